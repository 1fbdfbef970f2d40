"""Runs the micro-batches of one step through this rank's chunks: interleaved 1F1B, loops over the ticks of a `Schedule`, each
tick a `TickPlan`. One stage is a pipeline too: it goes through its chunks tick by tick, so that it hides the same messages.

What changes in every tick is carried through it (`_tick`): inputs, stash, the sums of a window. What changes where a window
ends (`windows.py`) lies around the ticks: weights that have arrived, totals of the gradients, shards that have left. So no
tick both reads and writes the large arrays, and XLA copies none of them. Where a window is a single tick, its writes hang on
its reads (`behind`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megascale_jax import axes
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import ParallelConfig
from megascale_jax.config.stages import EMPTY
from megascale_jax.kernels.clock.api import Clock, Stamps
from megascale_jax.model.branch import branches_of
from megascale_jax.model.order import TokenOrder
from megascale_jax.model.transformer import Transformer
from megascale_jax.parallel.pipeline.engine import run_phases
from megascale_jax.parallel.pipeline.loops import Loop, Run, forward_loops, training_loops
from megascale_jax.parallel.pipeline.operations import LATE, fill_operations, settle_operations, tick_operations
from megascale_jax.parallel.pipeline.phases import TickPlan, plan_phases, plan_tick
from megascale_jax.parallel.pipeline.residuals import Residuals
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.shape import TickShape, light_operations, tick_shape
from megascale_jax.parallel.pipeline.stamps import StepStamps, step_stamps
from megascale_jax.parallel.pipeline.table import keep_slots, schedule_table
from megascale_jax.parallel.pipeline.tick import Tick
from megascale_jax.parallel.pipeline.tick_state import Batch, Chunks, Constants, fold_rank, zero_gradients
from megascale_jax.parallel.pipeline.windows import State, Windows
from megascale_jax.parallel.zero import Shards, ZeroSharding

Carry = dict[str, Any]
Make = Callable[[jax.Array, Carry], Tick]
"""A tick of a row of the table and a carry."""


class Pipeline:
    """Interleaved 1F1B over ``pipe`` stages, each tick a list of phases; its methods run inside ``shard_map``.

    ``params`` are this rank's shards of the logical parameters, a batch is ``[m, B, S]``. Gradients add up in fp32 whatever the
    compute type. Micro-batches without a valid token contribute zero. With a ``clock`` the ticks of a step take stamps (`stamps.py`).
    """

    def __init__(self, transformer: Transformer, layout: Layout, parallel: ParallelConfig, zero: ZeroSharding, clock: Clock | None = None):
        self.transformer, self.layout, self.remat, self.zero = transformer, layout, parallel.remat, zero
        self.clock = clock
        self.delay: Literal[0, 1] = parallel.backward_delay
        self.axis_sizes = layout.mesh.by_axis
        self.shape = tick_shape(transformer.model, parallel, layout)
        self.order = TokenOrder(parallel.micro_batch_size, layout.mesh.tensor, 2 if self.shape.split else 1)
        self.branches = tuple(
            branch
            for window in layout.chunk_windows
            for branch in branches_of(transformer.model, transformer.columns, transformer.operators, window, self.order)
        )
        self.light = light_operations(transformer.model, layout)
        self.plan = cache(self._plan)

    def _plan(self, kind: TickKind) -> TickPlan:
        return plan_tick(kind, self.shape, self.axis_sizes, self.light)

    def schedule(self, micro_batches: int, backward_delay: Literal[0, 1] | None = None) -> Schedule:
        """The schedule of a step of so many micro-batches."""
        delay = self.delay if backward_delay is None else backward_delay
        return Schedule(self.layout.mesh.pipe, self.layout.virtual_stages, micro_batches, delay)

    def stamps(self, micro_batches: int) -> StepStamps:
        """Which stamp is which of those that a step with a clock takes."""
        return step_stamps(self.schedule(micro_batches), self.shape, self.plan, *self._ends)

    @cached_property
    def _ends(self) -> tuple[TickPlan, TickPlan]:
        """What fills the pipeline, and what settles it after ticks in halves."""
        return plan_phases(fill_operations(self.shape), self.axis_sizes), plan_phases(settle_operations(), self.axis_sizes)

    def loss(self, params: Shards, batch: Batch) -> jax.Array:
        """Summed negative log-likelihoods of this rank's rows, nats: ``m v + p - 1`` ticks forward, all weights gathered before."""
        schedule, batch = self.schedule(batch["tokens"].shape[0], 0), self._stored(batch)
        shape = replace(self.shape, recompute=False, backward_delay=0, turns=False, split=False)
        chunks, weights = self._chunks(shape), self.zero.gather(params)

        def plan(kind: TickKind) -> TickPlan:
            operations = [o for o in tick_operations(kind, shape) if o.verb != "store"]
            return plan_phases(operations, self.axis_sizes)

        constants = Constants(weights, batch, None, jnp.float32(1))
        held = {"stash": {}, "kept": {}, "sums": {}, "arriving": {}, "gradients": {}, "loss": jnp.float32(0), "now": {}}
        rows = _stage_rows(schedule)
        carry = self._filled(Tick(chunks, constants, rows[0], held), shape, Stamps(None))
        for loop in forward_loops(schedule):
            carry, _ = _repeat(partial(self._loop, loop, plan, partial(Tick, chunks, constants)), carry, loop, rows)
        return carry["held"]["loss"]

    def _loop(self, loop: Loop, plan: Callable[[TickKind], TickPlan], make: Make, carry: Carry, rows: jax.Array) -> tuple[Carry, None]:
        """One repetition of a loop in which no window ends."""
        start = 0
        for run in loop.runs:
            carry, _, _ = self._ticks(plan(run.kind), run.kind, make, carry, rows[start : start + run.ticks])
            start += run.ticks
        return carry, None

    def loss_and_gradients(
        self, params: Shards, batch: Batch, scale: jax.Array, key: jax.Array | None = None, stamps: Stamps | None = None
    ) -> tuple[jax.Array, Shards]:
        """``scale`` times the summed loss of all micro-batches of this rank; its gradients, fp32, for this rank's shards.

        ``scale`` is one over the valid tokens of the global batch, so nothing is divided afterwards; ``key`` draws the dropout.
        ``stamps`` takes those of `stamps.py`, if there is a clock.
        """
        stamps = stamps or Stamps(self.clock)
        schedule, batch = self.schedule(batch["tokens"].shape[0]), self._stored(batch)
        chunks = self._chunks(self.shape)
        windows = Windows(self.zero, chunks)
        rows, shards, small = _stage_rows(schedule), self.zero.shards(params), self.zero.gather_small(params)
        with jax.named_scope("fill"):
            state = windows.start(shards)
            stamps.take(state.weights)

        def constants(state: State) -> Constants:
            weights = small | {"layers": small["layers"] | state.weights}
            return Constants(weights, batch, None if key is None else fold_rank(key), scale, shards, state.totals)

        residuals = Residuals(self.branches, self.shape, self.remat, windows, batch, _activation(small, batch, self.axis_sizes))
        held = {
            "stash": residuals.stash(schedule.slots + 1),
            "kept": residuals.rings(keep_slots(schedule)),
            "sums": windows.empty_sums(),
            "arriving": windows.empty_arriving(shards),
            "gradients": zero_gradients(small),
            "loss": jnp.float32(0),
            "now": windows.first_turn(state),
        }
        carry = self._filled(Tick(chunks, constants(state), rows[0], held), self.shape, stamps)

        def window(run: Run, both: tuple[Carry, State], rows: jax.Array) -> tuple[tuple[Carry, State], jax.Array | None]:
            carry, state = both
            make = partial(Tick, chunks, constants(state))
            carry, moved, taken = self._ticks(self.plan(run.kind), run.kind, make, carry, rows)
            if run.closes:
                with jax.named_scope(f"{run.kind.part}/close"):
                    carry["held"], state = windows.close(run.kind, make(rows[-1], carry["held"]), state, moved)
            return (carry, state), taken

        both = (carry, state)
        for loop in training_loops(schedule):
            if "late_half" in both[0] and not self.shape.in_halves(loop.runs[0].kind):
                both = self._settled(Tick(chunks, constants(both[1]), rows[loop.start + 1], both[0]["held"]), both[0], stamps), both[1]
            both, taken = _repeat(partial(_run_by_run, window, loop), both, loop, rows)
            for stamped in taken:
                stamps.append(stamped, both[0]["clock"])
        carry, state = both
        with jax.named_scope("drain"):
            left = windows.finish(state)
            stamps.take(left)  # no barrier: they are put in place
            matrices = self.zero.logical(left)
            gradients = self.zero.scatter_small(self._without_pads(carry["held"]["gradients"]))
        return carry["held"]["loss"], gradients | matrices

    def _chunks(self, shape: TickShape) -> Chunks:
        per_layer = len(self.branches) // self.layout.layers_per_chunk
        return Chunks(self.transformer, self.branches, per_layer, self.layout.mesh.pipe, shape)

    def _stored(self, batch: Batch) -> Batch:
        """The batch with its tokens in the order of activations, ``[m, 1, B S]``."""
        return {name: jax.vmap(self.order.from_text)(value) for name, value in batch.items()}

    def _filled(self, tick: Tick, shape: TickShape, stamps: Stamps) -> Carry:
        """The carry before the first tick: its input is there, nothing is late."""
        split, ends = shape.split, "_a" if shape.split else ""
        plan = plan_phases(fill_operations(shape), self.axis_sizes)
        with jax.named_scope("fill"):
            first, zero = run_phases(plan, tick.execute, {}, ("E.x", f"next.x{ends}", f"next.N{ends}"), stamps)
        tick.loss = tick.loss + zero
        wait_BsD, x_BsD, N_BSD = first["E.x"], first[f"next.x{ends}"], first[f"next.N{ends}"]
        whole_BSD = jnp.zeros((N_BSD.shape[0], N_BSD.shape[1] * (2 if split else 1), N_BSD.shape[2]), N_BSD.dtype)
        late = {"g": jnp.zeros_like(wait_BsD), "x": jnp.zeros_like(wait_BsD), "dN": whole_BSD}
        carry = {"x": x_BsD, "N": N_BSD, "wait": wait_BsD, "last": jnp.zeros_like(x_BsD), "late": late, "held": tick.held}
        carry["clock"] = stamps.last
        return carry | {"late_half": {"o": jnp.zeros_like(N_BSD), "x_b": jnp.zeros_like(x_BsD)}} if split else carry

    def _settled(self, tick: Tick, carry: Carry, stamps: Stamps) -> Carry:
        """From the carry of ticks in halves to that of the first whole one, which ``tick`` is."""
        with jax.named_scope("settle"):
            whole, zero = run_phases(self._ends[1], tick.execute, _half_values(carry), ("F0.x", "F0.N", "last.y"), stamps)
        tick.loss = tick.loss + zero
        if self.shape.turns:
            tick.hold("forward", tick.looked_up_chunk(tick.column("forward_chunk")))
        rest = {name: value for name, value in carry.items() if name != "late_half"}
        return rest | {"x": whole["F0.x"], "N": whole["F0.N"], "last": whole["last.y"], "held": tick.held, "clock": stamps.last}

    def _ticks(
        self, plan: TickPlan, kind: TickKind, make: Make, carry: Carry, rows: jax.Array
    ) -> tuple[Carry, dict[str, jax.Array], jax.Array | None]:
        """Ticks of one kind; the carry after them, what left in each, and their stamps, both ``[tick, ...]``."""
        step = partial(self._tick, plan, kind, make)
        if rows.shape[0] > 1:
            carry, (moved, taken) = jax.lax.scan(step, carry, rows)
        else:
            carry, results = step(carry, rows[0])
            moved, taken = jax.tree.map(lambda leaf: leaf[None], results)
        return carry, moved, taken

    def _tick(
        self, plan: TickPlan, kind: TickKind, make: Make, carry: Carry, row: jax.Array
    ) -> tuple[Carry, tuple[dict[str, jax.Array], jax.Array | None]]:
        tick, stamps = make(row, carry["held"]), Stamps(None if carry["clock"] is None else self.clock, carry["clock"])
        halves = "late_half" in carry
        values = {f"late.{name}": value for name, value in carry["late"].items()} | {"wait.x": carry["wait"]}
        values |= _half_values(carry) if halves else {"F0.x": carry["x"], "F0.N": carry["N"], "last.y": carry["last"]}
        if kind.weight_gradients and self.shape.turns:
            values |= tick.recall()
        output, ends = (f"a{len(self.branches)}.x", "_a") if halves else (f"F{len(self.branches)}.x", "")
        leaving = [operation.writes[0] for operation in plan.operations if operation.verb.startswith("scatter_")]
        sums = [value for operation in plan.operations if operation.slot == "W" for value in operation.writes if ".sum_" in value]
        wanted = [
            *((f"next.x{ends}", f"next.N{ends}", output) if kind.forward else ()),
            *(("left.o", "left.x_b") if halves else ()),
            *(("E.x",) if kind.embed and kind.forward else ()),
            *((f"left.{name}" for name in LATE) if kind.backward else ()),
            *leaving,
            *sums,
        ]
        with jax.named_scope(kind.part):
            result, zero = run_phases(plan, tick.execute, values | {"part": tick.part, "turn": tick.turns}, wanted, stamps)
        tick.loss = tick.loss + zero
        if sums:
            tick.sums = {number: {m: self._sums(result, number, m) for m in ("in", "out")} for number in range(len(self.branches))}
        after = dict(carry) | {"held": tick.held, "clock": stamps.last}
        if kind.forward:
            after |= {"x": result[f"next.x{ends}"], "N": result[f"next.N{ends}"], "last": result[output]}
            after["wait"] = result.get("E.x", carry["wait"])
        if halves:
            after["late_half"] = {"o": result["left.o"], "x_b": result["left.x_b"]}
        if kind.backward:
            after["late"] = {name: result[f"left.{name}"] for name in LATE}
        return after, ({name: result[name] for name in leaving}, stamps.all())

    def _sums(self, values: dict[str, jax.Array], number: int, matrix: str) -> tuple[jax.Array, ...]:
        return tuple(values[f"W{number}.sum_{matrix}{half}"] for half in self.shape.halves(number, matrix))

    def _without_pads(self, gradients: Any) -> Any:
        """No gradient where a chunk is shorter than the deepest one; all others of such a layer are zero by themselves."""
        if self.layout.stages.is_even:
            return gradients
        layers = gradients["layers"]
        real_SVL = jnp.asarray(np.array(self.layout.stages.table) != EMPTY)
        real = real_SVL[jax.lax.axis_index(axes.PIPE)][:, :, None, None]
        return gradients | {"layers": layers | {"vectors": jnp.where(real, layers["vectors"], 0)}}


