"""Masks of ringattn.masks wherever a call takes them: results of the definition, the same bits as short forms, refusals."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from ringattn import Ring, RingMultiheadAttention, attention_reference, masks, ring_attention, simulate_ring
from ringattn import scaled_dot_product_attention as sdpa
from ringattn.plan.mask import MaskUnion

N = 24
STREAMING = masks.causal() & (masks.sinks(2) | masks.window(4))
TREE = masks.tree([None, 0, 1, 0], [8, 5, 4, 7])


def dense(mask: masks.Mask, n: int = N) -> torch.Tensor:
    i = torch.arange(n)
    return mask.visible(i[:, None], i).expand(n, n)


@pytest.mark.parametrize(
    ("mask", "short"),
    [
        (masks.causal(), {"causal": True}),
        (masks.causal() & masks.window(5), {"causal": True, "window": (5, 0)}),
        (masks.chunks(7) & masks.causal(), {"causal": True, "chunk_len": 7}),
        (masks.causal() | masks.prefix(6), {"causal": True, "prefix_len": 6}),
        (masks.lengths([(0, 20)]), {"lengths": ((0, 20),)}),
    ],
)
@pytest.mark.parametrize("memory_budget", [0, 2**30])
def test_short_forms_have_the_bits_of_the_masks_that_they_stand_for(mask, short, memory_budget):
    q, k, v, do = torch.randn(4, 1, N, 2, 16)
    found, wanted = (
        simulate_ring(q, k, v, 3, do=do, memory_budget=memory_budget, **options) for options in ({"mask": mask}, short)
    )
    assert torch.equal(found.o, wanted.o)
    assert found.grads is not None
    assert wanted.grads is not None
    assert all(torch.equal(found.grads[name], wanted.grads[name]) for name in "qkv")


@pytest.mark.parametrize("mask", [STREAMING, TREE], ids=["streaming", "tree"])
def test_functions_and_modules_of_torch_take_masks(mask):
    sharding = Ring().sharding(N)
    x = torch.randn(2, N, 32, dtype=torch.float64)
    q = x.view(2, N, 2, 16).transpose(1, 2)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=dense(mask))
    torch.testing.assert_close(sdpa(q, q, q, attn_mask=mask, sharding=sharding), wanted)
    module = RingMultiheadAttention(32, 2, batch_first=True, dtype=torch.float64)
    expected, weights = torch.nn.MultiheadAttention.forward(module, x, x, x, attn_mask=~dense(mask))
    o, found = module(x, x, x, attn_mask=mask, sharding=sharding)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(found, weights)
    with pytest.raises(ValueError, match="is_causal must be False"):
        module(x, x, x, attn_mask=mask, is_causal=True, sharding=sharding)
    with pytest.raises(RuntimeError, match="attn_mask must be None when is_causal"):
        sdpa(q, q, q, attn_mask=mask, is_causal=True, sharding=sharding)


def test_a_mask_is_a_constant_of_a_compiled_graph():
    sharding = Ring().sharding(N)
    q = torch.randn(1, N, 2, 16)

    def call(q: torch.Tensor) -> torch.Tensor:
        return ring_attention(q, q, q, sharding, mask=STREAMING)

    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(q), call(q))


def test_layouts_balance_a_mask_and_counters_count_its_pairs():
    n, mask = 4096, masks.causal() & masks.documents([0, 3000, 4096]) & (masks.sinks(4) | masks.window(99))
    union = MaskUnion(n, n, mask)
    ring = Ring()
    sharding = ring.sharding(n, "balanced", balance=mask)
    assert sum(union.work(run.start, run.last + 1) for shard in sharding.shards for run in shard) == mask.pairs(n)
    q = torch.randn(2, 64, 2, 16)
    with FlopCounterMode(display=False) as counter:
        ring_attention(q, q, q, ring.sharding(64), mask=masks.window(3, 3))
    assert counter.get_total_flops() == 2 * 2 * masks.window(3, 3).pairs(64) * 2 * 32


def test_masks_are_values():
    for mask in (
        STREAMING,
        TREE,
        masks.blocks(torch.ones(2, 2).bool(), 12),
        masks.per_batch([STREAMING, masks.prefix(3)]),
    ):
        assert pickle.loads(pickle.dumps(mask)) == mask
        assert hash(pickle.loads(pickle.dumps(mask))) == hash(mask)
        assert mask.pairs(N) == sum(mask.visible(i, j) for i in range(N) for j in range(N))
        assert mask.draw(N).count("x") == mask.pairs(N)
    assert STREAMING != TREE
    assert TREE.positions == [*range(8), *range(8, 13), *range(13, 17), *range(8, 15)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mask": STREAMING, "causal": True}, "mask must come without causal"),
        ({"mask": STREAMING, "window": 4}, "mask must come without causal"),
        ({"mask": dense(STREAMING)}, "made by ringattn.masks"),
        ({"mask": masks.per_batch([STREAMING] * 3)}, "one part per batch element, 1, got 3"),
        ({"mask": masks.tree([None], [N - 1])}, "got nodes of 23 tokens"),
    ],
)
def test_masks_that_do_not_fit_a_call_are_refused(options, says):
    q = torch.randn(1, N, 2, 16)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
        ring_attention(q, q, q, Ring().sharding(N), **options)


@pytest.mark.parametrize("sizes", [(12, 13), (12, 8)])
def test_blocks_of_other_sizes_in_one_batch_are_refused(sizes):
    # with 12 and 13 both tables are 2 x 2: the second element was attended to in blocks of the first
    x = torch.randn(2, N, 2, 16)
    mask = masks.per_batch(
        [masks.blocks(torch.ones(-(-N // size), -(-N // size)).tril().bool(), size) for size in sizes]
    )
    with pytest.raises(ValueError, match="one shape and block_size, got 2 x 2 blocks of 12"):
        ring_attention(x, x, x, Ring().sharding(N), mask=mask)


def differ(masks_by_rank):
    q = torch.randn(1, 12, 2, 16)
    try:
        ring_attention(q, q, q, Ring().sharding(N), mask=masks_by_rank[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_masks_are_named(pool):
    for found in pool(2).run(differ, [STREAMING, masks.causal() & (masks.sinks(2) | masks.window(5))]):
        assert "window" in found
        assert "rank" in found


class TestFromBlockMask:
    """Masks of FlexAttention."""

    @staticmethod
    def streaming(b, h, i, j):
        return (j <= i) & ((j < 16) | (i - j < 40))

    def test_shows_what_the_block_mask_shows(self):
        rule = masks.causal() & (masks.sinks(16) | masks.window(39))
        block_mask = create_block_mask(self.streaming, None, None, 200, 200, device="cpu", BLOCK_SIZE=32)
        mask = masks.from_block_mask(block_mask, rule)
        assert torch.equal(dense(mask, 200), dense(rule, 200))
        q, k, v = torch.randn(3, 1, 200, 2, 16, dtype=torch.float64)
        wanted = attention_reference(q, k, v, mask=rule)
        torch.testing.assert_close(simulate_ring(q, k, v, 2, mask=mask).o, wanted)

    def test_takes_full_blocks_as_they_are(self):
        block_mask = create_block_mask(
            lambda b, h, i, j: i // 32 >= j // 32, None, None, 128, 128, device="cpu", BLOCK_SIZE=32
        )
        i = torch.arange(128) // 32
        assert torch.equal(dense(masks.from_block_mask(block_mask), 128), i[:, None] >= i)

    def test_refuses_partial_blocks_without_their_rule_and_another_rule(self):
        block_mask = create_block_mask(self.streaming, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
        with pytest.raises(ValueError, match="inside must be the rule of the"):
            masks.from_block_mask(block_mask)
        with pytest.raises(ValueError, match="inside must show what the block mask shows"):
            masks.from_block_mask(block_mask, masks.causal())

    def test_refuses_what_is_no_block_mask(self):
        with pytest.raises(TypeError, match="block_mask must be a BlockMask of flex_attention, got int"):
            masks.from_block_mask(3)

    def test_refuses_patterns_of_heads(self):
        block_mask = create_block_mask(lambda b, h, i, j: j <= i + h, None, 2, 128, 128, device="cpu", BLOCK_SIZE=32)
        with pytest.raises(NotImplementedError, match="one pattern for all heads"):
            masks.from_block_mask(block_mask, masks.causal())
