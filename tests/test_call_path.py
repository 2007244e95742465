"""The way of a call: few files, seldom left for one another, which a reader can follow."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ringattn
from tests.support.pool import Pools

ONE_RANK = (18, 120), (8, 32), (8, 32)
"""The most files of a first and a second forward and a second backward, and how often their ways go from one to another."""
TWO_RANKS = (24, 260), (11, 70), (11, 110)
SIMULATED = (10, 170)  # two ranks in turn
PACKAGE = Path(ringattn.__file__).parent
KERNELS = PACKAGE.parent / "kernels"


@functools.cache
def is_ours(file: str) -> bool:
    """Return whether it is a file of the package or of the kernels."""
    return any(Path(file).is_relative_to(folder) for folder in (PACKAGE, KERNELS))


def file_of(frame: FrameType | None) -> str | None:
    """Our file that a frame runs in, or the nearest one that called it: written code and libraries are no files of ours."""
    while frame is not None and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and frame.f_code.co_filename


def way_of(call: Any) -> tuple[int, int]:
    """Files in which a call runs on all threads that it starts, and how often each of these goes from file to file."""
    ways: dict[int, list[str]] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        del arg
        # a cache that another ring has filled holds an equal mask, not the same one
        if event not in ("call", "return") or "__eq__" in (
            frame.f_code.co_name,
            frame.f_back and frame.f_back.f_code.co_name,
        ):
            return
        file = file_of(frame if event == "call" else frame.f_back)
        way = ways.setdefault(threading.get_ident(), [])
        if file is not None and (not way or way[-1] != file):
            way.append(file)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return len({file for way in ways.values() for file in way}), sum(len(way) - 1 for way in ways.values())


def ways_of_ring() -> list[tuple[int, int]]:
    """Those of the first and the second forward of a kind and of the second backward, on this rank of a ring."""
    ring = ringattn.Ring()
    sharding = ring.sharding(32)
    warm, x = (torch.randn(1, n, 2, 16, requires_grad=True) for n in (ring.sharding(16).shard_len, sharding.shard_len))
    # what a process does once: imports, registers operators, finds transports
    ringattn.ring_attention(warm, warm, warm, ring.sharding(16), causal=True).sum().backward()
    outputs = []

    def forward() -> None:
        outputs.append(ringattn.ring_attention(x, x, x, sharding, causal=True))

    first = way_of(forward)
    outputs[0].sum().backward()
    second = way_of(forward)
    grad = torch.ones_like(outputs[1])
    return [first, second, way_of(lambda: outputs[1].backward(grad))]


def assert_short(ways: list[tuple[int, int]], limits: tuple[tuple[int, int], ...]) -> None:
    for way, most in zip(ways, limits, strict=True):
        assert 3 <= way[0] <= most[0], f"{ways}: at most {most} files and changes of file"
        assert way[1] <= most[1], f"{ways}: at most {most} files and changes of file"


def test_a_call_on_one_rank_goes_through_few_files() -> None:
    assert_short(ways_of_ring(), ONE_RANK)


def test_a_call_on_two_ranks_goes_through_few_files(pool: Pools) -> None:
    for ways in pool(2).run(ways_of_ring):
        assert_short(ways, TWO_RANKS)


def test_a_second_call_of_the_simulated_ring_goes_through_few_files() -> None:
    x = torch.randn(1, 32, 2, 16)

    def call() -> None:
        ringattn.simulate_ring(x, x, x, 2, causal=True)

    call()
    assert_short([way_of(call)], (SIMULATED,))
