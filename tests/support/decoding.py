"""Requests in pages, as decode kernels get them, and what their attention is.

Scenes are made from lists of blocks in plain Python, and judged by `dense_attention` over the rows that those lists name:
the table is only seen by what is tested. Everything that is not a row of a block is NaN, and unused columns of tables name
pages that do not exist.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringattn.kernels.decode.dispatch import FP8, DecodeCall, PageTable
from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.kernels.partials.merge import merge_stack
from ringattn.kernels.partials.packed import size, views
from ringattn.numerics.reference import dense_attention
from tests.support.budget import assert_within_budget

Blocks = tuple[tuple[int, int, int], ...]
"""Of one request: (page, start, length), ascending by start."""
GARBAGE = -(2**31)


@dataclass(frozen=True)
class Case:
    """Parameters of a scene.

    Attributes:
        lengths: Tokens of each request on all ranks, the new ones included.
        tokens: New tokens of each request, its last ones.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q and k.
        v_head_dim: Of v; None: head_dim.
        latent: v is the first v_head_dim columns of k.
        page_size: Rows of a page.
        mine: Chance that a block lies on this rank.
        ragged: Chance that a block is not full.
        causal: New tokens do not see later ones.
        window: Tokens to the left that are seen; None: all.
        wild: Bounds are drawn at random, row by row, some of them empty.
        shared: Requests begin with blocks of the first one, cut somewhere.
        softcap: As in Score.
        alibi: With slopes.
        fp8: The pool is float8_e4m3fn with scales.
        splits: Height of the stack.
        seed: Of everything random.
    """

    lengths: tuple[int, ...] = (100,)
    tokens: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int | None = None
    latent: bool = False
    page_size: int = 16
    mine: float = 0.7
    ragged: float = 0.2
    causal: bool = True
    window: int | None = None
    wild: bool = False
    shared: bool = False
    softcap: float = 0.0
    alibi: bool = False
    fp8: bool = False
    splits: int = 3
    seed: int = 0

    def __str__(self) -> str:
        usual = Case()
        said = {name: x for name, x in vars(self).items() if x != getattr(usual, name)}
        return ",".join(f"{name}={x}" for name, x in said.items()).replace(" ", "") or "usual"


@dataclass(frozen=True)
class Scene:
    """The arguments of a call, and the blocks that its table was made of."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: PageTable
    lo: Tensor
    hi: Tensor
    positions: Tensor
    score: Score
    k_scale: Tensor | None
    v_scale: Tensor | None
    blocks: tuple[Blocks, ...]

    def call(self) -> DecodeCall:
        return DecodeCall(*(getattr(self, name) for name in DecodeCall._fields))

    def to(self, device: str | torch.device) -> Scene:
        """The same on another device."""
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        table = PageTable(**{name: x.to(device) for name, x in vars(self.table).items()})
        if self.call().latent:
            moved["v"] = moved["k"][..., : self.v.shape[-1]]
            moved |= {"v_scale": moved["k_scale"]} if self.k_scale is not None else {}
        slopes = self.score.alibi_slopes
        score = replace(self.score, alibi_slopes=None if slopes is None else slopes.to(device))
        return replace(self, table=table, score=score, **moved)


def place_blocks(case: Case, rng: random.Random) -> tuple[tuple[Blocks, ...], int]:
    """Blocks of every request, and how many pages there are; pages are handed out in random order, a few stay free."""
    cuts: list[list[tuple[int, int, bool]]] = []
    for number, length in enumerate(case.lengths):
        pieces: list[tuple[int, int, bool]] = []
        start = 0
        if case.shared and number and cuts[0]:
            kept = rng.randrange(len(cuts[0]) + 1)
            for first, size, _ in cuts[0][:kept]:
                pieces.append((first, rng.randint(1, size) if len(pieces) == kept - 1 else size, True))
            start = min(length, sum(pieces[-1][:2])) if pieces else 0
        while start < length:
            size = rng.randint(1, case.page_size) if rng.random() < case.ragged else case.page_size
            size = min(size, length - start)
            if rng.random() < case.mine:
                pieces.append((start, size, False))
            start += size
        cuts.append([piece for piece in pieces if sum(piece[:2]) <= length])
    own = sum(not shared for pieces in cuts for _, _, shared in pieces)
    pages = list(range(own + 3))
    rng.shuffle(pages)
    placed: list[Blocks] = []
    for pieces in cuts:
        placed.append(
            tuple(
                (placed[0][i][0] if shared else pages.pop(), start, size)
                for i, (start, size, shared) in enumerate(pieces)
            )
        )
    return tuple(placed), own + 3


