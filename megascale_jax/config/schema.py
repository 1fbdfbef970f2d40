"""The typed configuration of an experiment: its sections, one file each, all frozen; `cluster.py` has the driver's.

A field's description is its documentation, and what error texts quote. An unknown
key is an error (``load.py`` names the nearest known one). Rules that concern one field live here, rules that join
several sections in ``checks.py``. This module imports neither JAX nor NumPy.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.config.hardware import HardwareConfig
from megascale_jax.config.network import NetworkConfig

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
TRITON_HEAD_SIZES = (64, 96, 128, 192, 256)
"""Widths of a head that the Triton kernels are proven for on GPUs."""
Window = Positive | Literal["full"]


class Section(BaseModel):
    """A frozen group of fields that accepts no unknown key and converts no type silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The transformer: everything that decides which function is learned."""

    num_layers: Positive = Field(description="transformer blocks")
    hidden_size: Positive = Field(description="width of the residual stream (D)")
    num_heads: Positive = Field(description="query heads (H)")
    num_kv_heads: Positive | None = Field(default=None, description="key/value heads; null: as many as query heads")
    head_size: Positive | None = Field(default=None, description="width of one head (K); null: hidden_size / num_heads")
    mlp_size: Positive = Field(description="width of the feed-forward layer (F)")
    vocab_size: Positive = Field(description="token ids that the model knows (V); the tokenizer must not have more")
    sequence_length: Positive = Field(description="tokens in one training row (S)")
    block: Literal["parallel", "serial"] = Field(default="parallel", description="y = x + attn(n(x)) + mlp(n(x)), or one after the other")
    norm: Literal["layernorm", "rmsnorm"] = Field(default="layernorm", description="pre-norm kind")
    norm_epsilon: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="added to the variance before the root")
    norm_bias: bool = Field(default=True, description="learned shift after the norm (layernorm only)")
    activation: Literal["gelu", "swiglu"] = Field(default="gelu", description="feed-forward nonlinearity; swiglu adds a gate projection")
    position: Literal["rotary", "learned"] = Field(default="rotary", description="how positions enter")
    rotary_base: Annotated[float, Field(gt=0)] = Field(default=10000.0, description="base of the rotary frequencies")
    rotary_size: Positive | None = Field(
        default=None, description="elements of a head that turn with the position, the first ones; null: all (rotary only)"
    )
    rotary_layers: Literal["all", "windowed"] = Field(
        default="all", description="layers that turn: all, or those with a window, so that full ones know no positions (rotary only)"
    )
    window: Window | tuple[Window, ...] = Field(
        default="full", description="keys a query sees, itself included: a number, full, or a pattern repeated over the layers"
    )
    attention_bias: bool = Field(default=False, description="biases on q, k, v and o")
    mlp_bias: bool = Field(default=False, description="biases on up, gate and down")
    tied_head: bool = Field(default=False, description="the output projection is the embedding table")
    head_bias: bool = Field(default=False, description="a bias on the output projection")
    dropout: Fraction = Field(default=0.0, description="chance that an element of a branch's output is dropped before the residual add")
    initializer_std: Annotated[float, Field(gt=0)] = Field(default=0.02, description="standard deviation of initial weights")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads (G)."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head (K)."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that turn with the position; 0 without rotary positions."""
        return (self.rotary_size or self.head_dim) if self.position == "rotary" else 0

    @property
    def branches_per_layer(self) -> int:
        """Residual branches of one block: the parallel one has attention and feed-forward layer in one branch."""
        return 1 if self.block == "parallel" else 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of every layer, in order; ``None`` is full attention."""
        pattern = self.window if isinstance(self.window, tuple) else (self.window,)
        chosen = (pattern[i % len(pattern)] for i in range(self.num_layers))
        return tuple(w if isinstance(w, int) else None for w in chosen)


class ParallelConfig(Section):
    """How the model is spread over devices."""

    pipe: Positive = Field(default=1, description="pipeline stages (p)")
    data: Positive = Field(default=1, description="data-parallel replicas; fp32 masters and moments are sharded over them (ZeRO-2)")
    tensor: Positive = Field(default=1, description="tensor/sequence-parallel ranks of one replica's stage, inside one node")
    virtual_stages: Positive | None = Field(
        default=None,
        description="model chunks per pipeline stage (v), interleaved 1F1B; null: as many as the layers allow, which has the "
        "smallest bubble and compiles fastest",
    )
    micro_batch_size: Positive = Field(default=1, description="rows of one micro-batch on one data-parallel rank")
    layers: tuple[Positive, ...] | None = Field(
        default=None, description="layers of each virtual stage (chunk * pipe + stage), in order; null: as many on each"
    )
    remat: Literal["none", "selective", "full"] = Field(
        default="none", description="recompute nothing that is a GEMM in the backward pass, attention too, or whole chunks"
    )
    tensor_overlap: Literal["plain", "ring"] = Field(
        default="plain",
        description="plain: collectives that the pipeline hides under other products; ring: permutes under parts of their own product",
    )
    backward_delay: Literal[0, 1] = Field(
        default=1, description="ticks between the last stage's forward and backward pass of a micro-batch; 1 keeps the two slots apart"
    )


class KernelConfig(Section):
    """Implementation of each operator; ``auto`` picks the best for the target platform, anything else must run or raise."""

    attention: Literal["auto", "triton", "cudnn", "reference"] = Field(
        default="auto", description="attention; auto: cuDNN where a query sees all, Triton inside a window and where cuDNN lacks a case"
    )
    norm: Literal["auto", "triton", "reference"] = Field(default="auto", description="LayerNorm and RMSNorm")
    activation: Literal["auto", "triton", "reference"] = Field(default="auto", description="GeLU and SwiGLU")
    loss: Literal["auto", "triton", "reference"] = Field(default="auto", description="softmax cross-entropy of the split vocabulary")
    max_documents: Positive = Field(
        default=16,
        description="documents that may share a row under cuDNN, each with room for its own log-sum-exp; 1: rows of one document "
        "(all that cuDNN can below H100)",
    )


Rate = Annotated[float, Field(gt=0)]


class RatesConfig(Section):
    """Achieved rates of one device, from which `megascale compile` estimates times; peaks are elsewhere."""

    gemm_tflops: Rate = Field(description="bf16 matrix products, TFLOP/s")
    attention_tflops: Rate = Field(description="attention, FLOPs over the visible keys, TFLOP/s")
    memory_gbps: Rate = Field(description="memory of a kernel that streams, GB/s")
    tensor_gbps: Rate = Field(description="fast link between the devices of a node, GB/s each way")
    tensor_latency_us: Rate = Field(description="start of a collective on that link, microseconds")
    network_gbps: Rate = Field(description="network of one device, GB/s each way")
    network_latency_us: Rate = Field(description="start of a collective on the network, microseconds")


class LimitsConfig(Section):
    """How long a run on GPUs waits before it gives up, and how NCCL starts."""

    execution_s: Positive = Field(
        default=1800, description="longest execution of one step, seconds; the first one makes all communicators, see first_collective_s"
    )
    first_collective_s: Positive = Field(
        default=600, description="longest wait for all ranks at a first collective, seconds; below execution_s, to be the one that names it"
    )
    ib_timeout_exponent: Annotated[int, Field(ge=1, le=31)] = Field(
        default=22, description="NCCL_IB_TIMEOUT: a try on the network lasts 4.096 us times 2 to this power (22: 17 s)"
    )
    ib_retries: Annotated[int, Field(ge=1, le=7)] = Field(default=7, description="NCCL_IB_RETRY_CNT: tries before an error")
    ranks_per_root: Positive = Field(default=128, description="ranks that one NCCL root starts")


class SystemConfig(Section):
    """The machine: one kind of node."""

    platform: Literal["cpu", "gpu"] = Field(description="target platform; operators are chosen by it, not by the host's backend")
    device: str = Field(description="device name as vendors write it")
    devices_per_node: Positive | None = Field(default=None, description="devices of one node; null: no limit (virtual CPU devices)")
    memory_gib: Annotated[float, Field(gt=0)] | None = Field(default=None, description="memory of one device; null: not checked")
    compute_capability: Literal[80, 90, 100] | None = Field(
        default=None, description="compute capability of the GPUs times ten, for which Triton kernels are compiled; null: no GPU"
    )
    peak_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="dense bf16 peak of one device, for MFU; null: a matrix product timed at start, whole host"
    )
    kernels: KernelConfig = Field(default=KernelConfig(), description="implementation of each operator")
    limits: LimitsConfig = Field(default=LimitsConfig(), description="time-outs of a run on GPUs")
    rates: RatesConfig | None = Field(default=None, description="achieved rates for `megascale compile`; null: none known")
    hardware: HardwareConfig | None = Field(default=None, description="constants for `megascale simulate`; null: none known")
    network: NetworkConfig | None = Field(default=None, description="the cluster's CLOS for `megascale network`; null: none known")


class OptimizerConfig(Section):
    """Update rule; LAMB keeps one trust ratio per layer and logical parameter."""

    name: Literal["lamb", "adamw"] = Field(default="lamb", description="update rule")
    learning_rate: Annotated[float, Field(gt=0)] = Field(description="peak learning rate")
    beta1: Fraction = Field(default=0.9, description="decay of the first moment")
    beta2: Fraction = Field(default=0.95, description="decay of the second moment")
    epsilon: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.01, description="decoupled decay; norms and biases are left out")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(default=1.0, description="global gradient norm is cut to this; null: never")


class ScheduleConfig(Section):
    """Learning rate over applied updates."""

    name: Literal["cosine", "constant"] = Field(default="cosine", description="shape after warm-up")
    warmup_steps: NonNegative = Field(default=0, description="linear rise from 0")
    decay_steps: Positive | None = Field(default=None, description="length of the whole schedule; null: train.steps")
    final_fraction: Annotated[float, Field(ge=0, le=1)] = Field(default=0.1, description="last learning rate / peak (cosine)")


class SourceConfig(Section):
    """One source of a mixture."""

    prepared: str | None = Field(
        default=None, description="folder made by `megascale data prepare` (s3://, gs:// too); null: prepare `source` at start"
    )
    source: str | None = Field(default=None, description="corpus to prepare, as train.data.source")
    weight: Annotated[float, Field(ge=0)] = Field(description="share of the rows, relative to the other sources; 0: none for now")


class DataConfig(Section):
    """Where rows come from."""

    prepared: str | None = Field(
        default=None, description="folder made by `megascale data prepare` (s3://, gs:// too); null: prepare `source` at start"
    )
    source: str | None = Field(
        default=None, description="corpus to prepare: a file, a folder, or `stdlib` (Python's own library, no download)"
    )
    tokenizer: str = Field(default="bytes", description="`bytes` or a Hugging Face tokenizers JSON file")
    mixture: dict[str, SourceConfig] | None = Field(
        default=None, description="several sources instead of one: NAME: {prepared: FOLDER or source: CORPUS, weight: NUMBER}, ..."
    )
    weights_at: dict[Positive, dict[str, Annotated[float, Field(ge=0)]]] = Field(
        default={}, description="weights of the mixture from a step on: STEP: {NAME: NUMBER, ...}; names left out keep theirs"
    )
    shuffle: bool = Field(default=True, description="shuffle rows by train.seed, anew each epoch")
    skip: tuple[tuple[NonNegative, Positive], ...] = Field(
        default=(),
        description="samples never trained on: [[FIRST, END], ...], from FIRST to END - 1 in the order of training without any skip, "
        "where step N consumes train.global_batch_size samples; those after keep their numbers. What is consumed already is not undone",
    )
    loader: Literal["process", "thread"] = Field(
        default="process", description="who reads rows: one process for all ranks of a host, or a thread in each rank"
    )


class EvaluationConfig(Section):
    """Held-out loss."""

    every: Positive | None = Field(default=None, description="steps between evaluations; null: at the end only")
    batches: Positive | None = Field(default=None, description="global batches per evaluation; null: the whole held-out split")
    final_batches: Positive | None = Field(default=None, description="the same for the evaluation that ends the run")


class CheckpointConfig(Section):
    """Saving."""

    every: Positive | None = Field(default=None, description="steps between checkpoints; null: at the end only")
    place: str | None = Field(
        default=None, description="where they lie: a folder, gs://bucket/path or s3://bucket/path; null: checkpoints/ in the run folder"
    )
    upload: str | None = Field(
        default=None,
        description="a further copy of each, verified before the first may go, on anything that fsspec knows: hdfs://host/path; null: none",
    )
    keep: Positive = Field(default=2, description="newest checkpoints kept there")
    keep_every: Positive | None = Field(default=None, description="checkpoints whose step is a multiple of this stay for ever; null: none")
    keep_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="checkpoints younger than this stay; null: age does not count"
    )
    compression: Literal["none", "zstd"] = Field(
        default="none", description="of blocks on storage; zstd saves about 8 % of random fp32 numbers and costs twice the CPU time"
    )
    key_file: str | None = Field(
        default=None, description="file with 32 bytes or 64 hex digits that encrypts them on storage (AES-256-GCM); null: not encrypted"
    )
    restore: Literal["auto", "broadcast", "plain"] = Field(
        default="auto",
        description="broadcast: one rank of each data-parallel group reads what the group shares; plain: every rank reads what it "
        "needs; auto: broadcast on several nodes",
    )
    limit_s: Positive = Field(default=1800, description="longest that a save waits for storage or for another host, seconds")


class LoggingConfig(Section):
    """What is written while training."""

    every: Positive = Field(default=1, description="steps between lines in metrics.jsonl")
    tensorboard: bool = Field(default=True, description="also write TensorBoard events")


class EventsConfig(Section):
    """What happened when, by nanoseconds, in the run folder's events/."""

    enabled: bool = Field(default=True, description="write what each process, device and keeper does when")
    stamps: bool = Field(
        default=True, description="read the devices' clocks inside the step: how long each computes, and waits for which collective"
    )
    detail_every: Positive = Field(
        default=10, description="steps between those whose every phase of every tick is written; of all others, sums of passes and waits"
    )
    keep_mb: Annotated[float, Field(gt=0)] | None = Field(
        default=10_000, description="megabytes that a run keeps, oldest rows of devices first to go, then other old ones; null: all"
    )
    keep_days: Annotated[float, Field(gt=0)] | None = Field(default=None, description="events older than this go; null: age does not count")


