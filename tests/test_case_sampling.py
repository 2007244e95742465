"""The table of cases that are left out names tests that exist, and leaves out no more than it says."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.case_sampling import EVERY, LATER, thin

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", EVERY)
def test_what_is_thinned_exists(name: str) -> None:
    file, test = name.split("::")
    [path] = TESTS.rglob(file)
    assert f"def {test}(" in path.read_text()
    assert all(EVERY[name] > first.get(name, 0) for first in LATER.values())


def left_of(name: str, cases: int) -> list[int]:
    """The cases of a test that are not marked slow."""
    file, test = name.split("::")
    marked: list[int] = []
    items: Any = [
        SimpleNamespace(path=Path(file), name=test, add_marker=lambda _, case=case: marked.append(case))
        for case in range(cases)
    ]
    thin(items)
    return [case for case in range(cases) if case not in marked]


@pytest.mark.parametrize("name", EVERY)
def test_every_nth_case_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("triton", "transformers"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    assert left_of(name, 24) == list(range(0, 24, EVERY[name]))
    assert left_of("test_pool.py::test_what_is_not_in_the_table", 3) == [0, 1, 2]


@pytest.mark.parametrize(("package", "first_release"), [("triton", "3.7.1"), ("transformers", "5.23.0")])
def test_each_release_runs_cases_of_its_own(package: str, first_release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    later = {release: first for release, first in LATER.items() if release.split()[0] == package}
    assert later
    for name in {name for first in later.values() for name in first}:
        left = list[int]()
        for release in (first_release, *(f"{release.split()[1]}.0" for release in later)):
            monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__=release))
            left += left_of(name, 24)
        assert len(set(left)) == len(left) > 24 // EVERY[name]
