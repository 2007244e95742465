"""Random calls on a rank, on the simulated ring and by definition: whole outputs, and gradients by the name of their tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring
from tests.support.budget import assert_within_budget
from tests.support.random_calls import Attention

ROW_DIMS = {"q": 1, "k": 1, "v": 1, "latents": 1, "rotary_keys": 1, "key_bias": 1, "bias": 2}


def attend(
    case: Attention, layout: str, given: dict[str, Any] | None = None, device: str = "cpu", **of_ring: Any
) -> dict[str, Tensor]:
    """One process: shards the whole tensors and attends; gradients of replicated tensors are summed over processes."""
    ring = Ring(**of_ring)
    sharding = ring.sharding(case.seq_len, layout, case.documents)
    keys = sharding if case.kv_len is None else ring.sharding(case.kv_len, layout)
    sides = {"q": sharding, "bias": sharding}
    whole = {name: x.to(device) for name, x in case.tensors().items()}
    leaves = {
        name: (sides.get(name, keys).shard(x, ROW_DIMS[name]) if name in ROW_DIMS else x)
        .detach()
        .clone()
        .requires_grad_()
        for name, x in whole.items()
    }
    kv_sharding = None if keys is sharding else keys
    o, lse = case.on_ring(leaves, sharding, kv_sharding=kv_sharding, **case.mask, **case.options, **(given or {}))
    do, dlse = (x.to(device) for x in case.cotangents())
    grads = torch.autograd.grad((o, lse), list(leaves.values()), (sharding.shard(do, 1), sharding.shard(dlse, 2)))
    found = {"o": sharding.unshard(o.detach(), 1), "lse": sharding.unshard(lse.detach(), 2)}
    for name, grad in zip(leaves, grads, strict=True):
        if name in ROW_DIMS:
            grad = sides.get(name, keys).unshard(grad, ROW_DIMS[name])
        elif ring.world_size > 1:
            parts = [torch.empty_like(grad) for _ in range(ring.world_size)]
            dist.all_gather(parts, grad.contiguous())
            grad = torch.stack(parts).sum(0)
        found["d" + name] = grad
    return found


def simulate(case: Attention, layout: str, world_size: int, device: str = "cpu", **given: Any) -> dict[str, Tensor]:
    """The simulated ring."""
    do, dlse = (x.to(device) for x in case.cotangents())
    options = {**case.mask, **case.options, "layout": layout, "documents": case.documents, **given}
    tensors = {name: x.to(device) for name, x in case.tensors().items()}
    result = case.on_simulated_ring(tensors, world_size=world_size, do=do, dlse=dlse, **options)
    assert result.grads is not None
    return {"o": result.o, "lse": result.lse} | {"d" + name: grad for name, grad in result.grads.items()}


def define(case: Attention, dtype: torch.dtype) -> dict[str, Tensor]:
    """The definition in the given dtype, by plain autograd."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in case.tensors().items()}
    o, lse = case.reference(leaves, documents=case.documents, **case.mask, **case.options)
    do, dlse = case.cotangents()
    grads = torch.autograd.grad((o, lse), list(leaves.values()), (do.to(o.dtype), dlse.to(lse.dtype)))
    return {"o": o.detach(), "lse": lse.detach()} | {"d" + name: g for name, g in zip(leaves, grads, strict=True)}


class Standard:
    """What a case should give, and how far a result may be from it."""

    def __init__(self, case: Attention) -> None:
        self.case = case
        self.exact = define(case, torch.float64)
        self.low = define(case, min(case.dtype, torch.float32, key=lambda d: d.itemsize))

    def check(self, found: dict[str, Tensor]) -> None:
        assert found.keys() == self.exact.keys()
        for name, exact in self.exact.items():
            # a slope multiplies distances of up to n, and so its gradient a rounding of a score's: it is judged in units of n
            unit = self.case.seq_len if name == "dalibi_slopes" else 1
            mine, low = found[name] / unit, self.low[name] / unit
            assert_within_budget(mine, exact / unit, low, f"{name} of {self.case}", self.case.dtype)


def assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, rtol=0, atol=0, equal_nan=True, msg=f"{key}, {what}")
