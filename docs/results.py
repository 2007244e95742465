"""Writes the result tables and the figures they show from the JSON rows in docs/results.

    python docs/results.py            rewrites the tables between the result marks of docs/results.md, and the figures
    python docs/results.py --check    fails when one of them is not what the rows say

`TABLES` names every table: its files, the rows that it shows, and a format or a function per column. A table without rows
is left out. Every file of rows has the command that measured it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
from markdown_table import table

HERE = Path(__file__).parent
PAGE = HERE / "results.md"
BEGIN, END = "<!-- results: written by docs/results.py -->", "<!-- end of results -->"

Row = dict[str, Any]
Key = str | Callable[[Row], object]
Value = Callable[[list[Row]], object]


def runs_of(kind: str) -> list[Any]:
    """Return the content of every file of one bench, oldest first.

    Raises:
        SystemExit: A file was not written by a bench; the message names it.
    """
    found = []
    for path in sorted((HERE / "results").glob(f"{kind}*.json")):
        try:
            run = json.loads(path.read_text())
        except ValueError as error:
            run = error
        if not (isinstance(run, dict) and "rows" in run and "date" in (run.get("machine") or {})):
            raise SystemExit(
                f"error: docs/results/{path.name} must be what a bench wrote, got no rows, machine and date; remove it, or "
                "copy it again from where it was made"
            )
        found.append(run)
    return sorted(found, key=lambda one: one["machine"]["date"])


def source(machine: Row) -> str:
    """Return the machine, versions, commit and command of a run as one line."""
    gpus = machine.get("gpus") or [machine.get("device")]
    commit = re.sub(r"(?<=\w{12})\w+", "", machine["commit"] or "")
    version = f"commit {commit}" if commit else f"ringattn {machine['ringattn']}"
    flags = ", ".join(f"{name} {value}" for name, value in (machine.get("flags") or {}).items())
    server = f"; the server: {machine.get('parameters', 0) / 1e9:.2f} billion parameters, {flags}" if flags else ""
    return (
        f"{len(gpus)} x {gpus[0]}, torch {machine['torch']}, triton {machine['triton']}, {version}: "
        f"`{machine['command']}`{server}"
    )


def latest(runs: list[Any], names: tuple[str, ...]) -> list[Row]:
    """Return the rows of all runs with fields of their machine; of rows equal in `names` only those of the last run.

    Contenders are compared within one run only: they took turns there.
    """
    last: dict[str, list[Row]] = {}
    for index, run in enumerate(runs):
        machine, found = run["machine"], defaultdict(list)
        gpus = machine.get("gpus") or [machine.get("device")]
        asked = re.search(r"--(?:schedule|impl) (\w+)", machine["command"])
        own = {"run": index + 1, "gpus": len(gpus), "gpu": re.sub(r"NVIDIA (\w+).*", r"\1", str(gpus[0]))}
        own["asked"] = asked[1] if asked else "auto"
        for row in run["rows"]:
            one = row | own | {"devices": 1 if row.get("who") == "transformers" else row.get("world_size")}
            found[json.dumps([one.get(name) for name in names])].append(one)
        last |= found
    return [row for rows in last.values() for row in rows]


@dataclass(frozen=True)
class Across:
    """Columns that stand beside each other, one per contender that has a row.

    Args:
        cell: Returns the text of one contender's rows of a line.
        of: Returns the contender of a row.
        names: Contenders in the order they are shown, with their names; others follow.
    """

    cell: Callable[[list[Row]], str]
    of: Callable[[Row], str] = lambda row: row["who"]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Args:
        title: Its heading.
        text: The paragraph below the heading.
        files: Beginning of the names of its files.
        alike: Fields of a problem; a problem is shown from the last run that measured it.
        key: Columns that name a line: a format, or a function of a row. Rows with equal texts make one line.
        values: Columns of a line's rows.
        where: Chooses rows.
        order: Fields by which lines are sorted; by their first row if empty.
        across: Contenders beside each other.
        figure: File of the figure below the table.
    """

    title: str
    text: str
    files: str
    alike: tuple[str, ...]
    key: dict[str, Key]
    values: dict[str, Value] = field(default_factory=dict)
    where: Callable[[Row], bool] = lambda _: True
    order: tuple[str, ...] = ()
    across: Across | None = None
    figure: str = ""

    def rows(self) -> list[Row]:
        """Return the rows of the table, refused ones included."""
        rows = [row for row in latest(runs_of(self.files), self.alike) if self.where(row)]
        return sorted(rows, key=lambda row: [row.get(name) or 0 for name in self.order])

    def lines(self, rows: list[Row]) -> Iterator[list[str]]:
        """Yield the head and the lines."""
        names: dict[str, str] = {}
        if self.across is not None:
            there = {self.across.of(row) for row in rows}
            known = {who: name for who, name in self.across.names.items() if who in there}
            names = known | {who: who for who in sorted(there - set(known))}
        yield [*self.key, *self.values, *names.values()]
        found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            found[
                tuple(one.format(**row) if isinstance(one, str) else str(one(row)) for one in self.key.values())
            ].append(row)
        for key, some in found.items():
            line = [*key, *(str(value(some)) for value in self.values.values())]
            for who in names:
                assert self.across is not None, "it gave the names"
                mine = [row for row in some if self.across.of(row) == who]
                line.append(self.across.cell(mine) if mine else "-")
            yield line

    def markdown(self) -> str:
        """Return the section; empty without rows."""
        rows, runs = self.rows(), runs_of(self.files)
        shown = [row for row in rows if "refused" not in row]
        if not shown:
            return ""
        head, *lines = self.lines(shown)
        parts = [f"### {self.title}", self.text]
        parts.append(table(head, lines))
        refused = {
            textwrap.shorten(f"{row['who']}, {row['seq_len']:,} tokens: {row['refused']}", 110): None
            for row in rows
            if "refused" in row and "who" in row
        }
        if refused:
            parts.append(f"Without a number: {'; '.join(refused)}.")
        if (HERE / self.figure).is_file():
            parts.append(f"![{self.title}: a line per contender]({self.figure})")
        used = sorted({row["run"] for row in shown})
        return "\n\n".join([*parts, *(f"Run {number}: {source(runs[number - 1]['machine'])}" for number in used)])


