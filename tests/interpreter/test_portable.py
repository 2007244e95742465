import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from ringattn.kernels.contract import Carry, Grads, Score
from tests.interpreter.dense import Runs, attend, bounds, positions_of, side

pytest.importorskip("triton")
portable = pytest.importorskip("ringattn.kernels.portable.api")

F16_TOLERANCE, F32_TOLERANCE = 4e-3, 2e-5


def causal(n_q: int, n_k: int) -> Tensor:
    return torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)[None]


def everything(n_q: int, n_k: int) -> Tensor:
    return torch.ones(1, n_q, n_k, dtype=torch.bool)


def window(n_q: int, n_k: int, left: int, right: int) -> Tensor:
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)[None, :]
    return ((j >= i - left) & (j <= i + right))[None]


def documents(n: int, edges: tuple[int, ...]) -> Tensor:
    which = torch.bucketize(torch.arange(n), torch.tensor(edges), right=True)
    return (which[:, None] == which[None, :])[None] & causal(n, n)


def padded(n: int, lengths: tuple[tuple[int, int], ...]) -> Tensor:
    at = torch.arange(n)
    inside = torch.stack([(at >= start) & (at < stop) for start, stop in lengths])
    return inside[:, :, None] & inside[:, None, :] & causal(n, n)


def whole(n: int) -> Runs:
    return ((0, n, 0, 1),) if n else ()


def pack(*runs: tuple[int, int, int]) -> Runs:
    """Runs (start, stride, length) as a packed buffer."""
    offsets = itertools.accumulate([0, *(length for _, _, length in runs)])
    return tuple(
        (offset, length, start, stride) for offset, (start, stride, length) in zip(offsets, runs, strict=False)
    )


@dataclasses.dataclass
class Case:
    """One attention problem, whose keys come in one or more visits."""

    visible: Tensor  # `b n_q n_k` or `1 n_q n_k` over global positions
    q_runs: Runs
    visits: tuple[Runs, ...]
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    d: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    features: tuple[str, ...] = ()
    scale: float | None = None
    transposed: bool = False
    seed: int = 0


def tensor(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool = False) -> Tensor:
    if transposed and len(shape) == 4:
        b, s, h, d = shape
        return torch.randn(b, h, s, d + 8, generator=generator).to(dtype).transpose(1, 2)[..., :d]
    return torch.randn(shape, generator=generator).to(dtype)


