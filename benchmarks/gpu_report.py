"""Results of `gpu_check.py` as Markdown: what they say of the targets, and which tile of the table is best."""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Row = Mapping[str, Any]
PARTS = ("rates", "step", "suites", "tiles", "swaps")
TARGET_SHAPE = "target"
"""Length 8,192, 16 heads of 128."""


def verdicts(record: Record) -> list[dict[str, Any]]:
    """Each target with what was measured; ``None`` where a part of it is missing."""
    rows = [*record.get("rates", ()), *record.get("tiles", ())]
    gemm = next((row["tflops"] for row in rows if row["name"] == "ceiling: GEMM" and "tflops" in row), None)
    copy = next((row["gbps"] for row in rows if row["name"] == "ceiling: copy" and "gbps" in row), None)

    def attention(way: str, window: int | None, *by: str) -> float | None:
        case = (TARGET_SHAPE, way, window)
        found = [
            row["tflops"]
            for row in rows
            if (row.get("shape"), row.get("way"), row.get("window")) == case and row["implementation"] in by and "tflops" in row
        ]
        return max(found, default=None)

    def bandwidth(operator: str) -> float | None:
        return max((min(row["gbps"].values()) for row in rows if row.get("operator") == operator and "gbps" in row), default=None)

    # a window of W has fewer pairs, so times compare as rates over pairs do
    visible = {None: 8192 * 8193 / 2, 1024: 1024 * 1025 / 2 + (8192 - 1024) * 1024}
    faster = _ratio(attention("forward", 1024, "triton"), attention("forward", None, "triton"))
    steps = [*record.get("step", ()), *record.get("swaps", ())]
    mfu = max((row["mfu"] for row in steps if row["name"].startswith("1.3B") and "mfu" in row), default=None)
    wanted = [
        ("Triton forward, of the GEMM ceiling", _ratio(attention("forward", None, "triton"), gemm), 0.65),
        ("Triton backward, of the GEMM ceiling", _ratio(attention("backward", None, "triton"), gemm), 0.48),
        ("best forward, of the GEMM ceiling", _ratio(attention("forward", None, "triton", "cudnn"), gemm), 0.75),
        ("best backward, of the GEMM ceiling", _ratio(attention("backward", None, "triton", "cudnn"), gemm), 0.65),
        ("window 1024 over full, Triton, times faster", None if faster is None else faster * visible[None] / visible[1024], 3.0),
        ("window 1024, Triton over cuDNN, times faster", _ratio(*(attention("forward", 1024, by) for by in ("triton", "cudnn"))), 1.0),
        ("norm, of the copy bandwidth", _ratio(bandwidth("norm"), copy), 0.85),
        ("activation, of the copy bandwidth", _ratio(bandwidth("activation"), copy), 0.85),
        ("MFU of the 1.3B step", mfu, 0.60),
    ]
    return [{"target": name, "wanted": least, "got": got, "met": None if got is None else got >= least} for name, got, least in wanted]


def ranking(record: Record) -> list[dict[str, Any]]:
    """Per head and way of the tiles' part: the best tile, the first of the table, and how much faster the best is."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in record.get("tiles", ()):
        if "tflops" in row:
            groups.setdefault((row["head"], row["length"], row["window"], row["way"]), []).append(row)
    result = []
    for (head, length, window, way), rows in groups.items():
        best = max(rows, key=lambda row: row["tflops"])
        case = {"head": head, "length": length, "window": window or "full", "way": way}
        result.append(case | {"best tile": best["tile"], "first tile": rows[0]["tile"], "faster": best["tflops"] / rows[0]["tflops"]})
    return result


def markdown(record: Record) -> str:
    """The whole record for readers."""
    born = f"*{record['kind']}*, {record['date']}, {record['hardware']}, commit {record['commit']}"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        "# Kernels on a GPU",
        "",
        f"{born}{' and changes' if record['changed_since_commit'] else ''}, `{record['command']}`, {versions}",
        "",
        *_table(("target", "wanted", "got", "met"), record.get("targets", ())),
    ]
    if record.get("ranking"):
        columns = ("head", "length", "window", "way", "best tile", "first tile", "faster")
        lines += ["", "## which tile is best", "", *_table(columns, record["ranking"])]
    for part in PARTS:
        if part in record:
            lines += ["", f"## {part}", "", *_table(("name", "result", "seconds"), record[part])]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in ([*columns], ["---"] * len(columns), *cells)]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/")


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
