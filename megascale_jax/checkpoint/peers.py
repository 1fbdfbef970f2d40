"""Copies of other hosts' states: each keeper holds the newest two states of the ranks of one other host.

A copy travels with its checksums and is verified on arrival, so what a rank gets back after its host was lost is what it had.
Only who proves to know the secret of the run is heard.
"""

import contextlib
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from megascale_jax.checkpoint.channel import Channel, connect_tcp
from megascale_jax.checkpoint.slot import SLOTS, Slot, SlotIndex, checksums

LIMIT_S = 60.0


class PeerServer:
    """The door of a keeper to those of other hosts; closed until `open`."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        """Tells keepers apart, and so hosts."""
        self._secrets: list[str] = []
        self._copies: dict[int, list[tuple[Slot, SlotIndex, list[int]]]] = {}
        self._lock = threading.Lock()
        self._server: socket.socket | None = None

    def open(self, secret: str) -> int:
        """Listen, also to those who know ``secret``; the port."""
        with self._lock:
            if secret not in self._secrets:
                self._secrets = [*self._secrets[-1:], secret]
            if self._server is None:
                is_dual = socket.has_dualstack_ipv6()
                family = socket.AF_INET6 if is_dual else socket.AF_INET
                self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
                threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()
            return self._server.getsockname()[1]

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    def held(self) -> list[dict[str, Any]]:
        """Which copies there are: rank, step, launch and fingerprint of each."""
        with self._lock:
            return [
                {"rank": rank, "step": index.step, "launch": index.launch, "fingerprint": index.fingerprint}
                for rank, copies in self._copies.items()
                for _, index, _ in copies
            ]

    def fetch(self, host: str, port: int, secret: str, wanted: Mapping[str, Any], limit_s: float) -> tuple[Slot, SlotIndex, list[int]]:
        """The copy with the ``rank``, ``step``, ``launch`` and ``fingerprint`` that are ``wanted`` from another host's keeper, verified.

        Raises ConnectionError, OSError when it is not there or damaged.
        """
        with connect_tcp(host, port, secret, min(LIMIT_S, limit_s)) as channel:
            announced = channel.ask({"op": "get", "wanted": dict(wanted)})
            slot = Slot(announced["num_bytes"])
            channel.send({"op": "go"})
            channel.receive(into=slot.data)
        index = SlotIndex.from_json(announced["index"])
        if _name(index) != dict(wanted) or checksums(slot, index) != announced["sums"]:
            raise OSError(f"the copy of rank {wanted['rank']} at step {wanted['step']} on {host} is another one, or has a wrong checksum")
        return slot, index, announced["sums"]

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(Channel(connection, LIMIT_S),), daemon=True).start()

    def _talk(self, channel: Channel) -> None:
        with channel, contextlib.suppress(ConnectionError):
            with self._lock:
                known = list(self._secrets)
            if not channel.challenge(known):
                return
            message, _, _ = channel.receive()
            answer = self._put if message["op"] == "put" else self._get
            try:
                answer(channel, message)
            except (OSError, ValueError, KeyError, TypeError) as error:
                channel.send({"error": str(error)})

    def _put(self, channel: Channel, message: dict[str, Any]) -> None:
        index, slot = SlotIndex.from_json(message["index"]), Slot(message["num_bytes"])
        channel.send({})
        channel.receive(into=slot.data)
        if checksums(slot, index) != message["sums"]:
            raise OSError("wrong checksum on arrival")
        with self._lock:
            copies = [copy for copy in self._copies.get(index.rank, []) if (copy[1].step, copy[1].launch) != (index.step, index.launch)]
            self._copies[index.rank] = [*copies, (slot, index, message["sums"])][-SLOTS:]
        channel.send({})

    def _get(self, channel: Channel, message: dict[str, Any]) -> None:
        with self._lock:
            wanted = message["wanted"]
            found = [copy for copy in self._copies.get(wanted["rank"], []) if _name(copy[1]) == wanted]
        if not found:
            raise OSError(f"no copy of rank {wanted['rank']} at step {wanted['step']} here")
        slot, index, sums = found[-1]
        if checksums(slot, index) != sums:
            with self._lock:
                self._copies[index.rank] = [copy for copy in self._copies[index.rank] if copy[0] is not slot]
            raise OSError(f"the copy of rank {index.rank} at step {index.step} has a wrong checksum here, and is given up")
        channel.send({"num_bytes": slot.num_bytes, "index": index.to_json(), "sums": sums})
        channel.receive()
        channel.send({}, slot.data)


def _name(index: SlotIndex) -> dict[str, Any]:
    return {"rank": index.rank, "step": index.step, "launch": index.launch, "fingerprint": index.fingerprint}


def send_copy(host: str, port: int, secret: str, slot: Slot, index: SlotIndex, sums: Sequence[int]) -> None:
    """Give another host's keeper a copy of a filled slot. Raises ConnectionError or OSError."""
    with connect_tcp(host, port, secret, LIMIT_S) as channel:
        channel.ask({"op": "put", "num_bytes": slot.num_bytes, "index": index.to_json(), "sums": list(sums)})
        channel.ask({"op": "data"}, slot.data)
