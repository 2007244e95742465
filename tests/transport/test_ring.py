"""Is the distribution right? Ranks equal the simulated ring to the bit, and the simulated ring stays in the budget."""

from __future__ import annotations

import copy
import datetime
import itertools
import pickle
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringattn import Ring, attention_reference, masks, ring_attention, simulate_ring
from ringattn.transport.lockstep import LockstepTransport
from tests.support.mask_expressions import expressions, is_flat
from tests.support.pool import Pool, Pools
from tests.support.random_calls import Attention
from tests.support.ring_calls import Standard, assert_bits, attend, simulate

LAYOUTS = ("contiguous", "striped", "zigzag", "balanced")

CASES = {
    "plain": Attention(),
    "causal": Attention(mask={"causal": True}, num_heads=4, num_kv_heads=2),
    "window": Attention(seq_len=41, mask={"causal": True, "window": (5, 0)}),
    "both sides": Attention(mask={"window": (3, 6)}),
    "documents": Attention(seq_len=37, mask={"causal": True}, documents=(0, 3, 3, 20, 37)),
    "prefix": Attention(mask={"causal": True, "prefix_len": 9}),
    "chunks": Attention(mask={"chunk_len": 7}),
    "lengths": Attention(batch=3, mask={"causal": True, "lengths": ((0, 33), (4, 20), (9, 9))}),
    "sinks": Attention(mask={"causal": True}, features=("sinks",)),
    "alibi": Attention(mask={"causal": True}, features=("alibi_slopes",)),
    "key_bias": Attention(batch=2, features=("key_bias",)),
    "bias": Attention(batch=2, features=("bias",), mask={"causal": True}),
    "softcap": Attention(options={"softcap": 2.0}, mask={"causal": True}),
    "dropout": Attention(options={"dropout_p": 0.3, "dropout_seed": 2**40 + 5}, mask={"causal": True}),
    "cross": Attention(seq_len=19, kv_len=30),
    "cross causal": Attention(seq_len=19, kv_len=7, mask={"causal": True}),
    "many heads": Attention(num_heads=8, num_kv_heads=1, head_dim=24, v_head_dim=40),
    "everything": Attention(
        batch=2,
        num_heads=4,
        num_kv_heads=2,
        mask={"causal": True, "window": (12, 0)},
        documents=(0, 10, 33),
        features=("sinks", "alibi_slopes", "key_bias", "bias"),
        options={"softcap": 3.0, "dropout_p": 0.2, "dropout_seed": 3, "softmax_scale": 0.3},
    ),
    "sinks and window": Attention(
        seq_len=41, mask={"mask": masks.causal() & (masks.sinks(3) | masks.window(5))}, documents=(0, 17, 41)
    ),
    "tree": Attention(seq_len=37, mask={"mask": masks.tree([None, 0, 1, 0, 3], [9, 8, 6, 10, 4])}, num_heads=4),
    "spans": Attention(mask={"mask": masks.causal() | masks.spans([(3, 11), (20, 29)])}),
    "global tokens": Attention(
        batch=2,
        mask={"mask": masks.lengths([(0, 30), (4, 33)]) & (masks.global_tokens(6) | masks.window(4, 4))},
        features=("sinks", "alibi_slopes", "key_bias", "bias"),
        options={"softcap": 3.0, "dropout_p": 0.2, "dropout_seed": 3},
    ),
    "blocks": Attention(
        mask={"mask": masks.causal() & masks.blocks([[(3 * x + y) % 4 < 2 for y in range(7)] for x in range(7)], 5)},
        features=("sinks", "alibi_slopes"),
    ),
    "masks of their own": Attention(
        batch=2, mask={"mask": masks.per_batch([masks.causal(), masks.chunks(9) | masks.prefix(2)])}
    ),
    "short": Attention(seq_len=3, mask={"causal": True}),
    "one token": Attention(seq_len=1),
}


