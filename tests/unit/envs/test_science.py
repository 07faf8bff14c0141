"""Science, GPQA and MMLU-Pro: rows to tasks, grades, feedback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdpo.env_check import check_env
from sdpo.errors import ConfigError
from sdpo.types import Grade, Task
from sdpo_envs.gpqa import Gpqa
from sdpo_envs.mmlu_pro import MmluPro
from sdpo_envs.multiple_choice import MultipleChoice
from sdpo_envs.science import Science

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def row(number: int, *, answer: str = "B", options: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "question": f"What is {number}?",
        "options": options or ["two", "three", "five", "six"],
        "answer": answer,
        **more,
    }


@pytest.fixture
def physics(tmp_path: Path) -> str:
    return write(tmp_path / "physics.jsonl", [row(i, split="test" if i > 7 else "train") for i in range(10)])


def grade(env: MultipleChoice, task: Task, text: str) -> Grade:
    verdict = env.grade(task, text)
    assert isinstance(verdict, Grade)
    return verdict


def test_contract(physics: str) -> None:
    for feedback in ("none", "format", "verdict", "reason"):
        report = check_env(Science(physics, feedback=feedback))  # type: ignore[arg-type]
        assert [line for line in report if line.verdict == "failed"] == []


@pytest.mark.parametrize(
    ("response", "correct", "formed"),
    [
        ("<reasoning>x</reasoning><answer>\nB\n</answer>", 1, 1),
        ("<answer>B</answer>", 1, 1),
        ("B", 1, 0),  # no tags: the letter is read, the form is not there
        ("reason <answer>B", 1, 0),
        ("<answer>b</answer>", 1, 0),
        ("<answer>(B)</answer>", 1, 0),
        ("<answer>C</answer>", 0, 1),
        ("<answer>E</answer>", 0, 0),
        ("<answer></answer>", 0, 0),
        ("<answer>A</answer><answer>B</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_letter_and_form_are_told_apart(physics: str, response: str, correct: int, formed: int) -> None:
    env = Science(physics)
    verdict = grade(env, env.tasks("train")[0], response)
    assert (verdict.metrics["correct"], verdict.metrics["format"]) == (correct, formed)
    assert (verdict.reward, verdict.success) == (correct, bool(correct))


def test_what_is_paid(physics: str) -> None:
    task = Science(physics).tasks("train")[0]
    paid = {
        "strict": {"B": 0.0, "<answer>B</answer>": 1.0, "<answer>C</answer>": 0.0},
        "format": {"B": 0.0, "<answer>B</answer>": 1.0, "<answer>C</answer>": 1.0},
    }
    for reward, expected in paid.items():
        env = Science(physics, reward=reward)  # type: ignore[arg-type]
        assert {text: grade(env, task, text).reward for text in expected} == expected
    credit = Science(physics, reward="strict", format_credit=0.25)
    assert [grade(credit, task, text).reward for text in ("<answer>C</answer>", "B", "<answer>B</answer>")] == [
        0.25,
        0.0,
        1.0,
    ]


def test_feedback_on_form_shows_the_response_s_own_letter_only(physics: str) -> None:
    env = Science(physics, reward="strict")
    task = env.tasks("train")[0]
    assert "<answer>C</answer>" in grade(env, task, "The answer is C.").feedback
    assert "in <answer> tags" in grade(env, task, "no idea").feedback
    assert "several answers (A, C)" in grade(env, task, "Answer: A or C").feedback
    assert '"42" is not the letter' in grade(env, task, "<answer>42</answer>").feedback
    assert "before the answer was complete" in grade(env, task, "<think>hm").feedback
    assert grade(env, task, "<answer>C</answer>").feedback == ""
    for wrong in ("", "no idea", "<answer>42</answer>", "The answer is C."):
        assert "B</answer>" not in grade(env, task, wrong).feedback


def test_reasons_that_give_the_answer_away_are_held_back(tmp_path: Path) -> None:
    reasons = ["Add the numbers first.", "Because three is prime.", "Option B fits.", "A result of hard work."]
    path = write(tmp_path / "physics.jsonl", [row(i, reason=reason) for i, reason in enumerate(reasons)])
    env = Science(path, feedback="reason")
    told = [grade(env, task, "<answer>C</answer>").feedback for task in env.tasks("train")]
    assert told == [
        "C is not the right option. Add the numbers first.",
        "C is not the right option.",
        "C is not the right option.",
        "C is not the right option. A result of hard work.",
    ]


def test_options_with_the_right_text_are_all_right(tmp_path: Path) -> None:
    env = Science(write(tmp_path / "physics.jsonl", [row(0, answer="A", options=["7 m", "9 m", "7  m", "8 m"])]))
    task = env.tasks("train")[0]
    assert [grade(env, task, f"<answer>{x}</answer>").reward for x in "ABCD"] == [1, 0, 1, 0]


def test_two_and_ten_options(tmp_path: Path) -> None:
    rows = [row(0, options=["yes", "no"]), row(1, answer="J", options=[f"o{i}" for i in range(10)])]
    env = Science(write(tmp_path / "biology.jsonl", rows))
    two, ten = env.tasks("train")
    assert "two options" in two.prompt[0]["content"]
    assert "letters A, B and" in two.prompt[0]["content"]
    assert grade(env, two, "<answer>C</answer>").metrics["parsed"] == 0
    assert grade(env, ten, "<answer>J</answer>").reward == 1


def test_duplicates_leave_the_training_split_and_are_counted(tmp_path: Path) -> None:
    rows = [row(1), row(2), {**row(1), "id": "again", "split": "test"}, {**row(2), "id": "twice"}]
    env = Science(write(tmp_path / "material.jsonl", rows))
    assert [task.id for task in env.tasks("train")] == ["material-train-2"]
    assert [task.id for task in env.tasks("test")] == ["material-test-again"]
    assert env.duplicates == 2
    assert "Removed as duplicates: 2" in env.describe()


def test_authors_rows_and_folders(tmp_path: Path) -> None:
    def authors(number: int, gap: str) -> dict[str, Any]:
        options = gap.join(f"{letter}: option {letter}{number}" for letter in "ABCD")
        prompt = f"Given:\n\nA: a trap, not an option\n\nWhich?\n\n{options}\nThink first."
        return {"idx": number, "prompt": prompt, "answer": "D", "system": "Be good."}

    write(tmp_path / "chemistry" / "train.json", [authors(1, "\n")])
    write(tmp_path / "chemistry" / "test.json", [authors(2, "\n\n")])
    write(tmp_path / "chemistry" / "chemistry.json", [authors(1, "\n"), authors(2, "\n\n")])
    env = Science(str(tmp_path), domains="chemistry")
    (task,) = env.tasks("train")
    assert task.metadata["options"] == [f"option {letter}1" for letter in "ABCD"]
    assert [t.id for t in env.tasks("test")] == ["chemistry-test-2"]
    (verbatim,) = Science(str(tmp_path), system="data").tasks("train")
    assert [m["content"] for m in verbatim.prompt] == ["Be good.", authors(1, "\n")["prompt"]]


def test_hub_rows_are_filtered_and_divided_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(level: str, kind: str, number: int) -> dict[str, Any]:
        return {
            "question": f"Q{number}", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A", "type": kind,
            "domain": "Physics", "details": {"level": level},
        }  # fmt: skip

    rows = [hub("L3", "mcq-2-choices", i) for i in range(40)] + [hub("L2", "mcq-2-choices", 98), hub("L3", "open", 99)]
    monkeypatch.setattr("sdpo_envs.science.hub_rows", lambda *_: rows)
    first, again, other = Science(), Science(), Science(seed=1)
    assert (len(first.tasks("train")), len(first.tasks("test"))) == (36, 4)
    assert first.tasks("test") == again.tasks("test")
    assert {t.prompt[-1]["content"] for t in first.tasks("test")} != {
        t.prompt[-1]["content"] for t in other.tasks("test")
    }


def test_subsets_are_seeded(physics: str) -> None:
    env = Science(physics, train_size=3)
    assert env.tasks("train") == Science(physics, train_size=3).tasks("train")
    assert len(env.tasks("train")) == 3
    assert len(env.tasks("test")) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0, answer="")], "no field 'answer'|the answer is ''"),
        ([row(0, answer="E")], "the answer is 'E'"),
        ([row(0, answer="AC")], "the answer is 'AC'"),
        ([row(0, options=["one"])], "1 options"),
        ([{"idx": 1, "prompt": "no options here", "answer": "A"}], "no line 'A: ...'"),
        ([{**row(1), "question": "Other"}, row(1)], "the same id"),
    ],
)
def test_bad_rows_are_one_line(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Science(write(tmp_path / "physics.jsonl", rows)).tasks("train")


def test_bad_arguments_and_files_are_one_line(physics: str, tmp_path: Path) -> None:
    for arguments, message in (
        ({"domains": "phisics"}, "physics"),
        ({"system": "long"}, "one of paper, short, data"),
        ({"reward": "all"}, "one of correct, strict, format"),
        ({"format_credit": 1.0}, "below 1"),
        ({"train_size": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Science(physics, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no such file"):
        Science(str(tmp_path / "absent")).tasks("train")
    with pytest.raises(ConfigError, match="no split 'valid'"):
        Science(physics).tasks("valid")
    (tmp_path / "physics_bad.jsonl").write_text('{"id": 1\n')
    with pytest.raises(ConfigError, match="line 1"):
        Science(str(tmp_path / "physics_bad.jsonl")).tasks("train")


def test_gpqa_shuffles_by_question_not_by_run(tmp_path: Path) -> None:
    wrong_answers = {f"Incorrect Answer {j}": f"wrong {j}" for j in (1, 2, 3)}
    known = {"Correct Answer": "right", "Explanation": "No hint.", "High-level domain": "Physics", **wrong_answers}
    rows = [{"Record ID": f"r{i}", "Question": f"Q{i}", **known} for i in range(30)]
    whole = Gpqa(write(tmp_path / "all.jsonl", rows))
    part = Gpqa(write(tmp_path / "part.jsonl", rows[7:9]))
    targets = [task.target for task in whole.tasks("test")]
    assert set(targets) == set("ABCD")
    assert [task.target for task in part.tasks("test")] == targets[7:9]
    assert Gpqa(str(tmp_path / "all.jsonl"), shuffle_seed=1).tasks("test")[0:9] != whole.tasks("test")[0:9]
    task = whole.tasks("test")[0]
    assert grade(whole, task, rf"The answer is \boxed{{{task.target}}}. This is a known result.").metrics["format"] == 1
    wrong = next(letter for letter in "ABCD" if letter != task.target)
    assert grade(whole, task, rf"\boxed{{{wrong}}} because of vitamin {task.target}").reward == 0
    assert [line for line in check_env(whole, splits=["test"]) if line.verdict == "failed"] == []
    with pytest.raises(ConfigError, match="no field 'Incorrect Answer 3'"):
        Gpqa(write(tmp_path / "bad.jsonl", [{k: v for k, v in rows[0].items() if k[-1] != "3"}])).tasks("test")


def test_mmlu_pro(tmp_path: Path) -> None:
    rows = [
        {
            "question_id": i,
            "question": f"Q{i}",
            "options": [f"o{j}" for j in range(10)],
            "answer": "C",
            "category": category,
        }
        for i, category in enumerate(["law", "math", "math"])
    ]
    env = MmluPro(write(tmp_path / "rows.jsonl", rows), category="math")
    assert len(env.tasks("test")) == 2
    task = env.tasks("test")[0]
    for response, reward in (
        ("the answer is a bit tricky… the answer is (C)", 1),
        ("(B)? No, the answer is (C)", 1),
        ("It must be C, as I said", 1),
        ("(c)", 1),
        ("the answer is (I)", 0),
    ):
        assert grade(env, task, response).reward == reward
    assert [line for line in check_env(env, splits=["test"]) if line.verdict == "failed"] == []
    with pytest.raises(ConfigError, match="did you mean math"):
        MmluPro(category="maths")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data at {SHARED}")
def test_real_rows() -> None:
    env = Science(str(SHARED))
    train, test = env.tasks("train"), env.tasks("test")
    assert (len(train), len(test)) == (800, 230)
    for task in [*train, *test]:
        assert len(task.metadata["options"]) in (2, 4)
        assert all(task.metadata["options"])
        assert grade(env, task, task.demonstration or "").success
    copied = [task.id for task in [*train, *test] if grade(env, task, task.prompt[-1]["content"]).success]
    assert copied == ["physics-train-153"]  # its question says what the right answer is
