"""Examples that users read are run: those of docstrings, and the scripts of examples/."""

from __future__ import annotations

import doctest
import importlib
import os
import re
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


def run_on_two_ranks(example: str) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, f"examples/{example}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_runs_on_two_ranks() -> None:
    printed = run_on_two_ranks("quickstart")
    assert "rank 0 of 2: output (1, 501, 8, 64)" in printed
    assert "rank 1 of 2: output (1, 500, 8, 64)" in printed


def test_the_swap_of_sdpa_equals_one_process() -> None:
    printed = run_on_two_ranks("sdpa")
    assert printed.count("(equal up to rounding)") == 2


def test_the_converted_model_learns_what_one_process_learns() -> None:
    printed = run_on_two_ranks("multihead_attention")
    assert "converted: layers.layers.0.self_attn, layers.layers.1.self_attn" in printed
    steps = re.findall(r"step (\d+): loss (\S+), one process (\S+), gradients .* \(equal up to rounding\)", printed)
    assert [step for step, _, _ in steps] == ["1", "5", "10"]
    losses = [(float(ours), float(theirs)) for _, ours, theirs in steps]
    assert all(abs(ours - theirs) < 1e-3 for ours, theirs in losses)
    assert losses[-1][0] < losses[0][0] / 2
