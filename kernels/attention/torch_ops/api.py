"""The kernel set `torch`: `KernelSet` of interface.py over torch's own attention operators.

A ring step is decomposed into a few calls (bands.py). Each gives the partial (lse, 1, o) of its rows over its keys, which is
merged into the carry in fp32. In the backward each takes the lse of the finished rows, and its gradients are added in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.attention.arguments import LEAST_SCALE
from ringattn.kernels.attention.eager import eager_delta
from ringattn.kernels.attention.torch_ops import carry as partials
from ringattn.kernels.attention.torch_ops import measure, operators
from ringattn.kernels.attention.torch_ops.bands import Line, calls, lines, tiles
from ringattn.kernels.attention.torch_ops.delta_output import output_for, rest_for
from ringattn.kernels.attention.torch_ops.operators import OperatorLaunch, launch_of_call, launch_of_tile
from ringattn.kernels.interface import (
    BackwardStep,
    Grads,
    KernelSet,
    RowMetadata,
    Score,
    SoftmaxState,
    Step,
    accumulation_dtype,
)
from ringattn.kernels.runtime.optional_triton import import_optional

MOST_LAUNCHES = 64
"""Launches of one ring step, for each batch element; a step that needs more is served by other kernels."""
MOST_LINES = 4096
"""Lines of rows that are looked at before a step is refused."""
MOST_HELD = 2**28
"""Bytes of partials, or of gradients, that wait to be added together, but for one: more rows gain less by it."""
ALIGNMENT = 16
"""Bytes: the flash kernels copy rows in units of this."""


Part = tuple[tuple[int, int], tuple[int, int]]
"""Batch elements, and rows or keys: [first, end) of each."""


@dataclass(frozen=True)
class _Calls:
    """Launches of one backend.

    Attributes:
        row_gaps: Rows without a launch, where no two launches share a row; None: some do.
        key_gaps: Keys without a launch, in the same way.
    """

    launches: tuple[OperatorLaunch, ...]
    row_gaps: tuple[Part, ...] | None
    key_gaps: tuple[Part, ...] | None

    def is_single(self, batch: int) -> bool:
        """Return whether there is one launch, for all batch elements."""
        return len(self.launches) == 1 and self.launches[0].batch == (0, batch)

    @classmethod
    def of(cls, launches: Sequence[OperatorLaunch], batch: int, rows: int, keys: int) -> _Calls:
        row_gaps = _gaps([(x.batch, x.rows) for x in launches], batch, rows)
        return cls(tuple(launches), row_gaps, _gaps([(x.batch, x.keys) for x in launches], batch, keys))


@dataclass(frozen=True, eq=False)
class _Step:
    """The calls of a ring step, with windows (flash) and without; None: more than MOST_LAUNCHES."""

    windowed: _Calls | None
    plain: _Calls | None

    def calls_of(self, backend: str) -> _Calls | None:
        if backend == "flash":
            return self.windowed
        # cuDNN has no attention to one key
        if backend == "cudnn" and self.plain and any(x.keys[1] - x.keys[0] == 1 for x in self.plain.launches):
            return None
        return self.plain


def _gaps(parts: Sequence[Part], batch: int, num: int) -> tuple[Part, ...] | None:
    """Return the rows or keys of `batch` elements and `num` rows that no part holds; None: two parts share one."""
    gaps: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
    for b, found in enumerate(gaps):
        at = 0
        for first, end in [*sorted(one for (b0, b1), one in parts if b0 <= b < b1), (num, num)]:
            if first < at:
                return None
            if first > at:
                found.append((at, first))
            at = end
    if all(found == gaps[0] for found in gaps):
        return tuple(((0, batch), gap) for found in gaps[:1] for gap in found)
    return tuple(((b, b + 1), gap) for b, found in enumerate(gaps) for gap in found)


def refuse_steps(backends: Sequence[str], steps: Iterable[tuple[RowMetadata, RowMetadata]]) -> str | None:
    """Return the reason against ring steps of (rows, keys); None: one of the backends serves each of them."""
    for rows, keys in steps:
        step = _find_step(rows, keys, rows.lo_host.shape[0] // rows.terms)
        if all(step.calls_of(backend) is None for backend in backends):
            return (
                f"the visible pairs of a ring step must be at most {MOST_LAUNCHES} rectangles, triangles and bands for torch's "
                "operators, got a mask and a layout of more"
            )
    return None


class TorchKernels(KernelSet):
    """`KernelSet` over torch's own attention operators."""

    choose_faster = staticmethod(measure.choose_faster)

    def _faster(self, direction: int) -> str | None:
        """The backend to try first, forward (0) or backward (1)."""
        return None if self.call.faster is None else self.call.faster[direction]

    def forward(self, step: Step) -> None:
        """`KernelSet.forward`."""
        q, k, v, rows, keys, score, o, lse, carry, first, last, _ = step
        assert isinstance(keys, RowMetadata), "fused calls are not served"
        assert carry is not None or (first and last), "only a ring step that is first and last has no carry"
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            q, k, v, scale, _ = _scaled(q, k, v, score)
            backend, found = _choose(q, k, v, rows, keys, self._faster(0))
            begun = None if first else carry
            if first and score.sinks is not None:
                begun = partials.of_sinks(score.sinks, o, lse)
            done = (o, lse) if last or carry is None else carry
            if carry is not None and carry.held is not None:
                begun, *parts = ([] if first else carry.held) or [begun]
                carry.held.clear()
                if found.is_single(q.shape[0]):
                    (launch,) = found.launches
                    found_o, found_lse = _forward(backend, q, k, v, scale, launch)
                    parts.append(((found_o.contiguous(), found_lse.contiguous()), launch.rows))
                    if last or _are_enough([partial[0] for partial, _ in parts]):
                        partials.merge_parts(begun, parts, done)
                    else:
                        carry.held.extend((begun, *parts))
                    return
                if parts:
                    partials.merge_parts(begun, parts, carry)
                    begun = carry
            if found.row_gaps is not None:
                for launch in found.launches:
                    _merge(begun, _forward(backend, q, k, v, scale, launch), done, (launch.batch, launch.rows))
                for gap in found.row_gaps if begun is not done else ():
                    _merge(begun, None, done, gap)
                return
            # the last step leaves the carry alone
            state = _fresh(o, lse) if last or carry is None else carry
            if state is not begun:
                partials.merge(begun, None, state)
            for launch in found.launches:
                _merge(state, _forward(backend, q, k, v, scale, launch), state, (launch.batch, launch.rows))
            if last:
                partials.merge(state, None, done)

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        """`KernelSet.delta`."""
        fast = import_optional("ringattn.kernels.attention.portable.api") if o.is_cuda else None
        return eager_delta(o, do, dlse, out) if fast is None else fast.portable_delta(o, do, dlse, out)

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        """`KernelSet.backward`."""
        do, q, k, v, lse, delta, rows, keys, score, o, dlse, delta_made, _ = step
        assert isinstance(keys, RowMetadata), "fused calls are not served"
        assert grads.dk is not None, "a step writes dk and dv"
        assert grads.dv is not None, "a step writes dk and dv"
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if o is not None and not delta_made:
                self.delta(o, do, dlse, delta)
            q, k, v, scale, sign = _scaled(q, k, v, score)
            backend, found = _choose(q, k, v, rows, keys, self._faster(1), deterministic=self.call.deterministic)
            launches, do, start, rest = found.launches, _aligned(do), 0, None
            if launches and (o is None or dlse is not None):
                # only for the rows that a launch reads
                start, end = min(launch.rows[0] for launch in launches), max(launch.rows[1] for launch in launches)
                o, do = output_for(do[:, start:end], delta[:, :, start:end])
                rest = rest_for(o, do, delta[:, :, start:end])
            dq = _sum_of_rows(grads, found, q.shape[0])
            dk, dv = (_Sum(x, grads.accumulate_keys, found.key_gaps) for x in (grads.dk, grads.dv))
            for launch in launches:
                (b0, b1), (x0, x1), (y0, y1) = launch.batch, launch.rows, launch.keys
                assert o is not None, "an output was given or made"
                values = v[b0:b1, y0:y1]
                calls = [(o, do, values)] if rest is None else [(o, do, values), (*rest, torch.zeros_like(values))]
                (found_q, found_k, found_v), *more = (
                    operators.backward(
                        backend, of_do[b0:b1, x0 - start : x1 - start], q[b0:b1, x0:x1], k[b0:b1, y0:y1], of_v,
                        of_o[b0:b1, x0 - start : x1 - start], lse[b0:b1, :, x0:x1], scale, launch,
                    )
                    for of_o, of_do, of_v in calls
                )  # fmt: skip
                for more_q, more_k, _ in more:
                    found_q, found_k = found_q + more_q, found_k + more_k
                dq.add((launch.batch, launch.rows), found_q if sign == 1 else found_q * sign)
                dk.add((launch.batch, launch.keys), found_k)
                dv.add((launch.batch, launch.keys), found_v)
            for total in (dq, dk, dv):
                total.store()


