"""Both ends of the control link over real sockets: messages, reconnection, replacement, limits, a handler that fails."""

import asyncio
import threading

import pytest
import uvloop

from megascale_jax.cluster.link.client import LinkClient, ask
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.link.wire import Limits, Word
from megascale_jax.errors import LinkError
from tests.cluster.link.links import OUTGOING, Beat, Desired, Evict, Raw, Recorder, client, play, running, serving, until


def link(address, answers, security=None, limits=None, **callbacks):
    return LinkClient(security or client(), address, OUTGOING, received=answers.append, limits=limits, **callbacks)


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_messages_go_both_ways_in_order(loop):
    async def scenario():
        recorder, answers = Recorder(answer=True), []
        async with serving(recorder) as address, running(link(address, answers)) as end:
            await until(lambda: end.connected)
            assert all(end.send(Beat(step=step, text="x" * 600)) for step in range(100))
            await until(lambda: len(answers) == 100)
        assert [message.step for message in recorder.messages()] == list(range(100))
        assert answers == [Desired(step=step, text="answer") for step in range(100)]
        await until(lambda: recorder.heard[-1][0] == "lost")
        assert recorder.heard[0] == ("connected", "node-1")
        assert recorder.audited == []

    play(scenario, loop)


@pytest.mark.parametrize("size", [0, 4_000, 4_096, 8_192, 100_000, 262_000])
def test_frames_of_every_size_arrive_whole(size):
    async def scenario():
        recorder, answers = Recorder(), []
        async with serving(recorder) as address, running(link(address, answers)) as end:
            await until(lambda: end.connected)
            sent = [Beat(step=step, text="x" * (size if step % 2 else 3)) for step in range(6)]
            for message in sent:
                assert end.send(message)
            await until(lambda: len(recorder.messages()) == len(sent))
            assert recorder.messages() == sent
            recorder.peers[0].send(Desired(text="y" * size))
            await until(lambda: answers)
            assert len(answers[0].text) == size

    play(scenario)


def test_without_a_driver_messages_are_dropped_and_the_client_comes_back():
    async def scenario():
        recorder, events = Recorder(), []
        async with serving(recorder) as address:
            pass
        end = link(address, [], connected=lambda: events.append("connected"), lost=lambda why: events.append(why))
        async with running(end):
            assert end.send(Beat()) is False
            async with serving(recorder, address[1]):
                await until(lambda: end.connected)
                assert end.send(Beat(step=1)) is True
                await until(lambda: recorder.messages())
            await until(lambda: not end.connected)
            assert end.send(Beat(step=2)) is False
            async with serving(recorder, address[1]):
                await until(lambda: end.connected)
                assert end.send(Beat(step=3)) is True
                await until(lambda: len(recorder.messages()) == 2)
        assert [message.step for message in recorder.messages()] == [1, 3]
        assert events[:3] == ["connected", "the driver ended the connection: closed", "connected"]

    play(scenario)


def test_a_newer_connection_of_a_node_replaces_the_older():
    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address, Raw.connected(address) as old:
            await old.admit()
            async with Raw.connected(address) as new:
                await new.admit()
                assert await old.goodbye() == Word.REPLACED
                await until(lambda: len(recorder.heard) == 3)
                assert [entry[0] for entry in recorder.heard] == ["connected", "lost", "connected"]
                old.send(0, b'{"kind":"beat"}')
                new.send(0, b'{"kind":"beat","step":7}')
                await until(lambda: recorder.messages())
                assert recorder.messages() == [Beat(step=7)]
        assert recorder.audited[0][0] == "link.replaced"

    play(scenario)


def test_operators_with_one_name_do_not_replace_each_other():
    async def scenario():
        recorder, admin = Recorder(), client("alice", Role.ADMIN)
        async with serving(recorder) as address, Raw.connected(address, admin) as first, Raw.connected(address, admin) as second:
            await first.admit(admin)
            await second.admit(admin)
            first.send(0, b'{"kind":"evict","node":"node-3"}')
            await until(lambda: recorder.messages())
        assert recorder.heard[2] == ("received", "alice", Evict(node="node-3"))

    play(scenario)


def test_a_handler_that_fails_costs_one_connection_only():
    async def scenario():
        recorder, answers = Recorder(answer=True), []
        async with serving(recorder) as address, Raw.connected(address) as raw:
            await raw.admit()
            raw.send(0, b'{"kind":"beat","text":"fail"}')
            assert await raw.goodbye() == Word.CLOSED
            async with running(link(address, answers, client("node-2"))) as end:
                await until(lambda: end.connected)
                end.send(Beat(step=1))
                await until(lambda: answers)
        assert [action for action, _ in recorder.audited] == ["link.failed"]
        assert ("lost", "node-1", "the driver could not handle a message") in recorder.heard

    play(scenario)


