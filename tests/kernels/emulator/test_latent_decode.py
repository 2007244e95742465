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
from tests.kernels.emulator import gluon as machine
from tests.support.decoding import HOPPER_LATENTS, Case, are_same, assert_exact, empty_parts, make_scene

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


def test_no_order_of_events_changes_a_bit() -> None:
    first, *others = (run(HOPPER_LATENTS[1], torch.bfloat16, **mode) for mode in ({}, EAGER, SHUFFLED, BOTH))
    assert all(are_same(first, other) for other in others)


def test_a_plan_made_before_gives_the_same_bits() -> None:
    scene = make_scene(SMALL, torch.bfloat16)
    parts = empty_parts(scene, 3)
    latent_hopper.decode(scene.call(), parts, split_plan=latent_hopper.plan_splits(scene.call(), 3))
    assert are_same(parts, run(SMALL, torch.bfloat16))


def test_a_pool_that_the_copy_engine_cannot_address_is_refused() -> None:
    scene = make_scene(SMALL, torch.bfloat16)
    wide = torch.zeros(*scene.k.shape[:3], 161, dtype=scene.k.dtype)
    scene = replace(scene, k=wide[..., :160], v=wide[..., :128])
    with pytest.raises(ValueError, match=r"k must have .* multiples of 16 bytes"):
        latent_hopper.decode(scene.call(), empty_parts(scene, 3))
