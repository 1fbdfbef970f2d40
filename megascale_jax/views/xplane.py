"""Reads profiles of `jax.profiler`: ``*.xplane.pb``, an XSpace in protocol buffers, as operations of devices. No JAX, no TensorFlow.

The schema is a part of XLA's ``xplane.proto``, told to the `protobuf` library, which reads the file; what is not needed stays unread.
Devices are planes ``/device:...`` with a line a stream (GPU) or a line ``XLA Ops`` (TPU). A CPU's operations are events of its threads that
have ``hlo_op``; one that runs on elsewhere lasts to the event ``end: NAME`` of the same number. ``while`` and calls only hold others.

Source: https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto

Failure case: a file that is cut, too large, no XSpace, or with times that cannot be is refused (TraceError) with what to do.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megascale_jax.errors import TraceError

ENDING = ".xplane.pb"
KINDS = ("compute", "collective", "copy")
COMPUTE, COLLECTIVE, COPY = range(3)
MOST_BYTES = 1 << 30
MOST_EVENTS = 20_000_000
"""Of all lines of a file."""
_MOST_PS = 1 << 62
_COLLECTIVE = re.compile(
    r"nccl|nvshmem|(^|[^a-z])(all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]scatter|psum|ppermute|collective|ragged[-_]all|send|recv)", re.I
)
"""Names of HLO and JAX operations, and of NCCL's kernels, that communicate between devices."""
_COPY = re.compile(r"^(memcpy|memset|copy(-start|-done)?([.\d]|$))", re.I)
_HOLDS = re.compile(r"^(while|call|conditional|async-start|async-done)[.\d]*$")
"""Operations whose time is that of others inside; a start or an end of an asynchronous one has no time of its own."""
_FIELDS = {
    "XStat": "metadata_id:1:int64 double_value:2:double uint64_value:3:uint64 int64_value:4:int64 str_value:5:string ref_value:7:uint64",
    "XEvent": "metadata_id:1:int64 offset_ps:2:int64 duration_ps:3:int64 stats:4:XStat*",
    "XLine": "id:1:int64 name:2:string timestamp_ns:3:int64 events:4:XEvent* display_name:11:string",
    "XEventMetadata": "id:1:int64 name:2:string display_name:4:string stats:5:XStat*",
    "XStatMetadata": "id:1:int64 name:2:string",
    "EventEntry": "key:1:int64 value:2:XEventMetadata",
    "StatEntry": "key:1:int64 value:2:XStatMetadata",
    "XPlane": "id:1:int64 name:2:string lines:3:XLine* event_metadata:4:EventEntry* stat_metadata:5:StatEntry*",
    "XSpace": "planes:1:XPlane* errors:2:string* warnings:3:string* hostnames:4:string*",
}


@dataclass(frozen=True)
class Line:
    """A line of the file, of a stream or a thread, and how many events it has."""

    plane: str
    name: str
    events: int


@dataclass(frozen=True)
class Profile:
    """Operations as columns [n], and what else is in the file. Times are int64 picoseconds since the first line's begin.

    ``device`` indexes ``devices``, ``name`` indexes ``names``; ``kind``: `COMPUTE`, `COLLECTIVE` or `COPY`. ``steps``: numbers of the steps
    that the host began, int64, and ``step_begin_ps`` when. ``notes``: what the profiler itself complained of.
    """

    devices: tuple[str, ...]
    names: tuple[str, ...]
    device: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    begin_ps: np.ndarray
    duration_ps: np.ndarray
    steps: np.ndarray
    step_begin_ps: np.ndarray
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()


def find_profiles(path: Path) -> list[Path]:
    """The files of a profile: itself, or those of the newest session in a folder. Raises TraceError when there is none."""
    if not path.is_dir():
        return [path]
    sessions: dict[Path, list[Path]] = {}
    for file in path.rglob(f"*{ENDING}"):
        sessions.setdefault(file.parent, []).append(file)
    if not sessions:
        raise TraceError(f"{path} has no file *{ENDING}; expected the folder of a profile of jax.profiler")
    return sorted(sessions[max(sessions, key=lambda one: (max(file.stat().st_mtime for file in sessions[one]), one))])


def read_xplane(path: Path) -> Profile:
    """The operations of one file. Raises TraceError."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise TraceError(f"{path} has {size:,} bytes, at most {MOST_BYTES:,} are read; profile fewer steps")
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_xplane(content, str(path))


def parse_xplane(content: bytes, path: str) -> Profile:
    """The same of a file's content; ``path`` is for messages. Raises TraceError."""
    from google.protobuf.message import DecodeError

    space = _message("XSpace")()
    try:
        space.ParseFromString(content)
    except (DecodeError, RecursionError) as error:
        raise TraceError(f"{path} is damaged, or no profile of jax.profiler ({error}); copy it again, expected a file *{ENDING}") from error
    if not space.planes:
        raise TraceError(f"{path} has no planes: it is no profile of jax.profiler; expected a file *{ENDING}")
    if (events := sum(len(line.events) for plane in space.planes for line in plane.lines)) > MOST_EVENTS:
        raise TraceError(f"{path} has {events:,} events, at most {MOST_EVENTS:,} are read; profile fewer steps")
    begins = [line.timestamp_ns for plane in space.planes for line in plane.lines if line.events]
    table = _Table(path, min(begins, default=0))
    for plane in space.planes:
        table.read(plane)
    notes = (*space.errors, *space.warnings)
    return table.profile(notes)


