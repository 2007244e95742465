"""Implementations of attention: our kernel sets and rings, and those of others, each in the memory layout it takes.

torch's context parallelism knows causal masks over zigzag shards only, and no grouped heads: keys and values are repeated to
the query heads before they are timed, and their gradients are summed before they are compared. ring-flash-attn calls flash_attn;
where that is not installed it runs on the FlashAttention-2 inside torch (`provide_flash_attn`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringattn
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, SoftmaxState, Step, accumulation_dtype
from ringattn.kernels.registry import select_kernels
from ringattn.launch.bench.workloads import PACKED, Inputs, Problem, draw_inputs, mask_rule
from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import reason
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.device_tables import sides_of, step_tables
from ringattn.plan.sharding import Sharding

PEERS = ("cudnn", "fa2", "flex", "flex_flash", "fa4")
RANKS = 4
"""Ranks whose ring steps are timed at the level "steps"."""


class Unsupported(Exception):
    """A contender cannot compute a problem here; the message has the reason."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a problem, or a rank's rows of it.

    Attributes:
        forward: The forward alone, recorded for a backward.
        backward: The backward alone, of a forward that was done once.
        both: The forward and its backward.
        answers: Results of these calls by name (o, dq, dk, dv), `b s h d`; to be compared, not timed.
        note: The kernel set that was chosen, or a remark that is shown with the times.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    both: Callable[[], Any]
    answers: Callable[[], Iterator[tuple[str, Tensor]]]
    note: str = ""


def differentiable(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    do: Tensor,
    read: Callable[[Tensor], Tensor] = lambda x: x,
    note: str = "",
) -> Contender:
    """Make a contender whose backward is autograd's; `read` returns an output or gradient as `b s h d`."""
    held = functools.cache(forward)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(held(), leaves, do, retain_graph=True)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, do)

    def answers() -> Iterator[tuple[str, Tensor]]:
        o = forward()
        yield "o", read(o.detach())
        for name, x in zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True):
            yield name, read(x)

    return Contender(forward, backward, both, answers, note)


def prepare_op(inputs: Inputs, impl: str) -> Contender:
    """Prepare our public function on a ring of one."""
    problem = inputs.problem
    q, k, v, do = inputs.take("bshd")
    sharding = ringattn.Ring().sharding(problem.seq_len, layout="contiguous", documents=problem.documents)
    choice = select_kernels(inputs.device, q.dtype, *problem.head_dims, impl=impl)

    def forward() -> Tensor:
        return ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options)

    return differentiable(forward, (q, k, v), do, note=choice.name)


