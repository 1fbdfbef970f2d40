"""How long a training process may stay in a section before that counts as a hang: learned from the run itself, never below a floor. Pure.

    limit = max(floor, factor x longest completed pass on any rank)

``compile`` has the largest floor and a factor of its own: it is the only section whose length may rightly change by an order of
magnitude, with a change of the program or a cold cache. The first passes of ``step`` in a process teach nothing, since they may
compile too (`observe.marks.UNTAUGHT_PASSES`). Until there is something to go by they are measured against the compile passes
seen, each of which holds a whole step as well. Limits only grow; a pass that is not complete teaches nothing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_jax.config.cluster import ClusterConfig, FloorsConfig
from megascale_jax.observe.marks import SECTIONS, UNTAUGHT_PASSES

_FLOORS = FloorsConfig().model_dump()
assert set(_FLOORS) == set(SECTIONS)


@dataclass(frozen=True)
class LimitSettings:
    """``floors``: seconds by section, those not named keep their default. ``factor``: times the longest pass; ``compile`` has its own."""

    factor: float = 5.0
    compile_factor: float = 12.0
    floors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for a section that there is not, a factor below 1, or a floor that is not above 0."""
        if unknown := set(self.floors) - set(SECTIONS):
            raise ValueError(f"floors of {', '.join(sorted(unknown))}; expected some of {', '.join(SECTIONS)}")
        if not (1 <= self.factor < math.inf and 1 <= self.compile_factor < math.inf):
            raise ValueError(f"factor {self.factor} and compile_factor {self.compile_factor}; expected numbers of at least 1")
        if wrong := {name: floor for name, floor in self.floors.items() if not 0 < floor < math.inf}:
            raise ValueError(f"floors {wrong}; expected seconds above 0")

    def floor_s(self, section: str) -> float:
        """Least limit of a section, seconds."""
        return self.floors.get(section, _FLOORS[section])


class Limits:
    """Limits of one run; the longest passes in it outlive a restart of the driver as JSON."""

    def __init__(self, settings: LimitSettings | None = None, longest_s: Mapping[str, float] | None = None):
        """``longest_s``: what was learned before."""
        self.settings = settings or LimitSettings()
        self._longest_s: dict[str, float] = {}
        self.learn(longest_s or {})

    def learn(self, longest_s: Mapping[str, float]) -> None:
        """Take in the longest completed passes of one process (`ProcessReport.longest_s`), in any order and any number of times.

        Only of an attempt that nobody has told to stop: a pass that a hang held up is completed when its process is let go on to end.
        """
        for section, seconds in longest_s.items():
            if section in SECTIONS and 0 <= seconds < math.inf:
                self._longest_s[section] = max(seconds, self._longest_s.get(section, 0.0))

    def limit_s(self, section: str, passes: Mapping[str, int]) -> float:
        """Longest that a process may stay in ``section``, seconds. ``passes``: those that it has completed, by section."""
        settings, longest_s = self.settings, self._longest_s
        factor = settings.compile_factor if section == "compile" else settings.factor
        limit_s = max(settings.floor_s(section), factor * longest_s.get(section, 0.0))
        untaught = UNTAUGHT_PASSES.get(section, 0)
        if untaught and (passes.get(section, 0) < untaught or section not in longest_s):
            compiles = settings.compile_factor * longest_s["compile"] if "compile" in longest_s else settings.floor_s("compile")
            limit_s = max(limit_s, compiles)
        return limit_s

    def is_over(self, section: str, in_section_s: float, passes: Mapping[str, int]) -> bool:
        """Whether a process has been in ``section`` for longer than it may."""
        return in_section_s > self.limit_s(section, passes)

    def to_json(self) -> str:
        """What was learned; the settings come from the configuration."""
        return json.dumps(self._longest_s, sort_keys=True)

    @classmethod
    def of(cls, config: ClusterConfig, learned: str | None = None) -> "Limits":
        """By a job's settings, with what an earlier driver has learned. Raises ValueError when that is not from `to_json`."""
        settings = LimitSettings(config.limit_factor, config.compile_factor, config.floors.model_dump())
        return cls(settings) if learned is None else cls.from_json(learned, settings)

    @classmethod
    def from_json(cls, text: str, settings: LimitSettings | None = None) -> "Limits":
        """Go on with what was learned. Raises ValueError when ``text`` is not from `to_json`; sections unknown now are left out."""
        learned = json.loads(text)
        if not isinstance(learned, dict) or not all(isinstance(seconds, int | float) for seconds in learned.values()):
            raise ValueError(f"learned limits {text[:80]!r}; expected an object of seconds by section")
        return cls(settings, learned)
