"""Rows of results: kept on disk as they come, printed as they come and as a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ringattn.launch.common.session import Keep, Session, table

_ANSWERS = "ttft_ms ttft_p95_ms tpot_ms tpot_p95_ms gap_p95_ms gap_p99_ms failed cached_tokens client_busy_percent"
_LOADS = f"answers requests_per_s tokens_per_s {_ANSWERS}"
_DECODED = "world_size seq_len layers batch how ms_per_token"
_TOKENS = f"{_DECODED} worst_ms tokens_per_s bound_ms ratio"
_DIRECTIONS = " ".join(
    f"{way}_{name}"
    for way in ("forward", "both")
    for name in ("ms", "tflops", "percent", "exposed_ms", "host_us", "graph_ms", "graph_percent")
)
_COLUMNS: dict[str, str] = {
    "ring": f"world_size layout mask tokens_per_rank heads kv_heads who {_DIRECTIONS} backward_ms peak_gib",
    "host": "world_size layout mask tokens_per_rank heads kv_heads who inference_us forward_us both_us both_in_one_thread_us "
    "layer_us layer_in_one_thread_us",
    "latent: training": "world_size shape tokens_per_rank schedule who forward_ms both_ms peak_gib",
    "latent: decode": "world_size shape tokens layers cache_gib eager_ms_per_layer graph_ms_per_layer gbps share tflops",
    "model": "world_size seq_len layers who recompute mlp_rows offload step_s tokens_per_s_per_gpu model_tflops_per_gpu "
    "mfu_percent peak_gib saved_gib host_gib",
    "model: copies": "world_size out_gbps back_gbps",
    "trainer": "seq_len who steps step_s tokens_per_s ratio overhead mfu_percent peak_gib",
    "kernels": "group direction mask batch seq_len heads kv_heads head_dim v_head_dim dtype who level timing ms tflops ratio",
    "kernels: softmax": "dtype n copy_gbps ours_gbps torch_gbps lse_gbps ours_backward_gbps torch_backward_gbps share_of_copy",
    "kernels: log_probs": "n vocab who both_ms peak_gib ratio",
    "kernels: latent": "pages batch seq_len heads who kernels splits ms merged_ms gbps share tflops ratio",
    "inference: bandwidth": "who read_gbps",
    "inference: prefill": "world_size seq_len who chunk ms tflops percent_of_training",
    "inference: attention": "world_size seq_len batch how us_per_layer bound_us ratio ratio_with_15us goal_us goal_met "
    "calls_us_per_layer host_us_per_layer",
    "inference: first": "world_size seq_len layers chunk ttft_s tokens_per_s tflops mfu_percent peak_gib weights_gib "
    "gathered_gib cache_gib device_gib load_s",
    "inference: token": _TOKENS,
    "inference: written": _TOKENS,
    "inference: throughput": f"{_DECODED} tokens_per_s latency_ms within largest",
    "inference: generate": "world_size seq_len layers who batch ttft_s ms_per_token worst_ms",
    "server: check": "prompts clients differ failed cached_tokens",
    "server: alone": f"context answers {_ANSWERS} prompt_tokens_per_s",
    "server: load": f"clients {_LOADS}",
    "server: latency": f"clients latency_ms within largest {_LOADS}",
}
"""Columns of the table of each kind of row."""


@dataclass(frozen=True)
class BenchFlags:
    """Flags of every bench that runs on a device of its own.

    Attributes:
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")


def _kind(row: dict[str, Any]) -> str:
    return f"{row['bench']}: {row['part']}" if "part" in row else row["bench"]


def _cell(name: str, value: object) -> str:
    """Return a value as text: percents without decimals, other numbers with four digits.

    Example:
        >>> _cell("forward_percent", 34.25), _cell("tokens_per_s", 31364.2), _cell("ms", 4.74321), _cell("heads", 32)
        ('34%', '31364', '4.743', '32')
    """
    if "percent" in name:
        return f"{value:.0f}%"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def describe_row(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    names = [name for name in _COLUMNS[_kind(row)].split() if row.get(name) is not None]
    cells = [f"{name.replace('_', ' ')} {_cell(name, row[name])}" for name in names if name != "who"]
    who = [str(row["who"])] if "who" in row else []
    return ", ".join([*(_kind(row).split(": ")[1:]), *who, *cells, *([row["refused"]] if "refused" in row else [])])


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each kind of row, and below it the reasons for missing speeds and graphs."""
    for kind in dict.fromkeys(map(_kind, rows)):
        some = [row for row in rows if _kind(row) == kind]
        columns = [name for name in _COLUMNS[kind].split() if any(row.get(name) is not None for row in some)]
        cells = [[None if row.get(name) is None else _cell(name, row[name]) for name in columns] for row in some]
        table(f"bench {kind}", [name.replace("_", " ") for name in columns], cells)
    reasons: dict[str, int] = {}
    for row in rows:
        for name in ("refused", "forward_graph_refused", "both_graph_refused", "graph_refused", "note"):
            if row.get(name):
                line = f"{row.get('who', _kind(row))}, {name.replace('_', ' ')}: {row[name]}"
                reasons[line] = reasons.get(line, 0) + 1
    for line, count in reasons.items():
        print(f"{line} ({count} x)")


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the reasons to fail: each wrong answer of ours, or all reasons where nothing of ours was timed; failed requests.

    Example:
        >>> rows = [{"who": who, "ours": True, "refused": "no memory"} for who in ("auto", "stepwise")]
        >>> failures(rows[:1]), failures([*rows, {"who": "fused", "ours": True, "refused": "wrong answer: o"}])
        (['auto: no memory'], ['auto: no memory', 'stepwise: no memory', 'fused: wrong answer: o'])
        >>> failures([rows[0], {"who": "stepwise", "ours": True, "forward_ms": 1.0}])
        []
    """
    rows_of_who = [row for row in rows if "ours" in row]
    ours = [row for row in rows_of_who if row["ours"]] or rows_of_who
    timed = any("refused" not in row for row in ours)
    refused = [row for row in ours if "refused" in row and (not timed or row["refused"].startswith("wrong answer"))]
    found = [f"{row['who']}: {row['refused']}" for row in refused]
    for row in (row for row in rows if row.get("failed")):
        first, count = next(iter(row["failures"].items()))
        found.append(f"{row['part']}, {row['clients']} clients: {row['failed']} failed, {count} x {first}")
    return list(dict.fromkeys(found))


@dataclass
class Rows:
    """Rows so far, the same on every rank.

    Attributes:
        session: The ranks.
        keep: Called with all rows after each measurement: a run that is cut off keeps what it has.
        common: Fields of all rows.
    """

    session: Session
    keep: Keep
    common: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Complete a row, print it and keep it."""
        self.rows.append({**self.common, **row})
        self.session.say(f"  {describe_row(self.rows[-1])}")
        self.keep(self.rows)
