from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulator import gluon as machine
from tests.kernel_conformance import CASES, Case, run_case

pytest.importorskip("triton")
hopper = pytest.importorskip("ringattn.kernels.hopper.api")

CAUSAL: dict[str, Any] = {"causal": True}
SERVED = [case for case in CASES if case.bias is None and case.dropout_p == 0]
MODES = [{"eager": True}, {"seed": 0}, {"seed": 1, "eager": True}]

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


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forward_and_backward_stay_within_budget(case: Case):
    run_case(hopper, case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_many_tiles_stay_within_budget(case: Case):
    run_case(hopper, case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("case", [LARGE[2], LARGE[-2]], ids=str)
def test_float16_stays_within_budget(case: Case):
    run_case(hopper, case, torch.float16, "cpu")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [LARGE[2], LARGE[-1]], ids=str)
def test_no_order_of_events_changes_what_is_computed(case: Case, mode: dict[str, Any]):
    with machine.mode(**mode):
        run_case(hopper, case, torch.bfloat16, "cpu")
