"""Examples that users read are run: those of docstrings, and the scripts of examples/."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest

from tests.support.pages import load
from tests.support.scripts import ROOT, run_on_ranks

ELSEWHERE = {"accelerate", "diffusers", "linear", "transformers", "trl"}
"""Integrations whose packages only the stages of their tests have."""
MODULES = sorted(
    "ringattn." + ".".join(path.with_suffix("").parts).removeprefix("ringattn.")
    for folder in ("ringattn", "kernels", "launch")
    for path in (one.relative_to(ROOT) for one in (ROOT / folder).rglob("*.py"))
    if ">>> " in (ROOT / path).read_text() and path.stem != "__init__" and not ELSEWHERE & {*path.parts}
)


@pytest.mark.parametrize("name", [*MODULES, "figures"])
def test_examples_of_docstrings_are_true(name: str) -> None:
    if "torchtitan" in name:
        pytest.importorskip("torchtitan")
    result = doctest.testmod(load(name) if name == "figures" else importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_quickstart_runs_on_two_ranks() -> None:
    printed = run_on_ranks("quickstart")
    assert "rank 0 of 2: output (1, 501, 8, 64)" in printed
    assert "rank 1 of 2: output (1, 500, 8, 64)" in printed


def test_log_probabilities_have_the_same_bits_on_one_two_and_four_processes() -> None:
    found = {ranks: re.findall(r"digest (\w+)", run_on_ranks("same_bits", ranks=ranks)) for ranks in (1, 2, 4)}
    assert [len(digests) for digests in found.values()] == [1, 2, 4]
    assert len({digest for digests in found.values() for digest in digests}) == 1, found
    plain = {re.findall(r"digest (\w+)", run_on_ranks("same_bits", "--plain", ranks=ranks))[0] for ranks in (1, 2)}
    assert len(plain) == 2


@pytest.mark.slow
def test_the_swap_of_sdpa_equals_one_process() -> None:
    printed = run_on_ranks("sdpa")
    assert printed.count("(equal up to rounding)") == 2


@pytest.mark.slow
def test_the_converted_model_learns_what_one_process_learns() -> None:
    printed = run_on_ranks("multihead_attention")
    assert "converted: layers.layers.0.self_attn, layers.layers.1.self_attn" in printed
    steps = re.findall(r"step (\d+): loss (\S+), one process (\S+), gradients .* \(equal up to rounding\)", printed)
    assert [step for step, _, _ in steps] == ["1", "5", "10"]
    losses = [(float(ours), float(theirs)) for _, ours, theirs in steps]
    assert all(abs(ours - theirs) < 1e-3 for ours, theirs in losses)
    assert losses[-1][0] < losses[0][0] / 2


@pytest.mark.slow
def test_fsdp_beside_the_ring_trains_as_one_process_does() -> None:
    printed = run_on_ranks("fsdp2_context_parallel", "--steps", "3", ranks=4)
    assert "4 ranks on cpu: dp 2 x cp 2, rows per cp rank: 251, 250" in printed
    steps = re.findall(r"^ +\d +([\d.]+) +([\d.]+) +([-+][\d.e-]+)$", printed, re.MULTILINE)
    assert len(steps) == 3, printed
    assert float(steps[-1][0]) < float(steps[0][0])
    assert all(abs(float(difference)) < 1e-5 for _, _, difference in steps), printed


@pytest.mark.slow
def test_generation_on_two_ranks_answers_what_one_process_answers() -> None:
    printed = run_on_ranks("generate", "--prompt", "300", "--new", "8")
    answers = re.findall(
        r"^(greedy|sampled|3 beams): 8 tokens in .* pages by rank \((\d+), (\d+)\), one process answers the same$",
        printed,
        re.MULTILINE,
    )
    assert [name for name, _, _ in answers] == ["greedy", "sampled", "3 beams"], printed
    assert all(int(one) and int(other) for _, one, other in answers), "both ranks keep a part"
