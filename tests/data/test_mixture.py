"""Mixtures as training data: which rows, resume, changed weights, folders that do not fit together."""

import json
from typing import Any

import numpy as np
import pytest

from megascale_jax.config.checks import difference_blocks_resume
from megascale_jax.config.load import differences, dump_yaml, load_experiment, read_resolved
from megascale_jax.data.batch import decode_row
from megascale_jax.data.host import HostGroup
from megascale_jax.data.host_iterator import HostIterator
from megascale_jax.data.mixture import TrainingData, make_phases
from megascale_jax.data.pipeline import TrainIterator, held_out_batches
from megascale_jax.data.prepared import open_prepared
from megascale_jax.data.select import open_training_data
from megascale_jax.errors import ConfigError, DataError
from tests.data.texts import make_texts

LAYOUT: dict[str, Any] = {"global_batch_size": 16, "data_size": 2, "data_indices": [0, 1], "micro_batch_size": 2, "seed": 3}
WEIGHTS = {"web": 0.7, "code": 0.3}


@pytest.fixture
def folders(make_prepared, corpus):
    """Two prepared folders of different texts."""
    first = make_prepared("web")
    for number, text in enumerate(make_texts(20)):
        (corpus / f"more{number:03}.txt").write_text(text[::-1], encoding="utf-8")
    return {"web": first, "code": make_prepared("code")}


def mixture(folders, weights=WEIGHTS, changes=None) -> TrainingData:
    return TrainingData({name: open_prepared(folders[name]) for name in sorted(folders)}, make_phases(weights, changes or {}))


def test_batches_hold_the_rows_of_the_sources_that_the_order_names(folders):
    data = mixture(folders)
    code, web = (data.sources[name] for name in ("code", "web"))
    with TrainIterator(data, **LAYOUT) as train:
        ids = np.concatenate([train.sample_ids(step) for step in range(5)])
        first_of_web = code.manifest.train.rows
        assert (ids >= first_of_web).sum() == 56  # 0.7 of 80
        stored = {"code": TrainingData({"": code}).rows("train"), "web": TrainingData({"": web}).rows("train")}
        for step in range(5):
            tokens = next(train)["tokens"].reshape(16, -1)
            for row, index in enumerate(ids[16 * step : 16 * step + 16]):
                source = stored["web"][int(index - first_of_web)] if index >= first_of_web else stored["code"][int(index)]
                assert np.array_equal(tokens[row], decode_row(source, 32, 256)["tokens"])


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 9])
def test_resume_is_exact_across_a_change_of_weights_and_of_the_data_size(folders, stop):
    data = mixture(folders, changes={80: {"web": 0.1}})
    with TrainIterator(data, **LAYOUT) as unbroken, TrainIterator(data, **LAYOUT) as before:
        for _ in range(stop):
            next(before)
            next(unbroken)
        state = json.loads(json.dumps(before.state()))
        with TrainIterator(data, **LAYOUT | {"data_size": 4, "data_indices": [0, 1, 2, 3]}) as resumed:
            resumed.restore(state)
            for _ in range(6):
                assert np.array_equal(next(resumed)["tokens"].reshape(16, -1), next(unbroken)["tokens"].reshape(16, -1))


def test_weights_of_the_future_may_change_and_those_of_the_past_may_not(folders):
    data = mixture(folders, changes={80: {"web": 0.1}, 160: {"web": 0.5}})
    with TrainIterator(data, **LAYOUT) as train:
        for _ in range(10):
            next(train)
        state = train.state()
    for allowed in ({80: {"web": 0.1}}, {80: {"web": 0.1}, 160: {"web": 0.9}}, {80: {"web": 0.1}, 161: {"code": 2.0}}):
        with TrainIterator(mixture(folders, changes=allowed), **LAYOUT) as resumed:
            resumed.restore(state)
            assert resumed.state()["samples"] == 160
    for changes in ({}, {80: {"web": 0.2}}, {96: {"web": 0.1}}, {80: {"web": 0.1}, 159: {"web": 0.5}}):
        with TrainIterator(mixture(folders, changes=changes), **LAYOUT) as resumed:
            fresh = resumed.state()
            with pytest.raises(DataError, match="other weights before this step"):
                resumed.restore(state)
            assert resumed.state() == fresh
    started_otherwise = mixture(folders, {"web": 0.6, "code": 0.4}, {80: {"web": 0.1}})
    with TrainIterator(started_otherwise, **LAYOUT) as resumed, pytest.raises(DataError, match="other weights before this step"):
        resumed.restore(state)


def test_state_of_a_single_source_is_none_of_a_mixture(folders):
    single = open_prepared(folders["web"])
    with TrainIterator(single, **LAYOUT) as one, TrainIterator(mixture(folders), **LAYOUT) as many:
        with pytest.raises(DataError, match="trained on a single source, this run has a mixture"):
            many.restore(one.state())
        with pytest.raises(DataError, match="trained on a mixture, this run has a single source"):
            one.restore(many.state())


