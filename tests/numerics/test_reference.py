from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ringattn.kernels.attention.dropout import keep_mask
from ringattn.numerics.error_budget import Budget, error
from ringattn.numerics.reference import attention_reference, dense_attention, visible_pairs

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (3, 2)},
    {"window": (None, 0)},
    {"window": (4, None), "causal": True},
    {"documents": (0, 4, 4, 5, 13)},
    {"documents": (0, 6, 13), "causal": True},
    {"causal": True, "prefix_len": 5},
    {"chunk_len": 4},
    {"lengths": ((0, 13), (3, 9), (6, 6))},
    {
        "causal": True, "prefix_len": 3, "window": (5, None), "documents": (0, 7, 13), "chunk_len": 6,
        "lengths": ((1, 12), (0, 13)),
    },
    {"window": (2, 2**63 - 2)},
    {"window": (2**70, 1), "chunk_len": 2**70},
    {"causal": True, "prefix_len": 2**70, "window": (2**63, 2**63), "chunk_len": 2**63 - 1},
]  # fmt: skip


def _sees(i: int, j: int, b: int, mask: dict[str, Any]) -> bool:
    """The definitions, one pair at a time."""
    if mask.get("causal") and not (j <= i or j < mask.get("prefix_len", 0)):
        return False
    left, right = mask.get("window", (None, None))
    if left is not None and j < i - left:
        return False
    if right is not None and j > i + right:
        return False
    if "documents" in mask:
        cuts = mask["documents"]
        if [sum(cut <= x for cut in cuts) for x in (i, j)].count(sum(cut <= i for cut in cuts)) != 2:
            return False
    if "chunk_len" in mask and i // mask["chunk_len"] != j // mask["chunk_len"]:
        return False
    if "lengths" in mask:
        start, stop = mask["lengths"][b]
        return start <= i < stop and start <= j < stop
    return True


def _draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "-".join(mask) or "full")
def test_visible_pairs_are_the_definitions(mask: dict[str, Any]):
    visible = visible_pairs(13, **mask)
    expected = [
        [[_sees(i, j, b, mask) for j in range(13)] for i in range(13)] for b in range(len(mask.get("lengths", (0,))))
    ]
    assert visible.tolist() == expected


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (2, 3)}, {"chunk_len": 5}], ids=str)
@pytest.mark.parametrize(("seq_len", "kv_len"), [(7, 12), (12, 7)])
def test_visible_pairs_of_two_sequences_share_positions(mask: dict[str, Any], seq_len: int, kv_len: int):
    expected = [[_sees(i, j, 0, mask) for j in range(kv_len)] for i in range(seq_len)]
    assert visible_pairs(seq_len, kv_len, **mask)[0].tolist() == expected


def test_a_window_may_be_one_number():
    assert torch.equal(visible_pairs(7, causal=True, window=3), visible_pairs(7, causal=True, window=(2, 0)))


@pytest.mark.parametrize("documents", [[0, 3], [1, 7], [0, 5, 3, 7]])
def test_documents_that_divide_no_sequence_are_refused(documents):
    with pytest.raises(ValueError, match="documents must be boundaries from 0 to 7, ascending"):
        visible_pairs(7, documents=documents)


def test_prefix_without_causal_is_refused():
    with pytest.raises(ValueError, match="prefix_len must be 0 without causal, got 3"):
        visible_pairs(8, prefix_len=3)


