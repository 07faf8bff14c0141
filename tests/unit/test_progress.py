"""Progress: plain lines where they are read by programs, a bar on a real terminal."""

from __future__ import annotations

import io
import os
import pty
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sdpo.progress import Progress
from sdpo.types import StepResult


@dataclass(frozen=True)
class Evaluated:
    success: float = 0.5
    interval: tuple[float, float] = (0.4, 0.6)
    length: float = 61.7


def result(step: int, seconds: float = 2.0) -> StepResult:
    metrics = {"reward/mean": 0.53125, "success/rate": 0.44, "completion/length": 57.26}
    return StepResult(step, (), 0.1, metrics, {"step": seconds, "tokens_per_second": 1234.4})


class Clock:
    """Time that passes by `tick` a reading."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 100.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def plain(total: int, steps: Sequence[int], tick: float, start: int = 0) -> list[str]:
    stream = io.StringIO()
    with Progress(total, start=start, stream=stream, clock=Clock(tick)) as progress:
        for step in steps:
            progress.step(result(step))
    return stream.getvalue().splitlines()


def test_a_plain_line_says_it_all() -> None:
    (line,) = plain(100, [10], 5.0)
    assert line == "step 10/100  reward 0.531  success 0.440  length 57  1,234 tokens/s  0:03:00 left"


def test_slow_steps_each_get_a_line_and_fast_ones_are_thinned_out() -> None:
    assert len(plain(30, range(1, 31), 2.0)) == 30
    fast = plain(100, range(1, 101), 0.1)
    assert 8 <= len(fast) <= 15
    assert fast[0].startswith("step 1/100 ")
    assert fast[-1].startswith("step 100/100 ")
    assert fast[-1].endswith("0:00:00 left")


def test_a_resumed_run_shows_its_first_step() -> None:
    assert plain(100, [41, 42], 0.0, start=40)[0].startswith("step 41/100")


def test_what_is_unknown_is_left_out() -> None:
    stream = io.StringIO()
    Progress(3, stream=stream).step(StepResult(1, (), 0.0, {"completion/length": 5.0}, {}))
    assert stream.getvalue() == "step 1/3  length 5\n"


def test_notes_warnings_and_evaluations_have_their_own_lines_and_are_never_thinned() -> None:
    stream = io.StringIO()
    with Progress(10, stream=stream, clock=Clock(0.0)) as progress:
        progress.note("sdpo on lab")
        progress.step(result(1))
        progress.step(result(2))
        progress.warning("step 2: all_failed: [1, 0] is [bold]no[/bold] markup")
        progress.evaluation(2, Evaluated())
    lines = stream.getvalue().splitlines()
    assert [lines[0], *lines[2:]] == [
        "sdpo on lab",
        "warning: step 2: all_failed: [1, 0] is [bold]no[/bold] markup",
        "step 2  validation success 0.500 (0.400 to 0.600)  length 62",
    ]
    assert "\x1b" not in stream.getvalue()


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1) as progress:
        progress.note("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_reader_who_left_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stream:
        progress = Progress(1, stream=stream)
        progress.note("nobody listens")
        progress.step(result(1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that closing can flush


def on_terminal(monkeypatch: pytest.MonkeyPatch, term: str) -> str:
    """What a terminal receives from a short run."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    received = bytearray()

    def read() -> None:
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end is closed
                return
            if not chunk:
                return
            received.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as stream, Progress(4, start=1, stream=stream) as progress:
        progress.step(result(2))
        progress.warning("step 2: all_failed: [bold]look[/bold]")
        progress.evaluation(2, Evaluated())
        progress.step(result(4))
    reader.join(timeout=10)
    os.close(master)
    return received.decode()


def test_a_terminal_gets_a_bar_and_warnings_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_terminal(monkeypatch, "xterm-256color")
    assert "\x1b[" in text
    assert "4/4" in text
    assert "reward 0.531  success 0.440  length 57  1,234 tokens/s  0:00:00 left" in text
    assert "warning: step 2: all_failed: [bold]look[/bold]" in text
    assert "validation success 0.500" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_terminal(monkeypatch, "dumb")
    assert "\x1b" not in text
    assert "step 4/4  reward 0.531" in text
