"""What a tick has to do, as data: its operations, and what each reads and writes. No JAX.

An *operation* is a heavy kernel (``compute``), a ``collective`` over one mesh axis, a ``copy`` of weights, or ``glue``:
element-wise work and attention, which runs between phases, when something needs its result (or as soon as it can, where it writes nothing).
A chunk is a chain of *branches* (one per parallel block, two per serial block), each ``x + f(norm(x))`` with one gather,
one scatter, an input and an output GEMM. Names are ``<slot><branch>.<verb>`` for operations and ``<slot><branch>.<value>``
for values, with these slots:

    F   forward pass of this tick's unit               E   embedding of the micro-batch that enters next
    R   the same again, under full recomputation       H   head and loss
    B   backward pass of this tick's unit              D   gradient of the embedding
    L   what the last tick's backward pass left        P   permutes to the neighbours, and the next tick's input
    W   weight gradients of an earlier unit            Z   ZeRO-2: parts of weights and gradients over ``data``
    a   forward pass, first half of the sequence       T   what the last tick left of its second half
    b   the same of the second half

A tick starts with its input, as it is and normed and gathered (``F0.x``, ``F0.N``), with the last tick's output
(``last.y``) and what its backward pass left (``late.*``): branch 0's gradient before its reduce-scatter. It ends with the
same for the next. The operands of weight gradients are there from the start of a tick (`schedule.py`), so their GEMMs wait
for nothing and cover whatever else has no other work beside it.

**Halves.** While weight gradients do not run yet (warm-up, and its echo in the first backward passes) a forward pass alone has
nothing to hide its own messages under. It then runs in two halves of the sequence that leapfrog: while one computes, the other
communicates, and the end of the second half (``T``) is left to the next tick. The second half attends to the keys of both.
Their input GEMMs are cut once more, in columns (`INPUT_CUT`), because such a tick has more messages than GEMMs else. Their
weights are looked up in every tick: a copy between two ticks would delay the stages one after the other.

**Turns.** A slot's weights lie in one place in memory, so that its GEMMs read them without looking a chunk up, and are copied
there when the slot turns to another chunk: once in ``p`` ticks. A stage turns one tick after its neighbour, right before the
message that follows the turn, so the copy goes between the start and the end of that message (``P.turn_*``): the sender's copy
then delays a message that the receiver, copying itself, is not ready for. Anywhere else the delays of all stages would add up.
"""

from dataclasses import replace

from megascale_jax import axes
from megascale_jax.parallel.pipeline.operation import Operation, collective, compute, glue
from megascale_jax.parallel.pipeline.pieces import Piece, zero_pieces
from megascale_jax.parallel.pipeline.schedule import TickKind
from megascale_jax.parallel.pipeline.shape import TickShape

LATE = ("g", "x", "dN")
"""What a backward pass leaves to the next tick, as ``late.<value>``."""
KEPT: tuple[str, ...] = ("x", "G", "z", "dy")
"""What a backward pass keeps of every branch for its weight gradients; the norm of ``x`` is gathered once more.

Halves of a weight gradient are halves of its columns: of ``z`` and ``dy``, which are kept apart, so that no GEMM needs a slice."""


