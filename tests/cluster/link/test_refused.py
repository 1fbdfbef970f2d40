"""Everything that a peer must not do ends its connection with one word, goes to the audit log, and costs nobody else anything."""

import asyncio
import json
import ssl
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.link.tokens import Role, Token, sign
from megascale_jax.cluster.link.wire import FIRST_FRAME_BYTES, HEADER, Fault, Framed, Kind, Limits, Shown, Word
from tests.cluster.link.links import JOB, WAIT_S, Beat, Raw, Recorder, client, driver, folder, play, serving, until

BEAT = b'{"kind":"beat","step":1}'


def token(**changes):
    said = {"name": "node-1", "role": Role.NODE, "job": JOB, "expires": int(time.time()) + 100} | changes
    return sign(driver().read_signing_key(), Token(**said))


def shown(text):
    return Shown(token=text).model_dump_json().encode()


def tampered():
    version, payload, mac = token().split(".")
    return f"{version}.{payload[:-4]}AAAA.{mac}"


FIRST_FRAMES = {
    "wrong key": (lambda: shown(sign(b"x" * 32, Token(name="node-1", role=Role.ADMIN, job=JOB, expires=2**40))), "signature is wrong"),
    "tampered": (lambda: shown(tampered()), "signature is wrong"),
    "no token": (lambda: shown("a.b.c"), "not in the form"),
    "not ASCII": (lambda: shown("ü.ü.AAAA"), "not in the form"),
    "expired": (lambda: shown(token(expires=int(time.time()) - 5)), "expired"),
    "other job": (lambda: shown(token(job="job-2")), "is for job job-2"),
    "malformed JSON": (lambda: b"{", "json_invalid"),
    "extra field": (lambda: b'{"token":"x","admin":true}', "extra_forbidden"),
    "not an object": (lambda: b"[]", "model_type"),
    "not UTF-8": (lambda: b'{"token":"\xff"}', "json_invalid"),
}


@pytest.mark.parametrize("what", FIRST_FRAMES)
def test_first_frames(what):
    content, expected = FIRST_FRAMES[what]

    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address, Raw.connected(address) as raw:
            raw.send(Kind.TOKEN, content())
            assert await raw.goodbye() in (Word.REFUSED, Word.NOT_UNDERSTOOD)
        ((action, details),) = recorder.audited
        assert action == "link.refused" and expected in details["detail"] and details["address"] == "127.0.0.1"
        assert recorder.heard == []

    play(scenario)


def test_a_peer_is_not_told_why_its_token_is_refused():
    async def scenario():
        words = []
        async with serving(Recorder()) as address:
            for text in (token(expires=5), token(job="job-2"), tampered()):
                async with Raw.connected(address) as raw:
                    raw.send(Kind.TOKEN, shown(text))
                    words.append(await raw.goodbye())
        assert words == [Word.REFUSED] * 3

    play(scenario)