WORLDS = [1, 2, 4, 8]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_the_simulated_ring_is_attention_at_every_world_size(name: str, world_size: int) -> None:
    # another layout at each world size and for the next case: a case meets each of them
    layout = LAYOUTS[(WORLDS.index(world_size) + [*CASES].index(name)) % len(LAYOUTS)]
    Standard(CASES[name]).check(simulate(CASES[name], layout, world_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_errors_do_not_grow_with_the_number_of_ranks(dtype: torch.dtype) -> None:
    case = Attention(
        seq_len=64, num_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, dtype=dtype, mask={"causal": True}
    )
    standard = Standard(case)
    for world_size in (1, 2, 4, 8):
        standard.check(simulate(case, "zigzag", world_size))


@pytest.mark.parametrize("backward", ["keys", "queries"])
@pytest.mark.parametrize("name", [name for name in CASES if "bias" not in CASES[name].features])
def test_gradients_are_returned_whichever_side_moves(name: str, backward: str) -> None:
    standard = Standard(CASES[name])
    for world_size in (3, 4):
        standard.check(simulate(CASES[name], "zigzag", world_size, backward=backward))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Makes new memory NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SPARSE = {
    "few tokens": Attention(mask={"lengths": ((4, 7),)}, features=("sinks", "alibi_slopes", "key_bias")),
    "no tokens": Attention(batch=2, mask={"lengths": ((9, 9), (9, 9))}),
    "fewer tokens than ranks": Attention(seq_len=3, features=("alibi_slopes", "key_bias")),
    "keys of a few ranks": Attention(seq_len=30, kv_len=3),
    "keys out of reach": Attention(seq_len=30, kv_len=3, mask={"window": (2, 0)}, features=("sinks",)),
    "queries of a few ranks": Attention(seq_len=3, kv_len=30, features=("key_bias",)),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backward", ["keys", "queries"])
@pytest.mark.parametrize("name", SPARSE)
def test_ranks_without_visible_pairs_leave_no_memory_uninitialised(name: str, backward: str) -> None:
    standard = Standard(SPARSE[name])
    for world_size, layout in itertools.product((1, 2, 8), ("contiguous", "striped")):
        standard.check(simulate(SPARSE[name], layout, world_size, backward=backward))


@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_cotangents_of_rows_that_saw_nothing_are_not_read(backward: str) -> None:
    case = Attention(mask={"lengths": ((4, 20),)})
    do, dlse = case.cotangents()
    sinks = torch.tensor([float("-inf"), 0.5])
    found = []
    for nothing in (0.0, float("nan")):
        dlse[:, 0, :4], dlse[:, 0, 20:] = nothing, nothing
        options = {"backward": backward, "sinks": sinks, **case.mask}
        found.append(simulate_ring(**case.tensors(), world_size=3, do=do, dlse=dlse, **options).grads)
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("window", [None, (4, 0), (0, 8)])
@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("v_head_dim", [4, 16, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_moves_the_side_of_which_the_busiest_rank_moves_fewer_bytes(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int, int] | None, num_heads: int, v_head_dim: int, dtype: torch.dtype
) -> None:
    case = Attention(64, num_heads=num_heads, v_head_dim=v_head_dim, dtype=dtype, mask={"window": window})
    moved: Counter[int] = Counter()
    post = LockstepTransport.post

    def count(self: LockstepTransport, sends: Any, receives: Any, what: str) -> Any:
        if what.startswith("backward"):
            moved[self.rank] += sum(x.numel() for _, x in (*sends, *receives))
        return post(self, sends, receives, what)

    monkeypatch.setattr(LockstepTransport, "post", count)
    busiest = {}
    for backward in ("keys", "queries", "auto"):
        moved.clear()
        simulate(case, "contiguous", 4, backward=backward)
        busiest[backward] = max(moved.values())
    assert busiest["keys"] != busiest["queries"]
    assert busiest["auto"] == min(busiest.values()), busiest


@pytest.mark.rings
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_the_simulated_ring_to_the_bit(pool: Pools, name: str, world_size: int) -> None:
    # another layout for each number of ranks and for the next case: a case meets each of them
    layout = LAYOUTS[(world_size + [*CASES].index(name)) % len(LAYOUTS)]
    expected = simulate(CASES[name], layout, world_size)
    for found in pool(world_size).run(attend, CASES[name], layout):
        assert_bits(found, expected, layout)


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    n = draw(st.integers(1, 40))
    hk, g = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4]))
    batch = draw(st.integers(1, 2))
    mask: dict[str, Any] = {"causal": draw(st.booleans())}
    side = st.one_of(st.none(), st.integers(0, 12))
    if draw(st.booleans()):
        mask["window"] = (draw(side), draw(side))
    if mask["causal"] and draw(st.booleans()):
        mask["prefix_len"] = draw(st.integers(0, n))
    if draw(st.booleans()):
        mask["chunk_len"] = draw(st.integers(1, n + 2))
    if draw(st.booleans()):
        mask["lengths"] = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for _ in range(batch))
    cuts = draw(st.lists(st.integers(0, n), max_size=4))
    documents = (0, *sorted(cuts), n) if cuts else None
    if draw(st.booleans()):
        mask = {"mask": draw(expressions(n, n).filter(lambda found: is_flat(found, n, documents)))}
    names = ("sinks", "alibi_slopes", "key_bias", "bias")
    options: dict[str, Any] = {"softcap": draw(st.sampled_from([0.0, 2.0]))}
    if draw(st.booleans()):
        options |= {"dropout_p": 0.25, "dropout_seed": draw(st.integers(0, 2**63 - 1))}
    return Attention(
        seq_len=n,
        batch=batch,
        num_heads=hk * g,
        num_kv_heads=hk,
        features=tuple(name for name in names if draw(st.booleans())),
        mask=mask,
        documents=documents,
        options=options,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40, deadline=None)
