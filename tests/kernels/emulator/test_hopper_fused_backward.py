from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("GLUON_EMULATOR") != "1":
    pytest.skip("the kernels must not be imported before the emulator is there", allow_module_level=True)

from ringattn.kernels.attention.hopper import launcher, tile_scheduler
from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.attention.hopper.configs import DkvConfig, DqConfig, WideDkvConfig
from ringattn.kernels.attention.hopper.launcher import launch_dkv, launch_dq
from ringattn.kernels.attention.hopper.tile_scheduler import Shape, schedule_tiles
from ringattn.kernels.attention.portable.api import portable_delta
from ringattn.kernels.comm.grad_reduce import reduce_key_bias_grads, reduce_kv_grads
from ringattn.kernels.interface import BackwardStep, Grads, Step
from tests.kernels.emulator import gluon as machine
from tests.kernels.emulator.progress import split_always
from tests.support.budget import assert_within_budget
from tests.support.fused_cases import RingStep, Scene, contributions, make_visit, make_whole, shards_of
from tests.support.in_turns import InTurns
from tests.support.large_strides import heads_apart, leave_memory_alone
from tests.support.term_masks import blocks_and_window, causal_blocks, sinks_and_window, tree

CAUSAL: dict[str, Any] = {"causal": True}
DOCUMENTS = {"causal": True, "documents": (0, 30, 31, 200, 390, 501)}
SCENES = (
    Scene("zigzag", shards_of("zigzag", 601, 2), CAUSAL),
    Scene("contiguous_full", shards_of("contiguous", 450, 3), heads=1),
    Scene("documents", shards_of("scattered", 501, 2), DOCUMENTS, head_dim=128),
    Scene("window", shards_of("contiguous", 560, 3), {"window": (20, 5)}, heads=1),
    Scene("group", shards_of("zigzag", 300, 2), CAUSAL, heads=8, kv_heads=2, groups=2),
    Scene("head_groups_wide", shards_of("zigzag", 410, 2), CAUSAL, heads=4, kv_heads=4, groups=4, head_dim=128),
    Scene("lengths", shards_of("zigzag", 330, 2), {"causal": True, "lengths": ((0, 330), (37, 253))}, batch=2),
    Scene("narrow_columns", shards_of("contiguous", 270, 2), CAUSAL, head_dim=96, v_head_dim=40),
    Scene("softcap_sinks", shards_of("zigzag", 420, 2), CAUSAL, softcap=3.0, sinks=True, dtype=torch.float16),
    Scene("slopes", shards_of("zigzag", 420, 2), CAUSAL, alibi=True),
    Scene("slopes_wide", shards_of("zigzag", 300, 2), CAUSAL, alibi=True, head_dim=128),
    Scene("slopes_window", shards_of("contiguous", 560, 3), {"window": (20, 5)}, heads=1, alibi=True),
    Scene("key_bias", shards_of("zigzag", 420, 2), CAUSAL, heads=4, kv_heads=2, batch=2, groups=2, key_bias=True),
    Scene("key_bias_pair", shards_of("zigzag", 300, 2), CAUSAL, key_bias=True, head_dim=128),
    Scene("every_term", shards_of("zigzag", 300, 2), CAUSAL, softcap=4.0, alibi=True, key_bias=True),
    Scene("wide", shards_of("zigzag", 260, 3), CAUSAL, head_dim=256),
    Scene("wide_groups", shards_of("contiguous", 200, 2), heads=4, kv_heads=2, groups=2, head_dim=192, v_head_dim=72),
    Scene("wide_terms", shards_of("zigzag", 200, 2), CAUSAL, softcap=4.0, alibi=True, key_bias=True, head_dim=136),
    Scene("alone", (((0, 1, 200),),), CAUSAL),
)


OF_TERMS = (
    Scene("tree", shards_of("zigzag", 301, 2), terms=tree, heads=4, kv_heads=2, groups=2, batch=2),
    Scene("sinks_and_window", shards_of("contiguous", 330, 3), terms=sinks_and_window, sinks=True, head_dim=128),
    Scene("blocks", shards_of("zigzag", 500, 2), terms=lambda n: causal_blocks(n, 64), heads=1),
    Scene(
        "blocks_and_window", shards_of("scattered", 260, 2), terms=blocks_and_window, softcap=4.0, alibi=True,
        key_bias=True,
    ),
    Scene("wide_blocks", shards_of("zigzag", 200, 2), terms=lambda n: blocks_and_window(n, 32), heads=1, head_dim=256),
)  # fmt: skip