def tick_operations(kind: TickKind, shape: TickShape) -> tuple[Operation, ...]:
    """All operations of one tick."""
    result: list[Operation] = []
    if shape.in_halves(kind):
        result += [*_tail(), *_forward_in_halves(shape), *_next_input(f"a{shape.branches}.x", embed=kind.embed, half="a")]
        if kind.head:
            result.append(glue("T.join", ["last.y_a", "T.y"], "last.y"))
    elif kind.forward:
        result += _forward("F", shape.branches, gather_first=False, finish_last=True)
        result += _stores(shape)
        result += _next_input(f"F{shape.branches}.x", embed=kind.embed)
        if shape.turns:
            result += _turn("forward", "P.send_y")
    if kind.head:
        source = "last.y" if shape.backward_delay else f"F{shape.branches}.x"
        result += [*_head(source), *(_HEAD_BACKWARD if kind.backward else ())]
    if kind.backward or kind.finishes:
        result += [*_LATE, *(_EMBED_BACKWARD if kind.embed_backward else ())]
    if kind.backward:
        result.append(collective("P.send_g", axes.PIPE, "L0.g", "P.g"))
        if shape.turns:
            result += _turn("backward", "P.send_g")
        result.append(glue("P.gradient", ["P.g", *(["H.g"] if kind.head else [])], f"B{shape.branches}.g"))
        if shape.recompute:
            result.append(glue("R0.load", [f"B{shape.branches}.g"], "R0.x"))
            result += _forward("R", shape.branches, gather_first=True, finish_last=False)
        result += _backward(shape)
    if kind.weight_gradients:
        result += [operation for k in range(shape.branches) for operation in _weight_gradients(k, shape)]
    for piece in zero_pieces(shape).values():
        gathers = ".gather_" in piece.operation
        if kind.gather if gathers else kind.scatter:
            result += _zero_piece(piece, gathers)
    return tuple(_in_product(o) if shape.ring else o for o in result)


def _in_product(operation: Operation) -> Operation:
    """Gathers and scatters of the branches are nothing by themselves where products do them."""
    own = operation.axes == (axes.TENSOR,) and operation.slot in "FRBLWP"
    return replace(operation, kind="glue", axes=()) if own else operation


def fill_operations(shape: TickShape) -> tuple[Operation, ...]:
    """Before the first tick: the first micro-batch's embedding becomes the first input."""
    operations = (*_EMBED, *_next_input(None, embed=True, half="a" if shape.split else ""))
    return tuple(_in_product(o) if shape.ring else o for o in operations)


def settle_operations() -> tuple[Operation, ...]:
    """From the last tick in halves to the first whole one: both halves of its input are there, and gathered together."""
    return (
        *_tail(),
        glue("T.join", ["last.y_a", "T.y"], "last.y"),
        glue("P.settle", ["a0.x", "b0.x"], "F0.x", "F0.n"),
        collective("P.gather", axes.TENSOR, "F0.n", "F0.N"),
    )


def _forward(slot: str, branches: int, *, gather_first: bool, finish_last: bool) -> list[Operation]:
    """A chunk's forward pass from ``<slot>0.x`` to ``<slot><branches>.x``."""
    result: list[Operation] = []
    for k in range(branches):
        at = f"{slot}{k}"
        if k or gather_first:
            result += [glue(f"{at}.norm", [f"{at}.x"], f"{at}.n"), collective(f"{at}.gather", axes.TENSOR, f"{at}.n", f"{at}.N")]
        result += [
            compute(f"{at}.in", [f"{at}.N"], f"{at}.y"),
            glue(f"{at}.middle", [f"{at}.y"], f"{at}.z", f"{at}.saved"),
        ]
        if k + 1 < branches or finish_last:
            result += [
                compute(f"{at}.out", [f"{at}.z"], f"{at}.o"),
                collective(f"{at}.scatter", axes.TENSOR, f"{at}.o", f"{at}.os"),
                glue(f"{at}.finish", [f"{at}.x", f"{at}.os"], f"{slot}{k + 1}.x"),
            ]
    return result


