"""Orders of nodes, and where nodes hang: the text files that `megascale place` reads and writes, and that launchers take.

An order has one name a line; line ``i`` gets rank ``i`` (of a process per node), names beyond those that train are spares, nearest first.
Empty lines and ``#`` with what follows count for nothing. Names are those of nodes, or of the machines that they are on where a cluster
tells these apart (Kubernetes). A topology has a line ``NODE TOR_SET [POD]`` for every node.

Failure case: a name twice, an unknown one, or too few of them are refused with what was got and what was expected.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_jax.errors import UsageError

_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Hangs:
    """Where a node hangs: names of its ToR set and of the pod of that; ``""`` where there is but one pod."""

    tor: str
    pod: str = ""


def natural(name: str) -> tuple[str, int]:
    """By which names are sorted where nothing else is known: ``n2`` before ``n10``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def read_names(path: Path, option: str) -> tuple[str, ...]:
    """Names of a file, each once. Raises UsageError for a name twice, two on a line, none at all, or a file that cannot be read."""
    names: dict[str, int] = {}
    for number, line in _lines(path, option):
        words = line.split()
        if len(words) != 1:
            raise UsageError(f"{option} {path}, line {number}: got {line!r}, expected one name of a node")
        if (first := names.get(words[0])) is not None:
            raise UsageError(f"{option} {path}, line {number}: {words[0]} is there twice, first in line {first}; expected every node once")
        names[words[0]] = number
    if not names:
        raise UsageError(f"{option} {path} names no node; expected one name a line")
    return tuple(names)


def check_order(order: Sequence[str], origin: str, *, nodes: int, spares: int = 0, known: Sequence[str] | None = None) -> None:
    """Whether an order serves a job of so many nodes. ``known``: the nodes that there are, None where that shows only later.

    Raises UsageError for a node twice, an unknown one, and too few of them: the spares must be named, too.
    """
    if len(set(order)) < len(order):
        twice = next(name for index, name in enumerate(order) if name in order[:index])
        raise UsageError(f"{origin}: {twice} is there twice; expected every node once")
    if known is not None and (unknown := [name for name in order if name not in set(known)]):
        shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        raise UsageError(f"{origin}: got {unknown[0]}, which is none of the {len(known)} nodes here ({shown})")
    if len(order) < nodes + spares:
        raise UsageError(f"{origin}: got {len(order)} nodes, expected {nodes} that train and {spares} spares")


def read_topology(path: Path, option: str = "--topology") -> dict[str, Hangs]:
    """Where every node hangs. Raises UsageError."""
    found: dict[str, Hangs] = {}
    for number, line in _lines(path, option):
        words = line.split()
        if len(words) not in (2, 3):
            raise UsageError(f"{option} {path}, line {number}: got {line!r}, expected NODE TOR_SET [POD]")
        if words[0] in found:
            raise UsageError(f"{option} {path}, line {number}: {words[0]} is there twice; expected every node once")
        found[words[0]] = Hangs(*words[1:])
    if not found:
        raise UsageError(f"{option} {path} names no node; expected lines NODE TOR_SET [POD]")
    pods: dict[str, str] = {}
    for name, one in found.items():
        if pods.setdefault(one.tor, one.pod) != one.pod:
            raise UsageError(f"{option} {path}: {name} is under {one.tor} of {one.pod!r}, others of that set of {pods[one.tor]!r}")
    return found


def slurm_topology(text: str, host_names: Callable[[str], Sequence[str]]) -> dict[str, Hangs]:
    """Where nodes hang by the lines of ``scontrol show topology``: switches of level 0 are ToR sets, those of level 1 pods.

    ``host_names`` expands a list such as ``n[1-3]``. Raises UsageError where Slurm knows no tree of switches.
    """
    lines = [line for line in text.splitlines() if line.startswith("SwitchName=")]
    switches: list[dict[str, str]] = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    leaves = [one for one in switches if one.get("Level") == "0"]
    if not leaves:
        raise UsageError(
            "Slurm shows no tree of switches; set TopologyPlugin=topology/tree and topology.conf, or name a file with --topology"
        )
    pods: dict[str, str] = {}
    for one in switches:
        if one.get("Level") == "1":
            pods |= dict.fromkeys(host_names(one["Switches"]) if one.get("Switches") else (), one["SwitchName"])
    return {node: Hangs(one["SwitchName"], pods.get(one["SwitchName"], "")) for one in leaves for node in host_names(one["Nodes"])}


def write_order(order: Sequence[str], header: Sequence[str]) -> bytes:
    """The file: comments, then names. `read_names` reads it back."""
    return "".join([*(f"# {line}\n" for line in header), *(f"{name}\n" for name in order)]).encode()


def _lines(path: Path, option: str) -> list[tuple[int, str]]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{option} {path} has {path.stat().st_size:,} bytes, expected a list of nodes")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path} cannot be read: {error}; expected a text file with one node a line") from error
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in lines if line]
