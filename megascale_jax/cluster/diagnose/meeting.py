"""Diagnosis of many hosts without a driver: process 0 collects outcomes, deals out the rounds of pairs, and tells all the exit code.

Process 0 listens at ``MEGASCALE_COORDINATOR``, and only there. Who connects proves to know ``MEGASCALE_SECRET`` when it is set; without it,
anybody who reaches the port could take part, so the port belongs on the training network. Messages are JSON, checked against their types.
A process that never comes, or goes, is a finding. Every wait has a limit.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field, ValidationError

from megascale_jax.checkpoint.channel import Channel, connect_tcp
from megascale_jax.cluster.diagnose.checks import CHECKS, PAIR, Outcome, Wire
from megascale_jax.cluster.diagnose.fleet import Verdict, judge_all, no_answer, plan_round
from megascale_jax.cluster.diagnose.network import MOST_ROUNDS
from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.request import Node, PairTask
from megascale_jax.cluster.ports import free_ports
from megascale_jax.errors import UsageError

JOIN_LIMIT_S = 120.0
HELLO_LIMIT_S = 10.0
RETRY_S = 0.2

type Check = Callable[[Sequence[str], PairTask | None, float | None], list[Outcome]]
"""Runs checks by name, those of a pair with its task; the third argument: this host's clock less that of process 0, seconds."""


class Hello(Wire):
    """What a process says first."""

    rank: int = Field(ge=1)
    host: str = Field(max_length=255)
    node: Node


class Answer(Wire):
    """What a node found."""

    outcomes: tuple[Outcome, ...] = Field(max_length=200)


class Order(Wire):
    """What a node does next: a pair, or nothing for now; ``exit_code``: it is over."""

    pair: PairTask | None = None
    exit_code: int | None = None


