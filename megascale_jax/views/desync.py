"""Which rank a job that hangs in a collective waits for, by dumps of the NCCL flight recorder. Words and verdict as in `why.py`; no JAX.

Collectives of a process group have numbers, which all members count alike. The rule, in this order:

1. *Mismatch*: members enqueued different operations, or one of other sizes, under one number. Those unlike the majority are named; without
   a majority all are suspects. The first number in which a group disagrees counts: after it nothing fits.
2. *Behind*: a group waits in a number that some members have enqueued and not completed while others have not enqueued it, or, if there is
   none, have not started it on their device although others have. Who is behind only because it waits itself in another group is not
   named: the others' chain ends at those who wait for nobody.
3. Ranks without a readable dump, or whose ring has lost the group, if all others are equally far and more: they are named. Otherwise they
   are suspects.
4. Else it cannot be told who is behind. Nothing that waits: no hang is seen.

Dumps are of one moment only if the job stood still; sends and receives between two ranks are shown, and not judged.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megascale_jax.views.flight_recorder import Dump, Entry, Group, as_json
from megascale_jax.views.why import MOST_NAMED, Judgement, Outcome, RankState, State

SAME_SIZES = frozenset(
    {
        *("all_reduce", "allreduce", "allreduce_coalesced", "broadcast", "reduce", "all_reduce_barrier", "barrier"),
        *("_all_gather_base", "all_gather_into_tensor", "_reduce_scatter_base", "reduce_scatter_tensor"),
    }
)
"""Collectives to which every member gives inputs of one shape."""


@dataclass(frozen=True)
class Mismatch:
    """Members that disagree on collective ``number`` of a group: ``by_operation`` has the ranks of each ``operation sizes types``."""

    group: str
    number: int
    by_operation: Mapping[str, tuple[int, ...]]
    named: tuple[int, ...]

    def __str__(self) -> str:
        said = "; ".join(f"{_listed(ranks)} {_verb(ranks)} in {what}" for what, ranks in self.by_operation.items())
        return f"collective {self.number} of {self.group} differs: {said}"


@dataclass(frozen=True)
class Wait:
    """A collective that some have not reached: ``waiting`` are in it, ``behind`` before it, of ``unknown`` there is no dump."""

    group: Group
    number: int
    operation: str
    waiting: tuple[int, ...]
    behind: tuple[int, ...]
    unknown: tuple[int, ...]
    is_enqueued: bool = False
    """Whether those behind have enqueued it, and their devices have not come to it."""

    def __str__(self) -> str:
        return f"{self.operation} {self.number} of {_shown(self.group)}"


@dataclass(frozen=True)
class Desync:
    """The verdict, and what it stands on."""

    judgement: Judgement
    mismatches: tuple[Mismatch, ...] = ()
    waits: tuple[Wait, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Found:
    """As in `why.Behind`, of ranks' numbers."""

    named: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    verdict: Outcome = "hang"
    reason: str = ""


def judge_dumps(dumps: Sequence[Dump], now: float | None = None) -> Desync:
    """Who holds the others up; ``dumps`` in any order, one a rank. ``now``: seconds since 1970, by default this moment."""
    known = {dump.rank: dump for dump in sorted(dumps, key=lambda one: one.rank) if not dump.note}
    groups = sorted({group for dump in known.values() for group in dump.groups})
    ranks = sorted({*known, *(dump.rank for dump in dumps), *(rank for group in groups for rank in group.ranks)})
    mismatches = tuple(found for group in groups if (found := _mismatch(group, known)) is not None)
    waits = tuple(wait for group in groups if (wait := _wait(group, known)) is not None)
    found = _judged(known, set(ranks) - set(known), mismatches, waits)
    judgement = _judgement(found, ranks, known, dumps)
    age_s = round(max(0.0, (time.time() if now is None else now) - judgement.until), 3) if judgement.until else 0.0
    return Desync(replace(judgement, age_s=age_s), mismatches, waits, tuple(_notes(dumps, known)))


