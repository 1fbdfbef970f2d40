"""The relay that a drill cuts: bytes as they are, late but none lost, and only of the process that is meant."""

import os
import select
import socket
import subprocess
import sys
import threading

import pytest

from megascale_jax.cluster.proxy import Proxy

CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as link:
    print("here", flush=True)
    for line in sys.stdin:
        link.sendall(line.encode())
        print(link.recv(100).decode(), end="", flush=True)
"""


@pytest.fixture
def echo():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(link: socket.socket) -> None:
            with link:
                while content := link.recv(100):
                    link.sendall(content)

        def accept() -> None:
            while True:
                try:
                    link, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(link,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()


@pytest.fixture
def proxy(echo):
    made = Proxy(echo)
    yield made
    made.close()


def test_a_process_that_is_cut_off_is_not_heard_until_it_is_again(proxy):
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *map(str, proxy.address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "here\n"
        other.stdin.write("one\n")
        assert other.stdout.readline() == "one\n"
        with socket.create_connection(proxy.address, timeout=5.0) as own:
            with proxy.cut_off(other.pid):
                other.stdin.write("two\n")
                own.sendall(b"mine")
                assert own.recv(100) == b"mine", "another process is not cut off"
                assert not select.select([other.stdout], [], [], 0.2)[0]
            assert other.stdout.readline() == "two\n", "what was on its way arrives late"
        other.stdin.close()


def test_a_connection_that_is_made_while_cut_off_waits(proxy):
    with proxy.cut_off(os.getpid()), socket.create_connection(proxy.address, timeout=0.3) as link:
        link.sendall(b"x")
        with pytest.raises(TimeoutError):
            link.recv(1)
    with socket.create_connection(proxy.address, timeout=5.0) as link:
        link.sendall(b"x")
        assert link.recv(1) == b"x"


def test_without_a_driver_the_connection_ends():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        target = nobody.getsockname()
    proxy = Proxy(target)
    try:
        with socket.create_connection(proxy.address, timeout=5.0) as link:
            assert link.recv(1) == b""
    finally:
        proxy.close()
