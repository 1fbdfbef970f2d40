"""What the operations of a tick compute: names of the operation tables bound to the model's segments.

A `Tick` is made while a tick is traced. It reads from its row of the schedule's table which unit this stage has in each slot, and
holds what operations update in place: the stash of residuals, the gradients, the loss. Idle slots compute on what is there;
a backward slot's gradient is masked once, where it enters, and everything behind it is zero.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megascale_jax import axes
from megascale_jax.parallel.pipeline.half_operations import HalfOperations
from megascale_jax.parallel.pipeline.operation import Operation
from megascale_jax.parallel.pipeline.tick_state import cut
from megascale_jax.parallel.pipeline.vocabulary_operations import VocabularyOperations
from megascale_jax.parallel.pipeline.zero_operations import ZeroOperations


class Tick(HalfOperations, VocabularyOperations, ZeroOperations):
    """One tick of one step, inside ``shard_map``; `execute` runs its operations."""

    def execute(self, operation: Operation, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run one operation."""
        if operation.slot == "Z":
            return self._execute_zero(operation, *values)
        verb, half = operation.verb, None
        if verb[-1].isdigit():
            verb, half = verb[:-1], int(verb[-1]) - 1
        method = _METHODS[f"{operation.slot}.{verb}"]
        place = () if operation.branch is None else (self._places[operation.slot], operation.branch)
        result = method(self, *place, *values) if half is None else method(self, *place, *values, half=half)
        if not operation.writes:
            return ()
        return result if len(operation.writes) > 1 else (result,)

    def _execute_zero(self, operation: Operation, value: jax.Array) -> tuple[Any, ...]:
        if ".put_" in operation.name:
            self.put_piece(operation.name, value)
            return ()
        move = self.gather_piece if ".gather_" in operation.name else self.scatter_piece
        return (move(operation.name, value),)

    @property
    def turns(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Per slot, whether it turns, and to which chunk."""
        return {
            slot: (self.column(f"{slot}_turns"), self.column(f"{of}_chunk")) for slot, of in (("forward", "next"), ("backward", "backward"))
        }

    @property
    def part(self) -> jax.Array:
        """Number of the part that moves in this tick; weights and gradients never move in one and the same."""
        return self.column("gather_part") + self.column("scatter_part")

    def gather(self, x_BsD: jax.Array) -> jax.Array:
        """The whole sequence, from the tensor ranks."""
        return self.communication.gather(x_BsD)

    def scatter(self, x_BSD: jax.Array) -> jax.Array:
        """Sum over the tensor ranks, this rank's part of the sequence."""
        return self.communication.reduce_scatter(x_BSD)

    def branch_gather(self, x_BsD: jax.Array) -> jax.Array:
        """`gather`, where the product that follows does not do it."""
        return x_BsD if self.chunks.shape.ring else self.gather(x_BsD)

    def branch_scatter(self, x: jax.Array) -> jax.Array:
        """`scatter`, where the product before has not done it."""
        return x if self.chunks.shape.ring else self.scatter(x)

    def sum_over_stages(self, x: jax.Array) -> jax.Array:
        """Sum over the stages: also how one stage's value, the others giving zero, reaches all."""
        return jax.lax.psum(x, axes.PIPE)

    def join(self, statistics_3BS: jax.Array) -> jax.Array:
        """What every rank of the vocabulary knows."""
        return jax.lax.all_gather(statistics_3BS, self.communication.vocab_axes)

    def send_output(self, x_BsD: jax.Array) -> jax.Array:
        """To the next stage."""
        return self._permute(x_BsD, 1)

    def send_gradient(self, g_BsD: jax.Array) -> jax.Array:
        """To the stage before."""
        return self._permute(g_BsD, -1)

    def _permute(self, x: jax.Array, by: int) -> jax.Array:
        p = self.chunks.stages
        if p == 1:
            return x
        return jax.lax.ppermute(x, axes.PIPE, [(stage, (stage + by) % p) for stage in range(p)])

    def next_input(self, embedded_BsD: jax.Array, received_BsD: jax.Array | None = None) -> jax.Array:
        """The next tick's input: from the embedding on the first virtual stage, else from the stage before."""
        if received_BsD is None:
            return embedded_BsD
        return jnp.where(self.column("next_first") == 1, embedded_BsD, received_BsD)

    def next_norm(self, x_BsD: jax.Array) -> jax.Array:
        """Norm of the next tick's input."""
        return self._branch(0).norm(
            {"vectors": cut(self.weights["layers"]["vectors"], self.column("next_chunk"), 0, x_BsD.shape[-1])}, x_BsD
        )

    def gradient(self, received_BsD: jax.Array, of_head_BsD: jax.Array | None = None) -> jax.Array:
        """The gradient of this tick's backward unit, zero in an idle slot."""
        if of_head_BsD is not None:
            received_BsD = jnp.where(self.column("backward_last") == 1, of_head_BsD, received_BsD)
        return jnp.where(self.column("backward_busy") == 1, received_BsD, 0)


def _turn(slot: Literal["forward", "backward"], tick: Tick, turns: Any) -> Any:
    return tick.turn(slot, *turns[slot])


def _hold(slot: Literal["forward", "backward"], tick: Tick, matrices: Any) -> None:
    tick.hold(slot, matrices)


_METHODS: Mapping[str, Callable[..., Any]] = {
    **{f"{slot}.norm": Tick.norm for slot in "FRWab"},
    **{f"{slot}.in": Tick.project_in for slot in "FR"},
    **{f"{slot}.middle": Tick.middle for slot in "FR"},
    **{f"{slot}.out": Tick.project_out for slot in "FR"},
    **{f"{slot}.finish": Tick.finish for slot in "FRab"},
    **{f"{slot}.in": Tick.half_project_in for slot in "ab"},
    **{f"{slot}.join": Tick.half_join for slot in "ab"},
    **{f"{slot}.out": Tick.half_project_out for slot in "ab"},
    "a.middle": Tick.first_middle,
    "b.middle": Tick.second_middle,
    "b.store": Tick.both_store,
    "b.leave": lambda tick, *values: values,
    "T.scatter": Tick.scatter,
    "T.finish": Tick.tail_finish,
    "T.join": lambda tick, first, second: jnp.concatenate([first, second], 1),
    "P.send_a": Tick.send_output,
    "P.send_b": Tick.send_output,
    "P.input_a": Tick.first_input,
    "P.input_b": Tick.second_input,
    "P.norm_a": Tick.next_norm,
    "P.norm_b": Tick.second_norm,
    "P.gather_a": Tick.gather,
    "P.gather_b": Tick.gather,
    "P.settle": Tick.settle,
    "F.store": Tick.store,
    **{f"{slot}.load": Tick.load for slot in "RB"},
    "B.split": Tick.split,
    "B.dout": Tick.input_gradient_out,
    "B.dmiddle": Tick.middle_backward,
    "B.din": Tick.input_gradient_in,
    "B.leave": lambda tick, place, number, *values: values,
    "B.keep": Tick.keep,
    "W.wout": Tick.weight_out,
    "W.win": Tick.weight_in,
    **{f"{slot}.finish": Tick.finish_backward for slot in "BL"},
    **{f"{slot}.gather": lambda tick, place, number, x: tick.branch_gather(x) for slot in "FRBWab"},
    **{f"{slot}.scatter": lambda tick, place, number, x: tick.branch_scatter(x) for slot in "FRBLab"},
    "P.gather": Tick.branch_gather,
    **{f"{slot}.gather": Tick.gather for slot in "HD"},
    **{f"{slot}.scatter": Tick.scatter for slot in "EH"},
    **dict.fromkeys(("E.sum", "H.spread", "H.sum", "D.spread"), Tick.sum_over_stages),
    "P.send_y": Tick.send_output,
    "P.send_g": Tick.send_gradient,
    "P.turn_forward": partial(_turn, "forward"),
    "P.turn_backward": partial(_turn, "backward"),
    "P.hold_forward": partial(_hold, "forward"),
    "P.hold_backward": partial(_hold, "backward"),
    "P.input": Tick.next_input,
    "P.norm": Tick.next_norm,
    "P.gradient": Tick.gradient,
    "E.lookup": Tick.embed_rows,
    "E.finish": Tick.embed_finish,
    "D.split": Tick.embed_split,
    "D.add": Tick.embed_add,
    "H.split": Tick.head_split,
    "H.norm": Tick.head_norm,
    "H.project": Tick.head_project,
    "H.measure": Tick.head_measure,
    "H.join": Tick.join,
    "H.loss": Tick.head_loss,
    "H.differentiate": Tick.head_differentiate,
    "H.dx": Tick.head_input_gradient,
    "H.dw": Tick.head_weight_gradient,
    "H.addw": Tick.head_add,
    "H.finish": Tick.head_finish,
}
