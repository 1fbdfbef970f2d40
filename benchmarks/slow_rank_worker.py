"""`megascale` of a rank, one of which has more to do in each of its backward units: `python slow_rank_worker.py RANK SECONDS ARGUMENTS...`.

All ranks compile the same program, in which each asks whether it is the one; of 0 seconds none is. It spins: one that slept would be
given the core sooner than its peers when it wakes, and make up for half of the time. A core has the same ranks of each stage.
"""

import os
import sys
import time

import jax

from megascale_jax.cli.main import main
from megascale_jax.parallel.pipeline import tick as ticks
from megascale_jax.parallel.pipeline.tick import Tick


def slow_backward(is_slow: bool, more_s: float) -> None:
    """From now on the last phase of each backward unit of this process takes so much longer."""

    def spin(value):
        until = time.perf_counter() + more_s if is_slow else 0.0
        while time.perf_counter() < until:
            pass
        return value

    def late(self, place, number, g_BSD):
        return Tick.input_gradient_out(self, place, number, jax.pure_callback(spin, jax.ShapeDtypeStruct(g_BSD.shape, g_BSD.dtype), g_BSD))

    ticks._METHODS["B.dout"] = late  # pyright: ignore[reportIndexIssue]


if __name__ == "__main__":
    rank, seconds, own = int(sys.argv.pop(1)), float(sys.argv.pop(1)), int(os.environ["MEGASCALE_PROCESS_ID"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[own % len(cores)]})
    slow_backward(own == rank and seconds > 0, seconds)
    main()
