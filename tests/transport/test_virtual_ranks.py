"""A ring of virtual ranks has the bits of the simulated ring of that size, however many processes host them."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring, ring_attention, simulate_ring
from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.interface import BackwardStep
from ringattn.plan.layouts import make_shards
from ringattn.plan.mask import short_mask
from ringattn.plan.ring_plan import Rows, make_nodes, make_plan, share_moves
from ringattn.schedule.execution_plan import ForwardCall
from ringattn.transport.process_group import ProcessGroupTransport
from tests.support.pool import Pools
from tests.support.random_calls import Attention
from tests.support.ring_calls import assert_bits, attend, simulate
from tests.transport.test_ring import CASES, LAYOUTS, attentions

PLENTY = 2**30


@pytest.mark.rings
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_number_of_processes_gives_the_bits_of_the_simulated_ring(pool: Pools, name: str, processes: int) -> None:
    # another layout, size and schedule for the next case: with `-m slow` a case meets each number of processes
    number = [*CASES].index(name)
    layout, size, budget = LAYOUTS[number % 4], (4, 8)[number // 4 % 2], (0, PLENTY)[number // 8 % 2]
    expected = simulate(CASES[name], layout, size, memory_budget=budget)
    for found in pool(processes).run(attend, CASES[name], layout, virtual_size=size, memory_budget=budget):
        assert_bits(found, expected, f"{size} virtual ranks on {processes} processes, {layout}")


@settings(max_examples=20, deadline=None)
@given(
    case=attentions(),
    layout=st.sampled_from(LAYOUTS),
    size=st.sampled_from([2, 4, 6]),
    budget=st.sampled_from([0, PLENTY]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_call_has_the_same_bits_on_one_and_two_processes(
    pool: Pools, case: Attention, layout: str, size: int, budget: int, dtype: torch.dtype
) -> None:
    case = Attention(**{**vars(case), "dtype": dtype})
    expected = simulate(case, layout, size, memory_budget=budget)
    for processes in (1, 2):
        for found in pool(processes).run(attend, case, layout, virtual_size=size, memory_budget=budget):
            assert_bits(found, expected, f"{size} on {processes}, {layout}")


@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_whichever_side_moves(pool: Pools, backward: str) -> None:
    case = CASES["window"]
    expected = simulate(case, "zigzag", 4, backward=backward)
    for found in pool(2).run(attend, case, "zigzag", {"backward": backward}, virtual_size=4):
        assert_bits(found, expected, backward)


@pytest.mark.parametrize("budget", [0, PLENTY])
@pytest.mark.parametrize("nodes", [2, 4])
def test_virtual_ranks_have_nodes(pool: Pools, nodes: int, budget: int) -> None:
    case = CASES["causal"]
    expected = simulate(case, "zigzag", 8, nodes=nodes, memory_budget=budget)
    for found in pool(2).run(attend, case, "zigzag", virtual_size=8, nodes=nodes, memory_budget=budget):
        assert_bits(found, expected, f"{nodes} nodes")


def count_received(size: int | None, memory_budget: int = 0, **options: Any) -> list[int]:
    """KiB that this process receives from others in the forward and in the backward of 512 causal tokens."""
    sharding = Ring(virtual_size=size, memory_budget=memory_budget).sharding(512)
    q, k, v = torch.randn(3, 1, sharding.shard_len, 4, 32, requires_grad=True).unbind()
    post, found = ProcessGroupTransport.post, [0, 0]

    def count(self: ProcessGroupTransport, sends: Any, receives: Any, what: str) -> Any:
        found["backward" in what] += sum(message[1].nbytes for message in receives)
        return post(self, sends, receives, what)

    with patch.object(ProcessGroupTransport, "post", count):
        ring_attention(q, k, v, sharding, causal=True, **options).sum().backward()
    return [received // 1024 for received in found]


def indices(rows: Rows) -> list[int]:
    return [row for offset, length in rows for row in range(offset, offset + length)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("hosted", "nodes"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_the_first_rank_of_a_process_receives_the_rows_that_any_of_them_needs(
    layout: str, hosted: int, nodes: int
) -> None:
    for window in (None, 2, 9):
        mask = short_mask(61, causal=True, window=(window, 0))
        shards = make_shards(layout, 61, 8, mask if layout == "balanced" else None)
        plan = make_plan(shards, shards, mask, "keys", make_nodes(8, nodes))
        moves, crossed = share_moves(plan, hosted), dict[tuple[int, int, int], list[int]]()
        needed: dict[tuple[int, int, int], set[int]] = {}
        for part in plan.ranks:
            for step, send in enumerate(part.sends):
                if send is None or step % part.local_size == 0 or send.peer // hosted == part.rank // hosted:
                    assert moves.ranks[part.rank].sends[step] == send
                    continue
                key = part.rank, step // part.local_size, send.peer // hosted
                needed.setdefault(key, set()).update(indices(send.rows))
                ring_step = moves.ranks[send.peer].ring_steps[step]
                assert ring_step is not None
                assert ring_step.crossing is not None
                if (sent := moves.ranks[part.rank].sends[step]) is not None:
                    assert key not in crossed
                    assert sent == ring_step.crossing
                    crossed[key] = indices(sent.rows)
                assert [crossed[key][row] for row in indices(ring_step.rows)] == indices(send.rows)
        assert {key: sorted(rows) for key, rows in needed.items()} == crossed


def test_rows_cross_between_two_processes_once_for_all_virtual_ranks(pool: Pools) -> None:
    page = (Path(__file__).parents[2] / "docs/numerics.md").read_text()
    for size in (None, 2, 4, 8):
        forward, backward = map(max, zip(*pool(2).run(count_received, size), strict=True))
        assert f"| {f'{size} virtual ranks' if size else 'plain ring of 2'} | {forward} | {backward} |" in page
    for processes in (2, 4):
        plain, steps, fused = (
            pool(processes).run(count_received, size, budget, backward="keys")
            for size, budget in ((None, 0), (8, 0), (8, PLENTY))
        )
        assert fused == steps
        for (forward, backward), (expected, _) in zip(steps, plain, strict=True):
            assert forward == expected
            # gradients of the rows of a process, from each virtual rank elsewhere that may read them
            assert backward <= expected + 512 // processes * (8 - 8 // processes)


def blocks_of_nccl(size: int | None) -> int:
    with patch("ringattn.ring.ProcessGroupTransport", wraps=ProcessGroupTransport) as made:
        Ring(virtual_size=size)
    return made.call_args.args[-1]


def test_nccl_may_take_more_blocks_where_a_process_hosts_several_virtual_ranks(pool: Pools) -> None:
    assert [pool(2).run(blocks_of_nccl, size) for size in (None, 2, 4)] == [[4, 4], [4, 4], [32, 32]]


def launches_and_posts() -> list[str]:
    """The launches of a fused backward here, and the posts of its gradients, in their order."""
    found, launch, post = list[str](), EagerKernels.backward_fused, ProcessGroupTransport.post
    sharding = Ring(virtual_size=4, memory_budget=PLENTY).sharding(64)
    x = torch.randn(1, sharding.shard_len, 1, 16, requires_grad=True)

    def launch_one(self: EagerKernels, step: BackwardStep, *args: Any) -> None:
        found.append(f"launch of row {step.rows.run_list[0][2]}")
        launch(self, step, *args)

    def post_one(self: ProcessGroupTransport, sends: Any, receives: Any, what: str) -> Any:
        if "gradients" in what:
            found.append("post")
        return post(self, sends, receives, what)

    with (
        patch.object(EagerKernels, "backward_fused", launch_one),
        patch.object(ProcessGroupTransport, "post", post_one),
    ):
        ring_attention(x, x, x, sharding, causal=True).sum().backward()
    return found


def test_gradients_of_a_virtual_rank_leave_before_the_launch_of_the_next(pool: Pools) -> None:
    for process, found in enumerate(pool(2).run(launches_and_posts)):
        rows = 16 * process, 16 * process + 8
        assert found == [one for row in rows for one in (f"launch of row {row}", "post")]


def broadcast_bias(size: int, seq_len: int, shape: tuple[int, ...]) -> Tensor:
    """The whole gradient of a bias that rows, heads or batch elements share."""
    ring, case = Ring(virtual_size=size), Attention(seq_len=seq_len, batch=2)
    sharding = ring.sharding(case.seq_len, "contiguous")
    q, k, v = (sharding.shard(x) for x in case.tensors().values())
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    has_rows = shape[-2:-1] == (seq_len,)
    bias = (sharding.shard(bias, -2) if has_rows else bias).requires_grad_()
    o = ring_attention(q, k, v, sharding, bias=bias)
    (grad,) = torch.autograd.grad(o, [bias], sharding.shard(case.cotangents()[0]))
    if has_rows:
        return sharding.unshard(grad, -2)
    return ring.sum(grad.contiguous())


# of 5 rows three of four processes have one, whose bias may be its own or that of all rows
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize(
    ("seq_len", "shape"),
    [
        (29, (29,)),
        (29, (2, 1, 1, 29)),
        (29, (2, 2, 1, 1)),
        (29, (29, 29)),
        (29, (2, 1, 29, 29)),
        (29, (2, 29, 1)),
        (5, (1, 5)),
        (5, (5, 5)),
        (5, (2, 2, 5, 5)),
    ],
)
def test_the_gradient_of_a_bias_that_is_expanded_has_the_same_bits(
    pool: Pools, seq_len: int, shape: tuple[int, ...], processes: int
) -> None:
    case = Attention(seq_len=seq_len, batch=2)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    given: dict[str, Any] = {"bias": bias, "do": case.cotangents()[0], "layout": "contiguous"}
    grads = simulate_ring(**case.tensors(), world_size=4, **given).grads
    assert grads is not None
    for found in pool(processes).run(broadcast_bias, 4, seq_len, shape):
        torch.testing.assert_close(found, grads["bias"], rtol=0, atol=0)


def rows_of(size: int) -> tuple[list[int], list[int], bool, list[int]]:
    ring = Ring(virtual_size=size)
    sharding, whole = ring.sharding(23), torch.arange(23)
    mine = sharding.shard(whole, 0)
    copied = pickle.loads(pickle.dumps(sharding))
    other = ring.sharding(23, "striped")
    back = other.reshard(sharding.reshard(mine, other, 0), sharding, 0)
    assert torch.equal(back, mine)
    assert torch.equal(sharding.unshard(mine, 0), whole)
    assert (sharding, hash(sharding), sharding.shard_len) == (copied, hash(copied), len(mine))
    return mine.tolist(), sharding.positions.tolist(), copied.ring is ring, list(sharding.shard_lens)


def test_a_process_holds_the_rows_of_its_virtual_ranks_one_after_another(pool: Pools) -> None:
    alone = [found[0] for found in pool(4).run(rows_of, 4)]
    for processes in (1, 2):
        each = 4 // processes
        for rank, (rows, positions, is_same, lens) in enumerate(pool(processes).run(rows_of, 4)):
            hosted = alone[rank * each : (rank + 1) * each]
            assert rows == positions == [position for found in hosted for position in found]
            assert is_same
            assert lens[rank] == len(rows)


def count_operations(size: int | None) -> tuple[Counter[str], Tensor]:
    """The operations of torch in a call and its backward."""
    case = Attention(seq_len=64, dtype=torch.bfloat16)
    sharding = Ring(virtual_size=size).sharding(case.seq_len)
    q, k, v = (sharding.shard(x).requires_grad_() for x in case.tensors().values())

    def call() -> Tensor:
        o = ring_attention(q, k, v, sharding, causal=True, deterministic=True)
        o.backward(torch.ones_like(o))
        return o.detach()

    call()  # resolves it
    profile = torch.autograd.profiler.profile()
    with profile:
        o = call()
    names = [event.name for event in profile.function_events or ()]
    return Counter(name for name in names if name.startswith("aten::")), o


def test_one_virtual_rank_per_process_runs_the_operations_of_a_plain_ring(pool: Pools) -> None:
    for (found, o), (expected, plain) in zip(
        pool(2).run(count_operations, 2), pool(2).run(count_operations, None), strict=True
    ):
        assert found == expected
        assert torch.equal(o, plain)


def differ(size: int) -> None:
    ring = Ring(virtual_size=size * (1 + dist.get_rank()))
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16)
    ring_attention(x, x, x, sharding)


def test_processes_with_other_virtual_sizes_refuse(pool: Pools) -> None:
    with pytest.raises(ValueError, match="must"):
        pool(2).run(differ, 2)


def refuse(options: dict[str, Any]) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        Ring(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_size": 3}, "virtual_size must be a multiple of the 2 ranks of the ring, got 3"),
        ({"virtual_size": 0}, "virtual_size must be a multiple of the 2 ranks of the ring, got 0"),
        ({"virtual_size": 4, "nodes": "auto"}, "nodes must be a number with virtual_size"),
        ({"virtual_size": 4, "nodes": 3}, "nodes must divide the ring of 4 ranks, got 3"),
        ({"virtual_size": 4, "save_gathered_kv": True}, "save_gathered_kv must be False with virtual_size"),
        ({"virtual_size": 4, "transport": "copy_engine"}, "transport must be 'auto' or 'process_group'"),
    ],
)
def test_options_that_do_not_go_with_virtual_ranks_are_refused(
    pool: Pools, options: dict[str, Any], message: str
) -> None:
    assert all(found.startswith(message) for found in pool(2).run(refuse, options))


def wrong_rows() -> None:
    sharding = Ring(virtual_size=4).sharding(22)
    x = torch.zeros(1, sharding.shard_len + 1, 1, 16)
    ring_attention(x, x, x, sharding)


def test_rows_are_those_of_the_process() -> None:
    with pytest.raises(ValueError, match="q must have the 22 rows that rank 0 holds of 22, got 23"):
        wrong_rows()


def test_keys_are_those_of_as_many_virtual_ranks() -> None:
    sharding, keys = Ring(virtual_size=4).sharding(22), Ring().sharding(22)
    x = torch.zeros(1, 22, 1, 16)
    for rows, others in ((sharding, keys), (keys, sharding)):
        with pytest.raises(ValueError, match="kv_sharding must have the rank, ranks and virtual ranks of sharding"):
            ring_attention(x, x, x, rows, kv_sharding=others)


def test_a_failing_virtual_rank_fails_the_call_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn import dispatch

    sharding = Ring(virtual_size=4).sharding(16)
    x = torch.randn(1, 16, 1, 16)
    expected = ring_attention(x, x, x, sharding)
    run = dispatch.run_forward

    def fail(call: ForwardCall) -> Any:
        if call.context.rank == 2:
            raise ArithmeticError("rank 2")
        return run(call)

    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "run_forward", fail)
        with pytest.raises(ArithmeticError, match="rank 2"):
            ring_attention(x, x, x, sharding)
    assert torch.equal(ring_attention(x, x, x, sharding), expected)
