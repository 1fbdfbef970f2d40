"""Runs a tick plan: turns its phases into barriers.

A phase's operations read values that passed one barrier together, and their results leave through another; a token
through all of them keeps the phases in order even where no value connects two of them. The token must be used in the end:
XLA drops what a barrier hands to nobody, and with it the order. XLA's scheduler may then
choose nothing but where inside a phase a transfer starts and ends. Element-wise glue runs outside, when something needs
its result. Weights and accumulators never pass a barrier: operations take them from the tick they are bound to.

Time is stamped where a tick begins, when a phase's compute is done, and when its collectives are as well, so that computing and
waiting are told apart; `stamps.py` says which stamp is which. Glue runs after the stamp of the phase that it had to wait for. A CPU
device runs one operation after the other, so its collectives hide under nothing: they come behind the compute and its stamp, or what
they wait for others would be counted as computing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax.kernels.clock.api import Stamps
from megascale_jax.parallel.pipeline.operation import Operation
from megascale_jax.parallel.pipeline.phases import TickPlan

Execute = Callable[[Operation, tuple[Any, ...]], tuple[Any, ...]]
"""An operation of the values it reads, giving those it writes."""


def run_phases(
    plan: TickPlan, execute: Execute, values: Mapping[str, Any], outputs: Iterable[str], stamps: Stamps
) -> tuple[dict[str, Any], jax.Array]:
    """Run a tick's operations on ``values``: the ``outputs`` by name, and a zero to be added to something that is used."""
    known = dict(values)
    writers = {value: operation for operation in plan.operations for value in operation.writes}
    sinks = [operation for operation in plan.operations if operation.kind == "glue" and not operation.writes]
    heavy = {value for operation in plan.operations if operation.kind != "glue" for value in operation.writes}
    token = jnp.float32(0)

    def reachable(value: str) -> bool:
        return value in known or (value not in heavy and all(map(reachable, writers[value].reads)))

    def leaves(operation: Operation) -> set[str]:
        """Known values that an operation reads, or glue in front of it."""
        missing = [name for name in operation.reads if name not in known]
        return {name for name in operation.reads if name in known}.union(*(leaves(writers[name]) for name in missing))

    def run(operation: Operation) -> None:
        for name in operation.reads:
            if name not in known:
                run(writers[name])
        with jax.named_scope(operation.name):
            results = execute(operation, tuple(known[name] for name in operation.reads))
        known.update(zip(operation.writes, results, strict=True))

    def run_glue(glue: Iterable[Operation]) -> None:
        """Behind the last stamp: it would be counted as waiting otherwise."""
        glue = list(glue)
        if stamps.clock is not None:
            known.update(stamps.tie({name: known[name] for name in sorted(set().union(*map(leaves, glue)))}))
        for operation in glue:
            if any(name not in known for name in operation.writes) or not operation.writes:
                run(operation)

    def run_sinks() -> None:
        ready = [sink for sink in sinks if all(map(reachable, sink.reads))]
        run_glue(ready)
        sinks[:] = [sink for sink in sinks if sink not in ready]

    run_sinks()
    stamps.take(token)
    for phase in plan.phases:
        chosen = [plan.by_name[name] for name in phase.names]
        run_glue(writers[name] for operation in chosen for name in operation.reads if name not in known)
        read = {name: known[name] for operation in chosen for name in operation.reads}
        token, read = stamps.tie((token, read))
        written: dict[str, Any] = {}
        if stamps.is_of_host:
            chosen.sort(key=lambda operation: operation.name != phase.compute)
        for operation in chosen:
            with jax.named_scope(operation.name):
                results = execute(operation, tuple(read[name] for name in operation.reads))
            written.update(zip(operation.writes, results, strict=True))
            if operation.name == phase.compute and phase.collectives:
                stamps.take(results)
                if stamps.is_of_host:
                    read = stamps.tie(read)
        token, written = stamps.mark(stamps.tie((token, written)))
        known.update(written)
        run_sinks()
    assert not sinks, f"never ran: {[operation.name for operation in sinks]}"
    run_glue(writers[name] for name in outputs if name not in known)
    return {name: known[name] for name in outputs}, token
