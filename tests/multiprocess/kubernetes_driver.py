"""`megascale` as the driver's pod runs it, where the service account and the pod's own name are those of a test.

python -m tests.multiprocess.kubernetes_driver URL NAMESPACE drive ...
"""

import socket
import sys
from unittest.mock import patch

from kubernetes import client

from megascale_jax.cli.main import main
from megascale_jax.cluster.backends.kubernetes.client import Cluster, api_client
from tests.cluster.kubernetes.fake_kubernetes import TOKEN

if __name__ == "__main__":
    url, namespace, *arguments = sys.argv[1:]
    settings = client.Configuration()
    settings.host, settings.api_key = url, {"BearerToken": f"Bearer {TOKEN}"}
    sys.argv = ["megascale", *arguments]
    with (
        patch.object(Cluster, "of_this_pod", lambda jobset: Cluster(api_client(settings), namespace, jobset)),
        patch.object(socket, "gethostname", lambda: "localhost"),
    ):
        main()
