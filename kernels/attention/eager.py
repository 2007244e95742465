"""The kernel contract in plain torch: CPUs, fp64 and all calls that the fast kernels refuse.

Never holds a rows x keys tensor: at most one tile. Query rows are cut into tiles of TILE_ROWS. Positions ascend and bounds never
decrease, so the keys seen by any row of a tile are one range of key rows, and those seen by all of its rows are a range inside
it. Keys outside the first are skipped, tiles within the second need no mask. Under several terms every tile has a mask.

Shape legend beside the contract's: `g` query heads per key head, `c = b hk` independent problems, `x` rows and `y` keys
of a tile. Inside, tensors are head-major: queries `c (g x) d`, keys `c y d`, logits `c (g x) y`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.attention.dropout import keep_mask
from ringattn.kernels.constants import LN2, LOG2E
from ringattn.kernels.interface import (
    Arrivals,
    BackwardStep,
    GatheredKeys,
    Grads,
    KernelSet,
    Returns,
    RowMetadata,
    SoftmaxState,
    Step,
    accumulation_dtype,
)

# measured on one CPU core over head_dim 32 and 64: the logits of a tile stay in its caches, matmuls are still large
TILE_ROWS = 256
TILE_KEYS = 256


def _row_tiles(rows: RowMetadata, keys: RowMetadata) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Yield the rows of each tile, and the key rows that any of them sees, in ascending order and with whether they need a mask."""
    num_rows = rows.positions.shape[0]
    starts = torch.arange(0, num_rows, TILE_ROWS, device=rows.positions.device)
    finals = (starts + (TILE_ROWS - 1)).clamp_max(num_rows - 1)
    edges = torch.stack(
        [f for bound in (rows.lo, rows.hi) for f in (bound[:, starts].amin(0), bound[:, finals].amax(0))]
    )
    if rows.terms > 1 or rows.patterns is not None:
        edges[1:3] = edges[:1]  # no key is seen by all rows through one term
    ranges = torch.searchsorted(keys.positions, edges).T.tolist()
    for x, (seen_from, full_from, full_to, seen_to) in zip(range(0, num_rows, TILE_ROWS), ranges, strict=True):
        parts = [slice(y, min(y + TILE_KEYS, seen_to)) for y in range(seen_from, seen_to, TILE_KEYS)]
        tiles = [(part, part.start < full_from or full_to < part.stop) for part in parts]
        yield slice(x, min(x + TILE_ROWS, num_rows)), tiles


