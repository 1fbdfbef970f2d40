"""Which ranks a run has by its event files, and where in the mesh they are. No JAX."""

from collections.abc import Sequence
from pathlib import Path

from megascale_jax.errors import UsageError
from megascale_jax.observe.event_files import read_facts, read_parquet_facts
from megascale_jax.observe.event_paths import OPEN_SUFFIX, events_folder, found, process_of
from megascale_jax.observe.event_segments import Facts


def parse_numbers(text: str | None, option: str) -> set[int] | None:
    """``0,8-15`` as numbers; ``None`` for ``None``. Raises UsageError for anything else."""
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first) < 1 << 20):
            raise UsageError(f"{option} {text}: expected numbers and ranges, such as 0,8-15")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def files_of_trainers(run: Path) -> dict[str, list[Path]]:
    """Event files of every training process, oldest first. Raises RunFolderError when the run has none."""
    events_folder(run)
    segments, stored = found(run)
    files: dict[str, list[Path]] = {}
    for path in sorted((*segments, *stored)):
        if path.name.startswith("trainer-"):
            files.setdefault(process_of(path), []).append(path)
    return files


def facts_of(path: Path) -> Facts | None:
    """What a file of events says of its process; ``None`` when it cannot be read."""
    if path.name.endswith(OPEN_SUFFIX):
        return read_facts(path)
    known = read_parquet_facts(path)
    return None if isinstance(known, str) else known[0]


def newest_facts(paths: Sequence[Path]) -> Facts | None:
    """What the newest readable one of a process's files says, which are given in their order; ``None`` when none can be read."""
    return next((facts for path in reversed(paths) if (facts := facts_of(path)) is not None), None)