def make_table(blocks: tuple[Blocks, ...], columns: int | None = None) -> PageTable:
    """The table of some blocks, unused columns poisoned."""
    width = max(len(one) for one in blocks) + 2 if columns is None else columns
    filled = [[list(block) for block in one] + [[GARBAGE] * 3] * (width - len(one)) for one in blocks]
    pages, starts, lengths = torch.tensor(filled, dtype=torch.int32).unbind(-1)
    counts = torch.tensor([len(one) for one in blocks], dtype=torch.int32)
    return PageTable(pages.contiguous(), starts.contiguous(), lengths.contiguous(), counts)


def make_scene(case: Case, dtype: torch.dtype = torch.float32) -> Scene:
    """A scene on the CPU."""
    rng, g = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    blocks, pages = place_blocks(case, rng)
    b, s, dv = len(case.lengths), case.tokens, case.v_head_dim or case.head_dim
    rows = torch.zeros(pages, case.page_size, dtype=torch.bool)
    for one in blocks:
        for page, _, length in one:
            rows[page, :length] = True
    exists = rows[:, None, :, None]
    pools, scales = [], []
    for dim in (case.head_dim, dv):
        x = torch.randn(pages, case.kv_heads, case.page_size, dim, generator=g)
        x[:, :, :, 0] *= 4.0  # scores far apart
        scale = x.abs().amax(-1) / 448.0
        if case.fp8:
            x = x / scale.unsqueeze(-1)
        pools.append(torch.where(exists, x, torch.nan).to(FP8 if case.fp8 else dtype))
        scales.append(torch.where(exists[..., 0], scale, torch.nan) if case.fp8 else None)
    total = torch.tensor(case.lengths)[:, None]
    positions = (total - s + torch.arange(s)).clamp(min=0)
    hi = positions + 1 if case.causal else total.expand(b, s)
    lo = torch.zeros_like(hi) if case.window is None else (positions - case.window).clamp(min=0)
    if case.wild:
        hi = torch.tensor([[rng.randint(0, n + 3) for _ in range(s)] for n in case.lengths])
        lo = torch.tensor([[rng.randint(0, n + 3) for _ in range(s)] for n in case.lengths])
    slopes = torch.rand(case.heads, generator=g) if case.alibi else None
    lo, hi, positions = (x.to(torch.int32).contiguous() for x in (lo, hi, positions))
    q = torch.randn(b, s, case.heads, case.head_dim, generator=g).to(dtype)
    score = Score(case.head_dim**-0.5, softcap=case.softcap, alibi_slopes=slopes)
    (k, v), (k_scale, v_scale) = pools, scales
    if case.latent:
        v, v_scale = k[..., :dv], k_scale
    return Scene(q, k, v, make_table(blocks), lo, hi, positions, score, k_scale, v_scale, blocks)


def empty_parts(scene: Scene, splits: int) -> Tensor:
    """A poisoned stack for the result of a call."""
    b, s, h, _ = scene.q.shape
    shape = splits, size(b * s * h, scene.v.shape[-1])
    return torch.full(shape, torch.nan, dtype=accumulation_dtype(scene.q.dtype), device=scene.q.device)


