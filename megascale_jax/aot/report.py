"""What a compiled step says: does it fit, how long would it take, how much of its communication is hidden. No JAX.

All times are estimates of `cost.py` over the scheduled program; nothing has run. Hidden fractions are strict (only GEMMs
and attention hide), step time and MFU count every kernel. MFU counts model FLOPs over causal keys; nothing recomputed,
masked or idle.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megascale_jax.aot.cost import CostModel
from megascale_jax.aot.hlo import Module
from megascale_jax.aot.overlap import (
    LOOPS,
    PARTS,
    CollectiveRecord,
    Span,
    Timeline,
    hidden_fraction,
    loop_bodies,
    part_of,
    steady_tick,
    walk,
)
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.memory import FITS
from megascale_jax.config.schema import Experiment, RatesConfig
from megascale_jax.model.flops import flops_per_row


@dataclass(frozen=True)
class CompileReport:
    """The report of one compiled step; seconds and bytes of one device."""

    experiment: str
    target: str
    devices: int
    lower_s: float
    compile_s: float
    argument_bytes: int
    temp_bytes: int
    peak_bytes: int
    device_bytes: int
    largest_buffers: tuple[str, ...]
    modelled_step_s: float
    modelled_mfu: float
    executed_over_model_flops: float
    tick_over_gemm: float | None
    hidden_fraction: Mapping[str, float | None]
    seconds_of: Mapping[str, float]
    waits_s: float
    collectives: tuple[Mapping[str, Any], ...]
    sync_collectives: tuple[str, ...]
    uncovered_collectives: tuple[str, ...]
    steady_tick: tuple[Span, ...]

    @property
    def fits(self) -> bool:
        """Whether the program leaves room on the device."""
        return self.peak_bytes <= FITS * self.device_bytes

    def as_data(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"fits": self.fits}


def make_report(
    experiment: Experiment, target: str, device_bytes: int, module: Module, streams: Mapping[str, int], result: Mapping[str, Any]
) -> CompileReport:
    """Judge a compiled module. ``result`` is the worker's."""
    mesh, system = MeshShape.of(experiment.parallel), experiment.system
    assert system.rates is not None and system.peak_tflops is not None, "checked before the compile"
    model = CostModel(module, system.rates, mesh.by_axis, system.devices_per_node or 1)
    strict, everything = walk(model, streams, strict=True), walk(model, streams, strict=False)
    model_flops = flops_per_row(experiment.model, "causal") * experiment.train.global_batch_size / mesh.size
    return CompileReport(
        experiment=experiment.name,
        target=target,
        devices=mesh.size,
        lower_s=result["lower_s"],
        compile_s=result["compile_s"],
        argument_bytes=result["argument_bytes"],
        temp_bytes=result["temp_bytes"],
        peak_bytes=result["peak_bytes"],
        device_bytes=device_bytes,
        largest_buffers=tuple(result["largest_buffers"]),
        modelled_step_s=everything.seconds,
        modelled_mfu=model_flops / (everything.seconds * system.peak_tflops * 1e12),
        executed_over_model_flops=everything.flops / model_flops,
        tick_over_gemm=_tick_over_gemm(model),
        hidden_fraction=_fractions(strict),
        seconds_of={**everything.seconds_of},
        waits_s=everything.waits_s,
        collectives=tuple(_groups(strict)),
        sync_collectives=tuple(sorted({_label_with_source(record) for record in strict.collectives if record.is_sync})),
        uncovered_collectives=tuple(
            sorted({_label(record) for record in strict.collectives if record.scope.split("/")[0] in LOOPS and not record.gemms_beside})
        ),
        steady_tick=steady_tick(model, streams),
    )


def scaled(rates: RatesConfig, links: float) -> RatesConfig:
    """The same rates with both links times a factor."""
    return rates.model_copy(update={"tensor_gbps": rates.tensor_gbps * links, "network_gbps": rates.network_gbps * links})


def _fractions(timeline: Timeline) -> dict[str, float | None]:
    """By part; ``None`` for a part without collectives."""
    parts = {part: [r for r in timeline.collectives if r.scope.split("/")[0] == part] for part in LOOPS}
    fractions = {part: hidden_fraction(records) if records else None for part, records in parts.items()}
    return fractions | {"whole": hidden_fraction(timeline.collectives)}


def _groups(timeline: Timeline) -> list[dict[str, Any]]:
    """Collectives by part of the step, mesh axis and kind."""
    groups: dict[tuple[str, str, str], list[CollectiveRecord]] = defaultdict(list)
    for record in timeline.collectives:
        groups[record.scope.split("/")[0] or "outside", record.cost.axis, record.cost.opcode].append(record)
    order = {part: index for index, part in enumerate((*PARTS, "outside"))}
    return [
        {
            "part": part,
            "axis": axis,
            "kind": kind,
            "count": sum(record.count for record in records),
            "bytes": sum(record.cost.bytes * record.count for record in records),
            "seconds": sum(record.cost.seconds * record.count for record in records),
            "hidden_seconds": sum((record.cost.seconds - record.exposed_s) * record.count for record in records),
        }
        for (part, axis, kind), records in sorted(groups.items(), key=lambda item: (order.get(item[0][0], 9), item[0]))
    ]


def _tick_over_gemm(model: CostModel) -> float | None:
    """All kernels over GEMMs and attention in the bodies of the steady loops, each as often as it runs."""
    seconds: dict[str, float] = defaultdict(float)
    for body, count in loop_bodies(model.module, model.module.entry):
        if part_of(body) != "steady":
            continue
        for instruction in body.instructions:
            if instruction.opcode != "while":
                kernel = model.kernel(instruction, body)
                seconds[kernel.kind] += kernel.seconds * count
    heavy = seconds["gemm"] + seconds["attention"]
    return sum(seconds.values()) / heavy if heavy else None


def _label(record: CollectiveRecord) -> str:
    return f"{record.scope or 'outside'} {record.cost.opcode} over {record.cost.axis}"


def _label_with_source(record: CollectiveRecord) -> str:
    return _label(record) + (f" ({record.source})" if record.source else "")