def _mismatch(group: Group, known: Mapping[int, Dump]) -> Mismatch | None:
    """The first number in which its members disagree."""
    by_rank = {rank: known[rank].collectives.get(group, {}) for rank in group.ranks if rank in known}
    for number in sorted({number for entries in by_rank.values() for number in entries}):
        alike: dict[str, list[int]] = {}
        for rank, entries in by_rank.items():
            if number in entries:
                alike.setdefault(_likeness(entries[number]), []).append(rank)
        if len(alike) > 1:
            most = max(alike.values(), key=len)
            members = sum(map(len, alike.values()))
            named = sorted(rank for some in alike.values() if some is not most for rank in some) if 2 * len(most) > members else []
            return Mismatch(_shown(group), number, {what: tuple(some) for what, some in sorted(alike.items())}, tuple(named))
    return None


def _likeness(entry: Entry) -> str:
    """What all members of a collective have in common."""
    if entry.operation not in SAME_SIZES:
        return entry.operation
    return f"{entry.operation} {as_json(entry.input_sizes)} {','.join(entry.input_dtypes)}".strip()


def _wait(group: Group, known: Mapping[int, Dump]) -> Wait | None:
    """The first collective of a group that some of its members wait in; ``None``: all are through, as far as is known."""
    members = {rank: known[rank] for rank in group.ranks if rank in known}
    if not members:
        return None
    pending = {rank: entry for rank, dump in members.items() if (entry := _pending(dump, group)) is not None}
    if not pending:
        return None
    unknown = tuple(rank for rank in group.ranks if rank not in known)
    number = min(entry.collective_seq_id for entry in pending.values())
    reached = {rank: dump.enqueued.get(group, -1) for rank, dump in members.items() if group in dump.enqueued or dump.is_whole}
    unknown += tuple(rank for rank in members if rank not in reached)
    here = {rank: entry for rank, entry in pending.items() if entry.collective_seq_id == number}
    operation = Counter(entry.operation for entry in here.values()).most_common(1)[0][0]
    behind = tuple(rank for rank, last in reached.items() if last < number)
    if behind:
        return Wait(group, number, operation, tuple(here), behind, unknown)
    started = {rank for rank, entry in here.items() if entry.state == "started"}
    late = tuple(sorted(set(here) - started)) if started else ()
    return Wait(group, number, operation, tuple(rank for rank in here if rank not in late), late, unknown, is_enqueued=bool(late))


def _pending(dump: Dump, group: Group) -> Entry | None:
    """The first collective of a group that a rank has enqueued and not completed."""
    entries = dump.collectives.get(group, {})
    return next((entries[number] for number in sorted(entries) if entries[number].state != "completed"), None)


def _judged(known: Mapping[int, Dump], missing: set[int], mismatches: Sequence[Mismatch], waits: Sequence[Wait]) -> _Found:
    if not any(dump.collectives or dump.point_to_point for dump in known.values()):
        return _Found(suspects=set(missing), verdict="unknown", reason="no dump has a collective; was TORCH_NCCL_TRACE_BUFFER_SIZE set?")
    if mismatches:
        named = {rank for one in mismatches for rank in one.named}
        suspects = {rank for one in mismatches if not one.named for some in one.by_operation.values() for rank in some}
        return _Found(named, suspects - named, reason="; ".join(map(str, mismatches[:MOST_NAMED])))
    behind = {rank for wait in waits for rank in wait.behind}
    if behind:
        return _behind(behind, waits, missing)
    if not waits:
        pairs = {rank for rank, dump in known.items() if dump.point_to_point}
        if pairs:
            text = f"it cannot be told who is behind: {_listed(pairs)} {_verb(pairs)} in sends or receives, and no collective waits"
            return _Found(suspects=pairs | missing, verdict="hang", reason=text)
        text = "every collective that was recorded is completed on every rank with a dump"
        return _Found(verdict="running", reason=text) if not missing else _Found(suspects=set(missing), verdict="unknown", reason=text)
    first = waits[0]
    unknown, there = ({rank for wait in waits for rank in some(wait)} for some in (lambda one: one.unknown, lambda one: one.waiting))
    far = f"all others are equally far: in {first}"
    if unknown and len(unknown) < len(there):
        return _Found(unknown, reason=f"{_listed(unknown)} left no dump; {far}")
    if unknown:
        return _Found(suspects=unknown, reason=f"it cannot be told who is behind: of {_listed(unknown)} too little is known; {far}")
    return _Found(suspects=there, reason=f"it cannot be told who is behind: nobody is before {first}, in which {_listed(there)} wait")


