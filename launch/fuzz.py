"""Random visits against the definition: whatever shape, mask, option, stride or split over visits, the answer is right.

Owns the drawing of cases, their judging, and what is said of a wrong one. Refuses to know the ring: a case is a number of
calls of one kernel set, as a rank would make them. `check --fuzz SECONDS` runs it.

Note [Seeds]
    A case is a function of one integer (and of the kind of device, which decides sizes). What makes a compiler work, the
    dtype, head dims, head groups and options, is drawn from the integer without its last bits, so that neighbours share
    kernels. A case that is wrong names its integer, and `--fuzz 0 --fuzz-seed INTEGER` runs that case alone.

Note [What is judged]
    o, lse and every gradient against dense attention in fp64, inside the budget that dense attention in the dtype under
    test gives, as in `check`. Tensors of few elements get a second look before they are called wrong: the budget of
    several draws of the same case together, because the rounding of a few numbers is luck. Buffers start as NaN. The
    forward runs twice and must give the same bits; so must the backward, when the case demands it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import Carry, Grads, KernelSet, Score, Side, accumulation_dtype
from ringattn.kernels.select import pick
from ringattn.launch.session import Session
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.reference import dense_attention, visible_pairs
from ringattn.plan import device_tables
from ringattn.plan.layouts import LAYOUTS, Run, Shard, make_shards
from ringattn.plan.mask import Visibility

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
NEIGHBOURS = 8
"""Cases in a row that share their kernels (Note [Seeds])."""
FEW = 4096
"""Elements below which a tensor gets a second look (Note [What is judged])."""
SCORES = {"cuda": 2**23, "cpu": 2**15}
"""Scores of one case at most: batch x query heads x rows x keys."""
STRIDES = ("plain", "heads first", "padded", "shifted", "unaligned", "among others", "every second row")


@dataclass(frozen=True)
class FuzzCase:
    """One query shard and the buffers of keys that visit it.

    Attributes:
        seed: What it was drawn from, and the seed of its inputs.
        dtype: Of q, k, v and do.
        head_dim: Of q and k.
        v_head_dim: Of v.
        heads: Query heads.
        kv_heads: Key/value heads.
        batch: Batch elements.
        mask: Who sees whom.
        rows: Positions of the queries.
        visits: Positions of the keys of each visit, disjoint.
        softmax_scale: As in Score.
        softcap: As in Score.
        dropout_p: As in Score.
        extras: Of sinks, alibi, key_bias, bias.
        strides: Of q, k, v and do.
        accumulate: Gradients are added to what is there.
        narrow: Gradients are written in the dtype of the inputs.
        deterministic: The backward repeats to the bit.
    """

    seed: int
    dtype: str
    head_dim: int
    v_head_dim: int
    heads: int
    kv_heads: int
    batch: int
    mask: Visibility
    rows: Shard
    visits: tuple[Shard, ...]
    softmax_scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    extras: tuple[str, ...] = ()
    strides: tuple[str, ...] = ("plain",) * 4
    accumulate: bool = False
    narrow: bool = False
    deterministic: bool = False

    @property
    def features(self) -> set[str]:
        """What a kernel set must serve besides q . k and an interval."""
        found = set(self.extras)
        found |= {"softcap"} if self.softcap else set()
        found |= {"dropout"} if self.dropout_p else set()
        found |= {"deterministic"} if self.deterministic else set()
        return found | ({"per_batch_bounds"} if self.mask.batch_size > 1 else set())

    def __str__(self) -> str:
        kinds = {key: value for key, value in dataclasses.asdict(self.mask).items() if value not in (None, False, 0)}
        parts = [f"{self.dtype} b{self.batch} h{self.heads}/{self.kv_heads} d{self.head_dim}/{self.v_head_dim}"]
        parts += [f"{key}={value}" for key, value in kinds.items()]
        parts += [f"rows={_brief(self.rows)}", f"visits={'; '.join(_brief(keys) for keys in self.visits)}"]
        parts += [f"scale={self.softmax_scale:.3g} softcap={self.softcap:.3g} dropout={self.dropout_p:.3g}"]
        return ", ".join([*parts, *self.extras, f"strides={'/'.join(self.strides)}", *self._flags])

    @property
    def _flags(self) -> list[str]:
        return [name for name in ("accumulate", "narrow", "deterministic") if getattr(self, name)]


def _brief(shard: Shard) -> str:
    return " ".join(f"{run.start}+{run.stride}x{run.length}" for run in shard) or "none"


def draw_case(seed: int, kind: str, impl: str = "auto") -> FuzzCase:
    """The case of a seed (Note [Seeds]).

    Args:
        seed: Any integer from 0.
        kind: "cuda" or "cpu": the sizes.
        impl: Kernel set: only dtypes it serves are drawn.

    Example:
        >>> draw_case(5, "cpu") == draw_case(5, "cpu")
        True
    """
    shared, own = random.Random(seed // NEIGHBOURS), random.Random(~seed)
    gpu = kind == "cuda"
    # the Triton interpreter multiplies no bf16
    dtypes = ["fp16", "fp16"] if impl == "portable" and not gpu else ["bf16", "bf16", "fp16"]
    dtypes += (["fp32"] if impl != "hopper" else []) + (["fp64"] if impl == "eager" else [])
    dtype = shared.choice(dtypes)
    dims = [64, 64, 128, 128, 96, 192, 256, 40, 80, 72, 160, 32, 16] if gpu else [16, 24, 40]
    head_dim = shared.choice(dims)
    v_head_dim = shared.choice(dims) if shared.random() < 0.2 else head_dim
    heads, kv_heads = shared.choice([(1, 1), (2, 2), (4, 4), (4, 2), (8, 1), (6, 2), (5, 5), (3, 1), (16, 2)])
    extras = tuple(one for one in ("sinks", "alibi", "key_bias", "bias") if shared.random() < 0.15)
    softcap = shared.choice([0.0, 0.0, 0.0, 1.5, 20.0])
    dropout_p = shared.choice([0.0] * 7 + [0.1, 0.5])
    batch = own.choice([1, 1, 2, 3])

    longest = min(1100 if gpu else 70, math.isqrt(SCORES[kind] // heads))
    seq_len = draw_length(own, longest, gpu)
    kv_len = draw_length(own, longest, gpu) if own.random() < 0.25 else seq_len
    batch = max(1, min(batch, SCORES[kind] // (heads * seq_len * kv_len)))
    mask = draw_mask(own, seq_len, kv_len, batch)
    rows, visits = draw_split(own, mask)
    single = len(visits) == 1
    accumulate = own.random() < 0.3
    return FuzzCase(
        seed=seed,
        dtype=dtype,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        heads=heads,
        kv_heads=kv_heads,
        batch=batch,
        mask=mask,
        rows=rows,
        visits=visits,
        softmax_scale=own.choice([head_dim**-0.5] * 4 + [1.7 * head_dim**-0.5, -0.3 * head_dim**-0.5, 0.0]),
        softcap=softcap,
        dropout_p=dropout_p,
        extras=extras,
        strides=tuple(own.choice(STRIDES) if own.random() < 0.5 else "plain" for _ in range(4)),
        accumulate=accumulate,
        narrow=single and not accumulate and own.random() < 0.5,
        deterministic=own.random() < 0.5,
    )


def draw_length(draw: random.Random, longest: int, gpu: bool) -> int:
    """A length that is tiny, next to an edge of tiles, or anything."""
    style = draw.random()
    if style < 0.15:
        return draw.randint(1, 9)
    if style < 0.65:
        tile = draw.choice([64, 128, 192, 256] if gpu else [16, 32])
        return min(longest, max(1, tile * draw.randint(1, max(1, longest // tile)) + draw.choice([-1, 0, 0, 1, 7, -9])))
    return draw.randint(1, longest)


def draw_mask(draw: random.Random, seq_len: int, kv_len: int, batch: int) -> Visibility:
    """Any mask: features meet each other freely."""
    same = seq_len == kv_len
    causal = draw.random() < 0.6
    options: dict[str, Any] = {"causal": causal}
    if draw.random() < 0.35:
        sides = [draw.choice([None, 0, 1, 63, 64, 127, 191, draw.randint(0, seq_len)]) for _ in range(2)]
        options["window"] = tuple(sides)
    if same and draw.random() < 0.3:
        cuts = sorted(draw.randint(0, seq_len) for _ in range(draw.randint(0, 7)))
        cuts += draw.sample(cuts, min(len(cuts), draw.randint(0, 2)))  # documents of no tokens
        options["documents"] = (0, *sorted(cuts), seq_len)
    if causal and draw.random() < 0.12:
        options["prefix_len"] = draw.randint(0, kv_len + 3)
    if draw.random() < 0.1:
        options["chunk_len"] = draw.randint(1, seq_len)
    if same and batch > 1 and draw.random() < 0.4:
        ends = [sorted((draw.randint(0, seq_len), draw.randint(0, seq_len))) for _ in range(batch)]
        options["lengths"] = tuple((start, stop) for start, stop in ends)
    return Visibility(seq_len, kv_len, **options)


def draw_split(draw: random.Random, mask: Visibility) -> tuple[Shard, tuple[Shard, ...]]:
    """The rows of one rank and the keys of its visits: everything at once, a rank of a ring, or runs of any kind."""
    style = draw.random()
    everything = (Run(0, 1, mask.kv_len),)
    if style < 0.35:
        return (Run(0, 1, mask.seq_len),), (everything,)
    if style < 0.7:
        world_size, layout = draw.choice([2, 3, 4]), draw.choice(LAYOUTS)
        queries = make_shards(layout, mask.seq_len, world_size, mask)
        keys = queries if mask.seq_len == mask.kv_len else make_shards(layout, mask.kv_len, world_size, mask)
        rank = draw.randrange(world_size)
        return queries[rank], tuple(keys[(rank - step) % world_size] for step in range(world_size))
    rows = tuple(itertools.islice(draw_runs(draw, mask.seq_len), draw.randint(1, 9)))
    visits: list[list[Run]] = [[] for _ in range(draw.randint(1, 4))]
    for run in draw_runs(draw, mask.kv_len):
        draw.choice(visits).append(run)
    if draw.random() < 0.3:
        visits.insert(draw.randrange(len(visits) + 1), [])
    return rows, tuple(tuple(keys) for keys in visits)


def draw_runs(draw: random.Random, limit: int) -> Iterator[Run]:
    """Ascending runs below `limit`, many or few, with gaps and strides."""
    position, size = 0, draw.choice([1, 5, 40, 300])
    while position < limit:
        start = position + draw.choice([0, 0, 1, draw.randint(0, size)])
        stride = draw.choice([1, 1, 1, 2, 3, 7])
        if start >= limit:
            return
        run = Run(start, stride, min(draw.randint(1, size), (limit - 1 - start) // stride + 1))
        yield run
        position = run.last + 1


@dataclass
class Tensors:
    """The inputs of a case: keys of all visits in visit order."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    sinks: Tensor | None
    alibi: Tensor | None
    key_bias: Tensor | None
    bias: Tensor | None


