"""Slow nodes of a simulated job as the driver's governance meets them: windows in which they are slow, and checks that find nothing.

The paper's single-GPU tests did not reveal them (section 6.3), so the checks of an isolated node come out clean here.
"""

from collections.abc import Iterator

import numpy as np

from megascale_jax.cluster.state import Judged, Rechecked, SlowPass, SlowWindow, State
from megascale_jax.sim.faults.case import SECOND_NS, Case, ns


class SlowWatch:
    """Which nodes are slow, and what is seen of it. ``slow``: names; ``seed``: of the machines that come later."""

    def __init__(self, case: Case, slow: set[str], seed: int):
        self._case, self._slow, self._random = case, slow, np.random.default_rng([seed, 1])
        self._acts = case.slow_nodes is not None and case.cluster.slow_nodes.action == "act"

    def has_new_machine(self, name: str) -> None:
        """Another machine has the name: it may be slow, too."""
        self._slow.discard(name)
        if self._case.slow_nodes is not None and self._random.random() < self._case.slow_nodes.share:
            self._slow.add(name)

    def longer(self, state: State) -> float:
        """How much longer a step takes than without slow nodes, a factor."""
        if self._case.slow_nodes is None or not self._slow or self._slow.isdisjoint(state.seats):
            return 1.0
        return 1.0 + self._case.slow_nodes.step_cost

    def looks_ns(self, state: State, cycle_ns: int, until_ns: int) -> Iterator[int]:
        """Times after the start of a run at which a save is done and the driver may isolate a node, before ``until_ns``."""
        if not self._acts or self._slow.isdisjoint(state.seats):
            return
        first = -(-self._windows_ns() // cycle_ns) * cycle_ns
        yield from range(first, until_ns, cycle_ns)

    def judged(self, state: State, at_ns: int) -> Iterator[Judged]:
        """Windows in which every slow node with a seat was seen to be slow, as many as make one suspected."""
        config = self._case.cluster.slow_nodes
        slow_nodes = self._case.slow_nodes
        assert slow_nodes is not None, "only then there is something to look at"
        found = SlowPass(name="forward", excess=slow_nodes.excess, usual=0.0, cost_s=slow_nodes.excess, waits_less=slow_nodes.excess)
        slow = {name: found for name in state.seats if name is not None and name in self._slow and self._is_new(state, name)}
        if not slow:
            return
        first = state.best_step
        for number in range(config.windows):
            at = at_ns - (config.windows - 1 - number) * self._windows_ns() // config.windows
            window = SlowWindow(first=first, end=first + config.steps, slow=slow)
            yield Judged(at_s=at / SECOND_NS, attempt=state.attempt, window=window)

    def rechecked(self, state: State, at_s: float) -> Iterator[Rechecked]:
        """Checks of isolated nodes, which find nothing."""
        for name, known in state.slow.items():
            if known.stage == "isolated":
                yield Rechecked(at_s=at_s, node=name, isolation=known.isolations, findings="nothing found")

    def _is_new(self, state: State, name: str) -> bool:
        known = state.slow.get(name)
        return known is None or known.stage == "returned"

    def _windows_ns(self) -> int:
        config = self._case.cluster.slow_nodes
        return config.windows * max(ns(config.every_s), config.steps * self._case.step_ns)
