"""What operators may do: pure functions.

`REQUIRED` says which role a command needs. Evicting a node by hand takes two persons: the first admin's request waits until another admin
confirms it, or until it expires (`submit`, `confirm`). Who a person is, is the name in his token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from megascale_jax.cluster.link.tokens import Role


class Command(StrEnum):
    """What an operator can ask of a driver."""

    STATUS = "status"
    LOGS = "logs"
    DIAGNOSE = "diagnose"
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
        Command.LOGS: Role.VIEW,
        Command.DIAGNOSE: Role.OPERATE,
        Command.CORDON: Role.OPERATE,
        Command.UNCORDON: Role.OPERATE,
        Command.EVICT: Role.ADMIN,
        Command.STOP: Role.ADMIN,
        Command.RESTART: Role.ADMIN,
        Command.REWIND: Role.ADMIN,
        Command.CONFIRM: Role.ADMIN,
    }
)
"""The least role for each command."""

_RANK = {Role.VIEW: 1, Role.OPERATE: 2, Role.ADMIN: 3}


def may(role: Role, command: Command) -> bool:
    """Whether the role suffices. An executor is no operator: it may do none of them."""
    return _RANK.get(role, 0) >= _RANK[REQUIRED[command]]


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
    """All that wait. ``last``: the number of the newest, of those that no longer wait too, so no number means two requests."""

    waiting: tuple[Request, ...] = ()
    last: int = 0


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


def submit(requests: Requests, command: Command, target: str, by: str, role: Role, now: float, rule: Rule) -> tuple[Requests, Outcome]:
    """An operator asks for a command other than `Command.CONFIRM`; ``now``: seconds, of one clock that outlives the driver.

    The same request of the same person, made again, is the one that waits already; a second person's is no confirmation: he may not know
    of the first.
    """
    requests = expire(requests, now)
    if command is Command.CONFIRM:
        return requests, Refuse("a confirmation names a request by its number")
    if not may(role, command):
        return requests, Refuse(f"{command} needs the role {REQUIRED[command]}; {by} has {role}")
    if command not in rule.commands:
        return requests, Execute(command, target, by)
    for request in requests.waiting:
        if (request.command, request.target) == (command, target):
            if _same(request.by, by):
                return requests, Wait(request)
            return requests, Refuse(f"{command} {target} was asked for by {request.by}: confirm request {request.number} instead")
    if len(requests.waiting) >= rule.most:
        return requests, Refuse(f"{len(requests.waiting)} requests wait already; confirm them, or let them expire")
    request = Request(requests.last + 1, command, target, by, now + rule.limit_s)
    return Requests((*requests.waiting, request), request.number), Wait(request)


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


def _same(first: str, second: str) -> bool:
    return first.casefold() == second.casefold()
