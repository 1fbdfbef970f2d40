"""Windows of ranks: exact without noise, and few false alarms with it, together with the rule that judges them."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megascale_jax.cluster.governance import judged, with_window
from megascale_jax.cluster.lifecycle import NodeStatus
from megascale_jax.cluster.slow_windows import TOTAL, Window
from megascale_jax.cluster.state import Node, Shape, State
from megascale_jax.config.cluster import SlowNodesConfig
from megascale_jax.config.layout import MeshShape
from megascale_jax.views.slow_nodes import main, window_of
from tests.views.made_run import made_run
from tests.views.test_slow_devices import made


def scaled(times, factors):
    """With all passes of each rank longer by its factor, all devices ending together."""
    per = times.mesh.size // len(factors)
    scale = np.repeat(factors, per).reshape(times.mesh.pipe, times.mesh.data, times.mesh.tensor)
    computed = {name: seconds * scale for name, seconds in times.computed.items()}
    total = np.sum([*computed.values()], axis=0)
    whole = np.broadcast_to(total.max(axis=(1, 2, 3), keepdims=True) + 0.01, total.shape).copy()
    ranks = tuple(device // per for device in range(times.mesh.size))
    return replace(times, computed=computed, whole=whole, waits={("forward wait", "pipe"): whole - total}, ranks=ranks)


def followed(windows, mesh, factors, *, steps=40, noise=0.05, seed=0):
    """The state after each of some windows of a run with independent noise in every step and pass."""
    config, names = SlowNodesConfig(), tuple(f"node-{rank}" for rank in range(len(factors)))
    nodes = {name: Node(status=NodeStatus.ASSIGNED, incarnation="", address="") for name in names}
    state = State(shapes=(Shape(num_nodes=len(names)),), seats=names, nodes=nodes)
    for number in range(windows):
        times = scaled(made(1000 * seed + number, steps=steps, noise=noise, mesh=mesh), factors)
        state = with_window(state, judged(state, window_of(times, 1), config, float(number)), config)
        yield state


def test_a_slow_rank_is_told_by_pass_beside_the_other_ranks_of_its_stages():
    found = window_of(scaled(made(mesh=MeshShape(2, 4, 2)), (1, 1, 1, 1, 1, 1.1, 1, 1)), 3)
    assert (found.attempt, found.first, found.end, len(found.ranks)) == (3, 0, 24, 8)
    slow = {one.rank: one.passes for one in found.ranks}[5]
    assert {name: round(one.excess, 3) for name, one in slow.items()} == dict.fromkeys((*made().computed, TOTAL), 0.1)
    assert slow["forward"].cost_s == pytest.approx(0.1 * made().computed["forward"][0, 1, 0, 0]), "seconds of one device"
    assert slow[TOTAL].waits_less == pytest.approx(1, abs=0.01)
    assert all(abs(one.excess) < 1e-9 for rank in found.ranks if rank.rank != 5 for one in rank.passes.values())
    assert Window.model_validate_json(found.model_dump_json()) == found


def test_a_rank_with_several_stages_is_one_and_one_alone_in_its_stage_is_not_told_of():
    times = replace(scaled(made(mesh=MeshShape(2, 4, 1)), (1,) * 8), ranks=(0, 1, 2, 3, 0, 1, 2, 3))
    found = window_of(times, 1)
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3]
    assert window_of(replace(times, ranks=(0, 0, 0, 0, 1, 1, 1, 1)), 1).ranks == ()
    assert window_of(replace(times, ranks=()), 1).ranks == (), "whose devices they are is not known"


def test_what_is_not_known_of_a_device_is_not_known_of_its_rank():
    times = scaled(made(mesh=MeshShape(1, 4, 2)), (1,) * 4)
    for array in (*times.computed.values(), *times.waits.values(), times.whole):
        array[:, 0, 1, 0] = np.nan
    assert [one.rank for one in window_of(times, 1).ranks] == [0, 2, 3]
    few = scaled(made(mesh=MeshShape(1, 4, 2), steps=7), (1,) * 4)
    assert window_of(few, 1).ranks == ()


@pytest.mark.parametrize(("mesh", "ranks"), [(MeshShape(1, 4, 1), 4), (MeshShape(2, 4, 2), 8)])
def test_clean_runs_make_no_suspicion(mesh, ranks):
    assert not any(state.slow for seed in range(3) for state in followed(10, mesh, (1,) * ranks, seed=seed))


@pytest.mark.parametrize(("mesh", "ranks"), [(MeshShape(1, 4, 1), 4), (MeshShape(2, 4, 2), 8)])
def test_a_node_ten_percent_slow_is_suspected_alone_within_few_windows(mesh, ranks):
    for seed in range(4):
        *_, last = followed(6, mesh, (*(1,) * (ranks - 1), 1.1), seed=seed)
        assert list(last.slow) == [f"node-{ranks - 1}"]


def test_the_process_writes_one_line_or_says_what_is_wrong(tmp_path, capsys):
    assert main([str(tmp_path), "--first", "0", "--end", "8", "--attempt", "1"]) == 1
    assert "has no folder events" in capsys.readouterr().err


def test_the_process_reads_the_window_out_of_a_runs_events(tmp_path):
    folder = made_run(tmp_path, scale=lambda of, p, d, t, s: 1.1 if d == 1 else 1.0)
    command = [sys.executable, "-m", "megascale_jax.views.slow_nodes", str(folder), "--first", "4", "--end", "16", "--attempt", "2"]
    found = Window.model_validate_json(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert (found.attempt, found.first, found.end) == (2, 4, 16)
    assert found.ranks == (), "one rank has no peers"
