"""The reasoning-gym adapter: tasks, form, scores, and scorers that evaluate what they are given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from sdpo.env_check import check_env
from sdpo.errors import ConfigError, GradingError
from sdpo.types import Grade, Task
from sdpo_envs.adapters.reasoning_gym import ReasoningGym

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra rg)")


@pytest.fixture(scope="module")
def sums() -> Iterator[ReasoningGym]:
    env = ReasoningGym("chain_sum", train_size=60, test_size=20, min_terms=2, max_terms=2)
    yield env
    env.close()  # the grading processes, which all data sets share


@pytest.fixture(scope="module")
def countdown() -> ReasoningGym:
    return ReasoningGym("countdown", train_size=5, test_size=2, timeout=3)


def grade(env: ReasoningGym, task: Task, text: str) -> Grade:
    result = env.grade(task, text)
    assert isinstance(result, Grade)
    return result


def test_tasks_repeat_between_objects_and_splits_do_not_overlap(sums: ReasoningGym) -> None:
    other = ReasoningGym("chain_sum", train_size=60, test_size=20, min_terms=2, max_terms=2)
    assert other.tasks("train") == sums.tasks("train")
    questions = [{task.prompt[-1]["content"] for task in sums.tasks(split)} for split in ("train", "test")]
    assert not questions[0] & questions[1]
    json.dumps([asdict(task) for task in sums.tasks("train")])
    moved = ReasoningGym("chain_sum", train_size=60, test_size=20, seed=7, min_terms=2, max_terms=2)
    assert moved.tasks("train") != sums.tasks("train")


def test_contract(sums: ReasoningGym) -> None:
    assert [line for line in check_env(sums) if line.verdict == "failed"] == []


def test_form_and_result_are_told_apart(sums: ReasoningGym) -> None:
    task = sums.tasks("train")[0]
    right = grade(sums, task, f"<answer> {task.target} </answer>")
    assert (right.reward, right.feedback) == (1.0, "")
    assert "no <answer> tags" in grade(sums, task, task.target).feedback
    assert "closing </answer>" in grade(sums, task, f"<answer>{task.target}").feedback
    assert "more than one" in grade(sums, task, "<answer>1</answer><answer>2</answer>").feedback
    assert "nothing between" in grade(sums, task, "<answer> </answer>").feedback
    assert "ended before" in grade(sums, task, "<think>1 + 1").feedback
    wrong = grade(sums, task, "<answer>abc</answer>")
    assert (wrong.metrics["format"], wrong.metrics["correct"]) == (1.0, 0.0)
    assert wrong.feedback == 'The result "abc" is wrong.'


def test_levels_of_feedback_and_reward() -> None:
    def first(**arguments: object) -> tuple[ReasoningGym, Task]:
        env = ReasoningGym("chain_sum", train_size=3, test_size=1, **arguments)  # type: ignore[arg-type]
        return env, env.tasks("train")[0]

    env, task = first(feedback="answer")
    assert grade(env, task, "<answer>x</answer>").feedback.endswith(f"The right result is {task.target}")
    env, task = first(feedback="none", reward="format")
    assert grade(env, task, "<answer>x</answer>") == Grade(
        1.0, success=True, metrics={"correct": 0.0, "format": 1.0, "score": 0.0}
    )
    assert grade(env, task, f"<answer>{task.target}</answer>").metrics["correct"] == 1.0
    assert grade(env, task, "x") == Grade(0.0, success=False, metrics={"correct": 0.0, "format": 0.0, "score": 0.0})
    env, task = first(answer="text", system="none", format_credit=0.1)
    assert [m["role"] for m in task.prompt] == ["user"]
    assert grade(env, task, f" {task.target}\n").reward == 1.0
    assert grade(env, task, "x").reward == 0.1


def test_partial_credit_is_a_near_miss() -> None:
    env = ReasoningGym("letter_jumble", train_size=3, test_size=1, min_words=4, max_words=4)
    task = env.tasks("train")[0]
    words = task.target.split()
    almost = " ".join([*words[:-1], words[-1][::-1]])
    verdict = grade(env, task, f"<answer>{almost}</answer>")
    assert 0.1 < verdict.reward < 1.0
    assert "close" in verdict.feedback
    assert (
        ReasoningGym("letter_jumble", reward="correct", train_size=3, test_size=1)
        .grade(task, f"<answer>{almost}</answer>")
        .reward
        == 0.0
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "attack", ["__import__('os').system('touch {}')", "open('{}', 'w')", "().__class__", "[].append", "lambda: 1"]
)
def test_scorers_that_evaluate_do_not_run_what_they_get(countdown: ReasoningGym, tmp_path: Path, attack: str) -> None:
    task = countdown.tasks("train")[0]
    target = tmp_path / "file"
    assert grade(countdown, task, f"<answer>{attack.replace('{}', str(target))}</answer>").reward < 0.1
    assert not target.exists()


def test_literal_eval_replaces_eval_for_boards(tmp_path: Path) -> None:
    env = ReasoningGym("spiral_matrix", train_size=2, test_size=1)
    task = env.tasks("train")[0]
    numbers = [int(word) for word in task.target.split()]
    assert grade(env, task, f"<answer>{numbers}</answer>").reward == pytest.approx(0.1)  # a list: their near miss
    target = tmp_path / "file"
    assert grade(env, task, f"<answer>open({str(target)!r}, 'w')</answer>").reward == 0.0
    assert not target.exists()


def test_scorers_may_evaluate_their_own_puzzle() -> None:
    env = ReasoningGym("bitwise_arithmetic", train_size=2, test_size=1)
    for task in env.tasks("train"):
        assert grade(env, task, f"<answer>{task.target}</answer>").reward == 1.0


def test_a_result_without_end_is_wrong_and_the_next_one_is_graded(countdown: ReasoningGym) -> None:
    task = countdown.tasks("train")[0]
    verdict = grade(countdown, task, "<answer>9**9**9**9**9</answer>")
    assert verdict.reward < 0.1
    assert "wrong" in verdict.feedback or "cannot be read" in verdict.feedback
    assert grade(countdown, task, f"<answer>{task.target}</answer>").reward == 1.0


def test_scorers_that_raise_on_text_mean_a_wrong_answer() -> None:
    env = ReasoningGym("prime_factorization", train_size=2, test_size=1)
    task = env.tasks("train")[0]
    verdict = grade(env, task, "<answer>two times three</answer>")
    assert verdict.reward == 0.0
    assert grade(env, task, f"<answer>{task.target}</answer>").reward == 1.0


def test_a_scorer_that_cannot_be_run_is_not_a_wrong_answer(sums: ReasoningGym) -> None:
    lost = Task("train-x", sums.tasks("train")[0].prompt, "1", metadata={"split": "train", "index": 10**9})
    broken = ReasoningGym("chain_sum", train_size=2, test_size=1, timeout=1e-6)
    with pytest.raises(GradingError, match="scorer"):
        broken.grade(lost, "<answer>1</answer>")


def test_bad_names_and_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        ReasoningGym("chain_sums", train_size=1, test_size=1).tasks("train")
    with pytest.raises(ConfigError, match="min_term"):
        ReasoningGym("chain_sum", train_size=1, test_size=1, min_term=3).tasks("train")
    with pytest.raises(ConfigError, match="one of short, reason, none"):
        ReasoningGym("chain_sum", system="long")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="train_size = 0"):
        ReasoningGym("chain_sum", train_size=0)
