"""The keeper's own rules, without processes: who may fill a slot when, and when it ends."""

import threading
import time

import pytest

from megascale_jax.checkpoint.holdings import Held, Rank, Request, Work
from megascale_jax.checkpoint.keeper import Keeper
from megascale_jax.checkpoint.slot import Slot


@pytest.fixture
def keeper(tmp_path):
    return Keeper(tmp_path, idle_s=0.2)


def holding(keeper, *, busy):
    held = Held(Slot(4096), readers=int(busy))
    keeper.ranks[0] = Rank({0: held})
    return held


def ask(keeper, op, **message):
    asked = {"slot": 0, "identity": keeper.ranks[0].slots[0].slot.identity, "limit_s": 0.2}
    return getattr(keeper, f"_{op}")(Request(0, keeper.ranks[0], asked | message, []))


def test_slot_is_not_given_while_stage_two_reads_it(keeper):
    held = holding(keeper, busy=True)
    with pytest.raises(TimeoutError, match="stage 2 did not end within 0 s"):
        ask(keeper, "acquire")
    given = threading.Thread(target=ask, args=(keeper, "acquire"), kwargs={"limit_s": 30})
    given.start()
    time.sleep(0.05)
    assert given.is_alive()
    with keeper.changed:
        held.readers = 0
        keeper.changed.notify_all()
    given.join(10)
    assert not given.is_alive()


def test_slot_in_use_is_neither_replaced_nor_released(keeper):
    holding(keeper, busy=True)
    with pytest.raises(TimeoutError):
        ask(keeper, "release")
    with pytest.raises(TimeoutError):
        keeper._replace(Request(0, keeper.ranks[0], {"slot": 0, "limit_s": 0.1}, []), Held(Slot(4096)))


def test_other_memory_than_the_keeper_holds_is_refused(keeper):
    """Else the keeper would publish what it holds, with good checksums, in place of what the rank saved."""
    holding(keeper, busy=False)
    for op in ("acquire", "filled"):
        with pytest.raises(OSError, match="is other memory here than in the rank"):
            ask(keeper, op, identity=1, target=None)


def test_keeper_ends_when_all_is_over_or_nobody_comes(keeper):
    holding(keeper, busy=False)
    assert not keeper._has_ended()
    keeper.carriers.in_hand.append(Work("upload", 7))
    keeper.ranks[0].released = True
    assert not keeper._has_ended(), "an upload is in hand"
    assert ask(keeper, "wait", limit_s=0.01)["working"] == [{"what": "upload", "step": 7}]
    keeper.carriers.in_hand.clear()
    keeper._connections = 1
    assert not keeper._has_ended(), "a rank is there"
    keeper._connections = 0
    assert keeper._has_ended(), "released"
    keeper.ranks[0].released = False
    assert not keeper._has_ended(), "somebody may come back"
    time.sleep(0.25)
    assert keeper._has_ended(), "idle"
    keeper._last_contact = time.monotonic()
    keeper.stopping = True
    assert keeper._has_ended(), "asked to"
