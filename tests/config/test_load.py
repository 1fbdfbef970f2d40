import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megascale_jax.config.load import dump_yaml, list_experiments, load_experiment, read_resolved
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError

SHIPPED = ("gpt-13b", "gpt-175b", "gpt-1b", "gpt-530b", "quickstart")


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A working directory with an own ./configs tree of one experiment, `mine`."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "configs/model/small.yaml", "base: quickstart\nnum_layers: 2\n")
    write(
        tmp_path / "configs/experiment/mine.yaml",
        "model: small\nparallel: quickstart\nsystem: cpu\ntrain: quickstart\noverride:\n  train: {steps: 50, seed: 7}\n",
    )
    return tmp_path


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def refusal(*overrides: str, of: str = "quickstart") -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(of, overrides)
    return str(caught.value)


def test_all_shipped_experiments_load_and_are_listed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert tuple(list_experiments()) == SHIPPED
    assert [load_experiment(name).name for name in SHIPPED] == list(SHIPPED)


def test_every_shipped_yaml_file_says_where_its_numbers_come_from():
    configs = list_experiments()["quickstart"].parents[1]
    files = list(configs.rglob("*.yaml"))
    assert len(files) > 25
    assert [file for file in files if not file.read_text(encoding="utf-8").startswith("# ")] == []


def test_every_shipped_group_file_fits_the_schema_with_some_experiment():
    configs = list_experiments()["quickstart"].parents[1]
    for file in (configs / "train").glob("*.yaml"):
        load_experiment("gpt-1b", [f"train={file.stem}", "train.compute_dtype=bfloat16"])
    for file in (configs / "system").glob("*.yaml"):
        assert load_experiment("gpt-1b", [f"system={file.stem}"]).system.device


def test_paper_experiments_have_the_shapes_of_table_1():
    for name, shape, replica, devices in (
        ("gpt-175b", (128, 12288, 96, 8, 8, 6), 64, 12288),
        ("gpt-530b", (160, 20480, 105, 8, 35, 3), 280, 11200),
    ):
        e = load_experiment(name)
        got = (e.model.num_heads, e.model.hidden_size, e.model.num_layers, e.parallel.tensor, e.parallel.pipe, e.parallel.virtual_stages)
        assert got == shape
        assert e.parallel.tensor * e.parallel.pipe == replica
        assert replica * e.parallel.data == devices
        assert (e.model.sequence_length, e.model.vocab_size) == (2048, 64000)


def test_later_layers_win_when_the_same_key_is_set(tree):
    assert load_experiment("mine").model.num_layers == 2
    assert load_experiment("mine").model.hidden_size == load_experiment("quickstart").model.hidden_size
    assert load_experiment("mine").train.steps == 50
    loaded = load_experiment("mine", ["train.steps=60", "model.num_layers=4", "train.steps=70"])
    assert (loaded.train.steps, loaded.train.seed, loaded.model.num_layers) == (70, 7, 4)


def test_group_switch_replaces_the_file_and_keeps_the_override_when_given_in_any_order(tree):
    for overrides in (
        ["train.seed=3", "train=adamw", "train.schedule.warmup_steps=0"],
        ["train=adamw", "train.schedule.warmup_steps=0", "train.seed=3"],
    ):
        train = load_experiment("mine", overrides).train
        assert (train.optimizer.name, train.steps, train.seed) == ("adamw", 50, 3)


def test_working_directory_wins_over_shipped_when_both_have_the_name(tree):
    write(tree / "configs/system/cpu.yaml", "platform: cpu\ndevice: mine\n")
    assert load_experiment("quickstart").system.device == "mine"


def test_own_tree_of_a_yaml_path_wins_when_it_has_the_name(tree):
    elsewhere = write(tree / "other/experiment/x.yaml", "model: small\nparallel: quickstart\nsystem: cpu\ntrain: quickstart\n")
    assert load_experiment(str(elsewhere)).model.num_layers == 2
    write(tree / "other/model/small.yaml", "base: quickstart\nnum_layers: 6\n")
    assert load_experiment(str(elsewhere)).model.num_layers == 6
    assert load_experiment("other/experiment/x.yaml").name == "x"


