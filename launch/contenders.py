"""Who computes attention on one GPU, and how each is called: our kernel sets, and those of others.

Owns the calls, each in the memory layout its callee likes. Refuses to know clocks, and whether an answer is right
(`standard` says what it must be).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ringattn
from ringattn.kernels.contract import Carry, Grads, accumulation_dtype
from ringattn.kernels.select import pick
from ringattn.launch.problems import Problem, document_of, draw_inputs, visible_rows
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.reference import dense_attention
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.device_tables import AttentionTables

PEERS = ("cudnn", "fa2", "flex", "fa4")
CHUNK_ELEMENTS = {"cuda": 2**26, "cpu": 2**16}
"""Scores that the standard holds at a time."""


class Refused(Exception):
    """A contender cannot compute a problem here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a problem.

    Attributes:
        forward: The forward alone.
        backward: The backward alone, of a forward that was done once; None where there is none.
        answers: What the calls above compute, by name (o, dq, dk, dv), `b s h d`; for judging, not for timing.
        note: What served, where that was picked.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None
    answers: Callable[[], Iterator[tuple[str, Tensor]]]
    note: str = ""


class Inputs:
    """The tensors of a problem, drawn once and kept in each memory layout somebody likes.

    Attributes:
        problem: Whose.
        device: Where.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self._kept: dict[str, list[Tensor]] = {}

    def take(self, layout: str) -> list[Tensor]:
        """q, k, v and do as "bshd", "bhsd", or "thd" (batch elements one after the other)."""
        if layout not in self._kept:
            if layout == "bshd":
                self._kept[layout] = draw_inputs(self.problem, self.problem.seq_len, self.device)
            else:
                drawn = [x.detach() for x in self.take("bshd")]
                same = [x.transpose(1, 2).contiguous() if layout == "bhsd" else x.flatten(0, 1) for x in drawn]
                self._kept[layout] = [x.requires_grad_(index < 3) for index, x in enumerate(same)]
        return self._kept[layout]


def _differentiable(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    do: Tensor,
    read: Callable[[Tensor], Tensor],
    note: str = "",
) -> Contender:
    """A contender whose backward is autograd's."""
    o = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    def answers() -> Iterator[tuple[str, Tensor]]:
        yield "o", read(o.detach())
        for name, x in zip(("dq", "dk", "dv"), backward(), strict=True):
            yield name, read(x)

    return Contender(forward, backward, answers, note)


def _as_is(x: Tensor) -> Tensor:
    return x


def _heads_second(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _call(problem: Problem, ring: ringattn.Ring, impl: str) -> tuple[ringattn.Sharding, AttentionSpec]:
    sharding = ring.sharding(problem.seq_len, layout="contiguous", documents=problem.documents)
    text = serialize(sharding, softmax_scale=problem.head_dim**-0.5, impl=impl, **problem.options)
    return sharding, AttentionSpec.deserialize(text, 0)


def prepare_op(inputs: Inputs, ring: ringattn.Ring, impl: str) -> Contender:
    """Our public function on a ring of one."""
    problem = inputs.problem
    q, k, v, do = inputs.take("bshd")
    sharding, _ = _call(problem, ring, impl)
    choice = pick(inputs.device, q.dtype, problem.head_dim, problem.head_dim, impl=impl)

    def forward() -> Tensor:
        return ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options)

    return _differentiable(forward, (q, k, v), do, _as_is, choice.name)


