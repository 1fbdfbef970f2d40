"""The order of a tick: phases that pair compute with communication, planned from its operations. No JAX.

A *phase* is at most one compute and at most one collective per mesh axis, which run at the same time, and copies of weights that
belong to one of them; the engine puts a barrier on both sides, so this list is the order on the device and the reader's overlap plan.

The rule: walk forward in phases. Of what is ready (all it reads comes from earlier phases, with glue in between), take the
compute with the longest chain of work behind it, and per mesh axis the collective with the longest chain behind it, `IN_FLIGHT`
in all; equal chains go by the order of the table. Where no compute is ready, a collective that makes one ready goes first.
Weight gradients have nothing behind them, so they fill the phases in which a chain waits for a message. What goes beside
another operation (a ZeRO-2 piece, a copy of weights) shares its phase. What covers nothing is glue: a *light* compute (the
head, where the vocabulary is split many ways, as long as there are weight gradients to cover messages instead), and a collective
over an axis of size 1, which has no link. Another model
(serial blocks, no tensor axis, full recomputation) is another table, not another planner.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megascale_jax.parallel.pipeline.operation import Operation
from megascale_jax.parallel.pipeline.operations import tick_operations
from megascale_jax.parallel.pipeline.schedule import TickKind
from megascale_jax.parallel.pipeline.shape import TickShape

IN_FLIGHT = 2
"""Collectives of a phase: XLA gives out two communication streams in turn, and a third would queue behind one of two."""


@dataclass(frozen=True)
class Phase:
    """Names of the operations between two barriers."""

    compute: str | None
    collectives: tuple[str, ...]
    copies: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Collectives first: their starts come before the kernel."""
        return (*self.collectives, *((self.compute,) if self.compute else ()), *self.copies)


@dataclass(frozen=True)
class TickPlan:
    """A tick's operations and its phases, in order."""

    operations: tuple[Operation, ...]
    phases: tuple[Phase, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Operation]:
        """Operations by name."""
        return {operation.name: operation for operation in self.operations}

    @property
    def inputs(self) -> frozenset[str]:
        """Values that the tick starts with."""
        written = {value for operation in self.operations for value in operation.writes}
        return frozenset(value for operation in self.operations for value in operation.reads) - written

    @property
    def bare(self) -> tuple[str, ...]:
        """Collectives in a phase without compute: their time is exposed."""
        return tuple(name for phase in self.phases if phase.compute is None for name in phase.collectives)

    def table(self) -> str:
        """The phases as text, ``compute | collectives`` a line."""
        width = max((len(phase.compute or "-") for phase in self.phases), default=1)
        return "\n".join(
            f"{phase.compute or '-':{width}} | {', '.join((*phase.collectives, *phase.copies)) or '-'}" for phase in self.phases
        )


def plan_tick(kind: TickKind, shape: TickShape, axis_sizes: Mapping[str, int], light: Collection[str]) -> TickPlan:
    """The plan of a tick. ``light`` computes count as such only where weight gradients are there to cover messages instead."""
    return plan_phases(tick_operations(kind, shape), axis_sizes, light if kind.weight_gradients else ())


def plan_phases(operations: Iterable[Operation], axis_sizes: Mapping[str, int], light: Collection[str] = ()) -> TickPlan:
    """Order the operations of a tick by the rule above; ``light`` names the computes that cover no message.

    Raises AssertionError for operations that wait for each other.
    """
    table = _weighed(tuple(operations), axis_sizes, light)
    depth = _depths(table)
    available = set(TickPlan(table, ()).inputs)
    waiting = [operation for operation in table if operation.kind != "glue"]
    phases: list[Phase] = []
    available |= _glued(table, available)
    while waiting:
        ready = sorted((o for o in waiting if available.issuperset(o.reads)), key=lambda o: -depth[o.name])
        assert ready, f"operations wait for each other: {[operation.name for operation in waiting]}"
        compute = next((o for o in ready if o.kind == "compute"), None)
        moving = [o for o in ready if o.kind == "collective"]
        if compute is None:
            moving.sort(key=lambda o: not _lets_compute(o, waiting, table, available))
        collectives = [o for o in moving if compute is not None and o.beside == compute.name]
        for operation in [o for o in moving if o.beside is None]:
            taken = {axis for other in collectives for axis in other.axes}
            if len(collectives) < IN_FLIGHT and not taken.intersection(operation.axes):
                collectives.append(operation)
        chosen = [*collectives, *([compute] if compute else [])]
        assert chosen, f"operations wait for what does not run: {[(o.name, o.beside) for o in ready]}"
        copies = [o for o in ready if o.kind == "copy" and o.beside in [other.name for other in chosen]]
        phases.append(Phase(compute.name if compute else None, tuple(o.name for o in collectives), tuple(o.name for o in copies)))
        chosen += copies
        waiting = [operation for operation in waiting if operation not in chosen]
        available |= {value for operation in chosen for value in operation.writes}
        available |= _glued(table, available)
    return TickPlan(table, tuple(phases))