class _Sum:
    """Sum of the gradients of launches in a buffer of `Grads`; where launches share rows, in fp32 until `store`."""

    def __init__(self, target: Tensor, accumulate: bool, gaps: tuple[Part, ...] | None) -> None:
        wide = accumulation_dtype(target.dtype)
        self._target, self._adds = target, accumulate or gaps is None
        self._sum = target if gaps is not None or target.dtype == wide else torch.empty_like(target, dtype=wide)
        if not accumulate:
            for x in [self._sum] if gaps is None else [_rows(target, gap) for gap in gaps]:
                x.zero_()

    def add(self, part: Part, found: Tensor) -> None:
        whole = (found.contiguous(), (0, found.shape[1]))
        partials.add_rows([whole], _rows(self._sum, part), accumulate=self._adds)

    def store(self) -> None:
        if self._sum is not self._target:
            self._target.copy_(self._sum)


class _HeldSum:
    """What single calls give to all rows of dq, summed every few ring steps."""

    def __init__(self, grads: Grads, held: list[Any]) -> None:
        self._grads, self._held = grads, held
        self.adds, *self._parts = held or [grads.accumulate_rows]
        held.clear()

    def add(self, part: Part, found: Tensor) -> None:
        self._parts.append((found.contiguous(), part[1]))

    def store(self) -> None:
        if self._grads.last or _are_enough([x for x, _ in self._parts]):
            self.finish()
        else:
            self._held.extend((self.adds, *self._parts))

    def finish(self) -> None:
        if self._parts:
            partials.add_rows(self._parts, self._grads.dq, accumulate=self.adds)
            self.adds = True


