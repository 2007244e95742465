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

from ringattn.kernels.attention.hopper import api as hopper
from ringattn.kernels.attention.hopper import launcher
from ringattn.kernels.attention.hopper import tile_scheduler as plan_of_work
from ringattn.kernels.attention.hopper.configs import DkvConfig, DqConfig, WideDkvConfig
from ringattn.kernels.attention.hopper.launcher import (
    BackwardInputs,
    GradOutputs,
    RemoteGradArgs,
    launch_dkv,
    launch_dq,
)
from ringattn.kernels.attention.hopper.tile_scheduler import Shape, make_plan
from ringattn.kernels.interface import Grads, Score
from tests.kernels.emulator import gluon as machine
from tests.support.budget import assert_within_budget
from tests.support.fused_cases import RingStep, Scene, contributions, make_ring_step, make_whole, shards_of
from tests.support.large_strides import heads_apart, leave_memory_alone
from tests.support.term_masks import blocks_and_window, causal_blocks, sinks_and_window, tree

backward_fused: Any = hopper.backward_fused
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
        "blocks_and_window",
        shards_of("scattered", 260, 2),
        terms=blocks_and_window,
        softcap=4.0,
        alibi=True,
        key_bias=True,
    ),
    Scene("wide_blocks", shards_of("zigzag", 200, 2), terms=lambda n: blocks_and_window(n, 32), heads=1, head_dim=256),
)


def named(name: str) -> Scene:
    return next(scene for scene in SCENES if scene.name == name)


def run(
    ring_step: RingStep, *, waits: bool = True, deterministic: bool = False, **mode: Any
) -> tuple[Tensor, Tensor | None]:
    """(dq, dalibi) of a rank, which makes delta; its remote rows are filled beside the kernel, or before it."""
    if not waits:
        while ring_step.arrive():
            pass
    dq, dalibi = ring_step.outputs()
    do, q, local_kv, remote_kv, lse, delta, *others = ring_step.arguments()
    made = torch.full_like(delta, float("nan"))
    with machine.mode(mapped=(*ring_step.regions, *ring_step.bias_regions), outside=ring_step.arrive, **mode):
        backward_fused(
            do, q, local_kv, remote_kv, lse, made, *others, ring_step.ready_flags if waits else None, ring_step.grad_buffers,
            ring_step.grad_buffer_rows,
            dq=dq, dalibi=dalibi, bias_grad_buffers=ring_step.bias_grad_buffers, deterministic=deterministic, **ring_step.source(),
        )  # fmt: skip
    torch.testing.assert_close(made, delta, rtol=0.02, atol=0.02 * ring_step.whole.scene.head_dim**0.5)
    return dq, dalibi


def assert_gradients_within_budget(scene: Scene, **options: Any) -> None:
    whole = make_whole(scene)
    ring_steps = [make_ring_step(whole, rank) for rank in range(len(scene.shards))]
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
            hopper.reduce_key_bias_grads(dkey_bias, *contributions(ring_steps, ring_step.rank, biases=True))
            found["dkey_bias"][:, ring_step.places] = dkey_bias.to(scene.dtype)
        own = contributions(ring_steps, ring_step.rank)
        dk, dv = (torch.full_like(x, float("nan")) for x in ring_step.local_kv)
        hopper.reduce_kv_grads(dk, dv, *own)
        found["dk"][:, ring_step.places], found["dv"][:, ring_step.places] = dk, dv
    for name, x in found.items():
        assert_within_budget(x, whole.exact[name], whole.low[name], f"{scene}: {name}", scene.dtype)


