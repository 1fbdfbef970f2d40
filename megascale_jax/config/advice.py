"""What would make a plan smaller on a device: only values that every rule accepts, so that none is refused in its turn. No JAX."""

from collections.abc import Iterable, Mapping

from megascale_jax.config.checks import check
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.load import with_overrides
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError

_REMAT: Mapping[str, str] = {"none": "parallel.remat=selective or full", "selective": "parallel.remat=full"}


def advice_on_memory(experiment: Experiment) -> list[str]:
    """Overrides for a checked plan, each with what it makes smaller; empty when nothing is left."""
    parallel, batch = experiment.parallel, experiment.train.global_batch_size
    advice = [f"{_REMAT[parallel.remat]} (residuals)"] if parallel.remat in _REMAT else []
    for field, values, smaller in (
        ("micro_batch_size", range(parallel.micro_batch_size - 1, 0, -1), "residuals and activations"),
        ("tensor", range(parallel.tensor + 1, experiment.model.num_heads + 1), "everything, on {devices:,} devices"),
        ("pipe", range(parallel.pipe + 1, experiment.model.num_layers + 1), "all of the state, on {devices:,} devices"),
        ("data", range(parallel.data + 1, batch // parallel.micro_batch_size + 1), "masters and moments, on {devices:,} devices"),
    ):
        if found := _first(experiment, field, values):
            overrides, devices = found
            advice.append(f"{overrides} ({smaller.format(devices=devices)})")
    return advice


def nearest_nodes(experiment: Experiment, nodes: int, per_node: int) -> list[int]:
    """Two node counts, on both sides where there are some, that whole replicas fill and whose data axis divides the batch."""
    parallel, batch = experiment.parallel, experiment.train.global_batch_size
    replica, rows = parallel.pipe * parallel.tensor, parallel.micro_batch_size * parallel.pipe
    sizes = [data for data in range(1, batch // rows + 1) if batch % (data * rows) == 0 and data * replica % per_node == 0]
    good = [data * replica // per_node for data in sizes]
    above = [count for count in good if count > nodes]
    return sorted([*[count for count in good if count < nodes][-1:], *above][:2])


def on_nodes(bare: Experiment, count: int, per_node: int) -> Experiment:
    """The plan with the data axis that fills so many nodes. Raises ConfigError where none does."""
    replica, devices = bare.parallel.pipe * bare.parallel.tensor, count * per_node
    good = ", ".join(map(str, nearest_nodes(bare, count, per_node))) or "none for this batch: change train.global_batch_size"
    if devices % replica:
        pipe, tensor = bare.parallel.pipe, bare.parallel.tensor
        raise ConfigError(f"{devices} devices are not divisible by pipe {pipe} x tensor {tensor} = {replica}; nearest nodes: {good}")
    try:
        return with_overrides(bare, [f"parallel.data={devices // replica}"])
    except ConfigError as error:
        raise ConfigError(f"{error}; nearest nodes whose replicas divide the batch: {good}") from error


def _first(experiment: Experiment, field: str, values: Iterable[int]) -> tuple[str, int] | None:
    """Overrides with the first value that is accepted, with other chunks if need be, and the devices of that plan."""
    for value in values:
        changes: dict[str, int | None] = {field: value}
        for change in (changes, changes | {"virtual_stages": None}):
            plan = experiment.model_copy(update={"parallel": experiment.parallel.model_copy(update=change)})
            if _is_accepted(plan):
                text = " ".join(f"parallel.{key}={'null' if number is None else number}" for key, number in change.items())
                return text, MeshShape.of(plan.parallel).size
    return None


def _is_accepted(experiment: Experiment) -> bool:
    try:
        check(experiment)
    except ConfigError:
        return False
    return True
