"""Decode over pages, eager: exact attention for any table, and refusals that say what to do."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.kernels.decode import configs as decode_configs
from ringattn.kernels.decode import eager as decode_eager
from ringattn.kernels.decode.dispatch import FP8, decode, num_splits, parts_len, select_decode_kernel
from ringattn.kernels.interface import Score
from tests.support.decoding import CASES, Case, assert_exact, empty_parts, finish, make_scene, make_table

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
INF = float("inf")


def run(case: Case, dtype: torch.dtype) -> None:
    scene = make_scene(case, dtype)
    parts = empty_parts(scene, case.splits)
    decode(scene.call(), parts)
    assert_exact(scene, parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_stays_within_budget(case: Case, dtype: torch.dtype) -> None:
    run(case, dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    v_head_dim, latent = draw(st.integers(1, 40)), draw(st.booleans())
    kv_heads = 1 if latent else draw(st.integers(1, 3))
    return Case(
        lengths=tuple(draw(st.lists(st.integers(0, 120), min_size=1, max_size=4))),
        tokens=draw(st.integers(1, 16)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(0 if latent else 1, 40)) + v_head_dim * latent,
        v_head_dim=v_head_dim,
        latent=latent,
        page_size=draw(st.sampled_from([1, 3, 8, 16, 64])),
        mine=draw(st.sampled_from([0.0, 0.3, 1.0])),
        ragged=draw(st.sampled_from([0.0, 0.5])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(0, 50)),
        wild=draw(st.booleans()),
        shared=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 4.0])),
        alibi=draw(st.booleans()),
        fp8=draw(st.booleans()),
        splits=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 10**6)),
    )


@settings(max_examples=80, deadline=None)
@given(cases())
def test_any_table_gives_exact_attention(case: Case) -> None:
    run(case, torch.float64)


def test_rows_that_see_nothing_are_the_identity_in_every_split() -> None:
    scene = make_scene(Case(lengths=(50, 50), splits=3))
    scene = replace(scene, lo=scene.lo + 1000, hi=scene.hi + 1000)
    parts = empty_parts(scene, 3)
    decode(scene.call(), parts)
    rows = scene.q.shape[0] * scene.q.shape[2]
    assert torch.equal(parts[:, : rows * 32], torch.zeros(3, rows * 32))
    assert torch.equal(parts[:, rows * 32 : rows * 33], torch.full((3, rows), -INF))
    assert torch.equal(parts[:, rows * 33 :], torch.zeros(3, rows))
    o, lse = finish(scene, parts)
    assert not o.any()
    assert bool((lse == -INF).all())


def test_the_stack_may_be_a_view_and_nothing_beside_it_is_written() -> None:
    scene = make_scene(Case())
    parts = empty_parts(scene, 2)
    wide = torch.full((2, parts.shape[1] + 5), 7.0)
    decode(scene.call(), wide[:, : parts.shape[1]])
    assert_exact(scene, wide[:, : parts.shape[1]])
    assert bool((wide[:, parts.shape[1] :] == 7.0).all())


@pytest.mark.parametrize("splits", [1, 2, 5, 60])
def test_the_height_of_the_stack_does_not_matter(splits: int) -> None:
    scene = make_scene(Case(lengths=(300, 20)), torch.float64)
    parts = empty_parts(scene, splits)
    decode(scene.call(), parts)
    assert_exact(scene, parts)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": lambda x: x.q.new_zeros(2, 129, 4, 32)}, ValueError, "1 to 128 new tokens per request, got 129"),
        ({"q": lambda x: x.q[:, :, :3]}, ValueError, "heads that divides q's, got 2 and 3"),
        ({"q": lambda x: x.q[..., :16]}, ValueError, r"k must have shape .*16\), got .*32\)"),
        ({"k": lambda x: x.k.bfloat16()}, ValueError, "one dtype, got torch.bfloat16 and torch.float32"),
        ({"q": lambda x: x.q.bfloat16()}, ValueError, "k must have q's dtype torch.bfloat16 or"),
        ({"k_scale": lambda x: x.k[..., 0]}, ValueError, "k_scale must be None unless"),
        ({"v_scale": None}, ValueError, "v_scale must be given when k and v are"),
        ({"lo": lambda x: x.lo.long()}, ValueError, "lo must be torch.int32, got torch.int64"),
        ({"hi": lambda x: x.hi[:1]}, ValueError, r"hi must have shape \(2, 2\)"),
        ({"parts": lambda x: empty_parts(x, 2)[:, 1:]}, ValueError, "parts must have shape"),
        ({"parts": lambda x: empty_parts(x, 2).double()}, ValueError, "parts must be torch.float32"),
        ({"k": lambda x: x.k.mT.contiguous().mT}, ValueError, "k must have a contiguous last dim"),
        ({"score": Score(1.0, sinks=torch.zeros(4))}, NotImplementedError, "no sinks, got some; give them to what merges"),
        ({"score": Score(1.0, key_bias=torch.zeros(2, 9))}, NotImplementedError, "no key_bias, got some; use prefill"),
        ({"score": Score(1.0, bias=torch.zeros(1))}, NotImplementedError, "no bias, got some; use prefill"),
        ({"score": Score(1.0, dropout_p=0.5)}, NotImplementedError, "no dropout, got dropout_p=0.5"),
        ({"score": Score(1.0, alibi_slopes=torch.zeros(3))}, ValueError, r"alibi_slopes must have shape \(4,\)"),
        ({"table": lambda x: replace(x.table, counts=x.table.counts[:1])}, ValueError, "table.counts must have shape"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_served_are_refused(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    scene = make_scene(Case(lengths=(50, 20), tokens=2, fp8="v_scale" in changes))
    given: dict[str, Any] = {name: x(scene) if callable(x) else x for name, x in changes.items()}
    parts = given.pop("parts", empty_parts(scene, 2))
    with pytest.raises(error, match=match):
        decode_eager.decode(replace(scene, **given).call(), parts)


def test_latents_are_told_by_their_storage_and_have_one_scale() -> None:
    scene = make_scene(Case(lengths=(50, 20), fp8=True, latent=True, kv_heads=1, head_dim=24, v_head_dim=16))
    assert scene.call().latent
    assert not replace(scene, v=scene.v.view(torch.uint8).clone().view(FP8)).call().latent
    assert not make_scene(Case()).call().latent
    assert scene.v_scale is not None
    with pytest.raises(ValueError, match="v_scale must be k_scale"):
        decode_eager.decode(replace(scene, v_scale=scene.v_scale.clone()).call(), empty_parts(scene, 2))


def test_a_latent_that_is_not_finite_stays_with_the_rows_that_see_it() -> None:
    """Zeros in its value columns and NaN in the others, as pages keep it (Note [Latents])."""
    case = Case(lengths=(60,), tokens=4, latent=True, heads=3, kv_heads=1, head_dim=24, v_head_dim=16, mine=1.0)
    scene = make_scene(case)
    page, start, length = scene.blocks[0][-1]
    assert start + length == 60
    right = empty_parts(scene, 3)
    decode(scene.call(), right)
    scene.k[page, 0, length - 2] = torch.tensor([0.0] * 16 + [torch.nan] * 8)
    parts = empty_parts(scene, 3)
    decode(scene.call(), parts)
    (o, _), (expected, _) = finish(scene, parts), finish(scene, right)
    assert torch.equal(o[0, :2], expected[0, :2])
    assert bool(o[0, 2:].isnan().all())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A machine that looks like it has an H100; returns what stands in for the portable kernel."""
    portable = types.ModuleType("ringattn.kernels.decode.decode_triton")
    monkeypatch.setitem(sys.modules, "ringattn.kernels.decode.decode_triton", portable)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    select_decode_kernel.cache_clear()
    yield portable
    select_decode_kernel.cache_clear()


