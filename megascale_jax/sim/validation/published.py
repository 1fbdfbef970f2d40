"""Published rows that simulations are scored on, as data. No JAX.

Sources: MegaScale, NSDI '24, arXiv 2402.15627 (Tables 2 and 3, Figure 9); Korthikanti et al., arXiv 2205.05198, Table 5; The Llama 3 Herd
of Models, Table 4; the README of Megatron-LM of 2024; NVIDIA's benchmark recipes of MaxText on H100; Alibaba HPN, SIGCOMM '24, Table 3.
"""

from typing import Literal, NamedTuple

System = Literal["megatron-lm", "megascale"]


class Scaling(NamedTuple):
    """A row of Table 2: 175 B parameters; seconds of an iteration, tokens a second, MFU."""

    system: System
    gpus: int
    batch: int
    seconds: float
    tokens_per_s: float
    mfu: float


TABLE2 = (
    Scaling("megatron-lm", 256, 768, 40.0, 39.3e3, 0.530),
    Scaling("megatron-lm", 512, 768, 21.2, 74.1e3, 0.499),
    Scaling("megatron-lm", 768, 768, 15.2, 103.8e3, 0.467),
    Scaling("megatron-lm", 1024, 768, 11.9, 132.7e3, 0.447),
    Scaling("megatron-lm", 3072, 6144, 29.02, 433.6e3, 0.487),
    Scaling("megatron-lm", 6144, 6144, 14.78, 851.6e3, 0.478),
    Scaling("megatron-lm", 8192, 6144, 12.24, 1027.9e3, 0.433),
    Scaling("megatron-lm", 12288, 6144, 8.57, 1466.8e3, 0.412),
    Scaling("megascale", 256, 768, 32.0, 49.0e3, 0.653),
    Scaling("megascale", 512, 768, 16.5, 95.1e3, 0.635),
    Scaling("megascale", 768, 768, 11.5, 136.7e3, 0.613),
    Scaling("megascale", 1024, 768, 8.9, 176.9e3, 0.590),
    Scaling("megascale", 3072, 6144, 23.66, 531.9e3, 0.591),
    Scaling("megascale", 6144, 6144, 12.21, 1030.9e3, 0.573),
    Scaling("megascale", 8192, 6144, 9.56, 1315.6e3, 0.549),
    Scaling("megascale", 12288, 6144, 6.34, 1984.0e3, 0.552),
)
CALIBRATION_GPUS = (256, 3072)
"""Of both systems: the only rows that constants may be fitted on."""

TABLE3_START = 47.7
TABLE3 = (
    ("parallel block", 4.6),
    ("sliding-window attention", 1.0),
    ("tensor-parallel overlap", 2.2),
    ("pipeline overlap", 2.5),
    ("data-parallel overlap", 1.5),
    ("efficient operators", 1.7),
    ("misc: data pipeline, host code", 1.1),
    ("LAMB, batch x 3", 3.0),
)
"""What is added, and the points of MFU that it adds; 256 GPUs, batch 256 before the last row."""

FIGURE9 = (
    ("megatron-lm", 2240, 0.492),
    ("megatron-lm", 4480, 0.488),
    ("megatron-lm", 11200, 0.482),
    ("megascale", 2240, 0.543),
    ("megascale", 4480, 0.541),
    ("megascale", 11200, 0.543),
)
"""System, GPUs (as many rows in a batch), MFU; 530 B parameters."""

KORTHIKANTI = (
    ("22B", 1.42, 1.10),
    ("175B", 18.13, 13.75),
    ("530B", 49.05, 37.83),
    ("1T", 94.42, 71.49),
)
"""Model; seconds with full recomputation, and with sequence parallelism and selective recomputation."""

LLAMA3 = ((8192, 430.0), (16384, 400.0))
"""GPUs, TFLOP/s a GPU; tensor 8, pipe 16, 16 M tokens a batch of rows of 8,192."""

MEGATRON_H100 = (("175B", 96, 1152, 0.47), ("175B", 4608, 1152, 0.42), ("462B", 6144, 1536, 0.475))
"""Model, GPUs, rows (of 4,096; the 462 B model's are not published), MFU (the 462 B model's is printed as 47 to 48 %)."""

MAXTEXT_LLAMA2 = ((64, 0.5259), (128, 0.5204), (256, 0.5145), (512, 0.5190), (1024, 0.5195), (2048, 0.5209))
"""GPUs, MFU over full attention; Llama-2 70B, rows of 4,096, two a GPU, bf16."""
MAXTEXT_LLAMA3 = ((128, 15.563), (256, 15.444), (512, 15.519), (1024, 15.603), (2048, 15.898))
"""GPUs, seconds of a step; Llama-3 70B, rows of 8,192, two a GPU, bf16."""

HPN_PIPE_BYTES, HPN_DATA_BYTES = 6.29e6, 5.47e9
"""What the formulas make of HPN's Table 3 (6 MB and 5.5 GB): 175 B parameters, tensor 8, pipe 8, one row."""
