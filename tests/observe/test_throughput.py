"""Rates from a virtual clock: what counts as a step's time and what does not."""

import pytest

from megascale_jax.observe.throughput import Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def meter(clock: Clock, window: int = 20) -> Throughput:
    return Throughput(100, flops_per_token=6.0, peak_flops_total=1200.0, window=window, clock=clock)


def step(throughput: Throughput, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    throughput.step_done()


def test_rates_are_unknown_when_only_the_compiling_step_is_done(clock: Clock) -> None:
    throughput = meter(clock)
    step(throughput, clock, 60.0)
    assert throughput.tokens_per_s is None and throughput.mfu is None and throughput.eta_s(5) is None
    assert throughput.summary().tokens_per_s is None and throughput.summary().measured_steps == 0


def test_compilation_is_left_out_when_later_steps_are_fast(clock: Clock) -> None:
    throughput = meter(clock)
    for seconds in (60.0, 1.0, 3.0):
        step(throughput, clock, seconds)
    assert throughput.tokens_per_s == pytest.approx(200 / 4.0)
    assert throughput.mfu == pytest.approx(6.0 * 50.0 / 1200.0)
    assert throughput.eta_s(10) == pytest.approx(20.0)


def test_pause_is_left_out_when_between_two_steps(clock: Clock) -> None:
    throughput = meter(clock)
    step(throughput, clock, 60.0)
    step(throughput, clock, 2.0)
    with throughput.pause():
        clock.now += 30.0
    step(throughput, clock, 2.0)
    step(throughput, clock, 2.0)
    assert throughput.tokens_per_s == pytest.approx(50.0)
    assert throughput.summary().paused_s == pytest.approx(30.0)
    assert throughput.summary().measured_s == pytest.approx(6.0)


def test_pause_is_left_out_when_it_ends_in_an_exception_or_is_nested(clock: Clock) -> None:
    throughput = meter(clock)
    step(throughput, clock, 1.0)
    with pytest.raises(OSError), throughput.pause(), throughput.pause():
        clock.now += 7.0
        raise OSError
    step(throughput, clock, 4.0)
    assert throughput.tokens_per_s == pytest.approx(25.0)
    assert throughput.summary().paused_s == pytest.approx(7.0)


def test_only_the_latest_steps_count_when_the_window_is_full(clock: Clock) -> None:
    throughput = meter(clock, window=2)
    for seconds in (9.0, 100.0, 1.0, 1.0):
        step(throughput, clock, seconds)
    assert throughput.tokens_per_s == pytest.approx(100.0)
    summary = throughput.summary()
    assert summary.tokens_per_s == pytest.approx(300 / 102.0)
    assert summary.mfu == pytest.approx(6.0 * 300 / 102.0 / 1200.0)
    assert summary.measured_steps == 3


def test_step_inside_a_pause_is_our_mistake(clock: Clock) -> None:
    throughput = meter(clock)
    with pytest.raises(AssertionError), throughput.pause():
        throughput.step_done()