def test_values_are_read_as_yaml():
    overrides = ["train.optimizer.learning_rate=3e-4", "model.window=[64,full]", "train.evaluation.every=null", "model.norm_epsilon=1"]
    overrides += ["cluster.kubernetes.switch_labels=[example.com/rack,leaf]"]
    loaded = load_experiment("quickstart", overrides)
    assert loaded.train.optimizer.learning_rate == 3e-4
    assert loaded.model.window == (64, "full")
    assert loaded.train.evaluation.every is None
    assert isinstance(loaded.model.norm_epsilon, float)
    assert loaded.cluster.kubernetes.switch_labels == ("example.com/rack", "leaf")


def test_resolved_yaml_reads_back_unchanged(tmp_path):
    for name in SHIPPED:
        experiment = load_experiment(name)
        assert read_resolved(write(tmp_path / f"{name}.yaml", dump_yaml(experiment))) == experiment


def test_resolved_yaml_is_an_experiment_file(tmp_path):
    experiment = load_experiment("quickstart", ["train.steps=77"])
    file = write(tmp_path / "copy.yaml", dump_yaml(experiment))
    assert load_experiment(str(file)) == experiment
    assert load_experiment(str(file), ["train=adamw"]).train.optimizer.name == "adamw"


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=25, deadline=None)
@given(
    source=TEXT,
    prepared=st.none() | TEXT | st.sampled_from(["null", "1e-3", "${x}", "???", "a: b", "- a", "#", "~", "no", "2026-01-01"]),
    rate=st.floats(min_value=1e-30, max_value=1e30, exclude_min=True),
    window=st.sampled_from([1, "full", (1,), (64, "full")]),
)
def test_resolved_yaml_reads_back_unchanged_when_text_looks_like_other_types(tmp_path_factory, source, prepared, rate, window):
    data = load_experiment("quickstart").model_dump(mode="json")
    data["train"]["data"] |= {"source": source, "prepared": prepared}
    data["train"]["optimizer"]["learning_rate"] = rate
    data["model"]["window"] = window
    experiment = Experiment.model_validate_json(json.dumps(data))
    file = tmp_path_factory.mktemp("resolved") / "config.yaml"
    assert read_resolved(write(file, dump_yaml(experiment))) == experiment


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 10**12), seed=st.integers(0, 2**63), rate=st.floats(min_value=1e-12, max_value=1.0))
def test_override_sets_exactly_the_value_that_is_written(steps, seed, rate):
    overrides = [f"train.steps={steps}", f"train.seed={seed}", f"train.optimizer.learning_rate={rate!r}", "train.schedule.warmup_steps=0"]
    train = load_experiment("quickstart", overrides).train
    assert (train.steps, train.seed, train.optimizer.learning_rate) == (steps, seed, rate)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=30))
def test_any_override_gives_an_experiment_or_a_config_error(text):
    for override in (text, f"train.steps={text}", f"train.data.source={text}", f"{text}=3", f"model.window={text}", f"system={text}"):
        try:
            assert load_experiment("quickstart", [override]).name == "quickstart"
        except ConfigError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "command line: unknown key train.stepz; did you mean train.steps?"),
        ("steps=3", "unknown key steps; did you mean train.steps?"),
        ("model.micro_batch_size=2", "unknown key model.micro_batch_size; did you mean parallel.micro_batch_size?"),
        ("train.optimizer.betta1=0.5", "unknown key train.optimizer.betta1; did you mean train.optimizer.beta1?"),
        ("parallel.zzz=1", "unknown key parallel.zzz; known: parallel.pipe, parallel.data, parallel.tensor"),
        ("sytem=h200", "unknown key sytem; did you mean system?"),
        ("system=h20", "command line: no system named 'h20'; did you mean 'h200'?"),
        ("system=../model/gpt", "no system named '../model/gpt'"),
        ("name=other", "name cannot be set here"),
        ("train.steps", "got 'train.steps', expected key=value"),
        ("=3", "got '=3', expected key=value"),
        ("model.window=[1,", "model.window=[1, is no YAML value"),
        ("train.data.source=${nothing}", "is no YAML value"),
        ("train.steps=ten", "train.steps: got 'ten', expected an integer >= 1 (optimizer steps in all)"),
        ("train.steps=3.5", "train.steps: got 3.5, expected an integer >= 1"),
        ("train.steps=true", "train.steps: got true, expected an integer >= 1"),
        ("train.steps=null", "train.steps: got null, expected an integer >= 1"),
        ("model.window=0", "model.window: got 0, expected an integer >= 1 or full or a list of (an integer >= 1 or full)"),
        ("model.window=[4,fool]", "model.window: got [4, 'fool'], expected an integer >= 1 or full"),
        ("model.block=both", "model.block: got 'both', expected parallel or serial"),
        ("train.optimizer.beta1=1.0", "train.optimizer.beta1: got 1.0, expected a number >= 0 and < 1"),
        ("train.optimizer.learning_rate=.inf", "train.optimizer.learning_rate: got inf, expected a number > 0"),
        ("train.data=3", "train.data: got 3, expected a mapping"),
        ("train.evaluation.every=0", "train.evaluation.every: got 0, expected an integer >= 1 or null"),
        ("train.data.shuffle=maybe", "train.data.shuffle: got 'maybe', expected true or false"),
        ("cluster.kubernetes.switch_labels=[a rack]", "switch_labels: got ['a rack'], expected a list of (a string) (labels (PREFIX/NAME)"),
        ("cluster.kubernetes.switch_labels=[a/b/c]", "switch_labels: got ['a/b/c']"),
        ("cluster.kubernetes.switch_labels=rack", "switch_labels: got 'rack', expected a list"),
    ],
)
def test_refusal_teaches_when_an_override_is_wrong(override, message):
    assert message in refusal(override)


