"""Judges the summary of a finished run: ``check_summary.py RUN_FOLDER STEPS [--learned]``.

With ``--learned`` the model must know more about the held-out text than a table of byte pairs does.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Exit with a message if the run in the folder did not end as expected."""
    folder, steps, options = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    print({key: summary[key] for key in ("steps", "validation_loss", "unigram_nats", "bigram_nats", "tokens_per_s", "mfu", "wall_s")})
    if summary["steps"] != steps:
        sys.exit(f"{folder}: summary.json says {summary['steps']} steps, expected {steps}")
    if "--learned" in options and not summary["validation_loss"] < summary["bigram_nats"]:
        sys.exit(f"{folder}: validation loss {summary['validation_loss']} is not below the bigram's {summary['bigram_nats']}")


main()
