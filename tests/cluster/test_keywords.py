"""The first cause told from its consequences, in texts that real processes wrote."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.cluster.keywords import KEYWORDS, keyword_of, only_consequences

LOGS = Path(__file__).parent / "logs"


def found(text):
    return [keyword for line in text.splitlines() if (keyword := keyword_of(line)) is not None]


@pytest.mark.parametrize("log", ["peer_killed.log", "peer_of_coordinator_killed.log"])
def test_survivors_of_a_kill_name_consequences_only(log):
    """Logs of training processes, of two and of four, of which another one was killed."""
    keywords = found((LOGS / log).read_text())
    assert only_consequences(keywords) is True
    assert "coordination" in {keyword.name for keyword in keywords}


def test_gloo_says_that_a_peer_is_gone():
    assert {"coordination", "gloo"} <= {keyword.name for keyword in found((LOGS / "peer_killed.log").read_text())}


@pytest.mark.parametrize(
    ("line", "name", "is_primary"),
    [
        ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 274877906944 bytes.", "device memory", True),
        ("E1130 14:43:29.65 21600 cuda_executor.cc:1] CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", "ecc", True),
        ("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", "cuda", True),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "xid", True),
        ("node1:100:200 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_0:1 Got async fatal event: local error", "nccl", True),
        ("node1:100:200 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node2<50000>", "nccl peer", False),
        ("NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error.", "nccl peer", False),
        ("OSError: [Errno 28] No space left on device: '/data/run/metrics.jsonl'", "disk full", True),
        ("OSError: [Errno 12] Cannot allocate memory", "host memory", True),
        ("Fatal Python error: Bus error", "bus error", True),
        ("Fatal Python error: Segmentation fault", "segmentation fault", True),
        ("Killed", "killed", True),
        ("train.sh: line 3: 11632 Killed                  python train.py", "killed", True),
        ("OSError: [Errno 116] Stale file handle", "storage", True),
        (
            "[id=3] Termination timeout for `all reduce` of 300 seconds exceeded. Exiting to ensure a consistent program state.",
            "rendezvous",
            False,
        ),
        (
            "Use error polling to propagate the following error to all tasks: INTERNAL: Barrier failed because: "
            "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes",
            "coordination",
            False,
        ),
    ],
)
def test_kind_of_a_line(line, name, is_primary):
    keyword = keyword_of(line)
    assert (keyword.name, keyword.is_primary) == (name, is_primary)


@pytest.mark.parametrize(
    "line",
    [
        "step 102/2000  loss 2.3815  3.66k tok/s  MFU 0.2%  8:51 left",
        "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
        "I1130 14:43:29.657117   21600 coordination_service_agent.cc:288] Connected to the coordination service.",
        "step 7 was skipped: loss nan, gradient norm nan",
        "kept 3 checkpoints, killed none",
    ],
)
def test_ordinary_lines_say_nothing(line):
    assert keyword_of(line) is None


def test_one_primary_line_among_consequences_makes_a_first_cause():
    text = (LOGS / "peer_killed.log").read_text()
    assert only_consequences(found(f"{text}\nBus error")) is False
    assert only_consequences([]) is None


@given(st.text())
def test_any_line_has_a_verdict(line):
    assert keyword_of(line) is None or keyword_of(line) in KEYWORDS
