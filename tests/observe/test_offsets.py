"""Clocks of hosts against each other: skewed, drifting, noisy, with long uptimes."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale_jax.observe import event_segments
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import STEP_END, Events
from megascale_jax.observe.offsets import PIECE_NS, estimate, offsets

UPTIME_NS = 400 * 86_400 * 10**9


@given(
    skew_ns=st.integers(-UPTIME_NS, UPTIME_NS),
    drift=st.floats(-1e-4, 1e-4),
    noise_ns=st.integers(0, 100_000),
    step_ns=st.integers(10**7, 10**10),
    steps=st.integers(3, 400),
    missing=st.sets(st.integers(0, 400)),
    seed=st.integers(0, 100),
)
@example(skew_ns=UPTIME_NS, drift=1e-4, noise_ns=1000, step_ns=10**9, steps=400, missing=set(), seed=0)
@settings(max_examples=100, deadline=None)
def test_any_skew_and_drift_is_found_within_noise_and_half_a_piece(skew_ns, drift, noise_ns, step_ns, steps, missing, seed):
    noise = np.random.default_rng(seed)
    true = UPTIME_NS + np.arange(steps, dtype=np.int64) * step_ns
    own = true + skew_ns + np.rint((true - true[0]) * drift).astype(np.int64) + noise.integers(-noise_ns, noise_ns, steps, endpoint=True)
    reference = true + noise.integers(-noise_ns, noise_ns, steps, endpoint=True)
    missing -= {0}
    offset = estimate({n: int(own[n]) for n in range(steps) if n not in missing}, dict(enumerate(reference.tolist())))
    assert offset.steps == steps - len(missing & set(range(steps)))
    kept = np.array([n for n in range(steps) if n not in missing])
    error = np.abs(offset.to_reference(own[kept]) - true[kept])
    assert error.max() <= 4 * noise_ns + abs(drift) * 1.01 * PIECE_NS + 2
    if drift == 0 or len(offset.at_ns) > 4:
        inner = (own[kept] >= offset.at_ns[0]) & (own[kept] <= offset.at_ns[-1])
        assert np.median(error[inner]) <= 4 * noise_ns + abs(drift) * 0.1 * PIECE_NS + 2
    if offset.steps >= 3:
        assert offset.uncertainty_ns <= 4 * 1.5 * noise_ns + abs(drift) * 1.5 * PIECE_NS + 2


def test_the_uncertainty_is_that_of_the_noise():
    noise, number = np.random.default_rng(0), 500
    true = np.arange(number) * 10**8
    own = dict(enumerate((true + noise.normal(0, 3000, number).astype(int) + 12_345_678).tolist()))
    offset = estimate(own, dict(enumerate((true + noise.normal(0, 4000, number).astype(int)).tolist())))
    assert abs(offset.offset_ns[0] - 12_345_678) < 1500
    assert offset.uncertainty_ns is not None and 4000 < offset.uncertainty_ns < 6000


def test_nothing_is_made_up():
    assert estimate({1: 10}, {2: 10}) is None
    offset = estimate({1: 10, 2: 20}, {1: 5, 2: 15})
    assert (offset.steps, offset.uncertainty_ns, offset.to_reference(np.array([7])).tolist()) == (2, None, [2])


def write(run, rank, skew_ns, steps, monkeypatch, *, stamps=True, role="trainer"):
    """A process on a host of its own, whose clock is ahead by ``skew_ns``."""
    monkeypatch.setattr(event_segments, "boot_id", lambda: f"host-{skew_ns}")
    out = Events(run / "events", rank=rank, role=role)
    for device in (2 * rank, 2 * rank + 1):
        at = np.array([10**12 + step * 10**8 + skew_ns for step in steps])
        if stamps:
            out.many(name=STEP_END, lane="compute", begin_ns=at - 50, duration_ns=50, device=device, step=np.array(steps))
    out.record("step", 10**12, 5, step=1)
    out.close()


def test_clocks_of_a_run_are_found_from_its_events(tmp_path, monkeypatch):
    for rank, skew_ns in enumerate((0, 777_000_000_000, -5_000)):
        write(tmp_path, rank, skew_ns, range(1, 10), monkeypatch)
    write(tmp_path, 1, 777_000_000_000, range(1, 2), monkeypatch, stamps=False, role="keeper")
    with read_events(tmp_path) as store:
        found = offsets(store)
        names = {(file.facts.role, file.facts.rank): file.process for file in store.files}
    reference = names["trainer", 0]
    assert {one.reference for one in found.values()} == {reference}
    shown = {place: int(found[name].offset_ns[0]) for place, name in names.items()}
    assert shown == {("trainer", 0): 0, ("trainer", 1): 777_000_000_000, ("trainer", 2): -5_000, ("keeper", 1): 777_000_000_000}
    assert {found[names["trainer", rank]].steps for rank in range(3)} == {9}
    assert found[names["trainer", 1]].uncertainty_ns == 0
