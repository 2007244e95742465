from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import attention_reference
from ringattn.dispatch import resolve_simulated, run_backward, run_forward
from ringattn.kernels.attention.dropout import keep_mask, philox
from ringattn.plan.attention_spec import ScoreTensors, serialize
from ringattn.plan.layouts import zigzag
from ringattn.plan.sharding import Sharding
from ringattn.schedule.execution_plan import BackwardCall, ForwardCall, WantedGrads
from ringattn.transport.base import RingContext
from ringattn.transport.lockstep import run_ranks


def _mask(seed: int, b: range, h: range, i: range, j: range, num_heads: int, p: float) -> torch.Tensor:
    axes = [torch.arange(r.start, r.stop) for r in (b, h, i, j)]
    b_index, h_index, rows, keys = torch.meshgrid(*axes, indexing="ij")
    return keep_mask(seed, b_index, h_index, rows, keys, num_heads, p)


def _philox_integers(x: int, y: int, key: int) -> tuple[int, int]:
    for _ in range(10):
        product = 0xD256D193 * x
        x, y = (product >> 32) ^ key ^ y, product & 0xFFFFFFFF
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return x, y


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, int], key: int, words: tuple[int, int]):
    found = philox((torch.tensor(counter[0]), torch.tensor(counter[1])), torch.tensor(key))
    assert tuple(int(x) for x in found) == words


@pytest.mark.parametrize("seed", [0, 42, 2**63 + 12345, -1])
def test_mask_is_the_note_in_python_integers(seed: int):
    num_heads, p = 3, 0.3
    mask = _mask(seed, range(2), range(3), range(1000, 1004), range(5), num_heads, p)
    seed %= 2**64
    for b, h, x, j in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape)).tolist():
        key = _philox_integers(b * num_heads + h, seed >> 32, seed & 0xFFFFFFFF)[0]
        assert mask[b, h, x, j] == (_philox_integers(1000 + x, j, key)[0] >= int(p * 2**32))


def test_part_of_the_mask_is_the_mask_of_the_part():
    whole = _mask(7, range(2), range(4), range(50), range(60), 4, 0.5)
    part = _mask(7, range(1, 2), range(2, 4), range(13, 29), range(31, 60), 4, 0.5)
    assert torch.equal(whole[1:, 2:, 13:29, 31:], part)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_weights_are_dropped_with_probability_p(p: float):
    mask = _mask(3, range(2), range(4), range(128), range(128), 4, p)
    sigma = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs((~mask).double().mean().item() - p) < 5 * sigma
    by_row = (~mask).double().mean(3)
    assert (by_row - p).abs().max() < 6 * (p * (1 - p) / 128) ** 0.5


def test_everything_is_kept_at_zero_and_dropped_at_one():
    assert _mask(3, range(1), range(2), range(20), range(20), 2, 0.0).all()
    assert not _mask(3, range(1), range(2), range(20), range(20), 2, 1.0).any()


def test_seeds_batches_and_heads_are_independent():
    mask = _mask(3, range(2), range(2), range(64), range(64), 2, 0.5).flatten(0, 1)
    streams = torch.cat([mask, _mask(4, range(1), range(1), range(64), range(64), 2, 0.5)[0]])
    high = _mask(3 + (1 << 32), range(1), range(1), range(64), range(64), 2, 0.5)[0]
    streams = torch.cat([streams, high]).flatten(1).double() * 2 - 1
    correlation = streams @ streams.T / streams.shape[1]
    assert (correlation - correlation.diagonal().diag()).abs().max() < 6 / streams.shape[1] ** 0.5


def test_dropout_seeds_that_differ_give_the_gradients_of_what_each_rank_dropped() -> None:
    """As they may where every rank draws its own (Note [Seeds])."""
    n, world = 22, 3
    q, k, v, do = torch.randn(4, 1, n, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shardings = [Sharding(n, "zigzag", zigzag(n, world), rank) for rank in range(world)]

    def run(context: RingContext) -> tuple[Tensor, Any]:
        mine = shardings[context.rank]
        text = serialize(mine, softmax_scale=0.25, causal=True, dropout_p=0.4, impl="eager")
        local = mine.shard(q), mine.shard(k), mine.shard(v)
        plan, score = resolve_simulated(*local, ScoreTensors(), 5 + context.rank, context, text)
        o, lse, _ = run_forward(ForwardCall(*local, score, plan, context))
        return o, run_backward(BackwardCall(mine.shard(do), None, *local, o, lse, score, plan, context, WantedGrads()))

    with torch.no_grad():
        parts = run_ranks(world, run)
    expected = [torch.zeros_like(x) for x in (q, q, k, v)]
    for rank, sharding in enumerate(shardings):
        rows = torch.zeros(n, dtype=torch.bool).index_fill(0, sharding.positions, True)[:, None, None]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attention_reference(*leaves, causal=True, softmax_scale=0.25, dropout_p=0.4, dropout_seed=5 + rank)
        assert isinstance(o, Tensor)
        found = o.detach() * rows, *torch.autograd.grad(o, leaves, do * rows)
        expected = [x + y for x, y in zip(expected, found, strict=True)]
    made = [[o for o, _ in parts], *([getattr(grads, name) for _, grads in parts] for name in ("dq", "dk", "dv"))]
    for found, wanted in zip(made, expected, strict=True):
        torch.testing.assert_close(shardings[0].assemble(found), wanted)