def prepare_kernels(inputs: Inputs, ring: ringattn.Ring, impl: str) -> Contender:
    """Our kernel set as the ring calls it, on one visit: no autograd, no allocation; the backward makes delta."""
    problem = inputs.problem
    q, k, v, do = (x.detach() for x in inputs.take("bshd"))
    choice = pick(inputs.device, q.dtype, problem.head_dim, problem.head_dim, impl=impl)
    _, spec = _call(problem, ring, impl)
    tables, visit = AttentionTables(spec, inputs.device), spec.plan("keys").ranks[0].visits[0]
    assert visit is not None, "a ring of one visits itself"
    rows, keys = tables.stationary("keys"), tables.moving("keys", visit)
    score = spec.score(q.dtype, 0, ScoreTensors())
    o, (dq, dk, dv) = torch.empty_like(q), (torch.empty_like(x) for x in (q, k, v))
    b, s, h, _ = q.shape
    lse, delta = torch.empty(2, b, h, s, dtype=accumulation_dtype(q.dtype), device=q.device)

    def forward() -> None:
        choice.kernels.forward(q, k, v, rows, keys, score, carry=None, first=True, last=True, o=o, lse=lse)

    def backward() -> None:
        choice.kernels.backward(do, q, k, v, lse, delta, rows, keys, score, Grads(dq, dk, dv), o=o)

    def answers() -> Iterator[tuple[str, Tensor]]:
        forward()
        yield "o", o
        backward()
        yield from zip(("dq", "dk", "dv"), (dq, dk, dv), strict=True)

    return Contender(forward, backward, answers, choice.name)


def prepare_carried(inputs: Inputs, ring: ringattn.Ring, impl: str) -> Contender:
    """A visit in the middle of a ring: the same keys again, with the partial carried in and carried out.

    Visiting the same keys any number of times doubles, triples, ... both l and acc: acc / l stays the answer.
    """
    problem = inputs.problem
    q, k, v, _ = (x.detach() for x in inputs.take("bshd"))
    choice = pick(inputs.device, q.dtype, problem.head_dim, problem.head_dim, impl=impl)
    _, spec = _call(problem, ring, impl)
    tables, visit = AttentionTables(spec, inputs.device), spec.plan("keys").ranks[0].visits[0]
    assert visit is not None, "a ring of one visits itself"
    rows, keys = tables.stationary("keys"), tables.moving("keys", visit)
    score = spec.score(q.dtype, 0, ScoreTensors())
    b, s, h, d = q.shape
    wide = accumulation_dtype(q.dtype)
    m, l = (torch.empty(b, h, s, dtype=wide, device=q.device) for _ in range(2))  # noqa: E741
    carry = Carry(m, l, torch.empty(b, s, h, d, dtype=wide, device=q.device))
    # written by a last visit only
    o, lse = torch.empty_like(q), torch.empty_like(m)

    def visit_again(first: bool = False) -> None:
        choice.kernels.forward(q, k, v, rows, keys, score, carry=carry, first=first, last=False, o=o, lse=lse)

    visit_again(first=True)

    def answers() -> Iterator[tuple[str, Tensor]]:
        visit_again()
        yield "o", (carry.acc / carry.l.transpose(1, 2)[..., None]).to(q.dtype)

    return Contender(visit_again, None, answers, choice.name)


def prepare_cudnn(inputs: Inputs) -> Contender:
    """What scaled_dot_product_attention does with cuDNN, b h s d."""
    from torch.nn.attention import SDPBackend

    if inputs.problem.mask in ("window", "documents"):
        raise Refused(f"no {inputs.problem.mask} mask in torch's interface to it")
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def prepare_fa2(inputs: Inputs) -> Contender:
    """FlashAttention-2 as torch ships it, b h s d; windows and documents through the operator underneath."""
    from torch.nn.attention import SDPBackend

    _gpu_only(inputs)
    problem = inputs.problem
    if problem.mask in ("full", "causal"):
        return _sdpa(inputs, SDPBackend.FLASH_ATTENTION)
    attention = torch.ops.aten._flash_attention_forward
    if problem.mask == "window":
        q, k, v, do = inputs.take("bshd")
        n = problem.seq_len
        windows: dict[str, Any] = {"window_size_left": problem.window, "window_size_right": 0}

        def forward() -> Tensor:
            # no cumulative lengths; no dropout, causal, no debug mask
            return attention(q, k, v, None, None, n, n, 0.0, True, False, **windows)[0]

        return _differentiable(forward, (q, k, v), do, _as_is)
    q, k, v, do = inputs.take("thd")
    cuts, longest = _cumulative(problem, inputs.device)
    return _differentiable(
        lambda: attention(q, k, v, cuts, cuts, longest, longest, 0.0, True, False)[0],
        (q, k, v),
        do,
        lambda x: x.unflatten(0, (problem.batch, problem.seq_len)),
    )


