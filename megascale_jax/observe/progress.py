"""What a person sees of a running training: a live bar on a terminal, plain lines in a log file, nothing on ranks other than 0.

A CI log or a Slurm output file is no terminal: there one line appears every ten seconds or so, and one at the end. While the bar is
shown, stdout and stderr go through it, so a library's print or warning lands above it. Failure case: code that writes to
the file descriptors directly (a C++ library's log) can still smear the bar; the next refresh redraws it.
"""

import math
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text


def format_rate(value: float) -> str:
    """A rate with three significant digits and a metric suffix: 950, 1.23k, 45.6M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f}{suffix}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Seconds as m:ss, h:mm:ss or `2 days, h:mm:ss`."""
    text = str(timedelta(seconds=round(seconds)))
    return text[2:].removeprefix("0") if text.startswith("0:") else text


class TrainingProgress:
    """Context manager that shows steps, loss, tokens/s, MFU and time left.

    `steps` is the last step of the run, `start_step` the number of steps already done. `interval_s` is the time between plain lines.
    `console` and `clock` (monotonic seconds) default to the process's own.
    """

    def __init__(
        self,
        steps: int,
        *,
        start_step: int = 0,
        rank: int = 0,
        interval_s: float = 10.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._step = start_step
        self._is_silent = rank != 0
        self._interval_s = interval_s
        self._console = console or Console()
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = clock()
        self._pending = ""

    def __enter__(self) -> "TrainingProgress":
        is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        if is_live and not self._is_silent:
            self._bar = Progress(
                TextColumn("{task.completed}/{task.total}", style="bold"),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
                TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
                expand=True,
                get_time=self._clock,
            )
            self._task = self._bar.add_task("", total=self._steps, completed=self._step, status="compiling the step")
            self._bar.start()
        self._last_line = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._pending:
            self._line(self._pending)
            self._pending = ""

    def update(
        self,
        step: int,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        mfu: float | None = None,
        eta_s: float | None = None,
        note: str = "",
    ) -> None:
        """Show the state after `step`. `mfu` is a fraction; None means not known yet; `note` is a few words such as `evaluating`."""
        self._step = step
        parts = [
            "" if loss is None else f"loss {loss:.4f}",
            "" if tokens_per_s is None else f"{format_rate(tokens_per_s)} tok/s",
            "" if mfu is None else f"MFU {mfu:.1%}",
            "" if eta_s is None or not math.isfinite(eta_s) else f"{format_duration(eta_s)} left",
            note,
        ]
        status = "  ".join(part for part in parts if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif not self._is_silent:
            self._pending = f"step {step}/{self._steps}  {status}".rstrip()
            if self._clock() - self._last_line >= self._interval_s:
                self._line(self._pending)
                self._pending = ""

    def print(self, text: str) -> None:
        """Print a line above the bar, or into the log; nothing on ranks other than 0."""
        if not self._is_silent:
            self._show(text)

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        self._show(text)

    def _show(self, text: str) -> None:
        # A log line is never wrapped at the 80 columns that a file pretends to have; markup in a path stays text.
        self._console.print(Text(text), soft_wrap=not self._console.is_terminal, highlight=False)
        self._console.file.flush()
