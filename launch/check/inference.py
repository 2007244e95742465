"""Is attention over a cache right on this machine? Histories of requests, by prefill and decode, against the definition.

Owns the cases of inference and how one is examined. Refuses to know how rows are shown (`check`) and how histories are played
(`cache_scenarios`).

Note [What is compared there]
    A history lets requests join, grow in chunks of all sizes, fork, be cropped and leave, with NaN wherever nothing was written.
    What ranks answer to each step is put together and held against `attention_reference` on whole requests in fp64, within the
    budget of the same in the dtype under test. Prefill is played with keys moving, with queries moving, with pages read in place,
    and with whatever the counts say. In decode all ranks must hold the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    Definition,
    History,
    Op,
    Sizes,
    has_same_bits,
    join_answers,
    play,
)
from ringattn.launch.runtime.session import Session
from ringattn.numerics.error_budget import Budget, error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MOVES = ("auto", "keys", "queries", "pages")
"""How prefills go: what moves over copies of pages; "pages": queries, over pages where they lie; "auto": both by their counts."""


@dataclass(frozen=True)
class InferenceCase:
    """One history, to be played with each of `moves`.

    Attributes:
        name: Shown in the table.
        dtype: One of DTYPES.
        history: What happens.
        moves: Of MOVES.
    """

    name: str
    dtype: str
    history: History
    moves: tuple[str, ...] = MOVES

    @property
    def shape(self) -> str:
        """The sizes, for people."""
        sizes, dims = self.history.sizes, f"{self.history.sizes.head_dim}"
        dims += "" if sizes.head_dim == sizes.v_head_dim else f"/{sizes.v_head_dim}"
        return f"{len(self.history.ops)} ops h{sizes.heads}/{sizes.kv_heads} d{dims} page {sizes.page_size}"

    @property
    def options(self) -> tuple[str, ...]:
        """Names of options."""
        return (*dict.fromkeys(name for one in self.history.options for name in one), *self.history.features)

    @property
    def head_dim(self) -> int:
        """Of q and k."""
        return self.history.sizes.head_dim

    @property
    def v_head_dim(self) -> int:
        """Of v."""
        return self.history.sizes.v_head_dim


def inference_cases(*, full: bool, device: str) -> Iterator[InferenceCase]:
    """Every kind of history, and all options at once.

    Args:
        full: Every option under every kind of history, dtypes, head dims and head groups, too.
        device: "cuda" or "cpu".
    """
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
        # the definition of thousands of tokens is too much for a CPU
        long: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "v_head_dim": 128}
        for name in ("causal", "window", "everything"):
            yield case(f"long, {name}", LONG, main, OPTIONS[name], **long, page_size=64, pages=120)


@dataclass
class Examined:
    """What one rank found: as in `check.Finding`, by "prefill" and "decode"."""

    ratios: dict[str, float]
    errors: dict[str, float]
    budgets: dict[str, float]


def examine_history(case: InferenceCase, moves: str, ring: ringattn.Ring, session: Session) -> Examined:
    """Plays a case on all ranks and holds their answers against the definition.

    Args:
        case: The case.
        moves: Of MOVES.
        ring: The ranks.
        session: Likewise.
    """
    history = case.history
    mine = play(_going(history, moves), ring, session.device)
    everyone: Sequence[Sequence[Answer]] = session.gather(mine)
    # fp64 has nothing wider to be compared with: its budget is that of fp32, scaled
    low, scaled = (torch.float32, torch.float64) if case.dtype == "fp64" else (DTYPES[case.dtype], None)
    exact = Definition(history, torch.float64, session.device).play()
    rounded = Definition(history, low, session.device).play()
    found = Examined({}, {}, {})
    for index, answers in enumerate(zip(*everyone, strict=True)):
        name = answers[0].mode
        for layer, whole in enumerate(join_answers(list(answers))):
            right, budget = exact[index][layer].cpu(), Budget.of(exact[index][layer], rounded[index][layer], scaled)
            _worsen(found.ratios, name, budget.ratio(whole, right))
            _worsen(found.budgets, name, budget.largest)
            here = right if name == "decode" else right.index_select(1, mine[index].taken)
            _worsen(found.errors, name, error(mine[index].layers[layer], here))
        if name == "decode":
            _worsen(found.ratios, "same bits on all ranks", 0.0 if has_same_bits(list(answers)) else float("inf"))
    return found


def _going(history: History, way: str) -> History:
    """A history whose prefills go one of MOVES."""
    if way == "auto":
        return history
    moves, reads = ("auto", "pages") if way == "pages" else (way, "copies")
    return dataclasses.replace(history, comm_mode=moves, kv_access=reads)


def _worsen(found: dict[str, float], name: str, value: float) -> None:
    found[name] = max(found.get(name, 0.0), value)
