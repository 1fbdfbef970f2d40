"""A driven job's numbers for Prometheus, at 127.0.0.1 alone: whoever is on the driver's machine may read them, and nobody may do more.

From elsewhere they are read through a tunnel (``ssh -L``) or by a Prometheus agent beside the driver: there is no other address, because
this door knows neither TLS nor tokens, as the control link does. Numbers are taken from the driver's state when they are asked for.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megascale_jax.cluster.driver import Driver
from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.schema import Experiment
from megascale_jax.model.flops import mfu

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Rates:
    """What turns the time of a step into rates. ``mfu``: of so many tokens/s on so many nodes, a fraction; ``None``: the devices' peak is
    not known.
    """

    tokens_per_step: int
    mfu: Callable[[float, int], float] | None

    @classmethod
    def of(cls, experiment: Experiment, nodes: int) -> "Rates":
        """Those of an experiment whose mesh lies on ``nodes`` nodes at its full size; the devices of each stay the same at any other."""
        peak, per_node = experiment.system.peak_tflops, MeshShape.of(experiment.parallel).size // nodes
        if peak is None:
            return cls(experiment.tokens_per_step, None)
        return cls(experiment.tokens_per_step, lambda rate, seats: mfu(experiment.model, rate, seats * per_node, peak))


class JobCollector(Collector):
    """Gauges of one job; asked by the server's thread."""

    def __init__(self, driver: Driver, rates: Rates):
        self._driver, self._rates = driver, rates

    def collect(self) -> Iterator[Metric]:
        """All numbers that are known now."""
        driver, state = self._driver, self._driver.state
        yield _gauge("step", "newest step that every rank has done", driver.step)
        yield _gauge("steps", "optimizer steps of the whole run", driver.total_steps)
        yield _gauge("saved_step", "newest checkpoint on storage", state.saved_step)
        yield _gauge("attempt", "number of the present start of all processes", state.attempt)
        yield _states("phase", "phase of the job: 1 for the present one", "phase", {one.value: int(one == state.phase) for one in Phase})
        nodes = Counter(node.status for node in state.nodes.values())
        yield _states("nodes", "nodes by status", "status", {one.value: nodes[one] for one in NodeStatus})
        yield CounterMetricFamily("megascale_incidents", "interruptions of the training", value=len(state.incidents))
        yield _gauge("alarms", "things that a person should look at", len(state.alarms))
        yield from self._of_processes()

    def _of_processes(self) -> Iterator[Metric]:
        reports = [process for beat in list(self._driver.beats.values()) for process in beat.processes]
        losses = [process.loss for process in reports if process.loss is not None]
        times = [process.step_s for process in reports if process.step_s is not None and process.step_s > 0]
        if losses:
            yield _gauge("loss", "of the newest step, nats per token", statistics.median(losses))
        if times:
            step_s, rates = statistics.median(times), self._rates
            tokens_per_s = rates.tokens_per_step / step_s
            yield _gauge("step_seconds", "moving average of the time of a step", step_s)
            yield _gauge("tokens_per_second", "of the whole job, padding included", tokens_per_s)
            if rates.mfu is not None:
                yield _gauge("mfu", "model FLOPs utilisation, a fraction", rates.mfu(tokens_per_s, len(self._driver.state.seats)))


@contextmanager
def exported(driver: Driver, rates: Rates, port: int, say: Callable[[str], None]) -> Iterator[int | None]:
    """Serve the numbers in here; the port, ``None`` when it cannot be had: the job goes on without. ``port`` 0: any."""
    registry = CollectorRegistry()
    registry.register(JobCollector(driver, rates))
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as error:
        say(f"no metrics at {ADDRESS}:{port}: {error.strerror}; give another --metrics-port")
        yield None
        return
    try:
        say(f"metrics at http://{ADDRESS}:{server.server_port}/metrics")
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"megascale_{name}", help_text, value=value)


def _states(name: str, help_text: str, label: str, numbers: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"megascale_{name}", help_text, labels=[label])
    for state, number in numbers.items():
        family.add_metric([state], number)
    return family
