"""Implementations of attention on one GPU, each in the memory layout it takes: our kernel sets, and those of others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ringattn
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, SoftmaxState, Step, accumulation_dtype
from ringattn.kernels.registry import select_kernels
from ringattn.kernels.runtime.table_cache import find
from ringattn.launch.bench.workloads import UNIONS, Inputs, document_of, union_rule
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.device_tables import sides_of, step_tables
from ringattn.plan.sharding import Sharding

PEERS = ("cudnn", "fa2", "flex", "fa4")
RANKS = 4
"""Ranks whose ring steps are timed at the level "steps"."""


class Unsupported(Exception):
    """A contender cannot compute a problem here; the message has the reason."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a problem.

    Attributes:
        forward: The forward alone.
        backward: The backward alone, of a forward that was done once.
        answers: Results of these calls by name (o, dq, dk, dv), `b s h d`; to be compared, not timed.
        note: The kernel set that was chosen.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    answers: Callable[[], Iterator[tuple[str, Tensor]]]
    note: str = ""


def _differentiable(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    do: Tensor,
    read: Callable[[Tensor], Tensor] = lambda x: x,
    note: str = "",
) -> Contender:
    """Make a contender whose backward is autograd's."""
    o = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    def answers() -> Iterator[tuple[str, Tensor]]:
        yield "o", read(o.detach())
        for name, x in zip(("dq", "dk", "dv"), backward(), strict=True):
            yield name, read(x)

    return Contender(forward, backward, answers, note)


def prepare_op(inputs: Inputs, ring: ringattn.Ring, impl: str) -> Contender:
    """Prepare our public function on a ring of one."""
    problem = inputs.problem
    q, k, v, do = inputs.take("bshd")
    sharding = ring.sharding(problem.seq_len, layout="contiguous", documents=problem.documents)
    choice = select_kernels(inputs.device, q.dtype, *problem.head_dims, impl=impl)

    def forward() -> Tensor:
        return ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options)

    return _differentiable(forward, (q, k, v), do, note=choice.name)


def prepare_kernels(inputs: Inputs, ring: ringattn.Ring, impl: str) -> Contender:
    """Prepare our kernel set as the ring calls it, on one step: no autograd, no allocation; the backward makes delta."""
    problem = inputs.problem
    q, k, v, do = (x.detach() for x in inputs.take("bshd"))
    choice = select_kernels(inputs.device, q.dtype, *problem.head_dims, impl=impl)
    sharding = ring.sharding(problem.seq_len, layout="contiguous", documents=problem.documents)
    text = serialize(sharding, softmax_scale=problem.head_dim**-0.5, impl=impl, **problem.options)
    spec = AttentionSpec.deserialize(text, 0)
    tables = step_tables(spec, "keys", inputs.device)
    assert tables.moving[0] is not None, "a ring of one computes its only step"
    rows, keys = find(tables.stationary), find(tables.moving[0])
    score = spec.score(q.dtype, 0, ScoreTensors())
    o, dk, dv = torch.empty_like(do), torch.empty_like(k), torch.empty_like(v)
    grads = Grads(torch.empty_like(q), dk, dv)
    kernels = choice.kernels(CallShape.of(q, k, v, score))
    b, s, h, _ = q.shape
    lse, delta = torch.empty(2, b, h, s, dtype=accumulation_dtype(q.dtype), device=q.device)

    def forward() -> None:
        kernels.forward(Step(q, k, v, rows, keys, score, o, lse))

    def backward() -> None:
        kernels.backward(BackwardStep(do, q, k, v, lse, delta, rows, keys, score, o), grads)

    def answers() -> Iterator[tuple[str, Tensor]]:
        forward()
        yield "o", o
        backward()
        yield from (("dq", grads.dq), ("dk", dk), ("dv", dv))

    return Contender(forward, backward, answers, choice.name)


