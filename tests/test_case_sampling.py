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


def test_releases_of_triton_compile_cases_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = ("3.7.1", *(f"{release}.0" for release in LATER))
    for first in LATER.values():
        assert first.keys() <= EVERY.keys()
    for name, every in EVERY.items():
        left = {}
        for release in releases:
            monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=release))
            left[release] = left_of(name, 24)
        assert left["3.7.1"] == list(range(0, 24, every))
        assert {len(cases) for cases in left.values()} == {len(left["3.7.1"])}
        divided = all(name in first for first in LATER.values())
        assert divided == (len({case for cases in left.values() for case in cases}) == sum(map(len, left.values())))
    assert left_of("test_pool.py::test_what_is_not_in_the_table", 3) == [0, 1, 2]
