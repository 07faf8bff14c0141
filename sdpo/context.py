"""Teacher contexts: which demonstration, which feedback, and how both fit into a budget (2601.20802, Table 2).

For each rollout: a successful sibling if there is one, else the environment's feedback on the rollout's own attempt, else
no context and no loss. Text is cut to its budget *before* the chat template is applied, so that the question and the
generation header always survive. Pure: no torch, no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sdpo.chat import Chat, remove_thinking
from sdpo.config import ContextConfig
from sdpo.types import Group, Message, Rollout, Task, TeacherContext

__all__ = ["ContextBuilder"]

_SMALLEST_CUT = 16  # tokens: less of a text than this explains nothing


@dataclass(frozen=True, slots=True)
class _Material:
    """What the teacher is to be shown, before any budget."""

    demonstration: str
    demonstration_from: int | Literal["task"] | None
    feedback: str
    attempt: str


class ContextBuilder:
    """Builds the teacher contexts of a step.

    Args:
        config: the [context] section.
        chat: tokenizer and template of the policy.
        seed: the run's seed, for `choice = "random"`.
    """

    def __init__(self, config: ContextConfig, chat: Chat, *, seed: int = 0) -> None:
        self.config = config
        self.chat = chat
        self.seed = seed
        self._shows_attempt = any("{attempt}" in t for t in (config.template, config.feedback_template))

    def build(self, groups: Sequence[Group], step: int) -> list[list[TeacherContext | None]]:
        """One entry a rollout, aligned with `group.rollouts`; None where the teacher has nothing to know."""
        return [[self.context(group, rollout, step) for rollout in group.rollouts] for group in groups]

    def context(self, group: Group, rollout: Rollout, step: int = 0) -> TeacherContext | None:
        """The context under which the teacher re-scores one rollout, or None."""
        if rollout.grade is None or not rollout.completion.token_ids:
            return None
        if self.config.rows == "failures" and rollout.success:
            return None
        demonstration, source = self._demonstration(group, rollout, step)
        feedback = self._feedback(rollout, shown=bool(demonstration))
        if not demonstration and not feedback:
            return None
        attempt = self._clean(rollout.completion.text) if self._shows_attempt else ""
        return self._fit(group.task, _Material(demonstration, source, feedback, attempt))

    def messages(self, task: Task, demonstration: str, feedback: str, attempt: str) -> tuple[Message, ...]:
        """The teacher's chat; an empty demonstration or feedback leaves its section out."""
        cfg = self.config
        shown = cfg.demonstration_template.format(demonstration=demonstration) if demonstration else ""
        told = cfg.feedback_template.format(feedback=feedback, attempt=attempt) if feedback else ""
        question = task.prompt[-1]["content"]
        text = cfg.template.format(question=question, demonstration=shown, feedback=told, attempt=attempt)
        before = list(task.prompt[:-1])
        if cfg.system:
            if before and before[0]["role"] == "system":
                before[0] = Message(role="system", content=f"{before[0]['content']}\n\n{cfg.system}")
            else:
                before.insert(0, Message(role="system", content=cfg.system))
        return (*before, Message(role=task.prompt[-1]["role"], content=text))

    def _demonstration(self, group: Group, rollout: Rollout, step: int) -> tuple[str, int | Literal["task"] | None]:
        if "{demonstration}" not in self.config.template:
            return "", None
        if self.config.demonstration in ("sibling", "sibling_or_task"):
            candidates = {r.index: text for r in group.successes if (text := self._clean(r.completion.text))}
            if rollout.index in candidates:
                own = candidates.pop(rollout.index)
                if self.config.own_success == "include":
                    return own, rollout.index
            if candidates:
                index = self._choose(candidates, f"{self.seed}/{step}/{group.task.id}/{rollout.index}")
                return candidates[index], index
        if self.config.demonstration in ("task", "sibling_or_task") and group.task.demonstration:
            return self._clean(group.task.demonstration), "task"
        return "", None

    def _choose(self, candidates: dict[int, str], seed: str) -> int:
        if self.config.choice == "random":
            return random.Random(seed).choice(sorted(candidates))
        if self.config.choice == "shortest":
            return min(candidates, key=lambda i: (len(candidates[i]), i))
        return min(candidates)

    def _feedback(self, rollout: Rollout, *, shown: bool) -> str:
        assert rollout.grade is not None
        if self.config.feedback == "never" or "{feedback}" not in self.config.template:
            return ""
        if rollout.success and not self.config.feedback_on_success:
            return ""
        if self.config.feedback == "without_demonstration" and shown:
            return ""
        return self.chat.neutralise(rollout.grade.feedback.strip())

    def _clean(self, text: str) -> str:
        return self.chat.neutralise(remove_thinking(text) if self.config.remove_thinking else text.strip())

    def _fit(self, task: Task, material: _Material) -> TeacherContext | None:
        """Cut demonstration and feedback until the prompt fits; None when the question alone does not."""
        cfg, chat = self.config, self.chat
        room = {
            "attempt": chat.count(material.attempt, cfg.max_feedback_tokens),
            "feedback": chat.count(material.feedback, cfg.max_feedback_tokens),
            "demonstration": chat.count(material.demonstration, cfg.max_demonstration_tokens),
        }
        while True:
            demonstration, lost_demonstration = chat.cut(material.demonstration, room["demonstration"], middle=True)
            feedback, lost_feedback = chat.cut(material.feedback, room["feedback"])
            attempt, lost_attempt = chat.cut(material.attempt, room["attempt"], middle=True)
            messages = self.messages(task, demonstration, feedback, attempt)
            ids = chat.prompt_ids(messages)
            excess = len(ids) - cfg.max_prompt_tokens
            if excess <= 0:
                return TeacherContext(
                    messages=messages,
                    prompt_ids=ids,
                    demonstration_from=material.demonstration_from,
                    used_feedback=bool(feedback),
                    truncated=lost_demonstration + lost_feedback + lost_attempt,
                )
            give = next((part for part, tokens in room.items() if tokens > _SMALLEST_CUT), None)
            if give is not None:
                room[give] = max(_SMALLEST_CUT, room[give] - excess)
            elif material.demonstration and material.feedback:
                return self._fit(task, replace(material, feedback=""))
            else:
                return None
