"""What a run takes: GPU-hours, days, energy and money, and what these hang on.

Power and price are inputs: neither has a value of its own here, and a price has a day.
"""

from dataclasses import dataclass

from megascale_jax.config.price import Price
from megascale_jax.errors import ConfigError
from megascale_jax.sim.faults.case import Case
from megascale_jax.sim.faults.closed_forms import expected_ettr

STEP = 0.10
"""Change of each input in a tornado: 10 % down and up."""
HOUR_S, DAY_S = 3600.0, 86_400.0


@dataclass(frozen=True)
class Power:
    """``node_kw``: of one node under training, kilowatts; ``overhead``: of the site over its machines (PUE), at least 1."""

    node_kw: float
    overhead: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a power that is not above 0 or an overhead below 1."""
        if self.node_kw <= 0 or self.overhead < 1:
            raise ConfigError(f"node power {self.node_kw:g} kW, overhead {self.overhead:g}; expected more than 0 kW and at least 1")


@dataclass(frozen=True)
class Cost:
    """Of one run. ``gpu_hours`` and ``energy_mwh`` include the spares, which wait switched on; ``None``: its input was not given."""

    gpus: int
    spare_gpus: int
    wall_days: float
    gpu_hours: float
    gpu_hours_per_trillion_tokens: float | None
    energy_mwh: float | None
    amount: float | None
    price: Price | None


def cost_of(
    wall_s: float,
    nodes: int,
    spares: int,
    gpus_per_node: int,
    tokens: float | None = None,
    power: Power | None = None,
    price: Price | None = None,
) -> Cost:
    """Nodes and spares are there for the whole wall time, whether they train or not.

    GPU-hours = (nodes + spares) x GPUs of a node x hours; energy = (nodes + spares) x kW x overhead x hours; amount = GPU-hours x price.
    """
    hours, machines = wall_s / HOUR_S, nodes + spares
    gpu_hours = machines * gpus_per_node * hours
    return Cost(
        gpus=nodes * gpus_per_node,
        spare_gpus=spares * gpus_per_node,
        wall_days=wall_s / DAY_S,
        gpu_hours=gpu_hours,
        gpu_hours_per_trillion_tokens=None if not tokens else gpu_hours / tokens * 1e12,
        energy_mwh=None if power is None else machines * power.node_kw * power.overhead * hours / 1e3,
        amount=None if price is None else gpu_hours * price.price_per_gpu_hour,
        price=price,
    )


@dataclass(frozen=True)
class Sensitivity:
    """GPU-hours for the same tokens as a factor of the base, with an input 10 % lower and 10 % higher."""

    name: str
    lower: float
    higher: float

    @property
    def span(self) -> float:
        """How much hangs on it."""
        return abs(self.higher - self.lower)


def tornado(case: Case) -> list[Sensitivity]:
    """What the GPU-hours hang on, the most first: MFU, goodput, interruptions.

    MFU changes the step time, goodput the share of the time that trains (never above 1); interruptions change goodput by its expectation
    (`closed_forms.expected_ettr`), with the same checkpoint interval.
    """
    base = expected_ettr(case)
    if base <= 0:
        raise ConfigError("the job never keeps a step: it fails again before its first checkpoint; shorten the interval or the recovery")
    scaled = [base / expected_ettr(case, rate_factor=factor) for factor in (1 - STEP, 1 + STEP)]
    found = [
        Sensitivity("MFU", 1 / (1 - STEP), 1 / (1 + STEP)),
        Sensitivity("goodput", 1 / (1 - STEP), base / min(1.0, base * (1 + STEP))),
        Sensitivity("interruptions", scaled[0], scaled[1]),
    ]
    return sorted(found, key=lambda one: -one.span)
