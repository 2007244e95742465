"""Tables of the pages."""

from __future__ import annotations

from collections.abc import Iterable


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a markdown table."""
    columns = list(heads)
    lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
