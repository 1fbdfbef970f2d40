"""GPUs that are not there: the numbers that the compiler has to know of them. No JAX.

A *target* is one kind of GPU. Its numbers are those that the CUDA driver would report.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Numbers of one GPU, in bytes, hertz and counts."""

    name: str
    device: str
    compute_capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    memory_bandwidth: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    gpus_per_domain: int = 8


TARGETS = {
    target.name: target
    for target in (
        Target(
            "a100", "NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, 167936, 166912, 2_039_040_000_000, 41_943_040, 1.41, 85_100_068_864
        ),
        Target(
            "h100", "NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 233472, 232448, 3_352_320_000_000, 52_428_800, 1.98, 84_942_979_072
        ),
        Target("h200", "NVIDIA H200", (9, 0), True, 132, 128, 233472, 232448, 4_800_000_000_000, 52_428_800, 1.98, 150_754_820_096),
        Target("b200", "NVIDIA B200", (10, 0), True, 148, 128, 233472, 232448, 7_672_320_000_000, 132_644_864, 1.965, 191_514_411_008),
    )
}
"""By the name of the system file. H200: an H100 with its data sheet's memory."""


def target_config(target: Target) -> str:
    """The target as the text that XLA reads."""
    major, minor = target.compute_capability
    feature = "ACCELERATED_FEATURES" if target.accelerated else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {target.cores}
  fpus_per_core: {target.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {target.memory_bandwidth}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {target.memory_bytes}
  shared_memory_per_block_optin: {target.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{target.name}"
"""
