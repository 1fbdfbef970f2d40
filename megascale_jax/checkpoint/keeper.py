"""The keeper: the process of a host that holds the newest states in memory and carries them to storage and to a peer host.

It outlives the trainers. They hand it their slots (`slot.py`) and say when one is filled; it computes checksums, sends a copy to
the next host, writes the rank's part and, beside rank 0, publishes (`stage_two.py`), all at the lowest CPU and I/O
priority, so that steps do not feel it. After a crash the next trainer gets the slots back by descriptor.

One keeper serves all ranks of a run on its host. It ends by itself: at once when every rank has released its slots, else when
no rank has been connected for a while and no work is left. SIGTERM asks it to end as soon as its work is done and its ranks have
gone. It imports no JAX.
"""

import contextlib
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from megascale_jax.checkpoint.channel import Channel, is_own, keeper_address
from megascale_jax.checkpoint.holdings import Held, Job, Rank, Request
from megascale_jax.checkpoint.manifest import Manifest
from megascale_jax.checkpoint.peers import PeerServer, send_copy
from megascale_jax.checkpoint.slot import Slot, SlotIndex, checksums
from megascale_jax.checkpoint.stage_two import Target, discard, is_published, publish, tidy, write_part
from megascale_jax.checkpoint.upload import upload_waiting

IDLE_S = 600.0
ANSWER_S = 60.0
HANDOVER_S = 10.0
"""How long a keeper that starts waits for one that ends."""
ALIVE = "keeper.lock"
_POLL_S = 0.2


