"""The gathered backward on one GPU: homes in its own memory, keys and flags that come while the kernel runs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.comm.grad_reduce import reduce_key_bias_grads, reduce_kv_grads
from tests.support.budget import assert_within_budget
from tests.support.fused_cases import RingStep, Scene, contributions, make_visit, make_whole, shards_of
from tests.support.term_masks import causal_blocks, sinks_and_window, tree

CAUSAL: dict[str, Any] = {"causal": True}
SCENES = (
    Scene("zigzag", shards_of("zigzag", 2501, 3), CAUSAL, heads=8, kv_heads=4, head_dim=128),
    Scene("zigzag_64", shards_of("zigzag", 2600, 2), CAUSAL, heads=8, kv_heads=8),
    Scene("window", shards_of("contiguous", 2100, 3), {"window": (200, 30)}, heads=4, kv_heads=1, head_dim=128),
    Scene("documents", shards_of("scattered", 1900, 3), {"causal": True, "documents": (0, 3, 700, 701, 1900)}, heads=4),
    Scene("slopes", shards_of("zigzag", 1500, 2), CAUSAL, heads=4, alibi=True, softcap=4.0),
    Scene("narrow", shards_of("zigzag", 1500, 2), CAUSAL, heads=4, kv_heads=2, head_dim=96, v_head_dim=72),
    Scene("key_bias", shards_of("zigzag", 1500, 3), CAUSAL, heads=4, kv_heads=2, key_bias=True),
    Scene("key_bias_pair", shards_of("zigzag", 1500, 2), CAUSAL, heads=4, kv_heads=2, key_bias=True, head_dim=128),
    Scene("wide", shards_of("zigzag", 2100, 3), CAUSAL, heads=4, kv_heads=2, head_dim=256),
    Scene(
        "wide_window", shards_of("contiguous", 2100, 3), {"window": (200, 30)}, heads=4, head_dim=192, v_head_dim=128
    ),
    Scene("wide_terms", shards_of("zigzag", 1100, 2), CAUSAL, alibi=True, softcap=4.0, key_bias=True, head_dim=256),
    Scene("tree", shards_of("zigzag", 1500, 2), terms=tree, heads=4, kv_heads=2, head_dim=128),
    Scene("sinks_and_window", shards_of("contiguous", 1300, 3), terms=sinks_and_window, heads=2),
    Scene(
        "blocks", shards_of("zigzag", 1600, 2), terms=lambda n: causal_blocks(n, 128), heads=4, kv_heads=2, head_dim=128
    ),
)
pytestmark = pytest.mark.gpu


def launch(ring_step: RingStep, deterministic: bool) -> tuple[Tensor, Tensor | None]:
    grads, kernels = ring_step.grads(), HopperKernels(ring_step.call(deterministic=deterministic))
    kernels.backward_fused(ring_step.step(makes_delta=True), ring_step.arrivals, ring_step.returns, grads)
    return grads.dq, grads.dalibi


def run_with_late_keys(ring_step: RingStep, deterministic: bool) -> tuple[Tensor, Tensor | None]:
    """Keys and flags are copied from the host, by the engine that takes no multiprocessor, behind a running kernel."""
    whole, side_stream = ring_step.whole, torch.cuda.Stream()
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    sent = []
    for source, places in enumerate(ring_step.source_places[1:], 1):
        rows = torch.cat((whole.k[0, places], whole.v[0, places]), -1).cpu().pin_memory()
        first = ring_step.keys.sides[source].run_list[0][0]
        copies = [(ring_step.buffer[0, first : first + len(places)], rows)]
        if ring_step.table is not None and whole.key_bias is not None:
            near = ring_step.keys.local_rows
            there = ring_step.table[0, near + first : near + first + len(places)]
            copies.append((there, whole.key_bias[0, places].cpu().pin_memory()))
        sent.append((copies, ring_step.flags[0, ring_step.keys.steps[source]]))
    torch.cuda.synchronize()
    results = launch(ring_step, deterministic)
    with torch.cuda.stream(side_stream):
        for copies, flag in sent:
            time.sleep(0.01)
            for target, rows in copies:
                target.copy_(rows, non_blocking=True)
            flag.copy_(one[0], non_blocking=True)
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_gradients_of_late_keys_come_home_and_stay_within_budget(scene: Scene, deterministic: bool):
    whole = make_whole(scene, "cuda")
    ring_steps = [make_visit(whole, rank, "cuda") for rank in range(len(scene.shards))]
    # compiled now, for what is special about any rank's numbers: a compiler behind a kernel that waits may outlast its patience
    for rank in range(len(ring_steps)):
        warm = make_visit(whole, rank, "cuda")
        while warm.arrive():
            pass
        launch(warm, deterministic)
    found = {name: torch.full_like(x, float("nan")) for name, x in whole.low.items() if name not in ("o", "lse")}
    for ring_step in ring_steps:
        dq, dalibi = run_with_late_keys(ring_step, deterministic)
        assert ring_step.error.item() == 0
        found["dq"][:, ring_step.places] = dq
        if dalibi is not None:
            found["dalibi"][:, :, ring_step.places] = dalibi.to(scene.dtype)
        for region, places in zip(ring_step.regions, ring_step.source_places, strict=True):
            assert region[:, : len(places)].isfinite().all()
            assert region[:, len(places) :].isnan().all()
    for ring_step in ring_steps:
        dk, dv = (torch.full_like(x, float("nan")) for x in ring_step.near)
        plain = [torch.full_like(x, float("nan"), device="cpu") for x in ring_step.near]
        local, remote, rows = contributions(ring_steps, ring_step.rank)
        reduce_kv_grads(dk, dv, local, remote, rows)
        reduce_kv_grads(plain[0], plain[1], local.cpu(), [x.cpu() for x in remote], rows.cpu())
        assert torch.equal(dk.cpu(), plain[0])
        assert torch.equal(dv.cpu(), plain[1])
        found["dk"][:, ring_step.places], found["dv"][:, ring_step.places] = dk, dv
        if scene.key_bias:
            own = contributions(ring_steps, ring_step.rank, biases=True)
            dkey_bias = torch.full((1, len(ring_step.places)), float("nan"), device="cuda")
            reduce_key_bias_grads(dkey_bias, *own)
            found["dkey_bias"][:, ring_step.places] = dkey_bias.to(scene.dtype)
    for name, x in found.items():
        assert_within_budget(x, whole.exact[name], whole.low[name], f"{scene}: {name}", scene.dtype)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "pair"])
def test_keys_that_never_come_end_in_nan_and_an_error(deterministic: bool):
    ring_step = make_visit(make_whole(SCENES[0], "cuda"), 1, "cuda")
    began = time.perf_counter()
    dq, _ = launch(ring_step, deterministic)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 60
    assert ring_step.error.item() == 1
    assert dq.isnan().all()
    assert ring_step.regions[1][:, : len(ring_step.source_places[1])].isnan().all()
