"""How much of a compiled program's communication is hidden, by walking its schedule. No JAX.

One compute stream runs kernels in the order of the schedule. The start of a collective puts its transfer into the queue of
its communication stream; a stream works on its oldest transfer, and transfers of several streams on one link share that
link. A done waits for its transfer, a synchronous collective at its start. What a transfer moves while a kernel runs is
hidden, the rest is *exposed*, waits for other transfers included. So a collective is hidden only by compute between its
own start and done, and one second of compute hides one second on one link, once. Waits, counted once, lengthen the step.

Two clocks: *strict* gives time to GEMMs and attention only, *all* to every kernel. A loop's body counts trip-count times,
each trip from empty queues.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megascale_jax import axes
from megascale_jax.aot.cost import COLLECTIVES, Collective, CostModel, Kernel
from megascale_jax.aot.hlo import Computation, Instruction, Module, trip_count

Streams = Mapping[str, int]
"""Communication stream of each collective, by the name of its start; what is missing is on stream 0."""


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of the schedule, as often as its loops run it; seconds are of one run. ``source`` is empty where unknown."""

    name: str
    scope: str
    source: str
    cost: Collective
    exposed_s: float
    is_sync: bool
    gemms_beside: int
    count: int


@dataclass(frozen=True)
class Span:
    """What a lane of one loop body does when: ``compute``, or the link of a transfer; seconds from the body's start."""

    lane: str
    name: str
    kind: str
    start_s: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """A walk of one computation: seconds of its kernels and of its waits for transfers."""

    compute_s: float
    waits_s: float
    seconds_of: Mapping[str, float]
    flops: float
    collectives: tuple[CollectiveRecord, ...]
    spans: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the walk."""
        return self.compute_s + self.waits_s

    def repeated(self, count: int) -> "Timeline":
        """The same, ``count`` times in a row."""
        records = tuple(replace(record, count=record.count * count) for record in self.collectives)
        parts = {kind: seconds * count for kind, seconds in self.seconds_of.items()}
        return Timeline(self.compute_s * count, self.waits_s * count, parts, self.flops * count, records)


def hidden_fraction(records: list[CollectiveRecord] | tuple[CollectiveRecord, ...]) -> float:
    """1 - exposed / all collective seconds; 1 without collectives."""
    total = sum(record.cost.seconds * record.count for record in records)
    return 1.0 - sum(record.exposed_s * record.count for record in records) / total if total else 1.0


def walk(model: CostModel, streams: Streams, *, strict: bool) -> Timeline:
    """The whole module."""
    return _Walk(model, streams, strict).computation(model.module.entry)


def loop_records(model: CostModel, streams: Streams) -> Iterator[tuple[str, tuple[CollectiveRecord, ...]]]:
    """Part and collectives of every loop body of its own, strict."""
    for body, _ in loop_bodies(model.module, model.module.entry):
        if records := [r for r in _Walk(model, streams, strict=True).computation(body).collectives if r.name in body.by_name]:
            yield part_of(body), tuple(records)


def steady_tick(model: CostModel, streams: Streams) -> tuple[Span, ...]:
    """Lanes of the steady loop's commonest tick, every kernel counted; nothing where there is no such loop."""
    bodies = [(count, body) for body, count in loop_bodies(model.module, model.module.entry) if part_of(body) == "steady"]
    if not bodies:
        return ()
    return _Walk(model, streams, strict=False).computation(max(bodies, key=lambda pair: pair[0])[1]).spans


@dataclass
class _Transfer:
    name: str
    link: str
    remaining_s: float
    scope: str
    began_s: float | None = None


@dataclass
class _Queues:
    """Communication streams and what is left of their transfers."""

    streams: dict[int, list[_Transfer]] = field(default_factory=lambda: defaultdict(list))
    hidden_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    clock_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def start(self, stream: int, transfer: _Transfer) -> None:
        self.streams[stream].append(transfer)

    def compute(self, seconds: float) -> None:
        """A kernel runs; what moves meanwhile is hidden."""
        self._advance(seconds, None)

    def wait(self, name: str) -> float:
        """Nothing runs until a transfer is done; the wait."""
        return self._advance(float("inf"), name)

    def _advance(self, seconds: float, until: str | None) -> float:
        passed = 0.0
        while passed < seconds and (until is None or self._pending(until)):
            heads = [queue[0] for queue in self.streams.values() if queue]
            if not heads:
                if until is None:
                    self.clock_s += seconds - passed
                return passed if until is not None else seconds
            sharing = {link: sum(head.link == link for head in heads) for link in {head.link for head in heads}}
            first_s = min(head.remaining_s * sharing[head.link] for head in heads)
            step_s = min(first_s, seconds - passed)
            for head in heads:
                if head.began_s is None:
                    head.began_s = self.clock_s
                head.remaining_s -= step_s / sharing[head.link]
                if until is None:
                    self.hidden_s[head.name] += step_s / sharing[head.link]
            self.clock_s += step_s
            for queue in self.streams.values():
                if queue and queue[0].remaining_s <= 1e-15:
                    self._finish(queue.pop(0))
            passed += step_s
        return passed

    def _finish(self, transfer: _Transfer) -> None:
        began_s = self.clock_s if transfer.began_s is None else transfer.began_s
        self.spans.append(Span(transfer.link, transfer.scope, "transfer", began_s, self.clock_s - began_s))

    def _pending(self, name: str) -> bool:
        return any(transfer.name == name for queue in self.streams.values() for transfer in queue)


