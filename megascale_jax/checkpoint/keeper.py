"""The keeper: the process of a host that holds the newest states in memory and carries them to storage and to a peer host.

It outlives the trainers. They hand it their slots (`slot.py`) and say when one is filled; its threads (`carriers.py`) compute
checksums, send a copy to the next host, write the rank's part and, beside rank 0, publish, all at the lowest CPU and I/O
priority, so that steps do not feel it. After a crash the next trainer gets the slots back by descriptor. Here is what ranks may ask.

One keeper serves all ranks of a run on its host. It ends by itself: at once when every rank has released its slots, else when
no rank has been connected for a while and no work is left. SIGTERM asks it to end as soon as its work is done and its ranks have
gone. It imports no JAX.
"""

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from megascale_jax.checkpoint.carriers import Carriers
from megascale_jax.checkpoint.channel import Channel, is_own, keeper_address
from megascale_jax.checkpoint.holdings import Held, Job, Rank, Request
from megascale_jax.checkpoint.peers import PeerServer
from megascale_jax.checkpoint.slot import Slot, SlotIndex
from megascale_jax.checkpoint.stage_two import Target

IDLE_S = 600.0
ANSWER_S = 60.0
HANDOVER_S = 10.0
"""How long a keeper that starts waits for one that ends."""
ALIVE = "keeper.lock"
_POLL_S = 0.2


class Keeper:
    """State of one keeper and its answers; `serve` runs until there is no reason to."""

    def __init__(self, folder: Path, idle_s: float = IDLE_S):
        self.folder, self.idle_s = folder, idle_s
        self.ranks: dict[int, Rank] = {}
        self.peers = PeerServer()
        self.carriers = Carriers()
        self.changed = self.carriers.changed
        self.stopping = False
        self._connections = 0
        self._last_contact = time.monotonic()

    def serve(self) -> None:
        """Answer the ranks of this host. Raises Timeout when another keeper does already."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.folder / ALIVE, timeout=HANDOVER_S), contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.bind(keeper_address(self.folder))
            server.listen(64)
            server.settimeout(_POLL_S)
            self.carriers.start()
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
            if self.carriers.in_hand or self._connections:
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
            self._until(lambda: not held.is_busy, request.message["limit_s"])
            held.index = held.sums = None
        return {}

    def _filled(self, request: Request) -> dict[str, Any]:
        """A slot is complete: carry it on."""
        target = Target.from_json(request.message["target"]) if request.message["target"] is not None else None
        with self.changed:
            held = self._slot_of(request)
            held.index, held.sums = SlotIndex.from_json(request.message["index"]), None
            self.carriers.take(Job(request.rank, held, held.index, target))
        return {}

    def _wait(self, request: Request) -> dict[str, Any]:
        """Until there is no work left, or the limit; what is left then is in the status."""
        with self.changed:
            self.changed.wait_for(lambda: not self.carriers.in_hand, request.message["limit_s"])
        return self._status(request)

    def _status(self, request: Request) -> dict[str, Any]:
        """Newest published checkpoint, work in hand, and failures that were not told yet."""
        with self.changed:
            failures, request.rank.failures = request.rank.failures, []
            return self.carriers.status() | {"failures": failures}

    def _meet_peers(self, request: Request) -> dict[str, Any]:
        """Learn the run's secret and open the door to other keepers; then, who gets our copies."""
        port = self.peers.open(request.message["secret"])
        if "peer" in request.message:  # none at all: the run has one host now
            peer = request.message["peer"]
            self.carriers.peer = None if peer is None else (*peer, request.message["secret"])
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
            self._until(lambda: not any(held.is_busy for held in request.rank.slots.values()), request.message["limit_s"])
            for held in request.rank.slots.values():
                held.slot.close()
            request.rank.slots, request.rank.released = {}, True
            self.changed.notify_all()
        return {}

    def _replace(self, request: Request, held: Held) -> None:
        """Put a slot in the place of an older one, once stage 2 has left that."""
        slots, number = request.rank.slots, request.message["slot"]
        with self.changed:
            self._until(lambda: number not in slots or not slots[number].is_busy, request.message["limit_s"])
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
