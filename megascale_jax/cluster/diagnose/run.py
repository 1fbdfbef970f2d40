"""Runs checks in a probe process. A check that hangs is ended at its limit, and the others go on in a new process."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from pydantic import ValidationError

from megascale_jax.cluster.diagnose.checks import CHECKS, Outcome, Status, outcome
from megascale_jax.cluster.diagnose.request import Options

PROBE = (sys.executable, "-m", "megascale_jax.cluster.diagnose.probe")
GRACE_S = 3.0
"""Beyond the limit, in which the probe ends by itself and says where it hung."""
END_LIMIT_S = 2.0
"""A process that waits for a dead disk cannot even be killed: it is left behind after this."""
LONGEST_LINE = 1 << 20


def run_checks(
    names: Sequence[str], options: Options, *, limit_s: float = float("inf"), command: Sequence[str] = PROBE
) -> Iterator[Outcome]:
    """Run checks in order; each outcome as soon as it is known. ``limit_s``: at most so long for each, beside its own limit."""
    waiting = list(names)
    while waiting:
        for found in _run_some(tuple(waiting), options, limit_s, command):
            waiting.remove(found.check)
            yield found


def _run_some(names: Sequence[str], options: Options, limit_s: float, command: Sequence[str]) -> Iterator[Outcome]:
    """Outcomes of one probe process; the last one is of the check that ended it, if one did."""
    limits = {name: min(limit_s, CHECKS[name].limit_s) for name in names}
    arguments = [*command, "--json", "--options", options.model_dump_json()]
    arguments += [word for name in names for word in ("--check", name)]
    if limit_s != float("inf"):
        arguments += ["--limit-s", str(limit_s)]
    with tempfile.TemporaryFile() as errors:
        probe = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, process_group=0)
        assert probe.stdout is not None
        try:
            lines = _lines(probe.stdout)
            for name in names:
                deadline_s = time.monotonic() + limits[name] + GRACE_S
                line = lines(deadline_s)
                found = _parse(line, name) if line else None
                if found is None:
                    reason = _why(probe, errors, limits[name], is_late=line is None)
                    yield _with_pair(outcome(name, [reason]), options)
                    return
                yield found
            # leaving, too, has an end; a pair leaves together
            with contextlib.suppress(subprocess.TimeoutExpired):
                probe.wait(limits[names[-1]])
        finally:
            _end(probe)
            probe.stdout.close()


def _lines(stream: IO[bytes]):
    """A function that gives the next line before a deadline, ``b""`` at the end, ``None`` when it is late or too long."""
    content = bytearray()

    def next_line(deadline_s: float) -> bytes | None:
        while b"\n" not in content:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or len(content) > LONGEST_LINE or not select.select([stream], [], [], left_s)[0]:
                return None
            more = os.read(stream.fileno(), 65536)
            if not more:
                return b""
            content.extend(more)
        line, _, rest = bytes(content).partition(b"\n")
        content[:] = rest
        return line

    return next_line


def _parse(line: bytes, name: str) -> Outcome | None:
    try:
        found = Outcome.model_validate_json(line)
    except ValidationError:
        return None
    return found if found.check == name else None


def _why(probe: subprocess.Popen[bytes], errors: IO[bytes], limit_s: float, *, is_late: bool) -> tuple[Status, str]:
    """What became of a check without an outcome. A hang and a crash are findings, an error of the probe itself is none."""
    if not is_late:
        with contextlib.suppress(subprocess.TimeoutExpired):
            probe.wait(GRACE_S)
    code = probe.poll()
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 16384))
    said = errors.read().decode(errors="replace")
    if code is None or "Timeout (" in said:
        place = re.search(r'File "[^"]*?([^"/]+)", line (\d+) in (\w+)', said.partition("Timeout (")[2])
        where = f" in {place[3]} ({place[1]}:{place[2]})" if place else ""
        return "fail", f"did not end within {limit_s:g} s; it hung{where}"
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    if code < 0:
        return "fail", f"was ended by {signal.Signals(-code).name}: {last}"
    return "not_run", f"the probe ended with code {code}: {last}"


def _with_pair(found: Outcome, options: Options) -> Outcome:
    return found if options.pair is None else found.model_copy(update={"facts": found.facts | options.pair.facts})


def _end(probe: subprocess.Popen[bytes]) -> None:
    """End the probe and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(probe.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        probe.wait(END_LIMIT_S)