class _RankSteps:
    """Rows of one rank of `prepare_steps`, the keys of each of its steps, and the buffers of results."""

    def __init__(self, inputs: Inputs, text: str, rank: int, impl: str) -> None:
        spec, head_dims = AttentionSpec.deserialize(text, rank), inputs.problem.head_dims
        q, k, v, do = (x.detach() for x in inputs.take("bshd"))
        self.sides = sides_of(step_tables(spec, "keys", inputs.device), "keys")
        self.choice = select_kernels(inputs.device, q.dtype, *head_dims, impl=impl, steps=lambda: self.sides)
        self.score = spec.score(q.dtype, 0, ScoreTensors())
        self.rows, self.keys = self.sides[0][0].positions.long(), [keys.positions.long() for _, keys in self.sides]
        self.q, self.do = q[:, self.rows], do[:, self.rows]
        self.held = [(k[:, at], v[:, at]) for at in self.keys]
        self.kernels = self.choice.kernels(CallShape.of(self.q, *self.held[0], self.score))
        wide, (b, s, h, _) = accumulation_dtype(q.dtype), self.q.shape
        self.o, self.dq = torch.empty_like(self.do), torch.empty_like(self.q, dtype=wide)
        self.sums = [tuple(torch.empty_like(x, dtype=wide) for x in pair) for pair in self.held]
        self.lse, m, l = torch.empty(3, b, h, s, dtype=wide, device=q.device)  # noqa: E741
        self.carry = SoftmaxState(m, l, torch.empty_like(self.o, dtype=wide))

    def forward(self) -> None:
        last = len(self.sides) - 1
        for step, ((rows, keys), (k, v)) in enumerate(zip(self.sides, self.held, strict=True)):
            given = self.q, k, v, rows, keys, self.score, self.o, self.lse, self.carry
            self.kernels.forward(Step(*given, step == 0, step == last))

    def backward(self) -> None:
        delta = self.kernels.delta(self.o, self.do, None)
        for step, ((rows, keys), (k, v), sums) in enumerate(zip(self.sides, self.held, self.sums, strict=True)):
            grads = Grads(self.dq, *sums, accumulate_rows=step > 0)
            given = self.do, self.q, k, v, self.lse, delta, rows, keys, self.score, self.o
            self.kernels.backward(BackwardStep(*given, delta_made=True), grads)


def prepare_steps(inputs: Inputs, ring: ringattn.Ring, impl: str) -> Contender:
    """Prepare our kernel set as the RANKS ranks of a zigzag ring call it, one after the other: all ring steps, no transport."""
    del ring
    problem = inputs.problem
    sharding = Sharding.from_spec((problem.seq_len, "zigzag", RANKS, problem.documents, None), 0)
    text = serialize(sharding, softmax_scale=problem.head_dim**-0.5, impl=impl, **problem.options)
    ranks = [_RankSteps(inputs, text, rank, impl) for rank in range(RANKS)]

    def forward() -> None:
        for one in ranks:
            one.forward()

    def backward() -> None:
        for one in ranks:
            one.backward()

    def answers() -> Iterator[tuple[str, Tensor]]:
        def whole(index: int) -> Tensor:
            total = torch.zeros_like(inputs.take("bshd")[1 + index], dtype=ranks[0].dq.dtype)
            for one in ranks:
                for at, sums in zip(one.keys, one.sums, strict=True):
                    total[:, at] += sums[index]
            return total

        back = torch.cat([one.rows for one in ranks]).argsort()
        forward()
        yield "o", torch.cat([one.o for one in ranks], 1)[:, back]
        backward()
        yield from (("dq", torch.cat([one.dq for one in ranks], 1)[:, back]), ("dk", whole(0)), ("dv", whole(1)))

    return Contender(forward, backward, answers, ranks[-1].choice.name)


def prepare_cudnn(inputs: Inputs) -> Contender:
    """Prepare scaled_dot_product_attention with cuDNN, b h s d."""
    from torch.nn.attention import SDPBackend

    if inputs.problem.mask not in ("full", "causal"):
        raise Unsupported(f"no {inputs.problem.mask} mask in torch's interface to it")
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def prepare_fa2(inputs: Inputs) -> Contender:
    """Prepare FlashAttention-2 as torch ships it, b h s d; windows and documents through the operator underneath."""
    from torch.nn.attention import SDPBackend

    _gpu_only(inputs)
    problem = inputs.problem
    _no_unions(inputs)
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

        return _differentiable(forward, (q, k, v), do)
    return _packed(inputs, lambda q, k, v, cuts, n: attention(q, k, v, cuts, cuts, n, n, 0.0, True, False)[0])