def _forward_in_halves(shape: TickShape) -> list[Operation]:
    """A chunk's forward pass in halves, from ``a0.x`` and ``b0.x``; the last message of ``b`` is left to the next tick's `_tail`."""
    result: list[Operation] = []
    for k in range(shape.branches):
        for slot in "ab":
            at = f"{slot}{k}"
            if k:
                result += [glue(f"{at}.norm", [f"{at}.x"], f"{at}.n"), collective(f"{at}.gather", axes.TENSOR, f"{at}.n", f"{at}.N")]
            result += [compute(f"{at}.in{cut}", [f"{at}.N"], f"{at}.y{cut}") for cut in (1, 2)]
            result.append(glue(f"{at}.join", [f"{at}.y1", f"{at}.y2"], f"{at}.y"))
            both = {"a": ([f"{at}.y"], [f"{at}.z"]), "b": ([f"a{k}.y", f"{at}.y"], [f"{at}.z", f"{at}.saved"])}
            reads, writes = both[slot]
            result += [glue(f"{at}.middle", reads, *writes), compute(f"{at}.out", [f"{at}.z"], f"{at}.o")]
            if slot == "b" and k + 1 == shape.branches:
                result.append(glue("b.leave", [f"{at}.o", f"{at}.x"], "left.o", "left.x_b"))
            else:
                result += [
                    collective(f"{at}.scatter", axes.TENSOR, f"{at}.o", f"{at}.os"),
                    glue(f"{at}.finish", [f"{at}.x", f"{at}.os"], f"{slot}{k + 1}.x"),
                ]
        if k == 0 or not shape.recompute:
            kept = [f"{slot}{k}.{name}" for name in ("x", "y") for slot in "ab"]
            result.append(glue(f"b{k}.store", kept[:2] if shape.recompute else [*kept, f"b{k}.saved"]))
    return result


def _tail() -> list[Operation]:
    """The end of the last tick's second half, and the second half of this tick's input."""
    return [
        collective("T.scatter", axes.TENSOR, "late.o", "T.os"),
        glue("T.finish", ["late.x_b", "T.os"], "T.y"),
        collective("P.send_b", axes.PIPE, "T.y", "P.y_b"),
        glue("P.input_b", ["wait.x", "P.y_b"], "b0.x"),
        glue("P.norm_b", ["b0.x"], "b0.n"),
        collective("P.gather_b", axes.TENSOR, "b0.n", "b0.N"),
    ]


def _stores(shape: TickShape) -> list[Operation]:
    if shape.recompute:
        return [glue("F0.store", ["F0.x"])]
    return [glue(f"F{k}.store", [f"F{k}.x", f"F{k}.y", f"F{k}.saved"]) for k in range(shape.branches)]


def _next_input(output: str | None, *, embed: bool, half: str = "") -> list[Operation]:
    """From this tick's output and the embedding that waits to the next tick's input; ``half``: of one half of the sequence."""
    end = f"_{half}" if half else ""
    sources = ["E.x" if embed else "wait.x"]
    result = [*_EMBED] if embed and output else []
    if output:
        result.append(collective(f"P.send_{half or 'y'}", axes.PIPE, output, f"P.y{end}"))
        sources.append(f"P.y{end}")
    return [
        *result,
        glue(f"P.input{end}", sources, f"next.x{end}"),
        glue(f"P.norm{end}", [f"next.x{end}"], f"next.n{end}"),
        collective(f"P.gather{end}", axes.TENSOR, f"next.n{end}", f"next.N{end}"),
    ]


def _residuals_of(shape: TickShape) -> str:
    """Slot that a branch's x, y and saved come from in a backward pass: read from the stash, or recomputed."""
    return "R" if shape.recompute else "B"


def _backward(shape: TickShape) -> list[Operation]:
    """A chunk's backward pass from ``B<branches>.g`` (gradient of its output); branch 0's end is left to the next tick."""
    result: list[Operation] = []
    for k in reversed(range(shape.branches)):
        at = f"B{k}"
        if not shape.recompute:
            result.append(glue(f"{at}.load", [f"B{k + 1}.g"], f"{at}.x", f"{at}.y", f"{at}.saved"))
        x, y, saved = (f"{_residuals_of(shape)}{k}.{name}" for name in ("x", "y", "saved"))
        result += [
            glue(f"{at}.split", [f"B{k + 1}.g"], f"{at}.do"),
            collective(f"{at}.gather", axes.TENSOR, f"{at}.do", f"{at}.G"),
            compute(f"{at}.dout", [f"{at}.G"], f"{at}.dz"),
            glue(f"{at}.dmiddle", [f"{at}.dz", y, saved], f"{at}.dy", f"{at}.z"),
            compute(f"{at}.din", [f"{at}.dy"], f"{at}.dN"),
            *([glue(f"{at}.keep", [x, f"{at}.G", f"{at}.z", f"{at}.dy"])] if shape.turns else []),
        ]
        if k:
            result += [
                collective(f"{at}.scatter", axes.TENSOR, f"{at}.dN", f"{at}.dn"),
                glue(f"{at}.finish", [f"B{k + 1}.g", x, f"{at}.dn"], f"{at}.g"),
            ]
        else:
            result.append(glue("B0.leave", ["B1.g", x, "B0.dN"], *(f"left.{name}" for name in LATE)))
    return result


