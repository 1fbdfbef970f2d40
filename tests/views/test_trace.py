"""Traces: every unit where the schedule has it, every message an arrow, all lanes well formed."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import UsageError
from megascale_jax.observe.events import EVENTS_FOLDER, Events
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views import timeline as timeline_module
from megascale_jax.views.ideal import ideal_units
from megascale_jax.views.step_processes import find_step
from megascale_jax.views.timeline import read_timeline
from megascale_jax.views.trace import MOST_DEVICES, arrows, chosen, median_units_ns, trace_bytes, trace_events
from tests.views.fake_steps import stamps_of, write_steps
from tests.views.real_steps import train_steps

GRIDS = [(1, 1, 2, 0), (2, 2, 4, 1), (4, 3, 8, 0), (8, 2, 16, 1)]
"""Stages, chunks a stage, micro-batches, backward delay."""


def scheduled(schedule, stage, of):
    """``(tick, micro-batch, chunk)`` of a pass by the schedule's table."""
    if of == "weight":
        numbers = [(tick, number) for tick in range(schedule.length) if (number := schedule.weight_unit(tick)) is not None]
        return [(tick, schedule.decode(number)[0], schedule.virtual_stages - 1 - schedule.decode(number)[1]) for tick, number in numbers]
    if of == "head":
        numbers = [(tick, schedule.at_head(tick)) for tick in range(schedule.length)]
        return [(tick, number, schedule.virtual_stages - 1) for tick, number in numbers if number is not None]
    unit_at = schedule.forward if of == "forward" else schedule.backward
    return [(tick, unit.micro_batch, unit.chunk) for tick in range(schedule.ticks) if (unit := unit_at(tick, stage))]


def drawn(trace, pid, of):
    """The same of a lane of a trace, in the order of time."""
    lanes = {event["tid"] for event in trace if event["ph"] == "M" and event["pid"] == pid and event["args"].get("name") == f"{of} units"}
    rows = [event for event in trace if event["ph"] == "X" and event["pid"] == pid and event["tid"] in lanes and event["name"] != "idle"]
    rows.sort(key=lambda event: event["ts"])
    return [(event["args"]["tick"], event["args"]["micro_batch"], event["args"]["chunk"]) for event in rows]


def check_order(trace, schedule, mesh, light_head):
    """Units of all devices, and of the ideal, in the order of the schedule's table. A light head beside weight gradients has no phases."""
    for device in range(int(np.prod(mesh))):
        stage = device // (mesh[1] * mesh[2])
        for of in ("forward", "backward", "weight", "head"):
            is_glue = of == "head" and light_head
            own = [unit for unit in scheduled(schedule, stage, of) if not is_glue or schedule.weight_unit(unit[0]) is None]
            assert drawn(trace, device + 1, of) == own, f"device {device}, {of}"
            ideal = scheduled(schedule, stage, of) if own else []  # what no device was seen to compute takes no time
            assert drawn(trace, 1_000_000 + stage, of) == ideal, f"ideal of stage {stage}, {of}"


def check_lanes(trace):
    """Slices of a lane follow or enclose each other; every arrow has a begin and an end inside a slice."""
    lanes = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((round(event["ts"] * 1e3), -round(event["dur"] * 1e3)))
    for slices in lanes.values():
        open_until = []
        for begin, minus in sorted(slices):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or begin - minus <= open_until[-1], "slices of a lane overlap"
            open_until.append(begin - minus)
    ends = defaultdict(list)
    for event in trace:
        if event["ph"] in "sf":
            ends[event["id"]].append(event["ph"])
            at = event["ts"] * 1e3
            assert any(begin - 1 <= at <= begin - minus + 1 for begin, minus in lanes[event["pid"], event["tid"]])
    assert all(phases == ["s", "f"] for phases in ends.values())


@pytest.mark.parametrize("grid", GRIDS)
def test_the_order_of_a_trace_is_that_of_the_schedule(grid, tmp_path):
    schedule = Schedule(*grid)
    mesh = (schedule.pipe, 1, 2)
    write_steps(tmp_path / "run", stamps_of(schedule), mesh, [3])
    timeline = read_timeline(tmp_path / "run", 3)
    assert timeline.schedule == schedule
    trace = json.loads(trace_bytes(timeline))["traceEvents"]
    check_order(trace, schedule, mesh, light_head=True)
    check_lanes(trace)
    messages = schedule.pipe > 1 and 2 * (schedule.units * schedule.pipe - schedule.micro_batches)
    found = [(arrow.name, arrow.sender.number, arrow.used.micro_batch, arrow.used.chunk) for arrow in arrows(timeline, schedule)]
    whole = [one for one in found if one[0] != "P.send_b"]  # the other half of what P.send_a sends
    assert len(whole) == len(set(whole)) == 2 * messages, "every output but the last, every gradient but the first, on two ranks"
    assert len(set(found)) == len(found)


