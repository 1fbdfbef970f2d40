"""Times of a recovery that a fault drill has measured, in place of a fleet's own."""

import json
from pathlib import Path
from typing import Any, cast

from megascale_jax.config.fleet import Fleet
from megascale_jax.errors import ConfigError

_STAGES = ("suspend", "diagnose", "replace", "restore")


def with_drill(fleet: Fleet, file: Path) -> Fleet:
    """The fleet with the means of `megascale drill --json` or `benchmarks/fault_drill.py` for suspend, diagnose, replace and restore.

    The measured restore holds start, load and compilation of its own small job. Raises ConfigError naming file and field.
    """
    try:
        found: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--drill {file}: {error}; expected what `megascale drill --json` writes") from error
    means = cast("dict[str, Any]", found).get("mttr_s") if isinstance(found, dict) else None
    if not isinstance(means, dict):
        raise ConfigError(f"--drill {file}: mttr_s: missing, expected a mapping of {', '.join(_STAGES)} to seconds")
    means = cast("dict[str, Any]", means)
    for stage in _STAGES:
        seconds: Any = means.get(stage)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            raise ConfigError(f"--drill {file}: mttr_s.{stage}: got {seconds!r}, expected seconds >= 0")
    update = {
        "suspend_s": float(means["suspend"]),
        "diagnose_s": float(means["diagnose"]),
        "replace_s": float(means["replace"]),
        "init_s": {1: float(means["restore"])},
        "load_s": 0.0,
        "compile_s": 0.0,
        "source": f"measured: {file.name}; the rest: {fleet.recovery.source}",
    }
    return fleet.model_copy(update={"recovery": fleet.recovery.model_copy(update=update)})
