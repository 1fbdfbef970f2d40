"""Which checkpoints go, and a record of each that went. Deciding is a pure function; a deletion is written down before it is done.

A checkpoint stays while it is among the ``keep`` newest good ones, or younger than ``keep_hours``, or its step is a multiple of
``keep_every``; the newest good one always stays. Ages are differences of wall clocks: a clock that went back makes a
checkpoint look young, so it stays. What is damaged, or was never completed, goes once it is behind all that is kept; what a rewind gave
up (`line.py`) goes at once, and is not counted.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from megascale_jax.checkpoint.line import given_up
from megascale_jax.checkpoint.manifest import DELETIONS, MANIFEST, Found, Manifest, scan
from megascale_jax.comm.storage import Storage


@dataclass(frozen=True)
class Retention:
    """How many checkpoints are kept on durable storage."""

    keep: int
    keep_every: int | None = None
    keep_hours: float | None = None
    rewinds: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Deletion:
    """A folder below the storage's root to be removed, and why."""

    folder: str
    reason: str


def decide(
    found: Sequence[Found], folders: Sequence[str], policy: Retention, now_unix_s: float, bound: Collection[int] = ()
) -> list[Deletion]:
    """What goes: published ones by the policy, damaged and unfinished ones behind the oldest that stays.

    ``found``: published checkpoints that nobody marked damaged; ``folders``: all folders of the storage; ``bound``: steps that may not
    go yet, whatever the policy says.
    """
    readable = sorted((f.manifest for f in found if f.manifest is not None), key=lambda manifest: manifest.step)
    reasons = {manifest.step: given_up(manifest.step, manifest.description, policy.rewinds) for manifest in readable}
    good = [manifest for manifest in readable if reasons[manifest.step] is None]
    if not good:
        return []
    newest = {manifest.step for manifest in good[-policy.keep :]}
    deletions = [Deletion(str(step), reason) for step, reason in reasons.items() if reason is not None and step not in bound]
    for manifest in good:
        reason = _reason(manifest, newest, policy, now_unix_s)
        if reason is not None and manifest.step not in bound:
            deletions.append(Deletion(str(manifest.step), reason))
    # one whose manifest cannot be read now may be readable tomorrow: it goes only once a reader has marked it as damaged
    published = {f.step for f in found}
    behind = [name for name in folders if name.isdecimal() and int(name) not in published and int(name) < min(newest)]
    reason = f"damaged or never completed, and step {min(newest)} and all newer ones are good"
    return deletions + [Deletion(name, reason) for name in behind]


def _reason(manifest: Manifest, newest: set[int], policy: Retention, now_unix_s: float) -> str | None:
    """Why a checkpoint goes; ``None``: it stays."""
    if manifest.step in newest or (policy.keep_every is not None and manifest.step % policy.keep_every == 0):
        return None
    hours = (now_unix_s - manifest.created_unix_s) / 3600
    if policy.keep_hours is not None and hours < policy.keep_hours:
        return None
    reasons = [f"not among the newest {policy.keep}"]
    if policy.keep_hours is not None:
        reasons.append(f"older than {policy.keep_hours:g} hours")
    if policy.keep_every is not None:
        reasons.append(f"no multiple of {policy.keep_every} steps")
    return ", ".join(reasons)


def apply(storage: Storage, policy: Retention, by: str, *, launch: str, run: str = "", bound: Collection[int] = ()) -> list[Deletion]:
    """Decide and delete; what was deleted. What ``launch`` is writing stays, also where newer steps of another start lie beside it.

    What another run left here is not counted among those that ``run`` keeps, and not removed.

    Raises OSError.
    """
    everything = scan(storage)
    found = [one for one in everything if one.manifest is None or one.manifest.is_of(run)]
    published = {str(one.step) for one in found}

    def is_being_written(folder: str) -> bool:
        return folder not in published and any(storage.names(f"{folder}/{name}/") for name in (launch, f"{launch}.parts"))

    foreign = {str(one.step) for one in everything if one not in found}
    decided = decide(found, [name for name in storage.folders() if name not in foreign], policy, time.time(), bound)
    deletions = [deletion for deletion in decided if not is_being_written(deletion.folder)]
    for deletion in deletions:
        delete(storage, deletion, by)
    return deletions


def delete(storage: Storage, deletion: Deletion, by: str) -> None:
    """Write the deletion down, take the manifest away, then the rest: what is half deleted is no checkpoint. Raises OSError."""
    storage.append(DELETIONS, record(deletion, by))
    storage.delete(f"{deletion.folder}/{MANIFEST}")
    storage.delete_folder(deletion.folder)


def record(deletion: Deletion, by: str) -> str:
    """A line of the log of deletions."""
    return json.dumps({"unix_s": time.time(), **asdict(deletion), "by": by})