def test_a_message_goes_to_the_neighbour_of_the_same_place_and_is_used_after_it(tmp_path):
    schedule = Schedule(4, 2, 8, 1)
    write_steps(tmp_path / "run", stamps_of(schedule), (4, 2, 2), [1])
    timeline = read_timeline(tmp_path / "run", 1)
    for arrow in arrows(timeline, schedule):
        step = 1 if arrow.used.of == "forward" else -1
        assert arrow.receiver.place == ((arrow.sender.stage + step) % 4, *arrow.sender.place[1:])
        assert arrow.used.tick == arrow.sent.tick + (arrow.name in ("P.send_y", "P.send_a"))
    assert any(arrow.sent.lane == "compute" for arrow in arrows(timeline, schedule)), "messages are under way beside a compute"


def test_a_real_step_is_drawn_as_scheduled(tmp_path):
    schedule, mesh = train_steps(tmp_path / "run", 2, pipe=2, tensor=2, virtual_stages=2)
    for step in (1, 2):
        timeline = read_timeline(tmp_path / "run", step)
        assert timeline.schedule == schedule and timeline.mesh == mesh and not timeline.notes
        trace = list(trace_events(timeline))
        check_order(trace, schedule, mesh, light_head=False)
        check_lanes(trace)
        sent = list(arrows(timeline, schedule))
        assert len(sent) > 0
        for arrow in sent:  # CPUs may run a message before the phase that the plan has it in, never before the unit it is of
            before = arrow.used.tick - 1
            (unit,) = [row for row in arrow.sender.units[arrow.used.of] if row.tick == before]
            assert arrow.used.end_ns > unit.begin_ns, "nothing is used before it is made"
        assert {row.name for host in timeline.hosts for row in host.rows} >= {"data", "step"}


UNIT_TIMES = st.fixed_dictionaries({of: st.integers(0, 1000) for of in ("forward", "backward", "weight", "head")})


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(GRIDS), UNIT_TIMES)
def test_the_ideal_runs_each_unit_once_after_what_it_needs_and_never_two_at_a_time(grid, lasts_ns):
    schedule = Schedule(*grid)
    units = ideal_units(schedule, lasts_ns)
    places = {(unit.of, unit.stage, unit.micro_batch, unit.chunk): unit for unit in units}
    assert len(places) == len(units) == schedule.pipe * (3 * schedule.units + schedule.micro_batches)
    for stage in range(schedule.pipe):
        own = [unit for unit in units if unit.stage == stage]
        assert all(first.end_ns <= second.begin_ns for first, second in pairwise(own))
        busy_ns = schedule.units * sum(lasts_ns[of] for of in ("forward", "backward", "weight")) + schedule.micro_batches * lasts_ns["head"]
        assert sum(unit.end_ns - unit.begin_ns for unit in own) == busy_ns
    for (of, stage, micro_batch, chunk), unit in places.items():
        if of == "forward" and (stage or chunk):
            before = places["forward", (stage - 1) % schedule.pipe, micro_batch, chunk if stage else chunk - 1]
            assert before.end_ns <= unit.begin_ns
        if of == "backward" and stage == schedule.pipe - 1 and chunk == schedule.virtual_stages - 1:
            assert all(places["head", part, micro_batch, chunk].end_ns <= unit.begin_ns for part in range(schedule.pipe))
        if of == "head":
            assert places["forward", schedule.pipe - 1, micro_batch, chunk].end_ns <= unit.begin_ns
        if of == "weight":
            assert places["backward", stage, micro_batch, chunk].end_ns <= unit.begin_ns


def test_the_ideal_of_equal_units_has_the_bubble_of_the_schedule():
    schedule = Schedule(4, 2, 16, 0)
    units = ideal_units(schedule, {"forward": 10, "backward": 10})
    assert max(unit.end_ns for unit in units) == pytest.approx(schedule.units * 20 * (1 + schedule.bubble), rel=0.02)


def test_medians_are_of_whole_units(tmp_path):
    schedule = Schedule(2, 1, 2, 0)
    stamps = stamps_of(schedule)
    times = write_steps(tmp_path / "run", stamps, (2, 1, 1), [0])[0]
    computing = stamps.lane == stamps.lanes.index("compute")
    weight = computing & (stamps.of == stamps.passes.index("weight"))
    sums = defaultdict(int)
    for device in range(2):
        micro_batch, _ = stamps.units(device)
        for number in np.flatnonzero(weight & (micro_batch >= 0)):
            sums[device, micro_batch[number]] += int(times[device, stamps.end[number]] - times[device, stamps.begin[number]])
    assert median_units_ns(read_timeline(tmp_path / "run", 0))["weight"] == round(float(np.median(list(sums.values()))))


