"""Roles, and the rule of two persons: never executed twice, never by one person, never after its time."""

from random import Random, SystemRandom

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from megascale_jax.cluster.link.operators import (
    REQUIRED,
    Command,
    Execute,
    Refuse,
    Requests,
    Rule,
    Wait,
    confirm,
    may,
    submit,
)
from megascale_jax.cluster.link.tokens import Role

PEOPLE = st.sampled_from(["alice", "Alice", "bob", "carol"])
NODES = st.sampled_from(["node-1", "node-2", "node-3"])
ON = Rule(limit_s=10.0, most=2)


def why(result):
    """Why nothing is done."""
    assert isinstance(result[1], Refuse)
    return result[1].why


@pytest.mark.parametrize(
    ("role", "commands"),
    [
        (Role.NODE, set()),
        (Role.VIEW, {"status"}),
        (Role.OPERATE, {"status", "cordon", "uncordon"}),
        (Role.ADMIN, set(Command)),
    ],
)
def test_roles(role, commands):
    assert {command for command in Command if may(role, command)} == commands
    assert set(REQUIRED) == set(Command)


def test_eviction_waits_for_a_second_admin():
    requests, outcome = submit(Requests(), Command.EVICT, "node-3", "alice", Role.ADMIN, 0.0, ON)
    assert isinstance(outcome, Wait)
    assert submit(requests, Command.EVICT, "node-3", "alice", Role.ADMIN, 1.0, ON) == (requests, outcome), "asked again"
    number = outcome.request.number
    assert f"confirm request {number} instead" in why(submit(requests, Command.EVICT, "node-3", "bob", Role.ADMIN, 1.0, ON))
    assert "another admin" in why(confirm(requests, number, "alice", Role.ADMIN, 1.0))
    assert "needs the role admin" in why(confirm(requests, number, "bob", Role.OPERATE, 1.0))
    assert f"no request {number} waits" in why(confirm(requests, number, "bob", Role.ADMIN, 10.0))
    requests, outcome = confirm(requests, number, "bob", Role.ADMIN, 9.9)
    assert outcome == Execute(Command.EVICT, "node-3", "alice", "bob")
    assert f"no request {number} waits" in why(confirm(requests, number, "carol", Role.ADMIN, 9.9))


def test_what_two_persons_did_is_not_undone_by_one_with_less():
    def take_back(role, is_evicted):
        return submit(Requests(), Command.UNCORDON, "node-3", "alice", role, 0.0, ON, is_evicted=is_evicted)

    assert isinstance(take_back(Role.OPERATE, False)[1], Execute)
    assert why(take_back(Role.OPERATE, True)) == "uncordon of an evicted node needs the role admin; alice has operate"
    assert isinstance(take_back(Role.ADMIN, True)[1], Execute)


def test_a_number_is_never_that_of_a_request_before():
    """A confirmation that comes late, after a new start of the driver even, must not meet another eviction."""

    def number(requests: Requests, node: str, random: Random | None = None) -> int:
        outcome = submit(requests, Command.EVICT, node, "alice", Role.ADMIN, 0.0, ON, random=random or SystemRandom())[1]
        assert isinstance(outcome, Wait)
        return outcome.request.number

    first = number(Requests(), "node-3", Random(1))
    assert number(Requests(used=frozenset({first})), "node-1", Random(1)) != first
    numbers = {number(Requests(), "node-3") for _ in range(3)}
    assert len(numbers) > 1 and all(100_000 <= number < 1_000_000 for number in numbers)


def test_other_commands_and_a_rule_that_is_off_need_one_person():
    assert submit(Requests(), Command.STOP, "", "alice", Role.ADMIN, 0.0, ON)[1] == Execute(Command.STOP, "", "alice")
    off = Rule(commands=frozenset())
    assert submit(Requests(), Command.EVICT, "node-3", "alice", Role.ADMIN, 0.0, off)[1] == Execute(Command.EVICT, "node-3", "alice")


def test_a_confirmation_is_no_command_to_submit():
    assert isinstance(submit(Requests(), Command.CONFIRM, "1", "alice", Role.ADMIN, 0.0, ON)[1], Refuse)


@given(st.sampled_from(Role), st.sampled_from(Command))
def test_who_may_not_is_refused_and_nothing_waits(role, command):
    requests, outcome = submit(Requests(), command, "node-1", "alice", role, 0.0, ON)
    if not may(role, command):
        assert isinstance(outcome, Refuse) and requests == Requests()


class TwoPersons(RuleBasedStateMachine):
    """Any people, any order, any time: a model that knows who asked for what and when."""

    @initialize()
    def begin(self):
        self.requests, self.now, self.random = Requests(), 0.0, Random(0)
        self.asked = {}
        self.executed = set()

    @rule(seconds=st.floats(0.0, 12.0))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(who=PEOPLE, node=NODES)
    def ask(self, who, node):
        self.requests, outcome = submit(self.requests, Command.EVICT, node, who, Role.ADMIN, self.now, ON, random=self.random)
        assert not isinstance(outcome, Execute), "one person evicted a node"
        if isinstance(outcome, Wait):
            self.asked.setdefault(outcome.request.number, (who, node, self.now))
        assert len(self.requests.waiting) <= ON.most

    @rule(who=PEOPLE, index=st.integers(0, 8), role=st.sampled_from(Role))
    def confirm(self, who, index, role):
        number = [*self.asked, *range(9)][index]
        self.requests, outcome = confirm(self.requests, number, who, role, self.now)
        if isinstance(outcome, Execute):
            asker, node, when = self.asked[number]
            assert role is Role.ADMIN
            assert asker.casefold() != who.casefold() and (outcome.by, outcome.target, outcome.confirmed_by) == (asker, node, who)
            assert self.now < when + ON.limit_s, "too late"
            assert number not in self.executed, "executed twice"
            self.executed.add(number)


TestTwoPersons = TwoPersons.TestCase