class _HeadMajor:
    """One ring step, head-major and in the accumulation dtype, as far as every tile needs it.

    Attributes:
        shape: (b, hk, g).
        keys_h: `c t d`.
        values_h: `c t dv`.
    """

    def __init__(self, step: Step | BackwardStep, keys: RowMetadata) -> None:
        self.rows, self.keys, self.score, self.dtype = step.rows, keys, step.score, step.lse.dtype
        b, t, hk, _ = step.k.shape
        self.shape = b, hk, step.q.shape[2] // hk
        self.keys_h, self.values_h = (
            x.transpose(1, 2).to(self.dtype).reshape(b * hk, t, x.shape[3]) for x in (step.k, step.v)
        )

    def by_head(self, x: Tensor) -> Tensor:
        """`b x h d` -> `c (g x) d`, accumulation dtype."""
        b, hk, g = self.shape
        return x.transpose(1, 2).to(self.dtype).reshape(b * hk, g * x.shape[1], x.shape[3])

    def by_token(self, x: Tensor) -> Tensor:
        """`c (g x) d` -> `b x h d`."""
        b, hk, g = self.shape
        return x.reshape(b, hk * g, x.shape[1] // g, x.shape[2]).transpose(1, 2)

    def statistic(self, x: Tensor) -> Tensor:
        """`b h x` -> `c (g x) 1`, accumulation dtype."""
        b, hk, g = self.shape
        return x.to(self.dtype).reshape(b * hk, g * x.shape[2], 1)

    def grouped(self, x: Tensor) -> Tensor:
        """`c (g x) y` -> `b h x y`, a view."""
        b, hk, g = self.shape
        return x.view(b, hk * g, x.shape[1] // g, x.shape[2])

    def per_head(self, x: Tensor) -> Tensor:
        """`h` -> `1 h 1 1`, accumulation dtype."""
        return x.to(self.dtype).view(1, -1, 1, 1)

    def capped(self, q_h: Tensor, y: slice) -> Tensor:
        """Soft-capped scores over softcap (a tanh), or the scores in log2 units without a soft cap: `c (g x) y`."""
        s = torch.bmm(q_h, self.keys_h[:, y].transpose(1, 2))
        # scaled after the sum: scaling q first would round every term of it
        if self.score.softcap:
            return s.mul_(self.score.softmax_scale / self.score.softcap).tanh_()
        return s.mul_(self.score.softmax_scale * LOG2E)

    def logits(self, capped: Tensor, x: slice, y: slice, masked: bool) -> Tensor:
        """Scores in log2 units, -inf on invisible pairs: `c (g x) y`. Without a soft cap, in place."""
        score = self.score
        s = capped * (score.softcap * LOG2E) if score.softcap else capped
        s_h = self.grouped(s)
        if score.alibi_slopes is not None:
            s_h.addcmul_(self.per_head(score.alibi_slopes), self.distance(x, y), value=-LOG2E)
        if score.key_bias is not None:
            s_h.add_(score.key_bias[:, None, None, y].to(self.dtype), alpha=LOG2E)
        if score.bias is not None:
            s_h.add_(score.bias[:, :, x].index_select(3, self.keys.positions[y]).to(self.dtype), alpha=LOG2E)
        if masked:
            s_h.masked_fill_(self.hidden(x, y), -math.inf)
        return s

    def hidden(self, x: slice, y: slice) -> Tensor:
        """Invisible pairs: `b 1 x y`, or `1 1 x y` when all batch elements agree."""
        i, j = self.rows.positions[x], self.keys.positions[y]
        outside = (j < self.rows.lo[:, x, None]) | (j >= self.rows.hi[:, x, None])
        outside = outside.view(self.rows.terms, -1, *outside.shape[1:])
        patterns = self.rows.patterns
        if patterns is not None:
            hidden = patterns.tables[:, i[:, None] // patterns.block_size, j // patterns.block_size] == 0
            for term, table in enumerate(patterns.of_term):
                if table >= 0:
                    outside[term] |= hidden[table]
        return outside.all(0)[:, None]

    def distance(self, x: slice, y: slice) -> Tensor:
        """|i - j| of global positions: `x y`."""
        # subtracted as integers: fp32 does not hold positions beyond 2^24
        return (self.rows.positions[x, None] - self.keys.positions[y]).abs_().to(self.dtype)

    def kept(self, x: slice, y: slice) -> Tensor:
        """Dropout factor of every pair, keep / (1 - p): `c (g x) y`."""
        b, hk, g = self.shape
        device = self.keys_h.device
        keep = keep_mask(
            self.score.dropout_seed,
            torch.arange(b, device=device)[:, None, None, None],
            torch.arange(hk * g, device=device)[None, :, None, None],
            self.rows.positions[x, None],
            self.keys.positions[y],
            hk * g,
            self.score.dropout_p,
        )
        return keep.to(self.dtype).div_(1 - self.score.dropout_p).view(b * hk, g * keep.shape[2], keep.shape[3])


def eager_delta(o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """rowsum(o * do) - dlse as `b h s` (`KernelSet.delta`)."""
    dtype = accumulation_dtype(o.dtype)
    rowsum = (o.detach().to(dtype) * do.detach().to(dtype)).sum(-1).transpose(1, 2).contiguous()
    found = rowsum if dlse is None else rowsum.sub_(dlse.detach())
    return found if out is None else out.copy_(found)


def _store(target: Tensor, found: Tensor, accumulate: bool) -> None:
    if accumulate:
        target += found
    else:
        target.copy_(found)


class EagerKernels(KernelSet):
    """`KernelSet` in plain torch; bitwise the same from run to run.

    A fused call is the same loop over sources that a ring makes over steps. It is served on CPUs, where regions of gradients are
    in the memory of this process.
    """

    def can_fuse(self) -> bool:
        """`KernelSet.can_fuse`."""
        call = self.call
        return call.device.type == "cpu" and call.dtype != torch.float64 and call.score.bias is None

    def forward(self, step: Step) -> None:
        """`KernelSet.forward`."""
        q, _, v, rows, keys, score, o, lse, carry, first, last, _ = step
        assert isinstance(keys, RowMetadata), "a fused call is computed source by source"
        assert carry is not None or (first and last), "only a ring step that is first and last has no carry"
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            heads = _HeadMajor(step, keys)
            b, hk, g = heads.shape
            for x, tiles in _row_tiles(rows, keys):
                num = x.stop - x.start
                if not (first or last or tiles):
                    continue  # the carry stays as it is
                if first:
                    m = heads.keys_h.new_full((b * hk, g * num, 1), -math.inf)
                    if score.sinks is not None:
                        heads.grouped(m).copy_(heads.per_head(score.sinks) * LOG2E)
                    l = (m > -math.inf).to(m.dtype)  # noqa: E741
                    acc = m.new_zeros(b * hk, g * num, v.shape[3])
                else:
                    assert carry is not None
                    m = heads.statistic(carry.m[:, :, x])
                    l = heads.statistic(carry.l[:, :, x])  # noqa: E741
                    acc = heads.by_head(carry.acc[:, x])

                q_h = heads.by_head(q[:, x])
                for y, masked in tiles:
                    s = heads.logits(heads.capped(q_h, y), x, y, masked)
                    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                    # rows that have seen nothing: exponentials are taken against 0, so that 2^-inf is 0 and never NaN
                    m_safe = m_new.masked_fill(m_new == -math.inf, 0.0)
                    p = s.sub_(m_safe).exp2_()
                    rescale = (m - m_safe).exp2_()
                    l = l * rescale + p.sum(-1, keepdim=True)  # noqa: E741
                    if score.dropout_p:
                        p.mul_(heads.kept(x, y))
                    acc = torch.baddbmm(acc * rescale, p, heads.values_h[:, y])
                    m = m_new

                if last:
                    # a row without weight has acc = 0, and log2(0) = -inf is its lse
                    o[:, x] = heads.by_token(acc / l.masked_fill(l == 0, 1.0)).to(o.dtype)
                    m_safe = m.masked_fill(m == -math.inf, 0.0)
                    lse[:, :, x] = heads.grouped(LN2 * m_safe + l.log())[..., 0]
                else:
                    assert carry is not None
                    carry.m[:, :, x] = heads.grouped(m)[..., 0]
                    carry.l[:, :, x] = heads.grouped(l)[..., 0]
                    carry.acc[:, x] = heads.by_token(acc)

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        """`KernelSet.delta`."""
        return eager_delta(o, do, dlse, out)

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        """`KernelSet.backward`."""
        do, q, _, _, lse, delta, rows, keys, score, o, dlse, delta_made, _ = step
        assert isinstance(keys, RowMetadata), "a fused call is computed source by source"
        if o is not None and not delta_made:
            eager_delta(o, do, dlse, delta)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            heads = _HeadMajor(step, keys)
            dk, dv = torch.zeros_like(heads.keys_h), torch.zeros_like(heads.values_h)
            dkey_bias = None if grads.dkey_bias is None else torch.zeros_like(grads.dkey_bias)
            for x, tiles in _row_tiles(rows, keys):
                q_h, do_h = heads.by_head(q[:, x]), heads.by_head(do[:, x])
                lse2 = heads.statistic(lse[:, :, x]) * LOG2E
                # a row that saw nothing has weights exp(s - inf) = 0
                lse2 = lse2.masked_fill(lse2 == -math.inf, math.inf)
                delta_h = heads.statistic(delta[:, :, x])
                dq = torch.zeros_like(q_h)
                dalibi = torch.zeros_like(lse2)
                for y, masked in tiles:
                    capped = heads.capped(q_h, y)
                    p = heads.logits(capped, x, y, masked).sub_(lse2).exp2_()
                    dp = torch.bmm(do_h, heads.values_h[:, y].transpose(1, 2))
                    if score.dropout_p:
                        kept = heads.kept(x, y)
                        dp.mul_(kept)
                        dv[:, y].baddbmm_((p * kept).transpose(1, 2), do_h)
                    else:
                        dv[:, y].baddbmm_(p.transpose(1, 2), do_h)
                    ds = dp.sub_(delta_h).mul_(p)
                    if dkey_bias is not None:
                        dkey_bias[:, y] += heads.grouped(ds).sum((1, 2))
                    if grads.dalibi is not None:
                        dalibi -= (heads.grouped(ds) * heads.distance(x, y)).sum(-1).view_as(dalibi)
                    if grads.dbias is not None:
                        # zero on invisible pairs, so adding writes the visible ones only
                        grads.dbias[:, :, x].index_add_(3, keys.positions[y], heads.grouped(ds).to(grads.dbias.dtype))
                    if score.softcap:
                        ds = ds.mul_(1 - capped.square_())
                    dq.baddbmm_(ds, heads.keys_h[:, y])
                    dk[:, y].baddbmm_(ds.transpose(1, 2), q_h)

                _store(grads.dq[:, x], heads.by_token(dq.mul_(score.softmax_scale)), grads.accumulate_rows)
                if grads.dalibi is not None:
                    _store(grads.dalibi[:, :, x], heads.grouped(dalibi)[..., 0], grads.accumulate_rows)

            b, hk, _ = heads.shape
            dk.mul_(score.softmax_scale)
            assert grads.dk is not None, "a step writes dk and dv"
            assert grads.dv is not None, "a step writes dk and dv"
            _store(grads.dk, dk.view(b, hk, *dk.shape[1:]).transpose(1, 2), grads.accumulate_keys)
            _store(grads.dv, dv.view(b, hk, *dv.shape[1:]).transpose(1, 2), grads.accumulate_keys)
            if grads.dkey_bias is not None and dkey_bias is not None:
                _store(grads.dkey_bias, dkey_bias, grads.accumulate_keys)

    def forward_fused(self, step: Step, arrivals: Arrivals) -> None:
        """`KernelSet.forward_fused`."""
        lse, sources = step.lse, list(_sources(step, arrivals))
        carry = SoftmaxState(torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(step.o, dtype=lse.dtype))
        for number, source in enumerate(sources):
            self.forward(step._replace(**source, carry=carry, first=number == 0, last=number == len(sources) - 1))

    def backward_fused(self, step: BackwardStep, arrivals: Arrivals, returns: Returns, grads: Grads) -> None:
        """`KernelSet.backward_fused`."""
        if step.o is not None:
            eager_delta(step.o, step.do, step.dlse, step.delta)
        dq = torch.empty_like(grads.dq, dtype=step.lse.dtype)
        for number, source in enumerate(_sources(step, arrivals)):
            k, v = source["k"], source["v"]
            b, t, hk, d = k.shape
            region = _region(returns.grad_buffers, number, (b, returns.rows, hk, d + v.shape[-1]))[:, :t]
            biased = returns.bias_grad_buffers is not None
            dkey_bias = torch.empty(b, t, dtype=torch.float32, device="cpu") if biased else None
            some = Grads(dq, region[..., :d], region[..., d:], dkey_bias, grads.dalibi, accumulate_rows=number > 0)
            self.backward(step._replace(**source, o=None), some)
            if returns.bias_grad_buffers is not None and dkey_bias is not None:
                # heads are summed already: the sum stands with the first
                region = _region(returns.bias_grad_buffers, number, (b, hk, returns.rows))[..., :t]
                region.zero_()
                region[:, 0] = dkey_bias
        grads.dq.copy_(dq)


def _sources(step: Step | BackwardStep, arrivals: Arrivals) -> Iterator[dict[str, Any]]:
    """Yield k, v, keys and score of each source of a fused call, as those of a step of its own; NaN if it never arrived."""
    keys, score, flags = step.keys, step.score, arrivals.ready_flags
    assert isinstance(keys, GatheredKeys), "a fused call has all key sides"
    for side, number in zip(keys.sides, keys.steps, strict=True):
        at, rows = (side.run_list[0][0] if side.run_list else 0), side.positions.shape[0]
        k, v = (step.k, step.v) if number == 0 else (x[:, at : at + rows] for x in (arrivals.k, arrivals.v))
        if number and flags is not None:
            assert bool((flags.flags[:, number] == 1).all()), "on CPUs rows arrive before the call"
        runs = tuple((offset - at, *run) for offset, *run in side.run_list)
        own = dataclasses.replace(
            side, runs=torch.tensor(runs, dtype=torch.int32, device="cpu").view(-1, 4), run_list=runs
        )
        first = at + (keys.local_rows if number else 0)
        bias = None if score.key_bias is None else score.key_bias[:, first : first + rows]
        yield {"k": k, "v": v, "keys": own, "score": dataclasses.replace(score, key_bias=bias)}


def _region(addresses: Tensor, number: int, shape: tuple[int, ...]) -> Tensor:
    """Return the fp32 memory at an address."""
    memory = (ctypes.c_float * math.prod(shape)).from_address(int(addresses[number]))
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
