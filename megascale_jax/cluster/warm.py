"""A training process with its imports done, which waits to be told what to train: seconds less between a crash and training.

    python -m megascale_jax.cluster.warm            # reads one line of JSON: {"arguments": [...], "environment": {...}, "log": PATH}

It is started while training goes on, with the environment of its executor, so what JAX reads while it is imported is as it will be.
"""

import importlib
import json
import os
import sys
from typing import IO

MODULES = ("jax", "optax", "grain.python", "tensorstore", "megascale_jax.cli.main", "megascale_jax.train.loop")
"""What takes long to import; nothing of it touches a device."""
COMMAND = ("-m", "megascale_jax.cli.main")
"""The command that it can become, after the interpreter."""


def request(stream: IO[bytes], arguments: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    """Tell a waiting process what to be. Raises OSError when it is gone."""
    stream.write(json.dumps({"arguments": arguments, "environment": environment, "log": log}).encode() + b"\n")
    stream.close()


def main() -> None:
    """Entry point of the process."""
    for module in MODULES:
        importlib.import_module(module)
    line = sys.stdin.buffer.readline()
    if not line:  # its executor has gone, or wants it no more
        return
    told = json.loads(line)
    descriptor = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = ["megascale", *told["arguments"]]
    importlib.import_module("megascale_jax.cli.main").main()


if __name__ == "__main__":
    main()
