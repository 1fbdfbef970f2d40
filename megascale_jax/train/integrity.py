"""Nothing corrupt is trained on for long, and none of it is saved: `digest.py` at its steps and before every save."""

from collections.abc import Callable, Sequence
from typing import Any

import optax

from megascale_jax.config.schema import Experiment
from megascale_jax.errors import CorruptStateError
from megascale_jax.observe.marks import Marks
from megascale_jax.parallel.plan import Plan
from megascale_jax.train.digest import Digests, Finding, decisive
from megascale_jax.train.flip import BitFlip
from megascale_jax.train.state import TrainState

_SHOWN = 3


class Integrity:
    """The comparisons of one start of a run. All ranks call every method at the same steps."""

    def __init__(
        self, experiment: Experiment, plan: Plan, optimizer: optax.GradientTransformation, marks: Marks, say: Callable[[str], None]
    ):
        """Nothing is compiled yet. Raises UsageError for a drill that cannot be one."""
        self._plan, self._marks, self._say = plan, marks, say
        self._every = experiment.train.digest_every
        self._digests = Digests(plan, optimizer) if self._every is not None else None
        self._has_compiled = False
        self._checked: int | None = None
        self._flip = BitFlip.from_environment()

    def begin(self, step: int | None) -> None:
        """Training starts, from the state after ``step`` if one was restored: that was compared before it was saved, its checksums hold."""
        self._checked = step
        if self._digests is not None and not self._digests.arrays:
            self._say("no array of the state is held by two devices, so none can be compared with its copy (train.digest_every)")
            self._digests = None

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` is compared, saved or not."""
        return self._digests is not None and self._every is not None and step % self._every == 0

    def drilled(self, state: TrainState) -> TrainState:
        """The state; in a drill, corrupted when that was asked for."""
        return state if self._flip is None else self._flip.apply(state)

    def check(self, step: int, state: TrainState) -> None:
        """Compare the copies of the state after ``step``, once. Raises CorruptStateError, on all ranks, when some differ."""
        if self._digests is None or step == self._checked:
            return
        if self._has_compiled:
            findings = self._digests.compare(state)
        else:
            with self._marks.section("compile"):
                findings = self._digests.compare(state)
            self._has_compiled = True
        if findings:
            self._refuse(step, decisive(findings))
        self._checked = step

    def _refuse(self, step: int, findings: Sequence[Finding]) -> None:
        devices = {place: self._plan.mesh.devices[place] for finding in findings for place in finding.devices}
        ranks = sorted({device.process_index for device in devices.values()})
        is_certain = len(ranks) == 1 or all(finding.is_certain for finding in findings)
        self._marks.corrupt(ranks, is_certain=is_certain)
        raise CorruptStateError(
            f"silent corruption: after step {step}, {_named([finding.array for finding in findings])} on "
            + _named([_place(place, device) for place, device in devices.items()])
            + (" is not what the other copies are" if findings[0].is_certain else " differ, and no majority says which is right")
            + f"; the state is not saved. {'Take' if is_certain else 'Measure with `megascale diagnose`, then take'} rank "
            f"{' or '.join(map(str, ranks))} out of the run and start again from the newest checkpoint: its copies agreed"
        )


def _place(place: tuple[int, int, int], device: Any) -> str:
    pipe, data, tensor = place
    return f"data {data} (pipe {pipe}, tensor {tensor}; rank {device.process_index}, {device})"


def _named(things: Sequence[str]) -> str:
    shown = list(dict.fromkeys(things))
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