def positions_of(shards: Sequence[Shard], device: torch.device) -> Tensor:
    """Positions of the rows of some buffers, one after the other."""
    found = [run.position(x) for shard in shards for run in shard for x in range(run.length)]
    return torch.tensor(found, dtype=torch.int64, device=device)


def draw_tensors(case: FuzzCase, seed: int, device: torch.device) -> Tensors:
    """Inputs and cotangents, contiguous."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[case.dtype]
    wide = accumulation_dtype(dtype)
    s, t = (len(positions_of(shards, torch.device("cpu"))) for shards in ((case.rows,), case.visits))
    b, h, hk = case.batch, case.heads, case.kv_heads

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return Tensors(
        q=normal(b, s, h, case.head_dim),
        k=normal(b, t, hk, case.head_dim),
        v=normal(b, t, hk, case.v_head_dim),
        do=normal(b, s, h, case.v_head_dim),
        dlse=normal(b, h, s, dtype=wide),
        sinks=normal(h, dtype=wide) if "sinks" in case.extras else None,
        alibi=normal(h, dtype=wide).abs() / 8 if "alibi" in case.extras else None,
        key_bias=normal(b, t, dtype=wide) if "key_bias" in case.extras else None,
        bias=normal(b, h, s, case.mask.kv_len, dtype=wide if seed % 2 else dtype) if "bias" in case.extras else None,
    )


def lay_out(x: Tensor, kind: str) -> Tensor:
    """The same values with other strides (`b s h d`, last dim contiguous); what lies between is NaN."""
    b, s, h, d = x.shape

    def within(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=x.dtype, device=x.device)

    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    views = {
        "padded": lambda: within(b, s, h, d + 16)[..., :d],
        "shifted": lambda: within(b, s, h, d + 8)[..., 8:],
        "unaligned": lambda: within(b, s, h, d + 3)[..., 1 : d + 1],
        "among others": lambda: within(b, s, h + 3, d)[:, :, 2 : h + 2],
        "every second row": lambda: within(b, 2 * s, h, d)[:, ::2],
    }
    return x if kind == "plain" else views[kind]().copy_(x)


def define(case: FuzzCase, tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every output and gradient by autograd through dense attention in one dtype."""
    device, under_test = tensors.q.device, DTYPES[case.dtype]
    i, j = positions_of((case.rows,), device), positions_of(case.visits, device)
    mask = {one.name: getattr(case.mask, one.name) for one in dataclasses.fields(case.mask)}
    visible = visible_pairs(**mask, device=device)[:, i][:, :, j]
    wide = accumulation_dtype(dtype)

    def leaf(x: Tensor | None, to: torch.dtype) -> Tensor | None:
        return None if x is None else x.to(to, copy=True).requires_grad_()

    slopes = tensors.alibi
    if slopes is not None:
        slopes = slopes.view(1, -1, 1).expand(case.batch, -1, len(i))
    bias = None if tensors.bias is None else tensors.bias[..., j]
    leaves = {
        "dq": leaf(tensors.q, dtype),
        "dk": leaf(tensors.k, dtype),
        "dv": leaf(tensors.v, dtype),
        "dalibi": leaf(slopes, wide),
        "dkey_bias": leaf(tensors.key_bias, wide),
        "dbias": None if bias is None else leaf(bias, bias.dtype if dtype == under_test else dtype),
    }
    q, k, v = leaves["dq"], leaves["dk"], leaves["dv"]
    assert q is not None
    assert k is not None
    assert v is not None
    o, lse = dense_attention(
        q,
        k,
        v,
        visible,
        q_positions=i,
        k_positions=j,
        softmax_scale=case.softmax_scale,
        softcap=case.softcap,
        sinks=None if tensors.sinks is None else tensors.sinks.to(wide),
        alibi_slopes=leaves["dalibi"],
        key_bias=leaves["dkey_bias"],
        bias=leaves["dbias"],
        dropout_p=case.dropout_p,
        dropout_seed=case.seed,
    )
    found = {"o": o.detach(), "lse": lse.detach()}
    named = {name: x for name, x in leaves.items() if x is not None}
    cotangents = [tensors.do.to(o.dtype), tensors.dlse.to(lse.dtype)]
    grads = torch.autograd.grad([o, lse], list(named.values()), cotangents, allow_unused=True)
    for (name, x), grad in zip(named.items(), grads, strict=True):
        found[name] = (torch.zeros_like(x) if grad is None else grad).to(dtype)
    return found