@dataclass
class _Table:
    """Rows as they are found."""

    path: str
    origin_ns: int
    devices: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    kinds: dict[int, int] = field(default_factory=dict)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def read(self, plane: Any) -> None:
        """Rows of a plane: a device's lines, or a host's threads."""
        stats = {entry.key: entry.value.name for entry in plane.stat_metadata}
        names = {entry.key: entry.value.display_name or entry.value.name for entry in plane.event_metadata}
        is_device = plane.name.startswith("/device:")
        own = _own_lines(plane) if is_device else plane.lines
        for line in plane.lines:
            self.lines.append(Line(plane.name, line.display_name or line.name, len(line.events)))
        if is_device:
            for line in own:
                for event in line.events:
                    self._add(plane.name.removeprefix("/device:"), names.get(event.metadata_id, "?"), *self._times(line, event))
        else:
            self._read_host(plane, names, stats)

    def _read_host(self, plane: Any, names: dict[int, str], stats: dict[int, str]) -> None:
        wanted = {key: name for key, name in stats.items() if name in ("hlo_op", "device_ordinal", "step_num", "_p", "_c")}
        started: dict[tuple[str, int], tuple[str, int, int]] = {}
        ends: dict[tuple[str, int], int] = {}
        for line in plane.lines:
            for event in line.events:
                values = {wanted[stat.metadata_id]: _value(stat) for stat in event.stats if stat.metadata_id in wanted}
                if not values:
                    continue
                name = names.get(event.metadata_id, "?")
                begin, duration = self._times(line, event)
                if "hlo_op" in values and not _HOLDS.match(name):
                    device = f"CPU:{values.get('device_ordinal', 0)}"
                    if "_p" in values:
                        started[name, values["_p"]] = (device, begin, duration)
                    else:
                        self._add(device, name, begin, duration)
                elif name.startswith("end: ") and "_c" in values:
                    ends[name.removeprefix("end: "), values["_c"]] = begin + duration
                elif "step_num" in values:
                    self.steps.append((int(values["step_num"]), begin))
        for (name, number), (device, begin, duration) in started.items():
            self._add(device, name, begin, max(duration, ends.get((name, number), begin) - begin))

    def _times(self, line: Any, event: Any) -> tuple[int, int]:
        begin = (line.timestamp_ns - self.origin_ns) * 1000 + event.offset_ps
        if not (-_MOST_PS < begin < _MOST_PS and 0 <= event.duration_ps < _MOST_PS):
            raise TraceError(
                f"{self.path}: an event of line {line.name!r} begins at {begin} ps and lasts {event.duration_ps}; the file is damaged"
            )
        return begin, event.duration_ps

    def _add(self, device: str, name: str, begin: int, duration: int) -> None:
        code = self.names.setdefault(name, len(self.names))
        if code not in self.kinds:
            self.kinds[code] = kind_of(name)
        self.rows.append((self.devices.setdefault(device, len(self.devices)), code, begin, duration))

    def profile(self, notes: Sequence[str]) -> Profile:
        """All rows. Raises TraceError when there is none."""
        if not self.rows:
            raise TraceError(f"{self.path} has no operation of a device: nothing ran while it was taken, or only the host was profiled")
        device, name, begin, duration = (np.array(column, np.int64) for column in zip(*self.rows, strict=True))
        steps = np.array(sorted(set(self.steps)) or np.empty((0, 2)), np.int64).reshape(-1, 2)
        kind = np.array([self.kinds[code] for code in range(len(self.names))], np.int64)[name]
        columns = (device, name, kind, begin, duration, steps[:, 0], steps[:, 1])
        return Profile(tuple(self.devices), tuple(self.names), *columns, tuple(self.lines), tuple(notes))


def kind_of(name: str) -> int:
    """Of an operation or a kernel by its name."""
    return COLLECTIVE if _COLLECTIVE.search(name) else COPY if _COPY.match(name) else COMPUTE


def _own_lines(plane: Any) -> Iterator[Any]:
    """Lines of a device's plane with its operations: streams, or what a TPU has in their place. Others sum these up once more."""
    names = [line.name for line in plane.lines]
    streams = any(name.startswith("Stream") for name in names)
    for line in plane.lines:
        if line.name.startswith("Stream") if streams else line.name in ("XLA Ops", "Async XLA Ops"):
            yield line


def _value(stat: Any) -> Any:
    for name in ("int64_value", "uint64_value"):
        if stat.HasField(name):
            return getattr(stat, name)
    return 0


@cache
def _message(name: str) -> Any:
    """The class of a message of the schema."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    proto = descriptor_pb2.FieldDescriptorProto
    types = {kind: getattr(proto, f"TYPE_{kind.upper()}") for kind in ("int64", "uint64", "double", "string")}
    file = descriptor_pb2.FileDescriptorProto(name="xplane.proto", package="megascale.xplane", syntax="proto3")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for one in fields.split():
            label, number, kind = one.split(":")
            repeated = proto.LABEL_REPEATED if kind.endswith("*") else proto.LABEL_OPTIONAL
            item = described.field.add(name=label, number=int(number), label=repeated)
            kind = kind.removesuffix("*")
            item.type = types.get(kind, proto.TYPE_MESSAGE)
            if kind not in types:
                item.type_name = f".megascale.xplane.{kind}"
            if message == "XStat" and label != "metadata_id":
                item.oneof_index = 0
        if message == "XStat":
            described.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"megascale.xplane.{name}"))
