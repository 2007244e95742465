"""One exchange: all ranks leave with the same bits, those of the simulated ranks, and they are attention over all keys."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring
from ringattn.transport.base import RingContext, SelectedTransport
from ringattn.transport.lockstep import run_ranks
from ringattn.transport.reduce import base
from ringattn.transport.reduce.base import PartialReducer
from tests.kernels.contract.test_packed import Sizes, attend, draw_parts
from tests.support.pool import Pools


class SimulatedReducer(PartialReducer):
    """The reducer of one of `run_ranks`, with one post per peer."""

    def __init__(self, context: RingContext) -> None:
        super().__init__(SelectedTransport("simulated", "all ranks are in one process"), None, context.world_size)
        self._context = context

    def _stack(self, mine: Tensor, what: str) -> Tensor:
        context = self._context
        stack = mine.new_empty((context.world_size, *mine.shape))
        stack[context.rank] = mine
        for step in range(1, context.world_size):
            to, owner = (context.rank + step) % context.world_size, (context.rank - step) % context.world_size
            posted = f"exchange of {what}, step {step}"
            context.transport.post([(to, stack[context.rank])], [(owner, stack[owner])], posted).wait()
        return stack


def draw(seed: int, ranks: int, sizes: Sizes, *, sinks: bool) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor]:
    """Every rank's splits, of which there are 1 to 3 and some hold nothing, the sinks, and o and lse in fp64."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 4, (ranks,), generator=generator).tolist()
    stack, scores, values = draw_parts(seed, sum(counts), *sizes)
    drawn = torch.randn(sizes[2], generator=generator) * 4 if sinks else None
    return list(stack.split(counts)), drawn, *attend(scores, values, drawn)


