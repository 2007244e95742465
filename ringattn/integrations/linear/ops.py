"""Gated delta rule, Mamba-2 scan and causal convolution over a sequence sharded around a ring.

Shapes: b batch, s rows of this rank, k key heads, h value heads (a multiple), d width of keys, e width of values, c channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ringattn.integrations.linear.fla_scan import fla_refusal, scan_rows_fla
from ringattn.integrations.linear.local_scan import scan_rows
from ringattn.integrations.linear.rank_scan import keep_in_graph, rows_before, scan_ranks
from ringattn.integrations.linear.segments import Chain, chain_of
from ringattn.plan.sharding import Sharding, check_sharding
from ringattn.tensor_checks import check_tensor

KERNELS = ("auto", "fla", "torch")
"""Kernels of the scan of one rank's rows."""

_EPSILON = 1e-6  # of the norm of queries and keys, as in fla and transformers


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    sharding: Sharding,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    kernels: str = "auto",
) -> Tensor:
    """Return the gated delta rule over the whole sequence, at the rows of this rank. Differentiable; every rank calls it.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T and o_t = scale S_t^T q_t (Yang, Kautz and Hatamizadeh 2024,
    "Gated Delta Networks", arXiv 2412.06464, equation 10, with S transposed). States start from zero in each document.
    States and sums are kept in fp32, or in fp64 for fp64 values. One all-gather moves h (d d + d e) numbers per run.

    Args:
        q: Queries of this rank, `b s k d`, fp16, bf16, fp32 or fp64.
        k: Keys, `b s k d`.
        v: Values, `b s h e`; h is a multiple of k, and consecutive value heads share a key head.
        g: Decays, natural log, `b s h`, at most 0.
        beta: Step sizes, `b s h`.
        sharding: The rows of each rank, in any layout but "striped"; its documents do not see each other.
        scale: Factor on queries; default d ** -0.5.
        normalize_qk: Whether to divide each query and key by its length first: x / sqrt(sum x^2 + 1e-6).
        kernels: "torch" (any device), "fla" (the Triton kernels of flash-linear-attention, on a GPU in fp16 or bf16), or
            "auto": fla where it is installed and serves the call.

    Returns:
        `b s h e`, in the dtype of v.

    Raises:
        ValueError: A shape, dtype, device, layout or option is inconsistent, or ranks differ; raised on every rank where a call of
            this kind is the first.
        TypeError: An argument is no tensor, or no sharding.
        NotImplementedError: A tensor is a DTensor, or fla was asked for and cannot serve.

    Example:
        >>> from ringattn import Ring
        >>> x, one = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1)
        >>> gated_delta_rule(x, x, x, 0 * one, 0.5 * one, Ring().sharding(3, "contiguous")).flatten().tolist()
        [0.5, 0.75, 0.875]
    """
    with _propagate_errors(sharding):
        chain = _check(q, k, v, sharding, {"g": g, "beta": beta})
        uses_fla = _resolve_kernels(kernels, k, v)
    _compare("gated_delta_rule", sharding, q, k, v, g, beta)
    full = _scan_dtype(v)
    q, k, g = q.to(full), k.to(full), g.to(full)
    if normalize_qk:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    q = q * (k.shape[3] ** -0.5 if scale is None else scale)
    q, k, values, beta = (x.to(v.dtype if uses_fla else full) for x in (q, k, v, beta))
    return _scan(q, k, values, g, beta, chain, sharding, uses_fla).to(v.dtype)


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    sharding: Sharding,
    *,
    d: Tensor | None = None,
    kernels: str = "auto",
) -> Tensor:
    """Return the scan of Mamba-2 (SSD) over the whole sequence, at the rows of this rank. Differentiable; every rank calls it.

    S_t = exp(dt_t a) S_(t-1) + dt_t B_t x_t^T and y_t = S_t^T C_t + D x_t (Dao and Gu 2024, "Transformers are SSMs",
    arXiv 2405.21060, equations 1 and 2, with the discretization of its section 7 and S transposed). States start from zero in each
    document. States and sums are kept in fp32, or in fp64 for fp64 values. One all-gather moves h (1 + n p) numbers per run.

    Args:
        x: Inputs of this rank, `b s h p`, fp16, bf16, fp32 or fp64.
        dt: Time steps, `b s h`, after bias, softplus and limits.
        a: `h`, negative.
        b: `b s groups n`; consecutive heads share a group.
        c: `b s groups n`.
        sharding: See `gated_delta_rule`.
        d: `h`, of the skip connection; None: there is none.
        kernels: See `gated_delta_rule`.

    Returns:
        `b s h p`, in the dtype of x.

    Raises:
        ValueError: See `gated_delta_rule`, as for the other errors.
        TypeError: An argument is no tensor, or no sharding.
        NotImplementedError: A tensor is a DTensor, or fla was asked for and cannot serve.

    Example:
        >>> from ringattn import Ring
        >>> x, one = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1)
        >>> mamba2_scan(x, one, torch.tensor([-0.7]), x, x, Ring().sharding(3, "contiguous")).shape
        torch.Size([1, 3, 1, 1])
    """
    with _propagate_errors(sharding):
        chain = _check(c, b, x, sharding, {"dt": dt}, names="cbx")
        for name, per_head in (("a", a), ("d", d)):
            if per_head is None:
                continue
            check_tensor(name, per_head)
            if tuple(per_head.shape) != (x.shape[2],):
                raise ValueError(
                    f"{name} must have shape {(x.shape[2],)}, got {tuple(per_head.shape)}; one number per head"
                )
        uses_fla = _resolve_kernels(kernels, b, x)
    _compare("mamba2_scan", sharding, c, b, x, dt)
    full = _scan_dtype(x)
    dt = dt.to(full)
    q, k, values = (y.to(x.dtype if uses_fla else full) for y in (c, b, x.to(full) * dt[..., None]))
    y = _scan(q, k, values, dt * a.to(full), None, chain, sharding, uses_fla)
    return (y if d is None else y + d.to(full)[:, None] * x.to(full)).to(x.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, sharding: Sharding, *, activation: str | None = None
) -> Tensor:
    """Return a causal depthwise convolution over the whole sequence, at the rows of this rank. Differentiable; every rank calls it.

    y_t = bias + sum_i weight[i] x_(t - taps + 1 + i) per channel; rows before the document are zeros. One all-gather moves taps - 1
    rows per run.

    Args:
        x: Rows of this rank, `b s c`.
        weight: `c taps`.
        bias: `c`, or None.
        sharding: See `gated_delta_rule`.
        activation: "silu", applied to the result; None: there is none.

    Returns:
        `b s c`, in the dtype of x.

    Raises:
        ValueError: See `gated_delta_rule`, as for the other errors.
        TypeError: An argument is no tensor, or no sharding.
        NotImplementedError: A tensor is a DTensor.

    Example:
        >>> from ringattn import Ring
        >>> x = torch.tensor([1.0, 2.0, 3.0])[None, :, None]
        >>> causal_conv1d(x, torch.tensor([[10.0, 1.0]]), None, Ring().sharding(3, "contiguous")).flatten().tolist()
        [1.0, 12.0, 23.0]
    """
    with _propagate_errors(sharding):
        check_sharding(sharding)
        chain = chain_of(sharding)
        for name, tensor in (("x", x), ("weight", weight), *(() if bias is None else (("bias", bias),))):
            check_tensor(name, tensor)
        if x.dim() != 3 or x.shape[1] != sharding.shard_len:
            raise ValueError(
                f"x must be `batch rows channels` with this rank's {sharding.shard_len} rows, got shape {tuple(x.shape)}; "
                "pass sharding.shard(x)"
            )
        if weight.dim() != 2 or weight.shape[0] != x.shape[2]:
            raise ValueError(
                f"weight must be `channels taps` with {x.shape[2]} channels, got shape {tuple(weight.shape)}; "
                "pass conv1d.weight.squeeze(1)"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape {(x.shape[2],)}, got {tuple(bias.shape)}; one number per channel")
        if activation not in (None, "silu"):
            raise ValueError(f"activation must be 'silu' or None, got {activation!r}; apply another one to the result")
    _compare("causal_conv1d", sharding, x)
    dtype, count = x.dtype, weight.shape[1] - 1
    before, gathered = rows_before(x, count, chain, sharding)
    # each segment behind the rows before it: zeros where its document begins
    pieces, kept, place = list[Tensor](), list[Tensor](), 0
    for number, run in enumerate(chain.runs):
        for segment in chain.segments[slice(*run.segments)]:
            halo = before[:, number * count : (number + 1) * count]
            pieces += [halo if segment.continues else torch.zeros_like(halo)]
            pieces += [x[:, segment.start : segment.start + segment.length]]
            kept.append(torch.arange(place, place + segment.length, device=x.device))
            place += count + segment.length
    if not pieces:
        # no rows: the weights get gradients of zero, as from other layers
        return keep_in_graph((x * weight[:, -1] + (0 if bias is None else bias)).to(dtype), gathered)
    rows = torch.cat(pieces, 1).to(weight.dtype).transpose(1, 2)
    y = torch.nn.functional.conv1d(rows, weight[:, None], bias, groups=x.shape[2]).transpose(1, 2)
    y = y if len(kept) == 1 else y.index_select(1, torch.cat(kept))
    y = torch.nn.functional.silu(y) if activation else y
    return keep_in_graph(y.to(dtype), gathered)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chain: Chain, sharding: Sharding, uses_fla: bool
) -> Tensor:
    """Scan the rows of this rank, the runs of all ranks, and correct the outputs by the states from before."""
    zero = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=_scan_dtype(v))
    width = 1 if beta is None else k.shape[3]
    if not chain.segments:
        # no rows: every input gets a gradient of no rows
        v = v + sum(x.sum() for x in (q, k, g, *(() if beta is None else (beta,))))
        return keep_in_graph(v, scan_ranks([], [], zero + v.sum(), width, chain, sharding)[1])
    # states are sums over thousands of rows: autocast would round each product
    with torch.autocast(v.device.type, enabled=False):
        local = (scan_rows_fla if uses_fla else scan_rows)(q, k, v, g, beta, chain)
        incoming, gathered = scan_ranks(local.decays, local.states, zero, width, chain, sharding)
        return keep_in_graph(local.finish(incoming), gathered)


