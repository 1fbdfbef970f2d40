"""Hand-written scheduled programs whose times are known: a GEMM of 1 ms, a gather of 1 ms on the tensor link, ..."""

from megascale_jax.aot.cost import CostModel
from megascale_jax.aot.hlo import parse_module
from megascale_jax.config.schema import RatesConfig

RATES = RatesConfig(
    gemm_tflops=1,
    attention_tflops=1,
    memory_gbps=1e6,
    tensor_gbps=1,
    tensor_latency_us=1e-6,
    network_gbps=1,
    network_latency_us=1e-6,
)
"""A FLOP takes a picosecond, a byte on a link a nanosecond, memory and latency next to nothing."""
MESH = {"pipe": 2, "data": 2, "tensor": 2}
GEMM = "f32[1000,500]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
"""2 * 1000 * 500 * 1000 FLOPs: 1 ms, with the operands of `program`."""
HEADER = "HloModule test, is_scheduled=true\n\n"
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'


def program(*lines: str, parameters: str = "", extra: str = "") -> str:
    """An entry computation of these instructions; ``a`` and ``b`` are GEMM operands, ``x`` has 1,000,000 bytes."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{HEADER}{extra}ENTRY %main (a: f32[1000,1000], b: f32[1000,500], x: f32[250000]) -> f32[] {{
  %a = f32[1000,1000]{{1,0}} parameter(0)
  %b = f32[1000,500]{{1,0}} parameter(1)
  %x = f32[250000]{{0}} parameter(2){parameters}
{body}
}}
"""


def gather(name: str, axis: str = "tensor", more: str = "") -> str:
    """Start of a gather of 1 ms: ranks of two, each with a shard of 1,000,000 bytes."""
    return (
        f"%{name} = ((f32[250000]{{0}}), f32[500000]{{0}}) all-gather-start(%x), channel_id=1, "
        f"replica_groups=mesh['pipe'=2,'data'=2,'tensor'=2] {{'{axis}'}}, dimensions={{0}}{more}"
    )


def done(name: str) -> str:
    """Its done."""
    return f"%{name}.done = f32[500000]{{0}} all-gather-done(%{name})"


def gemm(name: str) -> str:
    """A GEMM of 1 ms."""
    return f"%{name} = {GEMM}"


def model_of(text: str) -> CostModel:
    """The cost model of a program at `RATES`."""
    return CostModel(parse_module(text), RATES, MESH)