@pytest.mark.emulated
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_gradients_return_to_their_owners_and_stay_within_budget(scene: Scene):
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
        ring_step = make_ring_step(whole, rank)
        _do, q, local_kv, remote_kv, lse, _delta, rows, keys, score = ring_step.arguments()
        o, lse = (
            torch.full((*q.shape[:3], local_kv[1].shape[3]), float("nan"), dtype=q.dtype),
            torch.full_like(lse, float("nan")),
        )
        with machine.mode(outside=ring_step.arrive):
            hopper.forward_fused(q, local_kv, remote_kv, rows, keys, score, ring_step.ready_flags, o=o, lse=lse)
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
    ring_step = make_ring_step(whole, 1)
    do, q, _, _, lse, delta, *_ = ring_step.arguments()
    do = torch.cat((do, torch.full_like(do, float("nan"))), 2)[:, :, : do.shape[2]]
    o = torch.cat((ring_step.source()["o"], torch.full_like(do, float("nan"))), 1)[:, : do.shape[1]]
    dlse = (
        torch.randn(lse.shape, generator=torch.Generator().manual_seed(0)).transpose(0, 1).contiguous().transpose(0, 1)
    )
    wanted = hopper.delta(o, do, dlse)
    made = torch.cat((delta, delta), 1)[:, : delta.shape[1]].fill_(float("nan"))
    found = []
    for given, options in ((made, {"o": o, "dlse": dlse}), (made, {})):
        again = make_ring_step(whole, 1)
        dq, dalibi = again.outputs()
        with machine.mode(mapped=(*again.regions, *again.bias_regions), outside=again.arrive):
            backward_fused(
                do, q, again.local_kv, again.remote_kv, lse, given, again.rows, again.keys, again.arguments()[-1],
                again.ready_flags,
                again.grad_buffers, again.grad_buffer_rows, dq=dq, dalibi=dalibi, bias_grad_buffers=again.bias_grad_buffers,
                deterministic=deterministic, **options,
            )  # fmt: skip
        found.append((dq, *again.regions))
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_delta_is_made_of_heads_that_lie_far_apart(monkeypatch: pytest.MonkeyPatch):
    leave_memory_alone(monkeypatch)
    ring_step = make_ring_step(make_whole(named("head_groups_wide")), 1)
    do, q, local_kv, remote_kv, lse, delta, *others = ring_step.arguments()
    dq, dalibi = ring_step.outputs()
    made = torch.full_like(delta, float("nan"))
    with machine.mode(mapped=(*ring_step.regions, *ring_step.bias_regions), outside=ring_step.arrive):
        backward_fused(
            heads_apart(do), q, local_kv, remote_kv, lse, made, *others, ring_step.ready_flags, ring_step.grad_buffers,
            ring_step.grad_buffer_rows,
            dq=dq, dalibi=dalibi, bias_grad_buffers=None, deterministic=False, o=heads_apart(ring_step.source()["o"]),
        )  # fmt: skip
    torch.testing.assert_close(made, hopper.delta(ring_step.source()["o"], do, None), rtol=1e-5, atol=1e-5)


def test_what_is_there_need_not_be_waited_for():
    assert_gradients_within_budget(named("window"), waits=False)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["zigzag", "documents", "lengths", "narrow_columns", "slopes_wide"])
@pytest.mark.parametrize("both", [True, False], ids=["fused", "keys"])
def test_contributions_are_the_bits_of_ring_steps_one_by_one(name: str, both: bool):
    """Where no tile is split, sums have one order."""
    scene = named(name)
    config = DkvConfig(block=64, persistent=False)
    whole = make_whole(scene)
    score = whole.score
    for rank in range(len(scene.shards)):
        ring_step = make_ring_step(whole, rank)
        do, q, local_kv, remote_kv, lse, delta, rows, keys, _ = ring_step.arguments()
        dq, dalibi = ring_step.outputs(torch.float32)
        remote = RemoteGradArgs(remote_kv, ring_step.ready_flags, ring_step.grad_buffers, ring_step.grad_buffer_rows)
        with machine.mode(mapped=tuple(ring_step.regions), outside=ring_step.arrive):
            x = BackwardInputs(do, q, local_kv[0], local_kv[1], lse, delta, rows, keys, score, remote=remote)
            launch_dkv(x, GradOutputs(dq, dalibi=dalibi), want_dq=both, config=config)
        for side, places, region in zip(keys.sides, ring_step.source_places, ring_step.regions, strict=True):
            first = side.run_list[0][0]
            alone = replace(side, run_list=tuple((offset - first, *run) for offset, *run in side.run_list))
            k, v = whole.k[:, places], whole.v[:, places]
            grads = Grads(
                dq.clone(), *(torch.full(x.shape, float("nan")) for x in (k, v)), dalibi=ring_step.outputs()[1]
            )
            x = BackwardInputs(do, q, k, v, lse, delta, rows, alone, score)
            launch_dkv(x, GradOutputs.of(grads), want_dq=both, config=config)
            assert torch.equal(region[:, : len(places), :, : scene.head_dim], grads.dk)
            assert torch.equal(region[:, : len(places), :, scene.head_dim :], grads.dv)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["wide_terms", "wide_groups"])
