"""Attention over a cache is attention: whatever the history, however it was cut, whoever else is there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budget import assert_within_budget
from tests.histories import Answer, Definition, History, Op, Sizes, join_answers, play
from tests.pool import Pools

WORLDS = [1, 2, 4]


def judge(history: History, by_rank: list[list[Answer]]) -> None:
    """Holds what ranks answered to a history against its definition."""
    low = min(history.sizes.dtype, torch.float32, key=lambda dtype: dtype.itemsize)
    exact, rounded = Definition(history, torch.float64).play(), Definition(history, low).play()
    for index, answers in enumerate(zip(*by_rank, strict=True)):
        for layer, o in enumerate(join_answers(list(answers))):
            what = f"o of layer {layer} of step {index} ({answers[0].mode}, {answers[0].moved}) of {history}"
            assert_within_budget(o, exact[index][layer], rounded[index][layer], what, history.sizes.dtype)


def extend(names: tuple[int, ...], counts: tuple[int, ...], mode: str = "auto", alike: bool = False) -> Op:
    return "extend", names, counts, mode, alike


CHUNKS: tuple[Op, ...] = (
    ("join", 0, 200, 0),
    extend((0,), (37,)),
    extend((0,), (1,), "prefill"),
    extend((0,), (64,)),
    extend((0,), (2,), "prefill"),
    extend((0,), (17,)),
    extend((0,), (1,)),
    extend((0,), (5,)),
    extend((0,), (16,), "prefill"),
    extend((0,), (1,)),
)
"""One request in pieces of all sizes, both ways."""

CROWD: tuple[Op, ...] = (
    ("join", 0, 120, 0),
    extend((0,), (41,)),
    ("fork", 1, 0, 41, 90),
    ("fork", 2, 0, 18, 60),
    ("join", 3, 50, 0),
    extend((0, 1, 2, 3), (3, 20, 1, 23), "prefill"),
    extend((0, 1, 2, 3), (1, 1, 1, 1)),
    ("crop", 1, 44),
    ("leave", 0),
    extend((3, 1), (3, 3)),
    extend((2, 1, 3), (9, 2, 1), "prefill"),
    extend((1, 2, 3), (16, 16, 16)),
)
"""Requests that share beginnings and steps."""

PADDED: tuple[Op, ...] = (
    ("join", 0, 80, 0),
    ("join", 1, 80, 7),
    ("join", 2, 80, 20),
    extend((0, 1, 2), (21, 21, 21), "prefill", True),
    extend((0, 1, 2), (1, 1, 1), alike=True),
    extend((0, 1, 2), (4, 4, 4), alike=True),
    extend((0, 1, 2), (19, 19, 19), "prefill", True),
    extend((0, 1, 2), (1, 1, 1)),
)
"""A batch with padding in front."""

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"options": ({"causal": False},)},
    "window": {"options": ({"window": (11, 0)}, {})},
    "int window": {"options": ({"window": 6},)},
    "both sides": {"options": ({"causal": False, "window": (9, 4)},)},
    "softcap": {"options": ({"softcap": 1.5, "softmax_scale": 0.6},)},
    "sinks": {"features": ("sinks",)},
    "alibi": {"features": ("alibi_slopes",)},
    "everything": {"options": ({"window": (20, 0), "softcap": 2.0}, {"softmax_scale": 0.3}), "features": ("sinks", "alibi_slopes")},
}


@pytest.mark.dist
@pytest.mark.parametrize("moves", ["keys", "queries"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_option_is_right_for_every_history(pool: Pools, world_size: int, moves: str) -> None:
    for named in OPTIONS.values():
        for ops in (CHUNKS, CROWD, PADDED):
            history = History(Sizes(), ops, moves=moves, **named)
            judge(history, pool(world_size).run(play, history))


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_right(pool: Pools, dtype: torch.dtype) -> None:
    for moves in ("keys", "queries"):
        for ops in (CHUNKS, CROWD, PADDED):
            history = History(Sizes(dtype=dtype), ops, moves=moves, features=("sinks", "alibi_slopes"))
            judge(history, pool(2).run(play, history))


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [Sizes(heads=3, kv_heads=3), Sizes(heads=8, kv_heads=1), Sizes(head_dim=24, v_head_dim=16), Sizes(page_size=1), Sizes(page_size=64, pages=9)], ids=["mha", "mqa", "dims", "page 1", "page 64"])
def test_every_shape_is_right(pool: Pools, sizes: Sizes) -> None:
    if sizes.page_size == 1:
        sizes = dataclasses.replace(sizes, pages=400)
    for moves in ("keys", "queries", "auto"):
        history = History(sizes, CROWD, moves=moves)
        judge(history, pool(4).run(play, history))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Any history: whatever the books allow."""
    lengths: dict[int, tuple[int, int]] = {}  # tokens and reservation
    ops: list[Op] = []
    for turn in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["join", "extend", "extend", "extend", "fork", "crop", "leave"])) if lengths else "join"
        name = draw(st.sampled_from(sorted(lengths))) if lengths else 0
        if kind == "join" and len(lengths) < 4:
            lengths[turn] = (0, 120)
            ops.append(("join", turn, 120, 0))
        elif kind == "fork" and len(lengths) < 4:
            length = draw(st.integers(0, lengths[name][0]))
            lengths[turn] = (length, 120)
            ops.append(("fork", turn, name, length, 120))
        elif kind == "crop":
            length = draw(st.integers(0, lengths[name][0]))
            lengths[name] = (length, lengths[name][1])
            ops.append(("crop", name, length))
        elif kind == "leave" and len(lengths) > 1:
            del lengths[name]
            ops.append(("leave", name))
        elif kind == "extend":
            names = draw(st.lists(st.sampled_from(sorted(lengths)), min_size=1, unique=True))
            if draw(st.booleans()):
                counts, mode = (draw(st.integers(1, 16)),) * len(names), "decode"
            else:
                counts, mode = tuple(draw(st.sampled_from([1, 2, 5, 17, 33, 50])) for _ in names), "prefill"
            kept = [(name, count) for name, count in zip(names, counts, strict=True) if lengths[name][0] + count <= 120]
            if kept:
                for name, count in kept:
                    lengths[name] = (lengths[name][0] + count, 120)
                names, counts = zip(*kept, strict=True)
                ops.append(extend(names, counts, mode))
    sizes = Sizes(page_size=draw(st.sampled_from([1, 3, 4, 16])), pages=600, layers=1)
    sizes = dataclasses.replace(sizes, pages=4 * 600 // sizes.page_size)
    named = OPTIONS[draw(st.sampled_from(sorted(OPTIONS)))]
    return History(sizes, tuple(ops), moves=draw(st.sampled_from(["auto", "keys", "queries"])), seed=draw(st.integers(0, 99)), **named)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", WORLDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
def test_any_history_is_right(pool: Pools, world_size: int, history: History) -> None:
    judge(history, pool(world_size).run(play, history))