@given(case=attentions(), layout=st.sampled_from(LAYOUTS), world_size=st.integers(1, 16))
def test_any_call_on_any_ring_is_attention(case: Attention, layout: str, world_size: int) -> None:
    Standard(case).check(simulate(case, layout, world_size))


@settings(max_examples=25, deadline=None)
@given(case=attentions(), layout=st.sampled_from(LAYOUTS), world_size=st.integers(1, 4))
def test_any_call_on_real_ranks_equals_the_simulated_ring(
    pool: Pools, case: Attention, layout: str, world_size: int
) -> None:
    expected = simulate(case, layout, world_size)
    for found in pool(world_size).run(attend, case, layout):
        assert_bits(found, expected, layout)


def test_dropout_is_the_same_at_every_world_size() -> None:
    case = Attention(seq_len=24, dtype=torch.float64, options={"dropout_p": 0.5, "dropout_seed": 7})
    one = simulate(case, "zigzag", 1)["o"]
    for world_size, layout in itertools.product((2, 5), LAYOUTS):
        torch.testing.assert_close(simulate(case, layout, world_size)["o"], one)


def test_a_sink_of_minus_infinity_has_no_gradient_even_where_rows_see_nothing() -> None:
    inputs = Attention(mask={"lengths": ((4, 20),)}, dtype=torch.float64)
    tensors, (do, _) = inputs.tensors(), inputs.cotangents()
    sinks = torch.tensor([float("-inf"), 0.5], dtype=torch.float64, requires_grad=True)
    attention_reference(**tensors, **inputs.mask, sinks=sinks).backward(do)
    found = simulate_ring(**tensors, **inputs.mask, sinks=sinks.detach(), world_size=2, do=do).grads
    assert found is not None
    torch.testing.assert_close(found["sinks"], sinks.grad)


def refuse(kind: str) -> None:
    ring = Ring()
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16)
    odd = ring.rank == 1
    options: dict[str, Any] = {"causal": True}
    q = x
    if kind == "mask":
        options["causal"] = not odd
    elif kind == "dtype" and odd:
        q = x = x.half()
    elif kind == "rows" and odd:
        q = x = x[:, :-1]
    elif kind == "heads" and odd:
        q = x = torch.cat([x, x], 2)
    elif kind == "mixed" and odd:
        q = x.double()
    ring_attention(q, x, x, sharding, **options)


