"""The picture of workers: each in its place, the slowest of tensor peers in front."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megascale_jax.config.layout import MeshShape
from megascale_jax.views.heat_map import plot_heat_map, worker_grid
from megascale_jax.views.run_heat_map import plot_run
from megascale_jax.views.slow_devices import SlowDevices
from megascale_jax.views.step_times import StepTimes
from megascale_jax.views.style import coarse
from megascale_jax.views.what_if import Worker

MESH = MeshShape(2, 3, 2)
WORKERS = [Worker(1 + rank / 100, 0.0, rank, *MESH.coordinates(rank)) for rank in range(MESH.size)]


def test_a_cell_is_the_slowest_of_its_devices():
    assert worker_grid(WORKERS, MESH).tolist() == [[1.01, 1.03, 1.05], [1.07, 1.09, 1.11]]


def test_a_slow_worker_is_a_bright_cell(tmp_path):
    pictures = []
    for slowdown in (1.0, 1.5):
        slow = [
            Worker(slowdown if worker.rank == 11 else 1.0, 0.0, worker.rank, worker.pipe, worker.data, worker.tensor) for worker in WORKERS
        ]
        plot_heat_map(slow, MESH, "a job", "one line", tmp_path / "a.png")
        pictures.append(np.asarray(Image.open(tmp_path / "a.png").convert("L"), float))
    assert pictures[0].shape == (700, 1200)
    rows, columns = np.nonzero(pictures[1] - pictures[0] > 100)
    assert rows.min() > 300 and 600 < columns.min() < columns.max() < 1080, "the lower right cell, and nothing else"


def test_names_with_signs_of_formulas_are_drawn(tmp_path):
    plot_heat_map(WORKERS, MESH, "a$b\\c$", "$x\\y$", tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size == (1200, 700)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 20), st.integers(1, 20), st.data())
def test_the_one_that_is_far_off_is_in_its_cell(rows, columns, most_rows, most_columns, data):
    excess = np.full((rows, columns), np.nan)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    excess[row] = 0.01
    excess[row, column] = data.draw(st.sampled_from([-0.4, 0.4]))
    cells = coarse(excess, most_rows, most_columns)
    assert cells.shape == (min(rows, most_rows), min(columns, most_columns))
    (place,) = np.argwhere(np.abs(cells) == 0.4)
    assert np.abs((place + 0.5) / cells.shape - (np.array([row, column]) + 0.5) / excess.shape).max() < 1 / min(cells.shape)


@pytest.mark.parametrize("device", [1, 5000, 12287])
def test_one_slow_device_of_thousands_is_in_both_panels(device, tmp_path):
    mesh, shape = MeshShape(192, 16, 4), (1, 192, 16, 4)
    times = StepTimes(mesh, np.arange(1), (), {}, np.zeros(shape), {}, np.zeros(shape), ())
    pictures = []
    for value in (0.0, 0.3):
        excess = np.zeros(mesh.size)
        excess[device] = value
        slow = SlowDevices({name: excess.reshape(shape[1:]) for name in ("forward", "backward")}, (), ())
        plot_run(times, slow, "a job", tmp_path / "a.png")
        pictures.append(np.asarray(Image.open(tmp_path / "a.png").convert("RGB"), float))
    rows = np.flatnonzero(np.abs(pictures[1] - pictures[0]).max(axis=(1, 2)) > 60)
    assert rows.min() < 360 and rows.max() > 400
