"""Reads dumps of PyTorch's NCCL flight recorder: JSON, one file a rank, its rank the last number in the file's name. No JAX.

The format is that of ``torch._C._distributed_c10d._dump_nccl_trace_json()``: ``entries``, a ring of the newest operations, and
``pg_config``, the ranks of each process group. ``pg_id`` is a number of the process alone, so groups are told apart by name and members.
Source: https://docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html and ``FlightRecorder.hpp`` of PyTorch 2.5 and later.

Failure cases: a pickle is refused, since reading one runs whatever it holds; a file that is cut or of another format is a dump of which
nothing is known but its rank and what is wrong with it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megascale_jax.errors import TraceError, UsageError

MOST_BYTES = 1 << 30
"""Of one file."""
MOST_FILES = 1 << 17
MOST_RANK = 1 << 20
_PICKLE = b"\x80"
"""First byte of every pickle since protocol 2."""
_AS_JSON = (
    "a pickle runs whatever it holds, so it is not read; dump as JSON, torch._C._distributed_c10d._dump_nccl_trace_json(), "
    "or turn files that you trust into JSON: python -c 'import json, pickle, sys; "
    'json.dump(pickle.load(open(sys.argv[1], "rb")), open(sys.argv[1] + ".json", "w"))\' FILE'
)

State = Literal["scheduled", "started", "completed"]
_Number = Annotated[int, Field(ge=0, lt=1 << 62)]
_Nanoseconds = Annotated[int, Field(ge=0, lt=1 << 63)]
_Rank = Annotated[int, Field(ge=0, lt=MOST_RANK)]
_Text = Annotated[str, Field(max_length=4096)]


def _listed(value: object) -> object:
    """PyTorch writes the ranks of a group as text, ``"[0, 1]"``."""
    return json.loads(value) if isinstance(value, str) else value


class _Group(BaseModel):
    """An item of ``pg_config``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: _Text
    desc: _Text = ""
    ranks: Annotated[tuple[_Rank, ...], BeforeValidator(_listed)]


class _Status(BaseModel):
    """An item of ``pg_status``; -1: none."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    last_enqueued_collective: int = Field(default=-1, lt=1 << 62)
    last_completed_collective: int = Field(default=-1, lt=1 << 62)


class Entry(BaseModel):
    """One operation of one rank. ``input_sizes``: the shapes of its inputs; ``process_group``: name and description."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    record_id: _Number = 0
    pg_id: _Number = 0
    process_group: tuple[_Text, _Text]
    collective_seq_id: _Number
    p2p_seq_id: _Number = 0
    is_p2p: bool = False
    profiling_name: _Text
    input_sizes: tuple[tuple[_Number, ...], ...] = ()
    input_dtypes: tuple[_Text, ...] = ()
    state: State
    time_created_ns: _Nanoseconds = 0

    @property
    def operation(self) -> str:
        """Without the library's name before it: ``all_reduce``."""
        return self.profiling_name.rpartition(":")[2] or "an operation without a name"


class _Dump(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: _Text
    pg_config: Mapping[str, _Group] = {}
    pg_status: Mapping[str, _Status] = {}
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, order=True)
class Group:
    """A process group by its name and its members, in ascending order."""

    name: str
    ranks: tuple[int, ...]
    description: str = field(default="", compare=False)


@dataclass(frozen=True)
class Dump:
    """What one rank recorded: its ``groups``, and of each its collectives by number. ``note``: why nothing is known, if so.

    ``enqueued``: number of the newest collective of a group, also if the ring has lost it. ``until_ns``: of the newest entry, since 1970.
    ``point_to_point``: sends and receives that are not completed. ``is_whole``: whether the ring still has its first operation.
    """

    rank: int
    groups: tuple[Group, ...] = ()
    collectives: Mapping[Group, Mapping[int, Entry]] = field(default_factory=dict)
    enqueued: Mapping[Group, int] = field(default_factory=dict)
    point_to_point: tuple[Entry, ...] = ()
    until_ns: int = 0
    is_whole: bool = True
    note: str = ""


