"""Roles, and the rule of two persons: never executed twice, never by one person, never after its time."""

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
        (Role.VIEW, {"status", "logs"}),
        (Role.OPERATE, {"status", "logs", "diagnose", "cordon", "uncordon"}),
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
    assert "confirm request 1 instead" in why(submit(requests, Command.EVICT, "node-3", "bob", Role.ADMIN, 1.0, ON))
    assert "another admin" in why(confirm(requests, 1, "alice", Role.ADMIN, 1.0))
    assert "needs the role admin" in why(confirm(requests, 1, "bob", Role.OPERATE, 1.0))
    assert "no request 1 waits" in why(confirm(requests, 1, "bob", Role.ADMIN, 10.0))
    requests, outcome = confirm(requests, 1, "bob", Role.ADMIN, 9.9)
    assert outcome == Execute(Command.EVICT, "node-3", "alice", "bob")
    assert "no request 1 waits" in why(confirm(requests, 1, "carol", Role.ADMIN, 9.9))


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
        self.requests, self.now = Requests(), 0.0
        self.asked = {}
        self.executed = set()

    @rule(seconds=st.floats(0.0, 12.0))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(who=PEOPLE, node=NODES)
    def ask(self, who, node):
        self.requests, outcome = submit(self.requests, Command.EVICT, node, who, Role.ADMIN, self.now, ON)
        assert not isinstance(outcome, Execute), "one person evicted a node"
        if isinstance(outcome, Wait):
            self.asked.setdefault(outcome.request.number, (who, node, self.now))
        assert len(self.requests.waiting) <= ON.most

    @rule(who=PEOPLE, number=st.integers(0, 8), role=st.sampled_from(Role))
    def confirm(self, who, number, role):
        self.requests, outcome = confirm(self.requests, number, who, role, self.now)
        if isinstance(outcome, Execute):
            asker, node, when = self.asked[number]
            assert role is Role.ADMIN
            assert asker.casefold() != who.casefold() and (outcome.by, outcome.target, outcome.confirmed_by) == (asker, node, who)
            assert self.now < when + ON.limit_s, "too late"
            assert number not in self.executed, "executed twice"
            self.executed.add(number)


TestTwoPersons = TwoPersons.TestCase