def _sum_of_rows(grads: Grads, found: _Calls, batch: int) -> _Sum | _HeldSum:
    if grads.held is None:
        return _Sum(grads.dq, grads.accumulate_rows, found.row_gaps)
    held = _HeldSum(grads, grads.held)
    if found.is_single(batch):
        return held
    held.finish()
    return _Sum(grads.dq, held.adds, found.row_gaps)


def _are_enough(waiting: Sequence[Tensor]) -> bool:
    """Return whether what waits to be added together should wait no longer."""
    return len(waiting) == partials.PARTS or sum(x.nbytes for x in waiting) > MOST_HELD


def _scaled(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor, Tensor, float, int]:
    """Return q, k and v as operators can read them, a positive scale, and the sign of the scale, which q has taken."""
    scale, sign = score.softmax_scale, 1
    if scale < LEAST_SCALE:
        # operators look for the largest score before they scale it
        sign = -1 if scale <= -LEAST_SCALE else 0
        q, scale = q * sign, -scale if sign else 1.0
    return _aligned(q), _aligned(k), _aligned(v), scale, sign


def _aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy of one whose rows do not begin at multiples of ALIGNMENT bytes."""
    steps = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    if x.device.type == "cpu" or not any(step % ALIGNMENT for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, scale: float, launch: OperatorLaunch
) -> tuple[Tensor, Tensor]:
    """The normalised partial of a launch: o `b s h dv`, lse `b h s` of its rows."""
    (b0, b1), (x0, x1), (y0, y1) = launch.batch, launch.rows, launch.keys
    return operators.forward(backend, q[b0:b1, x0:x1], k[b0:b1, y0:y1], v[b0:b1, y0:y1], scale, launch)


def _merge(
    begun: SoftmaxState | None, partial: tuple[Tensor, Tensor] | None, done: partials.Merged, part: Part
) -> None:
    """Merge the partial of some rows with these rows of a carry."""
    (b0, b1), (x0, x1) = part

    def rows_of(x: SoftmaxState) -> SoftmaxState:
        return SoftmaxState(x.m[b0:b1, :, x0:x1], x.l[b0:b1, :, x0:x1], x.acc[b0:b1, x0:x1])

    out = rows_of(done) if isinstance(done, SoftmaxState) else (done[0][b0:b1, x0:x1], done[1][b0:b1, :, x0:x1])
    partials.merge(None if begun is None else rows_of(begun), partial, out)


def _rows(x: Tensor, part: Part) -> Tensor:
    (b0, b1), (x0, x1) = part
    return x[b0:b1, x0:x1]


def _fresh(o: Tensor, lse: Tensor) -> SoftmaxState:
    m, l = torch.empty((2, *lse.shape), dtype=lse.dtype, device=o.device)  # noqa: E741
    return SoftmaxState(m, l, torch.empty(o.shape, dtype=lse.dtype, device=o.device))


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: RowMetadata,
    keys: RowMetadata,
    faster: str | None,
    *,
    deterministic: bool = False,
) -> tuple[str, _Calls]:
    """Return the backend of a step and its calls.

    cuDNN plans every new shape for tens of milliseconds, so it comes first only where a step is one rectangle; several, as of
    packed documents, seldom come again.
    """
    step, names = _find_step(rows, keys, q.shape[0]), operators.preferred(q.device, faster)
    if names[0] == "cudnn" and (step.plain is None or len(step.plain.launches) > 1):
        names = ("flash", "cudnn")
    for name in names:
        found = step.calls_of(name)
        if found is None or (deterministic and name in operators.NOT_REPEATING):
            continue
        if not found.launches or operators.can_run(name, q, k, v):
            return name, found
    raise NotImplementedError(
        f"torch's attention operators must serve this ring step, got none among {', '.join(names)} that does; use other kernels"
    )


def _find_step(rows: RowMetadata, keys: RowMetadata, batch: int) -> _Step:
    """Return the launches of a step, kept as long as its tables are."""
    if rows.patterns is not None:
        raise NotImplementedError(
            "masks must be intervals for torch's operators, got a block pattern; use other kernels"
        )
    known = rows.derived.setdefault(keys, {})
    if ("torch", batch) not in known:
        known["torch", batch] = _make_step(rows, keys, batch)
    return known["torch", batch]


def _make_step(rows: RowMetadata, keys: RowMetadata, batch: int) -> _Step:
    windowed, plain = list[OperatorLaunch](), list[OperatorLaunch]()
    by_line, device = _lines_of(rows, keys), rows.positions.device
    batches, most = len(by_line) // rows.terms, MOST_LAUNCHES * batch
    for index, found in enumerate(by_line):
        if found is None:
            return _Step(None, None)
        # terms share no pair, so each has launches of its own (Note [Terms] of interface.py)
        b, shared = index % batches, batches == 1
        each = [(i, i + 1) for i in range(batch)] if shared else [(b, b + 1)]
        together = [(0, batch)] if shared else each
        if len(windowed) <= most:
            # rows of variable lengths are those of one batch element
            windowed += [
                launch_of_call(call, part, device)
                for call in itertools.islice(calls(found), most + 1)
                for part in (together if len(call.bands) == 1 else each)
            ]
        if len(plain) <= most:
            tiled = itertools.islice(tiles(found), most + 1)
            plain += [launch_of_tile(tile, part) for tile in tiled for part in together]
    sizes = batch, rows.positions.shape[0], keys.positions.shape[0]
    return _Step(*(None if len(x) > most else _Calls.of(x, *sizes) for x in (windowed, plain)))


def _lines_of(rows: RowMetadata, keys: RowMetadata) -> list[list[Line] | None]:
    """Lines of each term and batch element, or of all elements alike; None: more than MOST_LINES."""
    runs = [torch.arange(start, start + stride * n, stride, device="cpu") for _, n, start, stride in keys.run_list]
    positions = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device="cpu")
    lo, hi = (torch.searchsorted(positions, bound.to(positions.dtype)) for bound in (rows.lo_host, rows.hi_host))
    found = list[list[Line] | None]()
    for a, e in zip(lo, hi, strict=True):
        moves = torch.stack((a, e)).diff()
        changes = (moves[:, 1:] != moves[:, :-1]).any(0).nonzero().flatten() + 1
        found.append(None if len(changes) > MOST_LINES else lines(a.tolist(), e.tolist(), changes.tolist()))
    return found
