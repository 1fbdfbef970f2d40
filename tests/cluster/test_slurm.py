"""The Slurm backend against a small Slurm: what is read from answers, and that a node never has two executors."""

import re
import tempfile
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megascale_jax.cluster.backends.base import Start
from megascale_jax.cluster.backends.slurm import STALE_S, SlurmBackend, SlurmEngine, address_of_host, tag_of
from megascale_jax.cluster.backends.slurm_commands import (
    Slurm,
    Step,
    clean_reason,
    last_words,
    parse_nodes,
    parse_steps,
    plain_environment,
    step_command,
    step_environment,
    step_name,
)
from megascale_jax.cluster.backends.slurm_worker import AGAIN_S, FRESH_S, LOOK_S, SlurmWorker
from megascale_jax.config.cluster import SlurmConfig
from megascale_jax.errors import BackendError, UsageError
from tests.fake_slurm import FakeSlurm

INSIDE = MappingProxyType({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"})
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)
START_S = 3 * STALE_S
TAG = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)


class Job:
    """A backend with its worker, worked by hand, and a Slurm."""

    def __init__(self, folder: Path, slurm: FakeSlurm | None = None):
        self.slurm, self.said, self.folder = slurm or FakeSlurm(), [], folder
        (folder / "security").mkdir(exist_ok=True)
        (folder / "security" / "job").write_text("abc\n")
        self.start = Start(("10.0.0.1", 2000), folder / "security", folder, ("train", "it"))
        self.restart()

    def restart(self) -> None:
        """Another driver, which knows nothing."""
        self.worker = SlurmWorker(Slurm(self.slurm), "7", self.slurm.names, self.said.append, self.clock)
        self.backend = SlurmBackend("7", self.start, SlurmConfig(start_s=START_S), self.worker, self.slurm.launch, self.clock)

    def clock(self) -> float:
        return self.slurm.now

    def look(self, after_s: float = 1.0) -> None:
        self.slurm.now += after_s
        self.worker.work()

    def name(self, node: str) -> str:
        return step_name(node, tag_of(self.start))


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


# Texts.


@given(
    st.sampled_from(["12", "12_3", "12+1"]),
    st.lists(st.tuples(NAMES, TAG), unique=True, max_size=5),
    st.lists(st.text(max_size=30), max_size=5),
)
def test_steps_are_found_among_anything(job, steps, noise):
    wanted = tuple(Step(f"{job}.{number}", node, tag) for number, (node, tag) in enumerate(steps))
    lines = [f"{step.number}|{step.node}|{step_name(step.node, step.tag)}" for step in wanted]
    others = ["12.batch|n1|batch", "12.extern|n1|extern", "12.9|n1|bash", "12.8|n1|megascale-n2-aa", *noise]
    assert parse_steps("\n".join([*others, *lines])) == wanted


@given(NAMES, st.lists(st.sampled_from(["DOWN", "DRAIN", "IDLE", "ALLOCATED", "MIXED"]), min_size=1), st.sampled_from(["", "*", "~", "#"]))
def test_states_of_nodes_lose_their_signs(name, states, sign):
    line = f"NodeName={name} Arch=x NodeAddr=10.1.1.1 OS=Linux 6 #1 SMP State={'+'.join(states)}{sign} ThreadsPerCore=1 Comment=State=UP"
    state = parse_nodes(line)[name]
    assert (state.states, state.address, state.reason) == (set(states), "10.1.1.1", "")
    assert state.is_down == ("DOWN" in states) and state.is_drained == ("DRAIN" in states)


@given(st.text())
def test_a_reason_is_marked_short_and_plain_and_is_read_back(reason):
    cleaned = clean_reason(reason)
    assert cleaned.startswith("megascale:") and len(cleaned) <= 200 and cleaned.isascii() and cleaned.isprintable()
    line = f"NodeName=n1 NodeAddr=a State=IDLE+DRAIN Weight=1 Reason={cleaned} [root@2026-01-01T00:00:00]"
    assert parse_nodes(line)["n1"].reason == cleaned


@given(st.text())
def test_no_text_is_too_odd(text):
    parse_nodes(text)
    parse_steps(text)
    assert "\n" not in last_words(text)


def test_a_step_gets_a_whole_node_whatever_the_script_asked_for():
    asked = {"SLURM_GPUS": "24", "SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "3", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_NNODES": "3"}
    kept = {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "8", "SLURM_CONF": "c", "SLURM_STEP_GRES": "gpu:8", "PATH": "p"}
    assert step_environment(asked | kept) == kept
    assert plain_environment({"SQUEUE_FORMAT": "%i", "PATH": "p", "LC_ALL": "de"}) == {"PATH": "p", "LC_ALL": "C"}


