"""Pictures of measured rows that can be read on a light and on a dark page.

Owns how kernel speeds are drawn over length. Refuses to know how they were measured, and which rows are good enough to
be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "hopper": "ringattn hopper",
    "portable": "ringattn portable",
    "auto": "ringattn auto",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "flex": "FlexAttention",
    "fa4": "FlashAttention-4",
}
"""What contenders are called in tables and figures, in the order they are shown."""
COLORS = {
    "hopper": "#e5484d",
    "portable": "#f0883e",
    "auto": "#bf8700",
    "cudnn": "#2da44e",
    "fa2": "#8b949e",
    "flex": "#a371f7",
    "fa4": "#388bfd",
}
INK = "#7d8590"
"""Gray that stands out from white and from near black alike."""


def lines_over_length(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str, str], dict[str, list[tuple[int, float]]]]:
    """Per (head_dim, mask, direction), per contender: (tokens, TFLOP/s), shortest first.

    One sequence, as many key/value heads as query heads, operators with autograd; what does not vary in length is left
    out.
    """
    panels: dict[tuple[int, str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        alike = row["batch"] == 1 and row["heads"] == row["kv_heads"] and row["level"] == "op"
        if alike and "tflops" in row:
            lines = panels.setdefault((row["head_dim"], row["mask"], row["direction"]), {})
            lines.setdefault(row["who"], []).append((row["seq_len"], row["tflops"]))
    found = {key: {who: sorted(points) for who, points in lines.items()} for key, lines in panels.items()}
    return {key: lines for key, lines in found.items() if any(len(points) > 1 for points in lines.values())}


def draw_lengths(rows: Sequence[dict[str, Any]], path: Path, note: str = "") -> bool:
    """Draws TFLOP/s over length: a column per mask, a row per direction and head_dim, a line per contender.

    Args:
        rows: Of `bench kernels`.
        path: An .svg or .png.
        note: Kept in an SVG as its description.

    Returns:
        Whether there was anything to draw: nothing is written when every contender met one length only.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = lines_over_length(rows)
    if not panels:
        return False
    masks = [one for one in ("full", "causal", "window", "documents") if any(key[1] == one for key in panels)]
    rank = {"forward": 0, "backward": 1}
    kinds = sorted({(direction, dim) for dim, _, direction in panels}, key=lambda kind: (rank[kind[0]], kind[1]))
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ringattn",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "savefig.transparent": True,
    }
    lengths = sorted({n for lines in panels.values() for points in lines.values() for n, _ in points})
    with mpl.rc_context(style):
        figure, axes = plt.subplots(
            len(kinds), len(masks), figsize=(2.7 * len(masks), 2.1 * len(kinds) + 0.6), squeeze=False, sharex=True
        )
        for i, (direction, dim) in enumerate(kinds):
            for axis, mask in zip(axes[i], masks, strict=True):
                lines = panels.get((dim, mask, direction), {})
                for who in [*NAMES, *sorted(set(lines) - set(NAMES))]:
                    if who in lines:
                        ours = who in ("hopper", "portable", "auto")
                        axis.plot(
                            *zip(*lines[who], strict=True),
                            color=COLORS.get(who, INK),
                            marker="o",
                            markersize=3,
                            linewidth=2.0 if ours else 1.2,
                            label=NAMES.get(who, who),
                        )
                axis.set_xscale("log", base=2)
                axis.set_ylim(bottom=0)
                axis.grid(color=INK, alpha=0.25, linewidth=0.6)
                axis.set_title(f"{direction}, {mask}, head_dim {dim}", fontsize=9)
                axis.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
                axis.minorticks_off()
            axes[i][0].set_ylabel("TFLOP/s")
        for axis in axes[-1]:
            axis.set_xlabel("tokens")
        shown = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=min(4, len(shown)), frameon=False)
        figure.tight_layout(rect=(0, 0.5 / figure.get_figheight(), 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": note} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=130, metadata=metadata)
        plt.close(figure)
    return True
