"""A run read back from its folder as plain values and NumPy arrays: what every picture and comparison of losses starts from.

Reads `config.yaml`, `metrics.jsonl` and, once the run has finished, `summary.json`; nothing here needs JAX or a device. Failure
case: a folder without training lines, or with a config that is no mapping, is refused with RunFolderError.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.metrics import EVENT_RESUME, EVENT_SKIP, read_metrics
from megascale_jax.observe.summary import RunSummary, read_summary

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Series:
    """Loss over steps: `steps` and `losses` are float64 of the same length, steps strictly rising, NaN where not finite."""

    steps: np.ndarray
    losses: np.ndarray

    @property
    def finite(self) -> "Series":
        """The points whose loss is finite."""
        keep = np.isfinite(self.losses)
        return Series(self.steps[keep], self.losses[keep])


@dataclass(frozen=True)
class RunRecord:
    """One run as found on disk. `config` is the resolved experiment as plain YAML."""

    folder: Path
    config: dict[str, Any]
    train: Series
    evaluation: Series
    resume_steps: tuple[int, ...]
    skip_steps: tuple[int, ...]
    summary: RunSummary | None

    @property
    def name(self) -> str:
        """Name of the run: its folder's."""
        return self.folder.resolve().name


def read_run(run_folder: Path) -> RunRecord:
    """Read a run. Raises RunFolderError if it is none, or has no training line yet."""
    records = read_metrics(run_folder)
    train = _series(record for record in records if record["kind"] == "train")
    if not train.steps.size:
        raise RunFolderError(f"{run_folder}: no training step is logged yet; wait for the first one, or name another run")
    events = [record for record in records if record["kind"] == "event"]
    skips = {r["step"] for r in events if r.get("event") == EVENT_SKIP}
    skips |= {r["step"] for r in records if r["kind"] == "train" and (r.get("skipped") or 0) > 0}
    return RunRecord(
        folder=run_folder,
        config=_read_config(run_folder / CONFIG_FILE),
        train=train,
        evaluation=_series(record for record in records if record["kind"] == "evaluation"),
        resume_steps=tuple(sorted({r["step"] for r in events if r.get("event") == EVENT_RESUME})),
        skip_steps=tuple(sorted(skips)),
        summary=read_summary(run_folder),
    )


def smooth(x: np.ndarray, y: np.ndarray, at: np.ndarray, window: float) -> np.ndarray:
    """Mean of `y` over the points whose `x` lies within `window / 2` of each `at` (all 1-D; `x` rising, `y` finite).

    Near the first point the window shrinks so that it stays centred, since a loss falls steeply there; near the last
    point it is cut off. Where no point lies inside, the value is interpolated.
    """
    half = np.minimum(window / 2, np.maximum(at - x[0], 0.0))
    low = np.searchsorted(x, at - half, side="left")
    high = np.searchsorted(x, at + half, side="right")
    total = np.concatenate(([0.0], np.cumsum(y)))
    count = high - low
    return np.where(count > 0, (total[high] - total[low]) / np.maximum(count, 1), np.interp(at, x, y))


def _series(records: Any) -> Series:
    """Loss by step; where a step occurs twice, the later line counts. A record without `loss` has no point."""
    points = {r["step"]: np.nan if r["loss"] is None else float(r["loss"]) for r in records if "loss" in r}
    steps = sorted(points)
    return Series(np.array(steps, np.float64), np.array([points[step] for step in steps], np.float64))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RunFolderError(f"{path.parent} has no {path.name}; expected the folder of a run, such as runs/quickstart")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise RunFolderError(f"{path} holds a {type(config).__name__}, expected the sections of an experiment")
    return config
