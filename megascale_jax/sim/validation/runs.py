"""The published runs as work on a device under a program: what is printed, and what is assumed because it is not. No JAX.

Assumed throughout Tables 2, 3 and Figure 9 because the paper prints none of it: the micro-batch (2 is the declared reference, 1 stands
beside it), no recomputation, windows as in the shipped models, a tied table of the vocabulary.

Changes to an assumption after the first scored run are bugs found, or they are not made.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megascale_jax.config import search
from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.config.schema import ModelConfig
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.sim.analytic import Times, iteration_times
from megascale_jax.sim.device import Device
from megascale_jax.sim.validation.published import System
from megascale_jax.sim.work import Work, even_layers

REFERENCE_MICRO_BATCH = 2


class Constants(NamedTuple):
    """The two that may be calibrated: `gemm_ceiling` and `slow_node_slowdown` of `config/hardware.py`."""

    gemm_ceiling: float
    slow_node_slowdown: float


class Run(NamedTuple):
    """One published run."""

    work: Work
    device: Device
    software: SoftwareConfig

    @property
    def times(self) -> Times:
        """Simulated."""
        return iteration_times(*self)

    @property
    def mfu(self) -> float:
        """Simulated, over the model's own FLOPs with full attention inside its windows."""
        return self.flops_per_s / self.device.peak

    @property
    def flops_per_s(self) -> float:
        """Of one device, simulated, counted the same way."""
        return self.work.model_flops("full") / (self.times.iteration_s * self.work.devices)

    def calibrated(self, constants: Constants | None) -> "Run":
        """The same with other constants; ``None``: as they are."""
        return self if constants is None else self._replace(device=replace(self.device, **constants._asdict()))


@lru_cache
def program(name: str) -> SoftwareConfig:
    """A shipped software file."""
    return load_document("software", str(search.shipped_tree() / "software" / f"{name}.yaml"), SoftwareConfig)


@lru_cache
def _base(experiment: str, system: str) -> tuple[Work, Device]:
    file = search.shipped_tree() / search.EXPERIMENT / f"{experiment}.yaml"
    loaded = load_experiment(str(file), [f"system={system}"], checked=False)
    return Work.of(loaded), Device.of(loaded.system)


def paper_run(system: System, model: str, gpus: int, batch: int, micro_batch: int) -> Run:
    """A run of the MegaScale paper's 175 B or 530 B model; Megatron-LM has a serial block and full attention."""
    work, device = _base(f"gpt-{model.lower()}", "a100")
    changes: dict[str, object] = {"tied_head": True}
    if system == "megatron-lm":
        changes |= {"block": "serial", "window": "full", "position": "learned"}
    data = gpus // (work.pipe * work.tensor)
    return Run(
        replace(
            work,
            model=work.model.model_copy(update=changes),
            data=data,
            micro_batch_size=micro_batch,
            micro_batches=batch // (data * micro_batch),
            backward_delay=0,
        ),
        device,
        program(system),
    )


def ablation_runs(micro_batch: int) -> list[Run]:
    """Table 3: the baseline, and what each line adds to the lines before it."""
    run = paper_run("megatron-lm", "175B", 256, 256, micro_batch)
    last = paper_run("megascale", "175B", 256, 768, micro_batch)
    megascale = last.software
    steps: list[tuple[Mapping[str, object], tuple[str, ...]]] = [
        ({"block": "parallel"}, ()),
        ({"window": last.work.model.window}, ()),
        ({}, ("tensor_hidden",)),
        ({}, ("pipe_sends", "pipe_stall_us")),
        ({}, ("data_overlap",)),
        ({}, tuple(name for name in SoftwareConfig.model_fields if "_passes" in name or "attention" in name)),
        ({}, ("data_wait_s", "host_s")),
    ]
    runs = [run]
    for model, techniques in steps:
        run = run._replace(
            work=replace(run.work, model=run.work.model.model_copy(update=dict(model))),
            software=run.software.model_copy(update={name: getattr(megascale, name) for name in techniques}),
        )
        runs.append(run)
    return [*runs, run._replace(work=replace(run.work, micro_batches=last.work.micro_batches))]


def _gpt(work: Work, layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> ModelConfig:
    shape = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "mlp_size": 4 * hidden, "vocab_size": vocabulary}
    more = {"sequence_length": length, "block": "serial", "window": "full", "position": "learned", "tied_head": True}
    return work.model.model_copy(update=shape | more)