BROKEN = {
    "malformed JSON": ({"content": b"{"}, Word.NOT_UNDERSTOOD, "json_invalid"),
    "deep JSON": ({"content": b"[" * 100_000}, Word.NOT_UNDERSTOOD, "json_invalid"),
    "unknown kind of message": ({"content": b'{"kind":"shutdown"}'}, Word.NOT_UNDERSTOOD, "union_tag_invalid"),
    "extra field": ({"content": b'{"kind":"beat","admin":true}'}, Word.NOT_UNDERSTOOD, "extra_forbidden"),
    "wrong type": ({"content": b'{"kind":"beat","step":"1"}'}, Word.NOT_UNDERSTOOD, "int_type"),
    "role too low": ({"content": b'{"kind":"evict","node":"node-3"}'}, Word.NOT_PERMITTED, "a Evict from the role node"),
    "oversized": ({"content": b"", "length": (256 << 10) + 1}, Word.TOO_LARGE, "a frame of 262145 bytes"),
    "huge": ({"content": b"", "length": 2**32 - 1}, Word.TOO_LARGE, "a frame of 4294967295 bytes"),
    "unknown kind of frame": ({"content": b"{}", "kind": 99}, Word.NOT_UNDERSTOOD, "kind 99"),
    "a second token": ({"content": b"{}", "kind": Kind.TOKEN}, Word.NOT_UNDERSTOOD, "a TOKEN frame after the token"),
    "the driver's frame": ({"content": b"{}", "kind": Kind.ADMITTED}, Word.NOT_UNDERSTOOD, "a ADMITTED frame after the token"),
    "replayed": ({"content": BEAT, "sequence": 1}, Word.NOT_UNDERSTOOD, "number 1; expected 2"),
    "out of order": ({"content": BEAT, "sequence": 5}, Word.NOT_UNDERSTOOD, "number 5; expected 2"),
    "another connection's": ({"content": BEAT, "challenge": b"x" * 16}, Word.NOT_UNDERSTOOD, "another connection's challenge"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_frames_after_the_token(what):
    broken, word, expected = BROKEN[what]

    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address, Raw.connected(address) as raw, Raw.connected(address, client("node-2")) as other:
            await raw.admit()
            await other.admit(client("node-2"))
            raw.send(Kind.MESSAGE, BEAT)
            raw.send(broken.get("kind", Kind.MESSAGE), **{name: value for name, value in broken.items() if name != "kind"})
            raw.send(Kind.MESSAGE, BEAT)
            assert await raw.goodbye() == word
            other.send(Kind.MESSAGE, BEAT)
            await until(lambda: len(recorder.messages()) == 2)
        ((action, details),) = recorder.audited
        assert action == "link.closed" and details["name"] == "node-1" and expected in details["detail"]
        assert [entry[1] for entry in recorder.heard if entry[0] == "received"] == ["node-1", "node-2"]
        assert next(entry[1] for entry in recorder.heard if entry[0] == "lost") == "node-1"

    play(scenario)


def test_a_recorded_session_cannot_be_replayed():
    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address:
            async with Raw.connected(address) as raw:
                recorded = [raw.frame(Kind.TOKEN, shown(token())), raw.frame(Kind.MESSAGE, BEAT)]
                raw.writer.write(b"".join(recorded))
                await until(lambda: recorder.messages())
            async with Raw.connected(address) as again:
                again.writer.write(b"".join(recorded))
                assert await again.goodbye() == Word.NOT_UNDERSTOOD
        assert recorder.messages() == [Beat(step=1)]
        assert "replayed" in recorder.audited[0][1]["detail"]

    play(scenario)


def test_a_message_before_the_token_and_a_large_first_frame():
    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address:
            async with Raw.connected(address) as raw:
                raw.send(Kind.MESSAGE, BEAT)
                assert await raw.goodbye() == Word.REFUSED
            async with Raw.connected(address) as raw:
                raw.send(Kind.TOKEN, b"", length=FIRST_FRAME_BYTES + 1)
                assert await raw.goodbye() == Word.TOO_LARGE
        assert recorder.heard == [] and len(recorder.audited) == 2

    play(scenario)


def test_a_first_frame_that_trickles_is_cut_off():
    async def scenario():
        recorder = Recorder()
        async with serving(recorder, limits=Limits(first_frame_s=0.3)) as address, Raw.connected(address) as raw:
            for byte in raw.frame(Kind.TOKEN, shown(token())):
                raw.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if recorder.audited:
                    break
            assert await raw.goodbye() in (Word.REFUSED, "")
        assert "no token within 0.3 s" in recorder.audited[0][1]["detail"]
        assert recorder.heard == []

    play(scenario)


def foreign():
    """A client of another authority that holds a token of this job."""
    other = folder("other")
    return Security(ca=folder() / "ca.pem", certificate=other / "client.pem", key=other / "client.key", job=JOB, token=client().token)


def as_driver():
    """The driver's certificate, used by a client."""
    own = driver()
    return Security(ca=own.ca, certificate=own.certificate, key=own.key, job=JOB, token=client().token)


@pytest.mark.parametrize("what", ["no certificate", "another authority", "the driver's certificate", "TLS 1.2"])
def test_clients_that_tls_refuses(what):
    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address:
            context = {"another authority": foreign, "the driver's certificate": as_driver}.get(what, client)().client_context()
            if what == "no certificate":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(client().ca)
            if what == "TLS 1.2":
                context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                # In TLS 1.3 the client's handshake is over before the driver has looked at its certificate.
                reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=address[0])
                writer.write(HEADER.pack(0, 0, 0, b""))
                await asyncio.wait_for(reader.readexactly(1), WAIT_S)
            await until(lambda: recorder.audited)
            async with Raw.connected(address) as raw:
                await raw.admit()
        assert recorder.audited[0][0] == "link.refused" and "no TLS handshake" in recorder.audited[0][1]["detail"]
        assert [entry[0] for entry in recorder.heard] == ["connected", "lost"]

    play(scenario)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 50, b""])