def _behind(behind: set[int], waits: Sequence[Wait], missing: set[int]) -> _Found:
    """Of those behind, the ones that wait for nobody themselves."""
    held = {rank for wait in waits for rank in wait.waiting}
    first = behind - held
    unknown = {rank for wait in waits if not wait.behind and behind & set(wait.waiting) for rank in wait.unknown}
    but = f"; of {_listed(missing)} too little is known" if missing else ""
    if first:
        wait = next(wait for wait in waits if first & set(wait.behind))
        where = f"enqueued, on the device not yet in {wait}" if wait.is_enqueued else f"before {wait}"
        tail = f"; {'it waits' if len(first) == 1 else 'they wait'} for no other rank"
        text = f"{_listed(first)} {_verb(first)} first behind: {where}, in which {_listed(wait.waiting)} {_verb(wait.waiting)}{tail}{but}"
        return _Found(first, reason=text)
    if unknown:
        text = f"{_listed(unknown)} left no dump; whoever else is behind waits for them: {_listed(behind)}"
        return _Found(unknown, reason=text)
    text = f"it cannot be told who is behind: {_listed(behind)} {_verb(behind)} behind, and each waits in another group"
    return _Found(suspects=behind | missing, reason=text)


def _judgement(found: _Found, ranks: Iterable[int], known: Mapping[int, Dump], dumps: Sequence[Dump]) -> Judgement:
    until_ns = max((dump.until_ns for dump in known.values()), default=0)
    notes = {dump.rank: dump.note for dump in dumps}

    def one(rank: int) -> RankState:
        dump = known.get(rank)
        named: State | None = "stuck" if rank in found.named else "suspect" if rank in found.suspects else None
        if dump is None:
            return RankState(rank, "", (), "suspect" if named else "silent", None, None, "", None, None, notes.get(rank) or "no dump")
        operation, entry = _where(dump)
        since_s = (until_ns - entry.time_created_ns) / 1e9 if entry is not None and entry.time_created_ns else None
        seen = dump.until_ns / 1e9 if dump.until_ns else None
        return RankState(rank, "", (), named or ("waiting" if entry is not None else "running"), None, None, operation, since_s, seen)

    lists = tuple(sorted(found.named)), tuple(sorted(found.suspects))
    return Judgement(found.verdict, found.reason, *lists, 0, None, until_ns / 1e9, 0.0, tuple(map(one, ranks)))


def _where(dump: Dump) -> tuple[str, Entry | None]:
    """What a rank does by its oldest operation that is not completed, and that."""
    pending = [(entry, group) for group in dump.groups if (entry := _pending(dump, group)) is not None]
    if pending:
        entry, group = min(pending, key=lambda pair: (pair[0].time_created_ns, pair[1]))
        return f"in {entry.operation} {entry.collective_seq_id} of {_shown(group)}, {entry.state}", entry
    if dump.point_to_point:
        entry = min(dump.point_to_point, key=lambda one: one.time_created_ns)
        return f"in {entry.operation} {entry.p2p_seq_id} of group {entry.process_group[0]}, {entry.state}", entry
    last = {group: number for group, number in dump.enqueued.items() if number >= 0}
    if not last:
        return "in no collective so far", None
    group = max(last, key=lambda one: (dump.collectives[one][max(dump.collectives[one])].time_created_ns, one))
    return f"after collective {last[group]} of {_shown(group)}", None


def _notes(dumps: Sequence[Dump], known: Mapping[int, Dump]) -> Iterator[str]:
    yield from (dump.note for dump in dumps if dump.note)
    pairs = sum(len(dump.point_to_point) for dump in known.values())
    if pairs:
        yield f"{pairs} sends and receives are not completed; they are not judged"


def _shown(group: Group) -> str:
    return f"group {group.name}" + (f" ({group.description})" if group.description else "")


def _listed(ranks: Iterable[int]) -> str:
    some = sorted(ranks)
    if len(some) == 1:
        return f"rank {some[0]}"
    shown = ", ".join(map(str, some[:MOST_NAMED]))
    return f"ranks {shown}" + (f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else "")


def _verb(ranks: Iterable[int]) -> str:
    return "is" if len(list(ranks)) == 1 else "are"
