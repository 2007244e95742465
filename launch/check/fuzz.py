"""Random kernel calls against the fp64 reference: any shape, mask, option, stride and split into ring steps.

A case is the calls of one rank to one kernel set, without a ring. It is a function of one integer and the kind of device, which
decides sizes. The dtype, head dims, head groups and options, for which kernels are compiled, depend on the integer without its
last bits, so neighbours share kernels. `check --fuzz SECONDS` runs cases; `--fuzz 0 --fuzz-seed INTEGER` repeats one.

o, lse and every gradient must be inside the budget that dense attention in the dtype under test gives. Buffers start as NaN. The
forward runs twice and must give the same bits; so must the backward, when the case is deterministic.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
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

from ringattn.kernels.interface import (
    BackwardStep,
    CallShape,
    Grads,
    KernelSet,
    RowMetadata,
    Score,
    SoftmaxState,
    Step,
    accumulation_dtype,
)
from ringattn.kernels.registry import select_kernels
from ringattn.kernels.runtime import table_cache
from ringattn.launch.check.inference import DTYPES, budget_dtypes
from ringattn.launch.common.session import Session
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.reference import dense_attention, visible_pairs
from ringattn.plan import device_tables
from ringattn.plan.layouts import LAYOUTS, Run, Shard, make_shards
from ringattn.plan.mask import MaskUnion, short_mask

NEIGHBOURS = 8
"""Cases in a row that share their kernels."""
FEW = 4096
FEW_ROWS = 512
"""Elements, or rows of all heads, below which a tensor over its budget is judged by the budget of several draws, not by luck."""
SCORES = {"cuda": 2**23, "cpu": 2**15}
"""Scores of one case at most: batch x query heads x rows x keys."""
STRIDES = ("plain", "heads first", "padded", "shifted", "unaligned", "among others", "every second row")


@dataclass(frozen=True)
class FuzzCase:
    """One query shard and the key buffers of its ring steps.

    Attributes:
        mask_options: Arguments of `short_mask` and of `visible_pairs`, its definition.
        ring_steps: Positions of the keys of each step, disjoint.
        strides: Of q, k, v and do.
        accumulate: Gradients are added to the values in their buffers.
        narrow: Gradients are written in the dtype of the inputs.
    """

    seed: int
    dtype: str
    head_dim: int
    v_head_dim: int
    heads: int
    kv_heads: int
    batch: int
    mask_options: dict[str, Any]
    rows: Shard
    ring_steps: tuple[Shard, ...]
    softmax_scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    extras: tuple[str, ...] = ()
    strides: tuple[str, ...] = ("plain",) * 4
    accumulate: bool = False
    narrow: bool = False
    deterministic: bool = False

    @functools.cached_property
    def mask(self) -> MaskUnion:
        """The mask of the whole sequences."""
        return short_mask(**self.mask_options)

    @property
    def features(self) -> set[str]:
        """Features that a kernel set must serve besides q . k and an interval."""
        flags = {"softcap": self.softcap, "dropout": self.dropout_p, "deterministic": self.deterministic}
        flags["per_batch_bounds"] = self.mask.batch_size > 1
        return {*self.extras, *(name for name, on in flags.items() if on)}


def draw_case(seed: int, kind: str, impl: str = "auto") -> FuzzCase:
    """The case of a seed, in sizes for `kind` ("cuda" or "cpu") and in a dtype that `impl` serves.

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
    mask_options = draw_mask(own, seq_len, kv_len, batch)
    rows, ring_steps = draw_split(own, short_mask(**mask_options))
    accumulate = own.random() < 0.3
    return FuzzCase(
        *(seed, dtype, head_dim, v_head_dim, heads, kv_heads, batch, mask_options, rows, ring_steps),
        softmax_scale=own.choice([head_dim**-0.5] * 4 + [1.7 * head_dim**-0.5, -0.3 * head_dim**-0.5, 0.0]),
        softcap=softcap,
        dropout_p=dropout_p,
        extras=extras,
        strides=tuple(own.choice(STRIDES) if own.random() < 0.5 else "plain" for _ in range(4)),
        accumulate=accumulate,
        narrow=len(ring_steps) == 1 and not accumulate and own.random() < 0.5,
        deterministic=own.random() < 0.5,
    )


