"""All layouts of a model on so many devices: which divide, which fit into memory, and how long a step of each would take. No JAX.

A *layout* is tensor, pipe, virtual stages, data, micro-batch and remat; whatever else an experiment says stays. What divides is judged
by the rules of `config/checks.py`, seconds are those of `analytic.predict`, bytes those of this trainer's own step (`step_memory.py`). So a
layout that is ranked is an experiment that loads, and predicts the same. Layers are placed evenly: ``parallel.layers`` is not searched.

Only divisors are tried, thus thousands of layouts at most. What is refused early (a tensor size, a pair of tensor and pipe) is counted
once, not for each layout that it would have led to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_jax.config.checks import LAYOUT_RULES, RULES, problems_of
from megascale_jax.config.layout import virtual_stages_of
from megascale_jax.config.memory import FITS, GIB
from megascale_jax.config.schema import Experiment, ParallelConfig
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.errors import ConfigError
from megascale_jax.sim.analytic import Prediction, predict
from megascale_jax.sim.step_memory import step_bytes

FIELDS = ("tensor", "pipe", "virtual_stages", "data", "micro_batch_size", "remat")
"""Fields of ``parallel`` that are searched."""
REMATS = ("none", "selective", "full")
"""From what keeps most to what keeps least."""

type Pins = Mapping[str, int | str]
"""Fields of `FIELDS` that are given."""


@dataclass(frozen=True)
class Candidate:
    """A layout, its step, and the peak bytes of it on one device."""

    parallel: ParallelConfig
    prediction: Prediction
    needed_bytes: float

    @property
    def layout(self) -> dict[str, Any]:
        """The searched fields."""
        return {name: getattr(self.parallel, name) for name in FIELDS}

    def experiment(self, base: Experiment) -> Experiment:
        """The experiment with this layout; it passes `check`, as the search has seen."""
        return base.model_copy(update={"parallel": self.parallel})


@dataclass(frozen=True)
class Rejected:
    """Layouts, or beginnings of layouts, that were refused for one reason, and what was said of the first."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Search:
    """What was found on ``devices`` devices. ``limit_bytes``: what a layout may use of a device; ``None``: memory is not known.

    ``ranked`` and ``too_large`` (divides, but does not fit), the quickest first.
    """

    devices: int
    limit_bytes: float | None
    ranked: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    def rank_of(self, experiment: Experiment) -> int | None:
        """Rank, from 1 on, of the layout of an experiment, whatever its data axis; ``None`` where it is none of the ranked."""
        parallel = experiment.parallel
        if parallel.layers is not None or self.devices % (parallel.pipe * parallel.tensor):
            return None
        changes = {
            "data": self.devices // (parallel.pipe * parallel.tensor),
            "virtual_stages": virtual_stages_of(experiment.model, parallel),
        }
        wanted = parallel.model_copy(update=changes)
        return next((rank for rank, found in enumerate(self.ranked, 1) if found.parallel == wanted), None)


@dataclass
class Refusals:
    """Counts refusals while layouts are tried."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, reason: str, example: str) -> None:
        """One more."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, example)

    def judge(self, experiment: Experiment, *rules: str) -> bool:
        """Whether it passes; the first rule that it breaks is the reason."""
        for rule in rules:
            if lines := problems_of(experiment, [rule]):
                self.add(rule, f"{_shape(experiment.parallel)}: {lines[0]}" if rule in ("batch", "layers") else lines[0])
                return False
        return True

    @property
    def listed(self) -> tuple[Rejected, ...]:
        """All of them, in the order in which they first came."""
        return tuple(Rejected(reason, count, self.examples[reason]) for reason, count in self.counts.items())


def search(base: Experiment, devices: int, software: SoftwareConfig, pins: Pins | None = None, margin: float = FITS) -> Search:
    """Rank all layouts of an experiment's model and batch on ``devices`` devices of its system.

    ``margin``: share of a device's memory that a step may use. Raises ConfigError when the devices fill no whole nodes,
    and when the experiment is wrong whatever its layout. Nothing ranked is no error: `search_advice.py` says why.
    """
    check_count(base, devices)
    refusals = Refusals()
    ranked: list[Candidate] = []
    too_large: list[Candidate] = []
    memory_gib = base.system.memory_gib
    limit = None if memory_gib is None else margin * memory_gib * GIB
    for plan in layouts(base, devices, pins or {}, refusals):
        found = Candidate(plan.parallel, predict(plan, software), step_bytes(plan).total)
        (ranked if limit is None or found.needed_bytes <= limit else too_large).append(found)
    ranked.sort(key=_order)
    too_large.sort(key=_order)
    return Search(devices, limit, tuple(ranked), tuple(too_large), refusals.listed)


