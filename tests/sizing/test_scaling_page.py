"""The page of scaling says what the planner says."""

from __future__ import annotations

import pytest

from tests.support.pages import DOCS, load


@pytest.mark.parametrize("name", ["published", "packing", pytest.param("rings", marks=pytest.mark.slow)])
def test_tables_of_the_page_are_what_the_planner_says(name):
    page = (DOCS / "scaling.md").read_text()
    shown = page.split(f"<!-- {name}: written by docs/scaling.py -->")[1].split(f"<!-- end of {name} -->")[0]
    assert shown.strip() == load("scaling").SECTIONS[name]()
