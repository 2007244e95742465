from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ringattn.kernels.attention.eager import EagerKernels, eager_delta
from ringattn.kernels.attention.hopper import launcher
from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.attention.hopper.configs import DqConfig, WideDkvConfig, choose_dkv
from ringattn.kernels.attention.hopper.launcher import launch_dkv, launch_dq
from ringattn.kernels.attention.hopper.tile_scheduler import Shape, schedule_tiles
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, Score, Step
from ringattn.numerics.reference import visible_pairs
from tests.kernels.emulator import gluon as machine
from tests.kernels.emulator.progress import keep_pace_always
from tests.support.kernel_conformance import CASES, SMALL_WEIGHT_CASES, Case, make_side, run_case

CAUSAL: dict[str, Any] = {"causal": True}
SERVED = [case for case in CASES if case.bias is None and case.dropout_p == 0]
NARROW = DqConfig(block=16, k_stages=3, v_stages=1)
"""Many blocks where the lengths of the suite leave room for one."""

LONG = (
    Case("long_full", seq_len=600, head_dim=64, heads=1, kv_heads=1, key_bias=True),
    Case("long_causal", seq_len=330, mask=CAUSAL, head_dim=64, heads=3, kv_heads=1),
    Case("long_documents", seq_len=400, mask={"causal": True, "documents": (0, 3, 200, 331, 400)}, head_dim=128),
    Case("long_256_v_192", seq_len=270, mask=CAUSAL, head_dim=256, v_head_dim=192, heads=2, kv_heads=1),
    Case(
        "long_192_v_128", seq_len=330, mask=CAUSAL, head_dim=192, v_head_dim=128, heads=4, kv_heads=2, accumulate=True
    ),
    Case("long_192", seq_len=270, mask={"window": (150, 9)}, head_dim=184, v_head_dim=192, heads=1, kv_heads=1),
    Case("long_96", seq_len=270, mask=CAUSAL, head_dim=96, v_head_dim=88, heads=2, kv_heads=1),
    Case(
        "long_zigzag", seq_len=800, q_runs=((100, 1, 100), (600, 1, 100)),
        ring_steps=(((100, 1, 100), (600, 1, 100)), ((0, 2, 50), (701, 1, 99))), mask=CAUSAL, head_dim=64, heads=2,
        kv_heads=1, accumulate=True,
    ),
    Case(
        "long_everything", seq_len=300, batch=2,
        mask={"causal": True, "window": (170, None), "lengths": ((0, 300), (37, 253))}, head_dim=192, v_head_dim=128,
        softcap=3.0, alibi=True, key_bias=True, sinks=True, accumulate=True,
    ),
)  # fmt: skip
"""Long enough for blocks without a mask, several tiles per program and tiles that are split."""


class WideKernels(HopperKernels):
    """Both halves of the wide backward, at any head_dim, behind a forward that needs no emulator."""

    def __init__(self, call: CallShape, *, dq: DqConfig | None = None, dkv: WideDkvConfig | None = None) -> None:
        super().__init__(call)
        self.bound.dq = dq or self.bound.dq
        self.bound.dkv[False] = dkv or choose_dkv(max(call.head_dim, 129), call.v_head_dim, False, 3)

    def forward(self, step: Step) -> None:
        EagerKernels(self.call).forward(step)

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        return eager_delta(o, do, dlse, out)

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        launch_dkv(self.bound, step, grads)
        launch_dq(self.bound, step, grads)


@pytest.mark.emulated
@pytest.mark.parametrize("case", [*SERVED, *LONG], ids=str)
def test_rows_and_wide_keys_stay_within_budget(case: Case):
    run_case(WideKernels, case, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [x for x in SMALL_WEIGHT_CASES if x.bias is None and x.dropout_p == 0], ids=str)
