from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.kernels.contract import Grads, Score
from ringattn.reference import visible_pairs
from tests.emulator import gluon as machine
from tests.kernel_conformance import CASES, Case, make_side, run_case

pytest.importorskip("triton")
hopper = pytest.importorskip("ringattn.kernels.hopper.api")

CAUSAL: dict[str, Any] = {"causal": True}
SERVED = [case for case in CASES if case.bias is None and case.dropout_p == 0]
MODES = [{"eager": True}, {"seed": 0}, {"seed": 1, "eager": True}]

FIXED_CASES = ("hidden_rows", "per_batch_gqa", "many_runs", "padded_ring", "empty_keys", "empty_queries_accumulate")

LARGE = [  # several tiles and blocks, and edges inside them
    Case("many_tiles", seq_len=520, mask=CAUSAL, head_dim=128, heads=1, kv_heads=1),
    Case("full_tiles", seq_len=384, head_dim=128, heads=1, kv_heads=1),
    Case("odd_tiles_64", seq_len=413, mask=CAUSAL, head_dim=64, heads=2, kv_heads=1),
    Case("window", seq_len=500, mask={"causal": True, "window": (150, None)}, head_dim=64, heads=1, kv_heads=1),
    Case("packed", seq_len=460, mask={"causal": True, "documents": (0, 100, 356, 357, 460)}, head_dim=128, heads=1, kv_heads=1),
    Case("dim_96", seq_len=270, mask=CAUSAL, head_dim=96, heads=1, kv_heads=1),
    Case("dim_192_v_128", seq_len=270, mask=CAUSAL, head_dim=192, v_head_dim=128, heads=1, kv_heads=1),
    Case("dim_256", seq_len=270, mask=CAUSAL, head_dim=256, heads=1, kv_heads=1),
    Case("packed_group", seq_len=130, mask=CAUSAL, head_dim=64, heads=8, kv_heads=1, batch=2),
    Case(
        "zigzag_carries",
        seq_len=560,
        q_runs=((0, 1, 140), (420, 1, 140)),
        visits=(((0, 1, 140), (420, 1, 140)), ((140, 1, 280),)),
        mask=CAUSAL,
        head_dim=128,
        heads=2,
        kv_heads=1,
        accumulate=True,
    ),
    Case(
        "every_score",
        seq_len=300,
        q_runs=((0, 2, 150),),
        visits=(((0, 2, 150),), ((1, 2, 150),)),
        mask={"causal": True, "lengths": ((0, 300), (20, 250))},
        batch=2,
        heads=2,
        kv_heads=1,
        head_dim=64,
        softcap=3.0,
        sinks=True,
        alibi=True,
        key_bias=True,
        heads_first=True,
    ),
]  # fmt: skip


def in_fixed_order() -> Any:
    """The kernel set, asked for the same bits every time."""

    def backward(*args: Any) -> None:
        *others, grads = args
        hopper.backward(*others, replace(grads, deterministic=True))

    return types.SimpleNamespace(forward=hopper.forward, delta=hopper.delta, backward=backward)


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forward_and_backward_stay_within_budget(case: Case):
    run_case(hopper, case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_many_tiles_stay_within_budget(case: Case):
    run_case(hopper, case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("case", [*LARGE, *(case for case in SERVED if case.name in FIXED_CASES)], ids=str)
def test_the_backward_of_fixed_order_stays_within_budget(case: Case):
    run_case(in_fixed_order(), case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("case", [LARGE[2], LARGE[-2]], ids=str)
def test_float16_stays_within_budget(case: Case):
    run_case(hopper, case, torch.float16, "cpu")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [LARGE[2], LARGE[-1]], ids=str)
def test_no_order_of_events_changes_what_is_computed(case: Case, mode: dict[str, Any]):
    with machine.mode(**mode):
        run_case(hopper, case, torch.bfloat16, "cpu")


def test_no_order_of_events_changes_a_bit_in_fixed_order():
    n, heads = 300, 2
    visible = visible_pairs(n, n, causal=True)
    rows, keys = (make_side(((0, 1, n),), x, "cpu") for x in (visible, visible.transpose(1, 2)))
    generator = torch.Generator().manual_seed(0)
    q, do = torch.randn(2, 1, n, 2 * heads, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, 1, n, heads, 64, generator=generator).bfloat16()
    score = Score(
        0.125, alibi_slopes=torch.rand(2 * heads, generator=generator), key_bias=torch.randn(1, n, generator=generator)
    )
    found = []
    for changes in ({}, *MODES):
        o, lse = torch.full_like(q, float("nan")), torch.full((1, 2 * heads, n), float("nan"))
        grads = Grads(
            *(torch.full(x.shape, float("nan")) for x in (q, k, v)),
            dkey_bias=torch.full((1, n), float("nan")),
            dalibi=torch.full((1, 2 * heads, n), float("nan")),
            deterministic=True,
        )
        with machine.mode(**changes):
            hopper.forward(q, k, v, rows, keys, score, carry=None, first=True, last=True, o=o, lse=lse)
            hopper.backward(do, q, k, v, lse, hopper.delta(o, do, None), rows, keys, score, grads)
        found.append((o, lse, grads.dq, grads.dk, grads.dv, grads.dkey_bias, grads.dalibi))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)
            assert not a.isnan().any()
