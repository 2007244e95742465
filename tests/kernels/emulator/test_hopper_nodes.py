"""One Hopper launch per node step of two nodes: partials in fp32, guests of which a rank sees nothing, and none at all."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("GLUON_EMULATOR") != "1":
    pytest.skip("the kernels must not be imported before the emulator is there", allow_module_level=True)

from ringattn.kernels.attention.eager import EagerKernels, _region
from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.interface import Arrivals, BackwardStep, Grads, Returns, Step
from ringattn.simulate import simulate_ring
from tests.kernels.emulator import gluon as machine


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        pytest.param("zigzag", {"causal": True}, id="zigzag", marks=pytest.mark.slow),
        pytest.param("contiguous", {"causal": True, "window": 9}, id="halo"),
    ],
)
def test_launches_of_all_node_steps_are_attention(
    monkeypatch: pytest.MonkeyPatch, layout: str, mask: dict[str, Any]
) -> None:
    launches: list[str] = []

    def forward_fused(self: EagerKernels, step: Step, arrivals: Arrivals) -> None:
        launches.append("forward_fused")
        HopperKernels(self.call).forward_fused(step, arrivals)

    def backward_fused(
        self: EagerKernels, step: BackwardStep, arrivals: Arrivals, returns: Returns, grads: Grads
    ) -> None:
        launches.append("backward_fused")
        k, v, homes = step.k, step.v, returns.grad_buffers
        shape = (k.shape[0], returns.rows, k.shape[2], k.shape[3] + v.shape[3])
        with machine.mode(mapped=tuple(_region(homes, i, shape) for i in range(len(homes)))):
            HopperKernels(self.call).backward_fused(step, arrivals, returns, grads)

    monkeypatch.setattr(EagerKernels, "forward_fused", forward_fused)
    monkeypatch.setattr(EagerKernels, "backward_fused", backward_fused)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 57, h, 16, generator=generator).bfloat16() for h in (2, 1, 1, 2))
    options = {"layout": layout, "deterministic": True, **mask}
    found = simulate_ring(q, k, v, 4, nodes=2, memory_budget=2**40, do=do, **options)
    assert launches.count("forward_fused") == launches.count("backward_fused") > 4
    exact = simulate_ring(q.double(), k.double(), v.double(), 4, nodes=2, do=do.double(), **options)
    assert found.grads is not None
    assert exact.grads is not None
    pairs = {"o": (found.o, exact.o), "lse": (found.lse, exact.lse)}
    for name, (x, y) in (pairs | {f"d{name}": (found.grads[name], exact.grads[name]) for name in "qkv"}).items():
        assert x.isfinite().all()
        worst = (x.double() - y).abs().max() / y.abs().max()
        assert worst < 2**-7, f"{name} is off by {worst:.2e}"
