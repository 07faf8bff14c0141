"""Mathematics: finding the answer, comparing it, the environment, and the grading processes behind it."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo.env_check import check_env
from sdpo.errors import ConfigError, GradingError
from sdpo.types import Grade, Task
from sdpo_envs.grading.equivalence import Tolerance, equivalent
from sdpo_envs.grading.math_answer import final_answer, normalise, number, parts, split_unit
from sdpo_envs.grading.worker import WorkerFailure, Workers
from sdpo_envs.math import Math, gsm8k_answer

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers("sdpo_envs.grading.algebra:equal", timeout=20, size=1)
    yield pool
    pool.close()


def no_algebra(gold: str, given_text: str, tolerance: Tolerance) -> bool:
    raise AssertionError(f"{gold!r} and {given_text!r} should not need algebra")


@pytest.mark.parametrize(
    ("response", "text", "boxed"),
    [
        (r"\boxed{\frac{1}{2}}" + " and that is all there is to say." * 20, r"\frac{1}{2}", True),  # far from the end
        (r"First \boxed{6}, no: \boxed {9}.", "9", True),
        (r"\boxed{" + "x" * 500 + "}", "x" * 500, True),
        (r"so \boxed{\text{(A)}}", r"\text{(A)}", True),
        (r"$\boxed 42$", "42", True),
        ("<think>\\boxed{1}</think>The answer is 7.5.", "7.5", False),
        ("Thus\n#### 1,450", "1,450", False),
        ("**Answer:** $-3$", "$-3$", False),
        ("adding gives **58** in all", "58", False),
        ("<answer>12</answer>", "12", False),
        ("42", "42", False),
    ],
)
def test_final_answer(response: str, text: str, boxed: bool) -> None:
    found = final_answer(response)
    assert (found.text, found.boxed, found.problem) == (text, boxed, "")


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("", "empty"), ("<think>\\boxed{5}", "unfinished"), (r"\boxed{5} or rather \boxed{", "unfinished"),
        (r"\boxed{}", "none"),
        ("There are 42 students.", "none"), (r"\boxed{" + "9" * 10_001 + "}", "too long"),
    ],
)  # fmt: skip
def test_no_final_answer(response: str, problem: str) -> None:
    assert final_answer(response).problem == problem


def test_a_box_may_be_required() -> None:
    assert final_answer("The answer is 5", require_boxed=True).problem == "none"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,450", Fraction(1450)), ("1{,}234.50", Fraction(2469, 2)), (r"10\,000", Fraction(10_000)), ("-5", Fraction(-5)),
        (r"\$10", Fraction(10)), ("−3.2", Fraction(-16, 5)), (r"\frac12", Fraction(1, 2)),
        (r"-\dfrac{3}{-4}", Fraction(3, 4)),
        ("3 1/2", Fraction(7, 2)), (r"3\frac{1}{2}", Fraction(7, 2)), ("6.02e3", Fraction(6020)),
        ("6.02 x 10^3", Fraction(6020)),
        (r"6.02\times 10^{-2}", Fraction(301, 5000)), ("6.02 × 10²", Fraction(602)), (r"0.\overline{3}", Fraction(1, 3)),
        (r"0.1\overline{6}", Fraction(1, 6)), ("007", Fraction(7)), ("5.", Fraction(5)), ("((5))", Fraction(5)),
        ("x = 5", Fraction(5)),
        ("1/0", None), ("1 1", None), ("5x", None), ("", None), ("1e99999", None), ("Infinity", None), ("nan", None),
    ],
)  # fmt: skip
def test_numbers_are_exact(text: str, value: Fraction | None) -> None:
    assert number(normalise(text)) == value


@given(st.fractions(), st.integers(min_value=1, max_value=9))
def test_a_number_equals_itself_and_nothing_near(value: Fraction, nudge: int) -> None:
    text = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert equivalent(text, f"{value.numerator}/{value.denominator}", no_algebra)
    other = value + Fraction(nudge, 10**30)
    assert not equivalent(text, f"{other.numerator}/{other.denominator}", no_algebra)


@given(st.text(alphabet=r"\{}()[]^_,.:%$ abfrct0123456789+-*/=|&~π∞√°", max_size=60))
def test_taking_apart_never_raises(text: str) -> None:
    plain = normalise(text)
    number(plain)
    parts(plain)
    split_unit(plain)
    equivalent("5", text, lambda *_: False)


EQUAL = r"""
10 | \$10.00
0.5 | \frac 1 2
12\text{ cm}^2 | 12
12 | 12 \mathrm{cm}^2
5 | 5 \text{ apples}
5 | 5 apples
90^\circ | 90
90 | 90^{\circ}
50\% | 0.5
50\% | 50
33\frac{1}{3}\% | \frac{100}{3}\%
\{1,2\} | \{2,1\}
\{1,2\} | 2, 1
\{1,2\} | \{1,2,2\}
1 \text{ and } -2 | -2, 1
(2,\frac{7}{2}) | (2, 3.5)
[0,1) | x \in [0, 1)
\begin{pmatrix}1\\\frac12\end{pmatrix} | \begin{bmatrix}1\\0.5\end{bmatrix}
\text{no solution} | No solution
\text{(A)} | A
3:4 | 3 : 4
"""
DIFFERENT = r"""
(1,450) | 1450
5m | 5
5m | 5n
12\text{ cm}^2 | 12 \text{ cm}^3
5\text{ m} | 5 \text{ cm}
3 | 3, 4
3 | 3 \text{ or } 4
3,4 | 3
5 | 5 \pm 100
(1,2) | (2,1)
(1,2) | [1,2]
1,2 | (1,2)
1:2 | 2:1
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1 & 2\end{pmatrix}
11 | 1 1
yes | No
50\% | 5
| 5
5 |
"""
EQUAL_BY_ALGEBRA = r"""
\sqrt{2} | \frac{2}{\sqrt2}
x^2+2x+1 | (x+1)^2
1-\sin^2(t) | \cos^2(t)
\sin 30^\circ | \frac12
e^{i\pi} | -1
10! | 3628800
2^{10} | 1024
\binom{5}{2} | 10
\pi/4 | 45\cdot\frac{\pi}{180}
(-\infty,2)\cup(3,\infty) | (3,\infty)\cup(-\infty,2)
0 \le x < 1 | [0,1)
x>3 | (3,\infty)
3x-7y+2=0 | 7y-3x=2
y=2x+3 | y = 3+2x
\{\sqrt{2}, 1\} | \{1, \frac{2}{\sqrt{2}}\}
"""
DIFFERENT_BY_ALGEBRA = r"""
\frac{1}{3^{70}} | \frac{1}{3^{69}}
\frac{2^{1500}+1}{5 \cdot 2^{1501}} | \frac{1}{5 \cdot 2^{1501}}
\sqrt{2} | 1.41421356
\pi | 3.14159265
2 - \frac{1}{e} | 2 + \frac{1}{e}
\frac{a}{b} | \frac{b}{a}
10 | \infty
5 | \frac{\sqrt{}}{}
5 | exec("open('/tmp/x','w')")
3+4i | 3-4i
x=5 | x>5
"""


def table(text: str) -> list[tuple[str, str]]:
    return [(a.strip(), b.strip()) for a, b in (line.split("|") for line in text.strip().splitlines())]


@pytest.mark.parametrize(("gold", "answer"), table(EQUAL))
def test_equal(gold: str, answer: str) -> None:
    assert equivalent(gold, answer, no_algebra)


@pytest.mark.parametrize(("gold", "answer"), table(DIFFERENT))
def test_different(gold: str, answer: str) -> None:
    assert not equivalent(gold, answer, lambda *_: False)


def test_algebra(workers: Workers) -> None:
    def algebra(gold: str, answer: str, tolerance: Tolerance) -> bool:
        return bool(workers.call(gold=gold, given=answer, rel=tolerance.rel, absolute=tolerance.abs))

    assert [pair for pair in table(EQUAL_BY_ALGEBRA) if not equivalent(*pair, algebra)] == []
    assert [pair for pair in table(DIFFERENT_BY_ALGEBRA) if equivalent(*pair, algebra)] == []
    assert equivalent("1.4142", r"\sqrt{2}", algebra, Tolerance(rel=0.001))
    assert not equivalent("1.4142", r"\sqrt{3}", algebra, Tolerance(rel=0.001))


def test_tolerance() -> None:
    close = Tolerance(rel=0.01)
    assert equivalent("-40", "-40.2", no_algebra, close)
    assert not equivalent("-40", "-42", no_algebra, close)
    assert not equivalent("-40", "40", no_algebra, close)
    assert not equivalent("0", "0.1", no_algebra, close)
    assert equivalent("0", "0.0004", no_algebra, Tolerance(abs=0.001))
    assert not equivalent("3.2", r"\infty", lambda *_: False, close)
    for bad in (float("nan"), float("inf"), -0.1):
        with pytest.raises(ConfigError, match="finite"):
            Tolerance(rel=bad)


@pytest.mark.parametrize(
    ("solution", "answer"), [("2+3\n#### 1,450", "1,450"), ("x\n#### -5", "-5"), ("x #### $10", "$10"), ("none", "")]
)
def test_gsm8k_answers_keep_sign_and_separators(solution: str, answer: str) -> None:
    assert gsm8k_answer(solution) == answer


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Math]:
    rows = [
        {"question": "1+1449?", "answer": "It is <<1+1449=1450>>1450.\n#### 1,450"},
        {"problem": "Half?", "answer": r"\frac{1}{2}"},
        {"problem": "Root?", "solution": r"So \boxed{\sqrt{2}}."},
    ]
    made = Math(path=write(tmp_path_factory.mktemp("math") / "rows.jsonl", rows), timeout=2)
    yield made
    made.close()


def grade(env: Math, task: Task, text: str) -> Grade:
    result = env.grade(task, text)
    assert isinstance(result, Grade)
    return result


def test_rows_grades_and_feedback(env: Math) -> None:
    sums, half, root = env.tasks("train")
    assert (sums.target, half.target, root.target) == ("1,450", r"\frac{1}{2}", r"\sqrt{2}")
    assert "<<" not in (sums.demonstration or "")
    assert grade(env, sums, r"\boxed{1450}").reward == 1
    assert grade(env, half, r"\boxed{0.5}").reward == 1
    assert grade(env, half, r"\boxed{}").reward == 0
    assert grade(env, half, "The answer is 0.5.").metrics == {"correct": 1.0, "format": 0.0}
    assert grade(env, half, r"\boxed{7}").feedback == 'The answer "7" is wrong.'
    assert r"\boxed{answer}" in grade(env, half, "no idea").feedback
    assert "Be shorter" in grade(env, half, r"Then \boxed{0.").feedback
    assert grade(env, half, r"\boxed{0.5} and so on, at length").feedback == ""  # right: nothing to say
    assert [line for line in check_env(env, splits=["train"]) if line.verdict == "failed"] == []


def test_any_thread_gives_the_same_verdict(env: Math) -> None:
    half = env.tasks("train")[1]
    seen: list[float] = []
    threads = [
        threading.Thread(target=lambda: seen.append(grade(env, half, r"\boxed{\frac{\sqrt{4}}{4}}").reward))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1.0] * 4


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "(10^{9})!", "(x+1)^{100000}", r"\sqrt{" * 900 + "2" + "}" * 900])
def test_answers_without_end_are_wrong_and_do_not_hang(env: Math, answer: str) -> None:
    root = env.tasks("train")[2]
    start = time.monotonic()
    assert grade(env, root, rf"\boxed{{{answer}}}").reward == 0
    assert time.monotonic() - start < 30
    assert grade(env, root, r"\boxed{\frac{2}{\sqrt{2}}}").reward == 1  # the next one is graded as ever


def test_our_own_failure_is_not_a_wrong_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"problem": "Root?", "answer": r"\sqrt{2}"}])
    overloaded = Math(path=path, timeout=1e-6)
    (task,) = overloaded.tasks("train")
    with pytest.raises(GradingError, match="fails on the right answer"):
        grade(overloaded, task, r"\boxed{\sqrt{3}}")
    assert grade(overloaded, task, r"\boxed{\sqrt 2}").reward == 1  # needs no algebra


def test_bad_rows_and_arguments(tmp_path: Path) -> None:
    for rows, message in (
        ([{"problem": "p", "answer": ""}], "answer is empty"),
        ([{"answer": "1"}], "no field 'problem'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Math(path=write(tmp_path / "bad.jsonl", rows)).tasks("train")
    for arguments, message in (
        ({"dataset": "gsm"}, "gsm8k"),
        ({"rel": -1.0}, "finite"),
        ({"format_credit": 2.0}, "below 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Math(**arguments)  # type: ignore[arg-type]


def test_dapo_rows_lose_their_wrapping(tmp_path: Path) -> None:
    prompt = "Solve it step by step.\n\nWhat is\n\n2+2?\n\nAnswer on the last line."
    row = {"prompt": [{"role": "user", "content": prompt}], "reward_model": {"ground_truth": "4"}}
    (task,) = Math(path=write(tmp_path / "rows.jsonl", [row, row]), system="none").tasks("train")
    assert (task.prompt[0]["content"], task.target) == ("What is\n\n2+2?", "4")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data at {SHARED}")
def test_real_gsm8k() -> None:
    env = Math(path=str(SHARED / "gsm8k_300.jsonl"))
    tasks = env.tasks("train")
    assert len(tasks) == 200
    for task in tasks:
        assert grade(env, task, task.demonstration or "").success
        assert not grade(env, task, task.prompt[-1]["content"]).success


def echo(**arguments: Any) -> Any:
    """Runs in a grading process: does what it is told."""
    action = arguments["do"]
    if action == "sleep":
        time.sleep(60)
    if action == "die":
        os._exit(3)
    if action == "memory":
        return len("x" * (8 << 30))
    if action == "raise":
        raise KeyError("gone")
    if action == "print":
        print("not an answer")
    if action == "write":
        Path(arguments["path"]).write_text("x")
    if action == "system":
        os.system(f"touch {arguments['path']}")
    if action == "environment":
        return sorted(os.environ)
    if action == "unjson":
        return {1, 2}
    return action


class TestWorkers:
    @pytest.fixture
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        monkeypatch.setenv("SECRET_TOKEN", "hunter2")
        made = Workers("test_math_env:echo", timeout=1.0, size=2)
        made.call(timeout=60, do="warm up")
        yield made
        made.close()

    @pytest.mark.parametrize(
        ("action", "kind"),
        [("sleep", "timeout"), ("die", "died"), ("memory", "died"), ("raise", "raised"), ("unjson", "raised")],
    )
    def test_failures_are_told_apart_and_the_next_call_works(self, pool: Workers, action: str, kind: str) -> None:
        with pytest.raises(WorkerFailure) as failure:
            pool.call(do=action)
        assert failure.value.kind == kind
        assert pool.call(timeout=60, do="again") == "again"

    def test_what_a_child_may_not_do(self, pool: Workers, tmp_path: Path) -> None:
        target = tmp_path / "file"
        for action in ("write", "system"):
            with pytest.raises(WorkerFailure, match="PermissionError"):
                pool.call(do=action, path=str(target))
        assert not target.exists()
        assert "SECRET_TOKEN" not in pool.call(do="environment")

    def test_printing_does_not_disturb_the_answer(self, pool: Workers) -> None:
        assert pool.call(do="print") == "print"

    def test_more_callers_than_children(self, pool: Workers) -> None:
        seen: list[Any] = []
        threads = [
            threading.Thread(target=lambda i=i: seen.append(pool.call(timeout=60, do=f"n{i}"))) for i in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == sorted(f"n{i}" for i in range(12))

    def test_a_pool_can_be_pickled_and_closed_twice(self, pool: Workers) -> None:
        clone = pickle.loads(pickle.dumps(pool))
        assert clone.call(timeout=60, do="x") == "x"
        clone.close()
        clone.close()

    def test_a_child_that_cannot_start_is_our_failure(self) -> None:
        with pytest.raises(GradingError, match="ModuleNotFoundError"):
            Workers("no_such_module:f", timeout=1).call()
