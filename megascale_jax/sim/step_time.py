"""How long a step takes: the one place where every forecast gets it from."""

from megascale_jax.config.layout import MeshShape
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError
from megascale_jax.model.flops import flops_per_token
from megascale_jax.sim.analytic import predict


def step_seconds(experiment: Experiment, step_s: float | None = None, mfu: float | None = None) -> float:
    """Seconds of one step of the experiment's own size: as given, from its model FLOPs utilisation, or else predicted.

    ``mfu``: a fraction, of the ``full`` convention of `model/flops.py`. The prediction is that of `megascale simulate` (`sim/analytic.py`).
    Raises ConfigError for both at once, for values out of range, and for a system of which the peak or the constants are not known.
    """
    if step_s is not None and mfu is not None:
        raise ConfigError("got both of --step-s and --mfu, expected one of them, or none for the predicted step")
    if step_s is not None:
        if step_s <= 0:
            raise ConfigError(f"--step-s {step_s:g}: expected seconds above 0")
        return step_s
    if mfu is None:
        return predict(experiment).iteration_s
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu:g}: expected a fraction above 0 and at most 1, such as 0.55")
    peak = experiment.system.peak_tflops
    if peak is None:
        raise ConfigError(f"system.peak_tflops of {experiment.system.device} is null, so --mfu says nothing; give --step-s")
    flops = flops_per_token(experiment.model) * experiment.tokens_per_step
    return flops / (MeshShape.of(experiment.parallel).size * peak * 1e12 * mfu)
