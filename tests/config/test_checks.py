from typing import Any

import pytest

from megascale_jax.config.checks import LAYOUT_RULES, RULES, check, difference_blocks_resume, nearest_multiples, problems_of
from megascale_jax.config.difference import differences
from megascale_jax.config.load import load_experiment
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError

QUICKSTART = load_experiment("quickstart", ["parallel.pipe=1", "parallel.micro_batch_size=16"])


def changed(**values: Any) -> Experiment:
    """The quickstart with leaves changed, not checked; ``__`` stands for the dot."""
    data = QUICKSTART.model_dump(mode="json")
    for key, value in values.items():
        *path, last = key.split("__")
        section = data
        for part in path:
            section = section[part]
        section[last] = value
    return Experiment.model_validate(data, strict=False)


def problems(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(changed(**values))
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel__tensor": 8}, "model.num_heads 4 is not divisible by parallel.tensor = 8; nearest: 8"),
        ({"model__num_kv_heads": 1}, "model.num_kv_heads 1 is not divisible by parallel.tensor = 2; nearest: 2"),
        ({"model__num_kv_heads": 3, "parallel__tensor": 1}, "model.num_heads 4 is not divisible by model.num_kv_heads = 3; nearest: 3, 6"),
        ({"model__hidden_size": 126}, "model.hidden_size 126 is not divisible by model.num_heads = 4; nearest: 124, 128"),
        ({"model__hidden_size": 132}, "the head width model.hidden_size / model.num_heads = 33 is odd"),
        ({"model__head_size": 7}, "model.head_size = 7 is odd, but rotary positions turn pairs"),
        ({"model__rotary_size": 34}, "model.rotary_size 34 is no even number up to the head width 32"),
        ({"model__rotary_size": 7}, "model.rotary_size 7 is no even number up to the head width 32"),
        ({"model__rotary_layers": "windowed", "model__window": "full"}, "model.rotary_layers is windowed, but no layer has a window"),
        ({"model__mlp_size": 511}, "model.mlp_size 511 is not divisible by parallel.tensor = 2; nearest: 510, 512"),
        ({"model__window": []}, "model.window is an empty list"),
        ({"model__norm": "rmsnorm"}, "model.norm_bias is true, but rmsnorm has no shift"),
        (
            {"train__global_batch_size": 100},
            "train.global_batch_size 100 is not divisible by parallel.data * parallel.micro_batch_size = 2 * 16 = 32; nearest: 96, 128",
        ),
        (
            {"parallel__pipe": 2, "train__global_batch_size": 96},
            "train.global_batch_size 96 is not divisible by parallel.data * parallel.micro_batch_size * parallel.pipe = 2 * 16 * 2 = 64; "
            "nearest: 64, 128",
        ),
        (
            {"parallel__pipe": 3},
            "model.num_layers 4 is not divisible by parallel.pipe * parallel.virtual_stages = 3 * 1 = 3; nearest: 3, 6",
        ),
        (
            {"parallel__virtual_stages": 5},
            "parallel.virtual_stages 5 exceeds the 4 layers of a stage (model.num_layers 4 over parallel.pipe 1); good values: 1, 2, 4",
        ),
        ({"parallel__layers": [2, 1]}, "parallel.layers loses 1 layers"),
        (
            {"system__limits__execution_s": 500},
            "system.limits.execution_s 500 would end a first step before system.limits.first_collective_s 600 tells which collective waits",
        ),
        (
            {"parallel__pipe": 2, "parallel__virtual_stages": 3},
            "parallel.virtual_stages 3 exceeds the 2 layers of a stage (model.num_layers 4 over parallel.pipe 2); good values: 1, 2",
        ),
        (
            {"parallel__pipe": 8, "parallel__virtual_stages": 2},
            "parallel.pipe 8 exceeds model.num_layers 4: a stage would hold no layer; good values: 1, 2",
        ),
        ({"parallel__pipe": 5}, "parallel.pipe 5 exceeds model.num_layers 4: a stage would hold no layer; good values: 1, 2, 4"),
        (
            {"parallel__pipe": 8, "parallel__virtual_stages": 5},
            "good values, with parallel.virtual_stages=null and parallel.layers=null: 1, 2, 4",
        ),
        (
            {"model__num_layers": 5, "parallel__pipe": 2, "parallel__virtual_stages": 3},
            "model.num_layers 5 is not divisible by parallel.pipe * parallel.virtual_stages = 2 * 3 = 6; nearest: 6",
        ),
        ({"parallel__pipe": 2, "parallel__layers": [3, 2]}, "parallel.layers doubles 1 layers"),
        ({"parallel__pipe": 2, "model__window": [64, 64, 64, "full"]}, "model.window gives layer 1 64 and layer 3 full"),
        (
            {"model__sequence_length": 126},
            "model.sequence_length 126 is not divisible by 2 * parallel.tensor = 2 * 2 = 4; nearest: 124, 128",
        ),
        ({"system__devices_per_node": 1}, "parallel.tensor 2 leaves the node: system.devices_per_node is 1"),
        ({"system__devices_per_node": 3}, "parallel.tensor 2 leaves the node: system.devices_per_node is 3 and tensor ranks share one"),
        ({"train__steps": 14}, "train.schedule.warmup_steps 14 is not below train.steps 14"),
        ({"train__schedule__decay_steps": 14}, "train.schedule.warmup_steps 14 is not below train.schedule.decay_steps 14"),
        ({"train__data__source": None}, "train.data has neither source nor prepared"),
        ({"system__kernels__attention": "cudnn"}, "system.kernels.attention is cudnn, which needs system.platform gpu, got cpu"),
        ({"system__platform": "gpu"}, "train.compute_dtype is float32, but attention on GPUs takes bfloat16"),
        (
            {"system__platform": "gpu", "train__compute_dtype": "bfloat16", "model__head_size": 20},
            "the head width 20 is none that attention on such GPUs takes: a multiple of 8, at most 256",
        ),
        ({"system__memory_gib": 0.001}, "one device would hold 0.0 GiB of state"),
    ],
)
def test_problem_is_named_with_good_values_when_fields_do_not_fit(values, message):
    assert message in problems(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"model__num_kv_heads": 2},
        {"model__head_size": 6},
        {"model__head_size": 7, "model__position": "learned"},
        {"model__norm": "rmsnorm", "model__norm_bias": False},
        {"parallel__pipe": 2, "parallel__virtual_stages": 2, "train__global_batch_size": 64},
        {"parallel__pipe": 2, "parallel__layers": [3, 1], "train__global_batch_size": 64},
        {"system__devices_per_node": 2},
        {"system__devices_per_node": 4},
        {"train__steps": 31},
        {"train__data__source": None, "train__data__prepared": "x"},
        {"system__kernels__attention": "cudnn", "system__platform": "gpu", "train__compute_dtype": "bfloat16"},
        {"system__memory_gib": 0.01},
        {"model__window": 10**9},
    ],
)
def test_nothing_is_said_when_fields_fit(values):
    check(changed(**values))


