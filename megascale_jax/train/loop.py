"""The training loop: dispatch step n, then look at step n - 1, so that reading metrics never stalls the device.

Around it: held-out loss and checkpoints at their steps (with the device drained, so their time is not booked as a
step's), garbage collection at fixed steps on all ranks alike, and an end that all ranks reach together: each step
carries their votes to stop, and all leave after the same step, save, and say how to go on.

Failure cases: a step with non-finite numbers is skipped inside the step and counted here; a checkpoint that cannot be
written is reported and counted while training goes on; after SIGKILL the next start resumes from the newest complete
checkpoint and repeats the same steps bit for bit; a state whose copies differ between devices ends the loop before it is saved.
"""

import gc
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from megascale_jax.checkpoint.line import Rewind, joined
from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.comm.agree import all_results
from megascale_jax.config.difference import differences
from megascale_jax.config.schema import Experiment
from megascale_jax.data.mixture import TrainingData, as_training_data
from megascale_jax.data.pipeline import BatchIterator, held_out_batches
from megascale_jax.data.prepared import Prepared
from megascale_jax.errors import RunFolderError
from megascale_jax.model.flops import count_parameters, flops_per_token
from megascale_jax.observe.events import EVENTS_FOLDER
from megascale_jax.observe.marks import Marks
from megascale_jax.observe.metrics import EVENT_CHECKPOINT, EVENT_CHECKPOINT_ERROR, EVENT_RESUME, EVENT_SKIP, MetricsWriter
from megascale_jax.observe.progress import TrainingProgress, format_duration
from megascale_jax.observe.provenance import library_versions, source_commit
from megascale_jax.observe.summary import RunSummary, write_summary
from megascale_jax.observe.throughput import Throughput
from megascale_jax.parallel.plan import Plan, make_plan
from megascale_jax.train.batches import train_batches
from megascale_jax.train.folder import RunFolder
from megascale_jax.train.garbage import collected_by_hand
from megascale_jax.train.integrity import Integrity
from megascale_jax.train.peak import peak_flops
from megascale_jax.train.profiles import Profiles
from megascale_jax.train.saved import named_arrays, named_state
from megascale_jax.train.spikes import Spikes
from megascale_jax.train.stamps import StampEvents
from megascale_jax.train.state import TrainState, initial_state
from megascale_jax.train.step import make_steps, place_batch, place_vote

_TIERS = {"local": " (memory of this host)", "peer": " (memory of another host)", "durable": ""}


@dataclass(frozen=True)
class Outcome:
    """How a call of `Trainer.run` ended: the summary when all steps are done, else the step at which it was stopped."""

    step: int
    summary: RunSummary | None
    saved: int | None
    """Step of the newest complete checkpoint."""


