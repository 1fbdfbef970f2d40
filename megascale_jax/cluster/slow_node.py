"""A node that is some per cent slower than its peers in real steps, and clean in every check: the paper's case, for a drill (section 6.3).

The kernel's freezer takes a share of the time away from its training process, in short slices within each step. The checks are other
processes, so they see a node in order; only the steps show it. It lasts until the driver has named a node, or the drill's limit.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megascale_jax.cluster.freezer import slowed
from megascale_jax.cluster.injury import Job
from megascale_jax.cluster.state import SLOW_NODE

SHARE, PERIOD_S = 0.9, 0.1
"""Of the time, which it gets: it takes 11 % longer. Slices of 10 ms, since a step may be short."""
CHECKED_S = 300.0
"""Longest that the checks of the isolated node may take."""
_POLL_S = 1.0


class SlowNode:
    """Slows the process ``pid`` of ``node`` from now on."""

    def __init__(self, job: Job, status: dict[str, Any], node: str, pid: int):
        self._job, self._node, self._known, self._began_s = job, node, status["num_incidents"], time.monotonic()
        self.measured: dict[str, float] = {}
        self._held = ExitStack()
        self._held.enter_context(slowed(pid, SHARE, PERIOD_S))
        self.release: Callable[[], None] = self._held.close

    def is_enough(self, status: dict[str, Any] | None) -> bool:
        """Whether the driver has begun to take a node's place for being slow, or the process is gone for another reason."""
        if status is None or status["num_incidents"] == self._known:
            return False
        self.measured["slow_s"] = time.monotonic() - self._began_s
        return True

    def amiss(self) -> str:
        """What is not as it should be: another rule had found it, another node is suspected, the checks find something in this one."""
        limit = time.monotonic() + CHECKED_S
        while (status := self._job.status()) is None or status["slow"].get(self._node, {}).get("stage") == "isolated":
            if time.monotonic() > limit:
                return f"the checks of {self._node} were not over after {CHECKED_S:.0f} s"
            time.sleep(_POLL_S)
        new = [one for one in status["incidents"] if one["number"] > self._known]
        if any(one["rule"] != SLOW_NODE for incident in new for one in incident["suspicions"]):
            return "another rule than slow_node interrupted the training"
        if others := sorted(set(status["slow"]) - {self._node}):
            return f"{', '.join(others)} suspected, though healthy"
        found = status["slow"].get(self._node)
        if found is None:
            return f"{self._node} was not suspected"
        return "" if found["stage"] == "returned" else f"{self._node} is {found['stage']}, expected a clean re-check: {found['findings']}"
