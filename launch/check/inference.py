"""Cases of attention over a KV cache: histories of requests, by prefill and decode, against the fp64 reference.

In a history requests are added, grow in chunks of all sizes, fork, are truncated and freed, with NaN wherever nothing was
written. The outputs of all ranks are put together and compared with `attention_reference` on whole requests. Prefill moves keys,
moves queries, reads pages without a copy, or does what the byte counts say. In decode all ranks must return the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import ringattn
from ringattn.launch.check.cache_scenarios import (
    CHUNKS,
    CROWD,
    LONG,
    OPTIONS,
    PACKED,
    PADDED,
    Answer,
    History,
    Op,
    Sizes,
    gather_answers,
    has_same_bits,
    play,
    reference_answers,
)
from ringattn.launch.common.session import Session
from ringattn.numerics.error_budget import Budget, error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

MOVES = ("auto", "keys", "queries", "pages")
"""How prefill gets keys: by byte counts; keys or queries move, over copies of pages; queries move, over pages in place."""


def budget_dtypes(dtype: str) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of the rounded reference of a budget, and that to which it is scaled.

    fp64 has nothing wider to be compared with: its budget is that of fp32, scaled.
    """
    return (torch.float32, torch.float64) if dtype == "fp64" else (DTYPES[dtype], None)


@dataclass(frozen=True)
class InferenceCase:
    """One history, to be run with each of `moves`."""

    name: str
    dtype: str
    history: History
    moves: tuple[str, ...] = MOVES

    @property
    def shape(self) -> str:
        """Text of the sizes."""
        sizes, dims = self.history.sizes, f"{self.head_dim}"
        dims += "" if self.head_dim == self.v_head_dim else f"/{self.v_head_dim}"
        return f"{len(self.history.ops)} ops h{sizes.heads}/{sizes.kv_heads} d{dims} page {sizes.page_size}"

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options."""
        return (*dict.fromkeys(name for one in self.history.options for name in one), *self.history.features)

    @property
    def head_dim(self) -> int:
        """Head dim of q and k."""
        return self.history.sizes.head_dim

    @property
    def v_head_dim(self) -> int:
        """Head dim of v."""
        return self.history.sizes.v_head_dim


@dataclass
class Finding:
    """Result of one rank for one case in one layout (of inference: one way to move).

    Attributes:
        ratios: Part of the error budget that is used up, per tensor; the same on every rank.
        errors: The largest error per tensor, in the rows of this rank.
        broken: The refusal, if there is no answer at all.
    """

    layout: str
    ratios: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    budgets: dict[str, float] = field(default_factory=dict)
    broken: str | None = None


def inference_cases(*, full: bool, device: str) -> Iterator[InferenceCase]:
    """Every kind of history, and all options at once; in full every option, dtype, head dim and head group, too."""
    gpu = device == "cuda"
    main = "bf16" if gpu else "fp32"
    size: dict[str, Any] = {"head_dim": 64, "v_head_dim": 64, "page_size": 16} if gpu else {"pages": 400}

    def case(title: str, ops: tuple[Op, ...], dtype: str, named: dict[str, Any], **changes: Any) -> InferenceCase:
        sizes = Sizes(dtype=DTYPES[dtype], **(size | changes))
        return InferenceCase(f"inference: {title}", dtype, History(sizes, ops, **named))

    histories = {"chunks": CHUNKS, "crowd": CROWD, "packed": PACKED, "padded": PADDED}
    for title, ops in histories.items():
        yield case(title, ops, main, {})
    if not full:
        yield case("everything", CROWD, main, OPTIONS["everything"])
        return
    for name, named in OPTIONS.items():
        for title, ops in histories.items():
            if named:
                yield case(f"{title}, {name}", ops, main, named)
    for dtype in DTYPES:
        if dtype != main and not (gpu and dtype == "fp64"):
            yield case("crowd", CROWD, dtype, OPTIONS["everything"])
    for heads, kv_heads in ((1, 1), (3, 3), (8, 1), (12, 2)):
        yield case("heads", CROWD, main, {}, heads=heads, kv_heads=kv_heads)
    for dims in ((16, 16), (40, 40), (96, 96), (256, 256), (192, 128)) if gpu else ((24, 16), (16, 40)):
        yield case("head dim", CROWD, main, {}, head_dim=dims[0], v_head_dim=dims[1])
    if gpu:
        # the reference of thousands of tokens is too slow on a CPU
        long: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "v_head_dim": 128}
        for name in ("causal", "window", "everything"):
            yield case(f"long, {name}", LONG, main, OPTIONS[name], **long, page_size=64, pages=120)


def examine_history(
    case: InferenceCase, moves: str, ring: ringattn.Ring, session: Session, layout: str | None = None
) -> Finding:
    """Run a case on all ranks with one of MOVES, shown as `layout`, and compare the outputs with the reference."""
    history = case.history
    if moves != "auto":
        mode, access = ("auto", "pages") if moves == "pages" else (moves, "copies")
        history = dataclasses.replace(history, comm_mode=mode, kv_access=access)
    mine = play(history, ring, session.device)
    by_rank: Sequence[Sequence[Answer]] = session.gather(mine)
    low, scaled = budget_dtypes(case.dtype)
    exact, rounded = (reference_answers(history, dtype, session.device) for dtype in (torch.float64, low))
    found = Finding(layout or moves)
    for index, answers in enumerate(zip(*by_rank, strict=True)):
        name = answers[0].mode
        for layer, whole in enumerate(gather_answers(answers)):
            right, budget = exact[index][layer].cpu(), Budget.of(exact[index][layer], rounded[index][layer], scaled)
            here = right if name == "decode" else right.index_select(1, mine[index].taken)
            _keep_largest(found.ratios, name, budget.ratio(whole, right))
            _keep_largest(found.budgets, name, budget.largest)
            _keep_largest(found.errors, name, error(mine[index].layers[layer], here))
        if name == "decode":
            _keep_largest(found.ratios, "same bits on all ranks", 0.0 if has_same_bits(answers) else float("inf"))
    return found


def _keep_largest(found: dict[str, float], name: str, value: float) -> None:
    found[name] = max(found.get(name, 0.0), value)
