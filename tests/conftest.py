"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.case_sampling import thin
from tests.support.pool import Pools


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """`pool(world_size).run(fn, *args, **kwargs)`: per-rank results of a module-level function on gloo workers."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin(items)
