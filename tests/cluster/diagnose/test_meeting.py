"""Many hosts without a driver, over real sockets: who does not come, goes, lies or does not know the secret is dealt with."""

import socket
import threading

import pytest

from megascale_jax.checkpoint.channel import connect_tcp
from megascale_jax.cluster.diagnose import meeting
from megascale_jax.cluster.diagnose.checks import Number, Outcome, outcome
from megascale_jax.cluster.diagnose.meeting import Meeting, attend
from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.ports import free_ports
from megascale_jax.errors import UsageError


class Hosts:
    """Process 0 in this thread, the others in threads of their own; ``check``: what a host finds, by its rank."""

    def __init__(self, secret="s"):
        self.secret, self.codes, self.threads = secret, {}, []
        self.address = ("127.0.0.1", free_ports("127.0.0.1", 1)[0])

    def attend(self, rank, check, secret=None):
        def run():
            arguments = (self.address, rank, f"host-{rank}", None, self.secret if secret is None else secret, ["memory"], check, 5.0)
            try:
                self.codes[rank] = attend(*arguments)
            except ConnectionError:
                self.codes[rank] = "refused"

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def lead(self, count, check, join_limit_s=30.0):
        held = Meeting(count, ["memory"], check, Baseline(), self.secret, True, 5.0, join_limit_s)
        verdict = held.hold(self.address, "host-0", None)
        held.close(verdict.exit_code)
        for thread in self.threads:
            thread.join(30)
        return held, verdict


def finder(bad=(), offsets=None):
    """Checks of a host: memory is fine; an all-reduce with a bad host, or on one, fails."""

    def make(own):
        def check(names, pair, offset_s):
            if offsets is not None:
                offsets[own] = offset_s
            if pair is None:
                return [Outcome(check="memory", status="pass")]
            if own in bad or pair.peer in bad:
                return [outcome("pair", [("fail", "no all-reduce")], facts=pair.facts)]
            return [outcome("pair", numbers=[Number(name="all-reduce", value=1.0, unit="GB/s")], facts=pair.facts)]

        return check

    return make


def dies(names, pair, offset_s):
    """The checks of a host that is fine until it meets another one."""
    if pair is not None:
        raise ConnectionError("gone")
    return [Outcome(check="memory", status="pass")]


def test_all_hosts_learn_the_exit_code_and_the_bad_one_is_named():
    hosts, offsets = Hosts(), {}
    check = finder({"host-2"}, offsets)
    for rank in (1, 2, 3):
        hosts.attend(rank, check(f"host-{rank}"))
    held, verdict = hosts.lead(4, check("host-0"))
    assert verdict.bad_nodes == ("host-2",) and verdict.exit_code == 14
    assert hosts.codes == {1: 14, 2: 14, 3: 14} and set(held.outcomes) == {f"host-{rank}" for rank in range(4)}
    assert offsets["host-0"] == 0.0 and abs(offsets["host-1"]) < 5


def test_a_host_that_never_comes_is_named_and_the_others_go_on():
    hosts = Hosts()
    hosts.attend(1, finder()("host-1"))
    held, verdict = hosts.lead(3, finder()("host-0"), join_limit_s=1.0)
    assert verdict.bad_nodes == ("process-2",) and verdict.exit_code == 16 and hosts.codes == {1: 16}
    assert any(one.check == "pair" and one.status == "pass" for one in held.outcomes["host-1"])


def test_a_host_that_goes_in_a_round_of_pairs_has_failed_it():
    hosts, check = Hosts(), finder({"host-1"})
    hosts.attend(1, dies)
    for rank in (2, 3):
        hosts.attend(rank, check(f"host-{rank}"))
    held, verdict = hosts.lead(4, check("host-0"))
    assert verdict.bad_nodes == ("host-1",) and verdict.exit_code == 14
    assert [(one.check, one.reason) for one in held.outcomes["host-1"][1:]] == [("pair", "the node did not answer")], "asked once"


def test_of_two_hosts_the_one_that_goes_is_bad():
    hosts = Hosts()
    hosts.attend(1, dies)
    _, verdict = hosts.lead(2, finder({"host-1"})("host-0"))
    assert verdict.bad_nodes == ("host-1",) and verdict.bad[0].reason == "the node has gone in the middle"


def test_strangers_and_doubles_are_let_go():
    hosts, before = Hosts(), []

    def strangers():
        for _ in range(50):
            try:
                with socket.create_connection(hosts.address, timeout=5) as scanner:
                    scanner.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"\0" * 64)
                break
            except OSError:
                threading.Event().wait(0.05)
        for message in ({"rank": 7, "host": "x"}, {"rank": 9, "host": "x", "node": {"address": "a", "ports": []}}, {"nonsense": True}):
            with connect_tcp(*hosts.address, "s", 5) as channel:
                try:
                    before.append(channel.ask(message))
                except ConnectionError:
                    before.append("refused")
        hosts.attend(1, finder()("host-1"), secret="wrong")
        hosts.threads[-1].join(30)
        before.append(dict(hosts.codes))
        hosts.attend(1, finder()("host-1"))

    first = threading.Thread(target=strangers, daemon=True)
    first.start()
    _, verdict = hosts.lead(2, finder()("host-0"))
    first.join(30)
    hosts.threads[-1].join(30)
    assert before == ["refused"] * 3 + [{1: "refused"}]
    assert verdict.exit_code == 0 and hosts.codes == {1: 0}


def test_an_address_that_is_not_here_is_a_usage_error():
    with pytest.raises(UsageError, match="cannot listen at"):
        Meeting(2, ["memory"], finder()("a"), Baseline(), "", False).hold(("203.0.113.7", 2000), "a", None)


def test_process_0_that_never_comes_ends_the_wait(monkeypatch):
    monkeypatch.setattr(meeting, "JOIN_LIMIT_S", 0.3)
    with pytest.raises(UsageError, match="process 0 does not answer"):
        attend(("127.0.0.1", free_ports("127.0.0.1", 1)[0]), 1, "a", None, "", ["memory"], finder()("a"), 1.0)


def test_an_order_that_is_not_understood_is_refused():
    with pytest.raises(ConnectionError, match="not understood"):
        meeting._order({"run": "rm"})
