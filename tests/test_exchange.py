"""One exchange: all ranks leave with the same bits, those of the simulated ranks, and they are attention over all keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring
from ringattn.transport.exchange import Exchange, SimulatedExchange
from ringattn.transport.simulated import run_ranks
from tests.pool import Pools
from tests.test_parts import Sizes, attend, draw_parts


def draw(seed: int, ranks: int, sizes: Sizes, *, sinks: bool) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor]:
    """Every rank's splits, of which there are 1 to 3 and some hold nothing, the sinks, and o and lse in fp64."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 4, (ranks,), generator=generator).tolist()
    stack, scores, values = draw_parts(seed, sum(counts), *sizes)
    drawn = torch.randn(sizes[2], generator=generator) * 4 if sinks else None
    return list(stack.split(counts)), drawn, *attend(scores, values, drawn)


def answer(exchange: Exchange, splits: Tensor, sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    b, s, h, dv = sizes
    o, lse = torch.full((b, s, h, dv), math.nan, dtype=dtype), torch.full((b, h, s), math.nan)
    exchange.finish(splits, *sizes, sinks, o, lse)
    return [o, lse]


def simulate(ranks: int, splits: list[Tensor], sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    found = run_ranks(ranks, lambda seat: answer(SimulatedExchange(seat), splits[seat.rank], sizes, sinks, dtype))
    for other in found:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
    return found[0]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 6, 8])),
    sinks=st.booleans(),
)
def test_simulated_ranks_leave_with_attention_over_all_keys(seed: int, ranks: int, sizes: Sizes, sinks: bool) -> None:
    splits, drawn, *want = draw(seed, ranks, sizes, sinks=sinks)
    for x, y in zip(simulate(ranks, splits, sizes, drawn, torch.float32), want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


CASES = [(seed, (1 + seed % 2, 1 + seed % 3, 1 + seed % 4, (8, 5, 128)[seed % 3]), bool(seed % 2)) for seed in range(8)]


def _group(cases: list[tuple[int, Sizes, bool]]) -> list[list[Tensor]]:
    ring = Ring()
    exchange, found = ring.exchange("cpu"), []
    assert ring.exchange(torch.device("cpu")) is exchange
    for seed, sizes, sinks in cases:
        splits, drawn, _, _ = draw(seed, ring.world_size, sizes, sinks=sinks)
        for dtype in (torch.float32, torch.bfloat16):
            found.append(answer(exchange, splits[ring.rank], sizes, drawn, dtype))
    ring.close()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_give_the_bits_of_simulated_ranks(pool: Pools, ranks: int) -> None:
    everywhere = pool(ranks).run(_group, CASES)
    wanted = []
    for seed, sizes, sinks in CASES:
        splits, drawn, _, _ = draw(seed, ranks, sizes, sinks=sinks)
        wanted += [simulate(ranks, splits, sizes, drawn, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for found in everywhere:
        for ours, theirs in zip(found, wanted, strict=True):
            # a rank alone merges its splits and its sinks at once
            same = (lambda x, y: torch.allclose(x, y, rtol=1e-2)) if ranks == 1 else torch.equal
            assert all(same(x, y) for x, y in zip(ours, theirs, strict=True))
