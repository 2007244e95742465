"""Every row of the table of models names a test that takes its cases from the rows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.integrations.model_table import ModelRow, all_rows, refused, works

ROOT = Path(__file__).parents[2]
ROW = ModelRow("Llama", "RingTrainer", "a.py::test_a", kind="llama")


@pytest.mark.parametrize("test", sorted({row.test for row in all_rows()}))
def test_every_row_names_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions, f"{file} has no {name}"
    assert "_rows import" in (ROOT / file).read_text(), f"{file} takes its cases from elsewhere"


def test_no_two_rows_speak_of_the_same_model_and_stack() -> None:
    seen = [(row.model, row.stack) for row in all_rows()]
    assert len(seen) == len(set(seen))


def test_rows_are_found_by_stack_and_verdict() -> None:
    refusal = ModelRow("Bert", "RingTrainer", "a.py::test_b", refusal="must")
    assert works([ROW, refusal], "RingTrainer") == [ROW]
    assert refused([ROW, refusal], "RingTrainer") == [refusal]
    assert works([ROW], "RingSFTTrainer") == []
