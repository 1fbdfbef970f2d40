from megascale_jax.config.difference import differences
from megascale_jax.config.load import load_experiment


def test_nothing_differs_when_the_experiments_are_equal():
    assert differences(load_experiment("quickstart"), load_experiment("quickstart")) == []


def test_each_changed_leaf_is_shown_once_in_schema_order():
    new = load_experiment(
        "quickstart", ["train.steps=600", "model.window=[8,full]", "train.evaluation.every=null", "train.data.shuffle=false"]
    )
    assert [str(item) for item in differences(load_experiment("quickstart"), new)] == [
        "model.window: 64 -> [8, full]",
        "train.steps: 140 -> 600",
        "train.data.shuffle: true -> false",
        "train.evaluation.every: 35 -> null",
    ]