class Subject:
    """A case in front of a kernel set: its sides, its inputs as they lie in memory, and the calls a rank would make.

    Attributes:
        case: The case.
        tensors: Its inputs, contiguous.
    """

    def __init__(self, case: FuzzCase, kernels: KernelSet, device: torch.device) -> None:
        self.case, self._kernels = case, kernels
        self.tensors = draw_tensors(case, case.seed, device)
        self._rows = device_tables.stationary_side(case.rows, case.mask, device, "keys")
        self._keys = [device_tables.stationary_side(keys, case.mask, device, "queries") for keys in case.visits]
        widths = [len(side.positions) for side in self._keys]
        x = self.tensors
        self._q, self._do = lay_out(x.q, case.strides[0]), lay_out(x.do, case.strides[3])
        self._k = [lay_out(part, case.strides[1]) for part in x.k.split(widths, 1)]
        self._v = [lay_out(part, case.strides[2]) for part in x.v.split(widths, 1)]
        biases = (
            [None] * len(widths) if x.key_bias is None else [one.contiguous() for one in x.key_bias.split(widths, 1)]
        )
        self._scores = [
            Score(
                case.softmax_scale,
                case.softcap,
                case.dropout_p,
                case.seed,
                sinks=x.sinks,
                alibi_slopes=x.alibi,
                key_bias=bias,
                bias=x.bias,
            )
            for bias in biases
        ]

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = accumulation_dtype(self.tensors.q.dtype) if dtype is None else dtype
        return torch.full(shape, math.nan, dtype=dtype, device=self.tensors.q.device)

    def _visits(self) -> Iterator[tuple[int, Side, Tensor, Tensor, Score]]:
        return zip(itertools.count(), self._keys, self._k, self._v, self._scores)

    def attend(self) -> dict[str, Tensor]:
        """The forward over all visits."""
        b, s, h, _ = self._q.shape
        dv = self.case.v_head_dim
        o, lse = self._empty(b, s, h, dv, dtype=self._q.dtype), self._empty(b, h, s)
        carry = Carry(self._empty(b, h, s), self._empty(b, h, s), self._empty(b, s, h, dv))
        last = len(self._keys) - 1
        for step, side, k, v, score in self._visits():
            alone = step == 0 == last
            self._kernels.forward(
                self._q,
                k,
                v,
                self._rows,
                side,
                score,
                carry=None if alone else carry,
                first=step == 0,
                last=step == last,
                o=o,
                lse=lse,
            )
        return {"o": o, "lse": lse}

    def differentiate(self, answer: dict[str, Tensor]) -> dict[str, Tensor]:
        """Calls delta and the backward over all visits; what was there before is taken off again."""
        case, x = self.case, self.tensors
        generator = torch.Generator().manual_seed(case.seed + 1)
        dtype = x.q.dtype if case.narrow else accumulation_dtype(x.q.dtype)

        def buffer(*shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | float]:
            found = self._empty(*shape, dtype=dtype)
            if not case.accumulate:
                return found, 0.0
            found.copy_(torch.randn(shape, generator=generator))
            return found, found.clone()

        # a row that saw nothing has no lse to differentiate
        dlse = x.dlse.masked_fill(answer["lse"] == -math.inf, 0.0)
        delta = self._kernels.delta(answer["o"], self._do, dlse)
        b, s, h, d = x.q.shape
        dq = buffer(b, s, h, d, dtype=dtype)
        dalibi = buffer(b, h, s) if x.alibi is not None else None
        dbias = (
            None if x.bias is None else torch.zeros(b, h, s, case.mask.kv_len, dtype=x.dlse.dtype, device=x.q.device)
        )
        parts: dict[str, list[Tensor]] = collections.defaultdict(list)
        for step, side, k, v, score in self._visits():
            t, hk = k.shape[1:3]
            dk, dv = buffer(b, t, hk, d, dtype=dtype), buffer(b, t, hk, v.shape[-1], dtype=dtype)
            dkey_bias = buffer(b, t) if x.key_bias is not None else None
            self._kernels.backward(
                self._do,
                self._q,
                k,
                v,
                answer["lse"],
                delta,
                self._rows,
                side,
                score,
                Grads(
                    dq=dq[0],
                    dk=dk[0],
                    dv=dv[0],
                    dkey_bias=None if dkey_bias is None else dkey_bias[0],
                    dalibi=None if dalibi is None else dalibi[0],
                    dbias=dbias,
                    accumulate_rows=case.accumulate or step > 0,
                    accumulate_keys=case.accumulate,
                    deterministic=case.deterministic,
                ),
            )
            for name, one in (("dk", dk), ("dv", dv), ("dkey_bias", dkey_bias)):
                if one is not None:
                    parts[name].append(one[0] - one[1])
        found = {"dq": dq[0] - dq[1]} | {name: torch.cat(shares, 1) for name, shares in parts.items()}
        if dalibi is not None:
            found["dalibi"] = dalibi[0] - dalibi[1]
        if dbias is not None:
            found["dbias"] = dbias[..., positions_of(case.visits, x.q.device)]
        return found


