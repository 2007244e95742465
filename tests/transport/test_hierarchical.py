"""A ring of two levels: the same attention, the same bits on real ranks, and each shard crosses once per node."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Ring, ring_attention, simulate_ring
from ringattn.transport.base import Done
from ringattn.transport.local import LocalTransport
from ringattn.transport.select import group_by_host
from tests.support import slow_link
from tests.support.pool import Pools
from tests.support.random_calls import Attention
from tests.support.ring_calls import Standard, assert_bits, attend, simulate
from tests.support.slow_link import Throttled, slow_down
from tests.transport.test_ring import CASES, LAYOUTS, attentions

SHAPES = [(4, 2), (4, 4), (6, 3), (6, 2), (3, 3), (8, 4)]
"""Ranks and nodes of simulated rings."""
SIMULATED = [(*shape, layout) for shape, layout in zip(SHAPES, LAYOUTS + LAYOUTS[:2], strict=True)]
REAL = ["causal", "window", "documents", "lengths", "key_bias", "bias", "cross", "everything", "short", "one token"]


@pytest.mark.parametrize("backward", ["keys", "queries"])
@pytest.mark.parametrize("name", CASES)
def test_a_double_ring_is_attention(name: str, backward: str) -> None:
    case, half = CASES[name], int(backward == "queries")
    if "bias" in case.features and backward == "queries":
        backward = "auto"
    standard = Standard(case)
    # two shapes where keys move in the backward, two others where queries do, and other ones for the next case
    for world_size, nodes, layout in SIMULATED[(half + [*CASES].index(name)) % 3 :: 3]:
        standard.check(simulate(case, layout, world_size, backward=backward, nodes=nodes))


@settings(max_examples=30, deadline=None)
@given(case=attentions(), layout=st.sampled_from(LAYOUTS), shape=st.sampled_from(SHAPES))
def test_any_call_on_a_double_ring_is_the_call_on_one_ring(
    case: Attention, layout: str, shape: tuple[int, int]
) -> None:
    case = replace(case, dtype=torch.float64)
    found, expected = (simulate(case, layout, shape[0], nodes=nodes) for nodes in (shape[1], 1))
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12, msg=name)


def test_a_simulated_ring_of_one_node_is_the_ring() -> None:
    case = CASES["everything"]
    one, two = (simulate(case, "zigzag", 4, nodes=nodes) for nodes in (1, 2))
    for name, x in simulate(case, "zigzag", 4).items():
        torch.testing.assert_close(one[name], x, rtol=0, atol=0)
    assert any(not torch.equal(one[name], two[name]) for name in one), "two nodes add in another order"


@pytest.mark.parametrize(
    ("name", "world_size", "nodes"),
    [(name, 4, 2) for name in REAL] + [(name, *shape) for name in ("causal", "short") for shape in ((4, 1), (2, 2))],
)
def test_ranks_of_a_double_ring_equal_the_simulated_one_to_the_bit(
    pool: Pools, name: str, world_size: int, nodes: int
) -> None:
    case = CASES[name]
    movements = ["keys"] if "bias" in case.features else ["keys", "queries"]
    for layout, backward in zip(LAYOUTS, movements * 4, strict=False):
        expected = simulate(case, layout, world_size, backward=backward, nodes=nodes)
        for found in pool(world_size).run(attend, case, layout, {"backward": backward}, nodes=nodes):
            assert_bits(found, expected, layout)


class Counting:
    """A transport that counts bytes by peer."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.sent: Counter[int] = Counter()

    def post(self, sends: Any, receives: Any, what: str) -> Any:
        for peer, x in sends:
            self.sent[peer] += x.numel() * x.element_size()
        return self.transport.post(sends, receives, what)

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        self.transport.reserve(num_bytes, grad_bytes)

    def kv_gather(self) -> None:
        return


