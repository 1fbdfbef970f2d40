"""Which switch each machine is under, by labels that a cloud, Topograph or the cluster's owners put on machines.

Only a diagnosis asks, and it does not wait: what was read last counts. A machine without any of the labels is under no known switch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from megascale_jax.cluster.backends.kubernetes.client import Cluster, RequestError

AGAIN_S = 60.0
"""Between two lists at least, whatever there is to know and however the last one ended."""
RENEW_S = 600.0
"""Age at which all are read again: labels may come long after their machine, or change."""


class Switches:
    """One list of all machines, read again once a pod is on one that was not there, and when it is old."""

    def __init__(self, cluster: Cluster, labels: Sequence[str], clock: Callable[[], float]):
        """``labels``: the first one that a machine has counts. Without any, nothing is ever read."""
        self._cluster, self._labels, self._clock = cluster, labels, clock
        self._found: Mapping[str, str] = {}
        self._looked_for: set[str] = set()
        """Machines that the list had, and those that it was read for in vain."""
        self._again_s = self._renew_s = clock()

    def of(self, machine: str) -> str | None:
        """The switch as ``LABEL=VALUE``: what other labels say of other machines cannot be taken for it."""
        return self._found.get(machine)

    def are_due(self, machines: Collection[str]) -> bool:
        """Whether to read the labels now. ``machines``: those with a pod of the job."""
        now = self._clock()
        if not self._labels or not machines or now < self._again_s:
            return False
        return now >= self._renew_s or not self._looked_for.issuperset(machines)

    def read(self, machines: Collection[str]) -> None:
        """Read the labels of all machines. Raises RequestError: what was read before goes on to count."""
        self._again_s = self._clock() + AGAIN_S
        try:
            labels = self._cluster.labels(self._labels)
        except RequestError as error:
            remedy = "let the driver's ClusterRole list nodes, or set cluster.kubernetes.switch_labels=[]; " if error.status == 403 else ""
            how = "by the labels that were read before" if self._found else "without regard to switches"
            text = f"{error}; {remedy}until it succeeds, a diagnosis pairs nodes {how}"
            raise RequestError(text, error.status, after_s=error.after_s) from error
        self._found = {machine: switch for machine, own in labels.items() if (switch := self._switch(own)) is not None}
        self._looked_for = {*labels, *machines}
        self._renew_s = self._clock() + RENEW_S

    def _switch(self, labels: Mapping[str, str]) -> str | None:
        return next((f"{label}={labels[label]}" for label in self._labels if labels.get(label)), None)

    def facts(self, machines: Collection[str]) -> dict[str, str]:
        """For the status page, once the labels have been read: how many switches, and of how many machines one is known."""
        if not self._looked_for:
            return {}
        known = [switch for machine in machines if (switch := self.of(machine)) is not None]
        return {"switches": f"{len(set(known))}, known of {len(known)} of {len(machines)} machines"}