def _turn(slot: str, message: str) -> list[Operation]:
    copy = Operation(f"P.turn_{slot}", "copy", ("turn",), (f"turned_{slot}",), beside=message)
    return [copy, glue(f"P.hold_{slot}", [f"turned_{slot}"])]


def _weight_gradients(k: int, shape: TickShape) -> list[Operation]:
    """Both weight gradients of a branch, each added to its sum; a half is a digit behind the verb."""
    at, unit = f"W{k}", f"W{k}" if shape.turns else f"B{k}"
    x = f"{unit}.x" if shape.turns else f"{_residuals_of(shape)}{k}.x"
    return [
        *(compute(f"{at}.wout{half}", [f"{unit}.G", f"{unit}.z{half}"], f"{at}.sum_out{half}") for half in shape.halves(k, "out")),
        glue(f"{at}.norm", [x], f"{at}.n"),
        collective(f"{at}.gather", axes.TENSOR, f"{at}.n", f"{at}.N"),
        *(compute(f"{at}.win{half}", [f"{at}.N", f"{unit}.dy{half}"], f"{at}.sum_in{half}") for half in shape.halves(k, "in")),
    ]


def _zero_piece(piece: Piece, gathers: bool) -> list[Operation]:
    """A piece in flight; what arrives of the weights is put in its place, what leaves of the gradients goes out of the tick."""
    name = piece.operation
    move = replace(collective(name, axes.DATA, "part", f"{name}ed"), beside=piece.beside)
    return [move, glue(name.replace("gather", "put"), [f"{name}ed"])] if gathers else [move]


def _head(source: str) -> list[Operation]:
    return [
        glue("H.split", [source], "H.own"),
        collective("H.spread", axes.PIPE, "H.own", "H.x"),
        glue("H.norm", ["H.x"], "H.n"),
        collective("H.gather", axes.TENSOR, "H.n", "H.N"),
        compute("H.project", ["H.N"], "H.logits"),
        glue("H.measure", ["H.logits"], "H.statistics"),
        Operation("H.join", "collective", ("H.statistics",), ("H.joined",), (axes.PIPE, axes.TENSOR)),
        glue("H.loss", ["H.joined"]),
    ]


_HEAD_BACKWARD = (
    glue("H.differentiate", ["H.logits", "H.joined"], "H.dlogits"),
    compute("H.dx", ["H.dlogits"], "H.dN"),
    compute("H.dw", ["H.dlogits", "H.N"], "H.dtable"),
    glue("H.addw", ["H.dtable"]),
    collective("H.scatter", axes.TENSOR, "H.dN", "H.dpart"),
    collective("H.sum", axes.PIPE, "H.dpart", "H.dn"),
    glue("H.finish", ["H.x", "H.dn"], "H.g"),
)
_LATE = (
    collective("L0.scatter", axes.TENSOR, "late.dN", "L0.dn"),
    glue("L0.finish", ["late.g", "late.x", "L0.dn"], "L0.g"),
)
_EMBED = (
    glue("E.lookup", [], "E.rows"),
    collective("E.scatter", axes.TENSOR, "E.rows", "E.part"),
    collective("E.sum", axes.PIPE, "E.part", "E.whole"),
    glue("E.finish", ["E.whole"], "E.x"),
)
_EMBED_BACKWARD = (
    glue("D.split", ["L0.g"], "D.own"),
    collective("D.spread", axes.PIPE, "D.own", "D.part"),
    collective("D.gather", axes.TENSOR, "D.part", "D.rows"),
    glue("D.add", ["D.rows"]),
)
