"""The one cost model: seconds of a kernel or a collective of a compiled program, from its shapes and a system's rates. No JAX.

A GEMM or an attention call takes the longer of its FLOPs over the achieved rate and its bytes over the memory's; any other
kernel its bytes. Bytes are operands and results; an operand that a fusion only slices counts the slice, one that it updates
in place the update, twice. Attention counts the keys a query sees (causal, inside the window), its backward pass five
products for two; a kernel of this package counts the FLOPs that it declares, what it recomputes included, at attention's
rate if it is one, else at that of products. A collective takes the bytes that cross the link over its rate, plus a
latency: ``(n - 1)`` shards for a gather, ``(n - 1) / n`` of the input for a reduce-scatter, twice that for an all-
reduce, the payload for a permute. The ``tensor`` axis stays on the fast link, and so does any other whose groups lie
within a node. A stamp of the clock takes `STAMP_S`.

A conditional costs its dearest branch as often as it is taken: a slot of the pipeline turns to another chunk
(`parallel/pipeline/operations.py`) once in ``pipe`` ticks, any other one counts every time.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megascale_jax import axes
from megascale_jax.aot.hlo import Computation, Instruction, Module, branches_of
from megascale_jax.config.schema import RatesConfig
from megascale_jax.sim.collectives import gathered_bytes

Kind = Literal["gemm", "attention", "memory", "free"]
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier"}
TURN = "P.turn_"
"""In the name of what a slot of the pipeline does where it turns to another chunk."""
STAMP_S = 2e-6
"""A stamp of the devices' clock: a kernel's start and end on the stream, as it does nothing in between. Not measured on GPUs."""
_STAMP = "/clock/"
_ATTENTION = "attention."
"""In the name of an attention kernel of `megascale_jax.kernels`."""
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all", "collective-broadcast")


@dataclass(frozen=True)
class Kernel:
    """Cost of one instruction on the compute stream."""

    kind: Kind
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Collective:
    """Cost of one collective; ``axis`` is its mesh axis, several joined by ``+``; ``near``: on the fast link of a node."""

    opcode: str
    axis: str
    group: int
    bytes: float
    seconds: float
    near: bool


class CostModel:
    """Costs of the instructions of one module on a mesh; ``mesh`` are its axis sizes, outermost first, ``node`` devices share
    the fast link."""

    def __init__(self, module: Module, rates: RatesConfig, mesh: Mapping[str, int], node: int = 1):
        self.module, self.rates, self.mesh, self.node = module, rates, dict(mesh), node

    def kernel(self, instruction: Instruction, computation: Computation) -> Kernel:
        """Cost of an instruction that is neither a collective nor a loop."""
        is_collective = instruction.opcode.removesuffix("-start") in COLLECTIVES
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done") or is_collective:
            return Kernel("free", 0, 0, 0)
        if instruction.opcode == "conditional":
            return self._conditional(instruction)
        if _STAMP in (instruction.text("op_name") or ""):
            return Kernel("memory", 0, instruction.bytes, STAMP_S)
        target = instruction.text("custom_call_target") or ""
        size = self._bytes(instruction, computation)
        memory_s = size / (self.rates.memory_gbps * 1e9)
        if "fmha" in target:
            flops = _attention_flops(instruction)
            return Kernel("attention", flops, size, max(flops / (self.rates.attention_tflops * 1e12), memory_s))
        flops = _declared_flops(instruction)
        if flops and _ATTENTION in (instruction.text("op_name") or ""):
            return Kernel("attention", flops, size, max(flops / (self.rates.attention_tflops * 1e12), memory_s))
        flops = flops or self._dot_flops(instruction, computation)
        if flops:
            return Kernel("gemm", flops, size, max(flops / (self.rates.gemm_tflops * 1e12), memory_s))
        return Kernel("memory", 0, size, memory_s)

    def _conditional(self, instruction: Instruction) -> Kernel:
        share = 1 / self.mesh[axes.PIPE] if TURN in (instruction.text("op_name") or "") else 1.0
        branches = [self.module.computations[name] for name in branches_of(instruction)]
        costs = [[self.kernel(part, branch) for part in branch.instructions] for branch in branches]
        dearest = max(costs, key=lambda kernels: sum(kernel.seconds for kernel in kernels))
        seconds, flops, size = (sum(getattr(kernel, name) for kernel in dearest) for name in ("seconds", "flops", "bytes"))
        return Kernel("gemm" if flops else "memory", flops * share, size * share, seconds * share)

    def collective(self, instruction: Instruction, computation: Computation) -> Collective:
        """Cost of a collective, given its start (or itself where it is synchronous)."""
        opcode = instruction.opcode.removesuffix("-start")
        operand_bytes = sum(computation.by_name[name].bytes for name in instruction.operands if name in computation.by_name)
        names, n = self._group(instruction)
        moved = {
            "all-gather": gathered_bytes(n, n * operand_bytes),
            "reduce-scatter": gathered_bytes(n, operand_bytes),
            "all-reduce": 2 * gathered_bytes(n, operand_bytes),
            "all-to-all": gathered_bytes(n, operand_bytes),
        }.get(opcode, operand_bytes)
        near = names == (axes.TENSOR,) or self._span(names) <= self.node
        rate, latency_us = (
            (self.rates.tensor_gbps, self.rates.tensor_latency_us) if near else (self.rates.network_gbps, self.rates.network_latency_us)
        )
        return Collective(opcode, "+".join(names), n, moved, moved / (rate * 1e9) + latency_us * 1e-6, near)

    def _group(self, instruction: Instruction) -> tuple[tuple[str, ...], int]:
        """Mesh axes and size of a collective's groups."""
        named = re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", instruction.attributes)
        if named:
            names = tuple(re.findall(r"'(\w+)'", named.group(1)))
            return names, _product(self.mesh[name] for name in names)
        ranks = _first_group(instruction.attributes)
        places = [self._coordinates(rank) for rank in ranks]
        names = tuple(name for index, name in enumerate(self.mesh) if len({place[index] for place in places}) > 1)
        if not names:
            return ("none",), 1
        return names, 2 if instruction.opcode.startswith("collective-permute") else len(ranks)

    def _span(self, names: Sequence[str]) -> int:
        """Devices from the first of a group to the last, ranks being numbered with the last axis fastest."""
        order = list(self.mesh)
        outermost = min((order.index(name) for name in names if name in order), default=len(order))
        return _product(list(self.mesh.values())[outermost:])

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        place = []
        for size in reversed(self.mesh.values()):
            rank, index = divmod(rank, size)
            place.append(index)
        return tuple(reversed(place))

    def _dot_flops(self, instruction: Instruction, computation: Computation) -> float:
        if instruction.opcode == "dot" or "__cublas" in (instruction.text("custom_call_target") or ""):
            return _dot_flops(instruction, computation)
        called = instruction.reference("calls") or instruction.reference("to_apply")
        if instruction.opcode not in ("fusion", "call") or called not in self.module.computations:
            return 0.0
        inner = self.module.computations[called]
        return sum(self._dot_flops(part, inner) for part in inner.instructions)

    def _bytes(self, instruction: Instruction, computation: Computation) -> float:
        operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
        called = instruction.reference("calls")
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1].bytes
        if instruction.opcode in ("dynamic-slice", "slice"):
            return 2 * instruction.bytes
        if instruction.opcode != "fusion" or called not in self.module.computations:
            return instruction.bytes + sum(operand.bytes for operand in operands)
        return _fusion_bytes(self.module.computations[called], instruction)


