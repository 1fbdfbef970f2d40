"""The fast tier as one rank sees it: its slots, its keeper, and what other hosts keep of it."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from megascale_jax.checkpoint.keeper_client import KeeperClient
from megascale_jax.checkpoint.slot import SLOTS, Slot, SlotIndex, SlotReader
from megascale_jax.checkpoint.stage_one import SlotLayout
from megascale_jax.checkpoint.stage_two import Target
from megascale_jax.checkpoint.tiers import LOCAL, MemoryState, Place, Report, peer_of
from megascale_jax.comm.agree import all_results
from megascale_jax.comm.init import Processes
from megascale_jax.errors import CheckpointError


@dataclass
class _Content:
    index: SlotIndex
    sums: list[int]


class HostMemory:
    """Two slots of one rank. Methods raise ConnectionError when the keeper is gone, OSError when it refuses."""

    def __init__(self, folder: Path, layout: SlotLayout, fingerprint: str, secret: str, limit_s: float):
        """Meet the keeper and all other ranks. Raises CheckpointError, on all ranks, when one of them cannot."""
        self._folder, self._layout, self._fingerprint, self._secret, self._limit_s = folder, layout, fingerprint, secret, limit_s
        self._rank = jax.process_index()
        self._slots: dict[int, Slot] = {}
        self._contents: dict[int, _Content] = {}
        self._next = 0
        self._handed: dict[int, dict[str, Any]] = {}
        self._peer: tuple[str, int] | None = None
        self._clients: list[KeeperClient] = []
        """One, the keeper there is now; none before it was met."""
        try:
            self.reports = self._meet()
        except BaseException:
            for client in self._clients:
                client.close()  # else the keeper would wait for a rank that is gone
            raise

    @property
    def _keeper(self) -> KeeperClient:
        return self._clients[0]

    @property
    def keeper_pid(self) -> int:
        """Process of this host's keeper."""
        return self._keeper.pid

    @property
    def num_hosts(self) -> int:
        """Hosts of the run, told apart by their keepers."""
        return len({report.keeper for report in self.reports})

    def prepare(self) -> None:
        """Have both slots in memory before the first save wants them. Raises OSError when there is too little memory."""
        for number in range(SLOTS):
            slot = self._slots.get(number)
            if slot is None or slot.num_bytes != self._layout.num_bytes:
                if slot is not None:
                    slot.close()
                self._contents.pop(number, None)
                self._slots.pop(number, None)
                new = Slot(self._layout.num_bytes, prefault=True)
                self._keeper.give_slot(number, new, self._limit_s)
                self._slots[number] = new  # only what the keeper holds too

    def fill(self, state: Mapping[str, jax.Array], index: SlotIndex, target: Target | None) -> None:
        """Copy a state into the older slot and hand it to stage 2; waits until stage 2 has left that slot."""
        if any((handed["index"]["step"], handed["index"]["launch"]) == (index.step, index.launch) for handed in self._handed.values()):
            return  # a keeper that took over has it already
        self.prepare()
        number = self._next
        identity = self._slots[number].identity
        self._keeper.ask("acquire", slot=number, identity=identity, limit_s=self._limit_s)
        self._contents.pop(number, None)
        self._handed.pop(number, None)
        self._layout.copy(state, self._slots[number])
        document = asdict(target) if target is not None else None
        self._handed[number] = {"slot": number, "identity": identity, "index": index.to_json(), "target": document}
        self._next = (number + 1) % SLOTS
        self._keeper.ask("filled", **self._handed[number])

    def replace_keeper(self) -> None:
        """Start another keeper in place of one that died, give it the slots, and let it finish what the old one had in hand."""
        self._keeper.close()
        self._clients = [KeeperClient(self._folder, self._rank)]
        for number, slot in self._slots.items():
            self._keeper.give_slot(number, slot, self._limit_s)
        self._name_peer()
        for handed in sorted(self._handed.values(), key=lambda one: one["index"]["step"]):
            self._keeper.ask("filled", **handed)

    def settle(self) -> None:
        """Stage 2 is done: a keeper that takes over gets the states for memory only, since retention may have let them go."""
        for handed in self._handed.values():
            handed["target"] = None

    def load(self, state: MemoryState) -> SlotReader:
        """This rank's part of a state, from its first place. Raises CheckpointError when it cannot be had."""
        place = state.places[self._rank][0]
        if place == LOCAL:
            if (number := self._holding(state)) is None:
                raise CheckpointError(f"step {state.step} is no longer in this host's memory")
            tier = "this host's"
        else:
            empty = [number for number in range(SLOTS) if number not in self._contents]
            number, tier = (empty or [self._next])[0], "another host's"  # what else is here may be wanted next
            try:
                self._fetch(number, place, state)
            except OSError as error:
                raise CheckpointError(f"the copy of step {state.step} cannot be fetched from {place[0]}:{place[1]}: {error}") from error
        content = self._contents[number]
        self._next = (number + 1) % SLOTS
        return SlotReader(self._slots[number], content.index, content.sums, tier)

    def forget(self, state: MemoryState) -> None:
        """Give up what this host has of this rank's part of a state; it is not offered again, after a restart neither. Never raises."""
        if (number := self._holding(state)) is not None:
            del self._contents[number]
            with suppress(OSError):
                self._keeper.ask("forget", slot=number)

    def _holding(self, state: MemoryState) -> int | None:
        """The slot with a state."""
        held = (n for n, content in self._contents.items() if (content.index.step, content.index.launch) == (state.step, state.launch))
        return next(held, None)

    def finish(self, limit_s: float) -> dict[str, Any]:
        """The keeper's status once stage 2 has nothing left to do, or after ``limit_s``."""
        return self._keeper.ask("wait", limit_s=limit_s)

    def status(self) -> dict[str, Any]:
        """Newest published checkpoint, work in hand, and failures that were not told yet."""
        return self._keeper.ask("status")

    def close(self, *, is_over: bool) -> None:
        """Leave; with ``is_over`` the keeper may forget the slots. Never raises."""
        with suppress(OSError):  # a keeper that is gone has forgotten them
            if is_over:
                self._keeper.ask("release", limit_s=self._limit_s)
        self._keeper.close()
        for slot in self._slots.values():
            slot.close()
        self._slots = {}

    def _meet(self) -> list[Report]:
        """What every rank found; afterwards each keeper knows where its copies go."""

        def greet() -> str:
            self._clients.append(KeeperClient(self._folder, self._rank))
            return self._keeper.identity["keeper"]

        is_alone = len(set(all_results(greet, CheckpointError))) == 1
        reports = [Report.from_json(document) for document in all_results(lambda: asdict(self._report(is_alone)), CheckpointError)]
        self._peer = peer_of(self._rank, reports)
        all_results(self._name_peer, CheckpointError)
        return reports

    def _report(self, is_alone: bool) -> Report:
        answer, descriptors = self._keeper.ask_for_slots("held")
        for held, descriptor in zip(answer["slots"], descriptors, strict=True):
            self._slots[held["slot"]] = Slot(held["num_bytes"], descriptor)
            if held["index"] is not None and held["sums"] is not None:
                content = _Content(SlotIndex.from_json(held["index"]), held["sums"])
                if content.index.fingerprint == self._fingerprint:
                    self._contents[held["slot"]] = content
        own = [(content.index.step, content.index.launch, number) for number, content in self._contents.items()]
        keeper, address = self._keeper.identity["keeper"], _own_address()
        if is_alone:
            return Report(self._fingerprint, keeper, (address, 0), own, [])
        copies = [(copy["rank"], copy["step"], copy["launch"], copy["fingerprint"]) for copy in answer["copies"]]
        port = self._keeper.ask("peers", secret=self._secret)["port"]
        return Report(self._fingerprint, keeper, (address, port), own, copies)

    def _name_peer(self) -> None:
        self._keeper.ask("peers", secret=self._secret, peer=self._peer)

    def _fetch(self, number: int, place: Place, state: MemoryState) -> None:
        host, port = place
        wanted = {"rank": self._rank, "step": state.step, "launch": state.launch, "fingerprint": self._fingerprint}
        answer, descriptors = self._keeper.ask_for_slots(
            "fetch", limit_s=self._limit_s, slot=number, host=host, port=port, secret=self._secret, wanted=wanted
        )
        if (old := self._slots.get(number)) is not None:
            old.close()
        self._slots[number] = Slot(answer["num_bytes"], descriptors[0])
        self._contents[number] = _Content(SlotIndex.from_json(answer["index"]), answer["sums"])


def _own_address() -> str:
    """The address of this host from which the coordinator is reached; the loopback when there is none."""
    coordinator = Processes.from_environment().coordinator
    if coordinator is None:
        return "127.0.0.1"
    host, _, port = coordinator.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))
        return probe.getsockname()[0]