def _sdpa(inputs: Inputs, backend: Any) -> Contender:
    from torch.nn.attention import sdpa_kernel

    _gpu_only(inputs)
    problem = inputs.problem
    q, k, v, do = inputs.take("bhsd")

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            grouped = problem.heads != problem.kv_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.mask == "causal", enable_gqa=grouped)

    return _differentiable(forward, (q, k, v), do, lambda x: x.transpose(1, 2))


def prepare_flex(inputs: Inputs) -> Contender:
    """Prepare FlexAttention, compiled, with a block mask, b h s d."""
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
    if problem.mask in UNIONS:
        rule = union_rule(problem, inputs.device)
        rules[problem.mask] = lambda b, h, i, j: rule(i, j)  # noqa: ARG005
    if problem.mask != "full":
        # uncompiled, it holds the whole mask pair by pair
        large = n > 32768
        block_mask = create_block_mask(rules[problem.mask], None, None, n, n, device=str(inputs.device), _compile=large)
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=problem.heads != problem.kv_heads)

    return _differentiable(forward, (q, k, v), do, lambda x: x.transpose(1, 2))


def prepare_fa4(inputs: Inputs) -> Contender:
    """Prepare FlashAttention-4 (CuTe), where it is installed, b s h d; documents as variable lengths."""
    _gpu_only(inputs)
    try:
        from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_func,
            flash_attn_varlen_func,
        )
    except ImportError as missing:
        raise Unsupported(f"flash_attn.cute cannot be imported: {missing}") from missing
    problem = inputs.problem
    _no_unions(inputs)
    if problem.mask == "documents":
        return _packed(
            inputs,
            lambda q, k, v, cuts, n: flash_attn_varlen_func(
                q, k, v, causal=True, cu_seqlens_q=cuts, cu_seqlens_k=cuts, max_seqlen_q=n, max_seqlen_k=n
            )[0],
        )
    q, k, v, do = inputs.take("bshd")
    mask: dict[str, Any] = {"causal": problem.mask != "full"}
    if problem.mask == "window":
        mask["window_size"] = (problem.window, 0)
    return _differentiable(lambda: flash_attn_func(q, k, v, **mask)[0], (q, k, v), do)


def _no_unions(inputs: Inputs) -> None:
    if inputs.problem.mask in UNIONS:
        raise Unsupported(f"no {inputs.problem.mask} mask in its interface")


def _gpu_only(inputs: Inputs) -> None:
    if inputs.device.type != "cuda":
        raise Unsupported("runs on GPUs only")


def _packed(inputs: Inputs, attention: Callable[..., Tensor]) -> Contender:
    """Make a contender of packed documents; `attention` takes q, k, v, boundaries and the longest document."""
    problem = inputs.problem
    assert problem.documents is not None, "a problem with documents"
    q, k, v, do = inputs.take("thd")
    ends = [0] + [b * problem.seq_len + cut for b in range(problem.batch) for cut in problem.documents[1:]]
    cuts = torch.tensor(ends, dtype=torch.int32, device=inputs.device)
    longest = max(stop - start for start, stop in itertools.pairwise(problem.documents))
    shape = (problem.batch, problem.seq_len)
    return _differentiable(lambda: attention(q, k, v, cuts, longest), (q, k, v), do, lambda x: x.unflatten(0, shape))


def prepare(who: str, level: str, inputs: Inputs, ring: ringattn.Ring) -> Contender:
    """Prepare the contender called `who`.

    Args:
        who: One of PEERS, "auto", or the name of one of our kernel sets.
        level: "op": a function with autograd; "kernel": our kernel set alone; "steps": as the ranks of a ring call it.
        inputs: Of the problem.
        ring: A ring of one.

    Raises:
        Unsupported: It cannot compute the problem here.
    """
    peers = {"cudnn": prepare_cudnn, "fa2": prepare_fa2, "flex": prepare_flex, "fa4": prepare_fa4}
    if who in peers:
        return peers[who](inputs)
    try:
        return {"op": prepare_op, "kernel": prepare_kernels, "steps": prepare_steps}[level](inputs, ring, who)
    except (NotImplementedError, ValueError) as error:
        raise Unsupported(str(error)) from error
