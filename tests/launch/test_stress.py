"""Many calls of all kinds on one ring: one wrong answer is red and named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringattn import Ring
from ringattn.kernels.attention import eager
from ringattn.launch.check import __main__ as check
from ringattn.launch.check import attention, stress


def _soak(*words: str) -> int:
    return check.main(["--device", "cpu", "--impl", "eager", *words])


def test_many_calls_on_one_ring_keep_their_bits(pool, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    assert pool(3).run(_soak, "--soak", "60", "--seed", "4", "--json", str(path)) == [0, 0, 0]
    kept = json.loads(path.read_text())
    assert kept["green"]
    for found in kept["ranks"]:
        assert found["calls"] == 60
        assert 0 < found["backwards"] < 60
        assert 0 < found["checks"] < 60
        deterministic = [case for case in stress.soak_cases(3, "cpu") if "deterministic" in case.options]
        assert found["equal_to_simulation"] == len(deterministic) > 0


def _soak_with_a_late_mistake(words: list[str], name: str) -> int:
    """Make one small error on rank 1 after the sequence has begun."""
    right, asked = getattr(eager.EagerKernels, name), [0]
    begun = stress._run

    def run(*args: Any) -> None:
        asked[0] = 1
        begun(*args)

    def wrong(kernels: eager.EagerKernels, step: Any, *grads: Any) -> None:
        right(kernels, step, *grads)
        written = (grads[0].dk, grads[0].dq) if grads else (step.o, step.lse)
        if asked[0] and (grads or step.last) and written[0].numel():
            asked[0] += 1
            if asked[0] == 6 and dist.get_rank() == 1:
                for x in written:
                    x.view(-1)[-1:].add_(1e-3)

    stress._run = run
    setattr(eager.EagerKernels, name, wrong)
    try:
        return _soak(*words)
    finally:
        stress._run = begun
        setattr(eager.EagerKernels, name, right)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_one_wrong_answer_among_many_is_red(pool, name: str, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    words = ["--soak", "40", "--only", "documents", "--json", str(path)]
    assert pool(2).run(_soak_with_a_late_mistake, words, name) == [1, 1]
    kept = json.loads(path.read_text())
    said = [one for rank in kept["ranks"] for one in rank["red"]]
    assert said
    assert all(one.startswith("call ") and "documents" in one for one in said)


def test_cases_are_few_kernels_and_every_layout_and_direction() -> None:
    for device in ("cpu", "cuda"):
        cases = list(stress.soak_cases(4, device))
        assert len({(case.dtype, case.head_dim) for case in cases}) == 1
        assert {case.layouts[0] for case in cases} == set(attention.LAYOUTS)
        assert {case.backward for case in cases} == {"auto", "keys", "queries"}
        assert len({(case.heads, case.kv_heads) for case in cases}) == 5
        assert {len(case.options) for case in cases} == {0, 1}
        assert {case.batch for case in cases} == {1, 2}


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def test_buffers_of_all_virtual_ranks_are_poisoned_between_calls(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    times = []
    poison = stress.poison_buffers

    def keep(ring: Ring, device: torch.device) -> None:
        poison(ring, device)
        times.append([torch.cat([*map(_bits, one.buffers._flat.values())]) for one in ring.contexts(device)])

    monkeypatch.setattr(stress, "poison_buffers", keep)
    assert _soak("--soak", "20", "--only", "full", "--poison", "--delay", "--virtual-size", "4") == 0
    assert times
    for ranks in times:
        assert len(ranks) == 4
        assert all(len(x) and (x == 255).all() for x in ranks)
    said = capsys.readouterr().out
    assert f"poisoned {len(times)} times" in said
    # virtual ranks promise the bits of the simulated ring in every case
    assert re.search(r" of (\d+) cases \(\1 calm answers equal", said)