def answer(
    reducer: PartialReducer, splits: Tensor, sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    b, s, h, dv = sizes
    o, lse = torch.full((b, s, h, dv), math.nan, dtype=dtype), torch.full((b, h, s), math.nan)
    reducer.merge_partials(splits, *sizes, sinks, o, lse)
    return [o, lse]


def simulate(ranks: int, splits: list[Tensor], sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    found = run_ranks(
        ranks, lambda context: answer(SimulatedReducer(context), splits[context.rank], sizes, sinks, dtype)
    )
    for other in found:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
    return found[0]


def draw_shares(seed: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Every rank's addends, of sizes so different that the order in which they are added shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 4.0 ** torch.randint(-3, 4, (ranks, *shape), generator=generator)
    return list((torch.randn(ranks, *shape, generator=generator) * sizes).to(dtype))


def draw_bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, of NaN too, which a cast would change."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * torch.finfo(dtype).bits // 8
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def add(shares: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Number by number, in the order of the ranks, each step rounded to fp32."""
    total = shares[0].float()
    for other in shares[1:]:
        # exact, and then rounded
        total = (total.double() + other.double()).float()
    return total.to(dtype)


def total(reducer: PartialReducer, x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.full_like(x, math.nan, dtype=dtype)
    reducer.all_reduce(x, out)
    return out


def side_by_side(reducer: PartialReducer, x: Tensor, ranks: int, widths: tuple[int, ...] = ()) -> Tensor:
    out = torch.full((x.shape[0], ranks * x.shape[1]), math.nan, dtype=x.dtype, device=x.device)
    out = out.view(-1) if widths else out
    reducer.all_gather_columns(x, out, widths)
    return out


def lay(columns: list[Tensor], widths: tuple[int, ...] = ()) -> Tensor:
    """What `side_by_side` gives to every rank."""
    if not widths:
        return torch.cat(columns, 1)
    parts = zip(*(x.split(widths, 1) for x in columns), strict=True)
    return torch.cat([torch.cat(part, 1).flatten() for part in parts])


def cut(width: int, seed: int) -> tuple[int, ...]:
    """Up to three parts of so many columns; sometimes none are named."""
    narrow = (seed % 4 - 1) * (1 + seed % 2,)
    return (*narrow, width - sum(narrow)) if seed % 4 and width > 4 else ()


def assert_bits(x: Tensor, y: Tensor) -> None:
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    ours, theirs = (z.reshape(-1).contiguous().view(torch.uint8) for z in (x, y))
    assert torch.equal(ours, theirs)


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


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 5),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
)
def test_simulated_ranks_add_in_the_order_of_the_ranks_and_round_once(
    seed: int, ranks: int, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    shares = draw_shares(seed, ranks, shape, dtypes[0])
    for found in run_ranks(ranks, lambda context: total(SimulatedReducer(context), shares[context.rank], dtypes[1])):
        assert_bits(found, add(shares, dtypes[1]))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 5),
    rows=st.integers(0, 4),
    width=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_simulated_ranks_lay_columns_side_by_side_bit_for_bit(
    seed: int, ranks: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    columns = [draw_bits(seed + rank, (rows, width), dtype) for rank in range(ranks)]
    for found in run_ranks(
        ranks, lambda context: side_by_side(SimulatedReducer(context), columns[context.rank], ranks, cut(width, seed))
    ):
        assert_bits(found, lay(columns, cut(width, seed)))


def test_the_order_of_addends_shows() -> None:
    shares = draw_shares(0, 3, (64,), torch.float32)
    assert not torch.equal(add(shares, torch.float32), add(shares[::-1], torch.float32))


CASES = [(seed, (1 + seed % 2, 1 + seed % 3, 1 + seed % 4, (8, 5, 128)[seed % 3]), bool(seed % 2)) for seed in range(8)]


def _group(cases: list[tuple[int, Sizes, bool]]) -> list[list[Tensor]]:
    ring = Ring()
    reducer, found = ring.partial_reducer("cpu"), []
    assert ring.partial_reducer(torch.device("cpu")) is reducer
    for seed, sizes, sinks in cases:
        splits, drawn, _, _ = draw(seed, ring.world_size, sizes, sinks=sinks)
        for dtype in (torch.float32, torch.bfloat16):
            found.append(answer(reducer, splits[ring.rank], sizes, drawn, dtype))
    ring.close()
    return found


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


SHAPES = [(1, 8), (3, 5), (64, 33), (0, 4)]


def _share(dtypes: list[torch.dtype]) -> list[Tensor]:
    ring = Ring()
    reducer, rank, found = ring.partial_reducer("cpu"), ring.rank, []
    for seed, shape in enumerate(SHAPES):
        for dtype in dtypes:
            x = draw_shares(seed, ring.world_size, shape, dtype)[rank]
            found += [total(reducer, x, to) for to in (torch.bfloat16, torch.float32)]
            found.append(side_by_side(reducer, draw_bits(seed + rank, shape, dtype), ring.world_size))
    ring.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_add_in_their_order_and_lay_columns_side_by_side(pool: Pools, ranks: int) -> None:
    wanted = []
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            shares = draw_shares(seed, ranks, shape, dtype)
            wanted += [add(shares, to) for to in (torch.bfloat16, torch.float32)]
            wanted.append(torch.cat([draw_bits(seed + rank, shape, dtype) for rank in range(ranks)], 1))
    for found in pool(ranks).run(_share, DTYPES):
        for x, y in zip(found, wanted, strict=True):
            assert_bits(x, y)


def _finish(reducer: PartialReducer, b: int, s: int, h: int, dv: int, **wrong: Tensor) -> None:
    given = {
        "splits": torch.zeros(1, b * s * h * (dv + 2)),
        "sinks": torch.zeros(h),
        "o": torch.empty(b, s, h, dv),
        "lse": torch.empty(b, h, s),
    } | wrong
    reducer.merge_partials(given["splits"], b, s, h, dv, given["sinks"], given["o"], given["lse"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"splits": torch.zeros(2, 47)},
            r"splits must be fp32 of shape \(at least 1, 48\), .* got torch.float32 of shape \(2, 47\)",
        ),
        ({"splits": torch.zeros(0, 48)}, r"splits must be fp32 of shape"),
        ({"splits": torch.zeros(1, 48).double()}, r"splits must be fp32 .* got torch.float64"),
        ({"splits": torch.zeros(48, 2).T}, r"splits must have a contiguous last dim, got strides \(1, 2\)"),
        ({"o": torch.empty(2, 4, 4)}, r"o must have shape \(1, 2, 4, 4\), got \(2, 4, 4\)"),
        ({"o": torch.empty(1, 2, 4, 4, dtype=torch.int32)}, r"o must have a floating dtype"),
        ({"o": torch.empty(1, 4, 2, 4).transpose(1, 2)}, r"o must be contiguous"),
        ({"lse": torch.empty(1, 4, 2, dtype=torch.float64)}, r"lse must be torch.float32, got torch.float64"),
        ({"lse": torch.empty(1, 4, 2, device="meta")}, r"lse must be on the device of splits, cpu, got meta"),
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \(4,\), got \(2,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(wrong: dict[str, Tensor], said: str) -> None:
    reducer = Ring().partial_reducer("cpu")
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            _finish(reducer, 1, 2, 4, 4, **wrong)
    _finish(reducer, 1, 2, 4, 4)


NUMBERS = torch.zeros(16)


@pytest.mark.parametrize(
    ("x", "out", "said"),
    [
        (torch.zeros(2, 4), torch.zeros(4, 2), r"out must have the shape of x, \(2, 4\), got \(4, 2\)"),
        (torch.zeros(2, 4).double(), torch.zeros(2, 4), r"x must be fp32, bf16 or fp16, got torch.float64"),
        (torch.zeros(2, 4), torch.zeros(2, 4).int(), r"out must be fp32, bf16 or fp16, got torch.int32"),
        (torch.zeros(4, 2).T, torch.zeros(2, 4), r"x must be contiguous, got strides \(1, 2\)"),
        (torch.zeros(2, 4), torch.zeros(4, 2).T, r"out must be contiguous, got strides \(1, 2\)"),
        (torch.zeros(2, 4), torch.zeros(2, 4, device="meta"), r"out must be on the device of x, cpu, got meta"),
        (NUMBERS[:8], NUMBERS[7:15], r"out must share no memory with x"),
        (NUMBERS[:8], NUMBERS[:8], r"out must share no memory with x"),
        (torch.zeros(2**30 + 1, device="meta"),) * 2 + (r"out must have at most 1073741824 numbers, got 1073741825",),
    ],
)
def test_sums_that_do_not_fit_are_refused(x: Tensor, out: Tensor, said: str) -> None:
    reducer = Ring().partial_reducer("cpu")
    assert_bits(total(reducer, torch.ones(2, 4), torch.bfloat16), torch.ones(2, 4, dtype=torch.bfloat16))
    reducer.all_reduce(NUMBERS[:8], NUMBERS[8:])
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            reducer.all_reduce(x, out)


@pytest.mark.parametrize(
    ("x", "out", "said"),
    [
        (torch.zeros(8), torch.zeros(8), r"x must have shape `rows width`, got \(8,\)"),
        (torch.zeros(2, 4), torch.zeros(2, 8), r"out must have shape \(2, 4\), the columns of 1 ranks, got \(2, 8\)"),
        (
            torch.zeros(2, 4),
            torch.zeros(2, 4).half(),
            r"out must have the dtype of x, torch.float32, got torch.float16",
        ),
        (torch.zeros(2, 4).long(), torch.zeros(2, 4).long(), r"x must be fp32, bf16 or fp16, got torch.int64"),
        (torch.zeros(4, 2).T, torch.zeros(2, 4), r"x must be contiguous, got strides \(1, 2\)"),
        (NUMBERS[:8].view(2, 4), NUMBERS[4:12].view(2, 4), r"out must share no memory with x"),
    ],
)
def test_columns_that_do_not_fit_are_refused(x: Tensor, out: Tensor, said: str) -> None:
    reducer = Ring().partial_reducer("cpu")
    for widths in ((3,), (0, 4), (1, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"widths must be at most 3 positive integers whose sum is the 4 columns"):
            reducer.all_gather_columns(torch.zeros(2, 4), torch.zeros(8), widths)
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            reducer.all_gather_columns(x, out)


def _differing(what: str) -> str:
    ring = Ring(timeout=timedelta(seconds=2 if what == "absent" else 60))
    reducer = ring.partial_reducer("cpu")
    _finish(reducer, 1, 1, 2, 4)
    try:
        if what == "heads":
            _finish(reducer, 1, 1, 4 if ring.rank else 8, 4)
        elif what == "shapes":
            total(reducer, torch.zeros(2, 8 if ring.rank else 4), torch.float32)
        elif what == "dtypes":
            side_by_side(reducer, torch.zeros(2, 4, dtype=torch.float16 if ring.rank else torch.bfloat16), 3)
        elif what == "operations":
            x = torch.zeros(2, 4)
            side_by_side(reducer, x, 3) if ring.rank else total(reducer, x, torch.float32)
        elif what == "strides":
            total(reducer, torch.zeros(8, 4).T if ring.rank == 1 else torch.zeros(4, 8), torch.bfloat16)
        elif what == "refused":
            _finish(reducer, 1, 2, 2, 4, **({"lse": torch.empty(1)} if ring.rank else {}))
        elif ring.rank == 0:
            _finish(reducer, 2, 1, 2, 4)
        else:
            return "absent"
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_different_reductions_are_refused_on_every_rank_and_name_the_ranks_that_differ(pool: Pools) -> None:
    for said in pool(3).run(_differing, "heads"):
        assert said.startswith(
            "ValueError: an exchange must be the same on all ranks of a ring, got b 1, s 1, h 4, dv 4, torch.float32, sinks, cpu "
            "on most ranks and b 1, s 1, h 8, dv 4, torch.float32, sinks, cpu on ring rank 0"
        )
    first, *others = pool(3).run(_differing, "refused")
    assert first.startswith("ValueError: ring rank 1 refused: ValueError: lse must have shape (1, 2, 2), got (1,)")
    assert all(other.startswith("ValueError: lse must have shape (1, 2, 2), got (1,)") for other in others)


@pytest.mark.parametrize(
    ("what", "usual", "other"),
    [
        (
            "shapes",
            "addends (2, 8), torch.float32 to torch.float32, cpu",
            "addends (2, 4), torch.float32 to torch.float32, cpu",
        ),
        ("dtypes", "columns (2, 4), torch.float16, cpu", "columns (2, 4), torch.bfloat16, cpu"),
        ("operations", "columns (2, 4), torch.float32, cpu", "addends (2, 4), torch.float32 to torch.float32, cpu"),
    ],
)
def test_different_sums_and_columns_are_refused_on_every_rank(pool: Pools, what: str, usual: str, other: str) -> None:
    for said in pool(3).run(_differing, what):
        assert said.startswith(
            f"ValueError: an exchange must be the same on all ranks of a ring, got {usual} on most ranks and {other} on ring rank 0"
        )


def test_a_sum_that_one_rank_can_not_make_is_refused_on_every_rank(pool: Pools) -> None:
    refused = "ValueError: x must be contiguous, got strides (1, 4)"
    for rank, said in enumerate(pool(3).run(_differing, "strides")):
        assert said.startswith(refused if rank == 1 else f"ValueError: ring rank 1 refused: {refused}")


def test_a_rank_that_does_not_come_is_named(pool: Pools) -> None:
    first, *_ = pool(2).run(_differing, "absent")
    assert first.startswith("RuntimeError: ring rank 0: ring ranks [1] did not make this attention call within 0:00:02")


def _lost() -> str:
    ring = Ring()
    reducer = ring.partial_reducer("cpu")
    _finish(reducer, 1, 1, 2, 4)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "all_gather_single", fail)
        try:
            _finish(reducer, 1, 1, 2, 4)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_collective_that_fails_names_the_ranks(pool: Pools) -> None:
    said = pool(2).run(_lost)[1]
    assert said.startswith(
        "ring rank 1: an exchange of b 1, s 1, h 2, dv 4: the collective with ring ranks [0] failed or timed out"
    )
    assert said.endswith("(connection closed by peer)")


def _named() -> list[str]:
    ring = Ring()
    names = [str(ring.partial_reducer("cpu"))]
    ring.close()
    asked = Ring(transport="process_group")
    return [*names, str(ring.partial_reducer("cpu")), str(asked.partial_reducer("cpu"))]


def test_a_reducer_names_itself_and_the_reason(pool: Pools) -> None:
    wanted = ["group: the partials are in cpu memory"] * 2 + ["group: process_group: asked for"]
    assert pool(2).run(_named) == [wanted] * 2
    assert str(Ring().partial_reducer("cpu")) == "alone: one rank: every key is here already"
