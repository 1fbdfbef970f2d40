"""A relay between nodes and their driver that a drill can break: what a partition of the control network looks like from both ends.

Bytes go through as they are, so TLS and tokens stay those of driver and executor. While a process is cut off, nothing that it sends
arrives and nothing comes back, but no connection is closed either, as when a switch has died; afterwards what was on its way arrives late.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_CONNECT_S = 5.0
_START_S = 10.0
_CHUNK_BYTES = 1 << 16


class Proxy:
    """Listens on ``address`` of this machine and relays to ``target``, in a thread of its own. Connections of processes can be cut off."""

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1"):
        """Raises OSError when it cannot listen."""
        self._target = target
        self._blocked: set[int] = set()
        self._open: dict[int, asyncio.Event] = {}
        """By the client's port: set while bytes may pass."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._relay, host, 0), self._loop).result(_START_S)
        self._server = server
        self.address: tuple[str, int] = server.sockets[0].getsockname()[:2]

    @contextmanager
    def cut_off(self, pid: int) -> Iterator[None]:
        """Nothing of a process passes, on connections that it has or makes."""
        self._change(pid, blocked=True)
        try:
            yield
        finally:
            self._change(pid, blocked=False)

    def close(self) -> None:
        """End the relay and all that passes through it."""

        async def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)

    def _change(self, pid: int, *, blocked: bool) -> None:
        async def change() -> None:
            (self._blocked.add if blocked else self._blocked.discard)(pid)
            ports = _ports_of(pid)
            for port, gate in self._open.items():
                if port in ports:
                    gate.clear() if blocked else gate.set()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(_START_S)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        gate = self._open[port] = asyncio.Event()
        if not any(port in _ports_of(pid) for pid in self._blocked):
            gate.set()
        theirs: asyncio.StreamWriter | None = None
        try:
            await gate.wait()
            async with asyncio.timeout(_CONNECT_S):
                there, theirs = await asyncio.open_connection(*self._target)
            ways = [asyncio.ensure_future(way) for way in (_pass(reader, theirs, gate), _pass(there, writer, gate))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        except (OSError, TimeoutError):
            pass  # the driver is away: the node sees its connection end, and tries again
        finally:
            del self._open[port]
            for end in (writer, theirs):
                if end is not None:
                    end.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    with suppress(OSError):
        while content := await reader.read(_CHUNK_BYTES):
            await gate.wait()
            writer.write(content)
            await writer.drain()


def _ports_of(pid: int) -> set[int]:
    try:
        return {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.laddr}
    except psutil.Error:
        return set()
