"""Runs a command that the kernel kills when the process that started it dies, however that ends.

    python -I -S die_with_parent.py PARENT_PID COMMAND [ARGUMENT...]

It is executed as a file with nothing but the standard library, which takes some 30 ms, and then *becomes* the command, so its process
number stays. The kernel counts the death of the *thread* that started it. A parent that died before the kernel was asked is noticed too.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command. Exits with 127, and says why, when it cannot be run."""
    parent, *command = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit("the process that started this one is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
