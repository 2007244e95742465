"""Writes the result tables and the figures they show from the JSON rows in docs/results.

    python docs/results.py            rewrites the tables between the result marks of docs/results.md, and the figures
    python docs/results.py --check    fails when one of them is not what the rows say

A section without rows is left out. Every file of rows has the command that measured it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "results.md"
BEGIN, END = "<!-- results: written by docs/results.py -->", "<!-- end of results -->"

Row = dict[str, Any]
FIGURE, RING_FIGURE, SCALING_FIGURE, MODEL_FIGURE = "kernels.svg", "ring-speed.svg", "ring-scaling.svg", "model.svg"
INFERENCE_FIGURE, UNIONS_FIGURE = "inference-speed.svg", "kernels-unions.svg"
PROBLEM = ("mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "window", "document")
NAMES = {
    "hopper": "ringattn hopper",
    "portable": "ringattn portable",
    "auto": "ringattn auto",
    "cudnn": "cuDNN",
    "fa2": "FA2",
    "flex": "FlexAttention",
    "fa4": "FA4",
}
"""Contenders in the order they are shown."""
RING_PROBLEM = ("world_size", "mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "dtype", "window")
WAYS = ("forward", "both")


def drawing() -> ModuleType:
    """`figures.py` by its path: it needs nothing of the package, and the package needs seconds to import."""
    spec = importlib.util.spec_from_file_location("figures", Path(__file__).parent / "figures.py")
    assert spec is not None, "a Python file"
    assert spec.loader is not None, "a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name: str) -> Any:
    """Return the content of a result file.

    Raises:
        SystemExit: It is no JSON; the message names it.
    """
    try:
        return json.loads((HERE / "results" / name).read_text())
    except ValueError as error:
        raise SystemExit(
            f"error: docs/results/{name} must be JSON, got {error}; copy it again from where it was made"
        ) from None


def table(heads: list[str], rows: Iterable[list[object]]) -> str:
    """Return a markdown table."""
    lines = [heads, ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TRAINER_NAMES = {
    "sdpa": "Trainer, sdpa",
    "flash": "Trainer, torch's flash kernel",
    "ringattn": "Trainer, ringattn",
    "ring_trainer": "RingTrainer, ringattn",
}
Column = tuple[str, str] | Callable[[Row], object]


def run_of(row: Row) -> int:
    """Return the number of the run of a row."""
    return row["run"] + 1


def cell_of(row: Row | None, name: str, form: str) -> str:
    """Return a number of a row; a dash where there is none."""
    return "-" if row is None or row.get(name) is None else form.format(row[name])


def table_of(rows: Iterable[Row], columns: dict[str, Column]) -> str:
    """Return a table with a line per row; a column is a field with its format, or a function. Empty without rows."""
    lines = [[one(row) if callable(one) else cell_of(row, *one) for one in columns.values()] for row in rows]
    return table(list(columns), lines) if lines else ""


def source(machine: Row) -> str:
    """Return the machine, versions, commit and command of a run as one line."""
    gpus = machine.get("gpus") or [machine.get("device")]
    version = f"commit {machine['commit'][:12]}" if machine["commit"] else f"ringattn {machine['ringattn']}"
    return (
        f"{len(gpus)} x {gpus[0]}, torch {machine['torch']}, triton {machine['triton']}, {version}: "
        f"`{machine['command']}`"
    )


def runs_of(kind: str) -> list[Any]:
    """Return the content of every file of one bench, oldest first.

    Raises:
        SystemExit: A file was not written by a bench; the message names it.
    """
    found = []
    for path in sorted((HERE / "results").glob(f"{kind}*.json")):
        run = load(path.name)
        if not (isinstance(run, dict) and "rows" in run and "date" in (run.get("machine") or {})):
            raise SystemExit(
                f"error: docs/results/{path.name} must be what a bench wrote, got no rows, machine and date; remove it"
            )
        found.append(run)
    return sorted(found, key=lambda one: one["machine"]["date"])


def correctness() -> str:
    """Runs inside the budget, and the worst error over it by dtype; a line per run of `check`."""
    runs = runs_of("check")
    if not runs:
        return ""
    there = {row["dtype"] for run in runs for row in run["rows"]}
    dtypes = [dtype for dtype in ("bf16", "fp16", "fp32") if dtype in there]
    lines = []
    for index, run in enumerate(runs):
        rows, machine = run["rows"], run["machine"]
        asked = re.search(r"--schedule (\w+)", machine["command"])
        worst = ([row["ratio"] for row in rows if row["dtype"] == dtype] for dtype in dtypes)
        lines.append(
            [
                len(machine["gpus"]),
                asked[1] if asked else "auto",
                f"{sum(row['ratio'] <= 1 for row in rows)} of {len(rows)}",
                *(f"{max(ratios):.2f} ({len(ratios)})" if ratios else "-" for ratios in worst),
                index + 1,
            ]
        )
    columns = [
        "GPUs",
        "schedule",
        "inside the budget",
        *(f"worst error / budget, {dtype} (of)" for dtype in dtypes),
        "run",
    ]
    parts = ["### Correctness", table(columns, lines)]
    return "\n\n".join([*parts, *(f"Run {index + 1}: {source(run['machine'])}" for index, run in enumerate(runs))])


def latest(runs: list[Any], key: Callable[[Row], object]) -> list[Row]:
    """Return the rows of all runs, with the index of their run; of rows with equal keys only those of the last run.

    Contenders are compared within one run only: they took turns there.
    """
    last: dict[object, list[Row]] = {}
    for index, run in enumerate(runs):
        found: dict[object, list[Row]] = {}
        for row in run["rows"]:
            found.setdefault(key(row), []).append(row | {"run": index})
        last |= found
    return [row for rows in last.values() for row in rows]


def values_of(row: Row, names: Iterable[str]) -> tuple[Any, ...]:
    """Return some fields of a row, None where they are missing."""
    return tuple(row.get(name) for name in names)


def kernel_rows(runs: list[Any]) -> list[Row]:
    """Return the rows of attention of all runs, a problem from the last run that measured it."""
    apart = ("carry", "softmax", "unions")
    rows = latest(runs, lambda row: (row["group"] if row["group"] in apart else None, values_of(row, PROBLEM)))
    return [row for row in rows if row["group"] != "softmax"]


def shown_names(rows: list[Row]) -> list[str]:
    """Contenders that have a speed somewhere, in the order of the figures; ours as functions."""
    timed = {row["who"] for row in rows if "tflops" in row}
    return [name for name in NAMES if name in timed] + sorted(timed - set(NAMES))


def speed(row: Row | None) -> str:
    """TFLOP/s, with a star where the host was timed too; a dash where there is no speed."""
    if row is None or "tflops" not in row:
        return "-"
    return f"{row['tflops']:.0f}{'' if row['timing'] == 'graph' else '*'}"


def table_of_targets(rows: list[Row]) -> str:
    """Forward and backward by head_dim, a column per contender: full / causal."""
    rows = [row for row in rows if row["level"] == "op"]
    names = shown_names(rows)
    cells = {(row["direction"], row["head_dim"], row["mask"], row["who"]): row for row in rows}
    lines = []
    for direction in ("forward", "backward"):
        for d in sorted({row["head_dim"] for row in rows}, key=lambda d: (d != 128, d)):
            pair = ([speed(cells.get((direction, d, mask, who))) for mask in ("full", "causal")] for who in names)
            lines.append(
                [f"{direction}, head_dim {d}", *(" / ".join(one) if set(one) != {"-"} else "-" for one in pair)]
            )
    return table(["full / causal", *(NAMES.get(who, who) for who in names)], lines)


def table_of_masks(rows: list[Row]) -> str:
    """A line per problem, a column per contender: forward / backward."""
    rows = [row for row in rows if row["level"] == "op"]
    names = shown_names(rows)
    keys = ("head_dim", "v_head_dim", "mask", "window", "document", "batch", "seq_len", "heads", "kv_heads")
    problems = list(dict.fromkeys(values_of(row, keys) for row in rows))
    cells = {(values_of(row, keys), row["direction"], row["who"]): row for row in rows}
    lines = []
    for problem in problems:
        d, dv, mask, window, document, b, n, h, hk = problem
        kind = f"{mask} {window + 1}" if mask == "window" else f"{mask} of {document}" if document else mask
        cut = kind if mask in ("window", "documents") else mask
        pair = ([speed(cells.get((problem, way, who))) for way in ("forward", "backward")] for who in names)
        speeds = (" / ".join(one) if set(one) != {"-"} else "-" for one in pair)
        lines.append([f"{d}/{dv}" if dv else d, cut, f"{b} x {n}", f"{h}" if h == hk else f"{h}/{hk}", *speeds])
    return table(["head_dim", "mask", "tokens", "heads", *(NAMES.get(who, who) for who in names)], lines)


def table_of_unions(rows: list[Row]) -> str:
    """A line per mask: forward / backward of our kernel alone, its share of the causal kernel's, and FlexAttention."""
    cells = {(row["mask"], row["direction"], row["who"]): row for row in rows}
    ways = ("forward", "backward")
    lines = []
    for mask in dict.fromkeys(row["mask"] for row in rows):
        ours, flex = ([cells.get((mask, way, who)) for way in ways] for who in ("hopper", "flex"))
        causal = [cells.get(("causal", way, "hopper")) for way in ways]
        shares = [
            f"{100 * a['tflops'] / b['tflops']:.0f}%" if a and b else "-" for a, b in zip(ours, causal, strict=True)
        ]
        lines.append([mask, *(" / ".join(one) for one in (map(speed, ours), shares, map(speed, flex)))])
    return table(["mask", "ringattn", "of causal", NAMES["flex"]], lines)


