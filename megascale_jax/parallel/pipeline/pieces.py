"""Which pieces of weights and gradients move in a tick, and beside which GEMM: ZeRO-2 as data. No JAX.

A chunk's weights arrive, and its gradients leave, in the ``p`` ticks of a window. In each, every GEMM
carries a piece of the same matrix of another chunk: a share of the ``p``-th part that is its share of the FLOPs which that
matrix costs in the tick. A piece then takes as long as its GEMM times one constant of model and links, whatever the sizes.
"""

from dataclasses import dataclass
from typing import Literal

from megascale_jax.parallel.pipeline.shape import INPUT_CUT, TickShape


@dataclass(frozen=True)
class Piece:
    """Of a ``p``-th of a branch's input or output matrix, cut into ``units``, those from ``first`` to before ``last``."""

    operation: str
    beside: str
    branch: int
    matrix: Literal["in", "out"]
    first: int
    last: int
    units: int


def zero_pieces(shape: TickShape) -> dict[str, Piece]:
    """Every piece that moves in a tick, by the name of its operation."""
    pieces: list[Piece] = []
    for k in range(shape.branches):
        for matrix in ("in", "out"):
            halves = shape.halves(k, matrix)
            carriers = {
                "gather": _forward_carriers(shape, k, matrix),
                "scatter": [f"B{k}.d{matrix}"] * len(halves) + [f"W{k}.w{matrix}{half}" for half in halves],
            }
            for move, equal in carriers.items():
                for carrier in dict.fromkeys(equal):
                    first = equal.index(carrier)
                    name = f"Z{k}.{move}_{matrix}{carrier[0]}{carrier[-1] if carrier[-1].isdigit() else ''}"
                    pieces.append(Piece(name, carrier, k, matrix, first, first + equal.count(carrier), len(equal)))
    return {piece.operation: piece for piece in pieces}


def _forward_carriers(shape: TickShape, k: int, matrix: Literal["in", "out"]) -> list[str]:
    """GEMMs of a matrix in a tick of the warm-up, each as often as its share of their FLOPs."""
    if not shape.split:
        return [f"F{k}.{matrix}"]
    if matrix == "out":
        return [f"a{k}.out", f"b{k}.out"]
    return [f"{slot}{k}.in{cut}" for slot in "ab" for cut in (1, 2) for _ in range(INPUT_CUT[cut - 1])]
