"""What a tick has to do, as data: its operations, and what each reads and writes. No JAX.

An *operation* is a heavy kernel (``compute``), a ``collective`` over one mesh axis, or ``glue``: element-wise work and
attention, which runs between phases, when something needs its result (or as soon as it can, where it writes nothing).
A chunk is a chain of *branches* (one per parallel block, two per serial block), each ``x + f(norm(x))`` with one gather,
one scatter, an input and an output GEMM. Names are ``<slot><branch>.<verb>`` for operations and ``<slot><branch>.<value>``
for values, with these slots:

    F   forward pass of this tick's unit               E   embedding of the micro-batch that enters next
    R   the same again, under full recomputation       H   head and loss
    B   backward pass of this tick's unit              D   gradient of the embedding
    L   what the last tick's backward pass left        P   permutes to the neighbours, and the next tick's input

A tick starts with its input, as it is and normed and gathered (``F0.x``, ``F0.N``), with the last tick's output
(``last.y``) and what its backward pass left (``late.*``): branch 0's gradient before its reduce-scatter, and the
operands of its weight gradients, so that there is work to hide the first messages under. It ends with the same for the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megascale_jax import axes
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import ModelConfig, ParallelConfig
from megascale_jax.model.parameters import fused_groups, parameter_specs
from megascale_jax.parallel.pipeline.schedule import TickKind

OperationKind = Literal["compute", "collective", "glue"]


@dataclass(frozen=True)
class Operation:
    """One step of a tick; ``axes`` are the mesh axes of a collective."""

    name: str
    kind: OperationKind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    axes: tuple[str, ...] = ()

    @property
    def slot(self) -> str:
        """Letter of the slot."""
        return self.name[0]

    @property
    def branch(self) -> int | None:
        """Number of the branch; ``None`` where there is none."""
        number = self.name[1:].split(".")[0]
        return int(number) if number else None

    @property
    def verb(self) -> str:
        """What it does."""
        return self.name.split(".")[1]


LATE = ("g", "x", "dN", "G", "z", "N", "dy")
"""What a backward pass leaves to the next tick, as ``late.<value>``."""


@dataclass(frozen=True)
class TickShape:
    """What decides the operations of a tick, besides its kind.

    ``branches`` of a chunk; ``recompute``: the backward slot runs the chunk's forward pass again; ``backward_delay`` as
    in the schedule: the head takes the last tick's output (1) or this tick's (0). ``halved``: the late weight gradients are
    cut in two, each half still long enough to cover a message, so that there are four kernels to hide first messages under.
    """

    branches: int
    recompute: bool
    backward_delay: Literal[0, 1]
    halved: bool = False


def tick_operations(kind: TickKind, shape: TickShape) -> tuple[Operation, ...]:
    """All operations of one tick."""
    result: list[Operation] = []
    if kind.forward:
        result += _forward("F", shape.branches, gather_first=False, finish_last=True)
        result += _stores(shape)
        result += _next_input(f"F{shape.branches}.x", embed=kind.embed)
    if kind.head:
        source = "last.y" if shape.backward_delay else f"F{shape.branches}.x"
        result += [*_head(source), *(_HEAD_BACKWARD if kind.backward else ())]
    if kind.backward:
        result += late_operations(embed_backward=kind.embed_backward, halved=shape.halved)
        result.append(_collective("P.send_g", axes.PIPE, "L0.g", "P.g"))
        result.append(_glue("P.gradient", ["P.g", *(["H.g"] if kind.head else [])], f"B{shape.branches}.g"))
        if shape.recompute:
            result.append(_glue("R0.load", [f"B{shape.branches}.g"], "R0.x"))
            result += _forward("R", shape.branches, gather_first=True, finish_last=False)
        result += _backward(shape.branches, "R" if shape.recompute else "B")
    return tuple(result)


def fill_operations() -> tuple[Operation, ...]:
    """Before the first tick: the first micro-batch's embedding becomes the first input."""
    return (*_EMBED, *_next_input(None, embed=True))


def late_operations(*, embed_backward: bool, halved: bool = False) -> tuple[Operation, ...]:
    """What the last tick left; alone, after the last tick."""
    gradients = _weight_gradients("L0", "late.G", "late.z", "late.N", "late.dy", ("1", "2") if halved else ("",))
    return (*_LATE, *gradients, *(_EMBED_BACKWARD if embed_backward else ()))


