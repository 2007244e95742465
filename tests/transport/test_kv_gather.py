"""All visits in one launch: the loops, held against the definition and against the visits one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import simulate
from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.interface import PAD_ROWS
from ringattn.kernels.runtime.table_cache import find
from ringattn.numerics.reference import attention_reference
from ringattn.plan.attention_spec import AttentionSpec, serialize
from ringattn.plan.buffers import count_groups, gather_bytes
from ringattn.plan.device_tables import fused_tables, returning_key, step_tables
from ringattn.plan.layouts import make_shards
from ringattn.plan.ring_plan import make_gather_plan, make_plan
from ringattn.plan.sharding import Sharding
from ringattn.schedule import fused
from ringattn.simulate import simulate_ring
from tests.support.short_mask import ShortMask

PLENTY = 2**40
CASES = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 9},
    "two-sided window": {"window": (5, 11)},
    "lengths": {"causal": True, "lengths": ((0, 61), (13, 40))},
    "documents": {"causal": True, "documents": (0, 7, 31, 32, 61)},
}


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches and sums of fused calls."""
    asked: list[str] = []

    def note(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def noted(*args: Any) -> Any:
            asked.append(name)
            return call(*args)

        monkeypatch.setattr(owner, name, noted)

    for name in ("forward_fused", "backward_fused"):
        note(EagerKernels, name)
    for name in ("reduce_kv_grads", "reduce_key_bias_grads"):
        note(fused, name)
    return asked


def draw(n: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n * heads)
    shapes = [(2, n, heads, 16), (2, n, kv_heads, 16), (2, n, kv_heads, 8), (2, n, heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def draw_bias(n: int) -> Tensor:
    """Numbers, and some keys that nobody sees."""
    generator = torch.Generator().manual_seed(n)
    bias = torch.randn(2, n, generator=generator)
    bias[1, n // 3 : n // 2] = -torch.inf
    return bias


def assert_gathered_is_stepwise(gathering: list[str], world_size: int, *reduced: str, **options: Any) -> None:
    """One launch per rank gives what ring steps give; `reduced` is what else is asked for once per rank."""
    q, k, v, do = draw(61, 4, 2)
    gathered = simulate_ring(q, k, v, world_size, memory_budget=PLENTY, do=do, **options)
    assert [gathering.count(name) for name in ("forward_fused", *reduced)] == [world_size] * (1 + len(reduced))
    staged = simulate_ring(q, k, v, world_size, do=do, **options)
    assert gathering.count("forward_fused") == world_size
    assert gathered.grads is not None
    assert staged.grads is not None
    torch.testing.assert_close(gathered.o, staged.o, rtol=0, atol=0)
    torch.testing.assert_close(gathered.lse, staged.lse, rtol=0, atol=0)
    assert gathered.grads.keys() == staged.grads.keys()
    for name, grad in gathered.grads.items():
        torch.testing.assert_close(grad, staged.grads[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped", "balanced"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_launch_equals_the_ring_steps(gathering, case, layout, world_size):
    options = {"layout": layout, "dlse": torch.ones(2, 4, 61), **CASES[case]}
    assert_gathered_is_stepwise(gathering, world_size, "backward_fused", **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("layout", "world_size"), [("zigzag", 2), ("contiguous", 3)])
def test_key_bias_is_gathered_and_its_gradient_is_returned(gathering, case, layout, world_size):
    options = {"layout": layout, "key_bias": draw_bias(61), **CASES[case]}
    assert_gathered_is_stepwise(gathering, world_size, "reduce_key_bias_grads", **options)


def test_keys_that_have_a_bias_are_not_kept_but_fetched_again(gathering):
    q, k, v, do = draw(61, 4, 2)
    options = {"causal": True, "do": do, "key_bias": draw_bias(61), "memory_budget": PLENTY}
    fetched, kept = (simulate_ring(q, k, v, 2, save_gathered_kv=keep, **options) for keep in (False, True))
    assert gathering.count("backward_fused") == 4
    assert fetched.grads is not None
    assert kept.grads is not None
    for name in ("q", "k", "v", "key_bias"):
        assert torch.equal(kept.grads[name], fetched.grads[name])


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "key bias"])
def test_one_launch_gives_the_definition(gathering, biased):
    q, k, v, do = draw(45, 4, 2)
    given: dict[str, Any] = {"q": q, "k": k, "v": v} | ({"key_bias": draw_bias(45)} if biased else {})
    found = simulate_ring(**given, world_size=3, causal=True, memory_budget=PLENTY, do=do)
    leaves: dict[str, Any] = {name: x.double().requires_grad_() for name, x in given.items()}
    o = attention_reference(**leaves, causal=True)
    expected = torch.autograd.grad(o, list(leaves.values()), do.double())
    assert "backward_fused" in gathering
    assert found.grads is not None
    torch.testing.assert_close(found.o.double(), o, rtol=1e-5, atol=1e-5)
    for name, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found.grads[name].double(), grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"memory_budget": 0}, {"memory_budget": 1000}, {"bias": torch.zeros(1, 1, 61, 61)}],
    ids=["no budget", "too small a budget", "bias"],
)
def test_calls_that_one_launch_cannot_serve_are_stepwise(gathering, options):
    q, k, v, do = draw(61, 4, 2)
    simulate_ring(q, k, v, 2, causal=True, do=do, **{"memory_budget": PLENTY, **options})
    assert "forward_fused" not in gathering
    assert "backward_fused" not in gathering


def test_each_direction_is_gathered_where_it_fits(gathering):
    q, k, v, do = draw(61, 4, 2)
    mask = ShortMask(61, 61, causal=True)
    shards = make_shards("zigzag", 61, 3)
    gather_plan = make_gather_plan(make_plan(shards, shards, mask, "keys"), 0, PAD_ROWS)
    forward, backward = (gather_bytes(2, 2, 24, 4, gather_plan, 3, backward=either) for either in (False, True))
    found = []
    for budget in (forward - 1, forward, backward - 1, backward):
        gathering.clear()
        simulate_ring(q, k, v, 3, layout="zigzag", causal=True, do=do, memory_budget=budget)
        found.append(("forward_fused" in gathering, "backward_fused" in gathering))
    assert found == [(False, False), (True, False), (True, False), (True, True)]


def test_ranks_without_rows_are_visited_one_by_one(gathering):
    q, k, v, do = draw(3, 4, 2)
    simulate_ring(q, k, v, 4, layout="contiguous", memory_budget=PLENTY, do=do)
    assert "forward_fused" not in gathering


def test_one_launch_leaves_room_for_copies_that_need_it(gathering, monkeypatch):
    found = []
    for name in ("forward_fused", "backward_fused"):
        launch = getattr(EagerKernels, name)

        def noted(kernels, step, *rest, name=name, call=launch):
            found.append((name, step.sm_margin))
            return call(kernels, step, *rest)

        monkeypatch.setattr(EagerKernels, name, noted)
    q, k, v, do = draw(61, 4, 2)
    simulate_ring(q, k, v, 2, memory_budget=PLENTY, do=do, causal=True)
    assert Counter(found) == {("forward_fused", 0): 2, ("backward_fused", 0): 2}
    found.clear()
    monkeypatch.setattr(simulate, "sm_margin_of", lambda device, ranks: 4)
    simulate_ring(q, k, v, 2, memory_budget=PLENTY, do=do, causal=True)
    assert Counter(found) == {("forward_fused", 4): 2, ("backward_fused", 4): 2}
    found.clear()
    simulate_ring(q, k, v, 4, nodes=2, memory_budget=PLENTY, do=do, causal=True)
    assert {sm_margin for _, sm_margin in found} == {4}


def test_queries_move_step_by_step_on_request(gathering):
    q, k, v, do = draw(61, 4, 2)
    simulate_ring(q, k, v, 2, causal=True, memory_budget=PLENTY, do=do, backward="queries")
    assert "forward_fused" in gathering
    assert "backward_fused" not in gathering


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped", "balanced"])
@pytest.mark.parametrize("window", [None, (9, 0), (4, 70)])
def test_fetched_rows_are_the_rows_that_are_read(layout, window):
    n, world_size = 501, 4
    mask = ShortMask(n, n, window=window, causal=window is None)
    shards = make_shards(layout, n, world_size, mask)
    plan = make_plan(shards, shards, mask, "keys")
    parts = [make_gather_plan(plan, rank, PAD_ROWS) for rank in range(world_size)]
    sent = {(rank, reader.peer, reader.step): reader.rows for rank, part in enumerate(parts) for reader in part.sends}
    fetched = {(fetch.owner, rank, fetch.step): fetch.rows for rank, part in enumerate(parts) for fetch in part.recvs}
    assert sent == fetched
    for part in parts:
        end = 0
        for fetch in part.recvs:
            assert fetch.at % PAD_ROWS == 0
            assert fetch.at >= end
            end = fetch.at + sum(length for _, length in fetch.rows) + PAD_ROWS
        assert end <= part.remote_rows <= part.most_remote_rows
        assert part.slot_rows == max(sum(run.length for run in shard) for shard in shards)


def test_one_table_holds_the_bounds_of_all_sources():
    n, world_size = 301, 3
    shards = make_shards("zigzag", n, world_size, ShortMask(n, n, causal=True))
    for rank in range(world_size):
        sharding = Sharding(n, "zigzag", shards, rank)
        call = AttentionSpec.deserialize(serialize(sharding, softmax_scale=1.0, causal=True, window=50), rank)
        keys = fused_tables(call, torch.device("cpu")).keys[0]
        moving = step_tables(call, "keys", torch.device("cpu")).moving
        found = find(keys)
        assert found is find(keys)
        assert found.steps[0] == 0
        assert list(found.steps) == sorted(found.steps)
        for step, side in zip(found.steps, found.sides, strict=True):
            key = moving[step]
            assert key is not None
            alone = find(key)
            first = side.run_list[0][0] + (found.local_rows if step else 0)
            place = slice(first, first + alone.positions.shape[0])
            for name in ("positions", "lo", "hi"):
                assert torch.equal(getattr(side, name), getattr(alone, name))
                assert torch.equal(getattr(found, name)[..., place], getattr(alone, name))
            assert torch.equal(side.lo_host, alone.lo_host)
            assert torch.equal(side.hi_host, alone.hi_host)


def test_every_returning_row_finds_its_own():
    n, world_size = 90, 3
    mask = ShortMask(n, n, causal=True, window=(19, 0))
    plan = make_plan(*(2 * [make_shards("zigzag", n, world_size, mask)]), mask, "keys")
    sends = make_gather_plan(plan, 1, PAD_ROWS).sends
    table = find(returning_key(sends, 30, "cpu"))
    for line, reader in zip(table, sends, strict=True):
        own = [x for offset, length in reader.rows for x in range(offset, offset + length)]
        assert line[own].tolist() == list(range(len(own)))
        assert int((line >= 0).sum()) == len(own)


def test_head_groups_keep_pushes_large_and_divide_the_heads():
    def groups(rows: int, heads: int) -> int:
        return count_groups(1, heads, 2 * 128, 2, rows)

    assert [groups(n, 8) for n in (1024, 4096, 65536)] == [1, 1, 1]
    assert [groups(n, 32) for n in (1024, 2048, 4096, 65536)] == [1, 2, 4, 4]
    assert [groups(n, 64) for n in (4096, 65536)] == [8, 8]
    assert groups(4096, 24) == 2