class TrainConfig(Section):
    """The run: data, batch, optimizer, and what is written when."""

    steps: Positive = Field(description="optimizer steps in all")
    global_batch_size: Positive = Field(description="rows of one step over all data-parallel ranks and micro-batches")
    seed: NonNegative = Field(default=0, description="initial weights and row order")
    compute_dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="type of weights and activations in the step")
    gc_every: Positive = Field(default=100, description="steps between garbage collections, the same on all ranks (skew costs MFU)")
    digest_every: Positive | None = Field(
        default=100,
        description="steps between comparisons of what devices hold alike (silent corruption), also after a start's first step and before "
        "each save; costs one gather of the weights and one pass over them; null: never",
    )
    optimizer: OptimizerConfig = Field(description="update rule")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="learning rate over updates")
    rewinds: tuple[tuple[NonNegative, NonNegative, Positive], ...] = Field(
        default=(),
        description="[[STEP, FIRST, END], ...]: give up what was trained after STEP (those checkpoints are removed), go on from the newest "
        "one at or before it, and never train on samples FIRST to END - 1 (train.data.skip); a run remembers all it was ever given",
    )
    sample_prompt: str | None = Field(default=None, description="text continued by the trained model when the run ends; null: none")
    data: DataConfig = Field(default=DataConfig(), description="where rows come from")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="held-out loss")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="saving")
    logging: LoggingConfig = Field(default=LoggingConfig(), description="what is written while training")
    events: EventsConfig = Field(default=EventsConfig(), description="what happened when")


class Experiment(Section):
    """One resolved experiment: its sections and its name."""

    name: str = Field(description="name of the experiment, and of its run folder")
    model: ModelConfig
    parallel: ParallelConfig
    system: SystemConfig
    train: TrainConfig
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="how `megascale drive` watches and heals the run")

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on each data-parallel rank (m)."""
        return self.train.global_batch_size // (self.parallel.data * self.parallel.micro_batch_size)

    @property
    def tokens_per_step(self) -> int:
        """Row positions of one step, padding included."""
        return self.train.global_batch_size * self.model.sequence_length
