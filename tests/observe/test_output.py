"""Words that cannot be written are lost, and nothing else is."""

import errno
import io
import os
import subprocess
import sys

import pytest

from megascale_jax.observe.output import Tolerant

SAYS = """
import sys
from megascale_jax.observe.output import outlive_full_disks
if sys.argv[1] == "tolerant":
    outlive_full_disks()
from rich.console import Console
Console().print("nobody reads this")
print("nor this", flush=True)
sys.exit(7)
"""


class Broken(io.StringIO):
    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def flush(self) -> None:
        self.write("")


@pytest.mark.parametrize("how", ["tolerant", "strict"])
def test_a_process_goes_on_though_its_log_is_on_a_full_disk(how):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ended = subprocess.run([sys.executable, "-c", SAYS, how], stdout=full, stderr=subprocess.PIPE, check=False, text=True)
    assert (ended.returncode == 7) == (how == "tolerant"), ended.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_the_disk_refuses_is_lost(number):
    stream = Tolerant(Broken(number))
    assert stream.write("abc") == 3
    stream.writelines(["a", "b"])
    stream.flush()


def test_other_errors_are_errors_and_good_streams_are_as_they_are():
    with pytest.raises(BrokenPipeError):
        Tolerant(Broken(errno.EPIPE)).write("a")
    with pytest.raises(BrokenPipeError):
        Tolerant(Broken(errno.EPIPE)).flush()
    good = io.StringIO()
    stream = Tolerant(good)
    stream.write("ab")
    assert good.getvalue() == "ab" and not stream.isatty()