def number(name: str, form: str, **where: object) -> Callable[[list[Row]], str]:
    """Return a column: the field of the first row of a line that has it; a dash where none has."""

    def cell(rows: list[Row]) -> str:
        fits = (row for row in rows if all(row.get(key) == value for key, value in where.items()))
        value = next((row[name] for row in fits if row.get(name) is not None), None)
        return "-" if value is None else form.format(value)

    return cell


def one(row: Row, name: str, form: str) -> str:
    """Return a number of a row; a dash where there is none."""
    return number(name, form)([row])


def pair(name: str, form: str) -> Value:
    """Return a column: the median / 95th percentile of a time."""
    return lambda rows: f"{number(f'{name}_ms', form)(rows)} / {number(f'{name}_p95_ms', form)(rows)}"


def speeds(rows: list[Row]) -> str:
    """Return TFLOP/s forward / backward, with a star where the host was timed too."""
    cells = {row["direction"]: f"{row['tflops']:.0f}{'' if row['timing'] == 'graph' else '*'}" for row in rows}
    return f"{cells.get('forward', '-')} / {cells.get('backward', '-')}"


def shares(rows: list[Row]) -> str:
    """Return TFLOP/s per GPU and the share of the kernel alone, forward / forward + backward."""
    return " / ".join(
        f"{rows[-1][f'{way}_tflops']:.0f} ({rows[-1][f'{way}_percent']:.0f}%)" for way in ("forward", "both")
    )


def masked(row: Row) -> str:
    """Return the mask with its size."""
    sizes = {"window": "window {}".format(row["window"] + 1)}
    if row.get("document"):
        sizes |= {"documents": f"documents of {row['document']}", "varlen": f"documents of up to {row['document']}"}
    mask: str = row["mask"]
    return sizes.get(mask, mask)


def inside(rows: list[Row]) -> str:
    """Return how many runs are inside the budget."""
    return f"{sum(row['ratio'] <= 1 for row in rows)} of {len(rows)}"


