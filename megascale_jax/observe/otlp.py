"""Events of a run as spans of OpenTelemetry: OTLP in its JSON encoding, to a file or to a collector over HTTP. No JAX, no SDK.

One request holds up to `BATCH` spans of one process. A trace is one attempt of one run, whose root span has all others as children; an
instant is a span of no duration. Identities are hashes of what they name, so exporting twice gives the same spans.

Source: https://opentelemetry.io/docs/specs/otlp/ (JSON Protobuf encoding: identities in hexadecimal digits, 64-bit integers as text) and
https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ (a request a line).

Failure cases: a collector that is not there, refuses or does not answer in time is a UsageError with what it said; one that is busy is
asked again `TRIES` times. A file is there whole or not at all.
"""

import hashlib
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale_jax.errors import UsageError
from megascale_jax.observe.event_store import VIEW, EventStore

BATCH = 2_000
"""Spans of a request: some 1 MB, collectors take 20 MB by default."""
TIMEOUT_S, TRIES, PAUSE_S, LONGEST_PAUSE_S = 30.0, 4, 1.0, 30.0
"""Of one request; a busy collector's own wish for a pause counts up to the longest one."""
PATH = "/v1/traces"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""Environment variable with headers as ``name=value,...``, values percent-encoded, such as a token; as OpenTelemetry's SDKs read it."""
_BUSY = frozenset({429, 502, 503, 504})
_INTERNAL = 1
"""SpanKind."""
_NUMBERS = ("device", "step", "tick", "microbatch", "chunk")
_MOST_ANSWER = 1 << 16


@dataclass(frozen=True)
class Exported:
    """How many spans, in how many requests; ``rejected``: of them a collector refused, with ``note`` saying why."""

    spans: int
    requests: int
    rejected: int = 0
    note: str = ""


def requests_of(store: EventStore) -> Iterator[tuple[dict[str, Any], int]]:
    """OTLP's ``TracesData``, each with the number of its spans: the roots first, then the processes one after the other."""
    runs = {file.process: file.facts.run for file in store.files if file.facts is not None}
    processes = store.sql(
        f"select process, attempt, any_value(role) as role, any_value(host) as host, any_value(rank) as rank, min(unix_ns) as first,"
        f" max(unix_ns + duration_ns) as last from {VIEW} group by process, attempt order by process, attempt"
    ).to_pylist()
    roots: dict[tuple[str, int], list[int]] = {}
    for one in processes:
        times = roots.setdefault((runs.get(one["process"], ""), one["attempt"]), [one["first"], one["last"]])
        times[:] = min(times[0], one["first"]), max(times[1], one["last"])
    for (run, attempt), (first, last) in roots.items():
        root = _span("run", run, attempt, _root(run, attempt), first, last - first, {"megascale.attempt": attempt})
        yield _request({"service.name": "megascale", "megascale.run": run}, [root]), 1
    for one in processes:
        run, attempt = runs.get(one["process"], ""), one["attempt"]
        resource = {
            "service.name": "megascale",
            "service.instance.id": one["process"],
            "host.name": one["host"],
            **{f"megascale.{name}": one[name] for name in ("role", "rank", "attempt")},
            "megascale.run": run,
        }
        name = one["process"].replace("'", "''")
        table = store.sql(f"select * from {VIEW} where process = '{name}' and attempt = {attempt:d} order by unix_ns, begin_ns, name, lane")
        for batch in table.to_batches(max_chunksize=BATCH):
            yield _request(resource, [_of_row(row, run) for row in batch.to_pylist()]), batch.num_rows


def write_file(store: EventStore, path: Path) -> Exported:
    """One request a line. Raises OSError (disk full, no permission); the former file is then untouched."""
    spans, requests = 0, 0
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with neighbour.open("wb") as stream:
            for request, number in requests_of(store):
                stream.write(_encoded(request) + b"\n")
                spans, requests = spans + number, requests + 1
            stream.flush()
            os.fsync(stream.fileno())
        neighbour.replace(path)
    finally:
        neighbour.unlink(missing_ok=True)
    return Exported(spans, requests)


def endpoint_of(url: str) -> str:
    """A collector's address with `PATH` where it has no path. Raises UsageError unless it is ``http://`` or ``https://``."""
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:
        raise UsageError(f"--otlp {url.rpartition('@')[2]}: expected a file, or an address such as http://127.0.0.1:4318") from None
    return urllib.parse.urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else PATH))


