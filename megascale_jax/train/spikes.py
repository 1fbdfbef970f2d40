"""A training's loss spikes: said, noted, and shown to whoever can rewind the run (`observe/spike.py`)."""

from collections.abc import Callable

from megascale_jax.config.schema import Experiment
from megascale_jax.observe.marks import Marks
from megascale_jax.observe.metrics import EVENT_SPIKE
from megascale_jax.observe.spike import SpikeWatch


class Spikes:
    """What a run's loop tells of its steps and checkpoints; does nothing where the job's rules look for no spikes."""

    def __init__(self, experiment: Experiment, marks: Marks, event: Callable[[int, str], None], say: Callable[[str], None]):
        self._marks, self._event, self._say = marks, event, say
        rules, checkpoint = experiment.cluster.rules, experiment.train.checkpoint
        self._first: int | None = None
        """Of the newest spike."""
        self._watch: SpikeWatch | None = None
        if rules.loss_spike != "off":
            self._watch = SpikeWatch(
                window=rules.loss_spike_window,
                deviations=rules.loss_spike_deviations,
                steps=rules.loss_spike_steps,
                margin=rules.loss_spike_margin,
                keep=checkpoint.keep,
                every=checkpoint.every,
            )
        self._acts = rules.loss_spike == "act"

    @property
    def holds_saves(self) -> bool:
        """Whether a state is not saved now, lest it take the place of one to go back to."""
        return self._acts and self._watch is not None and self._watch.is_young

    def begin(self, step: int, position: int, *, is_durable: bool) -> None:
        """Training goes on after ``step`` steps and ``position`` samples of the order, from storage or not."""
        if self._watch is not None:
            self._watch.begin(step, position)
            if is_durable:
                self._watch.durable(step)

    def saved(self, step: int) -> None:
        """A state has been handed to the keeper."""
        if self._watch is not None:
            self._watch.saved(step)

    def durable(self, step: int) -> None:
        """A checkpoint is on storage."""
        if self._watch is not None:
            self._watch.durable(step)

    def read(self, step: int, loss: float, position: int) -> None:
        """The loss of a step, whose batch ended at sample ``position`` of the order."""
        if self._watch is None or (spike := self._watch.seen(step, loss, position)) is None:
            return
        self._marks.spiked(spike)
        if spike.first != self._first:
            self._first = spike.first
            self._event(step, EVENT_SPIKE)
            self._say(f"the loss spikes since step {spike.first}: {loss:.4f}, usual is up to {self._watch.limit:.4f}")