def test_loader_of_the_host_gives_the_same_mixture(folders):
    data = mixture(folders, changes={48: {"web": 0.0}})
    with HostIterator(data, group=HostGroup(0, 1, "mixture"), **LAYOUT) as host, TrainIterator(data, **LAYOUT) as reference:
        for _ in range(8):
            own, expected = next(host), next(reference)
            assert all(np.array_equal(own[key], expected[key]) for key in expected)


def test_held_out_rows_come_once_each_and_evenly_from_all_sources(folders):
    data = mixture(folders)
    counts = {name: source.manifest.held_out.rows for name, source in data.sources.items()}
    order = data.held_out_order()
    assert sorted(order) == list(range(sum(counts.values())))
    for size in range(1, len(order)):
        assert abs((order[:size] < counts["code"]).sum() - size * counts["code"] / len(order)) <= 1
    layout = {key: LAYOUT[key] for key in ("global_batch_size", "data_size", "data_indices", "micro_batch_size")}
    targets = np.concatenate([batch["targets"].reshape(-1) for batch in held_out_batches(data, **layout)])
    singles = [held_out_batches(source, **layout) for source in data.sources.values()]
    expected = np.concatenate([batch["targets"].reshape(-1) for single in singles for batch in single])
    assert sorted(targets[targets >= 0]) == sorted(expected[expected >= 0])


def test_sources_that_do_not_fit_together_are_refused(folders, make_prepared):
    longer, bpe = make_prepared("longer", sequence_length=64), make_prepared("bpe", train_bpe_vocab=300)
    with pytest.raises(DataError, match=r"need one sequence length: longer .* has 64, web .* has 32"):
        mixture({"web": folders["web"], "longer": longer}, {"web": 1, "longer": 1})
    with pytest.raises(DataError, match=r"need one tokenizer: bpe .* has .*, web"):
        mixture({"web": folders["web"], "bpe": bpe}, {"web": 1, "bpe": 1})


def overrides(sources: str, *others: str) -> list[str]:
    return ["train.data.source=null", f"train.data.mixture={{{sources}}}", "model.sequence_length=32", *others]


def test_configuration_of_a_mixture_becomes_its_training_data(folders, tmp_path):
    sources = ", ".join(f"{name}: {{prepared: {folder}, weight: {WEIGHTS[name]}}}" for name, folder in folders.items())
    experiment = load_experiment("quickstart", overrides(sources, "train.data.weights_at={5: {web: 0.1}}"))
    data = open_training_data(experiment, tmp_path, progress=False)
    expected = mixture(folders, changes={5 * experiment.train.global_batch_size: {"web": 0.1}})
    assert data.request() == expected.request()
    assert data.digest == expected.digest != mixture({"web": folders["code"], "code": folders["web"]}).digest
    (tmp_path / "config.yaml").write_text(dump_yaml(experiment))
    assert read_resolved(tmp_path / "config.yaml") == experiment
    later = load_experiment("quickstart", overrides(sources, "train.data.weights_at={5: {web: 0.1}, 9: {web: 0.2}}"))
    assert difference_blocks_resume(differences(experiment, later)) == []
    other = load_experiment("quickstart", overrides(sources, "train.data.mixture.web.weight=0.8"))
    assert [item.key for item in difference_blocks_resume(differences(experiment, other))] == ["train.data.mixture"]


@pytest.mark.parametrize(
    ("sources", "others", "message"),
    [
        ("web: {source: a, weight: 1}", ["train.data.source=stdlib"], "a mixture and also source or prepared"),
        ("web: {source: a, weight: 1}", ["train.data.weights_at={5: {wob: 0.1}}"], "weights_at.5 names wob; the sources are web"),
        ("web: {source: a, prepared: b, weight: 1}", [], "mixture.web has both source and prepared"),
        ("web: {weight: 1}", [], "mixture.web has neither source nor prepared"),
        ("web: {source: a, weight: 0}", [], "no source with a weight above 0"),
        ("web: {source: a}", [], "train.data.mixture: got .* expected a mapping or null"),
        ("web: {source: a, weight: 1}", ["train.data.weights_at={0: {web: 1}}"], "train.data.weights_at: got .* expected a mapping"),
        ("web: {source: a, weight: 1, wait: 1}", [], "train.data.mixture: got .* expected a mapping or null"),
    ],
)
def test_configuration_that_cannot_be_is_refused(sources, others, message):
    with pytest.raises(ConfigError, match=message):
        load_experiment("quickstart", overrides(sources, *others))


def test_weights_without_a_mixture_are_refused():
    with pytest.raises(ConfigError, match=r"train\.data\.mixture is null"):
        load_experiment("quickstart", ["train.data.weights_at={5: {web: 0.1}}"])