def named(name: str) -> Scene:
    return next(scene for scene in SCENES if scene.name == name)


def run(
    ring_step: RingStep,
    *,
    waits: bool = True,
    deterministic: bool = False,
    kernel_set: type[HopperKernels] = HopperKernels,
    of_sums: torch.dtype | None = None,
    **mode: Any,
) -> tuple[Tensor, Tensor | None]:
    """(dq, dalibi) of a rank, which makes delta; its far is filled beside the kernel, or before it."""
    if not waits:
        while ring_step.arrive():
            pass
    step, grads, arrivals = ring_step.step(makes_delta=True), ring_step.grads(of_sums), ring_step.arrivals
    kernels = kernel_set(ring_step.call(deterministic=deterministic))
    if kernel_set is HopperKernels:
        kernels.bound.in_turns = False  # the pair, however many tiles there are
    with machine.mode(mapped=(*ring_step.regions, *ring_step.bias_regions), outside=ring_step.arrive, **mode):
        kernels.backward_fused(
            step, arrivals if waits else arrivals._replace(ready_flags=None), ring_step.returns, grads
        )
    given = ring_step.step().delta
    torch.testing.assert_close(step.delta, given, rtol=0.02, atol=0.02 * ring_step.whole.scene.head_dim**0.5)
    return grads.dq, grads.dalibi


def assert_gradients_within_budget(scene: Scene, **options: Any) -> None:
    whole = make_whole(scene)
    ring_steps = [make_visit(whole, rank) for rank in range(len(scene.shards))]
    found = {name: torch.full_like(x, float("nan")) for name, x in whole.low.items() if name not in ("o", "lse")}
    for ring_step in ring_steps:
        dq, dalibi = run(ring_step, **options)
        found["dq"][:, ring_step.places] = dq
        if dalibi is not None:
            found["dalibi"][:, :, ring_step.places] = dalibi.to(scene.dtype)
        assert ring_step.error.item() == 0
        for region, places in zip(ring_step.regions, ring_step.source_places, strict=True):
            assert region[:, : len(places)].isfinite().all(), "every row of every source is written"
            assert region[:, len(places) :].isnan().all(), "no other row is"
        for region, places in zip(ring_step.bias_regions, ring_step.source_places, strict=scene.key_bias):
            assert region[..., : len(places)].isfinite().all()
            assert region[..., len(places) :].isnan().all()
    for ring_step in ring_steps:
        if scene.key_bias:
            dkey_bias = torch.full((scene.batch, len(ring_step.places)), float("nan"))
            reduce_key_bias_grads(dkey_bias, *contributions(ring_steps, ring_step.rank, biases=True))
            found["dkey_bias"][:, ring_step.places] = dkey_bias.to(scene.dtype)
        own = contributions(ring_steps, ring_step.rank)
        dk, dv = (torch.full_like(x, float("nan")) for x in ring_step.near)
        reduce_kv_grads(dk, dv, *own)
        found["dk"][:, ring_step.places], found["dv"][:, ring_step.places] = dk, dv
    for name, x in found.items():
        assert_within_budget(x, whole.exact[name], whole.low[name], f"{scene}: {name}", scene.dtype)


@pytest.mark.emulated
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_gradients_come_home_and_stay_within_budget(scene: Scene):
    assert_gradients_within_budget(scene)


@pytest.mark.emulated
@pytest.mark.parametrize("scene", OF_TERMS, ids=str)
def test_gradients_of_several_terms_stay_within_budget(scene: Scene):
    assert_gradients_within_budget(scene)
    assert_gradients_within_budget(scene, deterministic=True)


@pytest.mark.emulated
@pytest.mark.parametrize("scene", OF_TERMS, ids=str)
def test_outputs_of_several_terms_stay_within_budget(scene: Scene):
    whole = make_whole(scene)
    for rank in range(len(scene.shards)):
        ring_step = make_visit(whole, rank)
        x = ring_step.step()
        o = torch.full((*x.q.shape[:3], x.v.shape[3]), float("nan"), dtype=x.q.dtype)
        lse = torch.full_like(x.lse, float("nan"))
        step = Step(x.q, x.k, x.v, x.rows, x.keys, x.score, o, lse)
        with machine.mode(outside=ring_step.arrive):
            HopperKernels(ring_step.call()).forward_fused(step, ring_step.arrivals)
        for name, x in (("o", o), ("lse", lse)):
            exact, low = (
                (y if name == "o" else y.transpose(1, 2))[:, ring_step.places]
                for y in (whole.exact[name], whole.low[name])
            )
            found = x if name == "o" else x.transpose(1, 2)
            assert_within_budget(found, exact, low, f"{scene}: {name}", scene.dtype)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["zigzag", "documents", "window", "lengths", "slopes", "group"])
