"""Models of transformers as checkpoints of ours and back, and the logits of a checkpoint by the compiled model and by the reference."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from megascale_jax import axes
from megascale_jax.checkpoint.huggingface.files import TensorFolder, read_config
from megascale_jax.checkpoint.huggingface.settings import choose, from_settings
from megascale_jax.checkpoint.huggingface.transfer import check_tensors, export_model, import_model
from megascale_jax.checkpoint.inspect import whole_arrays
from megascale_jax.checkpoint.manifest import read_manifest
from megascale_jax.checkpoint.restore import load_arrays
from megascale_jax.comm.storage import Storage
from megascale_jax.config.schema import Experiment
from megascale_jax.model.branch import Rows
from megascale_jax.parallel.plan import make_plan
from tests.build import experiment
from tests.reference import row_logits, x64


def silent(done, total):
    pass


def tolerance(model):
    """Of fp32 logits, relative to the largest: 2**-24 a rounding, as many as a random walk through all sums makes, four sigma."""
    longest = max(model.hidden_size, model.mlp_size, model.num_heads * model.head_dim, model.sequence_length)
    products = 6 * model.num_layers + 1
    return 4 * 2**-24 * (products * longest) ** 0.5


def imported(source, target):
    """The checkpoint of step 0 made in ``target`` from the model in ``source``; its experiment."""
    foreign = from_settings(read_config(source))
    config = experiment(**foreign.model.model_dump())
    with TensorFolder(source) as files:
        check_tensors(foreign, files)
        import_model(foreign, files, Storage(target), config, {"experiment": config.model_dump_json()}, silent)
    return config


def exported(source, folder, step=0, name=None, **options):
    """The model in ``folder`` made from a checkpoint in ``source``."""
    storage, settings = Storage(source), {"dtype": "float32", "limit_bytes": 1 << 30, "end_token": None, "progress": silent}
    model = Experiment.model_validate_json(read_manifest(storage, step).description["experiment"]).model
    folder.mkdir()
    return export_model(storage, step, model, choose(model, name), folder, **(settings | options))


def tensors_of(folder):
    """Every tensor of a model's folder in fp32."""
    with TensorFolder(folder) as files:
        return {name: files.read(name) for name in sorted(files.names)}


def compiled_logits(config, checkpoint, tokens, step=0):
    """Logits ``[S, V]`` of one row by the compiled model on one device."""
    plan = make_plan(config.model_copy(update={"parallel": experiment().parallel}), jax.devices()[:1])
    named = load_arrays(Storage(checkpoint), step, plan, [f"params.{name}" for name in plan.zero.specs])
    params = {name.removeprefix("params."): value for name, value in named.items()}
    transformer, positions = plan.executor.transformer, jnp.arange(len(tokens), dtype=jnp.int32)[None]

    def logits(params, tokens):
        weights = plan.zero.gather(params)
        layers = {name: value.reshape(-1, *value.shape[2:]) for name, value in weights["layers"].items()}
        x = transformer.embed(weights["ends"], tokens, positions)
        x = transformer.layers(layers, x, Rows(positions, jnp.ones_like(tokens)), config.model.windows)
        return transformer.logits(weights["ends"], x)[0]

    specs = (plan.zero.partitions, PartitionSpec(None, None))
    function = jax.jit(plan.shard_map(logits, specs, PartitionSpec(None, (axes.PIPE, axes.TENSOR))))
    return np.asarray(function(params, np.asarray(tokens, np.int32)[None]))


def reference_logits(config, checkpoint, tokens, step=0):
    """The same by the float64 reference."""
    with x64():
        params = {name: value.astype(np.float64) for name, value in whole_arrays(Storage(checkpoint), step, "params.")}
        ones = np.ones(len(tokens), int)
        return np.asarray(row_logits(config.model, params, np.asarray(tokens), np.arange(len(tokens)), ones))


def difference(got, expected):
    """Largest difference over the largest expected logit."""
    return np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()
