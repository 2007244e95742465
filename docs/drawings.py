"""Draw the layouts and masks of the documentation from the library itself: docs/drawings/*.svg.

Masks, layouts and ring steps are read from `short_mask`, `make_shards` and `make_plan`, on small integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ring_figure import COLORS, svg

from ringattn import masks
from ringattn.plan.layouts import Shard, balanced, contiguous, make_shards, striped, zigzag
from ringattn.plan.mask import MaskUnion, short_mask
from ringattn.plan.ring_plan import RingPlan, make_plan

HERE = Path(__file__).parent
WORLD_SIZE = 4
STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1f2937; font-size: 13px }
  .small { font-size: 11px } .middle { text-anchor: middle } .end { text-anchor: end } .faint { opacity: 0.16 }
  .line { stroke: #9ca3af; fill: none } .hidden { stroke: #6b7280; opacity: 0.14 } .cells { fill: none }
  @media (prefers-color-scheme: dark) { text { fill: #e5e7eb } .hidden { stroke: #d1d5db } }
"""


@dataclass(frozen=True)
class Mask:
    """Mask to draw.

    Attributes:
        name: Part of the file name: docs/drawings/mask-{name}.svg.
        call: Options that a user passes.
        layout: Layout of queries and keys.
        seq_len: Queries.
        kv_len: Keys.
        fields: The fields of its `short_mask`, or `mask`, a mask of `ringattn.masks`.
    """

    name: str
    call: str
    layout: str = "contiguous"
    seq_len: int = 16
    kv_len: int = 16
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def mask(self) -> MaskUnion:
        """Return the mask of the library."""
        if "mask" in self.fields:
            return MaskUnion(self.seq_len, self.kv_len, self.fields["mask"])
        return short_mask(self.seq_len, self.kv_len, **self.fields)

    def shards(self, of: str) -> tuple[Shard, ...]:
        """Return the shards of "queries" or "keys" of all ranks."""
        length = self.seq_len if of == "queries" else self.kv_len
        if self.layout == "balanced":
            # the smallest chunk of the library, 128 tokens, is too large to draw
            return balanced(length, WORLD_SIZE, self.mask.work, min_chunk_len=1)
        return make_shards(self.layout, length, WORLD_SIZE)

    @property
    def plan(self) -> RingPlan:
        """Return the ring steps of a forward and the rows that move."""
        return make_plan(self.shards("queries"), self.shards("keys"), self.mask, "keys")


DOCUMENTS = (0, 7, 10, 16)
PATTERN = masks.causal() & masks.blocks([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], 4)
MASKS = (
    Mask("full", "", "contiguous"),
    Mask("causal", "causal=True", "zigzag", fields={"causal": True}),
    Mask("window", "window=(3, 1)", fields={"window": (3, 1)}),
    Mask("causal-window", "causal=True, window=4", fields={"causal": True, "window": (3, 0)}),
    Mask("causal-window-zigzag", "causal=True, window=4", "zigzag", fields={"causal": True, "window": (3, 0)}),
    Mask("documents", "documents=[0, 7, 10, 16]", "balanced", fields={"documents": DOCUMENTS}),
    Mask(
        "causal-documents",
        "documents=[0, 7, 10, 16], causal=True",
        "balanced",
        fields={"documents": DOCUMENTS, "causal": True},
    ),
    Mask(
        "causal-documents-window",
        "documents=[0, 7, 10, 16], causal=True, window=4",
        "balanced",
        fields={"documents": DOCUMENTS, "causal": True, "window": (3, 0)},
    ),
    Mask("prefix", "causal=True, prefix_len=5", "zigzag", fields={"causal": True, "prefix_len": 5}),
    Mask(
        "prefix-window",
        "causal=True, prefix_len=5, window=(6, None)",
        "zigzag",
        fields={"causal": True, "prefix_len": 5, "window": (6, None)},
    ),
    Mask("chunks", "chunk_len=6", fields={"chunk_len": 6}),
    Mask("causal-chunks", "causal=True, chunk_len=6", fields={"causal": True, "chunk_len": 6}),
    Mask("lengths", "lengths=[(0, 11)]", "striped", fields={"lengths": ((0, 11),)}),
    Mask("causal-lengths", "causal=True, lengths=[(4, 16)]", "zigzag", fields={"causal": True, "lengths": ((4, 16),)}),
    Mask(
        "streaming",
        "mask=masks.causal() &amp; (masks.sinks(2) | masks.window(3))",
        "zigzag",
        fields={"mask": masks.causal() & (masks.sinks(2) | masks.window(3))},
    ),
    Mask(
        "global-tokens",
        "mask=masks.global_tokens(2) | masks.window(2, 2)",
        fields={"mask": masks.global_tokens(2) | masks.window(2, 2)},
    ),
    Mask(
        "spans",
        "mask=masks.causal() | masks.spans([(3, 7), (10, 14)])",
        "zigzag",
        fields={"mask": masks.causal() | masks.spans([(3, 7), (10, 14)])},
    ),
    Mask(
        "tree",
        "mask=masks.tree([None, 0, 1, 1, 0], [4, 3, 2, 2, 5])",
        "zigzag",
        fields={"mask": masks.tree([None, 0, 1, 1, 0], [4, 3, 2, 2, 5])},
    ),
    Mask("blocks", "mask=masks.causal() &amp; masks.blocks(pattern, 4)", "zigzag", fields={"mask": PATTERN}),
    Mask("cross", "kv_sharding=ring.sharding(10)", "zigzag", kv_len=10),
    Mask("cross-causal", "kv_sharding=ring.sharding(10), causal=True", "zigzag", kv_len=10, fields={"causal": True}),
)
"""Every mask of the library, and combinations that models use."""


