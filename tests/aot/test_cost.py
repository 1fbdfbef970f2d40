"""Costs of single instructions, and the reader of a module's text."""

import json

import pytest

from megascale_jax.aot.cost import CostModel
from megascale_jax.aot.hlo import parse_module, trip_count
from megascale_jax.config.load import load_experiment
from tests.aot.programs import HEADER, MESH, RATES, done, gather, gemm, model_of, program

FUSED = """%fused (p0: f32[6,1000], p1: s32[], p2: f32[1,1000]) -> f32[6,1000] {
  %p0 = f32[6,1000]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,1000]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %slice = f32[1,1000]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,1000}
  %sum = f32[1,1000]{1,0} add(%slice, %p2)
  ROOT %update = f32[6,1000]{1,0} dynamic-update-slice(%p0, %sum, %p1, %zero)
}

"""


def cost_of(line, extra=""):
    model = model_of(program(line, extra=extra))
    entry = model.module.entry
    return model, entry.instructions[-1], entry


def conditional(name):
    branches = """%taken (p: f32[250000]) -> f32[250000] {
  %p = f32[250000]{0} parameter(0)
  ROOT %c = f32[250000]{0} copy(%p)
}

%kept (p: f32[250000]) -> f32[250000] {
  ROOT %p = f32[250000]{0} parameter(0)
}

"""
    chosen = "true_computation=%taken, false_computation=%kept" if name else "branch_computations={%kept, %taken}"
    line = f'%k = f32[250000]{{0}} conditional(%x, %x, %x), {chosen}, metadata={{op_name="jit(train)/while/body/{name or "other"}/cond"}}'
    return cost_of(line, extra=branches)


def test_conditional_counts_its_dearest_branch_as_often_as_the_pipeline_turns():
    model, _, entry = conditional("steady/P.turn_forward")
    turned = model.kernel(entry.instructions[-1], entry)
    assert (turned.kind, turned.bytes) == ("memory", 2e6 / 2), "once in the two ticks of a window"
    model, _, entry = conditional("")
    assert model.kernel(entry.instructions[-1], entry).bytes == 2e6


def test_gemm_takes_its_flops():
    model, instruction, entry = cost_of(gemm("k"))
    kernel = model.kernel(instruction, entry)
    assert (kernel.kind, kernel.flops, kernel.seconds) == ("gemm", 1e9, pytest.approx(1e-3))


def test_gemm_inside_a_fusion_is_found():
    inside = "\n  ".join(
        [
            "%f (a: f32[1000,1000], b: f32[1000,500]) -> f32[1000,500] {",
            "%a = f32[1000,1000]{1,0} parameter(0)",
            "%b = f32[1000,500]{1,0} parameter(1)",
            f"ROOT {gemm('d')}\n}}\n\n",
        ]
    )
    model, instruction, entry = cost_of("%k = f32[1000,500]{1,0} fusion(%a, %b), kind=kCustom, calls=%f", extra=inside)
    assert model.kernel(instruction, entry).flops == 1e9


def test_cublas_call_counts_like_a_dot():
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    line = (
        f'%k = (f32[1000,500]{{1,0}}, s8[100]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={config}'
    )
    model, instruction, entry = cost_of(line)
    assert model.kernel(instruction, entry).flops == 1e9


def test_fusion_that_adds_to_a_slice_in_place_counts_the_slice_only():
    line = "%k = f32[6,1000]{1,0} fusion(%big, %i, %v), kind=kLoop, calls=%fused"
    parameters = "\n  %big = f32[6,1000]{1,0} parameter(3)\n  %i = s32[] parameter(4)\n  %v = f32[1,1000]{1,0} parameter(5)"
    model = model_of(program(line, parameters=parameters, extra=FUSED))
    kernel = model.kernel(model.module.entry.instructions[-1], model.module.entry)
    assert kernel.kind == "memory"
    assert kernel.bytes == 4000 + 4 + 4000 + 4000, "slice, index, addend, update"


