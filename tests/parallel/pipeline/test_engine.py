"""In which order a phase's compute, its stamp and its collectives come."""

import jax.numpy as jnp
import pytest

from megascale_jax.parallel.pipeline.engine import run_phases
from megascale_jax.parallel.pipeline.operation import collective, compute
from megascale_jax.parallel.pipeline.phases import Phase, TickPlan


class Told:
    """Stamps of which each is a word in a list."""

    clock = None

    def __init__(self, *, is_of_host: bool):
        self.is_of_host, self.words = is_of_host, []

    def take(self, after):
        self.words.append("stamp")

    def tie(self, values):
        self.words.append("tie")
        return values

    def mark(self, values):
        self.take(values)
        return self.tie(values)


@pytest.mark.parametrize(
    ("is_of_host", "phase"),
    [(True, ["F.in", "stamp", "tie", "G.gather", "tie", "stamp"]), (False, ["G.gather", "F.in", "stamp", "tie", "stamp"])],
)
def test_on_a_cpu_collectives_wait_for_the_stamp_of_the_compute(is_of_host, phase):
    plan = TickPlan((collective("G.gather", "tensor", "x", "y"), compute("F.in", ["z"], "w")), (Phase("F.in", ("G.gather",)),))
    stamps = Told(is_of_host=is_of_host)

    def execute(operation, values):
        stamps.words.append(operation.name)
        return values

    results, _ = run_phases(plan, execute, {"x": jnp.float32(1), "z": jnp.float32(2)}, ["y", "w"], stamps)
    assert (results["y"], results["w"]) == (1, 2)
    begin = stamps.words.index(phase[0])
    assert stamps.words[begin : begin + len(phase)] == phase
