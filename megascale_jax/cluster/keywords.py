"""What a line in the log of a training process says about a failure, and whether it can be the first cause.

When one process of a run dies, all others end too, each with pages about it. Those pages only say that *somebody* is gone
(*secondary*); what is looked for is the one process that says more than that (*primary*). A line that is secondary is never searched for a
primary keyword: the coordination service repeats another process's error in everybody's log.

Secondary texts are those that jaxlib 0.11 and Gloo wrote when one of two or four training processes was killed; the texts of NCCL and CUDA
are from their sources. Pure.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_INFORMATION = re.compile(r"I\d{4} \d\d:\d\d:")  # how absl begins a line that reports no problem


@dataclass(frozen=True)
class Keyword:
    """A kind of line. ``pattern`` is searched in it, with regard to case."""

    name: str
    is_primary: bool
    pattern: re.Pattern[str]


def _table(is_primary: bool, patterns: dict[str, str]) -> tuple[Keyword, ...]:
    return tuple(Keyword(name, is_primary, re.compile(pattern)) for name, pattern in patterns.items())


_SECONDARY = _table(
    False,
    {
        "coordination": r"JAX distributed service detected fatal errors|[Cc]oordination[ _]service|CoordinationService"
        r"|Barrier failed because|Shutdown barrier has failed|heartbeat timeout|stopped sending heartbeats|The tasks have crashed",
        "gloo": r"Gloo [\w-]+ failed|gloo/transport|\[Gloo\].*(?:failed|error)|Timed out waiting \d+ms for (?:recv|send) operation",
        "nccl peer": r"ncclRemoteError|remote process (?:exited|exiting)|Connection closed by remote peer|IBV_WC_RETRY_EXC_ERR"
        r"|NCCL WARN.*(?:[Tt]imed? ?out|Connection refused|Connection reset)",
        "peer closed": r"Connection (?:closed|reset) by (?:remote )?peer|Socket closed",
        "rendezvous": r"has been waiting for `.*` for \d+ seconds and may be stuck|Termination timeout for `.*` of \d+ seconds exceeded"
        r"|threads to join the rendezvous",
    },
)
# The first that fits counts, so the more exact ones come first.
_PRIMARY = _table(
    True,
    {
        "ecc": r"ECC_UNCORRECTABLE|[Uu]ncorrectable (?:\w+ )?ECC|[Dd]ouble[ -][Bb]it ECC",
        "nvlink": r"NVLINK_UNCORRECTABLE|NVLink.*(?:[Ff]atal|[Uu]ncorrectable|[Ee]rror)",
        "xid": r"\bXid\b",
        "device memory": r"CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED: Out of memory|cudaErrorMemoryAllocation|CUDA out of memory",
        "cuda": r"CUDA_ERROR_\w+|CUDA error|cudaError\w+|(?:CUDNN|CUBLAS)_STATUS_(?!SUCCESS)\w+",
        "nccl": r"NCCL WARN|NCCL [Ee]rror|NCCL operation .* failed|nccl(?:System|Internal|UnhandledCuda)Error",
        "host memory": r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|oom-kill|Out of memory: Killed process",
        "bus error": r"Bus error|\bSIGBUS\b",
        "segmentation fault": r"Segmentation fault|\bSIGSEGV\b",
        "killed": r"^Killed$|: line \d+: .*\bKilled\b",
        "disk full": r"No space left on device|Disk quota exceeded",
        "storage": r"Input/output error|Stale file handle|Transport endpoint is not connected|Read-only file system",
    },
)
KEYWORDS = (*_SECONDARY, *_PRIMARY)


def keyword_of(line: str) -> Keyword | None:
    """The kind of one line; ``None``: it says nothing of a failure."""
    if _INFORMATION.match(line):
        return None
    return next((keyword for keyword in KEYWORDS if keyword.pattern.search(line)), None)


def only_consequences(keywords: Iterable[Keyword]) -> bool | None:
    """Whether all of them can be explained by another process's end; ``None`` when there are none."""
    found = list(keywords)
    return not any(keyword.is_primary for keyword in found) if found else None