def draw_length(draw: random.Random, longest: int, gpu: bool) -> int:
    """A length that is tiny, next to a multiple of the tile, or anything."""
    style = draw.random()
    if style < 0.15:
        return draw.randint(1, 9)
    if style < 0.65:
        tile = draw.choice([64, 128, 192, 256] if gpu else [16, 32])
        return min(longest, max(1, tile * draw.randint(1, max(1, longest // tile)) + draw.choice([-1, 0, 0, 1, 7, -9])))
    return draw.randint(1, longest)


def draw_mask(draw: random.Random, seq_len: int, kv_len: int, batch: int) -> dict[str, Any]:
    """Arguments of any mask, with any combination of its features."""
    same = seq_len == kv_len
    causal = draw.random() < 0.6
    options: dict[str, Any] = {"seq_len": seq_len, "kv_len": kv_len, "causal": causal}
    if draw.random() < 0.35:
        choices = (None, 0, 1, 63, 64, 127, 191)
        options["window"] = tuple(draw.choice([*choices, draw.randint(0, seq_len)]) for _ in range(2))
    if same and draw.random() < 0.3:
        cuts = sorted(draw.randint(0, seq_len) for _ in range(draw.randint(0, 7)))
        cuts += draw.sample(cuts, min(len(cuts), draw.randint(0, 2)))  # documents of no tokens
        options["documents"] = (0, *sorted(cuts), seq_len)
    if causal and draw.random() < 0.12:
        options["prefix_len"] = draw.randint(0, kv_len + 3)
    if draw.random() < 0.1:
        options["chunk_len"] = draw.randint(1, seq_len)
    if same and batch > 1 and draw.random() < 0.4:
        ends = (sorted((draw.randint(0, seq_len), draw.randint(0, seq_len))) for _ in range(batch))
        options["lengths"] = tuple(map(tuple, ends))
    return options


def draw_split(draw: random.Random, mask: MaskUnion) -> tuple[Shard, tuple[Shard, ...]]:
    """The rows of one rank and the keys of its ring steps: everything at once, a rank of a ring, or runs of any kind."""
    style = draw.random()
    everything = (Run(0, 1, mask.kv_len),)
    if style < 0.35:
        return (Run(0, 1, mask.seq_len),), (everything,)
    if style < 0.7:
        world_size, layout = draw.choice([2, 3, 4]), draw.choice(LAYOUTS[:-1])
        queries = make_shards(layout, mask.seq_len, world_size, mask)
        keys = queries if mask.seq_len == mask.kv_len else make_shards(layout, mask.kv_len, world_size, mask)
        rank = draw.randrange(world_size)
        return queries[rank], tuple(keys[(rank - step) % world_size] for step in range(world_size))
    rows = tuple(itertools.islice(draw_runs(draw, mask.seq_len), draw.randint(1, 9)))
    ring_steps: list[list[Run]] = [[] for _ in range(draw.randint(1, 4))]
    for run in draw_runs(draw, mask.kv_len):
        draw.choice(ring_steps).append(run)
    if draw.random() < 0.3:
        ring_steps.insert(draw.randrange(len(ring_steps) + 1), [])
    return rows, tuple(tuple(keys) for keys in ring_steps)


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


def positions_of(shards: Sequence[Shard], device: torch.device) -> Tensor:
    """Positions of the rows of some buffers, one after the other."""
    found = [run.position(x) for shard in shards for run in shard for x in range(run.length)]
    return torch.tensor(found, dtype=torch.int64, device=device)


def draw_tensors(case: FuzzCase, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Inputs and cotangents, contiguous, the keys of all ring steps one after the other; options as far as the case has them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[case.dtype]
    wide = accumulation_dtype(dtype)
    s, t = (len(positions_of(shards, torch.device("cpu"))) for shards in ((case.rows,), case.ring_steps))
    b, h, hk = case.batch, case.heads, case.kv_heads
    shapes = {
        "q": ((b, s, h, case.head_dim), dtype),
        "k": ((b, t, hk, case.head_dim), dtype),
        "v": ((b, t, hk, case.v_head_dim), dtype),
        "do": ((b, s, h, case.v_head_dim), dtype),
        "dlse": ((b, h, s), wide),
    }
    options = {
        "sinks": ((h,), wide),
        "alibi": ((h,), wide),
        "key_bias": ((b, t), wide),
        "bias": ((b, h, s, case.mask.kv_len), wide if seed % 2 else dtype),
    }
    shapes |= {name: shape for name, shape in options.items() if name in case.extras}
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(device, to)
        for name, (shape, to) in shapes.items()
    }
    if "alibi" in drawn:
        drawn["alibi"] = drawn["alibi"].abs() / 8
    return drawn


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


def define(case: FuzzCase, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every output and gradient by autograd through dense attention in one dtype."""
    device, wide, x = tensors["q"].device, accumulation_dtype(dtype), dict(tensors)
    i, j = positions_of((case.rows,), device), positions_of(case.ring_steps, device)
    visible = visible_pairs(**case.mask_options, device=device)[:, i][:, :, j]
    dtypes = {"q": dtype, "k": dtype, "v": dtype, "alibi": wide, "key_bias": wide}
    if "alibi" in x:
        # the kernels return one gradient per row
        x["alibi"] = x["alibi"].view(1, -1, 1).expand(case.batch, -1, len(i))
    if "bias" in x:
        x["bias"] = x["bias"][..., j]
        dtypes["bias"] = x["bias"].dtype if dtype == DTYPES[case.dtype] else dtype
    leaves = {name: x[name].to(to, copy=True).requires_grad_() for name, to in dtypes.items() if name in x}
    q, k, v = (leaves[name] for name in "qkv")
    numbers: dict[str, Any] = {"softmax_scale": case.softmax_scale, "softcap": case.softcap}
    numbers |= {"dropout_p": case.dropout_p, "dropout_seed": case.seed}
    biases = {"alibi_slopes": leaves.get("alibi"), "key_bias": leaves.get("key_bias"), "bias": leaves.get("bias")}
    sinks = x["sinks"].to(wide) if "sinks" in x else None
    o, lse = dense_attention(q, k, v, visible, q_positions=i, k_positions=j, sinks=sinks, **biases, **numbers)
    found = {"o": o.detach(), "lse": lse.detach()}
    cotangents = [x["do"].to(o.dtype), x["dlse"].to(lse.dtype)]
    grads = torch.autograd.grad([o, lse], list(leaves.values()), cotangents, allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"d{name}"] = (torch.zeros_like(leaf) if grad is None else grad).to(dtype)
    return found


def sides_of(case: FuzzCase, device: torch.device) -> list[tuple[RowMetadata, RowMetadata]]:
    """The (query side, key side) of each ring step of a case."""
    rows = device_tables.stationary_side(case.rows, case.mask, device, "keys")
    keys = [device_tables.stationary_side(shard, case.mask, device, "queries") for shard in case.ring_steps]
    return [(rows, side) for side in keys]


class KernelCalls:
    """The calls that a rank would make to a kernel set for one case; `tensors` are the inputs, contiguous."""

    def __init__(self, case: FuzzCase, kernels: type[KernelSet], device: torch.device) -> None:
        self.case = case
        self.tensors = x = draw_tensors(case, case.seed, device)
        sides = sides_of(case, device)
        self._rows, self._keys = sides[0][0], [keys for _, keys in sides]
        widths = [len(side.positions) for side in self._keys]
        self._q, self._do = lay_out(x["q"], case.strides[0]), lay_out(x["do"], case.strides[3])
        self._k = [lay_out(part, case.strides[1]) for part in x["k"].split(widths, 1)]
        self._v = [lay_out(part, case.strides[2]) for part in x["v"].split(widths, 1)]
        numbers = (case.softmax_scale, case.softcap, case.dropout_p, case.seed)
        score = Score(*numbers, sinks=x.get("sinks"), alibi_slopes=x.get("alibi"), bias=x.get("bias"))
        self._scores = [score] * len(widths)
        shape = CallShape.of(self._q, self._k[0], self._v[0], score, deterministic=case.deterministic)
        if "key_bias" in x:
            shape = shape._replace(score=dataclasses.replace(score, key_bias=x["key_bias"]))
            biases = [one.contiguous() for one in x["key_bias"].split(widths, 1)]
            self._scores = [dataclasses.replace(score, key_bias=one) for one in biases]
        self._kernels = kernels(shape)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = accumulation_dtype(self._q.dtype) if dtype is None else dtype
        return torch.full(shape, math.nan, dtype=dtype, device=self._q.device)

    def _steps(self) -> Iterator[tuple[int, RowMetadata, Tensor, Tensor, Score]]:
        return zip(itertools.count(), self._keys, self._k, self._v, self._scores)

    def forward(self) -> dict[str, Tensor]:
        """Call the forward for all ring steps."""
        b, s, h, _ = self._q.shape
        dv = self.case.v_head_dim
        o, lse = self._empty(b, s, h, dv, dtype=self._q.dtype), self._empty(b, h, s)
        state = SoftmaxState(self._empty(b, h, s), self._empty(b, h, s), self._empty(b, s, h, dv), [])
        last = len(self._keys) - 1
        for step, side, k, v, score in self._steps():
            ends = state if last else None, step == 0, step == last
            self._kernels.forward(Step(self._q, k, v, self._rows, side, score, o, lse, *ends))
        return {"o": o, "lse": lse}

    def backward(self, answer: dict[str, Tensor]) -> dict[str, Tensor]:
        """Call delta and the backward for all ring steps; values that were in the buffers before are subtracted again."""
        case, x = self.case, self.tensors
        generator = torch.Generator().manual_seed(case.seed + 1)
        dtype = x["q"].dtype if case.narrow else accumulation_dtype(x["q"].dtype)

        def buffer(*shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | float]:
            found = self._empty(*shape, dtype=dtype)
            if not case.accumulate:
                return found, 0.0
            found.copy_(torch.randn(shape, generator=generator))
            return found, found.clone()

        # a row that sees nothing has no lse to differentiate
        dlse = x["dlse"].masked_fill(answer["lse"] == -math.inf, 0.0)
        delta = self._kernels.delta(answer["o"], self._do, dlse)
        b, s, h, _ = x["q"].shape
        rows = {"dq": buffer(*x["q"].shape, dtype=dtype)}
        if "alibi" in x:
            rows["dalibi"] = buffer(b, h, s)
        dbias = x["dlse"].new_zeros(b, h, s, case.mask.kv_len) if "bias" in x else None
        parts: dict[str, list[Tensor]] = collections.defaultdict(list)
        for step, side, k, v, score in self._steps():
            keys = {"dk": buffer(*k.shape, dtype=dtype), "dv": buffer(*v.shape, dtype=dtype)}
            if "key_bias" in x:
                keys["dkey_bias"] = buffer(*k.shape[:2])
            buffers: dict[str, Any] = {name: found for name, (found, _) in (rows | keys).items()}
            buffers |= {"accumulate_rows": case.accumulate or step > 0, "accumulate_keys": case.accumulate}
            grads = Grads(**buffers, dbias=dbias)
            given = self._do, self._q, k, v, answer["lse"], delta, self._rows, side, score
            self._kernels.backward(BackwardStep(*given), grads)
            for name, (found, before) in keys.items():
                parts[name].append(found - before)
        grads = {name: found - before for name, (found, before) in rows.items()}
        grads |= {name: torch.cat(steps, 1) for name, steps in parts.items()}
        if dbias is not None:
            grads["dbias"] = dbias[..., positions_of(case.ring_steps, dbias.device)]
        return grads


def same_bits(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    """Return 0.0 when all tensors are equal to the bit, infinity otherwise: a ratio like the others."""
    return 0.0 if all(torch.equal(x, those[name]) for name, x in these.items()) else math.inf


def _define_both(
    case: FuzzCase, tensors: dict[str, Tensor], low: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every output and gradient in fp64, and in `low` with gradients whose delta reads the o that was stored.

    Where rows see one key that rounding is most of the error of any flash attention, and plain torch has none.
    """
    exact, rounded = define(case, tensors, torch.float64), define(case, tensors, low)
    # an error of delta enters all gradients as one of -dlse does
    error = (exact["o"].to(DTYPES[case.dtype]) - exact["o"]) * tensors["do"]
    stored = define(case, tensors | {"dlse": tensors["dlse"] - error.sum(-1).transpose(1, 2)}, torch.float64)
    for name in rounded.keys() - {"o", "lse"}:
        rounded[name] = (rounded[name] + (stored[name] - exact[name])).to(low)
    return exact, rounded


def examine(case: FuzzCase, kernels: type[KernelSet], device: torch.device) -> dict[str, float]:
    """Run a case; return the part of its budget that every tensor uses up, at most 1 where it is right."""
    calls = KernelCalls(case, kernels, device)
    answer = calls.forward()
    ratios = {"forward twice": same_bits(answer, calls.forward())}
    grads = calls.backward(answer)
    if case.deterministic:
        ratios["backward twice"] = same_bits(grads, calls.backward(answer))
    low, scaled = budget_dtypes(case.dtype)
    exact, rounded = define(case, calls.tensors, torch.float64), define(case, calls.tensors, low)
    draws = list[tuple[dict[str, Tensor], dict[str, Tensor]]]()
    few_rows = answer["lse"].numel() < FEW_ROWS
    for name, x in (answer | grads).items():
        ratio = Budget.of(exact[name], rounded[name], scaled).ratio(x, exact[name])
        if 1 < ratio < math.inf and (few_rows or x.numel() < FEW):
            for seed in range(case.seed + len(draws), case.seed + 8):
                draws.append(_define_both(case, draw_tensors(case, seed, device), low))
            every, roughly = (torch.cat([draw[side][name] for draw in draws]) for side in (0, 1))
            pooled = Budget.of(every, roughly, scaled)
            few = Budget(rms=pooled.largest, largest=pooled.largest) if x.numel() < 64 else pooled
            ratio = few.ratio(x, exact[name])
        ratios[name] = math.inf if math.isnan(ratio) else ratio
    return ratios


@dataclass
class Tally:
    """Results of a run of many cases.

    Attributes:
        skipped: Number of cases that the kernel set does not serve, by reason.
        served: Number of cases by kernel set.
        worst: Per tensor the largest ratio, and the seed of its case.
        red: Per wrong case its seed, its text, and the ratios over 1 or the exception.
    """

    cases: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    red: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    next_seed: int = 0


def fuzz(seconds: float, seed: int, impl: str, session: Session, keep: Callable[[Tally], None] | None = None) -> Tally:
    """Run cases for so many seconds, at least one, on this rank alone.

    `keep` is called after every wrong case, so that nothing is lost when the next one ends the process.
    """
    tally, began = Tally(next_seed=seed), time.monotonic()
    while True:
        case = draw_case(tally.next_seed, session.device.type, impl)
        tally.next_seed += 1
        why = _run_one(case, impl, session.device, tally)
        tally.seconds = time.monotonic() - began
        if why is not None:
            tally.red.append({"seed": case.seed, "case": str(case), "why": why})
            where = " --device cpu" if session.device.type == "cpu" else ""
            command = f"python -m ringattn.launch.check --fuzz 0 --fuzz-seed {case.seed} --impl {impl}{where}"
            print(f"RED: {command}\n  {why}\n  {case}", file=sys.stderr, flush=True)
            if keep is not None:
                keep(tally)
            if session.device.type == "cuda":
                # after an error of the device no later result is valid
                torch.cuda.synchronize(session.device)
        if tally.seconds >= seconds:
            return tally


def _run_one(case: FuzzCase, impl: str, device: torch.device, tally: Tally) -> str | None:
    """Run one case; return a description of its errors, or None."""
    table_cache.clear()
    dtype, dims = DTYPES[case.dtype], (case.head_dim, case.v_head_dim)
    steps = functools.partial(sides_of, case, device)
    try:
        choice = select_kernels(device, dtype, *dims, impl=impl, features=case.features, steps=steps)
    except NotImplementedError as refusal:
        why = str(refusal)
        tally.skipped[why] = tally.skipped.get(why, 0) + 1
        return None
    tally.cases += 1
    tally.served[choice.name] = tally.served.get(choice.name, 0) + 1
    try:
        ratios = examine(case, choice.kernels, device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    for name, ratio in ratios.items():
        tally.worst[name] = max(tally.worst.get(name, (-1.0, 0)), (ratio, case.seed))
    wrong = [f"{name} {ratio:.3g} x its budget" for name, ratio in ratios.items() if not ratio <= 1]
    return ", ".join(wrong) or None