def _fusion_bytes(fused: Computation, instruction: Instruction) -> float:
    parameters = [part for part in fused.instructions if part.opcode == "parameter"]
    users: dict[str, list[Instruction]] = {part.name: [] for part in fused.instructions}
    for part in fused.instructions:
        for operand in set(part.operands):
            users[operand].append(part)
    total = sum(_read_bytes(parameter, users) for parameter in parameters)
    root = next(part for part in fused.instructions if part.is_root)
    results = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for result in results:
        update = _update_of(result, fused)
        total += update.bytes if update else result.bytes
    return total


def _read_bytes(parameter: Instruction, users: Mapping[str, Sequence[Instruction]]) -> float:
    """What a fusion reads of a parameter: a slice of it, or nothing where it is only updated in place."""
    read = 0.0
    for user in users[parameter.name]:
        if user.opcode in ("dynamic-slice", "slice"):
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue
        elif user.opcode == "bitcast":
            read += _read_bytes(user, users)
        else:
            return parameter.bytes
    return min(read, parameter.bytes)


def _update_of(result: Instruction, fused: Computation) -> Instruction | None:
    """The update, where a result is an array updated in place."""
    while result.opcode == "bitcast" and result.operands[0] in fused.by_name:
        result = fused.by_name[result.operands[0]]
    return fused.by_name[result.operands[1]] if result.opcode == "dynamic-update-slice" else None


