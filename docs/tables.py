"""Writes the computed tables of the documentation into its pages.

    python docs/tables.py    rewrites what stands between `<!-- table: name -->` and `<!-- end of table -->`

Work and rows are counted by the plan; the registry answers which kernels support a call. Measured tables are written by results.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from markdown_table import table

from ringattn.kernels import registry
from ringattn.kernels.attention.torch_ops import operators
from ringattn.plan.layouts import make_shards
from ringattn.plan.mask import short_mask
from ringattn.plan.ring_plan import make_plan, moved_rows

HERE = Path(__file__).parent
MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end of table -->", re.DOTALL)
SEQ_LEN, WORLD_SIZE = 65536, 4
PACKED = (0, 28000, 30400, 32400, 35600, 52000, 58000, 58800, SEQ_LEN)


def work() -> str:
    """Work of the busiest rank over the mean, and rows that it receives, by mask and layout."""
    masks = {
        "none": {},
        "`causal=True`": {"causal": True},
        "`causal=True, window=4096`": {"causal": True, "window": (4095, 0)},
        "`window=(2048, 2048)`": {"window": (2048, 2048)},
        "`causal=True`, documents": {"causal": True, "documents": PACKED},
        "`causal=True, window=4096`, documents": {"causal": True, "window": (4095, 0), "documents": PACKED},
        "`causal=True, prefix_len=16384`": {"causal": True, "prefix_len": 16384},
        "`causal=True, chunk_len=8192`": {"causal": True, "chunk_len": 8192},
    }
    layouts, rows = ("contiguous", "striped", "zigzag", "balanced"), []
    for said, fields in masks.items():
        mask = short_mask(SEQ_LEN, **fields)
        cells: list[object] = [said]
        for layout in layouts:
            shards = make_shards(layout, SEQ_LEN, WORLD_SIZE, mask)
            plan = make_plan(shards, shards, mask, "keys")
            pairs = [
                sum(ring_step.pairs for ring_step in part.ring_steps if ring_step is not None) for part in plan.ranks
            ]
            cells.append(f"{max(pairs) * WORLD_SIZE / sum(pairs):.2f}, {moved_rows(plan):,}")
        rows.append(cells)
    return table(["mask", *layouts], rows)


def _torch_available(
    device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, *, deterministic: bool
) -> tuple[tuple[str, ...], str]:
    """Return the answer of torch 2.11 on an H200, under deterministic algorithms."""
    del device, dtype, deterministic
    widest = max(head_dim, v_head_dim)
    served = head_dim % 8 == v_head_dim % 8 == 0 and widest <= 256
    return (("flash",) if head_dim == v_head_dim else ("cudnn",), "") if served else ((), "torch refuses this head_dim")


def _answers(
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, v_head_dim: int | None = None, feature: str | None = None
) -> dict[str, str]:
    """Return whether each kernel set supports a call on the GPU that suits it."""
    found = {}
    fitting = SimpleNamespace(__version__=f"{registry.HOPPER_TRITON[0]}.0")
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        patch.object(importlib.util, "find_spec", return_value=fitting),
        patch.object(operators, "available", _torch_available),
        patch.object(importlib, "import_module", return_value=MagicMock(**vars(fitting))),
    ):
        for name in ("hopper", "torch", "portable", "eager"):
            features = () if feature is None else (feature,)
            try:
                registry.select_kernels(
                    torch.device("cuda"), dtype, head_dim, v_head_dim or head_dim, impl=name, features=features
                )
                found[name] = "yes"
            except NotImplementedError:
                found[name] = "-"
    return found


def kernels() -> str:
    """Dtypes, head dims and options by kernel set."""
    asked: dict[str, dict[str, str]] = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        asked[str(dtype).removeprefix("torch.")] = _answers(dtype=dtype)
    for head_dim in (8, 16, 40, 64, 100, 128, 192, 256, 320):
        asked[f"head_dim {head_dim}"] = _answers(head_dim=head_dim)
    asked["head_dim 192, of the values 128"] = _answers(head_dim=192, v_head_dim=128)
    words = {
        "prefill": "prefill of a KV cache",
        "per_batch_bounds": "`lengths` per batch element",
        "terms": "masks of several intervals",
        "block_pattern": "`masks.blocks`",
        "alibi": "`alibi_slopes`",
        "dropout": "`dropout_p`",
    }
    for feature in sorted(registry.FEATURES):
        asked[words.get(feature, f"`{feature}`")] = _answers(feature=feature)
    return table(
        ["", "hopper", "torch", "portable", "eager"], ([said, *found.values()] for said, found in asked.items())
    )


def moved() -> str:
    """Bytes that a rank receives per token of its shard, forward and backward, by the formulas of the page."""
    rows: list[list[object]] = []
    e, wide, d = 2, 4, 128
    for h, hk in ((32, 32), (32, 8), (64, 8)):
        for w in (2, 4, 8, 16):
            keys, queries = e * hk * 2 * d, e * h * 2 * d
            back_keys = (w - 1) * (keys + wide * hk * 2 * d)
            back_queries = (w - 1) * (queries + wide * h * (d + 2))
            ulysses = (w - 1) * (keys + queries) / w
            cells = [(w - 1) * keys, min(back_keys, back_queries), ulysses, ulysses]
            fits = hk % w == 0
            said = [f"{cell / 1024:,.0f}" for cell in cells]
            rows.append([f"{h}/{hk}", w, *said[:2], *(said[2:] if fits else ["needs copies of keys"] * 2)])
    return table(
        [
            "heads", "ranks", "ring or all-gather, forward KiB", "backward KiB", "all-to-all, forward KiB",
            "backward KiB",
        ],
        rows,
    )  # fmt: skip


def models() -> str:
    """Models by what people run them with: works, or refused, from the rows that the tests run."""
    with patch.object(sys, "path", [str(HERE.parent), *sys.path]):
        rows = importlib.import_module("tests.integrations.model_table").all_rows()
    lines: list[list[object]] = []
    for row in sorted(rows, key=lambda row: row.stack):
        verdict = "refused" if row.refusal else "works"
        lines.append(
            [row.model, f"`{row.stack}`", verdict + (f" by `{row.upstream}`" if row.upstream else ""), row.advice]
        )
    return table(["my model", "run with", "", "do this"], lines)


def families() -> str:
    """Verdicts on the causal families of transformers, as `families.py` has found them."""
    found = json.loads((HERE / "results" / "families.json").read_text())
    by_text, untried, rows = list[str](), list[list[object]](), dict[str, dict[str, str]]()
    for kind, verdicts in found["families"].items():
        reason = next((x for x in verdicts.values() if x.startswith("not tried: ")), "").partition(": ")[2]
        text = reason.partition("see its text model ")[2]
        if text:
            by_text.append(f"`{kind}` ({'not in the table' if text not in found['families'] else f'`{text}`'})")
        elif reason:
            untried.append([f"`{kind}`", reason])
        else:
            rows[kind] = verdicts
    heads = ["family", "plain", "padded", "packed", "the error says"]
    return (
        f"With transformers {found['transformers']}. Listed by the text model: {', '.join(by_text)}.\n\n"
        f"{table(heads, _verdicts(rows))}\n\nNot tried, as the model alone does not run on text in this way:\n\n"
        f"{table(['family', 'one process says'], untried)}"
    )


def _verdicts(found: dict[str, dict[str, str]]) -> Iterable[list[object]]:
    for kind, verdicts in found.items():
        reasons = {verdict.partition(": ")[2] for verdict in verdicts.values()} - {""}
        yield [f"`{kind}`", *(verdict.partition(":")[0] for verdict in verdicts.values()), "; ".join(sorted(reasons))]


def latent_families() -> str:
    """Verdicts on models with latent attention, as `families.py` has found them."""
    found = json.loads((HERE / "results" / "families.json").read_text())
    heads = [
        "family",
        "trains on 1 rank",
        "2",
        "3",
        "generates: greedy",
        "batch",
        "padded",
        "assisted",
        "the error says",
    ]
    return f"With transformers {found['transformers']}:\n\n{table(heads, _verdicts(found['latent']))}"


TABLES = {
    "work": work,
    "kernels": kernels,
    "moved": moved,
    "models": models,
    "families": families,
    "latent_families": latent_families,
}


def fill(page: str) -> str:
    """Return a page with its tables computed again."""
    return MARKED.sub(lambda at: f"<!-- table: {at[1]} -->\n\n{TABLES[at[1]]()}\n\n<!-- end of table -->", page)


def pages() -> list[Path]:
    """Return the pages with tables of this script."""
    found = (path for path in sorted(HERE.glob("*.md")) if "<!-- end of table -->" in path.read_text())
    return [path for path in found if path.name != "online_softmax.md"]


if __name__ == "__main__":
    for path in pages():
        path.write_text(fill(path.read_text()))
