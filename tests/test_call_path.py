"""The way of a call: the second call of a kind runs in few files, which a reader can follow."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ringattn
from tests.support.pool import Pools

MOST_FILES = 8
PACKAGE = Path(ringattn.__file__).parent


def files_of(call: Any) -> set[str]:
    """Files of `ringattn/` in which a call runs, kernels and comparisons of keys apart, in all threads that it starts."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        del event, arg
        path = Path(frame.f_code.co_filename)
        # a cache that another ring has filled holds an equal mask, not the same one
        if "__eq__" in (frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name):
            return
        if path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "kernels"):
            found.add(str(path.relative_to(PACKAGE)))

    import threading

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return found


def files_of_ring() -> tuple[set[str], set[str]]:
    """Those of the second forward, and of its backward, on this rank of a ring."""
    ring = ringattn.Ring()
    sharding = ring.sharding(32)
    x = torch.randn(1, sharding.shard_len, 2, 16, requires_grad=True)
    outputs = []

    def forward() -> None:
        outputs.append(ringattn.ring_attention(x, x, x, sharding, causal=True))

    forward()
    outputs[0].sum().backward()
    first = files_of(forward)
    grad = torch.ones_like(outputs[1])
    return first, files_of(lambda: outputs[1].backward(grad))


def assert_few(files: set[str]) -> None:
    assert "dispatch.py" in files, "the call was traced"
    assert len(files) <= MOST_FILES, " ".join(sorted(files))


def test_a_second_call_on_one_rank_runs_in_few_files() -> None:
    for files in files_of_ring():
        assert_few(files)


@pytest.mark.dist
def test_a_second_call_on_two_ranks_runs_in_few_files(pool: Pools) -> None:
    for forward, backward in pool(2).run(files_of_ring):
        assert_few(forward)
        assert_few(backward)


def test_a_second_call_of_the_simulated_ring_runs_in_few_files() -> None:
    x = torch.randn(1, 32, 2, 16)

    def call() -> None:
        ringattn.simulate_ring(x, x, x, 2, causal=True)

    call()
    assert_few(files_of(call))