def kernels_alone(rows: list[Row]) -> str:
    """Our kernel sets without autograd, on the problems of the target table."""
    rows = [row | {"level": "op"} for row in rows if row["level"] == "kernel" and "tflops" in row]
    return table_of_targets(rows) if rows else ""


def carries(rows: list[Row]) -> str:
    """Return the cost of the carry as text."""
    found = [row for row in rows if row["level"] == "carried" and "cost_percent" in row]
    return "; ".join(
        f"{row['who']}, {row['mask']}, {row['seq_len']} tokens, head_dim {row['head_dim']}: {row['cost_percent']:+.1f}%"
        for row in found
    )


def kernels() -> str:
    """TFLOP/s of the contenders."""
    runs = runs_of("kernels")
    rows = kernel_rows(runs)
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    target = by_group.get("target", [])
    dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
    parts = [
        f"### Kernels\n\nTFLOP/s, {dtypes}, visible pairs only (4 b h d pairs, backward 2.5 times that), all contenders of a "
        "problem taking turns in one run. Without a star: the calls were replayed from a CUDA graph; with one (`*`): plain "
        "calls, launches on the host included.",
        *(f"Run {index + 1}: {source(run['machine'])}" for index, run in enumerate(runs)),
    ]
    if target:
        shapes = sorted({f"B{row['batch']} H{row['heads']} N{row['seq_len']}" for row in target})
        parts += [f"#### Targets\n\n{', '.join(shapes)}.", table_of_targets(target)]
        if alone := kernels_alone(target):
            parts += ["The kernels alone, as the ring calls them (backward with delta):", alone]
    if said := carries(rows):
        parts.append(f"Carrying a partial in and out costs the forward ({said}).")
    others = [row for group in ("batch", "masks", "grouped") for row in by_group.get(group, [])]
    if others:
        parts += ["#### Other shapes\n\nForward / backward.", table_of_masks(others)]
    if unions := by_group.get("unions", []):
        shape = f"{unions[0]['seq_len']} tokens, {unions[0]['heads']} heads, head_dim {unions[0]['head_dim']}"
        parts += [
            f"#### Masks of several intervals and of blocks\n\n{shape}, forward / backward; the kernel alone beside FlexAttention. "
            "[The masks](commands.md#bench-kernels).",
            table_of_unions(unions),
        ]
        if (HERE / UNIONS_FIGURE).exists():
            parts.append(f"![TFLOP/s by mask, beside FlexAttention]({UNIONS_FIGURE})")
    if (HERE / FIGURE).exists():
        parts.append(f"![TFLOP/s over tokens, one line per implementation]({FIGURE})")
    return "\n\n".join(parts)


