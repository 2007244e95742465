"""Prefill on pages: a few new rows attend to a rank's pages in place, with the decode kernel.

Note [In place or copied]
    The forward of training needs keys in one piece, so a prefill that uses it copies the pages of every layer first. The decode
    kernel reads pages in place, and multiplies about SLOWNESS times as slowly, also for rows that only fill up its tiles. Of r new
    rows, padded to R, over t stored keys it costs about
        (SLOWNESS R - r) * 4 t h d / (FLOP per second) more,   and the copy   ~ t hk 2 d e / (bytes per second)
    so pages are read in place while (SLOWNESS R - r) h <= hk e FLOPS_PER_BYTE. A request counts with its tokens, under a window
    with the visible ones, which are all that is read in place, while all would be copied. One H200, 32 query heads on 8, head_dim
    128, bf16; microseconds per layer, copied / in place:
        kept tokens    32 rows     64 rows      128 rows       256 rows       512 rows
            32,768    123 /  56   133 / 107    177 /  195     275 /  368     473 /  768
           131,072    411 / 197   481 / 398    676 /  745    1067 / 1433
           262,144    789 / 384   945 / 838   1310 / 1482
    So it is up to about 96 rows for each request.

Note [Rectangles]
    The kernel takes s rows of each of its requests. The rows of a prompt that attend here are cut into as few spans as its tile
    allows, all as long as the longest; each is a request to the kernel, with the blocks of its own. Missing rows of the last span
    of a request repeat its last row.

    Example: 70 and 3 rows, 32 in a tile: s = 24, four requests: rows 0-23, 24-47, 48-69 and two of row 69, 70-72 and 21 of row 72.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringattn.inference.forward_batch import ForwardBatch
from ringattn.inference.kv_pool import KVPool
from ringattn.inference.latent_weights import UpWeights, key_heads
from ringattn.kernels.decode.dispatch import DecodeCall, PageTable, decode, num_splits, parts_len, tile_tokens
from ringattn.kernels.interface import Score, SoftmaxState, accumulation_dtype
from ringattn.kernels.partials.packed import finish_parts, merge_parts, views
from ringattn.plan.expressions import Mask

KV_ACCESS_MODES = ("auto", "pages", "copies")
SLOWNESS = 1.6
"""Time of multiplications of the decode kernel in that of the forward of training, for rows that fill its tiles."""
FLOPS_PER_BYTE = 120.0
"""FLOP of the forward of training in the time in which a byte of the pages is copied and the copy read."""
MAX_RECTANGLES = 256
"""Requests to one call of the kernel, each program of which reads the bounds of all; beyond it "auto" copies."""
RowSpan = tuple[int, int, int]
"""(start, length, request): positions start .. start + length - 1 of the request at this place in its batch."""


def rectangle_rows(counts: Sequence[int], most: int) -> int:
    """Return the rows of a rectangle (Note [Rectangles]), for so many rows of each request, at most `most` in a tile."""
    return max((-(-count // -(-count // most)) for count in counts if count), default=1)


def is_paged_faster(
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    element_size: int,
    most: int,
    left: int | None = None,
    products: tuple[float, float] = (1.0, 1.0),
    expansion: float = 0.0,
) -> bool:
    """Return whether reading pages in place is faster (Note [In place or copied]); the same on all ranks.

    Args:
        counts: New rows of each request.
        lengths: Tokens of each request, the new ones included.
        heads: Query heads.
        kv_heads: Key heads.
        element_size: Bytes of an element of the pages.
        most: Rows that share a tile.
        left: Tokens that a row sees to its left; None: all.
        products: FLOP of one head for a row and a key, in place and over copies, in units of 2 FLOP per stored column of a head.
        expansion: FLOP of the expansion of a key of latents, in the same unit.
    """
    s = rectangle_rows(counts, most)
    if sum(-(-count // s) for count in counts) > MAX_RECTANGLES:
        return False
    slower = saved = 0.0
    for count, length in zip(counts, lengths, strict=True):
        seen = length if left is None else min(length, left + count)
        slower += seen * (SLOWNESS * -(-count // s) * s * products[0] - count * products[1]) * heads
        saved += length * (kv_heads * element_size * FLOPS_PER_BYTE + expansion)
    return slower <= saved


def resolve_kv_access(
    wanted: str, step: ForwardBatch, q: Tensor, up: UpWeights | None, left: int | None, fresh: bool
) -> str:
    """Return how cached rows are read: as wanted, or by Note [In place or copied] from numbers that are equal on all ranks.

    `left` is the number of tokens that a row sees to its left (None: all); fresh: no rows were stored before.
    """
    cache, h = step.cache, q.shape[2]
    if wanted != "auto":
        return wanted
    if fresh or cache.decode_kernel(q.dtype).name == "eager":
        return "copies"
    sizes: dict[str, Any] = {"heads": h, "kv_heads": cache.kv_heads, "element_size": cache.kv_dtype.itemsize}
    if up is not None:
        # by Note [Expanded or absorbed]
        c, r = cache.head_dim, cache.v_head_dim
        sizes["products"] = (c + r) / c, sum(key_heads(cache, up)[1:]) / c
        sizes["expansion"] = up.expansion_flops(c - r) / (2 * c)
    most = rows_of_tile(cache, h)
    return "pages" if is_paged_faster(step.counts, step.lengths, most=most, left=left, **sizes) else "copies"


def rows_of_tile(cache: KVPool, heads: int) -> int:
    """Return `tile_tokens` of the pages of a cache."""
    sizes: dict[str, Any] = {"head_dim": max(cache.head_dim, cache.v_head_dim), "kv_dtype": cache.kv_dtype}
    return tile_tokens(heads, cache.kv_heads, cache.device, latent=bool(cache.latent), **sizes)


@dataclass(frozen=True, eq=False)
class PagedRows:
    """Rows that attend to this rank's pages (Note [Rectangles]); planned once for all layers.

    Attributes:
        table: Blocks of each rectangle's request.
        terms: Per interval of the mask `n s` int32 the first position that each row of the n rectangles sees, and one past the
            last one; intervals of a row do not overlap.
        positions: `n s` int32.
        rows: `n s` int64: index of each row; None: they are all rows in their order.
        back: `rows` int64: place of each row in the rectangles; None with rows.
    """

    table: PageTable
    terms: tuple[tuple[Tensor, Tensor], ...]
    positions: Tensor
    rows: Tensor | None
    back: Tensor | None

    def partial(self, cache: KVPool, layer: int, q: Tensor, score: Score) -> Tensor:
        """Return the stack of packed parts of the rectangles over this rank's keys, for q `rows h d`, without sinks."""
        (n, s), (_, h, d), dv = self.positions.shape, q.shape, cache.v_head_dim
        found = (q if self.rows is None else q.index_select(0, self.rows.view(-1))).view(n, s, h, d)
        blocks, width = self.table.pages.shape[1], max(d, dv)
        sizes = {"head_dim": width, "kv_dtype": cache.kv_dtype, "latent": bool(cache.latent)}
        height = num_splits(n, s, h, cache.kv_heads, blocks, cache.page_size, q.device, **sizes)
        size, wide = parts_len(n * s * h, dv), accumulation_dtype(q.dtype)
        parts = torch.empty(height * len(self.terms), size, dtype=wide, device=q.device)
        pools, scales, score = (cache.k[layer], cache.v[layer]), cache.scales(layer), replace(score, sinks=None)
        for i, bounds in enumerate(self.terms):
            call = DecodeCall(found, *pools, self.table, *bounds, self.positions, score, *scales)
            decode(call, parts[i * height : (i + 1) * height])
        return parts

    def attend(self, cache: KVPool, layer: int, q: Tensor, score: Score) -> Tensor:
        """Return the finished attention `b s h dv` of rows q `b s h d` that see keys of this rank only."""
        b, s, h, _ = q.shape
        parts = self.partial(cache, layer, q.flatten(0, 1), score)
        n, rows = self.positions.shape
        o = torch.empty(n, rows, h, cache.v_head_dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(n, h, rows, dtype=parts.dtype, device=q.device)
        finish_parts(parts, n * rows * h, cache.v_head_dim, score.sinks, o, lse)
        found = o.flatten(0, 1)
        return (found if self.back is None else found.index_select(0, self.back)).view(b, s, h, -1)

    def write_partial(self, cache: KVPool, layer: int, q: Tensor, score: Score, carry: SoftmaxState) -> None:
        """Write the partial of q `b s h d` over this rank's keys into a carry."""
        b, s, h, _ = q.shape
        dv, count = cache.v_head_dim, self.positions.numel()
        parts = self.partial(cache, layer, q.flatten(0, 1), score)
        merged = torch.empty_like(parts[0])
        merge_parts(parts, merged, count * h, dv)
        for target, x in zip((carry.m, carry.l, carry.acc), views(merged, count * h, dv), strict=True):
            found = x.view(count, h, *x.shape[1:])
            found = (found if self.back is None else found.index_select(0, self.back)).view(b, s, h, *x.shape[1:])
            target.copy_(found if target is carry.acc else found.transpose(1, 2))


def plan_paged_rows(step: ForwardBatch, spans: Sequence[RowSpan], heads: int, mask: Mask) -> PagedRows | None:
    """Plan the attention of rows to this rank's pages; None where there are no rows.

    Spans of a request follow each other and ascend; the mask has `bounds`.
    """
    cache, device = step.cache, step.cache.device
    counts = [0] * len(step.requests)
    for _, length, request in spans:
        counts[request] += length
    total = sum(counts)
    if not total:
        return None
    s = rectangle_rows(counts, rows_of_tile(cache, heads))
    here = torch.cat([torch.arange(start, start + length, device="cpu") for start, length, _ in spans])
    numbers, owners, first = [], [], 0
    for request, count in enumerate(counts):
        rectangles = -(-count // s)
        numbers.append(torch.arange(rectangles * s, device="cpu").clamp_(max=count - 1) + first)
        owners += [request] * rectangles
        first += count
    rows = torch.cat(numbers)
    exact = len(rows) == total
    # the first place of each row: places ascend, and padding follows the row that it repeats
    back = torch.searchsorted(rows, torch.arange(total, device="cpu"))
    positions = here[rows].view(-1, s)
    starts, ends = (
        torch.tensor(x, device="cpu")[torch.tensor(owners, device="cpu")][:, None] for x in (step.firsts, step.lengths)
    )
    terms = mask.bounds(positions, starts, ends)
    assert terms is not None, "masks without bounds read copies"
    # a row of padding sees nothing
    terms = [(low, torch.where(positions < starts, low, high)) for low, high in terms]
    *bounds, positions = torch.stack((*(x for pair in terms for x in pair), positions)).to(device, torch.int32)
    return PagedRows(
        _table(step, owners, device),
        tuple(zip(bounds[::2], bounds[1::2], strict=True)),
        positions,
        None if exact else rows.view(-1, s).to(device),
        None if exact else back.to(device),
    )


def _table(step: ForwardBatch, owners: Sequence[int], device: torch.device) -> PageTable:
    """Return this rank's blocks of each rectangle's request."""
    cache = step.cache
    tables = [cache.allocator.table(request, cache.ring.rank) for request in step.requests]
    # a kernel needs at least one column
    found = torch.zeros(3, len(tables), max(1, *map(len, tables)), dtype=torch.int32, device="cpu")
    for i, table in enumerate(tables):
        for j, x in enumerate((table.pages, table.starts, table.lengths)):
            if x:
                found[j, i, : len(x)] = torch.frombuffer(x, dtype=torch.int32)
    of = torch.tensor(owners, device=device)
    counts = torch.tensor([len(table) for table in tables], dtype=torch.int32, device="cpu")
    pages, starts, lengths = found.to(device).index_select(1, of)
    return PageTable(pages, starts, lengths, counts.to(device).index_select(0, of))
