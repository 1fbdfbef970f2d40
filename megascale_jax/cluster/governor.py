"""Slow nodes as the driver deals with them: windows come in, isolated nodes are checked; what follows is `governance.py`'s.

Both end in events, so a driver that was killed goes on where it was: a window under way is lost, checks under way begin anew.
"""

from collections.abc import Callable, Iterator

from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.request import Node
from megascale_jax.cluster.examination import Examination
from megascale_jax.cluster.governance import judged, to_recheck
from megascale_jax.cluster.lifecycle import Phase
from megascale_jax.cluster.messages import Diagnosis, DiagnosisOrder
from megascale_jax.cluster.state import Judged, Rechecked, State
from megascale_jax.cluster.suspects import Suspects
from megascale_jax.config.cluster import ClusterConfig

_FINDINGS = 500


class Governor:
    """``suspects``: where windows come from; ``None``: there are none, and only checks that are due are made."""

    def __init__(self, config: ClusterConfig, suspects: Suspects | None):
        self._config, self._suspects = config, suspects
        self._checked: tuple[str, int] | None = None
        """The node whose checks are under way, and which isolation of it."""
        self._began_s = 0.0
        self._examination: Examination | None = None

    def look(self, now: float, state: State, step: int, in_pairs: Callable[[str], Node]) -> Iterator[Judged | Rechecked]:
        """What has come to be known. ``in_pairs``: a node as an examination knows it."""
        if self._suspects is not None and state.phase == Phase.RUNNING:
            window = self._suspects.look(now, state.attempt, step)
            if window is not None:
                yield judged(state, window, self._config.slow_nodes, now)
        yield from self._recheck(now, state, in_pairs)

    def _recheck(self, now: float, state: State, in_pairs: Callable[[str], Node]) -> Iterator[Rechecked]:
        name = to_recheck(state)
        due = None if name is None else (name, state.slow[name].isolations)
        if due != self._checked:
            self._checked, self._began_s = due, now
            # alone: a spare that is measured beside it may be needed at any moment
            limit_s = self._config.diagnose_s
            self._examination = None if name is None else Examination({name: in_pairs(name)}, Baseline(), limit_s, is_full=True)
        if self._examination is None or due is None:
            return
        node, isolation = due
        if (found := self._examination.result()) is not None:
            findings = "; ".join(filter(None, (*found.findings.values(), self._examination.rates(node))))
            yield Rechecked(at_s=now, node=node, isolation=isolation, bad=found.bad.get(node, ""), findings=findings[:_FINDINGS])
        elif now > self._began_s + 2 * self._config.diagnose_s:
            yield Rechecked(at_s=now, node=node, isolation=isolation, findings="not over in time")

    def heard(self, name: str, diagnosis: Diagnosis) -> None:
        """Outcomes of a node; only those of the isolated one count."""
        if self._examination is not None and self._checked is not None and self._checked[0] == name:
            self._examination.heard(name, diagnosis)

    def order(self, name: str) -> DiagnosisOrder | None:
        """What a node should check now."""
        if self._examination is None or self._checked is None or self._checked[0] != name:
            return None
        return self._examination.order(name)

    def close(self) -> None:
        """End what is at work."""
        if self._suspects is not None:
            self._suspects.close()