class _RankSteps:
    """Rows of one rank of `prepare_kernels`, the keys of each of its steps, and the buffers of results."""

    def __init__(self, inputs: Inputs, text: str, rank: int, impl: str) -> None:
        spec, head_dims = AttentionSpec.deserialize(text, rank), inputs.problem.head_dims
        q, k, v, do = (x.detach() for x in inputs.take("bshd"))
        self.sides = sides_of(step_tables(spec, "keys", inputs.device), "keys")
        self.single = spec.sharding.world_size == 1
        steps = None if self.single else lambda: self.sides
        self.choice = select_kernels(inputs.device, q.dtype, *head_dims, impl=impl, steps=steps)
        self.score = spec.score(q.dtype, 0, ScoreTensors())
        self.rows, self.keys = self.sides[0][0].positions.long(), [keys.positions.long() for _, keys in self.sides]
        self.q, self.do = q[:, self.rows], do[:, self.rows]
        self.held = [(k[:, at], v[:, at]) for at in self.keys]
        choose = self.choice.kernels.choose_faster
        faster = None if choose is None else choose(inputs.device, q.dtype, *head_dims)
        self.kernels = self.choice.kernels(CallShape.of(self.q, *self.held[0], self.score)._replace(faster=faster))
        wide, (b, s, h, _) = accumulation_dtype(q.dtype), self.q.shape
        of_grads = q.dtype if self.single else wide
        self.o, self.dq = torch.empty_like(self.do), torch.empty_like(self.q, dtype=of_grads)
        self.sums = [tuple(torch.empty_like(x, dtype=of_grads) for x in pair) for pair in self.held]
        self.waiting = list[Tensor]()
        self.lse, self.delta, m, l = torch.empty(4, b, h, s, dtype=wide, device=q.device)  # noqa: E741
        self.carry = None if self.single else SoftmaxState(m, l, torch.empty_like(self.o, dtype=wide), [])

    def forward(self) -> None:
        last = len(self.sides) - 1
        for step, ((rows, keys), (k, v)) in enumerate(zip(self.sides, self.held, strict=True)):
            given = self.q, k, v, rows, keys, self.score, self.o, self.lse, self.carry
            self.kernels.forward(Step(*given, step == 0, step == last))

    def backward(self) -> None:
        delta = self.delta if self.single else self.kernels.delta(self.o, self.do, None)
        for step, ((rows, keys), (k, v), sums) in enumerate(zip(self.sides, self.held, self.sums, strict=True)):
            last = step == len(self.sides) - 1
            grads = Grads(self.dq, *sums, accumulate_rows=step > 0, held=self.waiting, last=last)
            given = self.do, self.q, k, v, self.lse, delta, rows, keys, self.score, self.o
            self.kernels.backward(BackwardStep(*given, delta_made=not self.single), grads)


def prepare_kernels(inputs: Inputs, impl: str, layout: str, world_size: int) -> Contender:
    """Prepare our kernel set as the ranks of a ring call it, one after the other: all ring steps, no transport, no autograd.

    A single rank has no delta of its own: the backward makes it, and nothing is allocated.
    """
    problem = inputs.problem
    sharding = Sharding.from_spec((problem.seq_len, layout, world_size, problem.documents, None), 0)
    text = serialize(sharding, softmax_scale=problem.head_dim**-0.5, impl=impl, **problem.options)
    ranks = [_RankSteps(inputs, text, rank, impl) for rank in range(world_size)]

    def call(*directions: Callable[[_RankSteps], None]) -> None:
        for direction, one in itertools.product(directions, ranks):
            direction(one)

    forward = functools.partial(call, _RankSteps.forward)
    backward = functools.partial(call, _RankSteps.backward)
    both = functools.partial(call, _RankSteps.forward, _RankSteps.backward)

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

    return Contender(forward, backward, both, answers, ranks[-1].choice.name)


def prepare_cudnn(inputs: Inputs) -> Contender:
    """Prepare scaled_dot_product_attention with cuDNN, b h s d."""
    from torch.nn.attention import SDPBackend

    _check_peer(inputs, "full", "causal")
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def prepare_fa2(inputs: Inputs) -> Contender:
    """Prepare FlashAttention-2 as torch ships it, b h s d; windows and documents through the operator underneath."""
    from torch.nn.attention import SDPBackend

    _check_peer(inputs, "full", "causal", "window", *PACKED)
    problem = inputs.problem
    if problem.mask in ("full", "causal"):
        return _sdpa(inputs, SDPBackend.FLASH_ATTENTION)
    attention = torch.ops.aten._flash_attention_forward
    if problem.mask in PACKED:
        return _packed(inputs, lambda q, k, v, cuts, n: attention(q, k, v, cuts, cuts, n, n, 0.0, True, False)[0])
    q, k, v, do = inputs.take("bshd")
    n = problem.seq_len
    windows: dict[str, Any] = {"window_size_left": problem.window, "window_size_right": 0}
    # no cumulative lengths; no dropout, causal, no debug mask
    return differentiable(lambda: attention(q, k, v, None, None, n, n, 0.0, True, False, **windows)[0], (q, k, v), do)