def fa4() -> str:
    """Our kernels and FlashAttention-4 in turns, a table per GPU."""
    runs = runs_of("fa4")
    if not runs:
        return ""
    parts = [
        "### Kernels beside FlashAttention-4\n\nTFLOP/s as above, forward / backward, FlashAttention-4 being 4.0.0b36 on "
        "nvidia-cutlass-dsl 4.8.1. The H200s were the two of one host, which ran at the same time."
    ]
    for run in runs:
        parts += [f"{source(run['machine'])}", table_of_masks(run["rows"])]
    return "\n\n".join(parts)


def digest(rows: list[Row]) -> str:
    """Return a digest of the rows of a figure."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def figure_rows() -> list[Row]:
    """Return the rows of the figure of kernels."""
    return [row for row in kernel_rows(runs_of("kernels")) if row["group"] not in ("carry", "unions")]


def figures() -> Iterator[tuple[str, Callable[..., bool], list[Row], bool]]:
    """Yield every figure: its file, the function that draws it, its rows, and whether they give a line."""
    module = drawing()
    rows = figure_rows()
    yield FIGURE, module.draw_lengths, rows, bool(module.lines_over_length(rows))
    rows = [row for row in kernel_rows(runs_of("kernels")) if row["group"] == "unions"]
    yield UNIONS_FIGURE, module.draw_unions, rows, bool(rows)
    rows = ring_rows(runs_of("ring"))
    largest = [row for row in rows if row["world_size"] == max(row["world_size"] for row in rows)]
    yield RING_FIGURE, module.draw_ring, largest, bool(module.ring_lines(largest))
    grown = scaling_rows(rows)
    yield SCALING_FIGURE, module.draw_scaling, grown, bool(module.scaling_lines(grown))
    rows = model_rows(runs_of("model"))
    yield MODEL_FIGURE, module.draw_model, rows, bool(module.model_lines(rows))
    rows = inference_rows(runs_of("inference"))
    yield INFERENCE_FIGURE, module.draw_inference, rows, bool(module.inference_lines(rows))


def draw_figures() -> None:
    """Draws every figure, or removes it when there is no line to draw."""
    for name, draw, rows, any_line in figures():
        if not any_line or not draw(rows, HERE / name, f"rows {digest(rows)}"):
            (HERE / name).unlink(missing_ok=True)


def figures_are_true() -> bool:
    """Return whether every figure says that it was drawn from the committed rows; true too where there is none to draw."""
    for name, _, rows, any_line in figures():
        path = HERE / name
        if path.exists() != any_line or (any_line and f"rows {digest(rows)}" not in path.read_text()):
            return False
    return True


def ring_rows(runs: list[Any]) -> list[Row]:
    """Return the rows of all runs of `bench ring`, a problem from the last run that measured it."""
    rows = latest(runs, lambda row: values_of(row, RING_PROBLEM))
    for row in rows:
        # rows of before there were names
        row.setdefault("who", runs[row["run"]]["machine"].get("backend") or "auto")
        row.setdefault("ours", True)
        if "refused" not in row:
            for way in WAYS:
                row.setdefault(f"{way}_alone_tflops", row[f"{way}_tflops"] * 100 / row[f"{way}_percent"])
    return sorted(rows, key=lambda row: tuple(map(str, values_of(row, RING_PROBLEM))))


def main_ring(rows: list[Row]) -> list[Row]:
    """Our rows of the ring that users get: auto where it was measured, else fused, else whichever there is."""
    order = ("auto", "fused", "stepwise")
    chosen: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["ours"] and "refused" not in row:
            key = tuple(row[name] for name in RING_PROBLEM)
            best = chosen.get(key)
            ranks = [order.index(one["who"]) if one["who"] in order else len(order) for one in (row, best or row)]
            if best is None or ranks[0] < ranks[1]:
                chosen[key] = row
    return list(chosen.values())


def heads(row: Row) -> str:
    """Query heads / key/value heads."""
    return f"{row['heads']}/{row['kv_heads']}"


def mask_of(row: Row) -> str:
    """Return the mask as text."""
    return f"window {row['window'] + 1}" if row["mask"] == "window" else row["mask"]


def both_ways(form: Callable[[str], str]) -> str:
    """Forward / forward + backward."""
    return " / ".join(form(way) for way in WAYS)


def by_length(rows: list[Row]) -> list[Row]:
    """Masks, then head groups, then lengths."""
    return sorted(
        rows, key=lambda row: (row["mask"] != "causal", row["mask"], -row["heads"] / row["kv_heads"], row["seq_len"])
    )


def table_of_shares(rows: list[Row]) -> str:
    """A line per problem, a column per ring: TFLOP/s and the share of the kernel alone."""
    names = drawing().RING_NAMES
    timed = {row["who"] for row in rows if "refused" not in row}
    shown = [who for who in names if who in timed] + sorted(timed - set(names))
    problems: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in by_length(rows):
        key = (mask_of(row), row["layout"], row["tokens_per_rank"], heads(row))
        problems.setdefault(key, {})[row["who"]] = row

    def cell(row: Row | None) -> str:
        if row is None or "refused" in row:
            return "-"
        return both_ways(lambda way: f"{row[f'{way}_tflops']:.0f} ({row[f'{way}_percent']:.0f}%)")

    lines = []
    for key, cells in problems.items():
        timed_row = next((row for row in cells.values() if "refused" not in row), None)
        if timed_row is not None:
            alone = both_ways(lambda way, row=timed_row: f"{row[f'{way}_alone_tflops']:.0f}")
            lines.append([key[0], key[1], key[2], key[3], alone, *(cell(cells.get(who)) for who in shown)])
    columns = ["mask", "layout", "tokens per GPU", "heads", "kernel alone", *(names.get(who, who) for who in shown)]
    return table(columns, lines)


def table_of_costs(rows: list[Row]) -> str:
    """Costs of a call besides arithmetic: exposed time, host time, memory; and the share as a CUDA graph."""
    lines = []
    for row in by_length([row for row in rows if row["ours"] and row.get("forward_host_us") is not None]):

        def number(way: str, name: str, form: str, row: Row = row) -> str:
            value = row.get(f"{way}_{name}")
            return "-" if value is None else form.format(value)

        lines.append(
            [
                f"{mask_of(row)}, {row['tokens_per_rank']}, {heads(row)}",
                drawing().RING_NAMES.get(row["who"], row["who"]),
                both_ways(lambda way, number=number: number(way, "exposed_ms", "{:.2f}")),
                both_ways(lambda way, number=number: number(way, "host_us", "{:.0f}")),
                both_ways(lambda way, number=number: number(way, "graph_percent", "{:.0f}%")),
                "-" if row.get("peak_gib") is None else f"{row['peak_gib']:.2f}",
            ]
        )
    columns = ["mask, tokens per GPU, heads", "ring", "exposed ms", "host us", "of alone, as a CUDA graph", "peak GiB"]
    return table(columns, lines) if lines else ""


def scaling_rows(rows: list[Row]) -> list[Row]:
    """Causal rows of our ring whose length per GPU was measured on several numbers of GPUs."""
    causal = [row for row in main_ring(rows) if row["mask"] == "causal"]
    sizes: dict[tuple[Any, ...], set[int]] = {}
    for row in causal:
        sizes.setdefault((row["tokens_per_rank"], heads(row)), set()).add(row["world_size"])
    return [row for row in causal if len(sizes[row["tokens_per_rank"], heads(row)]) > 1]


def table_of_scaling(rows: list[Row], fixed: str) -> str:
    """A line per length that several numbers of GPUs measured, a column per number.

    Args:
        rows: Of our ring.
        fixed: "tokens_per_rank" (weak: TFLOP/s per GPU) or "seq_len" (strong: ms, and times as fast as the fewest GPUs).
    """
    causal = [row for row in main_ring(rows) if row["mask"] == "causal"]
    lines: dict[tuple[str, int], dict[int, Row]] = {}
    for row in by_length(causal):
        lines.setdefault((heads(row), row[fixed]), {})[row["world_size"]] = row
    lines = {key: found for key, found in lines.items() if len(found) > 1}
    sizes = sorted({size for found in lines.values() for size in found})
    if not lines:
        return ""

    def cell(found: dict[int, Row], size: int) -> str:
        if size not in found:
            return "-"
        row, least = found[size], found[min(found)]
        if fixed == "tokens_per_rank":
            return both_ways(lambda way: f"{row[f'{way}_tflops']:.0f}")
        return both_ways(lambda way: f"{row[f'{way}_ms']:.2f} ({least[f'{way}_ms'] / row[f'{way}_ms']:.2f} x)")

    what = "tokens per GPU" if fixed == "tokens_per_rank" else "tokens in all"
    columns = ["heads", what, *(f"{size} GPU{'s' if size > 1 else ''}" for size in sizes)]
    return table(columns, ([*key, *(cell(found, size) for size in sizes)] for key, found in lines.items()))


def table_of_windows(rows: list[Row]) -> str:
    """Bytes and exposed time under a window by number of GPUs, at lengths per GPU that several of them measured."""
    windows = [row for row in main_ring(rows) if row["mask"] == "window" and row["world_size"] > 1]
    sizes: dict[tuple[Any, ...], set[int]] = {}
    for row in windows:
        sizes.setdefault((row["tokens_per_rank"], heads(row), row["window"]), set()).add(row["world_size"])
    lines = []
    for row in sorted(windows, key=lambda row: (heads(row), row["tokens_per_rank"], row["world_size"])):
        if len(sizes[row["tokens_per_rank"], heads(row), row["window"]]) > 1:
            moved = row["bytes_received"]
            line = [mask_of(row), row["layout"], row["tokens_per_rank"], heads(row), row["world_size"]]
            line += [both_ways(lambda way, moved=moved: f"{_moved(moved, way) / 1e6:.1f}")]
            line += [both_ways(lambda way, row=row: f"{row[f'{way}_exposed_ms']:.2f} of {row[f'{way}_ms']:.2f}")]
            lines.append(line)
    columns = ["mask", "layout", "tokens per GPU", "heads", "GPUs", "MB received by the busiest rank", "exposed ms"]
    return table(columns, lines) if lines else ""


def _moved(moved: Row, way: str) -> int:
    return moved["forward_most"] + (moved["backward_most"] if way == "both" else 0)


def ring() -> str:
    """The ring as a share of the kernel alone, beside others, over lengths and numbers of GPUs."""
    runs = runs_of("ring")
    rows = ring_rows(runs)
    if not rows:
        return ""
    parts = [
        "### Ring\n\nForward / forward + backward, TFLOP/s per GPU over visible pairs. In brackets the share of the kernel alone: "
        "our own ring of one rank on the same GPUs, with a rank's share of the work, taking turns in the same run. Every answer is "
        "checked before its time counts.",
        *(f"Run {index + 1}: {source(run['machine'])}" for index, run in enumerate(runs)),
    ]
    for size in sorted({row["world_size"] for row in rows if row["world_size"] > 1}, reverse=True):
        some = [row for row in rows if row["world_size"] == size]
        parts += [f"#### {size} GPUs", table_of_shares(some)]
        if costs := table_of_costs(some):
            parts += [
                f"#### Time, host and memory on {size} GPUs\n\nExposed is the time beyond the kernel alone; host is the time until "
                "a call returns; peak memory is of one step.",
                costs,
            ]
        refused = sorted({f"{row['who']}: {row['refused']}" for row in some if "refused" in row})
        if refused:
            parts.append(f"Without a speed: {'; '.join(refused)}.")
    if short := runs_of("short"):
        parts.append(
            "#### Short rings in the order of arrival\n\nThe fused ring since its programs take tiles in the order in which keys "
            "arrive, in the columns of the table above; its rows are of before."
        )
        for run in short:
            parts += [source(run["machine"]), table_of_costs(ring_rows([run]))]
    if (HERE / RING_FIGURE).exists():
        parts.append(f"![Share of the kernel alone over tokens per GPU, one line per ring]({RING_FIGURE})")
    for title, said, body in (
        (
            "Weak scaling",
            "A fixed number of tokens per GPU: TFLOP/s per GPU, on the GPUs of the runs above.",
            table_of_scaling(rows, "tokens_per_rank"),
        ),
        (
            "Strong scaling",
            "A fixed length: ms, and how much faster than the fewest GPUs.",
            table_of_scaling(rows, "seq_len"),
        ),
        ("Windows move their halo", "What is moved does not grow with the number of GPUs.", table_of_windows(rows)),
    ):
        if body:
            parts += [f"#### {title}\n\n{said}", body]
        if title == "Weak scaling" and body and (HERE / SCALING_FIGURE).exists():
            parts.append(f"![TFLOP/s per GPU over the number of GPUs]({SCALING_FIGURE})")
    return "\n\n".join(parts)


def memory() -> str:
    """Peak memory of a step, measured and predicted, from the last run of each problem."""
    runs = runs_of("memory")
    rows = latest(runs, lambda row: values_of(row, (*RING_PROBLEM, "who")))
    if not rows:
        return ""

    def size(value: float | None) -> str:
        # JSON readers may have no infinity, and what does not fit has no size
        return "-" if value is None else f"{value:.2f}" if value < 1e6 else "does not fit"

    names = drawing().RING_NAMES
    body = table_of(
        sorted(rows, key=lambda row: (row["seq_len"], -row["world_size"], row["kv_heads"])),
        {
            "tokens": ("seq_len", "{:,}"),
            "GPUs": ("world_size", "{}"),
            "heads": heads,
            "ring": lambda row: names.get(row["who"], row["who"]),
            "tensors GiB": lambda row: size(row["tensors_gib"]),
            "predicted GiB": lambda row: size(row["predicted_gib"]),
            "measured GiB": lambda row: size(row["peak_gib"]),
        },
    )
    said = " ".join(f"Run {index + 1}: {source(run['machine'])}" for index, run in enumerate(runs))
    return (
        "### Memory\n\nThe peak of one forward and backward on the fullest GPU, inputs and gradients included; predicted from "
        f"integers before anything is allocated. The command that measured it went with version 1.0. {said}\n\n{body}"
    )


def softmax() -> str:
    """Bandwidth of the online softmax as a share of a device copy."""
    rows = [{**row, **run["machine"]} for run in runs_of("kernels") for row in run["rows"] if row["group"] == "softmax"]
    rows = [row for row in rows if "refused" not in row] or load("softmax.json")
    shares = {
        "online_softmax": "share_of_copy",
        "torch.softmax": "torch_share_of_copy",
        "online backward": "backward_share_of_copy",
        "torch backward": "torch_backward_share_of_copy",
    }
    columns: dict[str, Column] = {"dtype": ("dtype", "{}"), "row length": ("n", "{}")}
    columns |= {name: lambda row, field=field: f"{100 * row[field]:.0f}%" for name, field in shares.items()}
    body = table_of(rows, columns)
    return (
        "### Online softmax\n\nBytes per second, counted as two reads and one write of every element, as a share of a device "
        f"copy in the same run; above 100% where the second read hits the cache. {source(rows[0])}\n\n{body}"
    )


def training_rows(runs: list[Any]) -> list[Row]:
    """Return the rows of all runs of the training job by context and number of GPUs."""
    names = ("seq_len", "world_size", "parameters")
    return sorted(latest(runs, lambda row: values_of(row, names)), key=lambda row: values_of(row, names))


def training() -> str:
    """Loss, speed and memory of the main job by context and number of GPUs."""
    runs = runs_of("train")
    rows = training_rows(runs)
    if not rows:
        return ""
    body = table_of(
        rows,
        {
            "GPUs": ("world_size", "{}"),
            "context": ("seq_len", "{:,}"),
            "loss, first step": lambda row: f"{row['losses'][0]:.4f}",
            "loss, last step": lambda row: f"{row['losses'][-1]:.4f} ({row['steps']})",
            "tokens/s": ("tokens_per_s", "{:,.0f}"),
            "MFU": lambda row: "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%",
            "exposed ms": ("exposed_ms", "{:.1f}"),
            "GiB per GPU": lambda row: f"{max(row['peak_memory_mib']) / 1024:.1f}",
            "run": run_of,
        },
    )
    shown = {row["run"] for row in rows}
    said = " ".join(f"Run {index + 1}: {source(run['machine'])}" for index, run in enumerate(runs) if index in shown)
    return (
        f"### Training\n\nThe training job, {_millions(rows)} parameters. Tokens/s are of all GPUs together, the median "
        "of the steps; memory is of the fullest GPU; [the page on training](training.md) defines MFU and exposed "
        f"communication. {said}\n\n{body}"
    )


def _millions(rows: list[Row]) -> str:
    return " and ".join(sorted({f"{row['parameters'] / 1e6:.1f}M" for row in rows}))


def trainers() -> str:
    """Training steps of transformers' Trainer on one GPU by attention."""
    runs = runs_of("hf-trainer")
    rows = latest(runs, lambda row: values_of(row, ("seq_len", "who")))
    if not rows:
        return ""
    first = rows[0]
    body = table_of(
        rows,
        {
            "context": ("seq_len", "{:,}"),
            "trainer, attention": lambda row: TRAINER_NAMES[row["who"]],
            "seconds per step": ("step_s", "{:.3f}"),
            "tokens/s": ("tokens_per_s", "{:,.0f}"),
            "over sdpa": ("ratio", "{:.2f}"),
            "overhead of the mixin": ("overhead", "{:.1%}"),
            "MFU": ("mfu_percent", "{:.1f}%"),
            "GiB": ("peak_gib", "{:.1f}"),
            "steps": ("steps", "{}"),
        },
    )
    return (
        f"### Trainer of transformers\n\nOne GPU, one sequence per step, a model of {first['layers']} layers with the widths of "
        f"Llama 3 8B and a vocabulary of {first['vocab_size']:,}, random weights in bf16, AdamW, blocks checkpointed. Median of "
        f"the steps; loss and gradient norm of the first step equal those with sdpa. "
        f"{' '.join(source(run['machine']) for run in runs)}\n\n{body}"
    )


