"""The metric itself: programs with answers that can be worked out by hand."""

import pytest

from megascale_jax.aot.overlap import hidden_fraction, loop_bodies, part_of, scope_of, steady_tick, walk
from tests.aot.programs import SYNC, done, gather, gemm, model_of, program

MS = 1e-3


def walked(*lines, streams=None, strict=True, extra=""):
    timeline = walk(model_of(program(*lines, extra=extra)), streams or {}, strict=strict)
    return timeline, {record.name: record for record in timeline.collectives}


def test_collective_under_a_kernel_of_its_length_is_hidden():
    timeline, records = walked(gather("g"), gemm("k"), done("g"))
    assert records["g"].cost.seconds == pytest.approx(MS, rel=1e-3)
    assert records["g"].exposed_s == pytest.approx(0, abs=1e-8)
    assert records["g"].gemms_beside == 1
    assert timeline.seconds == pytest.approx(MS, rel=1e-3)
    assert timeline.flops == 1e9


def test_collective_without_a_kernel_between_start_and_done_is_exposed():
    timeline, records = walked(gemm("before"), gather("g"), done("g"), gemm("after"))
    assert records["g"].exposed_s == pytest.approx(MS, rel=1e-3)
    assert records["g"].gemms_beside == 0
    assert timeline.seconds == pytest.approx(3 * MS, rel=1e-3)
    assert hidden_fraction(timeline.collectives) == pytest.approx(0, abs=1e-3)


def test_collective_under_two_kernels_needs_one_of_them():
    timeline, records = walked(gather("g"), gemm("k1"), gemm("k2"), done("g"))
    assert records["g"].gemms_beside == 2
    assert timeline.seconds == pytest.approx(2 * MS, rel=1e-3)


def test_one_second_of_compute_hides_one_second_on_one_link_once():
    """Two gathers on one stream under one GEMM: the second waits for the first, and is exposed."""
    timeline, records = walked(gather("g1"), gather("g2"), gemm("k"), done("g1"), done("g2"))
    assert records["g1"].exposed_s == pytest.approx(0, abs=1e-8)
    assert records["g2"].exposed_s == pytest.approx(MS, rel=1e-3)
    assert hidden_fraction(timeline.collectives) == pytest.approx(0.5, abs=1e-3)


def test_streams_on_one_link_share_it_and_on_two_links_do_not():
    lines = (gather("g1"), gather("g2"), gemm("k"), done("g1"), done("g2"))
    shared, _ = walked(*lines, streams={"g1": 0, "g2": 1})
    assert shared.waits_s == pytest.approx(MS, rel=1e-3), "2 ms of transfers on one link under 1 ms"
    other_link = (gather("g1"), gather("g2", axis="data"), gemm("k"), done("g1"), done("g2"))
    apart, _ = walked(*other_link, streams={"g1": 0, "g2": 1})
    assert apart.waits_s == pytest.approx(0, abs=1e-8)
    queued, _ = walked(*other_link, streams={"g1": 0, "g2": 0})
    assert queued.waits_s == pytest.approx(MS, rel=1e-3), "two links, but one stream"


def test_start_and_done_are_not_enough_when_the_runtime_waits():
    timeline, records = walked(gather("g", more=f", {SYNC}"), gemm("k"), done("g"))
    assert records["g"].is_sync and records["g"].gemms_beside == 0
    assert records["g"].exposed_s == pytest.approx(MS, rel=1e-3)
    assert timeline.seconds == pytest.approx(2 * MS, rel=1e-3)


def test_waiting_for_one_transfer_hides_no_other():
    timeline, _ = walked(gather("g1"), gather("g2", axis="data"), done("g1"), done("g2"), streams={"g1": 0, "g2": 1})
    assert hidden_fraction(timeline.collectives) == pytest.approx(0, abs=1e-3)
    assert timeline.waits_s == pytest.approx(MS, rel=1e-3), "both move at once: the step waits once"


def test_queue_is_charged_to_the_transfer_that_did_not_move():
    timeline, records = walked(gather("g1"), gather("g2"), gemm("k"), done("g2"), done("g1"))
    assert records["g1"].exposed_s == pytest.approx(0, abs=1e-8)
    assert records["g2"].exposed_s == pytest.approx(MS, rel=1e-3)
    assert timeline.waits_s == pytest.approx(MS, rel=1e-3)


