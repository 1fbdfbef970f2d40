"""The dashboard as an ASGI application: pages, their live parts, their data, and commands; all of one run.

    GET  /PATH                     a page
    GET  /fragment/KEY             what a page shows, for the script that keeps it fresh; ETag
    GET  /data/KEY/NAME            bytes for its drawings
    POST /action/KEY/NAME          a command, of a form on a page
    GET, POST /login, POST /logout a token is shown, and forgotten

KEY is the page's path, or ``overview`` for the first. Answers carry a policy by which a browser runs our scripts alone and asks
nobody else for anything. Failure case: whatever goes wrong is a page with words and a status; what was asked for is never repeated
unescaped.
"""

import asyncio
import hashlib
import logging
from typing import Any
from urllib.parse import parse_qsl, quote

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megascale_jax.errors import MegascaleError
from megascale_jax.views.dashboard.guard import COOKIE, FORM_FIELD, SESSION_S, Guard, Refused
from megascale_jax.views.dashboard.page import Page, Query, Visitor
from megascale_jax.views.dashboard.pages import PAGES
from megascale_jax.views.dashboard.render import STATIC, content, filled, link
from megascale_jax.views.dashboard.run_view import RunView

MOST_BODY_BYTES, BODY_S = 64 << 10, 10.0
"""Of a form, and how long it may take to come."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with none at all browsers send a form without its origin, which `Guard.check_origin` asks for
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


def make_app(run: RunView, guard: Guard, pages: tuple[Page, ...] = PAGES) -> ASGIApp:
    """The application for one run."""
    site = _Site(run, guard, pages)
    routes = [
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/login", site.login_page, methods=["GET"]),
        Route("/login", site.login, methods=["POST"]),
        Route("/logout", site.logout, methods=["POST"]),
        Route("/fragment/{key}", site.fragment, methods=["GET"]),
        Route("/data/{key}/{name}", site.data, methods=["GET"]),
        Route("/action/{key}/{name}", site.action, methods=["POST"]),
        Route("/{path}", site.page, methods=["GET"]),
        Route("/", site.page, methods=["GET"]),
    ]
    errors = {Refused: site.refused, HTTPException: site.not_found, MegascaleError: site.failed, Exception: site.broken}
    return _Door(Starlette(routes=routes, exception_handlers=errors), guard)


class _Door:
    """Around everything: whose host it is, and the headers of every answer."""

    def __init__(self, app: ASGIApp, guard: Guard):
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        try:
            self._guard.check_host(Request(scope))
        except Refused as error:
            await PlainTextResponse(f"{error}\n", error.status)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


class _Site:
    """Answers. Those that read a run are plain functions, which Starlette calls in threads."""

    def __init__(self, run: RunView, guard: Guard, pages: tuple[Page, ...]):
        self._run, self._guard, self._pages = run, guard, pages
        self._by_key = {page.key: page for page in pages}

    def page(self, request: Request) -> Response:
        """A whole page."""
        page = next((one for one in self._pages if one.path == request.path_params.get("path", "")), None)
        if page is None:
            raise HTTPException(404)
        visitor = self._guard.visitor(request)
        if self._guard.needs_token and not visitor.token:
            return RedirectResponse(link("login", {"next": page.key}), 303)
        return self._framed(visitor, self._content(page, request, visitor), page.title, page=page)

    def fragment(self, request: Request) -> Response:
        """What a page shows now; 304 when the script has it already."""
        page, visitor = self._asked(request)
        html = self._content(page, request, visitor)
        tag = f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return HTMLResponse(html, headers={"ETag": tag})

    def data(self, request: Request) -> Response:
        """The bytes of a drawing."""
        page, _ = self._asked(request)
        make = page.data.get(request.path_params["name"])
        if make is None:
            raise HTTPException(404)
        return Response(make(self._run, _query(request)), media_type="application/octet-stream")

    async def action(self, request: Request) -> Response:
        """A command of a form, if its sender may give it; then the page with what became of it."""
        page, visitor = self._asked(request)
        action = page.actions.get(request.path_params["name"])
        if action is None:
            raise HTTPException(404)
        form = await self._form(request, visitor)
        if not visitor.may(action.role):
            raise Refused(
                403, f"this needs a token with the role {action.role}; you have {visitor.role if visitor.token else 'shown none'}"
            )
        try:
            said, is_done = await run_in_threadpool(action.run, self._run, visitor, form), True
        except MegascaleError as error:
            said, is_done = str(error), False
        _log.info("%s of %s by %s: %s", request.path_params["name"], page.key, visitor.name, said)
        return self._framed(
            visitor, filled("said.html", text=said, page=page, is_done=is_done), page.title, page=page, status=200 if is_done else 409
        )

    def login_page(self, request: Request) -> Response:
        """Where a token is shown."""
        return self._login(self._guard.visitor(request), request.query_params.get("next", ""))

    async def login(self, request: Request) -> Response:
        """A token was shown: a cookie and the page that was wanted, or why not."""
        before = self._guard.visitor(request)
        form = await self._form(request, before)
        wanted = self._by_key.get(form.get("next", ""), self._pages[0])
        try:
            visitor = await run_in_threadpool(self._guard.holder, form.get("token", "").strip())
        except Refused as error:
            return self._login(before, wanted.key, str(error), error.status)
        answer = RedirectResponse(f"/{wanted.path}", 303)
        number, is_tls = self._guard.sessions.begin(visitor.token), request.url.scheme == "https"
        answer.set_cookie(COOKIE, number, max_age=int(SESSION_S), path="/", secure=is_tls, httponly=True, samesite="strict")
        return answer

    async def logout(self, request: Request) -> Response:
        """Forget the token."""
        await self._form(request, self._guard.visitor(request))
        self._guard.sessions.end(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(COOKIE, path="/", secure=request.url.scheme == "https", httponly=True, samesite="strict")
        return answer

    def refused(self, request: Request, error: Exception) -> Response:
        """What the guard does not let pass."""
        return self._problem(request, str(error), error.status if isinstance(error, Refused) else 403)

    def not_found(self, request: Request, error: Exception) -> Response:
        """A wrong address or method."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        text = "There is no such page." if status == 404 else "This address does not take that method."
        return self._problem(request, text, status)

    def failed(self, request: Request, error: Exception) -> Response:
        """An error with words for people."""
        return self._problem(request, str(error), 400)

    def broken(self, request: Request, error: Exception) -> Response:
        """A fault of ours; Starlette logs it."""
        return self._problem(request, f"The dashboard failed: {type(error).__name__}. Its log says where.", 500)

    def _asked(self, request: Request) -> tuple[Page, Visitor]:
        visitor = self._guard.visitor(request)
        self._guard.check_look(visitor)
        page = self._by_key.get(request.path_params["key"])
        if page is None:
            raise HTTPException(404)
        return page, visitor

    def _content(self, page: Page, request: Request, visitor: Visitor) -> Markup:
        word = self._guard.form_word(visitor)
        return content(page, self._run, _query(request), data_link=data_link, visitor=visitor, form_word=word)

    async def _form(self, request: Request, visitor: Visitor) -> Query:
        self._guard.check_origin(request)
        form = await _read_form(request)
        if COOKIE in request.cookies or "authorization" not in request.headers:
            self._guard.check_form(visitor, form.get(FORM_FIELD, ""))
        return form

    def _framed(self, visitor: Visitor, html: Markup, title: str, *, page: Page | None = None, status: int = 200) -> Response:
        shown = {"run": self._run, "pages": self._pages, "page": page, "title": title, "content": html}
        return HTMLResponse(filled("frame.html", **shown, **self._door(visitor)), status)

    def _login(self, visitor: Visitor, wanted: str, problem: str = "", status: int = 200) -> Response:
        html = filled("login.html", wanted=wanted, problem=problem, **self._door(visitor))
        return self._framed(visitor, html, "Token", status=status)

    def _door(self, visitor: Visitor) -> dict[str, Any]:
        """What templates know of the visitor."""
        has_tokens = self._guard.security is not None
        return {"visitor": visitor, "has_tokens": has_tokens, "form_word": self._guard.form_word(visitor)}

    def _problem(self, request: Request, text: str, status: int) -> Response:
        if request.url.path.startswith(("/fragment/", "/data/", "/static/")):
            return PlainTextResponse(f"{text}\n", status)
        html = filled("problem.html", problem=text)
        return self._framed(self._guard.visitor(request), html, "Problem", status=status)


def data_link(page: Page, name: str, query: Query) -> str:
    """Where this server has the data of a drawing."""
    return link(f"data/{quote(page.key)}/{quote(name)}", query)


def _query(request: Request) -> Query:
    return dict(request.query_params)


async def _read_form(request: Request) -> Query:
    """The fields of a form. Raises Refused when it is too large, too slow or no form."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
        raise Refused(415, "expected the fields of a form")
    body = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > MOST_BODY_BYTES:
                raise Refused(413, f"a form of more than {MOST_BODY_BYTES} bytes")

    try:
        await asyncio.wait_for(read(), BODY_S)
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=64))
    except TimeoutError as error:
        raise Refused(408, f"the form did not come within {BODY_S:.0f} s") from error
    except (ClientDisconnect, ValueError) as error:
        raise Refused(400, "the form cannot be read") from error