def same_bits(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    """0.0 when all tensors are equal to the bit, infinity otherwise: a ratio like the others."""
    return 0.0 if all(torch.equal(x, those[name]) for name, x in these.items()) else math.inf


def examine(case: FuzzCase, kernels: KernelSet, device: torch.device) -> dict[str, float]:
    """Runs a case; the part of its budget that every tensor uses up, at most 1 where it is right."""
    subject = Subject(case, kernels, device)
    answer = subject.attend()
    ratios = {"forward twice": same_bits(answer, subject.attend())}
    grads = subject.differentiate(answer)
    if case.deterministic:
        ratios["backward twice"] = same_bits(grads, subject.differentiate(answer))
    dtype = DTYPES[case.dtype]
    low, scaled = (torch.float32, torch.float64) if dtype == torch.float64 else (dtype, None)
    exact, rounded = define(case, subject.tensors, torch.float64), define(case, subject.tensors, low)
    draws = [(exact, rounded)]
    for name, x in (answer | grads).items():
        ratio = Budget.of(exact[name], rounded[name], scaled).ratio(x, exact[name])
        if 1 < ratio < math.inf and x.numel() < FEW:
            for seed in range(case.seed + len(draws), case.seed + 8):
                other = draw_tensors(case, seed, device)
                draws.append((define(case, other, torch.float64), define(case, other, low)))
            every, roughly = (torch.cat([draw[side][name] for draw in draws]) for side in (0, 1))
            pooled = Budget.of(every, roughly, scaled)
            few = Budget(rms=pooled.largest, largest=pooled.largest) if x.numel() < 64 else pooled
            ratio = few.ratio(x, exact[name])
        ratios[name] = math.inf if math.isnan(ratio) else ratio
    return ratios


@dataclass
class Tally:
    """What a run of many cases found.

    Attributes:
        cases: Cases run.
        skipped: Cases that the kernel set does not serve, by reason.
        served: Cases by kernel set.
        worst: Per tensor: the largest ratio, and the seed of its case.
        red: What was wrong: seed, case, ratios over 1 or the exception.
        seconds: How long it took.
        next_seed: Where to go on.
    """

    cases: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    red: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    next_seed: int = 0


def fuzz(seconds: float, seed: int, impl: str, session: Session, keep: Callable[[Tally], None] | None = None) -> Tally:
    """Runs cases for so many seconds, one at least, on this rank alone.

    Args:
        seconds: How long; 0 for the one case of the seed.
        seed: Of the first case.
        impl: Kernel set, or "auto".
        session: For the device.
        keep: Told after every wrong case, so that nothing is lost when the next one ends the process.
    """
    tally, began = Tally(next_seed=seed), time.monotonic()
    while True:
        case = draw_case(tally.next_seed, session.device.type, impl)
        tally.next_seed += 1
        _run_one(case, impl, session.device, tally)
        tally.seconds = time.monotonic() - began
        if tally.red and tally.red[-1]["seed"] == case.seed:
            print(
                f"RED: {replay(case, impl, session)}\n  {tally.red[-1]['why']}\n  {case}", file=sys.stderr, flush=True
            )
            if keep is not None:
                keep(tally)
            if session.device.type == "cuda":
                # after a fault of the device nothing that follows means anything
                torch.cuda.synchronize(session.device)
        if tally.seconds >= seconds:
            return tally


def _run_one(case: FuzzCase, impl: str, device: torch.device, tally: Tally) -> None:
    dtype = DTYPES[case.dtype]
    try:
        choice = pick(device, dtype, case.head_dim, case.v_head_dim, impl=impl, features=case.features)
    except NotImplementedError as refusal:
        why = str(refusal)
        tally.skipped[why] = tally.skipped.get(why, 0) + 1
        return
    tally.cases += 1
    tally.served[choice.name] = tally.served.get(choice.name, 0) + 1
    device_tables.clear()
    try:
        ratios = examine(case, choice.kernels, device)
    except Exception as error:
        tally.red.append({"seed": case.seed, "case": str(case), "why": f"{type(error).__name__}: {error}"[:500]})
        return
    for name, ratio in ratios.items():
        tally.worst[name] = max(tally.worst.get(name, (-1.0, 0)), (ratio, case.seed))
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    if wrong:
        why = ", ".join(f"{name} {ratio:.3g} x its budget" for name, ratio in wrong.items())
        tally.red.append({"seed": case.seed, "case": str(case), "why": why})


def replay(case: FuzzCase, impl: str, session: Session) -> str:
    """The command that runs one case again."""
    where = " --device cpu" if session.device.type == "cpu" else ""
    return f"python -m ringattn.launch.check --fuzz 0 --fuzz-seed {case.seed} --impl {impl}{where}"
