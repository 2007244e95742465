"""Who computes attention over several GPUs, and how each is called: our rings, and those of others.

Owns the calls, each in the memory layout its callee likes, and whether two answers agree. Refuses to know clocks.

Note [Peers]
    torch's context parallelism runs cuDNN's kernels in its own ring, with either of its rotate methods. It knows causal
    masks over zigzag shards only, and no grouped heads: keys and values are repeated to the query heads beforehand,
    which costs it no time here, and their gradients are summed for judging. ring-flash-attn is a wheel that calls
    flash_attn; where that is not installed, the FlashAttention-2 inside torch answers under its name (`lend_flash_attn`).

Note [Agreement]
    Our answers are held against the definition at a length it can afford. At the measured length everybody is held
    against our first ring: the root mean square of the difference over that of ours, for o, dq, dk and dv, may be four
    machine epsilons of the dtype (3% for bf16). That finds wrong masks, orders and signs, not rounding.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.launch.bench.baselines import Refused
from ringattn.launch.bench.workloads import Problem, draw_inputs
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.runtime.session import Session

PeerName = Literal["torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn"]
NAMES = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class RingContender:
    """One way to compute this rank's rows of a problem.

    Attributes:
        forward: The forward, recorded for a backward.
        both: The forward and its backward.
        answers: o, dq, dk and dv of this rank's rows, `b s h d`, in the order of NAMES; for judging, not for timing.
        note: What a reader of its times must know.
    """

    forward: Callable[[], Any]
    both: Callable[[], Any]
    answers: Callable[[], list[Tensor]]
    note: str = ""


def deal(problem: Problem, ring: ringattn.Ring, layout: str) -> ringattn.Sharding:
    """Who holds which positions; "balanced" is balanced for the mask of the problem."""
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
    """Our attention on this rank's rows of a problem; kv_buffer: its keys lie where they leave from."""
    sharding = deal(problem, ring, layout)
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
    """A contender of one function and autograd, in our memory layout."""

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, do)

    def answers() -> list[Tensor]:
        o = forward()
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    return RingContender(forward, both, answers)


