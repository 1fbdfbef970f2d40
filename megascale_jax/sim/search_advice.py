"""Why a search found no layout, and what would change that: other counts, more memory, other layouts. No JAX."""

from collections.abc import Iterator
from itertools import islice

from megascale_jax.config import search as files
from megascale_jax.config.load import load_document
from megascale_jax.config.memory import FITS, GIB
from megascale_jax.config.schema import Experiment, ParallelConfig, SystemConfig
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.errors import ConfigError
from megascale_jax.sim.search import REMATS, Candidate, Pins, Search, check_count, described, divisors, layouts, search, with_layout
from megascale_jax.sim.step_memory import step_bytes


def why_none(base: Experiment, found: Search, software: SoftwareConfig, pins: Pins | None = None, margin: float = FITS) -> str:
    """What to say when nothing is ranked: the nearest counts that some layout divides, or the least memory and what would make it fit."""
    pins = pins or {}
    given = f" with {', '.join(f'{name} {value}' for name, value in pins.items())}" if pins else ""
    if not found.too_large:
        counts = nearest_counts(base, found.devices, pins)
        nearest = f"nearest counts that work: {', '.join(f'{count:,}' for count in counts)}" if counts else "no count works"
        reasons = "; ".join(f"{item.reason}: {item.example}" for item in found.rejected)
        return (
            f"no layout{given} divides {found.devices:,} devices and {base.train.global_batch_size:,} rows; {nearest}. Reasons: {reasons}"
        )
    assert found.limit_bytes is not None, "without a limit everything fits"
    least = min(found.too_large, key=lambda item: item.needed_bytes)
    needed = least.needed_bytes
    ways = list(_ways(base, found, least, software, pins, margin)) or ["a smaller model"]
    return (
        f"no layout{given} fits: the least memory is {needed / GIB:.1f} GiB a device ({described(least.parallel)}), but {margin:.0%} of "
        f"{base.system.device} is {found.limit_bytes / GIB:.1f}; what would fit: {'; '.join(ways)}"
    )


def nearest_fits(found: Search, wanted: ParallelConfig, most: int = 3) -> list[Candidate]:
    """Of the ranked layouts those that differ from ``wanted`` in the fewest fields, one for each set of fields, the quickest first."""
    best: dict[tuple[str, ...], Candidate] = {}
    for candidate in found.ranked:
        best.setdefault(_changed(candidate.parallel, wanted), candidate)
    fewest = min(map(len, best), default=0)
    return list(islice((candidate for fields, candidate in best.items() if len(fields) == fewest), most))


def change_of(candidate: ParallelConfig, wanted: ParallelConfig) -> str:
    """What one layout has different from another: ``remat full``."""
    return ", ".join(f"{name.replace('_', ' ')} {getattr(candidate, name)}" for name in _changed(candidate, wanted))


def nearest_counts(base: Experiment, devices: int, pins: Pins | None = None) -> list[int]:
    """The nearest numbers of devices below and above that some layout divides, of whole nodes."""
    counts = {plan.parallel.tensor * plan.parallel.pipe * plan.parallel.data for plan in _all_shapes(base, pins or {})}
    below, above = [count for count in counts if count < devices], [count for count in counts if count > devices]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def least_count(base: Experiment, above: int, pins: Pins | None = None, margin: float = FITS) -> int | None:
    """The smallest number of devices beyond ``above`` on which some layout fits; ``None`` if more devices never help.

    One row a micro-batch keeps least, so no other is tried.
    """
    pins = pins or {}
    memory_gib, best = base.system.memory_gib, None
    if memory_gib is None:
        return None
    remats: tuple[int | str, ...] = (pins["remat"],) if "remat" in pins else REMATS
    for plan in _all_shapes(base, pins):
        count = plan.parallel.tensor * plan.parallel.pipe * plan.parallel.data
        if count <= above or (best is not None and count >= best):
            continue
        for remat in remats:
            one = with_layout(plan, remat=remat)
            if step_bytes(one).total <= margin * memory_gib * GIB:
                best = count
                break
    return best


def _all_shapes(base: Experiment, pins: Pins) -> Iterator[Experiment]:
    """Every tensor, pipe, chunks and data axis that divide model and batch, on however many devices; one row a micro-batch or the pin."""
    row = pins.get("micro_batch_size", 1)
    narrow: Pins = {**pins, "micro_batch_size": row, "remat": pins.get("remat", "none")}
    batch = base.train.global_batch_size
    tensors = [int(pins["tensor"])] if "tensor" in pins else list(range(1, (base.system.devices_per_node or base.model.num_heads) + 1))
    pipes = [int(pins["pipe"])] if "pipe" in pins else divisors(base.model.num_layers)
    for data in [int(pins["data"])] if "data" in pins else divisors(batch):
        for tensor in tensors:
            for pipe in pipes:
                if batch % (data * int(row) * pipe):
                    continue
                devices = data * tensor * pipe
                try:
                    check_count(base, devices)
                except ConfigError:
                    continue
                yield from layouts(base, devices, {**narrow, "tensor": tensor, "pipe": pipe})


def _changed(one: ParallelConfig, other: ParallelConfig) -> tuple[str, ...]:
    """Fields that differ; the data axis follows from tensor and pipe, chunks must follow another pipe."""
    names = ["tensor", "pipe", "virtual_stages", "micro_batch_size", "remat"]
    changed = [name for name in names if getattr(one, name) != getattr(other, name)]
    if "pipe" in changed and "virtual_stages" in changed:
        changed.remove("virtual_stages")
    return tuple(changed)


def _ways(base: Experiment, found: Search, least: Candidate, software: SoftwareConfig, pins: Pins, margin: float) -> Iterator[str]:
    if pins and (freed := search(base, found.devices, software, {}, margin)).ranked:
        best = freed.ranked[0].parallel
        yield f"without what is pinned, {len(freed.ranked)} layouts, the quickest with {described(best)}"
    if count := least_count(base, found.devices, pins, margin):
        yield f"{count:,} devices"
    needed_gib = least.needed_bytes / GIB / margin
    if systems := _systems_with(needed_gib, base.system):
        yield f"system {' or '.join(systems)}"
    yield f"a device of {needed_gib:.1f} GiB"


def _systems_with(needed_gib: float, given: SystemConfig) -> list[str]:
    """Names of systems that can be simulated and have as much memory; files with errors are passed over."""
    names: list[str] = []
    for name, file in files.names("system", files.config_trees()).items():
        try:
            system = load_document("system", str(file), SystemConfig)
        except ConfigError:
            continue  # told when somebody asks for it
        if system.hardware is not None and system.memory_gib is not None and system.memory_gib >= needed_gib and system != given:
            names.append(name)
    return names
