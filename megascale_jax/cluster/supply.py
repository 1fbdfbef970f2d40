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
        self._removed: set[tuple[str, str]] = set()
        """Nodes and machines for which removal was asked by this very driver; a later one asks again."""
        self._refused: dict[str, str] = {}

    def keep(self, state: State) -> list[str]:
        """Have the backend run what should run, and take out what was evicted; nodes that were taken back into service."""
        restored = []
        for name in self._names:
            try:
                if self._ask(state, name):
                    restored.append(name)
                self._refused.pop(name, None)
            except MegascaleError as error:
                if self._refused.get(name) != str(error):
                    self._refused[name] = str(error)
                    self._say(f"{name}: {error}")
        return restored

    def _ask(self, state: State, name: str) -> bool:
        """What one node needs; whether it was taken back into service."""
        node, over = state.nodes.get(name), state.phase in ENDS
        if node is not None and node.status == NodeStatus.EVICTED:
            if (name, node.machine) not in self._removed and _is_idle(state, name):
                self._backend.remove(name, node.machine, node.reason)
                self._removed.add((name, node.machine))
            return False
        is_back = node is not None and node.is_out_of_service
        if node is not None and is_back:
            self._backend.restore(name, node.machine)
            self._removed.discard((name, node.machine))
        if not over and (node is None or node.lost_at_s is not None):
            self._backend.ensure(name)
        return is_back

    def taken_back(self, state: State) -> list[str]:
        """Evicted nodes whose machines were put back into service without the driver."""
        lifted = self._backend.taken_back().items()
        return [
            name
            for name, machine in lifted
            if (node := state.nodes.get(name)) and (node.status, node.machine) == (NodeStatus.EVICTED, machine)
        ]

    def release(self) -> None:
        """The job is over: end executors that did not hear of it."""
        for name in self._names:
            with suppress(MegascaleError):
                self._backend.release(name)


def _is_idle(state: State, name: str) -> bool:
    """Whether a node may be taken away: it trains no more, or cannot be asked."""
    return name in state.idle or name not in state.seats or state.nodes[name].lost_at_s is not None or state.phase in ENDS
