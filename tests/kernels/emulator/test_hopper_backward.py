from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.attention.hopper import tile_scheduler
from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.attention.hopper.configs import DkvConfig
from ringattn.kernels.attention.portable.api import portable_delta
from ringattn.kernels.interface import Arrivals, BackwardStep, CallShape, GatheredKeys, Grads, Returns, Score, Step
from ringattn.kernels.runtime import bound_launch
from ringattn.numerics.reference import visible_pairs
from tests.kernels.emulator import gluon as machine
from tests.kernels.emulator.progress import keep_pace_always
from tests.support.kernel_conformance import LONG_CASES, Case, make_side, run_case

launcher: Any = pytest.importorskip("ringattn.kernels.attention.hopper.launcher")


class OneKernel(HopperKernels):
    """One kernel for dk and dv, and dq where it is wanted, behind a forward that needs no emulator."""

    def __init__(self, call: CallShape, *, config: DkvConfig | None = None) -> None:
        super().__init__(call)
        self.bound.dkv[True] = config or self.bound.dkv[True]

    def forward(self, step: Step) -> None:
        EagerKernels(self.call).forward(step)

    def backward(self, step: BackwardStep, grads: Grads, *, want_dq: bool = True) -> None:
        launcher.launch_dkv(self.bound, step, grads, want_dq=want_dq)


class Ordered(OneKernel):
    """The one kernel, which adds dq in a fixed order."""

    def __init__(self, call: CallShape) -> None:
        super().__init__(call)
        self.bound.deterministic = True


def launch_backward(step: BackwardStep, grads: Grads, *, kernels: type[OneKernel] = OneKernel, **options: Any) -> None:
    kernels(CallShape.of(step.q, step.k, step.v, step.score)).backward(step, grads, **options)


CAUSAL: dict[str, Any] = {"causal": True}
LONG: tuple[Case, ...] = (
    Case("long_wide", seq_len=300, mask=CAUSAL, heads=4, kv_heads=2, head_dim=128),
    Case("long_128_v_64", seq_len=290, kv_len=256, head_dim=128, v_head_dim=64),
    Case("long_96", seq_len=290, mask=CAUSAL, head_dim=96, heads=4, kv_heads=2, accumulate=True),
    Case("long_split", seq_len=1200, kv_len=120, heads=1, kv_heads=1, head_dim=64, key_bias=True, alibi=True),
    Case(
        "long_everything", seq_len=300, kv_len=256, batch=2, heads=4, kv_heads=2, head_dim=64, v_head_dim=40,
        softcap=3.0, softmax_scale=0.3, alibi=True, key_bias=True, sinks=True,
    ),
    Case(
        "long_everything_wide", seq_len=330, mask=CAUSAL, head_dim=128, v_head_dim=96, softcap=3.0, alibi=True,
        key_bias=True, accumulate=True,
    ),
)  # fmt: skip
"""What the shared cases leave out: padded columns under every feature, and tiles that are split under some."""


@pytest.mark.emulated
@pytest.mark.parametrize("case", LONG, ids=str)
def test_backward_stays_within_budget(case: Case):
    run_case(OneKernel, case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("mode", [{"eager": True}, {"seed": 0}, {"seed": 1, "eager": True}], ids=str)
def test_results_stay_within_budget_in_every_order_of_events(mode: dict[str, Any]):
    case = next(case for case in LONG if case.name == "long_128_v_64")
    with machine.mode(**mode):
        run_case(OneKernel, case, torch.float16, "cpu")


def test_a_schedule_does_not_change_what_is_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tile_scheduler, "SLACK", 1e9)  # no tile is split
    config = DkvConfig(block=64)
    run_case(
        partial(OneKernel, config=config),
        next(case for case in LONG if case.name == "long_wide"),
        torch.bfloat16,
        "cpu",
    )


def ring_step(
    launch_it: Callable[[BackwardStep, Grads], None],
    grads_dtype: torch.dtype,
    scale: float = 1.0,
    head_dim: int = 64,
    v_head_dim: int = 64,
    n: int = 200,
) -> Grads:
    """One causal visit of n keys by n queries, gradients overwritten; scores far below zero under a large scale."""
    generator = torch.Generator().manual_seed(0)
    visible = visible_pairs(n, n, causal=True)
    runs = ((0, 1, n),)
    rows, keys = make_side(runs, visible, "cpu"), make_side(runs, visible.transpose(1, 2), "cpu")
    q, do = (torch.randn(1, n, 2, d, generator=generator).half() for d in (head_dim, v_head_dim))
    k, v = (torch.randn(1, n, 1, d, generator=generator).half() for d in (head_dim, v_head_dim))
    if scale > 1:
        q, k = q.abs() * scale, -k.abs() * scale
    scores = torch.einsum("bshd,btgd->bhst", q.float(), k.float()) / 8
    lse = scores.masked_fill(~visible[:, None], float("-inf")).logsumexp(-1)
    dq, dk, dv = (torch.full_like(x, float("nan"), dtype=grads_dtype) for x in (q, k, v))
    grads = Grads(dq=dq, dk=dk, dv=dv)
    delta = torch.randn(1, 2, n, generator=generator)
    launch_it(BackwardStep(do, q, k, v, lse, delta, rows, keys, Score(softmax_scale=1 / 8)), grads)
    return grads


