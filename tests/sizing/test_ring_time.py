"""Times of launches and rings: late rows cost time, hidden ones do not, and large rings repeat the steps of small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringattn.kernels.interface import PAD_ROWS
from ringattn.plan.buffers import count_groups
from ringattn.plan.ring_plan import make_gather_plan
from ringattn.sizing import load_profile, ring_time
from ringattn.sizing.attention_launch import Exchange, Heads, launch_ms, make_launch
from ringattn.sizing.profile import Link
from ringattn.sizing.ring_time import RingCall, attention_time, gathered
from tests.support.short_mask import ShortMask

H200 = load_profile("h200")
HEADS = Heads(1, 8, 4, 128)


def causal(tokens: int, world_size: int, **options) -> RingCall:
    return RingCall(ShortMask(tokens, tokens, causal=True), world_size, options.pop("heads", HEADS), **options)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_launch_whose_rows_are_there_takes_as_long_as_one_without_flags(direction):
    rows, keys = gathered(causal(8192, 4), 1)
    there = torch.zeros(2, 4, dtype=torch.float64)
    assert launch_ms(rows, keys, HEADS, H200, direction, Exchange(there)) == pytest.approx(
        launch_ms(rows, keys, HEADS, H200, direction), rel=1e-6 if direction == "forward" else 0.1
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_launch_ends_after_its_last_rows_arrive(direction):
    rows, keys = gathered(causal(8192, 4), 1)
    late = torch.full((1, 4), 5000.0, dtype=torch.float64)
    alone, waited = (launch_ms(rows, keys, HEADS, H200, direction, x) for x in (None, Exchange(late)))
    assert waited > 5.0 > alone


def test_gradients_of_remote_rows_wait_for_the_link():
    rows, keys = gathered(causal(8192, 4), 0)
    there = torch.zeros(1, 4, dtype=torch.float64)
    free, slow = (launch_ms(rows, keys, HEADS, H200, "backward", Exchange(there, 1.0, us)) for us in (0.0, 5000.0))
    assert 5.0 < slow < 5.0 + free
    assert launch_ms(rows, keys, HEADS, H200, "backward", Exchange(there, 1.0, 1.0)) == pytest.approx(free, rel=0.01)


@pytest.mark.parametrize(("world_size", "turns"), [(2, 0), (4, 2)])
def test_owners_take_turns_at_a_reader(world_size, turns):
    times = []
    for turn in (0.0, 10e3):
        profile = replace(H200, semaphores_us={**H200.semaphores_us, "turn": turn})
        times.append(attention_time(causal(1024 * world_size, world_size), profile, "forward").device_ms)
    assert times[1] - times[0] == pytest.approx(10.0 * turns, rel=0.01, abs=1e-9)


@pytest.mark.parametrize(("head_dim", "padded"), [(96, 128), (192, 256)])
def test_a_forward_takes_the_time_of_the_columns_that_it_multiplies(head_dim, padded):
    rows, keys = gathered(causal(32768, 1), 0)
    own, wide = (launch_ms(rows, keys, replace(HEADS, head_dim=d), H200, "forward") for d in (head_dim, padded))
    assert own * padded / head_dim == pytest.approx(wide, rel=0.2)
    assert own < 0.9 * wide


def test_the_last_step_delays_less_than_the_first():
    rows, keys = gathered(causal(32768, 4), 1)
    times = []
    for step in (1, 3):
        arrivals = torch.zeros(1, 4, dtype=torch.float64)
        arrivals[0, step] = 300.0
        times.append(launch_ms(rows, keys, HEADS, H200, "forward", Exchange(arrivals)))
    assert times[0] >= times[1]


def test_blocks_cover_every_visible_pair():
    rows, keys = gathered(causal(4096, 2), 0)
    launch = make_launch(rows, keys, HEADS, H200, "forward")
    assert launch is not None
    pairs = sum(step.pairs for step in causal(4096, 2).plan.ranks[0].ring_steps if step is not None)
    covered = launch.work.blocks * launch.shape.tile * launch.shape.block
    assert pairs * HEADS.heads <= covered * launch.times <= 1.3 * pairs * HEADS.heads


@pytest.mark.parametrize("schedule", ["fused", "stepwise", "process_group"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_slower_link_never_makes_a_call_faster(schedule, direction):
    call, before = causal(16384, 4, schedule=schedule), 0.0
    for rate in (400.0, 40.0, 4.0):
        link = Link(rate, 6.0)
        time = attention_time(call, replace(H200, copy_engine=link, nccl=link), direction)
        assert time.device_ms >= before * 0.999
        before = time.device_ms
    assert time.exposed_ms > 0


def test_keys_that_are_saved_arrive_no_more():
    slow = replace(H200, copy_engine=Link(2.0, 6.0))
    saved, fetched = (attention_time(causal(8192, 4, saved=x), slow, "backward") for x in (True, False))
    assert saved.device_ms < fetched.device_ms


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("schedule", "world_size", "nodes"),
    [("stepwise", 48, 1), ("fused", 24, 6), ("process_group", 12, 12), ("process_group", 24, 6)],
)
def test_large_rings_repeat_the_steps_of_small_ones(schedule, world_size, nodes, direction, monkeypatch):
    call = causal(world_size * 2048, world_size, nodes=nodes, schedule=schedule)
    repeated = attention_time(call, H200, direction)
    assert call.planned is not call
    monkeypatch.setattr(ring_time, "MOST_RANKS", 1000)
    monkeypatch.setattr(ring_time, "MOST_NODES", 1000)
    # an equal call, whose plan was not made yet
    whole = attention_time(replace(call), replace(H200), direction)
    assert repeated.device_ms == pytest.approx(whole.device_ms, rel=0.05)
    assert repeated.bytes_received == pytest.approx(whole.bytes_received, rel=0.05)


def test_bytes_are_those_of_the_plan():
    call = causal(8192, 4)
    gather = make_gather_plan(call.plan, 0, PAD_ROWS)
    rows = sum(length for recv in gather.recvs for _, length in recv.rows)
    time = attention_time(call, H200, "forward")
    assert time.bytes_received >= rows * HEADS.kv_bytes()


@pytest.mark.parametrize(("kv_heads", "rows", "groups"), [(8, 4096, 1), (32, 1024, 1), (32, 65536, 4), (16, 65536, 2)])
def test_head_groups_are_cut_while_pushes_stay_long(kv_heads, rows, groups):
    assert count_groups(1, kv_heads, 256, 2, rows) == groups


def test_more_documents_are_less_work():
    mask = ShortMask(16384, 16384, causal=True)
    cut = ShortMask(16384, 16384, causal=True, documents=(0, 4096, 8192, 16384))
    times = [attention_time(RingCall(x, 2, HEADS, "balanced"), H200, "forward").device_ms for x in (cut, mask)]
    assert times[0] < times[1]
