"""Profiles are read, written and measured; a wrong one is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ringattn.launch import doctor
from ringattn.launch.common.session import open_session
from ringattn.launch.plan.fit import kernel_costs, ring_call, ring_costs
from ringattn.launch.plan.measure import Sizes, measure_profile
from ringattn.sizing import Profile, estimate, load_profile, write_profile
from ringattn.sizing.ring_time import attention_time

TINY = Sizes(
    kernels=(("causal", 64, 64), ("full", 64, 128), ("window", 64, 128)), ring_tokens=(32, 64), heads=2,
    matmul=(64, 64, 64), memory_bytes=2**16, rounds=3, seconds=0.1,
)  # fmt: skip


@pytest.mark.parametrize("name", ["h100", "h200", "a100", "b200"])
def test_committed_profiles_say_what_they_come_from(name):
    profile = load_profile(name)
    assert profile.fitted_from or profile.assumed
    assert set(profile.forward) == set(profile.backward) == {64, 128, 256}
    assert all(cost.block > 0 for cost in profile.forward.values())


def test_a_profile_that_is_written_is_read_again(tmp_path):
    profile = load_profile("h200")
    write_profile(profile, tmp_path / "mine.json")
    assert vars(load_profile(tmp_path / "mine.json")) == vars(profile)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"name": "x"}))
    with pytest.raises(ValueError, match="a profile must hold the fields of"):
        load_profile(tmp_path / "x.json")
    with pytest.raises(ValueError, match="gpu must be one of a100, b200, h100, h200 or a file"):
        load_profile("h300")


def measured() -> Profile:
    with open_session("cpu") as session:
        return measure_profile(session, TINY)


def test_a_measured_profile_plans_a_job(pool, tmp_path):
    profiles = pool(2).run(measured)
    assert vars(profiles[0]) == vars(profiles[1])
    profile = profiles[0]
    assert profile.memory_gbps > 0
    assert profile.host_us["process_group_forward_peer"] > 0
    write_profile(profile, tmp_path / "cpu.json")
    found = estimate("llama3-8b", 4096, gpus=2, gpus_per_node=2, gpu=tmp_path / "cpu.json")
    assert found.best is not None


def test_a_profile_of_the_cpu_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="profile must be measured on GPUs, got the CPU"):
        doctor.main(["--device", "cpu", "--profile", str(tmp_path / "x.json")])


@pytest.mark.parametrize("world_size", [2, 4])
def test_times_of_short_rings_give_host_and_semaphores(world_size):
    """Rows of rings that a profile predicts are fitted to that profile."""
    semaphores_us = {"turn": 9.0, "fused_forward": 20.0, "fused_backward": 30.0}
    names = ("fused_forward", "fused_backward", "fused_forward_peer", "fused_backward_peer")
    host_us = dict(zip(names, (200.0, 700.0, 0.0, 0.0), strict=True))
    profile = dataclasses.replace(load_profile("h200"), semaphores_us=semaphores_us, host_us=host_us)
    rows = []
    for tokens in (128, 16384):
        row = {
            "mask": "causal", "seq_len": tokens * world_size, "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128,
        }  # fmt: skip
        row |= {"dtype": "bf16", "window": 1, "document": 0, "who": "fused", "world_size": world_size}
        row |= {"tokens_per_rank": tokens}
        forward, backward = (
            attention_time(ring_call(row, world_size), profile, way) for way in ("forward", "backward")
        )
        row |= {"forward_ms": forward.ms, "both_ms": forward.ms + backward.ms}
        rows.append(
            row | {"forward_graph_ms": forward.device_ms, "both_graph_ms": forward.device_ms + backward.device_ms}
        )
    found = ring_costs(rows, load_profile("h200"))
    assert {name: found.host_us[name] for name in names} == host_us
    assert found.semaphores_us == pytest.approx(semaphores_us, abs=1.0)
    assert found.slowdown["fused_backward"] == pytest.approx(profile.slowdown["fused_backward"], rel=0.01)


def test_kernels_are_fitted_where_memory_was_measured_far_too_slow():
    """A copy on a busy host may take longer than the kernels beside it."""
    slow = dataclasses.replace(load_profile("h200"), memory_gbps=0.01)
    row = {"mask": "causal", "seq_len": 64, "batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "bf16"}
    rows = [{**row, "window": 64, "document": 64, "direction": way, "ms": 0.1} for way in ("forward", "backward")]
    assert kernel_costs(rows, slow).forward[64].block > 0