def worst(dtype: str) -> Value:
    """Return a column: the largest error over the budget, and the number of runs, of one dtype."""

    def cell(rows: list[Row]) -> str:
        ratios = [row["ratio"] for row in rows if row["dtype"] == dtype]
        return f"{max(ratios):.2f} ({len(ratios)})" if ratios else "-"

    return cell


def has_speed(row: Row) -> bool:
    """Return whether a row of `bench kernels` is of a whole call, and has a speed."""
    return row["level"] == "op" and "tflops" in row


PROBLEM = (
    "group", "mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "window", "document",
)  # fmt: skip
RING_PROBLEM = ("world_size", "mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "dtype", "window")
MODEL = ("world_size", "seq_len", "layers", "batch")
KERNELS: dict[str, Key] = {
    "head_dim": lambda row: f"{row['head_dim']}/{row['v_head_dim']}" if row.get("v_head_dim") else row["head_dim"],
    "mask": masked,
    "tokens": "{batch} x {seq_len}",
    "heads": "{heads}/{kv_heads}",
}
TRAINERS = {
    "sdpa": "Trainer, sdpa",
    "flash": "Trainer, torch's flash kernel",
    "ringattn": "Trainer, ringattn",
    "ring_trainer": "RingTrainer, ringattn",
}
TABLES = (
    Table(
        "Correctness",
        "Cases of `check` whose every tensor is inside its error budget, and the largest error over the budget (number of"
        " cases).",
        "check",
        ("run",),
        {"run": "{run}", "GPUs": "{gpus}", "schedule or kernels": "{asked}"},
        {"inside the budget": inside, **{f"worst, {dtype}": worst(dtype) for dtype in ("bf16", "fp16", "fp32")}},
    ),
    Table(
        "Kernels",
        "TFLOP/s, forward / backward, bf16, visible pairs only (4 b h d pairs, backward 2.5 times that), all contenders "
        "of a problem taking turns in one run as CUDA graphs. With a star: plain calls, launches on the host included.",
        "kernels",
        PROBLEM,
        KERNELS,
        where=lambda row: row["group"] == "target" and has_speed(row),
        order=("head_dim",),
        across=Across(speeds, names=figures.NAMES),
        figure="kernels.svg",
    ),
    Table(
        "Kernels beside FlashAttention-4",
        "As above. FlashAttention-4 is 4.0.0b36 on nvidia-cutlass-dsl 4.8.1. The H200s were the two of one host, which "
        "ran at the same time.",
        "fa4",
        (*PROBLEM, "gpu"),
        KERNELS,
        where=lambda row: row["who"] in ("hopper", "fa4") and has_speed(row),
        across=Across(
            speeds,
            lambda row: f"{row['who']}, {row['gpu']}",
            {f"{who}, {gpu}": f"{figures.NAMES[who]}, {gpu}" for gpu in ("H200", "H100") for who in ("hopper", "fa4")},
        ),
    ),
    Table(
        "Kernels beside rivals of today",
        "As above, all contenders in turns, two head_dims at a time on the two H200s of one host. FlashAttention-4 and "
        'nvidia-cutlass-dsl as above; FlexAttention of torch 2.11 on Triton and, with `BACKEND="FLASH"`, on this '
        "FlashAttention-4.",
        "rivals",
        PROBLEM,
        KERNELS,
        where=has_speed,
        order=("head_dim",),
        across=Across(speeds, names=figures.NAMES),
    ),
    Table(
        "Masks of several intervals and of blocks",
        "As above; our kernel alone beside FlexAttention on Triton, by plain calls. [The masks](commands.md#bench-kernels).",
        "kernels-unions",
        PROBLEM,
        KERNELS,
        where=lambda row: "tflops" in row,
        across=Across(speeds, names=figures.NAMES),
    ),
    Table(
        "Ring",
        "Forward / forward + backward, TFLOP/s per GPU over visible pairs. In brackets the share of the kernel alone: our"
        " own ring of one rank on the same GPUs, with a rank's share of the work, taking turns in the same run. Every "
        'answer is checked before its time counts. "documents of up to" are drawn from MagiAttention\'s table of lengths.',
        "ring",
        RING_PROBLEM,
        {
            "GPUs": "{world_size}",
            "mask": masked,
            "layout": "{layout}",
            "heads": "{heads}/{kv_heads}",
            "tokens per GPU": "{tokens_per_rank}",
            "run": "{run}",
        },
        {"kernel alone": lambda rows: f"{rows[0]['forward_alone_tflops']:.0f} / {rows[0]['both_alone_tflops']:.0f}"},
        where=lambda row: row["world_size"] > 1,
        order=("world_size", "mask", "kv_heads", "seq_len"),
        across=Across(shares, names=figures.RING_NAMES),
        figure="ring-speed.svg",
    ),
    Table(
        "Training",
        "The training job. Tokens/s are of all GPUs together, the median of the steps; memory is of the fullest GPU; [the"
        " page on training](training.md) defines MFU and exposed communication.",
        "train",
        ("seq_len", "world_size", "parameters"),
        {
            "GPUs": "{world_size}",
            "context": "{seq_len:,}",
            "parameters": "{parameters:,}",
            "loss, first and last step": lambda row: f"{row['losses'][0]:.4f}, {row['losses'][-1]:.4f}",
            "tokens/s": "{tokens_per_s:,.0f}",
            "MFU": lambda row: one(row, "mfu", "{:.1%}"),
            "exposed ms": lambda row: one(row, "exposed_ms", "{:.1f}"),
            "GiB per GPU": lambda row: f"{max(row['peak_memory_mib']) / 1024:.1f}",
            "run": "{run}",
        },
        order=("seq_len", "world_size", "parameters"),
    ),
    Table(
        "Trainer of transformers",
        "One GPU, one sequence per step, a model of 8 layers with the widths of Llama 3 8B, random weights in bf16, AdamW, "
        "blocks checkpointed. Median of the steps; loss and gradient norm of the first step equal those with sdpa.",
        "hf-trainer",
        ("seq_len", "who"),
        {
            "context": "{seq_len:,}",
            "layers": "{layers}",
            "trainer, attention": lambda row: TRAINERS[row["who"]],
            "seconds per step": "{step_s:.3f}",
            "tokens/s": "{tokens_per_s:,.0f}",
            "over sdpa": "{ratio:.2f}",
            "MFU": "{mfu_percent:.1f}%",
            "GiB": "{peak_gib:.1f}",
        },
    ),
    Table(
        "Whole models",
        "Training steps of a model with the shape of Llama 3 8B cut to the given number of layers, random weights, FSDP2,"
        " AdamW, blocks checkpointed; `ringattn` saves the output of attention, the others recompute it. MFU does not "
        "count recomputation; the peak is 989 TFLOP/s.",
        "model",
        ("world_size", "seq_len", "layers"),
        {
            "GPUs": "{world_size}",
            "context": "{seq_len:,}",
            "layers": "{layers}",
            "attention": lambda row: figures.RING_NAMES.get(row["who"], row["who"]),
            "seconds per step": "{step_s:.2f}",
            "tokens/s per GPU": "{tokens_per_s_per_gpu:,.0f}",
            "MFU": "{mfu_percent:.1f}%",
            "GiB per GPU": "{peak_gib:.1f}",
            "run": "{run}",
        },
        order=("world_size", "seq_len", "layers"),
        figure="model.svg",
    ),
    Table(
        "Inference",
        "A model with the shape of Llama 3 8B, cut to the given number of layers, random weights, with a KV cache that is"
        " sharded over the GPUs; `transformers` is its own cache with sdpa on one GPU. A first token is on every host "
        "after its prompt, a token before the next one begins. The bound is the bytes of weights, keys and values on a "
        "GPU over the bandwidth.",
        "inference",
        (*MODEL, "part", "kv_dtype", "who", "how"),
        {
            "library": "{who}",
            "GPUs": "{devices}",
            "context": "{seq_len:,}",
            "layers": "{layers}",
            "K/V": "{kv_dtype}",
            "batch": "{batch}",
        },
        {
            "first token s": number("ttft_s", "{:.2f}"),
            "ms per token, plain": lambda rows: number("ms_per_token", "{:.2f}")(
                [row for row in rows if row.get("how") != "graph"]
            ),
            "ms per token, CUDA graph": number("ms_per_token", "{:.2f}", how="graph"),
            "bytes / bandwidth ms": number("bound_ms", "{:.2f}", how="graph"),
            "tokens/s": number("tokens_per_s", "{:,.1f}", how="graph"),
            "runs": lambda rows: ", ".join(map(str, sorted({row["run"] for row in rows}))),
        },
        where=lambda row: (
            row["part"] in ("first", "token") or (row["part"], row.get("who")) == ("generate", "transformers")
        ),
        order=("seq_len", "layers", "batch", "devices"),
    ),
    Table(
        "The server",
        "Streamed greedy answers over HTTP, from a client beside the server, to random prompts; median / 95th percentile,"
        " queue included. `launch/bench/server.py` has the definitions. m32 has the shape of Llama 3 8B, with 1.92 "
        "billion parameters four of its layers.",
        "server",
        ("part", "model", "world_size", "context", "clients", "tokens", "prompt_lengths", "reuse"),
        {
            "GPUs": "{world_size}",
            "model": "{model}",
            "clients": "{clients}",
            "tokens of prompts": lambda row: (
                "{} to {}".format(*row["prompt_lengths"])
                if row.get("prompt_lengths")
                else f"{row['context']:,}{' again' if row.get('reuse') else ''}"
            ),
            "tokens of answers": "{tokens}",
            "run": "{run}",
        },
        {
            "first token ms": pair("ttft", "{:,.1f}"),
            "ms per token": pair("tpot", "{:.2f}"),
            "tokens/s": number("tokens_per_s", "{:,.0f}"),
            "failed": number("failed", "{}"),
        },
        where=lambda row: row["part"] in ("alone", "load"),
        order=("world_size", "part", "context", "clients"),
    ),
)


def digest(rows: list[Row]) -> str:
    """Return a digest of the rows of a figure."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def all_figures() -> Iterator[tuple[str, Callable[..., bool], list[Row], bool]]:
    """Yield every figure: its file, the function that draws it, its rows, and whether they give a line."""
    rows = [row for row in latest(runs_of("kernels"), PROBLEM) if row["group"] not in ("carry", "softmax", "unions")]
    yield "kernels.svg", figures.draw_lengths, rows, bool(figures.lines_over_length(rows))
    rows = latest(runs_of("ring"), RING_PROBLEM)
    rows = [row for row in rows if row["world_size"] == max(row["world_size"] for row in rows)]
    yield "ring-speed.svg", figures.draw_ring, rows, bool(figures.ring_lines(rows))
    rows = latest(runs_of("model"), ("world_size", "seq_len", "layers"))
    yield "model.svg", figures.draw_model, rows, bool(figures.model_lines(rows))


def draw_figures() -> None:
    """Draws every figure, or removes it when there is no line to draw."""
    for name, draw, rows, any_line in all_figures():
        if not any_line or not draw(rows, HERE / name, f"rows {digest(rows)}"):
            (HERE / name).unlink(missing_ok=True)


def figures_are_true() -> bool:
    """Return whether every figure says that it was drawn from the committed rows; true too where there is none to draw."""
    for name, _, rows, any_line in all_figures():
        path = HERE / name
        if path.exists() != any_line or (any_line and f"rows {digest(rows)}" not in path.read_text()):
            return False
    return True


def wrapped(line: str) -> str:
    """Line of prose in lines of at most 140 characters; rows of tables and images stay whole."""
    whole = line.startswith(("|", "!"))
    return line if whole else textwrap.fill(line, 140, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """Return docs/results.md with all tables between its marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    sections = "\n\n".join(filter(None, (one.markdown() for one in TABLES)))
    return f"{before}{BEGIN}\n\n" + "\n".join(map(wrapped, sections.splitlines())) + f"\n\n{END}{after}"


def main() -> int:
    """Rewrite or check the page; return the exit code."""
    if "--check" in sys.argv:
        return int(PAGE.read_text() != page() or not figures_are_true())
    draw_figures()
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