def test_wide_contributions_are_the_bits_of_ring_steps_one_by_one(name: str):
    """Likewise, dkey_bias too."""
    scene, config = named(name), WideDkvConfig(split=False)
    whole = make_whole(scene)
    for rank in range(len(scene.shards)):
        ring_step = make_ring_step(whole, rank)
        do, q, local_kv, remote_kv, lse, delta, rows, keys, score = ring_step.arguments()
        remote = RemoteGradArgs(
            remote_kv,
            ring_step.ready_flags,
            ring_step.grad_buffers,
            ring_step.grad_buffer_rows,
            ring_step.bias_grad_buffers,
        )
        with machine.mode(mapped=(*ring_step.regions, *ring_step.bias_regions), outside=ring_step.arrive):
            x = BackwardInputs(do, q, local_kv[0], local_kv[1], lse, delta, rows, keys, score, remote=remote)
            launch_dkv(x, GradOutputs(torch.empty(0)), config=config)
        for i, (side, places) in enumerate(zip(keys.sides, ring_step.source_places, strict=True)):
            first = side.run_list[0][0]
            alone = replace(side, run_list=tuple((offset - first, *run) for offset, *run in side.run_list))
            k, v = whole.k[:, places], whole.v[:, places]
            dk, dv = (torch.full(x.shape, float("nan")) for x in (k, v))
            grads = Grads(torch.empty(0), dk, dv)
            here = score
            if whole.key_bias is not None:
                grads = replace(grads, dkey_bias=torch.full((scene.batch, len(places)), float("nan")))
                here = replace(score, key_bias=whole.key_bias[:, places])
            launch_dkv(BackwardInputs(do, q, k, v, lse, delta, rows, alone, here), GradOutputs.of(grads), config=config)
            assert torch.equal(ring_step.regions[i][:, : len(places), :, : scene.head_dim], grads.dk)
            assert torch.equal(ring_step.regions[i][:, : len(places), :, scene.head_dim :], grads.dv)
            if grads.dkey_bias is not None:
                assert torch.equal(ring_step.bias_regions[i][..., : len(places)].sum(1), grads.dkey_bias)


def test_dq_by_rows_over_local_keys_alone_is_the_bits_of_one_ring_step():
    ring_step = make_ring_step(make_whole(named("alone")), 0)
    do, q, local_kv, remote_kv, lse, delta, rows, keys, score = ring_step.arguments()
    config = DqConfig(64, 3, 3)
    wanted, found = ring_step.outputs()[0], ring_step.outputs()[0]
    remote = RemoteGradArgs(remote_kv, None, ring_step.grad_buffers, ring_step.grad_buffer_rows)
    alone = BackwardInputs(do, q, local_kv[0], local_kv[1], lse, delta, rows, keys.sides[0], score)
    fused = BackwardInputs(do, q, local_kv[0], local_kv[1], lse, delta, rows, keys, score, remote=remote)
    launch_dq(alone, GradOutputs(wanted), config=config)
    launch_dq(fused, GradOutputs(found), config=config)
    assert torch.equal(wanted, found)


@pytest.mark.emulated
@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
@pytest.mark.parametrize("lost", ["negative", "never"])
@pytest.mark.parametrize("name", ["group", "slopes", "slopes_window", "key_bias", "wide"])
def test_what_never_comes_makes_results_nan_and_sets_the_error_word(name: str, lost: str, deterministic: bool):
    ring_step = make_ring_step(make_whole(named(name)), 1)
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


