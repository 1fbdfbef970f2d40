"""Limits are a multiple of what was seen, never below the floor; what a hang or a first step does teaches nothing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.cluster.limits import Limits, LimitSettings
from megascale_jax.observe.marks import SECTIONS, Marks, read_marks

SECONDS = st.floats(0, 1e6)
LONGEST = st.dictionaries(st.sampled_from(SECTIONS), SECONDS)
MANY = dict.fromkeys(SECTIONS, 100)


def learned(reports, settings=None):
    limits = Limits(settings)
    for longest_s in reports:
        limits.learn(longest_s)
    return limits


def test_floors_hold_when_nothing_was_seen():
    limits = Limits()
    floors = {name: limits.limit_s(name, MANY) for name in SECTIONS if name != "step"}
    assert floors == {
        "start": 300,
        "join": 300,
        "data": 120,
        "restore": 600,
        "compile": 1800,
        "evaluate": 60,
        "checkpoint": 120,
        "end": 300,
    }


def test_step_has_its_floor_once_steps_were_seen():
    limits = learned([{"step": 0.2, "compile": 3.0}])
    assert limits.limit_s("step", {"step": 2}) == 10
    assert learned([{"step": 30.0}]).limit_s("step", {"step": 2}) == 150


@given(st.lists(LONGEST, max_size=6), st.sampled_from(SECTIONS))
def test_limit_is_a_multiple_of_the_longest_of_all_ranks_and_never_below_the_floor(reports, section):
    settings = LimitSettings(factor=3, compile_factor=20, floors={"step": 1.0})
    seen = [report[section] for report in reports if section in report]
    limit_s = learned(reports, settings).limit_s(section, MANY)
    factor = 20 if section == "compile" else 3
    if seen or section != "step":
        assert limit_s == max([settings.floor_s(section), *[factor * seconds for seconds in seen]])
    assert limit_s >= settings.floor_s(section)


@given(st.lists(LONGEST, max_size=6), st.randoms())
def test_order_and_repetition_of_reports_change_nothing(reports, random):
    again = reports * 2
    random.shuffle(again)
    assert learned(again).to_json() == learned(reports).to_json()


@given(st.lists(LONGEST, max_size=6), st.sampled_from(SECTIONS), st.integers(0, 3))
def test_limits_survive_a_restart(reports, section, steps):
    before = learned(reports)
    after = Limits.from_json(before.to_json())
    assert after.limit_s(section, {"step": steps}) == before.limit_s(section, {"step": steps})


@given(st.floats(1e-3, 1e5), st.floats(0, 10))
def test_compile_ten_times_longer_than_any_before_raises_no_alarm(compile_s, times):
    limits = learned([{"compile": compile_s, "step": 0.01}])
    assert not limits.is_over("compile", times * compile_s, MANY)
    assert not limits.is_over("step", times * compile_s, {"compile": 1}), "the second step of a process may compile once more"


@given(st.floats(1e-3, 1e5), st.floats(0, 1e5))
def test_steps_that_come_before_any_is_learned_raise_no_alarm(step_s, compiling_s):
    limits = learned([{"compile": compiling_s + step_s}])
    for passes in ({"compile": 1}, {"compile": 1, "step": 1}):
        assert not limits.is_over("step", 5 * step_s, passes)


def test_first_steps_are_bounded_by_compile_passes_seen_or_else_by_the_floor():
    assert Limits().limit_s("step", {}) == 1800
    assert learned([{"compile": 4.0}]).limit_s("step", {}) == 48
    assert learned([{"compile": 4.0, "step": 0.1}]).limit_s("step", {}) == 48


def test_hang_is_found_and_teaches_nothing():
    limits = learned([{"step": 4.0, "compile": 30.0}])
    assert not limits.is_over("step", 20.0, MANY)
    assert limits.is_over("step", 20.1, MANY)
    limits.learn({"step": 4.0})
    assert limits.is_over("step", 20.1, MANY)


def test_long_first_step_teaches_nothing_when_it_comes_from_marks(tmp_path):
    now = 0
    marks = Marks(tmp_path / "marks", clock=lambda: now)
    for seconds in (1, 500, 2):  # start, the first step, the second
        now += seconds * 10**9
        marks.enter("step")
    reading = read_marks(tmp_path / "marks")
    assert learned([reading.longest_s]).limit_s("step", reading.passes) == 10


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_impossible_times_are_passed_over(seconds):
    assert learned([{"step": 3.0}, {"step": seconds, "unknown": 5.0}]).to_json() == '{"step": 3.0}'


@pytest.mark.parametrize("text", ["[]", '{"step": "long"}', "{", '{"step": null}'])
def test_foreign_json_is_refused(text):
    with pytest.raises(ValueError):
        Limits.from_json(text)


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"compile_factor": math.nan}, {"floors": {"steps": 1.0}}, {"floors": {"step": 0.0}}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        LimitSettings(**wrong)
