r"""Mathematics with a checkable answer: GSM8K, MATH-500, AIME 2024 and 2025, DAPO-Math, or rows of one's own.

Answers are compared by `sdpo_envs.grading.equivalence`; what needs computer algebra runs in processes with a hard time
limit. An answer on which the algebra does not finish is wrong, provided that it finishes on the right answer; if it does
not, or a process cannot be had, the attempt could not be graded and leaves the step. Needs the extra `math`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from sdpo.env import Env
from sdpo.errors import ConfigError, GradingError, MissingDependencyError, did_you_mean
from sdpo.types import Grade, Message, Task
from sdpo_envs.grading.equivalence import Tolerance, equivalent
from sdpo_envs.grading.math_answer import FinalAnswer, final_answer
from sdpo_envs.grading.text import quote
from sdpo_envs.grading.worker import WorkerFailure, Workers
from sdpo_envs.multiple_choice import one_of
from sdpo_envs.rows import Row, field, hub_rows, json_files, read_rows

__all__ = ["DATASETS", "Math", "gsm8k_answer"]

System = Literal["paper", "short", "none"]
Reward = Literal["correct", "strict", "format"]
Feedback = Literal["none", "format", "verdict"]


@dataclass(frozen=True, slots=True)
class _Hub:
    name: str
    revision: str
    splits: Mapping[str, str]
    config: str | None = None


DATASETS = {
    "gsm8k": _Hub(
        "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", {"train": "train", "test": "test"}, "main"
    ),
    "math500": _Hub("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", {"test": "test"}),
    "aime24": _Hub("math-ai/aime24", "83a7f387baaa524a8bda0022eac0541582297103", {"test": "test"}),
    "aime25": _Hub("math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", {"test": "test"}),
    "dapo": _Hub("BytedTsinghua-SIA/DAPO-Math-17k", "65877096c24ffa7abc4e4fa5edb95cf3413a5674", {"train": "train"}),
}
_ASK = {
    "paper": "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}.",
    "short": "{problem}\n\nGive the final answer only, as \\boxed{{answer}}.",
    "none": "{problem}",
}
_WORKERS = Workers("sdpo_envs.grading.algebra:equal", timeout=5.0)  # shared by all instances
_WANTED = r"Write the final answer once, at the end, as \boxed{answer}."
_GSM8K_FINAL = re.compile(r"####\s*(.+?)\s*$")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


class Math(Env):
    """Problems with one answer; splits as the data set has them ("train" and "test" for GSM8K).

    Args:
        dataset: gsm8k, math500, aime24, aime25 or dapo, from the hub.
        path: file or folder of JSON lines instead; rows have `problem` (or `question`) and `answer` (or `final`; GSM8K's
            "... #### 5" too), optionally `solution`, `split`, `id`. The split defaults to "test" where the file's name
            says so, else "train".
        system: "paper": reason, then box the answer; "short": the boxed answer only; "none": the problem alone.
        reward: "correct": the right answer, boxed or clearly stated; "strict": boxed; "format": any boxed answer.
        format_credit: reward below 1 for a boxed answer that does not earn 1.
        feedback: "none"; "format": what is wrong with the form; "verdict": also that the answer is wrong.
        rel, abs: tolerance for numbers, relative to the right one and absolute; 0 compares exactly.
        timeout: seconds for one comparison by computer algebra.
    """

    def __init__(
        self,
        dataset: str = "gsm8k",
        path: str | None = None,
        *,
        system: System = "paper",
        reward: Reward = "correct",
        format_credit: float = 0.0,
        feedback: Feedback = "verdict",
        rel: float = 0.0,
        abs: float = 0.0,
        timeout: float = 5.0,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingDependencyError("environment math", extra="math")
        one_of("dataset", dataset, list(DATASETS))
        one_of("system", system, get_args(System))
        one_of("reward", reward, get_args(Reward))
        one_of("feedback", feedback, get_args(Feedback))
        if not 0.0 <= format_credit < 1.0:
            raise ConfigError(f"math: format_credit = {format_credit}", hint="at least 0 and below 1")
        self._dataset = dataset
        self._path = path
        self._ask = _ASK[system]
        self._reward = reward
        self._credit = format_credit
        self._feedback = feedback
        self._tolerance = Tolerance(rel, abs)
        self._timeout = timeout

    def tasks(self, split: str) -> Sequence[Task]:
        known = list(self._splits) if self._path else list(DATASETS[self._dataset].splits)
        if split not in known:
            raise ConfigError(
                f"math ({self._path or self._dataset}) has no split {split!r}", hint=did_you_mean(split, known)
            )
        return self._splits[split]

    def grade(self, task: Task, completion: str) -> Grade:
        answer = final_answer(completion, require_boxed=bool(task.metadata.get("require_boxed")))
        formed = answer.boxed and not answer.problem
        correct = not answer.problem and self._equal(task, answer.text)
        success = {"correct": correct, "strict": correct and answer.boxed, "format": formed}[self._reward]
        return Grade(
            reward=1.0 if success else self._credit * formed,
            feedback="" if success else self._explain(answer, correct),
            success=success,
            metrics={"correct": float(correct), "format": float(formed)},
        )

    def task_from(self, row: Mapping[str, Any]) -> Task:
        """A task for `sdpo env grade`: `gold`, optionally `tolerance` {"rel", "abs"} and `require_boxed`."""
        tolerance = row.get("tolerance") or {}
        Tolerance(**tolerance)
        return Task(
            id="case",
            prompt=(Message(role="user", content=str(row.get("problem", "case"))),),
            target=_answer(row["gold"], "gold"),
            metadata={"tolerance": tolerance, "require_boxed": bool(row.get("require_boxed"))},
        )

    def close(self) -> None:
        _WORKERS.close()

    @cached_property
    def _splits(self) -> dict[str, list[Task]]:
        if self._path is None:
            hub = DATASETS[self._dataset]
            rows = [
                (split, f"{hub.name}, row {number}", number, row)
                for split, theirs in hub.splits.items()
                for number, row in enumerate(hub_rows(hub.name, hub.config, theirs, hub.revision), 1)
            ]
        else:
            rows = [
                (
                    str(row.get("split") or ("test" if "test" in file.stem else "train")),
                    f"{file}, row {number}",
                    number,
                    row,
                )
                for file in json_files(Path(self._path).expanduser())
                for number, row in enumerate(read_rows(file), 1)
            ]
        splits: dict[str, dict[str, Task]] = {}
        for split, where, number, row in rows:
            task = self._task(row, split, where, number)
            splits.setdefault(split, {}).setdefault(task.prompt[-1]["content"], task)
        for problem in splits.get("test", {}):
            splits.get("train", {}).pop(problem, None)
        return {split: list(tasks.values()) for split, tasks in splits.items()}

    def _task(self, row: Row, split: str, where: str, number: int) -> Task:
        problem, answer, solution = _problem(row, where)
        gold = _answer(answer, where)
        shown = f"{solution}\n\n\\boxed{{{gold}}}" if solution and r"\boxed" not in solution else solution
        return Task(
            id=f"{split}-{row.get('unique_id', row.get('id', number))}",
            prompt=(Message(role="user", content=self._ask.format(problem=problem)),),
            target=gold,
            demonstration=shown or f"\\boxed{{{gold}}}",
            metadata={},
        )

    def _equal(self, task: Task, given: str) -> bool:
        tolerance = Tolerance(**task.metadata["tolerance"]) if task.metadata.get("tolerance") else self._tolerance
        try:
            return equivalent(str(task.target), given, self._algebra, tolerance)
        except _Unfinished:
            return False

    def _algebra(self, gold: str, given: str, tolerance: Tolerance) -> bool:
        request: dict[str, Any] = {
            "gold": gold,
            "rel": tolerance.rel,
            "absolute": tolerance.abs,
            "timeout": self._timeout,
        }
        try:
            return bool(_WORKERS.call(given=given, **request))
        except WorkerFailure:
            pass  # this answer's fault or ours: the right answer decides
        try:
            _WORKERS.call(given=gold, **request)
        except WorkerFailure as failure:
            raise GradingError(f"math: the algebra fails on the right answer {quote(gold)} too: {failure}") from failure
        raise _Unfinished

    def _explain(self, answer: FinalAnswer, correct: bool) -> str:
        if self._feedback == "none":
            return ""
        if answer.problem:
            told = {
                "empty": "The response is empty.",
                "unfinished": "The response ended before its answer was complete. Be shorter.",
                "too long": "The answer is too long to be one.",
            }.get(answer.problem, "The response has no final answer that can be found.")
            return f"{told} {_WANTED}"
        if correct or (self._feedback == "format" and not answer.boxed):
            return f"The answer {quote(answer.text)} is not in a box. {_WANTED}"
        if self._feedback == "format":
            return ""
        form = "" if answer.boxed else f" {_WANTED}"
        return f"The answer {quote(answer.text)} is wrong.{form}"


class _Unfinished(Exception):
    """The algebra fails or does not finish on this answer, though it does on the right one."""


def gsm8k_answer(text: str) -> str:
    """The answer of a GSM8K solution: all that follows "####", thousands separators, sign and currency included."""
    found = _GSM8K_FINAL.search(text.strip())
    return found.group(1) if found else ""


def _problem(row: Row, where: str) -> tuple[str, str, str]:
    """Problem, answer and solution of a row in one of the data sets' forms."""
    if isinstance(row.get("reward_model"), dict):  # DAPO: the problem stands between an instruction and a reminder
        text = str(row["prompt"][-1]["content"])
        pieces = text.split("\n\n")
        return "\n\n".join(pieces[1:-1]) if len(pieces) > 2 else text, str(row["reward_model"]["ground_truth"]), ""
    problem = str(field(row, ("problem", "question"), where)).strip()
    answer = str(field(row, ("final", "answer", "solution"), where))
    solution = str(row.get("solution") or "")
    if "####" in answer:
        return problem, gsm8k_answer(answer), _CALCULATOR.sub("", answer.split("####")[0]).strip()
    if "####" in str(row.get("answer")):
        solution = _CALCULATOR.sub("", str(row["answer"]).split("####")[0]).strip()
    return problem, answer, "" if solution == answer else solution


def _answer(answer: Any, where: str) -> str:
    text = str(answer).strip()
    if r"\boxed" in text or r"\fbox" in text:
        text = final_answer(text).text
    if not text:
        raise ConfigError(f"{where}: the answer is empty", hint="leave rows without an answer out")
    return text
