"""Real small processes: what is reported of them, and that nothing is left of them after a stop."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megascale_jax.cluster import processes
from megascale_jax.cluster.log_reader import KEEP_BYTES
from megascale_jax.cluster.processes import Launch, TrainingProcesses
from megascale_jax.cluster.reports import ProcessReport
from megascale_jax.errors import StuckProcessError

LIMIT_S = 30
FOREVER = f"import time; time.sleep({10 * LIMIT_S})"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {FOREVER}"
MARKED = (
    "import os\nfrom megascale_jax.observe.marks import Marks\nmarks = Marks.from_environment(0)\nmarks.enter('join')\n"
    "marks.resumed(7, is_durable=True)\nmarks.enter('step')\n"
    "marks.step_done(8, float('nan'), is_skipped=True, step_s=0.5)\nmarks.saved(8)\n"
)


@pytest.fixture
def training():
    training = TrainingProcesses(kept_attempts=2)
    yield training
    training.stop(0)


def launch(code, rank=0, *, is_bare=True):
    flags = ["-I", "-S"] if is_bare else []
    return Launch(rank, (sys.executable, *flags, "-c", code), {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]})


def until(condition):
    limit = time.monotonic() + LIMIT_S
    while not (result := condition()):
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.01)
    return result


def ended(training):
    """Reports of all ranks once all have ended, and all lines of their logs."""
    lines = []

    def look():
        reports = training.poll()
        lines.extend(line for report in reports for line in report.log)
        return reports if all(report.state == "exited" for report in reports) else None

    return until(look), lines


def log_of(folder, attempt=1, rank=0):
    return folder / f"attempt-{attempt:04}" / f"rank-{rank}.log"


def wait_for(folder, text, rank=0):
    """The word that follows ``text`` in the log."""
    until(lambda: log_of(folder, rank=rank).is_file() and text in log_of(folder, rank=rank).read_text())
    return log_of(folder, rank=rank).read_text().split(text)[1].split()[:1]


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_codes_signals_and_logs_are_those_of_each_rank(training, tmp_path):
    training.start(
        3,
        [
            launch("print('fine')", 0),
            launch("import sys; print('CUDA_ERROR_UNKNOWN', file=sys.stderr); sys.exit(7)", 1),
            launch("import os; print('Socket closed', flush=True); os.abort()", 2),
            Launch(3, ("/no/such/command",), {}),
        ],
        tmp_path,
    )
    reports, lines = ended(training)
    assert [(report.rank, report.exit_code, report.signal) for report in reports] == [
        (0, 0, None),
        (1, 7, None),
        (2, None, signal.SIGABRT),
        (3, 127, None),
    ]
    assert [(report.keywords, report.is_secondary) for report in reports[:3]] == [((), None), (("cuda",), False), (("peer closed",), True)]
    assert sorted(lines) == ["/no/such/command: No such file or directory", "CUDA_ERROR_UNKNOWN", "Socket closed", "fine"]
    assert log_of(tmp_path, 3).read_text() == "fine\n"
    assert [report.log for report in training.poll()] == [()] * 4, "lines are news once"


def test_process_without_marks_is_at_its_start(training, tmp_path):
    training.start(1, [launch(FOREVER)], tmp_path)
    until(lambda: training.poll()[0].rss_bytes > 0)
    first, second = training.poll()[0], training.poll()[0]
    assert (first.state, first.step, first.section, first.passes) == ("running", None, "start", {})
    assert 0 < first.in_section_s < second.in_section_s


def test_marks_are_read_from_a_process_that_is_stopped_and_of_one_that_was_killed(training, tmp_path):
    training.start(4, [launch(MARKED + FOREVER, is_bare=False)], tmp_path)
    report = until(lambda: [report for report in training.poll() if report.saved_step is not None])[0]
    assert (report.step, report.section, report.loss, report.non_finite_in_a_row) == (8, "step", None, 1)
    assert (report.durable_step, report.step_s, report.passes) == (7, 0.5, {"start": 1, "join": 1})
    assert set(report.longest_s) == {"start", "join"} and report.cpu_s > 0
    os.kill(report.pid, signal.SIGSTOP)
    stopped = until(lambda: [report for report in training.poll() if report.state == "stopped"])[0]
    assert stopped.in_section_s < training.poll()[0].in_section_s, "time goes on for it"
    os.kill(report.pid, signal.SIGKILL)
    (killed,), _ = ended(training)
    assert (killed.signal, killed.step, killed.section) == (signal.SIGKILL, 8, "step")
    assert killed.in_section_s == training.poll()[0].in_section_s
    assert ProcessReport.model_validate_json(killed.model_dump_json()) == killed


def test_marks_of_another_attempt_are_not_believed(training, tmp_path):
    code = (
        MARKED.replace("from_environment(0)", "from_environment(0, {**os.environ, 'MEGASCALE_ATTEMPT': '8'})")
        + "print('there', flush=True);"
    )
    training.start(1, [launch(code + FOREVER, is_bare=False)], tmp_path)
    wait_for(tmp_path, "there")
    assert training.poll()[0].step is None


def test_stopped_process_hears_sigterm(training, tmp_path):
    code = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('ready', flush=True); {FOREVER}"
    training.start(1, [launch(code)], tmp_path)
    wait_for(tmp_path, "ready")
    os.kill(training.poll()[0].pid, signal.SIGSTOP)
    until(lambda: training.poll()[0].state == "stopped")
    training.stop(LIMIT_S)
    assert training.poll()[0].exit_code == 5


def test_deaf_process_is_killed_after_the_grace(training, tmp_path):
    training.start(1, [launch(DEAF)], tmp_path)
    wait_for(tmp_path, "deaf")
    training.stop(0.05)
    training.stop(LIMIT_S)
    report = training.poll()[0]
    assert (report.state, report.signal) == ("exited", signal.SIGKILL) and is_gone(report.pid)


def test_descendants_end_with_a_stop_though_their_parent_is_gone_and_a_keeper_stays(training, tmp_path):
    """One deaf grandchild in a process group of its own, and one that left the session, as the keeper of checkpoints does."""
    start = f"subprocess.Popen([sys.executable, '-I', '-S', '-c', {DEAF!r}]"
    code = (
        f"import subprocess, sys\nprint('grandchild', {start}, process_group=0).pid)\nprint('keeper', {start}, start_new_session=True).pid)"
    )
    training.start(1, [launch(code)], tmp_path)
    ended(training)
    (grandchild,), (keeper,) = wait_for(tmp_path, "grandchild"), wait_for(tmp_path, "keeper")
    until(lambda: log_of(tmp_path).read_text().count("deaf") == 2)
    try:
        assert not is_gone(int(grandchild))
        training.stop(0)
        assert is_gone(int(grandchild)) and not is_gone(int(keeper))
    finally:
        os.kill(int(keeper), signal.SIGKILL)


def test_number_of_a_process_that_ended_is_not_free_before_its_stop(training, tmp_path):
    training.start(1, [launch("pass")], tmp_path)
    ((report,), _) = ended(training)
    assert psutil.Process(report.pid).status() == psutil.STATUS_ZOMBIE, "nobody else can have its number now"
    training.stop(0)
    assert not psutil.pid_exists(report.pid)


def test_stranger_that_has_got_a_number_is_not_signalled(training, tmp_path):
    training.start(1, [launch(FOREVER)], tmp_path)
    leader = training.poll()[0].pid
    with subprocess.Popen(["cat"], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as stranger:
        processes._signal([stranger.pid], {leader}, signal.SIGKILL)
        stranger.stdin.write("alive\n")
        assert stranger.stdout.readline() == "alive\n"
        processes._signal([stranger.pid], {stranger.pid}, signal.SIGKILL)
        assert stranger.wait(LIMIT_S) == -signal.SIGKILL


def test_numbers_are_forgotten_after_a_stop(training, tmp_path, monkeypatch):
    training.start(1, [launch(FOREVER)], tmp_path)
    training.stop(0)
    monkeypatch.setattr(processes, "_members", lambda leaders: sorted(leaders))  # as if strangers had them all
    training.stop(1)


def test_processes_die_with_the_one_that_started_them(tmp_path):
    code = (
        "import pathlib, sys, time\nfrom megascale_jax.cluster.processes import Launch, TrainingProcesses\ntraining = TrainingProcesses()\n"
        f"training.start(1, [Launch(0, (sys.executable, '-I', '-S', '-c', {FOREVER!r}), {{}})], pathlib.Path(sys.argv[1]))\n"
        f"print(training.poll()[0].pid, flush=True)\ntime.sleep({LIMIT_S})"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as executor:
        pid = int(executor.stdout.readline())
        until(lambda: psutil.Process(pid).cmdline() == [sys.executable, "-I", "-S", "-c", FOREVER])  # it has become the command
        executor.kill()
        until(lambda: is_gone(pid))


def test_processes_outlive_the_thread_that_asked_for_them(training, tmp_path):
    def start():
        training.start(1, [launch("import time\nwhile True: print('alive', flush=True); time.sleep(0.01)")], tmp_path)
        wait_for(tmp_path, "alive")  # so it has asked the kernel by now

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: not any(task.id == thread.native_id for task in psutil.Process().threads()) and thread.native_id)
    size = log_of(tmp_path).stat().st_size
    until(lambda: log_of(tmp_path).stat().st_size > size + 10 or training.poll()[0].state != "running")
    assert training.poll()[0].state == "running"


def test_poll_answers_while_a_stop_waits(training, tmp_path):
    training.start(1, [launch(DEAF)], tmp_path)
    wait_for(tmp_path, "deaf")
    thread = threading.Thread(target=training.stop, args=(LIMIT_S,))
    thread.start()
    assert training.poll()[0].state == "running" and thread.is_alive()
    os.kill(training.poll()[0].pid, signal.SIGKILL)
    thread.join(LIMIT_S)
    assert training.poll()[0].signal == signal.SIGKILL


def test_new_attempt_ends_the_one_before_and_old_logs_go(training, tmp_path):
    pids = []
    for attempt in range(1, 5):
        training.start(attempt, [launch(FOREVER)], tmp_path)
        pids.append(training.poll()[0].pid)
    assert [is_gone(pid) for pid in pids] == [True, True, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-0003", "attempt-0004"]


def test_a_job_begun_anew_starts_beside_later_attempts_of_the_one_before(training, tmp_path):
    """It counts from 1 again: neither is its first folder the oldest, nor has it a part of the earlier job's in it."""
    for attempt in range(1, 5):
        training.start(attempt, [launch(f"print('old {attempt}')")], tmp_path)
        ended(training)
    os.utime(tmp_path / "attempt-0003", (1.0, 1.0))
    training.start(3, [launch("print('new')")], tmp_path)
    ended(training)
    assert log_of(tmp_path, 3).read_text() == "new\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-0003", "attempt-0004"]
    training.start(4, [launch("print('newer')")], tmp_path)
    training.start(1, [launch("print('newest')")], tmp_path)
    ended(training)
    assert log_of(tmp_path, 1).read_text() == "newest\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-0001", "attempt-0004"], "the one before it, and no older one"


