"""The page of scaling says what the planner says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["published", "packing", pytest.param("rings", marks=pytest.mark.slow)])
def test_tables_of_the_page_are_what_the_planner_says(name):
    spec = importlib.util.spec_from_file_location("scaling", DOCS / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scaling)
    page = (DOCS / "scaling.md").read_text()
    shown = page.split(f"<!-- {name}: written by docs/scaling.py -->")[1].split(f"<!-- end of {name} -->")[0]
    assert shown.strip() == scaling.SECTIONS[name]()
