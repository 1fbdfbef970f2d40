"""What stamps inside the step cost: the same step with and without them, by turns in one process, and their events.

    python benchmarks/bench_stamps.py --json benchmarks/results/stamps.json

Both programs are compiled; then pairs of steps run, the one with stamps first in every other pair. What is compared is the
median over the pairs of the ratio within a pair, so that a machine that slows down meanwhile slows both. CPU times say nothing about
GPUs, where a stamp is a kernel launch (`aot/cost.py`).
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from step_report import birth_certificate

ROOT = Path(__file__).resolve().parent.parent
MESHES = {"1": (1, ["parallel.pipe=1", "parallel.data=1", "parallel.tensor=1"]), "8": (8, [])}


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for all numbers")],
    changes: Annotated[list[str] | None, typer.Argument(help="of the experiment, such as parallel.pipe=2", show_default=False)] = None,
    devices: Annotated[str, typer.Option(help="1, or 8 virtual ones: the experiment as it is")] = "8",
    experiment: Annotated[str, typer.Option(help="what is trained")] = "quickstart",
    pairs: Annotated[int, typer.Option(min=2, help="pairs of steps")] = 40,
) -> None:
    """Measure, print, and add to the JSON file."""
    number, overrides = MESHES[devices]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={number}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    overrides = [*overrides, *(changes or ())]
    options = " ".join([*(changes or ()), f"--devices {devices} --experiment {experiment} --pairs {pairs}"])
    record = birth_certificate(ROOT, f"python benchmarks/bench_stamps.py --json PATH {options}")
    record |= {"devices": number, "overrides": overrides} | measured(experiment, overrides, pairs)
    results = json.loads(json_path.read_text()) if json_path.is_file() else {}
    json_path.write_text(json.dumps(results | {f"{Path(experiment).stem}, {devices}": record}, indent=1) + "\n")
    typer.echo(json.dumps({key: value for key, value in record.items() if key != "ratios"}, indent=1))


def measured(name: str, overrides: list[str], pairs: int) -> dict[str, Any]:
    """Seconds of steps with and without stamps, their ratios, and the share of a step that writing its stamps as events takes."""
    from step_worker import our_variant

    from megascale_jax.config.load import load_experiment

    experiments = {stamps: load_experiment(name, [*overrides, f"train.events.stamps={str(stamps).lower()}"]) for stamps in (True, False)}
    advance = {stamps: our_variant(experiment) for stamps, experiment in experiments.items()}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for run in advance.values():
        run()
    for pair in range(pairs):
        for stamps in (True, False) if pair % 2 else (False, True):
            began = time.perf_counter()
            advance[stamps]()
            seconds[stamps].append(time.perf_counter() - began)
    ratios = [stamped / plain for stamped, plain in zip(seconds[True], seconds[False], strict=True)]
    step_s = statistics.median(seconds[False])
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return {
        "step_s": step_s,
        "ratio": statistics.median(ratios),
        "ratio_error": 1.25 * (upper - lower) / 1.35 / len(ratios) ** 0.5,
        **writing(experiments[True], step_s),
        "ratios": ratios,
    }


def writing(experiment: Any, step_s: float) -> dict[str, float]:
    """Stamps of a device and step, and the share of the step that it takes to write them, details in every tenth step included."""
    import jax
    import numpy as np

    from megascale_jax.kernels.clock.api import STAMP
    from megascale_jax.observe.events import Events
    from megascale_jax.parallel.plan import DEVICE_PARTITION, make_plan
    from megascale_jax.train.stamps import StampEvents

    plan = make_plan(experiment, jax.devices())
    count = plan.executor.stamps(experiment.num_micro_batches).count
    stamps = jax.device_put(np.zeros((plan.mesh.size, count, *STAMP.shape), np.int32), plan.sharding(DEVICE_PARTITION))
    with tempfile.TemporaryDirectory() as folder:
        events = Events(Path(folder))
        writer = StampEvents(plan, events, experiment.train.events.detail_every)
        writer.write(0, stamps)
        began = time.process_time()
        for step in range(1, 101):
            writer.write(step, stamps)
        events.close()
        seconds = (time.process_time() - began) / 100
    return {"stamps_of_a_device": count, "events_of_a_step_s": seconds, "events_over_step": seconds / step_s}


if __name__ == "__main__":
    typer.run(main)
