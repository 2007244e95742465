from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.kernels.attention import eager
from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, RowMetadata, Score, Step
from ringattn.numerics.reference import visible_pairs
from tests.support.kernel_conformance import CASES, MILLION_KEY_CASES, SMALL_WEIGHT_CASES, Case, make_side, run_case
from tests.support.request_isolation import BAD, SPOILT, assert_kernels_isolate

F64 = torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *SMALL_WEIGHT_CASES], ids=str)
def test_forward_and_backward_stay_within_budget(case: Case, dtype: torch.dtype):
    run_case(EagerKernels, case, dtype, "cpu")


@pytest.mark.parametrize("tile", [(256, 256), (16, 24), (7, 5)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_of_any_size_stay_within_budget(case: Case, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "TILE_ROWS", tile[0])
    monkeypatch.setattr(eager, "TILE_KEYS", tile[1])
    run_case(EagerKernels, case, F64, "cpu")


def test_weights_of_a_million_keys_keep_their_digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "TILE_KEYS", 2**16)
    run_case(EagerKernels, replace(MILLION_KEY_CASES[1], head_dim=8), torch.float16, "cpu")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_not_finite_stays_with_its_request(spoilt: str, bad: float):
    assert_kernels_isolate(EagerKernels, (300, 170, 90), spoilt, bad, torch.float32, "cpu")


def _sides(seq_len: int, **mask: Any) -> tuple[RowMetadata, RowMetadata]:
    visible = visible_pairs(seq_len, **mask)
    runs = ((0, 1, seq_len),)
    return make_side(runs, visible, "cpu"), make_side(runs, visible.transpose(1, 2), "cpu")


def _ring_step(
    seq_len: int, score: Score, dtype: torch.dtype = torch.float32, heads: int = 2, **mask: Any
) -> list[Tensor]:
    """One forward and backward over a whole sequence: o, lse, dq, dk, dv."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, seq_len, heads, 16, generator=generator).to(dtype) for _ in range(4))
    rows, keys = _sides(seq_len, **mask)
    o, lse = torch.empty_like(q), torch.empty(1, heads, seq_len)
    kernels = EagerKernels(CallShape.of(q, k, v, score))
    kernels.forward(Step(q, k, v, rows, keys, score, o, lse))
    dq, dk, dv = (torch.empty(1, seq_len, heads, 16) for _ in range(3))
    step = BackwardStep(do, q, k, v, lse, kernels.delta(o, do, None), rows, keys, score)
    kernels.backward(step, Grads(dq, dk, dv))
    return [o, lse, dq, dk, dv]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_that_see_one_key_have_no_gradient_but_of_roundings(dtype: torch.dtype):
    _, _, dq, dk, _ = _ring_step(64, Score(0.25), dtype, window=(0, 0))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5
    # o = v / 0.9 is rounded to dtype before delta is made of it
    _, _, dq, dk, _ = _ring_step(64, Score(0.25, dropout_p=0.1, dropout_seed=1), dtype, window=(0, 0))
    eps = torch.finfo(dtype).eps
    assert eps / 100 < max(dq.abs().max(), dk.abs().max()) < 20 * eps


class _Watch(TorchDispatchMode):
    """Counts calls of operators and the elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        if isinstance(found, Tensor):
            # of what is stored: an expanded view is as large as what it repeats
            self.largest = max(self.largest, found.untyped_storage().nbytes() // found.element_size())
        return found


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [({}, 25), ({"causal": True}, 15), ({"causal": True, "window": (15, None)}, 9), ({"documents": (0, 32, 80)}, 13)],
)
def test_invisible_tiles_are_skipped(mask: dict[str, Any], tiles: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "TILE_ROWS", 16)
    monkeypatch.setattr(eager, "TILE_KEYS", 16)
    with _Watch() as watch:
        _ring_step(80, Score(0.25), **mask)
    assert watch.calls["bmm"] == 3 * tiles


def test_full_tiles_are_not_masked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "TILE_ROWS", 16)
    monkeypatch.setattr(eager, "TILE_KEYS", 16)
    with _Watch() as watch:
        _ring_step(80, Score(0.25), causal=True)
    # one tile on the diagonal per tile of rows, in forward and in backward
    assert watch.calls["masked_fill_"] == 2 * 5


