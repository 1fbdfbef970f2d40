"""The picture of workers: each in its place, the slowest of tensor peers in front."""

import numpy as np
from PIL import Image

from megascale_jax.config.layout import MeshShape
from megascale_jax.views.heat_map import plot_heat_map, worker_grid
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
