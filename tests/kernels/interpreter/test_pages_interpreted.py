"""The Triton put and take leave the bits of the definition, and e4m3 by integers is that of torch."""

import math
from dataclasses import replace

import pytest
import torch

from ringattn.kernels.kv.pages import Pool
from tests.support import decoding
from tests.support.paging import CASES, Case, assert_put, assert_take


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_put_as_defined(case: Case) -> None:
    from ringattn.kernels.kv import pages_triton

    assert_put(pages_triton.put, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_taken_as_defined(case: Case) -> None:
    from ringattn.kernels.kv import pages_triton

    if case.is_quantised and case.dtype == torch.bfloat16:
        # the interpreter cuts fp32 off where a GPU rounds it
        case = replace(case, dtype=torch.float16)
    assert_take(pages_triton.take, case)


def test_every_code_of_e4m3_is_read_and_written_as_torch_does() -> None:
    from ringattn.kernels.kv import pages_triton

    # a page of 256 rows of one number: the codes as they are, scale 1
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 256, 1)
    scale = torch.ones(1, 1, 256)
    k, v = torch.empty(2, 1, 256, 1, 1)
    pages_triton.take(Pool(codes, codes.clone(), scale, scale.clone()), torch.arange(256).view(1, 256), k, v)
    expected = codes.float().flatten()
    assert torch.equal(k.flatten().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    # each beside 448, so that the scale is 1 again; and what lies between two codes, ties included
    finite = expected[expected.isfinite()].sort().values
    between = torch.cat([finite, *((a * finite[:-1] + (1 - a) * finite[1:]) for a in (0.25, 0.5, 0.5001, 0.75))])
    rows = torch.stack([between, torch.full_like(between, 448.0)], -1).view(1, -1, 1, 2)
    n = rows.shape[1]
    pool, scale = torch.zeros(1, 1, n, 2, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, n)
    slots = torch.arange(n).view(1, n)
    pages_triton.put(Pool(pool, pool.clone(), scale, scale.clone()), rows, rows.clone(), slots)
    assert scale.unique().tolist() == [1.0]
    assert torch.equal(pool.view(torch.uint8)[0, 0], rows[0, :, 0].to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_wherever_it_is_read(bad: float) -> None:
    from ringattn.kernels.kv import pages, pages_triton

    rows = torch.ones(1, 2, 1, 8)
    rows[0, 0, 0, 3] = bad
    for module in (pages_triton, pages):
        pool = [torch.zeros(1, 1, 4, 8, dtype=torch.float8_e4m3fn) for _ in range(2)]
        scales = [torch.zeros(1, 1, 4) for _ in range(2)]
        slots = torch.tensor([[2, 1]])
        module.put(Pool(*pool, *scales), rows, rows.clone(), slots)
        k, v = torch.zeros(2, 1, 2, 1, 8)
        module.take(Pool(*pool, *scales), slots, k, v)
        assert k[0, 0].isnan().all()
        assert torch.equal(k[0, 1], torch.ones(1, 8))


@pytest.mark.parametrize("kv_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_of_values_that_is_not_finite_is_zeros_beside_a_key_of_nan(bad: float, kv_dtype: torch.dtype) -> None:
    from ringattn.kernels.kv import pages, pages_triton

    fp8 = kv_dtype == torch.float8_e4m3fn
    dtype = torch.float32 if fp8 else kv_dtype
    k, v = torch.ones(1, 2, 2, 8, dtype=dtype), torch.ones(1, 2, 2, 4, dtype=dtype)
    v[0, 0, 1, 3] = bad
    slots = torch.tensor([[2, -1]])
    for module in (pages_triton, pages):
        pool = [torch.zeros(1, 2, 4, dim, dtype=kv_dtype) for dim in (8, 4)]
        scales = [torch.zeros(1, 2, 4) if fp8 else None for _ in range(2)]
        contained = torch.zeros_like(k), torch.zeros_like(v)
        module.put(Pool(*pool, *scales), k, v, slots, contained)
        kept = torch.zeros_like(k[:, :1]), torch.zeros_like(v[:, :1])
        module.take(Pool(*pool, *scales), slots[:, :1], *kept)
        for keys, values in (kept, contained):
            assert keys[0, 0, 1].isnan().all()
            assert torch.equal(values[0, 0, 1], torch.zeros(4, dtype=dtype))
            assert torch.equal(keys[0, 0, 0], k[0, 0, 0])
            assert torch.equal(values[0, 0, 0], v[0, 0, 0])
        assert torch.equal(contained[1][0, 1], v[0, 1]), "rows that are kept elsewhere are written, too"


@pytest.mark.parametrize("kv_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 7, 8, 11])
def test_a_latent_that_is_not_finite_is_zeros_beside_nan(column: int, bad: float, kv_dtype: torch.dtype) -> None:
    from ringattn.kernels.kv import pages, pages_triton

    fp8 = kv_dtype == torch.float8_e4m3fn
    k = torch.ones(1, 3, 1, 12, dtype=torch.float32 if fp8 else kv_dtype)
    k[0, 0, 0, column] = k[0, 2, 0, column] = bad
    instead = [0.0] * 8 + [math.nan] * 4
    wanted = torch.tensor([instead, [1.0] * 12, instead], dtype=k.dtype)
    slots = torch.tensor([[2, 1, -1]])
    for module in (pages_triton, pages):
        pages_of_all = torch.zeros(1, 1, 4, 12, dtype=kv_dtype)
        scale = torch.zeros(1, 1, 4) if fp8 else None
        pool = Pool(pages_of_all, pages_of_all[..., :8], scale, scale)
        contained, kept = torch.full_like(k, 7.0), torch.full_like(k[:, :2], 7.0)
        module.put(pool, k, k[..., :8], slots, (contained, contained[..., :8]))
        module.take(pool, slots[:, :2], kept, kept[..., :8])
        torch.testing.assert_close(contained[0, :, 0], wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(kept[0, :, 0], wanted[:2], rtol=0, atol=0, equal_nan=True)
        assert scale is None or bool(scale.isfinite().all()), "it is that of the values"


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_latent_that_is_not_finite_stays_with_the_tokens_that_see_it(kv_dtype: torch.dtype) -> None:
    from ringattn.kernels.decode.dispatch import decode
    from ringattn.kernels.kv import pages

    fp8 = kv_dtype == torch.float8_e4m3fn
    case = decoding.Case(
        lengths=(60,), tokens=4, latent=True, fp8=fp8, heads=3, kv_heads=1, head_dim=24, v_head_dim=16, mine=1.0
    )
    scene = decoding.make_scene(case)
    page, start, length = scene.blocks[0][-1]
    assert start + length == 60
    found = []
    for spoil in (False, True):
        if spoil:
            row = torch.ones(1, 1, 1, 24)
            row[..., 20] = math.inf
            slot = torch.tensor([[page * case.page_size + length - 2]])
            pages.put(Pool(scene.k, scene.v, scene.k_scale, scene.v_scale), row, row[..., :16], slot)
        for impl in ("eager", "portable"):
            parts = decoding.empty_parts(scene, 3)
            decode(scene.call(), parts, impl=impl)
            found.append(decoding.finish(scene, parts)[0])
    for expected, o in zip(found[:2], found[2:], strict=True):
        assert torch.equal(o[0, :2], expected[0, :2])
        assert bool(o[0, 2:].isnan().all())
