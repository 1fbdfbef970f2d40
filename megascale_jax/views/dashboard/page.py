"""A page of the dashboard as a value: what it is called, what it shows, which data its drawings fetch, what may be done on it.

A page is a template and a function from a run and the address's query to what the template shows. It needs no server: a report puts
the same content into a file. Templates escape everything; there is no mark for "safe" text. Addresses are made by ``link`` in templates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import UsageError
from megascale_jax.views.dashboard.run_view import RunView

Query = Mapping[str, str]
"""Of an address or a form; whoever sends it may write anything into it."""
RANKS = (Role.VIEW, Role.OPERATE, Role.ADMIN)
"""Roles of people, each with the rights of those before it."""


@dataclass(frozen=True)
class Visitor:
    """Who asks. ``token``: as was shown, to be shown to the driver; empty: nobody in particular, who may look where nobody has to say."""

    name: str = ""
    role: Role = Role.VIEW
    token: str = field(default="", repr=False)

    def may(self, role: Role | str) -> bool:
        """Whether a token was shown for this role or a higher one; looking without one is not `may`'s to decide."""
        wanted = Role(role)
        return bool(self.token) and self.role in RANKS and wanted in RANKS and RANKS.index(self.role) >= RANKS.index(wanted)


@dataclass(frozen=True)
class Action:
    """What a form on a page does: ``run`` gets the form's fields, and returns one line for the visitor.

    It raises UsageError, LinkError for what cannot be done. The server has checked role and origin before.
    """

    role: Role
    run: Callable[[RunView, Visitor, Query], str]


@dataclass(frozen=True)
class Page:
    """One page.

    ``path``: in addresses, empty for the first; ``context``: what ``template`` shows, never raising for a damaged run; ``data``: by
    name, bytes that drawings fetch (`packed`); ``scripts``: files in ``static`` that only this page needs; ``refresh_s``: between two
    looks for changes, ``None``: the page stays as it is; ``actions``: by name.
    """

    path: str
    title: str
    template: str
    context: Callable[[RunView, Query], dict[str, Any]]
    data: Mapping[str, Callable[[RunView, Query], bytes]] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()
    refresh_s: float | None = 5.0
    actions: Mapping[str, Action] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name in addresses of its parts."""
        return self.path or "overview"


def whole_number(query: Query, name: str, *, most: int = 1 << 40) -> int | None:
    """A field that is empty, or a whole number of at least 0. Raises UsageError for anything else."""
    text = query.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= most):
        raise UsageError(f"{name} is {text[:40]!r}; expected a whole number from 0 to {most}, or nothing")
    return int(text)


def choice(query: Query, name: str, of: tuple[str, ...]) -> str:
    """A field that is one of ``of``; the first when it is none of them."""
    return query.get(name, "") if query.get(name, "") in of else of[0]
