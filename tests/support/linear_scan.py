"""Comparison of a scan of one rank's rows with the plain torch one: its map of the state, its outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringattn.integrations.linear.local_scan import LocalScan, scan_rows
from ringattn.integrations.linear.segments import chain_of
from ringattn.plan.layouts import make_shards
from ringattn.plan.sharding import Sharding

CASES: list[tuple[int, str, int, int, tuple[int, ...] | None]] = [
    (100, "contiguous", 1, 0, None),
    (150, "contiguous", 2, 1, None),
    (131, "zigzag", 2, 0, None),
    (131, "zigzag", 2, 1, None),
    (140, "zigzag", 2, 0, (0, 20, 21, 110, 140)),
    (140, "contiguous", 2, 1, (0, 70, 100, 140)),
]
"""Length, layout, ranks, rank and documents."""

Scan = Callable[..., LocalScan]


def scan_errors(
    scan: Scan,
    case: tuple[int, str, int, int, tuple[int, ...] | None],
    gated: bool,
    device: str,
    dtype: torch.dtype,
    gradients: bool = True,
) -> dict[str, float]:
    """Relative root mean square errors of a scan against the plain torch one in fp64, by name."""
    n, layout, world_size, rank, documents = case
    sharding = Sharding(n, layout, make_shards(layout, n, world_size), rank, documents)
    chain, s = chain_of(sharding), sharding.shard_len
    b, key_heads, heads, d, e = 2, 2, 4, 16, 32
    random = torch.Generator().manual_seed(n)

    def rows(*shape: int) -> Tensor:
        return torch.randn(b, s, *shape, generator=random, dtype=torch.float64)

    inputs = {
        "q": rows(key_heads, d),
        "k": torch.nn.functional.normalize(rows(key_heads, d), dim=-1),
        "v": rows(heads, e),
        "g": -rows(heads).abs() / 16,
        **({"beta": rows(heads).sigmoid()} if gated else {}),
    }
    # both sides get the same numbers
    inputs = {name: x.to(torch.float32 if name == "g" else dtype) for name, x in inputs.items()}
    before = [torch.randn(b, heads, d, e, generator=random) for _ in chain.runs]
    cotangents = [torch.randn(b, heads, d, e, generator=random) for _ in chain.runs]
    do = torch.randn(b, s, heads, e, generator=random)

    def run(scan: Scan, whole: bool) -> dict[str, Tensor]:
        kept = {name: x.to(device, torch.float64 if whole else x.dtype) for name, x in inputs.items()}
        kept = {name: x.requires_grad_(gradients) for name, x in kept.items()}
        full = torch.float64 if whole else torch.float32
        local = scan(**{"beta": None, **kept}, chain=chain)
        o = local.finish([x.to(device, full) for x in before])
        found = {"o": o, "states": torch.stack(local.states), "decays": torch.stack(local.decays)}
        if not gradients:
            return {name: x.double().cpu() for name, x in found.items()}
        total = (o.to(full) * do.to(device, full)).sum()
        for state, decay, x in zip(local.states, local.decays, cotangents, strict=True):
            total = total + (state * x.to(device, full)).sum() + decay.sum()
        total.backward()
        for name, x in kept.items():
            assert x.grad is not None, "every input has a gradient"
            found[f"d{name}"] = x.grad
        return {name: x.detach().double().cpu() for name, x in found.items()}

    expected, found = run(scan_rows, True), run(scan, False)
    least = 1e-6  # decays of runs in which documents begin are zero
    return {
        name: float((found[name] - x).square().mean().sqrt() / x.square().mean().sqrt().clamp(min=least))
        for name, x in expected.items()
    }
