"""Whether two runs were measured on the same held-out rows, and in which config fields they differ.

The digest of the prepared data decides where both runs have one; else the unigram and bigram cross-entropies, which depend on the
held-out text and its tokens alone; else the data section of the config, which is noted, since a path may hold other text by now.
Failure case: a loss over other rows, other row lengths or another part of the split is another quantity; the reason says so.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megascale_jax.errors import RunFolderError
from megascale_jax.views.curve import CONFIG_FILE, RunRecord


@dataclass(frozen=True)
class ConfigDifference:
    """A field that two runs set differently; None where a run does not have it."""

    field: str
    a: Any
    b: Any


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[ConfigDifference, ...]:
    """Every leaf of two configs that differs, as `section.field`, sorted."""
    flat_a, flat_b = dict(_leaves(a)), dict(_leaves(b))
    fields = sorted(flat_a.keys() | flat_b.keys())
    return tuple(ConfigDifference(f, flat_a.get(f), flat_b.get(f)) for f in fields if flat_a.get(f) != flat_b.get(f))


def config_int(run: RunRecord, field: str) -> int:
    """A whole number of the run's config by its dotted name. Raises RunFolderError if it is not there."""
    value = dict(_leaves(run.config)).get(field)
    if type(value) is not int or value < 1:
        raise RunFolderError(f"{run.folder / CONFIG_FILE}: {field} is {value!r}, expected a positive whole number")
    return value


def held_out_difference(a: RunRecord, b: RunRecord) -> tuple[str | None, str | None]:
    """`(reason, note)`: why the held-out losses of two runs cannot be compared, or what could not be made certain."""
    length_a, length_b = (config_int(run, "model.sequence_length") for run in (a, b))
    if length_a != length_b:
        return f"rows have {length_a} tokens in A and {length_b} in B, so a prediction sees other contexts", None
    for field in ("batches", "final_batches"):
        rows_a, rows_b = _evaluated_rows(a, field), _evaluated_rows(b, field)
        if rows_a != rows_b:
            text_a, text_b = ("the whole held-out split" if rows is None else f"{rows} held-out rows" for rows in (rows_a, rows_b))
            return (
                f"A was evaluated on {text_a}, B on {text_b}; set train.evaluation.{field} so that {field} x train.global_batch_size "
                "agree, or to null in both"
            ), None
    return _data_difference(a, b)


def _data_difference(a: RunRecord, b: RunRecord) -> tuple[str | None, str | None]:
    digest_a, digest_b = (run.summary and run.summary.data_digest for run in (a, b))
    if digest_a and digest_b:
        return (None if digest_a == digest_b else f"the data differs: digest {digest_a} in A, {digest_b} in B"), None
    print_a, print_b = _fingerprint(a), _fingerprint(b)
    if print_a and print_b:
        if all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(print_a, print_b, strict=True)):
            return None, None
        shown = " and ".join(f"{unigram:.4f} / {bigram:.4f}" for unigram, bigram in (print_a, print_b))
        return f"the held-out text differs: its unigram / bigram cross-entropies are {shown} nats", None
    differing = [d for d in config_differences(a.config, b.config) if d.field in _DATA_FIELDS]
    if differing:
        return "the data differs: " + "; ".join(f"{d.field} is {d.a!r} in A, {d.b!r} in B" for d in differing), None
    return None, "no data digest in both summaries: that the held-out text is the same rests on the config's train.data alone"


_DATA_FIELDS = frozenset({"train.data.prepared", "train.data.source", "train.data.tokenizer"})


def _fingerprint(run: RunRecord) -> tuple[float, float] | None:
    summary = run.summary
    if summary is None or summary.unigram_nats is None or summary.bigram_nats is None:
        return None
    return summary.unigram_nats, summary.bigram_nats


def mixes_evaluations(run: RunRecord) -> bool:
    """Whether the loss at the end is over other held-out rows than those on the way, so that the two make no one curve."""
    return _evaluated_rows(run, "batches") != _evaluated_rows(run, "final_batches")


def _evaluated_rows(run: RunRecord, field: str) -> int | None:
    """Held-out rows of one evaluation on the way (``batches``) or at the end (``final_batches``); None for the whole split."""
    leaves = dict(_leaves(run.config))
    batches = leaves.get(f"train.evaluation.{field}", leaves.get("train.evaluation.batches"))
    return None if batches is None else batches * config_int(run, "train.global_batch_size")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
