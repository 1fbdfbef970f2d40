"""The process in which checks run, one after the other: ``python -m megascale_jax.cluster.diagnose.probe --check NAME ... --json``.

Prints one outcome a line as soon as it is known. A check that exceeds its limit ends the process from within, even while it hangs in a
library, with the place on standard error; the caller kills what does not end (`run.py`). Whatever libraries print goes to standard error.
"""

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from megascale_jax.cluster.diagnose import gpu, host, loopback, nic
from megascale_jax.cluster.diagnose.checks import CHECKS, PAIR, Outcome, not_run, outcome, shorten
from megascale_jax.cluster.diagnose.request import Options
from megascale_jax.errors import UsageError


def _host_checks(options: Options) -> dict[str, Callable[[], Outcome]]:
    folders, baseline = [Path(folder) for folder in options.folders], options.baseline
    return {
        "disk": lambda: host.disk(folders),
        "storage": lambda: host.storage(folders),
        "memory": host.memory,
        "memory_errors": host.memory_errors,
        "shared_memory": host.shared_memory,
        "clock": lambda: host.clock(options.clock_offset_s),
        "software": host.software,
        "leftovers": host.leftovers,
        "throttling": host.throttling,
        "gpu_memory": gpu.gpu_memory,
        "gpu_xid": gpu.gpu_xid,
        "gpu_nvlink": gpu.gpu_nvlink,
        "gpu_clocks": gpu.gpu_clocks,
        "gpu_free": gpu.gpu_free,
        "nic_link": lambda: nic.nic_link(baseline),
        "nic_counters": lambda: nic.nic_counters(baseline),
        "nic_settings": lambda: nic.nic_settings(baseline),
        "nic_tcp": lambda: loopback.nic_tcp(baseline),
        "nic_loopback": lambda: loopback.nic_loopback(baseline),
        "nic_to_nic": lambda: loopback.nic_to_nic(baseline),
    }


class _Devices:
    """The checks that need JAX, which starts with the first of them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._is_prepared = False

    def run(self, name: str) -> Outcome:
        try:
            from megascale_jax.cluster.diagnose import on_devices
        except ImportError as error:
            return not_run(name, f"JAX cannot be imported: {error}")
        try:
            if not self._is_prepared:
                on_devices.prepare(self._options)
                self._is_prepared = True
            if name != PAIR:
                return getattr(on_devices, name)()
            assert self._options.pair is not None, "argparse has seen to it"
            return on_devices.pair(self._options.pair)
        except (UsageError, RuntimeError) as error:  # XLA's errors are RuntimeErrors
            return outcome(name, [("fail", str(error).splitlines()[0] if str(error) else type(error).__name__)])


def run_check(name: str, host_checks: dict[str, Callable[[], Outcome]], devices: _Devices) -> Outcome:
    """One check; an error of the check itself is no verdict on the node."""
    try:
        return host_checks[name]() if name in host_checks else devices.run(name)
    except Exception as error:
        return not_run(name, f"the check itself failed: {type(error).__name__}: {error}")


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="Run checks of this node and print an outcome for each.")
    parser.add_argument("--check", action="append", required=True, choices=tuple(CHECKS), help="may be given several times")
    parser.add_argument("--options", default="{}", help="arguments of the checks, JSON")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="seconds of one check at most; each has a limit of its own, too"
    )
    parser.add_argument("--json", action="store_true", help="print outcomes as JSON, one a line")
    given = parser.parse_args()
    try:
        options = Options.model_validate_json(given.options)
    except ValidationError as error:
        parser.error(f"--options: {shorten(str(error))}")
    if PAIR in given.check and (options.pair is None or given.check != [PAIR]):
        parser.error(f"--check {PAIR} needs a pair in --options, and goes alone")
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host_checks, devices = _host_checks(options), _Devices(options)
    for name in given.check:
        faulthandler.dump_traceback_later(min(given.limit_s, CHECKS[name].limit_s), exit=True, file=sys.stderr)
        found = run_check(name, host_checks, devices)
        if options.pair is not None:
            found = found.model_copy(update={"facts": found.facts | options.pair.facts})
        print(found.model_dump_json() if given.json else f"{found.check}: {found.status} {found.reason}", file=results, flush=True)
    # the last limit stays on: leaving may wait for the peer


if __name__ == "__main__":
    main()
