from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ringattn.kernels.attention.portable import configs
from ringattn.kernels.attention.portable.api import PortableKernels
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, RowMetadata, Score, SoftmaxState, Step
from ringattn.schedule.validation import SOFTCAPS
from tests.support.kernel_conformance import CASES, SMALL_WEIGHT_CASES, TERM_CASES, Case, run_case
from tests.support.large_strides import HALF_WAY, at_strides, heads_apart, leave_memory_alone
from tests.support.request_isolation import BAD, SPOILT, assert_kernels_isolate

BULK_CASES = (
    "causal", "zigzag", "zigzag_window", "striped", "many_runs", "everything", "window_both_sides", "gqa_3",
    "documents", "padded_ring", "blocks_over_visits_everything",
)  # fmt: skip
WIDEST = Case("widest_softcap", mask={"causal": True})
HALF_CASES = ("causal", "head_dim_40", "zigzag", "everything", "shared_bias", "window_both_sides")


def whole(n: int) -> tuple[tuple[int, int, int, int], ...]:
    return ((0, n, 0, 1),)


def side(n: int, lo: torch.Tensor, hi: torch.Tensor) -> RowMetadata:
    runs = torch.tensor(whole(n), dtype=torch.int32)
    lo, hi = lo[None].int(), hi[None].int()
    return RowMetadata(runs, torch.arange(n, dtype=torch.int32), lo, hi, whole(n), lo, hi)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward_stay_within_budget(case: Case):
    run_case(PortableKernels, case, torch.float32, "cpu")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", TERM_CASES, ids=str)
def test_masks_of_several_terms_stay_within_budget(case: Case):
    run_case(PortableKernels, case, torch.float32, "cpu")


@pytest.mark.interpreted
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_not_finite_stays_with_its_request(spoilt: str, bad: float):
    assert_kernels_isolate(PortableKernels, (90, 71, 50), spoilt, bad, torch.float32, "cpu")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", [case for case in CASES if case.name in HALF_CASES], ids=str)
def test_half_precision_stays_within_budget(case: Case):
    run_case(PortableKernels, case, torch.float16, "cpu")


@pytest.mark.parametrize("case", [case for case in SMALL_WEIGHT_CASES if case.head_dim <= 64], ids=str)
def test_small_weights_keep_their_digits(case: Case):
    run_case(PortableKernels, case, torch.float16, "cpu")


@pytest.mark.parametrize("softcap", [50.0, 2.0**13, SOFTCAPS[torch.float32]])
def test_a_wide_softcap_loses_no_digits_of_fp32(softcap: float):
    run_case(PortableKernels, replace(WIDEST, softcap=softcap), torch.float32, "cpu")


def test_the_widest_softcap_stays_within_budget():
    run_case(PortableKernels, replace(WIDEST, softcap=SOFTCAPS[torch.float16]), torch.float16, "cpu")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", [case for case in (*CASES, *TERM_CASES) if case.name in BULK_CASES], ids=str)
def test_bulk_loads_stay_within_budget_at_any_offset(case: Case, monkeypatch: pytest.MonkeyPatch):
    choose = configs.choose
    found = lambda *args: {name: replace(config, tma=True) for name, config in choose(*args).items()}  # noqa: E731
    monkeypatch.setattr(configs, "choose", found)
    run_case(PortableKernels, case, torch.float32, "cpu")


class FarApart(PortableKernels):
    """The kernels on a copy of this tensor whose heads, or rows of a bias, lie far apart."""

    def __init__(self, call: CallShape, *, name: str) -> None:
        super().__init__(call)
        self.name = name

    def place(self, name: str, x: Tensor) -> Tensor:
        if name != self.name.removeprefix("rows of "):
            return x
        apart, is_bias = HALF_WAY // 6, name in ("bias", "dbias")
        if name != self.name:
            return at_strides(x, (0, 0, apart, 1) if is_bias else (0, apart, x.shape[3], 1))
        return at_strides(x, (0, HALF_WAY, x.shape[3], 1)) if is_bias else heads_apart(x)

    def score(self, score: Score) -> Score:
        return score if score.bias is None else replace(score, bias=self.place("bias", score.bias))

    def forward(self, step: Step) -> None:
        far = {name: self.place(name, getattr(step, name)) for name in ("q", "k", "v", "o")}
        super().forward(step._replace(score=self.score(step.score), **far))
        step.o.copy_(far["o"])

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        return super().delta(self.place("o", o), self.place("do", do), dlse, out)

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        names = ("dq", "dk", "dv") if grads.dbias is None else ("dq", "dk", "dv", "dbias")
        far = {name: self.place(name, getattr(grads, name)) for name in names}
        given = {
            name: self.place(name, x) for name in ("do", "q", "k", "v", "o") if (x := getattr(step, name)) is not None
        }
        super().backward(step._replace(score=self.score(step.score), **given), replace(grads, **far))
        for name, x in far.items():
            getattr(grads, name).copy_(x)