def test_all_problems_are_collected_in_one_error():
    message = problems(parallel__tensor=3, train__global_batch_size=31, train__data__source=None)
    assert message.count("\n  - ") == 5
    assert message.startswith("experiment quickstart cannot run:\n")


@pytest.mark.parametrize(("size", "factor", "text"), [(6144, 168, "6048, 6216"), (5, 8, "8"), (9, 8, "8, 16"), (15, 8, "8, 16")])
def test_nearest_multiples_lie_on_both_sides(size, factor, text):
    assert nearest_multiples(size, factor) == text


def test_rules_can_be_asked_by_name():
    plan = changed(parallel__tensor=8, train__schedule__warmup_steps=1000)
    assert {name for name in RULES if problems_of(plan, [name])} == {"heads", "training"}
    assert len(problems_of(plan)) == 2 and problems_of(plan, LAYOUT_RULES) == problems_of(plan, ["heads"])


def test_resume_allows_what_decides_no_number_and_blocks_the_rest():
    free = {
        "train__steps": 600,
        "train__gc_every": 7,
        "train__evaluation__every": 3,
        "train__checkpoint__keep": 5,
        "train__logging__every": 2,
        "train__sample_prompt": "x",
        "parallel__data": 1,
        "system__device": "x",
    }
    assert difference_blocks_resume(differences(QUICKSTART, changed(**free))) == []
    blocked = {
        "name": "other",
        "model__num_layers": 2,
        "train__seed": 1,
        "train__data__shuffle": False,
    }
    blocking = difference_blocks_resume(differences(QUICKSTART, changed(**blocked, **free)))
    assert {item.key for item in blocking} == {key.replace("__", ".") for key in blocked}


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch):
    message = "system.kernels.norm is triton, which needs system.platform gpu, got cpu; set system.kernels.norm=auto"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert message in problems(system__kernels__norm="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check(changed(system__kernels__norm="triton"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"system__kernels__loss": "triton"},
            "system.kernels.loss is triton, compiled for a compute capability: set system.compute_capability",
        ),
        (
            {"system__kernels__attention": "triton", "model__head_size": 72, "system__compute_capability": 90},
            "the head width 72 is none of those of the Triton kernels: 64, 96, 128, 192, 256; set system.kernels.attention=auto",
        ),
        (
            {"system__kernels__attention": "cudnn", "model__head_size": 64, "system__compute_capability": 80},
            "cuDNN keeps the documents of a row apart on compute capability 90 and later, got 80",
        ),
        (
            {"system__kernels__attention": "cudnn", "model__head_size": 192, "system__compute_capability": 80},
            "the head width 192 is none that attention on such GPUs takes: a multiple of 8, at most 128",
        ),
    ],
)
def test_kernel_that_the_gpu_lacks_is_named(values, message):
    assert message in problems(system__platform="gpu", train__compute_dtype="bfloat16", **values)
