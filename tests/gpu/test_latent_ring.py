"""Latent attention on GPUs: its schedules against fp64, ranks against the simulated ring."""

from __future__ import annotations

import pytest
import torch

import ringattn.schedule.latents
from ringattn import masks
from tests.support.pool import Pools
from tests.support.ring_calls import Standard, attend, simulate
from tests.transport.test_latent_ring import LatentAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = {
    "V2-Lite": LatentAttention(1000, None, 1, 4, 4, 192, 128, dtype=torch.bfloat16, mask={"causal": True}),
    "fp16": LatentAttention(777, None, 2, 2, 2, 192, 128, dtype=torch.float16, mask={"causal": True, "window": (300, 0)}),
    "narrow": LatentAttention(
        500, None, 1, 4, 2, 96, 64, dtype=torch.bfloat16, features=("sinks", "alibi_slopes", "key_bias")
    ),
    "sinks": LatentAttention(
        900, None, 1, 2, 2, 192, 128, dtype=torch.bfloat16,
        mask={"mask": masks.causal() & (masks.sinks(4) | masks.window(200))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("expand", ["reader", "owner"])
@pytest.mark.parametrize("name", CASES)
def test_latents_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch, name: str, expand: str) -> None:
    monkeypatch.setattr(ringattn.schedule.latents.Latents, "rows_at_once", lambda _: 256)
    standard = Standard(CASES[name])
    for world_size in (1, 3):
        found = simulate(CASES[name], "zigzag", world_size, device="cuda", expand=expand)
        standard.check({what: x.cpu() for what, x in found.items()})


@pytest.mark.parametrize("expand", ["auto", "reader"])
def test_ranks_equal_the_simulated_ring(pool: Pools, expand: str) -> None:
    case = CASES["V2-Lite"]
    standard = Standard(case)
    for found in pool(2, 120).run(attend, case, "zigzag", {"expand": expand}, "cuda"):
        standard.check({what: x.cpu() for what, x in found.items()})
