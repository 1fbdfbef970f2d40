"""Run folders as the trainer leaves them, with losses from a closed formula."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROW_TOKENS = 128


def falling_loss(progress: float) -> float:
    """Loss after a fraction of the run."""
    return 1.6 + 3.9 * math.exp(-8.0 * progress)


def make_run(
    folder: Path,
    *,
    steps: int = 200,
    batch: int = 8,
    loss: Callable[[float], float] = falling_loss,
    scale: float = 1.0,
    length: float = 1.0,
    evaluate_every: int | None = 20,
    summary: dict[str, Any] | None = None,
    finished: bool = True,
    config: dict[str, Any] | None = None,
    extra_lines: tuple[dict[str, Any], ...] = (),
) -> Path:
    """A run whose loss after step n is `scale * loss(n / steps * length)`; `config` fields are dotted."""
    folder.mkdir(parents=True)
    fields = {
        "name": folder.name, "model.sequence_length": ROW_TOKENS, "model.block": "parallel",
        "train.steps": steps, "train.global_batch_size": batch, "train.evaluation.batches": None,
        "train.data.source": "stdlib", "train.data.prepared": None, "train.data.tokenizer": "bytes",
    } | (config or {})  # fmt: skip
    tree: dict[str, Any] = {}
    for field, value in fields.items():
        *path, leaf = field.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        value = scale * loss((step - 1) / steps * length)
        lines.append({"step": step, "kind": "train", "wall_s": 0.1 * step, "loss": value if math.isfinite(value) else None})
        if evaluate_every and step % evaluate_every == 0:
            value = scale * loss(step / steps * length)
            lines.append({"step": step, "kind": "evaluation", "wall_s": 0.1 * step, "loss": value if math.isfinite(value) else None})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, *extra_lines]))
    if finished:
        final = scale * loss(length)
        values = {
            "validation_loss": final if math.isfinite(final) else None, "unigram_nats": 3.3, "bigram_nats": 2.5,
            "tokens_per_s": 20000.0, "mfu": 0.3, "steps": steps, "wall_s": 0.1 * steps, "resumed_from": None,
            "parameters": 1000, "peak_flops": 1e11, "data_digest": "d1",
        } | (summary or {})  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(values))
    return folder
