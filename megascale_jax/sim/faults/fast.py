"""All seeds of a faulty job at once: one pass of the loop is one incident of every job, in arrays.

The rules are `case.py`'s; what the driver would decide is written out as times here, and `decisions.py` asks the driver's own code. They
differ where that has limits of its own: evictions beyond ``max_evictions`` in a window, several failures that no check finds at once,
slow nodes that are isolated (here a slow node stays).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megascale_jax.observe.booked import KINDS, Kind
from megascale_jax.sim.faults.case import NEVER_NS, Case, ns, run_until, split_run
from megascale_jax.sim.faults.draws import Batch
from megascale_jax.sim.faults.outcome import Outcome


@dataclass
class _Jobs:
    """The state of every job; int64[seeds] unless said otherwise."""

    case: Case
    batch: Batch
    end_ns: int
    now: np.ndarray
    """When the present attempt starts to restore."""
    step: np.ndarray
    interval: np.ndarray
    pool: np.ndarray
    """When each spare is there, int64[seeds, spares], sorted."""
    alive: np.ndarray
    """bool: not over yet."""
    booked: Mapping[Kind, np.ndarray]
    next: np.ndarray
    pending: np.ndarray
    """Incidents that a failure which was not found still has before it; its kind is in ``pending_kind``."""
    pending_kind: np.ndarray
    extra: np.ndarray
    """On top of the restore, for a node that was replaced."""
    incidents: np.ndarray
    replaced: np.ndarray
    gave_up: np.ndarray
    waited: np.ndarray
    columns: dict[str, np.ndarray]
    """Of the events, by kind."""

    def spend(self, kind: Kind, amount: np.ndarray, who: np.ndarray) -> None:
        """Let time pass for some jobs, as far as the end."""
        spent = np.where(who, np.minimum(amount, self.end_ns - self.now), 0)
        self.booked[kind][:] += spent
        self.now = self.now + spent


def simulate(case: Case, batch: Batch, end_ns: int, need_steps: float | None = None) -> Outcome:
    """Jobs that go on until ``end_ns``, or until ``need_steps`` are done; then ``end_ns`` is the longest they may take.

    Failures after ``end_ns`` must not be needed: draw them up to it.
    """
    jobs = _begin(case, batch, end_ns)
    need_ns = np.full(jobs.now.size, NEVER_NS) if need_steps is None else np.ceil(need_steps * jobs.step).astype(np.int64)
    is_done = np.zeros(jobs.now.size, bool)
    while jobs.alive.any():
        struck, kinds, fault = _attempt(jobs, need_ns, is_done)
        if struck.any():
            _recover(jobs, struck, kinds, fault)
        jobs.alive &= jobs.now < end_ns
    return Outcome(
        booked_ns=jobs.booked,
        wall_ns=jobs.now,
        steps=jobs.booked["training"] / jobs.step,
        incidents=jobs.incidents,
        replaced=jobs.replaced,
        gave_up=jobs.gave_up,
        waited_ns=jobs.waited,
        is_finished=is_done if need_steps is not None else np.ones(jobs.now.size, bool),
    )


def _begin(case: Case, batch: Batch, end_ns: int) -> _Jobs:
    seeds = batch.is_slow.size
    cost = case.slow_nodes.step_cost if case.slow_nodes is not None else 0.0
    longer = np.where(batch.is_slow, 1.0 + cost, 1.0)
    zeros = np.zeros(seeds, np.int64)
    repeats = [case.incidents_until_evicted(event) for event in case.events]
    columns = {name: np.array([getattr(event, name) for event in case.events], np.int64) for name in _COLUMNS}
    columns["is_silent"] = np.array([event.shows == "silent" for event in case.events])
    columns["is_hopeless"] = np.array([repeat is None for repeat in repeats])
    columns["repeats"] = np.array([case.cluster.fruitless_recoveries + 1 if repeat is None else repeat for repeat in repeats], np.int64)
    return _Jobs(
        case=case,
        batch=batch,
        end_ns=end_ns,
        now=zeros.copy(),
        step=np.rint(case.step_ns * longer).astype(np.int64),
        interval=np.rint(case.interval_ns * longer).astype(np.int64),
        pool=np.zeros((seeds, case.spares), np.int64),
        alive=np.ones(seeds, bool),
        booked={kind: zeros.copy() for kind in KINDS},
        next=zeros.copy(),
        pending=zeros.copy(),
        pending_kind=zeros.copy(),
        extra=zeros.copy(),
        incidents=zeros.copy(),
        replaced=zeros.copy(),
        gave_up=zeros.copy(),
        waited=zeros.copy(),
        columns=columns,
    )


_COLUMNS = ("takes", "detect_ns", "away_ns", "back_ns", "lag_ns")


def _attempt(jobs: _Jobs, need_ns: np.ndarray, is_done: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Restore and run until a failure, the end or the last step: who was struck, by which kind, and by which of the draws (-1: again)."""
    case, alive = jobs.case, jobs.alive
    rows = np.arange(jobs.now.size)
    restore, compiled = case.restore_ns + jobs.extra, np.full(jobs.now.size, case.compile_ns)
    begins = jobs.now + restore + compiled
    drawn = np.maximum(jobs.batch.times_ns[rows, jobs.next], jobs.now)
    again = np.where(jobs.pending > 0, begins + case.recurs_ns, NEVER_NS)
    is_again = again < drawn
    rest = np.minimum(need_ns - jobs.booked["training"], NEVER_NS // 4)
    finish = begins + run_until(rest, jobs.interval, case.blocking_ns)
    strike = np.minimum(drawn, again)
    finishes = alive & (finish <= strike) & (finish <= jobs.end_ns)
    struck = alive & ~finishes & (strike < jobs.end_ns)
    stop = np.where(finishes, finish, np.where(struck, strike, jobs.end_ns))
    kinds = np.where(is_again, jobs.pending_kind, jobs.batch.kinds[rows, jobs.next])
    began = jobs.now
    jobs.spend("restart", np.minimum(restore, stop - began), alive)
    jobs.spend("compile", np.minimum(compiled, stop - jobs.now), alive)
    ran = np.where(alive, stop - jobs.now, 0)
    lag = jobs.columns["lag_ns"][kinds] if case.events else np.zeros_like(ran)
    trained, saved, safe = split_run(ran, jobs.interval, case.blocking_ns, lag)
    kept = np.where(struck, safe, trained)
    jobs.booked["training"][:] += kept
    jobs.booked["recomputed"][:] += trained - kept
    jobs.booked["checkpoint"][:] += saved
    jobs.now = jobs.now + ran
    is_done |= finishes
    jobs.alive = alive & ~finishes
    fault = np.where(is_again, -1, jobs.next)
    jobs.next = jobs.next + (struck & ~is_again)
    return struck, kinds, fault


def _recover(jobs: _Jobs, struck: np.ndarray, kinds: np.ndarray, fault: np.ndarray) -> None:
    """From a failure to the begin of the next attempt."""
    case, columns = jobs.case, jobs.columns
    strike = jobs.now
    jobs.incidents[:] += struck
    is_silent, replaces, heals = _outcome(jobs, struck, kinds, fault)
    jobs.spend("idle", columns["detect_ns"][kinds], struck)
    noticed = jobs.now
    jobs.spend("restart", np.full_like(strike, case.suspend_ns), struck)
    jobs.spend("diagnosis", np.full_like(strike, case.diagnose_ns), struck)
    lost, replacing = struck & is_silent, jobs.now
    returns = strike + np.where(lost & heals, columns["back_ns"][kinds], columns["away_ns"][kinds])
    keeps_until = noticed + ns(case.cluster.grace_s)
    comes_back = lost & (returns <= keeps_until)
    ready = np.maximum(replacing, np.where(comes_back, returns, np.where(lost, keeps_until, replacing)))
    takes_spare = (lost & ~comes_back) | replaces
    ready, used = _taken(jobs, takes_spare, columns["takes"][kinds], returns, ready)
    wait = ready - replacing
    limit = ns(case.cluster.wait_s)
    fails = struck & (wait > limit)
    jobs.spend("restart", np.minimum(wait, limit), struck)
    jobs.spend("idle", np.maximum(case.operator_ns, wait - limit), fails)
    jobs.gave_up[:] += fails
    jobs.waited[:] += np.where(struck, wait, 0)
    used = np.where(fails, 0, used)  # a driver that is started again fills all seats anew
    jobs.replaced[:] += used
    jobs.extra = np.where(struck, np.where(used > 0, case.replace_ns, 0), jobs.extra)


def _outcome(jobs: _Jobs, struck: np.ndarray, kinds: np.ndarray, fault: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which jobs lost nodes that said nothing, which replace a node that they could ask, and where a restart heals."""
    columns, rows = jobs.columns, np.arange(struck.size)
    is_new = struck & (fault >= 0)
    at = np.maximum(fault, 0)
    heals, found = jobs.batch.heals[rows, at], jobs.batch.found[rows, at]
    is_silent = columns["is_silent"][kinds]
    hides = is_new & ~is_silent & ~heals & ~found
    again = struck & (fault < 0)
    left = np.where(hides, np.maximum(jobs.pending, columns["repeats"][kinds] - 1), jobs.pending - again)
    cured = (again | hides) & (left == 0)
    jobs.pending_kind = np.where(hides, kinds, jobs.pending_kind)
    jobs.pending = np.where(struck, left, jobs.pending)
    by_hand = cured & columns["is_hopeless"][kinds]
    jobs.spend("idle", np.full(struck.size, jobs.case.operator_ns), by_hand)
    jobs.gave_up[:] += by_hand
    return is_silent, (is_new & ~is_silent & ~heals & found) | cured, heals


def _taken(jobs: _Jobs, takes: np.ndarray, counts: np.ndarray, returns: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the last of the nodes that are needed is there, and how many of them are spares; lost ones that return come in, too.

    Spares and returning nodes are one pool, from which the earliest are taken; as many as before remain.
    """
    ready, used = wanted.copy(), np.zeros_like(wanted)
    for count in np.unique(counts[takes]):
        rows = np.flatnonzero(takes & (counts == count))
        back = np.repeat(returns[rows, None], count, axis=1)
        pool = np.concatenate([jobs.pool[rows], back], axis=1)
        order = np.argsort(pool, axis=1, kind="stable")
        pool = np.take_along_axis(pool, order, axis=1)
        ready[rows] = np.maximum(wanted[rows], pool[:, count - 1])
        used[rows] = (order[:, :count] < jobs.case.spares).sum(axis=1)
        jobs.pool[rows] = pool[:, count:]
    return ready, used
