from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("GLUON_EMULATOR") != "1":
    pytest.skip("the kernels must not be imported before the emulator is there", allow_module_level=True)

from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, Score, Step
from ringattn.numerics.reference import visible_pairs
from ringattn.schedule.validation import SOFTCAPS
from tests.kernels.emulator import gluon as machine
from tests.support.kernel_conformance import (
    CASES,
    LONG_CASES,
    LONG_TERM_CASES,
    SMALL_WEIGHT_CASES,
    TERM_CASES,
    Case,
    make_side,
    run_case,
)

SERVED = [case for case in CASES if case.bias is None and case.dropout_p == 0]
LONG = (
    *LONG_CASES,
    Case("long_causal_96", seq_len=270, mask={"causal": True}, head_dim=96, heads=1, kv_heads=1),
    Case("long_group", seq_len=130, mask={"causal": True}, head_dim=64, heads=8, kv_heads=1, batch=2, accumulate=True),
)
FIXED = {
    "hidden_rows", "per_batch_gqa", "many_runs", "padded_ring", "empty_keys", "empty_queries_accumulate", "long_full",
    "long_causal_96", "long_causal_128", "long_v_wider", "long_window_both_sides", "long_documents", "long_lengths",
    "long_striped", "long_group", "long_not_plain", "long_negative_scale", "long_hidden_rows", "few_rows_many_keys_not_plain",
}  # fmt: skip
IN_FIXED_ORDER = [replace(case, deterministic=True) for case in (*LONG, *SERVED) if case.name in FIXED]
"""Beyond a head_dim of 128 the order is always fixed, so that these cases are not among them."""
OF_TERMS = [case for case in (*TERM_CASES, *LONG_TERM_CASES) if case.bias is None]
EAGER, SHUFFLED, BOTH = {"eager": True}, {"seed": 0}, {"seed": 1, "eager": True}
UNORDERED = [("long_zigzag", EAGER), ("long_zigzag", SHUFFLED), ("long_not_plain", BOTH), ("long_lengths", BOTH)]


def named(name: str) -> Case:
    return next(case for case in LONG if case.name == name)


@pytest.mark.emulated
@pytest.mark.parametrize("case", [*SERVED, *LONG], ids=str)
def test_forward_and_backward_stay_within_budget(case: Case):
    run_case(HopperKernels, case, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("case", IN_FIXED_ORDER, ids=str)
def test_the_backward_of_fixed_order_stays_within_budget(case: Case):
    run_case(HopperKernels, case, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("case", OF_TERMS, ids=str)
def test_masks_of_several_terms_stay_within_budget(case: Case):
    run_case(HopperKernels, case, torch.bfloat16, "cpu")
    run_case(HopperKernels, replace(case, deterministic=True), torch.bfloat16, "cpu")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [x for x in SMALL_WEIGHT_CASES if x.bias is None and x.dropout_p == 0], ids=str)
def test_small_weights_keep_their_digits_in_float16(case: Case, deterministic: bool):
    run_case(HopperKernels, replace(case, deterministic=deterministic), torch.float16, "cpu")


@pytest.mark.parametrize("name", ["long_zigzag", "few_rows_many_keys_not_plain"])
def test_float16_stays_within_budget(name: str):
    run_case(HopperKernels, named(name), torch.float16, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_the_widest_softcap_stays_within_budget(head_dim: int, dtype: torch.dtype):
    case = Case("widest_softcap", seq_len=70, mask={"causal": True}, softcap=SOFTCAPS[dtype], head_dim=head_dim)
    run_case(HopperKernels, case, dtype, "cpu")
    run_case(HopperKernels, replace(case, deterministic=True), dtype, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize(("name", "mode"), UNORDERED, ids=str)
def test_no_order_of_events_changes_what_is_computed(name: str, mode: dict[str, Any]):
    with machine.mode(**mode):
        run_case(HopperKernels, named(name), torch.bfloat16, "cpu")


def test_no_order_of_events_changes_a_bit_in_fixed_order():
    n, heads = 300, 1
    visible = visible_pairs(n, n, causal=True)
    rows, keys = (make_side(((0, 1, n),), x, "cpu") for x in (visible, visible.transpose(1, 2)))
    generator = torch.Generator().manual_seed(0)
    q, do = torch.randn(2, 1, n, 2 * heads, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, 1, n, heads, 64, generator=generator).bfloat16()
    slopes, bias = torch.rand(2 * heads, generator=generator), torch.randn(1, n, generator=generator)
    score = Score(0.125, alibi_slopes=slopes, key_bias=bias)
    found = []
    for changes in ({}, SHUFFLED, BOTH):
        o, lse = torch.full_like(q, float("nan")), torch.full((1, 2 * heads, n), float("nan"))
        grads = Grads(
            *(torch.full(x.shape, float("nan")) for x in (q, k, v)),
            dkey_bias=torch.full((1, n), float("nan")),
            dalibi=torch.full((1, 2 * heads, n), float("nan")),
        )
        with machine.mode(**changes):
            kernels = HopperKernels(CallShape.of(q, k, v, score, deterministic=True))
            kernels.forward(Step(q, k, v, rows, keys, score, o, lse))
            kernels.backward(BackwardStep(do, q, k, v, lse, kernels.delta(o, do, None), rows, keys, score), grads)
        found.append((o, lse, grads.dq, grads.dk, grads.dv, grads.dkey_bias, grads.dalibi))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)
            assert not a.isnan().any()
