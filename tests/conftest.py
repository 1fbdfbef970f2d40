"""Eight virtual CPU devices for every test process, decided before JAX makes its first array.

LLVM optimises nothing: tests run tiny programs once, so compiling is what they pay for. XLA's own passes stay on. Triton's
kernels run in its interpreter, which must be asked for before Triton is imported.
"""

import os

import pytest

from tests.fake_s3 import fake_s3

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "64")  # threads for devices that wait in several collectives
os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("MEGASCALE_KEEPER_IDLE_S", "5")  # keepers that a failed or killed run left behind


@pytest.fixture
def s3(monkeypatch):
    """An S3 of this machine that every process of the test finds, with an empty bucket called ``bucket``."""
    with fake_s3() as (address, store):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield store
