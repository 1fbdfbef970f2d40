"""Training data of one or several prepared folders, and the weights that mix them.

Weights are taken as the decimal numbers that they were written as, and only their ratios count. Names are sorted, so the order in a file
decides nothing. Folders that do not fit together, and weights that need too long a period, are a ``DataError``.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from megascale_jax.comm.address import is_remote
from megascale_jax.data.batch import Rows
from megascale_jax.data.files import full_name
from megascale_jax.data.manifest import Split
from megascale_jax.data.order import MixtureOrder, Phase, RowOrder, SampleOrder
from megascale_jax.data.prepared import Prepared, stored_rows
from megascale_jax.data.rows import JoinedRows
from megascale_jax.data.tokenizer import Tokenizer
from megascale_jax.errors import DataError

MAX_PERIOD = 100_000
"""Sum of the whole-number weights: five decimal places."""


@dataclass(frozen=True)
class TrainingData:
    """Prepared folders by name, sorted, and how they are mixed; ``phases`` is None for a single folder, not a mixture.

    Raises ``DataError`` when the folders differ in tokenizer or sequence length.
    """

    sources: Mapping[str, Prepared]
    phases: tuple[Phase, ...] | None = None

    def __post_init__(self) -> None:
        name, first = next(iter(self.sources.items()))
        for other, source in self.sources.items():
            for what, own, expected in (
                ("tokenizer", source.manifest.tokenizer_digest[:12], first.manifest.tokenizer_digest[:12]),
                ("sequence length", source.manifest.sequence_length, first.manifest.sequence_length),
            ):
                if own != expected:
                    raise DataError(
                        f"Sources of a mixture need one {what}: {name} ({first.folder}) has {expected}, "
                        f"{other} ({source.folder}) has {own}. Prepare them alike."
                    )

    @property
    def tokenizer(self) -> Tokenizer:
        """That of all sources."""
        return self._first.tokenizer

    @property
    def sequence_length(self) -> int:
        """Tokens of a training row (S)."""
        return self._first.manifest.sequence_length

    @property
    def end_of_document(self) -> int:
        """Token id that ends each document."""
        return self._first.manifest.end_of_document

    @property
    def digest(self) -> str:
        """Equal digests, equal rows in all sources of equal names."""
        if self.phases is None:
            return self._first.manifest.digest
        parts = "\0".join(f"{name}\0{source.manifest.digest}" for name, source in self.sources.items())
        return hashlib.sha256(parts.encode()).hexdigest()

    @property
    def unigram_nats(self) -> float:
        """Held-out cross-entropy, nats per token, where each source is scored by the unigram counts of its own train split."""
        return self._mean("unigram_nats")

    @property
    def bigram_nats(self) -> float:
        """The same for bigram counts."""
        return self._mean("bigram_nats")

    @property
    def is_remote(self) -> bool:
        """Whether rows of one source or more come over a network."""
        return any(is_remote(source.folder) for source in self.sources.values())

    def train_order(self, seed: int, shuffle: bool) -> SampleOrder:
        """The endless order of the rows of ``rows("train")``."""
        return make_order([(name, source.manifest.train.rows) for name, source in self.sources.items()], self.phases, seed, shuffle)

    def rows(self, split: Split) -> Rows:
        """The rows of all sources, one after the other. Raises ``DataError`` when a file is missing or damaged."""
        return join_rows([stored_rows(source.folder, source.manifest, split) for source in self.sources.values()])

    def held_out_order(self) -> np.ndarray:
        """int64: every held-out row once, sources spread evenly, so that any beginning is like the whole."""
        counts = [source.manifest.held_out.rows for source in self.sources.values()]
        return np.argsort(np.concatenate([(np.arange(count) + 0.5) / count for count in counts]), kind="stable")

    def request(self) -> dict[str, Any]:
        """The train split as a JSON value, for a process that opens it with `open_request`."""
        return {
            "names": list(self.sources),
            "folders": [full_name(source.folder) for source in self.sources.values()],
            "digests": [source.manifest.digest for source in self.sources.values()],
            "phases": None if self.phases is None else [[phase.begin, list(phase.weights)] for phase in self.phases],
        }

    @property
    def _first(self) -> Prepared:
        return next(iter(self.sources.values()))

    def _mean(self, field: str) -> float:
        if len(self.sources) == 1:
            return getattr(self._first.manifest, field)
        weights = [source.manifest.held_out.tokens for source in self.sources.values()]
        return sum(weight * getattr(s.manifest, field) for weight, s in zip(weights, self.sources.values(), strict=True)) / sum(weights)


def as_training_data(data: "TrainingData | Prepared") -> TrainingData:
    """A single folder as training data."""
    return TrainingData({"": data}) if isinstance(data, Prepared) else data


def make_order(sizes: Sequence[tuple[str, int]], phases: Sequence[Phase] | None, seed: int, shuffle: bool) -> SampleOrder:
    """The order over sources of these names and numbers of rows; None for ``phases``: a single one, shuffled by the seed itself."""
    if phases is None:
        ((_, rows),) = sizes
        return RowOrder(rows, seed, shuffle)
    return MixtureOrder([RowOrder(rows, _source_seed(seed, name), shuffle) for name, rows in sizes], [rows for _, rows in sizes], phases)


def make_phases(weights: Mapping[str, float], changes: Mapping[int, Mapping[str, float]]) -> tuple[Phase, ...]:
    """Phases over the sorted names: ``weights`` from the start, and from sample ``n`` on those of ``changes[n]``.

    A name that a change leaves out keeps its weight; a change that changes nothing is none. Raises ``DataError`` for a negative
    weight, an unknown name, weights that are all 0, or weights with more decimal places than ``MAX_PERIOD`` holds.
    """
    names, current = sorted(weights), dict(weights)
    phases = [Phase(0, _whole_weights([current[name] for name in names], "at the start"))]
    for begin, change in sorted(changes.items()):
        if unknown := sorted(set(change) - set(names)):
            raise DataError(f"A change of weights names {', '.join(unknown)}; the sources are {', '.join(names)}.")
        current |= change
        whole = _whole_weights([current[name] for name in names], f"from sample {begin} on")
        if whole != phases[-1].weights:
            phases.append(Phase(begin, whole))
    return tuple(phases)


def _whole_weights(weights: Sequence[float], when: str) -> tuple[int, ...]:
    if min(weights) < 0 or not sum(weights) > 0:
        raise DataError(f"The weights {list(weights)} {when} must be at least 0, and not all 0.")
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * denominator) for fraction in exact]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor > MAX_PERIOD:
        raise DataError(
            f"The weights {list(weights)} {when} are in the ratio of whole numbers with the sum {sum(whole) // divisor:,}, "
            f"more than {MAX_PERIOD:,}. Round them to fewer decimal places."
        )
    return tuple(weight // divisor for weight in whole)


def _source_seed(seed: int, name: str) -> int:
    """Sources of one mixture are shuffled independently, whichever others there are."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little")


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of several files as one, counted through."""
    return parts[0] if len(parts) == 1 else JoinedRows(parts)
