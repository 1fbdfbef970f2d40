"""What the operations of a tick compute: names of the operation tables bound to the model's segments.

A `Tick` is made while a tick is traced. It reads from its row of the schedule's table which unit this stage has in each slot, and
holds what operations update in place: the stash of residuals, the gradients, the loss. Idle slots compute on what is there;
a backward slot's gradient is masked once, where it enters, and everything behind it is zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax import axes
from megascale_jax.kernels.loss.reference import IGNORE
from megascale_jax.model.branch import Branch, Rows
from megascale_jax.model.transformer import Transformer
from megascale_jax.parallel.pipeline.operations import Operation
from megascale_jax.parallel.pipeline.table import COLUMNS

Batch = Mapping[str, jax.Array]
"""``tokens``, ``targets``, ``segment_ids``, ``positions``: int32 ``[m, B, S]``."""

_EMBED_KEY = 2**20
"""Folded into a micro-batch's key for the embedding's dropout; branches fold their own, smaller, number."""


@dataclass(frozen=True)
class Chunks:
    """The static part of a pipeline: the chunk's branches, the number of stages, what is kept or recomputed."""

    transformer: Transformer
    branches: tuple[Branch, ...]
    branches_per_layer: int
    stages: int
    recomputes: bool


@dataclass(frozen=True)
class Place:
    """The unit that a slot works on, traced."""

    chunk: jax.Array
    micro_batch: jax.Array
    slot: jax.Array


