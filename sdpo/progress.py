"""What a run shows while it goes on: a live bar on a terminal, plain lines anywhere else.

On standard error, so that a command's own output can be piped. Lines of very fast steps are thinned out; notes,
warnings and evaluations never are. Drawing is rich's. Not covered: notebooks (they get the plain lines), several runs
at once.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from sdpo.types import StepResult

__all__ = ["Progress"]

_INTERVAL = 1.0  # seconds between two plain step lines
_WINDOW = 20  # steps over which the time left is estimated


class _Evaluation(Protocol):
    """What is shown of an evaluation."""

    @property
    def success(self) -> float: ...
    @property
    def interval(self) -> tuple[float, float]: ...
    @property
    def length(self) -> float: ...


class Progress:
    """Progress of one run; a context manager.

    Args:
        total: steps of the whole run.
        start: steps that are already done.
        stream: where to write; standard error by default.
        clock: seconds, for the thinning of lines.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._start = start
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._last_line = -_INTERVAL
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        console = Console(file=self._stream)
        self._bar: Bar | None = None
        if self._stream.isatty() and not console.is_dumb_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
            self._bar = Bar(*columns, console=console)
            self._bar.add_task("", total=total, completed=start)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def step(self, result: StepResult) -> None:
        """Show a finished step. Reads `timings["step"]` and `timings["tokens_per_second"]` where they are given."""
        if "step" in result.timings:
            self._seconds.append(result.timings["step"])
        facts = "  ".join(self._facts(result))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=result.step, description=facts)
            return
        now = self._clock()
        if result.step in (self._start + 1, self.total) or now - self._last_line >= _INTERVAL:
            self._last_line = now
            self._print(f"step {result.step}/{self.total}  {facts}")

    def evaluation(self, step: int, result: _Evaluation) -> None:
        """Show an evaluation."""
        low, high = result.interval
        self._print(
            f"step {step}  validation success {result.success:.3f} ({low:.3f} to {high:.3f})"
            f"  length {result.length:.0f}"
        )

    def warning(self, text: str) -> None:
        """Show a warning on its own line."""
        self._print(f"warning: {text}", style="yellow")

    def note(self, text: str) -> None:
        """Show a line of information."""
        self._print(text)

    def _facts(self, result: StepResult) -> list[str]:
        metrics, timings = result.metrics, result.timings
        shown = [
            ("reward/mean", "reward {:.3f}", metrics),
            ("success/rate", "success {:.3f}", metrics),
            ("completion/length", "length {:.0f}", metrics),
            ("tokens_per_second", "{:,.0f} tokens/s", timings),
        ]
        facts = [form.format(source[name]) for name, form, source in shown if name in source]
        if self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            facts.append(f"{_clock_time(mean * (self.total - result.step))} left")
        return facts

    def _print(self, text: str, style: str = "") -> None:
        if self._bar is not None:
            self._bar.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
            return
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except BrokenPipeError:
            return  # whoever read the lines has gone; the run goes on


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
