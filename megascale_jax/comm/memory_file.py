"""Memory with a descriptor and no name, to be handed to other processes of a host.

The kernel frees it with its last holder, however that one ended, so nothing has to be cleaned up; it counts against nobody's ``/dev/shm``.
All of it is taken when it is made: too little memory is an error then, never a SIGBUS at the first touch later. No JAX.
"""

import errno
import os
import tempfile

import psutil

RESERVE_BYTES = 256 << 20
"""Memory that is left to others: where it is taken too, the kernel ends some process instead of refusing."""


def make_memory_file(name: str, num_bytes: int) -> int:
    """Descriptor of ``num_bytes`` of zeros; closed in a process that this one starts. ``name`` shows in ``/proc``.

    Raises OSError when so much memory is not free.
    """
    if (free := psutil.virtual_memory().available) < num_bytes + RESERVE_BYTES:
        raise OSError(errno.ENOMEM, f"{num_bytes:,} bytes do not fit into the memory of this host, of which {free:,} are free")
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    else:  # a Python built for an old C library
        with tempfile.TemporaryFile(prefix=name, dir="/dev/shm") as file:
            descriptor = os.dup(file.fileno())
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