def test_a_step_is_started_without_a_shell_and_its_log_keeps_its_name():
    command = step_command("7", "n1", "ab", Path("/r/100%/log"), ["a b", "$HOME"])
    assert command[0] == "srun" and command[-2:] == ["a b", "$HOME"] and "--output=/r/100%%/log" in command
    assert {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n1", "--job-name=megascale-n1-ab", "--cpu-bind=none"} <= {*command}


# The allocation.


def engine(nodes: int, spares: int, slurm: FakeSlurm | None = None, environment=INSIDE, **config: object) -> tuple[SlurmEngine, list[str]]:
    said: list[str] = []
    return SlurmEngine(nodes, spares, SlurmConfig.model_validate(config), said.append, environment, Slurm(slurm or FakeSlurm())), said


def test_nodes_are_those_of_the_allocation():
    found, said = engine(2, 1)
    assert (found.names, found.host, said) == (("n1", "n2", "n3"), "127.0.0.1", [])
    found, said = engine(1, 1)
    assert found.names == ("n1", "n2") and "1 nodes of job 7 are left unused; use them with --spares 2" in said[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"environment": {}}, "sbatch --nodes 3 launch/slurm-drive.sbatch"),
        ({"environment": {"SLURM_JOB_ID": "1; rm", "SLURM_JOB_NODELIST": "n1"}}, "in none"),
        ({"slurm": FakeSlurm(names=("n1", "n2"))}, "has 2 nodes .*expected 2 that train and 1 spares.*ask Slurm for 3"),
        ({"slurm": FakeSlurm(names=("n1", "-n2", "n3"))}, "is none for a job"),
        ({"slurm": FakeSlurm(refuses={"scontrol show": "slurmctld is away"})}, "slurmctld is away"),
        ({"slurm": FakeSlurm(address="nowhere.invalid")}, "cluster.slurm.host"),
        ({"host": "nowhere.invalid"}, "an interface of this node .*lo"),
    ],
)
def test_what_cannot_be_had_is_said_with_what_to_do(values, words):
    with pytest.raises(UsageError, match=words):
        engine(2, 1, **values)


def test_the_driver_listens_at_an_interface_an_address_or_a_name():
    assert address_of_host("lo") == address_of_host("127.0.0.1") == "127.0.0.1"
    assert address_of_host("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("config", "line", "words", "is_asked"),
    [
        ({}, "Requeue=1 Restarts=2 BatchFlag=1", "queued again, for other nodes \\(3 of at most 3", True),
        ({}, "Requeue=1 Restarts=3 BatchFlag=1", "3 times already", False),
        ({}, "Requeue=0 Restarts=0 BatchFlag=1", "--no-requeue", False),
        ({}, "Requeue=1 Restarts=0 BatchFlag=0", "no batch job", False),
        ({}, "nonsense", "says nothing of", False),
        ({"requeue": False}, "Requeue=1 Restarts=0 BatchFlag=1", "cluster.slurm.requeue=false", False),
    ],
)
def test_a_job_is_queued_again_a_few_times_where_it_may(config, line, words, is_asked):
    slurm = FakeSlurm(job_line=f"JobId=7 {line} Reboot=0")
    found, _ = engine(2, 1, slurm, **config)
    assert re.search(words, found.start_over())
    assert (["scontrol", "requeue", "7"] in slurm.asked) == is_asked


# Steps.


def test_nothing_is_started_before_slurm_was_asked_what_runs(job):
    job.backend.ensure("n1")
    assert job.backend.is_alive("n1") is None and not job.slurm.steps
    job.look()
    for _ in range(3):
        job.backend.ensure("n1")
    assert job.slurm.steps_of("n1") == ["7.0"] and job.backend.is_alive("n1") and job.backend.is_alive("n2") is False


def test_a_new_driver_adopts_what_runs_and_ends_what_is_not_its_own(job):
    job.slurm.steps = {"7.90": ("n1", job.name("n1")), "7.91": ("n2", step_name("n2", "0123")), "7.92": ("n2", "bash")}
    job.look()
    for name in ("n1", "n2"):
        job.backend.ensure(name)
    assert job.backend.is_alive("n1") and not job.slurm.children
    job.look()
    job.backend.ensure("n2")
    job.look()
    assert [number for number in job.slurm.steps if number != "7.0"] == ["7.90", "7.92"] and job.slurm.steps_of("n2") == ["7.92", "7.0"]


def test_a_step_that_ends_is_known_at_once_and_started_again(job):
    job.look()
    job.backend.ensure("n1")
    job.slurm.now += 100.0
    job.slurm.end("7.0", 137)
    assert job.backend.is_alive("n1") is False
    job.look()
    job.backend.ensure("n1")
    assert job.slurm.steps_of("n1") == ["7.1"]


