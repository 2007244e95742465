"""Writes the README's result tables from the JSON rows in docs/results.

    python docs/results.py            rewrites the part of README.md between the two result marks
    python docs/results.py --check    fails when README.md is not what the rows say

Owns the shape of the tables. Refuses to know how anything was measured: every file says that itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results: written by docs/results.py -->", "<!-- end of results -->"

Row = dict[str, Any]


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


def kernels() -> str:
    """TFLOP/s of the contenders, forward / backward."""
    found = load("kernels.json")
    rows = found["rows"]
    names = {"ours": "ringattn portable", "flex": "FlexAttention", "cudnn": "cuDNN", "fa2": "FlashAttention-2"}
    keys = ("head_dim", "mask", "seq_len", "heads", "kv_heads")
    problems = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    cells = {(tuple(row[key] for key in keys), row["who"]): row for row in rows}

    def speed(problem: tuple[Any, ...], who: str) -> str:
        row = cells.get((problem, who))
        if row is None or "forward_tflops" not in row:
            return "-"
        return f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}"

    body = table(
        ["head_dim", "mask", "tokens", "heads", *names.values()],
        (
            [d, mask, n, f"{h}" if h == hk else f"{h}/{hk}", *(speed((d, mask, n, h, hk), who) for who in names)]
            for d, mask, n, h, hk in problems
        ),
    )
    return (
        "### Kernels\n\nTFLOP/s forward / backward, bf16, visible pairs only (4 b h d pairs, backward 2.5 times that), all "
        "contenders taking turns in one run. Whole calls are timed. That our short "
        f"ones (windows, documents) are held up by launches on the host is likely, but was not profiled. "
        f"{source(found['machine'])}\n\n{body}"
    )


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
        "### Ring\n\nCausal, zigzag, head_dim 128, bf16, NCCL; alone is one GPU with no ring at the same work. Measured "
        "with skewed 128x64 forward tiles, which were given up for 128x128 afterwards. What is lost was not profiled; likely "
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
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n\n" + "\n\n".join(section() for section in SECTIONS) + f"\n\n{END}{after}"
    if "--check" in sys.argv:
        return int(text != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
