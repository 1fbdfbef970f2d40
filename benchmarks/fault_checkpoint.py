"""Faults at random moments against checkpoints: after each, the newest good one loads bit by bit, nothing good is gone, nothing hangs.

    python benchmarks/fault_checkpoint.py --faults 500 --seed 1 --json faults.json

Seeded slices append to one result: run it again with another seed and the same file. Four ranks on four hosts save a state whose bits
are known (`fault_cluster.py`); the kinds of faults are in `KINDS`. A fault counts as recovered when the run finds what it must find:
the new checkpoint where the fault leaves all that is needed, else the newest one before. It counts as lost_good when a
checkpoint that was good and that retention must keep is gone or cannot be read, as hung when a wait reaches its limit.
Exit code 1 unless every fault was recovered, with nothing lost and nothing hung.
"""

import json
import os
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from fault_cluster import KEEP, LIMIT_S, RANKS, Cluster, is_good, pause
from rich.console import Console
from rich.progress import track
from step_report import birth_certificate

from megascale_jax.checkpoint.manifest import MANIFEST, Manifest, published_steps, read_manifest
from megascale_jax.checkpoint.owner import Owner, claim, read_owner
from megascale_jax.cluster.small_disk import filled, mount_small_disk, unmount
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import RunFolderError

ROOT = Path(__file__).resolve().parents[1]
LONGEST_PAUSE_S = 0.25
"""Random moments lie in this time after stage 1; a whole stage 2 takes about as long."""
TMPFS_BYTES = 24 << 20


class Drill:
    """One run that is hurt again and again."""

    def __init__(self, cluster: Cluster, rng: random.Random, is_small_disk: bool):
        self.cluster, self.rng, self.is_small_disk, self.step = cluster, rng, is_small_disk, 0
        self.seen: set[int] = set()
        """Steps that were published at any time."""
        self.rooms: list[int] = []
        """Sizes in bytes that full disks are to have next; random ones when there are none left."""
        self.hurt: set[int] = set()
        self.storage = Storage(cluster.checkpoints)

    def settle(self) -> None:
        """A good checkpoint to fall back to."""
        self.next()
        self.cluster.finish()

    def next(self) -> int:
        self.step += 1
        self.cluster.save(self.step)
        return self.step

    def wait_a_moment(self) -> None:
        pause(self.rng.uniform(0, LONGEST_PAUSE_S))

    def files(self, step: int) -> list[Path]:
        return sorted(path for path in (self.cluster.checkpoints / str(step)).rglob("*") if path.is_file())


def keeper_killed(drill: Drill) -> int:
    """The writer of one host dies between stage 1 and publication; its rank starts another."""
    step, victim = drill.next(), drill.rng.choice(drill.cluster.ranks)
    drill.wait_a_moment()
    victim.kill_keeper()
    victim.recover()
    return step


def publisher_killed(drill: Drill) -> int:
    """The same for the host that publishes."""
    step = drill.next()
    drill.wait_a_moment()
    drill.cluster.ranks[0].kill_keeper()
    drill.cluster.ranks[0].recover()
    return step


def all_keepers_killed(drill: Drill) -> int:
    """All writers at once."""
    step = drill.next()
    drill.wait_a_moment()
    for rank in drill.cluster.ranks:
        rank.kill_keeper()
    for rank in drill.cluster.ranks:
        rank.recover()
    return step


def host_lost(drill: Drill) -> int | None:
    """One host of four goes with its memory in stage 2: the step may have made it to storage, or is never published."""
    drill.cluster.impatient()
    step, victim = drill.next(), drill.rng.choice(drill.cluster.ranks)
    drill.wait_a_moment()
    victim.kill_keeper()
    victim.recover(memory_is_lost=True)
    drill.cluster.finish()
    drill.cluster.patient()
    drill.cluster.start_again()
    return step if step in published_steps(drill.storage) else None


def host_lost_silently(drill: Drill) -> int:
    """The same, and nobody starts the run again: the next save must not wait for the part that never comes."""
    drill.next()
    victim = drill.rng.choice(drill.cluster.ranks)
    drill.wait_a_moment()
    victim.kill_keeper()
    victim.recover(memory_is_lost=True)
    return drill.next()


