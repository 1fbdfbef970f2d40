import pytest

from megascale_jax.config.load import load_experiment
from megascale_jax.config.memory import matrix_parameters, state_bytes
from megascale_jax.model.parameters import parameter_specs


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.activation=swiglu", "model.num_kv_heads=2", "model.head_size=10"],
        ["model.tied_head=true", "model.position=learned", "model.block=serial"],
        ["model.attention_bias=true", "model.mlp_bias=true"],
    ],
)
def test_matrices_are_those_of_the_parameter_table(overrides):
    model = load_experiment("quickstart", overrides).model
    specs = parameter_specs(model).values()
    assert matrix_parameters(model) == sum(spec.size * (model.num_layers if spec.per_layer else 1) for spec in specs if spec.decays)


def test_only_masters_and_moments_shrink_when_data_grows():
    one, four = (load_experiment("quickstart", [f"parallel.data={n}", "parallel.micro_batch_size=1"]) for n in (1, 4))
    assert state_bytes(four).master_and_moments == state_bytes(one).master_and_moments / 4
    assert state_bytes(four).weights == state_bytes(one).weights
    assert state_bytes(four).gradients == state_bytes(one).gradients


def test_paper_model_takes_18_bytes_a_parameter_when_nothing_is_sharded():
    experiment = load_experiment("gpt-175b")
    shards = experiment.parallel.tensor * experiment.parallel.pipe
    state = state_bytes(experiment)
    unsharded = state.master_and_moments * shards * experiment.parallel.data + (state.weights + state.gradients) * shards
    assert unsharded == pytest.approx(18 * matrix_parameters(experiment.model))
