"""Write notebooks as the repository keeps them: no outputs, no counts, no trace of a machine, sorted keys, one line for one line of source.

python notebooks/strip.py                  all notebooks beside this file
python notebooks/strip.py MINE.ipynb       one of them
"""

import json
import sys
from pathlib import Path
from typing import Any

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stripped(text: str) -> str:
    """A notebook's text in that form; the same again for a text that has it. Raises ValueError where it is no notebook of format 4.5."""
    book: dict[str, Any] = json.loads(text)
    if (book.get("nbformat"), book.get("nbformat_minor")) != (4, 5):
        raise ValueError(f"format {book.get('nbformat')}.{book.get('nbformat_minor')}, expected 4.5: save it with a newer Jupyter")
    cells: list[dict[str, Any]] = []
    for cell in book["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        kept = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {}, "source": source.rstrip().splitlines(keepends=True)}
        cells.append(kept | ({"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}))
    whole = {"cells": cells, "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(paths: list[Path]) -> None:
    """Rewrite those that are not in that form."""
    for path in paths or sorted(Path(__file__).parent.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        if (new := stripped(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
