"""Writes the README's result tables, and docs/kernels.svg, from the JSON rows in docs/results.

    python docs/results.py            rewrites the part of README.md between the two result marks, and the figure
    python docs/results.py --check    fails when README.md or the figure is not what the rows say

Owns the shape of the tables. Refuses to know how anything was measured: every file says that itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results: written by docs/results.py -->", "<!-- end of results -->"

Row = dict[str, Any]
FIGURE = "kernels.svg"
PROBLEM = ("mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "dtype", "window", "document")
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


def load(name: str) -> Any:
    """The content of a result file."""
    return json.loads((HERE / "results" / name).read_text())


def table(heads: list[str], rows: Iterable[list[object]]) -> str:
    """A markdown table."""
    lines = [heads, ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(machine: Row) -> str:
    """One line that says where numbers come from."""
    gpus = machine.get("gpus") or [machine.get("device")]
    return (
        f"{len(gpus)} x {gpus[0]}, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit'][:12]}: "
        f"`{machine['command']}`"
    )


def correctness() -> str:
    """Runs, and the worst error over budget, by dtype."""
    parts = []
    for name in ("check1.json", "check4.json"):
        found = load(name)
        rows = found["rows"]
        dtypes = sorted({row["dtype"] for row in rows})
        worst = {dtype: max(row["ratio"] for row in rows if row["dtype"] == dtype) for dtype in dtypes}
        counts = {dtype: sum(row["dtype"] == dtype for row in rows) for dtype in dtypes}
        green = sum(row["ratio"] <= 1 for row in rows)
        head = f"{green} of {len(rows)} runs are inside the budget ({source(found['machine'])}):"
        body = table(
            ["dtype", "runs", "worst error / budget"],
            ([dtype, counts[dtype], f"{worst[dtype]:.2f}"] for dtype in dtypes),
        )
        parts.append(f"{head}\n\n{body}")
    return "### Correctness\n\n" + "\n\n".join(parts)


def kernel_runs() -> list[Any]:
    """The content of every file of `bench kernels`, oldest first."""
    found = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("kernels*.json"))]
    return sorted(found, key=lambda one: one["machine"]["date"])


def kernel_rows(runs: list[Any]) -> list[Row]:
    """The rows of all runs; a problem that several runs measured is shown from the last one alone.

    Contenders are compared within one run only: they took turns there.
    """
    last: dict[tuple[Any, ...], list[Row]] = {}
    for index, run in enumerate(runs):
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in run["rows"]:
            key = (row["group"] == "carry", *(row.get(name) for name in PROBLEM))
            found.setdefault(key, []).append(row | {"run": index})
        last |= found
    return [row for rows in last.values() for row in rows]


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
    keys = ("head_dim", "mask", "window", "document", "batch", "seq_len", "heads", "kv_heads")
    problems = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    cells = {(tuple(row[key] for key in keys), row["direction"], row["who"]): row for row in rows}
    lines = []
    for problem in problems:
        d, mask, window, document, b, n, h, hk = problem
        kind = f"{mask} {window + 1}" if mask == "window" else f"{mask} of {document}" if document else mask
        cut = kind if mask in ("window", "documents") else mask
        pair = ([speed(cells.get((problem, way, who))) for way in ("forward", "backward")] for who in names)
        speeds = (" / ".join(one) if set(one) != {"-"} else "-" for one in pair)
        lines.append([d, cut, f"{b} x {n}", f"{h}" if h == hk else f"{h}/{hk}", *speeds])
    return table(["head_dim", "mask", "tokens", "heads", *(NAMES.get(who, who) for who in names)], lines)


def kernels_alone(rows: list[Row]) -> str:
    """Our kernel sets without autograd, on the problems of the target table."""
    rows = [row | {"level": "op"} for row in rows if row["level"] == "kernel" and "tflops" in row]
    return table_of_targets(rows) if rows else ""


def carries(rows: list[Row]) -> str:
    """What the carry costs, in words."""
    found = [row for row in rows if row["level"] == "carried" and "cost_percent" in row]
    return "; ".join(
        f"{row['who']}, {row['mask']}, {row['seq_len']} tokens, head_dim {row['head_dim']}: {row['cost_percent']:+.1f}%"
        for row in found
    )


def kernels() -> str:
    """TFLOP/s of the contenders."""
    runs = kernel_runs()
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
    if (HERE / FIGURE).exists():
        parts.append(f"![TFLOP/s over tokens, one line per implementation](docs/{FIGURE})")
    return "\n\n".join(parts)


def digest(rows: list[Row]) -> str:
    """What a figure was drawn from."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def figure_rows() -> list[Row]:
    """The rows a figure is drawn from."""
    return [row for row in kernel_rows(kernel_runs()) if row["group"] != "carry"]


