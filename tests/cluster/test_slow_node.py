"""How a drill judges what becomes of a node that is slow in real steps, against made-up statuses and a freezer that notes whom it slows."""

from contextlib import contextmanager

import pytest

from megascale_jax.cluster import slow_node
from megascale_jax.cluster.slow_node import SlowNode


@pytest.fixture
def held(monkeypatch):
    held: list[int] = []

    @contextmanager
    def slowed(pid: int, share: float, period_s: float):
        assert 1 / share == pytest.approx(1.1, abs=0.02), "about 10 % longer"
        held.append(pid)
        yield
        held.remove(pid)

    monkeypatch.setattr(slow_node, "slowed", slowed)
    monkeypatch.setattr(slow_node, "_POLL_S", 0.0)
    return held


class Job:
    """Says each status once, the last one again and again."""

    def __init__(self, *statuses):
        self.statuses = list(statuses)

    def status(self):
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


def status(number: int = 0, slow: dict[str, str] | None = None, rules: tuple[str, ...] = ("slow_node",)):
    incidents = [{"number": number, "suspicions": [{"rule": rule} for rule in rules]}] if number else []
    stages = {name: {"stage": stage, "findings": "gemm 1 TFLOP/s"} for name, stage in (slow or {}).items()}
    return {"num_incidents": number, "incidents": incidents, "slow": stages}


def test_it_is_slow_until_the_driver_acts(held):
    slow = SlowNode(Job(status()), status(), "node-1", 17)
    assert held == [17] and not slow.is_enough(status()) and not slow.is_enough(None)
    assert slow.is_enough(status(1)) and slow.measured["slow_s"] >= 0
    slow.release()
    assert held == []


@pytest.mark.parametrize(
    ("last", "word"),
    [
        (status(1, {"node-1": "returned"}), ""),
        (status(1, {"node-1": "archived"}), "archived, expected a clean re-check: gemm"),
        (status(1, {"node-1": "returned", "node-0": "suspected"}), "node-0 suspected, though healthy"),
        (status(1, {}), "node-1 was not suspected"),
        (status(1, {"node-1": "returned"}, ("slow_node", "exit")), "another rule"),
    ],
)
def test_right_is_a_clean_recheck_of_this_node_alone(held, last, word):
    slow = SlowNode(Job(status(1, {"node-1": "isolated"}), None, last), status(), "node-1", 17)
    assert (slow.amiss() == "") if not word else (word in slow.amiss())
    slow.release()


def test_checks_without_an_end_are_said(held, monkeypatch):
    monkeypatch.setattr(slow_node, "CHECKED_S", -1.0)
    slow = SlowNode(Job(status(1, {"node-1": "isolated"})), status(), "node-1", 17)
    assert "were not over" in slow.amiss()
    slow.release()