def test_gradients_in_fixed_order_stay_within_budget(name: str):
    assert_gradients_within_budget(named(name), deterministic=True)


IN_TURNS: dict[str, Any] = {"kernel_set": InTurns, "deterministic": True}


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["zigzag", "documents", "window", "lengths", "group", "slopes"])
def test_gradients_in_turns_stay_within_budget(name: str):
    assert_gradients_within_budget(named(name), **IN_TURNS, seed=0, resident=3)


def test_gradients_in_turns_are_the_same_bits_in_every_order_of_events():
    whole = make_whole(named("zigzag"))
    found = []
    modes: list[dict[str, Any]] = [{}, {"seed": 0, "resident": 2}, {"seed": 1, "resident": 4}]
    for mode in modes:
        ring_step = make_visit(whole, 0)
        found.append((run(ring_step, **IN_TURNS, of_sums=torch.float32, **mode)[0], *ring_step.regions))
    for other in found[1:]:
        assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(found[0], other, strict=True))


@pytest.mark.emulated
@pytest.mark.parametrize("mode", [{"seed": 0}, {"seed": 1, "eager": True}], ids=str)
@pytest.mark.parametrize("name", ["zigzag", "group"])
def test_no_order_of_events_changes_what_is_computed(name: str, mode: dict[str, Any]):
    assert_gradients_within_budget(named(name), **mode)


@pytest.mark.parametrize("name", ["zigzag", "group", "slopes"])
def test_gradients_stay_within_budget_with_heads_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "L2_BYTES", 0)
    with machine.mode(seed=0):
        assert_gradients_within_budget(named(name))


@pytest.mark.emulated
@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
@pytest.mark.parametrize("name", ["lengths", "narrow_columns", "wide_groups"])
def test_delta_is_made_as_it_would_be_given(name: str, deterministic: bool):
    """Of rows that lie apart, and of a gradient of lse."""
    scene = named(name)
    whole = make_whole(scene)
    ring_step = make_visit(whole, 1)
    step = ring_step.step(makes_delta=True)
    do, o, delta = step.do, step.o, step.delta
    assert o is not None
    do = torch.cat((do, torch.full_like(do, float("nan"))), 2)[:, :, : do.shape[2]]
    o = torch.cat((o, torch.full_like(o, float("nan"))), 1)[:, : o.shape[1]]
    dlse = torch.randn(delta.shape, generator=torch.Generator().manual_seed(0))
    dlse = dlse.transpose(0, 1).contiguous().transpose(0, 1)
    wanted = portable_delta(o, do, dlse)
    made = torch.cat((delta, delta), 1)[:, : delta.shape[1]]
    found = []
    for source in ({"o": o, "dlse": dlse}, {"o": None}):
        again = make_visit(whole, 1)
        step, grads = again.step()._replace(do=do, delta=made, **source), again.grads()
        with machine.mode(mapped=(*again.regions, *again.bias_regions), outside=again.arrive):
            kernels = HopperKernels(again.call(deterministic=deterministic))
            kernels.bound.in_turns = False
            kernels.backward_fused(step, again.arrivals, again.returns, grads)
        found.append((grads.dq, *again.regions))
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_delta_is_made_of_heads_that_lie_far_apart(monkeypatch: pytest.MonkeyPatch):
    leave_memory_alone(monkeypatch)
    ring_step = make_visit(make_whole(named("head_groups_wide")), 1)
    step = ring_step.step(makes_delta=True)
    assert step.o is not None
    apart = step._replace(do=heads_apart(step.do), o=heads_apart(step.o))
    with machine.mode(mapped=(*ring_step.regions, *ring_step.bias_regions), outside=ring_step.arrive):
        kernels = HopperKernels(ring_step.call())
        kernels.backward_fused(apart, ring_step.arrivals, ring_step.returns, ring_step.grads())
    torch.testing.assert_close(step.delta, portable_delta(step.o, step.do, None), rtol=1e-5, atol=1e-5)