@pytest.mark.emulated
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (40, 64), (128, 128), (128, 64), (96, 72)])
@pytest.mark.parametrize("mode", [{}, {"seed": 0}, {"seed": 1, "eager": True}], ids=str)
def test_gradients_in_the_dtype_of_the_inputs_are_the_rounded_ones(
    head_dim: int, v_head_dim: int, mode: dict[str, Any]
):
    with machine.mode(**mode):
        wide, narrow = (
            ring_step(launch_backward, dtype, head_dim=head_dim, v_head_dim=v_head_dim)
            for dtype in (torch.float32, torch.float16)
        )
    for name in ("dq", "dk", "dv"):
        assert torch.allclose(getattr(wide, name), getattr(narrow, name).float(), rtol=2**-10, atol=1e-6), name


def test_rows_are_added_in_the_dtype_of_the_inputs_too():
    def launch_again(step: BackwardStep, grads: Grads) -> None:
        launch_backward(step, grads)
        written.append(grads.dq.clone())
        grads.dq.fill_(3.0)
        launch_backward(step, replace(grads, accumulate_rows=True))

    written: list[Tensor] = []
    found = ring_step(launch_again, torch.float16)
    torch.testing.assert_close(found.dq, 3.0 + written[0], rtol=2**-9, atol=2**-9)


def test_keys_alone_are_the_same_bits_and_leave_rows_alone():
    both, alone = (ring_step(partial(launch_backward, want_dq=want_dq), torch.float32) for want_dq in (True, False))
    for name in ("dk", "dv"):
        assert torch.equal(getattr(both, name), getattr(alone, name)), name
    assert alone.dq.isnan().all()


def test_keys_beyond_the_buffer_reach_nothing_where_every_score_is_very_low():
    grads = ring_step(launch_backward, torch.float32, scale=8.0)
    for name in ("dq", "dk", "dv"):
        assert getattr(grads, name).isfinite().all(), name


@pytest.mark.parametrize(("s", "launches"), [(1, 4), (0, 2)])
def test_heads_of_a_batch_may_exceed_the_programs_of_a_second_dimension(
    s: int, launches: int, monkeypatch: pytest.MonkeyPatch
):
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(bound_launch, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    b, h, d = 1100, 64, 16
    k, stat, homes = torch.zeros(b, 1, h, d).half(), torch.zeros(b, h, s), torch.zeros(1, dtype=torch.int64)
    q = k[:, :s].clone()
    visible = torch.ones(1, s, 1, dtype=torch.bool)
    rows, keys = make_side(((0, 1, s),), visible, "cpu"), make_side(((0, 1, 1),), visible.transpose(1, 2), "cpu")
    sources = GatheredKeys((keys,), (0,), 1, 0, keys.positions, keys.lo, keys.hi)
    portable_delta(q, q, stat)
    step, grads = BackwardStep(q, q, k, k, stat, stat, rows, sources, Score(1.0)), Grads(torch.empty_like(q))
    bound = HopperKernels(CallShape.of(q, k, k, step.score)).bound
    arrivals, returns = Arrivals(k[:, :0], k[:, :0], None), Returns(homes, 1, homes)
    launcher.launch_dkv(bound, step, grads, arrivals, returns, want_dq=True)
    assert len(grids) == launches
    # what a launch of CUDA may have
    assert all(n <= 65535 for grid in grids for n in grid[1:]), grids


@pytest.mark.parametrize("name", ["long_wide", "long_zigzag", "long_everything"])
def test_results_stay_within_budget_with_heads_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "L2_BYTES", 0)
    case = next(case for case in (*LONG, *LONG_CASES) if case.name == name)
    with machine.mode(seed=0):
        run_case(OneKernel, case, torch.bfloat16, "cpu")


def test_programs_that_keep_pace_compute_the_same_and_each_ends_every_epoch_once(monkeypatch: pytest.MonkeyPatch):
    boards = keep_pace_always(monkeypatch, launcher)
    run_case(OneKernel, next(case for case in LONG if case.name == "long_split"), torch.bfloat16, "cpu")
    assert boards, "nobody kept pace"
    for board, programs in boards:
        assert board.tolist() == [programs] * len(board)


SIDE_BY_SIDE: tuple[dict[str, Any], ...] = ({"seed": 0, "resident": 2}, {"seed": 1, "resident": 5, "eager": True})


