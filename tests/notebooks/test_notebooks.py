"""Every notebook runs, in a folder of its own, and its numbers are those of the package; none keeps an output in the repository."""

import json
import os
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from megascale_jax.config.load import load_document, load_experiment, load_system
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.sim.analytic import predict
from megascale_jax.sim.faults.closed_forms import meta_ettr
from megascale_jax.sim.network import closed_forms
from megascale_jax.sim.search import search
from megascale_jax.sim.validation.tables import TABLES
from notebooks.strip import stripped

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_LIMIT_S = 300
KINDS = ("*measured*", "*simulated*", "*published*")


def source(path):
    return [(cell.cell_type, cell.source) for cell in nbformat.read(path, as_version=4).cells]


def run(book, folder):
    """Executes it as a fresh process on one CPU device would; its ``key_numbers``."""
    book.cells.append(nbformat.v4.new_code_cell("import json\n\nprint(json.dumps(key_numbers))"))
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC", "TRITON_INTERPRET")}
    root = str(FOLDER.parent)
    paths = os.pathsep.join([root, kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [root])
    changes = {"PYTHONPATH": paths, "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "IPYTHONDIR": str(folder / "ipython"), "COLUMNS": "120"}
    client = NotebookClient(
        book, timeout=CELL_LIMIT_S, startup_timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=kept | changes)
    return json.loads(book.cells[-1].outputs[0].text)


@cache
def score(name):
    return TABLES[name]()


def of_scaling(numbers):
    means = score("table2").means["simulated"]
    assert (numbers["mean_error"], numbers["largest_error"]) == pytest.approx(means)
    assert numbers["ladder_last"] == pytest.approx(means[0])
    assert numbers["seconds_12288"] == pytest.approx(
        next(row.predicted for row in score("table2").rows if row.name == "MegaScale, 12,288 GPUs")
    )


def of_weak_scaling(numbers):
    assert numbers["largest_error"] == pytest.approx(score("figure9").means["simulated"][1])
    assert numbers["largest_error_micro_batch_1"] == pytest.approx(score("figure9").means["micro-batch 1"][1])


def of_ablation(numbers):
    assert (numbers["mean_error"], numbers["largest_error"]) == pytest.approx(score("table3").means["simulated"])
    assert numbers["last"] - numbers["first"] == pytest.approx(sum(row.predicted for row in score("table3").rows))


def of_batches(numbers):
    assert numbers["bubbles"] == pytest.approx([7 / (6 * m) for m in (32, 96, 128)]), "(p - 1) / (v m)"
    last_step = next(row for row in score("table3").rows if row.name.startswith("LAMB"))
    assert 100 * (numbers["mfu"][1] - numbers["mfu"][0]) == pytest.approx(last_step.predicted)
    assert numbers["by_events"] == pytest.approx([1.0] * 3, abs=0.005)
    assert all(1 < loss < 5.55 for loss in numbers["live_losses"]), "ln 257 is what a model that knows nothing has"


def of_goodput(numbers):
    rate = 6.5 / 1000 * 2000 / 86_400
    assert (numbers["formula_60"], numbers["formula_5"]) == pytest.approx((meta_ettr(rate, 300, 3600, 0), meta_ettr(rate, 300, 300, 0)))
    assert (numbers["formula_60"], numbers["formula_5"]) == pytest.approx((0.684, 0.932), abs=5e-4)
    assert numbers["mtbf_rsc_1_h"] == pytest.approx(2.40, abs=0.005)
    assert numbers["goodput"] > 0.9, "the paper: more than 90 %"


def of_network(numbers):
    config = load_system("a100", []).network
    for split, flows, delivered, exact, error in numbers["uplinks"]:
        fabric = config if split else config.without_split()
        assert exact == pytest.approx(closed_forms.delivered(flows, fabric.tor_uplinks, fabric.nic_gbit_s, fabric.uplink_gbit_s))
        assert abs(delivered - exact) < 4 * error, "Monte Carlo and closed form"
    assert numbers["dropped"] == 0, "lossless"
    placed, by_name = numbers["across_tor_bytes"]
    assert all(one < other for one, other in zip(placed, by_name, strict=True))


def of_plan_search(numbers):
    base = load_experiment("gpt-175b", ["system=a100"])
    found = search(base, 12_288, load_document("software", "megascale", SoftwareConfig))
    assert numbers["layouts"] == [len(found.ranked), len(found.too_large)]
    assert numbers["first_s"] == pytest.approx(found.ranked[0].prediction.iteration_s)
    assert numbers["own"] == pytest.approx([found.rank_of(base), predict(base).iteration_s])
    assert all(abs(needed - peak) < 2.0 for needed, peak in numbers["memory"]), "GiB"
    assert (numbers["best"]["no overlap of data communication"], numbers["best"]["530 B on 11,200 GPUs"]) == ("8 x 8 x 6", "8 x 35 x 3")


CHECKS = {
    "ablation": of_ablation,
    "goodput": of_goodput,
    "lamb_batch": of_batches,
    "network": of_network,
    "plan_search": of_plan_search,
    "strong_scaling": of_scaling,
    "weak_scaling": of_weak_scaling,
}


def test_every_notebook_is_checked_and_told_of():
    assert {path.stem for path in BOOKS} == set(CHECKS)
    page = (FOLDER / "README.md").read_text()
    assert all(f"]({path.name})" in page for path in BOOKS)


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs_in_the_one_form_that_diffs_well(path):
    text = path.read_text()
    assert text == stripped(text), f"run: python notebooks/strip.py {path}"


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_it_has_a_title_says_how_to_read_it_and_which_kinds_its_numbers_are(path):
    (kind, first), *others = source(path)
    assert kind == "markdown" and first.startswith("# ")
    assert "**How to read**:" in first
    assert any(word in first.lower() for word in KINDS)
    words = sum(len(text.split()) for kind, text in [("markdown", first), *others] if kind == "markdown")
    assert words < 700, "five minutes, pictures and tables included"


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_it_runs_and_its_numbers_are_the_packages(path, tmp_path):
    CHECKS[path.stem](run(nbformat.read(path, as_version=4), tmp_path))
    assert not [left for left in tmp_path.rglob("*") if left.is_file() and "ipython" not in left.parts], "nothing is left beside it"


def test_a_cell_that_fails_fails_the_run(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("key_numbers = {}\nassert 1 == 2")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(book, tmp_path)


def test_stripping_takes_what_a_run_leaves():
    text = BOOKS[0].read_text()
    book = json.loads(text)
    code = next(cell for cell in book["cells"] if cell["cell_type"] == "code")
    code |= {"execution_count": 3, "outputs": [{"name": "stdout", "output_type": "stream", "text": "1"}], "metadata": {"scrolled": True}}
    book["metadata"]["language_info"]["version"] = "3.12.1"
    assert stripped(json.dumps(book)) == text
    with pytest.raises(ValueError, match=r"format 4\.4, expected 4\.5"):
        stripped(json.dumps(book | {"nbformat_minor": 4}))
