"""Kernels on the CPU. This folder runs in its own process: the variable must be set before triton is imported."""

import importlib.util
import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "set TRITON_INTERPRET=1 and run tests/interpreter in its own process"
    elif importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        return
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.skip(reason=reason))