@pytest.mark.parametrize("kind", ["mask", "dtype", "rows", "heads", "mixed"])
def test_disagreeing_ranks_all_refuse_and_name_the_odd_one(pool: Pools, kind: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        pool(3).run(refuse, kind)
    every_rank = str(caught.value.__cause__)
    assert every_rank.count("ValueError: ") >= 3
    assert "ring ranks [1]" in every_rank or "ring rank 1 refused" in every_rank


def absent() -> None:
    ring = Ring(timeout=datetime.timedelta(seconds=5))
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16)
    if ring.rank != 1:
        ring_attention(x, x, x, sharding)


def test_a_missing_rank_is_named(pool: Pools) -> None:
    with pytest.raises(RuntimeError, match=r"ring ranks \[1\] did not make this attention call"):
        pool(3).run(absent)


def come_late() -> tuple[str, list[float]]:
    ring = Ring(timeout=datetime.timedelta(seconds=2))
    sharding = ring.sharding(16)
    x = torch.full((1, sharding.shard_len, 2, 16), 3.0)
    said, gave_up = "", torch.zeros(1)
    if ring.rank == 1:
        dist.recv(gave_up, 0)
    try:
        ring_attention(x, x, x, sharding)
    except RuntimeError as error:
        said = str(error)
    if ring.rank == 0:
        dist.send(gave_up, 1)
    dist.barrier()
    return said, ring_attention(x, x, x, sharding, window=2).unique().tolist()


def test_a_rank_after_the_timeout_raises_and_later_calls_are_compared_again(pool: Pools) -> None:
    (first, *results), (second, *others) = pool(2).run(come_late)
    assert first.startswith("ring rank 0: ring ranks [1] did not make this attention call within 0:00:02")
    assert second.startswith("ring rank 1: ring ranks [0] waited 0:00:02 for this attention call and gave it up")
    assert results == others == [[3.0]]


def stop_answering() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    assert isinstance(group, dist.ProcessGroup)
    ring = Ring(group)
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16)
    ring_attention(x, x, x, sharding)
    if ring.rank != 1:
        ring_attention(x, x, x, sharding)


def test_a_transfer_that_never_comes_names_rank_and_step(pool: Pools) -> None:
    message = (
        r"ring rank [02]: forward, keys for ring step \d: the transfer with ring ranks \[.*1.*\] failed or timed out"
    )
    with pytest.raises(RuntimeError, match=message):
        pool(3).run(stop_answering)


def leave_a_backward_out() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    assert isinstance(group, dist.ProcessGroup)
    ring = Ring(group)
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16, requires_grad=True)
    o = ring_attention(x, x, x, sharding)
    if ring.rank != 1:
        o.sum().backward()
    else:
        ring_attention(x, x, x, sharding)


def test_the_next_call_of_a_rank_that_left_a_backward_out_is_not_taken_for_it(pool: Pools) -> None:
    call = r"ring_attention\(16 tokens, zigzag\), digest [0-9a-f]{6}"
    message = (
        rf"the backward of call 1, {call} on ring ranks \[0\] and {call} on ring ranks \[1\] as call 2 of the ring"
    )
    with pytest.raises(ValueError, match=message) as caught:
        pool(2).run(leave_a_backward_out)
    assert len(re.findall(message, str(caught.value.__cause__))) == 2


def attend_in_two_threads() -> list[Tensor]:
    rings = [Ring(), Ring()]
    for ring in rings:
        errors_of_equal_values(ring, 0.0, 1)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(errors_of_equal_values, rings, (1.0, 2.0), (100, 100)))


def errors_of_equal_values(ring: Ring, number: float, calls: int) -> Tensor:
    sharding = ring.sharding(16)
    x = torch.full((1, sharding.shard_len, 2, 16), number)
    return torch.stack([(ring_attention(x, x, x, sharding) - number).abs().max() for _ in range(calls)])