def headers_from(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of `HEADERS`. Raises UsageError, without their values, when they are of another form."""
    headers: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in environment.get(HEADERS, "").split(","))):
        name, equals, value = part.partition("=")
        value = urllib.parse.unquote(value.strip())
        if not (equals and name.strip().isascii() and value.isprintable() and name.strip().isprintable()):
            raise UsageError(f"{HEADERS} is not name=value,name=value with percent-encoded values")
        headers[name.strip()] = value
    return headers


def send(store: EventStore, url: str, headers: Mapping[str, str] | None = None, *, pause_s: float = PAUSE_S) -> Exported:
    """Post all requests to a collector, one after the other; it may have some when this raises UsageError, and takes them again."""
    endpoint, spans, count, rejected, note = endpoint_of(url), 0, 0, 0, ""
    for request, number in requests_of(store):
        answer = _post(endpoint, _encoded(request), headers or {}, pause_s)
        spans, count = spans + number, count + 1
        if lost := _rejected(answer):
            rejected, note = rejected + lost[0], lost[1]
    return Exported(spans, count, rejected, note)


def _post(endpoint: str, body: bytes, headers: Mapping[str, str], pause_s: float) -> bytes:
    opener = urllib.request.build_opener(_NoRedirect)
    for left in reversed(range(TRIES)):
        request = urllib.request.Request(endpoint, body, {**headers, "Content-Type": "application/json"}, method="POST")
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                return answer.read(_MOST_ANSWER)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(_MOST_ANSWER)[:300].decode("utf-8", "replace")
            if error.code not in _BUSY or not left:
                raise UsageError(f"{_shown(endpoint)} answered {error.code} {error.reason}: {said}; is it an OTLP/HTTP endpoint?") from None
            wished = error.headers.get("Retry-After", "")
            time.sleep(min(float(wished) if wished.isdecimal() else pause_s, LONGEST_PAUSE_S))
        except OSError as error:  # refused, time-out, TLS: URLError is one
            reason = getattr(error, "reason", error)
            raise UsageError(
                f"{_shown(endpoint)} cannot be reached ({reason}); is a collector listening there for OTLP over HTTP?"
            ) from error
    raise AssertionError("the last try returned or raised")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token stays with whom it was meant for, and a POST a POST."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _shown(endpoint: str) -> str:
    """Without a password."""
    parts = urllib.parse.urlsplit(endpoint)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _rejected(answer: bytes) -> tuple[int, str] | None:
    """Of ``ExportTracePartialSuccess``: how many spans were not taken, and why."""
    try:
        partial = json.loads(answer or b"{}").get("partialSuccess") or {}
        lost = int(partial.get("rejectedSpans", 0))
        return (lost, str(partial.get("errorMessage", ""))) if lost > 0 else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _encoded(request: dict[str, Any]) -> bytes:
    return json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _request(resource: Mapping[str, Any], spans: Collection[dict[str, Any]]) -> dict[str, Any]:
    scope = {"scope": {"name": "megascale_jax"}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}


def _of_row(row: Mapping[str, Any], run: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {"megascale.lane": row["lane"]}
    attributes |= {f"megascale.{name}": row[name] for name in _NUMBERS if row[name] >= 0}
    attributes |= {"megascale.instant": True} if row["is_instant"] else {}
    attributes |= {} if row["text"] is None else {"megascale.text": row["text"]}
    identity = ("row", row["process"], row["name"], row["lane"], *(row[name] for name in (*_NUMBERS, "begin_ns", "duration_ns", "text")))
    attempt = row["attempt"]
    span = _span(row["name"], run, attempt, _hex(8, *identity), row["unix_ns"], row["duration_ns"], attributes)
    return span | {"parentSpanId": _root(run, attempt)}


def _span(
    name: str, run: str, attempt: int, span_id: str, begin_ns: int, duration_ns: int, attributes: Mapping[str, Any]
) -> dict[str, Any]:
    begin_ns = max(0, begin_ns)
    return {
        "traceId": _hex(16, "trace", run, attempt),
        "spanId": span_id,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(begin_ns),
        "endTimeUnixNano": str(begin_ns + max(0, duration_ns)),
        "attributes": _attributes(attributes),
    }


def _root(run: str, attempt: int) -> str:
    return _hex(8, "root", run, attempt)


def _hex(count: int, *parts: Any) -> str:
    """The first ``count`` bytes of a hash."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[: 2 * count]


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
    return {"stringValue": str(value)}
