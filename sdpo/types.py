"""Everything that flows through a step, in one place.

    Task -> Completion -> Grade -> Rollout -> Group -> TeacherContext -> Example -> Batch -> StepResult

All of them are frozen and, `Batch` apart, JSON-able with `dataclasses.asdict`, so that a run can be written down and
read back. This module imports no torch: environments and the command line need these names long before a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Batch",
    "Completion",
    "Example",
    "Failure",
    "FinishReason",
    "Grade",
    "Group",
    "Message",
    "Rollout",
    "Rows",
    "StepResult",
    "Task",
    "TeacherContext",
]

FinishReason = Literal["stop", "length"]


class Message(TypedDict):
    """One chat message, in the form that chat templates read."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One question.

    Attributes:
        id: unique within its environment and stable between runs.
        prompt: the chat messages that the policy sees; the last one is the question (role `user`).
        target: what the grader compares with. It never enters a prompt.
        demonstration: an expert's answer, if there is one: for `context.demonstration = "task"`, and what `sdpo env check`
            expects to succeed.
        metadata: anything else that is JSON-able.
    """

    id: str
    prompt: tuple[Message, ...]
    target: Any = None
    demonstration: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler produced for one prompt.

    Attributes:
        text: decoded without special tokens, for graders only; training reads `token_ids`.
        token_ids: exactly what was sampled, the end token included when `finish_reason` is "stop".
        logprobs: natural log-probability of each token under the sampling policy at the sampling temperature, before
            top-p or top-k truncation; None when the sampler cannot tell.
        finish_reason: "stop" at an end token, "length" when the token budget cut it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True, slots=True)
class Grade:
    """An environment's verdict: a scalar and, if it can say, the reason.

    Attributes:
        reward: finite; by convention 1 is right and 0 is wrong.
        feedback: why the attempt failed, as text for the self-teacher. Empty when there is nothing to say.
        success: None lets the run decide by its success threshold.
        metrics: further numbers to average in the logs.
    """

    reward: float
    feedback: str = ""
    success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout could not be graded. Never a reward of 0: the attempt is unknown, not wrong.

    Attributes:
        boundary: where it failed, for example "env.grade" or "sandbox".
        message: one line.
    """

    boundary: str
    message: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt of a group. Exactly one of `grade` and `failure` is set."""

    task_id: str
    index: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    grade: Grade | None = None
    failure: Failure | None = None

    @property
    def success(self) -> bool:
        """True only for a graded success."""
        return self.grade is not None and self.grade.success is True

    @property
    def reward(self) -> float | None:
        """The reward, or None when the rollout could not be graded."""
        return None if self.grade is None else self.grade.reward


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one task in one step: everything "relative to the group" is relative to this."""

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def graded(self) -> tuple[Rollout, ...]:
        """The rollouts that have a verdict, in order."""
        return tuple(r for r in self.rollouts if r.grade is not None)

    @property
    def successes(self) -> tuple[Rollout, ...]:
        """The successful rollouts, in order."""
        return tuple(r for r in self.rollouts if r.success)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the graded rollouts, in order."""
        return tuple(r.grade.reward for r in self.rollouts if r.grade is not None)


@dataclass(frozen=True, slots=True)
class TeacherContext:
    """The prompt under which the self-teacher re-scores one rollout.

    Attributes:
        messages: the chat as the teacher sees it.
        prompt_ids: the same as token ids, generation header included; the completion's ids follow verbatim.
        demonstration_from: index of the sibling rollout shown, "task" for the task's own demonstration, None for none.
        used_feedback: whether the environment's feedback is in the prompt.
        truncated: number of tokens of demonstration and feedback that the budget cut.
    """

    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    demonstration_from: int | Literal["task"] | None
    used_feedback: bool
    truncated: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout, ready to become tensor rows: the last object before tensors.

    Attributes:
        teacher_prompt_ids: None when the rollout has no teacher signal.
        advantage: group-relative advantage; 0 where the algorithm needs none.
        group: position of the rollout's group in the step.
    """

    rollout: Rollout
    teacher_prompt_ids: tuple[int, ...] | None
    advantage: float
    group: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows of a micro-batch, each distinct prompt once: U <= B prompts, padded on the left to P columns, and B
    completions, padded on the right to T columns.

    Attributes:
        prompt_ids, prompt_mask: [U, P] int64.
        which: [B] int64, the prompt of each row.
        completion_ids, completion_mask: [B, T] int64.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    which: Tensor
    completion_ids: Tensor
    completion_mask: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as tensors: B rows with T completion columns, of which the teacher scores R <= B.

    Attributes:
        student: the B rows under the policy's prompts.
        teacher: the R rows that have a context, under the teacher's prompts, with the same T columns; None for R = 0.
        teacher_rows: [R] int64, which of the B rows those are.
        mask: [B, T] float, 1 on completion tokens.
        has_context: [B] bool.
        success: [B] bool.
        advantages: [B] float.
        sampler_logprobs: [B, T] float, 0 where padded; None when the sampler gave none.
    """

    student: Rows
    teacher: Rows | None
    teacher_rows: Tensor
    mask: Tensor
    has_context: Tensor
    success: Tensor
    advantages: Tensor
    sampler_logprobs: Tensor | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. `metrics` go to metrics.jsonl and the trackers; `timings` are seconds by phase."""

    step: int
    groups: Sequence[Group]
    loss: float
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