def test_what_is_there_need_not_be_waited_for():
    assert_gradients_within_budget(named("window"), waits=False)


def source_alone(ring_step: RingStep, source: int) -> tuple[BackwardStep, Grads]:
    """A step over the rows of one source, and unwritten gradients of its keys."""
    step, places, side = ring_step.step(), ring_step.source_places[source], ring_step.keys.sides[source]
    first, key_bias = side.run_list[0][0], ring_step.whole.key_bias
    keys = replace(side, run_list=tuple((offset - first, *run) for offset, *run in side.run_list))
    k, v = ring_step.whole.k[:, places], ring_step.whole.v[:, places]
    score = replace(step.score, key_bias=None if key_bias is None else key_bias[:, places])
    dk, dv = (torch.full(x.shape, float("nan")) for x in (k, v))
    grads = Grads(torch.empty(0), dk, dv)
    if key_bias is not None:
        grads = replace(grads, dkey_bias=torch.full((k.shape[0], len(places)), float("nan")))
    return step._replace(k=k, v=v, keys=keys, score=score), grads


def assert_same_keys(region: Tensor, grads: Grads) -> None:
    assert grads.dk is not None
    assert grads.dv is not None
    assert torch.equal(region[:, : grads.dk.shape[1]], torch.cat((grads.dk, grads.dv), -1))


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["zigzag", "documents", "lengths", "narrow_columns", "slopes_wide"])
@pytest.mark.parametrize("both", [True, False], ids=["fused", "keys"])
def test_contributions_are_the_bits_of_visits_one_by_one(name: str, both: bool, monkeypatch: pytest.MonkeyPatch):
    """Where no tile is split, sums have one order."""
    monkeypatch.setattr(tile_scheduler, "SLACK", 1e9)
    scene = named(name)
    whole = make_whole(scene)
    for rank in range(len(scene.shards)):
        ring_step = make_visit(whole, rank)
        step, grads, bound = ring_step.step(), ring_step.grads(torch.float32), HopperKernels(ring_step.call()).bound
        bound.dkv[both] = DkvConfig(block=64)
        with machine.mode(mapped=tuple(ring_step.regions), outside=ring_step.arrive):
            launch_dkv(bound, step, grads, ring_step.arrivals, ring_step.returns, want_dq=both)
        for source, region in enumerate(ring_step.regions):
            alone, of_source = source_alone(ring_step, source)
            of_source = replace(of_source, dq=grads.dq.clone(), dalibi=ring_step.grads().dalibi)
            launch_dkv(bound, alone, of_source, want_dq=both)
            assert_same_keys(region, of_source)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["wide_terms", "wide_groups"])
def test_wide_contributions_are_the_bits_of_visits_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch):
    """Likewise, dkey_bias too."""
    monkeypatch.setattr(tile_scheduler, "SLACK", 1e9)
    scene = named(name)
    whole = make_whole(scene)
    for rank in range(len(scene.shards)):
        ring_step = make_visit(whole, rank)
        bound = HopperKernels(ring_step.call()).bound
        bound.dkv[False] = WideDkvConfig()
        with machine.mode(mapped=(*ring_step.regions, *ring_step.bias_regions), outside=ring_step.arrive):
            launch_dkv(bound, ring_step.step(), Grads(torch.empty(0)), ring_step.arrivals, ring_step.returns)
        for source, region in enumerate(ring_step.regions):
            alone, grads = source_alone(ring_step, source)
            launch_dkv(bound, alone, grads)
            assert_same_keys(region, grads)
            if grads.dkey_bias is not None:
                biases = ring_step.bias_regions[source][..., : alone.k.shape[1]]
                assert torch.equal(biases.sum(1), grads.dkey_bias)


def test_dq_by_rows_over_near_alone_is_the_bits_of_one_visit():
    ring_step = make_visit(make_whole(named("alone")), 0)
    step, bound = ring_step.step(), HopperKernels(ring_step.call()).bound
    bound.dq = DqConfig(64, 3, 3)
    wanted, found = ring_step.grads(), ring_step.grads()
    launch_dq(bound, step._replace(keys=ring_step.keys.sides[0]), wanted)
    launch_dq(bound, step, found, ring_step.arrivals._replace(ready_flags=None))
    assert torch.equal(wanted.dq, found.dq)


