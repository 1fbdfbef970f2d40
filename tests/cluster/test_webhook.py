"""Messages about a job to a receiver that is well, slow, failing, hanging, gone or hostile."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megascale_jax.cluster import webhook as webhook_module
from megascale_jax.cluster.state import Ordered
from megascale_jax.cluster.webhook import MOST_WAITING, TEXT_LENGTH, TRIES, Message, Webhook, news, target_of
from megascale_jax.errors import ConfigError
from tests.cluster.simulated import World
from tests.cluster.test_driver import CONFIG
from tests.cluster.test_governance import Watched, suspected

SECRET = "T0KEN-in-the-path"


class Receiver:
    """A server that answers as it is told, and what it was sent."""

    def __init__(self, answer: Callable[["Receiver", BaseHTTPRequestHandler, int], None]):
        self.got: list[dict] = []
        self.tokens: list[str | None] = []
        self.let_go = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                receiver.tokens.append(self.headers["Authorization"])
                answer(receiver, self, len(receiver.got))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.let_go.set()
        self.server.shutdown()
        self.server.server_close()


def status(*codes: int) -> Callable[[Receiver, BaseHTTPRequestHandler, int], None]:
    def answer(receiver: Receiver, handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(codes[min(number, len(codes)) - 1])
        handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
        handler.end_headers()

    return answer


def hangs(receiver: Receiver, handler: BaseHTTPRequestHandler, number: int) -> None:
    receiver.let_go.wait(30)


def trickles(receiver: Receiver, handler: BaseHTTPRequestHandler, number: int) -> None:
    while not receiver.let_go.wait(0.02):
        handler.wfile.write(b"H")


@pytest.fixture
def receiver():
    made: list[Receiver] = []

    def make(answer) -> Receiver:
        made.append(Receiver(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(webhook_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(webhook_module, "LIMIT_S", 0.3)


def message(number: int, text: str = "text") -> Message:
    return Message("run", "alarm", text, "node-1", number, 1.5)


def posted(url: str, count: int = 3, token: str | None = None) -> tuple[list[str], Webhook]:
    said: list[str] = []
    hook = Webhook(url, "run", said.append, token)
    for number in range(count):
        hook.put(message(number))
    hook.close()
    assert not any(SECRET in line or "127.0.0.1" in line for line in said), said
    return said, hook


def test_messages_arrive_in_order_with_the_token(receiver):
    well = receiver(status(204))
    said, hook = posted(well.url, 20, "secret")
    assert [one["step"] for one in well.got] == list(range(20)) and said == [] and hook.dropped == 0
    assert well.got[0] == {"job": "run", "kind": "alarm", "text": "text", "node": "node-1", "step": 0, "time": 1.5}
    assert set(well.tokens) == {"Bearer secret"}


def test_a_failing_receiver_is_tried_again_and_what_is_dropped_is_counted_and_said(receiver):
    failing = receiver(status(500, 503, 200))
    said, hook = posted(failing.url, 2)
    assert [one["step"] for one in failing.got] == [0, 0, 0, 1] and said == []
    down = receiver(status(500))
    said, hook = posted(down.url, 3)
    assert len(down.got) == 3 * TRIES and hook.dropped == 3
    assert len(said) == 2 and "answers 500" in said[0] and "3 message(s) in all" in said[1]


def test_it_says_when_messages_arrive_again(receiver):
    again = receiver(status(*[500] * TRIES, 200))
    said, _ = posted(again.url, 3)
    assert "is dropped" in said[0] and "arrive again; 1 in all" in said[1]


@pytest.mark.parametrize("code", [302, 307, 400, 404])
def test_redirects_are_not_followed_and_refusals_not_repeated(receiver, code):
    one = receiver(status(code))
    said, hook = posted(one.url, 1)
    assert len(one.got) == 1 and hook.dropped == 1 and f"answers {code}" in said[0]


@pytest.mark.parametrize("answer", [hangs, trickles])
def test_a_receiver_that_hangs_holds_nobody_up(receiver, monkeypatch, answer):
    monkeypatch.setattr(webhook_module, "TRIES", 2)
    one = receiver(answer)
    said, hook = posted(one.url, 2)
    assert hook.dropped == 2 and "cannot be reached" in said[0]


def test_a_closed_port_and_the_bound_of_the_queue(receiver, monkeypatch):
    said, hook = posted("http://127.0.0.1:1/" + SECRET, 2)
    assert hook.dropped == 2 and "ConnectionRefusedError" in said[0]
    monkeypatch.setattr(webhook_module, "LIMIT_S", 30.0)
    monkeypatch.setattr(webhook_module, "CLOSE_S", 0.1)
    one = receiver(hangs)
    lines: list[str] = []
    full = Webhook(one.url, "run", lines.append)
    for number in range(MOST_WAITING + 12):
        full.put(message(number))
    assert full.dropped >= 11 and "than the receiver takes" in lines[0] and len(lines) == 1
    full.close()
    assert "not sent" in lines[-1]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/x",
        "http://127.0.0.1.example.com/",
        "http://localhost/x",
        "ftp://example.com/x",
        "https://",
        "https://me:pass@example.com/",
        "https://example.com:99999/",
        "https://example.com/a\r\nX: y",
        "https://[::1/",
    ],
)
def test_other_urls_are_refused_without_being_repeated(url):
    with pytest.raises(ConfigError, match=r"cluster\.webhook") as refused:
        target_of("$HOOK", {"HOOK": url})
    assert "example" not in str(refused.value) and "pass@" not in str(refused.value)


def test_a_url_may_be_in_the_environment():
    assert target_of("$HOOK", {"HOOK": "https://example.com/x?y=1"}) == "https://example.com/x?y=1"
    with pytest.raises(ConfigError, match="no such environment variable"):
        target_of("$HOOK", {})


def test_what_is_told_of_a_slow_node():
    story = Watched()
    kinds: list[str] = []
    on = story.on

    def heard(event):
        before = story.state
        on(event)
        kinds.extend(kind for kind, _, _ in news(before, story.state))
        return story.state

    story.on = heard
    name = suspected(story, 2)
    story.save()
    story.replace()
    story.recheck(name, bad="gemm is slow")
    assert kinds == ["suspicion", "isolation", "incident", "recovered", "recheck", "eviction"]


def test_a_job_is_told_from_its_first_incident_to_its_end_whatever_is_in_a_text(tmp_path, receiver):
    well = receiver(status(200))
    said: list[str] = []
    world = World(tmp_path, CONFIG)
    world.driver.webhook = Webhook(well.url, "a job", said.append)
    world.until_step(12)
    world.crash("node-2")
    world.until_step(20)
    world.driver.record(Ordered(at_s=world.now, action="evict", node="node-1", by="ada\x1b[2J" + "x" * 5000))
    world.until_step(25)
    world.driver.record(Ordered(at_s=world.now, action="stop", by="ada"))
    world.run(30, lambda: world.driver.is_over)
    world.driver.webhook.close()
    assert [one["kind"] for one in well.got] == ["incident", "recovered", "eviction", "incident", "recovered", "end"] and said == []
    assert well.got[0]["node"] == "node-2" and well.got[0]["step"] >= 10 and well.got[0]["job"] == "a job"
    assert all(len(one["text"]) <= TEXT_LENGTH and "\x1b" not in one["text"] for one in well.got)
    assert abs(well.got[0]["time"] - time.time()) < 600
