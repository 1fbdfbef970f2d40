"""A diagnosis as the driver conducts it: who checks what, until all have answered or the time is up; then a verdict (paper section 4.3)."""

from collections.abc import Mapping

from megascale_jax.cluster.messages import Diagnosis, DiagnosisOrder
from megascale_jax.cluster.state import Diagnosed, Incident

QUICK = ("disk", "memory", "memory_errors", "shared_memory", "gpu_memory", "gpu_xid", "gpu_nvlink", "nic_link")
"""After a process that died: what tells of a broken host within seconds."""


class Examination:
    """One round of checks on all nodes that can be reached."""

    def __init__(self, attempt: int, incident: Incident, addresses: Mapping[str, tuple[str, tuple[int, ...]]], limit_s: float):
        self._attempt, self._incident, self._nodes, self._limit_s = attempt, incident, dict(addresses), limit_s
        self._heard: dict[str, Diagnosis] = {}

    def order(self, name: str) -> DiagnosisOrder | None:
        """What a node should check; ``None`` for one that came later."""
        if name not in self._nodes:
            return None
        return DiagnosisOrder(round=self._attempt, checks=QUICK, limit_s=self._limit_s)

    def heard(self, name: str, diagnosis: Diagnosis) -> None:
        """A node's outcomes; those of another round are none of ours."""
        if diagnosis.round == self._attempt and name in self._nodes:
            self._heard[name] = diagnosis

    def result(self, now_s: float) -> Diagnosed | None:
        """The verdict once all have answered. Its time limit is the driver's."""
        if len(self._heard) < len(self._nodes):
            return None
        bad: dict[str, str] = {}
        for name, diagnosis in self._heard.items():
            failed = [outcome for outcome in diagnosis.outcomes if outcome.get("status") == "fail"]
            if failed:
                bad[name] = "; ".join(f"{outcome['check']}: {outcome['reason']}" for outcome in failed)
        return Diagnosed(at_s=now_s, attempt=self._attempt, bad=bad)
