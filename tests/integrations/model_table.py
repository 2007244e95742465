"""The table "my model: works, or refused, do this", as data that tests run and `docs/tables.py` prints.

Each area keeps its rows in a file `tests/integrations/*_rows.py` with a list `ROWS`. Its tests take their cases from that list, so
a row is on the page only while the test that it names passes. Files of rows import nothing but this module.

    ROWS = [ModelRow("Llama", "RingTrainer", "tests/integrations/x/test_y.py::test_z", kind="llama")]

    @pytest.mark.parametrize("row", works(ROWS, "RingTrainer"), ids=str)
    def test_z(row): ...                                    # trains row.kind, and compares with one process

    @pytest.mark.parametrize("row", refused(ROWS, "RingTrainer"), ids=str)
    def test_refusal(row):                                  # the message is the one on the page
        with pytest.raises(NotImplementedError, match=row.refusal): ...
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelRow:
    """One line of the table.

    Attributes:
        model: Models that the row speaks of, in a reader's words.
        stack: Class or function that people run them with: "RingTrainer", "RingSFTTrainer", "shard_batch".
        test: Test that runs the row, as `file::function`.
        kind: Key by which the test makes its model and options.
        refusal: Regular expression that the message matches; empty when the model works.
        advice: What a user has to do, in markdown.
        upstream: Check of another package that forbids it, as `package.function`; empty where ringattn decides.
    """

    model: str
    stack: str
    test: str
    kind: str = ""
    refusal: str = ""
    advice: str = ""
    upstream: str = ""

    def __str__(self) -> str:
        return self.kind or self.model


def works(rows: Iterable[ModelRow], stack: str) -> list[ModelRow]:
    """Return the rows of a stack whose models work."""
    return [row for row in rows if row.stack == stack and not row.refusal]


def refused(rows: Iterable[ModelRow], stack: str) -> list[ModelRow]:
    """Return the rows of a stack whose models are refused."""
    return [row for row in rows if row.stack == stack and row.refusal]


def all_rows() -> list[ModelRow]:
    """Return the rows of all files, by file name."""
    found: list[ModelRow] = []
    for path in sorted(Path(__file__).parent.glob("*_rows.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.ROWS
    return found