def _dot_flops(dot: Instruction, computation: Computation) -> float:
    left = computation.by_name[dot.operands[0]].arrays[0]
    contracted = dot.numbers("lhs_contracting_dims")
    if not contracted:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', dot.attributes)
        contracted = tuple(int(n) for n in re.findall(r"\d+", found.group(1))) if found else ()
    return 2.0 * dot.arrays[0].elements * _product(left.dims[dim] for dim in contracted)


def _attention_flops(call: Instruction) -> float:
    """FLOPs over the visible keys of a cuDNN call: two products forward, five backward."""
    config = json.loads(re.search(r"backend_config=(\{.*\})", call.attributes).group(1))["cudnn_fmha_backend_config"]  # type: ignore[union-attr]
    batch, heads, queries, _ = (int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    window = int(config.get("sliding_window_length") or 0) or queries
    width = call.arrays[0].dims[-1]
    seen = sum(min(row + 1, window) for row in range(queries)) if "CAUSAL" in config["mask_type"] else queries * queries
    products = 5 if "Backward" in (call.text("custom_call_target") or "") else 2
    return 2.0 * products * batch * heads * seen * width


def _declared_flops(call: Instruction) -> float:
    """FLOPs in the cost estimate that a custom call carries; 0 where it carries none."""
    found = re.search(r'cost_estimate_json\s*=\s*"\{[^}]*?flops\\22:\s*(\d+)', call.attributes)
    return float(found.group(1)) if found else 0.0


def _first_group(attributes: str) -> tuple[int, ...]:
    """Ranks of the first group, or of the first pair that differs, of a collective that names them one by one."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if pairs:
        found = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)", pairs.group(0))]
        return next((pair for pair in found if pair[0] != pair[1]), (0,))
    listed = re.search(r"replica_groups=\{\{([0-9,]*)\}", attributes)
    if listed:
        return tuple(int(n) for n in listed.group(1).split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", attributes)
    if iota:
        size, dims = int(iota.group(2)), [int(n) for n in iota.group(3).split(",")]
        order = [int(n) for n in iota.group(4).split(",")] if iota.group(4) else list(range(len(dims)))
        return tuple(_iota_rank(position, dims, order) for position in range(size))
    raise ValueError(f"no replica groups in {attributes[:200]!r}")


def _iota_rank(position: int, dims: Sequence[int], order: Sequence[int]) -> int:
    """Element ``position`` of ``iota(dims)`` transposed by ``order`` and flattened."""
    index = [0] * len(dims)
    for axis in reversed(order):
        position, index[axis] = divmod(position, dims[axis])
    rank = 0
    for size, place in zip(dims, index, strict=True):
        rank = rank * size + place
    return rank


def _product(values) -> int:
    result = 1
    for value in values:
        result *= value
    return result