class Keeper:
    """State and threads of one keeper; `serve` runs until there is no reason to."""

    def __init__(self, folder: Path, idle_s: float = IDLE_S):
        self.folder, self.idle_s = folder, idle_s
        self.ranks: dict[int, Rank] = {}
        self.peers = PeerServer()
        self.changed = threading.Condition()
        self.stopping = False
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._publications: queue.Queue[Job] = queue.Queue()
        self._uploads: queue.Queue[tuple[Job, Manifest]] = queue.Queue()
        self._working = self._connections = 0
        self._durable: dict[str, Any] | None = None
        self._launch = ""
        self._peer: tuple[str, int, str] | None = None
        self._last_contact = time.monotonic()

    def serve(self) -> None:
        """Answer the ranks of this host. Raises Timeout when another keeper does already."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.folder / ALIVE, timeout=HANDOVER_S), contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.bind(keeper_address(self.folder))
            server.listen(64)
            server.settimeout(_POLL_S)
            for work in (self._carry, self._publish, self._upload):
                threading.Thread(target=work, daemon=True).start()
            while not self._has_ended():
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    if not is_own(connection):
                        connection.close()
                        continue
                    with self.changed:
                        self._connections += 1  # here, not in the thread, before which this one may find that all is over
                    threading.Thread(target=self._talk, args=(Channel(connection, ANSWER_S),), daemon=True).start()
        self.peers.close()

    def _has_ended(self) -> bool:
        with self.changed:
            if self._working or self._connections:
                self._last_contact = time.monotonic()
                return False
            done = bool(self.ranks) and all(rank.released for rank in self.ranks.values())
            return done or self.stopping or time.monotonic() - self._last_contact > self.idle_s

    def _talk(self, channel: Channel) -> None:
        """Answer one rank until it goes."""
        with channel:
            try:
                hello, _, _ = channel.receive()
                with self.changed:
                    rank = self.ranks.setdefault(int(hello["rank"]), Rank())
                    rank.released, rank.failures = False, []
                channel.limit(None)
                channel.send({"pid": os.getpid(), "keeper": self.peers.name})
                while True:
                    message, _, descriptors = channel.receive()
                    self._answer(channel, Request(int(hello["rank"]), rank, message, descriptors))
            except ConnectionError:
                pass
            finally:
                with self.changed:
                    self._connections -= 1

    def _answer(self, channel: Channel, request: Request) -> None:
        answers: dict[str, Callable[[Request], dict[str, Any]]] = {
            "held": self._held,
            "slot": self._take_slot,
            "acquire": self._acquire,
            "filled": self._filled,
            "wait": self._wait,
            "status": self._status,
            "peers": self._meet_peers,
            "fetch": self._fetch,
            "forget": self._forget,
            "release": self._release,
        }
        try:
            answer = answers[request.message["op"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.send(answer, descriptors=request.reply_descriptors)

    # What a rank may ask.

    def _held(self, request: Request) -> dict[str, Any]:
        """The rank's slots and their descriptors, and what this host holds for others."""
        with self.changed:
            own = sorted(request.rank.slots.items())
            request.reply_descriptors = [held.slot.descriptor for _, held in own]
            described = [
                {"slot": slot, "num_bytes": held.slot.num_bytes, "sums": held.sums, "index": held.index.to_json() if held.index else None}
                for slot, held in own
            ]
        return {"slots": described, "copies": self.peers.held()}

    def _take_slot(self, request: Request) -> dict[str, Any]:
        """A new slot in place of an old one."""
        if len(request.descriptors) != 1:
            raise ValueError(f"{len(request.descriptors)} descriptors came with a slot, expected 1")
        self._replace(request, Held(Slot(request.message["num_bytes"], request.descriptors[0])))
        return {}

    def _acquire(self, request: Request) -> dict[str, Any]:
        """Give a slot to the rank to be filled, once stage 2 has left it."""
        with self.changed:
            held = self._slot_of(request)
            self._until(lambda: not held.busy, request.message["limit_s"])
            held.index = held.sums = None
        return {}

    def _filled(self, request: Request) -> dict[str, Any]:
        """A slot is complete: carry it on."""
        target = Target.from_json(request.message["target"]) if request.message["target"] is not None else None
        with self.changed:
            held = self._slot_of(request)
            held.index, held.sums, held.busy = SlotIndex.from_json(request.message["index"]), None, True
            job = Job(request.number, request.message["slot"], held, held.index, target)
            self._launch = held.index.launch
            self._working += 1
            if request.number == 0 and target is not None:
                self._working += 1
                self._publications.put(job)
            self._jobs.put(job)
        return {}

    def _wait(self, request: Request) -> dict[str, Any]:
        """Until there is no work left, or the limit."""
        with self.changed:
            self._until(lambda: not self._working, request.message["limit_s"])
        return self._status(request)

    def _status(self, request: Request) -> dict[str, Any]:
        """Newest published checkpoint, and failures that were not told yet."""
        with self.changed:
            failures, request.rank.failures = request.rank.failures, []
            return {"durable": self._durable, "failures": failures, "working": self._working}

    def _meet_peers(self, request: Request) -> dict[str, Any]:
        """Learn the run's secret and open the door to other keepers; then, who gets our copies."""
        port = self.peers.open(request.message["secret"])
        if request.message.get("peer") is not None:
            self._peer = (*request.message["peer"], request.message["secret"])
        return {"port": port}

    def _fetch(self, request: Request) -> dict[str, Any]:
        """Get a rank's copy from another host into one of the rank's slots. Raises ConnectionError or OSError."""
        door = {key: request.message[key] for key in ("host", "port", "secret")}
        slot, index, sums = self.peers.fetch(**door, wanted=request.message["wanted"], limit_s=request.message["limit_s"])
        self._replace(request, Held(slot, index, sums))
        request.reply_descriptors = [slot.descriptor]
        return {"num_bytes": slot.num_bytes, "index": index.to_json(), "sums": sums}

    def _forget(self, request: Request) -> dict[str, Any]:
        """A slot's content turned out to be damaged: nobody is offered it again."""
        with self.changed:
            held = request.rank.slots[request.message["slot"]]
            held.index = held.sums = None
        return {}

    def _release(self, request: Request) -> dict[str, Any]:
        """The run is over: nobody will come for the rank's slots."""
        with self.changed:
            self._until(lambda: not any(held.busy for held in request.rank.slots.values()), request.message["limit_s"])
            for held in request.rank.slots.values():
                held.slot.close()
            request.rank.slots, request.rank.released = {}, True
            self.changed.notify_all()
        return {}

    def _replace(self, request: Request, held: Held) -> None:
        """Put a slot in the place of an older one, once stage 2 has left that."""
        slots, number = request.rank.slots, request.message["slot"]
        with self.changed:
            self._until(lambda: number not in slots or not slots[number].busy, request.message["limit_s"])
            if (old := slots.get(number)) is not None:
                old.slot.close()
            slots[number] = held

    def _slot_of(self, request: Request) -> Held:
        """The slot that is asked about. Raises OSError when the rank means other memory than we hold."""
        held = request.rank.slots[request.message["slot"]]
        if request.message["identity"] != held.slot.identity:
            raise OSError(f"slot {request.message['slot']} is other memory here than in the rank; give it again")
        return held

    def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        if not self.changed.wait_for(condition, limit_s):
            raise TimeoutError(f"stage 2 did not end within {limit_s:.0f} s")

    # Background threads.

    def _carry(self) -> None:
        while True:
            job = self._jobs.get()
            with self._ended(), self._reported(job, "not written"):
                try:
                    self._carry_on(job)
                finally:
                    with self.changed:
                        job.held.busy = False

    def _carry_on(self, job: Job) -> None:
        sums = checksums(job.held.slot, job.index)
        with self.changed:
            job.held.sums = sums
        if self._peer is not None:
            with self._reported(job, "no copy on the next host", is_loss=False):
                send_copy(*self._peer, job.held.slot, job.index, sums)
        if job.target is not None:
            write_part(job.target.storage(), job.target, job.held.slot, job.index)

    def _publish(self) -> None:
        while True:
            job = self._publications.get()
            with self._ended(), self._reported(job, "not published"):
                self._publish_one(job)

    def _publish_one(self, job: Job) -> None:
        target = job.target
        assert target is not None, "only what goes to storage is published"
        storage = target.storage()
        try:
            manifest = publish(storage, target, job.index, lambda: self._launch != job.index.launch)
        except OSError as error:
            if not is_published(storage, job.index):
                discard(storage, job.index, str(error))
            raise
        with self.changed:
            self._durable = {"step": manifest.step, "created_unix_s": manifest.created_unix_s, "num_bytes": manifest.num_bytes}
        with self._reported(job, "old ones not removed", is_loss=False):
            tidy(storage, target, manifest)
        if target.upload is not None:
            self._begin()
            self._uploads.put((job, manifest))

    def _upload(self) -> None:
        while True:
            job, manifest = self._uploads.get()
            target = job.target
            assert target is not None and target.upload is not None, "only what goes to storage is uploaded"
            with self._ended(), self._reported(job, f"not uploaded to {target.upload}", is_loss=False):
                storage = target.storage()
                try:
                    upload_waiting(storage, target.upload)
                finally:
                    tidy(storage, target, manifest)

    def _begin(self) -> None:
        with self.changed:
            self._working += 1

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """Work that `_begin` counted ends with this."""
        try:
            yield
        finally:
            with self.changed:
                self._working -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def _reported(self, job: Job, what: str, *, is_loss: bool = True) -> Iterator[None]:
        """Failures inside become something that the rank is told; ``is_loss``: without this the state is not safe."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            with self.changed:
                self.ranks[job.rank].failures.append({"step": job.index.step, "what": what, "error": str(error), "is_loss": is_loss})
