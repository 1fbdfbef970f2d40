"""One device count of the step benchmark, in a process of its own; `bench_step.py` starts it and talks to it in JSON lines.

The first line in says what to build; each variant takes one step, compiled in it, and says ``{"variant", "loss", "start_s"}``.
Every further line in asks for that many rounds; a round is one step of every variant, each time in another order, and one
line comes out per step: ``{"variant", "wall_s", "cpu_s", "loss"}``. The CPU clock is the process's, all threads. Each
answer ends with ``{"done": true}``.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from megascale_jax.config.load import load_experiment
from megascale_jax.config.schema import Experiment
from megascale_jax.optim.schedule import learning_rate
from megascale_jax.parallel.plan import DEVICE_PARTITION, make_plan
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch

Advance = Callable[[], float]


def main() -> None:
    """Serve one benchmark over stdin and stdout."""
    request = json.loads(sys.stdin.readline())
    variants: dict[str, Advance] = {}
    for item in request["variants"]:
        experiment = load_experiment(item["experiment"], item["overrides"])
        build = plain_variant if item["implementation"] == "plain" else our_variant
        began_s = time.perf_counter()
        variants[item["variant"]] = build(experiment)
        reply(variant=item["variant"], loss=variants[item["variant"]](), start_s=time.perf_counter() - began_s)
    reply(done=True)
    for line in sys.stdin:
        for round_index in range(int(line)):
            for name in rotated(list(variants), round_index):
                reply(variant=name, **measured(variants[name]))
        reply(done=True)


def our_variant(experiment: Experiment) -> Advance:
    """The package's step on the first devices of this process."""
    plan = make_plan(experiment, jax.devices())
    steps = make_steps(experiment, plan)
    state = initial_state(plan, steps.optimizer, experiment.train.seed)
    votes = jax.device_put(np.zeros(plan.mesh.size, np.int32), plan.sharding(DEVICE_PARTITION))
    batches = batches_of(experiment)

    def advance() -> float:
        nonlocal state
        state, metrics = steps.train(state, place_batch(plan, next(batches)), votes)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return advance


def plain_variant(experiment: Experiment) -> Advance:
    """Plain JAX on the first device, from the parameters that the package would start with."""
    from plain_step import PlainStep

    plan = make_plan(experiment, jax.devices()[:1])
    steps = make_steps(experiment, plan)
    logical = jax.jit(plan.to_logical)(initial_state(plan, steps.optimizer, experiment.train.seed).params)
    config = experiment.train
    plain = PlainStep(experiment, learning_rate(config.schedule, config.optimizer.learning_rate, config.steps))
    device = jax.devices()[0]
    # committed to the device, as the step's results are: else the second step would be compiled again
    state = jax.device_put(plain.init({name: np.asarray(value) for name, value in logical.items()}), device)
    batches = batches_of(experiment)

    def advance() -> float:
        nonlocal state
        batch = next(batches)
        state, loss = plain.step(state, *(jax.device_put(batch[key][0], device) for key in ("tokens", "targets")))
        jax.block_until_ready(state)
        return float(loss)

    return advance


def batches_of(experiment: Experiment) -> Iterator[dict[str, np.ndarray]]:
    """Random tokens, one document per row, every target valid: the same sequence for every variant of an experiment."""
    model, rows = experiment.model, experiment.train.global_batch_size
    random = np.random.default_rng(experiment.train.seed)
    m = experiment.num_micro_batches
    while True:
        text = random.integers(0, model.vocab_size, (m, rows // m, model.sequence_length + 1), dtype=np.int32)
        shape = (m, rows // m, model.sequence_length)
        yield {
            "tokens": text[..., :-1],
            "targets": text[..., 1:],
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(model.sequence_length, dtype=np.int32), shape),
        }


def measured(advance: Advance) -> dict[str, float]:
    """Wall and CPU time of one step."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    loss = advance()
    return {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s, "loss": loss}


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names, starting at another one each round."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def reply(**content: Any) -> None:
    """One line to the benchmark."""
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
