"""Whether inference over a sharded cache is right on this machine: before anything is timed, and at the size that is.

Owns the checks of `bench inference`, each against something that shares no code with what it judges. Refuses to know clocks and
rows.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import ringattn
from ringattn.inference import ForwardBatch, attend
from ringattn.launch.bench.inference_model import (
    Decoder,
    Shape,
    attending,
    draw_tokens,
    fill_by_prompt,
    make_cache,
    pages_for,
)
from ringattn.launch.runtime.session import Session
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.reference import attention_reference

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_attention(shape: Shape, dtype: torch.dtype, ring: ringattn.Ring, session: Session) -> dict[str, float]:
    """How much of the error budget prompts in chunks and tokens one by one use up, on the worst rank.

    A short sequence of the same heads and dtype, against the definition in fp64.
    """
    device = session.device
    n, few = (1021, 3) if device.type == "cuda" else (203, 3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, shape.head_dim, generator=generator).to(device, dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    cache = make_cache(ring, shape, pages_for(1, n, ring.world_size), dtype, device)
    request = cache.add_request(reserve=n)
    exact = attention_reference(*(x.double() for x in (q, k, v)), causal=True)
    low = attention_reference(q, k, v, causal=True)
    prompt, found = n - few, {}
    cuts = [0, prompt // 3, prompt - 100, *range(prompt, n + 1)]
    for start, stop in itertools.pairwise(cuts):
        mode = "decode" if start >= prompt else "prefill"
        step = cache.extend([request], [stop - start], mode=mode)
        q_, k_, v_, wanted, accepted = (step.take(x[:, start:stop]) for x in (q, k, v, exact, low))
        rows = found.setdefault("tokens one by one" if mode == "decode" else "a prompt in chunks", [])
        rows.append((attend(step, 0, q_, k_, v_), wanted, accepted))
    ratios = []
    for rows in found.values():
        o, wanted, accepted = (torch.cat(x, 1) for x in zip(*rows, strict=True))
        ratios.append(Budget.of(wanted, accepted, dtype).ratio(o, wanted) if o.numel() else 0.0)
    return dict(zip(found, session.maximum(ratios), strict=True))


def check_model(shape: Shape, dtype: torch.dtype, model: PreTrainedModel, ring: ringattn.Ring, session: Session) -> str:
    """Why the model over the cache is wrong, on any rank; empty when it is right.

    Logits of a short prompt in chunks, and of tokens after it, against the model in one process with sdpa. Roundings of whole
    models have no budget; what is allowed is twice what transformers' own eager attention differs by, and a rounding.
    """
    device, n, few = session.device, 515, 3
    tokens = draw_tokens(n, shape.vocab_size, device, seed=1)
    expected = []
    for implementation in ("sdpa", "eager"):
        with attending(model, implementation):
            logits = model(input_ids=tokens[None], use_cache=False, logits_to_keep=few + 1).logits[0]
            expected.append(logits[:-1].float())
    cache = make_cache(ring, shape, pages_for(1, n, ring.world_size), dtype, device)
    request = cache.add_request(reserve=n)
    prompt = n - few
    found = [fill_by_prompt(model, cache, request, tokens[:prompt], 200)]
    decoder = Decoder(model, cache, [request])
    for token in tokens[prompt : n - 1]:
        decoder.tokens.fill_(token)
        decoder.next_tokens()
        found.append(decoder.logits)
    ours = torch.cat(found).float()
    scale = float(expected[0].square().mean().sqrt())
    apart, accepted = (float((x - expected[0]).square().mean().sqrt()) / scale for x in (ours, expected[1]))
    allowed = 2 * accepted + torch.finfo(dtype).eps
    weights = [float(parameter.double().sum()) for parameter in list(model.parameters())[:3]]
    said = session.gather(weights)
    if any(one != said[0] for one in said):
        return f"ranks must have the same weights, got sums {said}"
    worst = session.maximum([apart])[0]
    session.say(f"check: logits differ from sdpa's by {worst:.2g} of their size, allowed are {allowed:.2g}")
    if not worst <= allowed:
        return f"logits must be those of sdpa within {allowed:.2g} of their size, got {worst:.2g}"
    return ""


def check_decoded(step: ForwardBatch, layer: int, q: Tensor, o: Tensor, session: Session) -> float:
    """How far the answer of a decoding step over a large cache is off, relative to its size: root mean squares.

    The first and the last request against plain torch in fp32 over each rank's own pages, merged by what every rank says.

    Args:
        step: Of one token per request; its keys are in the cache.
        layer: Which.
        q: `b 1 h d`.
        o: `b 1 h dv`: what `attend` gave.
        session: The ranks.
    """
    worst = 0.0
    for i in {0, step.batch - 1}:
        said = session.gather(tuple(x.cpu() for x in _plain_partial(step, layer, q[i, 0], i)))
        m, total, acc = (torch.stack(x) for x in zip(*said, strict=True))
        weights = torch.exp(m - m.amax(0))
        wanted = (weights[..., None] * acc).sum(0) / (weights * total).sum(0)[:, None]
        apart = (o[i, 0].float().cpu() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        worst = max(worst, float(apart))
    return session.maximum([worst])[0]


def _plain_partial(step: ForwardBatch, layer: int, q: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """M `h` (natural log), l `h` and acc `h dv` of a request's keys on this rank, some pages at a time."""
    cache, table = step.cache, step.table
    assert table is not None, "a step of decoding has a table"
    grouped = q.float().unflatten(0, (cache.kv_heads, -1))  # hk g d
    m = torch.full(grouped.shape[:2], -math.inf, device=q.device)
    total, acc = torch.zeros_like(m), torch.zeros(*m.shape, cache.v_head_dim, device=q.device)
    count = int(table.counts[i])
    for pages, lengths in zip(table.pages[i, :count].split(1024), table.lengths[i, :count].split(1024), strict=True):
        k, v = (
            _rows_of(pool[layer], scale, pages)
            for pool, scale in zip((cache.k, cache.v), cache.scales(layer), strict=True)
        )
        inside = (torch.arange(cache.page_size, device=q.device) < lengths[:, None]).flatten()
        scores = (grouped @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~inside, -math.inf)  # hk g t
        top = torch.maximum(m, scores.amax(-1))
        p, scale = torch.exp(scores - top[..., None]), torch.exp(m - top)
        m, total = top, total * scale + p.sum(-1)
        acc = acc * scale[..., None] + p @ v.masked_fill(~inside[:, None], 0.0)
    return m.flatten(), total.flatten(), acc.flatten(0, 1)


def _rows_of(pool: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """`hk t d` fp32 of pages, one after another."""
    # bytes, because not every device can pick rows of fp8
    bits = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
    x = bits[pages.long()].view(pool.dtype).float()
    x = x if scale is None else x * scale[pages.long()].unsqueeze(-1)
    return x.transpose(0, 1).flatten(1, 2)
