"""The loop: collect, contexts, advantages, step, teacher, log, evaluate, save; and the same from a checkpoint.

A step is a pure function of (weights, optimiser, teacher, seed, step, cursor): every random draw is derived from the seed
and the step, so a killed run that resumes ends with the numbers of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdpo import checkpoint
from sdpo.advantage import group_advantages, is_constant, overlong_penalty
from sdpo.algorithms import get_algorithm
from sdpo.config import Config, TeacherConfig
from sdpo.context import ContextBuilder
from sdpo.errors import ConfigError
from sdpo.evaluate import EvalResult, evaluate_tasks
from sdpo.metrics import context_metrics, rollout_metrics
from sdpo.monitor import Monitor
from sdpo.order import TaskOrder, derive_seed
from sdpo.progress import Progress
from sdpo.rollout import SamplingParams, check_failures, collect
from sdpo.run import RunDir
from sdpo.session import Session
from sdpo.step import Stepper
from sdpo.teacher import make_teacher
from sdpo.track import open_tracker
from sdpo.types import Group, StepResult, TeacherContext

__all__ = ["TrainResult", "Trainer", "train"]

_ROLLOUT, _DROPOUT = 0, 2  # purposes of derived seeds; 1 is evaluation


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        best_step: step of the best evaluation, None without one.
        warnings: those of the monitors, as printed.
    """

    run_dir: Path
    steps: int
    evaluations: tuple[tuple[int, EvalResult], ...]
    best_step: int | None
    warnings: tuple[str, ...]
    stopped_early: bool


def train(config: Config, argv: Sequence[str] = ()) -> TrainResult:
    """Run a recipe to its end, or on from its newest checkpoint with `run.resume`.

    Args:
        config: the whole tree.
        argv: for the record in environment.json.

    Raises:
        SDPOError: a mistake that the user can mend.
    """
    RunDir.check(config)  # before a model is loaded; opened after all checks, so that a mistake leaves no run behind
    with Session(config) as session:
        trainer = Trainer(config, session)
        with RunDir.open(config, argv) as run:
            return trainer.run(run)


