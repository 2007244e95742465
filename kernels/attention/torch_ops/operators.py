"""torch's attention operators behind one signature: which of them run here, and how each is called.

    flash      aten::_flash_attention_forward and _backward: windows and variable lengths; FlashAttention-3 or -4 where
               `torch.nn.attention.activate_flash_attention_impl` was called
    cudnn      aten::_scaled_dot_product_cudnn_attention and _backward: full or square causal
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
    "flash_cpu": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
}
"""Forward and backward of each backend."""

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
    if head_dim % 8 or v_head_dim % 8:
        return (), f"head_dim and v_head_dim must be multiples of 8, got {head_dim} and {v_head_dim}"
    # gradients are asked for: some GPUs have less shared memory than the backward of a wide head takes
    q, k, v = (
        torch.empty(1, 128, 1, d, dtype=dtype, device=device).requires_grad_() for d in (head_dim, head_dim, v_head_dim)
    )
    found = tuple(
        name for name in preferred(device) if not (deterministic and name == "cudnn") and can_run(name, q, k, v)
    )
    why = why_not_active(q, v) if "flash" not in found and _torch_runs("flash", q, k, v) else None
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


def preferred(device: torch.device) -> Sequence[str]:
    """Return the backends of a device, the faster first: an activated flash kernel, cuDNN on data centre GPUs, flash elsewhere.

    torch's own order (`check_prefer_cudnn_attention` in sdp_utils.cpp) is the same.
    """
    if device.type == "cpu":
        return ("flash_cpu",)
    centre = active_flash() is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return ("cudnn", "flash") if centre else ("flash", "cudnn")


def active_flash() -> str | None:
    """Return the name of the activated flash kernel ("FA3", "FA4"); None: torch's own."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


def why_not_active(q: Tensor, v: Tensor) -> str | None:
    """Return why the activated flash kernel does not serve q `b s h d` and v `b t hk dv`; None: it does, or none was activated."""
    active = active_flash()
    if active is None:
        return None
    return _try_active(
        active, q.device, q.dtype, q.shape[-1], v.shape[-1], torch.are_deterministic_algorithms_enabled()
    )


@cache
def _try_active(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, deterministic: bool
) -> str | None:
    """Make a small call of an activated flash kernel, and return how it failed; None: it gave the right lse.

    torch calls functions of the kernel's package that change between releases, and finds out when it calls them.
    """
    del deterministic  # a switch of torch that the call reads, here a part of the key
    n = 128
    q, k, v, do = (torch.zeros(1, n, 1, d, dtype=dtype, device=device) for d in (*[head_dim] * 2, *[v_head_dim] * 2))
    launch = OperatorLaunch((0, 1), (0, n), (0, n), causal=True)
    try:
        o, lse = forward("flash", q, k, v, 1.0, launch)
        backward("flash", do, q, k, v, o, lse, 1.0, launch)
        wanted = torch.arange(1, n + 1, dtype=torch.float32, device=device).log()
        torch.testing.assert_close(lse, wanted.expand(1, 1, n), rtol=1e-4, atol=1e-4)
    except Exception as refusal:
        said = next(iter(str(refusal).splitlines()), "")
        return (
            f"the activated {name} must run and return lse `b h s` in natural log, got {type(refusal).__name__}: {said}; "
            "install its release of the time of this torch, or call torch.nn.attention.restore_flash_attention_impl()"
        )
    return None


def can_run(backend: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether torch runs a backend on q `b s h d`, k `b t hk d` and v `b t hk dv`."""
    return _torch_runs(backend, q, k, v) and (backend != "flash" or why_not_active(q, v) is None)


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
    if backend == "flash":
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
    if backend == "flash":
        varied = launch.cu_seqlens is not None
        given = (do, q, k, v, o)
        if varied:
            given = tuple(x[0] for x in given)
            lse = lse[0]
        # without dropout the state of the generator is not read
        state, unused = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))
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
