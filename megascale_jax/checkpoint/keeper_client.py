"""A rank's side of its keeper: find it, start it if there is none, talk to it. No JAX.

The keeper of a run is found by the run's identity, in a folder that only this user can enter. Whichever rank of a host comes
first starts it, in a session of its own, so that signals to the ranks do not reach it; `megascale keep` starts one by hand.
"""

import hashlib
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from megascale_jax.checkpoint.channel import Channel, connect_unix
from megascale_jax.checkpoint.keeper import IDLE_S
from megascale_jax.checkpoint.slot import Slot
from megascale_jax.errors import CheckpointError

START_S = 60.0
AGAIN_S = 20.0
"""Longest that a start of Python may take; then another is tried."""
ANSWER_S = 60.0
FOLDER_VARIABLE, IDLE_VARIABLE = "MEGASCALE_KEEPER", "MEGASCALE_KEEPER_IDLE_S"
_POLL_S = 0.02


def keeper_folder(run_identity: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of the keeper of a run on this host: below ``$MEGASCALE_KEEPER``, else below a folder of this user in the temporary one."""
    base = Path(environment.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / f"megascale-{os.getuid()}")
    return base / hashlib.sha256(run_identity.encode()).hexdigest()[:16]


def _make_private(folder: Path) -> None:
    for path in (folder.parent, folder):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise CheckpointError(f"{path} can be entered by others; remove it, or name another folder in {FOLDER_VARIABLE}")


def start_keeper(folder: Path, idle_s: float | None = None) -> None:
    """Start a keeper that outlives this process; returns at once."""
    idle = idle_s if idle_s is not None else float(os.environ.get(IDLE_VARIABLE, IDLE_S))
    log = os.open(folder / "keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "megascale_jax.checkpoint.keeper_process", str(folder), "--idle-s", str(idle)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(log)


class KeeperClient:
    """A connection to the keeper of this host; thread-safe. Methods raise ConnectionError when it is gone, OSError when it refuses."""

    def __init__(self, folder: Path, rank: int):
        """Connect, starting a keeper if none answers. Raises CheckpointError when that does not succeed within `START_S`."""
        _make_private(folder)
        self._lock = threading.Lock()
        self._channel, self.identity = _meet(folder, rank)

    @property
    def pid(self) -> int:
        """Process of the keeper."""
        return self.identity["pid"]

    def ask(self, op: str, *, limit_s: float = ANSWER_S, descriptors: Sequence[int] = (), **message: Any) -> dict[str, Any]:
        """Ask, and the answer. ``limit_s`` also is the longest that the keeper waits for what is asked."""
        return self.ask_for_slots(op, limit_s=limit_s, descriptors=descriptors, **message)[0]

    def ask_for_slots(
        self, op: str, *, limit_s: float = ANSWER_S, descriptors: Sequence[int] = (), **message: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """`ask`, and the descriptors that came with the answer."""
        with self._lock:
            try:
                self._channel.limit(limit_s + ANSWER_S)
                self._channel.send({"op": op, "limit_s": limit_s, **message}, descriptors=descriptors)
                answer, _, received = self._channel.receive()
            except BaseException:
                self._channel.close()  # a late answer must not be taken for that to the next question
                raise
        if "error" in answer:
            raise OSError(answer["error"])
        return answer, received

    def give_slot(self, number: int, slot: Slot, limit_s: float = ANSWER_S) -> None:
        """Let the keeper hold a slot too, once stage 2 has left the one before."""
        self.ask("slot", limit_s=limit_s, slot=number, num_bytes=slot.num_bytes, descriptors=[slot.descriptor])

    def close(self) -> None:
        """End the connection; the keeper stays."""
        self._channel.close()


def _meet(folder: Path, rank: int) -> tuple[Channel, dict[str, Any]]:
    """A channel to a keeper that has answered, and its answer; one that is just ending counts as none."""
    with suppress(ConnectionError):
        return _greet(folder, rank)
    limit = time.monotonic() + START_S
    with FileLock(folder / "start.lock", timeout=START_S):  # one of the ranks of a host starts it
        started = -START_S
        while True:
            try:
                return _greet(folder, rank)
            except ConnectionError as error:
                if time.monotonic() > limit:
                    raise CheckpointError(f"no keeper answers in {folder} within {START_S:.0f} s; see its keeper.log") from error
            if time.monotonic() > started + AGAIN_S:
                start_keeper(folder)
                started = time.monotonic()
            time.sleep(_POLL_S)


def _greet(folder: Path, rank: int) -> tuple[Channel, dict[str, Any]]:
    channel = connect_unix(folder, ANSWER_S)
    try:
        return channel, channel.ask({"op": "hello", "rank": rank})
    except ConnectionError:
        channel.close()
        raise
