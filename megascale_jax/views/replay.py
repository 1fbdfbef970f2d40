"""Play a graph of operations again with other durations: when would each have ended?

``end(o) = max(end of all that o waits for) + duration(o)``; what waits for nothing begins at 0. The longest end of a step is its time.
Nodes are taken level by level, so that a replay is a few dozen array operations whatever the number of steps,
workers and what-ifs. Pure NumPy.
"""

from functools import cached_property
from itertools import pairwise

import numpy as np

from megascale_jax.errors import TraceError
from megascale_jax.views.dependencies import Graph
from megascale_jax.views.operations import OPTYPES


class Replay:
    """A graph ready to be played. Raises TraceError if its operations wait for each other in a circle."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.steps, first = np.unique(graph.operations.step, return_index=True)
        self._first_rows = first

    def times(self, durations: np.ndarray) -> np.ndarray:
        """Seconds of every step (`steps`), float64[steps, ...], for durations float64[n, ...] of the graph's operations."""
        ends = self.ends(durations)
        return np.maximum.reduceat(ends, self._first_rows, axis=0)

    def ends(self, durations: np.ndarray) -> np.ndarray:
        """End of every operation, float64[n, ...], in seconds from the beginning of its step."""
        graph = self.graph
        end = np.zeros((len(graph.operations) + graph.meetings, *durations.shape[1:]))
        end[: len(durations)] = durations
        for nodes, before, first in self._levels:
            end[nodes] += np.maximum.reduceat(end[before], first, axis=0)
        return end[: len(durations)]

    @cached_property
    def _levels(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """By level: nodes, all that they wait for, and where in that those of each node begin. Nodes of level 0 wait for nothing."""
        graph = self.graph
        count = len(graph.operations) + graph.meetings
        by_before = np.argsort(graph.before, kind="stable")
        after, out_first = graph.after[by_before], np.searchsorted(graph.before[by_before], np.arange(count + 1))
        waits_for = np.bincount(graph.after, minlength=count)
        level, depth, done = np.zeros(count, np.int64), 0, 0
        front = np.flatnonzero(waits_for == 0)
        while front.size:
            level[front], depth, done = depth, depth + 1, done + front.size
            reached, times = np.unique(after[_ranges(out_first[front], out_first[front + 1])], return_counts=True)
            waits_for[reached] -= times
            front = reached[waits_for[reached] == 0]
        if done < count:
            raise self._circle(np.flatnonzero(waits_for > 0))
        order = np.lexsort((graph.after, level[graph.after]))
        before, after, of = graph.before[order], graph.after[order], level[graph.after[order]]
        borders = np.searchsorted(of, np.arange(1, depth + 1))
        levels = []
        for begin, end in pairwise(borders):
            nodes, first = np.unique(after[begin:end], return_index=True)
            levels.append((nodes, before[begin:end], first))
        return levels

    def _circle(self, stuck: np.ndarray) -> TraceError:
        table = self.graph.operations
        row = int(stuck[0]) if stuck[0] < len(table) else int(np.flatnonzero(self.graph.meeting == stuck[0] - len(table))[0])
        return TraceError(
            f"step {table.step[row]}: {stuck.size} operations wait for each other in a circle, {OPTYPES[table.optype[row]]} of rank "
            f"{table.rank[row]} among them; the order of starts cannot be right. Leave the step out with --steps, or look at the clocks"
        )


def _ranges(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """All numbers of ``[begin, end)``, one range after the other."""
    lengths = ends - begins
    offsets = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(begins - offsets, lengths)
