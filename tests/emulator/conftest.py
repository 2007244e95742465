"""Replaces Gluon by the emulator for the whole process, before any kernel is imported.

The process must be started for it: `TRITON_INTERPRET=1 GLUON_EMULATOR=1 python -m pytest tests/emulator`. Plain Triton
kernels beside the Gluon ones then run in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.interpreted import language_patched_once_per_launch

EMULATED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GLUON_EMULATOR") == "1"
collect_ignore_glob = [] if EMULATED else ["test_*.py"]

if EMULATED:
    from tests.emulator.gluon import emulated

    _installed = emulated()
    _installed.__enter__()  # test modules import kernels while they are collected


@pytest.fixture(autouse=True, scope="session")
def patch_the_language_once_per_launch() -> Iterator[None]:
    with language_patched_once_per_launch():
        yield
