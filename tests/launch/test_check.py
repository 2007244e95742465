"""`check` is red when something is wrong, and prints where."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ringattn import Ring, dispatch
from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.decode import eager as decode_eager
from ringattn.launch.check import __main__ as check_command
from ringattn.launch.check import attention as check
from ringattn.launch.check import inference as check_inference
from ringattn.launch.common.session import Session
from ringattn.numerics.error_budget import Budget
from tests.launch.common import ROOT, _off_by_a_little
from tests.support.pool import Pools
from tests.support.scripts import run_module


@pytest.fixture
def _wrong_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerKernels, "forward", _off_by_a_little(EagerKernels.forward))


def test_check_is_green_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command.main(["--device", "cpu", "--json", str(tmp_path / "check.json")]) == 0
    kept = json.loads((tmp_path / "check.json").read_text())
    assert kept["green"]
    layouts = {row["layout"] for row in kept["rows"] if row["case"] == "causal window"}
    assert layouts == {check.ALONE, *check.LAYOUTS}
    tensors = {name for row in kept["rows"] for name in row["ratios"]}
    gradients = {"dsinks", "dalibi_slopes", "dkey_bias", "dbias", "dlatents", "drotary_keys", "dk_up", "dv_up"}
    said = capsys.readouterr().out.splitlines()
    done = [line for line in said if line.startswith("[")]
    cases = {(row["case"], row["dtype"], row["shape"]) for row in kept["rows"]}
    assert len(done) == len(cases)
    assert done[0].startswith(f"[1/{len(cases)}] full (fp32 b1 n37 h4/2 d16): 5 runs, worst ratio 0.")
    inference = {"prefill", "decode", "same bits on all ranks"}
    assert tensors == {"o", "lse", "dq", "dk", "dv", *gradients, "same bits twice", *inference}


@pytest.mark.dist
def test_check_is_green_on_two_ranks() -> None:
    said = run_module("ringattn.launch.check", "--device", "cpu", "--only", "in")
    assert "green: " in said
    assert "2 rank(s), gloo" in said


@pytest.mark.dist
def test_check_compares_virtual_ranks_with_the_simulated_ring_bit_by_bit(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--only", "causal window", "--virtual-size", "4")
    for ranks in (1, 2):
        said = run_module("ringattn.launch.check", *flags, "--json", str(tmp_path / "check.json"), ranks=ranks)
        assert "green: " in said
        rows = json.loads((tmp_path / "check.json").read_text())["rows"]
        assert len(rows) == 8  # in one launch and step by step
        assert all(row["ratios"]["bits of the simulated ring"] == 0 for row in rows)


def test_check_is_red_when_virtual_ranks_have_other_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = dispatch.run_forward

    def nearly(*args: Any, **kwargs: Any) -> Any:
        o, lse, saved = forward(*args, **kwargs)
        return torch.nextafter(o, o + 1), lse, saved

    monkeypatch.setattr(dispatch, "run_forward", nearly)
    assert check_command.main(["--device", "cpu", "--only", "causal window", "--virtual-size", "4"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"error \d\S+ where 0.0 is allowed; over budget: bits of the simulated ring", said)


def _check_virtual_cache(path: Path, wrong: str) -> int:
    """Check a cache over virtual ranks where ranks merge in another order, or rank 1 rounds otherwise."""
    gather, attend = Ring.gather, check_inference.attend

    def nearly(*args: Any, **kwargs: Any) -> torch.Tensor:
        o = attend(*args, **kwargs)
        return torch.nextafter(o, o + 1)

    with pytest.MonkeyPatch.context() as patch:
        if wrong == "order":
            patch.setattr(Ring, "gather", lambda *args: gather(*args)[::-1])
        if wrong == "rank 1" and dist.get_rank() == 1:
            patch.setattr(check_inference, "attend", nearly)
        flags = ["--virtual-size", "4", "--only", "inference: padded", "--json", str(path)]
        return check_command.main(["--device", "cpu", *flags])


def test_check_compares_a_cache_over_virtual_ranks_with_one_process_bit_by_bit(pool: Pools, tmp_path: Path) -> None:
    path, bits = tmp_path / "check.json", "bits of one process in extend "
    prefills, decodes = {f"{bits}{i} (prefill)" for i in (0, 3)}, {f"{bits}{i} (decode)" for i in (1, 2, 4)}
    same = "same bits on all ranks"
    for wrong, rank, red in (
        ("nothing", None, set[str]()),
        ("order", None, decodes),
        ("rank 1", 1, prefills | decodes | {same}),
    ):
        assert pool(2).run(_check_virtual_cache, path, wrong) == [int(bool(red))] * 2
        rows = json.loads(path.read_text())["rows"]
        assert len(rows) == 8  # in one launch and step by step, with each way to move
        for row in rows:
            assert row["ratios"].keys() == {"prefill", "decode", same} | prefills | decodes
            assert {name for name, ratio in row["ratios"].items() if ratio > 1} == red
            assert rank in (None, row["rank"])
            assert not red or row["tensor"] in red


def _refusal() -> object:
    with pytest.raises(SystemExit) as refused:
        check_command.main(["--device", "cpu", "--virtual-size", "3"])
    return refused.value.code


def test_virtual_ranks_that_processes_cannot_share_evenly_end_in_an_error_line(pool: Pools) -> None:
    said = "error: virtual_size must be a multiple of the 2 ranks, got 3; pass another --virtual-size"
    assert pool(2).run(_refusal) == [said] * 2


def test_check_is_green_on_the_kernels_of_torch_and_says_what_they_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command.main(["--device", "cpu", "--impl", "torch", "--only", "in", "--simulate", "2"]) == 0
    said = capsys.readouterr().out
    assert "causal window (fp32" in said
    assert 'not served: inference: chunks in fp32: impl="torch" cannot serve this call: prefill is no part' in said


@pytest.mark.usefixtures("_wrong_forward")
def test_check_is_red_when_the_forward_is_off_by_a_thousandth(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command.main(["--device", "cpu", "--only", "window"]) == 1
    said = capsys.readouterr().out
    assert "RED: causal window (fp32 b1 n37 h4/2 d16), zigzag, " in said
    # at once, and at the end again
    assert said.index("RED: causal window") < said.index("[2/") < said.rindex("RED: causal window")
    assert "over budget: o " in said
    assert "green: " not in said


@pytest.mark.usefixtures("_wrong_backward")
def test_check_is_red_when_the_backward_is_off_by_a_thousandth(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command.main(["--device", "cpu", "--only", "window"]) == 1
    assert "zigzag, dv on rank " in capsys.readouterr().out


def _check_with_one_wrong_rank(only: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(EagerKernels, "forward", _off_by_a_little(EagerKernels.forward))
        return check_command.main(["--device", "cpu", "--only", only])


def test_every_rank_is_red_when_one_is_wrong(pool) -> None:
    assert pool(2).run(_check_with_one_wrong_rank, "full") == [1, 1]
    assert pool(2).run(_check_with_one_wrong_rank, "inference: chunks") == [1, 1]


def test_check_is_red_when_decode_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = decode_eager._partial
    monkeypatch.setattr(decode_eager, "_partial", lambda scores, values: right(scores * 1.01, values))
    assert check_command.main(["--device", "cpu", "--only", "inference: crowd"]) == 1
    said = capsys.readouterr().out
    assert "RED: inference: crowd (fp32 12 ops h4/2 d8 page 4), alone, decode on rank 0" in said


def test_check_is_red_when_nothing_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command.main(["--device", "cpu", "--only", "no such case"]) == 1
    assert "nothing was checked: no case has 'no such case' in its name" in capsys.readouterr().out
    assert check_command.main(["--device", "cpu", "--only", "sinks", "--impl", "hopper"]) == 1
    assert "nothing was checked: no case was served" in capsys.readouterr().out
    assert check_command.main(["--device", "cpu", "--only", "sinks", "--soak", "-1"]) == 1


def test_nan_is_outside_every_budget() -> None:
    session, case = Session(0, 1, torch.device("cpu"), None), check.Case("x", "fp32", 3)
    exact = torch.zeros(3, dtype=torch.float64)
    standard: check.Standard = {"o": (exact, Budget(1.0, 1.0))}
    for wrong in (math.nan, math.inf, -math.inf):
        x = torch.tensor([0.0, wrong, 0.0])
        finding = check.examine("zigzag", lambda x=x: ({"o": x}, lambda x, name: x), standard)
        assert finding.ratios["o"] > 1
        verdict = check.Verdict(check.merge_findings(session, case, [finding]))
        assert [row["tensor"] for row in verdict.red] == ["o"]
    assert session.maximum([math.nan, 1.0]) == [math.inf, 1.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [check.default_cases, check.full_cases])
def test_every_layout_meets_every_mask_and_option(make: Any, world_size: int, device: str) -> None:
    cases = list(make(world_size, device))
    met = {(layout, option) for case in cases for layout in case.layouts for option in case.options}
    assert met == {(layout, option) for layout in check.LAYOUTS for option in check.OPTIONS}
    everywhere = [case.name for case in cases if case.layouts == check.LAYOUTS]
    assert set(check.masks(64)) <= set(everywhere)
    assert {case.dtype for case in cases} >= {"bf16", "fp16", "fp32"}
    assert {"keys", "queries"} <= {case.backward for case in cases}


def test_progress_of_compiling_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "PROGRESS_SECONDS", 0.2)
    session, cases = Session(0, 1, torch.device("cpu"), None), [check.masked("causal", 8, dtype="fp32")]
    check.compile_ahead(cases, check.CheckArgs(), 2, session)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("compiling in 1 processes first")
    assert said[-1].startswith("  1 of 1 cases are compiled, ")
    assert len(said) > 2


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_processes_that_compile_end_with_their_parent(how: int) -> None:
    starter = (
        "import signal, torch; from ringattn.launch.check import attention as check\n"
        "from ringattn.launch.common.session import Session\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background processes ignore it
        "check.compile_ahead(list(check.full_cases(4, 'cpu')), check.CheckArgs(), 4, Session(0, 1, torch.device('cpu'), None))"
    )
    process = psutil.Popen(
        [sys.executable, "-c", starter], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    # the first child tracks shared memory, and ends by itself
    while len(children) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        children = process.children()
    process.send_signal(how)
    assert len(children) >= 2
    assert not psutil.wait_procs([process, *children], 60)[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_few_kernels_are_compiled_by_default(device: str) -> None:
    # each differs in dozens of kernels, and up to 24 processes share them: a first run waits a minute for these
    args, session = check.CheckArgs(), Session(0, 1, torch.device("cpu"), None)
    cases = list(check.default_cases(4, device))
    assert len(check.distinct_kernels(cases, args, session)) <= 18
    assert len({case.head_dim for case in cases}) == 1