def are_same(x: Tensor, y: Tensor) -> bool:
    """Whether two stacks hold the same bits, those that nobody writes among them."""
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def finish(scene: Scene, parts: Tensor) -> tuple[Tensor, Tensor]:
    """(o `b s h dv`, lse `b h s`) of a stack of partials."""
    b, s, h, _ = scene.q.shape
    rows, dv = b * s * h, scene.v.shape[-1]
    o, lse = merge_stack(*views(parts, rows, dv), log2=True, finish=True)
    return o.view(b, s, h, dv), lse.view(b, s, h).transpose(1, 2)


def dense(scene: Scene, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(o, lse) by definition, in a dtype, request by request, over the rows that the blocks name."""
    found = []
    pools = [
        pool.double() if scale is None else pool.double() * scale.double().unsqueeze(-1)
        for pool, scale in ((scene.k, scene.k_scale), (scene.v, scene.v_scale))
    ]
    for i, one in enumerate(scene.blocks):
        keys, values = (
            torch.cat([pool[page, :, :length] for page, _, length in one], 1)
            if one
            else pool.new_zeros(pool.shape[1], 0, pool.shape[3])
            for pool in pools
        )
        where = torch.tensor([p for _, start, length in one for p in range(start, start + length)], dtype=torch.long)
        lo, hi = scene.lo[i].cpu()[:, None], scene.hi[i].cpu()[:, None]
        found.append(
            dense_attention(
                scene.q[i : i + 1].to(dtype),
                keys.transpose(0, 1)[None].to(dtype),
                values.transpose(0, 1)[None].to(dtype),
                ((where >= lo) & (where < hi))[None].to(scene.q.device),
                q_positions=scene.positions[i],
                k_positions=where.to(scene.q.device),
                softmax_scale=scene.score.softmax_scale,
                softcap=scene.score.softcap,
                alibi_slopes=scene.score.alibi_slopes,
            )
        )
    return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found])


def assert_exact(scene: Scene, parts: Tensor) -> None:
    """Fails unless a stack is within the budget of exact attention, and every row that saw nothing has m -inf and l 0."""
    dtype = scene.q.dtype
    exact, low = dense(scene, torch.float64), dense(scene, torch.float32 if dtype == torch.float64 else dtype)
    for name, x, right, plain in zip(("o", "lse"), finish(scene, parts), exact, low, strict=True):
        # statistics are kept in fp32 whatever the dtype: the plain answer shows what that costs
        assert_within_budget(x, right, plain, name, dtype if name == "o" or dtype == torch.float64 else None)
    b, s, h, _ = scene.q.shape
    rows, dv = b * s * h, scene.v.shape[-1]
    m, l, acc = views(parts, rows, dv)  # noqa: E741
    nothing = m == -torch.inf
    assert not m.isnan().any(), "every m is written, and none is NaN"
    assert not l[nothing].any(), "l of the identity is 0"
    assert not acc[~nothing].isnan().any(), "every acc that counts is written, and none is NaN"
    assert bool((l[~nothing] > 0).all()), "a row that saw something has weight"


LATENTS = (
    Case(lengths=(90, 0, 33, 7), latent=True, tokens=2, heads=5, kv_heads=1, head_dim=160, v_head_dim=128),
    Case(lengths=(150, 40), latent=True, heads=40, kv_heads=1, head_dim=288, v_head_dim=256, page_size=32, window=50),
    Case(lengths=(170,), latent=True, heads=20, kv_heads=1, head_dim=576, v_head_dim=512, page_size=64, shared=True),
    Case(lengths=(99, 60), latent=True, heads=3, kv_heads=1, head_dim=64, v_head_dim=64, causal=False),
    Case(
        lengths=(160, 77), latent=True, wild=True, heads=8, kv_heads=1, head_dim=56, v_head_dim=40, tokens=5,
        softcap=5.0,
    ),
    Case(lengths=(130, 55), latent=True, fp8=True, tokens=2, kv_heads=1, page_size=32, head_dim=320, v_head_dim=256),
    Case(
        lengths=(80, 140, 10), latent=True, fp8=True, kv_heads=1, window=30, alibi=True, head_dim=24, v_head_dim=24,
        tokens=9,
    ),
)  # fmt: skip
"""Cases of latents, of all shapes that models have."""

_SMALL = Case(
    lengths=(300, 0, 40), latent=True, heads=5, kv_heads=1, head_dim=160, v_head_dim=128, page_size=64, ragged=0.4
)
HOPPER_LATENTS = (
    _SMALL,
    replace(_SMALL, lengths=(700,), page_size=128, mine=1.0, splits=2, ragged=0.8),
    replace(_SMALL, tokens=14, causal=False, softcap=5.0, alibi=True),
    replace(_SMALL, lengths=(200, 300, 90), tokens=3, heads=20, wild=True, page_size=256),
    replace(_SMALL, head_dim=128, tokens=2, window=70, lengths=(900, 60), splits=5),
    replace(_SMALL, head_dim=288, v_head_dim=256, heads=40, shared=True, lengths=(260, 200)),
    replace(_SMALL, head_dim=320, v_head_dim=256, heads=64, lengths=(260,), mine=1.0),
    replace(_SMALL, head_dim=576, v_head_dim=512, heads=128, lengths=(200, 70)),
)
"""Cases that the Hopper kernel serves: whole tiles of 64 rows."""

_FEW = Case(lengths=(300, 0, 40), fp8=True, heads=8, kv_heads=2, head_dim=64, page_size=64, ragged=0.4)
HOPPER_PAGES = (
    _FEW,
    replace(_FEW, lengths=(700,), head_dim=128, page_size=128, mine=1.0, splits=2, ragged=0.8),
    replace(_FEW, lengths=(130,), tokens=3, causal=False, softcap=5.0, alibi=True),
    replace(_FEW, lengths=(200, 300), tokens=2, heads=6, wild=True, page_size=256),
    replace(_FEW, lengths=(900, 60), head_dim=128, v_head_dim=64, tokens=2, window=70, splits=5),
)
"""Cases that the Hopper kernel of pages serves: up to 16 rows of queries, and whole tiles of 64 rows of keys."""

CASES = (
    Case(),
    Case(lengths=(90, 0, 33, 7), tokens=2),
    Case(lengths=(200, 40), tokens=16, heads=6, kv_heads=2),
    Case(lengths=(64, 150), tokens=4, heads=8, kv_heads=1, page_size=32, splits=5),
    Case(lengths=(150, 90), heads=3, kv_heads=3, head_dim=40, v_head_dim=24),
    Case(lengths=(150,), tokens=3, head_dim=17, v_head_dim=96, page_size=64),
    Case(lengths=(300, 170, 5), window=20, tokens=2, splits=4),
    Case(lengths=(300, 170), window=0, tokens=3, page_size=64),
    Case(lengths=(120, 60, 90), wild=True, tokens=5),
    Case(lengths=(160, 130, 77), shared=True, tokens=2, softcap=5.0),
    Case(lengths=(99, 140), alibi=True, tokens=3, causal=False),
    Case(lengths=(130, 55), fp8=True, tokens=2, page_size=32, head_dim=64),
    Case(lengths=(80, 200, 10), fp8=True, window=30, softcap=3.0, alibi=True, head_dim=24, shared=True),
    Case(lengths=(60,), mine=0.0, splits=2),
    Case(lengths=(40, 700), splits=40, ragged=0.8),
    Case(lengths=(500, 3, 20, 9, 1), splits=7, page_size=32, tokens=1, mine=1.0),
    # many rows: of a prompt
    Case(lengths=(400, 90), tokens=40, splits=4),
    Case(lengths=(300, 130), tokens=70, heads=2, window=25, ragged=0.6, head_dim=16),
    Case(lengths=(200, 150), tokens=23, heads=6, wild=True, shared=True, softcap=4.0, alibi=True, head_dim=24),
    Case(lengths=(170, 60), tokens=36, fp8=True, page_size=32),
    *LATENTS,
)
"""Cases that every decode kernel must satisfy."""
