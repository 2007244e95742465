"""The Hopper decode of latents, emulated: exact on all shapes, free of races in every order of events, and the same bits."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("GLUON_EMULATOR") != "1":
    pytest.skip("the kernels must not be imported before the emulator is there", allow_module_level=True)

from ringattn.kernels.decode import latent_hopper
from ringattn.kernels.decode.dispatch import FP8
from tests.kernels.emulator import gluon as machine
from tests.support.decoding import HOPPER_LATENTS, Case, are_same, assert_exact, empty_parts, finish, make_scene

EAGER, SHUFFLED, BOTH = {"eager": True}, {"seed": 0}, {"seed": 1, "eager": True}


SMALL = HOPPER_LATENTS[0]


def run(case: Case, dtype: torch.dtype, **mode: Any) -> torch.Tensor:
    scene = make_scene(case, dtype)
    parts = empty_parts(scene, case.splits)
    with machine.mode(**mode):
        latent_hopper.decode(scene.call(), parts)
    assert_exact(scene, parts)
    return parts


@pytest.mark.emulated
@pytest.mark.parametrize("case", HOPPER_LATENTS, ids=str)
def test_the_kernel_stays_within_budget(case: Case) -> None:
    run(case, torch.bfloat16)


@pytest.mark.parametrize("case", [SMALL, HOPPER_LATENTS[2]], ids=str)
def test_float16_stays_within_budget(case: Case) -> None:
    run(case, torch.float16)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HOPPER_LATENTS, ids=str)
def test_fp8_pages_stay_within_budget(case: Case, dtype: torch.dtype) -> None:
    run(replace(case, fp8=True), dtype)


@pytest.mark.parametrize("fp8", [False, True])
def test_no_order_of_events_changes_a_bit(fp8: bool) -> None:
    case = replace(HOPPER_LATENTS[1], fp8=fp8)
    first, *others = (run(case, torch.bfloat16, **mode) for mode in ({}, EAGER, SHUFFLED, BOTH))
    assert all(are_same(first, other) for other in others)


def test_a_plan_made_before_gives_the_same_bits() -> None:
    scene = make_scene(SMALL, torch.bfloat16)
    parts = empty_parts(scene, 3)
    latent_hopper.decode(scene.call(), parts, split_plan=latent_hopper.plan_splits(scene.call(), 3))
    assert are_same(parts, run(SMALL, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_fp8_number_keeps_its_value(dtype: torch.dtype) -> None:
    scene = make_scene(replace(SMALL, lengths=(256,), mine=1.0, ragged=0.0, fp8=True, heads=1), dtype)
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = numbers[~numbers.float().isnan()]
    # a row of one key that is seen alone: its values are the result
    for first in range(0, 254, 127):
        row = torch.cat([finite[first : first + 127], finite[:33]])
        page, start, _ = scene.blocks[0][0]
        scene.k[page, 0, 0] = row
        assert scene.k_scale is not None
        scene.k_scale[page, 0, 0] = 1.0
        scene = replace(
            scene, lo=torch.full_like(scene.lo, start), hi=torch.full_like(scene.hi, start + 1), q=scene.q * 0
        )
        parts = empty_parts(scene, 3)
        latent_hopper.decode(scene.call(), parts)
        assert torch.equal(finish(scene, parts)[0].flatten(), row[:128].float())


def test_q_beyond_fp16_gives_the_same_bits_under_fp8_pages() -> None:
    scene = make_scene(replace(SMALL, fp8=True), torch.bfloat16)
    right, parts = empty_parts(scene, 3), empty_parts(scene, 3)
    latent_hopper.decode(scene.call(), right)
    call = scene.call()
    score = replace(call.score, softmax_scale=call.score.softmax_scale * 2.0**-40)
    latent_hopper.decode(call._replace(q=call.q * 2.0**40, score=score), parts)
    assert are_same(parts, right)


def test_a_row_of_fp8_that_is_not_finite_is_nan_for_rows_that_see_it_and_no_others() -> None:
    scene = make_scene(replace(SMALL, lengths=(70,), tokens=3, mine=1.0, ragged=0.0, fp8=True), torch.bfloat16)
    right = empty_parts(scene, 3)
    latent_hopper.decode(scene.call(), right)
    page, start, length = scene.blocks[0][-1]
    assert start + length == 70
    scene.k[page, 0, length - 2] = torch.tensor([0.0] * 128 + [torch.nan] * 32).to(FP8)
    parts = empty_parts(scene, 3)
    latent_hopper.decode(scene.call(), parts)
    (o, _), (expected, _) = finish(scene, parts), finish(scene, right)
    assert torch.equal(o[0, :1], expected[0, :1])
    assert bool(o[0, 1:].isnan().all())


def test_scales_that_the_copy_engine_cannot_read_as_a_list_are_refused() -> None:
    scene = make_scene(replace(SMALL, fp8=True), torch.bfloat16)
    assert scene.k_scale is not None
    scales = torch.zeros(*scene.k_scale.shape[:2], 2 * scene.k_scale.shape[2])[..., ::2]
    scene = replace(scene, k_scale=scales, v_scale=scales)
    with pytest.raises(ValueError, match=r"k_scale must have .* scales must be contiguous, .*use impl=\"portable\""):
        latent_hopper.decode(scene.call(), empty_parts(scene, 3))


def test_a_pool_that_the_copy_engine_cannot_address_is_refused() -> None:
    scene = make_scene(SMALL, torch.bfloat16)
    wide = torch.zeros(*scene.k.shape[:3], 161, dtype=scene.k.dtype)
    scene = replace(scene, k=wide[..., :160], v=wide[..., :128])
    with pytest.raises(ValueError, match=r"k must have .* multiples of 16 bytes"):
        latent_hopper.decode(scene.call(), empty_parts(scene, 3))
