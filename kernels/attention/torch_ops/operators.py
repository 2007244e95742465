"""torch's attention operators behind one signature: which of them run here, and how each is called.

    flash      aten::_flash_attention_forward and _backward: windows and variable lengths; FlashAttention-3 or -4 where
               `torch.nn.attention.activate_flash_attention_impl` was called
    cudnn      aten::_scaled_dot_product_cudnn_attention and _backward: full or square causal
    aotriton   the operators of flash on ROCm, where AOTriton or Composable Kernel is behind them: full or square causal, because
               releases of torch ignore the window there, align causal rectangles to the first row, or return another lse for
               variable lengths
    flash_cpu  aten::_scaled_dot_product_flash_attention_for_cpu and _backward: full or square causal, on CPUs, in fp32 or fp64

All return lse in natural log. Their backwards take any o and lse, thus those of rows finished over more keys than the call's.
torch itself says what it can run (`torch.backends.cuda.can_use_flash_attention`), and the signatures of its operators are
compared before they are called: both differ between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from ringattn.kernels.attention.torch_ops.bands import Call, Tile
from ringattn.kernels.interface import accumulation_dtype

SIGNATURES = {
    "_flash_attention_forward": (
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
        "scale", "window_size_left", "window_size_right",
    ),
    "_flash_attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal", "rng_state", "unused", "scale", "window_size_left", "window_size_right",
    ),
    "_scaled_dot_product_cudnn_attention": (
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale",
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias", "cum_seq_q",
        "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale",
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale",
    ),
}  # fmt: skip
"""First arguments of each operator, by which it is called; those that follow must have defaults."""

OPERATORS = {
    "flash": ("_flash_attention_forward", "_flash_attention_backward"),
    "cudnn": ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
    "aotriton": ("_flash_attention_forward", "_flash_attention_backward"),
    "flash_cpu": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
}
"""Forward and backward of each backend."""

TRIED = ("flash", "aotriton")
"""Backends of the flash operators, behind which other kernels may be: these are tried on a small call first."""
NOT_REPEATING = ("cudnn", "aotriton")
"""Backends whose gradients need not repeat to the bit."""

Grads3 = tuple[Tensor, Tensor, Tensor]


class OperatorLaunch(NamedTuple):
    """One call of an operator on slices of rows and keys.

    Attributes:
        batch: First batch element, and one past the last.
        cu_seqlens: Cumulative rows and keys `bands + 1`, int32 on the device, of bands of variable lengths; None: one band.
        max_seqlens: Rows and keys of the largest band.
        causal: The last row and the last key are aligned, and no row sees a later key.
        window: (left, right) as in `Band.window`, where it is more than causal.
        flipped: The call is causal where rows and keys are taken in reverse order.
    """

    batch: tuple[int, int]
    rows: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    window: tuple[int | None, int | None] = (None, None)
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    max_seqlens: tuple[int, int] = (0, 0)
    flipped: bool = False


def launch_of_call(call: Call, batch: tuple[int, int], device: torch.device) -> OperatorLaunch:
    """Return the launch of a call of the operators that have windows."""
    causal = call.window == (None, 0)
    window = (None, None) if causal else call.window
    if len(call.bands) == 1:
        return OperatorLaunch(batch, call.rows, call.keys, causal, window)
    (row, _), (key, _) = call.rows, call.keys
    ends = [[0, *(band.rows[1] - row for band in call.bands)], [0, *(band.keys[1] - key for band in call.bands)]]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cpu").to(device)
    longest = max(band.shape[0] for band in call.bands), max(band.shape[1] for band in call.bands)
    return OperatorLaunch(batch, call.rows, call.keys, causal, window, (cu_seqlens[0], cu_seqlens[1]), longest)


def launch_of_tile(tile: Tile, batch: tuple[int, int]) -> OperatorLaunch:
    """Return the launch of a tile of the operators that have no windows."""
    return OperatorLaunch(batch, tile.rows, tile.keys, causal=tile.kind != "full", flipped=tile.kind == "upper")


def operator(name: str) -> Any:
    """Return an operator of torch by its name."""
    return getattr(torch.ops.aten, name).default


@cache
def check_signatures(backend: str) -> str | None:
    """Return how an operator of this torch differs from the known ones; None: all are called as here."""
    for name in OPERATORS[backend]:
        if not hasattr(torch.ops.aten, name):
            return f"torch must have the operator aten::{name}, got {torch.__version__} without it"
        given = operator(name)._schema.arguments
        names, known = [argument.name for argument in given], SIGNATURES[name]
        optional = all(argument.has_default_value() for argument in given[len(known) :])
        if names[: len(known)] != list(known) or not optional:
            return f"aten::{name} must take {', '.join(known)}, got {', '.join(names)} in torch {torch.__version__}"
    return None


def available(
    device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, *, deterministic: bool
) -> tuple[tuple[str, ...], str]:
    """Return the backends that serve a call on a device, the preferred one first, and their names in words or why there is none.

    torch's switches hold: `torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_cudnn_sdp` choose the backend.
    """
    if device.type == "cpu":
        why = check_signatures("flash_cpu")
        if why is None and head_dim != v_head_dim:
            why = f"v_head_dim must be head_dim, got {v_head_dim} and {head_dim}"
        return ((), why) if why else (("flash_cpu",), "flash_cpu")
    if deterministic and not _repeats():
        return (), (
            "deterministic=True needs torch.use_deterministic_algorithms(True), by which torch's flash attention repeats "
            "to the bit, got False"
        )
    if deterministic and all(name in NOT_REPEATING for name in preferred(device)):
        return (), "deterministic=True needs gradients that repeat to the bit, got AOTriton, which does not promise it"
    if head_dim % 8 or v_head_dim % 8:
        return (), f"head_dim and v_head_dim must be multiples of 8, got {head_dim} and {v_head_dim}"
    found = tuple(
        name for name in runnable(device, dtype, head_dim, v_head_dim) if name not in NOT_REPEATING or not deterministic
    )
    q, k, v = _small(device, dtype, head_dim, v_head_dim)
    missing = next((name for name in preferred(device) if name in TRIED and name not in found), None)
    why = None
    if missing is not None and _torch_runs(missing, q, k, v):
        why = why_not_tried(missing, q, v)
    if not found:
        return (), why or _why_none(dtype, head_dim, v_head_dim)
    active = active_flash()
    words = " and ".join(f"flash ({active})" if name == "flash" and active else name for name in found)
    return found, words if why is None else f"{words}, not flash: {why}"


def _why_none(dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str:
    different = [why for name in ("flash", "cudnn") if (why := check_signatures(name)) is not None]
    named = str(dtype).removeprefix("torch.")
    return "; ".join(different) or (
        f"torch's flash or cuDNN attention must run {named} with head_dim {head_dim} and v_head_dim {v_head_dim} here, got "
        "neither from torch.backends.cuda.can_use_flash_attention and can_use_cudnn_attention"
    )


def _repeats() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


DEFAULT = "flash"
"""The backend to try first on a GPU of which neither a table nor a measurement says more."""


def by_table(device: torch.device) -> str | None:
    """Return the backend that was measured to be the faster one on GPUs of a kind: cuDNN on 9.0 and 10.x; None: on no such GPU.

    torch's own order (`check_prefer_cudnn_attention` in sdp_utils.cpp) is the same.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return "cudnn" if torch.cuda.get_device_capability(device)[0] in (9, 10) else None


