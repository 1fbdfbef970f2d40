"""The closed form: its parts, its memory, and how it answers to hardware, for any plan."""

import math
import shutil
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.config.search import shipped_tree
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.errors import ConfigError
from megascale_jax.sim.analytic import Times, iteration_times, predict
from megascale_jax.sim.device import Device, Link
from megascale_jax.sim.memory import layer_bytes
from megascale_jax.sim.work import Work, even_layers

EXPERIMENT = load_experiment("gpt-175b")
DEVICE = Device.of(EXPERIMENT.system)
WORK = Work.of(EXPERIMENT)
PROGRAMS = {
    name: load_document("software", name, SoftwareConfig)
    for name in ("megascale", "megatron-lm", "korthikanti", "llama3", "megatron-core", "maxtext")
}


@st.composite
def works(draw):
    """Layouts that divide, of models with every choice that the costs know."""
    tensor, pipe, chunks = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 8), (1, 2, 5, 8), (1, 2, 3)))
    heads = draw(st.sampled_from([8, 16, 64]))
    model = EXPERIMENT.model.model_copy(
        update={
            "num_layers": pipe * chunks * draw(st.integers(1, 3)),
            "hidden_size": heads * draw(st.sampled_from([64, 128])),
            "num_heads": heads,
            "num_kv_heads": draw(st.sampled_from([None, 8])),
            "mlp_size": draw(st.sampled_from([1024, 28672])),
            "block": draw(st.sampled_from(["serial", "parallel"])),
            "activation": draw(st.sampled_from(["gelu", "swiglu"])),
            "window": draw(st.sampled_from(["full", 64])),
            "tied_head": draw(st.booleans()),
        }
    )
    return Work(
        model=model,
        pipe=pipe,
        data=draw(st.sampled_from([1, 2, 24, 512])),
        tensor=tensor,
        virtual_stages=chunks,
        micro_batch_size=draw(st.integers(1, 4)),
        micro_batches=pipe * draw(st.integers(1, 6)),
        remat=draw(st.sampled_from(["none", "selective", "full"])),
        backward_delay=draw(st.sampled_from([0, 1])),
        layers=even_layers(model.num_layers, pipe, chunks),
    )


@settings(max_examples=60, deadline=None)
@given(works(), st.sampled_from(sorted(PROGRAMS)))
def test_every_part_is_a_time_and_they_add_up(work, program):
    times = iteration_times(work, DEVICE, PROGRAMS[program])
    parts = [getattr(times, field.name) for field in fields(Times)]
    assert all(math.isfinite(part) and part >= 0 for part in parts)
    assert times.iteration_s == pytest.approx(sum(parts))
    useful_s = work.model_flops("causal") / (work.devices * DEVICE.peak)
    assert times.iteration_s > useful_s


@settings(max_examples=60, deadline=None)
@given(
    works(),
    st.sampled_from(sorted(PROGRAMS)),
    st.sampled_from(["node_link", "network_link", "memory_bytes_per_s", "gemm_ceiling", "peak"]),
    st.floats(1.01, 4),
)
def test_faster_hardware_is_never_slower(work, program, part, factor):
    value = getattr(DEVICE, part)
    assume(part != "gemm_ceiling" or value * factor <= 1)
    better = replace(value, bytes_per_s=value.bytes_per_s * factor) if isinstance(value, Link) else value * factor
    before, after = (iteration_times(work, device, PROGRAMS[program]) for device in (DEVICE, replace(DEVICE, **{part: better})))
    assert after.iteration_s <= before.iteration_s * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(works(), st.sampled_from(sorted(PROGRAMS)))
def test_more_slow_nodes_never_help(work, program):
    healthy, ill = (iteration_times(work, replace(DEVICE, slow_node_share=share), PROGRAMS[program]).iteration_s for share in (0.0, 0.2))
    assert ill > healthy
    assert iteration_times(work, replace(DEVICE, slow_node_share=0.0), PROGRAMS[program]).stragglers_s == 0


def test_bubble_is_the_interleaved_ideal_of_the_passes():
    times = iteration_times(WORK, DEVICE, PROGRAMS["megascale"])
    passes_s = times.gemm_s + times.attention_s + times.memory_s + times.tensor_s
    assert times.bubble_s / passes_s == pytest.approx((WORK.pipe - 1) / (WORK.virtual_stages * WORK.micro_batches))


def test_a_gpt_layer_keeps_34_bytes_a_token_and_5_a_score():
    """Korthikanti et al., equation 1, and 4 with sequence parallelism."""
    model = EXPERIMENT.model.model_copy(update={"block": "serial", "window": "full", "dropout": 0.1})
    work = replace(WORK, model=model, tensor=8)
    s, b, h, a = model.sequence_length, work.micro_batch_size, model.hidden_size, model.num_heads
    assert layer_bytes(work, PROGRAMS["megatron-lm"]) == s * b * h * 34 / 8
    assert layer_bytes(work, PROGRAMS["korthikanti"]) == pytest.approx(s * b * h / 8 * (34 + 5 * a * s / h))
    alone = PROGRAMS["megatron-lm"].model_copy(update={"sequence_parallel": False})
    assert layer_bytes(work, alone) == s * b * h * (10 + 24 / 8)


def test_prediction_of_the_largest_run_has_memory_and_both_conventions():
    prediction = predict(EXPERIMENT)
    assert prediction.devices == 12288 and prediction.nodes == 1536 and prediction.fits
    assert 0.3 < prediction.mfu("causal") < prediction.mfu("full") < 0.8
    assert prediction.days(300e9) == pytest.approx(300e9 / prediction.tokens * prediction.iteration_s / 86400)


def test_a_system_without_constants_says_which_and_what_to_do():
    with pytest.raises(ConfigError, match=r"system\.hardware is missing for CPU.*system=a100"):
        predict(load_experiment("quickstart"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("system.hardware.network_link.gpbs=3", "unknown key system.hardware.network_link.gpbs; did you mean .*gbps"),
        ("system.hardware.network_link.gbps=-3", r"network_link\.gbps: got -3, expected a number > 0"),
        ("system.hardware.gemm_ceiling=1.2", r"gemm_ceiling: got 1\.2, expected a number > 0 and <= 1"),
    ],
)
def test_bad_constants_name_the_field(override, says):
    with pytest.raises(ConfigError, match=says):
        load_experiment("gpt-175b", [override])


def test_a_software_file_without_a_field_names_both(tmp_path):
    file = tmp_path / "software" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("attention: fused\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:(?s:.*)attention_forward_share: missing, expected a number"):
        load_document("software", str(file), SoftwareConfig)
    with pytest.raises(ConfigError, match="did you mean 'host_s'"):
        load_document("software", "megascale", SoftwareConfig, ["hosts=3"])


def test_a_bad_system_file_is_named_with_its_field(tmp_path, monkeypatch):
    shutil.copytree(shipped_tree(), tmp_path / "configs")
    file = tmp_path / "configs" / "system" / "a100.yaml"
    good = file.read_text()
    monkeypatch.chdir(tmp_path)
    for old, new, says in (
        ("multiprocessors: 108", "multiprocessors: -1", r"multiprocessors: got -1, expected an integer >= 1.*; file .*a100\.yaml"),
        ("  message_us: 22\n", "", r"message_us: missing, expected a number >= 0.*; file .*a100\.yaml"),
        ("message_us", "mesage_us", r"a100\.yaml: unknown key system\.hardware\.mesage_us; did you mean .*message_us"),
    ):
        file.write_text(good.replace(old, new))
        with pytest.raises(ConfigError, match=says):
            load_experiment("gpt-175b")