def test_plain_collective_is_synchronous():
    line = "%r = f32[250000]{0} all-reduce(%x), channel_id=2, replica_groups=mesh['pipe'=2,'data'=2,'tensor'=2] {'pipe'}, to_apply=%add"
    timeline, records = walked(gemm("k"), line)
    assert records["r"].is_sync
    assert timeline.waits_s == pytest.approx(MS, rel=1e-3), "2 (n - 1) / n of 1 MB at 1 GB/s"


LOOP = """%cond (c: (s32[], f32[250000])) -> pred[] {
  %c = (s32[], f32[250000]{0}) parameter(0)
  ROOT %t = pred[] constant(true)
}

%inner (p: (s32[], f32[250000])) -> (s32[], f32[250000]) {
  %p = (s32[], f32[250000]{0}) parameter(0)
  %x = f32[250000]{0} get-tuple-element(%p), index=1
  %a = f32[1000,1000]{1,0} constant({...})
  %b = f32[1000,500]{1,0} constant({...})
  GATHER
  KERNEL
  DONE
  ROOT %out = (s32[], f32[250000]{0}) tuple(%x, %x)
}

%outer (p: (s32[], f32[250000])) -> (s32[], f32[250000]) {
  %p = (s32[], f32[250000]{0}) parameter(0)
  ROOT %w = (s32[], f32[250000]{0}) while(%p), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

"""


def test_nested_loops_count_each_trip():
    scoped = gemm("k") + ', metadata={op_name="jit(train)/while/body/steady/F0.in/dot_general"}'
    extra = LOOP.replace("GATHER", gather("g")).replace("KERNEL", scoped).replace("DONE", done("g"))
    loop = '%w = (s32[], f32[250000]{0}) while(%x), condition=%cond, body=%outer, backend_config={"known_trip_count":{"n":"5"}}'
    text = program(loop, extra=extra)
    timeline = walk(model_of(text), {}, strict=True)
    assert [record.count for record in timeline.collectives] == [15]
    assert timeline.flops == 15e9
    assert timeline.seconds == pytest.approx(15 * MS, rel=1e-3)
    module = model_of(text).module
    assert [(body.name, count, part_of(body)) for body, count in loop_bodies(module, module.entry)] == [
        ("outer", 5, ""),
        ("inner", 15, "steady"),
    ]


def test_memory_bound_kernels_hide_only_on_the_clock_of_all_kernels():
    copy = "%c = f32[250000]{0} copy(%x)"
    lines = (gather("g"), *[copy.replace("%c ", f"%c{n} ") for n in range(3)], done("g"))
    strict, _ = walked(*lines)
    assert strict.waits_s == pytest.approx(MS, rel=1e-3)
    everything, _ = walked(*lines, strict=False)
    assert 0 < strict.waits_s - everything.waits_s < 1e-6


def test_scope_is_the_innermost_named_operation():
    text = program(gemm("k") + ', metadata={op_name="jit(train)/shard_map/while/body/warmup/F1.store/F1.middle/dot"}')
    module = model_of(text).module
    assert scope_of(module.entry.by_name["k"]) == "warmup/F1.middle"


def test_lanes_of_a_tick_show_when_each_transfer_moves():
    loop = '%w = (s32[], f32[250000]{0}) while(%x), condition=%cond, body=%outer, backend_config={"known_trip_count":{"n":"5"}}'
    scope = ', metadata={op_name="jit(train)/while/body/steady/F0.in/dot_general"}'
    extra = LOOP.replace("GATHER", gather("g")).replace("KERNEL", gemm("k") + scope).replace("DONE", done("g"))
    spans = steady_tick(model_of(program(loop, extra=extra)), {})
    found = {span.lane: (span.kind, span.start_s, span.seconds) for span in spans}
    assert found["compute"] == ("gemm", 0.0, pytest.approx(MS, rel=1e-3))
    assert found["tensor"] == ("transfer", 0.0, pytest.approx(MS, rel=1e-3))


def test_only_operations_and_closes_name_a_scope():
    for name, scope in (
        ("jit(f)/while/body/steady/W0.wout1/bsd,bsg->dg/dot_general", "steady/W0.wout1"),
        ("jit(f)/while/body/steady/Z1.gather_inb2/all_gather", "steady/Z1.gather_inb2"),
        ("jit(f)/while/body/steady/close/broadcast.370", "steady/close"),
        ("jit(f)/broadcast.370/add.b", ""),
        ("jit(f)/while/body/(warmup/Z0.gather_ina1/all_gather:fill/all_gather)", "warmup/Z0.gather_ina1"),
    ):
        line = f'%k = f32[4]{{0}} copy(%x), metadata={{op_name="{name}"}}'
        assert scope_of(model_of(program(line)).module.entry.instructions[-1]) == scope