class Trainer:
    """One run on one machine."""

    def __init__(self, config: Config, session: Session) -> None:
        self.config = config
        self.session = session
        self.algorithm = get_algorithm(config.algo.name)
        self.data = session.task_set(config.env.train_split)
        self.held_out = session.task_set(config.eval.split, config.eval.tasks) if config.eval.every else None
        self.order = TaskOrder(len(self.data.tasks), derive_seed(config.run.seed, 3))
        policy = session.policy
        self._check_model()
        teacher = make_teacher(config.teacher if self.algorithm.needs_teacher else TeacherConfig(kind="live"), policy)
        keep_reference = "policy" in self.algorithm.sections and config.policy.kl_coef > 0
        reference = make_teacher(TeacherConfig(kind="frozen"), policy) if keep_reference else None
        self.stepper = Stepper(config, policy, teacher, reference)
        room = policy.positions - config.sampling.max_tokens
        context = config.context.model_copy(update={"max_prompt_tokens": min(room, config.context.max_prompt_tokens)})
        self.contexts = ContextBuilder(context, policy.chat, seed=config.run.seed)
        if self.algorithm.needs_teacher:
            task = self.data.tasks[0]
            policy.chat.check(task.prompt, self.contexts.messages(task, "demonstration", "feedback", "attempt"))
        self.monitor = Monitor(config.monitor)
        self.step = 0
        self.cursor = 0
        self.evaluations: list[tuple[int, EvalResult]] = []
        self.best: tuple[int, float] | None = None
        self.warnings: list[str] = []

    def _check_model(self) -> None:
        """Refuse what the model cannot do, before the first step."""
        policy, model = self.session.policy, self.config.model
        if not policy.trainable():
            raise ConfigError(f"model.path = {model.path!r} has nothing to train", hint="set model.lora_rank")
        if model.dtype == "bfloat16" and not any(p.dtype == torch.float32 for p in policy.trainable().values()):
            raise ConfigError(
                'model.dtype = "bfloat16" rounds small updates of all parameters away',
                hint='use "float32" (the matrix products are bfloat16 by model.compute), or model.lora_rank',
            )
        longest = max(map(len, self.data.prompts))
        if longest + self.config.sampling.max_tokens > policy.positions:
            raise ConfigError(
                f"sampling.max_tokens = {self.config.sampling.max_tokens} after a prompt of {longest} tokens exceeds the "
                f"{policy.positions} positions of {model.path}",
                hint="lower sampling.max_tokens or sampling.max_prompt_tokens",
            )

    def run(self, run: RunDir) -> TrainResult:
        """The whole loop, written to `run`."""
        config = self.config
        self.run_dir = run
        resumed = config.run.resume and self._resume()
        tracker = open_tracker(
            config.run.track, self.run_dir.path, config.to_toml(), self.run_dir.path.name, first_step=self.step
        )
        with Progress(config.train.steps, start=self.step) as self.progress, tracker as self.tracker:
            self._announce(resumed)
            if not resumed and self.held_out is not None and config.eval.at_start:
                self._evaluate()
            stopped = config.monitor.stop_on_collapse and self.monitor.should_stop
            while self.step < config.train.steps and not stopped:
                self._one_step()
                last = self.step == config.train.steps
                improved = False
                if self.held_out is not None and (self.step % config.eval.every == 0 or last):
                    improved = self._evaluate()
                stopped = config.monitor.stop_on_collapse and self.monitor.should_stop
                due = config.train.save_every and self.step % config.train.save_every == 0
                if due or improved or last or stopped:
                    self._save()
        return self._finish(stopped)

    def _one_step(self) -> None:
        """One step of training, from sampling to the log."""
        start = time.perf_counter()
        torch.manual_seed(derive_seed(self.config.run.seed, _DROPOUT, self.step))
        groups, everything = self._collect()
        seconds = {"generate": time.perf_counter() - start}
        contexts: list[list[TeacherContext | None]] = [[None] * len(g.rollouts) for g in groups]
        if self.algorithm.needs_teacher:
            contexts = self.contexts.build(groups, self.step)
        optimised = self.stepper.run(groups, contexts, self._advantages(groups))
        self.step += 1
        self.stepper.teacher.update(self.step)
        self.session.sampler.sync()
        metrics = {**rollout_metrics(everything), **optimised.metrics}
        if self.config.train.resample_rounds:
            metrics["groups/dropped"] = float(len(everything) - len(groups))
        if self.algorithm.needs_teacher:
            metrics |= context_metrics(groups, contexts)
            metrics["teacher/distance"] = self.stepper.teacher.distance()
        tokens = sum(len(r.completion.token_ids) for g in everything for r in g.rollouts)
        seconds |= optimised.timings
        seconds["step"] = time.perf_counter() - start
        seconds["tokens_per_second"] = tokens / seconds["step"]
        self._log(StepResult(self.step, groups, optimised.loss, metrics, seconds), contexts)

    def _collect(self) -> tuple[list[Group], list[Group]]:
        """The step's groups, and all that were sampled: with `train.resample_rounds`, groups with equal rewards are
        replaced by fresh ones, and what is still missing after the last round is left out."""
        kept: list[Group] = []
        everything: list[Group] = []
        rounds = self.config.train.resample_rounds
        for attempt in range(rounds + 1):
            groups = self._sample(self.config.train.prompts_per_step - len(kept), attempt)
            everything += groups
            kept += [g for g in groups if not (rounds and is_constant(g))]
            if len(kept) == self.config.train.prompts_per_step:
                break
        check_failures(everything, self.config.train.max_failed_fraction)
        return kept, everything

    def _sample(self, count: int, attempt: int) -> list[Group]:
        config = self.config
        chosen = self.order.take(self.cursor, count)
        self.cursor += count
        params = SamplingParams(
            config.sampling.temperature, config.sampling.top_p, config.sampling.top_k, config.sampling.max_tokens
        )
        return collect(
            [self.data.tasks[i] for i in chosen],
            [self.data.prompts[i] for i in chosen],
            self.session.sampler,
            self.session.grader,
            config.train.rollouts_per_prompt,
            params,
            seed=derive_seed(config.run.seed, _ROLLOUT, self.step, attempt),
        )

    def _advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Group-relative advantages, 0 where the algorithm reads none."""
        if not self.algorithm.needs_advantages:
            return [[0.0] * len(g.rollouts) for g in groups]
        policy = self.config.policy
        if policy.overlong_buffer:
            groups = [self._punished(g) for g in groups]
        return group_advantages(groups, baseline=policy.baseline, outcome_gate=policy.outcome_gate)

    def _punished(self, group: Group) -> Group:
        """The group with DAPO's soft overlong punishment added to its rewards."""
        limit, buffer = self.config.sampling.max_tokens, self.config.policy.overlong_buffer
        rollouts = [
            r
            if r.grade is None
            else dataclasses.replace(
                r,
                grade=dataclasses.replace(
                    r.grade, reward=r.grade.reward + overlong_penalty(len(r.completion.token_ids), limit, buffer)
                ),
            )
            for r in group.rollouts
        ]
        return Group(group.task, tuple(rollouts))

    def _log(self, result: StepResult, contexts: Sequence[Sequence[TeacherContext | None]]) -> None:
        run, config = self.config.run, self.config
        record = {"step": result.step, "loss": result.loss, **result.metrics}
        self.run_dir.append_metrics({**record, "seconds": dict(result.timings)})
        self.tracker.log(record, result.step)
        if run.rollouts_every and (result.step % run.rollouts_every == 0 or result.step == config.train.steps):
            self.run_dir.write_rollouts(result.step, result.groups)
        if run.dump_prompts and result.step == 1:
            self._dump_prompts(result.groups, contexts)
        self.progress.step(result)
        for warning in self.monitor.observe_step(result.step, record):
            self._warn(str(warning))

    def _dump_prompts(self, groups: Sequence[Group], contexts: Sequence[Sequence[TeacherContext | None]]) -> None:
        """Aligned student and teacher prompts of the first step, for reading."""
        chat = self.session.policy.chat
        pairs = [
            (rollout, context)
            for group, row in zip(groups, contexts, strict=True)
            for rollout, context in zip(group.rollouts, row, strict=True)
            if context is not None
        ]
        self.run_dir.write_prompts(
            [
                {
                    "task_id": rollout.task_id,
                    "index": rollout.index,
                    "student_prompt": chat.decode(rollout.prompt_ids, special=True),
                    "teacher_prompt": chat.decode(context.prompt_ids, special=True),
                    "completion": chat.decode(rollout.completion.token_ids, special=True),
                    "student_ids": [*rollout.prompt_ids, *rollout.completion.token_ids],
                    "teacher_ids": [*context.prompt_ids, *rollout.completion.token_ids],
                    "completion_ids": list(rollout.completion.token_ids),
                }
                for rollout, context in pairs[: self.config.run.dump_prompts]
            ]
        )

    def _evaluate(self) -> bool:
        """Evaluate now; whether it is the best so far."""
        assert self.held_out is not None
        result, _ = evaluate_tasks(self.session, self.held_out, self.config)
        self.evaluations.append((self.step, result))
        self.run_dir.append_eval({"step": self.step, **result.to_record()})
        self.tracker.log({f"eval/{k}": v for k, v in result.to_record().items() if isinstance(v, float)}, self.step)
        self.progress.evaluation(self.step, result)
        for warning in self.monitor.observe_eval(self.step, result.success, length=result.length):
            self._warn(str(warning))
        improved = self.best is None or result.success > self.best[1]
        if improved:
            self.best = (self.step, result.success)
        return improved and self.step > 0

    def _save(self) -> None:
        state: dict[str, Any] = {
            "cursor": self.cursor,
            "best": self.best,
            "monitor": self.monitor.state_dict(),
            "warnings": self.warnings,
        }
        folder = self.run_dir.checkpoints
        checkpoint.save(folder, self.step, self.session.policy, self.stepper, state)
        checkpoint.prune(folder, self.config.train.keep_checkpoints, [] if self.best is None else [self.best[0]])

    def _resume(self) -> bool:
        """Go back to the newest checkpoint; False when the run died before its first one."""
        newest = checkpoint.latest(self.run_dir.checkpoints)
        if newest is None:
            self.run_dir.rewind(-1)
            return False
        checkpoint.restore(newest, self.session.policy, self.stepper)
        self.session.sampler.sync()
        state = checkpoint.load_state(newest)
        self.step, self.cursor = state["step"], state["cursor"]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.monitor.load_state(state["monitor"])
        self.warnings = list(state["warnings"])
        self.run_dir.rewind(self.step)
        self.evaluations = [(r["step"], EvalResult.from_record(r)) for r in self.run_dir.read_evals()]
        if self.step > self.config.train.steps:
            raise ConfigError(
                f"the run is at step {self.step}, past train.steps = {self.config.train.steps}",
                hint="raise train.steps",
            )
        return True

    def _announce(self, resumed: bool) -> None:
        """One line of facts before the first step."""
        policy, config = self.session.policy, self.config
        parameters = sum(p.numel() for p in policy.trainable().values())
        facts = [
            f"{config.algo.name} on {config.env.name}",
            f"{config.model.path}, {parameters:,} trained parameters",
            f"{policy.device}, {str(policy.compute).removeprefix('torch.')}, {torch.get_num_threads()} threads",
            f"{len(self.data.tasks)} tasks",
        ]
        if self.data.too_long:
            facts.append(f"{self.data.too_long} left out, longer than sampling.max_prompt_tokens")
        if self.algorithm.needs_teacher and config.teacher.temperature != config.sampling.temperature:
            facts.append(f"teacher temperature {config.teacher.temperature}, student {config.sampling.temperature}")
        if resumed:
            facts.append(f"resumed at step {self.step}: weights, optimiser, scheduler, teacher, data cursor, monitors")
        self.progress.note("; ".join(facts))

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.progress.warning(text)

    def _finish(self, stopped: bool) -> TrainResult:
        self.run_dir.write_summary(
            {
                "steps": self.step,
                "stopped_early": stopped,
                "best": None if self.best is None else {"step": self.best[0], "success": self.best[1]},
                "evaluations": [{"step": s, **r.to_record()} for s, r in self.evaluations],
                "warnings": self.warnings,
            }
        )
        return TrainResult(
            run_dir=self.run_dir.path,
            steps=self.step,
            evaluations=tuple(self.evaluations),
            best_step=None if self.best is None else self.best[0],
            warnings=tuple(self.warnings),
            stopped_early=stopped,
        )
