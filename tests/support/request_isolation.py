"""Requests beside one whose tensors are not finite: they get, to the bit, what they get beside a healthy one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringattn.inference import PagedKVCache, attend, latent_attend
from ringattn.kernels.interface import CallShape, KernelSet, Score, Step, accumulation_dtype
from ringattn.kernels.kv.pages import contain
from ringattn.numerics.reference import visible_pairs
from tests.support.kernel_conformance import make_side

SPOILT = ("q", "k", "v")
BAD = (math.nan, math.inf, -math.inf)


def spoil(x: Tensor, rows: slice, bad: float) -> Tensor:
    """The tensor `b s h d` with one bad number in each head of some rows."""
    x = x.clone()
    x[:, rows, :, 1] = bad
    return x


def assert_kernels_isolate(
    kernels: Callable[[CallShape], KernelSet],
    lengths: Sequence[int],
    spoilt: str,
    bad: float,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
) -> None:
    """A packed causal forward of requests of which the second is not finite, given what a cache gives.

    Args:
        kernels: What computes.
        lengths: Tokens of the requests.
        spoilt: Which tensor: "q", "k" or "v".
        bad: What stands in it.
        dtype: Of the tensors.
        device: Where.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Of all.
    """
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    n, second = edges[-1], slice(edges[1], edges[2])
    visible = visible_pairs(n, n, causal=True, documents=tuple(edges))
    rows, keys = (make_side(((0, 1, n),), x, device) for x in (visible, visible.transpose(1, 2)))
    generator = torch.Generator().manual_seed(n)
    healthy = {
        name: torch.randn(1, n, count, head_dim, generator=generator).to(device, dtype)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    found = []
    for given in (healthy, healthy | {spoilt: spoil(healthy[spoilt], second, bad)}):
        k, v = contain(given["k"], given["v"])
        o = torch.full_like(given["q"], math.nan)
        lse = torch.full((1, heads, n), math.nan, dtype=accumulation_dtype(dtype), device=device)
        score = Score(head_dim**-0.5)
        bound = kernels(CallShape.of(given["q"], k, v, score))
        bound.forward(Step(given["q"], k, v, rows, keys, score, o, lse))
        found.append((o, lse))
    (o, lse), (other, other_lse) = found
    for i, (a, b) in enumerate(pairwise(edges)):
        if i == 1:
            assert bad == bad or other[:, a:b].isnan().all(), "who sees NaN is NaN"
            assert spoilt != "v" or other[:, a:b].isnan().all(), "who sees values that are not finite is NaN"
        else:
            assert torch.equal(o[:, a:b], other[:, a:b]), f"o of request {i}"
            assert torch.equal(lse[:, :, a:b], other_lse[:, :, a:b]), f"lse of request {i}"


def attend_beside(
    cache: PagedKVCache, heads: int, chunks: Sequence[Sequence[int]], spoilt: str | None, bad: float, **options: Any
) -> list[Tensor]:
    """What this rank's rows of the healthy requests get, step by step.

    Args:
        cache: An empty one.
        heads: Query heads.
        chunks: For each step how many tokens each request brings.
        spoilt: Which tensor of the second request is not finite; None: none.
        bad: What stands in it.
        options: Of `attend`.
    """
    requests = [cache.add_request(sum(counts)) for counts in zip(*chunks, strict=True)]
    generator = torch.Generator().manual_seed(0)
    found = []
    for counts in chunks:
        step = cache.extend(requests, counts)
        decodes = step.mode == "decode"
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        x: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {
            "k": (cache.kv_heads, cache.head_dim),
            "v": (cache.kv_heads, cache.v_head_dim),
        }
        if cache.latent is not None:
            shapes = {"latents": cache.latent[:1], "rotary_keys": cache.latent[1:]}
        for name, shape in {"q": (heads, cache.head_dim), **shapes}.items():
            y = torch.randn(len(owner), *shape, generator=generator)
            if name == spoilt:
                y[owner == 1, ..., 1] = bad
            y = y.unflatten(0, (len(counts), -1)) if decodes else y[None]
            x[name] = step.take(y.to(cache.device, cache.dtype))
        run: Any = attend
        if cache.latent is not None:
            r, dr = cache.latent
            # q has r + dr columns, too: as many weights of keys as columns of latents
            draw = torch.Generator().manual_seed(1)
            x["k_up"], x["v_up"] = (torch.randn(heads, dim, r, generator=draw) for dim in (r, dr))
            run = latent_attend
        o = run(step, 0, **x, **({} if decodes else options))
        if decodes:
            mine, second = torch.arange(len(counts)) != 1, o[1]
            found.append(o[mine.to(o.device)])
        else:
            other = owner[step.taken.cpu()] == 1
            found.append(o[0, ~other.to(o.device)])
            second = o[0, other.to(o.device)]
        assert spoilt is None or bad == bad or second.isnan().all(), "who sees NaN is NaN"
    return found