def meet_in_opposite_order() -> list[Tensor]:
    rings = [Ring(timeout=datetime.timedelta(seconds=20)) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        calls = []
        for ring in rings if dist.get_rank() else reversed(rings):
            calls.append(threads.submit(errors_of_equal_values, ring, 1.0, 1))
            time.sleep(0.3)  # the first one waits for the other rank by now
        return [call.result() for call in calls]


def test_first_calls_in_two_threads_may_come_in_any_order(pool: Pools) -> None:
    for found in pool(2).run(meet_in_opposite_order):
        assert not torch.stack(found).any()


def test_rings_in_two_threads_keep_to_themselves(pool: Pools) -> None:
    for found in pool(2).run(attend_in_two_threads):
        assert not torch.stack(found).any()


def use_a_ring_without_its_group() -> None:
    ring = Ring()
    sharding = ring.sharding(16)
    x = torch.ones(1, sharding.shard_len, 2, 16)
    ring_attention(x, x, x, sharding)
    dist.barrier()
    dist.destroy_process_group()
    calls = (
        lambda: ring_attention(x, x, x, sharding),
        lambda: ring_attention(x, x, x, sharding, causal=True),
        lambda: sharding.unshard(x),
        lambda: ring.sum(x),
        lambda: ring.all_reduce_min(1),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"a ring must be used while its process group exists, got .* destroyed"):
            call()


@pytest.mark.dist
def test_a_ring_says_that_its_group_was_destroyed() -> None:
    pool = Pool(2)
    try:
        pool.run(use_a_ring_without_its_group)
    finally:
        pool.close(kill=True)


@pytest.mark.parametrize(("processes", "refused"), [("4", True), ("1", False), ("", False)])
def test_a_job_of_several_processes_needs_a_process_group(
    monkeypatch: pytest.MonkeyPatch, processes: str, refused: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", processes)
    if not refused:
        assert Ring().world_size == 1
        return
    with pytest.raises(
        RuntimeError, match=r"Ring\(\) must find a process group where WORLD_SIZE is 4, got none; call torch"
    ):
        Ring()


def use_a_ring_in_another_group(meeting: str) -> None:
    ring = Ring()
    sharding = ring.sharding(16)
    x = torch.ones(1, sharding.shard_len, 2, 16)
    ring_attention(x, x, x, sharding)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=1 - ring.rank, world_size=2)
    for call in (lambda: ring_attention(x, x, x, sharding), lambda: sharding.unshard(x), lambda: ring.sum(x)):
        with pytest.raises(
            RuntimeError, match=f"as rank {ring.rank} of 2, got another one .* rank {1 - ring.rank} of 2"
        ):
            call()
    dist.barrier()


@pytest.mark.dist
def test_a_ring_is_not_used_in_another_group_of_the_same_name(tmp_path: Path) -> None:
    pool = Pool(2)
    try:
        pool.run(use_a_ring_in_another_group, str(tmp_path / "meeting"))
    finally:
        pool.close(kill=True)


def attend_on_a_mesh(cases: tuple[Attention, Attention]) -> tuple[int, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica = mesh["dp"].get_local_rank()
    return replica, attend(cases[replica], "zigzag", group=mesh["cp"])


def test_rings_of_a_mesh_keep_to_themselves(pool: Pools) -> None:
    cases = (CASES["causal"], Attention(seq_len=21, seed=9, mask={"causal": True}))
    expected = [simulate(case, "zigzag", 2) for case in cases]
    for replica, found in pool(4).run(attend_on_a_mesh, cases):
        assert_bits(found, expected[replica], f"replica {replica}")


def test_a_mesh_of_two_dimensions_is_refused(pool: Pools) -> None:
    with pytest.raises(ValueError, match=r"a mesh must have one dimension, got 2; pass a slice such as mesh\['cp'\]"):
        pool(4).run(ring_of_a_whole_mesh)


def ring_of_a_whole_mesh() -> None:
    Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))


def rings_of_others() -> None:
    made: list[Any] = [dist.new_group([0]), DeviceMesh("cpu", [0])]
    for others in made:
        if dist.get_rank() == 0:
            assert Ring(others).world_size == 1
        else:
            with pytest.raises(ValueError, match="this process must be a member of the group"):
                Ring(others)