def validate_phases(plan: TickPlan) -> None:
    """Prove a plan, whoever made it: every operation once, nothing before what it reads, one collective per mesh axis.

    Raises AssertionError with the first fault.
    """
    writes = [value for operation in plan.operations for value in operation.writes]
    assert len(set(writes)) == len(writes), f"written twice: {sorted({value for value in writes if writes.count(value) > 1})}"
    planned = [name for phase in plan.phases for name in phase.names]
    heavy = [operation.name for operation in plan.operations if operation.kind != "glue"]
    assert sorted(planned) == sorted(heavy), f"planned {sorted(planned)}, expected {sorted(heavy)}"
    available = set(plan.inputs)
    available |= _glued(plan.operations, available)
    for phase in plan.phases:
        links = [axis for name in phase.collectives for axis in plan.by_name[name].axes]
        assert len(set(links)) == len(links), f"two collectives on one axis in {phase}"
        for name in phase.names:
            beside = plan.by_name[name].beside
            assert beside in (None, *phase.names), f"{name} goes with {beside}, not with {phase}"
        for name in phase.names:
            missing = set(plan.by_name[name].reads) - available
            assert not missing, f"{name} runs before {sorted(missing)}"
        available |= {value for name in phase.names for value in plan.by_name[name].writes}
        available |= _glued(plan.operations, available)
    unread = {value for operation in plan.operations for value in operation.reads} - available
    assert not unread, f"never written: {sorted(unread)}"


def _weighed(table: tuple[Operation, ...], axis_sizes: Mapping[str, int], light: Collection[str]) -> tuple[Operation, ...]:
    """Glue where an operation costs nothing worth a phase, and a copy beside such a one."""
    nothing = {o.name for o in table if o.name in light or (o.axes and all(axis_sizes[axis] == 1 for axis in o.axes))}
    nothing |= {o.name for o in table if o.kind == "copy" and o.beside in nothing}
    return tuple(replace(o, kind="glue") if o.name in nothing else o for o in table)


def _lets_compute(collective: Operation, waiting: Iterable[Operation], table: Sequence[Operation], available: Collection[str]) -> bool:
    """Whether a compute is ready once this collective is done."""
    then = {*available, *collective.writes}
    then |= _glued(table, then)
    return any(o.kind == "compute" and then.issuperset(o.reads) for o in waiting)


def _glued(table: Sequence[Operation], available: Collection[str]) -> set[str]:
    """Values that glue makes of the available ones, directly or through other glue."""
    known = set(available)
    pending = [operation for operation in table if operation.kind == "glue"]
    while True:
        done = [operation for operation in pending if known.issuperset(operation.reads)]
        if not done:
            return known - set(available)
        known |= {value for operation in done for value in operation.writes}
        pending = [operation for operation in pending if operation not in done]


def _depths(table: Sequence[Operation]) -> dict[str, int]:
    """Heavy operations on the longest chain that starts with each operation, itself included."""
    readers: dict[str, list[Operation]] = {}
    for operation in table:
        for value in operation.reads:
            readers.setdefault(value, []).append(operation)
    depths: dict[str, int] = {}

    def depth(operation: Operation) -> int:
        if operation.name not in depths:
            after = [depth(reader) for value in operation.writes for reader in readers.get(value, ())]
            depths[operation.name] = (operation.kind != "glue") + max(after, default=0)
        return depths[operation.name]

    for operation in table:
        depth(operation)
    return depths
