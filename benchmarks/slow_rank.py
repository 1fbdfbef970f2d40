"""A rank of eight that is slow in its backward pass alone: whether it is named, and how often a healthy one is.

    python benchmarks/slow_rank.py --json benchmarks/results/slow_rank.json

Runs the real trainer as eight `jax.distributed` processes (pipe 2 x data 2 x tensor 2): first healthy, then with one rank that has more
to do in every backward unit, for a share of what the unit took before. Both runs are cut into windows of steps, each is judged as
`megascale analyze` does. All ranks share this machine's cores, so their times vary far more than those of GPUs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from step_report import birth_certificate

from megascale_jax.views.slow_devices import find_slow
from megascale_jax.views.step_times import StepTimes, read_step_times

ROOT = Path(__file__).resolve().parent.parent
RANKS, UNTAUGHT = 8, 3
"""Processes, and first steps that are left out: they compile."""
SMALL = (
    "parallel.virtual_stages=1",
    "train.global_batch_size=8",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.mlp_size=512",
    "model.window=64",
    "model.sequence_length=128",
    "train.evaluation.every=null",
    "train.evaluation.final_batches=1",
    "train.checkpoint.every=100000",
    "train.digest_every=null",
    "train.logging.tensorboard=false",
    "train.sample_prompt=null",
    "train.events.detail_every=1000",
)


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for all numbers")],
    windows: Annotated[int, typer.Option(min=1, help="of the healthy run")] = 100,
    slow_windows: Annotated[int, typer.Option(min=1, help="of the run with a slow rank")] = 25,
    steps: Annotated[int, typer.Option(min=8, help="of a window")] = 40,
    rank: Annotated[int, typer.Option(min=0, max=RANKS - 1, help="the slow one")] = 5,
    share: Annotated[float, typer.Option(min=0.0, help="of a backward unit that it takes longer")] = 0.15,
) -> None:
    """Run both, judge, print, write."""
    options = f"--windows {windows} --slow-windows {slow_windows} --steps {steps} --rank {rank} --share {share:g}"
    record = birth_certificate(ROOT, f"python benchmarks/slow_rank.py {options} --json PATH")
    with tempfile.TemporaryDirectory(prefix="slow-rank-", ignore_cleanup_errors=True) as folder:
        healthy = trained(Path(folder) / "healthy", windows * steps, rank, 0.0)
        backward_s = float(np.nanmedian(healthy.computed["backward"]))
        more_s = share * backward_s / units_of_a_step()
        slow = trained(Path(folder) / "slow", slow_windows * steps, rank, more_s)
    record |= {"share": share, "slow_rank": rank, "steps_of_a_window": steps, "step_s": float(np.nanmedian(healthy.whole))}
    record |= {"backward_s": backward_s, "more_of_a_unit_s": more_s, "healthy": judged(healthy, steps), "slow": judged(slow, steps)}
    excess = find_slow(slow).excess["backward"].ravel()
    record["slow"] |= {"excess_of_all_steps": dict(zip(map(str, slow.ranks), excess.tolist(), strict=True))}
    # all ranks end their steps together: the time of a step tells nobody apart
    record["slow"]["step_s_by_rank"] = np.nanmedian(slow.whole, axis=0).ravel().tolist()
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    typer.echo(json.dumps(record, indent=1))


def trained(folder: Path, steps: int, rank: int, more_s: float) -> StepTimes:
    """Times of all steps of a run but the first ones. Raises CalledProcessError when it fails."""
    folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA", "JAX", "MEGASCALE"))}
    worker = Path(__file__).with_name("slow_rank_worker.py")
    environment |= {
        "MEGASCALE_COMMAND": f"{sys.executable} {worker} {rank} {more_s:.9f} train",
        "MEGASCALE_CACHE": str(folder.parent / "cache"),
        "MEGASCALE_KEEPER_IDLE_S": "5",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
    }
    run = folder / "run"
    command = [str(ROOT / "launch/local.sh"), "-n", str(RANKS), "quickstart", *SMALL, f"train.steps={steps + UNTAUGHT}"]
    with (folder / "log").open("wb") as log:
        done = subprocess.run([*command, "--run-folder", str(run)], env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"the run ended with {done.returncode}:\n{(folder / 'log').read_text(errors='replace')[-3000:]}")
    return read_step_times(run, (UNTAUGHT, steps + UNTAUGHT))


def units_of_a_step() -> int:
    """Backward units of a device."""
    from megascale_jax.config.load import load_experiment

    experiment = load_experiment("quickstart", list(SMALL))
    assert experiment.parallel.virtual_stages == 1, "a chunk a stage"
    return experiment.num_micro_batches


def judged(times: StepTimes, steps: int) -> dict[str, Any]:
    """How often which rank was named, in windows of so many steps and over all of them."""
    named: Counter[str] = Counter()
    alarms = 0
    windows = times.steps.size // steps
    for window in range(windows):
        found = find_slow(cut(times, slice(window * steps, (window + 1) * steps))).devices
        named.update({f"rank {one.rank} {one.optype}" for one in found})
        alarms += bool(found)
    whole = [f"rank {one.rank} {one.optype}: {one.excess:.1%}" for one in find_slow(times).devices]
    return {"windows": windows, "windows_that_name_anybody": alarms, "named": dict(named), "all_steps": whole}


def cut(times: StepTimes, part: slice) -> StepTimes:
    """Some of the steps."""
    arrays = {name: {key: value[part] for key, value in getattr(times, name).items()} for name in ("computed", "waits")}
    return replace(times, steps=times.steps[part], idle=times.idle[part], whole=times.whole[part], **arrays)


if __name__ == "__main__":
    typer.run(main)