def test_small_weights_keep_their_digits(case: Case, dtype: torch.dtype):
    run_case(WideKernels, case, dtype, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("case", LONG, ids=str)
def test_switches_and_float16_stay_within_budget(case: Case):
    run_case(partial(WideKernels, dq=NARROW, dkv=WideDkvConfig()), case, torch.float16, "cpu")


@pytest.mark.parametrize(
    ("case", "mode"),
    [(LONG[1], {"eager": True}), (LONG[1], {"seed": 0}), (LONG[-1], {"seed": 1, "eager": True})],
    ids=str,
)
def test_no_order_of_events_changes_what_is_computed(case: Case, mode: dict[str, Any]):
    with machine.mode(**mode):
        run_case(partial(WideKernels, dq=NARROW), case, torch.bfloat16, "cpu")


def test_neither_an_order_of_events_nor_a_late_dq_changes_a_bit():
    n, heads, d = 600, 1, 64
    visible = visible_pairs(n, n)
    rows, keys = (make_side(((0, 1, n),), x, "cpu") for x in (visible, visible.transpose(1, 2)))
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, n, heads, d, generator=generator).bfloat16() for _ in range(4))
    score = Score(
        0.125,
        softcap=5.0,
        alibi_slopes=torch.rand(heads, generator=generator),
        key_bias=torch.randn(1, n, generator=generator),
    )
    o, lse = torch.empty_like(q), torch.empty(1, heads, n)
    call = CallShape.of(q, k, v, score)
    EagerKernels(call).forward(Step(q, k, v, rows, keys, score, o, lse))
    step = BackwardStep(do, q, k, v, lse, eager_delta(o, do, None), rows, keys, score)
    shape = Shape(1, heads, 128, NARROW.block, 3, 4 * n * d)
    assert schedule_tiles(rows, keys, shape).slots, "the case splits tiles of queries"
    of_keys = shape._replace(tile=64, block=64, align=4)
    assert schedule_tiles(keys, rows, of_keys).slots, "the case splits tiles of keys"
    found = []
    for changes, dq_config in (({}, NARROW), ({"seed": 4, "eager": True}, replace(NARROW, late=True))):
        dq, dk, dv = (torch.full(x.shape, float("nan")) for x in (q, k, v))
        grads = Grads(
            dq, dk, dv, dkey_bias=torch.full((1, n), float("nan")), dalibi=torch.full((1, heads, n), float("nan"))
        )
        with machine.mode(**changes):
            WideKernels(call, dq=dq_config).backward(step, grads)
        found.append([grads.dq, grads.dk, grads.dv, grads.dkey_bias, grads.dalibi])
    for others in found[1:]:
        for x, y in zip(found[0], others, strict=True):
            assert torch.equal(x, y)


def test_gradients_reach_narrow_targets():
    n, heads, d = 140, 2, 128
    visible = visible_pairs(n, n, causal=True)
    rows, keys = (make_side(((0, 1, n),), x, "cpu") for x in (visible, visible.transpose(1, 2)))
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, n, heads, d, generator=generator).bfloat16() for _ in range(4))
    o, lse = torch.empty_like(q), torch.empty(1, heads, n)
    score = Score(d**-0.5)
    call = CallShape.of(q, k, v, score)
    EagerKernels(call).forward(Step(q, k, v, rows, keys, score, o, lse))
    step = BackwardStep(do, q, k, v, lse, eager_delta(o, do, None), rows, keys, score)

    def unwritten(dtype: torch.dtype) -> torch.Tensor:
        return torch.full((1, n, heads, d), float("nan"), dtype=dtype)

    wide, narrow = (
        Grads(dq=unwritten(dtype), dk=unwritten(dtype), dv=unwritten(dtype)) for dtype in (torch.float32, q.dtype)
    )
    for grads in (wide, narrow):
        WideKernels(call).backward(step, grads)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(wide, name).bfloat16(), getattr(narrow, name)), name


def test_programs_that_keep_pace_compute_the_same_and_each_ends_every_epoch_once(monkeypatch: pytest.MonkeyPatch):
    boards = keep_pace_always(monkeypatch, launcher)
    run_case(WideKernels, LONG[0], torch.bfloat16, "cpu")
    assert len(boards) == 2, "both kernels keep pace"
    for board, programs in boards:
        assert board.tolist() == [programs] * len(board)