def test_the_host_is_told_once_per_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "TILE_ROWS", 16)
    copies: list[Tensor] = []
    to_list = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: (copies.append(x), to_list(x))[1])
    rows, keys = _sides(80, causal=True)
    copies.clear()
    with _Watch() as watch:
        assert len(list(eager._row_tiles(rows, keys))) == 5
    assert len(copies) == 1
    assert "_local_scalar_dense" not in watch.calls


def test_nothing_larger_than_a_tile_or_the_inputs_is_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "TILE_ROWS", 16)
    monkeypatch.setattr(eager, "TILE_KEYS", 16)
    n = 128
    score = Score(
        0.25,
        softcap=2.0,
        dropout_p=0.2,
        sinks=torch.zeros(2),
        alibi_slopes=torch.ones(2),
        key_bias=torch.zeros(1, n),
        bias=torch.zeros(1).expand(1, 2, n, n),
    )
    rows, keys = _sides(n, causal=True)
    q = torch.ones(1, n, 2, 16)
    o, lse = torch.empty_like(q), torch.empty(1, 2, n)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    grads = Grads(dq, dk, dv, dkey_bias=torch.empty(1, n), dalibi=torch.empty(1, 2, n))
    with _Watch() as watch:
        kernels = EagerKernels(CallShape.of(q, q, q, score))
        kernels.forward(Step(q, q, q, rows, keys, score, o, lse))
        kernels.backward(BackwardStep(q, q, q, q, lse, kernels.delta(o, q, None), rows, keys, score), grads)
    assert watch.largest == q.numel()


def test_results_repeat_bitwise():
    score = Score(0.25, softcap=2.0, dropout_p=0.2, dropout_seed=5)
    for once, again in zip(_ring_step(70, score, causal=True), _ring_step(70, score, causal=True), strict=True):
        assert torch.equal(once, again)


def test_autocast_does_not_lower_the_kernels():
    plain = _ring_step(40, Score(0.25), causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = _ring_step(40, Score(0.25), causal=True)
    for once, again in zip(plain, lowered, strict=True):
        assert torch.equal(once, again)


def test_a_sink_of_minus_infinity_is_no_sink():
    without = _ring_step(20, Score(0.25), causal=True)
    sinks = torch.full((2,), -math.inf)
    for once, again in zip(without, _ring_step(20, Score(0.25, sinks=sinks), causal=True), strict=True):
        assert torch.equal(once, again)
    o, lse, *grads = _ring_step(20, Score(0.25, sinks=sinks), lengths=((4, 9),))
    assert (lse[:, :, 9:] == -math.inf).all()
    assert (o[:, 9:] == 0).all()
    assert all((x[:, 9:] == 0).all() for x in grads)


def test_pairs_hidden_by_a_bias_of_minus_infinity_are_invisible():
    bias = torch.zeros(1, 1, 20, 20).masked_fill(
        ~visible_pairs(20, causal=True, lengths=((4, 20),))[:, None], -math.inf
    )
    by_bias = _ring_step(20, Score(0.25, bias=bias.expand(1, 2, 20, 20)))
    by_mask = _ring_step(20, Score(0.25), causal=True, lengths=((4, 20),))
    for found, expected in zip(by_bias, by_mask, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_distances_between_far_positions_are_exact():
    far = 2**30
    positions = torch.tensor([far, far + 1, far + 3], dtype=torch.int32)
    lo, hi = torch.full((1, 3), far, dtype=torch.int32), torch.full((1, 3), far + 4, dtype=torch.int32)
    side = RowMetadata(torch.empty(0, 4, dtype=torch.int32), positions, lo, hi, (), lo, hi)
    q, v = torch.zeros(1, 3, 1, 16), torch.eye(3, 16)[None, :, None].contiguous()
    o, lse = torch.empty(1, 3, 1, 16), torch.empty(1, 1, 3)
    score = Score(1.0, alibi_slopes=torch.ones(1))
    EagerKernels(CallShape.of(q, q, v, score)).forward(Step(q, q, v, side, side, score, o, lse))
    distance = torch.tensor([[0.0, 1, 3], [1, 0, 2], [3, 2, 0]])
    torch.testing.assert_close(o[0, :, 0, :3], torch.softmax(-distance, 1), rtol=1e-6, atol=1e-7)