def test_who_speaks_no_tls(sent):
    async def scenario():
        recorder = Recorder()
        async with serving(recorder, limits=Limits(handshake_s=2.0)) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            assert HEADER.size not in [len(await asyncio.wait_for(reader.read(HEADER.size), WAIT_S))]
            await until(lambda: recorder.audited)
            writer.transport.abort()
            async with Raw.connected(address) as raw:
                await raw.admit()
        assert "no TLS handshake" in recorder.audited[0][1]["detail"]

    play(scenario)


def test_a_host_that_connects_and_says_nothing_does_not_shut_the_door_for_others():
    async def scenario():
        recorder = Recorder()
        async with serving(recorder, limits=Limits(handshake_s=10 * WAIT_S)) as address:
            idle = [await asyncio.open_connection(*address) for _ in range(300)]
            await until(lambda: recorder.audited)
            async with Raw.connected(address, local="127.0.0.2") as raw:
                await raw.admit()
            for _, silent in idle:
                silent.transport.abort()
            await until(lambda: "no TLS handshake" in recorder.audited[-1][1]["detail"])
            async with Raw.connected(address) as raw:
                await raw.admit()
        assert recorder.audited[0][1]["detail"] == "more than 32 handshakes of one address"

    play(scenario)


def test_a_driver_of_another_authority_gets_no_token():
    other = Security(ca=folder("other") / "ca.pem", certificate=client().certificate, key=client().key, job=JOB, token=client().token)

    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address:
            with pytest.raises(ssl.SSLCertVerificationError):
                await Raw.connected(address, other).__aenter__()
        assert recorder.heard == []

    play(scenario)


def test_a_flood_of_refusals_does_not_fill_the_log():
    async def scenario():
        recorder = Recorder()
        async with serving(recorder) as address:
            for _ in range(30):
                async with Raw.connected(address) as raw:
                    raw.send(Kind.TOKEN, shown(tampered()))
                    await raw.goodbye()
        assert len(recorder.audited) == 21
        assert recorder.audited[-1] == ("link.refused.more", {"reason": Word.REFUSED, "lines_not_written": 10})

    play(scenario)


def test_nothing_secret_is_in_the_audit_log():
    async def scenario():
        recorder = Recorder()
        secret = token(job="job-2")
        async with serving(recorder) as address:
            for content in (shown(secret), b'{"token":"' + secret.encode(), b'{"tokens":"' + secret.encode() + b'"}'):
                async with Raw.connected(address) as raw:
                    raw.send(Kind.TOKEN, content)
                    await raw.goodbye()
        text = json.dumps(recorder.audited)
        assert len(recorder.audited) == 3
        assert all(part not in text for part in secret.split(".")[1:])

    play(scenario)


class Collected(Framed):
    """The frames that arrive, or why no more do."""

    def __init__(self):
        super().__init__(1000, b"c" * 16)
        self.contents, self.faults = [], []

    def frame(self, kind, content):
        self.contents.append(content)

    def fault(self, fault):
        self.faults.append(fault)
        self.closed = True

    def feed(self, data, sizes):
        """Hand over bytes as an event loop does, in pieces."""
        while data:
            buffer = self.get_buffer(-1)
            count = min(len(buffer), len(data), next(sizes))
            buffer[:count] = data[:count]
            data = data[count:]
            self.buffer_updated(count)


@given(st.lists(st.binary(max_size=1000), max_size=20), st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_frames_are_the_same_however_the_stream_is_cut(contents, sizes):
    data = b"".join(HEADER.pack(len(content), Kind.MESSAGE, number, b"c" * 16) + content for number, content in enumerate(contents))
    collected = Collected()
    collected.feed(data, (size for _ in range(10**6) for size in sizes))
    assert (collected.contents, collected.faults) == (contents, [])


@settings(suppress_health_check=[HealthCheck.large_base_example])
@given(st.binary(max_size=10_000), st.integers(1, 5000))
def test_noise_is_a_fault_and_no_exception(noise, size):
    collected = Collected()
    collected.feed(noise, iter(lambda: size, 0))
    assert collected.contents == []
    assert len(collected.faults) <= 1 and (len(noise) < HEADER.size or isinstance(collected.faults[0], Fault))
