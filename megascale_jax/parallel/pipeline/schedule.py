"""Interleaved 1F1B as plain data: who runs which micro-batch in which tick, and where its residuals lie. No JAX.

``p`` stages, ``v`` model chunks a stage, ``m`` micro-batches with ``m % p == 0``. Virtual stage ``c * p + s`` is chunk
``c`` on stage ``s``. All stages go through the same ticks; a tick has a forward slot and a backward slot. A *unit* is
one micro-batch through one chunk; unit ``u`` of a stage is micro-batch ``g * p + j`` and chunk ``c``, where
``g, r = divmod(u, v * p)`` and ``c, j = divmod(r, p)`` (backward: chunk ``v - 1 - c``). In tick ``t`` stage ``s`` runs

    forward  unit ``t - s``
    backward unit ``t - (v * p - 1) - (p - 1 - s) - backward_delay``

whatever lies outside ``[0, m * v)`` is an idle slot. A unit's input leaves its neighbour one tick before it is needed.
Both passes take ``m * v + p - 1`` slots in all, which is the interleaved ideal: the bubble is ``(p - 1) / (v * m)``.

With ``backward_delay`` 1 the last stage differentiates a micro-batch one tick after its forward pass, so that the two
slots of a tick, and the head between them, never wait for each other; warm-up and cool-down are one tick longer, steady
one shorter, and one more unit is in flight.

Weight gradients have no reader before the end of the step, so they wait until all stages can compute those of one and the
same unit, ``s + 1`` ticks after the backward pass on stage ``s``:

    weight gradients of unit ``t - (v * p - 1) - p - backward_delay`` on every stage

A single stage waits for nobody: it computes them in the tick of the backward pass. The ``p`` units of one chunk then are a *window*
of ``p`` ticks that begins and ends on all stages at once: their gradients add up in one place in memory that no stage has to look
up. ZeRO-2 moves in windows as well: weights of chunk ``c`` arrive in window ``c - 1`` of the warm-up, the gradients of a chunk
leave in the window after its last one.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from megascale_jax.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """One micro-batch in one chunk of a stage, and the slot that holds its residuals from forward to backward."""

    micro_batch: int
    chunk: int
    slot: int


@dataclass(frozen=True)
class TickKind:
    """What a tick does on at least one stage, known without asking which.

    ``embed``: the next micro-batch to enter is embedded; ``head``: the loss of a micro-batch is taken; ``embed_backward``:
    the gradient of an embedded micro-batch, finished in the tick before, goes into the table. These three fall on the same
    ``p`` of ``v * p`` ticks. ``weight_gradients``: those of an earlier backward pass are computed. ``gather``, ``scatter``: a part of
    a chunk's weights arrives, or of its gradients leaves. ``finishes``: what the last backward pass left is finished, and none runs.
    """

    forward: bool
    backward: bool
    embed: bool = False
    head: bool = False
    embed_backward: bool = False
    weight_gradients: bool = False
    gather: bool = False
    scatter: bool = False
    finishes: bool = False

    def union(self, other: "TickKind") -> "TickKind":
        """What either does."""
        return TickKind(**{field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)})

    @property
    def without_ends(self) -> "TickKind":
        """The same without the vocabulary."""
        return replace(self, embed=False, head=False, embed_backward=False)

    @property
    def part(self) -> str:
        """Part of the step: warmup, steady or cooldown."""
        return {(True, False): "warmup", (True, True): "steady"}.get((self.forward, self.backward), "cooldown")

    @property
    def ends(self) -> bool:
        """Whether the vocabulary has work."""
        return self.embed or self.head or self.embed_backward


@dataclass(frozen=True)
class Schedule:
    """The schedule of one step. Raises ConfigError where it does not exist."""

    pipe: int
    virtual_stages: int
    micro_batches: int
    backward_delay: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        p, m = self.pipe, self.micro_batches
        if min(p, self.virtual_stages, m) < 1:
            raise ConfigError(f"pipeline of {p} stages, {self.virtual_stages} chunks, {m} micro-batches; expected at least 1 of each")
        if m % p:
            near = ", ".join(str(n) for n in (m - m % p, m - m % p + p) if n > 0)
            raise ConfigError(f"{m} micro-batches do not divide over {p} pipeline stages; nearest: {near}")

    @property
    def period(self) -> int:
        """Ticks after which a stage runs the same chunk again, ``v * p``."""
        return self.virtual_stages * self.pipe

    @property
    def units(self) -> int:
        """Units of one pass on one stage, ``m * v``."""
        return self.micro_batches * self.virtual_stages

    @property
    def warmup(self) -> int:
        """Ticks with a forward slot only."""
        return self.period - 1 + self.backward_delay

    @property
    def steady(self) -> int:
        """Ticks with both slots."""
        return self.units + self.pipe - 1 - self.warmup

    @property
    def ticks(self) -> int:
        """Ticks of a step: warm-up, steady, cool-down (as long as the warm-up)."""
        return 2 * self.warmup + self.steady

    @property
    def weight_delay(self) -> int:
        """Ticks between the backward passes of stage 0 and their weight gradients: 1, but none where no stage waits for another."""
        return int(self.pipe > 1)

    @property
    def length(self) -> int:
        """All `ticks`, and one that finishes what the last backward passes have left."""
        return self.ticks + 1

    @property
    def bubble(self) -> float:
        """Idle slots of a stage over its busy ones, ``(p - 1) / (v * m)``."""
        return (self.warmup + self.steady) / self.units - 1

    def forward_unit(self, tick: int, stage: int) -> int | None:
        """Number of the unit in the forward slot."""
        return self._within(tick - stage)

    def backward_unit(self, tick: int, stage: int) -> int | None:
        """Number of the unit in the backward slot, in backward order."""
        return self._within(tick - self.backward_offset + stage)

    @property
    def backward_offset(self) -> int:
        """Tick of stage 0's first backward unit."""
        return self.period + self.pipe - 2 + self.backward_delay

    def decode(self, unit: int) -> tuple[int, int]:
        """``(micro_batch, rank of the chunk in order of use)`` of a unit."""
        group, rest = divmod(unit, self.period)
        rank, index = divmod(rest, self.pipe)
        return group * self.pipe + index, rank

    def forward(self, tick: int, stage: int) -> Unit | None:
        """What the forward slot runs."""
        unit = self.forward_unit(tick, stage)
        if unit is None:
            return None
        return Unit(*self.decode(unit), self.forward_slots[stage][unit])

    def backward(self, tick: int, stage: int) -> Unit | None:
        """What the backward slot runs."""
        unit = self.backward_unit(tick, stage)
        if unit is None:
            return None
        micro_batch, rank = self.decode(unit)
        return Unit(micro_batch, self.virtual_stages - 1 - rank, self.backward_slots[stage][unit])

    @cached_property
    def slots(self) -> int:
        """Residual slots that every stage needs: the most that any of them fills, on stage 0."""
        return 1 + max(max(row) for row in self.forward_slots)

    @property
    def slot_bound(self) -> int:
        """Upper bound of `slots`: ``(v - 1) p + 2 (p - 1) + 1``, one more with the delay, and never more than the units."""
        return min((self.virtual_stages - 1) * self.pipe + 2 * (self.pipe - 1) + 1 + self.backward_delay, self.units)

    @property
    def gpipe_slots(self) -> int:
        """Residual slots of GPipe, all forward passes first: every unit."""
        return self.units

    @cached_property
    def forward_slots(self) -> tuple[tuple[int, ...], ...]:
        """Slot of every forward unit, ``[stage][unit]``: interval colouring by a free list.

        A slot is taken in the tick of the forward pass and free again in the tick after its backward pass, so that a tick
        never reads and writes one slot for two units.
        """
        return tuple(self._colour(stage) for stage in range(self.pipe))

    @cached_property
    def backward_slots(self) -> tuple[tuple[int, ...], ...]:
        """The same slots by backward unit."""
        v = self.virtual_stages

        def forward_number(unit: int) -> int:
            group, rest = divmod(unit, self.period)
            rank, index = divmod(rest, self.pipe)
            return group * self.period + (v - 1 - rank) * self.pipe + index

        return tuple(tuple(row[forward_number(unit)] for unit in range(self.units)) for row in self.forward_slots)

    def entering(self, tick: int) -> int | None:
        """Micro-batch that is embedded in a tick; the first one is, before the first tick."""
        group, index = divmod(tick + 1 - self.backward_delay, self.period)
        micro_batch = group * self.pipe + index + self.backward_delay
        return micro_batch if index < self.pipe and micro_batch < self.micro_batches else None

    def at_head(self, tick: int) -> int | None:
        """Micro-batch whose loss is taken in a tick."""
        unit = self.forward_unit(tick - self.backward_delay, self.pipe - 1)
        return self._micro_batch_of_rank(unit, self.virtual_stages - 1)

    def leaving(self, tick: int) -> int | None:
        """Micro-batch whose embedding gets its gradient in a tick: its backward pass ended in the tick before."""
        return self._micro_batch_of_rank(self.backward_unit(tick - 1, 0), self.virtual_stages - 1)

    def weight_unit(self, tick: int) -> int | None:
        """Number of the unit whose weight gradients all stages compute, in backward order."""
        return self._within(tick - self.backward_offset - self.weight_delay)

    def weight_chunk(self, tick: int) -> int | None:
        """Chunk of that unit."""
        unit = self.weight_unit(tick)
        return None if unit is None else self.virtual_stages - 1 - self.decode(unit)[1]

    def gathered(self, tick: int) -> tuple[int, int] | None:
        """``(chunk, part)`` of the weights that arrive in a tick, part ``0`` to ``p - 1`` of the chunk; chunk 0 comes before all ticks."""
        if not 0 <= tick < self.period - self.pipe:
            return None
        window, part = divmod(tick, self.pipe)
        return window + 1, part

    def scattered(self, tick: int) -> tuple[int, int] | None:
        """The same of the gradients that leave; chunk 0 leaves after all ticks."""
        place = tick - (self.ticks + self.weight_delay) + self.period - self.pipe
        if not 0 <= place < self.period - self.pipe:
            return None
        window, part = divmod(place, self.pipe)
        return self.virtual_stages - 1 - window, part

    def closes_window(self, tick: int) -> bool:
        """Whether a chunk's weights have arrived, or a chunk's gradients of ``p`` micro-batches are complete, after a tick."""
        unit, gathered = self.weight_unit(tick), self.gathered(tick)
        return (unit is not None and unit % self.pipe == self.pipe - 1) or (gathered is not None and gathered[1] == self.pipe - 1)

    def kind(self, tick: int) -> TickKind:
        """What a tick does; the one behind all `ticks` has no unit, but one kind with the rest of its window."""
        finishes = tick >= self.ticks and not self.weight_delay
        return TickKind(
            forward=tick < self.warmup + self.steady,
            backward=tick >= self.warmup and not finishes,
            finishes=finishes,
            embed=self.entering(tick) is not None,
            head=self.at_head(tick) is not None,
            embed_backward=self.leaving(tick) is not None,
            weight_gradients=self.weight_unit(tick) is not None,
            gather=self.gathered(tick) is not None,
            scatter=self.scattered(tick) is not None,
        )

    def _micro_batch_of_rank(self, unit: int | None, rank: int) -> int | None:
        if unit is None or self.decode(unit)[1] != rank:
            return None
        return self.decode(unit)[0]

    def _within(self, unit: int) -> int | None:
        return unit if 0 <= unit < self.units else None

    def _colour(self, stage: int) -> tuple[int, ...]:
        slots: list[int] = [-1] * self.units
        free: list[int] = []
        used = 0
        in_flight: dict[tuple[int, int], int] = {}
        for tick in range(self.ticks):
            entering = self.forward_unit(tick, stage)
            if entering is not None:
                if free:
                    slot = free.pop()
                else:
                    slot, used = used, used + 1
                slots[entering] = in_flight[self.decode(entering)] = slot
            leaving = self.backward_unit(tick, stage)
            if leaving is not None:
                micro_batch, rank = self.decode(leaving)
                free.append(in_flight.pop((micro_batch, self.virtual_stages - 1 - rank)))
        return tuple(slots)