def _half_values(carry: Carry) -> dict[str, jax.Array]:
    late = {f"late.{name}": value for name, value in carry["late_half"].items()}
    return late | {"a0.x": carry["x"], "a0.N": carry["N"], "last.y_a": carry["last"], "wait.x": carry["wait"]}


def _run_by_run(body: Callable[[Run, Any, jax.Array], tuple[Any, Any]], loop: Loop, carry: Any, rows: jax.Array) -> tuple[Any, list[Any]]:
    """One repetition of a loop: the carry, and what each of its runs gave, stacked if that is repeated."""
    start, given = 0, []
    for run in loop.runs:
        own = rows[start : start + run.ticks].reshape(run.repeats, run.length, -1)
        carry, one = body(run, carry, own[0]) if run.repeats == 1 else jax.lax.scan(partial(body, run), carry, own)
        given.append(one)
        start += run.ticks
    return carry, given


def _repeat(body: Callable[[Any, jax.Array], tuple[Any, Any]], carry: Any, loop: Loop, rows: jax.Array) -> tuple[Any, Any]:
    """All repetitions of a loop: the carry, and what each gave, stacked if there is more than one.

    ``rows``: this stage's rows of the schedule's table, the first one the fill's.
    """
    own = rows[loop.start + 1 :][: loop.period * loop.repeats].reshape(loop.repeats, loop.period, -1)
    return body(carry, own[0]) if loop.repeats == 1 else jax.lax.scan(body, carry, own)


def _stage_rows(schedule: Schedule) -> jax.Array:
    """This stage's rows of the schedule's table, int32 ``[ticks + 2, len(COLUMNS)]``."""
    # behind a barrier: XLA moves a constant into the loops and then tries, and fails, to evaluate what the ticks make of it
    table = jax.lax.optimization_barrier(jnp.asarray(np.array(schedule_table(schedule), np.int32)))
    return table[jax.lax.axis_index(axes.PIPE)]


def _activation(weights: Any, batch: Batch, axis_sizes: Any) -> jax.ShapeDtypeStruct:
    """Shape of this rank's part of a residual stream."""
    table = weights["ends"]["embedding"]
    _, rows, length = batch["tokens"].shape
    return jax.ShapeDtypeStruct((rows, length // axis_sizes[axes.TENSOR], table.shape[1]), table.dtype)