def preferred(device: torch.device, faster: str | None = None) -> Sequence[str]:
    """Return the backends of a device in the order in which they are tried: an activated flash kernel is always first.

    Args:
        faster: What a ring has agreed on (`CallShape.faster`); None: the table, or DEFAULT.
    """
    if device.type == "cpu":
        return ("flash_cpu",)
    if torch.version.hip is not None:
        return ("aotriton",)
    first = "flash" if active_flash() is not None else faster or by_table(device) or DEFAULT
    return ("cudnn", "flash") if first == "cudnn" else ("flash", "cudnn")


def runnable(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> tuple[str, ...]:
    """Return the backends of a GPU that torch runs, forward and backward."""
    given = _small(device, dtype, head_dim, v_head_dim)
    return tuple(name for name in preferred(device) if can_run(name, *given))


def _small(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v by which torch tells what it runs."""
    # gradients are asked for: some GPUs have less shared memory than the backward of a wide head takes
    q, k, v = (
        torch.empty(1, 128, 1, d, dtype=dtype, device=device).requires_grad_() for d in (head_dim, head_dim, v_head_dim)
    )
    return q, k, v


def active_flash() -> str | None:
    """Return the name of the activated flash kernel ("FA3", "FA4"); None: torch's own."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


def why_not_tried(backend: str, q: Tensor, v: Tensor) -> str | None:
    """Return why a backend of TRIED does not serve q `b s h d` and v `b t hk dv`; None: it does, or needs no trial."""
    active = active_flash()
    if backend == "flash" and active is None:
        return None
    return _try(
        backend, active, q.device, q.dtype, q.shape[-1], v.shape[-1], torch.are_deterministic_algorithms_enabled()
    )


@cache
def _try(
    backend: str, active: str | None, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int,
    deterministic: bool,
) -> str | None:  # fmt: skip
    """Make small calls of a backend, and return how it failed; None: it gave the right lse.

    torch calls functions of an activated kernel's package that change between releases, and finds out when it calls them.
    """
    del deterministic  # a switch of torch that the call reads, here a part of the key
    n = 128
    q, k, v, do = (torch.zeros(1, n, 1, d, dtype=dtype, device=device) for d in (*[head_dim] * 2, *[v_head_dim] * 2))
    counts = [(torch.arange(1, n + 1, device=device), True)]
    if backend == "aotriton":
        counts.append((torch.full((n // 2,), n, device=device), False))
    try:
        for keys, causal in counts:
            rows = len(keys)
            launch = OperatorLaunch((0, 1), (0, rows), (0, n), causal=causal)
            o, lse = forward(backend, q[:, :rows], k, v, 1.0, launch)
            backward(backend, do[:, :rows], q[:, :rows], k, v, o, lse, 1.0, launch)
            wanted = keys.to(torch.float32).log()
            torch.testing.assert_close(lse, wanted.expand(1, 1, rows), rtol=1e-4, atol=1e-4)
    except Exception as refusal:
        said = next(iter(str(refusal).splitlines()), "")
        what, remedy = "torch's flash attention on ROCm", 'use impl="portable"'
        if backend == "flash":
            what, remedy = (
                f"the activated {active}",
                "install its release of the time of this torch, or call torch.nn.attention.restore_flash_attention_impl()",
            )
        return f"{what} must run and return lse `b h s` in natural log, got {type(refusal).__name__}: {said}; {remedy}"
    return None


def can_run(backend: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether torch runs a backend on q `b s h d`, k `b t hk d` and v `b t hk dv`."""
    return _torch_runs(backend, q, k, v) and (backend not in TRIED or why_not_tried(backend, q, v) is None)


def _torch_runs(backend: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether torch, without regard to an activated kernel, runs a backend."""
    if check_signatures(backend) is not None:
        return False
    if backend == "flash_cpu":
        return q.shape[-1] == v.shape[-1]
    given = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    params = SDPAParams(*given, None, 0.0, False, q.shape[2] != k.shape[2])
    return can_use_cudnn_attention(params) if backend == "cudnn" else can_use_flash_attention(params)


def forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, scale: float, launch: OperatorLaunch
) -> tuple[Tensor, Tensor]:
    """Return o `b s h dv` and lse `b h s` of a launch, from slices of its rows and keys."""
    if launch.flipped:
        o, lse = forward(backend, q.flip(1), k.flip(1), v.flip(1), scale, launch._replace(flipped=False))
        return o.flip(1), lse.flip(2)
    if backend in TRIED:
        varied = launch.cu_seqlens is not None
        given = (x[0] for x in (q, k, v)) if varied else (q, k, v)
        o, lse, *_ = operator("_flash_attention_forward")(
            *given, *_lengths(q, k, launch), 0.0, launch.causal, False, scale=scale, **_window(launch)
        )
        return (o[None], lse[None]) if varied else (o, lse)
    given = (x.transpose(1, 2) for x in (q, k, v))
    if backend == "cudnn":
        o, lse, *_ = operator(OPERATORS[backend][0])(*given, None, True, 0.0, launch.causal, False, scale=scale)
        lse = lse.view(lse.shape[:3])
    else:
        # its exponential in half precision is short: lse would be wrong by 5e-5
        wide = (x.to(accumulation_dtype(x.dtype)) for x in given)
        o, lse = operator(OPERATORS[backend][0])(*wide, 0.0, launch.causal, scale=scale)
    return o.transpose(1, 2), lse


def backward(
    backend: str,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    launch: OperatorLaunch,
) -> Grads3:
    """Return dq `b s h d`, dk `b t hk d` and dv `b t hk dv` of a launch; o `b s h dv` and lse `b h s` are of finished rows."""
    if launch.flipped:
        rows, keys = (x.flip(1) for x in (do, q, o)), (k.flip(1), v.flip(1))
        do, q, o = rows
        found = backward(backend, do, q, *keys, o, lse.flip(2), scale, launch._replace(flipped=False))
        return found[0].flip(1), found[1].flip(1), found[2].flip(1)
    if backend in TRIED:
        varied = launch.cu_seqlens is not None
        given = (do, q, k, v, o)
        if varied:
            given = tuple(x[0] for x in given)
            lse = lse[0]
        # without dropout the state of the generator is not read
        kinds = (((2,), torch.uint64), ((), torch.uint64)) if backend == "flash" else (((), torch.int64),) * 2
        state, unused = (torch.zeros(shape, dtype=dtype, device=q.device) for shape, dtype in kinds)
        found = operator("_flash_attention_backward")(
            *given,
            lse.contiguous(),
            *_lengths(q, k, launch),
            0.0,
            launch.causal,
            state,
            unused,
            scale=scale,
            **_window(launch),
        )
        return (found[0][None], found[1][None], found[2][None]) if varied else (found[0], found[1], found[2])
    given = (x.transpose(1, 2) for x in (do, q, k, v, o))
    name = OPERATORS[backend][1]
    if backend == "cudnn":
        lse = lse.contiguous().view(*lse.shape, *(1,) * (_cudnn_lse_dims(q.device, q.dtype) - 3))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        found = operator(name)(
            *given, lse, seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, launch.causal, scale=scale
        )
    else:
        wide = (x.to(accumulation_dtype(x.dtype)) for x in given)
        found = operator(name)(*wide, lse, 0.0, launch.causal, scale=scale)
    return found[0].transpose(1, 2), found[1].transpose(1, 2), found[2].transpose(1, 2)


@cache
def _cudnn_lse_dims(device: torch.device, dtype: torch.dtype) -> int:
    """Dims of lse of this torch's cuDNN attention, which its backward takes: `b h s 1`, or `b h s`."""
    x = torch.zeros(1, 1, 128, 64, dtype=dtype, device=device)
    return operator(OPERATORS["cudnn"][0])(x, x, x, None, True)[1].dim()


def _lengths(q: Tensor, k: Tensor, launch: OperatorLaunch) -> tuple[Tensor | None, Tensor | None, int, int]:
    if launch.cu_seqlens is None:
        return None, None, q.shape[1], k.shape[1]
    return *launch.cu_seqlens, *launch.max_seqlens


def _window(launch: OperatorLaunch) -> dict[str, int | None]:
    """Window arguments: -1 is an unbounded side of a window; both None are no window."""
    if launch.window == (None, None):
        return {"window_size_left": None, "window_size_right": None}
    left, right = (-1 if side is None else side for side in launch.window)
    return {"window_size_left": left, "window_size_right": right}
