"""Four jax.distributed processes, pipe 2 x data 2: killed, resumed, stopped by a signal, resumed; equal to an unbroken run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale_jax.config.load import load_experiment
from megascale_jax.data.prepared import open_prepared
from megascale_jax.data.select import prepare_if_missing
from megascale_jax.observe.metrics import read_metrics
from megascale_jax.observe.summary import read_summary
from megascale_jax.train.folder import RunFolder
from megascale_jax.train.loop import Trainer
from tests.build import TINY
from tests.train.test_loop import StopAt

ROOT = Path(__file__).parents[2]
LIMIT_S = 180
VANISH_LIMIT_S = 10
STEPS = 10
OVERRIDES = [
    "parallel.tensor=1",
    *TINY,
    f"train.steps={STEPS}",
    "train.schedule.warmup_steps=2",
    "train.evaluation.every=null",
    "train.evaluation.final_batches=1",
    "train.checkpoint.every=2",
    "train.digest_every=null",
    "train.logging.tensorboard=false",
    "train.sample_prompt=null",
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Overrides with a small corpus, and the environment of a launch."""
    folder = tmp_path_factory.mktemp("launch")
    corpus = folder / "corpus"
    corpus.mkdir()
    for index in range(30):
        (corpus / f"{index:02}.txt").write_text(f"line {index} of a small corpus, {index * index} words\n" * 12)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA", "JAX", "MEGASCALE"))}
    environment |= {
        "MEGASCALE_COMMAND": f"{sys.executable} -m megascale_jax.cli.main train",
        "MEGASCALE_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "TMPDIR": str(folder),
    }
    return [*OVERRIDES, f"train.data.source={corpus}"], environment, folder


def launch(overrides, environment, run):
    command = [str(ROOT / "launch/local.sh"), "-n", "4", "quickstart", *overrides, "--run-folder", str(run)]
    return subprocess.Popen(command, env=environment, cwd=run.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process, run, step):
    """Until metrics.jsonl has that step; fails if the run ends or takes too long."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        if (run / "metrics.jsonl").is_file() and any(line["step"] >= step for line in read_metrics(run, "train")):
            return
        if process.poll() is not None:
            raise AssertionError(f"ended early with {process.returncode}:\n{process.stdout.read()}")
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no step {step} within {LIMIT_S} s")


def losses(run):
    return [(line["step"], line["loss"]) for line in read_metrics(run, "train")]


def processes_of(run):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run).encode() in words and b"megascale_jax.cli.main" in words:
                found.append(int(entry.name))
    return found


def finish(overrides, environment, run):
    """Launch and wait for the end; the output."""
    process = launch(overrides, environment, run)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, output
    limit = time.monotonic() + VANISH_LIMIT_S
    while processes_of(run) and time.monotonic() < limit:
        time.sleep(0.05)  # the last reporter of the launcher may just be on its way out
    assert processes_of(run) == []
    return output


@pytest.fixture(scope="module")
def unbroken(setting):
    """Folder of a run of four processes that nothing disturbed."""
    overrides, environment, folder = setting
    finish(overrides, environment, folder / "unbroken")
    return folder / "unbroken"


def test_four_processes_equal_an_unbroken_run_through_a_kill_and_a_signal(setting, unbroken):
    overrides, environment, folder = setting
    run = folder / "broken"

    killed = launch(overrides, environment, run)
    wait_for_step(killed, run, 3)
    for pid in processes_of(run):
        os.kill(pid, signal.SIGKILL)
    killed.communicate(timeout=LIMIT_S)
    assert killed.returncode != 0

    signalled = launch(overrides, environment, run)
    wait_for_step(signalled, run, 5)
    signalled.send_signal(signal.SIGTERM)
    output = signalled.communicate(timeout=LIMIT_S)[0]
    assert signalled.returncode == 0, output
    # On a fast machine the last step may be done before the signal arrives.
    assert "-n 4 quickstart" in output or read_summary(run) is not None, output

    finish(overrides, environment, run)
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    assert losses(run) == losses(unbroken)
    assert read_summary(run).validation_loss == read_summary(unbroken).validation_loss


def test_four_processes_equal_one_process_with_four_devices(setting, unbroken):
    """Sums over more than two ranks may be ordered differently, hence the tolerance."""
    overrides, environment, folder = setting
    one = folder / "one"
    experiment = load_experiment("quickstart", overrides)
    data = prepare_if_missing(experiment.train.data, experiment.model.sequence_length, Path(environment["MEGASCALE_CACHE"]) / "data", False)
    Trainer(experiment, RunFolder(one), open_prepared(data)).run(StopAt())
    four = dict(losses(unbroken))
    assert [step for step, _ in losses(one)] == sorted(four)
    assert [loss for _, loss in losses(one)] == pytest.approx([four[step] for step in sorted(four)], rel=1e-6, abs=0)