def poison(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def run(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Every result of the portable kernels beside the oracle's."""
    g = torch.Generator().manual_seed(case.seed)
    n_k = case.visible.shape[2]
    q_pos = positions_of(case.q_runs)
    s = len(q_pos)
    key_pos = [positions_of(runs) for runs in case.visits]
    q = tensor(g, (case.batch, s, case.heads, case.d), case.dtype, case.transposed)
    ks = [tensor(g, (case.batch, len(p), case.kv_heads, case.d), case.dtype, case.transposed) for p in key_pos]
    vs = [tensor(g, (case.batch, len(p), case.kv_heads, case.dv), case.dtype, case.transposed) for p in key_pos]
    do = tensor(g, (case.batch, s, case.heads, case.dv), case.dtype, case.transposed)
    dlse = torch.randn(case.batch, case.heads, s, generator=g)
    sinks = torch.randn(case.heads, generator=g) if "sinks" in case.features else None
    slopes = torch.rand(case.heads, generator=g) * 0.1 if "alibi" in case.features else None
    key_biases = (
        [torch.randn(case.batch, len(p), generator=g) for p in key_pos] if "key_bias" in case.features else None
    )
    bias = None
    if "bias" in case.features:
        bias = torch.randn(case.batch, case.heads, s, n_k, generator=g)
    if "head_bias" in case.features:  # one row for all batch elements and queries
        bias = torch.randn(1, case.heads, 1, n_k, generator=g).expand(case.batch, case.heads, s, n_k)
    scale = case.d**-0.5 if case.scale is None else case.scale
    score = Score(
        scale,
        softcap=2.0 if "softcap" in case.features else 0.0,
        dropout_p=0.3 if "dropout" in case.features else 0.0,
        dropout_seed=0xFEDCBA9876543210,
        sinks=sinks,
        alibi_slopes=slopes,
        bias=bias,
    )
    rows_lo, rows_hi = bounds(case.visible, q_pos)
    rows = side(case.q_runs, rows_lo, rows_hi, q_pos)
    sides = [
        side(runs, *bounds(case.visible.transpose(1, 2), p), p) for runs, p in zip(case.visits, key_pos, strict=True)
    ]
    scores = [
        dataclasses.replace(score, key_bias=None if key_biases is None else key_biases[i])
        for i in range(len(case.visits))
    ]

    o = torch.full((case.batch, s, case.heads, case.dv), float("nan"), dtype=case.dtype)
    lse = poison(case.batch, case.heads, s)
    carry = None
    if len(case.visits) > 1:
        carry = Carry(lse.clone(), lse.clone(), poison(case.batch, s, case.heads, case.dv))
    for i in range(len(case.visits)):
        portable.forward(
            q,
            ks[i],
            vs[i],
            rows,
            sides[i],
            scores[i],
            carry=carry,
            first=i == 0,
            last=i == len(case.visits) - 1,
            o=o,
            lse=lse,
        )
    delta = portable.delta(o, do, dlse)
    # dk and dv of a buffer come from one visit; the second half of the time they add to what is there
    base = [torch.randn(k.shape, generator=g) for k in ks]
    dq = poison(*q.shape)
    dalibi = poison(case.batch, case.heads, s) if slopes is not None else None
    dbias = torch.zeros(case.batch, case.heads, s, n_k) if bias is not None else None
    dks, dvs, dkbs = [], [], []
    for i in range(len(case.visits)):
        add = i % 2 == 1
        dk = base[i].clone() if add else poison(*ks[i].shape)
        dv = torch.ones(vs[i].shape) if add else poison(*vs[i].shape)
        dkb = None if key_biases is None else (torch.ones(key_biases[i].shape) if add else poison(*key_biases[i].shape))
        grads = Grads(dq, dk, dv, dkb, dalibi, dbias, accumulate_rows=i > 0, accumulate_keys=add)
        portable.backward(do, q, ks[i], vs[i], lse, delta, rows, sides[i], scores[i], grads)
        dks.append(dk - base[i] if add else dk)
        dvs.append(dv - 1 if add else dv)
        dkbs.append(dkb - 1 if add and dkb is not None else dkb)

    leaf = {"q": q.double().requires_grad_(), "k": torch.cat(ks, 1).double().requires_grad_()}
    leaf["v"] = torch.cat(vs, 1).double().requires_grad_()
    if slopes is not None:  # one copy per row would need b h s slopes: the oracle sums
        leaf["alibi"] = slopes.double().requires_grad_()
    if key_biases is not None:
        leaf["key_bias"] = torch.cat(key_biases, 1).double().requires_grad_()
    if bias is not None:
        leaf["bias"] = bias.double().contiguous().requires_grad_()
    oracle_score = dataclasses.replace(
        score, alibi_slopes=leaf.get("alibi"), key_bias=leaf.get("key_bias"), bias=leaf.get("bias")
    )
    oracle_o, oracle_lse = attend(
        leaf["q"], leaf["k"], leaf["v"], q_pos, torch.cat(key_pos), rows_lo, rows_hi, oracle_score,
        None if sinks is None else sinks.double(),
    )  # fmt: skip
    finite = torch.where(torch.isfinite(oracle_lse), oracle_lse, 0.0)
    ((oracle_o * do.double()).sum() + (finite * dlse.double()).sum()).backward()
    out = {
        "o": (o, oracle_o.detach()),
        "lse": (lse, oracle_lse.detach()),
        "dq": (dq, leaf["q"].grad),
        "dk": (torch.cat(dks, 1), leaf["k"].grad),
        "dv": (torch.cat(dvs, 1), leaf["v"].grad),
    }
    if dalibi is not None:
        out["dalibi"] = (dalibi.sum((0, 2)), leaf["alibi"].grad)
    if key_biases is not None:
        out["dkey_bias"] = (torch.cat(dkbs, 1), leaf["key_bias"].grad)
    if dbias is not None:
        out["dbias"] = (dbias, leaf["bias"].grad)
    return out


def assert_equal(case: Case) -> None:
    tolerance = F32_TOLERANCE if case.dtype == torch.float32 else F16_TOLERANCE
    for name, (got, want) in run(case).items():
        assert got.shape == want.shape, name
        assert not torch.isnan(got).any(), name
        hidden = torch.isinf(want)
        assert torch.equal(torch.isinf(got), hidden), name
        if want.numel() == 0:
            continue
        want = torch.where(hidden, 0.0, want)
        error = (torch.where(hidden, 0.0, got.double()) - want).abs().max().item()
        assert error <= tolerance * max(1.0, want.abs().max().item()), f"{name}: {error:.2e}"


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (16, 16), (37, 75), (75, 37)])
def test_odd_lengths(s, t, mask):
    visible = everything(s, t) if mask == "full" else causal(s, t)
    assert_equal(Case(visible, whole(s), (whole(t),)))