def count_crossings() -> tuple[dict[int, int], dict[int, int]]:
    ring = Ring(nodes=2)
    near, far = Counting(ring.context.transport), Counting(ring.context.between_nodes)
    object.__setattr__(ring.context, "transport", near)
    object.__setattr__(ring.context, "between_nodes", far)
    sharding = ring.sharding(64)
    q, k, v = (torch.randn(1, 16, 2, 16, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v, sharding, backward="keys").sum().backward()
    return dict(near.sent), dict(far.sent)


def test_a_shard_and_its_gradient_cross_once_per_node(pool: Pools) -> None:
    shard = 2 * 16 * 2 * 16 * 4  # k and v of 16 rows, fp32
    for rank, (near, far) in enumerate(pool(4).run(count_crossings)):
        # forward and backward each bring a shard here and pass a guest on; dk and dv weigh as much in fp32
        assert far == {(rank + 2) % 4: 3 * shard}
        assert near == {rank ^ 1: 6 * shard}


def hold_up() -> float:
    """Seconds of a call whose shard takes 0.2 s to cross."""
    x = torch.randn(1, 64, 2, 16)
    ring = slow_down(Ring(nodes=2), 2 * x.numel() * 4 * 8 / 0.2 / 1e9)
    sharding = ring.sharding(4 * 64)
    begin = time.monotonic()
    ring_attention(x, x, x, sharding)
    return time.monotonic() - begin


def test_a_throttled_link_takes_the_time_of_its_bytes(pool: Pools) -> None:
    assert all(taken >= 0.2 for taken in pool(4).run(hold_up))


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_transfers_of_a_throttled_link_queue_up_and_pass_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(LocalTransport):
        def post(self, sends: Any, receives: Any, what: str) -> Done:
            del sends, receives, what
            return Done()

    clock = Clock()
    monkeypatch.setattr(slow_link, "time", clock)
    link = Throttled(Nothing(), gbps=8e-6)  # a kilobyte per second
    x = torch.zeros(5000, dtype=torch.uint8)
    first, second = (link.post([(1, x)], [(1, x[:100])], "test") for _ in range(2))
    assert clock.now == 0, "posting takes no time"
    clock.now = 3.0
    first.wait()
    assert clock.now == pytest.approx(5)
    second.wait()
    assert clock.now == pytest.approx(10)
    clock.now = 20.0
    third = link.post([(1, x[:100])], [(1, x)], "test")
    clock.now = 26.0
    third.wait()
    assert clock.now == 26, "what came while others worked is there"


def test_ranks_are_grouped_by_host_wherever_they_are() -> None:
    assert group_by_host(["b", "a", "b", "a"]) == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match=r"nodes='auto' must find equally many ring ranks on every host, got"):
        group_by_host(["a", "a", "b"])


def count_nodes() -> tuple[bool, bool]:
    return Ring(nodes="auto").context.nodes is None, Ring(nodes=1).context.nodes is None


def test_ranks_of_one_host_are_one_node(pool: Pools) -> None:
    assert pool(2).run(count_nodes) == [(True, True)] * 2
    assert Ring(nodes="auto").context.nodes is None


def disagree() -> None:
    ring = Ring(nodes=1 if dist.get_rank() == 1 else 2)
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16)
    ring_attention(x, x, x, sharding)


def test_ranks_that_disagree_about_nodes_are_named(pool: Pools) -> None:
    with pytest.raises(ValueError, match=r"got a different one on ring ranks \[1\] \(nodes: "):
        pool(4).run(disagree)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes must divide the ring of 1 ranks, got 2"):
        Ring(nodes=2)
    with pytest.raises(ValueError, match="nodes must be a number or 'auto', got 'all'"):
        Ring(nodes="all")
    with pytest.raises(ValueError, match="nccl_max_ctas must be at least 1, got 0"):
        Ring(nccl_max_ctas=0)
    with pytest.raises(ValueError, match="the ring must have several nodes"):
        slow_down(Ring(), 100)
    with pytest.raises(ValueError, match="gbps must be a positive number"):
        Throttled(LocalTransport(), 0)
    x = torch.randn(1, 8, 1, 16)
    with pytest.raises(ValueError, match="nodes must divide the ring of 4 ranks, got 3"):
        simulate_ring(x, x, x, 4, nodes=3)


def stop_answering() -> None:
    import datetime

    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    assert isinstance(group, dist.ProcessGroup)
    ring = Ring(group, nodes=2)
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16)
    for _ in range(2):
        ring_attention(x, x, x, sharding)
    # between GPUs no marks travel beside the first rows, and ranks do not compare them in the third call
    ring._links[0].sends_marks = lambda device: False
    if ring.rank != 1:
        ring_attention(x, x, x, sharding)


def test_a_crossing_that_never_comes_names_rank_and_step(pool: Pools) -> None:
    message = r"ring rank 0: forward, keys for ring step 1, between nodes: the transfer with ring ranks \[1\] failed"
    with pytest.raises(RuntimeError, match=message):
        pool(2).run(stop_answering)
