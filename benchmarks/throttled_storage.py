"""A folder behind HTTP at a limited rate over all clients: shared storage that is slower than everything else."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_PIECE = 256 << 10


class Throttle:
    """Lets so many bytes a second pass, over all threads."""

    def __init__(self, bytes_per_s: float):
        self._rate, self._lock, self._free_at = bytes_per_s, threading.Lock(), time.monotonic()
        self.passed = 0

    def take(self, num_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._rate
            self.passed += num_bytes
            pause = self._free_at - time.monotonic()
        if pause > 0:
            time.sleep(pause)


@contextmanager
def throttled(folder: Path, bytes_per_s: float) -> Iterator[tuple[str, Throttle]]:
    """Serve a folder; its address, and the throttle that counts what went out."""
    throttle = Throttle(bytes_per_s)

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            file = folder / self.path.lstrip("/")
            if not file.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = file.stat().st_size
            first, last = 0, size - 1
            if (wanted := self.headers.get("Range")) is not None:
                begin, _, end = wanted.removeprefix("bytes=").partition("-")
                first, last = (int(begin), min(int(end), size - 1) if end else size - 1) if begin else (size - int(end), size - 1)
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
            self.end_headers()
            with file.open("rb") as stream:
                stream.seek(first)
                left = last - first + 1
                while left:
                    piece = stream.read(min(left, _PIECE))
                    throttle.take(len(piece))
                    self.wfile.write(piece)
                    left -= len(piece)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", throttle
    finally:
        server.shutdown()
        server.server_close()
