"""A file of sums (`step_sums.py`): one frame for each Parquet file with rows of devices, of any number of processes. No JAX.

    line of JSON: format and fields      frame      frame      ...
    frame: _HEAD, a `Frame` as JSON, then the sums int64[fields, rows] in LZ4

It is made of those files and only saves reading them: whatever is damaged, cut, of another format, or of a file that has changed or gone is
not used, and the rows are read. Every part has a checksum, so what is used is what was written. One process at a time appends (`update`).
"""

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.step_sums import FIELDS

FORMAT = 1
MOST_DEAD = 0.25
"""Share of a file that may be of files that have gone, before it is written anew."""
_HEAD = struct.Struct("<4sIIQQ")
"""Mark, bytes of the JSON and of the sums, checksums of both."""
_MARK = b"SUMS"
_CODEC_NAME = "lz4_raw"
"""Six times as fast to read as zstd, and 1.4 times as large."""
_CODEC = pa.Codec(_CODEC_NAME)
_START = json.dumps({"format": FORMAT, "codec": _CODEC_NAME, "fields": FIELDS}).encode() + b"\n"


class Frame(BaseModel):
    """What a frame is of: name and bytes of a file, its process, and which steps it has (-1: none)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str
    source_bytes: int
    facts: Facts
    last_unix_ns: int
    rows: int = Field(ge=0, lt=1 << 24)
    first_step: int
    last_step: int


@dataclass(frozen=True)
class StoredSums:
    """A frame in an open file: where its sums begin, how many bytes they have, and their checksum; ``head``: all that is before them."""

    frame: Frame
    file: BinaryIO
    head: bytes
    begin: int
    num_bytes: int
    checksum: int

    def packed(self) -> bytes | None:
        """The sums as they are stored; ``None``: they are damaged. Raises OSError when they cannot be read."""
        content = os.pread(self.file.fileno(), self.num_bytes, self.begin)
        return content if xxhash.xxh3_64_intdigest(content) == self.checksum else None

    def sums(self) -> np.ndarray | None:
        """int64[`FIELDS`, rows]; ``None``: they are damaged or cannot be read."""
        try:
            if (packed := self.packed()) is None:
                return None
            content = _CODEC.decompress(packed, decompressed_size=8 * len(FIELDS) * self.frame.rows)
            return np.frombuffer(content, np.int64).reshape(len(FIELDS), -1)
        except (pa.ArrowException, OSError, ValueError):
            return None


def frame_of(source: str, num_bytes: int, facts: Facts, last_unix_ns: int, sums: np.ndarray) -> bytes:
    """A frame of the sums of a file that has so many bytes."""
    steps = sums[0]
    first, last = (int(steps.min()), int(steps.max())) if steps.size else (-1, -1)
    of = {"source": source, "source_bytes": num_bytes, "facts": facts, "last_unix_ns": last_unix_ns}
    frame = Frame(**of, rows=steps.size, first_step=first, last_step=last)
    text, packed = frame.model_dump_json().encode(), bytes(_CODEC.compress(np.ascontiguousarray(sums)))
    head = _HEAD.pack(_MARK, len(text), len(packed), xxhash.xxh3_64_intdigest(text), xxhash.xxh3_64_intdigest(packed))
    return head + text + packed


def read_frames(path: Path) -> tuple[list[StoredSums], int]:
    """The frames of a file up to the first whose head is cut or damaged, and where that is; none when it is gone or of another format.

    Sums are read from the file when they are asked for, also when it has been replaced meanwhile.
    """
    found: list[StoredSums] = []
    try:
        file = path.open("rb")
    except OSError:
        return found, 0
    if file.read(len(_START)) != _START:
        return found, 0
    size, end = os.fstat(file.fileno()).st_size, len(_START)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        mark, text_bytes, num_bytes, text_sum, checksum = _HEAD.unpack(head)
        text, begin = file.read(text_bytes if mark == _MARK else 0), end + _HEAD.size + text_bytes
        if begin + num_bytes > size or xxhash.xxh3_64_intdigest(text) != text_sum:
            break
        try:
            frame = Frame.model_validate_json(text)
        except ValidationError:
            break
        found.append(StoredSums(frame, file, head + text, begin, num_bytes, checksum))
        end = file.seek(begin + num_bytes)
    return found, end


def update(path: Path, files: Mapping[str, int], made: Callable[[str], bytes | None]) -> None:
    """Have a file hold a frame of each of ``files`` (bytes by name): ``made`` gives those that it lacks, ``None`` of what cannot be read.

    Frames of other files go once they are more than `MOST_DEAD` of it, damaged ones at once. Raises OSError when the disk refuses; what
    is there then is of use all the same.
    """
    found, end = read_frames(path)
    whole = {one.frame.source: one for one in found if one.packed() is not None}
    kept = {name: one for name, one in whole.items() if files.get(name) == one.frame.source_bytes}
    there = path.stat().st_size if path.exists() else 0
    dead = there - len(_START) - sum(len(one.head) + one.num_bytes for one in kept.values())
    missing = (frame for name in files if name not in kept and (frame := made(name)) is not None)
    if not files:
        path.unlink(missing_ok=True)
    elif not there or there > end or len(whole) < len(found) or dead > MOST_DEAD * there:
        _write_anew(path, chain([_START], _copies(kept.values()), missing))
    else:
        with path.open("ab") as file:  # not forced to the disk: what a crash leaves of it, its checksums tell
            file.writelines(missing)


def _copies(frames: Iterable[StoredSums]) -> Iterator[bytes]:
    for one in frames:
        if (packed := one.packed()) is not None:
            yield one.head + packed


def _write_anew(path: Path, parts: Iterable[bytes]) -> None:
    hidden = path.with_name(f".{path.name}")
    try:
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