def test_logs_of_the_same_number_are_kept_apart(training, tmp_path):
    for text in ("first", "second"):
        training.start(1, [launch(f"print({text!r})")], tmp_path)
        ended(training)
    assert log_of(tmp_path).read_text() == "second\n"
    assert (tmp_path / "attempt-0001-1" / "rank-0.log").read_text() == "first\n"


def test_a_process_to_wait_that_cannot_be_had_is_no_error_and_not_tried_without_pause(training, tmp_path, monkeypatch):
    tries = []

    def refuse(*_):
        tries.append(clock[0])
        raise BlockingIOError("no more processes")

    clock = [1000.0]
    monkeypatch.setattr(processes, "_start_warm", refuse)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    while clock[0] < 3000:
        training.warm_up({}, tmp_path / "warm.log")
        clock[0] += 1
    monkeypatch.undo()
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 320, 320, 320, 320]


def test_what_a_waiting_process_dies_of_is_in_its_log(training, tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('libcuda is not there')")
    training.warm_up({"PYTHONPATH": str(tmp_path)}, tmp_path / "warm.log")
    training._warm.wait(LIMIT_S)
    assert "libcuda is not there" in (tmp_path / "warm.log").read_text()


def test_nothing_runs_when_one_of_the_processes_cannot_be_started(training, tmp_path):
    with pytest.raises(OSError, match="too long"):
        training.start(1, [launch(FOREVER, 0), launch(FOREVER + " " * (1 << 20), 1)], tmp_path)
    assert training.poll() == ()
    own = psutil.Process()
    alive = [child for child in own.children() if child.status() != psutil.STATUS_ZOMBIE]  # of other tests there may be one
    assert [child for child in alive if str(FOREVER) in " ".join(child.cmdline())] == []


def test_process_that_cannot_be_killed_is_named(training, tmp_path, monkeypatch):
    training.start(1, [launch(FOREVER)], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "KILL_LIMIT_S", 0.0)
        patch.setattr(processes, "_signal", lambda *_: None)
        with pytest.raises(StuckProcessError, match=f"{training.poll()[0].pid} .*take this node out"):
            training.stop(0)
    training.stop(0)
    assert training.poll()[0].state == "exited"


def test_stop_without_a_start_does_nothing(training):
    training.stop(1)
    assert training.poll() == ()


def test_flood_of_a_log_stays_small_and_its_first_cause_is_told(training, tmp_path):
    training.start(1, [launch("import os\nprint('Bus error', flush=True)\nwhile True: os.write(1, b'noise ' * 10000 + b'\\n')")], tmp_path)
    first = log_of(tmp_path).with_suffix(".first.log")
    until(lambda: training.poll() and first.exists())
    reports = training.poll()
    training.stop(0)
    assert reports[0].keywords[0] == "bus error" and len(reports[0].model_dump_json()) < 10_000
    assert first.stat().st_size <= KEEP_BYTES
    with first.open("rb") as file:
        assert file.read(9) == b"Bus error"
