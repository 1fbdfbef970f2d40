"""Eight virtual CPU devices for every test process, decided before JAX makes its first array.

LLVM optimises nothing: tests run tiny programs once, so compiling is what they pay for. XLA's own passes stay on. Triton's
kernels run in its interpreter, which must be asked for before Triton is imported.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "64")  # threads for devices that wait in several collectives
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("MEGASCALE_KEEPER_IDLE_S", "5")  # keepers that a failed or killed run left behind