def model_rows(runs: list[Any]) -> list[Row]:
    """Return the rows of all runs of `bench model`, shortest context first."""
    names = ("world_size", "seq_len", "layers")
    return sorted(latest(runs, lambda row: values_of(row, names)), key=lambda row: values_of(row, names))


def models() -> str:
    """Training steps of a whole model, ours and torch's."""
    runs = runs_of("model")
    rows = model_rows(runs)
    if not rows:
        return ""
    names = drawing().RING_NAMES
    first = rows[0]

    def timed(name: str, form: str) -> Callable[[Row], str]:
        return lambda row: "" if "refused" in row else cell_of(row, name, form)

    body = table_of(
        rows,
        {
            "GPUs": ("world_size", "{}"),
            "context": ("seq_len", "{:,}"),
            "layers": ("layers", "{}"),
            "attention": lambda row: names.get(row["who"], row["who"]),
            "seconds per step": lambda row: row["refused"] if "refused" in row else f"{row['step_s']:.2f}",
            "tokens/s per GPU": timed("tokens_per_s_per_gpu", "{:,.0f}"),
            "MFU": timed("mfu_percent", "{:.1f}%"),
            "GiB per GPU": timed("peak_gib", "{:.1f}"),
            "run": run_of,
        },
    )
    said = " ".join(f"Run {index + 1}: {source(run['machine'])}" for index, run in enumerate(runs))
    text = (
        f"### Whole models\n\nTraining steps of a model with the shape of Llama 3 8B (dim {first['dim']:,}, "
        f"{first['heads']}/{first['kv_heads']} heads of {first['head_dim']}, SwiGLU {first['mlp_dim']:,}, vocabulary "
        f"{first['vocab_size']:,}) cut to the given number of layers, random weights, FSDP2, AdamW, blocks checkpointed; "
        "`ringattn` saves the output of attention, the others recompute it. MFU does not count recomputation; the peak is "
        f"989 TFLOP/s. `launch/bench/model.py` has the definitions. {said}\n\n{body}"
    )
    if drawing().model_lines(rows):
        text += f"\n\n![MFU of training steps over the context]({MODEL_FIGURE})"
    return text