@pytest.mark.parametrize(
    ("dims", "rows", "why"),
    [
        ((128, 64, 64), 16, None),
        ((96, 96, 64), 1, "head_dim and v_head_dim must be 64 or 128, got 96 and 96"),
        ((128, 128, 32), 1, "page_size must be a multiple of 64, got 32"),
        ((128, 128, 64), 17, "a key head must have at most 16 rows of queries, got 17"),
    ],
)
def test_few_rows_of_pages_are_served_by_hopper_and_the_choice_says_why(
    gpu: types.ModuleType, monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int, int], rows: int, why: str | None
) -> None:
    hopper = types.ModuleType("ringattn.kernels.decode.paged_hopper")
    monkeypatch.setitem(sys.modules, hopper.__name__, hopper)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    choice = select_decode_kernel(GPU, torch.bfloat16, FP8, *dims, rows=rows)
    assert choice.kernels is (hopper if why is None else gpu)
    reason = "hopper: compute capability 9.0 and triton 3.6.0"
    assert str(choice) == (
        reason if why is None else f"portable: CUDA device of compute capability 9.0; not hopper: {why}"
    )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "columns", "why"),
    [
        (torch.bfloat16, FP8, 576, None),
        (torch.float16, FP8, 576, None),
        (torch.bfloat16, torch.bfloat16, 520, None),
        (torch.bfloat16, FP8, 520, "up to 64 rotary ones, in multiples of 16, got 512 of 520"),
        (torch.bfloat16, torch.bfloat16, 516, "up to 64 rotary ones, in multiples of 8, got 512 of 516"),
        (torch.float16, torch.bfloat16, 576, "k must have q's dtype or torch.float8_e4m3fn, got torch.bfloat16"),
    ],
)
def test_latents_in_16_and_8_bits_are_served_by_hopper(
    gpu: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    columns: int,
    why: str | None,
) -> None:
    hopper = types.ModuleType("ringattn.kernels.decode.latent_hopper")
    monkeypatch.setitem(sys.modules, hopper.__name__, hopper)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.7.0"))
    choice = select_decode_kernel(GPU, dtype, kv_dtype, columns, 512, 64, latent=True)
    assert choice.kernels is (hopper if why is None else gpu)
    assert [reason for _, reason in choice.rejected if why is None or why not in reason] == []