@pytest.mark.parametrize(("s", "t"), [(0, 40), (40, 0), (0, 0)])
def test_an_empty_side_gives_zeros(s, t):
    assert_equal(Case(everything(s, t), whole(s), (whole(t),), features=("key_bias",)))


@pytest.mark.parametrize(
    "visible",
    [
        window(90, 90, 20, 0),
        window(90, 90, 7, 11),
        window(90, 90, 0, 0),
        documents(90, (0, 3, 3, 40, 41, 70)),
        causal(90, 90) | (torch.arange(90) < 25)[None, None, :],
        causal(40, 90),
    ],
    ids=["left", "both", "self", "documents", "prefix", "offset"],
)
def test_intervals(visible):
    assert_equal(Case(visible, whole(visible.shape[1]), (whole(90),)))


def test_rows_without_keys_are_zero():
    visible = causal(60, 60).clone()
    visible[:, :35] = False
    visible[:, 50:] = False
    assert_equal(Case(visible, whole(60), (whole(60),)))
    assert_equal(Case(visible, whole(60), (whole(60),), features=("sinks",)))


def test_bounds_differ_per_batch_element():
    visible = padded(70, ((0, 70), (13, 50), (40, 40), (69, 70)))
    assert_equal(Case(visible, whole(70), (whole(70),), batch=4, features=("key_bias",)))


ZIGZAG = (pack((0, 1, 24), (168, 1, 24)), pack((24, 1, 24), (144, 1, 24)), pack((48, 1, 48), (96, 1, 48)))
STRIPED = tuple(pack((r, 4, 48)) for r in range(4))
SCATTERED = (
    pack((0, 1, 5), (7, 1, 1), (10, 1, 40), (190, 1, 2)),
    pack((5, 1, 2), (8, 1, 2), (50, 1, 100)),
    pack((150, 1, 17), (167, 3, 8)),
)


@pytest.mark.parametrize("shards", [ZIGZAG, STRIPED, SCATTERED], ids=["zigzag", "striped", "scattered"])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_runs_and_carries(shards, mask):
    visible = causal(192, 192) if mask == "causal" else window(192, 192, 33, 4)
    for q_runs in shards[:2]:
        assert_equal(Case(visible, q_runs, shards))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2), (8, 1)])