def test_a_step_without_details_has_its_sums_and_says_where_details_are(tmp_path):
    run, out = tmp_path / "run", tmp_path / "trace.json"
    schedule = Schedule(2, 1, 2, 1)
    write_steps(run, stamps_of(schedule), (2, 1, 2), range(1, 7), detail_every=4, ranks=2)
    assert find_step(run).step == 4 and find_step(run, 6, {1}).detailed == (4,)
    done = CliRunner().invoke(app, ["trace", str(run), "--step", "6", "--output", str(out)])
    assert done.exit_code == 0 and "step 6 has no details" in done.output and "the nearest step with them is 4" in done.output
    trace = json.loads(out.read_bytes())["traceEvents"]
    check_lanes(trace)
    assert len([event for event in trace if event["ph"] == "X" and event["cat"] == "forward"]) == 2 * 2 * 2
    assert not [event for event in trace if event["ph"] in "sf"]
    steps = [event for event in trace if event["ph"] == "X" and event["name"] == "step" and event["cat"] == "compute"]
    assert len(steps) == 4 and all("forward wait, tensor" in event["args"] for event in steps)


def test_the_newest_step_with_details_is_drawn_and_gzipped_unless_another_is_asked_for(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_steps(run, stamps_of(Schedule(2, 1, 2, 1)), (2, 1, 2), range(1, 7), detail_every=4, ranks=2)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["trace", str(run)])
    assert done.exit_code == 0 and "step 4 of attempt 0, 4 devices" in done.output, done.output
    whole = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert whole["otherData"] == {"step": 4, "attempt": 0, "notes": []}
    for options, devices in ((["--ranks", "1"], {3, 4}), (["--stage", "0"], {1, 2}), (["--ranks", "0-1", "--stage", "1"], {3, 4})):
        done = CliRunner().invoke(app, ["trace", str(run), "--output", "part.json", *options])
        assert done.exit_code == 0, done.output
        part = json.loads((tmp_path / "part.json").read_bytes())["traceEvents"]
        assert {event["pid"] for event in part if event["ph"] == "X" and event["cat"] == "compute"} == devices


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "9"], "there are steps 1 to 2"),
        (["--stage", "2"], "in step 2 the run has the stages 0 to 1"),
        (["--ranks", "7"], "no events of it"),
        (["--ranks", "x"], "expected numbers and ranges"),
        (["--ranks", "1", "--stage", "0"], "none of these ranks"),
    ],
)
def test_what_is_not_there_is_said(tmp_path, options, words):
    write_steps(tmp_path / "run", stamps_of(Schedule(2, 1, 2, 1)), (2, 1, 2), [1, 2], ranks=2)
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "run"), "--output", str(tmp_path / "out.json"), *options])
    assert isinstance(done.exception, UsageError) and words in str(done.exception)
    assert not (tmp_path / "out.json").exists()


def test_a_step_that_was_trained_again_is_that_of_the_newest_attempt(tmp_path):
    stamps = stamps_of(Schedule(2, 1, 2, 1))
    write_steps(tmp_path / "run", stamps, (2, 1, 2), [1], seed=1)
    times = write_steps(tmp_path / "run", stamps, (2, 1, 2), [1], attempt=1, seed=2)
    timeline = read_timeline(tmp_path / "run", 1)
    assert timeline.attempt == 1 and len(timeline.devices) == 4
    lasted = [device.step.duration_ns for device in timeline.devices]
    assert lasted == [int(times[1, device, -1] - times[1, device, 0]) for device in range(4)]


def test_names_from_anywhere_are_text(tmp_path):
    run = tmp_path / "run"
    write_steps(run, stamps_of(Schedule(1, 1, 1, 0)), (1, 1, 1), [1])
    events = Events(run / EVENTS_FOLDER, rank=5)
    events.record('"}]}<script>\x1b[31m', 10**9, 5, step=1, lane="driver", text='"\n')
    events.close()
    trace = json.loads(trace_bytes(read_timeline(run, 1)))["traceEvents"]
    assert [event["args"]["text"] for event in trace if "script" in event["name"]] == ['"\n']


def test_of_a_large_mesh_one_pipeline_is_drawn():
    assert chosen((8, 4, 2), None) == (None, "") and MOST_DEVICES == 8 * 4 * 2
    devices, note = chosen((12, 128, 8), None)
    assert devices == [stage * 1024 for stage in range(12)] and "12,288 devices" in note
    assert chosen((12, 128, 8), {1}) == (list(range(1024, 2048)), "")


