"""One GPU, one process: short calls replayed as CUDA graphs give the bits of enqueued ones, and no call waits for the device.

python -m pytest -m gpu tests/gpu/test_local.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, ring_attention_with_lse
from ringattn.transport.base import Transport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": (300, 0)},
        {"softcap": 20.0, "deterministic": True},
        {"causal": True, "sinks": True, "alibi_slopes": True},
    ],
    ids=str,
)
def test_replayed_calls_give_the_bits_of_enqueued_ones(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"deterministic": True, **options}
    for name in ("sinks", "alibi_slopes"):
        if options.get(name):
            options[name] = torch.rand(8, device="cuda").requires_grad_(name == "sinks")
    ring = Ring()
    sharding = ring.sharding(1500)
    q, do = (torch.randn(1, 1500, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 1500, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> list[Tensor]:
        o, lse = ring_attention_with_lse(q, k, v, sharding, **options)
        wanted = [q, k, v, *([options["sinks"]] if "sinks" in options else [])]
        return [o.detach().clone(), lse.detach().clone(), *torch.autograd.grad(o, wanted, do)]

    with monkeypatch.context() as patch:
        patch.setattr(type(ring.context.transport), "replay_or_enqueue", Transport.replay_or_enqueue)
        expected = step()
    for values in range(8):
        found = step()
        assert all(map(torch.equal, found, expected)), f"call {values}"
        del found
    assert ring.context.transport.graph_launches >= 2
    # the same addresses with other values
    with torch.no_grad():
        q.neg_()
    found = step()
    with monkeypatch.context() as patch:
        patch.setattr(type(ring.context.transport), "replay_or_enqueue", Transport.replay_or_enqueue)
        expected = step()
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], torch.zeros_like(found[0]))


def test_calls_on_two_streams_do_not_disturb_each_other() -> None:
    ring = Ring()
    sharding = ring.sharding(1024)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [[torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in streams]
    expected = [ring_attention_with_lse(q, k, v, sharding, causal=True)[0] for q, k, v in inputs]
    torch.cuda.synchronize()
    for _ in range(12):
        found = []
        for stream, (q, k, v) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream), torch.no_grad():
                found.append(ring_attention_with_lse(q, k, v, sharding, causal=True)[0])
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("budget", [0, 2**40], ids=["stepwise", "fused"])
def test_a_process_of_several_ranks_does_not_wait_for_its_launches(budget: int) -> None:
    sharding = Ring(virtual_size=4, memory_budget=budget).sharding(2048)
    q, k, v, do = (torch.randn(1, 2048, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> list[Tensor]:
        o, _ = ring_attention_with_lse(q, k, v, sharding, causal=True)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, found, expected))