@pytest.mark.parametrize(
    ("dtype", "dims", "why"),
    [
        (torch.float64, (64, 64, 64), "dtype must be float16, bfloat16 or float32, got float64"),
        (torch.bfloat16, (8, 64, 64), "head_dim must be between 16 and 256, got 8"),
        (torch.bfloat16, (64, 512, 64), "v_head_dim must be between 16 and 256, got 512"),
        (torch.bfloat16, (64, 64, 48), "page_size must be a power of two between 16 and 256, got 48"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_what_portable_refuses_falls_to_eager_with_a_reason(
    dtype: torch.dtype, dims: tuple[int, int, int], why: str
) -> None:
    choice = select_decode_kernel(GPU, dtype, dtype, *dims)
    assert choice.kernels is decode_eager
    assert choice.rejected[-1] == ("portable", why)
    assert str(choice).endswith(f"not portable: {why}")
    with pytest.raises(NotImplementedError, match=f'impl="portable" cannot serve .*{why}; use impl="eager"'):
        select_decode_kernel(GPU, dtype, dtype, *dims, impl="portable")


def test_unknown_kernels_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match='impl must be "auto" or one of hopper, portable, eager, got "cuda"'):
        select_decode_kernel(CPU, torch.float32, torch.float32, 64, 64, 16, impl="cuda")
    with pytest.raises(NotImplementedError, match=r"no decode kernel serves this call: .*portable: dtype must be"):
        select_decode_kernel(CPU, torch.int32, torch.int32, 64, 64, 16)


def test_a_share_is_neither_too_small_nor_more_than_its_part_of_the_device() -> None:
    for s, group, page_size in [(1, 4, 64), (16, 4, 64), (16, 32, 16), (1, 1, 256)]:
        tokens = page_size * decode_configs.least_blocks(s, group, page_size)
        assert tokens >= decode_configs.MIN_TOKENS
        assert tokens >= decode_configs.MIN_TOKENS_PER_ROW * s * group
    two = decode_configs.DecodeConfig(64, 4, 4, per_sm=2)
    splits = functools.partial(decode_configs.splits, page_size=64, sms=132, config=two)
    assert splits(1, 1, 32, 8, 16384) * 8 <= 2 * 132  # one wave of two programs for each multiprocessor
    assert splits(1, 1, 32, 8, 16384) * 8 > 2 * 132 - 8
    assert splits(1, 1, 32, 8, 4) == 2
    assert splits(1, 1, 32, 8, 0) == 1
    assert splits(1, 1, 512, 512, 16384) == 1
    # a long request among 63 short ones still gets a program of every multiprocessor
    assert splits(64, 1, 32, 8, 16384) * 8 > 132 - 8
    assert num_splits(1, 1, 32, 8, 16384, 64, CPU) == 1


def test_splits_follow_the_kernel_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = importlib.import_module("ringattn.kernels.attention.portable.configs")
    monkeypatch.setattr(kinds, "kind_of", lambda device: "sm90")
    monkeypatch.setattr(decode_configs, "multiprocessors", lambda device: 132)
    for page_size, s in ((64, 1), (32, 1), (64, 5)):
        few = page_size == 64 and s * 4 <= decode_configs.FEW_ROWS
        config = decode_configs.PAGED_HOPPER[1] if few else decode_configs.choose("sm90", 1, 128, s * 4)
        expected = decode_configs.splits(1, s, 32, 8, 4096, page_size, 132, config)
        assert num_splits(1, s, 32, 8, 4096, page_size, GPU, kv_dtype=FP8) == expected


def test_parts_are_acc_then_m_then_l() -> None:
    scene = make_scene(Case(lengths=(40,), mine=1.0, heads=2, kv_heads=1))
    parts = empty_parts(scene, 1)
    decode(scene.call(), parts)
    assert parts.shape[1] == parts_len(2, 32) == 2 * 34
    o, _ = finish(scene, parts)
    torch.testing.assert_close(parts[0, :32] / parts[0, 66], o[0, 0, 0])
    make = make_table(scene.blocks)
    assert make.pages.shape[1] == 5
    assert int(make.counts) == 3
