"""Replaces Gluon by the emulator for the whole process, before any kernel is imported.

The process must be started for it: `TRITON_INTERPRET=1 GLUON_EMULATOR=1 python -m pytest tests/kernels/emulator`. Plain Triton
kernels beside the Gluon ones then run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.support.interpreter import language_patched_once_per_launch

EMULATED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GLUON_EMULATOR") == "1"

if EMULATED:
    from tests.kernels.emulator.gluon import emulated

    _installed = contextlib.ExitStack()
    _installed.enter_context(emulated())  # test modules import kernels while they are collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if EMULATED:
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 and GLUON_EMULATOR=1 from the start of the process")
    for item in items:
        if "emulator" in item.path.parts:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def patch_the_language_once_per_launch() -> Iterator[None]:
    if not EMULATED:
        yield
        return
    with language_patched_once_per_launch():
        yield


def pytest_unconfigure() -> None:
    if EMULATED:
        _installed.close()
