"""How a search for layouts looks: tables, JSON, and the experiment that it leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.cli.simulate import PARTS
from megascale_jax.config.load import dump_yaml
from megascale_jax.config.memory import GIB
from megascale_jax.config.schema import Experiment
from megascale_jax.sim.analytic import Prediction
from megascale_jax.sim.search import Candidate, Pins, Search, described
from megascale_jax.sim.search_advice import change_of, nearest_fits

_EXPLAINED = 3
"""Layouts whose seconds are shown part by part."""
_REASONS: Mapping[str, str] = {
    "node": "tensor ranks leave the node",
    "heads": "heads do not divide",
    "widths": "widths do not divide",
    "devices": "devices do not divide",
    "batch": "batch does not divide",
    "layers": "layers do not divide",
}
_COLUMNS = ("tensor", "pipe", "v", "data", "rows", "remat", "m")


@dataclass(frozen=True)
class Plans:
    """What was asked: an experiment without its layout, the program's name, the share of memory that may be used, what is pinned."""

    base: Experiment
    program: str
    margin: float
    pins: Pins

    def as_data(self) -> dict[str, Any]:
        """For ``--json``."""
        base = self.base
        return {
            "experiment": base.name,
            "device": base.system.device,
            "software": self.program,
            "global_batch_size": base.train.global_batch_size,
            "memory_margin": self.margin,
            "pins": dict(self.pins),
            "grade": "simulated",
        }

    @property
    def asked(self) -> str:
        """In words."""
        pinned = "".join(f", {name} {value}" for name, value in self.pins.items())
        rows = f"{self.base.train.global_batch_size:,} rows a step{pinned}"
        return f"{self.base.name} on {self.base.system.device}, {rows}, techniques of {self.program}"


def search_data(plans: Plans, found: Search) -> dict[str, Any]:
    """A search for ``--json``: every ranked layout, and why others were refused."""
    near = _near_misses(found)
    return {
        "devices": found.devices,
        "limit_bytes": found.limit_bytes,
        "own_rank": found.rank_of(plans.base),
        "ranked": [_candidate_data(rank, item) for rank, item in enumerate(found.ranked, 1)],
        "too_large": len(found.too_large),
        "quickest_too_large": None if near is None else _candidate_data(None, near),
        "rejected": [asdict(item) for item in found.rejected],
    }


def show_search(console: Console, plans: Plans, found: Search, top: int) -> None:
    """The best layouts, then where the time of the very best goes; and the experiment's own layout, wherever it ranks."""
    title = f"{plans.asked}, {found.devices:,} GPUs: {len(found.ranked):,} layouts fit, the quickest first (simulated)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", justify="right")
    for column in (*_COLUMNS, "s", "MFU", "tokens/s", "GiB", "bubble", "tensor", "pipe", "data"):
        table.add_column(column, justify="right", no_wrap=True)
    own = found.rank_of(plans.base)
    ranks = [*range(1, min(top, len(found.ranked)) + 1), *([own] if own is not None and own > top else [])]
    for rank in ranks:
        candidate = found.ranked[rank - 1]
        step, times = candidate.prediction, candidate.prediction.times
        exposed = (times.bubble_s, times.tensor_s, times.pipe_s, times.data_s)
        table.add_row(
            f"{rank}{' own' if rank == own else ''}",
            *_layout_cells(plans.base, candidate),
            f"{step.iteration_s:.3f}",
            f"{step.mfu():.1%}",
            f"{step.tokens_per_s:,.0f}",
            f"{candidate.needed_bytes / GIB:.1f}",
            *(f"{seconds / step.iteration_s:.1%}" for seconds in exposed),
        )
    console.print(table)
    _show_parts(console, found)
    if own is None:
        console.print("The layout that the experiment names is not among them.", highlight=False)


def show_rejected(console: Console, found: Search) -> None:
    """Reasons with numbers and an example each; for the quickest layout that does not fit, the nearest ones that do."""
    for item in found.rejected:
        console.print(Text(f"refused, {_REASONS[item.reason]}: {item.count:,}, such as {item.example}"), soft_wrap=True)
    near = _near_misses(found)
    if near is None or found.limit_bytes is None:
        return
    needs = f"{near.needed_bytes / GIB:.1f} of {found.limit_bytes / GIB:.1f} GiB"
    text = (
        f"refused, memory: {len(found.too_large):,}, the quickest {described(near.parallel)}: {needs}, {near.prediction.iteration_s:.3f} s"
    )
    fits = " or ".join(
        f"{change_of(item.parallel, near.parallel)} ({item.prediction.iteration_s:.3f} s)" for item in nearest_fits(found, near.parallel)
    )
    console.print(Text(f"{text}; fits with {fits}"), soft_wrap=True)


