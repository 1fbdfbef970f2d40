"""Profiles of jax.profiler: made ones with known times, a real one against jax's own reader, damaged ones refused."""

import json
from contextlib import suppress

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import TraceError, UsageError
from megascale_jax.views.profile_times import covered_ps, measure
from megascale_jax.views.xplane import COLLECTIVE, COMPUTE, COPY, KINDS, _message, find_profiles, kind_of, parse_xplane, read_xplane

MS = 10**9


def space(*planes):
    """Planes of ``(name, [(line, timestamp_ns, [(event, offset_ms, duration_ms, stats)])])``."""
    made = _message("XSpace")()
    for number, (name, lines) in enumerate(planes):
        plane = made.planes.add(name=name, id=number)
        events, stats = {}, {}
        for line_name, timestamp, rows in lines:
            line = plane.lines.add(name=line_name, timestamp_ns=timestamp)
            for event, offset, duration, values in rows:
                code = events.setdefault(event, len(events) + 1)
                item = line.events.add(metadata_id=code, offset_ps=round(offset * MS), duration_ps=round(duration * MS))
                for key, value in values.items():
                    stat = item.stats.add(metadata_id=stats.setdefault(key, len(stats) + 1))
                    setattr(stat, "int64_value" if isinstance(value, int) else "str_value", value)
        for key, code in events.items():
            plane.event_metadata.add(key=code).value.name = key
        for key, code in stats.items():
            plane.stat_metadata.add(key=code).value.name = key
    return made.SerializeToString()


BASE = 1_700_000_000 * 10**9
GPU = (
    "/device:GPU:0",
    [
        ("Stream #1(Compute)", BASE, [("gemm", 0, 4, {}), ("gemm", 6, 2, {}), ("gemm", 20, 1, {})]),
        ("Stream #2(NCCL)", BASE, [("ncclDevKernel_AllGather_RING_LL", 3, 5, {})]),
        ("Stream #3(MemcpyD2H)", BASE, [("MemcpyD2H", 7, 3, {})]),
        ("XLA Ops", BASE, [("gemm", 0, 4, {}), ("everything again", 0, 21, {})]),
    ],
)
HOST = ("/host:CPU", [("python", BASE, [("train", 0, 1, {"step_num": 7}), ("train", 19, 1, {"step_num": 8})])])


def test_each_moment_of_a_device_is_counted_once():
    found = measure([("rank-00000", parse_xplane(space(GPU, HOST), "x"))])
    (one,) = found.devices
    assert (one.device, one.operations) == ("GPU:0", 5)
    assert [round(1e3 * s, 9) for s in (one.window_s, one.compute_s, one.collective_s, one.exposed_s, one.copy_s, one.idle_s)] == [
        *(21, 7, 5, 2, 2, 10),
    ]
    assert found.exposed_share == pytest.approx(0.4) and (found.steps, found.step_s) == ((7, 8), pytest.approx(0.019))
    assert [(op.name, op.kind, op.count) for op in found.operations] == [
        ("gemm", "compute", 3),
        ("ncclDevKernel_AllGather_RING_LL", "collective", 1),
        ("MemcpyD2H", "copy", 1),
    ]
    assert sum(op.share for op in found.operations) == pytest.approx(1)


def test_steps_choose_a_time():
    profile = parse_xplane(space(GPU, HOST), "x")
    (first,) = measure([("a", profile)], (7, 8)).devices
    assert first.window_s == pytest.approx(0.010) and first.operations == 4
    (second,) = measure([("a", profile)], (8, None)).devices
    assert second.compute_s == pytest.approx(0.001)
    with pytest.raises(UsageError, match="it has the steps 7 to 8"):
        measure([("a", profile)], (9, 12))
    with pytest.raises(UsageError, match="it names no steps"):
        measure([("a", parse_xplane(space(GPU), "x"))], (9, 12))