def test_a_group_of_others_is_refused(pool: Pools) -> None:
    pool(2).run(rings_of_others)
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh or None, got str"):
        Ring("cp")  # pyright: ignore[reportArgumentType]


def reuse() -> tuple[int, int]:
    ring = Ring()
    sharding = ring.sharding(64)
    x = torch.randn(1, sharding.shard_len, 2, 16, requires_grad=True)
    sizes = []
    for _ in range(3):
        ring_attention(x, x, x, sharding, causal=True).sum().backward()
        sizes.append(ring.context.buffers.num_bytes())
    assert sizes[0] == sizes[2] > 0
    ring.close()
    return sizes[0], ring.context.buffers.num_bytes()


def test_copies_of_a_ring_are_the_ring() -> None:
    ring = Ring()
    for copied in (copy.copy(ring), copy.deepcopy(ring), pickle.loads(pickle.dumps(ring))):
        assert copied is ring
    stored = pickle.dumps(ring)
    del ring, copied
    with pytest.raises(RuntimeError, match="is gone"):
        pickle.loads(stored)


def test_buffers_are_reused_across_calls(pool: Pools) -> None:
    for held, left in pool(2).run(reuse):
        assert held > 0
        assert left == 0


def evaluate_then_train() -> None:
    ring = Ring()
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 8)

    def step(x: Tensor) -> Tensor:
        k, v = ring.kv_buffer(sharding, 1, 2, 8, dtype=x.dtype, name="a layer")
        k.copy_(x)
        v.copy_(x)
        return ring_attention(x, k, v, sharding, causal=True)

    with torch.inference_mode():
        expected = step(x)
    found = step(x.clone().requires_grad_())
    found.sum().backward()
    assert torch.equal(found, expected)


def test_a_ring_that_began_in_inference_mode_serves_training(pool: Pools) -> None:
    pool(2).run(evaluate_then_train)
    pool(1).run(evaluate_then_train)


def test_keys_written_in_place_are_differentiable_step_after_step() -> None:
    ring = Ring()
    sharding = ring.sharding(24)
    x, weight = torch.randn(1, 24, 2, 8), torch.randn(8, 8, requires_grad=True)
    q = torch.randn(1, 24, 4, 8)
    for _ in range(3):
        k, v = ring.kv_buffer(sharding, 1, 2, 8, dtype=torch.float32, name="layer 0")
        k.copy_(x @ weight)
        v.copy_(x)
        found = torch.autograd.grad(ring_attention(q, k, v, sharding, causal=True).square().sum(), weight)[0]
        o = ring_attention(q, x @ weight, x, sharding, causal=True)
        torch.testing.assert_close(found, torch.autograd.grad(o.square().sum(), weight)[0])


def test_keys_overwritten_before_the_backward_are_refused() -> None:
    ring = Ring()
    sharding = ring.sharding(8)
    held = ring.kv_buffer(sharding, 1, 1, 8, dtype=torch.float32, name="layer 0")
    k, v = (x.normal_().requires_grad_() for x in held)
    o = ring_attention(torch.randn(1, 8, 1, 8, requires_grad=True), k, v, sharding)
    for x in ring.kv_buffer(sharding, 1, 1, 8, dtype=torch.float32, name="layer 0"):
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def differentiate_twice_alone() -> list[str]:
    """What a rank hears of steps of two calls; in the first step rank 1 alone wants a gradient of gradients."""
    ring, said = Ring(timeout=datetime.timedelta(seconds=20)), []
    sharding = ring.sharding(8)
    for wrong in (ring.rank == 1, False):
        x = torch.ones(1, 4, 2, 8, requires_grad=True)
        try:
            (dx,) = torch.autograd.grad(ring_attention(x, x, x, sharding).sum(), x, create_graph=wrong)
            if wrong:
                torch.autograd.grad(dx.sum(), x)
            ring_attention(x, x, x, sharding, causal=True)
            said.append("")
        except (NotImplementedError, ValueError) as error:
            said.append(str(error))
    return said


