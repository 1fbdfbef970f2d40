"""The bar, the plain lines and the silence, on a virtual clock and a console that writes to memory."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megascale_jax.observe.progress import TrainingProgress, format_duration, format_rate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    # `_environ` keeps the colour settings of whoever runs the tests out of them.
    return Console(file=stream, force_terminal=terminal, width=width, _environ={"TERM": "xterm"}), stream


def test_lines_are_ten_seconds_apart_when_not_on_a_terminal() -> None:
    target, stream = console(terminal=False)
    clock = Clock()
    with TrainingProgress(100, console=target, clock=clock) as progress:
        for step in range(1, 36):
            clock.now += 1.0
            progress.update(step, loss=2.5, tokens_per_s=12345.0, mfu=0.4123, eta_s=65.0, note="saving")
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/100", "20/100", "30/100", "35/100"]
    assert lines[0] == "step 10/100  loss 2.5000  12.3k tok/s  MFU 41.2%  1:05 left  saving"


def test_last_line_is_not_repeated_when_it_was_just_shown() -> None:
    target, stream = console(terminal=False)
    clock = Clock()
    with TrainingProgress(1, console=target, clock=clock) as progress:
        clock.now += 10.0
        progress.update(1, loss=1.0)
    assert stream.getvalue() == "step 1/1  loss 1.0000\n"


def test_line_is_not_wrapped_when_longer_than_the_console() -> None:
    target, stream = console(terminal=False, width=20)
    with TrainingProgress(1, console=target, clock=Clock()) as progress:
        progress.print("checkpoint in [runs]/" + "x" * 90)
    assert stream.getvalue() == "checkpoint in [runs]/" + "x" * 90 + "\n"


def test_nothing_is_shown_when_rank_is_not_zero() -> None:
    for terminal in (False, True):
        target, stream = console(terminal)
        clock = Clock()
        with TrainingProgress(10, rank=3, console=target, clock=clock) as progress:
            clock.now += 60.0
            progress.update(5, loss=1.0)
            progress.print("text")
        assert stream.getvalue() == ""


def test_bar_shows_all_numbers_when_on_a_terminal_of_80_columns() -> None:
    target, stream = console(terminal=True, width=80)
    with TrainingProgress(500, start_step=100, console=target, clock=Clock()) as progress:
        progress.update(120, loss=2.34567, tokens_per_s=21456.0, mfu=0.312, eta_s=3723.0)
        progress.print("saved step 120")
    shown = stream.getvalue()
    assert "saved step 120" in shown
    last = shown[shown.rindex("120/500") :]
    for part in ("loss 2.3457", "21.5k tok/s", "MFU 31.2%", "1:02:03 left", "━"):
        assert part in last, part


def test_plain_lines_are_used_when_the_terminal_is_dumb() -> None:
    stream = io.StringIO()
    dumb = Console(file=stream, force_terminal=True, width=80, _environ={"TERM": "dumb"})
    with TrainingProgress(2, console=dumb, clock=Clock()) as progress:
        progress.update(1, loss=float("nan"), eta_s=float("inf"))
    assert stream.getvalue() == "step 1/2  loss nan\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.6, "1.00k"), (1234, "1.23k"), (12345, "12.3k"), (123456, "123k"), (4.56e6, "4.56M"), (2e9, "2.00G")],
)
def test_rate_has_three_digits_when_formatted(value: float, text: str) -> None:
    assert format_rate(value) == text


@given(st.floats(min_value=1, max_value=9.9e11))
def test_rate_is_within_half_a_per_cent_when_read_back(value: float) -> None:
    text = format_rate(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    read = float(text.rstrip("kMG")) * scale
    assert abs(read - value) <= max(0.0051 * value, 0.5)
    assert len(text) <= 5


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (5.4, "0:05"), (600, "10:00"), (3723, "1:02:03"), (90061, "1 day, 1:01:01")])
def test_duration_is_short_when_formatted(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