def test_an_operation_of_a_cpu_lasts_until_it_ends_elsewhere():
    rows = [
        ("while.1", 0, 9, {"hlo_op": "while.1", "device_ordinal": 1, "_p": 1}),
        ("psum.6", 1, 0.5, {"hlo_op": "psum.6", "device_ordinal": 1, "_p": 2}),
        ("psum.6", 5, 0.5, {"hlo_op": "psum.6", "device_ordinal": 0, "_p": 3}),
        ("Handle inputs", 5, 1, {}),
    ]
    ends = [("end: psum.6", 3, 0, {"_c": 2}), ("end: while.1", 9, 0, {"_c": 1})]
    profile = parse_xplane(space(("/host:CPU", [("a", BASE, rows), ("b", BASE, ends)])), "x")
    times = {profile.devices[d]: t / MS for d, t in zip(profile.device, profile.duration_ps, strict=True)}
    assert times == {"CPU:1": 2, "CPU:0": 0.5}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("all-reduce-start.3", COLLECTIVE), ("reduce_scatter.1", COLLECTIVE), ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", COLLECTIVE)),
        *(("ppermute.4", COLLECTIVE), ("collective-permute.2", COLLECTIVE), ("psum.6", COLLECTIVE), ("recv.1", COLLECTIVE)),
        *(("copy.9", COPY), ("MemcpyD2D", COPY), ("copy_fusion", COMPUTE), ("loop_reduce_fusion", COMPUTE), ("broadcast.1", COMPUTE)),
    ],
)
def test_kinds_go_by_names(name, kind):
    assert kind_of(name) == kind


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_covered_time_is_that_of_the_set(intervals):
    begin = np.array([b for b, _ in intervals], np.int64)
    end = begin + np.array([d for _, d in intervals], np.int64)
    assert covered_ps(begin, end) == len({moment for b, d in intervals for moment in range(b, b + d)})


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two steps of two CPU devices with a collective, as jax.profiler's own functions write them."""
    folder = tmp_path_factory.mktemp("profile")
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("d")
    work = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x @ x.T, "d"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()))
    x = jax.device_put(np.ones((128, 64), np.float32), jax.sharding.NamedSharding(mesh, spec))
    work(x).block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for step in (3, 4):
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                work(x).block_until_ready()
    return folder


@pytest.mark.filterwarnings("ignore:builtin type")
def test_a_real_profile_is_read_as_jax_reads_it(real, tmp_path):
    (path,) = find_profiles(real)
    ours = read_xplane(path)
    theirs = sorted(
        (event.name, dict(event.stats)["device_ordinal"])
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if "hlo_op" in dict(event.stats)
    )
    assert theirs == sorted((ours.names[n], int(ours.devices[d].partition(":")[2])) for n, d in zip(ours.name, ours.device, strict=True))
    assert ours.steps.tolist() == [3, 4] and {KINDS[kind] for kind in ours.kind} >= {"compute", "collective"}
    output = tmp_path / "times.json"
    result = CliRunner().invoke(app, ["analyze", str(real), "--json", str(output), "--top", "3"])
    assert result.exit_code == 0, result.output
    told = json.loads(output.read_text())
    assert {one["device"] for one in told["devices"]} == {"CPU:0", "CPU:1"} and "of communication" in result.output
    for one in told["devices"]:
        assert one["window_s"] == pytest.approx(one["compute_s"] + one["exposed_s"] + one["copy_s"] + one["idle_s"])
        assert 0 < one["collective_s"] <= one["window_s"]


def test_what_is_no_profile_is_refused(real, tmp_path):
    (path,) = find_profiles(real)
    content = path.read_bytes()
    for wrong, text in ((content[: len(content) // 2], "damaged"), (b"", "no planes"), (b"\x0a\xff\xff\xff\x7f", "damaged")):
        (tmp_path / "a.xplane.pb").write_bytes(wrong)
        result = CliRunner().invoke(app, ["analyze", str(tmp_path / "a.xplane.pb")])
        assert isinstance(result.exception, TraceError) and text in str(result.exception)
    with pytest.raises(TraceError, match="no operation of a device"):
        parse_xplane(space(HOST), "x")
    with pytest.raises(TraceError, match="damaged"):
        parse_xplane(space(("/device:GPU:0", [("Stream", BASE, [("a", 0, -1, {})])])), "x")
    with pytest.raises(TraceError, match="cannot be read"):
        read_xplane(tmp_path / "nothing.xplane.pb")
    with pytest.raises(UsageError, match="a profile has a table"):
        CliRunner().invoke(app, ["analyze", str(path), "--heat-map", str(tmp_path / "a.png")], catch_exceptions=False)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damage_never_crashes(data):
    content = bytearray(space(GPU, HOST))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(TraceError):
        measure([("x", parse_xplane(bytes(content[: data.draw(st.integers(0, len(content)))]), "x"))])
