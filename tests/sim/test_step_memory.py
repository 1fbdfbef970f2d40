"""Peak memory of this trainer's step against the peaks that the compiler gave, and how it answers to a layout."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import megascale_jax.sim.step_memory as step_memory
from megascale_jax.cli.compile import resolve
from megascale_jax.config.load import load_experiment
from megascale_jax.sim.search import FIELDS, with_layout
from megascale_jax.sim.step_memory import buffer_units, step_bytes
from megascale_jax.sim.work import Work

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30
LARGE = load_experiment("gpt-175b")


def compiled():
    """Plans that were compiled, with the peaks in bytes. Other rates of links compile to the same."""
    found = {}
    for name, command in re.findall(r"- `(.*\.json)`: `megascale compile (.*)`", (RESULTS / "compile.md").read_text()):
        words = shlex.split(command)
        options = {
            words.pop(at): words.pop(at) for option in ("--target", "--nodes", "--links") if option in words for at in [words.index(option)]
        }
        if "--links" not in options:
            plan = resolve(words[0], words[1:], options["--target"], int(options["--nodes"]))
            found[name] = (plan, json.loads((RESULTS / "compile" / name).read_text())["peak_bytes"])
    return found


COMPILED = compiled()


def test_constants_are_those_of_the_fit():
    assert len(COMPILED) == 15
    units = np.array([buffer_units(Work.of(plan)) for plan, _ in COMPILED.values()])
    rest = np.array([peak - step_bytes(plan).total + step_bytes(plan).buffers for plan, peak in COMPILED.values()])
    fitted = np.linalg.lstsq(units, rest, rcond=None)[0]
    kept = [step_memory.CHUNKS, step_memory.CHUNKS_ALONE, step_memory.SHARDS, step_memory.LOGITS]
    assert kept == pytest.approx(list(fitted), abs=0.006)


@pytest.mark.parametrize("name", COMPILED)
def test_peaks_are_those_of_the_compiler_within_what_is_said(name):
    plan, peak = COMPILED[name]
    assert step_bytes(plan).total == pytest.approx(peak, abs=1.3 * GIB)


def test_layouts_that_a_search_found_were_not_fitted_and_are_met_too():
    answers = json.loads((RESULTS / "plan_compiled.json").read_text())["compiled"]
    assert len(answers) == 4
    for answer in answers:
        plan = with_layout(LARGE, **{name: answer[name] for name in FIELDS})
        assert step_bytes(plan).total == pytest.approx(answer["peak_bytes"], abs=1.85 * GIB)


def test_what_is_counted_alone_tells_the_plans_of_one_model_apart():
    """Recomputation, delay and block change nothing that is calibrated: their differences are predicted."""
    of = {name.removeprefix("gpt-175b").removesuffix("_h100_12288.json"): item for name, item in COMPILED.items() if "_h100_12288" in name}
    plain, plain_peak = of[""]
    for name in ("-full-remat", "-selective", "-delay-0", "-serial"):
        plan, peak = of[name]
        assert step_bytes(plan).buffers == step_bytes(plain).buffers
        assert step_bytes(plan).total - step_bytes(plain).total == pytest.approx(peak - plain_peak, abs=0.25 * GIB), name


def test_each_means_of_saving_saves():
    def total(**fields):
        return step_bytes(with_layout(LARGE, **fields)).total

    given = step_bytes(LARGE).total
    assert total(remat="full") < total(remat="selective") < given
    assert given < total(micro_batch_size=2) < total(micro_batch_size=4)
    assert total(tensor=4) > given and total(data=384) < given
    assert total(pipe=16, virtual_stages=3) < given
