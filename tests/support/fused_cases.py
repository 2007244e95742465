"""Gathered visits for tests: sides, near, far and homes made from dense masks, and far filled while a kernel runs.

Made here from masks and shards in plain Python, so that neither the schedule of the library nor a kernel set judges itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.interface import (
    PAD_ROWS,
    Arrivals,
    BackwardStep,
    CallShape,
    GatheredKeys,
    Grads,
    ReadyFlags,
    Returns,
    RowMetadata,
    Score,
)
from ringattn.numerics.reference import dense_attention, visible_pairs
from tests.support.kernel_conformance import Runs, make_side, positions_of
from tests.support.term_masks import TermMask, TermMaskMaker

NAN = math.nan
TERMS = ("dalibi", "dkey_bias")  # gradients in fp32 at least


@dataclass(frozen=True)
class Scene:
    """Attention over a whole sequence, cut among ranks.

    Attributes:
        name: Said by pytest.
        shards: The runs of every rank.
        mask: Arguments of `visible_pairs`.
        terms: In place of mask: makes a mask of several terms.
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Of q and k.
        v_head_dim: Of v; None: head_dim.
        groups: Groups of key heads that arrive one after another.
        softcap: As in Score.
        alibi: With slopes.
        sinks: With sinks.
        key_bias: With a bias per key, which is -inf for some.
        dtype: Of q, k, v and do.
        seed: Of the inputs.
    """

    name: str
    shards: tuple[Runs, ...]
    mask: dict[str, Any] = field(default_factory=dict)
    terms: TermMaskMaker | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    groups: int = 1
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    key_bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return sum(length for shard in self.shards for _, _, length in shard)


def shards_of(layout: str, seq_len: int, world_size: int) -> tuple[Runs, ...]:
    """Shards by a layout's name: contiguous, zigzag, or scattered (uneven chunks, in turn)."""
    if layout == "scattered":
        edges = [seq_len * k * (k + 2) // (8 * world_size * (world_size * 4 + 1)) for k in range(4 * world_size)]
        edges = [*sorted(set(edges)), seq_len]
        chunks = [(a, 1, e - a) for a, e in pairwise(edges)]
        return tuple(tuple(chunks[r::world_size]) for r in range(world_size))
    count = world_size * (2 if layout == "zigzag" else 1)
    edges = [seq_len * k // count for k in range(count + 1)]
    chunks = [(edges[k], 1, edges[k + 1] - edges[k]) for k in range(count)]
    if layout == "zigzag":
        return tuple((chunks[r], chunks[count - 1 - r]) for r in range(world_size))
    return tuple((chunk,) for chunk in chunks)


@dataclass
class Whole:
    """Inputs and exact results of a scene, by global position."""

    scene: Scene
    mask: TermMask
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    slopes: Tensor | None
    sinks: Tensor | None
    key_bias: Tensor | None  # b n
    lse: Tensor
    delta: Tensor
    exact: dict[str, Tensor]
    low: dict[str, Tensor]

    @property
    def score(self) -> Score:
        """How scores are made."""
        scene = self.scene
        return Score(scene.head_dim**-0.5, softcap=scene.softcap, sinks=self.sinks, alibi_slopes=self.slopes)


def make_whole(scene: Scene, device: torch.device | str = "cpu") -> Whole:
    """Draws the inputs and finds the gradients in fp64 and in the scene's dtype."""
    generator = torch.Generator().manual_seed(scene.seed)
    n, b, h, hk, d = scene.seq_len, scene.batch, scene.heads, scene.kv_heads, scene.head_dim
    dv = scene.v_head_dim or d

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, scene.dtype)

    q, k, v, do = draw(b, n, h, d), draw(b, n, hk, d), draw(b, n, hk, dv), draw(b, n, h, dv)
    slopes = torch.rand(h, generator=generator).to(device) * 0.2 if scene.alibi else None
    sinks = torch.randn(h, generator=generator).to(device) if scene.sinks else None
    key_bias = None
    if scene.key_bias:
        key_bias = torch.randn(b, n, generator=generator)
        key_bias[-1, n // 5 : n // 4] = -math.inf
        key_bias = key_bias.to(device)
    mask = TermMask(visible_pairs(n, **scene.mask)[None]) if scene.terms is None else scene.terms(n)
    visible = mask.visible.to(device).expand(b, -1, -1)

    def gradients(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {"dq": q, "dk": k, "dv": v}
        if slopes is not None:
            leaves["dalibi"] = slopes.view(1, -1, 1).expand(b, -1, n)
        if key_bias is not None:
            leaves["dkey_bias"] = key_bias
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of = {
            name: x.detach().to(wide if name in TERMS else dtype, copy=True).contiguous().requires_grad_()
            for name, x in leaves.items()
        }
        positions = torch.arange(n, device=device)
        o, lse = dense_attention(
            of["dq"], of["dk"], of["dv"], visible, q_positions=positions, k_positions=positions,
            softmax_scale=d**-0.5, softcap=scene.softcap, sinks=None if sinks is None else sinks.to(wide),
            alibi_slopes=of.get("dalibi"), key_bias=of.get("dkey_bias"),
        )  # fmt: skip
        o.backward(do.to(o.dtype))
        found = {name: torch.zeros_like(x) if x.grad is None else x.grad.to(dtype) for name, x in of.items()}
        return {**found, "o": o.detach(), "lse": lse.detach()}

    exact, low = gradients(torch.float64), gradients(scene.dtype)
    delta = (exact["o"] * do.double()).sum(-1).transpose(1, 2).float().contiguous()
    lse = exact["lse"].float().contiguous()
    return Whole(scene, mask.expand(b), q, k, v, do, slopes, sinks, key_bias, lse, delta, exact, low)


@dataclass
class RingStep:
    """What one rank's gathered backward is given, and where results go."""

    whole: Whole
    rank: int
    places: list[int]  # global positions of the queries
    rows: RowMetadata
    keys: GatheredKeys
    source_places: list[list[int]]  # global positions of the rows of each source
    owners: list[int]  # of each source
    near: tuple[Tensor, Tensor]
    far: tuple[Tensor, Tensor]
    buffer: Tensor  # of both halves of far
    flags: Tensor
    error: Tensor
    regions: list[Tensor]  # one per source
    homes: Tensor
    grad_buffer_rows: int
    table: Tensor | None  # the bias of keys, near's and far's
    bias_regions: list[Tensor]
    bias_grad_buffers: Tensor | None
    waiting: list[tuple[int, int]]  # (group, source) still to come

    @property
    def arrivals(self) -> Arrivals:
        """The remote rows, for which a kernel waits one second."""
        return Arrivals(*self.far, ReadyFlags(self.flags, self.error, 10**9))

    @property
    def returns(self) -> Returns:
        """The regions of gradients of keys."""
        return Returns(self.homes, self.grad_buffer_rows, self.bias_grad_buffers)

    def grads(self, dq_dtype: torch.dtype | None = None) -> Grads:
        """Return dq and dalibi, unwritten."""
        q = self.whole.q[:, self.places]
        dalibi = None
        if self.whole.slopes is not None:
            dalibi = torch.full((q.shape[0], q.shape[2], q.shape[1]), NAN, device=q.device)
        return Grads(torch.full_like(q, NAN, dtype=dq_dtype or q.dtype), dalibi=dalibi)

    def step(self, *, makes_delta: bool = False) -> BackwardStep:
        """Return the inputs of the backward; delta is given, or made from o."""
        at, whole = self.places, self.whole
        lse, delta = whole.lse[:, :, at].contiguous(), whole.delta[:, :, at].contiguous()
        score = replace(whole.score, key_bias=self.table)
        step = BackwardStep(whole.do[:, at], whole.q[:, at], *self.near, lse, delta, self.rows, self.keys, score)
        o = whole.low["o"].to(whole.q.dtype)[:, at]
        return step._replace(delta=torch.full_like(delta, NAN), o=o) if makes_delta else step

    def call(self, *, deterministic: bool = False) -> CallShape:
        """Return the shape of the call."""
        return CallShape.of(self.whole.q, *self.near, self.step().score, deterministic=deterministic)

    def bring(self, group: int, source: int) -> None:
        """Puts the rows of a source for one group of heads into far."""
        whole, scene = self.whole, self.whole.scene
        heads = slice(*(scene.kv_heads // scene.groups * g for g in (group, group + 1)))
        first = self.keys.sides[source].run_list[0][0] if self.source_places[source] else 0
        at = slice(first, first + len(self.source_places[source]))
        for far, all_rows in zip(self.far, (whole.k, whole.v), strict=True):
            far[:, at, heads] = all_rows[:, self.source_places[source], heads]
        if self.table is not None and whole.key_bias is not None and group == 0:
            self.table[:, self.keys.local_rows :][:, at] = whole.key_bias[:, self.source_places[source]]

    def arrive(self) -> bool:
        """The next rows come and their flag rises; False: all are there."""
        if not self.waiting:
            return False
        group, source = self.waiting.pop(0)
        self.bring(group, source)
        self.flags[group, self.keys.steps[source]] = 1
        return True


@dataclass(frozen=True)
class Sources:
    """The keys that one rank meets.

    Attributes:
        rows: Its queries.
        keys: The key sides.
        places: Global positions of the rows of each source.
        owners: The rank of each source.
    """

    rows: RowMetadata
    keys: GatheredKeys
    places: list[list[int]]
    owners: list[int]


def gather_sources(
    shards: tuple[Runs, ...],
    rank: int,
    mask: Tensor | TermMask,
    device: torch.device | str = "cpu",
    everything: bool = False,
) -> Sources:
    """The sources of a rank under a mask, `b n n` or terms: only keys that it sees are fetched, or `everything`, seen or not."""
    mask = mask if isinstance(mask, TermMask) else TermMask(mask[None])
    world = len(shards)
    own = positions_of(shards[rank])
    seen_by = mask.transpose()
    sees = mask.visible[:, own].any(0).any(0)
    runs_of, steps, owners = [shards[rank]], [0], [rank]
    for step in range(1, world):
        owner = (rank - step) % world
        kept: list[tuple[int, int, int]] = []
        for start, stride, length in shards[owner]:
            wanted = sees[[start + stride * x for x in range(length)]].nonzero().flatten().tolist()
            if everything:
                kept.append((start, stride, length))
            elif wanted:
                kept.append((start + stride * wanted[0], stride, wanted[-1] + 1 - wanted[0]))
        if kept:
            runs_of.append(tuple(kept))
            steps.append(step)
            owners.append(owner)
    near = make_side(runs_of[0], seen_by, device)
    sides, at = [near], 0
    tables = {"positions": [near.positions[None]], "lo": [near.lo], "hi": [near.hi]}
    for runs in runs_of[1:]:
        side = make_side(runs, seen_by, device)
        count = side.positions.shape[0]
        length = -(-(count + PAD_ROWS) // PAD_ROWS) * PAD_ROWS
        for name, parts in tables.items():
            of_side = getattr(side, name).view(-1, count)
            guard = torch.zeros(of_side.shape[0], length - count, dtype=torch.int32, device=device)
            parts.append(torch.cat((of_side, guard), 1))
        run_list = tuple((offset + at, n, start, stride) for offset, n, start, stride in side.run_list)
        table = torch.tensor(run_list, dtype=torch.int32, device=device)
        sides.append(replace(side, runs=table, run_list=run_list))
        at += length
    joined = {name: torch.cat(parts, 1).contiguous() for name, parts in tables.items()}
    keys = GatheredKeys(tuple(sides), tuple(steps), len(own), at, joined["positions"][0], joined["lo"], joined["hi"])
    return Sources(make_side(shards[rank], mask, device), keys, [positions_of(runs) for runs in runs_of], owners)


def make_visit(whole: Whole, rank: int, device: torch.device | str = "cpu", everything: bool = False) -> RingStep:
    """The visit of one rank: only keys that it sees are fetched, or `everything`, seen or not."""
    scene = whole.scene
    sources = gather_sources(scene.shards, rank, whole.mask, device, everything)
    keys, places = sources.keys, sources.places[0]
    b, hk, d, dv = scene.batch, scene.kv_heads, scene.head_dim, scene.v_head_dim or scene.head_dim
    far = torch.full((b, keys.remote_rows, hk, d + dv), NAN, dtype=scene.dtype, device=device)
    for side in keys.sides[1:]:
        end = side.run_list[0][0] + side.lo_host.shape[1]
        far[:, end : end + PAD_ROWS] = 0  # what lies behind the guard stays NaN
    grad_buffer_rows = max(sum(length for _, _, length in shard) for shard in scene.shards) + 3
    regions = [torch.full((b, grad_buffer_rows, hk, d + dv), NAN, device=device) for _ in keys.sides]
    homes = torch.tensor([x.data_ptr() for x in regions], dtype=torch.int64, device=device)
    table, bias_grad_buffers, bias_regions = None, None, []
    if whole.key_bias is not None:
        table = torch.full((b, keys.local_rows + keys.remote_rows), NAN, device=device)
        table[:, : keys.local_rows] = whole.key_bias[:, places]
        bias_regions = [torch.full((b, hk, grad_buffer_rows), NAN, device=device) for _ in keys.sides]
        bias_grad_buffers = torch.tensor([x.data_ptr() for x in bias_regions], dtype=torch.int64, device=device)
    waiting = [(g, s) for g in range(scene.groups) for s in range(1, len(keys.sides))]
    return RingStep(
        whole, rank, places, sources.rows, keys, sources.places, sources.owners,
        (whole.k[:, places], whole.v[:, places]), (far[..., :d], far[..., d:]), far,
        torch.zeros(scene.groups, len(scene.shards), dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device), regions, homes, grad_buffer_rows, table, bias_regions, bias_grad_buffers,
        waiting,
    )  # fmt: skip


def contributions(
    ring_steps: list[RingStep], rank: int, *, biases: bool = False
) -> tuple[Tensor, list[Tensor], Tensor]:
    """What `reduce_kv_grads`, or `reduce_key_bias_grads`, is given on a rank: own, parts in ring order, rows."""
    (mine,) = (ring_step for ring_step in ring_steps if ring_step.rank == rank)
    world = len(mine.whole.scene.shards)
    parts, table = [], []
    for step in range(1, world):
        (visitor,) = (ring_step for ring_step in ring_steps if ring_step.rank == (rank + step) % world)
        if rank in visitor.owners:
            source = visitor.owners.index(rank)
            row_of = {place: x for x, place in enumerate(visitor.source_places[source])}
            parts.append((visitor.bias_regions if biases else visitor.regions)[source])
            table.append([row_of.get(place, -1) for place in mine.places])
    rows = torch.tensor(table, dtype=torch.int32, device=mine.homes.device).view(len(parts), len(mine.places))
    return (mine.bias_regions if biases else mine.regions)[0], parts, rows