@pytest.mark.parametrize("mask", MASKS[:9], ids=lambda mask: "-".join(mask) or "full")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_reference_is_torch_attention_where_they_overlap(mask: dict[str, Any], kv_heads: int):
    q, k, v = _draw(2, 13, 4, 8), _draw(2, 13, kv_heads, 8, seed=1), _draw(2, 13, kv_heads, 6, seed=2)
    key_bias, bias = _draw(2, 13, seed=3), _draw(1, 4, 13, 13, seed=4)
    do = _draw(2, 13, 4, 6, seed=5)
    leaves = [x.requires_grad_() for x in (q, k, v, key_bias, bias)]
    o = attention_reference(q, k, v, softmax_scale=0.3, key_bias=key_bias, bias=bias, **mask)
    attn_mask = (key_bias[:, None, None] + bias).masked_fill(~visible_pairs(13, **mask)[:, None], -math.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(
        torch.autograd.grad(o, leaves, do), torch.autograd.grad(expected, leaves, do), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_every_score_term_is_what_the_definition_says():
    n, h, p, seed = 6, 2, 0.4, 11
    q, k, v = _draw(1, n, h, 4), _draw(1, n, 1, 4, seed=1), _draw(1, n, 1, 3, seed=2)
    sinks, slopes = _draw(h, seed=3), _draw(h, seed=4).abs()
    key_bias, bias = _draw(1, n, seed=5), _draw(1, h, n, n, seed=6)
    o, lse = attention_reference(
        q,
        k,
        v,
        causal=True,
        softmax_scale=-0.7,
        softcap=1.3,
        sinks=sinks,
        alibi_slopes=slopes,
        key_bias=key_bias,
        bias=bias,
        dropout_p=p,
        dropout_seed=seed,
        return_lse=True,
    )
    zero = torch.tensor(0)
    for head in range(h):
        for i in range(n):
            weights, kept = [], []
            for j in range(i + 1):
                s = -0.7 * float(q[0, i, head] @ k[0, j, 0])
                s = (
                    1.3 * math.tanh(s / 1.3)
                    - float(slopes[head]) * (i - j)
                    + float(key_bias[0, j] + bias[0, head, i, j])
                )
                weights.append(math.exp(s))
                kept.append(bool(keep_mask(seed, zero, zero + head, zero + i, zero + j, h, p)))
            total = sum(weights) + math.exp(float(sinks[head]))
            assert float(lse[0, head, i]) == pytest.approx(math.log(total), rel=1e-12)
            for e in range(3):
                row = sum(weights[j] * kept[j] / (1 - p) * float(v[0, j, 0, e]) for j in range(i + 1))
                assert float(o[0, i, head, e]) == pytest.approx(row / total, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("how", ["mask", "bias", "key_bias"])
def test_rows_without_keys_are_zero(how: str):
    q, k, v = (_draw(2, 7, 2, 4, seed=seed).requires_grad_() for seed in range(3))
    options: dict[str, Any] = {"lengths": ((0, 7), (2, 2))}
    if how == "bias":
        hidden = torch.zeros(2, 1, 1, 1, dtype=torch.float64).index_fill(0, torch.tensor(1), -math.inf)
        options = {"bias": hidden.requires_grad_()}
    elif how == "key_bias":
        hidden = torch.zeros(2, 7, dtype=torch.float64).index_fill(0, torch.tensor(1), -math.inf)
        options = {"key_bias": hidden.requires_grad_()}
    o, lse = attention_reference(q, k, v, return_lse=True, **options)
    assert (o[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    assert lse[0].isfinite().all()
    torch.autograd.backward([o, lse], [_draw(*o.shape), _draw(*lse.shape)])
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    for x in leaves:
        assert x.grad is not None
        assert (x.grad[1] == 0).all()
        assert x.grad.isfinite().all()


def test_a_sink_is_all_that_a_row_without_keys_sees():
    q, k, v = (_draw(1, 3, 2, 4, seed=seed) for seed in range(3))
    sinks = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    o, lse = attention_reference(q, k, v, lengths=((1, 1),), sinks=sinks, return_lse=True)
    assert (o == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(1, 2, 3), rtol=0, atol=0)
    lse.sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradients_are_those_of_finite_differences(dropout_p: float):
    shapes = {"q": (2, 5, 2, 3), "k": (2, 5, 1, 3), "v": (2, 5, 1, 2)}
    shapes |= {"sinks": (2,), "alibi_slopes": (2,), "key_bias": (2, 5), "bias": (1, 2, 5, 5)}
    leaves = [_draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes.values())]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named: dict[str, Any] = dict(zip(shapes, values, strict=True))
        o, lse = attention_reference(
            **named, causal=True, lengths=((0, 5), (1, 4)), softcap=1.5, dropout_p=dropout_p, return_lse=True
        )
        return o, lse

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_gives_the_dtypes_that_are_promised(dtype: torch.dtype):
    q, k, v = (_draw(1, 9, 2, 8, seed=seed).to(dtype) for seed in range(3))
    o, lse = attention_reference(q, k, v, return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    exact = attention_reference(q.double(), k.double(), v.double())
    assert error(o, exact) < 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_autocast_does_not_lower_the_reference():
    q, k, v = (_draw(1, 9, 2, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = attention_reference(q, k, v)
    assert torch.equal(lowered, attention_reference(q, k, v))


def test_dense_attention_of_a_part_is_the_part_of_the_whole():
    q, k, v = (_draw(1, 12, 2, 4, seed=seed) for seed in range(3))
    slopes = torch.tensor([0.3, 0.1], dtype=torch.float64)
    whole = attention_reference(q, k, v, causal=True, alibi_slopes=slopes)
    i, j = torch.tensor([9, 1, 4]), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    visible = visible_pairs(12, causal=True)[:, i][:, :, j]
    part, _ = dense_attention(q[:, i], k[:, j], v[:, j], visible, q_positions=i, k_positions=j, alibi_slopes=slopes)
    torch.testing.assert_close(part, whole[:, i], rtol=1e-12, atol=1e-12)


def test_budget_is_twice_the_low_error_and_a_band():
    exact = torch.tensor([1.0, -4.0, -math.inf], dtype=torch.float64)
    low = torch.tensor([1.5, -4.0, -math.inf], dtype=torch.bfloat16)
    eps, noise = torch.finfo(torch.bfloat16).eps, 16 * torch.finfo(torch.float32).eps * 4
    budget = Budget.of(exact, low)
    assert budget.largest == pytest.approx(4 * 0.5 + 4 * eps * 4 + noise)
    assert budget.rms == pytest.approx(2 * math.sqrt(0.25 / 3) + eps * math.sqrt(17 / 3) + noise)
    assert budget.ratio(low, exact) < 1
    assert budget.ratio(exact + 3, exact) > 1
    assert error(low, exact) == 0.5


def test_one_wrong_element_among_many_is_over_budget():
    exact = torch.randn(1000, 1000, dtype=torch.float64)
    low = exact.bfloat16()
    wrong = low.clone()
    wrong[3, 4] += 1
    assert Budget.of(exact, low).ratio(low, exact) < 1
    assert Budget.of(exact, low).ratio(wrong, exact) > 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0])
def test_an_error_at_an_infinity_is_infinite(wrong: float):
    assert error(torch.tensor([wrong]), torch.tensor([-math.inf])) == math.inf
    assert error(torch.tensor([-math.inf]), torch.tensor([-math.inf])) == 0.0
    assert error(torch.tensor([math.nan]), torch.tensor([0.0])) == math.inf


def test_errors_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"actual must have the shape of exact, \(2,\), got \(3,\)"):
        error(torch.zeros(3), torch.zeros(2))
