"""What people should hear of a job, posted to a URL as small JSON, in order; a receiver that is down, slow or hostile changes nothing.

One daemon thread and a queue of `MOST_WAITING` messages: the driver only puts, and what finds no place is counted and said. A message
is tried `TRIES` times, each within `LIMIT_S`, then it is dropped; so is one that the receiver refuses (4xx).
Redirects are not followed, answers are not read, proxies of the environment are not used. Neither the URL nor the token is ever shown.

    {"job": ..., "kind": "alarm" | "incident" | "recovered" | "suspicion" | "isolation" | "recheck" | "eviction" | "end",
     "text": ..., "node": ... | null, "step": ..., "time": seconds since 1970}
"""

import http.client
import json
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from urllib.parse import SplitResult, urlsplit

from megascale_jax.cluster.lifecycle import ENDS, NodeStatus
from megascale_jax.cluster.state import State
from megascale_jax.cluster.story import described, summed_up
from megascale_jax.errors import ConfigError
from megascale_jax.observe.output import printable

TOKEN = "MEGASCALE_WEBHOOK_TOKEN"
"""Environment variable whose value is sent as a bearer's token, if it is there."""
MOST_WAITING = 256
LIMIT_S = 5.0
TRIES = 4
PAUSE_S = 1.0
"""Before the second try; twice as long before each further one."""
CLOSE_S = 10.0
"""Longest that the end of a job waits for what is left in the queue."""
TEXT_LENGTH = 1000


@dataclass(frozen=True)
class Message:
    """One message; ``time``: seconds since 1970."""

    job: str
    kind: str
    text: str
    node: str | None
    step: int
    time: float


def target_of(webhook: str, environment: Mapping[str, str]) -> str:
    """The URL of `cluster.webhook`. Raises ConfigError, which does not repeat it."""
    url = webhook
    if webhook.startswith("$"):
        url = environment.get(webhook[1:], "")
        if not url:
            raise ConfigError(f"cluster.webhook is {webhook}, but the driver has no such environment variable; set it to the URL")
    expected = "expected https://HOST/..., or http://127.0.0.1:PORT/..., without user and password"
    try:
        parts = urlsplit(url)
        is_known = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ConfigError(f"cluster.webhook is no URL; {expected}") from error
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname == "127.0.0.1")
    if not is_known or not is_safe or "@" in parts.netloc or any(ord(one) <= 32 or ord(one) > 126 for one in url):
        raise ConfigError(f"cluster.webhook is a URL that cannot be used (scheme {parts.scheme!r}); {expected}")
    return url


def news(before: State, after: State) -> Iterator[tuple[str, str, str | None]]:
    """Kind, text and node of what a change of the job has to tell."""
    for name in after.slow if after.slow is not before.slow else ():
        new, old = after.slow[name], before.slow.get(name)
        if old is not None and old.stage == new.stage:
            continue
        if new.stage == "suspected":
            yield "suspicion", f"{name} is suspected of being slow: {new.evidence}", name
        elif new.stage == "isolated":
            yield "isolation", f"{name} is isolated: {new.evidence}", name
        elif old is not None and old.stage == "isolated":
            yield "recheck", f"{name} is {new.stage}; its checks: {new.findings or 'nothing found'}", name
    for name, node in after.nodes.items() if after.nodes is not before.nodes else ():
        if node.status == NodeStatus.EVICTED and (name not in before.nodes or before.nodes[name].status != NodeStatus.EVICTED):
            yield "eviction", f"{name} is evicted: {node.reason}", name
    for alarm in after.alarms if after.alarms is not before.alarms else ():
        if alarm not in before.alarms:
            yield "alarm", alarm, None
    if len(after.incidents) > len(before.incidents):
        incident = after.incidents[-1]
        first = next((one for one in incident.suspicions if one.is_primary), incident.suspicions[0])
        yield "incident", f"incident {incident.number} at step {incident.step}: {described(first)}", first.node
    elif before.incident is not None and after.incident is None:
        yield "recovered", f"incident {summed_up(after.incidents[-1])}", None
    if after.phase in ENDS and before.phase not in ENDS:
        yield "end", f"{after.phase}: {after.outcome}", None


