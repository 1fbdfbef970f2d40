"""The driver's own pod: where its nodes come from, and what it is called."""

import os
import socket
from collections.abc import Mapping

from megascale_jax.cluster.backends.base import Start
from megascale_jax.cluster.backends.kubernetes.backend import KubernetesBackend
from megascale_jax.cluster.backends.kubernetes.names import JOBSET_VARIABLE, LAUNCH_VARIABLE, node_name
from megascale_jax.config.cluster import KubernetesConfig
from megascale_jax.errors import BackendError


class KubernetesEngine:
    """So many executors of the JobSet that this pod is part of."""

    def __init__(self, number: int, config: KubernetesConfig, environment: Mapping[str, str] = os.environ):
        self._config = config
        self.names = tuple(node_name(index) for index in range(number))
        self.host = socket.gethostname()  # resolves to the pod's address, by its /etc/hosts
        self.launch = environment.get(LAUNCH_VARIABLE, "")
        """Identity of what started this driver, and starts it again when it ends."""
        self._jobset = environment.get(JOBSET_VARIABLE, "")
        if not self._jobset:
            raise BackendError(
                f"--backend kubernetes runs in the driver's pod, where {JOBSET_VARIABLE} names its JobSet; "
                "make the manifests with `megascale launch render` and apply them"
            )

    def start_over(self) -> str:
        """Pods wait for machines by themselves: there is nothing to ask for."""
        return ""

    def backend(self, start: Start) -> KubernetesBackend:
        """The JobSet's pods; they were told by the manifests what to run. Raises BackendError without client or service account."""
        try:
            from megascale_jax.cluster.backends.kubernetes.client import Cluster
        except ImportError as error:
            raise BackendError(f"{error}; install megascale_jax[kubernetes]") from error
        backend = KubernetesBackend(Cluster.of_this_pod(self._jobset), self._config.switch_labels)
        backend.start()
        return backend
