"""Processes that work behind a training and must not be felt by it."""

import contextlib
import os

import psutil


def lowest_priority() -> None:
    """Give way to everything else on this host, on the CPU and, where the kernel lets us, on the disk."""
    os.nice(19)
    with contextlib.suppress(OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
