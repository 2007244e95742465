"""Gathered forwards on small rings whose far rows arrive while the kernel runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.attention.hopper.configs import ForwardConfig
from ringattn.kernels.interface import PAD_ROWS, Arrivals, CallShape, ReadyFlags, Score, Step
from ringattn.kernels.runtime.table_cache import find
from ringattn.numerics.reference import attention_reference
from ringattn.plan.attention_spec import AttentionSpec, serialize
from ringattn.plan.device_tables import fused_tables
from ringattn.plan.layouts import Shard, make_shards
from ringattn.plan.mask import MaskUnion
from ringattn.plan.sharding import Sharding
from ringattn.schedule.kv_rotation import slices
from tests.kernels.emulator import gluon as machine
from tests.support.budget import assert_within_budget
from tests.support.short_mask import ShortMask


@dataclass(frozen=True)
class Gathering:
    """One call, seen from one rank of a ring.

    Attributes:
        name: Said by pytest.
        seq_len: Tokens of the whole sequence.
        layout: Who holds them; or the shards.
        world_size: Ranks.
        rank: The one that computes.
        mask: Arguments of `describe` and of `attention_reference`.
        options: Of the score: softcap, and "sinks", "alibi" and "key_bias" for random ones.
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key heads.
        groups: Groups in which they arrive.
        head_dim: Of q and k.
        v_head_dim: Of v; None: head_dim.
        dtype: Of q, k and v.
    """

    name: str
    seq_len: int = 150
    layout: str | tuple[Shard, ...] = "zigzag"
    world_size: int = 3
    rank: int = 1
    mask: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    groups: int = 1
    head_dim: int = 16
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name

    @property
    def call(self) -> AttentionSpec:
        """The call of this rank."""
        sizes = self.seq_len, self.seq_len
        mask = MaskUnion(*sizes, self.mask["mask"]) if "mask" in self.mask else ShortMask(*sizes, **self.mask)
        name, shards = "contiguous", self.layout
        if isinstance(shards, str):
            name, shards = shards, make_shards(shards, self.seq_len, self.world_size, mask)
        options = dict(self.mask)
        sharding = Sharding(self.seq_len, name, shards, self.rank, options.pop("documents", None))
        scale = self.options.get("softmax_scale", self.head_dim**-0.5)
        softcap = self.options.get("softcap", 0.0)
        return AttentionSpec.deserialize(
            serialize(sharding, softmax_scale=scale, softcap=softcap, **options), self.rank
        )


@dataclass
class Scene:
    """The tensors of a call, and what is yet to arrive: far holds numbers only where it is owed them."""

    gathering: Gathering
    q: Tensor
    near: tuple[Tensor, Tensor]
    buffer: Tensor
    flags: Tensor
    error: Tensor
    score: Score
    whole: dict[str, Any]
    positions: Tensor
    events: Iterator[None]
    key_bias: Tensor | None

    def kernels(self, config: ForwardConfig | None = None) -> HopperKernels:
        """Return the Hopper kernels bound to this call."""
        kernels = HopperKernels(CallShape.of(self.q, *self.near, self.score))
        kernels.bound.forward = config or kernels.bound.forward
        return kernels

    def step(self) -> bool:
        """Lets one thing happen: rows of a source come, or their flag; False: all is there."""
        return next(self.events, self) is None

    def finish(self) -> None:
        """Lets everything happen."""
        while self.step():
            pass


def make_scene(gathering: Gathering, lost: int | None = None, refused: int | None = None) -> Scene:
    """A scene before anything has arrived.

    Args:
        gathering: The call.
        lost: The number of an arrival that never comes, nor any behind it.
        refused: The number of an arrival whose flag becomes negative instead, and all behind it.
    """
    g, call = gathering, gathering.call
    generator = torch.Generator().manual_seed(0)
    dv = g.v_head_dim or g.head_dim
    shapes = [(g.heads, g.head_dim), (g.kv_heads, g.head_dim), (g.kv_heads, dv)]
    q, k, v = (torch.randn(g.batch, g.seq_len, *shape, generator=generator).to(g.dtype) for shape in shapes)
    options: dict[str, Any] = {"softcap": g.options.get("softcap", 0.0)}
    if "sinks" in g.options:
        options["sinks"] = torch.randn(g.heads, generator=generator)
    if "alibi" in g.options:
        options["alibi_slopes"] = torch.rand(g.heads, generator=generator) * 0.2
    if "key_bias" in g.options:
        options["key_bias"] = torch.randn(g.batch, g.seq_len, generator=generator)
        options["key_bias"][-1, g.seq_len // 5 : g.seq_len // 4] = -torch.inf
    key_bias = options.get("key_bias")

    def rows_of(x: Tensor, rank: int) -> Tensor:
        return x[:, positions_of(call.kv_sharding.shards[rank])]

    gather_plan, keys = call.gather_plan(), find(fused_tables(call, torch.device("cpu")).keys[0])
    buffer = torch.full((g.batch, gather_plan.remote_rows, g.kv_heads, g.head_dim + dv), float("nan")).to(g.dtype)
    for fetch in gather_plan.recvs:
        end = fetch.at + sum(length for _, length in fetch.rows)
        buffer[:, end : end + PAD_ROWS] = 0
    local_rows, table = keys.local_rows, None
    if key_bias is not None:
        table = torch.full((g.batch, local_rows + gather_plan.remote_rows), float("nan"))
        table[:, :local_rows] = rows_of(key_bias, g.rank)
    score = Score(g.options.get("softmax_scale", g.head_dim**-0.5), **{**options, "key_bias": table})
    # flags of steps without a source stay at 0, and column 0 is poison
    flags = torch.zeros(g.groups, g.world_size, dtype=torch.int32)
    flags[:, 0] = -1
    assert keys.steps == (0, *(fetch.step for fetch in gather_plan.recvs))
    heads = g.kv_heads // g.groups

    def happen() -> Iterator[None]:
        number = 0
        for group in range(g.groups):
            for fetch in gather_plan.recvs:
                if number == lost:
                    return
                number += 1
                if refused is not None and number > refused:
                    flags[group, fetch.step] = -1
                    yield
                    continue
                source = torch.cat([rows_of(x, fetch.owner) for x in (k, v)], -1)
                rows = torch.cat(slices(source, 1, fetch.rows), 1)
                mine = slice(group * heads, (group + 1) * heads)
                buffer[:, fetch.at : fetch.at + rows.shape[1], mine] = rows[:, :, mine]
                if table is not None and key_bias is not None and group == 0:
                    there = torch.cat(slices(rows_of(key_bias, fetch.owner), 1, fetch.rows), 1)
                    table[:, local_rows + fetch.at :][:, : there.shape[1]] = there
                yield
                flags[group, fetch.step] = 1
                yield

    whole = {"q": q, "k": k, "v": v, "softmax_scale": score.softmax_scale, **options, **g.mask}
    if isinstance(window := whole.get("window"), int):
        whole["window"] = (window - 1, 0)
    positions = torch.tensor(positions_of(call.sharding.shards[g.rank]))
    own = q[:, positions].contiguous()
    near = rows_of(k, g.rank).contiguous(), rows_of(v, g.rank).contiguous()
    return Scene(
        g, own, near, buffer, flags, torch.zeros(1, dtype=torch.int32), score, whole, positions, iter(happen()), table
    )


def positions_of(shard: Shard) -> list[int]:
    """Positions of a shard's rows."""
    return [run.start + run.stride * x for run in shard for x in range(run.length)]


