"""Compile-only devices of a target: no GPU, driver or CUDA toolkit is touched; ``JAX_PLATFORMS=cpu`` must be set."""

from typing import Any

from megascale_jax.aot.targets import Target, target_config
from megascale_jax.errors import ConfigError


def absent_devices(target: Target, nodes: int) -> list[Any]:
    """Compile-only devices of so many nodes, in rank order. Raises ConfigError when the parts of ``[aot]`` are missing."""
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=f"{nodes}x1x{target.gpus_per_domain}", target_config=target_config(target)
        )
    except Exception as error:
        raise ConfigError(f"no compiler for absent GPUs here: {str(error).splitlines()[0]}; install it with `make aot`") from error
    return list(topology.devices)
