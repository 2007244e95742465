"""Pictures of an estimate: memory and time of the best meshes as stacked bars, and a heat map over tokens and GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ringattn.sizing import Estimate, MeshEstimate
from ringattn.sizing.estimate import estimate_job

INK = "#7d8590"
"""Gray that stands out from white and from near black alike."""
COLORS = ("#388bfd", "#a371f7", "#db61a2", "#f0883e", "#2da44e", "#bf8700", "#8b949e", "#e5484d")
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "ringattn", "font.size": 9, "savefig.transparent": True}
STYLE |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)
MOST_BARS = 6


def draw(found: Estimate, path: Path) -> None:
    """Draw an estimate to an SVG or PNG file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bars = [one for one in found.candidates if one.seconds is not None][:MOST_BARS]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 0.45 * max(4, len(bars)) + 1.4), layout="constrained")
        axes = figure.subplots(1, 3)
        names = [str(one.mesh) for one in bars]
        _stack(axes[0], names, [one.memory.gib() for one in bars], "GiB per GPU")
        axes[0].axvline(found.job.profile.memory_gib, color="#e5484d", linewidth=1)
        _stack(axes[1], names, [_seconds(one) for one in bars], "s per sequence")
        axes[1].set_yticks([])
        _heat(figure, axes[2], found)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _seconds(one: MeshEstimate) -> dict[str, float]:
    assert one.seconds is not None, "bars are of simulated meshes"
    return {name.replace("_", ", "): value / one.sequences for name, value in vars(one.seconds).items()}


def _stack(axes: Any, names: list[str], parts: list[dict[str, float]], label: str) -> None:
    kinds = [kind for kind in parts[0] if any(one[kind] > 0 for one in parts)] if parts else []
    left = [0.0] * len(names)
    for kind, color in zip(kinds, COLORS, strict=False):
        values = [one[kind] for one in parts]
        axes.barh(names, values, left=left, color=color, label=kind.replace("_", " "), height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)


def _heat(figure: Any, axes: Any, found: Estimate) -> None:
    """Draw MFU over tokens and GPUs; cells in which nothing fits stay empty."""
    job = found.job
    nodes = job.gpus_per_node
    tokens = [max(job.gpus, job.tokens * 4**i // 4) for i in range(4)]
    gpus = [n for n in (job.gpus // 4, job.gpus, job.gpus * 4) if n and (n <= nodes or n % nodes == 0)]

    def percent(length: int, count: int) -> float:
        best = estimate_job(replace(job, tokens=length, gpus=count, documents=None)).best
        return float("nan") if best is None or best.mfu is None else 100 * best.mfu

    cells = [[percent(length, count) for count in gpus] for length in tokens]
    image = axes.imshow(cells, aspect="auto", cmap="viridis", origin="lower")
    axes.set_xticks(range(len(gpus)), [str(n) for n in gpus])
    axes.set_yticks(range(len(tokens)), [_short(n) for n in tokens])
    axes.set(xlabel="GPUs", ylabel="tokens")
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            text = "-" if value != value else f"{value:.0f}%"
            axes.text(x, y, text, ha="center", va="center", color="white", fontsize=8)
    figure.colorbar(image, ax=axes, label="MFU %")


def _short(tokens: int) -> str:
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 2**10:g}K"