def test_attention_counts_visible_keys_and_five_products_backward():
    config = {"intermediate_tensor_shape": {"dimensions": ["1", "2", "100", "100"]}, "mask_type": "CAUSAL", "sliding_window_length": 10}
    seen = sum(min(row + 1, 10) for row in range(100))
    for target, products in (("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)):
        result, options = "(bf16[1,100,2,64]{3,2,1,0}, u8[0]{0})", json.dumps({"cudnn_fmha_backend_config": config})
        line = f'%k = {result} custom-call(%x), custom_call_target="{target}", backend_config={options}'
        model, instruction, entry = cost_of(line)
        kernel = model.kernel(instruction, entry)
        assert (kernel.kind, kernel.flops) == ("attention", 2 * products * 2 * seen * 64)


@pytest.mark.parametrize(
    ("groups", "axis", "size"),
    [
        ("replica_groups=mesh['pipe'=2,'data'=2,'tensor'=2] {'pipe','tensor'}", "pipe+tensor", 4),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor", 2),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "pipe", 2),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", "data", 2),
        ("replica_groups=[1,8]<=[8]", "pipe+data+tensor", 8),
    ],
)
def test_axis_of_a_collective_is_read_from_any_form_of_its_groups(groups, axis, size):
    model, instruction, entry = cost_of(f"%g = f32[250000]{{0}} all-reduce(%x), channel_id=1, {groups}, to_apply=%add")
    cost = model.collective(instruction, entry)
    assert (cost.axis, cost.group) == (axis, size)
    assert cost.bytes == pytest.approx(2 * (size - 1) / size * 1e6)


@pytest.mark.parametrize(("node", "near"), [(1, ["tensor"]), (2, ["tensor"]), (4, ["data", "tensor"]), (8, ["pipe", "data", "tensor"])])
def test_axes_whose_groups_lie_within_a_node_are_on_the_fast_link(node, near):
    rates = RATES.model_copy(update={"network_gbps": 0.1})
    for axis in MESH:
        text = program(gather("g", axis), done("g"))
        model = CostModel(parse_module(text), rates, MESH, node)
        start = model.module.entry.by_name["g"]
        cost = model.collective(start, model.module.entry)
        assert cost.near == (axis in near)
        assert cost.seconds == pytest.approx(1e-3 if axis in near else 1e-2, rel=1e-6)


def test_permute_takes_its_payload_and_the_axis_of_its_pairs():
    pairs = "source_target_pairs={{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}"
    model, instruction, entry = cost_of(f"%g = (f32[250000]{{0}}, f32[250000]{{0}}) collective-permute-start(%x), channel_id=1, {pairs}")
    cost = model.collective(instruction, entry)
    assert (cost.opcode, cost.axis, cost.bytes) == ("collective-permute", "pipe", 1e6)


def test_module_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        parse_module(program().replace(", is_scheduled=true", ""))
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module(HEADER)


def test_loop_of_unknown_length_is_refused():
    module = parse_module(program("%w = f32[] while(%x), condition=%c, body=%d"))
    with pytest.raises(ValueError, match="no known trip count"):
        trip_count(module.entry.instructions[-1])


def test_rates_of_the_system_files():
    """The assumptions behind every published estimate: changing one is a decision, not an edit."""
    h100, a100 = (load_experiment("gpt-1b", [f"system={name}"]).system.rates for name in ("h100", "a100"))
    names = ("gemm_tflops", "attention_tflops", "memory_gbps", "tensor_gbps", "tensor_latency_us", "network_gbps", "network_latency_us")
    assert [getattr(h100, name) for name in names] == [600, 400, 2600, 370, 15, 50, 25]
    assert [getattr(a100, name) for name in names] == [230, 150, 1580, 220, 15, 21.5, 25]


@pytest.mark.parametrize(
    ("scope", "flops", "kind", "seconds"),
    [
        ("steady/F0.middle/attention.forward", 3e9, "attention", 3e9 / (RATES.attention_tflops * 1e12)),
        ("steady/B0.dmiddle/jvp(attention.backward_q)", 3e9, "attention", 3e9 / (RATES.attention_tflops * 1e12)),
        ("steady/H.project/product", 3e9, "gemm", 3e9 / (RATES.gemm_tflops * 1e12)),
        ("steady/F0.norm/norm.forward", 0, "memory", 6e6 / (RATES.memory_gbps * 1e9)),
    ],
)
def test_custom_call_counts_its_declared_flops_and_all_its_bytes(scope, flops, kind, seconds):
    estimate = rf'{{cost_estimate_json = "{{\22flops\22: {flops:.0f}, \22bytes_accessed\22: 5}}", opaque = "x\9C"}}'
    line = f'%k = f32[1000,500]{{1,0}} custom-call(%a), custom_call_target="triton_kernel_call_ffi", backend_config={estimate}'
    model, instruction, entry = cost_of(f'{line}, metadata={{op_name="jit(train)/while/body/{scope}/triton_kernel_call"}}')
    kernel = model.kernel(instruction, entry)
    assert (kernel.kind, kernel.flops, kernel.bytes) == (kind, flops, 4e6 + 2e6)
    assert kernel.seconds == pytest.approx(max(seconds, 6e6 / (RATES.memory_gbps * 1e9)))


def test_custom_call_that_declares_nothing_is_not_free():
    model, instruction, entry = cost_of('%k = f32[1000,500]{1,0} custom-call(%a, %b), custom_call_target="anything"')
    kernel = model.kernel(instruction, entry)
    assert (kernel.kind, kernel.bytes) == ("memory", 4e6 + 2e6 + 2e6)