class _Walk:
    def __init__(self, model: CostModel, streams: Streams, strict: bool):
        self.model, self.streams, self.strict = model, streams, strict

    def computation(self, computation: Computation) -> Timeline:
        queues, seconds_of = _Queues(), defaultdict(float)
        costs: dict[str, tuple[Instruction, Collective]] = {}
        beside: dict[str, int] = {}
        open_starts: set[str] = set()
        inner: list[CollectiveRecord] = []
        flops = waits_s = 0.0
        for instruction in computation.instructions:
            kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
            if kind in COLLECTIVES:
                waits_s += self._collective(instruction, computation, queues, costs, beside, open_starts)
            elif instruction.opcode == "while":
                body = self.model.module.computations[instruction.reference("body") or ""]
                loop = self.computation(body).repeated(trip_count(instruction))
                for name, seconds in loop.seconds_of.items():
                    seconds_of[name] += seconds
                inner += loop.collectives
                waits_s += loop.waits_s
                flops += loop.flops
            else:
                kernel = self.model.kernel(instruction, computation)
                flops += kernel.flops
                if kernel.kind in ("gemm", "attention"):
                    for name in open_starts:
                        beside[name] += 1
                seconds = self._seconds(kernel)
                seconds_of[kernel.kind] += seconds
                if seconds:
                    queues.spans.append(Span("compute", scope_of(instruction), kernel.kind, queues.clock_s, seconds))
                queues.compute(seconds)
        own = [
            CollectiveRecord(
                name=name,
                scope=scope_of(start),
                source=self.model.module.source_of(start),
                cost=cost,
                exposed_s=max(cost.seconds - queues.hidden_s[name], 0.0),
                is_sync=_is_sync(start),
                gemms_beside=beside.get(name, 0),
                count=1,
            )
            for name, (start, cost) in costs.items()
        ]
        return Timeline(sum(seconds_of.values()), waits_s, dict(seconds_of), flops, (*own, *inner), tuple(queues.spans))

    def _collective(
        self,
        instruction: Instruction,
        computation: Computation,
        queues: _Queues,
        costs: dict[str, tuple[Instruction, Collective]],
        beside: dict[str, int],
        open_starts: set[str],
    ) -> float:
        """Start or finish a collective; the wait that it means."""
        name = instruction.name
        if instruction.opcode.endswith("-done"):
            start = instruction.operands[0]
            open_starts.discard(start)
            return queues.wait(start)
        cost = self.model.collective(instruction, computation)
        costs[name], beside[name] = (instruction, cost), 0
        queues.start(self.streams.get(name, 0), _Transfer(name, _link(cost), cost.seconds, scope_of(instruction)))
        if _is_sync(instruction):
            return queues.wait(name)
        open_starts.add(name)
        return 0.0

    def _seconds(self, kernel: Kernel) -> float:
        return 0.0 if self.strict and kernel.kind == "memory" else kernel.seconds


_OPERATION = re.compile(r"[FRBLEHDPWZTab]\d*\.\w+")
"""An operation of `parallel/pipeline/operations.py`."""


def scope_of(instruction: Instruction) -> str:
    """The innermost named part of the step that an instruction belongs to, such as ``steady/B1.gather``; empty outside."""
    found = instruction.text("op_name") or ""
    words = re.split(r"[/:()]", found)  # XLA joins the names of what it joins: ``(a/b:c/d)``
    part = next((word for word in words if word in PARTS), "")
    operation = next((word for word in reversed(words) if _OPERATION.fullmatch(word)), "close" if "close" in words else "")
    return "/".join(word for word in (part, operation) if word)


def loop_bodies(module: Module, computation: Computation, count: int = 1) -> Iterator[tuple[Computation, int]]:
    """Every loop body below a computation, outer ones too, and how often it runs."""
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            body = module.computations[instruction.reference("body") or ""]
            trips = count * trip_count(instruction)
            yield body, trips
            yield from loop_bodies(module, body, trips)


def part_of(body: Computation) -> str:
    """The named part of the step that most of a body's instructions belong to; empty for none."""
    found = Counter(scope.split("/")[0] for i in body.instructions if (scope := scope_of(i)))
    return found.most_common(1)[0][0] if found else ""


PARTS = ("fill", "warmup", "settle", "steady", "cooldown", "drain")
"""Named parts of a pipelined step, in order."""
LOOPS = ("warmup", "steady", "cooldown")
"""Those that are loops over ticks; messages of the others count in the whole step only."""


def _link(cost: Collective) -> str:
    return axes.TENSOR if cost.near else "network"


def _is_sync(start: Instruction) -> bool:
    return not start.opcode.endswith("-start") or '"is_sync":true' in start.attributes