class Webhook:
    """Posts the news of one job. ``url`` is one of `target_of`; ``say`` is told what is wrong, never where it goes."""

    def __init__(self, url: str, job: str, say: Callable[[str], None], token: str | None = None):
        self._parts, self._job, self._say, self._token = urlsplit(url), job, say, token
        self._queue: queue.Queue[Message | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._dropped = 0
        self._problem = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, webhook: str | None, job: str, say: Callable[[str], None]) -> "Webhook | None":
        """As configured; ``None`` without. Raises ConfigError."""
        return None if webhook is None else cls(target_of(webhook, os.environ), job, say, os.environ.get(TOKEN))

    @property
    def dropped(self) -> int:
        """Messages that nobody got so far."""
        return self._dropped

    def changed(self, before: State, after: State, step: int) -> None:
        """The job has changed; never waits."""
        for kind, text, node in news(before, after):
            self.put(Message(self._job, kind, printable(text)[:TEXT_LENGTH], node, step, time.time()))

    def put(self, message: Message) -> None:
        """Have one message sent; never waits."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._drop("more is to be told than the receiver takes")

    def close(self) -> None:
        """Send what is left, within `CLOSE_S`; what is not sent by then is said."""
        limit = time.monotonic() + CLOSE_S
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, limit - time.monotonic()))
        self._closed.set()
        if self._thread.is_alive():
            left = self._queue.qsize()
            self._say(f"webhook: the receiver does not take all in time; {left} message(s) or more are not sent")
        elif self._dropped:
            self._say(f"webhook: {self._dropped} message(s) in all were not sent")

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            problem = self._sent(message)
            if problem:
                self._drop(problem)
            elif self._problem:
                self._problem = ""
                self._say(f"webhook: messages arrive again; {self._dropped} in all were not sent")
            if self._closed.is_set():
                return

    def _sent(self, message: Message) -> str:
        """What is wrong; empty when it was taken."""
        body, problem = json.dumps(asdict(message)).encode(), ""
        for number in range(TRIES):
            if number and self._closed.wait(PAUSE_S * 2 ** (number - 1)):
                break
            try:
                status = _posted(self._parts, body, self._token)
            except (OSError, http.client.HTTPException, ValueError) as error:  # what it says may hold the URL
                problem = f"the receiver cannot be reached ({type(error).__name__})"
                continue
            if 200 <= status < 300:
                return ""
            problem = f"the receiver answers {status}" + (", a redirect, which is not followed" if 300 <= status < 400 else "")
            if status < 500 and status not in (408, 429):
                break
        return problem

    def _drop(self, problem: str) -> None:
        with self._lock:
            self._dropped += 1
            is_new, self._problem = problem != self._problem, problem
        if is_new:
            self._say(f"webhook: a message is dropped, {problem}; the job goes on, more are counted")


def _posted(parts: SplitResult, body: bytes, token: str | None) -> int:
    """Post once; the status of the answer. Raises OSError, HTTPException, ValueError."""
    assert parts.hostname is not None, "checked by `target_of`"
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=LIMIT_S, context=ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)
    headers = {"Content-Type": "application/json", "User-Agent": "megascale"} | ({"Authorization": f"Bearer {token}"} if token else {})
    cut = threading.Timer(
        LIMIT_S, _cut, (connection,)
    )  # the time-out is of each read: whoever sends a byte a second would hold it for ever
    cut.daemon = True
    cut.start()
    try:
        connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
        return connection.getresponse().status
    finally:
        cut.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    """End a connection that another thread waits for."""
    if (sock := connection.sock) is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
