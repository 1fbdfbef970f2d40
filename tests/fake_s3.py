"""An S3 of this machine: one bucket in memory, as much of the protocol as TensorStore speaks; counts requests and bytes."""

import hashlib
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape


class FakeS3:
    """Objects by key.

    ``refuse``: every request fails with that status. ``refuse_after_writes``: so many writes are taken. ``delay_s``: time of an answer.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.written: list[str] = []
        self.sent_bytes = 0
        self.under_way = self.most_under_way = 0
        self.refuse: int | None = None
        self.refuse_after_writes: int | None = None
        self.delay_s = 0.0
        self.on_refusal: Callable[[], None] = lambda: None
        self.lock = threading.Lock()


def _listing(store: FakeS3, query: dict[str, list[str]]) -> bytes:
    prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
    keys = sorted(key for key in store.objects if key.startswith(prefix) and key > after)
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(store.objects[key])}</Size>"
        f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag></Contents>"
        for key in keys
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
    ).encode()


def _respond(store: FakeS3, command: str, key: str, query: str, asked: Mapping[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
    """Status, content and headers of one request for the bucket or for an object in it."""
    there = f'"{hashlib.md5(store.objects[key]).hexdigest()}"' if key in store.objects else None
    if command == "PUT":
        if (asked.get("If-None-Match") == "*" and there) or asked.get("If-Match", there) != there:
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        if len(store.written) == store.refuse_after_writes:
            return 403, b"<Error><Code>AccessDenied</Code></Error>", {}
        store.written.append(key)
        store.objects[key] = body
        return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
    if command == "DELETE":
        store.objects.pop(key, None)
        return 204, b"", {}
    if not key:
        return 200, _listing(store, urllib.parse.parse_qs(query)), {"x_amz_bucket_region": "us-east-1"}
    if there is None:
        return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
    content, wanted = store.objects[key], asked.get("Range")
    if wanted is None:
        return 200, content, {"ETag": there}
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    begin = int(first) if first else len(content) - int(last)
    if begin >= len(content):
        return 416, b"<Error><Code>InvalidRange</Code></Error>", {}
    end = min(int(last) if last and first else len(content) - 1, len(content) - 1)
    return 206, content[begin : end + 1], {"ETag": there, "Content_Range": f"bytes {begin}-{end}/{len(content)}"}


@contextmanager
def fake_s3() -> Iterator[tuple[str, FakeS3]]:
    """Serve an empty bucket called ``bucket``; its address and its content."""
    store = FakeS3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                store.sent_bytes += len(content)
                self.wfile.write(content)

        def _handle(self) -> None:
            parsed = urllib.parse.urlsplit(self.path)
            key = urllib.parse.unquote(parsed.path).removeprefix("/bucket").lstrip("/")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with store.lock:
                store.under_way += 1
                store.most_under_way = max(store.most_under_way, store.under_way)
            time.sleep(store.delay_s)
            with store.lock:
                store.under_way -= 1
                store.requests[self.command] += 1
                if (status := store.refuse) is not None:
                    store.on_refusal()
                    return self._answer(status, b"<Error><Code>AccessDenied</Code></Error>")
                if not parsed.path.startswith("/bucket"):
                    return self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
                status, content, headers = _respond(store, self.command, key, parsed.query, self.headers, body)
                return self._answer(status, content, **headers)

        do_GET = do_PUT = do_DELETE = do_HEAD = _handle

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # clients that connect at once

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that are killed are no news."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", store
    finally:
        server.shutdown()
        server.server_close()