def test_sums_in_turns_have_the_same_bits_in_every_order_of_programs():
    def bits(kernels: type[OneKernel], head_dim: int, **mode: Any) -> Grads:
        with machine.mode(**mode):
            launch_it = partial(launch_backward, kernels=kernels)
            return ring_step(launch_it, torch.float32, head_dim=head_dim, v_head_dim=head_dim, n=460)

    for head_dim in (64, 128):
        alone = bits(Ordered, head_dim)
        for mode in SIDE_BY_SIDE:
            found = bits(Ordered, head_dim, **mode)
            for name in ("dq", "dk", "dv"):
                assert torch.equal(getattr(found, name), getattr(alone, name)), (name, mode)
    in_any_order = [bits(OneKernel, 64, **mode).dq for mode in ({}, *SIDE_BY_SIDE)]
    assert not all(torch.equal(dq, in_any_order[0]) for dq in in_any_order), "the order shows in the bits"


def test_dq_is_added_in_turns_where_tiles_fill_the_programs_and_no_heads_of_a_group_meet_a_window():
    visits: list[tuple[BackwardStep, Grads]] = []
    ring_step(lambda *visit: visits.append(visit), torch.float32, n=1280)
    [(x, grads)] = visits
    bound = Ordered(CallShape.of(x.q, x.k, x.v, x.score)).bound

    def chosen(programs: int, sm_margin: int = 0, seen: BackwardStep = x) -> bool:
        bound.programs = programs
        return launcher._waits_little(bound, seen._replace(sm_margin=sm_margin), grads, None)

    # ten tiles of 128 keys
    assert [chosen(programs) for programs in (12, 11, 10, 9, 6, 5, 1)] == [False, True, True, False, False, True, True]
    assert [chosen(12, sm_margin) for sm_margin in (1, 3, 7)] == [True, False, True]
    visible = visible_pairs(1280, 1280, causal=True, window=64)
    rows, keys = (make_side(((0, 1, 1280),), pairs, "cpu") for pairs in (visible, visible.transpose(1, 2)))
    for bound.group, waits_little in ((1, True), (2, False)):
        assert chosen(10, seen=x._replace(rows=rows, keys=keys)) == waits_little


ORDERED = ("long_wide", "long_96", "long_window", "long_documents", "long_lengths", "long_zigzag", "long_runs")


@pytest.mark.emulated
@pytest.mark.parametrize("name", ORDERED)
def test_sums_in_turns_stay_within_budget(name: str):
    case = next(case for case in (*LONG, *LONG_CASES) if case.name == name)
    with machine.mode(seed=0, resident=3):
        run_case(Ordered, case, torch.bfloat16, "cpu")


def test_tiles_taken_in_another_order_than_their_turns_are_a_deadlock(monkeypatch: pytest.MonkeyPatch):
    def turned(rows: Any, keys: Any, shape: Any) -> Any:
        plan = tile_scheduler.schedule_tiles(rows, keys, shape)
        return replace(plan, work=plan.work.flip(0))

    monkeypatch.setattr(launcher, "schedule_tiles", turned)
    with pytest.raises(machine.Deadlock, match="turn"):
        ring_step(partial(launch_backward, kernels=Ordered), torch.float32)


@pytest.mark.parametrize("add_keys", [False, True])
@pytest.mark.parametrize("add_rows", [False, True])
def test_what_is_finished_side_by_side_is_added_or_written_each_as_told(add_rows: bool, add_keys: bool):
    """One tile of keys in two parts, and rows that do not fill the programs that own them."""
    draw = torch.Generator().manual_seed(0)
    parts, total = (torch.randn(shape, generator=draw) for shape in ((2, 128 * (64 + 64)), (2, 50, 3, 40)))
    dq = torch.randn(2, 50, 3, 40, generator=draw)
    dk, dv = torch.randn(1, 100, 1, 40, generator=draw), torch.randn(1, 100, 1, 24, generator=draw)
    before = [x.clone() for x in (dq, dk, dv)]
    plan = SimpleNamespace(splits=torch.tensor([[0, 0, 0, 2]], dtype=torch.int32))

    target = (dk, dv, None, None, *dk.stride()[:3], *dv.stride()[:3], 1, 100)
    keys = launcher.KeySums(plan, parts, 128, (64, 64), (40, 24), target, add_keys)
    launcher.finish_sums(keys, launcher.RowSums(total, dq, None, None, 64, 0.5, add_rows))
    of_dk, of_dv = (x.sum(0).view(128, 64)[:100] for x in parts.split(128 * 64, 1))
    sums = (total * 0.5, of_dk[None, :, None, :40], of_dv[None, :, None, :24])
    for x, old, new, add in zip((dq, dk, dv), before, sums, (add_rows, add_keys, add_keys), strict=True):
        torch.testing.assert_close(x, old + new if add else new)
