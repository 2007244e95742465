"""Implementations of attention over several GPUs: our rings, torch's context parallelism, and ring-flash-attn.

torch's context parallelism knows causal masks over zigzag shards only, and no grouped heads: keys and values are repeated to
the query heads before they are timed, and their gradients are summed before they are compared. ring-flash-attn calls flash_attn;
where that is not installed it runs on the FlashAttention-2 inside torch (`provide_flash_attn`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringattn
from ringattn.launch.bench.baselines import Contender, Unsupported, differentiable
from ringattn.launch.bench.workloads import Problem, draw_inputs
from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import reason

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
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    package, interface = (types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface"))
    package.__path__ = []
    interface.__dict__.update(
        _flash_attn_forward=_flash_forward,
        _flash_attn_backward=_flash_backward,
        _flash_attn_varlen_forward=_no_varlen,
        _flash_attn_varlen_backward=_no_varlen,
    )
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
