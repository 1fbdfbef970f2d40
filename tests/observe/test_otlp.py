"""Events as OpenTelemetry's spans: the encoding, stable identities, files whole or absent, collectors that refuse, are busy, or silent."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import UsageError
from megascale_jax.observe import otlp
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import Events
from megascale_jax.observe.otlp import HEADERS, endpoint_of, headers_from, requests_of, send, write_file


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    for rank in (0, 3):
        out = Events(path / "events", rank=rank, attempt=1, run="r1")
        out.record("step", 10**9, 5_000, step=1, text='{"a": "ü\\ud800"}')
        out.instant("saved", begin_ns=2 * 10**9, step=1)
        out.many(name="forward", lane="compute", begin_ns=np.arange(50) * 100 + 10**9, duration_ns=7, device=rank, step=2, microbatch=0)
        out.close()
    return path


def spans_of(requests):
    return [
        (one["resource"], span)
        for request in requests
        for one in request["resourceSpans"]
        for scope in one["scopeSpans"]
        for span in scope["spans"]
    ]


def plain(item):
    return {pair["key"]: next(iter(pair["value"].values())) for pair in item["attributes"]}


def test_spans_are_of_the_json_encoding(run):
    with read_events(run) as store:
        rows = store.sql("select * from events").num_rows
        found = spans_of(request for request, _ in requests_of(store))
    assert len(found) == rows + 1, "and the root"
    assert all(re.fullmatch("[0-9a-f]{32}", span["traceId"]) and re.fullmatch("[0-9a-f]{16}", span["spanId"]) for _, span in found)
    assert len({span["traceId"] for _, span in found}) == 1 and len({span["spanId"] for _, span in found}) == rows + 1
    (root,) = [span for _, span in found if "parentSpanId" not in span]
    assert {span["parentSpanId"] for _, span in found if span is not root} == {root["spanId"]}
    resource, step = next(
        (resource, span) for resource, span in found if span["name"] == "step" and plain(resource)["megascale.rank"] == "3"
    )
    assert int(step["endTimeUnixNano"]) - int(step["startTimeUnixNano"]) == 5_000
    assert int(root["startTimeUnixNano"]) <= int(step["startTimeUnixNano"]) and root["name"] == "run"
    assert {"service.name": "megascale", "megascale.attempt": "1", "megascale.run": "r1"}.items() <= plain(resource).items()
    assert plain(resource)["host.name"] and plain(step)["megascale.step"] == "1" and "megascale.device" not in plain(step)
    instant = next(span for _, span in found if span["name"] == "saved")
    assert plain(instant)["megascale.instant"] is True and instant["startTimeUnixNano"] == instant["endTimeUnixNano"]


def test_exporting_again_gives_the_same_spans_and_another_attempt_another_trace(run, tmp_path):
    with read_events(run) as store:
        for name in ("a", "b"):
            write_file(store, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert otlp._span("x", "r1", 1, "", 0, 0, {})["traceId"] != otlp._span("x", "r1", 2, "", 0, 0, {})["traceId"]


def test_a_file_is_whole_or_not_there(run, tmp_path, monkeypatch):
    path = tmp_path / "spans.jsonl"
    with read_events(run) as store:
        done = write_file(store, path)
        lines = path.read_text().splitlines()
        assert len(lines) == done.requests and sum(len(spans_of([json.loads(line)])) for line in lines) == done.spans

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(otlp.os, "fsync", full)
        before = path.read_bytes()
        with pytest.raises(OSError, match="No space"):
            write_file(store, path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["spans.jsonl"]


class Collector:
    """Answers with each of ``answers`` in turn, then with 200."""

    def __init__(self, *answers, body=b"{}", headers=()):
        self.seen, collector, self.answers = [], self, list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                content = self.rfile.read(int(self.headers["Content-Length"]))
                collector.seen.append((self.path, dict(self.headers), json.loads(content)))
                self.send_response(collector.answers.pop(0) if collector.answers else 200)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()


def test_a_collector_gets_all_in_batches_with_the_headers(run, monkeypatch):
    monkeypatch.setattr(otlp, "BATCH", 20)
    monkeypatch.setenv(HEADERS, "authorization=Bearer%20secret")
    with Collector() as collector:
        result = CliRunner().invoke(app, ["events", "export", str(run), "--otlp", collector.url])
    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    assert {path for path, _, _ in collector.seen} == {"/v1/traces"}
    assert all(headers["Authorization"] == "Bearer secret" for _, headers, _ in collector.seen)
    assert all(headers["Content-Type"] == "application/json" for _, headers, _ in collector.seen)
    sizes = [len(spans_of([content])) for _, _, content in collector.seen]
    assert max(sizes) == 20 and f"{sum(sizes)} spans in {len(sizes)} requests" in result.output


def test_steps_and_ranks_choose(run, tmp_path):
    path = tmp_path / "spans.jsonl"
    result = CliRunner().invoke(app, ["events", "export", str(run), "--otlp", str(path), "--steps", "2:", "--ranks", "3"])
    assert result.exit_code == 0, result.output
    found = spans_of(json.loads(line) for line in path.read_text().splitlines())
    assert {span["name"] for _, span in found} == {"run", "forward"} and len(found) == 51


def test_a_busy_collector_is_asked_again_and_a_refusal_is_said(run):
    with read_events(run, steps=range(1, 2)) as store:
        with Collector(503, 429) as collector:
            done = send(store, collector.url, pause_s=0.0)
        assert len(collector.seen) == done.requests + 2
        with Collector(*[503] * 10) as collector, pytest.raises(UsageError, match="answered 503"):
            send(store, collector.url, pause_s=0.0)
        assert len(collector.seen) == otlp.TRIES
        with Collector(400, body=b"no traces here") as collector, pytest.raises(UsageError, match=r"answered 400 .*no traces here"):
            send(store, collector.url)
        with Collector(302, headers=[("Location", "http://127.0.0.1:1/")]) as collector, pytest.raises(UsageError, match="answered 302"):
            send(store, collector.url, {"authorization": "x"})
        body = b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}'
        with Collector(body=body) as collector:
            done = send(store, collector.url)
        assert (done.rejected, done.note) == (2 * done.requests, "too old")


def test_one_that_is_not_there_or_does_not_answer_is_said(run, monkeypatch):
    with read_events(run, steps=range(1, 2)) as store:
        with Collector() as gone:
            pass
        with pytest.raises(UsageError, match="cannot be reached"):
            send(store, gone.url)
        monkeypatch.setattr(otlp, "TIMEOUT_S", 0.05)
        silent = Collector()  # it listens, and nobody serves
        with pytest.raises(UsageError, match=r"cannot be reached.*timed out"):
            send(store, silent.url)
        silent.server.server_close()


def test_addresses_and_headers_are_checked():
    assert endpoint_of("http://h:4318") == "http://h:4318/v1/traces" == endpoint_of("http://h:4318/")
    assert endpoint_of("https://h/in/v1/traces") == "https://h/in/v1/traces"
    for wrong in ("ftp://h", "http://", "http://h:x", "http://[", "file:///etc/passwd"):
        with pytest.raises(UsageError, match="expected a file, or an address"):
            endpoint_of(wrong)
    assert headers_from({HEADERS: "a=1, b=x%2Cy ,"}) == {"a": "1", "b": "x,y"} and headers_from({}) == {}
    with pytest.raises(UsageError) as caught:
        headers_from({HEADERS: "token%0asecret"})
    assert "secret" not in str(caught.value)
    with pytest.raises(UsageError):
        headers_from({HEADERS: "a=b%0d%0aHost: x"})
