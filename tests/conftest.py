"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

# ranks and the simulated ring add in one order with equal numbers of threads only; torch reads this where it is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
# compiling takes almost twice as long with it
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# a pool of compiling processes, each of which imports torch, for every process that compiles
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

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
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("dist")
    thin(items)


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of garbage collections, which would walk it time and again."""
    gc.collect()
    gc.freeze()
