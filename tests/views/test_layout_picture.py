"""The picture of a search: a dot a layout, hollow where it does not fit."""

import pytest
from matplotlib.figure import Figure

from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.config.memory import GIB
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.sim.search import Search, search
from megascale_jax.views.layout_picture import plot_layouts

SOFTWARE = load_document("software", "megascale", SoftwareConfig)


def test_each_layout_is_a_dot_filled_where_it_fits(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: kept.append(self))
    base = load_experiment("gpt-13b", ["system=a100"])
    found = search(base, 64, SOFTWARE)
    plot_layouts(found, found.rank_of(base), tmp_path / "picture.png")
    (axes,) = kept[0].axes
    quickest = found.ranked[0]
    limit = 1.5 * quickest.prediction.iteration_s
    filled = [dots for dots in axes.collections if dots.get_facecolors().size]
    assert sum(len(dots.get_offsets()) for dots in filled) == sum(one.prediction.iteration_s <= limit for one in found.ranked)
    places = {tuple(place) for dots in filled for place in dots.get_offsets().tolist()}
    assert (quickest.needed_bytes / GIB, quickest.prediction.iteration_s) in places
    stages = {one.parallel.pipe for one in (*found.ranked, *found.too_large)}
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels <= {f"pipe {pipe}" for pipe in stages} and f"pipe {quickest.parallel.pipe}" in labels
    assert "rank 1" in {text.get_text() for text in axes.texts}


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="no layout on 8 devices fits"):
        plot_layouts(Search(8, 1.0, (), (), ()), None, tmp_path / "picture.png")