def test_steps_that_fail_at_once_are_tried_less_and_less_often_and_say_why(job):
    job.look()
    for _ in range(200):
        try:
            job.backend.ensure("n1")
            (job.folder / "nodes" / "n1" / "srun.log").write_text("srun: error: Unable to create step: no such node\n")
            for number in job.slurm.steps_of("n1"):
                job.slurm.end(number, 1)
        except BackendError as error:
            assert "Unable to create step: no such node" in str(error)
        job.look()
    assert 8 <= len(job.slurm.children) <= 12


def test_a_step_whose_srun_was_killed_goes_on(job):
    job.look()
    job.backend.ensure("n1")
    job.look()
    job.slurm.kill_srun("7.0")
    assert job.backend.is_alive("n1") is None, "the newest look is older than that"
    job.backend.ensure("n1")
    job.look()
    job.backend.ensure("n1")
    assert job.backend.is_alive("n1") and job.slurm.steps_of("n1") == ["7.0"]
    job.slurm.end("7.0", 0)
    job.look()
    assert job.backend.is_alive("n1") is False


def miss(job: Job, node: str, seconds: float) -> None:
    """The node's executor is not heard of, and asked for all the time."""
    for _ in range(int(seconds / LOOK_S)):
        job.look(LOOK_S)
        job.backend.ensure(node)


@pytest.mark.parametrize("is_adopted", [False, True])
@pytest.mark.parametrize(("is_heard", "limit_s"), [(False, START_S), (True, STALE_S)])
def test_a_step_that_nobody_hears_of_is_ended_and_another_started(job, is_adopted, is_heard, limit_s):
    job.look()
    job.backend.ensure("n1")
    if is_adopted:
        job.restart()
    if is_heard:
        job.backend.is_alive("n1")  # as the driver asks of a node that is part of the job
    miss(job, "n1", limit_s)
    assert job.slurm.steps_of("n1") == ["7.0"], "an executor may take long to start, or hang for a while"
    miss(job, "n1", 3 * LOOK_S)
    assert job.slurm.steps_of("n1") == ["7.1"]
    miss(job, "n1", START_S - LOOK_S)
    assert job.slurm.steps_of("n1") == ["7.1"], "the new one was never heard of, so it may be starting"


def test_a_node_that_came_late_and_is_missed_at_once_has_its_time(job):
    job.look()
    job.backend.ensure("n1")
    miss(job, "n1", START_S - LOOK_S)
    job.backend.is_alive("n1")
    miss(job, "n1", STALE_S)
    assert job.slurm.steps_of("n1") == ["7.0"]
    miss(job, "n1", 3 * LOOK_S)
    assert job.slurm.steps_of("n1") == ["7.1"]


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_step_that_slurm_lists_for_ever_is_not_waited_for(job, is_adopted, monkeypatch):
    job.look()
    job.backend.ensure("n1")
    if is_adopted:
        job.restart()

    def end(number: str, code: int) -> None:
        if (child := job.slurm.children[number]).returncode is None and not is_adopted:
            child.returncode = code  # as srun does when nobody answers

    monkeypatch.setattr(job.slurm, "end", end)
    miss(job, "n1", START_S + 100.0)
    assert job.slurm.steps_of("n1") == ["7.0", "7.1"] and job.backend.is_alive("n1")
    assert [command for command in job.slurm.asked if command[0] == "scancel"] == [["scancel", "--quiet", "7.0"]], "once"


def test_a_node_that_is_missed_now_and_then_keeps_its_step(job):
    job.look()
    job.backend.ensure("n1")
    for _ in range(10):
        miss(job, "n1", START_S / 2)
        job.look(2 * START_S)
    assert job.slurm.steps_of("n1") == ["7.0"]


def test_a_look_that_is_old_says_nothing(job):
    job.slurm.steps = {"7.9": ("n1", job.name("n1"))}
    job.look()
    assert job.backend.is_alive("n1")
    job.slurm.refuses["squeue"] = "no answer within 20 s"
    job.look(FRESH_S)
    assert job.backend.is_alive("n1") is None
    with pytest.raises(BackendError, match="no answer within 20 s"):
        job.backend.ensure("n1")


def test_a_node_that_slurm_calls_down_is_dead_and_what_is_left_there_is_ended(job):
    job.look()
    job.backend.ensure("n1")
    job.slurm.states["n1"], job.slurm.reasons["n1"] = "DOWN*", "Not responding"
    job.look()
    assert job.backend.is_alive("n1") is False
    with pytest.raises(BackendError, match="DOWN: Not responding"):
        job.backend.ensure("n1")
    job.look()
    assert job.slurm.steps_of("n1") == []