class Peers:
    """Those of others, opened when they are first asked for. A context: what was opened is put back at its end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stack = contextlib.ExitStack()
        self._patched = False

    def __enter__(self) -> Peers:
        """Nothing is opened yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Puts back what was patched."""
        self._stack.close()

    def prepare(self, who: str, problem: Problem, seed: int) -> RingContender:
        """The peer called `who`.

        Args:
            who: A PeerName.
            problem: What to compute; q, k, v and do are those of `prepare_ours` with the same seed under zigzag.
            seed: Of this rank's inputs.

        Raises:
            Refused: It cannot compute the problem here.
            Exception: Whatever a peer raises.
        """
        world_size = self._session.world_size
        if problem.mask != "causal":
            raise Refused(f"no {problem.mask} mask over load-balanced shards")
        if problem.seq_len % (2 * world_size):
            raise Refused(f"seq_len must be a multiple of {2 * world_size}, got {problem.seq_len}")
        if self._session.device.type != "cuda":
            raise Refused("runs on GPUs only")
        if world_size == 1:
            raise Refused("runs among several ranks only")
        inputs = draw_inputs(problem, problem.seq_len // world_size, self._session.device, seed)
        if who == "ring_flash_attn":
            return self._ring_flash_attn(inputs)
        return self._torch_cp(who.removeprefix("torch_cp_"), problem, inputs)

    def _ring_flash_attn(self, inputs: list[Tensor]) -> RingContender:
        attention = find_ring_flash_attn()
        q, k, v, do = inputs
        return _differentiable(lambda: attention(q, k, v, causal=True, group=dist.group.WORLD), (q, k, v), do)

    def _torch_cp(self, rotation: str, problem: Problem, inputs: list[Tensor]) -> RingContender:
        from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._patch_attention()
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

    def _patch_attention(self) -> None:
        if self._patched:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cuda", (self._session.world_size,))
        # it wants a sequence to shard, though ours come sharded
        sequence = torch.zeros(1, 128 * self._session.world_size, device=self._session.device)
        self._stack.enter_context(context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1]))
        self._patched = True


def find_ring_flash_attn() -> Callable[..., Tensor]:
    """The zigzag attention of ring-flash-attn.

    Raises:
        Refused: It is not installed.
    """
    if importlib.util.find_spec("ring_flash_attn") is None:
        raise Refused("not installed (pip install --no-deps ring-flash-attn)")
    lend_flash_attn()
    return importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func


def lend_flash_attn() -> None:
    """Lets ring-flash-attn be imported without flash_attn and without an old transformers.

    Where flash_attn is not installed, modules of its name offer the four functions that are imported from it, on the
    FlashAttention-2 inside torch. The adapter for transformers wants private names of old versions; it is not used here, and
    an empty module takes its place.
    """
    adapters = types.ModuleType("ring_flash_attn.adapters")
    for name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):
        setattr(adapters, name, None)
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    package, interface = (types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface"))
    package.__path__ = []
    lent: dict[str, Any] = {
        "_flash_attn_forward": _lent_forward,
        "_flash_attn_backward": _lent_backward,
        "_flash_attn_varlen_forward": _not_lent,
        "_flash_attn_varlen_backward": _not_lent,
    }
    for name, function in lent.items():
        setattr(interface, name, function)
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def _lent_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, **others: Any
) -> tuple[Tensor, Tensor, None, Tensor]:
    _refuse_others(others)
    attention = torch.ops.aten._flash_attention_forward
    # no cumulative lengths, no dropout, no debug mask
    o, lse, state, *_ = attention(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale)
    return o, lse, None, state


def _lent_backward(
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
    _refuse_others(others)
    # the state of a random generator that is not used
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    attention = torch.ops.aten._flash_attention_backward
    found = attention(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        causal,
        state,
        state,
        scale=softmax_scale,
    )
    for x, gradient in zip((dq, dk, dv), found, strict=True):
        x.copy_(gradient)


def _not_lent(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "variable lengths must come from flash_attn itself, got the functions inside torch; install it"
    )


def _refuse_others(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value not in (None, False, 0, -1, (-1, -1)) and name != "rng_state":
            raise NotImplementedError(f"{name} must be left out, got {value}; install flash_attn")


def distance(found: list[Tensor], ours: list[Tensor]) -> dict[str, float]:
    """Root mean square of the difference over that of ours, by tensor; infinite where a shape or a number is wrong."""
    distances = {}
    for name, x, y in zip(NAMES, found, ours, strict=True):
        if x.shape != y.shape:
            distances[name] = math.inf
            continue
        scale = max(float(y.float().norm()), 1e-30)
        ratio = float((x.float() - y.float()).norm()) / scale
        distances[name] = ratio if math.isfinite(ratio) else math.inf
    return distances


def allowed_distance(dtype: str) -> float:
    """What Note [Agreement] allows; never below what the order of sums costs in fp32."""
    return max(4 * torch.finfo(DTYPES[dtype]).eps, 1e-5)


def judge(found: list[Tensor], ours: list[Tensor], dtype: str, session: Session) -> str | None:
    """Why an answer is wrong, if it is; the same on every rank."""
    distances = distance(found, ours)
    worst = session.maximum([distances[name] for name in NAMES])
    wrong = {name: far for name, far in zip(NAMES, worst, strict=True) if not far <= allowed_distance(dtype)}
    if not wrong:
        return None
    listed = ", ".join(f"{name} by {100 * far:.3g}%" for name, far in wrong.items())
    return f"wrong answer: differs from ours in {listed}"


def attempt(prepare: Callable[[], RingContender], session: Session) -> tuple[RingContender | None, list[Tensor], str]:
    """Prepares a contender and has it answer once, on every rank or on none.

    Returns:
        The contender and its answers, or None and the reason, the same on every rank.
    """
    contender, answers, why = None, [], ""
    try:
        contender = prepare()
        answers = contender.answers()
    except Refused as refusal:
        why = str(refusal)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        why = f"{type(error).__name__}: {lines[0]}"[:300]
    said = sorted({one for one in session.gather(why) if one})
    if said:
        return None, [], "; ".join(said)
    return contender, answers, ""
