"""Draw docs/ring.svg: four ranks, key/value shards that move, partials that merge. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, RADIUS = 760, 330, 112
COLORS = ["#3b82f6", "#10b981", "#f59e0b", "#ec4899"]
STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1f2937; font-size: 14px; text-anchor: middle }
  .small { font-size: 12px } .on { fill: #111827; font-weight: 600 }
  .line { stroke: #6b7280; fill: none; stroke-width: 2 } .head { fill: #6b7280 } .box { fill: none; stroke: #9ca3af }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb } .line { stroke: #9ca3af } .head { fill: #9ca3af } .box { stroke: #6b7280 } .on { fill: #111827 }
  }
"""


def svg(width: float, height: float, style: str, label: str, parts: Sequence[str]) -> str:
    """Return a drawing as text."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="{label}">\n<style>{style}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def block(x: float, y: float, rank: int, text: str) -> str:
    """Return a labelled shard in its rank's color, centered on (x, y)."""
    return (
        f'<rect x="{x - 23:.0f}" y="{y - 12:.0f}" width="46" height="24" rx="5" fill="{COLORS[rank]}"/>'
        f'<text class="small on" x="{x:.0f}" y="{y + 4:.0f}">{text}</text>'
    )


def figure() -> str:
    """Return the picture as SVG."""
    center_x, center_y = 205, 165
    parts = []
    for rank in range(4):
        angle = math.radians(-90 + 90 * rank)
        x, y = center_x + 1.25 * RADIUS * math.cos(angle), center_y + RADIUS * math.sin(angle)
        parts.append(f'<rect class="box" x="{x - 60:.0f}" y="{y - 40:.0f}" width="120" height="80" rx="10"/>')
        parts.append(f'<text class="small" x="{x:.0f}" y="{y - 22:.0f}">rank {rank}</text>')
        parts += [block(x - 27, y + 8, rank, f"Q{rank}"), block(x + 27, y + 8, rank, f"KV{rank}")]
        # an arc on the ellipse, from this rank towards the next
        a, b = angle + math.radians(34), angle + math.radians(56)
        start, end = ((center_x + 1.2 * RADIUS * math.cos(t), center_y + RADIUS * math.sin(t)) for t in (a, b))
        parts.append(
            f'<path class="line" marker-end="url(#head)" d="M{start[0]:.0f} {start[1]:.0f} '
            f'A{1.2 * RADIUS:.0f} {RADIUS} 0 0 1 {end[0]:.0f} {end[1]:.0f}"/>'
        )
    parts.append(f'<text x="{center_x}" y="{center_y - 2}">keys and values</text>')
    parts.append(f'<text x="{center_x}" y="{center_y + 17}">move, queries stay</text>')
    left = 435
    parts.append(f'<text x="{left + 150}" y="42">on rank 0: a partial per ring step, merged</text>')
    for step in range(4):
        owner, y = -step % 4, 82 + 44 * step
        parts.append(f'<text class="small" x="{left}" y="{y + 4}">step {step}</text>')
        parts += [block(left + 58, y, 0, "Q0"), block(left + 112, y, owner, f"KV{owner}")]
        parts.append(f'<path class="line" marker-end="url(#head)" d="M{left + 140} {y} H{left + 168}"/>')
        parts.append(f'<text x="{left + 215}" y="{y + 4}">(m, l, o)</text>')
        if step:
            parts.append(f'<path class="line" marker-end="url(#head)" d="M{left + 215} {y - 32} V{y - 16}"/>')
    parts.append(f'<path class="line" marker-end="url(#head)" d="M{left + 215} 226 V250"/>')
    parts.append(f'<text x="{left + 170}" y="276">output = o / l,  lse = m + ln l</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Four ranks in a ring pass key/value shards on and merge partial results">\n<style>{STYLE}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("ring.svg").write_text(figure())
