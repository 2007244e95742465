from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.interpreter import language_patched_once_per_launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start of the process")
    for item in items:
        if "interpreter" in item.path.parts:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def patch_the_language_once_per_launch() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    with language_patched_once_per_launch():
        yield