def disk_full(drill: Drill) -> int | None:
    """The disk has room for a part of a checkpoint; afterwards somebody makes room.

    Where no small disk can be mounted, the kernel refuses one host's writes beyond a random size instead.
    """
    drill.cluster.impatient()
    victim = drill.rng.choice(drill.cluster.ranks).client.pid
    if drill.is_small_disk:
        with filled(drill.cluster.checkpoints, drill.rooms.pop(0) if drill.rooms else drill.rng.randrange(1, 3 << 20)):
            step = drill.next()
            drill.cluster.finish()
    else:
        resource.prlimit(victim, resource.RLIMIT_FSIZE, (drill.rng.randrange(1, 1 << 16), resource.RLIM_INFINITY))
        step = drill.next()
        drill.cluster.finish()
        resource.prlimit(victim, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    drill.cluster.patient()
    return step if step in published_steps(drill.storage) else None


def _damaged(drill: Drill, hurt: Callable[[Path], None]) -> int | None:
    """Hurt a random file of the newest checkpoint; what is expected depends on whether that file is read at all."""
    step = drill.next()
    drill.cluster.finish()
    drill.seen.add(step)
    drill.hurt.add(step)
    hurt(drill.rng.choice(drill.files(step)))
    return step if is_good(drill.storage, step) else None


def flipped_byte(drill: Drill) -> int | None:
    """One bit of a random file, data, tree, manifest or metadata."""

    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        if content:
            content[drill.rng.randrange(len(content))] ^= 1 << drill.rng.randrange(8)
            file.write_bytes(content)

    return _damaged(drill, flip)


def truncated_file(drill: Drill) -> int | None:
    """A random file loses its end."""
    return _damaged(drill, lambda file: os.truncate(file, drill.rng.randrange(file.stat().st_size or 1)))


def missing_file(drill: Drill) -> int | None:
    """A random file is gone."""
    return _damaged(drill, lambda file: file.unlink())


def stale_folder(drill: Drill) -> int:
    """What a killed start left of the very step that comes next, and of one before it."""
    for step in (drill.step + 1, max(1, drill.step - KEEP - 1)):
        left = drill.cluster.checkpoints / str(step) / "launch-of-old" / f"ocdbt.process_{drill.rng.randrange(RANKS)}"
        left.mkdir(parents=True, exist_ok=True)
        (left / "manifest.ocdbt").write_bytes(drill.rng.randbytes(64))
    step = drill.next()
    drill.cluster.finish()
    assert not (drill.cluster.checkpoints / str(step) / "launch-of-old").exists(), "a published step holds nothing else"
    return step


def clock_goes_backwards(drill: Drill) -> int:
    """The newest checkpoint seems to be from the future; numbers of steps decide, not clocks."""
    step = drill.next()
    drill.cluster.finish()
    manifest = read_manifest(drill.storage, step)
    future = Manifest(**{**vars(manifest), "created_unix_s": manifest.created_unix_s + drill.rng.uniform(-1, 1) * 1e7})
    drill.storage.write(f"{step}/{MANIFEST}", future.to_bytes())
    return drill.next()


def second_run(drill: Drill) -> int:
    """Another run asks for the same place: it has an owner, so it is refused before anything is touched."""
    step = drill.next()
    storage = Storage(drill.cluster.folder)

    def refuse(found: Owner | None, run: str) -> None:
        if found is not None and found.run != run:
            raise RunFolderError(f"the place is {found.run}'s")

    claim(storage, Owner("first", "first", 0.0), lambda found: refuse(found, "first"))
    try:
        claim(storage, Owner("second", "second", 0.0), lambda found: refuse(found, "second"))
    except RunFolderError:
        owner = read_owner(storage)
        assert owner is not None and owner.run == "first", "the record is still the first one's"
        return step
    raise AssertionError("the second run was not refused")


def trainers_killed(drill: Drill) -> int:
    """All ranks die after stage 1; their keepers finish, and the next start is another launch that finds the step."""
    step = drill.next()
    drill.wait_a_moment()
    for rank in drill.cluster.ranks:
        rank.client.close()
        rank.client = rank._meet()
    drill.cluster.finish()
    drill.cluster.start_again()
    return step


KINDS = (
    keeper_killed,
    publisher_killed,
    all_keepers_killed,
    host_lost,
    host_lost_silently,
    disk_full,
    flipped_byte,
    truncated_file,
    missing_file,
    stale_folder,
    clock_goes_backwards,
    second_run,
    trainers_killed,
)


def run(drill: Drill, kind: Callable[[Drill], int | None]) -> dict[str, Any]:
    """One fault and what came of it."""
    before = drill.cluster.newest()
    drill.seen |= set(published_steps(drill.storage))
    began = time.monotonic()
    outcome: dict[str, Any] = {"kind": kind.__name__, "step": drill.step + 1, "hung": False, "lost_good": 0, "recovered": False}
    try:
        must_be = kind(drill)
        drill.cluster.finish()
        outcome["failures"], drill.cluster.failures = drill.cluster.failures, []
        expected = before if must_be is None else must_be
        found = drill.cluster.newest()
        published = published_steps(drill.storage)
        drill.seen |= set(published)
        behind = [name for name in drill.storage.folders() if name.isdecimal() and int(name) not in published]
        left = [name for name in behind if published and int(name) < published[-1] and int(name) not in drill.hurt] if must_be else []
        lost = [step for step in sorted(drill.seen)[-KEEP:] if step not in published and step not in drill.hurt]
        outcome |= {"found": found, "expected": expected, "lost": lost, "lost_good": len(lost), "left": left}
        outcome["recovered"] = found == expected and not lost and not left
    except (TimeoutError, ConnectionError) as error:
        outcome |= {"hung": "limit" in str(error) or "did not end" in str(error), "problem": str(error)}
    except (OSError, AssertionError) as error:
        outcome |= {"problem": f"{type(error).__name__}: {error}"}
    outcome["seconds"] = round(time.monotonic() - began, 3)
    outcome["hung"] = outcome["hung"] or outcome["seconds"] > 2 * LIMIT_S
    return outcome


def every_room(checkpoints: Path) -> list[int]:
    """Sizes that a disk may have left for the next checkpoint, one a page: from none to three times what the newest one holds."""
    newest = max(published_steps(Storage(checkpoints)))
    files = [path.stat().st_size for path in (checkpoints / str(newest)).rglob("*") if path.is_file()]
    page = resource.getpagesize()
    return [page * number for number in range(3 * sum(-(-size // page) for size in files))]


def campaign(folder: Path, faults: int, seed: int, *, sweeps: bool = False, show: bool = True) -> list[dict[str, Any]]:
    """So many faults, every kind about equally often, in a random order; with ``sweeps`` a disk that is full at every page in turn."""
    rng = random.Random(seed)
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    is_small_disk = mount_small_disk(checkpoints, TMPFS_BYTES)
    order = [KINDS[number % len(KINDS)] for number in range(faults)]
    rng.shuffle(order)
    cluster = Cluster(folder, f"drill-{seed}-{folder}")
    outcomes = []
    try:
        drill = Drill(cluster, rng, is_small_disk)
        drill.settle()
        if sweeps:
            assert is_small_disk, "a disk that is full at a given page needs the right to mount one"
            drill.rooms = every_room(checkpoints)
            order = [disk_full] * len(drill.rooms)
        for kind in track(order, "faults", console=Console(stderr=True), disable=not show):
            outcomes.append(run(drill, kind) | {"seed": seed})
            if not outcomes[-1]["recovered"]:
                drill.settle()
            if sweeps and len(outcomes) > 2 and all(one["found"] == one["step"] for one in outcomes[-3:]):
                break  # from here on there is room for all of it
    finally:
        cluster.close()
        if is_small_disk:
            unmount(checkpoints)
    return outcomes


def totals(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts that matter."""
    return {
        "injected": len(outcomes),
        "recovered": sum(one["recovered"] for one in outcomes),
        "lost_good": sum(one["lost_good"] for one in outcomes),
        "hung": sum(bool(one["hung"]) for one in outcomes),
        "by_kind": dict(Counter(one["kind"] for one in outcomes)),
        "longest_s": max((one["seconds"] for one in outcomes), default=0.0),
        "seeds": sorted({one["seed"] for one in outcomes}),
    }


def main(
    json_path: Annotated[Path, typer.Option("--json", help="result; an existing one is added to")],
    faults: Annotated[int, typer.Option(min=1, help="faults of this slice")] = 100,
    seed: Annotated[int, typer.Option(help="another seed, other moments")] = 0,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="instead: the disk is full at every page of a checkpoint in turn, until it fits")
    ] = False,
) -> None:
    """Inject, check, append."""
    record = json.loads(json_path.read_text()) if json_path.is_file() else {"slices": [], "outcomes": []}
    which = "--sweep" if sweep else f"--faults {faults}"
    slice_ = birth_certificate(ROOT, f"python benchmarks/fault_checkpoint.py {which} --seed {seed} --json PATH")
    with tempfile.TemporaryDirectory(prefix="fault-checkpoint-", ignore_cleanup_errors=True) as name:
        outcomes = campaign(Path(name), faults, seed, sweeps=sweep)
    record["slices"].append(slice_)
    record["outcomes"] += outcomes
    record |= totals(record["outcomes"])
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    console = Console()
    console.print({key: value for key, value in record.items() if key not in ("slices", "outcomes")})
    for one in outcomes:
        if not one["recovered"]:
            console.print("[red]not recovered[/red]", one)
    raise typer.Exit(0 if all(one["recovered"] and not one["hung"] for one in outcomes) else 1)


if __name__ == "__main__":
    typer.run(main)
