"""Pictures of measured rows that can be read on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

KERNELS = {
    "hopper": ("ringattn hopper", "#e5484d"),
    "portable": ("ringattn portable", "#f0883e"),
    "auto": ("ringattn auto", "#bf8700"),
    "cudnn": ("cuDNN", "#2da44e"),
    "fa2": ("FlashAttention-2", "#8b949e"),
    "flex": ("FlexAttention, Triton", "#a371f7"),
    "flex_flash": ("FlexAttention, FLASH", "#db61a2"),
    "fa4": ("FlashAttention-4", "#388bfd"),
}
"""Name and color of kernels in figures, in the order they are shown."""
RINGS = {
    "auto": ("ringattn", "#e5484d"),
    "fused": ("ringattn fused", "#e5484d"),
    "fused_kv_buffer": ("ringattn fused, KV buffer", "#db61a2"),
    "fused_saved_kv": ("ringattn fused, saved KV", "#a371f7"),
    "stepwise": ("ringattn stepwise", "#f0883e"),
    "ring": ("ringattn", "#e5484d"),
    "ring_recomputed": ("ringattn, attention recomputed", "#f0883e"),
    "nccl": ("ringattn NCCL", "#bf8700"),
    "gloo": ("ringattn gloo", "#bf8700"),
    "torch_cp_allgather": ("torch CP all-gather", "#2da44e"),
    "torch_cp_alltoall": ("torch CP all-to-all", "#388bfd"),
    "ring_flash_attn": ("ring-flash-attention", "#8b949e"),
}
"""Name and color of rings in tables and figures, in the order they are shown."""
NAMES, RING_NAMES = ({who: name for who, (name, _) in known.items()} for known in (KERNELS, RINGS))
PEERS = {"cudnn", "fa2", "flex", "flex_flash", "fa4", "torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn"}
"""Implementations of others, which have thin lines."""
PALETTE = ("#e5484d", "#f0883e", "#bf8700", "#2da44e", "#388bfd", "#a371f7", "#db61a2", "#6e40c9")
DIRECTIONS = {"forward": "forward", "both": "forward + backward", "model": "training step"}
INK = "#7d8590"
"""Gray that stands out from white and from near black alike."""
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "ringattn", "font.family": "sans-serif", "font.size": 9}
STYLE |= {"savefig.transparent": True}
STYLE |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)


Lines = dict[str, list[tuple[int, float]]]
Panels = dict[tuple[Any, str], Lines]


def lines_over_length(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str, str], Lines]:
    """Per (head_dim, mask, direction), per contender: (tokens, TFLOP/s), shortest first.

    One sequence, as many key/value heads as query heads, operators with autograd; panels of a single length are left out.
    """
    panels: dict[tuple[int, str, str], Lines] = {}
    for row in rows:
        alike = row["batch"] == 1 and row["heads"] == row["kv_heads"] and row["level"] == "op"
        if alike and "tflops" in row:
            lines = panels.setdefault((row["head_dim"], row["mask"], row["direction"]), {})
            lines.setdefault(row["who"], []).append((row["seq_len"], row["tflops"]))
    found = {key: {who: sorted(points) for who, points in lines.items()} for key, lines in panels.items()}
    return {key: lines for key, lines in found.items() if any(len(points) > 1 for points in lines.values())}


def draw_lengths(rows: Sequence[dict[str, Any]], path: Path, note: str = "") -> bool:
    """Draw TFLOP/s over length: a column per mask, a row per direction and head_dim, a line per contender.

    Args:
        rows: Of `bench kernels`.
        path: An .svg or .png.
        note: Kept in an SVG as its description.

    Returns:
        Whether there was anything to draw; nothing is written otherwise.
    """
    masks = ("full", "causal", "window", "documents")
    found = {((way, dim), mask): lines for (dim, mask, way), lines in lines_over_length(rows).items()}
    order = sorted(found, key=lambda key: (key[0][0] != "forward", key[0][1], masks.index(key[1])))

    def title(row: tuple[str, int], mask: str) -> str:
        return f"{row[0]}, {mask}, head_dim {row[1]}"

    return _draw({key: found[key] for key in order}, path, note, title, "tokens", "TFLOP/s", KERNELS)


def thousands(n: int) -> str:
    """Return a length with a unit.

    Example:
        >>> thousands(512), thousands(65536), thousands(1048576)
        ('512', '64K', '1M')
    """
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if n >= size and n % size == 0:
            return f"{n // size}{letter}"
    return str(n)


def _draw(
    panels: Panels,
    path: Path,
    note: str,
    title: Callable[[Any, str], str],
    x: str,
    y: str,
    known: Mapping[str, tuple[str, str]],
    *,
    top: float | None = None,
) -> bool:
    """Draw a grid of panels, which are keyed by row and column; return whether there is any.

    Args:
        panels: Lines by name.
        path: The file.
        note: Kept in an SVG as its description.
        title: Returns the title of a panel.
        x: Label of the horizontal axes.
        y: Label of the vertical axes.
        known: Labels and colors of lines, in order; other lines follow under their names with colors of PALETTE.
        top: End of the vertical axes.
    """
    if not panels:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows, columns = (list(dict.fromkeys(key[place] for key in panels)) for place in (0, 1))
    ticks = sorted({n for lines in panels.values() for points in lines.values() for n, _ in points})
    there = list(dict.fromkeys(who for lines in panels.values() for who in lines))
    order = [*(who for who in known if who in there), *(who for who in there if who not in known)]
    looks = {who: (who, PALETTE[place % len(PALETTE)]) for place, who in enumerate(order)} | dict(known)
    with mpl.rc_context(STYLE):
        size = (3.1 * len(columns) + 0.4, 2.3 * len(rows) + 0.4 + _legend_height(len(order)))
        figure, axes = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False, sharex=True)
        for i, row in enumerate(rows):
            for axis, column in zip(axes[i], columns, strict=True):
                lines = panels.get((row, column), {})
                for who in order:
                    if who in lines:
                        axis.plot(
                            *zip(*lines[who], strict=True),
                            color=looks[who][1],
                            marker="o",
                            markersize=3,
                            linewidth=1.2 if who in PEERS else 2.0,
                            label=looks[who][0],
                        )
                axis.set_xscale("log", base=2)
                axis.set_ylim(bottom=0, top=top)
                axis.grid(color=INK, alpha=0.25, linewidth=0.6)
                axis.set_title(title(row, column), fontsize=9)
                axis.set_xticks(ticks, [thousands(n) for n in ticks])
                axis.minorticks_off()
            axes[i][0].set_ylabel(y)
        for axis in axes[-1]:
            axis.set_xlabel(x)
        shown = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        _finish(figure, {label: shown[label] for label, _ in (looks[who] for who in order)}, path, note)
    return True


def _legend_height(lines: int) -> float:
    return 0.25 + 0.25 * -(-lines // min(4, lines))


def _finish(figure: Any, shown: dict[str, Any], path: Path, note: str) -> None:
    """Add one legend below all panels, and write the file."""
    from matplotlib import pyplot as plt

    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=min(4, len(shown)), frameon=False)
    figure.tight_layout(rect=(0, _legend_height(len(shown)) / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": note} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=130, metadata=metadata)
    plt.close(figure)


def ring_lines(rows: Sequence[dict[str, Any]]) -> Panels:
    """Per (direction, mask and heads), per contender: (tokens per GPU, percent of the kernel alone), shortest first.

    What does not vary in length is left out, and so is a ring of one.
    """
    panels: Panels = {}
    for row in rows:
        if row["world_size"] > 1 and "refused" not in row:
            for way in ("forward", "both"):
                lines = panels.setdefault((way, f"{row['mask']}, {row['heads']}/{row['kv_heads']} heads"), {})
                points = lines.setdefault(row.get("who", "auto"), [])
                points.append((row["tokens_per_rank"], row[f"{way}_percent"]))
    return _with_a_line(panels)


def model_lines(rows: Sequence[dict[str, Any]]) -> Panels:
    """One panel per number of GPUs: per attention, (context, MFU in percent)."""
    panels: Panels = {}
    for row in rows:
        if row.get("mfu_percent") is not None:
            lines = panels.setdefault(("model", f"{row['world_size']} GPUs"), {})
            lines.setdefault(row["who"], []).append((row["seq_len"], row["mfu_percent"]))
    return _with_a_line(panels)


def _with_a_line(panels: Panels) -> Panels:
    found = {key: {who: sorted(dict(points).items()) for who, points in lines.items()} for key, lines in panels.items()}
    kept = {key: {who: points for who, points in lines.items() if len(points) > 1} for key, lines in found.items()}
    return {key: lines for key, lines in kept.items() if lines}


def draw_ring(rows: Sequence[dict[str, Any]], path: Path, note: str = "") -> bool:
    """Draw the percent of the kernel alone over tokens per GPU, of rows of one world size; see `draw_lengths`."""
    return _draw_rings(ring_lines(rows), path, note, "tokens per GPU", "% of the kernel alone", 105.0)


def draw_model(rows: Sequence[dict[str, Any]], path: Path, note: str = "") -> bool:
    """Draw the MFU of training steps over the context, a line per attention; see `draw_lengths`."""
    return _draw_rings(model_lines(rows), path, note, "tokens of context", "MFU, %", None)


def _draw_rings(panels: Panels, path: Path, note: str, x: str, y: str, top: float | None) -> bool:
    ordered = {key: panels[key] for way in DIRECTIONS for key in panels if key[0] == way}
    return _draw(ordered, path, note, lambda way, kind: f"{DIRECTIONS[way]}, {kind}", x, y, RINGS, top=top)