def test_not_all_of_a_large_job_starts_in_one_moment(tmp_path):
    job = Job(tmp_path, FakeSlurm(names=tuple(f"n{number}" for number in range(100))))
    job.look()
    for name in job.slurm.names:
        job.backend.ensure(name)
    assert len(job.slurm.steps) == 32
    job.slurm.now += 1.1
    for name in job.slurm.names:
        job.backend.ensure(name)
    assert len(job.slurm.steps) == 64


# Drains.


def test_an_evicted_node_is_drained_and_comes_back_by_order(job):
    job.look()
    job.backend.ensure("n1")
    job.look()
    job.backend.remove("n1", "", "gemm: 3 GB/s; a=b\nState=UP")
    job.look()
    assert job.slurm.reasons["n1"] == "megascale: gemm: 3 GB/s; a b State UP" and job.slurm.steps_of("n1") == []
    job.backend.restore("n1", "")
    job.look()
    assert job.slurm.states == {} and job.said == ["n1 is drained in Slurm", "n1 is resumed in Slurm"]


def test_what_others_drained_is_neither_renamed_nor_resumed(job):
    job.slurm.states["n1"], job.slurm.reasons["n1"] = "ALLOCATED+DRAIN", "new disk on Monday"
    job.backend.remove("n1", "", "slow")
    job.look()
    job.backend.restore("n1", "")
    job.look()
    assert job.slurm.reasons["n1"] == "new disk on Monday" and "others did that: new disk on Monday" in job.said[-1]


def test_who_may_not_drain_hears_it_once_and_it_is_tried_again(job):
    job.slurm.refuses["scontrol update"] = "Access/permission denied"
    job.backend.remove("n1", "", "slow")
    for _ in range(10):
        job.look(AGAIN_S / 3)
    tries = [command for command in job.slurm.asked if command[:2] == ["scontrol", "update"]]
    assert len(job.said) == 1 and "permission denied" in job.said[0] and 3 <= len(tries) <= 4
    job.slurm.refuses.clear()
    job.look(AGAIN_S)
    assert "n1" in job.slurm.reasons


def test_the_end_of_a_job_ends_its_steps_and_leaves_others(tmp_path):
    job = Job(tmp_path)
    job.slurm.steps = {"7.90": ("n1", job.name("n1")), "7.92": ("n2", "bash")}
    job.worker.start()
    for name in job.slurm.names:
        job.backend.release(name)
    assert list(job.slurm.steps) == ["7.92"]


class OneExecutorEach(RuleBasedStateMachine):
    """Drivers, sruns and steps come and go in any order."""

    nodes = st.sampled_from(FakeSlurm().names)

    def __init__(self) -> None:
        super().__init__()
        self._place = tempfile.TemporaryDirectory()
        self.job = Job(Path(self._place.name))

    def teardown(self) -> None:
        self._place.cleanup()

    @rule(node=nodes)
    def ensure(self, node: str) -> None:
        try:
            self.job.backend.ensure(node)
        except BackendError:
            assert self.job.backend.is_alive(node) is not True

    @rule(after_s=st.sampled_from([0.1, 1.0, 20.0]))
    def look(self, after_s: float) -> None:
        self.job.look(after_s)

    @rule(passed_s=st.sampled_from([0.1, 5.0, FRESH_S]))
    def time_passes(self, passed_s: float) -> None:
        self.job.slurm.now += passed_s

    @rule()
    def restart(self) -> None:
        self.job.restart()

    @rule(node=nodes, code=st.sampled_from([0, 1, 137]))
    def step_ends(self, node: str, code: int) -> None:
        for number in self.job.slurm.steps_of(node):
            self.job.slurm.end(number, code)

    @rule(node=nodes)
    def srun_is_killed(self, node: str) -> None:
        for number in self.job.slurm.steps_of(node):
            self.job.slurm.kill_srun(number)

    @rule(node=nodes, state=st.sampled_from(["DOWN*", "ALLOCATED", "MIXED+DRAIN"]))
    def node_changes(self, node: str, state: str) -> None:
        self.job.slurm.states[node] = state

    @rule(is_away=st.booleans())
    def controller(self, is_away: bool) -> None:
        self.job.slurm.refuses = {"squeue": "is away"} if is_away else {}

    @invariant()
    def no_node_has_two(self) -> None:
        for node in self.job.slurm.names:
            assert len(self.job.slurm.steps_of(node)) <= 1

    @invariant()
    def a_running_step_is_not_called_dead(self) -> None:
        for node in self.job.slurm.names:
            if self.job.slurm.steps_of(node) and "DOWN" not in self.job.slurm.states.get(node, ""):
                look = self.job.worker.newest
                was_down = look is not None and node in look.nodes and look.nodes[node].is_down
                assert was_down or self.job.backend.is_alive(node) is not False


TestOneExecutorEach = OneExecutorEach.TestCase
TestOneExecutorEach.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