def _sdpa(inputs: Inputs, backend: Any) -> Contender:
    from torch.nn.attention import sdpa_kernel

    problem = inputs.problem
    q, k, v, do = inputs.take("bhsd")

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            grouped = problem.heads != problem.kv_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.mask == "causal", enable_gqa=grouped)

    return differentiable(forward, (q, k, v), do, lambda x: x.transpose(1, 2))


def prepare_flex(inputs: Inputs, backend: str | None = None) -> Contender:
    """Prepare FlexAttention, compiled, with a block mask, b h s d: on Triton kernels, or on FlashAttention-4's ("FLASH")."""
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    problem = inputs.problem
    _check_peer(inputs, problem.mask)
    options: dict[str, Any] = {} if backend is None else {"kernel_options": {"BACKEND": backend}}
    # on Hopper FlashAttention-4 takes blocks of as many keys as a tile of its forward and of its backward has
    keys = 128 if backend is None or problem.head_dim <= 128 else 96 if problem.head_dim <= 192 else 64
    q, k, v, do = inputs.take("bhsd")
    n, block_mask = problem.seq_len, None
    if problem.mask != "full":
        rule = mask_rule(problem, inputs.device)
        # uncompiled, it holds the whole mask pair by pair
        large = n > 32768
        block_mask = create_block_mask(
            lambda b, h, i, j: rule(i, j),  # noqa: ARG005
            *(None, None, n, n),
            device=str(inputs.device),
            BLOCK_SIZE=(128, keys),
            _compile=large,
        )
    # a backward that is timed again and again must keep what its forward saved
    functorch.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        grouped = problem.heads != problem.kv_heads
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped, **options)

    return differentiable(forward, (q, k, v), do, lambda x: x.transpose(1, 2))


def prepare_fa4(inputs: Inputs) -> Contender:
    """Prepare FlashAttention-4 (CuTe), where it is installed, b s h d; documents as variable lengths."""
    _check_peer(inputs, "full", "causal", "window", *PACKED)
    try:
        from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_func,
            flash_attn_varlen_func,
        )
    except ImportError as missing:
        raise Unsupported(f"flash_attn.cute cannot be imported: {missing}") from missing
    problem = inputs.problem
    if problem.mask in PACKED:
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
    return differentiable(lambda: flash_attn_func(q, k, v, **mask)[0], (q, k, v), do)


def _check_peer(inputs: Inputs, *masks: str) -> None:
    if inputs.device.type != "cuda":
        raise Unsupported("runs on GPUs only")
    if inputs.problem.mask not in masks:
        raise Unsupported(f"no {inputs.problem.mask} mask in its interface")


def _packed(inputs: Inputs, attention: Callable[..., Tensor]) -> Contender:
    """Make a contender of packed documents; `attention` takes q, k, v, boundaries and the longest document."""
    problem = inputs.problem
    assert problem.documents is not None, "a problem with documents"
    q, k, v, do = inputs.take("thd")
    ends = [0] + [b * problem.seq_len + cut for b in range(problem.batch) for cut in problem.documents[1:]]
    cuts = torch.tensor(ends, dtype=torch.int32, device=inputs.device)
    longest = max(stop - start for start, stop in itertools.pairwise(problem.documents))
    shape = (problem.batch, problem.seq_len)
    return differentiable(lambda: attention(q, k, v, cuts, longest), (q, k, v), do, lambda x: x.unflatten(0, shape))


def prepare(who: str, level: str, inputs: Inputs) -> Contender:
    """Prepare one of PEERS, "auto", or one of our kernel sets; raise Unsupported if it cannot compute the problem here.

    Levels of ours are "op", a function with autograd; "kernel", the kernel set alone; "steps", as RANKS ranks of a ring call it.
    """
    peers: dict[str, Callable[[Inputs], Contender]] = {
        "cudnn": prepare_cudnn,
        "fa2": prepare_fa2,
        "flex": prepare_flex,
        "flex_flash": functools.partial(prepare_flex, backend="FLASH"),
        "fa4": prepare_fa4,
    }
    if who in peers:
        return peers[who](inputs)
    try:
        if level == "op":
            return prepare_op(inputs, who)
        return prepare_kernels(inputs, who, *(("contiguous", 1) if level == "kernel" else ("zigzag", RANKS)))
    except (NotImplementedError, ValueError) as error:
        raise Unsupported(str(error)) from error