COVERING_FLOPS = 5e10
"""FLOPs of a GEMM that covers a message of a large model, some 0.1 ms on an H100."""


def tick_shape(model: ModelConfig, parallel: ParallelConfig, layout: Layout) -> TickShape:
    """The shape of a run's ticks."""
    tokens = parallel.micro_batch_size * model.sequence_length
    half = tokens * model.hidden_size * _own_width(model, layout)
    return TickShape(
        layout.layers_per_chunk * model.branches_per_layer, parallel.remat == "full", parallel.backward_delay, half >= COVERING_FLOPS
    )


HEAD_GEMMS = ("H.project", "H.dx", "H.dw")
LIGHT = 0.25
"""A GEMM of less than this share of a branch's input GEMM does not cover a message."""


def light_operations(model: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """The head's GEMMs, where a rank's part of the vocabulary is small beside its part of a branch's input projection."""
    own_vocab = layout.padded_vocab // (layout.mesh.pipe * layout.mesh.tensor)
    return HEAD_GEMMS if own_vocab < LIGHT * _own_width(model, layout) else ()


def _own_width(model: ModelConfig, layout: Layout) -> int:
    """One rank's columns of the first branch's input projection."""
    specs = parameter_specs(model)
    group = next(group for group in fused_groups(model) if group.name in ("w_in", "w_qkv"))
    return sum(specs[name].columns() for name in group.members) // layout.mesh.tensor


def _compute(name: str, reads: Iterable[str], *writes: str) -> Operation:
    return Operation(name, "compute", tuple(reads), writes)


def _collective(name: str, axis: str, reads: str, writes: str) -> Operation:
    return Operation(name, "collective", (reads,), (writes,), (axis,))


def _glue(name: str, reads: Iterable[str], *writes: str) -> Operation:
    return Operation(name, "glue", tuple(reads), writes)


def _forward(slot: str, branches: int, *, gather_first: bool, finish_last: bool) -> list[Operation]:
    """A chunk's forward pass from ``<slot>0.x`` to ``<slot><branches>.x``."""
    result: list[Operation] = []
    for k in range(branches):
        at = f"{slot}{k}"
        if k or gather_first:
            result += [_glue(f"{at}.norm", [f"{at}.x"], f"{at}.n"), _collective(f"{at}.gather", axes.TENSOR, f"{at}.n", f"{at}.N")]
        result += [
            _compute(f"{at}.in", [f"{at}.N"], f"{at}.y"),
            _glue(f"{at}.middle", [f"{at}.y"], f"{at}.z", f"{at}.saved"),
        ]
        if k + 1 < branches or finish_last:
            result += [
                _compute(f"{at}.out", [f"{at}.z"], f"{at}.o"),
                _collective(f"{at}.scatter", axes.TENSOR, f"{at}.o", f"{at}.os"),
                _glue(f"{at}.finish", [f"{at}.x", f"{at}.os"], f"{slot}{k + 1}.x"),
            ]
    return result


def _stores(shape: TickShape) -> list[Operation]:
    if shape.recompute:
        return [_glue("F0.store", ["F0.x"])]
    return [_glue(f"F{k}.store", [f"F{k}.x", f"F{k}.y", f"F{k}.saved"]) for k in range(shape.branches)]


def _next_input(output: str | None, *, embed: bool) -> list[Operation]:
    """From this tick's output and the embedding that waits to the next tick's input."""
    sources = ["E.x" if embed else "wait.x"]
    result = [*_EMBED] if embed and output else []
    if output:
        result.append(_collective("P.send_y", axes.PIPE, output, "P.y"))
        sources.append("P.y")
    return [
        *result,
        _glue("P.input", sources, "next.x"),
        _glue("P.norm", ["next.x"], "next.n"),
        _collective("P.gather", axes.TENSOR, "next.n", "next.N"),
    ]


def _backward(branches: int, source: str) -> list[Operation]:
    """A chunk's backward pass from ``B<branches>.g`` (gradient of its output); branch 0's end is left to the next tick.

    ``source`` is where a branch's x, N, y and saved come from: ``B`` (read from the stash) or ``R`` (recomputed).
    """
    result: list[Operation] = []
    for k in reversed(range(branches)):
        at = f"B{k}"
        if source == "B":
            result += [
                _glue(f"{at}.load", [f"B{k + 1}.g"], f"{at}.x", f"{at}.y", f"{at}.saved"),
                _glue(f"{at}.norm", [f"{at}.x"], f"{at}.n"),
                _collective(f"{at}.regather", axes.TENSOR, f"{at}.n", f"{at}.N"),
            ]
        x, N, y, saved = (f"{source}{k}.{name}" for name in ("x", "N", "y", "saved"))
        result += [
            _glue(f"{at}.split", [f"B{k + 1}.g"], f"{at}.do"),
            _collective(f"{at}.gather", axes.TENSOR, f"{at}.do", f"{at}.G"),
            _compute(f"{at}.dout", [f"{at}.G"], f"{at}.dz"),
            _glue(f"{at}.dmiddle", [f"{at}.dz", y, saved], f"{at}.dy", f"{at}.z"),
            _compute(f"{at}.din", [f"{at}.dy"], f"{at}.dN"),
        ]
        if k:
            result += [
                *_weight_gradients(at, f"{at}.G", f"{at}.z", N, f"{at}.dy"),
                _collective(f"{at}.scatter", axes.TENSOR, f"{at}.dN", f"{at}.dn"),
                _glue(f"{at}.finish", [f"B{k + 1}.g", x, f"{at}.dn"], f"{at}.g"),
            ]
        else:
            left = ["B1.g", x, "B0.dN", "B0.G", "B0.z", N, "B0.dy"]
            result.append(_glue("B0.leave", left, *(f"left.{name}" for name in LATE)))
    return result


def _weight_gradients(at: str, G: str, z: str, N: str, dy: str, parts: tuple[str, ...] = ("",)) -> list[Operation]:
    """Both weight gradients of a branch and their sums; a part is a digit behind the verb, for half of the rows."""
    result: list[Operation] = []
    for name, reads in (("out", [G, z]), ("in", [N, dy])):
        for part in parts:
            result.append(_compute(f"{at}.w{name}{part}", reads, f"{at}.dw{name}{part}"))
            result.append(_glue(f"{at}.add{name}{part}", [f"{at}.dw{name}{part}"]))
    return result


def _head(source: str) -> list[Operation]:
    return [
        _glue("H.split", [source], "H.own"),
        _collective("H.spread", axes.PIPE, "H.own", "H.x"),
        _glue("H.norm", ["H.x"], "H.n"),
        _collective("H.gather", axes.TENSOR, "H.n", "H.N"),
        _compute("H.project", ["H.N"], "H.logits"),
        _glue("H.measure", ["H.logits"], "H.statistics"),
        # over tensor too, but three numbers a token: its share of that link is not worth a phase
        _collective("H.join", axes.PIPE, "H.statistics", "H.joined"),
        _glue("H.loss", ["H.joined"]),
    ]


_HEAD_BACKWARD = (
    _glue("H.differentiate", ["H.logits", "H.joined"], "H.dlogits"),
    _compute("H.dx", ["H.dlogits"], "H.dN"),
    _compute("H.dw", ["H.dlogits", "H.N"], "H.dtable"),
    _glue("H.addw", ["H.dtable"]),
    _collective("H.scatter", axes.TENSOR, "H.dN", "H.dpart"),
    _collective("H.sum", axes.PIPE, "H.dpart", "H.dn"),
    _glue("H.finish", ["H.x", "H.dn"], "H.g"),
)
_LATE = (
    _collective("L0.scatter", axes.TENSOR, "late.dN", "L0.dn"),
    _glue("L0.finish", ["late.g", "late.x", "L0.dn"], "L0.g"),
)
_EMBED = (
    _glue("E.lookup", [], "E.rows"),
    _collective("E.scatter", axes.TENSOR, "E.rows", "E.part"),
    _collective("E.sum", axes.PIPE, "E.part", "E.whole"),
    _glue("E.finish", ["E.whole"], "E.x"),
)
_EMBED_BACKWARD = (
    _glue("D.split", ["L0.g"], "D.own"),
    _collective("D.spread", axes.PIPE, "D.own", "D.part"),
    _collective("D.gather", axes.TENSOR, "D.part", "D.rows"),
    _glue("D.add", ["D.rows"]),
)
