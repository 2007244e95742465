from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from ringattn.kernels import eager
from ringattn.kernels.contract import KernelSet
from ringattn.kernels.hopper.backward_configs import BackwardConfig
from tests.kernel_conformance import CASES, Case, run_case

launch: Any = pytest.importorskip("ringattn.kernels.hopper.backward_launch")


CAUSAL: dict[str, Any] = {"causal": True}
LONG: tuple[Case, ...] = (
    Case("long_full", seq_len=260, kv_len=384, head_dim=64),
    Case("long_causal", seq_len=400, mask=CAUSAL, head_dim=64),
    Case("long_wide", seq_len=300, mask=CAUSAL, heads=4, kv_heads=2, head_dim=128),
    Case("long_128_v_64", seq_len=290, kv_len=256, head_dim=128, v_head_dim=64),
    Case("long_64_v_128", seq_len=290, kv_len=256, head_dim=64, v_head_dim=128),
    Case("long_window", seq_len=500, mask={"causal": True, "window": (200, None)}, head_dim=128, batch=2),
    Case(
        "long_zigzag",
        seq_len=800,
        q_runs=((130, 1, 270), (401, 2, 190)),
        visits=(((0, 1, 130), (400, 1, 130)), ((130, 1, 140), (600, 1, 200))),
        mask=CAUSAL,
        heads=4,
        kv_heads=1,
        head_dim=64,
        accumulate=True,
    ),
    Case(
        "long_everything",
        seq_len=300,
        kv_len=256,
        batch=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        v_head_dim=40,
        softcap=3.0,
        softmax_scale=0.3,
        alibi=True,
        key_bias=True,
        sinks=True,
    ),
    Case(
        "long_everything_wide",
        seq_len=330,
        mask=CAUSAL,
        head_dim=128,
        v_head_dim=96,
        softcap=3.0,
        alibi=True,
        key_bias=True,
        accumulate=True,
    ),
)
"""Long enough for blocks without a mask, several tiles per program and tiles that are split."""


def served(case: Case) -> bool:
    wide = max(case.head_dim, case.v_head_dim or 0) > 128
    return not (wide or case.dropout_p or case.bias)


def kernels(config: BackwardConfig | None = None) -> KernelSet:
    """The backward of this room behind a forward that needs no emulator."""

    def backward(*args: Any) -> None:
        launch.launch_backward(*args, config=config)

    return cast(KernelSet, SimpleNamespace(forward=eager.forward, delta=launch.launch_delta, backward=backward))


@pytest.mark.parametrize("case", [case for case in (*CASES, *LONG) if served(case)], ids=str)
def test_backward_stays_within_budget(case: Case):
    run_case(kernels(), case, torch.bfloat16, "cpu")
