"""The Hopper decode of few rows, emulated: exact on all shapes, free of races in every order of events, and the same bits."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("GLUON_EMULATOR") != "1":
    pytest.skip("the kernels must not be imported before the emulator is there", allow_module_level=True)

from ringattn.kernels.decode import paged_hopper
from tests.kernels.emulator import gluon as machine
from tests.support.decoding import HOPPER_PAGES, Case, are_same, assert_exact, empty_parts, make_scene


def run(case: Case, dtype: torch.dtype, **mode: Any) -> torch.Tensor:
    scene = make_scene(case, dtype)
    parts = empty_parts(scene, case.splits)
    with machine.mode(**mode):
        paged_hopper.decode(scene.call(), parts)
    assert_exact(scene, parts)
    return parts


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("case", HOPPER_PAGES, ids=str)
def test_the_kernel_stays_within_budget(case: Case, fp8: bool) -> None:
    run(replace(case, fp8=fp8), torch.bfloat16)


def test_float16_stays_within_budget() -> None:
    run(HOPPER_PAGES[2], torch.float16)


def test_no_order_of_events_changes_a_bit() -> None:
    first, *others = (
        run(HOPPER_PAGES[1], torch.bfloat16, **mode)
        for mode in ({}, {"eager": True}, {"seed": 0}, {"seed": 1, "eager": True})
    )
    assert all(are_same(first, other) for other in others)


def test_a_pool_that_the_copy_engine_cannot_address_is_refused() -> None:
    scene = make_scene(HOPPER_PAGES[0], torch.bfloat16)
    assert scene.k_scale is not None
    wide = torch.zeros(*scene.k.shape[:3], 65, dtype=scene.k.dtype)
    apart = torch.zeros(*scene.k_scale.shape[:2], 128)[..., ::2]
    for name, changed in (("k", {"k": wide[..., :64]}), ("v_scale", {"v_scale": apart})):
        with pytest.raises(ValueError, match=rf'^{name} must have .* multiples of 16 bytes.*use impl="portable"'):
            paged_hopper.decode(replace(scene, **changed).call(), empty_parts(scene, 3))