@pytest.mark.emulated
@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
@pytest.mark.parametrize("lost", ["negative", "never"])
@pytest.mark.parametrize("name", ["group", "slopes", "slopes_window", "key_bias", "wide"])
def test_what_never_comes_makes_results_nan_and_sets_the_error_word(name: str, lost: str, deterministic: bool):
    ring_step = make_visit(make_whole(named(name)), 1)
    ring_step.waiting = [(group, source) for group, source in ring_step.waiting if group > 0]
    if lost == "negative":
        ring_step.flags[0, 1] = -1
    dq, dalibi = run(ring_step, deterministic=deterministic)
    assert ring_step.error.item() == 1
    assert dq.isnan().all()
    assert dalibi is None or dalibi.isnan().all()
    heads = ring_step.whole.scene.kv_heads // ring_step.whole.scene.groups
    region = ring_step.regions[1][:, : len(ring_step.source_places[1]), :heads]
    assert region.isnan().all()
    if ring_step.bias_regions:
        assert ring_step.bias_regions[1][:, :heads, : len(ring_step.source_places[1])].isnan().all()


@pytest.mark.parametrize("options", [{}, {**IN_TURNS, "resident": 2}], ids=["fused", "ordered"])
def test_an_error_of_an_earlier_call_is_not_forgotten(options: dict[str, Any]):
    ring_step = make_visit(make_whole(named("window")), 2)
    ring_step.error[0] = 1
    dq, _ = run(ring_step, **options)
    assert dq.isnan().all()
    for region in ring_step.regions:
        assert region.isnan().all()


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
def test_a_rank_without_queries_sends_zeros_home(deterministic: bool):
    scene = Scene("no_queries", (((0, 1, 140),), ((140, 1, 61),)), heads=1)
    ring_step = make_visit(make_whole(scene), 0, everything=True)
    ring_step.places, ring_step.rows = [], make_visit(make_whole(replace(scene, shards=((), *scene.shards))), 0).rows
    run(ring_step, deterministic=deterministic)
    for region, places in zip(ring_step.regions, ring_step.source_places, strict=True):
        assert not region[:, : len(places)].any()
        assert region[:, len(places) :].isnan().all()


def test_a_rank_without_keys_of_its_own_fetches_all():
    scene = Scene("no_keys", ((), ((0, 1, 140),), ((140, 1, 61),)), heads=1)
    whole = make_whole(scene)
    ring_step = make_visit(whole, 0, everything=True)
    other = make_visit(whole, 1)
    ring_step.places, ring_step.rows = other.places, other.rows
    dq, _ = run(ring_step)
    exact, low = (found["dq"][:, ring_step.places] for found in (whole.exact, whole.low))
    assert_within_budget(dq, exact, low, "dq", scene.dtype)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_delta_of_queries_that_have_no_keys_is_made_too(head_dim: int, deterministic: bool):
    """The gradient of sinks asks for it."""
    whole = make_whole(Scene("no_keys", ((), ((0, 1, 60),)), heads=1, head_dim=head_dim))
    ring_step, other = make_visit(whole, 0), make_visit(whole, 1)
    ring_step.places, ring_step.rows = other.places, other.rows
    assert not any(side.positions.numel() for side in ring_step.keys.sides)
    dq, _ = run(ring_step, deterministic=deterministic)
    assert not dq.any()


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
def test_parts_of_split_tiles_come_home(deterministic: bool, monkeypatch: pytest.MonkeyPatch):
    programs = 13
    monkeypatch.setattr(launcher, "multiprocessors", lambda _: programs)
    scene = Scene("split", (((0, 1, 640),), ((640, 1, 100),)), heads=1, head_dim=128)
    ring_step = make_visit(make_whole(scene), 0)
    plan = schedule_tiles(
        ring_step.keys, ring_step.rows, Shape(1, 1, 128, 64, programs, 640 * (256 * 2 + 128 * 4), align=4)
    )
    assert set(plan.split_tiles[:, 0].tolist()) == {0, 1}, "the scene splits tiles of both sources"
    assert_gradients_within_budget(scene, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 256], ids=["fused", "wide"])
def test_parts_of_biases_come_home_too(head_dim: int, monkeypatch: pytest.MonkeyPatch):
    plans = split_always(monkeypatch, launcher)
    runs = (((0, 1, 190),), ((190, 1, 50),))
    assert_gradients_within_budget(Scene("split", runs, heads=1, head_dim=head_dim, v_head_dim=64, key_bias=True))
    split = {source for plan in plans for source in plan.split_tiles[:, 0].tolist()}
    assert split == {0, 1}, "tiles of both sources are split"
