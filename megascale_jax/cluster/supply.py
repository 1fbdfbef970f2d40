"""Nodes as the driver wants them of its backend: those of the job running, those that were evicted out of service."""

from collections.abc import Callable
from contextlib import suppress

from megascale_jax.cluster.backends.base import Backend
from megascale_jax.cluster.lifecycle import ENDS, NodeStatus
from megascale_jax.cluster.state import State
from megascale_jax.errors import MegascaleError


class Supply:
    """Asks for what is missing, again and again. A request that fails is said once for each reason."""

    def __init__(self, backend: Backend, names: tuple[str, ...], say: Callable[[str], None]):
        self._backend, self._names, self._say = backend, names, say
        self._removed: set[str] = set()
        self._refused: dict[str, str] = {}

    def keep(self, state: State) -> None:
        """Have the backend run what should run, and take out what was evicted."""
        over = state.phase in ENDS
        for name in self._names:
            node = state.nodes.get(name)
            is_evicted = node is not None and node.status == NodeStatus.EVICTED
            try:
                if node is not None and is_evicted and name not in self._removed and _is_idle(state, name):
                    self._removed.add(name)
                    self._backend.remove(name, node.machine, node.reason)
                elif not is_evicted and not over and (node is None or node.lost_at_s is not None):
                    if name in self._removed:
                        self._removed.discard(name)
                        self._backend.restore(name, node.machine if node is not None else "")
                    self._backend.ensure(name)
            except MegascaleError as error:
                if self._refused.get(name) != str(error):
                    self._refused[name] = str(error)
                    self._say(f"{name}: {error}")

    def came_anew(self, name: str) -> None:
        """The engine has put another machine in the place of an evicted node."""
        self._removed.discard(name)

    def release(self) -> None:
        """The job is over: end executors that did not hear of it."""
        for name in self._names:
            with suppress(MegascaleError):
                self._backend.release(name)


def _is_idle(state: State, name: str) -> bool:
    """Whether a node may be taken away: it trains no more, or cannot be asked."""
    return name in state.idle or name not in state.seats or state.nodes[name].lost_at_s is not None or state.phase in ENDS