_KORTHIKANTI = {
    "22B": (48, 6144, 64, 1, 1, 4, 4),
    "175B": (96, 12288, 96, 8, 3, 64, 1),
    "530B": (105, 20480, 128, 35, 3, 280, 1),
    "1T": (128, 25600, 160, 64, 1, 512, 1),
}
"""Layers, width, heads, pipeline stages, chunks, rows, micro-batch: Tables 3 and 5 of the paper. Tensor 8, one replica."""


def korthikanti_run(model: str, full: bool) -> Run:
    """Full recomputation without sequence parallelism, or selective with it; vocabulary 51,200, rows of 2,048."""
    work, device = _base("gpt-175b", "a100")
    layers, hidden, heads, pipe, chunks, batch, micro_batch = _KORTHIKANTI[model]
    return Run(
        replace(
            work,
            model=_gpt(work, layers, hidden, heads, 51200, 2048).model_copy(update={"dropout": 0.1}),
            pipe=pipe,
            data=1,
            virtual_stages=chunks,
            micro_batch_size=micro_batch,
            micro_batches=batch // micro_batch,
            remat="full" if full else "selective",
            backward_delay=0,
            layers=even_layers(layers, pipe, chunks),
        ),
        device,
        program("korthikanti").model_copy(update={"sequence_parallel": not full}),
    )


def _llama(work: Work, layers: int, hidden: int, mlp: int, heads: int, vocabulary: int, length: int) -> ModelConfig:
    shape = {"num_layers": layers, "hidden_size": hidden, "mlp_size": mlp, "num_heads": heads, "num_kv_heads": 8, "activation": "swiglu"}
    more = {"vocab_size": vocabulary, "sequence_length": length, "block": "serial", "window": "full", "norm": "rmsnorm", "norm_bias": False}
    return work.model.model_copy(update=shape | more)


def llama3_run(gpus: int) -> Run:
    """Llama-3 405B. Published: tensor 8, pipe 16, 2,048 rows of 8,192, a layer less on the first and on the last stage.

    Chunks of one layer follow from that (section 3.3.2: the first chunk holds the embedding alone, the last the output alone). Assumed:
    one row a micro-batch, no recomputation, MFU over full attention (the paper cites PaLM's definition).
    """
    work, device = _base("gpt-175b", "h100")
    data = gpus // (8 * 16)
    return Run(
        replace(
            work,
            model=_llama(work, 126, 16384, 53248, 128, 128256, 8192),
            pipe=16,
            data=data,
            virtual_stages=8,
            micro_batch_size=1,
            micro_batches=2048 // data,
            backward_delay=0,
            layers=((0, *(1,) * 7), *((1,) * 8,) * 14, (*(1,) * 7, 0)),
        ),
        device,
        program("llama3"),
    )


_MEGATRON_H100 = {"175B": (96, 12288, 96, 12, 8), "462B": (112, 18432, 144, 16, 7)}
"""Layers, width, heads, pipeline stages, chunks (one layer each). The 462 B model's shape is assumed: 459 B parameters."""


def megatron_h100_run(model: str, gpus: int, batch: int) -> Run:
    """Megatron-Core's README: rows of 4,096, vocabulary 131,072. Its layouts are a picture; tensor 8, pipe 12 or 16, one row assumed."""
    work, device = _base("gpt-175b", "h100")
    layers, hidden, heads, pipe, chunks = _MEGATRON_H100[model]
    data = gpus // (8 * pipe)
    return Run(
        replace(
            work,
            model=_gpt(work, layers, hidden, heads, 131072, 4096),
            pipe=pipe,
            data=data,
            virtual_stages=chunks,
            micro_batch_size=1,
            micro_batches=batch // data,
            backward_delay=0,
            layers=even_layers(layers, pipe, chunks),
        ),
        device,
        program("megatron-core"),
    )


def maxtext_run(model: str, gpus: int) -> Run:
    """MaxText on H100, Llama-2 or Llama-3 70B: no tensor or pipeline parallelism, two rows a GPU, weights sharded (all published).

    Assumed: whole layers are recomputed (without it, 80 layers' activations are several times the GPU's memory).
    """
    work, device = _base("gpt-175b", "h100")
    vocabulary, length = (32000, 4096) if model == "llama2" else (128256, 8192)
    return Run(
        replace(
            work,
            model=_llama(work, 80, 8192, 28672, 64, vocabulary, length),
            pipe=1,
            data=gpus,
            tensor=1,
            virtual_stages=1,
            micro_batch_size=2,
            micro_batches=1,
            remat="full",
            backward_delay=0,
            layers=even_layers(80, 1, 1),
        ),
        device,
        program("maxtext"),
    )