def inference_rows(runs: list[Any]) -> list[Row]:
    """Return the rows of all runs of `bench inference`, fewest GPUs first."""
    naming = ("part", "world_size", "seq_len", "batch", "layers", "kv_dtype", "chunk", "who", "how")
    rows = [row for row in latest(runs, lambda row: values_of(row, naming)) if row["part"] != "bandwidth"]
    order = ("world_size", "seq_len", "batch", "layers")
    return sorted(rows, key=lambda row: tuple(row.get(name) or 0 for name in order))


def table_of_prompts(rows: list[Row]) -> str:
    """Time to first token, ours and transformers'."""
    peers = {(row["seq_len"], row["layers"]): row for row in rows if row.get("who") == "transformers"}
    return table_of(
        (row for row in rows if row["part"] == "first" and "ttft_s" in row),
        {
            "GPUs": ("world_size", "{}"),
            "context": ("seq_len", "{:,}"),
            "layers": ("layers", "{}"),
            "chunk": ("chunk", "{:,}"),
            "seconds": ("ttft_s", "{:.2f}"),
            "tokens/s": ("tokens_per_s", "{:,.0f}"),
            "TFLOP/s per GPU": ("tflops", "{:.0f}"),
            "MFU": ("mfu_percent", "{:.1f}%"),
            "transformers, 1 GPU, s": lambda row: cell_of(
                peers.get((row["seq_len"], row["layers"])), "ttft_s", "{:.2f}"
            ),
            "GiB per GPU": ("peak_gib", "{:.1f}"),
            "run": run_of,
        },
    )