@dataclass
class Meeting:
    """The side of process 0. ``names``: checks that each node runs by itself; ``limit_s``: of one check, beside its own."""

    count: int
    names: Sequence[str]
    check: Check
    baseline: Baseline
    secret: str
    with_pairs: bool
    limit_s: float = float("inf")
    join_limit_s: float = JOIN_LIMIT_S
    nodes: dict[str, Node] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    _channels: dict[str, Channel] = field(default_factory=dict)

    def hold(self, address: tuple[str, int], own: str, switch: str | None) -> Verdict:
        """Meet the others, check, judge. Raises UsageError when it cannot listen. `close` tells them the end."""
        try:
            server = socket.create_server(address)
            node = Node(address=server.getsockname()[0], ports=free_ports(server.getsockname()[0], MOST_ROUNDS), switch=switch)
        except OSError as error:
            raise UsageError(f"process 0 cannot listen at {address[0]}:{address[1]}: {error}; give an address of its host") from error
        self.nodes[own] = node
        with server:
            self._meet(server)
        self.outcomes[own] = self.check(self.names, None, 0.0)
        for name in list(self._channels):
            self.outcomes[name] = self._hear(name, whole_limit_s(self.names, self.limit_s))
        self._run_pairs(own)
        return judge_all(self.nodes, self.outcomes, self.baseline, set(self.nodes) - set(self._channels) - {own})

    def close(self, exit_code: int) -> None:
        """Tell all that it is over."""
        for channel in self._channels.values():
            with channel, contextlib.suppress(ConnectionError):
                channel.send(Order(exit_code=exit_code).model_dump())

    def _meet(self, server: socket.socket) -> None:
        """Wait for the others. Whoever connects and is none of them is let go."""
        deadline_s, ranks = time.monotonic() + self.join_limit_s, set[int]()
        while len(ranks) < self.count - 1 and (left_s := deadline_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            channel = Channel(connection, HELLO_LIMIT_S)
            try:
                if not channel.challenge([self.secret]):
                    raise ConnectionError("it does not know the secret")
                hello = Hello.model_validate(channel.receive()[0], strict=False)
                if hello.rank in ranks or hello.rank >= self.count:
                    raise ConnectionError(f"rank {hello.rank} is there already, or is none")
                channel.send({"unix_s": time.time()})
            except (ConnectionError, ValidationError):
                channel.close()
                continue
            ranks.add(hello.rank)
            name = hello.host if hello.host not in self.nodes else f"{hello.host}-{hello.rank}"
            self.nodes[name], self._channels[name] = hello.node, channel
        for rank in sorted(set(range(1, self.count)) - ranks):
            self.nodes[f"process-{rank}"] = Node(address="-", ports=())
            self.outcomes[f"process-{rank}"] = []

    def _hear(self, name: str, limit_s: float) -> list[Outcome]:
        """What a node found; nothing when it is gone, which it then stays."""
        channel = self._channels[name]
        try:
            channel.limit(limit_s)
            return list(Answer.model_validate(channel.receive()[0], strict=False).outcomes)
        except (ConnectionError, ValidationError):
            channel.close()
            del self._channels[name]
            return []

    def _run_pairs(self, own: str) -> None:
        while self.with_pairs:
            here = {name: node for name, node in self.nodes.items() if name == own or name in self._channels}
            tasks = plan_round(here, self.outcomes, self.baseline)
            if not tasks:
                return
            for name in list(self._channels):
                with contextlib.suppress(ConnectionError):  # `_hear` meets it again
                    self._channels[name].send(Order(pair=tasks.get(name)).model_dump())
            if own in tasks:
                self.outcomes[own] += self.check([PAIR], tasks[own], 0.0)
            for name in list(self._channels):
                self.outcomes[name] += self._hear(name, whole_limit_s([PAIR], self.limit_s))
            for name, task in tasks.items():
                if not any(one.facts.get("round") == str(task.round) for one in self.outcomes[name] if one.check == PAIR):
                    self.outcomes[name].append(no_answer(PAIR, task))


def whole_limit_s(names: Sequence[str], limit_s: float) -> float:
    """Longest time of some checks together, with what starting and ending them takes."""
    return 60.0 + sum(min(limit_s, CHECKS[name].limit_s) + 10.0 for name in names)


def attend(
    address: tuple[str, int], rank: int, host: str, switch: str | None, secret: str, names: Sequence[str], check: Check, limit_s: float
) -> int:
    """The side of all other processes; the exit code. Raises UsageError when process 0 does not come, ConnectionError when it goes."""
    channel = _join(address, secret)
    with channel:
        here = channel.local_address()
        hello = Hello(rank=rank, host=host, node=Node(address=here, ports=free_ports(here, MOST_ROUNDS), switch=switch)).model_dump()
        asked_s = time.time()
        answer = channel.ask(hello)
        offset_s = (asked_s + time.time()) / 2 - float(answer["unix_s"])
        # process 0 speaks when the slowest node has ended
        channel.limit(JOIN_LIMIT_S + whole_limit_s([*names, PAIR], limit_s))
        answer = Answer(outcomes=tuple(check(names, None, offset_s)))
        while True:
            order = _order(channel.ask(answer.model_dump()))
            if order.exit_code is not None:
                return order.exit_code
            answer = Answer(outcomes=tuple(check([PAIR], order.pair, offset_s)) if order.pair else ())


def _join(address: tuple[str, int], secret: str) -> Channel:
    deadline_s = time.monotonic() + JOIN_LIMIT_S
    while True:
        try:
            return connect_tcp(*address, secret, HELLO_LIMIT_S)
        except ConnectionError as error:
            if time.monotonic() > deadline_s:
                raise UsageError(f"process 0 does not answer: {error}; check MEGASCALE_COORDINATOR, and that it runs") from error
        time.sleep(RETRY_S)


def _order(message: Mapping[str, object]) -> Order:
    try:
        return Order.model_validate(message, strict=False)
    except ValidationError as error:
        raise ConnectionError(f"process 0 says what is not understood: {error}") from error
