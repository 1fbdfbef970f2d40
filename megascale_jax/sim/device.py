"""One device of a simulated cluster in SI units, from a ``system`` file. No JAX."""

from dataclasses import dataclass

from megascale_jax.config.hardware import LinkConfig
from megascale_jax.config.schema import SystemConfig
from megascale_jax.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """A link of one device: bytes a second each way, and seconds of a collective's start and of each step of its ring."""

    bytes_per_s: float
    start_s: float
    hop_s: float

    @classmethod
    def of(cls, link: LinkConfig) -> "Link":
        """From a section of the file."""
        return cls(link.gbps * 1e9, link.start_us * 1e-6, link.hop_us * 1e-6)


@dataclass(frozen=True)
class Device:
    """One device and its links. Rates are FLOP/s and bytes/s; `config/hardware.py` says what each constant means."""

    peak: float
    multiprocessors: int
    gemm_ceiling: float
    tile_overhead_k: int
    small_tile_slowdown: float
    kernel_s: float
    memory_bytes_per_s: float
    node_link: Link
    network_link: Link
    message_s: float
    per_node: int
    memory_bytes: float | None
    slow_node_share: float
    slow_node_slowdown: float

    @classmethod
    def of(cls, system: SystemConfig) -> "Device":
        """The device of a system. Raises ConfigError where the file lacks what a simulation needs."""
        hardware = system.hardware
        missing = [name for name in ("hardware", "peak_tflops", "devices_per_node") if getattr(system, name) is None]
        if hardware is None or system.peak_tflops is None or system.devices_per_node is None:
            raise ConfigError(
                f"system.{missing[0]} is missing for {system.device}, so its steps cannot be simulated; take a system file that has it "
                "(system=a100, h100, h200 or b200), or add it as configs/system/a100.yaml does"
            )
        return cls(
            peak=system.peak_tflops * 1e12,
            multiprocessors=hardware.multiprocessors,
            gemm_ceiling=hardware.gemm_ceiling,
            tile_overhead_k=hardware.tile_overhead_k,
            small_tile_slowdown=hardware.small_tile_slowdown,
            kernel_s=hardware.kernel_us * 1e-6,
            memory_bytes_per_s=hardware.memory_gbps * 1e9,
            node_link=Link.of(hardware.node_link),
            network_link=Link.of(hardware.network_link),
            message_s=hardware.message_us * 1e-6,
            per_node=system.devices_per_node,
            memory_bytes=None if system.memory_gib is None else system.memory_gib * 2**30,
            slow_node_share=hardware.slow_node_share,
            slow_node_slowdown=hardware.slow_node_slowdown,
        )