def show_counts(console: Console, plans: Plans, found: Sequence[Search]) -> None:
    """The best layout of each number of devices."""
    if not found:
        return
    table = Table(title=f"{plans.asked}: the quickest layouts (simulated)", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("GPUs", *_COLUMNS, "s", "MFU", "tokens/s", "GiB", "layouts"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        best, step = one.ranked[0], one.ranked[0].prediction
        numbers = (f"{step.iteration_s:.3f}", f"{step.mfu():.1%}", f"{step.tokens_per_s:,.0f}", f"{best.needed_bytes / GIB:.1f}")
        table.add_row(f"{one.devices:,}", *_layout_cells(plans.base, best), *numbers, f"{len(one.ranked):,}")
    console.print(table)


def show_compiled(console: Console, plans: Plans, ranked: Sequence[Candidate], answers: Sequence[Mapping[str, Any]]) -> None:
    """The compiler's answers beside the simulated numbers."""
    table = Table(title="verified: the run's own step, compiled", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "GiB simulated", "compiled", "fits", "s simulated", "estimated from the schedule"):
        table.add_column(column, justify="right", no_wrap=True)
    for candidate, answer in zip(ranked, answers, strict=False):
        step = candidate.prediction
        simulated = f"{candidate.needed_bytes / GIB:.1f}", f"{step.iteration_s:.3f}"
        if "error" in answer:
            table.add_row(str(answer["rank"]), simulated[0], "-", "no", simulated[1], "-")
            continue
        peak, fits = f"{answer['peak_bytes'] / GIB:.1f} of {answer['device_bytes'] / GIB:.1f}", "yes" if answer["fits"] else "no"
        table.add_row(str(answer["rank"]), simulated[0], peak, fits, simulated[1], f"{answer['modelled_step_s']:.3f}")
    console.print(table)
    for answer in answers:
        if "error" in answer:
            console.print(Text(f"{answer['rank']}: {answer['error']}", style="red"), soft_wrap=True)


def written_plan(plans: Plans, best: Candidate) -> str:
    """The YAML file of an experiment with that layout, its prediction in comments above."""
    step = best.prediction
    limit = "" if step.device_bytes is None else f" of {step.device_bytes / GIB:.1f}"
    lines = (
        f"Layout found by `megascale plan` for {step.devices:,} x {plans.base.system.device}, techniques of {plans.program}.",
        f"Simulated, not measured: {step.iteration_s:.3f} s a step, MFU {step.mfu():.1%}, {step.tokens_per_s:,.0f} tokens/s,",
        f"{best.needed_bytes / GIB:.1f}{limit} GiB of a device for state, activations and buffers.",
    )
    return "".join(f"# {line}\n" for line in lines) + dump_yaml(best.experiment(plans.base))


def _show_parts(console: Console, found: Search) -> None:
    best = found.ranked[:_EXPLAINED]
    table = Table(title="where the time goes, %", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for rank, _ in zip(count(1), best, strict=False):
        table.add_column(str(rank), justify="right")
    for part, label in PARTS.items():
        shares = [getattr(item.prediction.times, part) / item.prediction.iteration_s for item in best]
        if any(shares):
            table.add_row(label, *(f"{100 * share:.1f}" for share in shares))
    console.print(table)


def _layout_cells(base: Experiment, candidate: Candidate) -> list[str]:
    """The searched fields, and the micro-batches of a step: with as few as stages there is hardly a tick of both passes."""
    values = [*candidate.layout.values(), candidate.experiment(base).num_micro_batches]
    return [f"{value:,}" if isinstance(value, int) else str(value) for value in values]


def _near_misses(found: Search) -> Candidate | None:
    """The quickest layout that divides but does not fit."""
    return found.too_large[0] if found.too_large else None


def _candidate_data(rank: int | None, candidate: Candidate) -> dict[str, Any]:
    step: Prediction = candidate.prediction
    return {
        "rank": rank,
        **candidate.layout,
        "iteration_s": step.iteration_s,
        "parts_s": asdict(step.times),
        "mfu": step.mfu("causal"),
        "mfu_full": step.mfu("full"),
        "tokens_per_s": step.tokens_per_s,
        "needed_bytes": candidate.needed_bytes,
        "state_bytes": step.state_bytes,
        "activation_bytes": step.activation_bytes,
        "device_bytes": step.device_bytes,
    }
