"""Room for what a unit keeps from its forward pass to its backward pass, and from there to its weight gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax.model.branch import Branch, Rows
from megascale_jax.parallel.pipeline.shape import TickShape
from megascale_jax.parallel.pipeline.tick_state import Batch
from megascale_jax.parallel.pipeline.windows import Windows


@dataclass(frozen=True)
class Residuals:
    """Zeros of the shapes of what is kept; ``like``: this rank's part of a residual stream."""

    branches: tuple[Branch, ...]
    shape: TickShape
    remat: str
    windows: Windows
    batch: Batch
    like: jax.ShapeDtypeStruct

    def stash(self, slots: int) -> dict[int, Any]:
        """Zeros for what `Tick.store` keeps; ``slots`` is one more than the schedule's: idle ticks write there."""
        whole = (self.like.shape[0], self.batch["tokens"].shape[2])
        ids = jax.ShapeDtypeStruct(whole, jnp.int32)
        stash: dict[int, Any] = {}
        for number, branch in enumerate(self.branches[:1] if self.remat == "full" else self.branches):
            kept: dict[str, Any] = {"x": self.like}
            if self.remat != "full":
                kept["y"] = jax.ShapeDtypeStruct((*whole, self.windows.width(branch.w_in)), self.like.dtype)
            if self.remat == "none":
                kept["saved"] = jax.eval_shape(lambda y, p, s, b=branch: b.middle_forward(y, Rows(p, s))[1], kept["y"], ids, ids)
            stash[number] = _zeros(slots, kept)
        return stash

    def rings(self, slots: int) -> dict[int, Any]:
        """Zeros for what `Tick.keep` keeps: nothing where weight gradients do not wait."""
        rings: dict[int, Any] = {}
        if not self.shape.turns:
            return rings
        for number in range(len(self.branches)):
            whole = (self.like.shape[0], self.batch["tokens"].shape[2])
            widths = {} if self.shape.ring else {"G": self.like.shape[2]}
            for name, matrix in (("z", "out"), ("dy", "in")):
                parts = zip(self.shape.halves(number, matrix), self.windows.part_widths(number, matrix), strict=True)
                widths |= {f"{name}{half}": width for half, width in parts}
            kept = {name: jax.ShapeDtypeStruct((*whole, width), self.like.dtype) for name, width in widths.items()}
            local = {"x": self.like, "G": self.like} if self.shape.ring else {"x": self.like}
            rings[number] = _zeros(slots, local | kept)
        return rings


def _zeros(slots: int, kept: dict[str, Any]) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), kept)
