"""How long a step takes: the one place where every forecast gets it from."""

from megascale_jax.config.layout import MeshShape
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError
from megascale_jax.model.flops import flops_per_token


def step_seconds(experiment: Experiment, step_s: float | None = None, mfu: float | None = None) -> float:
    """Seconds of one step of the experiment's own size, as given or from its model FLOPs utilisation.

    ``mfu``: a fraction, of the ``full`` convention of `model/flops.py`. Raises ConfigError unless exactly one is given and above 0, and
    for a system whose peak is not known.
    """
    if (step_s is None) == (mfu is None):
        given = "neither" if step_s is None else "both"
        raise ConfigError(f"got {given} of --step-s and --mfu, expected one of them: a measured or predicted step, or an assumed MFU")
    if step_s is not None:
        if step_s <= 0:
            raise ConfigError(f"--step-s {step_s:g}: expected seconds above 0")
        return step_s
    assert mfu is not None, "one of both is given"
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu:g}: expected a fraction above 0 and at most 1, such as 0.55")
    peak = experiment.system.peak_tflops
    if peak is None:
        raise ConfigError(f"system.peak_tflops of {experiment.system.device} is null, so --mfu says nothing; give --step-s")
    flops = flops_per_token(experiment.model) * experiment.tokens_per_step
    return flops / (MeshShape.of(experiment.parallel).size * peak * 1e12 * mfu)