def _sdpa(inputs: Inputs, backend: Any) -> Contender:
    from torch.nn.attention import sdpa_kernel

    _gpu_only(inputs)
    problem = inputs.problem
    q, k, v, do = inputs.take("bhsd")

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            grouped = problem.heads != problem.kv_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.mask == "causal", enable_gqa=grouped)

    return _differentiable(forward, (q, k, v), do, _heads_second)


def prepare_flex(inputs: Inputs) -> Contender:
    """FlexAttention, compiled, with a block mask, b h s d."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _gpu_only(inputs)
    problem = inputs.problem
    q, k, v, do = inputs.take("bhsd")
    n, left, block_mask = problem.seq_len, problem.window, None
    owner = document_of(problem, inputs.device)
    rules = {
        "causal": lambda b, h, i, j: i >= j,  # noqa: ARG005
        "window": lambda b, h, i, j: (i >= j) & (i - j <= left),  # noqa: ARG005
        "documents": lambda b, h, i, j: (i >= j) & (owner[i] == owner[j]),  # noqa: ARG005
    }
    if problem.mask != "full":
        # uncompiled, it holds the whole mask pair by pair
        large = n > 32768
        block_mask = create_block_mask(rules[problem.mask], None, None, n, n, device=str(inputs.device), _compile=large)
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=problem.heads != problem.kv_heads)

    return _differentiable(forward, (q, k, v), do, _heads_second)


def prepare_fa4(inputs: Inputs) -> Contender:
    """FlashAttention-4 (CuTe), where it is installed, b s h d; documents as variable lengths."""
    _gpu_only(inputs)
    try:
        from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_func,
            flash_attn_varlen_func,
        )
    except ImportError as missing:
        raise Refused(f"flash_attn.cute cannot be imported: {missing}") from missing
    problem = inputs.problem
    if problem.mask == "documents":
        q, k, v, do = inputs.take("thd")
        cuts, longest = _cumulative(problem, inputs.device)
        bounds = {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return _differentiable(
            lambda: flash_attn_varlen_func(q, k, v, causal=True, **bounds)[0],
            (q, k, v),
            do,
            lambda x: x.unflatten(0, (problem.batch, problem.seq_len)),
        )
    q, k, v, do = inputs.take("bshd")
    mask: dict[str, Any] = {"causal": problem.mask != "full"}
    if problem.mask == "window":
        mask["window_size"] = (problem.window, 0)
    return _differentiable(lambda: flash_attn_func(q, k, v, **mask)[0], (q, k, v), do, _as_is)


def _gpu_only(inputs: Inputs) -> None:
    if inputs.device.type != "cuda":
        raise Refused("runs on GPUs only")


def _cumulative(problem: Problem, device: torch.device) -> tuple[Tensor, int]:
    """Boundaries of the documents of all batch elements one after the other, int32, and the longest document."""
    cuts = problem.documents
    assert cuts is not None, "a problem with documents"
    ends = [0] + [b * problem.seq_len + cut for b in range(problem.batch) for cut in cuts[1:]]
    longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    return torch.tensor(ends, dtype=torch.int32, device=device), longest


def prepare(who: str, level: str, inputs: Inputs, ring: ringattn.Ring) -> Contender:
    """The contender called `who`.

    Args:
        who: One of PEERS, "auto", or the name of one of our kernel sets.
        level: "op": a function with autograd; "kernel": our kernel set alone; "carried": our forward kernel in the
            middle of a ring.
        inputs: Of the problem.
        ring: A ring of one.

    Raises:
        Refused: It cannot compute the problem here.
        Exception: Whatever a peer raises.
    """
    peers = {"cudnn": prepare_cudnn, "fa2": prepare_fa2, "flex": prepare_flex, "fa4": prepare_fa4}
    if who in peers:
        return peers[who](inputs)
    try:
        return {"op": prepare_op, "kernel": prepare_kernels, "carried": prepare_carried}[level](inputs, ring, who)
    except (NotImplementedError, ValueError) as refusal:
        raise Refused(str(refusal)) from refusal


@dataclass(frozen=True)
class Standard:
    """What the answer of a problem must be, in one group of heads of the last batch element.

    Attributes:
        heads: First and one past the last query head.
        kv_head: The key/value head they share.
        tensors: o, dq, dk and dv of these heads: the fp64 answer and the error it may have.
    """

    heads: tuple[int, int]
    kv_head: int
    tensors: dict[str, tuple[Tensor, Budget]]

    def ratio(self, name: str, x: Tensor) -> float:
        """The part of its budget that a tensor `b s h d` uses up; infinite where anything at all is not finite."""
        if not bool(x.isfinite().all()):
            return math.inf
        exact, budget = self.tensors[name]
        head = slice(*self.heads) if name in ("o", "dq") else slice(self.kv_head, self.kv_head + 1)
        return budget.ratio(x[-1:, :, head], exact)


def make_standard(inputs: Inputs, backward: bool = True) -> Standard:
    """The definition of a problem at its own length, computed rows by rows in fp64 and in the dtype under test.

    The last key/value head of the last batch element and its query heads: mistakes of strides show there, and no
    more of it is affordable at 100K tokens.
    """
    problem, group = inputs.problem, inputs.problem.heads // inputs.problem.kv_heads
    heads, kv_head = (problem.heads - group, problem.heads), problem.kv_heads - 1
    q, k, v, do = (x.detach()[-1:] for x in inputs.take("bshd"))
    own = [x[:, :, heads[0] :] for x in (q, do)] + [x[:, :, kv_head:] for x in (k, v)]
    low = torch.float32 if problem.dtype == "fp64" else q.dtype
    exact, rounded = (_define(inputs, own, dtype, backward) for dtype in (torch.float64, low))
    scaled = torch.float64 if problem.dtype == "fp64" else None
    return Standard(heads, kv_head, {name: (x, Budget.of(x, rounded[name], scaled)) for name, x in exact.items()})


def _define(inputs: Inputs, own: Sequence[Tensor], dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
    q, do, *keys = own
    problem, n = inputs.problem, inputs.problem.seq_len
    chunk = max(1, CHUNK_ELEMENTS.get(inputs.device.type, 2**16) // (n * q.shape[2]))
    k, v = (x.to(dtype, copy=True).requires_grad_(backward) for x in keys)
    positions = torch.arange(n, device=inputs.device)
    outputs, dq = [], []
    sums = [torch.zeros(x.shape, dtype=accumulation_dtype(dtype), device=x.device) for x in (k, v)]
    for start in range(0, n, chunk):
        rows = slice(start, min(n, start + chunk))
        some = q[:, rows].to(dtype, copy=True).requires_grad_(backward)
        visible = visible_rows(problem, rows.start, rows.stop, inputs.device)
        o, _ = dense_attention(some, k, v, visible, q_positions=positions[rows], k_positions=positions)
        outputs.append(o.detach())
        if backward:
            found = torch.autograd.grad(o, [some, k, v], do[:, rows].to(dtype))
            dq.append(found[0])
            for total, share in zip(sums, found[1:], strict=True):
                total += share
    if not backward:
        return {"o": torch.cat(outputs, 1)}
    dk, dv = (total.to(dtype) for total in sums)
    return {"o": torch.cat(outputs, 1), "dq": torch.cat(dq, 1), "dk": dk, "dv": dv}