def check_base(base: Experiment) -> None:
    """Raise ConfigError for what no layout can mend: rules about training, data, kernels, and a model that one device refuses too."""
    alone = with_layout(base, tensor=1, pipe=1, virtual_stages=1, data=1, micro_batch_size=1)
    rules = [name for name in RULES if name not in LAYOUT_RULES]
    if problems := [*problems_of(base, rules), *problems_of(alone, ["heads", "widths"])]:
        raise ConfigError("\n  - ".join([f"experiment {base.name} cannot run, whatever its layout:", *problems]))


def check_count(base: Experiment, devices: int) -> None:
    """Raise ConfigError for what is left of a node."""
    per_node = base.system.devices_per_node
    if per_node is not None and devices > per_node and devices % per_node:
        lower = devices - devices % per_node
        raise ConfigError(f"{devices:,} devices are no whole nodes of {per_node}; nearest: {lower:,}, {lower + per_node:,}")


def with_layout(base: Experiment, **fields: int | str) -> Experiment:
    """The experiment with other searched fields, layers placed evenly; not checked."""
    return base.model_copy(update={"parallel": base.parallel.model_copy(update={"layers": None, **fields})})


def layouts(base: Experiment, devices: int, pins: Pins, refusals: Refusals | None = None) -> Iterator[Experiment]:
    """Every layout that divides; each passes all rules of a layout but memory's."""
    refusals = refusals or Refusals()
    for shape in shapes(base, devices, pins, refusals):
        parallel = shape.parallel
        rows = base.train.global_batch_size // (parallel.data * (parallel.pipe if parallel.pipe > 1 else 1))
        for size in _sizes(pins.get("micro_batch_size"), rows, rows):
            one = with_layout(shape, micro_batch_size=size)
            if size > 1 and not refusals.judge(one, "batch"):
                continue
            for remat in (pins["remat"],) if "remat" in pins else REMATS:
                yield with_layout(one, remat=remat)


def shapes(base: Experiment, devices: int, pins: Pins, refusals: Refusals) -> Iterator[Experiment]:
    """Layouts of one row a micro-batch that divide: tensor, pipe, virtual stages, and the data axis that is left."""
    for tensor in _sizes(pins.get("tensor"), devices, base.model.num_heads):
        if devices % tensor:
            refusals.add("devices", f"tensor {tensor} does not divide {devices:,} devices")
            continue
        narrow = with_layout(base, tensor=tensor, pipe=1, virtual_stages=1, data=devices // tensor, micro_batch_size=1)
        if not refusals.judge(narrow, "node", "heads", "widths"):
            continue
        for pipe in _sizes(pins.get("pipe"), devices // tensor, base.model.num_layers):
            data = devices // (tensor * pipe)
            if tensor * pipe * data != devices:
                refusals.add("devices", f"tensor {tensor} x pipe {pipe} = {tensor * pipe} does not divide {devices:,} devices")
            elif data != pins.get("data", data):
                refusals.add("devices", f"tensor {tensor} x pipe {pipe} leaves data {data}, not {pins['data']}, of {devices:,} devices")
            elif refusals.judge(with_layout(narrow, pipe=pipe, data=data), "batch"):
                chunks = _sizes(pins.get("virtual_stages"), max(1, base.model.num_layers // pipe), base.model.num_layers)
                staged = (with_layout(narrow, pipe=pipe, data=data, virtual_stages=count) for count in chunks)
                yield from (plan for plan in staged if refusals.judge(plan, "layers"))


def described(parallel: ParallelConfig) -> str:
    """A layout in words: ``tensor 8, pipe 8 x 6, data 192, micro-batch 1, remat none``."""
    return f"{_shape(parallel)}, micro-batch {parallel.micro_batch_size}, remat {parallel.remat}"


def _shape(parallel: ParallelConfig) -> str:
    stages = f"{parallel.pipe} x {parallel.virtual_stages}" if (parallel.virtual_stages or 1) > 1 else str(parallel.pipe)
    return f"tensor {parallel.tensor}, pipe {stages}, data {parallel.data}"


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _sizes(pin: int | str | None, number: int, most: int) -> list[int]:
    """The pinned size, else divisors of a number up to ``most``."""
    if pin is not None:
        return [int(pin)]
    return [size for size in divisors(number) if size <= most]


def _order(found: Candidate) -> tuple[float, float, int, int]:
    """Quickest first; of equals the smaller, then the one of shallower chunks, which compile faster."""
    parallel, step = found.parallel, found.prediction
    return step.iteration_s, found.needed_bytes, -(parallel.virtual_stages or 1), REMATS.index(parallel.remat)