class Trainer:
    """One process's part of a run. `comm.init.start` has been called; `run` may be called once."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        prepared: TrainingData | Prepared,
        *,
        fresh: bool = False,
        marks: Marks | None = None,
    ):
        """Plan the run, take its folder and meet the other ranks; ``fresh`` removes an earlier run there first, ``marks`` show where it is.

        Raises ConfigError when the plan does not fit the devices; nothing has been written then. Raises RunFolderError, on all ranks, when
        the folder or the place of the checkpoints is another's; no keeper has been spoken to then.
        """
        self.experiment, self.folder, self.prepared = experiment, folder, as_training_data(prepared)
        self.plan: Plan = make_plan(experiment, jax.devices())
        self.steps = make_steps(experiment, self.plan)
        self.peak = peak_flops(experiment, self.plan.mesh.size)
        self.throughput = Throughput(experiment.tokens_per_step, flops_per_token(experiment.model, "full"), self.peak)
        self.is_first = jax.process_index() == 0
        self.marks = marks or Marks()
        self.has_evaluated = False
        self.skipped = 0
        self.spikes = Spikes(experiment, self.marks, self._event, self._say)
        self.tier = "durable"
        self.data_wait_s = 0.0
        self.commit = source_commit()
        self.metrics: MetricsWriter | None = None
        self.progress: TrainingProgress | None = None
        self.tokenizer: str | None = None
        self.integrity = Integrity(experiment, self.plan, self.steps.optimizer, self.marks, self._say)
        with ExitStack() as held:

            def take() -> tuple[str, Sequence[Rewind]]:
                if not self.is_first:
                    return "", ()
                held.enter_context(folder.taken(experiment, fresh=fresh))
                self.tokenizer = self.prepared.tokenizer.save(folder.path)
                known = folder.experiment().train.rewinds
                for to_step, first, end in set(experiment.train.rewinds) - set(known):
                    self.marks.told("rewind", to_step, f"without samples {first} to {end - 1}")
                return folder.identity(), joined(known, experiment.train.rewinds)

            identity, known = all_results(take, RunFolderError)[0]
            rewinds = joined(known)
            self.experiment = experiment.model_copy(update={"train": experiment.train.model_copy(update={"rewinds": rewinds})})
            events = folder.path / EVENTS_FOLDER if self.marks.events.is_on else None
            self.store = CheckpointStore(
                folder.place(experiment), identity, self.plan, experiment.train.checkpoint, self._say, rewinds, events
            )
            self._held = held.pop_all()
        self._begin_events(identity)
        self.profiles = Profiles(folder.path, experiment.train.steps, jax.process_index(), jax.process_count(), self.marks)
        self.stamps = StampEvents(self.plan, self.marks.events, experiment.train.events.detail_every)

    def _begin_events(self, identity: str) -> None:
        """The folder is this run's by now, on all ranks: an earlier run there has been removed if it was to be."""
        mesh, own = self.plan.mesh, jax.process_index()
        devices = [index for index, device in enumerate(mesh.devices.flat) if device.process_index == own]
        self.marks.events.describe(run=identity, mesh=mesh.devices.shape, devices=devices)
        self.marks.events.begin()

    def run(self, stop: Any) -> Outcome:
        """Train from the newest checkpoint, or from the start, until done or until any rank's ``stop.asked``."""
        train = self.experiment.train
        self.marks.enter("restore")
        with (
            self._held,
            self.store,  # an error in the loop must not lose the save in flight
            train_batches(self.prepared, train, self._batch_layout) as batches,
        ):
            resumed_from, state = self._begin(batches)
            if self.is_first:
                self.folder.begin(self.experiment)
            with (
                self._metrics_writer(resumed_from) as self.metrics,
                TrainingProgress(train.steps, start_step=resumed_from or 0, rank=jax.process_index()) as self.progress,
                collected_by_hand(),
                self.profiles,
            ):
                if resumed_from is not None:
                    self._say(f"resumed from step {resumed_from} of {self.folder.path}{_TIERS[self.tier]}")
                    self._event(resumed_from, EVENT_RESUME)
                    if self.tier != "durable":  # it may never have reached storage
                        self._save(resumed_from, state, batches)
                is_durable = resumed_from is not None and self.tier == "durable"
                self.spikes.begin(resumed_from or 0, batches.position, is_durable=is_durable)
                step, state = self._loop(state, resumed_from or 0, batches, stop)
                self.marks.enter("end")
                self.store.wait()
                self._durable(step)
                summary = None
                if step >= train.steps:
                    self.progress.update(step, note="evaluating on the held-out split")
                    loss = self.held_out_loss(state, train.evaluation.final_batches)
                    self.marks.enter("end")
                    summary = self._summarize(step, loss, resumed_from)
                    self.store.close(is_over=True)
        return Outcome(step, summary, self.folder.latest(self.experiment) if self.is_first else None)

    def held_out_loss(self, state: TrainState, batches: int | None) -> float:
        """Mean negative log-likelihood over the held-out split, or its first global batches, nats per token."""
        total, count = 0.0, 0
        for batch in held_out_batches(self.prepared, batches=batches, **self._batch_layout):
            self.marks.enter("evaluate" if self.has_evaluated else "compile")
            nats, tokens = self.steps.evaluate(state.params, place_batch(self.plan, batch))
            total, count = total + float(nats), count + int(tokens)
            self.has_evaluated = True
        return total / max(count, 1)

    @property
    def _batch_layout(self) -> dict[str, Any]:
        return {
            "global_batch_size": self.experiment.train.global_batch_size,
            "data_size": self.experiment.parallel.data,
            "data_indices": self.plan.data_indices,
            "micro_batch_size": self.experiment.parallel.micro_batch_size,
        }

    def _begin(self, batches: BatchIterator) -> tuple[int | None, TrainState]:
        restored = self.store.restore()
        self.store.prepare()
        self.integrity.begin(restored.step if restored is not None else None)
        if restored is None:
            return None, initial_state(self.plan, self.steps.optimizer, self.experiment.train.seed)
        batches.restore(restored.description["data"])
        saved = Experiment.model_validate_json(restored.description["experiment"])
        if changes := [str(item) for item in differences(saved, self.experiment) if item.key.startswith(("parallel.", "system."))]:
            effect = "dropout draws others" if self.experiment.model.dropout else "sums are rounded in another order"
            self._say(f"goes on with another layout ({effect}): {', '.join(changes)}")
        self.tier = restored.tier
        self.marks.resumed(restored.step, is_durable=restored.tier == "durable")
        return restored.step, named_state(self.plan, self.steps.optimizer, restored.arrays)

    def _loop(self, state: TrainState, first: int, batches: BatchIterator, stop: Any) -> tuple[int, TrainState]:
        train = self.experiment.train
        unread: tuple[int, dict[str, Any]] | None = None
        step, stopping = first, False
        self.stamps.begin(first)
        while step < train.steps and not stopping:
            self.marks.enter("data", step + 1)
            asked_at = time.monotonic()
            rows = next(batches)
            data_wait_s = time.monotonic() - asked_at
            self.marks.enter("compile" if step == first else "step", step + 1)
            batch, state = place_batch(self.plan, rows), self.integrity.drilled(state)
            with self.profiles.step(step + 1):
                state, metrics = self.steps.train(state, batch, place_vote(self.plan, stop.asked))
            step += 1
            if unread is not None:
                # Before the next batch is asked for: the rows of the one before the last may be overwritten then.
                stopping = self._read(*unread)
            unread = (step, metrics | {"data_wait_s": data_wait_s, "position": batches.position})
            evaluates = _is_due(step, train.evaluation.every) and step < train.steps
            saves = (_is_due(step, train.checkpoint.every) and not self.spikes.holds_saves) or step == train.steps
            has_compiled = step == first + 1  # waited for, so that the long first run of the program is told from a step
            if step % train.gc_every == 0:
                gc.collect()
            compares = self.integrity.is_due(step)
            if evaluates or saves or stopping or has_compiled or compares:
                stopping |= self._read(*unread)
                unread = None
                if compares:
                    self.integrity.check(step, state)
                with self.throughput.pause():
                    self.stamps.calibrate()
                    if evaluates:
                        self._evaluate(step, state)
                    if saves or stopping:
                        self._save(step, state, batches)
        return step, state

    def _metrics_writer(self, resumed_from: int | None) -> AbstractContextManager[MetricsWriter | None]:
        if not self.is_first:
            return nullcontext()
        return MetricsWriter(self.folder.path, tensorboard=self.experiment.train.logging.tensorboard, resume_step=resumed_from)

    def _read(self, step: int, metrics: dict[str, Any]) -> bool:
        """Wait for a step's numbers, show and write them; whether a rank has asked to stop."""
        stamps = metrics.pop("stamps", None)
        values = {key: float(value) for key, value in metrics.items()}
        self.profiles.read(step)
        self.throughput.step_done()
        if self.throughput.tokens_per_s is not None:  # the first step waits for the loader to start, and is not measured
            self.data_wait_s += values["data_wait_s"]
        if values["skipped"]:
            self.skipped += 1
            self._event(step, EVENT_SKIP)
            self._say(f"step {step} was skipped: loss {values['loss']}, gradient norm {values['grad_norm']}")
        if stamps is not None:
            self.stamps.write(step, stamps)
        self.marks.step_done(step, values["loss"], is_skipped=values["skipped"] > 0, step_s=self.throughput.last_step_s)
        age_s, safe = self._durable(step)
        self.spikes.read(step, values["loss"], int(values["position"]))
        if self.metrics is not None and _is_due(step, self.experiment.train.logging.every):
            self.metrics.train(
                step,
                {
                    "loss": values["loss"],
                    "grad_norm": values["grad_norm"],
                    "learning_rate": values["learning_rate"],
                    "tokens": step * self.experiment.tokens_per_step,
                    "valid_tokens": values["tokens"],
                    "skipped": values["skipped"],
                    "tokens_per_s": self.throughput.tokens_per_s,
                    "mfu": self.throughput.mfu,
                    "checkpoint_age_s": age_s,
                    "data_wait_s": values["data_wait_s"],
                },
            )
        assert self.progress is not None
        left = self.throughput.eta_s(self.experiment.train.steps - step)
        self.progress.update(step, values["loss"], self.throughput.tokens_per_s, self.throughput.mfu, left, safe)
        if values["stop_votes"] > 0:
            self.marks.told("stop", step)
        return values["stop_votes"] > 0

    def _evaluate(self, step: int, state: TrainState) -> None:
        loss = self.held_out_loss(state, self.experiment.train.evaluation.batches)
        if self.metrics is not None:
            self.metrics.evaluation(step, {"loss": loss})
        self._say(f"step {step}: held-out loss {loss:.4f}")

    def _save(self, step: int, state: TrainState, batches: BatchIterator) -> None:
        self.integrity.check(step, state)
        description = {
            "experiment": self.experiment.model_dump_json(),
            "data": batches.state(),
            "tokenizer": self.tokenizer,
            "commit": self.commit,
            "versions": library_versions(),
        }
        errors = self.store.errors
        with self.marks.section("checkpoint", step):
            self.store.save(step, named_arrays(state), description)
        if self.store.errors == errors:
            self.marks.saved(step)
            self.spikes.saved(step)
        self._event(step, EVENT_CHECKPOINT, {"blocked_s": self.store.blocked_s})

    def _summarize(self, step: int, loss: float, resumed_from: int | None) -> RunSummary:
        measured = self.throughput.summary()
        summary = RunSummary(
            validation_loss=loss,
            unigram_nats=self.prepared.unigram_nats,
            bigram_nats=self.prepared.bigram_nats,
            tokens_per_s=measured.tokens_per_s,
            mfu=measured.mfu,
            steps=step,
            wall_s=self.metrics.wall_s if self.metrics is not None else 0.0,
            resumed_from=resumed_from,
            parameters=count_parameters(self.experiment.model),
            peak_flops=self.peak,
            checkpoint_errors=self.store.errors,
            skipped_steps=self.skipped,
            data_wait_fraction=self.data_wait_s / measured.measured_s if measured.measured_s else None,
            data_digest=self.prepared.digest,
            commit=self.commit,
            versions=library_versions(),
        )
        if self.metrics is not None:
            self.metrics.evaluation(step, {"loss": loss})
            try:
                write_summary(self.folder.path, summary)
            except OSError as error:
                self._say(f"the summary could not be written: {error}")
        return summary

    def _durable(self, step: int) -> tuple[float | None, str]:
        """Age of the newest durable checkpoint, seconds, and words for it; what stage 2 lost since the last call is on record then."""
        known, durable = self.store.errors, self.store.durable()
        if self.store.errors > known:
            self._event(step, EVENT_CHECKPOINT_ERROR)
        if durable is None:
            return None, ""
        self.marks.durable(durable["step"])
        self.spikes.durable(durable["step"])
        age_s = max(0.0, time.time() - durable["created_unix_s"])
        return age_s, f"step {durable['step']} safe for {format_duration(age_s)}"

    def _event(self, step: int, name: str, values: dict[str, float] | None = None) -> None:
        if self.metrics is not None:
            self.metrics.event(step, name, values)

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.print(text)
        elif self.is_first:
            print(text, flush=True)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
