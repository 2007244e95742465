"""A call is decided once: it is found again for equal facts, never for others, and a refused one is refused again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring, Sharding, attention_reference, dispatch, ring_attention
from ringattn.dispatch import call_text
from ringattn.plan import attention_spec as calls
from ringattn.plan import device_tables
from ringattn.plan.attention_spec import serialize
from ringattn.plan.ring_plan import make_plan
from tests.support.pool import Pools

RING = Ring()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dispatch._plans.clear()
    yield
    dispatch._plans.clear()


def draw_qkv(n: int, h: int, hk: int, d: int, dtype: torch.dtype, *, transposed: bool) -> list[Tensor]:
    shapes = [(2, heads, n, d) if transposed else (2, n, heads, d) for heads in (h, hk, hk)]
    generator = torch.Generator().manual_seed(n * h + d)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.transpose(1, 2) if transposed else x for x in found]


@st.composite
def variants(draw: st.DrawFn) -> dict[str, Any]:
    """A call by what may differ from the call before it, out of few values, so that calls come again."""
    return {
        "n": draw(st.sampled_from([5, 8])),
        "heads": draw(st.sampled_from([(2, 2), (4, 2)])),
        "d": draw(st.sampled_from([8, 16])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
        "transposed": draw(st.booleans()),
        "documents": draw(st.sampled_from([None, (0, 3, 5)])),
        "sinks": draw(st.booleans()),
        "options": {
            "causal": draw(st.booleans()),
            "window": draw(st.sampled_from([None, (0, 0), (1, 0), (2, 1)])),
            "softcap": draw(st.sampled_from([0.0, 2.0])),
        },
    }


@settings(max_examples=40, deadline=None)
@given(st.lists(variants(), min_size=1, max_size=6))
def test_a_call_is_never_taken_for_another(sequence: list[dict[str, Any]]) -> None:
    for one in [*sequence, *sequence]:
        documents = one["documents"] if one["n"] == 5 else None
        h, hk = one["heads"]
        q, k, v = draw_qkv(one["n"], h, hk, one["d"], one["dtype"], transposed=one["transposed"])
        sinks = torch.arange(q.shape[2], dtype=torch.float32) if one["sinks"] else None
        found = ring_attention(q, k, v, RING.sharding(one["n"], documents=documents), sinks=sinks, **one["options"])
        expected = attention_reference(q, k, v, documents=documents, sinks=sinks, **one["options"])
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(found, expected)


def test_nothing_is_decided_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sharding = RING.sharding(12, documents=(0, 5, 12))
    leaves = [x.requires_grad_() for x in draw_qkv(12, 4, 2, 16, torch.float32, transposed=False)]

    def step() -> None:
        ring_attention(leaves[0], leaves[1], leaves[2], sharding, causal=True, softcap=3.0).sum().backward()

    step()

    def decided(*args: object, **kwargs: object) -> None:
        raise AssertionError("a call that was made before must be found, got one that is decided again")

    for module, name in (
        (dispatch, "check_call"),
        (dispatch, "select_kernels"),
        (dispatch, "make_execution_plan"),
        (calls, "parse"),
        (calls, "make_plan"),
        (calls, "write_call"),
        (device_tables, "side_key"),
        (device_tables, "_make"),
    ):
        monkeypatch.setattr(module, name, decided)
    monkeypatch.setattr(type(RING), "consistent_call", decided)
    step()


def test_an_equal_call_is_the_same_text() -> None:
    sharding = RING.sharding(12, documents=(0, 5, 12))
    options = {"softmax_scale": 0.5, "causal": True, "window": 3, "prefix_len": 1}
    text = call_text(sharding, None, options)
    assert call_text(sharding, None, dict(options)) is text
    assert call_text(sharding, None, {**options, "window": (2, 0)}) == text
    with pytest.raises(ValueError, match="prefix_len must be of integers, got True"):  # in a table 1 is True
        call_text(sharding, None, {**options, "prefix_len": True})
    assert call_text(sharding, RING.sharding(12), options) != text


def test_a_number_that_changes_in_place_is_read_at_every_call() -> None:
    sharding, scale = RING.sharding(12), torch.tensor(0.5)
    first = call_text(sharding, None, {"softmax_scale": scale})
    scale.fill_(0.25)
    assert call_text(sharding, None, {"softmax_scale": scale}) != first


def test_whatever_differs_is_another_text() -> None:
    sharding = RING.sharding(12)
    usual: dict[str, Any] = {"softmax_scale": 0.5, "causal": True}
    others: list[dict[str, Any]] = [
        {}, {"kv_sharding": RING.sharding(7)}, {"softmax_scale": 0.25}, {"causal": False}, {"window": 3},
        {"prefix_len": 2}, {"chunk_len": 4}, {"softcap": 2.0}, {"dropout_p": 0.1}, {"impl": "eager"},
        {"backward": "keys"}, {"deterministic": True},
    ]  # fmt: skip
    for _ in range(2):
        texts = set[str]()
        for other in others:
            options = {**usual, **other}
            texts.add(call_text(sharding, options.pop("kv_sharding", None), options))
        assert len(texts) == len(others)


def test_lengths_are_not_kept_with_the_sharding() -> None:
    sharding = RING.sharding(13)
    for stop in range(12):
        assert f"((0, {stop}),)" in call_text(sharding, None, {"softmax_scale": 0.5, "lengths": ((0, stop),)})
    assert not sharding.calls


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["q", "k", "v", "sinks"]), st.sampled_from(["shape", "dtype"]))
def test_a_wrong_call_is_refused_after_a_right_one(name: str, what: str) -> None:
    sharding = RING.sharding(6)
    q, k, v = draw_qkv(6, 2, 2, 8, torch.float32, transposed=False)
    right: dict[str, Any] = {"q": q, "k": k, "v": v, "sinks": torch.zeros(2)}
    ring_attention(**right, sharding=sharding)
    wrong = right[name][:1, ..., :1] if right[name].dim() > 1 else right[name][:1]
    if what == "dtype":
        wrong = right[name].to(torch.int64)
    for _ in range(2):
        with pytest.raises(ValueError, match="must"):
            ring_attention(**{**right, name: wrong}, sharding=sharding)
    ring_attention(**right, sharding=sharding)


def refused_again() -> list[str]:
    """Right calls, with a wrong one by rank 1 and by all in between; what was said each time."""
    ring = Ring()
    sharding = ring.sharding(16)
    x = torch.randn(1, sharding.shard_len, 2, 16)
    said = []
    for wrong_on in ((), (0, 1), (0, 1), (), (1,)):
        q = x[..., :8] if ring.rank in wrong_on else x
        options: dict[str, Any] = {"causal": True} if wrong_on == (1,) else {}
        try:
            ring_attention(q, x, x, sharding, **options)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_every_rank_refuses_at_first_sight_and_at_each_later_wrong_call(pool: Pools) -> None:
    for said in pool(2).run(refused_again):
        assert [bool(text) for text in said] == [False, True, True, False, True]
        assert "head_dim" in said[1]
        assert said[1] == said[2]


def test_the_cache_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "CAPACITY", 3)
    for n in range(1, 9):
        q, k, v = draw_qkv(n, 1, 1, 8, torch.float32, transposed=False)
        ring_attention(q, k, v, RING.sharding(n))
        assert 1 <= len(dispatch._plans) <= 3


def test_a_kept_call_does_not_keep_its_ring() -> None:
    ring = Ring()
    q, k, v = draw_qkv(4, 1, 1, 8, torch.float32, transposed=False)
    ring_attention(q, k, v, ring.sharding(4))
    gone = weakref.ref(ring)
    del ring
    gc.collect()  # a ring and the shardings that it keeps refer to each other
    assert dispatch._plans
    assert gone() is None


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = (x.requires_grad_() for x in draw_qkv(4, 1, 1, 8, torch.float32, transposed=False))
    (dq,) = torch.autograd.grad(ring_attention(q, k, v, RING.sharding(4)).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="must be differentiated once"):
        dq.sum().backward()


def test_plans_are_those_of_the_schedule() -> None:
    sharding: Sharding = RING.sharding(12, documents=(0, 5, 12))
    call = calls.AttentionSpec.deserialize(serialize(sharding, softmax_scale=0.5, causal=True), 0)
    for moving in ("keys", "queries"):
        expected = make_plan(sharding.shards, sharding.shards, call.mask, moving)
        assert call.plan(moving) == expected
        assert call.plan(moving) is call.plan(moving)
