"""The loader by itself, in a thread: what it does with ranks at different places, with strangers, and without its owner."""

import os
import threading

import pytest

from megascale_jax.data import wire
from megascale_jax.data.host import HostGroup
from megascale_jax.data.host_iterator import HostIterator
from megascale_jax.data.loader import SLOTS, Loader
from megascale_jax.data.prepared import open_prepared
from megascale_jax.data.wire import Connection, accept, connect, listen

LIMIT_S = 20.0
BATCH = 16


class Running:
    """A loader for so many ranks, and the two ends that its owner holds."""

    def __init__(self, name: str, size: int, limit_s: float = LIMIT_S):
        lifeline, self.owner = os.pipe()
        loader = Loader(listen(name), lifeline, size, limit_s)
        self.reason: str | None = None
        self.thread = threading.Thread(target=lambda: setattr(self, "reason", loader.run()), daemon=True)
        self.thread.start()

    def ended(self) -> str | None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        return self.reason


@pytest.fixture
def request_of(make_prepared):
    with HostIterator(
        open_prepared(make_prepared()), group=HostGroup(0, 1, "unused"),
        global_batch_size=BATCH, data_size=2, data_indices=[0], micro_batch_size=2, seed=0, shuffle=False,
    ) as iterator:  # fmt: skip
        return iterator._request()


def hello(name: str, rank: int, request: dict, samples: int, again: bool) -> Connection:
    connection = connect(name)
    connection._socket.settimeout(LIMIT_S)
    message = {"kind": "hello", "rank": rank, "request": request, "data_indices": [rank], "samples": samples, "again": again}
    connection.send(message)
    return connection


def messages(connection: Connection, count: int) -> list[dict]:
    found = []
    for _ in range(count):
        message, descriptor = connection.receive()
        if descriptor is not None:
            os.close(descriptor)
        assert message is not None
        found.append(message)
    return found


def test_ranks_that_lost_a_loader_at_different_batches_get_each_what_it_lacks(request_of, tmp_path):
    running = Running(str(tmp_path), 2)
    ranks = [hello(str(tmp_path), rank, request_of, samples, True) for rank, samples in enumerate((2 * BATCH, BATCH))]
    ahead, behind = (messages(connection, 1 + count) for connection, count in zip(ranks, (SLOTS - 1, SLOTS), strict=True))
    assert [message["kind"] for message in (ahead[0], behind[0])] == ["ring", "ring"]
    assert [message["samples"] for message in ahead[1:]] == [BATCH * number for number in range(2, SLOTS + 1)]
    assert [message["samples"] for message in behind[1:]] == [BATCH * number for number in range(1, SLOTS + 1)]
    assert {m["samples"]: m["slot"] for m in ahead[1:]}.items() <= {m["samples"]: m["slot"] for m in behind[1:]}.items()
    for connection in ranks:
        connection.send({"kind": "bye"})
    assert running.ended() is None


def test_slot_is_filled_again_only_when_every_rank_has_released_it(request_of, tmp_path):
    running = Running(str(tmp_path), 2)
    ranks = [hello(str(tmp_path), rank, request_of, 0, False) for rank in range(2)]
    for connection in ranks:
        messages(connection, 1 + SLOTS)
    for released in (BATCH, 3 * BATCH):
        ranks[0].send({"kind": "released", "samples": released})
    ranks[0].send({"kind": "why"})
    (answer,) = messages(ranks[0], 1)
    assert answer == {
        "kind": "because",
        "text": f"the next batch to read starts at sample {SLOTS * BATCH}, local ranks [1] use the one at 0",
    }
    ranks[1].send({"kind": "released", "samples": BATCH})
    for connection in ranks:
        (message,) = messages(connection, 1)
        assert message == {"kind": "batch", "samples": SLOTS * BATCH, "slot": 0}
    for connection in ranks:
        connection.send({"kind": "bye"})
    assert running.ended() is None


def test_rank_that_leaves_holds_nobody_back(request_of, tmp_path):
    running = Running(str(tmp_path), 2)
    ranks = [hello(str(tmp_path), rank, request_of, 0, False) for rank in range(2)]
    for connection in ranks:
        messages(connection, 1 + SLOTS)
    ranks[1].send({"kind": "bye"})
    ranks[0].send({"kind": "released", "samples": 2 * BATCH})
    assert [message["samples"] for message in messages(ranks[0], 2)] == [SLOTS * BATCH, (SLOTS + 1) * BATCH]
    ranks[0].send({"kind": "bye"})
    assert running.ended() is None


def test_loader_ends_with_its_owner_before_anyone_came(tmp_path):
    running = Running(str(tmp_path), 2)
    os.close(running.owner)
    assert running.ended() is None


def test_loader_waits_for_ranks_only_so_long(request_of, tmp_path):
    running = Running(str(tmp_path), 2, limit_s=0.2)
    rank = hello(str(tmp_path), 0, request_of, 0, False)
    (message,) = messages(rank, 1)
    assert message["kind"] == "error" and "local ranks [1] have not asked for data" in message["text"]
    assert running.ended() == message["text"]


def test_processes_of_another_user_are_let_in_by_neither_side(tmp_path, monkeypatch):
    name, user = str(tmp_path), os.getuid()
    listener, connection = listen(name), connect(name)
    address = wire._address(name)
    monkeypatch.setattr(wire, "_address", lambda name: address)
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert accept(listener) is None
    with pytest.raises(ConnectionRefusedError, match="belongs to another user"):
        connect(name)
    connection.close()
    listener.close()
