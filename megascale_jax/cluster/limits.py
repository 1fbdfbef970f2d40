"""How long a section of a training process may take: learned from the run, never below a stated floor.

A limit is `factor` times the longest pass that any rank has completed, so what was slow once raises no alarm again. The first
step of a process (`compile`) has a floor of its own that is far above any step's, and so does the first evaluation.
"""

import json
from collections.abc import Mapping
from typing import Self

from megascale_jax.config.cluster import ClusterConfig

SECTION_ORDER = ("start", "join", "restore", "compile", "data", "step", "evaluate", "checkpoint", "end")
"""Sections in the order in which a process meets them within one step."""


class LearnedLimits:
    """Limits of all sections, seconds."""

    def __init__(self, floors: Mapping[str, float], factor: float, longest_s: Mapping[str, float] | None = None):
        self._floors, self._factor = dict(floors), factor
        self._longest_s = dict(longest_s or {})

    @classmethod
    def of(cls, config: ClusterConfig, learned: str | None = None) -> Self:
        """By a job's settings, with what an earlier driver has learned (`to_json`)."""
        return cls(config.floors.model_dump(), config.limit_factor, json.loads(learned) if learned else None)

    def learn(self, longest_s: Mapping[str, float]) -> None:
        """Take in the longest completed passes of one process."""
        for section, seconds in longest_s.items():
            self._longest_s[section] = max(seconds, self._longest_s.get(section, 0.0))

    def limit_s(self, section: str) -> float:
        """The limit of a section; that of an unknown one is the largest floor."""
        floor = self._floors.get(section, max(self._floors.values()))
        return max(floor, self._factor * self._longest_s.get(section, 0.0))

    def to_json(self) -> str:
        """What was learned."""
        return json.dumps(self._longest_s)