def read_dumps(paths: Sequence[Path]) -> list[Dump]:
    """The dumps of files, and of all files in folders, in the order of their ranks.

    Raises UsageError when there is none, one is a pickle, has no rank in its name or another's; TraceError when none can be read.
    """
    files = sorted({file for path in paths for file in _files(path)})
    if not files:
        raise UsageError(f"{', '.join(map(str, paths))}: no files; expected JSON dumps of the flight recorder, one a rank")
    if len(files) > MOST_FILES:
        raise UsageError(f"{len(files):,} files, at most {MOST_FILES:,} are read; give the folder of one job's dumps")
    dumps: dict[int, Dump] = {}
    for file in files:
        rank = rank_of(file)
        if rank in dumps:
            raise UsageError(f"{file}: there is another file of rank {rank}; give the dumps of one moment, one a rank")
        dumps[rank] = _read(file, rank)
    if all(dump.note for dump in dumps.values()):
        raise TraceError(f"none of {len(dumps)} files is a JSON dump of the flight recorder; the first: {dumps[min(dumps)].note}")
    return [dumps[rank] for rank in sorted(dumps)]


def rank_of(path: Path) -> int:
    """The last number in a file's name, endings left out: 12 of ``nccl_trace_rank_12.json``. Raises UsageError when there is none."""
    numbers = re.findall(r"[0-9]+", path.name.partition(".")[0])
    if not numbers or len(numbers[-1]) > 7 or int(numbers[-1]) >= MOST_RANK:
        raise UsageError(f"{path}: no rank in the name; expected one such as nccl_trace_rank_12.json, rename it")
    return int(numbers[-1])


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")]
    if not path.is_file():
        raise UsageError(f"{path} is no file and no folder; expected dumps of the flight recorder, one a rank")
    return [path]


def _read(path: Path, rank: int) -> Dump:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            return Dump(rank, note=f"{path.name} has {size:,} bytes, at most {MOST_BYTES:,} are read")
        content = path.read_bytes()
        if content[:1] == _PICKLE:
            raise UsageError(f"{path}: {_AS_JSON}")
        return _checked(_Dump.model_validate(json.loads(content)), rank, path.name)
    except ValidationError as error:
        first = error.errors()[0]
        return Dump(rank, note=f"{path.name}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}")
    except UsageError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        return Dump(rank, note=f"{path.name} cannot be read as JSON ({error})")


def _checked(dump: _Dump, rank: int, name: str) -> Dump:
    groups = {one.name: Group(one.name, tuple(sorted(set(one.ranks))), one.desc) for one in dump.pg_config.values() if one.ranks}
    if stranger := next((group for group in groups.values() if rank not in group.ranks), None):
        return Dump(rank, note=f"{name} has group {stranger.name}, which rank {rank} is not in; is it the file of another rank?")
    collectives: dict[Group, dict[int, Entry]] = {}
    pending: list[Entry] = []
    names: dict[int, Group] = {}
    for entry in dump.entries:
        group = groups.get(entry.process_group[0])
        if group is None:
            return Dump(rank, note=f"{name}: group {entry.process_group[0]} of an entry is not in pg_config")
        if entry.is_p2p:
            pending += [entry] if entry.state != "completed" else []
        else:
            names[entry.pg_id] = group
            collectives.setdefault(group, {})[entry.collective_seq_id] = entry
    enqueued: dict[Group, int] = {group: max(entries) for group, entries in collectives.items()}
    for number, group in names.items():
        if (status := dump.pg_status.get(str(number))) is not None:
            enqueued[group] = max(enqueued[group], status.last_enqueued_collective)
    until_ns = max((entry.time_created_ns for entry in dump.entries), default=0)
    is_whole = min((entry.record_id for entry in dump.entries), default=0) == 0
    return Dump(rank, tuple(groups.values()), collectives, enqueued, tuple(pending), until_ns, is_whole)


def as_json(value: Any) -> str:
    """A shape list as one word."""
    return json.dumps(value, separators=(",", ":"))