def draw_figure() -> None:
    """Draws docs/kernels.svg, or removes it when no contender met two lengths."""
    sys.path.insert(0, str(HERE.parent))
    from ringattn.launch.figures import draw_lengths

    rows, path = figure_rows(), HERE / FIGURE
    if not draw_lengths(rows, path, f"rows {digest(rows)}"):
        path.unlink(missing_ok=True)


def figure_is_true() -> bool:
    """Whether docs/kernels.svg says that it was drawn from the committed rows; true too where there is none to draw."""
    rows, path = figure_rows(), HERE / FIGURE
    lengths: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if "tflops" in row and row["level"] == "op" and row["batch"] == 1 and row["heads"] == row["kv_heads"]:
            line = tuple(row[key] for key in ("who", "direction", "head_dim", "mask"))
            lengths.setdefault(line, set()).add(row["seq_len"])
    if not any(len(found) > 1 for found in lengths.values()):
        return not path.exists()
    return path.exists() and f"rows {digest(rows)}" in path.read_text()


def ring() -> str:
    """The ring as a share of the kernel alone."""
    found = load("ring.json")
    body = table(
        ["tokens per GPU", "heads", "forward TFLOP/s per GPU", "of the kernel alone", "forward + backward", "of alone"],
        (
            [
                row["tokens_per_rank"],
                f"{row['heads']}/{row['kv_heads']}",
                f"{row['forward_tflops']:.0f}",
                f"{row['forward_percent']:.0f}%",
                f"{row['both_tflops']:.0f}",
                f"{row['both_percent']:.0f}%",
            ]
            for row in found["rows"]
        ),
    )
    return (
        "### Ring\n\nCausal, zigzag, head_dim 128, bf16, NCCL; alone is one GPU with no ring at the same work. "
        "Kernels as picked by themselves (here the Hopper ones). What is lost was not profiled; likely "
        f"causes are host launches at few tokens, and NCCL's use of multiprocessors at many. "
        f"{source(found['machine'])}\n\n{body}\n\n![TFLOP/s per GPU over tokens per GPU](docs/results/ring.png)"
    )


def softmax() -> str:
    """Bandwidth of the online softmax as a share of a device copy."""
    rows = load("softmax.json")
    body = table(
        ["dtype", "row length", "online_softmax", "torch.softmax", "online backward", "torch backward"],
        (
            [
                row["dtype"],
                row["n"],
                *(
                    f"{100 * row[key]:.0f}%"
                    for key in (
                        "share_of_copy",
                        "torch_share_of_copy",
                        "backward_share_of_copy",
                        "torch_backward_share_of_copy",
                    )
                ),
            ]
            for row in rows
        ),
    )
    return (
        "### Online softmax\n\nBytes per second, counted as two reads and one write of every element, as a share of a device "
        f"copy in the same run; above 100% where the second read hits the cache. {source(rows[0])}\n\n{body}"
    )


def training() -> str:
    """Loss, speed and memory of the main job by number of GPUs."""
    found = load("train.json")
    runs = found["runs"]
    body = table(
        [
            "GPUs",
            "context",
            "loss at step 1",
            f"loss at step {runs[0]['last_step']}",
            "tokens/s",
            "peak memory",
            "commit",
        ],
        (
            [
                run["world_size"],
                run["seq_len"],
                f"{run['first_loss']:.4f}",
                f"{run['last_loss']:.4f}",
                f"{run['tokens_per_s']:,.0f}",
                f"{max(run['peak_memory_mib']) / 1024:.1f} GiB",
                run["commit"][:7],
            ]
            for run in runs
        ),
    )
    far = found["long"]
    return (
        "### Training\n\nThe main job with 135.6M replicated parameters (2 GiB of weights, gradients and optimizer state on "
        "every GPU; the rest is activations and falls with the number of GPUs). Tokens/s are of the whole ring, peak memory "
        f"is of the fullest GPU. {source(found['machine'])}\n\n{body}\n\nAt {far['seq_len']:,} tokens of context "
        f"{far['world_size']} GPUs make {far['tokens_per_s']:,.0f} tokens/s and need "
        f"{max(far['peak_memory_mib']) / 1024:.1f} GiB each "
        f"(`{far['command']}`)."
    )


SECTIONS: tuple[Callable[[], str], ...] = (correctness, kernels, ring, softmax, training)


def main() -> int:
    """Rewrites or checks the README; returns the exit code."""
    if "--check" not in sys.argv:
        draw_figure()
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n\n" + "\n\n".join(section() for section in SECTIONS) + f"\n\n{END}{after}"
    if "--check" in sys.argv:
        return int(text != wanted or not figure_is_true())
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
