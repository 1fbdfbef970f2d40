"""`megascale` of a rank, one of which sleeps in each of its backward units: `python slow_rank_worker.py RANK SECONDS ARGUMENTS...`.

All ranks compile the same program, in which each asks whether it is the one; of 0 seconds none sleeps.
"""

import os
import sys
import time

import jax

from megascale_jax.cli.main import main
from megascale_jax.parallel.pipeline import tick as ticks
from megascale_jax.parallel.pipeline.tick import Tick


def slow_backward(is_slow: bool, sleep_s: float) -> None:
    """From now on the last phase of each backward unit of this process takes so much longer."""

    def pause(value):
        if is_slow:
            time.sleep(sleep_s)
        return value

    def late(self, place, number, g_BSD):
        return Tick.input_gradient_out(self, place, number, jax.pure_callback(pause, jax.ShapeDtypeStruct(g_BSD.shape, g_BSD.dtype), g_BSD))

    ticks._METHODS["B.dout"] = late  # pyright: ignore[reportIndexIssue]


if __name__ == "__main__":
    rank, seconds = int(sys.argv.pop(1)), float(sys.argv.pop(1))
    slow_backward(os.environ["MEGASCALE_PROCESS_ID"] == str(rank) and seconds > 0, seconds)
    main()
