"""The drill of `benchmarks/fault_checkpoint.py`, two dozen faults of every kind; more are injected by running it."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fault_checkpoint
from fault_cluster import LIMIT_S


def test_newest_good_checkpoint_survives_every_kind_of_fault(tmp_path):
    outcomes = fault_checkpoint.campaign(tmp_path / "drill", 24, seed=0, show=False)
    totals = fault_checkpoint.totals(outcomes)
    bad = [one for one in outcomes if not one["recovered"]]
    assert not bad, json.dumps(bad, indent=1)
    assert (totals["injected"], totals["lost_good"], totals["hung"]) == (24, 0, 0)
    assert totals["longest_s"] < LIMIT_S
    assert set(totals["by_kind"]) == {kind.__name__ for kind in fault_checkpoint.KINDS}


def test_full_disk_without_a_disk_of_our_own(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_checkpoint, "mount_small_disk", lambda folder, size: False)
    monkeypatch.setattr(fault_checkpoint, "KINDS", (fault_checkpoint.disk_full,))
    outcomes = fault_checkpoint.campaign(tmp_path / "drill", 3, seed=0, show=False)
    assert all(one["recovered"] and not one["lost_good"] for one in outcomes), outcomes
    assert any(one["failures"] for one in outcomes), "at least one save must have failed"