def table_of_prompt_attention(rows: list[Row]) -> str:
    """The attention of a prompt beside the forward of training."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "prefill" and "ms" in row:
            key = (row["world_size"], row["seq_len"], row.get("kv_dtype"), row["run"])
            found.setdefault(key, {})[row["who"]] = row

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        cut = f"chunks of {row['chunk']:,}: " if row.get("chunk") else ""
        return f"{cut}{row['ms']:.1f} ms, {row['tflops']:.0f} TFLOP/s ({row['percent_of_training']:.0f}%)"

    lines = []
    for key in sorted(found, key=str):
        gpus, length, kept, run = key
        base = found[key].get("ring")
        alone = "-" if base is None else f"{base['ms']:.1f} ms, {base['tflops']:.0f} TFLOP/s"
        cells = (cell(found[key].get(who)) for who in ("attend", "attend_chunked"))
        lines.append([gpus, f"{length:,}", kept_in(kept, base), alone, *cells, run + 1])
    columns = ["GPUs", "context", "K/V", "training's forward", "prompt, whole", "prompt, in chunks", "run"]
    return table(columns, lines) if lines else ""


def kept_in(kv_dtype: str | None, row: Row | None) -> str:
    """Return the dtype of keys and values in the cache."""
    return "-" if row is None else row["dtype"] if kv_dtype in (None, "same") else kv_dtype


def table_of_tokens(rows: list[Row]) -> str:
    """Time per token, eager and as a CUDA graph, beside the bound and transformers."""
    peers = {(row["seq_len"], row["layers"], row["batch"]): row for row in rows if row.get("who") == "transformers"}
    found: dict[str, dict[tuple[Any, ...], dict[str, Row]]] = {"token": {}, "written": {}}
    for row in rows:
        if row["part"] in found and "ms_per_token" in row:
            key = tuple(row.get(name) for name in ("world_size", "seq_len", "layers", "batch", "kv_dtype"))
            found[row["part"]].setdefault(key, {})[row["how"]] = row
    lines = []
    for key, ways in found["token"].items():
        gpus, length, layers, batch, kept = key
        best = ways.get("graph") or ways["eager"]
        line = [gpus, f"{length:,}", layers, kept_in(kept, best), batch]
        line += [cell_of(ways.get(how), "ms_per_token", "{:.2f}") for how in ("eager", "graph")]
        line += [cell_of(found["written"].get(key, {}).get("graph"), "ms_per_token", "{:.2f}")]
        line += [f"{best['bound_ms']:.2f}", f"{best['ratio']:.2f}", f"{best['tokens_per_s']:,.1f}"]
        line += [cell_of(peers.get((length, layers, batch)), "ms_per_token", "{:.2f}"), best["run"] + 1]
        lines.append(line)
    columns = ["GPUs", "context", "layers", "K/V", "batch", "eager ms", "graph ms", "as written, graph ms"]
    columns += ["bytes / bandwidth ms", "ratio"]
    return table([*columns, "tokens/s", "transformers, 1 GPU, ms", "run"], lines) if lines else ""


def table_of_generate(rows: list[Row]) -> str:
    """`generate`, ours and transformers' own."""
    names = {"ringattn": "ringattn", "transformers": "transformers, sdpa"}
    return table_of(
        (row for row in rows if row["part"] == "generate" and "ttft_s" in row),
        {
            "GPUs": lambda row: row["world_size"] if row["who"] == "ringattn" else 1,
            "context": ("seq_len", "{:,}"),
            "layers": ("layers", "{}"),
            "cache and attention": lambda row: names[row["who"]],
            "first token s": ("ttft_s", "{:.2f}"),
            "ms per token": ("ms_per_token", "{:.2f}"),
            "run": run_of,
        },
    )


