"""What the driver tells Prometheus and the events of the run."""

import json
import urllib.request
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megascale_jax.cluster.exporter import ADDRESS, Rates, exported
from megascale_jax.cluster.state import Shape
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.load import load_experiment
from megascale_jax.model.flops import mfu
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import Events
from tests.cluster.simulated import STEP_S, World
from tests.cluster.test_driver import CONFIG

LIMIT_S = 30
RATES = Rates(1000, lambda tokens_per_s, nodes: tokens_per_s / nodes / 2_500)


def scraped(port):
    with urllib.request.urlopen(f"http://{ADDRESS}:{port}/metrics", timeout=LIMIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def report_steps(world):
    for name, beat in list(world.driver.beats.items()):
        reports = tuple(one.model_copy(update={"step_s": STEP_S, "loss": 2.5}) for one in beat.processes)
        world.driver.beats[name] = beat.model_copy(update={"processes": reports})


def test_numbers_are_those_of_the_job(tmp_path):
    world = World(tmp_path, CONFIG)
    with exported(world.driver, RATES, 0, world.lines.append) as port:
        before = scraped(port)
        assert before["megascale_phase", "replacing"] == 1 and ("megascale_loss",) not in before
        world.until_step(12)
        world.crash("node-2")
        world.until_step(20)
        after = scraped(port)
        assert (after["megascale_step",], after["megascale_steps",]) == (world.driver.step, world.total_steps)
        assert (after["megascale_phase", "running"], after["megascale_phase", "replacing"]) == (1, 0)
        assert (after["megascale_nodes", "assigned"], after["megascale_nodes", "ready"], after["megascale_incidents_total",]) == (4, 2, 1)
        assert (after["megascale_attempt",], after["megascale_saved_step",]) == (2, world.driver.state.saved_step)
        report_steps(world)
        rates = scraped(port)
        assert (rates["megascale_loss",], rates["megascale_tokens_per_second",], rates["megascale_mfu",]) == (
            2.5,
            1000 / STEP_S,
            0.1 / STEP_S,
        )
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_utilisation_is_of_the_devices_that_train_now(tmp_path):
    experiment = load_experiment("gpt-13b", ["system=h100", "parallel.data=2"])
    devices, peak = MeshShape.of(experiment.parallel).size, experiment.system.peak_tflops
    shapes = (Shape(num_nodes=2), Shape(num_nodes=1, overrides=("parallel.data=1",)))
    world = World(tmp_path, CONFIG.model_copy(update={"shrink": True, "wait_s": 10.0}), nodes=2, spares=0, shapes=shapes)
    with exported(world.driver, Rates.of(experiment, 2), 0, world.lines.append) as port:
        for step, present in ((12, devices), (20, devices // 2)):
            world.until_step(step)
            report_steps(world)
            rate = experiment.tokens_per_step / STEP_S
            assert scraped(port)["megascale_mfu",] == pytest.approx(mfu(experiment.model, rate, present, peak))
            world.power_off("node-1")


def test_utilisation_is_unknown_without_a_peak():
    assert Rates.of(load_experiment("quickstart", []), 1).mfu is None


def test_a_port_that_is_taken_costs_the_metrics_and_nothing_else(tmp_path):
    world = World(tmp_path, CONFIG)
    start = partial(exported, world.driver, RATES, say=world.lines.append)
    with start(port=0) as port, start(port=port) as other:
        assert other is None and f"no metrics at {ADDRESS}:{port}" in world.lines[-1]


def test_decisions_and_phases_are_events(tmp_path):
    events = Events(tmp_path / "events", role="driver")
    (tmp_path / "job").mkdir()
    world = World(tmp_path / "job", CONFIG, events=events)
    world.until_step(12)
    world.crash("node-2")
    world.until_step(20)
    events.close()
    with read_events(tmp_path) as store:
        rows = store.sql("select * from events where lane = 'driver' order by begin_ns").to_pylist()
    spans = [row["name"] for row in rows if not row["is_instant"]]
    assert spans == ["replacing", "restoring", "running", "suspended", "diagnosing", "restoring"], "one of no length is none"
    told = [json.loads(row["text"]) for row in rows if row["is_instant"]]
    assert told == [event.model_dump(mode="json") for event in world.journal.events()]
