"""The one-shot exchange of several ranks in one process: what is stored where, who reads what, and who gives up.

The interpreter runs one program at a time and knows no inline assembly. So `barrier` is a function of this file: it sets the flags
and looks at them once. A launch of all ranks is made twice, first to store and set flags, then, with the numbers of the launches
put back, to find everything there.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.kernels.contract.test_packed import Sizes
from tests.transport.test_reduce import add, assert_bits, cut, draw, draw_bits, draw_shares, lay, simulate

SLOT = 4096
Found = TypeVar("Found")


def read(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def write(address: int, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def number(x: Any) -> int:
    return int(x.handle.data.view("int64").reshape(-1)[0])


class Ranks:
    """The memory of all ranks.

    Attributes:
        looks: Programs look at their flags; else they only set them.
    """

    def __init__(self, ranks: int) -> None:
        from ringattn.kernels.comm import one_shot_triton

        self.ranks = ranks
        self.looks = True
        self.kernel = one_shot_triton
        words = one_shot_triton.control_size(ranks)
        self.controls = [torch.zeros(words, dtype=torch.int64) for _ in range(ranks)]
        self.boxes = [torch.full((2, ranks, SLOT), math.nan) for _ in range(ranks)]
        self.errors = [torch.zeros(ranks, dtype=torch.int32) for _ in range(ranks)]
        shared = [x.data_ptr() for x in (*self.boxes, *self.controls)]
        self.tables = [torch.tensor([*shared, errors.data_ptr()]) for errors in self.errors]

    def barrier(
        self,
        controls: Any,
        flags: Any,
        offset: Any,
        epoch: Any,
        word: Any,
        failed: Any,
        errors: Any,
        patience: Any,
        RANKS: Any,
    ) -> Any:
        """In place of the kernel's."""
        import triton.language as tl

        assert RANKS == self.ranks
        assert number(patience) == 7_000_000_000
        bad = number(word) != 0
        places = [read(number(controls) + 8 * rank) + number(offset) for rank in range(self.ranks)]
        for place in places:
            write(place, -1 if bad else number(epoch))
        if self.looks and not bad:
            for rank in range(self.ranks):
                found = read(number(flags) + 8 * rank)
                if found < number(epoch):
                    bad = True
                    ctypes.c_int32.from_address(number(errors) + 4 * rank).value = 2 if found < 0 else 1
                    write(number(failed), -1)
            for place in places if bad else []:
                write(place, -1)
        return tl.full([], int(self.looks and not bad), tl.int32)

    def launch(self, rank: int, splits: Tensor, sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        b, s, h, dv = sizes
        o, lse = torch.full((b, s, h, dv), math.inf, dtype=dtype), torch.full((b, h, s), math.inf)
        self.kernel.one_shot(
            splits, sinks, o, lse, self.tables[rank], rank=rank, ranks=self.ranks, slot=SLOT, timeout_us=7_000_000
        )
        return [o, lse]

    def share(self, rank: int, x: Tensor, out: Tensor, adds: bool, widths: tuple[int, ...] = ()) -> Tensor:
        place = {"rank": rank, "ranks": self.ranks, "slot": SLOT, "timeout_us": 7_000_000}
        # amid free memory, so that a wrong address is a wrong answer
        room = torch.full((2**20,), math.inf, dtype=out.dtype)
        found = room[2**19 :][: out.numel()].view(out.shape)
        self.kernel.share(x, found, self.tables[rank], adds=adds, widths=widths, **place)
        return found

    def epochs(self, rank: int) -> Tensor:
        programs = self.kernel.PROGRAMS
        return self.controls[rank][programs * self.ranks : programs * (self.ranks + 1)]

    def together(self, launch: Callable[[int], Found]) -> list[Found]:
        """What a launch of every rank leaves it with."""
        self.looks = False
        for rank in range(self.ranks):
            launch(rank)
            self.epochs(rank).sub_(1)
        self.looks = True
        return [launch(rank) for rank in range(self.ranks)]

    def exchange(
        self, splits: list[Tensor], sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """What every rank leaves with."""
        return self.together(lambda rank: self.launch(rank, splits[rank], sizes, sinks, dtype))


@pytest.fixture
def make_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    from ringattn.kernels.comm import one_shot_triton

    # as many as the language allows, and few enough for the interpreter
    monkeypatch.setattr(one_shot_triton, "PROGRAMS", 4)
    # more blocks than programs, and more ranks than are asked at once
    monkeypatch.setattr(one_shot_triton, "UNITS", 128)
    monkeypatch.setattr(one_shot_triton, "AT_ONCE", 2)

    def make(ranks: int) -> Ranks:
        made = Ranks(ranks)
        monkeypatch.setattr(one_shot_triton, "meet", made.barrier)
        return made

    return make


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_leaves_with_the_same_bits_and_they_are_those_of_simulated_ranks(
    make_ranks: Any, ranks: int
) -> None:
    together = make_ranks(ranks)
    cases: list[tuple[Sizes, bool]] = [
        ((1, 1, 3, 8), False),
        ((2, 3, 3, 40), True),
        ((1, 1, 1, 5), True),
        ((2, 4, 3, 64), False),
    ]
    for launch, (sizes, with_sinks) in enumerate(cases, 1):
        splits, sinks, _, _ = draw(launch, ranks, sizes, sinks=with_sinks)
        for dtype in (torch.float32,) if launch % 2 else (torch.bfloat16,):
            found = together.exchange(splits, sizes, sinks, dtype)
            for other in found[1:]:
                assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
            eps = torch.finfo(dtype).eps
            for x, y in zip(found[0], simulate(ranks, splits, sizes, sinks, dtype), strict=True):
                torch.testing.assert_close(x, y, rtol=eps if x is found[0][0] else 1e-6, atol=1e-6)
        for rank in range(ranks):
            assert together.epochs(rank).tolist() == [launch] * 4, "programs without rows count too"
            assert not together.errors[rank].any()
            rows = sizes[0] * sizes[1] * sizes[2] * (sizes[3] + 2)
            # whole parts of all ranks in the half of this launch
            assert (
                together.boxes[rank][launch % 2, :, :rows]
                .isfinite()
                .logical_or(together.boxes[rank][launch % 2, :, :rows] == -math.inf)
                .all()
            )


def test_a_rank_that_does_not_come_leaves_nan_and_its_name_and_later_launches_store_nothing(make_ranks: Any) -> None:
    sizes = (1, 2, 3, 8)
    together = make_ranks(3)
    splits, _, _, _ = draw(0, 3, sizes, sinks=False)
    together.exchange(splits, sizes, None, torch.float32)
    # rank 2 is gone: 0 launches alone, 1 after it
    for rank, missing in ((0, {1: 1, 2: 1}), (1, {0: 2, 2: 1})):
        assert all(x.isnan().all() for x in together.launch(rank, splits[rank], sizes, None, torch.float32))
        assert {peer: code for peer, code in enumerate(together.errors[rank].tolist()) if code} == missing
        assert together.controls[rank][-1] == -1
    before = [box.clone() for box in together.boxes]
    for rank in (0, 1):
        assert all(x.isnan().all() for x in together.launch(rank, splits[rank], sizes, None, torch.float32))
    for x, y in zip(before, together.boxes, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
    # it comes after all, and must not take what is there for an answer
    assert all(x.isnan().all() for x in together.launch(2, splits[2], sizes, None, torch.float32))
    assert together.errors[2].tolist() == [2, 2, 0]


SHAPES = [(1, 1), (3, 5), (2, 24), (1, 4096), (7, 129), (5, 136), (2, 2040)]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(1, torch.float16), (2, torch.bfloat16), (3, torch.bfloat16), (3, torch.float32)]
)
def test_sums_and_columns_are_those_of_all_ranks_whatever_divides_them(
    make_ranks: Any, ranks: int, dtype: torch.dtype
) -> None:
    together = make_ranks(ranks)
    for seed, shape in enumerate(SHAPES):
        brought = draw_shares(seed, ranks, shape, dtype)
        to = (torch.bfloat16, torch.float32, torch.float16)[seed % 3]
        for found in together.together(
            lambda rank, x=brought, to=to: together.share(
                rank, x[rank], torch.full_like(x[rank], math.inf, dtype=to), True
            )
        ):
            if to == torch.bfloat16:
                # the interpreter cuts where GPUs round
                torch.testing.assert_close(found, add(brought, to), rtol=torch.finfo(to).eps, atol=0.0)
            else:
                assert_bits(found, add(brought, to))
        columns = [draw_bits(seed + rank, shape, dtype) for rank in range(ranks)]
        wanted = lay(columns, widths := cut(shape[1], seed))
        for found in together.together(
            lambda rank, x=columns, wanted=wanted, widths=widths: together.share(
                rank, x[rank], torch.full_like(wanted, math.inf), False, widths
            )
        ):
            assert_bits(found, wanted)
        for rank in range(ranks):
            assert together.epochs(rank).tolist() == [2 * seed + 2] * 4, "programs without units count too"
            assert not together.errors[rank].any()


def test_every_kernel_counts_in_the_same_words(make_ranks: Any) -> None:
    sizes: Sizes = (2, 1, 2, 6)
    together = make_ranks(2)
    for seed in range(5):
        splits, _, _, _ = draw(seed, 2, sizes, sinks=False)
        brought = draw_shares(seed, 2, (3, 8), torch.float32)
        if seed % 2:
            wanted = simulate(2, splits, sizes, None, torch.float32)
            for found in together.exchange(splits, sizes, None, torch.float32):
                torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
        for found in together.together(
            lambda rank, x=brought: together.share(rank, x[rank], torch.empty_like(x[rank]), True)
        ):
            assert_bits(found, add(brought, torch.float32))


@pytest.mark.parametrize("adds", [True, False])
def test_shares_of_a_rank_that_does_not_come_are_nan_and_nothing_is_stored_any_more(
    make_ranks: Any, adds: bool
) -> None:
    together = make_ranks(3)
    brought = draw_shares(0, 3, (2, 24), torch.bfloat16)

    def launch(rank: int) -> Tensor:
        return together.share(rank, brought[rank], torch.zeros(2, 24 if adds else 72, dtype=torch.bfloat16), adds)

    assert all(found.isfinite().all() for found in together.together(launch))
    # rank 2 is gone: 0 launches alone, 1 after it
    for rank, missing in ((0, [0, 1, 1]), (1, [2, 0, 1])):
        assert launch(rank).isnan().all()
        assert together.errors[rank].tolist() == missing
        assert together.controls[rank][-1] == -1
    before = [box.clone() for box in together.boxes]
    # other numbers, which would show
    brought = draw_shares(1, 3, (2, 24), torch.bfloat16)
    for rank in (0, 1):
        assert launch(rank).isnan().all()
    for x, y in zip(before, together.boxes, strict=True):
        assert_bits(x, y)
    assert launch(2).isnan().all()
    assert together.errors[2].tolist() == [2, 2, 0]
