"""The dashboard's HTTP server: limits for whoever connects, TLS where the guard has certificates, a clean stop.

uvicorn has limits of headers, connections and idle connections; a connection that asks for nothing, or sends its headers byte by byte,
is closed here. Bodies are limited by the application.
"""

import asyncio
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from megascale_jax.cluster.link.security import Security
from megascale_jax.errors import UsageError

MOST_CONNECTIONS = 128
MOST_HEADER_BYTES = 16 << 10
IDLE_S, REQUEST_S, STOP_S = 30.0, 15.0, 3.0
"""Of a connection between requests; until a request's headers have come; for requests under way when the server stops."""
_START_S = 20.0


class _Connection(H11Protocol):
    """Closed when it does not ask for anything in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(REQUEST_S, self._look, None)

    def _look(self, cycle: object) -> None:
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is cycle:
            self.transport.close()
        else:
            self.loop.call_later(REQUEST_S + IDLE_S, self._look, self.cycle)


class _Server(uvicorn.Server):
    """Signals are for `serve` to take."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


def bound(host: str, port: int) -> socket:
    """A socket at an address, 0: any port. Raises UsageError when it cannot be had."""
    listening = socket(AF_INET6 if ":" in host else AF_INET)
    try:
        listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(MOST_CONNECTIONS)  # whoever is told the address may come at once
    except OSError as error:
        listening.close()
        raise UsageError(f"{host} port {port} cannot be had ({error.strerror or error}); give another --port, 0 for any") from error
    return listening


def url_of(listening: socket, *, is_tls: bool) -> str:
    """Where a browser finds it."""
    host, port = listening.getsockname()[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/"


def serve(app: ASGIApp, listening: socket, security: Security | None) -> None:
    """Serve until SIGTERM or Ctrl-C. ``security``: whose certificate it shows, ``None``: no TLS. In the main thread only."""
    server = _made(app, security)

    def stop(number: int, frame: FrameType | None) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run([listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listening.close()


@contextmanager
def served(app: ASGIApp, listening: socket, security: Security | None = None) -> Iterator[str]:
    """Serve in here, in a thread; the address. Raises TimeoutError when it does not start."""
    server = _made(app, security)
    thread = threading.Thread(target=server.run, args=([listening],), name="dashboard", daemon=True)
    thread.start()
    try:
        limit = time.monotonic() + _START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > limit:
                raise TimeoutError(f"the dashboard did not start within {_START_S:.0f} s")
            time.sleep(0.01)
        yield url_of(listening, is_tls=security is not None)
    finally:
        server.should_exit = True
        thread.join(STOP_S + 5.0)
        listening.close()


def _made(app: ASGIApp, security: Security | None) -> _Server:
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=int(STOP_S),
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        ssl_context_factory=None if security is None else lambda _, __: browser_context(security),
    )
    return _Server(config)


def browser_context(security: Security) -> ssl.SSLContext:
    """TLS 1.3 for browsers, which show tokens and no certificates. Raises UsageError."""
    context = security.server_context()
    context.verify_mode = ssl.CERT_NONE
    return context