class Tick:
    """One tick of one step, inside ``shard_map``; `execute` runs its operations.

    ``row``: this stage's row of the schedule's table, int32 ``[len(COLUMNS)]``.
    """

    def __init__(
        self,
        chunks: Chunks,
        weights: Mapping[str, Any],
        batch: Batch,
        key: jax.Array | None,
        scale: jax.Array,
        row: jax.Array,
        held: Mapping[str, Any],
    ):
        self.chunks, self.weights, self.batch, self.key, self.scale = chunks, weights, batch, key, scale
        # scalars behind a barrier: XLA updates a slice in place only where reader and writer share the very same index
        self.columns = jax.lax.optimization_barrier(tuple(row[index] for index in range(len(COLUMNS))))
        self.model, self.communication = chunks.transformer.model, chunks.transformer.communication
        self.stage = jax.lax.axis_index(axes.PIPE)
        self.stash, self.gradients, self.loss = held["stash"], held["gradients"], held["loss"]

    @property
    def held(self) -> dict[str, Any]:
        """What operations have updated."""
        return {"stash": self.stash, "gradients": self.gradients, "loss": self.loss}

    def execute(self, operation: Operation, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run one operation."""
        verb, half = operation.verb, None
        if verb[-1].isdigit():
            verb, half = verb[:-1], int(verb[-1]) - 1
        method = _METHODS[f"{operation.slot}.{verb}"]
        place = () if operation.branch is None else (self._places[operation.slot], operation.branch)
        result = method(self, *place, *values) if half is None else method(self, *place, *values, half=half)
        if not operation.writes:
            return ()
        return result if len(operation.writes) > 1 else (result,)

    # --- places -------------------------------------------------------------------------------------------------------

    def _at(self, column: str) -> jax.Array:
        return self.columns[COLUMNS[column]]

    @cached_property
    def _places(self) -> dict[str, Place]:
        forward, backward = self._place("forward"), self._place("backward")
        late = Place(self._at("late_chunk"), self._at("leaving"), forward.slot)
        return {"F": forward, "B": backward, "R": backward, "L": late}

    def _place(self, slot: str) -> Place:
        return Place(*(self._at(f"{slot}_{part}") for part in ("chunk", "micro_batch", "slot")))

    # --- one branch ---------------------------------------------------------------------------------------------------

    def _branch(self, number: int) -> Branch:
        return self.chunks.branches[number]

    def _layer(self, place: Place, number: int, *names: str) -> dict[str, jax.Array]:
        """The named weights of a branch, cut out of the stack of chunks."""
        depth = number // self.chunks.branches_per_layer
        return {name: _cut(self.weights["layers"][name], place.chunk, depth) for name in names}

    def _add(self, place: Place, number: int, name: str, gradient: jax.Array | None, half: int | None = None) -> None:
        if gradient is not None:
            layers, depth = self.gradients["layers"], number // self.chunks.branches_per_layer
            row = layers[name].shape[2] // 2 if half else 0
            total = _add_at(layers[name], place.chunk, depth, gradient.astype(jnp.float32), row)
            self.gradients = self.gradients | {"layers": layers | {name: total}}

    def _rows(self, place: Place) -> Rows:
        return Rows(_take(self.batch["positions"], place.micro_batch), _take(self.batch["segment_ids"], place.micro_batch))

    def _branch_key(self, place: Place, number: int) -> jax.Array | None:
        key = self._micro_batch_key(place.micro_batch)
        return None if key is None else jax.random.fold_in(key, place.chunk * len(self.chunks.branches) + number)

    def _micro_batch_key(self, micro_batch: jax.Array) -> jax.Array | None:
        return None if self.key is None else jax.random.fold_in(self.key, micro_batch)

    def norm(self, place: Place, number: int, x_BsD: jax.Array) -> jax.Array:
        """Norm of a branch's input."""
        return self._branch(number).norm(self._layer(place, number, "vectors"), x_BsD)

    def project_in(self, place: Place, number: int, n_BSD: jax.Array) -> jax.Array:
        """Input GEMM."""
        branch = self._branch(number)
        return branch.project_in(self._layer(place, number, branch.w_in, *([branch.b_in] if branch.b_in else [])), n_BSD)

    def middle(self, place: Place, number: int, y_BSF: jax.Array) -> tuple[jax.Array, Any]:
        """Attention and nonlinearity."""
        return self._branch(number).middle_forward(y_BSF, self._rows(place))

    def project_out(self, place: Place, number: int, z_BSG: jax.Array) -> jax.Array:
        """Output GEMM."""
        return self._branch(number).project_out(self._layer(place, number, self._branch(number).w_out), z_BSG)

    def finish(self, place: Place, number: int, x_BsD: jax.Array, o_BsD: jax.Array) -> jax.Array:
        """Residual add."""
        return self._branch(number).finish(self._layer(place, number, "vectors"), x_BsD, o_BsD, self._branch_key(place, number))

    def store(self, place: Place, number: int, x_BsD: jax.Array, *kept: Any) -> None:
        """Put a branch's residuals into this unit's slot."""
        names = dict(zip(("x", "y", "saved"), (x_BsD, *kept), strict=False))
        slots = self.stash[number]
        put = {name: jax.tree.map(lambda s, v: _put(s, v, place.slot), slots[name], names[name]) for name in slots}
        self.stash = self.stash | {number: put}

    def load(self, place: Place, number: int, gradient: jax.Array) -> Any:
        """A branch's residuals, read no earlier than its gradient is there."""
        slot, _ = jax.lax.optimization_barrier((place.slot, gradient))
        kept = jax.tree.map(lambda s: _take(s, slot), self.stash[number])
        if self.chunks.recomputes:
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
        return jnp.einsum("bsd,dg->bsg", g_BSD, self._layer(place, number, self._branch(number).w_out)[self._branch(number).w_out])

    def middle_backward(self, place: Place, number: int, dz_BSG: jax.Array, y_BSF: jax.Array, saved: Any) -> tuple[jax.Array, jax.Array]:
        """Back through attention and nonlinearity; the input biases take their gradient."""
        branch = self._branch(number)
        dy_BSF, z_BSG = branch.middle_backward(y_BSF, saved, dz_BSG, self._rows(place))
        if branch.b_in:
            self._add(place, number, branch.b_in, branch.bias_in_gradient(dy_BSF))
        return dy_BSF, z_BSG

    def input_gradient_in(self, place: Place, number: int, dy_BSF: jax.Array) -> jax.Array:
        """Data gradient of the input GEMM."""
        return jnp.einsum("bsf,df->bsd", dy_BSF, self._layer(place, number, self._branch(number).w_in)[self._branch(number).w_in])

    def weight_out(self, place: Place, number: int, g_BSD: jax.Array, z_BSG: jax.Array, half: int | None = None) -> jax.Array:
        """Weight gradient of the output GEMM, or of half of its rows."""
        return self._branch(number).weight_out_gradient(_half_of(g_BSD, half), z_BSG)

    def weight_in(self, place: Place, number: int, n_BSD: jax.Array, dy_BSF: jax.Array, half: int | None = None) -> jax.Array:
        """Weight gradient of the input GEMM, or of half of its rows."""
        return self._branch(number).weight_in_gradient(_half_of(n_BSD, half), dy_BSF)

    def add_out(self, place: Place, number: int, gradient: jax.Array, half: int | None = None) -> None:
        """Accumulate it."""
        self._add(place, number, self._branch(number).w_out, gradient, half)

    def add_in(self, place: Place, number: int, gradient: jax.Array, half: int | None = None) -> None:
        """Accumulate it."""
        self._add(place, number, self._branch(number).w_in, gradient, half)

    def finish_backward(self, place: Place, number: int, g_BsD: jax.Array, x_BsD: jax.Array, dn_BsD: jax.Array) -> jax.Array:
        """Back through the norm and the residual add."""
        _, pull = jax.vjp(self._branch(number).norm, self._layer(place, number, "vectors"), x_BsD)
        d_vectors, d_x_BsD = pull(dn_BsD)
        self._add(place, number, "vectors", d_vectors["vectors"])
        return g_BsD + d_x_BsD

    def leave(self, place: Place, number: int, *values: jax.Array) -> tuple[jax.Array, ...]:
        """Hand over to the next tick."""
        return values

    # --- collectives --------------------------------------------------------------------------------------------------

    def gather(self, x_BsD: jax.Array) -> jax.Array:
        """The whole sequence, from the tensor ranks."""
        return self.communication.gather(x_BsD)

    def scatter(self, x_BSD: jax.Array) -> jax.Array:
        """Sum over the tensor ranks, this rank's part of the sequence."""
        return self.communication.reduce_scatter(x_BSD)

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
        return jax.lax.ppermute(x, axes.PIPE, [(stage, (stage + by) % p) for stage in range(p)])

    # --- what enters a slot -------------------------------------------------------------------------------------------

    def next_input(self, embedded_BsD: jax.Array, received_BsD: jax.Array | None = None) -> jax.Array:
        """The next tick's input: from the embedding on the first virtual stage, else from the stage before."""
        if received_BsD is None:
            return embedded_BsD
        return jnp.where(self._at("next_first") == 1, embedded_BsD, received_BsD)

    def next_norm(self, x_BsD: jax.Array) -> jax.Array:
        """Norm of the next tick's input."""
        return self._branch(0).norm({"vectors": _cut(self.weights["layers"]["vectors"], self._at("next_chunk"), 0)}, x_BsD)

    def gradient(self, received_BsD: jax.Array, of_head_BsD: jax.Array | None = None) -> jax.Array:
        """The gradient of this tick's backward unit, zero in an idle slot."""
        if of_head_BsD is not None:
            received_BsD = jnp.where(self._at("backward_last") == 1, of_head_BsD, received_BsD)
        return jnp.where(self._at("backward_busy") == 1, received_BsD, 0)

    # --- embedding ----------------------------------------------------------------------------------------------------

    def embed_rows(self) -> jax.Array:
        """This rank's vocabulary's share of the entering micro-batch's embeddings."""
        return self.chunks.transformer.embed_local(self.weights["ends"], _take(self.batch["tokens"], self._at("entering")))

    def embed_finish(self, x_BsD: jax.Array) -> jax.Array:
        """Learned positions and dropout."""
        return self._positioned(self.weights["ends"], x_BsD, self._at("entering"))

    def _positioned(self, ends: Mapping[str, jax.Array], x_BsD: jax.Array, micro_batch: jax.Array) -> jax.Array:
        key = self._micro_batch_key(micro_batch)
        key = None if key is None else jax.random.fold_in(key, _EMBED_KEY)
        return self.chunks.transformer.embed_finish(ends, x_BsD, _take(self.batch["positions"], micro_batch), key)

    def embed_split(self, g_BsD: jax.Array) -> jax.Array:
        """Gradient of the embedded rows where this rank finished one, zero elsewhere; learned positions take theirs."""
        own_BsD = jnp.where(self._at("late_first") == 1, g_BsD, 0)
        zero = jnp.zeros_like(own_BsD)
        ends = {name: value for name, value in self.weights["ends"].items() if name == "position"}
        _, pull = jax.vjp(lambda e, x: self._positioned(e, x, self._at("leaving")), ends, zero)
        d_ends, d_x_BsD = pull(own_BsD)
        for name, gradient in d_ends.items():
            self._add_end(name, gradient)
        return d_x_BsD

    def embed_add(self, g_BSD: jax.Array) -> None:
        """Add up the gradient of this rank's rows of the table."""
        tokens_BS = _take(self.batch["tokens"], self._at("leaving"))
        table = self.weights["ends"]["embedding"]
        _, pull = jax.vjp(lambda t: self.chunks.transformer.embed_local({"embedding": t}, tokens_BS), jnp.zeros(table.shape, jnp.float32))
        self._add_end("embedding", pull(g_BSD.astype(jnp.float32))[0])

    def _add_end(self, name: str, gradient: jax.Array) -> None:
        ends = self.gradients["ends"]
        self.gradients = self.gradients | {"ends": ends | {name: ends[name] + gradient.astype(jnp.float32)}}

    # --- head ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _targets(self) -> jax.Array:
        """Targets of the micro-batch at the head; ignored ones when there is none."""
        return jnp.where(self._at("head_busy") == 1, _take(self.batch["targets"], self._at("head")), IGNORE)

    def head_split(self, y_BsD: jax.Array) -> jax.Array:
        """The last stage's output; zero elsewhere."""
        return jnp.where(self.stage == self.chunks.stages - 1, y_BsD, 0)

    def head_norm(self, x_BsD: jax.Array) -> jax.Array:
        """The final norm."""
        return self.chunks.transformer.final_norm(self.weights["ends"], x_BsD)

    def head_project(self, n_BSD: jax.Array) -> jax.Array:
        """Logits of this rank's vocabulary."""
        return jnp.einsum("bsd,vd->bsv", n_BSD, self._table)

    def head_measure(self, logits_BSV: jax.Array) -> jax.Array:
        """This rank's part of the softmax."""
        return self.chunks.transformer.operators.loss_statistics(logits_BSV, self._targets, self._offset, self.model.vocab_size)

    def head_loss(self, statistics_n3BS: jax.Array) -> None:
        """Add up the loss."""
        loss_BS, _ = self.chunks.transformer.operators.loss_join(statistics_n3BS, self._targets)
        self.loss = self.loss + loss_BS.sum() * self.scale

    def head_differentiate(self, logits_BSV: jax.Array, statistics_n3BS: jax.Array) -> jax.Array:
        """Gradient of this rank's logits."""
        operators = self.chunks.transformer.operators
        loss_BS, log_total_BS = operators.loss_join(statistics_n3BS, self._targets)
        weight_BS = jnp.broadcast_to(self.scale, loss_BS.shape)
        return operators.loss_gradient(logits_BSV, log_total_BS, self._targets, self._offset, self.model.vocab_size, weight_BS)

    def head_input_gradient(self, d_logits_BSV: jax.Array) -> jax.Array:
        """Data gradient of the head."""
        return jnp.einsum("bsv,vd->bsd", d_logits_BSV, self._table)

    def head_weight_gradient(self, d_logits_BSV: jax.Array, n_BSD: jax.Array) -> jax.Array:
        """Gradient of this rank's rows of the head."""
        return jnp.einsum("bsv,bsd->vd", d_logits_BSV, n_BSD, preferred_element_type=jnp.float32)

    def head_add(self, gradient: jax.Array) -> None:
        """Accumulate it."""
        self._add_end(self._table_name, gradient)

    def head_finish(self, x_BsD: jax.Array, dn_BsD: jax.Array) -> jax.Array:
        """Back through the final norm, whose gradient the last stage counts."""
        vectors = {"final_vectors": self.weights["ends"]["final_vectors"]}
        _, pull = jax.vjp(self.chunks.transformer.final_norm, vectors, x_BsD)
        d_vectors, d_x_BsD = pull(dn_BsD)
        counts = self.stage == self.chunks.stages - 1
        self._add_end("final_vectors", jnp.where(counts, d_vectors["final_vectors"], 0))
        return d_x_BsD

    @property
    def _table_name(self) -> str:
        return "embedding" if self.model.tied_head else "head"

    @property
    def _table(self) -> jax.Array:
        return self.weights["ends"][self._table_name]

    @property
    def _offset(self) -> jax.Array:
        return self.communication.vocab_offset(self._table.shape[0])


def _take(stacked: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False, allow_negative_indices=False)


def _put(stacked: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, value, index, 0, allow_negative_indices=False)


def _cut(stacked: jax.Array, chunk: jax.Array, depth: int) -> jax.Array:
    sizes = (1, 1, *stacked.shape[2:])
    return jax.lax.dynamic_slice(stacked, _origin(stacked, chunk, depth, 0), sizes, allow_negative_indices=False)[0, 0]


def _half_of(x_BSD: jax.Array, half: int | None) -> jax.Array:
    """The first (0) or second (1) half of the width; all of it for ``None``."""
    middle = x_BSD.shape[-1] // 2
    return x_BSD if half is None else x_BSD[..., middle:] if half else x_BSD[..., :middle]


def _add_at(stacked: jax.Array, chunk: jax.Array, depth: int, value: jax.Array, row: int) -> jax.Array:
    # no reshape between slice and update: XLA then adds in place in one pass over the memory instead of three
    origin, sizes = _origin(stacked, chunk, depth, row), (1, 1, *value.shape)
    total = jax.lax.dynamic_slice(stacked, origin, sizes, allow_negative_indices=False) + value[None, None]
    return jax.lax.dynamic_update_slice(stacked, total, origin, allow_negative_indices=False)


def _origin(stacked: jax.Array, chunk: jax.Array, depth: int, row: int) -> tuple[jax.Array | int, ...]:
    return (chunk, jnp.int32(depth), jnp.int32(row), *[jnp.int32(0)] * (stacked.ndim - 3))


_METHODS: Mapping[str, Callable[..., Any]] = {
    **{f"{slot}.norm": Tick.norm for slot in "FRB"},
    **{f"{slot}.in": Tick.project_in for slot in "FR"},
    **{f"{slot}.middle": Tick.middle for slot in "FR"},
    **{f"{slot}.out": Tick.project_out for slot in "FR"},
    **{f"{slot}.finish": Tick.finish for slot in "FR"},
    "F.store": Tick.store,
    **{f"{slot}.load": Tick.load for slot in "RB"},
    "B.split": Tick.split,
    "B.dout": Tick.input_gradient_out,
    "B.dmiddle": Tick.middle_backward,
    "B.din": Tick.input_gradient_in,
    "B.leave": Tick.leave,
    **{f"{slot}.wout": Tick.weight_out for slot in "BL"},
    **{f"{slot}.win": Tick.weight_in for slot in "BL"},
    **{f"{slot}.addout": Tick.add_out for slot in "BL"},
    **{f"{slot}.addin": Tick.add_in for slot in "BL"},
    **{f"{slot}.finish": Tick.finish_backward for slot in "BL"},
    **{f"{slot}.gather": lambda tick, place, number, x: tick.gather(x) for slot in "FRB"},
    "B.regather": lambda tick, place, number, x: tick.gather(x),
    **{f"{slot}.scatter": lambda tick, place, number, x: tick.scatter(x) for slot in "FRBL"},
    **{f"{slot}.gather": Tick.gather for slot in "PHD"},
    **{f"{slot}.scatter": Tick.scatter for slot in "EH"},
    **dict.fromkeys(("E.sum", "H.spread", "H.sum", "D.spread"), Tick.sum_over_stages),
    "P.send_y": Tick.send_output,
    "P.send_g": Tick.send_gradient,
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
