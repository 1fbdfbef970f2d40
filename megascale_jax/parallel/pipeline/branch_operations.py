"""Operations of one residual branch in a tick: slots F, R, B, L and W; halves are in `half_operations.py`.

``number`` is the branch's place in its chunk.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megascale_jax.model.branch import Branch, Rows
from megascale_jax.parallel.pipeline.operations import KEPT
from megascale_jax.parallel.pipeline.tick_state import Place, TickState, add_at, behind, cut, put, take


class BranchOperations(TickState):
    """Segments of `model/branch.py` on the unit of a slot."""

    def _branch(self, number: int) -> Branch:
        return self.chunks.branches[number]

    def _layer(self, place: Place, number: int, *names: str) -> dict[str, jax.Array]:
        """The named weights of a branch: matrices that the slot holds, all else cut out of the stack of chunks."""
        held = self.now.get(place.direction, {}).get(number, {})
        return {name: held[name] if name in held else self._cut(place.chunk, number, name) for name in names}

    def _cut(self, chunk: jax.Array, number: int, name: str) -> jax.Array:
        return cut(self.weights["layers"][name], chunk, number // self.chunks.branches_per_layer, self.model.hidden_size)

    def turn(self, direction: Literal["forward", "backward"], turns: jax.Array, chunk: jax.Array) -> Any:
        """The matrices that a slot holds from now on: those of ``chunk`` where ``turns`` is 1."""
        return jax.lax.cond(turns == 1, lambda held: self.looked_up_chunk(chunk), lambda held: held, self.now[direction])

    def looked_up_chunk(self, chunk: jax.Array) -> Any:
        """All matrices of a chunk, by branch and group."""
        return {
            number: {name: self._cut(chunk, number, name) for name in (branch.w_in, branch.w_out)}
            for number, branch in enumerate(self.chunks.branches)
        }

    def hold(self, direction: Literal["forward", "backward"], matrices: Any) -> None:
        """Take what `turn` gave."""
        self.now = self.now | {direction: matrices}

    def _add(self, place: Place, number: int, name: str, gradient: jax.Array | None) -> None:
        """Add to the gradient of a vector."""
        if gradient is not None:
            layers, depth = self.gradients["layers"], number // self.chunks.branches_per_layer
            total = add_at(layers[name], place.chunk, depth, gradient.astype(jnp.float32))
            self.gradients = self.gradients | {"layers": layers | {name: total}}

    def _rows(self, place: Place) -> Rows:
        return Rows(take(self.batch["positions"], place.micro_batch), take(self.batch["segment_ids"], place.micro_batch))

    def _branch_key(self, place: Place, number: int) -> jax.Array | None:
        key = self._micro_batch_key(place.micro_batch)
        return None if key is None else jax.random.fold_in(key, place.chunk * len(self.chunks.branches) + number)

    def norm(self, place: Place, number: int, x_BsD: jax.Array) -> jax.Array:
        """Norm of a branch's input."""
        return self._branch(number).norm(self._layer(place, number, "vectors"), x_BsD)

    def project_in(self, place: Place, number: int, n_BSD: jax.Array) -> jax.Array:
        """Input GEMM."""
        branch = self._branch(number)
        weights = self._layer(place, number, branch.w_in, *([branch.b_in] if branch.b_in else []))
        return branch.add_bias_in(weights, self.products.all_gather_matmul(n_BSD, weights[branch.w_in]))

    def middle(self, place: Place, number: int, y_BSF: jax.Array) -> tuple[jax.Array, Any]:
        """Attention and nonlinearity."""
        return self._branch(number).middle_forward(y_BSF, self._rows(place))

    def project_out(self, place: Place, number: int, z_BSG: jax.Array) -> jax.Array:
        """Output GEMM."""
        name = self._branch(number).w_out
        return self.products.matmul_reduce_scatter(z_BSG, self._layer(place, number, name)[name])

    def finish(self, place: Place, number: int, x_BsD: jax.Array, o_BsD: jax.Array) -> jax.Array:
        """Residual add."""
        return self._branch(number).finish(self._layer(place, number, "vectors"), x_BsD, o_BsD, self._branch_key(place, number))

    def store(self, place: Place, number: int, x_BsD: jax.Array, *kept: Any) -> None:
        """Put a branch's residuals into this unit's slot."""
        names = dict(zip(("x", "y", "saved"), (x_BsD, *kept), strict=False))
        slots, slot = self.stash[number], self._behind_reads(number, place.slot)
        kept_now = {name: jax.tree.map(lambda s, v: put(s, v, slot), slots[name], names[name]) for name in slots}
        self.stash = self.stash | {number: kept_now}

    def _behind_reads(self, number: int, slot: jax.Array) -> jax.Array:
        """The slot to write a branch's residuals to, an index that hangs on what was made of those that the tick has read before.

        XLA would rather copy the stash than find the order by itself.
        """
        return behind(slot, *self.loaded.get(number, ()))

    def load(self, place: Place, number: int, gradient: jax.Array) -> Any:
        """A branch's residuals, read no earlier than its gradient is there."""
        slot, _ = jax.lax.optimization_barrier((place.slot, gradient))
        kept = jax.tree.map(lambda s: take(s, slot), self.stash[number])
        self.loaded[number] = (kept["x"],)
        if self.chunks.shape.recompute:
            return kept["x"]
        saved = kept["saved"] if "saved" in kept else self.middle(place, number, kept["y"])[1]
        return kept["x"], kept["y"], saved

    def split(self, place: Place, number: int, g_BsD: jax.Array) -> jax.Array:
        """From the gradient of a branch's output to that of ``o``; the output biases take theirs."""
        branch, vectors = self._branch(number), self._layer(place, number, "vectors")
        zero = jnp.zeros_like(g_BsD)
        _, pull = jax.vjp(lambda w, o: branch.finish(w, zero, o, self._branch_key(place, number)), vectors, zero)
        d_vectors, d_o_BsD = pull(g_BsD)
        if any(name in branch.groups["vectors"].members for name in branch.out_biases):
            self._add(place, number, "vectors", d_vectors["vectors"])
        return d_o_BsD

    def input_gradient_out(self, place: Place, number: int, g_BSD: jax.Array) -> jax.Array:
        """Data gradient of the output GEMM."""
        name = self._branch(number).w_out
        return self.products.all_gather_matmul(g_BSD, self._layer(place, number, name)[name])

    def middle_backward(self, place: Place, number: int, dz_BSG: jax.Array, y_BSF: jax.Array, saved: Any) -> tuple[jax.Array, jax.Array]:
        """Back through attention and nonlinearity; the input biases take their gradient."""
        branch = self._branch(number)
        dy_BSF, z_BSG = branch.middle_backward(y_BSF, saved, dz_BSG, self._rows(place))
        if not self.chunks.shape.turns:
            # nothing is made of the residuals any later, so that their slot may be written in this tick
            dy_BSF, z_BSG = jax.lax.optimization_barrier((dy_BSF, z_BSG))
            self.loaded[number] = (*self.loaded.get(number, ()), dy_BSF, z_BSG)
        if branch.b_in:
            self._add(place, number, branch.b_in, branch.bias_in_gradient(dy_BSF))
        return dy_BSF, z_BSG

    def input_gradient_in(self, place: Place, number: int, dy_BSF: jax.Array) -> jax.Array:
        """Data gradient of the input GEMM."""
        name = self._branch(number).w_in
        return self.products.matmul_reduce_scatter(dy_BSF, self._layer(place, number, name)[name])

    def keep(self, place: Place, number: int, *values: jax.Array) -> None:
        """Put the operands of a branch's weight gradients (`operations.KEPT`) where they wait for their tick."""
        slot, rings = self.column("keep_slot"), self.kept[number]
        named: dict[str, jax.Array] = dict(zip(KEPT, values, strict=True))
        kept = {name: put(ring, _kept(named, name), slot) for name, ring in rings.items()}
        self.kept = self.kept | {number: kept}
        self.loaded[number] = (*self.loaded.get(number, ()), *(ring for name, ring in kept.items() if name[0] in "zd"))

    def recall(self) -> dict[str, jax.Array]:
        """All operands of this tick's weight gradients, as ``W<branch>.<value>``."""
        slot = self.column("recall_slot")
        recalled = {f"W{number}.{name}": take(ring, slot) for number, kept in self.kept.items() for name, ring in kept.items()}
        # whatever the tick keeps is written behind these reads, so XLA need not copy the rings
        recalled, self.columns = jax.lax.optimization_barrier((recalled, self.columns))
        return recalled

    def weight_out(self, place: Place, number: int, g_BSD: jax.Array, z_BSG: jax.Array, half: int | None = None) -> jax.Array:
        """The window's sum of gradients of the output matrix with this unit's added, or half of its columns."""
        # sum and product in one GEMM: the sum lies in one place for all ticks of a window
        return self._summed(number, "out", half, self.products.gathered_outer(g_BSD, z_BSG))

    def weight_in(self, place: Place, number: int, n_BSD: jax.Array, dy_BSF: jax.Array, half: int | None = None) -> jax.Array:
        """The same of the input matrix."""
        return self._summed(number, "in", half, self.products.gathered_outer(n_BSD, dy_BSF))

    def _summed(self, number: int, matrix: str, half: int | None, product: jax.Array) -> jax.Array:
        return self.sums[number][matrix][half or 0] + product if self.sums else product

    def finish_backward(self, place: Place, number: int, g_BsD: jax.Array, x_BsD: jax.Array, dn_BsD: jax.Array) -> jax.Array:
        """Back through the norm and the residual add."""
        _, pull = jax.vjp(self._branch(number).fork, self._layer(place, number, "vectors"), x_BsD)
        d_vectors, d_x_BsD = pull((g_BsD, dn_BsD))
        self._add(place, number, "vectors", d_vectors["vectors"])
        return d_x_BsD


def _kept(values: Mapping[str, jax.Array], name: str) -> jax.Array:
    """A value, or the first (1) or second (2) half of its columns."""
    if not name[-1].isdigit():
        return values[name]
    whole = values[name[:-1]]
    middle = whole.shape[-1] // 2
    return whole[..., :middle] if name[-1] == "1" else whole[..., middle:]