PeerName = Literal["torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn"]


def make_sharding(problem: Problem, ring: ringattn.Ring, layout: str) -> ringattn.Sharding:
    """Shard a problem; "balanced" is balanced for its mask."""
    balance = problem.options if layout == "balanced" else None
    return ring.sharding(problem.seq_len, layout=layout, documents=problem.documents, balance=balance)


def prepare_ours(
    problem: Problem,
    ring: ringattn.Ring,
    layout: str,
    device: torch.device,
    impl: str,
    seed: int,
    *,
    kv_buffer: bool = False,
) -> Contender:
    """Prepare our attention on this rank's rows; kv_buffer: KV lies in the ring's own memory."""
    sharding = make_sharding(problem, ring, layout)
    q, k, v, do = draw_inputs(problem, sharding.shard_len, device, seed)
    if kv_buffer:
        sizes = problem.batch, problem.kv_heads, problem.head_dim
        held = ring.kv_buffer(sharding, *sizes, dtype=k.dtype, name="bench", device=device)
        with torch.no_grad():
            for target, x in zip(held, (k, v), strict=True):
                target.copy_(x)
        k, v = (x.detach().requires_grad_() for x in held)

    return differentiable(
        lambda: ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options), (q, k, v), do
    )


@contextlib.contextmanager
def torch_context_parallel(session: Session) -> Iterator[None]:
    """Let torch's context parallelism replace scaled_dot_product_attention inside the context."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (session.world_size,))
    # requires a sequence to shard, though ours is sharded already
    sequence = torch.zeros(1, 128 * session.world_size, device=session.device)
    with context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1]):
        yield


def torch_cp_attention(rotation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention `b h s d` of torch's context parallelism, inside `torch_context_parallel`, with cuDNN's kernels."""
    from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # one setting for the whole process, read by forwards and backwards alike
    set_rotate_method(rotation)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Peers(contextlib.ExitStack):
    """Other implementations, set up at their first use; a context manager that undoes the setup."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._patched = False

    def prepare(self, who: str, problem: Problem, seed: int) -> Contender:
        """Prepare a peer on the inputs of `prepare_ours` with the same seed; raise Unsupported if it cannot.

        Rows lie in the zigzag layout, those of documents in the contiguous one.
        """
        world_size = self._session.world_size
        if problem.mask != "causal" and (who != "ring_flash_attn" or problem.mask not in PACKED):
            raise Unsupported(f"no {problem.mask} mask over shards")
        if problem.seq_len % (2 * world_size):
            raise Unsupported(f"seq_len must be a multiple of {2 * world_size}, got {problem.seq_len}")
        if self._session.device.type != "cuda":
            raise Unsupported("runs on GPUs only")
        if world_size == 1:
            raise Unsupported("runs among several ranks only")
        inputs = draw_inputs(problem, problem.seq_len // world_size, self._session.device, seed)
        if who == "ring_flash_attn":
            package, (q, k, v, do) = find_ring_flash_attn(), inputs
            if problem.documents:
                return _packed_ring(package, problem.documents, inputs, self._session)
            attention = package.zigzag_ring_flash_attn_func
            return differentiable(lambda: attention(q, k, v, causal=True, group=dist.group.WORLD), (q, k, v), do)
        if not self._patched:
            self.enter_context(torch_context_parallel(self._session))
            self._patched = True
        group, heads = problem.heads // problem.kv_heads, problem.heads
        drawn = [x.detach().transpose(1, 2) for x in inputs]
        q, k, v, do = (x.repeat_interleave(heads // x.shape[1], 1).contiguous() for x in drawn)
        leaves = tuple(x.requires_grad_() for x in (q, k, v))
        rotation = who.removeprefix("torch_cp_")
        found = differentiable(lambda: torch_cp_attention(rotation, *leaves), leaves, do, lambda x: x.transpose(1, 2))

        def answers() -> Iterator[tuple[str, Tensor]]:
            for name, x in found.answers():
                is_key = name in ("dk", "dv")
                yield name, x.unflatten(2, (-1, group)).float().sum(3).to(x.dtype) if is_key else x

        note = "cuDNN kernels" + ("; keys and values repeated to the query heads beforehand" if group > 1 else "")
        return dataclasses.replace(found, answers=answers, note=note)


def _packed_ring(package: Any, documents: Sequence[int], inputs: Sequence[Tensor], session: Session) -> Contender:
    """Make a contender of ring-flash-attn's attention of packed documents, four key heads at a time as in its benchmark."""
    if inputs[0].shape[0] != 1:
        raise Unsupported(f"packed documents of one batch element, got {inputs[0].shape[0]}")
    q, k, v, do = (x.detach()[0] for x in inputs)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    cuts = torch.tensor(documents, dtype=torch.int32, device=q.device)
    *bounds, keys = package.llama3_flash_attn_prepare_cu_seqlens(cuts, True, session.rank, session.world_size)
    options = {"heads_k_stride": math.gcd(4, k.shape[1]), "local_k_slice": keys, "group": dist.group.WORLD}

    def forward() -> Tensor:
        return package.llama3_flash_attn_varlen_func(*leaves, *bounds, causal=True, **options)

    return differentiable(forward, leaves, do, lambda x: x[None])


