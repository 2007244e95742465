"""A sample of cases has the size of its rate, is the same every time, and differs between releases."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.case_sampling import RATES, RELEASES, drawn, thin


def left_of(marker: str, cases: int) -> list[int]:
    """The cases of a test with a marker that are not marked slow."""
    marked: list[int] = []
    items: Any = [
        SimpleNamespace(
            nodeid=f"tests/test_x.py::test_x[{case}]",
            get_closest_marker=lambda name: name == marker or None,
            add_marker=lambda _, case=case: marked.append(case),
        )
        for case in range(cases)
    ]
    thin(items)
    return [case for case in range(cases) if case not in marked]


@pytest.mark.parametrize("marker", RATES)
def test_a_share_of_the_cases_runs_and_always_the_same(marker: str) -> None:
    assert left_of(marker, 200) == left_of(marker, 200)
    assert len(left_of(marker, 200)) == round(RATES[marker] * 200)
    assert left_of("no marker of a sample", 3) == [0, 1, 2]


def test_a_sample_is_drawn_by_names_and_has_one_case_at_least() -> None:
    assert drawn(list("abcdef"), 0.3, 0) == {"b", "e"}
    assert drawn(list("fedcba"), 0.3, 0) == {"b", "e"}
    assert drawn(["a"], 0.1, 0) == {"a"}


@pytest.mark.parametrize(("marker", "package"), [("compiled", "triton"), ("models", "transformers")])
def test_each_release_runs_cases_of_its_own(marker: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list[int]()
    for release in RELEASES[package]:
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__=f"{release}.1"))
        left += left_of(marker, 24)
    assert len(set(left)) == len(left) == len(RELEASES[package]) * round(24 * RATES[marker])
