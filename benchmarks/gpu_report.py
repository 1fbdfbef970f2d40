"""Results of `gpu_check.py` as Markdown, and what they say of the targets."""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Row = Mapping[str, Any]
TARGET_SHAPE = "target"
"""Length 8,192, 16 heads of 128."""


def verdicts(record: Record) -> list[dict[str, Any]]:
    """Each target with what was measured; ``None`` where a part of it is missing."""
    rows = [row for row in record.get("operators", ()) if "not run" not in row["result"] and "failed" not in row["result"]]
    gemm = next((row["tflops"] for row in rows if row["name"] == "ceiling: GEMM"), None)
    copy = next((row["gbps"] for row in rows if row["name"] == "ceiling: copy"), None)

    def attention(way: str, window: int | None, *by: str) -> float | None:
        found = [
            row["tflops"]
            for row in rows
            if (row.get("shape"), row.get("way"), row.get("window")) == (TARGET_SHAPE, way, window) and row["implementation"] in by
        ]
        return max(found, default=None)

    def seconds(window: int | None, *by: str) -> float | None:
        found = [
            row["seconds_each"]
            for row in rows
            if (row.get("shape"), row.get("way"), row.get("window")) == (TARGET_SHAPE, "forward", window) and row["implementation"] in by
        ]
        return min(found, default=None)

    def bandwidth(operator: str) -> float | None:
        found = [min(row["gbps"].values()) for row in rows if row.get("operator") == operator]
        return max(found, default=None)

    mfu = next((row.get("mfu") for row in record.get("steps", ()) if row["name"] == "1.3B as shipped"), None)
    wanted = [
        ("Triton forward, of the GEMM ceiling", _ratio(attention("forward", None, "triton"), gemm), 0.65),
        ("Triton backward, of the GEMM ceiling", _ratio(attention("backward", None, "triton"), gemm), 0.48),
        ("best forward, of the GEMM ceiling", _ratio(attention("forward", None, "triton", "cudnn"), gemm), 0.75),
        ("best backward, of the GEMM ceiling", _ratio(attention("backward", None, "triton", "cudnn"), gemm), 0.65),
        ("window 1024 over full, Triton, times faster", _ratio(seconds(None, "triton"), seconds(1024, "triton")), 3.0),
        ("window 1024, Triton over cuDNN, times faster", _ratio(seconds(1024, "cudnn"), seconds(1024, "triton")), 1.0),
        ("norm, of the copy bandwidth", _ratio(bandwidth("norm"), copy), 0.85),
        ("activation, of the copy bandwidth", _ratio(bandwidth("activation"), copy), 0.85),
        ("MFU of the 1.3B step", mfu, 0.60),
    ]
    return [{"target": name, "wanted": least, "got": got, "met": None if got is None else got >= least} for name, got, least in wanted]


def markdown(record: Record) -> str:
    """The whole record for readers."""
    lines = [
        "# Kernels on a GPU",
        "",
        f"*{record['kind']}*, {record['date']}, {record['hardware']}, commit {record['commit']}"
        f"{' and changes' if record['changed_since_commit'] else ''}, `{record['command']}`, "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "",
        *_table(("target", "wanted", "got", "met"), record.get("targets", ())),
    ]
    for part in ("suites", "operators", "steps"):
        if part in record:
            lines += ["", f"## {part}", "", *_table(("name", "result", "seconds"), record[part])]
            lines += [f"- {wrong}" for row in record[part] for wrong in row.get("wrong", ())]
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