def test_grouped_heads(heads, kv_heads):
    assert_equal(Case(causal(40, 40), whole(40), (whole(40),), batch=2, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(("d", "dv"), [(16, 64), (40, 40), (64, 24), (96, 96), (128, 64), (8, 8), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_head_dims(d, dv, dtype):
    assert_equal(Case(causal(40, 40), whole(40), (whole(40),), d=d, dv=dv, dtype=dtype))


FEATURES = ("softcap", "sinks", "alibi", "key_bias", "bias", "head_bias", "dropout")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_each_feature(feature, dtype):
    case = Case(causal(50, 50), ZIGZAG_50[0], ZIGZAG_50, batch=2, heads=4, dtype=dtype, features=(feature,))
    assert_equal(case)


ZIGZAG_50 = (pack((0, 1, 13), (37, 1, 13)), pack((13, 1, 24)))


@pytest.mark.parametrize("shards", [(whole(50),), ZIGZAG_50], ids=["one visit", "two visits"])
def test_all_features_together(shards):
    features = ("softcap", "sinks", "alibi", "key_bias", "bias", "dropout")
    assert_equal(Case(causal(50, 50), shards[0], shards, batch=2, heads=4, features=features))


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_softmax_scale(scale):
    assert_equal(Case(causal(50, 50), whole(50), (whole(50),), scale=scale))


def test_strided_inputs():
    assert_equal(Case(causal(50, 50), whole(50), (whole(50),), batch=2, transposed=True))


def test_three_visits_leave_what_one_visit_leaves():
    one = run(Case(causal(192, 192), whole(192), (whole(192),)))
    parts = tuple(pack((start, 1, 64)) for start in (0, 64, 128))
    three = run(Case(causal(192, 192), whole(192), parts))
    for name in ("o", "lse"):
        assert torch.allclose(one[name][0], three[name][0], atol=1e-6), name


def test_the_backward_is_the_same_bits_every_time():
    case = Case(causal(50, 50), whole(50), (whole(50),), heads=4, kv_heads=2, features=("dropout", "key_bias"))
    first, second = run(case), run(case)
    for name in first:
        assert torch.equal(first[name][0], second[name][0]), name


def test_keys_nobody_sees_are_never_read():
    n = 64
    visible = window(n, n, 0, 0)
    rows, keys = (side(whole(n), *bounds(visible, positions_of(whole(n))), positions_of(whole(n))) for _ in range(2))
    q = torch.randn(1, n, 1, 16)
    k, v = torch.randn(2, 1, 2 * n, 1, 16)
    k[:, n:], v[:, n:] = float("nan"), float("nan")
    o, lse = poison(1, n, 1, 16), poison(1, 1, n)
    portable.forward(q, k[:, :n], v[:, :n], rows, keys, Score(0.25), carry=None, first=True, last=True, o=o, lse=lse)
    assert torch.allclose(o, v[:, :n], atol=1e-6)


def test_a_visit_without_visible_keys_leaves_the_carry_alone():
    q, k = torch.randn(1, 40, 1, 16), torch.randn(1, 8, 1, 16)
    nothing = torch.zeros(1, 40, dtype=torch.int32)
    rows = side(whole(40), nothing, nothing, torch.arange(40))
    keys = side(whole(8), nothing[:, :8], nothing[:, :8], torch.arange(8))
    carry = Carry(torch.randn(1, 1, 40), torch.rand(1, 1, 40), torch.randn(1, 40, 1, 16))
    before = Carry(carry.m.clone(), carry.l.clone(), carry.acc.clone())
    o, lse = poison(1, 40, 1, 16), poison(1, 1, 40)
    portable.forward(q, k, k, rows, keys, Score(0.25), carry=carry, first=False, last=False, o=o, lse=lse)
    for name in ("m", "l", "acc"):
        assert torch.equal(getattr(carry, name), getattr(before, name))


@pytest.mark.parametrize(("dtype", "d", "match"), [(torch.float64, 16, "float32"), (torch.float32, 320, "up to 256")])
def test_what_is_not_served_is_refused(dtype, d, match):
    q = torch.zeros(1, 4, 1, d, dtype=dtype)
    bound = torch.zeros(1, 4, dtype=torch.int32)
    rows = side(whole(4), bound, bound, torch.arange(4))
    with pytest.raises(NotImplementedError, match=match):
        portable.forward(
            q,
            q,
            q,
            rows,
            rows,
            Score(1.0),
            carry=None,
            first=True,
            last=True,
            o=q,
            lse=torch.zeros(1, 1, 4, dtype=dtype),
        )