def run(
    scene: Scene, config: ForwardConfig | None = None, *, awaited: bool = True, seed: int | None = None, **mode: Any
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the kernel beside which the rest of the scene happens; without `awaited` it has happened before."""
    g, call = scene.gathering, scene.gathering.call
    if not awaited:
        scene.finish()
    s = scene.q.shape[1]
    o = torch.full((g.batch, s, g.heads, g.v_head_dim or g.head_dim), -7.0).to(g.dtype)
    lse = torch.full((g.batch, g.heads, s), -7.0)
    tables = fused_tables(call, torch.device("cpu"))
    rng = None if seed is None else random.Random(seed)
    for _ in range(0 if rng is None else rng.randrange(4)):
        scene.step()
    flags = ReadyFlags(scene.flags, scene.error, 10**9) if awaited else None
    arrivals = Arrivals(scene.buffer[..., : g.head_dim], scene.buffer[..., g.head_dim :], flags)
    step = Step(scene.q, *scene.near, find(tables.rows), find(tables.keys[0]), scene.score, o, lse)
    with machine.mode(outside=scene.step, seed=seed, **mode):
        scene.kernels(config).forward_fused(step, arrivals)
    return o, lse


def assert_right(scene: Scene, o: Tensor, lse: Tensor) -> None:
    """Holds o and lse against attention over the whole sequence."""
    answers = []
    for dtype in (torch.float64, scene.gathering.dtype):
        whole = {name: scene.whole[name].to(dtype) for name in "qkv"}
        found = attention_reference(**{**scene.whole, **whole}, return_lse=True)
        answers.append((found[0][:, scene.positions], found[1][:, :, scene.positions]))
    for name, x, exact, low in zip(("o", "lse"), (o, lse), *answers, strict=True):
        assert_within_budget(x, exact, low, name)
