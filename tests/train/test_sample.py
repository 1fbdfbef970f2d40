"""Greedy continuation against the float64 reference."""

from functools import partial

import jax
import numpy as np
import pytest

from megascale_jax.checkpoint.restore import load_arrays
from megascale_jax.errors import RunFolderError, UsageError
from megascale_jax.train.folder import RunFolder
from megascale_jax.train.loop import Trainer
from megascale_jax.train.sample import sample
from tests.reference import row_logits, x64
from tests.train.test_loop import StopAt, tiny


def test_greedy_text_follows_the_reference_beyond_the_sequence_length(prepared, tmp_path):
    config, folder = tiny(steps=6), RunFolder(tmp_path / "run")
    trainer = Trainer(config, folder, prepared)
    trainer.run(StopAt())
    text = sample(folder, "def x", num_tokens=20, temperature=0)
    named = load_arrays(folder.storage(), 6, trainer.plan)
    params = jax.jit(trainer.plan.to_logical)({name: named[f"params.{name}"] for name in trainer.plan.zero.specs})
    params = {name: np.asarray(value) for name, value in params.items()}
    ids, length = list(b"def x"), config.model.sequence_length
    with x64():
        logits_of = jax.jit(partial(row_logits, config.model))
        for _ in range(20):
            row = np.zeros(length, int)
            visible = ids[-length:]
            row[: len(visible)] = visible
            logits = logits_of(params, row, np.arange(length), np.ones(length, int))[len(visible) - 1]
            chosen = int(np.argmax(logits))
            if chosen == 256:
                break
            ids.append(chosen)
    assert text == bytes(ids).decode(errors="replace")


def test_impossible_requests_are_refused(prepared, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunFolderError, match="not a run folder"):
        sample(folder, "x", num_tokens=1)
    folder.create(tiny())
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        sample(folder, "x", num_tokens=1)
    with pytest.raises(UsageError, match="at least 1 token"):
        sample(folder, "x", num_tokens=0)
