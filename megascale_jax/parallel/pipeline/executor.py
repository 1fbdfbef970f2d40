"""Runs the micro-batches of one step through this rank's chunks and adds up loss and gradients.

`OneStage` is for a mesh without pipeline: each micro-batch forward, then backward, differentiated by JAX. `Pipeline` runs
interleaved 1F1B: loops over the ticks of a `Schedule`, each tick a `TickPlan`. Both run inside ``shard_map``. Gradients
accumulate in fp32 whatever the compute type. Micro-batches without a valid token contribute zero.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from megascale_jax import axes
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import ParallelConfig
from megascale_jax.config.stages import EMPTY
from megascale_jax.model.branch import Rows, branches_of
from megascale_jax.model.transformer import Transformer
from megascale_jax.parallel.pipeline.engine import run_phases
from megascale_jax.parallel.pipeline.loops import Loop, forward_loops, training_loops
from megascale_jax.parallel.pipeline.operations import (
    LATE,
    TickShape,
    fill_operations,
    late_operations,
    light_operations,
    tick_operations,
    tick_shape,
)
from megascale_jax.parallel.pipeline.phases import TickPlan, plan_phases
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.table import schedule_table
from megascale_jax.parallel.pipeline.tick import Tick
from megascale_jax.parallel.pipeline.tick_state import Batch, Chunks

Carry = dict[str, Any]


class Executor(Protocol):
    """What the step asks of it; weights are those of `ZeroSharding.gather`, a batch is ``[m, B, S]``."""

    def loss(self, weights: Mapping[str, Any], batch: Batch) -> jax.Array:
        """Sum of the negative log-likelihoods of this rank's rows, nats."""
        ...

    def loss_and_gradients(
        self, weights: Mapping[str, Any], batch: Batch, scale: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """``scale`` times the summed loss of all micro-batches of this rank, and its gradients, fp32.

        ``scale`` is one over the valid tokens of the global batch, so nothing is divided afterwards.
        """
        ...


class OneStage:
    """The executor of a pipeline with one stage."""

    def __init__(self, transformer: Transformer):
        self.transformer = transformer

    def hidden(self, weights: Mapping[str, Any], batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Output of the last layer for one micro-batch ``[B, S]``, ``[B, s, D]``."""
        model = self.transformer
        embed_key, layer_key = (None, None) if key is None else jax.random.split(key)
        x_BsD = model.embed(weights["ends"], batch["tokens"], batch["positions"], embed_key)
        rows = Rows(batch["positions"], batch["segment_ids"])
        chunk = {name: value[0] for name, value in weights["layers"].items()}
        return model.layers(chunk, x_BsD, rows, model.model.windows, layer_key)

    def loss(self, weights: Mapping[str, Any], batch: Batch) -> jax.Array:
        """See `Executor`."""
        return jax.lax.map(partial(self._loss, weights), dict(batch)).sum()

    def _loss(self, weights: Mapping[str, Any], micro_batch: Batch, key: jax.Array | None = None) -> jax.Array:
        return self.transformer.loss(weights["ends"], self.hidden(weights, micro_batch, key), micro_batch["targets"])

    def loss_and_gradients(
        self, weights: Mapping[str, Any], batch: Batch, scale: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """See `Executor`."""

        def one(weights: Any, micro_batch: Batch, key: jax.Array | None) -> jax.Array:
            return self._loss(weights, micro_batch, key) * scale

        count = batch["tokens"].shape[0]
        keys = None if key is None else jax.random.split(_fold_rank(key), count)

        def accumulate(carry: tuple[jax.Array, Any], xs: tuple[Batch, jax.Array | None]) -> tuple[tuple[jax.Array, Any], None]:
            loss, gradients = jax.value_and_grad(one)(weights, *xs)
            return (carry[0] + loss, jax.tree.map(lambda total, g: total + g.astype(jnp.float32), carry[1], gradients)), None

        if count == 1:
            loss, gradients = jax.value_and_grad(one)(weights, *jax.tree.map(lambda x: x[0], (batch, keys)))
            return loss, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        return jax.lax.scan(accumulate, (jnp.float32(0), _zero_gradients(weights)), (batch, keys))[0]


class Pipeline:
    """Interleaved 1F1B over ``pipe`` stages, each tick a list of phases."""

    def __init__(self, transformer: Transformer, layout: Layout, parallel: ParallelConfig):
        self.transformer, self.layout, self.remat = transformer, layout, parallel.remat
        self.delay: Literal[0, 1] = parallel.backward_delay
        self.branches = tuple(
            branch
            for window in layout.chunk_windows
            for branch in branches_of(transformer.model, transformer.columns, transformer.operators, window)
        )
        self.axis_sizes = layout.mesh.by_axis
        self.shape = tick_shape(transformer.model, parallel, layout)
        self.light = light_operations(transformer.model, layout)
        self.plan = cache(self._plan)

    def _plan(self, kind: TickKind) -> TickPlan:
        return plan_phases(tick_operations(kind, self.shape), self.axis_sizes, self.light)

    def schedule(self, micro_batches: int, backward_delay: Literal[0, 1] | None = None) -> Schedule:
        """The schedule of a step of so many micro-batches."""
        delay = self.delay if backward_delay is None else backward_delay
        return Schedule(self.layout.mesh.pipe, self.layout.virtual_stages, micro_batches, delay)

    def loss(self, weights: Mapping[str, Any], batch: Batch) -> jax.Array:
        """See `Executor`; a forward pass in ``m v + p - 1`` ticks."""
        schedule = self.schedule(batch["tokens"].shape[0], 0)
        shape = TickShape(len(self.branches), recompute=False, backward_delay=0)
        chunks = self._chunks(recomputes=False)

        def plan(kind: TickKind) -> TickPlan:
            operations = [o for o in tick_operations(kind, shape) if o.verb != "store"]
            return plan_phases(operations, self.axis_sizes, self.light)

        make = partial(Tick, chunks, weights, batch, None, jnp.float32(1))
        held = {"stash": {}, "gradients": {}, "loss": jnp.float32(0)}
        rows = _stage_rows(schedule)
        carry = self._filled(make(rows[0], held), like=_activation(weights, batch, self.axis_sizes))
        for loop in forward_loops(schedule):
            carry = self._run_loop(loop, plan, make, carry, rows)
        return carry["held"]["loss"]

    def loss_and_gradients(
        self, weights: Mapping[str, Any], batch: Batch, scale: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """See `Executor`."""
        schedule = self.schedule(batch["tokens"].shape[0])
        chunks = self._chunks(recomputes=self.remat == "full")
        rows = _stage_rows(schedule)
        make = partial(Tick, chunks, weights, batch, None if key is None else _fold_rank(key), scale)
        like = _activation(weights, batch, self.axis_sizes)
        held = {
            "stash": self._empty_stash(schedule.slots + 1, weights, batch, like),
            "gradients": _zero_gradients(weights),
            "loss": jnp.float32(0),
        }
        carry = self._filled(make(rows[0], held), like)
        for loop in training_loops(schedule):
            carry = self._run_loop(loop, self.plan, make, carry, rows)
        tick = make(rows[-1], carry["held"])
        operations = late_operations(embed_backward=True, halved=self.shape.halved)
        with jax.named_scope("drain"):
            _, zero = run_phases(plan_phases(operations, self.axis_sizes), tick.execute, _late_values(carry), ())
        return tick.loss + zero, self._without_pads(tick.gradients)

    def _chunks(self, *, recomputes: bool) -> Chunks:
        per_layer = len(self.branches) // self.layout.layers_per_chunk
        return Chunks(self.transformer, self.branches, per_layer, self.layout.mesh.pipe, recomputes)

    def _filled(self, tick: Tick, like: jax.ShapeDtypeStruct) -> Carry:
        """The carry before the first tick: its input is there, nothing is late."""
        plan = plan_phases(fill_operations(), self.axis_sizes)
        with jax.named_scope("fill"):
            first, zero = run_phases(plan, tick.execute, {}, ("next.x", "next.N"))
        tick.loss = tick.loss + zero
        zero = jnp.zeros(like.shape, like.dtype)
        late = dict.fromkeys(("g", "x"), zero) | {name: jnp.zeros_like(first["next.N"]) for name in ("dN", "G", "N")}
        held = tick.held
        if held["gradients"]:
            branch = self.branches[0]
            widths = {name: held["gradients"]["layers"][group].shape[-1] for name, group in (("z", branch.w_out), ("dy", branch.w_in))}
            late |= {name: jnp.zeros((*first["next.N"].shape[:2], width), like.dtype) for name, width in widths.items()}
        return {"x": first["next.x"], "N": first["next.N"], "wait": first["next.x"], "last": zero, "late": late, "held": held}

    def _run_loop(
        self, loop: Loop, plan: Callable[[TickKind], TickPlan], make: Callable[..., Tick], carry: Carry, rows: jax.Array
    ) -> Carry:
        """``rows``: this stage's rows of the schedule's table; the first one is the fill's."""

        def repetition(carry: Carry, rows: jax.Array) -> tuple[Carry, None]:
            start = 0
            for run in loop.runs:
                step, own = partial(self._tick, plan(run.kind), run.kind, make), rows[start : start + run.length]
                carry = step(carry, own[0])[0] if run.length == 1 else jax.lax.scan(step, carry, own)[0]
                start += run.length
            return carry, None

        count = loop.period * loop.repeats
        own = rows[loop.start + 1 : loop.start + 1 + count]
        if loop.repeats == 1:
            return repetition(carry, own)[0]
        return jax.lax.scan(repetition, carry, own.reshape(loop.repeats, loop.period, -1))[0]

    def _tick(self, plan: TickPlan, kind: TickKind, make: Callable[..., Tick], carry: Carry, row: jax.Array) -> tuple[Carry, None]:
        tick = make(row, carry["held"])
        values = {"F0.x": carry["x"], "F0.N": carry["N"], "wait.x": carry["wait"], "last.y": carry["last"], **_late_values(carry)}
        output = f"F{len(self.branches)}.x"
        wanted = [
            *(("next.x", "next.N", output) if kind.forward else ()),
            *(("E.x",) if kind.embed and kind.forward else ()),
            *((f"left.{name}" for name in LATE) if kind.backward else ()),
        ]
        with jax.named_scope(kind.part):
            result, zero = run_phases(plan, tick.execute, values, wanted)
        tick.loss = tick.loss + zero
        after = dict(carry) | {"held": tick.held}
        if kind.forward:
            after |= {"x": result["next.x"], "N": result["next.N"], "last": result[output], "wait": result.get("E.x", carry["wait"])}
        if kind.backward:
            after["late"] = {name: result[f"left.{name}"] for name in LATE}
        return after, None

    def _empty_stash(self, slots: int, weights: Mapping[str, Any], batch: Batch, like: jax.ShapeDtypeStruct) -> dict[int, Any]:
        """Zeros for what `Tick.store` keeps; ``slots`` is one more than the schedule's: idle ticks write there."""
        whole = (like.shape[0], batch["tokens"].shape[2])
        ids = jax.ShapeDtypeStruct(whole, jnp.int32)
        stash: dict[int, Any] = {}
        for number, branch in enumerate(self.branches[:1] if self.remat == "full" else self.branches):
            kept: dict[str, Any] = {"x": like}
            if self.remat != "full":
                kept["y"] = jax.ShapeDtypeStruct((*whole, weights["layers"][branch.w_in].shape[-1]), like.dtype)
            if self.remat == "none":
                kept["saved"] = jax.eval_shape(lambda y, p, s, b=branch: b.middle_forward(y, Rows(p, s))[1], kept["y"], ids, ids)
            stash[number] = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), kept)
        return stash

    def _without_pads(self, gradients: Any) -> Any:
        """No gradient where a chunk is shorter than the deepest one; all others of such a layer are zero by themselves."""
        if self.layout.stages.is_even:
            return gradients
        layers = gradients["layers"]
        real_SVL = jnp.asarray(np.array(self.layout.stages.table) != EMPTY)
        real = real_SVL[jax.lax.axis_index(axes.PIPE)][:, :, None, None]
        return gradients | {"layers": layers | {"vectors": jnp.where(real, layers["vectors"], 0)}}


def _stage_rows(schedule: Schedule) -> jax.Array:
    """This stage's rows of the schedule's table, int32 ``[ticks + 2, len(COLUMNS)]``."""
    return jnp.asarray(np.array(schedule_table(schedule), np.int32))[jax.lax.axis_index(axes.PIPE)]


def _late_values(carry: Carry) -> dict[str, jax.Array]:
    return {f"late.{name}": value for name, value in carry["late"].items()}


def _activation(weights: Mapping[str, Any], batch: Batch, axis_sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """Shape of this rank's part of a residual stream."""
    table = weights["ends"]["embedding"]
    _, rows, length = batch["tokens"].shape
    return jax.ShapeDtypeStruct((rows, length // axis_sizes[axes.TENSOR], table.shape[1]), table.dtype)


def _zero_gradients(weights: Mapping[str, Any]) -> Any:
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)


def _fold_rank(key: jax.Array) -> jax.Array:
    """A key of this rank's own, so that no two ranks drop the same elements."""
    for axis in axes.MESH_AXES:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key