def test_hosts_are_drawn_by_one_clock(tmp_path):
    """The second host's clock is 3 s ahead: its steps end with those of the first all the same."""
    run, stamps = tmp_path / "run", stamps_of(Schedule(2, 1, 2, 1))
    write_steps(run, stamps, (2, 1, 1), range(1, 12), ranks=2, hosts=(("here", 0), ("there", 3 * 10**9)))
    timeline = read_timeline(run, 6)
    first, second = timeline.devices
    assert (first.host, second.host) == ("here", "there")
    lasted = [device.step.end_ns for device in timeline.devices]
    assert abs(lasted[1] - lasted[0]) < 10**8, "durations are random, so ends are within those of a step"
    assert any("clocks of hosts are aligned" in note for note in timeline.notes)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_step_is_drawn_with_the_mesh_that_it_had(tmp_path, attempt):
    """Also where the run was started again without a driver, so that all is one attempt."""
    run, out = tmp_path / "run", tmp_path / "out.json"
    write_steps(run, stamps_of(Schedule(4, 1, 4, 1)), (4, 1, 1), [1, 2], ranks=2)
    write_steps(run, stamps_of(Schedule(2, 1, 2, 1), tensor=1), (2, 1, 1), [2, 3], ranks=2, attempt=attempt, hosts=(("here", 10**12),) * 2)
    for step, mesh in ((1, (4, 1, 1)), (2, (2, 1, 1)), (3, (2, 1, 1))):
        done = CliRunner().invoke(app, ["trace", str(run), "--step", str(step), "--output", str(out)])
        assert done.exit_code == 0 and f"{mesh[0]} devices" in done.output, done.output
        timeline = read_timeline(run, step)
        assert timeline.mesh == mesh and [device.place for device in timeline.devices] == [(stage, 0, 0) for stage in range(mesh[0])]
    for stage in range(4):
        done = CliRunner().invoke(app, ["trace", str(run), "--step", "1", "--stage", str(stage), "--output", str(out)])
        assert done.exit_code == 0 and "1 devices" in done.output, done.output
    refused = CliRunner().invoke(app, ["trace", str(run), "--step", "3", "--stage", "3", "--output", str(out)])
    assert isinstance(refused.exception, UsageError) and "stages 0 to 1" in str(refused.exception)


def test_only_what_is_drawn_is_read_and_not_too_much(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_steps(run, stamps_of(Schedule(2, 1, 2, 1)), (2, 1, 2), [1], ranks=1)
    read: list[int] = []
    by_device = timeline_module._by_device
    monkeypatch.setattr(timeline_module, "_by_device", lambda rows: read.extend(row["device"] for row in rows) or by_device(rows))
    assert [device.number for device in read_timeline(run, 1, devices=[2]).devices] == [2] and set(read) == {-1, 2}
    with pytest.raises(UsageError, match="no chosen device"):
        read_timeline(run, 1, devices=[7])
    monkeypatch.setattr(timeline_module, "MOST_ROWS", 100)
    with pytest.raises(UsageError, match=r"at most 100: choose by --ranks or --stage"):
        read_timeline(run, 1)


def test_what_is_not_known_of_clocks_is_said(tmp_path):
    stamps, hosts = stamps_of(Schedule(2, 1, 2, 1)), (("here", 0), ("there", 3 * 10**9))
    write_steps(tmp_path / "few", stamps, (2, 1, 1), [1, 2], ranks=2, hosts=hosts)
    assert any("is not known: fewer than 3 steps" in note for note in read_timeline(tmp_path / "few", 1).notes)
    timeline = SimpleNamespace(sql=lambda _: pa.table({}), files=())
    facts = {f"p{rank}": SimpleNamespace(rank=rank, role="trainer", boot_id=name, host=name) for rank, (name, _) in enumerate(hosts)}
    rows = [{"process": process, "unix_ns": 1, "begin_ns": 1} for process in facts]
    later_ns, notes = timeline_module._clocks(timeline, facts, rows)
    assert set(later_ns) == {"p0"} and len(notes) == 1 and "the clock of there is not aligned" in notes[0]


def test_files_that_lost_a_pass_have_no_ideal(tmp_path):
    write_steps(tmp_path / "run", stamps_of(Schedule(2, 1, 2, 1)), (2, 1, 1), [1])
    whole = read_timeline(tmp_path / "run", 1)
    devices = tuple(replace(one, phases=tuple(row for row in one.phases if row.of != "forward")) for one in whole.devices)
    assert not [event for event in trace_events(replace(whole, devices=devices)) if event["pid"] in (1_000_000, 1_000_001)]
    assert list(trace_events(replace(whole, devices=(), hosts=()))) == []
