"""What an analysis of a window of steps says of each rank, as it travels to the driver: one line of JSON, checked against these types.

The driver decides by it (`governance.py`); whoever measures (`views/slow_nodes.py`) blames nobody.
"""

from typing import Annotated

from pydantic import Field

from megascale_jax.cluster.messages import Message, Text
from megascale_jax.cluster.reports import Count

TOTAL = "all passes"
"""The pass that stands for all that a rank computes in a step."""
MOST_BYTES = 16 << 20
"""Of a line: 16,384 ranks take 10 MB."""

Part = Annotated[float, Field(ge=-1e6, le=1e6)]


class PassTimes(Message):
    """A rank's time for a pass beside that of its peers, which are the other ranks with devices of the same stage.

    ``excess``: how much longer than their median it takes (0.1: 10 %), the median over the steps; ``deviation``: standard deviation of
    that in a rank that is like the others; ``cost_s``: seconds a step; ``waits_less``: how much less than them it waits, over ``cost_s``.
    """

    excess: Part
    deviation: Annotated[float, Field(ge=0, le=1e6)]
    cost_s: Part
    waits_less: Part


class RankTimes(Message):
    """What is known of one rank in a window; passes without peers are not there."""

    rank: Count
    passes: dict[Text, PassTimes] = Field(max_length=32)


class Window(Message):
    """Steps ``first <= step < end`` of an attempt; a step took ``step_s`` seconds, the median."""

    attempt: Count
    first: Count
    end: Count
    step_s: Annotated[float, Field(gt=0)]
    ranks: tuple[RankTimes, ...] = Field(max_length=1 << 17)
    notes: tuple[Text, ...] = Field(default=(), max_length=16)