ROWS_APART = ["rows of q", "rows of k", "rows of v", "rows of do", "rows of bias"]


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "do", "dq", "dk", "dv", "bias", "dbias", *ROWS_APART])
def test_offsets_may_need_more_than_32_bits(name: str, monkeypatch: pytest.MonkeyPatch):
    leave_memory_alone(monkeypatch)
    bias = {"rows of bias": "shared", "bias": "dense", "dbias": "dense"}.get(name)
    heads = 1 if name == "rows of bias" else 3
    case = Case("far_apart", seq_len=20, mask={"causal": True}, heads=heads, kv_heads=heads, bias=bias)
    run_case(partial(FarApart, name=name), case, torch.float16, "cpu")


def test_the_backward_is_the_same_bits_every_time():
    n = 50
    at = torch.arange(n)
    rows, keys = side(n, torch.zeros(n), at + 1), side(n, at, torch.full((n,), n))
    q, do = torch.randn(2, 1, n, 4, 16)
    k, v = torch.randn(2, 1, n, 2, 16)
    lse, delta = torch.randn(2, 1, 4, n)
    key_bias = torch.randn(1, n)
    score = Score(0.25, dropout_p=0.2, dropout_seed=5, key_bias=key_bias)
    found = []
    for _ in range(2):
        dq, dk, dv, dkey_bias = (torch.full_like(x, float("nan")) for x in (q, k, v, key_bias))
        kernels = PortableKernels(CallShape.of(q, k, v, score))
        kernels.backward(BackwardStep(do, q, k, v, lse, delta, rows, keys, score), Grads(dq, dk, dv, dkey_bias))
        found.append((dq, dk, dv, dkey_bias))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert not torch.isnan(a).any()


def test_keys_nobody_sees_are_never_read():
    n = 64
    at = torch.arange(n)
    rows = side(n, at, at + 1)  # each row sees itself
    q = torch.randn(1, n, 1, 16)
    k, v = torch.randn(2, 1, 2 * n, 1, 16)
    k[:, n:], v[:, n:] = float("nan"), float("nan")
    o, lse = torch.full((1, n, 1, 16), float("nan")), torch.full((1, 1, n), float("nan"))
    step = Step(q, k[:, :n], v[:, :n], rows, rows, Score(0.25), o, lse)
    PortableKernels(CallShape.of(q, k, v, step.score)).forward(step)
    assert torch.allclose(o, v[:, :n], atol=1e-6)


def test_a_visit_without_visible_keys_leaves_the_carry_alone():
    q, k = torch.randn(1, 40, 1, 16), torch.randn(1, 8, 1, 16)
    rows = side(40, torch.zeros(40), torch.zeros(40))
    keys = side(8, torch.zeros(8), torch.zeros(8))
    carry = SoftmaxState(torch.randn(1, 1, 40), torch.rand(1, 1, 40), torch.randn(1, 40, 1, 16))
    before = SoftmaxState(carry.m.clone(), carry.l.clone(), carry.acc.clone())
    o, lse = torch.empty(1, 40, 1, 16), torch.empty(1, 1, 40)
    step = Step(q, k, k, rows, keys, Score(0.25), o, lse, carry, first=False, last=False)
    PortableKernels(CallShape.of(q, k, k, step.score)).forward(step)
    for name in ("m", "l", "acc"):
        assert torch.equal(getattr(carry, name), getattr(before, name))