def table_of_cached_attention(rows: list[Row]) -> str:
    """One layer's attention over the cache beside its bytes."""
    return table_of(
        (row for row in rows if row["part"] == "attention" and "us_per_layer" in row),
        {
            "GPUs": ("world_size", "{}"),
            "context": ("seq_len", "{:,}"),
            "K/V": lambda row: kept_in(row.get("kv_dtype"), row),
            "batch": ("batch", "{}"),
            "us per layer": lambda row: f"{row['us_per_layer']:.1f}{'' if row['how'] == 'graph' else '*'}",
            "bytes / bandwidth us": ("bound_us", "{:.1f}"),
            "ratio": ("ratio", "{:.2f}"),
            "ratio with 15 us more": ("ratio_with_15us", "{:.2f}"),
            "goal us": lambda row: f"{row['goal_us']:.1f}, {'met' if row['goal_met'] else 'missed'}",
            "run": run_of,
        },
    )


def table_of_throughput(rows: list[Row]) -> str:
    """Tokens per second by batch, and which batch is the largest within the latency."""
    return table_of(
        (row for row in rows if row["part"] == "throughput" and "ms_per_token" in row),
        {
            "GPUs": ("world_size", "{}"),
            "context": ("seq_len", "{:,}"),
            "layers": ("layers", "{}"),
            "batch": lambda row: f"**{row['batch']}**" if row.get("largest") else row["batch"],
            "ms per token": ("ms_per_token", "{:.2f}"),
            "tokens/s": ("tokens_per_s", "{:,.0f}"),
            "within the latency": lambda row: f"{'yes' if row['within'] else 'no'} ({row['latency_ms']:g} ms)",
            "run": run_of,
        },
    )


def inference() -> str:
    """Prompts and tokens over a sharded cache."""
    runs = runs_of("inference")
    rows = inference_rows(runs)
    if not rows:
        return ""
    bandwidths = [next(row for row in run["rows"] if row["part"] == "bandwidth") for run in runs]
    parts = [
        "### Inference\n\nA model with the shape of Llama 3 8B, cut to the given number of layers, random weights, in "
        "transformers, with a KV cache that is sharded over the GPUs. Results are checked before they are timed. "
        "`launch/bench/inference.py` has the definitions.",
        *(
            f"Run {index + 1}, {band['read_gbps']:,.0f} GB/s read ({band['who']}): {source(run['machine'])}"
            for index, (run, band) in enumerate(zip(runs, bandwidths, strict=True))
        ),
    ]
    if drawing().inference_lines(rows):
        parts.append(f"![Times of prompts and tokens over the context]({INFERENCE_FIGURE})")
    for title, said, body in (
        (
            "Time to first token",
            "From a prompt to its first token on every host, median.",
            table_of_prompts(rows),
        ),
        (
            "Attention of a prompt",
            "One layer: prefill of a prompt, beside the forward of training over as many tokens, in turns; TFLOP/s per GPU.",
            table_of_prompt_attention(rows),
        ),
        (
            "Time per token",
            "Every token is on the host before the next one begins. The bound is the bytes of weights, keys and values on a GPU "
            "over the bandwidth; ratio and tokens/s are the graph's where there is one. Where the JSON has `split`, the model is "
            'fused and tensor parallel; "as written" is the model as transformers writes it, in the same run.',
            table_of_tokens(rows),
        ),
        (
            "generate()",
            "`model.generate` of transformers, greedy, the same weights and prompt.",
            table_of_generate(rows),
        ),
        (
            "Attention over the cache",
            "One new token, all that `attend` does for a layer, replayed from a CUDA graph (with `*`: plain calls), beside the "
            "bytes of K and V on a GPU over the bandwidth. The goal is that times 1.25, from batch 8 on times 1.15, plus 15 us.",
            table_of_cached_attention(rows),
        ),
        (
            "Throughput at a latency",
            "Requests of equal context that decode together; the largest batch within the latency is bold.",
            table_of_throughput(rows),
        ),
    ):
        if body:
            parts += [f"#### {title}\n\n{said}", body]
    names = ("part", "world_size", "seq_len", "batch", "who", "how")
    refused = {
        f"{', '.join(str(row[name]) for name in names if row.get(name) is not None)}: {row['refused']}": None
        for row in rows
        if "refused" in row
    }
    if refused:
        parts.append(f"Without a number (part, GPUs, context, batch): {'; '.join(refused)}.")
    return "\n\n".join(parts)


