"""Pages as HTML: every template escapes, whoever wrote the text.

`content` is what a page shows, without the frame around it; a server and a file with a report both begin there.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megascale_jax.errors import UsageError
from megascale_jax.views.dashboard.page import Page, Query, Visitor
from megascale_jax.views.dashboard.run_view import Missing, RunView

STATIC = Path(__file__).with_name("static")
_TEMPLATES = Path(__file__).with_name("templates")

DataLink = Callable[[Page, str, Query], str]
"""The address of a page's data, by its name."""


@cache
def environment() -> Environment:
    """Templates of this folder."""
    found = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters |= {"visible": visible, "signed": signed, "duration": duration, "moment": moment, "share": share}
    found.tests["missing"] = lambda value: isinstance(value, Missing)
    return found


def content(page: Page, run: RunView, query: Query, *, data_link: DataLink, visitor: Visitor | None = None, form_word: str = "") -> Markup:
    """What a page shows. A query that makes no sense is answered by a page that says so.

    ``data_link``: where drawings find their data. ``form_word``: what its forms must carry; without one they should not be there.
    """
    shown: dict[str, Any] = {
        "page": page,
        "run": run,
        "query": query,
        "visitor": visitor or Visitor(),
        "form_word": form_word,
        "link": lambda path, **changes: link(path, changes),
        "data_link": lambda name, **changes: data_link(page, name, {**query, **{key: str(value) for key, value in changes.items()}}),
    }
    try:
        return filled(page.template, **{**shown, **page.context(run, query)})
    except UsageError as error:
        return filled("problem.html", problem=str(error))


def filled(template: str, **values: Any) -> Markup:
    """A template with values. What comes out is HTML that other templates may hold as it is: everything in it was escaped."""
    return Markup(environment().get_template(template).render(values))


def link(path: str, query: Query) -> str:
    """Address of a page with fields; empty ones are left out."""
    fields = {name: value for name, value in query.items() if value not in ("", None)}
    return f"/{path}" + (f"?{urlencode(fields)}" if fields else "")


def visible(text: object) -> str:
    """Text with signs that are not seen, or that turn the direction of others, as escapes: names come from outside."""
    return "".join(sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode() for sign in str(text))


def signed(fraction: float) -> str:
    """``+15.2 %``."""
    return f"{100 * fraction:+.1f} %"


def share(fraction: float | None) -> str:
    """``98 %``, ``?`` where it is not known."""
    return "?" if fraction is None or fraction != fraction else f"{round(100 * fraction)} %"


def duration(seconds: float | None) -> str:
    """``480 us``, ``1.5 ms``, ``12.0 s``, ``3 min 05 s``, ``2 h 03 min``, ``4 d 02 h``."""
    if seconds is None or seconds != seconds:
        return "unknown"
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def moment(unix_s: float | None) -> str:
    """``2026-03-01 12:00:05 UTC`` of seconds since 1970."""
    try:
        return "unknown" if unix_s is None else f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "unknown"
