"""Operations of a forward pass in halves of the sequence: slots ``a``, ``b`` and T. A rank's own tokens are its part of ``a``,
then that of ``b`` (`TokenOrder`)."""

from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax.parallel.pipeline.branch_operations import BranchOperations
from megascale_jax.parallel.pipeline.shape import INPUT_CUT, TILE
from megascale_jax.parallel.pipeline.tick_state import Place, cut_columns


class HalfOperations(BranchOperations):
    """Weights are looked up once for both halves."""

    def half_project_in(self, place: Place, number: int, n_BSD: jax.Array, half: int) -> jax.Array:
        """Columns of the input GEMM, without biases."""
        return self.products.all_gather_matmul(n_BSD, self._looked_up(place, number, self._branch(number).w_in)[half])

    def half_join(self, place: Place, number: int, *columns: jax.Array) -> jax.Array:
        """All columns of ``y``, with biases."""
        branch = self._branch(number)
        return branch.add_bias_in(self._layer(place, number, *([branch.b_in] if branch.b_in else [])), jnp.concatenate(columns, -1))

    def half_project_out(self, place: Place, number: int, z_BSG: jax.Array) -> jax.Array:
        """Output GEMM."""
        name = self._branch(number).w_out
        return self.products.matmul_reduce_scatter(z_BSG, self._looked_up(place, number, name)[0])

    def first_middle(self, place: Place, number: int, y_BSF: jax.Array) -> jax.Array:
        """Attention and nonlinearity of the first half, which sees no token of the second."""
        return self._branch(number).first_half_forward(y_BSF, self._rows(place))

    def second_middle(self, place: Place, number: int, y_first_BSF: jax.Array, y_BSF: jax.Array) -> tuple[jax.Array, Any]:
        """The same of the second half; what attention saves is that of both."""
        return self._branch(number).second_half_forward(y_first_BSF, y_BSF, self._rows(place))

    def both_store(self, place: Place, number: int, *kept: Any) -> None:
        """Put both halves' residuals into this unit's slot, as a whole pass would have put them."""
        x_BsD = jnp.concatenate(kept[:2], 1)
        if len(kept) == 2:
            return self.store(place, number, x_BsD)
        return self.store(place, number, x_BsD, self._branch(number).halved_order.joined(*kept[2:4]), kept[4])

    def tail_finish(self, x_BsD: jax.Array, o_BsD: jax.Array) -> jax.Array:
        """The second half of the last tick's output."""
        return self.finish(self._places["T"], len(self.chunks.branches) - 1, x_BsD, o_BsD)

    def first_input(self, embedded_BsD: jax.Array, received_BsD: jax.Array | None = None) -> jax.Array:
        """First half of the next tick's input."""
        embedded_BsD = half_of(embedded_BsD, 0)
        return embedded_BsD if received_BsD is None else jnp.where(self.column("next_first") == 1, embedded_BsD, received_BsD)

    def second_input(self, embedded_BsD: jax.Array, received_BsD: jax.Array) -> jax.Array:
        """Second half of this tick's input."""
        return jnp.where(self.column("forward_first") == 1, half_of(embedded_BsD, 1), received_BsD)

    def second_norm(self, x_BsD: jax.Array) -> jax.Array:
        """Its norm."""
        return self.norm(self._places["b"], 0, x_BsD)

    def settle(self, first_BsD: jax.Array, second_BsD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The whole input of a tick, and its norm."""
        x_BsD = jnp.concatenate([first_BsD, second_BsD], 1)
        return x_BsD, self.norm(self._places["F"], 0, x_BsD)

    def _looked_up(self, place: Place, number: int, name: str) -> list[jax.Array]:
        """A matrix out of the stack of chunks: the output matrix whole, the input matrix in its two parts of columns."""
        if (number, name) not in self.looked_up:
            stacked, depth = self.weights["layers"][name], number // self.chunks.branches_per_layer
            width = stacked.shape[-1]
            first = width * INPUT_CUT[0] // sum(INPUT_CUT)
            first = round(first / TILE) * TILE if first >= TILE else first
            widths = [first, width - first] if name == self._branch(number).w_in else [width]
            self.looked_up[number, name] = cut_columns(stacked, place.chunk, depth, self.model.hidden_size, widths)
        return self.looked_up[number, name]


def half_of(x_BSD: jax.Array, half: int) -> jax.Array:
    """The first (0) or second (1) half of the tokens."""
    middle = x_BSD.shape[1] // 2
    return x_BSD[:, middle:] if half else x_BSD[:, :middle]