def server_rows(runs: list[Any]) -> list[Row]:
    """Return the rows of all runs of `bench server`, fewest GPUs first; of a server that several runs measured alike, the last."""
    naming = ("part", "model", "world_size", "context", "clients", "tokens", "prompt_lengths", "reuse", "latency_ms")

    def key(row: Row) -> str:
        return json.dumps([row["how"], values_of(row, naming)])

    for run in runs:
        machine = run["machine"]
        how = [machine.get("flags"), machine.get("dtype"), bool(machine.get("graphs"))]
        run["rows"] = [row | {"how": how} for row in run["rows"]]
    order = ("world_size", "context", "clients", "run")
    return sorted(latest(runs, key), key=lambda row: tuple(row.get(name) or 0 for name in order))


def server_told(machine: Row) -> str:
    """Return how a server was started."""
    if not machine.get("flags"):
        return f"{machine['model']}, by a server that does not say more"
    flags = ", ".join(f"{name} {value}" for name, value in machine["flags"].items())
    graphs = f"{machine['graphs']} CUDA graphs" if machine["graphs"] else "no CUDA graphs"
    return f"{machine['model']} ({machine['parameters'] / 1e9:.2f} billion parameters, {machine['dtype']}), {graphs}, {flags}"


def with_p95(name: str, form: str) -> Callable[[Row], str]:
    """Return a column of the median and the 95th percentile of a time."""
    return lambda row: f"{cell_of(row, f'{name}_ms', form)} / {cell_of(row, f'{name}_p95_ms', form)}"


def table_of_lone_requests(rows: list[Row]) -> str:
    """One request at a time."""
    return table_of(
        (row for row in rows if row["part"] == "alone" and "refused" not in row),
        {
            "GPUs": ("world_size", "{}"),
            "model": ("model", "{}"),
            "tokens of prompt": lambda row: f"{row['context']:,}{' again' if row.get('reuse') else ''}",
            "first token ms": with_p95("ttft", "{:,.1f}"),
            "ms per token": with_p95("tpot", "{:.2f}"),
            "p99 between tokens ms": ("gap_p99_ms", "{:.2f}"),
            "run": run_of,
        },
    )


def table_of_loads(rows: list[Row]) -> str:
    """Many clients at once."""
    return table_of(
        (row for row in rows if row["part"] == "load"),
        {
            "GPUs": ("world_size", "{}"),
            "model": ("model", "{}"),
            "clients": ("clients", "{}"),
            "tokens of prompts, new": lambda row: "{} to {}, {}".format(*row["prompt_lengths"], row["tokens"]),
            "requests/s": ("requests_per_s", "{:.2f}"),
            "tokens/s": ("tokens_per_s", "{:,.0f}"),
            "first token ms": with_p95("ttft", "{:,.1f}"),
            "ms per token": with_p95("tpot", "{:.2f}"),
            "failed": ("failed", "{}"),
            "run": run_of,
        },
    )


def table_of_held_latencies(rows: list[Row]) -> str:
    """Clients by their time per token; the largest number within the latency is bold."""
    return table_of(
        (row for row in rows if row["part"] == "latency"),
        {
            "GPUs": ("world_size", "{}"),
            "model": ("model", "{}"),
            "clients": lambda row: f"**{row['clients']}**" if row["largest"] else row["clients"],
            "ms per token, p95": ("tpot_p95_ms", "{:.2f}"),
            "tokens/s": ("tokens_per_s", "{:,.0f}"),
            "within the latency": lambda row: f"{'yes' if row['within'] else 'no'} ({row['latency_ms']:g} ms)",
            "run": run_of,
        },
    )


def serving() -> str:
    """The server, asked over HTTP."""
    runs = runs_of("server")
    rows = server_rows(runs)
    if not rows:
        return ""
    parts = [
        "### The server\n\nStreamed greedy answers over HTTP, from a client beside the server; median / 95th percentile. Prompts "
        "are random tokens, each one new. `launch/bench/server.py` has the definitions. m32 has the shape of Llama 3 8B, "
        "with 1.92 billion parameters four of its layers, and random weights, whose scores lie close together: in bfloat16 other "
        "batches, and prompts whose beginning is cached, round to other tokens; in float32 they do not.",
        *(
            f"Run {index + 1}, {server_told(run['machine'])}; {source(run['machine'])}"
            for index, run in enumerate(runs)
        ),
    ]
    compared = [
        f"{row['differ']} of {row['prompts']} differ among {row['clients']} (run {row['run'] + 1})"
        for row in rows
        if row["part"] == "check"
    ]
    if compared:
        parts.append(f"Answers beside others, compared with those alone, token by token: {'; '.join(compared)}.")
    for title, said, body in (
        ("One request at a time", "", table_of_lone_requests(rows)),
        (
            "Many clients",
            "Each client sends its next request as soon as it has its answer; times are of all answers, queue included.",
            table_of_loads(rows),
        ),
        (
            "Clients within a latency",
            "Bold: most clients, doubled from one, whose 95th percentile of the time per token is within the latency.",
            table_of_held_latencies(rows),
        ),
    ):
        if body:
            parts += [f"#### {title}" + (f"\n\n{said}" if said else ""), body]
    refused = [
        f"{row['context']:,} tokens of prompt: {row['refused']} (run {row['run'] + 1})"
        for row in rows
        if "refused" in row
    ]
    if refused:
        parts.append(f"Without a number: {'; '.join(refused)}.")
    return "\n\n".join(parts)


SECTIONS: tuple[Callable[[], str], ...] = (
    correctness,
    kernels,
    fa4,
    ring,
    memory,
    softmax,
    training,
    trainers,
    models,
    inference,
    serving,
)


def everything() -> list[str]:
    """All sections that have rows."""
    return [body for section in SECTIONS if (body := section())]


def wrapped(line: str) -> str:
    """Line of prose in lines of at most 140 characters; rows of tables and images stay whole."""
    whole = line.startswith(("|", "!"))
    return line if whole else textwrap.fill(line, 140, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """Return docs/results.md with all sections between its marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    sections = "\n".join(map(wrapped, "\n\n".join(everything()).splitlines()))
    return f"{before}{BEGIN}\n\n{sections}\n\n{END}{after}"


def main() -> int:
    """Rewrite or check the page; return the exit code."""
    if "--check" in sys.argv:
        return int(PAGE.read_text() != page() or not figures_are_true())
    draw_figures()
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
