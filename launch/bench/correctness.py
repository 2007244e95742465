"""Checks of every bench: whether an answer is right, before its speed is printed.

Each compares with an answer that shares no code with the implementation under test: the definition in fp64, plain torch over a
rank's own pages, or a model in one process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import ringattn
from ringattn.inference import ForwardBatch
from ringattn.kernels.interface import accumulation_dtype
from ringattn.launch.bench.inference_model import (
    PAGE_SIZE,
    Decoder,
    draw_tokens,
    fill_by_prompt,
    make_cache,
    pages_for,
    use_attention,
)
from ringattn.launch.bench.workloads import Inputs, Problem, resolve_layouts, visible_rows
from ringattn.launch.check.attention import DTYPES, Case, CheckArgs, check, show
from ringattn.launch.check.inference import History, InferenceCase, Sizes, budget_dtypes, examine_history, parse_ops
from ringattn.launch.common.ring_variants import ScheduleName, display_name
from ringattn.launch.common.session import Session
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.reference import dense_attention
from ringattn.sizing.shapes import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TENSORS = ("o", "dq", "dk", "dv")
CHUNK_ELEMENTS = {"cuda": 2**26, "cpu": 2**16}
"""Scores that the definition holds at a time."""


def check_rings(
    problems: Sequence[Problem],
    layouts: Sequence[str],
    session: Session,
    impl: str,
    schedules: Sequence[ScheduleName] = ("auto",),
    virtual_sizes: Sequence[int] = (),
) -> bool:
    """Return whether rings are right in the same dtypes, heads, masks, layouts and schedules at a short length.

    Those of virtual ranks also in both of their schedules, to the bit.

    Prints the table of errors if they are not.
    """
    n = 1021 if session.device.type == "cuda" else 67
    cases: dict[tuple[object, ...], Case] = {}
    for problem in problems:
        cases[problem.mask, problem.kv_heads, problem.head_dim, problem.dtype] = Case(
            problem.mask,
            problem.dtype,
            n,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            v_head_dim=problem.head_dims[1],
            mask=dataclasses.replace(problem, seq_len=n, window=n // 4).options,
            documents=(0, n // 7, n // 3, n) if problem.documents else None,
            layouts=resolve_layouts(layouts, problem, session.world_size),
        )
    all_green = True
    flags = [CheckArgs(impl=impl, schedule=one) for one in schedules]
    for one in (*flags, *(CheckArgs(impl=impl, virtual_size=size) for size in virtual_sizes)):
        verdict = check(session, list(cases.values()), one)
        name = "" if one.schedule == "auto" else f" {display_name(one.schedule, session)}"
        name += f" of {one.virtual_size} virtual ranks" if one.virtual_size else ""
        session.say(f"check{name}: {verdict.summary} inside the error budget")
        green = bool(verdict.rows) and not verdict.red and not verdict.skipped
        if not green and session.rank == 0:
            show(verdict)
        all_green &= green
    return all_green


def disagreement(found: list[Tensor], ours: list[Tensor], dtype: str, session: Session) -> str | None:
    """Return why another answer differs from ours beyond rounding, the same on every rank; None if it does not.

    The root mean square of the difference over that of ours may be four epsilons of the dtype, and at least the cost of the
    order of sums in fp32. That finds wrong masks, orders and signs at lengths that the definition cannot afford.
    """
    distances = [
        float((x.float() - y.float()).norm()) / max(float(y.float().norm()), 1e-30) if x.shape == y.shape else math.inf
        for x, y in zip(found, ours, strict=True)
    ]
    allowed = max(4 * torch.finfo(DTYPES[dtype]).eps, 1e-5)
    worst = session.maximum(distances)
    wrong = [f"{name} by {100 * far:.3g}%" for name, far in zip(TENSORS, worst, strict=True) if not far <= allowed]
    return f"wrong answer: differs from ours in {', '.join(wrong)}" if wrong else None


def step_difference(found: Sequence[float], expected: Sequence[float], dtype: str) -> str:
    """Return how loss and gradient norm of a training step differ from those of another implementation; empty where they agree."""
    # two roundings of bf16 in the loss of one token average out over thousands of them
    allowed = 1e-3 if dtype == "bf16" else 1e-5
    for name, bound, here, there in zip(("loss", "grad_norm"), (allowed, 10 * allowed), found, expected, strict=True):
        if not abs(here - there) <= bound * abs(there):
            return f"wrong answer: {name} {here:.6g}, expected {there:.6g}"
    return ""


@dataclass(frozen=True)
class Expected:
    """Exact answer of a problem in one group of heads of the last batch element, with the error budget.

    Attributes:
        heads: Its query heads.
        kv_heads: The key/value head that they share.
        tensors: o, dq, dk and dv of these heads.
    """

    heads: slice
    kv_heads: slice
    tensors: dict[str, tuple[Tensor, Budget]]

    def ratio(self, name: str, x: Tensor) -> float:
        """Return the part of its budget that a tensor `b s h d` uses up; infinity where any element is not finite."""
        exact, budget = self.tensors[name]
        head = self.heads if name in ("o", "dq") else self.kv_heads
        return budget.ratio(x[-1:, :, head], exact) if bool(x.isfinite().all()) else math.inf


def make_expected(inputs: Inputs) -> Expected:
    """Compute the definition of a problem at its own length, some rows at a time, in fp64 and in the dtype under test.

    Only the last key/value head of the last batch element and its query heads: wrong strides show there, and more is not
    affordable at 100K tokens.
    """
    problem = inputs.problem
    heads, kv_heads = slice(-(problem.heads // problem.kv_heads), None), slice(-1, None)
    q, k, v, do = inputs.take("bshd")
    tensors = [x.detach()[-1:, :, head] for x, head in ((q, heads), (do, heads), (k, kv_heads), (v, kv_heads))]
    low, scaled = budget_dtypes(problem.dtype)
    exact, rounded = (_define(inputs, tensors, dtype) for dtype in (torch.float64, low))
    return Expected(heads, kv_heads, {name: (x, Budget.of(x, rounded[name], scaled)) for name, x in exact.items()})


def _define(inputs: Inputs, tensors: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    q, do, *keys = tensors
    problem, n = inputs.problem, inputs.problem.seq_len
    chunk = max(1, CHUNK_ELEMENTS.get(inputs.device.type, 2**16) // (n * q.shape[2]))
    k, v = (x.to(dtype, copy=True).requires_grad_() for x in keys)
    positions = torch.arange(n, device=inputs.device)
    outputs, dq = [], []
    sums = [torch.zeros(x.shape, dtype=accumulation_dtype(dtype), device=x.device) for x in (k, v)]
    for start in range(0, n, chunk):
        rows = slice(start, min(n, start + chunk))
        some = q[:, rows].to(dtype, copy=True).requires_grad_()
        visible = visible_rows(problem, rows.start, rows.stop, inputs.device)
        o, _ = dense_attention(some, k, v, visible, q_positions=positions[rows], k_positions=positions)
        outputs.append(o.detach())
        found = torch.autograd.grad(o, [some, k, v], do[:, rows].to(dtype))
        dq.append(found[0])
        for total, part in zip(sums, found[1:], strict=True):
            total += part
    dk, dv = (total.to(dtype) for total in sums)
    return {"o": torch.cat(outputs, 1), "dq": torch.cat(dq, 1), "dk": dk, "dv": dv}


def check_attention(shape: ModelShape, dtype: str, ring: ringattn.Ring, session: Session) -> dict[str, float]:
    """Return the part of the error budget that a prompt in chunks and single tokens use up, on the worst rank.

    A short sequence of the same heads and dtype, against the definition in fp64.
    """
    n, few = (1021 if session.device.type == "cuda" else 203), 3
    prompt = n - few
    chunks = f"extend 0:{prompt // 3} prefill; extend 0:{prompt - 100 - prompt // 3} prefill; extend 0:100 prefill"
    ops = parse_ops(f"add_request 0 {n} 0; {chunks}" + "; extend 0:1 decode" * few)
    dims = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim
    sizes = Sizes(*dims, PAGE_SIZE, pages_for(1, n, ring.world_size), layers=1, dtype=DTYPES[dtype])
    case = InferenceCase("a prompt and tokens", dtype, History(sizes, ops))
    return examine_history(case, "auto", ring, session).ratios


def check_model(
    shape: ModelShape,
    dtype: torch.dtype,
    model: PreTrainedModel,
    ring: ringattn.Ring,
    session: Session,
    *,
    shard: bool = False,
) -> str:
    """Return why the model over the cache is wrong, on any rank; empty when it is right.

    Compares logits of a short prompt in chunks, and of tokens after it, with the model in one process with sdpa. Roundings of
    whole models have no budget: allowed is twice the difference of transformers' own eager attention, and a rounding.

    With `shard` the model has whole weights, which are sharded over the ring before it computes over the cache. On GPUs the prompt
    then has more rows than are computed with slices, and fewer: layers are gathered too.
    """
    from ringattn.integrations.transformers import shard_weights

    device, few = session.device, 16 if shard else 3
    prompt, chunk = (2560, 2048) if shard and device.type == "cuda" else (512, 200)
    n = prompt + few
    tokens = draw_tokens(n, shape.vocab_size, device, seed=1)
    expected = []
    for implementation in ("sdpa", "eager"):
        with use_attention(model, implementation):
            logits = model(input_ids=tokens[None], use_cache=False, logits_to_keep=few + 1).logits[0]
            expected.append(logits[:-1].float())
    weights = session.gather([float(parameter.double().sum()) for parameter in list(model.parameters())[:3]])
    if any(one != weights[0] for one in weights):
        return f"ranks must have the same weights, got sums {weights}"
    if shard:
        shard_weights(model, ring)
    cache = make_cache(ring, shape, pages_for(1, n, ring.world_size), dtype, device)
    request = cache.add_request(reserve=n)
    found = [fill_by_prompt(model, cache, request, tokens[:prompt], chunk)]
    decoder = Decoder(model, cache, [request])
    for token in tokens[prompt : n - 1]:
        decoder.tokens.fill_(token)
        decoder.next_tokens()
        found.append(decoder.logits)
    ours = torch.cat(found).float()
    scale = float(expected[0].square().mean().sqrt())
    apart, accepted = (float((x - expected[0]).square().mean().sqrt()) / scale for x in (ours, expected[1]))
    allowed = 2 * accepted + torch.finfo(dtype).eps
    worst = session.maximum([apart])[0]
    same = int((ours.argmax(-1) == expected[0].argmax(-1)).sum())
    session.say(
        f"check: logits differ from sdpa's by {worst:.2g} of their size, allowed are {allowed:.2g}; {same} of {few} greedy tokens "
        "are equal"
    )
    if not worst <= allowed:
        return f"logits must be those of sdpa within {allowed:.2g} of their size, got {worst:.2g}"
    return ""


def check_decoded(step: ForwardBatch, layer: int, q: Tensor, o: Tensor, session: Session) -> float:
    """Return how far decoding over a large cache is off, relative to its size: root mean squares.

    Compares the first and the last request with plain torch in fp32 over each rank's own pages, merged across ranks.

    `step` has one token per request, whose keys are in the cache; q and o, the output of `attend`, are `b 1 h d`.
    """
    worst = 0.0
    for i in {0, step.batch - 1}:
        parts = session.gather(tuple(x.cpu() for x in _torch_partial(step, layer, q[i, 0], i)))
        m, total, acc = (torch.stack(x) for x in zip(*parts, strict=True))
        weights = torch.exp(m - m.amax(0))
        wanted = (weights[..., None] * acc).sum(0) / (weights * total).sum(0)[:, None]
        apart = (o[i, 0].float().cpu() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        worst = max(worst, float(apart))
    return session.maximum([worst])[0]


def _torch_partial(step: ForwardBatch, layer: int, q: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """M `h` (natural log), l `h` and acc `h dv` of a request's keys on this rank, some pages at a time."""
    cache, table = step.cache, step.table
    assert table is not None, "a decode step has a table"
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
    """Return pages, one after another: `hk t d` fp32."""
    # bytes, because not every device can pick rows of fp8
    bits = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
    x = bits[pages.long()].view(pool.dtype).float()
    x = x if scale is None else x * scale[pages.long()].unsqueeze(-1)
    return x.transpose(0, 1).flatten(1, 2)
