"""The classes that every second of a job is booked in, whether it runs (`views/booking.py`) or is simulated (`sim/faults`)."""

from typing import Literal, get_args

Kind = Literal["training", "recomputed", "data wait", "checkpoint", "evaluation", "compile", "restart", "diagnosis", "idle"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""``recomputed``: training of which the result was lost; ``restart``: start of processes, their meeting, preparation and restore."""
