"""The Triton decode kernel, interpreted, is exact on every case, and shares its work out as its note says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringattn.kernels.decode import configs as decode_configs
from ringattn.kernels.decode.configs import DecodeConfig
from ringattn.kernels.decode.dispatch import decode, parts_len, select_decode_kernel
from tests.support.decode_bytes import assert_bytes_are_numbers
from tests.support.decoding import CASES, Case, Scene, are_same, assert_exact, empty_parts, finish, make_scene

FP8 = [case for case in CASES if case.fp8]


def run(case: Case, dtype: torch.dtype) -> tuple[Scene, torch.Tensor]:
    scene = make_scene(case, dtype)
    parts = empty_parts(scene, case.splits)
    decode(scene.call(), parts, impl="portable")
    assert_exact(scene, parts)
    return scene, parts


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_stays_within_budget(case: Case) -> None:
    run(case, torch.float32)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5], *FP8], ids=str)
def test_half_precision_stays_within_budget(case: Case) -> None:
    run(case, torch.float16)


@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spoilt", ["q", "k", "v"])
def test_what_is_not_finite_stays_with_its_request(spoilt: str, bad: float) -> None:
    scene = make_scene(Case(lengths=(90, 70, 33), tokens=3, splits=3, mine=1.0))
    found = []
    for which in (None, spoilt):
        given = {name: getattr(scene, name).clone() for name in ("q", "k", "v")}
        if which == "q":
            given["q"][1] = bad
        elif which is not None:
            for page, _, length in scene.blocks[1]:
                given[which][page, :, :length] = bad
        other = replace(scene, **given)
        parts = empty_parts(other, 3)
        decode(other.call(), parts, impl="portable")
        found.append(finish(other, parts)[0][[0, 2]])
    assert torch.equal(*found)


@pytest.mark.parametrize("softcap", [50.0, 2.0**13, 2.0**100])
def test_a_wide_softcap_loses_no_digits_of_fp32(softcap: float) -> None:
    run(Case(lengths=(160, 77), tokens=2, softcap=softcap), torch.float32)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_that_sees_nothing_stays_so_beside_rows_that_see_all(fp8: bool) -> None:
    scene = make_scene(Case(lengths=(64, 64), tokens=3, mine=1.0, ragged=0.0, causal=False, fp8=fp8, page_size=32))
    hi = scene.hi.clone()
    hi[0, 1] = hi[1, 0] = 0
    scene = replace(scene, hi=hi)
    parts = empty_parts(scene, 2)
    decode(scene.call(), parts, impl="portable")
    assert_exact(scene, parts)


def test_two_bytes_are_two_numbers() -> None:
    assert_bytes_are_numbers(torch.device("cpu"), "portable")


def test_values_of_any_size_survive_fp8() -> None:
    """Scales of v from 1e-9 to 1e9 beside each other, and rows of zeros whose scale is zero."""
    scene = make_scene(Case(lengths=(120, 60), fp8=True, head_dim=32, page_size=32, mine=1.0), torch.float16)
    assert scene.v_scale is not None
    sizes = torch.logspace(-9, 9, 19)[torch.arange(32) % 19]
    sizes[5] = 0.0
    scene = replace(scene, v_scale=scene.v_scale * sizes)
    parts = empty_parts(scene, 2)
    decode(scene.call(), parts, impl="portable")
    expected = empty_parts(scene, 1)
    decode(scene.call(), expected, impl="eager")
    (o, lse), (o_eager, lse_eager) = finish(scene, parts), finish(scene, expected)
    torch.testing.assert_close(o, o_eager, rtol=0, atol=2e-3 * o_eager.abs().max().item())
    torch.testing.assert_close(lse, lse_eager, rtol=0, atol=1e-3)


def assert_shares(found: list[int], splits: int, lengths: tuple[int, ...], window: int | None = None) -> None:
    """Check in how many splits each request holds something, and the numbers."""
    case = Case(lengths=lengths, mine=1.0, ragged=0.0, heads=2, kv_heads=1, head_dim=16, splits=splits, window=window)
    scene = make_scene(case)
    parts = empty_parts(scene, splits)
    decode(scene.call(), parts, impl="portable")
    b, s, h, _ = scene.q.shape
    rows, dv = b * s * h, scene.v.shape[-1]
    used = (parts[:, rows * dv : rows * dv + rows] > -torch.inf).view(-1, b, s * h).any(2)
    assert used.sum(0).tolist() == found
    assert_exact(scene, parts)


def test_a_long_request_gets_the_programs_that_short_ones_do_not_need() -> None:
    # four multiprocessors, two programs each: 8 slots; of 13 blocks a share there would be 9 shares, of 15 there are 8
    assert_shares([7, 1], 8, (16 * 100, 16 * 4))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("lengths", "found"), [((100,) * 9, [4] * 9), ((100,) * 8, [1] * 8), ((200, *(4,) * 8), [8] + [1] * 8)]
)
def test_shares_are_finer_where_the_last_round_would_be_long(lengths: tuple[int, ...], found: list[int]) -> None:
    """Nine requests on eight slots would take as long as sixteen; eight need one round; short ones fit beside a long one."""
    assert_shares(found, 8, tuple(16 * blocks for blocks in lengths))


def test_a_window_is_shared_among_all_programs_of_its_request() -> None:
    assert_shares([4], 4, (16 * 200,), window=16 * 40 - 1)


def test_pages_outside_the_window_are_not_looked_at() -> None:
    case = Case(lengths=(16 * 60,), mine=1.0, ragged=0.0, heads=2, kv_heads=1, head_dim=16, window=95)  # from 864 on
    scene = make_scene(case)
    seen = [page for page, start, length in scene.blocks[0] if start + length > 864]
    unseen = torch.ones(scene.k.shape[0], dtype=torch.bool).index_fill(0, torch.tensor(seen), False)
    pages = scene.table.pages.clone()
    pages[0, : 60 - len(seen)] = -(2**31)  # an address that would fault
    poisoned = replace(
        scene,
        k=scene.k.masked_fill(unseen[:, None, None, None], torch.nan),
        v=scene.v.masked_fill(unseen[:, None, None, None], torch.nan),
        table=replace(scene.table, pages=pages),
    )
    results = []
    for one in (scene, poisoned):
        parts = empty_parts(one, 3)
        decode(one.call(), parts, impl="portable")
        results.append(parts)
    assert are_same(*results)
    assert_exact(scene, results[0])


@pytest.mark.parametrize(
    "config", [DecodeConfig(16, 1, 1, 3, block_m=16), DecodeConfig(64, 1, 1, 1), DecodeConfig(32, 1, 1, 7)], ids=str
)
def test_any_configuration_is_exact(config: DecodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_configs, "choose", lambda *args, **kwargs: config)
    scene = make_scene(Case(lengths=(300, 90), tokens=7, heads=8, kv_heads=2, head_dim=16, page_size=64))
    parts = empty_parts(scene, 5)
    decode(scene.call(), parts, impl="portable")
    assert_exact(scene, parts)


def test_pools_and_stacks_may_be_views() -> None:
    scene = make_scene(Case(lengths=(100, 30), tokens=2))
    pages, hk, page_size, d = scene.k.shape
    both = torch.stack([scene.k, scene.v], 3).view(pages, hk, page_size, 2 * d)
    rows_first = scene.v.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((3, parts_len(2 * 2 * 4, d) + 5), 7.0)
    for k, v in ((both[..., :d], both[..., d:]), (scene.k, rows_first)):
        viewed = replace(scene, k=k, v=v)
        parts = wide[:, :-5]
        decode(viewed.call(), parts, impl="portable")
        assert_exact(scene, parts)
        assert bool((wide[:, -5:] == 7.0).all())


def test_fp8_pools_may_be_views_with_even_strides() -> None:
    scene = make_scene(Case(lengths=(100, 30), tokens=2, fp8=True), torch.float16)
    for room in (2, 3):
        wide = torch.zeros(*scene.v.shape[:3], scene.v.shape[3] + room, dtype=torch.uint8).view(scene.v.dtype)
        wide[..., :-room] = scene.v
        viewed, parts = replace(scene, v=wide[..., :-room]), empty_parts(scene, 3)
        if room % 2:
            with pytest.raises(ValueError, match=r"v in .* must have even strides and address, .* make it contiguous"):
                decode(viewed.call(), parts, impl="portable")
        else:
            decode(viewed.call(), parts, impl="portable")
            assert_exact(scene, parts)


def test_what_eager_refuses_is_refused_before_a_launch() -> None:
    scene = make_scene(Case())
    with pytest.raises(ValueError, match=r"hi must be torch\.int32"):
        decode(replace(scene, hi=scene.hi.long()).call(), empty_parts(scene, 1), impl="portable")
    choice = select_decode_kernel(torch.device("cpu"), torch.float32, torch.float32, 64, 64, 16, impl="portable")
    assert str(choice) == "portable: the Triton interpreter was asked for"
