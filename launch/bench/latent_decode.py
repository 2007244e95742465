"""The group "latent" of `bench kernels`: decode over latents.

It has the rows of DeepSeek V3, 512 + 64 columns, in pages of 64. `gbps` are the bytes of the visible rows,
scales of fp8 among them, and `share` is their part of the bandwidth that the same run measures; TFLOP/s count 2 heads
(576 + 512) per row and request. A call goes over as many layers as make LATENT_BYTES, so that no cache helps; `ms` is one layer,
`merged_ms` with the merge of its partials.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.decode.dispatch import (
    FP8,
    DecodeCall,
    PageTable,
    decode,
    num_splits,
    parts_len,
    plan_splits,
    select_decode_kernel,
)
from ringattn.kernels.interface import Score
from ringattn.kernels.kv.pages import dequantise, quantise
from ringattn.kernels.partials.packed import finish_parts
from ringattn.launch.bench.workloads import teraflops
from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import Timing, time_calls
from ringattn.numerics.error_budget import Budget

LATENT, ROTARY, PAGE = 512, 64, 64
LATENT_BYTES = {"cuda": 2**29, "cpu": 1}
LATENT_SIZES = {"cuda": ((16, 32, 128), (1, 8), (32768, 131072)), "cpu": ((4,), (2,), (300,))}
"""Heads, requests, and tokens of each."""
CHECKED = 16
"""Heads of a request that are held to fp64."""
DECODERS = ("auto", "hopper", "portable", "eager")


def latent_rows(
    session: Session, who: Sequence[str], rounds: int, timing: Timing, seconds: float, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Yield a row per dtype of pages, size and kernel: time, bytes and FLOP per second of decode, or the reason against it.

    Args:
        session: The device.
        who: Names of decode kernels; others are passed over.
        rounds: See `time_calls`; also timing and seconds.
        bandwidth: Of memory, 10^9 bytes per second.
    """
    heads, batches, lengths = LATENT_SIZES[session.device.type]
    cases = [(dtype, b, n) for dtype in (torch.bfloat16, FP8) for b in batches for n in lengths]
    for dtype, b, n in cases:
        blocks, size = -(-n // PAGE), b * n * (LATENT + ROTARY + 2) * dtype.itemsize
        layers = max(1, -(-LATENT_BYTES[session.device.type] // size))
        pools = [_latent_pool(session.device, b * blocks, dtype, seed) for seed in range(layers)]
        for h in heads:
            call = _latent_call(session.device, b, n, h)
            calls = [call._replace(k=k, v=k[..., :LATENT], k_scale=x, v_scale=x) for k, x in pools]
            row: dict[str, Any] = {
                "group": "latent", "part": "latent", "ours": True, "batch": b, "seq_len": n, "heads": h,
            }  # fmt: skip
            row |= {"pages": str(dtype).removeprefix("torch."), "layers": layers}
            for impl in who:
                if impl in DECODERS:
                    found = _measure_latents(calls, impl, session, rounds, timing, seconds)
                    if "ms" in found:
                        data = b * n * ((LATENT + ROTARY) * dtype.itemsize + (4 if dtype == FP8 else 0))
                        gbps = data / found["ms"] / 1e6
                        flops = 2.0 * b * n * h * (2 * LATENT + ROTARY)
                        found |= {"gbps": gbps, "share": gbps / bandwidth, "tflops": teraflops(flops, found["ms"])}
                    yield row | {"who": impl} | found
        del pools


def _latent_pool(device: torch.device, pages: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (pages, 1, PAGE, LATENT + ROTARY)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
    if dtype != FP8:
        return x, None
    pool, scale = torch.empty(shape, device=device, dtype=dtype), torch.empty(shape[:3], device=device)
    for part, rows, sizes in zip(x.split(1024), pool.split(1024), scale.split(1024), strict=True):
        stored, found = quantise(part)
        rows.copy_(stored)
        sizes.copy_(found)
    return pool, scale


def _latent_call(device: torch.device, b: int, n: int, h: int) -> DecodeCall:
    """Return a call of one token per request, whose pages lie in random order, without its pool."""
    generator = torch.Generator(device).manual_seed(h)
    q = torch.randn(b, 1, h, LATENT + ROTARY, device=device, dtype=torch.bfloat16, generator=generator)
    blocks = -(-n // PAGE)
    whole = functools.partial(torch.full, (b, 1), dtype=torch.int32, device=device)
    starts = torch.arange(blocks, dtype=torch.int32, device=device) * PAGE
    table = PageTable(
        torch.randperm(b * blocks, device=device, generator=generator).view(b, blocks).int(),
        starts.expand(b, -1).contiguous(),
        (n - starts).clamp(max=PAGE).expand(b, -1).contiguous(),
        whole(blocks).flatten(),
    )
    return DecodeCall(q, q, q, table, whole(0), whole(n), whole(n - 1), Score((128 + ROTARY) ** -0.5))


def _measure_latents(
    calls: Sequence[DecodeCall], impl: str, session: Session, rounds: int, timing: Timing, seconds: float
) -> dict[str, Any]:
    q, k = calls[0].q, calls[0].k
    b, s, h, d = q.shape
    try:
        kernel = select_decode_kernel(q.device, q.dtype, k.dtype, d, LATENT, PAGE, impl=impl, latent=True)
    except NotImplementedError as error:
        return {"refused": str(error)}
    blocks = calls[0].table.pages.shape[1]
    splits = num_splits(b, s, h, 1, blocks, PAGE, q.device, head_dim=d, kv_dtype=k.dtype, same_length=True, latent=True)
    parts = torch.full((splits, parts_len(b * h, LATENT)), float("nan"), device=q.device)
    o, lse = q.new_empty(b, s, h, LATENT), parts.new_empty(b, h, s)
    plan = plan_splits(calls[0], splits, impl=impl)

    def attend(merge: bool) -> None:
        for call in calls:
            decode(call, parts, split_plan=plan, impl=impl)
            if merge:
                finish_parts(parts, b * h, LATENT, None, o, lse)

    attend(True)
    row = {"kernels": kernel.name, "splits": splits, "ratio": max(_latent_ratio(calls[-1], i, o) for i in {0, b - 1})}
    if not row["ratio"] <= 1:
        return row | {"refused": f"wrong answer: o {row['ratio']:.3g} x its budget"}
    both = {"ms": functools.partial(attend, False), "merged_ms": functools.partial(attend, True)}
    times = time_calls(both, session, rounds, timing, seconds)
    refused = next((time.refused for time in times.values() if time.refused is not None), None)
    if refused is not None:
        return row | {"refused": refused}
    return row | {name: time.best_ms / len(calls) for name, time in times.items()}


def _latent_ratio(call: DecodeCall, i: int, o: Tensor) -> float:
    """Return the part of the error budget that the output of a request uses up, in CHECKED heads at most."""
    pages = call.table.pages[i].long()
    # bytes, because not every device can pick rows of fp8
    rows = call.k.view(torch.uint8)[pages].view(call.k.dtype)
    if call.k_scale is not None:
        rows = dequantise(rows, call.k_scale[pages], torch.float32)
    rows = rows.flatten(0, 2)[: int(call.hi[i])]
    heads = slice(None, None, -(-o.shape[2] // CHECKED))

    def attention_in(dtype: torch.dtype) -> Tensor:
        x = rows.to(dtype)
        return torch.softmax(call.q[i, 0, heads].to(dtype) @ x.T * call.score.softmax_scale, -1) @ x[:, :LATENT]

    exact = attention_in(torch.float64)
    return Budget.of(exact, attention_in(call.q.dtype)).ratio(o[i, 0, heads], exact)
