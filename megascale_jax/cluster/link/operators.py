"""What operators may do: pure functions.

`REQUIRED` says which role a command needs. Evicting a node by hand takes two persons: the first admin's request waits until another admin
confirms it, or until it expires (`submit`, `confirm`). Who a person is, is the name in his token.

What waits is in the driver's memory: a driver that was started again has forgotten it. So a request is known by a random number that no
other one of the job has had, and a late confirmation does not meet another request.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from types import MappingProxyType

from megascale_jax.cluster.link.tokens import Role


class Command(StrEnum):
    """What an operator can ask of a driver."""

    STATUS = "status"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    EVICT = "evict"
    STOP = "stop"
    RESTART = "restart"
    REWIND = "rewind"
    CONFIRM = "confirm"


REQUIRED: Mapping[Command, Role] = MappingProxyType(
    {
        Command.STATUS: Role.VIEW,
        Command.CORDON: Role.OPERATE,
        Command.UNCORDON: Role.OPERATE,
        Command.EVICT: Role.ADMIN,
        Command.STOP: Role.ADMIN,
        Command.RESTART: Role.ADMIN,
        Command.REWIND: Role.ADMIN,
        Command.CONFIRM: Role.ADMIN,
    }
)
"""The least role for each command. What one admin had to ask for and another to confirm, is not undone with less: see `needed`."""

_RANK = {Role.VIEW: 1, Role.OPERATE: 2, Role.ADMIN: 3}


_NUMBERS = range(100_000, 1_000_000)


def needed(command: Command, *, is_evicted: bool = False) -> Role:
    """The least role for a command; ``is_evicted``: its node has been evicted."""
    return Role.ADMIN if command is Command.UNCORDON and is_evicted else REQUIRED[command]


def may(role: Role, command: Command, *, is_evicted: bool = False) -> bool:
    """Whether the role suffices. An executor is no operator: it may do none of them."""
    return _RANK.get(role, 0) >= _RANK[needed(command, is_evicted=is_evicted)]


@dataclass(frozen=True)
class Rule:
    """Which commands need a second person (none: the rule is off), within which time, and how many requests may wait at once."""

    commands: frozenset[Command] = frozenset({Command.EVICT})
    limit_s: float = 600.0
    most: int = 64


@dataclass(frozen=True)
class Request:
    """A command that waits for a second person. ``expires``: on the clock of the ``now`` that `submit` was given."""

    number: int
    command: Command
    target: str
    by: str
    expires: float


@dataclass(frozen=True)
class Requests:
    """All that wait. ``used``: numbers of all that there were in this job, so no number means two requests."""

    waiting: tuple[Request, ...] = ()
    used: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Execute:
    """Do it now, once. ``confirmed_by`` is empty where one person suffices."""

    command: Command
    target: str
    by: str
    confirmed_by: str = ""


@dataclass(frozen=True)
class Wait:
    """Nothing is done until another admin confirms the request."""

    request: Request


@dataclass(frozen=True)
class Refuse:
    """Nothing is done; ``why`` is for the operator and the audit log."""

    why: str


Outcome = Execute | Wait | Refuse


def submit(
    requests: Requests,
    command: Command,
    target: str,
    by: str,
    role: Role,
    now: float,
    rule: Rule,
    *,
    is_evicted: bool = False,
    random: Random | None = None,
) -> tuple[Requests, Outcome]:
    """An operator asks for a command other than `Command.CONFIRM`; ``now``: seconds, of one clock.

    ``is_evicted``: the target is a node that has been evicted; ``random``: where numbers come from, default the system.
    The same request of the same person, made again, is the one that waits already; a second person's is no confirmation: he may not know
    of the first.
    """
    requests = expire(requests, now)
    if command is Command.CONFIRM:
        return requests, Refuse("a confirmation names a request by its number")
    if not may(role, command, is_evicted=is_evicted):
        what = f"{command} of an evicted node" if is_evicted and command is Command.UNCORDON else command
        return requests, Refuse(f"{what} needs the role {needed(command, is_evicted=is_evicted)}; {by} has {role}")
    if command not in rule.commands:
        return requests, Execute(command, target, by)
    for request in requests.waiting:
        if (request.command, request.target) == (command, target):
            if _same(request.by, by):
                return requests, Wait(request)
            return requests, Refuse(f"{command} {target} was asked for by {request.by}: confirm request {request.number} instead")
    if len(requests.waiting) >= rule.most:
        return requests, Refuse(f"{len(requests.waiting)} requests wait already; confirm them, or let them expire")
    number = _unused(requests.used, random or secrets.SystemRandom())
    request = Request(number, command, target, by, now + rule.limit_s)
    return Requests((*requests.waiting, request), requests.used | {number}), Wait(request)


def confirm(requests: Requests, number: int, by: str, role: Role, now: float) -> tuple[Requests, Outcome]:
    """A second admin confirms the request with this number, which then waits no more."""
    requests = expire(requests, now)
    if not may(role, Command.CONFIRM):
        return requests, Refuse(f"{Command.CONFIRM} needs the role {REQUIRED[Command.CONFIRM]}; {by} has {role}")
    for request in requests.waiting:
        if request.number == number:
            if _same(request.by, by):
                return requests, Refuse(f"request {number} is {by}'s own; another admin must confirm it")
            left = tuple(other for other in requests.waiting if other.number != number)
            return replace(requests, waiting=left), Execute(request.command, request.target, request.by, by)
    return requests, Refuse(f"no request {number} waits: it was confirmed, has expired, or was never made")


def expire(requests: Requests, now: float) -> Requests:
    """Without those whose time is over."""
    return replace(requests, waiting=tuple(request for request in requests.waiting if now < request.expires))


def _unused(used: frozenset[int], random: Random) -> int:
    while (number := random.choice(_NUMBERS)) in used:
        pass
    return number


def _same(first: str, second: str) -> bool:
    return first.casefold() == second.casefold()