def test_gradients_of_gradients_on_one_rank_are_refused_on_all(pool: Pools) -> None:
    for refused, after in pool(2).run(differentiate_twice_alone):
        assert "ring attention must be differentiated once" in refused
        assert after == ""


def refuse_alone() -> Tensor:
    """Rank 1 makes a ring that cannot be, says so, and goes on."""
    if dist.get_rank():
        wrongs: list[dict[str, Any]] = [{"nodes": 3}, {"nodes": "some"}, {"nccl_max_ctas": 0}]
        for wrong in wrongs:
            with pytest.raises(ValueError, match=r"nodes|nccl_max_ctas"):
                Ring(**wrong)
    ring = Ring(timeout=datetime.timedelta(seconds=20))
    x = torch.ones(1, 4, 2, 8)
    return ring_attention(x, x, x, ring.sharding(8), causal=True)


def test_a_ring_that_one_rank_was_refused_has_no_name(pool: Pools) -> None:
    """The rank would look for the others under the name of its second ring."""
    for found in pool(2).run(refuse_alone):
        assert torch.equal(found, torch.ones(1, 4, 2, 8))


def _refused_budget(rank_budgets: tuple[int, ...]) -> str:
    ring = Ring(transport="copy_engine", memory_budget=rank_budgets[dist.get_rank()])
    sharding = ring.sharding(4)
    x = torch.zeros(1, sharding.shard_len, 1, 16)
    try:
        ring_attention(x, x, x, sharding)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_budgets_that_differ_are_refused_by_every_rank(pool: Pools) -> None:
    for said in pool(2).run(_refused_budget, (0, 1000)):
        assert "memory_budget must be the same on all ring ranks, got [0, 1000]" in said
    # with one budget the refusal is about the transport
    for said in pool(2).run(_refused_budget, (1000, 1000)):
        assert "must have GPUs of one host that reach each other" in said


def do_other_things(kind: str) -> str:
    """The error of a rank where rank 1 does something else than ranks 0 and 2, which attend."""
    ring = Ring(timeout=datetime.timedelta(seconds=3 if kind == "rings" else 20))
    if kind == "rings" and ring.rank == 1:
        ring = Ring(timeout=datetime.timedelta(seconds=3))
    sharding = ring.sharding(15)
    x = torch.ones(1, sharding.shard_len, 2, 16)
    try:
        if ring.rank != 1 or kind == "rings":
            ring_attention(x, x, x, sharding, causal=True)
        elif kind == "unshard":
            sharding.unshard(x)
        else:
            ring.assert_equal_across_ranks("a RingCache", "batch=1")
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


OTHER = {"unshard": r"Sharding.unshard([1, (5, 5, 5), 2, 16], torch.float32 cpu)", "agree": "a RingCache: batch=1"}


@pytest.mark.parametrize("kind", OTHER)
def test_ranks_in_different_calls_raise_errors_that_name_both(pool: Pools, kind: str) -> None:
    for said in pool(3).run(do_other_things, kind):
        assert said.startswith(
            f"all ranks must make the same calls in the same order, got ring_attention(15 tokens, zigzag, causal=True) on "
            f"ring ranks [0, 2] and {OTHER[kind]} on ring ranks [1]"
        )


def test_a_timeout_names_the_rings_that_the_other_ranks_wait_in(pool: Pools) -> None:
    ranks = pool(3)
    try:
        here, there, _ = ranks.run(do_other_things, "rings")
    finally:
        ranks.close(kill=True)  # these ranks have made different numbers of rings
    call = r"ring_attention\(15 tokens, zigzag, causal=True\) of ring '0#\d+'"
    assert re.search(rf"ranks \[1\] did not .* \(this rank is in {call}, ring rank 1 in {call}\)", here)
    assert re.search(
        rf"ranks \[0, 2\] did not .* \(this rank is in {call}, ring rank 0 in {call}, ring rank 2 in", there
    )
    assert len(set(re.findall(r"of ring '(0#\d+)'", here))) == 2
