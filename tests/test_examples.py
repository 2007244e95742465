"""Examples that users read are run: those of docstrings, and the script that the README starts with."""

from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    "ringattn." + path.stem
    for path in (ROOT / "ringattn").glob("*.py")
    if ">>> " in path.read_text() and path.stem != "__init__"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_quickstart_runs_on_two_ranks() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, "examples/quickstart.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: output (1, 501, 8, 64)" in done.stdout
    assert "rank 1 of 2: output (1, 500, 8, 64)" in done.stdout