def _propagate_errors(sharding: Sharding) -> AbstractContextManager[None]:
    named = isinstance(sharding, Sharding) and sharding.ring_name is not None
    return sharding.ring.propagate_errors() if named else nullcontext()


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    per_head: dict[str, Tensor],
    names: Sequence[str] = "qkv",
) -> Chain:
    """Refuse tensors that do not fit each other or the sharding; return the chain of its runs."""
    check_sharding(sharding)
    chain = chain_of(sharding)
    for name, x in (*zip(names, (q, k, v), strict=True), *per_head.items()):
        check_tensor(name, x)
        if x.device != v.device or not x.is_floating_point():
            raise ValueError(
                f"{name} must be numbers on {v.device} like {names[2]}, got {x.dtype} on {x.device}; convert it"
            )
    for name, x in zip(names, (q, k, v), strict=True):
        if x.dim() != 4 or x.shape[1] != sharding.shard_len:
            raise ValueError(
                f"{name} must be `batch rows heads width` with this rank's {sharding.shard_len} rows, got shape "
                f"{tuple(x.shape)}; pass sharding.shard({name})"
            )
    if q.shape != k.shape or k.shape[0] != v.shape[0] or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{names[0]} and {names[1]} must have one shape, and {names[2]} a multiple of their heads, got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}; repeat or split heads"
        )
    for name, x in per_head.items():
        if x.shape != v.shape[:3]:
            raise ValueError(
                f"{name} must have shape {tuple(v.shape[:3])}, got {tuple(x.shape)}; one number per row and head of {names[2]}"
            )
    return chain


def _resolve_kernels(kernels: str, k: Tensor, v: Tensor) -> bool:
    """Return whether fla computes the scan of this rank's rows."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, got {kernels!r}; leave it out for 'auto'")
    refusal = None if kernels == "torch" else fla_refusal(k.shape[3], v.shape[3], v.dtype, v.device)
    if kernels == "fla" and refusal is not None:
        raise NotImplementedError(f"kernels='fla' must {refusal}")
    return kernels != "torch" and refusal is None


def _scan_dtype(v: Tensor) -> torch.dtype:
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def _compare(call: str, sharding: Sharding, *tensors: Tensor) -> None:
    """Raise on every rank where ranks make different calls; only the first call of a kind is compared."""
    if sharding.world_size == 1 or torch.compiler.is_compiling():
        return
    differentiable = torch.is_grad_enabled()
    kinds = [
        ([*x.shape[:1], *x.shape[2:]], str(x.dtype), x.device.type, differentiable and x.requires_grad) for x in tensors
    ]
    sharding.ring.assert_equal_once(f"a call of {call}", f"{kinds} {sharding.text}", f"{call}({kinds})")