def test_a_peer_that_the_driver_closes_is_lost_once():
    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address, Raw.connected(address) as raw:
            await raw.admit()
            recorder.peers[0].close("evicted")
            recorder.peers[0].close("again")
            assert recorder.heard[-1][0] == "connected", "not from within the handler's own call"
            assert await raw.goodbye() == Word.CLOSED
            recorder.peers[0].send(Desired())
        assert [entry for entry in recorder.heard if entry[0] == "lost"] == [("lost", "node-1", "evicted")]

    play(scenario)


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_who_does_not_read_is_dropped(loop):
    async def scenario():
        recorder = Recorder()
        async with serving(recorder, limits=Limits(queue_bytes=1 << 16)) as address, Raw.connected(address) as raw:
            await raw.admit()
            raw.writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in range(1000):
                recorder.peers[0].send(Desired(text="x" * 100_000))
                if recorder.heard[-1][0] == "lost":
                    break
                await asyncio.sleep(0)
            await until(lambda: recorder.heard[-1][0] == "lost")
        assert recorder.heard[-1][2].endswith("bytes wait to be read; expected at most 65536")
        assert recorder.audited[0][1]["reason"] == Word.TOO_SLOW

    play(scenario, loop)


def test_a_silent_peer_is_dropped_and_a_quiet_client_is_not():
    async def scenario():
        recorder = Recorder()
        limits = Limits(idle_s=2.0, keepalive_s=0.4)
        async with serving(recorder, limits=limits) as address, running(link(address, [], client("node-2"), limits)) as end:
            await until(lambda: end.connected)
            async with Raw.connected(address) as raw:
                await raw.admit()
                raw.send(0, b"", length=100)  # a frame that never gets whole
                await until(lambda: any(entry[0] == "lost" for entry in recorder.heard))
            assert end.connected
        assert recorder.heard[2][:2] == ("lost", "node-1")
        assert "no complete frame" in recorder.heard[2][2]
        assert all(entry[0] != "lost" or entry[1] == "node-1" for entry in recorder.heard[:3])

    play(scenario)


def test_a_client_leaves_a_driver_that_has_stopped_and_comes_back():
    async def scenario():
        recorder, lost = Recorder(), []
        limits = Limits(idle_s=1.0, keepalive_s=0.4)
        async with serving(recorder) as address:
            silent = asyncio.Event()

            async def swallow(reader, writer):
                """A middle that goes on accepting, and stops to carry bytes: a partition."""
                there, back = await asyncio.open_connection(*address)

                async def carry(source, sink):
                    while data := await source.read(65536):
                        if not silent.is_set():
                            sink.write(data)

                await asyncio.wait([asyncio.create_task(carry(reader, back)), asyncio.create_task(carry(there, writer))])
                back.transport.abort()
                writer.transport.abort()

            middle = await asyncio.start_server(swallow, "127.0.0.1", 0)
            end = link(middle.sockets[0].getsockname(), [], limits=limits, lost=lost.append)
            async with running(end):
                await until(lambda: end.connected)
                silent.set()
                await until(lambda: lost)
                silent.clear()
                await until(lambda: end.connected and len(recorder.peers) >= 2)
            middle.close()
        assert "the driver has been silent" in lost[0]
        assert [entry[0] for entry in recorder.heard[:3]] == ["connected", "lost", "connected"], "the half-open one was replaced"

    play(scenario)


def test_too_many_connections_and_too_many_frames():
    async def scenario():
        recorder = Recorder()
        limits = Limits(connections=1, frames_per_s=1.0, burst=5)
        async with serving(recorder, limits=limits) as address, Raw.connected(address) as raw:
            await raw.admit()
            with pytest.raises(OSError):
                await Raw.connected(address).__aenter__()
            for _ in range(20):
                raw.send(0, b'{"kind":"beat"}')
            assert await raw.goodbye() == Word.TOO_MANY
        assert len(recorder.messages()) == 4
        assert [(action, details["reason"]) for action, details in recorder.audited] == [
            ("link.refused", Word.TOO_MANY),
            ("link.closed", Word.TOO_MANY),
        ]

    play(scenario)


@pytest.fixture
def served():
    """A driver in another thread, for the synchronous `ask`."""
    recorder, ready, ended = Recorder(answer=True), threading.Event(), threading.Event()
    addresses = []

    async def serve():
        async with serving(recorder) as address:
            addresses.append(address)
            ready.set()
            while not ended.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    yield recorder, addresses[0]
    ended.set()
    thread.join(20)


def test_ask(served):
    recorder, address = served
    assert ask(client(), address, Beat(step=3), OUTGOING, 10.0) == Desired(step=3, text="answer")
    with pytest.raises(LinkError, match="needs a token with another role"):
        ask(client(), address, Evict(node="node-3"), OUTGOING, 10.0)
    with pytest.raises(LinkError, match=r"no answer from the driver at .* within 0\.3 s"):
        ask(client("alice", Role.ADMIN), address, Evict(node="node-3"), OUTGOING, 0.3)
    assert recorder.messages() == [Beat(step=3), Evict(node="node-3")]
    with pytest.raises(LinkError, match="no connection to the driver at 127"):
        ask(client(), ("127.0.0.1", 1), Beat(), OUTGOING, 10.0)
