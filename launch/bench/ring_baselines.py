"""Implementations of attention over several GPUs: our rings, torch's context parallelism, and ring-flash-attn.

torch's context parallelism knows causal masks over zigzag shards only, and no grouped heads: keys and values are repeated to
the query heads before they are timed, and their gradients are summed before they are compared. ring-flash-attn calls flash_attn;
where that is not installed it runs on the FlashAttention-2 inside torch (`provide_flash_attn`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.launch.bench.baselines import Unsupported
from ringattn.launch.bench.workloads import Problem, draw_inputs
from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import reason

PeerName = Literal["torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn"]


@dataclass(frozen=True)
class RingContender:
    """One way to compute this rank's rows of a problem.

    Attributes:
        forward: The forward, recorded for a backward.
        both: The forward and its backward.
        answers: o, dq, dk and dv of this rank's rows, `b s h d`; to be compared, not timed.
        note: Shown with its times.
    """

    forward: Callable[[], Any]
    both: Callable[[], Any]
    answers: Callable[[], list[Tensor]]
    note: str = ""


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
) -> RingContender:
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

    def forward() -> Tensor:
        return ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options)

    return _differentiable(forward, (q, k, v), do)


def _differentiable(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], do: Tensor) -> RingContender:
    """Make a contender of one function and autograd, in our memory layout."""

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, do)

    def answers() -> list[Tensor]:
        o = forward()
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    return RingContender(forward, both, answers)


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


class Peers(contextlib.ExitStack):
    """Other implementations, set up at their first use; a context manager that undoes the setup."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._patched = False

    def prepare(self, who: str, problem: Problem, seed: int) -> RingContender:
        """Prepare the peer called `who`, on the inputs of `prepare_ours` with the same seed under zigzag.

        Raises:
            Unsupported: It cannot compute the problem here.
        """
        world_size = self._session.world_size
        if problem.mask != "causal":
            raise Unsupported(f"no {problem.mask} mask over load-balanced shards")
        if problem.seq_len % (2 * world_size):
            raise Unsupported(f"seq_len must be a multiple of {2 * world_size}, got {problem.seq_len}")
        if self._session.device.type != "cuda":
            raise Unsupported("runs on GPUs only")
        if world_size == 1:
            raise Unsupported("runs among several ranks only")
        inputs = draw_inputs(problem, problem.seq_len // world_size, self._session.device, seed)
        if who == "ring_flash_attn":
            attention, (q, k, v, do) = find_ring_flash_attn(), inputs
            return _differentiable(lambda: attention(q, k, v, causal=True, group=dist.group.WORLD), (q, k, v), do)
        return self._torch_cp(who.removeprefix("torch_cp_"), problem, inputs)

    def _torch_cp(self, rotation: str, problem: Problem, inputs: list[Tensor]) -> RingContender:
        from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not self._patched:
            self.enter_context(torch_context_parallel(self._session))
            self._patched = True
        group = problem.heads // problem.kv_heads
        drawn = [x.detach().transpose(1, 2) for x in inputs]
        q, k, v, do = (x.repeat_interleave(problem.heads // x.shape[1], 1).contiguous() for x in drawn)
        leaves = tuple(x.requires_grad_() for x in (q, k, v))

        def forward() -> Tensor:
            # one setting for the whole process, read by forwards and backwards alike
            set_rotate_method(rotation)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), leaves, do)

        def answers() -> list[Tensor]:
            o = forward()
            dq, dk, dv = torch.autograd.grad(o, leaves, do)
            dk, dv = (x.unflatten(1, (-1, group)).float().sum(2).to(x.dtype) for x in (dk, dv))
            return [x.detach().transpose(1, 2) for x in (o, dq, dk, dv)]

        note = "cuDNN kernels" + ("; keys and values repeated to the query heads beforehand" if group > 1 else "")
        return RingContender(forward, both, answers, note)


def find_ring_flash_attn() -> Callable[..., Tensor]:
    """Return the zigzag attention of ring-flash-attn.

    Raises:
        Unsupported: It is not installed.
    """
    if importlib.util.find_spec("ring_flash_attn") is None:
        raise Unsupported("not installed (pip install --no-deps ring-flash-attn)")
    provide_flash_attn()
    return importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func


def provide_flash_attn() -> None:
    """Let ring-flash-attn be imported without flash_attn and without an old transformers.

    Without flash_attn, modules of its name offer the four functions that are imported from it, on the FlashAttention-2 inside
    torch. The adapter for transformers imports private names of old versions; an empty module takes its place.
    """
    adapters = types.ModuleType("ring_flash_attn.adapters")
    for name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):
        setattr(adapters, name, None)
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    package, interface = (types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface"))
    package.__path__ = []
    functions: dict[str, Any] = {
        "_flash_attn_forward": _flash_forward,
        "_flash_attn_backward": _flash_backward,
        "_flash_attn_varlen_forward": _no_varlen,
        "_flash_attn_varlen_backward": _no_varlen,
    }
    for name, function in functions.items():
        setattr(interface, name, function)
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, **others: Any
) -> tuple[Tensor, Tensor, None, Tensor]:
    _check_unused(others)
    attention = torch.ops.aten._flash_attention_forward
    # no cumulative lengths, no dropout, no debug mask
    o, lse, state, *_ = attention(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale)
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
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> None:
    _check_unused(others)
    # the state of a random generator that is not used
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    attention = torch.ops.aten._flash_attention_backward
    n, n_kv = q.shape[1], k.shape[1]
    found = attention(
        *(dout, q, k, v, out, softmax_lse, None, None, n, n_kv, 0.0, causal, state, state), scale=softmax_scale
    )
    for x, gradient in zip((dq, dk, dv), found, strict=True):
        x.copy_(gradient)


def _no_varlen(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "variable lengths must come from flash_attn itself, got the functions inside torch; install it"
    )


def _check_unused(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value not in (None, False, 0, -1, (-1, -1)) and name != "rng_state":
            raise NotImplementedError(f"{name} must be left out, got {value}; install flash_attn")


def attempt(prepare: Callable[[], RingContender], session: Session) -> tuple[RingContender | None, list[Tensor], str]:
    """Prepare a contender and compute its answers once, on every rank or on none.

    Returns:
        The contender and its answers, or None and the reason, the same on every rank.
    """
    contender, answers, why = None, [], ""
    try:
        contender = prepare()
        answers = contender.answers()
    except Unsupported as error:
        why = str(error)
    except Exception as error:
        why = reason(error)
    if reasons := sorted({one for one in session.gather(why) if one}):
        return None, [], "; ".join(reasons)
    return contender, answers, ""