def test_all_wrong_values_are_reported_at_once():
    message = refusal("train.steps=ten", "parallel.data=0", "model.norm=none")
    assert [key in message for key in ("train.steps: got", "parallel.data: got", "model.norm: got")] == [True] * 3


def test_missing_field_is_named_when_no_file_sets_it(tree):
    write(tree / "configs/system/bare.yaml", "platform: cpu\n")
    assert "system.device: missing, expected a string (device name as vendors write it)" in refusal("system=bare")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model/small.yaml", "num_layer: 2\n", "small.yaml: unknown key model.num_layer; did you mean model.num_layers?"),
        ("model/small.yaml", "base: smal\n", "small.yaml: base: no model named 'smal'; did you mean 'small'?"),
        ("model/small.yaml", "base: small\n", "base goes in a circle: small -> small"),
        ("model/small.yaml", "base: 3\n", "base: model: got 3, expected the name of a model file (gpt"),
        ("model/small.yaml", "- a\n", "small.yaml holds no mapping"),
        ("model/small.yaml", "a: [\n", "small.yaml cannot be read as YAML"),
        ("model/small.yaml", "num_layers: 1\nnum_layers: 2\n", "small.yaml cannot be read as YAML"),
        ("model/small.yaml", "1: 2\n", "small.yaml holds no mapping with text keys"),
        ("experiment/mine.yaml", "model: small\n", "mine.yaml: parallel: missing, expected the name of a parallel file (gpt-13b"),
        ("experiment/mine.yaml", "modle: small\n", "mine.yaml: unknown key modle; did you mean 'model'?"),
    ],
)
def test_refusal_names_the_file_when_a_file_is_wrong(tree, file, text, message):
    write(tree / "configs" / file, text)
    assert message in refusal(of="mine")


def test_override_section_is_refused_when_it_is_no_mapping_or_has_unknown_keys(tree):
    head = "model: small\nparallel: quickstart\nsystem: cpu\ntrain: quickstart\n"
    write(tree / "configs/experiment/mine.yaml", f"{head}override: 3\n")
    assert "override: got 3, expected a mapping of model, parallel, system, train" in refusal(of="mine")
    write(tree / "configs/experiment/mine.yaml", f"{head}override: {{train: {{step: 3}}}}\n")
    assert "unknown key train.step; did you mean train.steps?" in refusal(of="mine")


def test_unknown_experiment_names_the_nearest():
    assert "no experiment named 'quikstart'; did you mean 'quickstart'?" in refusal(of="quikstart")
    assert "absent.yaml does not exist" in refusal(of="./absent.yaml")


def test_resolved_file_of_another_version_is_refused(tmp_path):
    data = OmegaConf.create(dump_yaml(load_experiment("quickstart")))
    OmegaConf.update(data, "train.steps_in_all", 3)
    with pytest.raises(ConfigError, match=r"config\.yaml: unknown key train\.steps_in_all"):
        read_resolved(write(tmp_path / "config.yaml", OmegaConf.to_yaml(data)))


def test_config_is_loaded_without_jax():
    code = """
import sys
from megascale_jax.cli.config import facts_of, load_experiment
facts_of(load_experiment("quickstart"))
sys.exit(any(name in sys.modules for name in ("jax", "numpy")))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