def text(x: float, y: float, said: str, kind: str = "", color: str | None = None) -> str:
    """Return a line of text, left-aligned unless the class changes that."""
    style = "" if color is None else f' style="fill:{color};font-weight:600"'
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{style}>{said}</text>'


def positions(shard: Shard) -> list[int]:
    """Return the positions of a shard, in order."""
    return [run.position(i) for run in shard for i in range(run.length)]


def holders(shards: tuple[Shard, ...]) -> list[int]:
    """Return the rank that holds each position."""
    found = {position: rank for rank, shard in enumerate(shards) for position in positions(shard)}
    return [found[position] for position in range(len(found))]


class Grid:
    """Square per pair of query and key: rows are queries, columns are keys; strips on two sides show their ranks.

    Args:
        x: Left edge of the cells.
        y: Upper edge.
        cell: Size of a cell, the gap included.
        queries: Rank of each query.
        keys: Rank of each key.
    """

    def __init__(self, x: float, y: float, cell: float, queries: list[int], keys: list[int]) -> None:
        self.x, self.y, self.cell = x, y, cell
        self.queries, self.keys = queries, keys

    @property
    def width(self) -> float:
        """Return the width of the cells."""
        return self.cell * len(self.keys)

    @property
    def height(self) -> float:
        """Return the height of the cells."""
        return self.cell * len(self.queries)

    def _path(self, stretches: list[tuple[int, int, int]], kind: str, color: str | None = None) -> str:
        """Return cells, given as (row, first column, end), as dashes of broad lines."""
        gap = self.cell / 7
        size = self.cell - gap
        lines = "".join(
            f"M{self.x + self.cell * a:g} {self.y + self.cell * (row + 0.5):g}h{self.cell * (b - a) - gap:g}"
            for row, a, b in stretches
        )
        style = "" if color is None else f' stroke="{color}"'
        return f'<path class="cells {kind}"{style} stroke-width="{size:.3g}" stroke-dasharray="{size:.3g} {gap:.3g}" d="{lines}"/>'

    def frame(self) -> list[str]:
        """Return hidden cells and the strips."""
        parts = [self._path([(i, 0, len(self.keys)) for i in range(len(self.queries))], "hidden")]
        thick, away = self.cell * 0.45, self.cell * 0.8
        for holder, x, y, along in (
            *((rank, self.x - away, self.y + self.cell * i, "v") for i, rank in enumerate(self.queries)),
            *((rank, self.x + self.cell * j, self.y - away, "h") for j, rank in enumerate(self.keys)),
        ):
            width, height = (thick, self.cell * 0.86) if along == "v" else (self.cell * 0.86, thick)
            parts.append(
                f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.3g}" height="{height:.3g}" fill="{COLORS[holder]}"/>'
            )
        return parts

    def pairs(self, seen: dict[int, list[tuple[int, int]]], kind: str = "") -> list[str]:
        """Return the visible keys of queries, in the color of the rank that computes them."""
        parts = []
        for rank, color in enumerate(COLORS):
            stretches = [(i, a, b) for i, some in seen.items() if self.queries[i] == rank for a, b in some]
            if stretches:
                parts.append(self._path(stretches, kind, color))
        return parts


