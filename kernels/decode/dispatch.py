"""Decode: attention of a few new tokens per request over this rank's pages of a cache, as a stack of partials.

Owns the contract of decode kernels and the choice between them; `decode.eager` is the definition, `decode_triton` runs on GPUs.

Shape legend: `b` requests, `s` new tokens of each, 1 to 128; `h` query heads, `hk` key/value heads (`hk` divides `h`);
`d` head_dim of q and k, `dv` of v; `pages` of the pool; `blocks`, columns of the table.

A pool is k `pages hk page_size d` and v `pages hk page_size dv`: a page of one head is contiguous. A block of a request is
(page, start, length): rows 0 .. length - 1 of the page hold the keys at global positions start .. start + length - 1.
Blocks of a request ascend by start and do not overlap. Rows of a page from `length` on may be NaN, and are not used.
An fp8 pool (float8_e4m3fn) comes with a scale for every row of a page: k = k_scale * pool row, and v the same.

Note [Latents]
    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) keeps one row per token: a latent of r columns, which
    every head multiplies by its own k_up and v_up, and dr rotary columns. Decode absorbs both products: with q_nope k_up beside
    q_rope as queries of r + dr columns, the score is q . row, and the weighted sum of latents is multiplied by v_up afterwards.
    So there is one key head, and its values are the first r of its columns. Such a call passes one pool: k `pages 1 page_size
    (r + dr)`, v = k[..., :r], a view of it, and with fp8 one scale per row, given as k_scale and v_scale. Kernels read a row
    once for both products. The result is O `b s h r`. softmax_scale is that of the expanded heads, (dn + dr) ** -0.5, often
    with a factor: it is not a function of r. A row that is not finite is stored as zeros in its first r columns and NaN in the
    other dr, its scale finite: then rows that see it are NaN, and no others.

A decode call leaves a stack of packed parts (Note [Packed parts] of kernels.partials.packed), whose merge is the attention
of this rank's keys. m of a row is the reference point of its l and acc, near its maximum. The division of keys among the
stack follows from shapes and the content of the table alone, so the bits are the same from run to run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ringattn.kernels.decode import configs as decode_configs
from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.kernels.kv.pages import are_latents
from ringattn.kernels.partials.packed import size as parts_len
from ringattn.kernels.registry import (
    Candidate,
    SelectedKernels,
    check_dims,
    check_dtype,
    check_hopper,
    check_triton_device,
    select,
)

MAX_TOKENS = 128
"""Rows of a request that one call takes. More are several requests with the same blocks."""
MAX_LATENT = 512
"""Columns of a latent that kernels for GPUs take; rotary columns are at most 256."""
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class PageTable:
    """This rank's blocks of every request; int32, on the device of the pool.

    Attributes:
        pages: `b blocks`: the page of each block. Columns from counts[b] on are garbage, here and below.
        starts: `b blocks`: the global position of its first row; ascending.
        lengths: `b blocks`: how many of its rows count.
        counts: `b`: how many blocks a request has on this rank; 0 is a request without keys here.
    """

    pages: Tensor
    starts: Tensor
    lengths: Tensor
    counts: Tensor


class DecodeCall(NamedTuple):
    """The inputs of a decode call.

    Attributes:
        q: `b s h d`, fp16, bf16, fp32 (fp64 eager); last dim contiguous.
        k: `pages hk page_size d`, q's dtype, or float8_e4m3fn with k_scale; last dim contiguous.
        v: `pages hk page_size dv`, like k; or `k[..., :dv]` (Note [Latents]).
        table: The blocks of every request.
        lo: `b s` int32: the new token x of b sees the keys at global positions lo[b, x] <= p < hi[b, x].
        hi: `b s` int32.
        positions: `b s` int32: where the new tokens sit; matters to ALiBi only.
        score: Without sinks and biases.
        k_scale: `pages hk page_size` fp32, with fp8 only.
        v_scale: Like k_scale; k_scale itself for latents.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: PageTable
    lo: Tensor
    hi: Tensor
    positions: Tensor
    score: Score
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def latent(self) -> bool:
        """Whether v is the first columns of k (Note [Latents])."""
        return are_latents(self.k, self.v)


@dataclass(frozen=True)
class _Request:
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    page_size: int
    explicit: bool
    latent: bool
    rows: int