def test_an_error_of_an_earlier_call_is_not_forgotten():
    ring_step = make_ring_step(make_whole(named("window")), 2)
    ring_step.error[0] = 1
    dq, _ = run(ring_step)
    assert dq.isnan().all()
    for region in ring_step.regions:
        assert region.isnan().all()


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
def test_a_rank_without_queries_sends_zeros_home(deterministic: bool):
    scene = Scene("no_queries", (((0, 1, 140),), ((140, 1, 61),)), heads=1)
    ring_step = make_ring_step(make_whole(scene), 0, everything=True)
    ring_step.places, ring_step.rows = (
        [],
        make_ring_step(make_whole(replace(scene, shards=((), *scene.shards))), 0).rows,
    )
    run(ring_step, deterministic=deterministic)
    for region, places in zip(ring_step.regions, ring_step.source_places, strict=True):
        assert not region[:, : len(places)].any()
        assert region[:, len(places) :].isnan().all()


def test_a_rank_without_keys_of_its_own_fetches_all():
    scene = Scene("no_keys", ((), ((0, 1, 140),), ((140, 1, 61),)), heads=1)
    whole = make_whole(scene)
    ring_step = make_ring_step(whole, 0, everything=True)
    other = make_ring_step(whole, 1)
    ring_step.places, ring_step.rows = other.places, other.rows
    dq, _ = run(ring_step)
    exact, low = (found["dq"][:, ring_step.places] for found in (whole.exact, whole.low))
    assert_within_budget(dq, exact, low, "dq", scene.dtype)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_delta_of_queries_that_have_no_keys_is_made_too(head_dim: int, deterministic: bool):
    """The gradient of sinks asks for it."""
    whole = make_whole(Scene("no_keys", ((), ((0, 1, 60),)), heads=1, head_dim=head_dim))
    ring_step, other = make_ring_step(whole, 0), make_ring_step(whole, 1)
    ring_step.places, ring_step.rows = other.places, other.rows
    assert not any(side.positions.numel() for side in ring_step.keys.sides)
    dq, _ = run(ring_step, deterministic=deterministic)
    assert not dq.any()


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
def test_parts_of_split_tiles_return_to_their_owners(deterministic: bool, monkeypatch: pytest.MonkeyPatch):
    programs = 13
    monkeypatch.setattr(launcher, "multiprocessors", lambda _: programs)
    scene = Scene("split", (((0, 1, 640),), ((640, 1, 100),)), heads=1, head_dim=128)
    ring_step = make_ring_step(make_whole(scene), 0)
    plan = make_plan(ring_step.keys, ring_step.rows, Shape(1, 1, 128, 64, programs, 640 * (256 * 2 + 128 * 4), align=4))
    assert set(plan.split_tiles[:, 0].tolist()) == {0, 1}, "the scene splits tiles of both sources"
    assert_gradients_within_budget(scene, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 256], ids=["fused", "wide"])
def test_parts_of_biases_return_to_their_owners_too(head_dim: int, monkeypatch: pytest.MonkeyPatch):
    for name in ("OVERHEAD", "EPILOGUE", "MERGE"):
        monkeypatch.setattr(plan_of_work, name, 0)
    monkeypatch.setattr(plan_of_work, "MIN_PART", 1)
    split: set[int] = set()

    def make(keys: Any, rows: Any, shape: Any) -> Any:
        made = make_plan(keys, rows, replace(shape, programs=7))
        split.update(made.split_tiles[:, 0].tolist())
        return made

    monkeypatch.setattr(launcher, "make_plan", make)
    runs = (((0, 1, 190),), ((190, 1, 50),))
    assert_gradients_within_budget(Scene("split", runs, heads=1, head_dim=head_dim, v_head_dim=64, key_bias=True))
    assert split == {0, 1}, "tiles of both sources are split"


@pytest.mark.parametrize("score", [{"bias": torch.zeros(1)}, {"dropout_p": 0.5}], ids=str)
def test_what_is_not_gathered_is_refused(score: dict[str, Any]):
    ring_step = make_ring_step(make_whole(named("alone")), 0)
    *most, _ = ring_step.arguments()
    dq, dalibi = ring_step.outputs()
    wanted: Any = Score(1.0, **score)
    with pytest.raises(NotImplementedError, match=r"take no (bias|dropout)"):
        backward_fused(
            *most, wanted, None, ring_step.grad_buffers, ring_step.grad_buffer_rows,
            dq=dq, dalibi=dalibi, bias_grad_buffers=None, deterministic=False,
        )  # fmt: skip