def find_ring_flash_attn() -> Any:
    """Return the package ring_flash_attn; raise Unsupported where it is not installed."""
    if importlib.util.find_spec("ring_flash_attn") is None:
        raise Unsupported("not installed (pip install --no-deps ring-flash-attn)")
    provide_flash_attn()
    return importlib.import_module("ring_flash_attn")


def provide_flash_attn() -> None:
    """Let ring-flash-attn be imported without flash_attn and without an old transformers.

    Without flash_attn, modules of its name offer the four functions that are imported from it, on the FlashAttention-2 inside
    torch. The adapter for transformers imports private names of old versions; an empty module takes its place.
    """
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    package, interface = (types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface"))
    package.__path__ = []
    interface.__dict__.update(
        _flash_attn_forward=_flash_forward,
        _flash_attn_backward=_flash_backward,
        _flash_attn_varlen_forward=_flash_forward,
        _flash_attn_varlen_backward=_flash_backward,
    )
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor, None, Tensor]:
    _check_unused(others)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1]
    # no dropout, no debug mask
    o, lse, state, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=softmax_scale
    )
    return o, lse, None, state


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> None:
    _check_unused(others)
    # the state of a random generator that is not used
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1]
    found = torch.ops.aten._flash_attention_backward(
        *(dout, q, k, v, out, softmax_lse, *lengths, 0.0, causal, state, state), scale=softmax_scale
    )
    for x, gradient in zip((dq, dk, dv), found, strict=True):
        x.copy_(gradient)


def _check_unused(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value not in (None, False, 0, -1, (-1, -1)) and name != "rng_state":
            raise NotImplementedError(f"{name} must be left out, got {value}; install flash_attn")


def attempt(prepare: Callable[[], Contender], session: Session) -> tuple[Contender, list[Tensor]]:
    """Prepare a contender and compute its answers once; return both, or raise Unsupported, on every rank alike."""
    why, found = "", None
    try:
        contender = prepare()
        found = contender, [x for _, x in contender.answers()]
    except Unsupported as error:
        why = str(error)
    except Exception as error:
        why = reason(error)
    if reasons := sorted({one for one in session.gather(why) if one}):
        raise Unsupported("; ".join(reasons))
    assert found is not None, "a contender that no rank refused"
    return found
