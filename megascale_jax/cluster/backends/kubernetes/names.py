"""Names that the manifests and the driver agree on, and those that Kubernetes and JobSet (v1alpha2) give."""

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
ROLE_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
LAUNCH_LABEL = "batch.kubernetes.io/controller-uid"
"""Identity of the Job that a pod belongs to: another one for each time that the manifests were applied anew."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-preferred-topology"
HOST_LABEL = "kubernetes.io/hostname"

DRIVER, EXECUTOR = "driver", "executor"
"""The two replicated jobs."""

CORDONED_BY = "megascale/cordoned-by"
"""Annotation of a machine: NAMESPACE/JOBSET of the job that cordoned it; only that job uncordons it."""
REASON = "megascale/reason"

DRIVER_RESTARTS = 200
"""Of the driver over the whole life of a run, until its Job fails. A run of months must live through its upgrades and crashes, one a day
for half a year. A run that has failed has its driver start as often, each time to end at once with the same exit code: at the kubelet's
longest delay of 5 minutes that is 17 hours, in which the executors have completed and hold no machine any more.
"""

JOBSET_VARIABLE, LAUNCH_VARIABLE = "MEGASCALE_JOBSET", "MEGASCALE_LAUNCH"
"""Of the driver's pod: the JobSet's name, and `LAUNCH_LABEL`."""


def node_name(index: int | str) -> str:
    """The job's name of an executor's pod slot."""
    return f"node-{index}"


ORDER_FILE = "nodes"
"""Of the ConfigMap with an order of machines."""


def order_name(jobset: str) -> str:
    """The ConfigMap with the order of machines of a run."""
    return f"{jobset}-node-order"


def driver_hosts(jobset: str) -> tuple[str, str]:
    """Names of the driver's pod: its own for itself, and the one that other pods of the namespace resolve."""
    own = f"{jobset}-{DRIVER}-0-0"
    return own, f"{own}.{jobset}"
