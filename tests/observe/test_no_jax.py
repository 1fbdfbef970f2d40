"""Watching a run or diagnosing a node must not start JAX: these modules are read on machines without a device, and by `compare`."""

import subprocess
import sys


def test_jax_is_not_loaded_when_runs_are_watched_or_compared() -> None:
    names = (
        "observe.compactor", "observe.event_compaction", "observe.event_store", "observe.events", "observe.offsets",
        "observe.marks", "observe.metrics", "observe.progress", "observe.report", "observe.summary", "observe.throughput",
        "views.compare", "views.loss", "views.overlay", "views.trace", "views.timeline", "views.why", "views.cube", "cli.compare",
        "views.goodput", "views.goodput_picture", "cli.goodput",
        "cluster.diagnose.fleet", "cluster.diagnose.meeting", "cluster.diagnose.report", "cluster.diagnose.run", "cli.diagnose",
    )  # fmt: skip
    code = (
        "import sys\n"
        + "".join(f"import megascale_jax.{name}\n" for name in names)
        + "print('jax' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
