"""Metrics log of a run: one JSON object per line, a summary, and a plot of the losses."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class MetricsLog:
    """The rows of `log.jsonl`, each with a "step": losses of training ("loss") and of validation ("validation_loss").

    Args:
        step: Rows of later steps are dropped, because the run repeats them.
    """

    def __init__(self, folder: Path, step: int, writes: bool) -> None:
        self.path, self.writes = folder / "log.jsonl", writes
        self.rows: list[dict[str, Any]] = []
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if step and self.path.exists():
            self.rows = [row for row in read_rows(self.path) if row["step"] <= step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        part.replace(self.path)

    def add(self, **row: Any) -> None:
        """Append one row and write it to the file."""
        self.rows.append(row)
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Sync the rows to disk."""
        if self.writes and self.rows:
            with self.path.open("a") as file:
                os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log, without a truncated last line."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def summarise(rows: Sequence[dict[str, Any]], start: int = 0) -> dict[str, Any]:
    """Summarise the steps of a run.

    Tokens/s, seconds and MFU are medians of the steps after `start`, the last restart, without the first two, which compile
    kernels and allocate buffers; exposed communication, of all these steps; peak memory is by rank.
    """
    steps = [row for row in rows if "loss" in row]
    made = [row for row in steps if row["step"] > start]
    counted = made[2:] or made

    def median(rows: Sequence[dict[str, Any]], name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return statistics.median(values) if values else None

    return {
        "steps": steps[-1]["step"],
        "losses": [row["loss"] for row in steps],
        "grad_norms": [row["grad_norm"] for row in steps],
        "steps_s": [row["step_s"] for row in steps],
        **{name: median(counted, name) for name in ("tokens_per_s", "step_s", "mfu")},
        "exposed_ms": median(made, "exposed_ms"),
        "peak_memory_mib": [max(column) for column in zip(*(row["peak_memory_mib"] for row in made), strict=True)],
    }


def plot_losses(rows: list[dict[str, Any]], path: Path, title: str, unit: str = "byte") -> None:
    """Plot training and validation loss over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    training = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if training:
        axes.plot(*zip(*training, strict=True), color="tab:blue", linewidth=0.8, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=3, label="validation")
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})", title=title)
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    part = path.with_name(f".{path.name}")
    figure.savefig(part, dpi=120, format=path.suffix[1:])
    part.replace(path)