def visible(mask: MaskUnion) -> dict[int, list[tuple[int, int]]]:
    """Return the keys [lo, hi) of every query that sees any: one stretch or several."""
    found: dict[int, list[tuple[int, int]]] = {}
    for (lower, upper), pattern in mask.intervals("keys", mask.variant_of[0]):
        for i in range(mask.seq_len):
            spans = ((0, mask.kv_len),) if pattern is None else pattern.spans[i // pattern.block_size]
            for begin, end in spans:
                lo, hi = max(lower.at(i), begin), min(upper.at(i), end)
                if lo < hi:
                    found.setdefault(i, []).append((lo, hi))
    return {i: sorted(stretches) for i, stretches in sorted(found.items())}


def seen_at(step: int, mask: MaskUnion, queries: list[int], keys: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the visible keys of a ring step: at step s, rank r computes with the keys of rank r - s."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i, seen in visible(mask).items():
        owner = (queries[i] - step) % WORLD_SIZE
        stretches: list[tuple[int, int]] = []
        for j in (j for lo, hi in seen for j in range(lo, hi)):
            if keys[j] == owner:
                if stretches and stretches[-1][1] == j:
                    stretches[-1] = stretches[-1][0], j + 1
                else:
                    stretches.append((j, j + 1))
        if stretches:
            found[i] = stretches
    return found


def draw_mask(drawn: Mask) -> str:
    """Return the drawing of a mask, and of the pairs and rows of each ring step."""
    mask, plan = drawn.mask, drawn.plan
    queries, keys = holders(drawn.shards("queries")), holders(drawn.shards("keys"))
    whole = Grid(24, 44, 11, queries, keys)
    parts = [text(14, 18, f"{drawn.layout}, 4 ranks", "small"), *whole.frame(), *whole.pairs(visible(mask))]
    for step in range(WORLD_SIZE):
        small = Grid(244 + 137 * step, 44, 7, queries, keys)
        parts.append(text(small.x - 6, 18, f"step {step}", "small"))
        parts += [*small.frame(), *small.pairs(visible(mask), "faint")]
        parts += small.pairs(seen_at(step, mask, queries, keys))
        y = small.y + small.height + 20
        if step == 0:
            parts.append(text(small.x - 6, y, "its own keys", "small"))
            parts.append(text(small.x - 6, y + 20, "received:", "small"))
            continue
        for place, part in enumerate(plan.ranks):
            ring_step = part.ring_steps[step]
            x = small.x - 6 + 33 * place
            said = "-" if ring_step is None else f"{ring_step.num_rows} of {part.rank}"
            parts.append(text(x, y + 20, said.split(" ")[0], "small", COLORS[part.rank]))
    most = max(part.received_rows for part in plan.ranks)
    parts.append(text(whole.x - 10, whole.y + whole.height + 26, f"busiest rank receives {most} rows", "small"))
    height = whole.y + whole.height + 40
    return svg(
        790,
        height,
        STYLE,
        f"Mask {drawn.call or 'without options'}, who computes it, and what each ring step moves",
        parts,
    )


def bars(x: float, y: float, work: list[int], height: float, step: float) -> list[str]:
    """Return work per rank as columns, labelled in percent of the mean."""
    mean, parts = sum(work) / len(work), []
    scale = height / max(2 * mean, max(work))
    parts.append(
        f'<path class="line" stroke-dasharray="3 3" d="M{x - 3:g} {y - mean * scale:.4g}h{step * len(work):g}"/>'
    )
    for rank, pairs in enumerate(work):
        size = pairs * scale
        parts.append(
            f'<rect x="{x + step * rank:g}" y="{y - size:.4g}" width="{step - 8:g}" height="{size:.4g}" fill="{COLORS[rank]}"/>'
        )
        parts.append(text(x + step * rank + (step - 8) / 2, y + 14, f"{100 * pairs / mean:.0f}%", "small middle"))
    return parts


def work_of(shards: tuple[Shard, ...], mask: MaskUnion) -> list[int]:
    """Return the number of visible pairs of each rank's queries."""
    plan = make_plan(shards, shards, mask, "keys")
    return [sum(ring_step.pairs for ring_step in rank.ring_steps if ring_step is not None) for rank in plan.ranks]


def draw_layouts() -> str:
    """Return the drawing of four layouts under a causal mask, with the work of each rank."""
    mask = short_mask(16, causal=True)
    parts = []
    for place, (name, shards) in enumerate(
        (
            ("contiguous", contiguous(16, 4)),
            ("striped", striped(16, 4)),
            ("zigzag", zigzag(16, 4)),
            ("balanced, for this mask", balanced(16, 4, mask.work, min_chunk_len=1)),
        )
    ):
        held = holders(shards)
        grid = Grid(22 + 190 * place, 48, 9.6, held, held)
        parts += [text(grid.x - 8, 22, name), *grid.frame(), *grid.pairs(visible(mask))]
        parts += bars(grid.x + 2, 302, work_of(shards, mask), 78, 38)
    return svg(
        770,
        324,
        STYLE,
        "Four layouts of 16 tokens over 4 ranks under a causal mask, and each rank's share of the work",
        parts,
    )


PACKED = (0, 7000, 7600, 8100, 8900, 13000, 14500, 14700, 16384)


def draw_packed() -> str:
    """Return the drawing of four layouts of packed documents, with the work of each rank."""
    seq_len, left, width = PACKED[-1], 96, 520
    mask = short_mask(seq_len, causal=True, documents=PACKED)
    scale = width / seq_len

    def strip(start: float, length: float, y: float, height: float, color: str) -> str:
        x, wide = left + start * scale, length * scale
        return f'<rect x="{x:.5g}" y="{y}" width="{wide:.4g}" height="{height}" fill="{color}"/>'

    parts = [text(left - 10, 26, "documents", "small end")]
    # a gap of a pixel and a half between documents
    parts += [strip(a, b - a - 1.5 / scale, 14, 16, "#9ca3af") for a, b in pairwise(PACKED)]
    for place, name in enumerate(("contiguous", "striped", "zigzag", "balanced")):
        shards = make_shards(name, seq_len, WORLD_SIZE, mask)
        y = 48 + 74 * place
        parts.append(text(left - 10, y + 36, name, "end"))
        for rank, shard in enumerate(shards):
            color = COLORS[rank]
            parts += [strip(run.start, run.length, y + 16, 30, color) for run in shard if run.stride == 1]
            if any(run.stride > 1 for run in shard):  # every fourth token: finer than a pixel
                dashes = f'stroke-width="30" stroke-dasharray="2 6" stroke-dashoffset="{-2 * rank}"'
                parts.append(f'<path stroke="{color}" {dashes} d="M{left} {y + 31}h{width}"/>')
        parts += bars(left + width + 28, y + 48, work_of(shards, mask), 44, 40)
    return svg(
        812,
        352,
        STYLE,
        "Four layouts of 16,384 tokens in packed documents over 4 ranks, and each rank's share of the work",
        parts,
    )


def drawings() -> dict[str, str]:
    """Return every drawing by its file name."""
    found = {f"mask-{mask.name}.svg": draw_mask(mask) for mask in MASKS}
    return {"layouts.svg": draw_layouts(), "layouts-packed.svg": draw_packed(), **found}


if __name__ == "__main__":
    for stale in (HERE / "drawings").glob("*.svg"):
        stale.unlink()
    for name, drawn in drawings().items():
        (HERE / "drawings" / name).write_text(drawn)