def num_splits(
    b: int,
    s: int,
    h: int,
    hk: int,
    blocks: int,
    page_size: int,
    device: torch.device,
    *,
    head_dim: int = 128,
    kv_dtype: torch.dtype = torch.bfloat16,
    same_length: bool = False,
    latent: bool = False,
) -> int:
    """Number of partials that a decode call should leave: enough to fill the device, few enough to be cheap to merge."""
    if not _has_config(device, head_dim, kv_dtype, latent):
        return 1
    from ringattn.kernels.attention.portable.configs import kind_of

    kind, rows = kind_of(device), s * h // hk
    size, hopper = kv_dtype.itemsize, kind == "sm90" and page_size % 64 == 0
    if hopper and latent and size <= 2:
        config = decode_configs.LATENT_HOPPER[size]
    elif hopper and not latent and size <= 2 and rows <= decode_configs.FEW_ROWS and head_dim <= 128:
        config = decode_configs.PAGED_HOPPER[size]
    else:
        config = decode_configs.choose(kind, size, head_dim, rows, latent=latent)
    sms = decode_configs.multiprocessors(device)
    return decode_configs.splits(b, s, h, hk, blocks, page_size, sms, config, same_length=same_length)


def tile_tokens(
    h: int,
    hk: int,
    device: torch.device,
    *,
    head_dim: int = 128,
    kv_dtype: torch.dtype = torch.bfloat16,
    latent: bool = False,
) -> int:
    """Largest number of rows of a request that share one pass over its keys: the least that calls of many rows should bring."""
    if not _has_config(device, head_dim, kv_dtype, latent):
        return 16
    from ringattn.kernels.attention.portable.configs import kind_of

    many = decode_configs.MANY_ROWS + 1
    config = decode_configs.choose(kind_of(device), kv_dtype.itemsize, head_dim, many, latent=latent)
    return max(1, min(MAX_TOKENS, config.block_m * hk // h))


def _has_config(device: torch.device, head_dim: int, kv_dtype: torch.dtype, latent: bool) -> bool:
    most = MAX_LATENT + 256 if latent else 256
    return device.type == "cuda" and 1 <= head_dim <= most and kv_dtype.itemsize <= 4


def decode(call: DecodeCall, parts: Tensor, *, split_plan: Tensor | None = None, impl: str = "auto") -> None:
    """Attention of the new tokens over the blocks of a table, as a stack of partials that are not normalised.

    On a GPU nothing waits for the device, and what is launched depends on shapes alone: captured in a CUDA graph, a call
    serves whatever is written into the tables and bounds later.

    Args:
        call: The inputs.
        parts: `splits parts_len(b * s * h, dv)`, fp32 (fp64 for fp64 inputs), last dim contiguous: overwritten. Any number of
            splits is right; `num_splits` returns a fast one.
        split_plan: What `plan_splits` found for tensors of these shapes with the same table and bounds; None: it is found again.
        impl: "auto", or the name of a kernel, which then serves or is refused.
    """
    _kernel_of(call, impl).decode(call, parts, split_plan=split_plan)


def plan_splits(call: DecodeCall, splits: int, *, impl: str = "auto") -> Tensor | None:
    """Division of the blocks of a table among programs, which is the same for all layers: for calls of `decode` to be told.

    In stream order on a GPU, and capturable.

    Returns:
        Integers for the kernel that serves the call; None where it needs none.
    """
    return _kernel_of(call, impl).plan_splits(call, splits)


def _kernel_of(call: DecodeCall, impl: str) -> ModuleType:
    q, k, v = call[:3]
    dims, rows = (q.shape[-1], v.shape[-1], k.shape[-2]), q.shape[1] * q.shape[2] // k.shape[1]
    return select_decode_kernel(q.device, q.dtype, k.dtype, *dims, impl=impl, latent=call.latent, rows=rows).kernels


def check_decode(call: DecodeCall, parts: Tensor) -> None:
    """Raise the errors of `decode`."""
    q, k, v, table, lo, hi, positions, score, k_scale, v_scale = call
    _expect(q.ndim == 4 and k.ndim == 4 and v.ndim == 4, "q, k and v must have 4 dims", f"{q.ndim}, {k.ndim}, {v.ndim}")
    b, s, h, d = q.shape
    pages, hk, page_size, dv = v.shape
    _expect(
        1 <= s <= MAX_TOKENS,
        f"q must have 1 to {MAX_TOKENS} new tokens per request",
        f"{s}; cut them into several requests",
    )
    _expect(hk > 0 and h % hk == 0, "k must have a number of heads that divides q's", f"{hk} and {h}")
    _expect(hk == 1 or not call.latent, "k must have one head where v is columns of it", str(hk))
    _expect_shape("k", k, (pages, hk, page_size, d))
    _expect(k.dtype == v.dtype, "k and v must have one dtype", f"{k.dtype} and {v.dtype}")
    _expect(k.dtype in (q.dtype, FP8), f"k must have q's dtype {q.dtype} or {FP8}", str(k.dtype))
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k.dtype != FP8:
            _expect(x is None, f"{name} must be None unless k and v are {FP8}", "a tensor")
            continue
        _expect(x is not None, f"{name} must be given when k and v are {FP8}", "None")
        _expect_shape(name, cast(Tensor, x), (pages, hk, page_size), torch.float32)
    if call.latent and k_scale is not None and v_scale is not None:
        _expect(
            k_scale.data_ptr() == v_scale.data_ptr(),
            "v_scale must be k_scale where v is columns of k",
            "another tensor",
        )
    _expect(table.pages.ndim == 2, "pages must be `b blocks`", f"{tuple(table.pages.shape)}")
    blocks = table.pages.shape[1]
    strides = {x.stride() for x in (table.pages, table.starts, table.lengths)}
    _expect(len(strides) == 1, "pages, starts and lengths of the table must have the same strides", str(strides))
    for name in ("pages", "starts", "lengths"):
        _expect_shape(f"table.{name}", getattr(table, name), (b, blocks), torch.int32)
    _expect_shape("table.counts", table.counts, (b,), torch.int32)
    for name, x in (("lo", lo), ("hi", hi), ("positions", positions)):
        _expect_shape(name, x, (b, s), torch.int32)
    _expect(parts.ndim == 2 and parts.shape[0] > 0, "parts must be `splits numbers`", f"{tuple(parts.shape)}")
    _expect_shape("parts", parts, (parts.shape[0], parts_len(b * s * h, dv)), accumulation_dtype(q.dtype))
    if score.alibi_slopes is not None:
        _expect_shape("alibi_slopes", score.alibi_slopes, (h,))
    rows = {"q": q, "k": k, "v": v, "parts": parts, "table.pages": table.pages, "lo": lo, "hi": hi}
    for name, x in rows.items():
        _expect(x.stride(-1) == 1 or x.shape[-1] <= 1, f"{name} must have a contiguous last dim", f"{x.stride()}")
    given = (k, v, *vars(table).values(), lo, hi, positions, parts, k_scale, v_scale, score.alibi_slopes)
    devices = {x.device for x in given if x is not None} | {q.device}
    _expect(len(devices) == 1, "all tensors must be on one device", ", ".join(sorted(map(str, devices))))
    for name in ("sinks", "key_bias", "bias"):
        if getattr(score, name) is not None:
            remedy = "give them to what merges the partials" if name == "sinks" else "use prefill for it"
            raise NotImplementedError(f"decode serves no {name}, got some; {remedy}")
    if score.dropout_p:
        raise NotImplementedError(f"decode serves no dropout, got dropout_p={score.dropout_p}; decode without it")


def _expect(holds: bool, what: str, got: str) -> None:
    if not holds:
        raise ValueError(f"{what}, got {got}")


def _expect_shape(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    _expect(tuple(x.shape) == shape, f"{name} must have shape {shape}", str(tuple(x.shape)))
    _expect(dtype in (None, x.dtype), f"{name} must be {dtype}", str(x.dtype))


def _paged_hopper(request: _Request) -> tuple[bool, str]:
    if (why_not := _obstacle_to_hopper(request)) is not None:
        return False, why_not
    if request.head_dim not in (64, 128) or request.v_head_dim not in (64, 128):
        return False, f"head_dim and v_head_dim must be 64 or 128, got {request.head_dim} and {request.v_head_dim}"
    if request.rows > decode_configs.FEW_ROWS:
        return False, f"a key head must have at most {decode_configs.FEW_ROWS} rows of queries, got {request.rows}"
    return check_hopper(request.device)


def _obstacle_to_hopper(request: _Request) -> str | None:
    why_not = check_dtype(request.dtype, "float16", "bfloat16")
    if why_not is None and request.kv_dtype not in (request.dtype, FP8):
        why_not = f"k must have q's dtype or {FP8}, got {request.kv_dtype}"
    if why_not is None and request.page_size % 64:
        why_not = f"page_size must be a multiple of 64, got {request.page_size}"
    return why_not


def _latent_hopper(request: _Request) -> tuple[bool, str]:
    r, d = request.v_head_dim, request.head_dim
    if (why_not := _obstacle_to_hopper(request)) is not None:
        return False, why_not
    unit = 16 // request.kv_dtype.itemsize
    if r not in (128, 256, 512) or not r <= d <= r + 64 or d % unit:
        return False, (
            f"latents must have 128, 256 or 512 columns and up to 64 rotary ones, in multiples of {unit}, got {r} of {d}"
        )
    return check_hopper(request.device)


def _portable(request: _Request) -> tuple[bool, str]:
    dims = {"head_dim": request.head_dim, "v_head_dim": request.v_head_dim}
    why_not = check_dtype(request.dtype, "float16", "bfloat16", "float32")
    if why_not is None and not request.latent:
        why_not = check_dims(16, **dims)
    elif why_not is None:
        r, rotary = request.v_head_dim, request.head_dim - request.v_head_dim
        if not 16 <= r <= MAX_LATENT or rotary > 256:
            why_not = f"latents must have 16 to {MAX_LATENT} columns and at most 256 rotary ones, got {r} and {rotary}"
    if why_not is not None:
        return False, why_not
    for name, dim in dims.items():
        if request.kv_dtype == FP8 and dim % 2:
            return False, f"{name} of fp8 pages must be even, got {dim}"
    size = request.page_size
    if not 16 <= size <= 256 or size & (size - 1):
        return False, f"page_size must be a power of two between 16 and 256, got {size}"
    serves, why = check_triton_device(request.device, explicit=request.explicit)
    if serves and request.kv_dtype == FP8 and request.device.type == "cuda" and torch.version.hip is not None:
        return False, "device must be a CUDA GPU for fp8 pages, got a ROCm device"
    return serves, why


def _eager(request: _Request) -> tuple[bool, str]:
    why_not = check_dtype(request.dtype, "float16", "bfloat16", "float32", "float64")
    return why_not is None, why_not or "plain torch serves any device, head_dim and page_size"


_ANYWHERE = (Candidate("portable", "decode.decode_triton", _portable), Candidate("eager", "decode.eager", _eager))
_TABLE = (Candidate("hopper", "decode.paged_hopper", _paged_hopper), *_ANYWHERE)
_LATENT_TABLE = (Candidate("hopper", "decode.latent_hopper", _latent_hopper), *_ANYWHERE)


@functools.lru_cache
def select_decode_kernel(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    page_size: int,
    *,
    impl: str = "auto",
    latent: bool = False,
    rows: int = 1,
) -> SelectedKernels[ModuleType]:
    """Return the fastest decode kernel that serves a call, or the one that is asked for: a module with `decode` and `plan_splits`.

    Args:
        impl: "auto", or the name of a kernel, which then serves or is refused, never replaced.
        latent: Whether v is the first v_head_dim columns of k (Note [Latents]).
        rows: Query rows of a request that share a key head: new tokens times heads of a group.

    Example:
        >>> print(select_decode_kernel(torch.device("cpu"), torch.float32, torch.float32, 64, 64, 16, impl="eager"))
        eager: plain torch serves any device, head_dim and page_size
    """
    table = _LATENT_TABLE if latent else _TABLE
    names = [row.name for row in table]
    if impl not in ("auto", *names):
        raise ValueError(f'impl must be "auto" or one of {", ".join(names)}, got "{impl}"; use "auto"')
    request = _Request(device, dtype, kv_dtype, head_dim, v_head_dim, page_size, impl != "auto", latent, rows)
    return select("decode kernel", table, request, impl, "cast q to a supported dtype")
