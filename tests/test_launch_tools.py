"""The commands that look, check and measure: they tell the truth, and they notice when it is not the truth."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringattn
from ringattn import launch
from ringattn.kernels import decode, decode_eager, eager
from ringattn.kernels.contract import Score, accumulation_dtype
from ringattn.launch import (
    bench,
    bench_kernels,
    bench_links,
    bench_memory,
    bench_ring,
    bench_softmax,
    check,
    contenders,
    doctor,
    faults,
    figures,
    problems,
    replays,
    ring_contenders,
    rings,
    session,
    timeline,
    train,
    turns,
)
from ringattn.launch.distributed import REFUSED, choose_backend, resolve_device
from ringattn.launch.session import Session, check_numbers, check_output, open_session
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.reference import visible_pairs
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.layouts import make_shards
from ringattn.plan.mask import Visibility
from ringattn.plan.sharding import Sharding
from ringattn.schedule.execution_plan import make_execution_plan
from ringattn.schedule.stepwise_backward import WantedGrads, stepwise_backward
from ringattn.schedule.stepwise_forward import stepwise_forward
from ringattn.transport import base
from ringattn.transport.gpu_sharing import SHARE

ROOT = Path(__file__).parents[1]
TINY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "fp32"]


@pytest.fixture
def _wrong_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "forward", _off_by_a_little(eager.forward, "o"))


@pytest.fixture
def _wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        args[9].dv.mul_(1.001)

    right = eager.backward
    monkeypatch.setattr(eager, "backward", wrong)


def _off_by_a_little(right: Any, name: str) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        kwargs[name].mul_(1.001)

    return wrong


def _torchrun(world_size: int, *words: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*start, "-m", *words], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_modules_that_are_no_commands_say_which_is() -> None:
    files = {
        ".".join(path.relative_to(ROOT / "launch").with_suffix("").parts): path
        for path in (ROOT / "launch").rglob("*.py")
    }
    runs = {name for name, path in files.items() if '\nif __name__ == "__main__":' in path.read_text()}
    assert runs == {*launch.COMMANDS, *launch.INSIDE}
    for name in files:
        module = f"ringattn.launch.{name}"
        for start in (["-m", module], ["-u", f"-m{module}"]):
            words = ["-m", "-m", "x"], ["python", *start, "-m", "x"]
            if name in runs:
                launch._check_command(*words)
                continue
            with pytest.raises(SystemExit, match=f"must be a command, got {module}; run (.*)") as refused:
                launch._check_command(*words)
            instead = str(refused.value).rpartition("; run ")[2]
            if name.startswith("bench_"):
                assert instead == f"ringattn.launch.bench {name[6:]}"
                with pytest.raises(SystemExit, match="0"):
                    bench.main([name[6:], "--help"])
    launch._check_command(["-m"], ["python", "-m", "myringattn.launch.x"])
    done = subprocess.run(
        [sys.executable, "-m", "ringattn.launch.fuzz"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("got ringattn.launch.fuzz; run ringattn.launch.check --fuzz")


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (bench, ["ring", "--heads", "3", "--kv-heads", "2"], "kv_heads must divide the 3 heads, got 2; pass another --kv-heads"),
        (bench, ["ring", "--rounds", "0"], "rounds must be at least 1, got 0; pass another --rounds"),
        (bench, ["ring", "--seconds", "nan"], "seconds must be at least 0, got nan; pass another --seconds"),
        (bench, ["ring", "--tokens"], "tokens must have at least one value, got none; pass another --tokens"),
        (bench, ["ring", "--total", "-4"], "total must be at least 1, got -4; pass another --total"),
        (bench, ["host", "--calls", "0"], "calls must be at least 1, got 0; pass another --calls"),
        (bench, ["memory", "--kv-heads", "0"], "kv_heads must be at least 1, got 0; pass another --kv-heads"),
        (bench_links, ["--gbps", "0", "-1"], "gbps must be at least 0, got -1.0; pass another --gbps"),
        (check, ["--simulate", "-1"], "simulate must be at least 0, got -1; pass another --simulate"),
        (check, ["--seed", str(2**64)], r"seed must be from -2\*\*63 to 2\*\*64 - 1, as torch .* got 1844.*; pass another --seed"),
        (check, ["--fuzz-seed", str(-(2**63) - 1)], r"fuzz_seed must be from .* got -9223.*; pass another --fuzz-seed"),
        (faults, ["--times", "0"], "times must be at least 1, got 0; pass another --times"),
        (timeline, ["--head-dim", "0"], "head_dim must be at least 1, got 0; pass another --head-dim"),
    ],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(command: Any, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=f"^{said}$"):
        command.main([*words, "--device", "cpu"])


def test_every_count_of_a_command_has_a_least() -> None:
    kinds = [
        bench.Kernels,
        bench.Decode,
        bench.Products,
        bench.Ring,
        bench.Memory,
        bench.Model,
        bench.Host,
        bench.Exchange,
    ]
    kinds += [bench.Prefill, bench.Inference, bench.Server, bench_links.Links, check.CheckArgs, doctor.DoctorArgs]
    kinds += [faults.FaultArgs, replays.ReplaysArgs, timeline.TimelineArgs]
    for kind in kinds:
        check_numbers(kind())
        for field in dataclasses.fields(kind):
            several = isinstance(field.default, tuple)
            if "int" in str(field.type) and field.name not in ("seed", "fuzz_seed", "soak"):
                wrong = {field.name: (4, -1) if several else -1}
                with pytest.raises(
                    ValueError, match=rf"{field.name} must be (at least \d|multiples|the fewest|one number)"
                ):
                    check_numbers(kind(**wrong))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (bench, ["ring", "--out"]),
        (bench, ["server", "--out"]),
        (bench_links, ["--out"]),
        (bench_softmax, ["--json"]),
        (check, ["--json"]),
        (doctor, ["--json"]),
        (faults, ["--out"]),
        (timeline, ["--out"]),
    ],
)
def test_results_that_could_not_be_kept_are_not_measured(command: Any, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = [tmp_path / "file" / "x" / "y", tmp_path if words == ["--json"] else tmp_path / "file"]
    for path in wrong:
        with pytest.raises(
            SystemExit, match=f"{words[-1][2:]} must be a place that can be written, got {path}: .*; pass another"
        ):
            command.main([*words, str(path)])
    check_output(bench.Ring(out=tmp_path / "not" / "there"))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("name", "said"), [("taken", "taken: .*taken.json is a folder"), ("", "''"), (".", "'.'")])
def test_names_that_no_file_can_have_are_refused_before_anything_is_measured(
    name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "taken.json").mkdir()
    for kind in ("ring", "memory", "kernels", "server"):
        with pytest.raises(SystemExit, match=f"^name must be that of a file, got {said}; pass another --name$"):
            bench.main([kind, "--out", str(tmp_path), "--name", name])


def test_json_is_whole_beside_another_writer_and_a_full_disk_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "rows.json", Path.write_text

    def meet(self: Path, text: str) -> int:
        """Half of a text is there when another process writes its own."""
        with self.open("w") as file:
            written = file.write(text[: len(text) // 2])
            file.flush()
            with monkeypatch.context() as other:
                other.setattr(Path, "write_text", whole)
                other.setattr(os, "getpid", lambda: -1)
                session.write_json(path, ["the other"])
            assert json.loads(path.read_text()) == ["the other"]
            return written + file.write(text[written:])

    monkeypatch.setattr(Path, "write_text", meet)
    session.write_json(path, ["mine"])
    assert json.loads(path.read_text()) == ["mine"]

    def fill(self: Path, text: str) -> int:
        whole(self, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OSError, match="No space left on device"):
        session.write_json(path, ["more"])
    assert json.loads(path.read_text()) == ["mine"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (check, ["--fuzz", "1"]),
        (check, []),
        (timeline, []),
        (faults, []),
        (bench_links, []),
        (bench, ["host"]),
        (bench, ["prefill"]),
    ],
)
def test_kernels_that_nobody_knows_are_refused_at_once(command: Any, words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^impl must be \"auto\" or one of .*, got 'hooper'; use \"auto\"$"):
        command.main([*words, "--impl", "hooper", "--device", "cpu"])


def test_contenders_that_nobody_knows_are_refused() -> None:
    with pytest.raises(
        ValueError, match="who must be of cudnn, fa2, flex, fa4 and our kernel sets, got fa5: impl must be"
    ):
        bench.Kernels(who=("hopper", "fa5"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: bench.Decode(tokens=4, batch=8),
            "must have its new tokens, got 0 tokens of which 1 are new in group batch",
        ),
        (
            lambda: bench.Decode(tokens=8, groups=("tokens",)),
            "got 1 tokens of which 4 are new in group tokens; pass more --tokens",
        ),
        (lambda: bench.Decode(lengths=(0,)), "lengths must be at least 1, got 0"),
        (
            lambda: bench.Decode(configs=("64,4",)),
            "configs must be chosen or block_n,warps,stages,per_sm, got 64,4; pass such as",
        ),
        (
            lambda: bench.Products(mlp_dim=3, sharing=4),
            "sharing must be at most mlp_dim, got 4 and 3; pass a smaller --sharing",
        ),
        (
            lambda: bench.Prefill(total=(4096,)),
            "turns must be at most the tokens of each prompt, got 8192 of 4096; pass other",
        ),
        (lambda: bench.Model(head_dim=3), "head_dim must be even, got 3"),
        (lambda: bench.Inference(head_dim=3), "head_dim must be even, got 3"),
    ],
)
def test_shapes_that_a_bench_cannot_measure_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="grouped must be query heads and a divisor of them, got"):
        bench.Kernels(grouped=(3, 2))
    with pytest.raises(ValueError, match="rows must be multiples of the 3 heads, got 32"):
        bench.Exchange(heads=3)


def test_doctor_finds_this_box_healthy_and_says_why_a_kernel_is_not_used(tmp_path: Path) -> None:
    assert doctor.main(["--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] == []
    assert report["machine"]["torch"] == torch.__version__
    assert {row["kernels"] for row in report["kernels"]} == {"eager"}
    assert all(row["why"] and row["rejected"].get("portable") for row in report["kernels"])


def test_ranks_that_do_not_meet_are_told_where_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SystemExit, match=r"^ranks must meet at MASTER_ADDR:MASTER_PORT, got nothing:nothing: .*MASTER_ADDR"
    ):
        doctor.main(["--device", "cpu"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(SystemExit, match=rf"got 127.0.0.1:{port}: .*EADDRINUSE.*; start them with torchrun"):
            doctor.main(["--device", "cpu"])


def test_doctor_finds_a_broken_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(eager, "forward", broken)
    assert doctor.main(["--device", "cpu"]) == 1
    assert "no such instruction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "flags", "ranks"),
    [(doctor, [], 1), (check, ["--simulate", "3"], 3), (check, ["--simulate", "0"], 1), (check, ["--soak", "5"], 1)],
)
def test_nodes_that_the_ranks_cannot_share_are_refused(command: Any, flags: list[str], ranks: int) -> None:
    with pytest.raises(SystemExit, match=f"nodes must divide the ring of {ranks} ranks, got 2"):
        command.main(["--device", "cpu", "--nodes", "2", *flags])


def _doctor() -> dict[str, Any]:
    with open_session("cpu") as session:
        return doctor.examine(session)


@pytest.mark.dist
def test_doctor_measures_links_and_says_the_same_on_every_rank(pool) -> None:
    reports = pool(2).run(_doctor)
    assert reports[0]["faults"] == reports[1]["faults"] == []
    assert [row["mib"] for row in reports[0]["links"]] == [1, 8, 64]
    assert all(row["intact"] and row["gb_per_s"] > 0 for row in reports[0]["links"])


def test_check_is_green_in_one_process(tmp_path: Path) -> None:
    assert check.main(["--quick", "--device", "cpu", "--json", str(tmp_path / "check.json")]) == 0
    kept = json.loads((tmp_path / "check.json").read_text())
    assert kept["green"]
    layouts = {row["layout"] for row in kept["rows"] if row["case"] == "causal window"}
    assert layouts == {check.ALONE, *check.LAYOUTS}
    tensors = {name for row in kept["rows"] for name in row["ratios"]}
    gradients = {"dsinks", "dalibi_slopes", "dkey_bias", "dbias"}
    inference = {"prefill", "decode", "same bits on all ranks"}
    assert tensors == {"o", "lse", "dq", "dk", "dv", *gradients, "same bits twice", *inference}


@pytest.mark.dist
def test_links_are_timed_after_their_bits(tmp_path: Path) -> None:
    words = ["--tokens", "16", "--ctas", "4", "--gbps", "0", "1", "--rounds", "1", "--calls", "1", "--device", "cpu"]
    done = _torchrun(2, "ringattn.launch.bench_links", *words, *TINY, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "green: 4 rings give the bits of the simulated ring" in done.stdout
    rows = json.loads((tmp_path / "links.json").read_text())["rows"]
    assert [row["link"] for row in rows] == ["alone", "one ring, 4 ctas", "2 x 1, no limit", "2 x 1, 1 Gb/s"]
    assert all(row["forward_ms"] > 0 for row in rows)


@pytest.mark.dist
def test_check_is_green_under_torchrun() -> None:
    done = _torchrun(2, "ringattn.launch.check", "--quick", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "green: " in done.stdout
    assert "2 rank(s), gloo" in done.stdout


@pytest.mark.usefixtures("_wrong_forward")
def test_check_is_red_when_the_forward_is_off_by_a_thousandth(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--quick", "--device", "cpu", "--only", "window"]) == 1
    said = capsys.readouterr().out
    assert "RED: causal window (fp32 b1 n37 h4/2 d16), zigzag, " in said
    assert "over budget: o " in said
    assert "green: " not in said


@pytest.mark.usefixtures("_wrong_backward")
def test_check_is_red_when_the_backward_is_off_by_a_thousandth(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--quick", "--device", "cpu", "--only", "window"]) == 1
    assert "zigzag, dv on rank " in capsys.readouterr().out


def _check_with_one_wrong_rank(only: str) -> int:
    right = eager.forward
    if dist.get_rank() == 1:
        eager.forward = _off_by_a_little(right, "o")
    try:
        return check.main(["--quick", "--device", "cpu", "--only", only])
    finally:
        eager.forward = right


@pytest.mark.dist
def test_every_rank_is_red_when_one_is_wrong(pool) -> None:
    assert pool(2).run(_check_with_one_wrong_rank, "full") == [1, 1]
    assert pool(2).run(_check_with_one_wrong_rank, "inference: chunks") == [1, 1]


def test_check_is_red_when_decode_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = decode_eager._partial
    monkeypatch.setattr(decode_eager, "_partial", lambda scores, values: right(scores * 1.01, values))
    assert check.main(["--quick", "--device", "cpu", "--only", "inference: crowd"]) == 1
    said = capsys.readouterr().out
    assert "RED: inference: crowd (fp32 12 ops h4/2 d8 page 4), alone, decode on rank 0" in said


def test_check_is_red_when_nothing_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--quick", "--device", "cpu", "--only", "no such case"]) == 1
    assert "nothing was checked: no case has 'no such case' in its name" in capsys.readouterr().out
    assert check.main(["--quick", "--device", "cpu", "--only", "sinks", "--impl", "hopper"]) == 1
    assert "nothing was checked: no case was served" in capsys.readouterr().out
    assert check.main(["--device", "cpu", "--only", "sinks", "--soak", "-1"]) == 1


def test_nan_is_outside_every_budget() -> None:
    case = check.Case("x", "fp32", 3)
    exact = torch.zeros(3, dtype=torch.float64)
    standard: check.Standard = {"o": (exact, Budget(1.0, 1.0))}
    for wrong in (math.nan, math.inf, -math.inf):
        x = torch.tensor([0.0, wrong, 0.0])
        finding = check.examine(case, "zigzag", lambda x=x: ({"o": x}, lambda x, name: x), standard)
        assert finding.ratios["o"] > 1
        verdict = check.agree(Session(0, 1, torch.device("cpu"), None), [finding], [])
        assert [row["tensor"] for row in verdict.red] == ["o"]
    assert Session(0, 1, torch.device("cpu"), None).maximum([math.nan, 1.0]) == [math.inf, 1.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [check.quick_cases, check.full_cases])
def test_every_layout_meets_every_mask_and_option(make: Any, world_size: int, device: str) -> None:
    cases = list(make(world_size, device))
    met = {(layout, option) for case in cases for layout in case.layouts for option in case.options}
    assert met == {(layout, option) for layout in check.LAYOUTS for option in check.OPTIONS}
    everywhere = [case.name for case in cases if case.layouts == check.LAYOUTS]
    assert set(check.masks(64)) <= set(everywhere)
    assert {case.dtype for case in cases} >= {"bf16", "fp16", "fp32"}
    assert {"keys", "queries"} <= {case.backward for case in cases}


def _bench(out: str) -> int:
    words = [
        "--tokens",
        "24",
        "48",
        "--layouts",
        "zigzag",
        "balanced",
        "--rounds",
        "2",
        "--device",
        "cpu",
        "--out",
        out,
    ]
    return bench.main(["ring", *TINY, "--masks", "causal", "--no-graphs", *words])


def _bench_host(out: str) -> int:
    words = ["--tokens", "8", "--calls", "25", "--layers", "2", "--device", "cpu", "--out", out]
    return bench.main(["host", *TINY, *words])


@pytest.mark.dist
def test_bench_host_times_every_direction(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench_host, str(tmp_path)) == [0, 0]
    (row,) = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert row["world_size"] == 2
    # which takes longer is for a quiet machine to say
    times = ("inference", "forward", "both", "both_in_one_thread", "backward_operator", "layer", "layer_in_one_thread")
    assert min(row[f"{name}_us"] for name in times) > 0
    for split in (row["split_us"], row["split_in_one_thread_us"]):
        assert len(split) == 3
        assert min(split) > 0


PRODUCTS = ["--dim", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--mlp-dim", "48", "--rows", "1", "3"]


def test_bench_products_times_what_is_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["products", *PRODUCTS, "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main(words) == 0
    rows = json.loads((tmp_path / "products.json").read_text())["rows"]
    assert {row["who"] for row in rows if "us" in row} == {"torch"}
    assert {row["refused"] for row in rows if "us" not in row} == {
        "NotImplementedError: there is no kernel for this weight on cpu"
    }
    monkeypatch.setattr("ringattn.kernels.few_rows.has_kernel", lambda *weights: True)
    assert bench.main(words) == 0
    rows = json.loads((tmp_path / "products.json").read_text())["rows"]
    assert len(rows) == 4 * 2 * 2
    assert min(row["us"] for row in rows) > 0
    assert {(row["product"], row["weight_bytes"]) for row in rows} == {
        ("q, k and v", 2 * 32 * 64), ("o", 2 * 32 * 32), ("gate and up", 2 * 2 * 32 * 24), ("down", 2 * 24 * 32),
    }  # fmt: skip


def test_bench_products_gives_no_speed_to_a_wrong_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ringattn.kernels.few_rows.has_kernel", lambda *weights: True)
    monkeypatch.setattr("ringattn.kernels.few_rows.gate", lambda x, weight, *_: x.new_ones(len(x), len(weight)))
    assert bench.main(["products", *PRODUCTS, "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "products.json").read_text())["rows"]
    wrong = [row for row in rows if str(row.get("refused")).startswith("wrong answer")]
    assert [(row["product"], row["who"]) for row in wrong] == [("gate and up", "few rows")] * 2
    assert not any("us" in row for row in wrong)


SHARES = ["--sums", "3", "--hidden", "8", "--gathers", "2", "--columns", "5"]


def _bench_exchange(out: str) -> int:
    words = ["--rows", "4", "8", "--heads", "4", "--head-dim", "16", "--splits", "2", "--rounds", "2", *SHARES]
    return bench.main(["exchange", *words, "--device", "cpu", "--out", out])


@pytest.mark.dist
def test_bench_exchange_times_every_exchange_that_is_right(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench_exchange, str(tmp_path)) == [0, 0]
    rows = json.loads((tmp_path / "exchange.json").read_text())["rows"]
    assert [(row["who"], row["op"], row["rows"], row["kib_per_rank"]) for row in rows] == [
        ("group", "finish", 4, 4 * 4 * 18 / 1024),
        ("group", "finish", 8, 4 * 8 * 18 / 1024),
        ("group", "sum", 3, 4 * 3 * 8 / 1024),
        ("group", "gather", 2, 2 * 2 * 5 / 1024),
    ]
    assert min(row["call_us"] for row in rows) > 0


def test_bench_exchange_gives_no_speed_to_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rows", "4", "--heads", "4", "--head-dim", "16", "--rounds", "1", "--device", "cpu", *SHARES]
    for broken, said in (
        ("exchange.finish_parts", "alone, 4 rows: o is"),
        ("exchange.AloneExchange.sum", "alone, a sum of 3 x 8: the sum is"),
        ("exchange.AloneExchange.gather", "alone, columns 2 x 5: the whole is"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"ringattn.transport.{broken}", lambda *args: [x.fill_(0.5) for x in args[-2:]])
            assert bench.main(["exchange", *words, "--out", str(tmp_path)]) == 1
        assert said in capsys.readouterr().out
        assert not (tmp_path / "exchange.json").exists()


@pytest.mark.dist
def test_bench_ring_writes_rows_and_a_plot(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench, str(tmp_path)) == [0, 0]
    kept = json.loads((tmp_path / "ring.json").read_text())
    assert kept["machine"]["world_size"] == 2
    assert [(row["tokens_per_rank"], row["layout"], row["who"]) for row in kept["rows"]] == [
        (tokens, layout, "auto") for tokens in (24, 48) for layout in ("zigzag", "balanced")
    ]
    for row in kept["rows"]:
        assert row["both_ms"] > 0
        assert row["forward_ms"] > 0
        assert row["forward_tflops"] * row["forward_ms"] * 1e9 == pytest.approx(4 * 4 * 16 * row["pairs"] / 2)
        assert row["forward_exposed_ms"] == pytest.approx(row["forward_ms"] - row["forward_alone_ms"])
        # rank 0 needs all 48 keys of rank 1, rank 1 only the first 24 of rank 0; k and v, 2 heads of 16, fp32
        if (row["tokens_per_rank"], row["layout"]) == (48, "zigzag"):
            assert row["bytes_received"]["forward"] == (48 + 24) // 2 * 2 * 16 * 2 * 4
            assert row["bytes_received"]["forward_most"] == 48 * 2 * 16 * 2 * 4
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")


def _bench_with_others(out: str) -> int:
    """Two schedules, a third that cannot be, and peers: one right, one that mistakes its order, one that raises."""
    rings.SCHEDULES.update(staged={}, process_group={})

    def refuse(schedule: str, group: Any = None) -> Any:
        if schedule == "gathered":
            raise NotImplementedError("peers must reach each other's memory, got CPUs; use process_group")
        return make(schedule, group)

    def peer(self: Any, who: str, problem: Any, seed: int) -> ring_contenders.RingContender:
        if who == "ring_flash_attn":
            raise contenders.Refused("not installed")
        ring = peer_ring
        right = ring_contenders.prepare_ours(problem, ring, "zigzag", torch.device("cpu"), "auto", seed)
        if who == "torch_cp_allgather":
            return right
        return dataclasses.replace(right, answers=lambda: [x.flip(1) for x in right.answers()])

    make, peer_ring = rings.make_ring, ringattn.Ring()
    rings.make_ring = refuse
    ring_contenders.Peers.prepare = peer
    words = ["--schedules", "gathered", "staged", "process_group", "--tokens", "24", "--rounds", "1", "--device", "cpu"]
    words += ["--peers", "torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn", "--no-graphs", "--out", out]
    return bench.main(["ring", *TINY, *words])


@pytest.mark.dist
def test_rings_and_peers_take_turns_and_a_wrong_one_has_no_speed(pool, tmp_path: Path) -> None:
    workers = pool(2)
    try:
        assert workers.run(_bench_with_others, str(tmp_path)) == [0, 0]
    finally:
        workers.close(kill=True)  # what was patched there ends with them
    rows = {row["who"]: row for row in json.loads((tmp_path / "ring.json").read_text())["rows"]}
    assert list(rows) == ["staged", "gloo", "torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn"]
    assert [who for who, row in rows.items() if "forward_ms" in row] == ["staged", "gloo", "torch_cp_allgather"]
    assert rows["torch_cp_alltoall"]["refused"].startswith("wrong answer: differs from ours in o by ")
    assert rows["ring_flash_attn"]["refused"] == "not installed"
    assert (rows["gloo"]["ours"], rows["torch_cp_allgather"]["ours"]) == (True, False)


def test_bench_ring_fails_when_none_of_its_rings_was_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room for keys")

    monkeypatch.setattr(ringattn.Ring, "kv_buffer", refuse)
    words = ["ring", *TINY, "--tokens", "24", "--rounds", "1", "--no-graphs", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main([*words, "--schedules", "in_place"]) == 1
    assert capsys.readouterr().err.endswith("error: in_place: RuntimeError: no room for keys\n")
    assert bench.main([*words, "--schedules", "in_place", "auto"]) == 0
    assert "error:" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ring", "memory"])
def test_a_bench_without_a_ring_says_why(kind: str, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no GPUs")

    monkeypatch.setattr(rings, "make_ring", refuse)
    assert bench.main([kind, *TINY, "--device", "cpu", "--schedules", "gathered", "kept", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.endswith(
        "error: one of the schedules must give a ring here, got none (gathered: rank 0: RuntimeError: no GPUs; "
        "kept: rank 0: RuntimeError: no GPUs); choose another schedule\n"
    )
    assert "check is green" not in said.out


def _refusal(name: str, words: list[str]) -> str:
    command = {"bench": bench, "bench_links": bench_links, "check": check, "timeline": timeline}[name]
    with pytest.raises(SystemExit) as refused:
        command.main([*words, "--device", "cpu"])
    return str(refused.value)


@pytest.mark.dist
def test_schedules_and_nodes_that_cannot_be_are_refused_on_every_rank(pool) -> None:
    for name, words in {
        "bench": ["prefill", "--schedule", "gathered"],
        "bench_links": ["--within", "staged"],
        "check": ["--schedule", "kept"],
        "timeline": ["--schedule", "staged"],
    }.items():
        for said in pool(2).run(_refusal, name, words):
            assert said.startswith(f"one of the schedules must give a ring here, got none ({words[-1]}: rank 0: "), said
            assert said.endswith("); choose another schedule")
    assert (
        pool(2).run(_refusal, "bench_links", ["--nodes", "3"])
        == ["nodes must divide the ring of 2 ranks, got 3; use nodes of equal size, or nodes=1"] * 2
    )


def test_a_window_is_dealt_out_so_that_fewer_rows_move() -> None:
    wide = problems.Problem("window", 4 * 32768, 1, 32, 8, 128, "bf16", window=4095)
    assert bench_ring.best_layout(wide, 4) == "contiguous"
    moved = {}
    for world_size in (2, 4, 8):
        problem = dataclasses.replace(wide, seq_len=world_size * 32768)
        sharding = bench_ring.deal(problem, FakeRing(world_size), "contiguous")  # pyright: ignore[reportArgumentType]
        moved[world_size] = bench_ring.bytes_received(problem, sharding)["forward_most"]
    assert set(moved.values()) == {4095 * 2 * 8 * 128 * 2}, "the halo, at any number of ranks"


class FakeRing:
    """Deals out positions among ranks that are not there."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def sharding(self, seq_len: int, layout: str, documents: Any = None, balance: Any = None) -> Any:
        options: dict[str, Any] = balance or {"causal": True}
        mask = Visibility(seq_len, seq_len, documents=documents, **options)
        return Sharding(seq_len, layout, make_shards(layout, seq_len, self.world_size, mask), 0, documents)


def test_the_flash_attn_that_is_lent_answers_ring_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(contenders.Refused, match="not installed"):
        ring_contenders.find_ring_flash_attn()
    ring_contenders.lend_flash_attn()
    lent = sys.modules["flash_attn.flash_attn_interface"]
    signature = inspect.signature(lent._flash_attn_backward)
    assert {"dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "causal"} <= set(signature.parameters)
    with pytest.raises(NotImplementedError, match="window_size_left must be left out, got 5"):
        lent._flash_attn_forward(None, None, None, window_size_left=5)


@pytest.mark.parametrize(("seconds", "rounds"), [(math.inf, 5), (0.0, 3), (1e3, 5)])
def test_rounds_fit_into_the_seconds_but_three_at_least(seconds: float, rounds: int) -> None:
    here = Session(0, 1, torch.device("cpu"), None)
    found = turns.time_calls({"a": lambda: time.sleep(1e-3)}, here, 5, "calls", seconds)["a"]
    assert found.rounds == rounds
    assert found.calls_ms is not None
    assert found.calls_ms >= 1


def test_calls_of_several_ranks_are_timed_with_their_host() -> None:
    here = Session(0, 1, torch.device("cpu"), None)
    found = turns.time_together({"a": lambda: None, "b": lambda: time.sleep(1e-3)}, here, 3, math.inf, ["b"])
    assert found["a"].host_us is None
    assert found["b"].host_us is not None
    assert found["b"].host_us >= 1e3
    assert found["b"].calls_ms is not None
    assert found["b"].calls_ms >= 1
    assert found["b"].graph_refused == "NotImplementedError: graphs need a GPU"


class _NoKernels:
    """Kernels that write nothing: what is left is what the loops hold."""

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> None:
        """Nothing."""

    backward = forward

    @staticmethod
    def delta(o: torch.Tensor, do: torch.Tensor, dlse: Any) -> torch.Tensor:
        return torch.empty(o.shape[0], o.shape[2], o.shape[1], dtype=accumulation_dtype(o.dtype))


class _NoWire(base.NoTransport):
    def post(self, sends: Any, receives: Any, what: str) -> Any:
        return base.Done()


def _held(problem: Any, layout: str, world_size: int, rank: int) -> int:
    """Bytes that torch's allocator handed out at the peak of the second of two steps."""
    ring = FakeRing(world_size)
    dealt = bench_ring.deal(problem, ring, layout)  # pyright: ignore[reportArgumentType]
    sharding = Sharding(problem.seq_len, layout, dealt.shards, rank, problem.documents)
    spec = AttentionSpec.deserialize(serialize(sharding, softmax_scale=1.0, impl="eager", **problem.options), rank)
    context = base.RingContext(rank, world_size, _NoWire())
    kernels: Any = _NoKernels()

    def step() -> list[torch.Tensor]:
        q, k, v, do = (x.detach() for x in problems.draw_inputs(problem, sharding.shard_len, torch.device("cpu")))
        plan = make_execution_plan(spec, q, k, v, ScoreTensors(), kernels, context)
        o, lse = stepwise_forward(q, k, v, Score(1.0), plan, context)
        grads = stepwise_backward(do, None, q, k, v, o, lse, Score(1.0), plan, context, WantedGrads())
        return [grads.dq.to(q.dtype), grads.dk.to(q.dtype), grads.dv.to(q.dtype)]

    step()
    kept = context.buffers.num_bytes()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    assert context.buffers.num_bytes() == kept
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return kept + max(change["Total Allocated"] for change in changes) - before


@pytest.mark.parametrize(
    ("mask", "kv_heads", "batch", "dtype"),
    [("causal", 1, 1, "bf16"), ("causal", 4, 2, "bf16"), ("window", 2, 1, "fp16"), ("full", 4, 1, "fp32")],
)
def test_the_predicted_peak_is_what_the_allocator_saw(mask: Any, kv_heads: int, batch: int, dtype: Any) -> None:
    problem = problems.Problem(mask, 1536, batch, 4, kv_heads, 32, dtype, window=100)
    for world_size in (1, 3):
        layout = bench_ring.best_layout(problem, world_size)
        held = max(_held(problem, layout, world_size, rank) for rank in range(world_size))
        predicted = sum(bench_memory.predict_bytes(problem, world_size).values())
        assert held == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_predicted_outboxes_are_those_that_the_loops_reserve(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.Problem("causal", 1536, 1, 4, kv_heads, 32, "bf16", window=0)
    for world_size in (2, 4):
        asked = [0, 0]

        def reserve(self: Any, *sizes: int, asked: list[int] = asked) -> None:
            del self
            asked[:] = map(max, asked, sizes)

        monkeypatch.setattr(_NoWire, "reserve", reserve)
        _held(problem, bench_ring.best_layout(problem, world_size), world_size, 0)
        predicted = bench_memory.predict_bytes(problem, world_size, boxes=bench_memory.BOXES)
        assert predicted["outboxes"] == pytest.approx(2 * sum(asked), rel=0.01)


def test_a_million_tokens_on_four_gpus_are_predicted_to_fit() -> None:
    problem = problems.Problem("causal", 2**20, 1, 32, 8, 128, "bf16", window=0)
    staged, gathered = (bench_memory.predict_bytes(problem, 4, schedule) for schedule in ("staged", "gathered"))
    per_rank = 2**18 * 8 * 2 * 128
    assert gathered["far"] == pytest.approx(2 * 3 * per_rank, rel=0.01), "rank 0 holds the last rows"
    assert gathered["homes"] == 4 * (2 * 3 + 1) * per_rank
    assert sum(staged.values()) < sum(gathered.values()) + 2**33
    assert max(sum(staged.values()), sum(gathered.values())) < 100 * 2**30


SMALL = ["kernels", "--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--head-dims", "16", "--heads", "2"]
SMALL += ["--length", "64", "--lengths", "32", "64", "--batch", "2", "32", "--carry-length", "48"]
SMALL += ["--grouped", "4", "1", "--window", "15", "--document", "20"]


def _rows(tmp_path: Path, *words: str) -> dict[str, Any]:
    assert bench.main([*SMALL, "--out", str(tmp_path), *words]) == 0
    return json.loads((tmp_path / "kernels.json").read_text())


def test_bench_kernels_says_who_was_refused_and_why(tmp_path: Path) -> None:
    groups = ["target", "masks", "grouped"]
    kept = _rows(tmp_path, "--who", "auto", "portable", "cudnn", "fa2", "flex", "fa4", "--groups", *groups)
    rows = kept["rows"]
    assert {(row["who"], row["level"]) for row in rows if "tflops" in row} == {("auto", "op"), ("auto", "kernel")}
    assert all(row["refused"] for row in rows if row["who"] != "auto")
    assert "device must be a CUDA" in next(row["refused"] for row in rows if row["who"] == "portable")
    assert {(row["group"], row["mask"], row["kv_heads"]) for row in rows} == {
        *(("target", mask, 2) for mask in ("full", "causal")),
        *(("masks", mask, 2) for mask in ("window", "documents")),
        *(("grouped", mask, 1) for mask in ("full", "causal")),
    }
    for row in rows:
        if "tflops" in row:
            work = 4 * row["heads"] * 16 * row["pairs"] * {"forward": 1, "backward": 2.5}[row["direction"]]
            assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(work)
            assert (row["timing"], row["graph_refused"]) == ("calls", "NotImplementedError: graphs need a GPU")
            assert 0 < row["ratio"] <= 1
            assert row["kernels"] == "eager"


def test_bench_kernels_fails_when_nobody_was_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--who", "fa2", "portable", "--groups", "target", "--out", str(tmp_path)]
    assert bench.main([*SMALL, *words]) == 1
    assert capsys.readouterr().err == "error: every contender was refused, so nothing was timed; --who takes others\n"
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert {row["who"] for row in rows if row["refused"]} == {"fa2", "portable"}
    # a window of 16 cuts no 16 tokens
    words = ["--groups", "lengths", "--masks", "window", "--lengths", "16", "--out", str(tmp_path / "none")]
    with pytest.raises(SystemExit, match="bench kernels must have a problem to measure, got none; pass other --groups"):
        bench.main([*SMALL, *words])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("share", ["x", "1/", "-1/2", "2/2"])
@pytest.mark.parametrize(("command", "words"), [(bench, ["kernels"]), (check, [])])
def test_shares_of_compiling_that_are_none_are_refused(command: Any, words: list[str], share: str) -> None:
    with pytest.raises(SystemExit, match=f"^compile_share must be i/n with i below n, got {share}; pass such as"):
        command.main([*words, f"--compile-share={share}", "--device", "cpu"])


def _wait_for(what: Any, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("module", ["bench_kernels", "check"])
def test_processes_that_compile_end_with_the_one_that_started_them(module: str, how: int, tmp_path: Path) -> None:
    share = (
        "import os, sys, time; from pathlib import Path; from ringattn.launch.session import share_of\n"
        "for item in share_of(range(12000), '0/1'): Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(0.05)"
    )
    starter = (
        "import signal, subprocess, sys, torch; from ringattn.launch import bench, bench_kernels, check, session\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what is started in the background ignores it
        "start, words = subprocess.Popen, sys.argv[1:]\n"
        "subprocess.Popen = lambda *_, **options: start([sys.executable, '-c', *words])\n"
        "bench_kernels.os.cpu_count = lambda: 2\n"
        "one = session.Session(0, 1, torch.device('cpu'), None)\n"
    )
    starter += {
        "bench_kernels": "bench_kernels.compile_ahead(bench.Kernels(), [], one)",
        "check": "check.compile_ahead([], check.CheckArgs(), 1, one)",
    }[module]
    said = tmp_path / "pid"
    command = [sys.executable, "-c", starter, share, str(said)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    _wait_for(lambda: said.exists() and said.read_text())
    process.send_signal(how)
    process.wait(120)
    pid = int(said.read_text())
    _wait_for(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(), 60)


def test_bench_kernels_times_the_carry_beside_the_same_kernel_without(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "--who", "auto", "fa4", "--groups", "carry")["rows"]
    assert {(row["who"], row["level"], row["direction"]) for row in rows} == {
        ("auto", "kernel", "forward"),
        ("auto", "carried", "forward"),
    }
    for row in rows:
        if row["level"] == "carried":
            assert row["cost_percent"] == pytest.approx(100 * (row["ms"] / row["plain_ms"] - 1))
            assert row["seq_len"] == 48


DECODE = ["decode", "--device", "cpu", "--tokens", "64", "--batch", "2", "--lengths", "40", "--new-tokens", "3"]
DECODE += [
    "--page-size",
    "16",
    "--rounds",
    "3",
    "--round-s",
    "0.01",
    "--groups",
    "target",
    "lengths",
    "tokens",
    "fp8",
    "uneven",
]


def test_bench_decode_counts_the_bytes_of_k_and_v(tmp_path: Path) -> None:
    assert bench.main([*DECODE, "--out", str(tmp_path), "--configs", "chosen", "64,4,4,2"]) == 0
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [row["requests"] for row in rows if row["config"] == "chosen"] == [
        *([64], [40], [64], [32, 32], [64], [32, 32], [64], [60, 4]),
    ]
    for row in rows:
        if row["config"] != "chosen":
            assert "refused" in row  # no Triton on a CPU
            continue
        assert row["kv_bytes"] == 2 * sum(row["requests"]) * 8 * {"bf16": 256, "fp8": 132}[row["pool"]]
        assert row["gbps"] * row["us"] == pytest.approx(1e-3 * row["kv_bytes"])
        assert row["percent"] == pytest.approx(100 * row["gbps"] / max(row["read_gbps"], row["copy_gbps"]))


def test_bench_decode_gives_no_speed_to_a_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.decode

    def off_by_a_little(q: Tensor, *rest: Any, **options: Any) -> None:
        right(q * 1.1, *rest, **options)

    monkeypatch.setattr(decode, "decode", off_by_a_little)
    assert bench.main([*DECODE, "--groups", "target", "--out", str(tmp_path)]) == 1
    (row,) = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert row["refused"].startswith("wrong answer: o is off by")
    assert "us" not in row


def test_bench_decode_fails_when_nothing_of_ours_was_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--groups", "target", "--configs", "64,4,4,2", "--peers", "sdpa", "--out", str(tmp_path)]
    assert bench.main([*DECODE, *words]) == 1  # no Triton on a CPU
    said = capsys.readouterr()
    assert said.err == "error: no configuration of ours was timed\n"
    assert f"rows: {tmp_path / 'decode.json'}\n" in said.out


@pytest.mark.parametrize("words", [DECODE, ["products", *PRODUCTS, "--device", "cpu"]])
def test_a_bench_that_leaves_out_everything_fails_and_names_no_file(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*words, "--budget-s", "1e-9", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: nothing was measured, and no file written: all was left out; ")
    assert "rows: " not in said.out
    assert not list(tmp_path.iterdir())


def test_bench_kernels_leaves_out_what_the_budget_does_not_reach(tmp_path: Path) -> None:
    kept = _rows(tmp_path, "--who", "auto", "--groups", "lengths", "--budget-s", "1e-3")
    assert kept["rows"] == []
    assert {(one["mask"], one["seq_len"]) for one in kept["left_out"]} == {
        (mask, n) for mask in ("full", "causal", "window", "documents") for n in (32, 64)
    }


def test_bench_kernels_gives_no_speed_to_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(eager, "forward", _off_by_a_little(eager.forward, "o"))
    words = ["--who", "auto", "--groups", "target", "--masks", "full", "--out", str(tmp_path)]
    assert bench.main([*SMALL, *words]) == 1
    kept = json.loads((tmp_path / "kernels.json").read_text())
    assert all("wrong answer: o " in row["refused"] and "ms" not in row for row in kept["rows"])
    assert len(kept["red"]) == 2
    assert "red, and so without a speed: auto op, full b1 n64 h2 d16 fp32: wrong answer: o " in capsys.readouterr().out


def test_a_peer_that_raises_stops_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(inputs: contenders.Inputs) -> contenders.Contender:
        raise AssertionError("only SM100 is supported")

    def half(inputs: contenders.Inputs) -> contenders.Contender:
        whole = contenders.prepare("auto", "op", inputs, ringattn.Ring())

        def answers() -> Any:
            yield next(whole.answers())
            raise RuntimeError("no backward")

        def backward() -> None:
            raise RuntimeError("no backward")

        return contenders.Contender(whole.forward, backward, answers)

    monkeypatch.setattr(contenders, "prepare_fa4", breaks)
    monkeypatch.setattr(contenders, "prepare_flex", half)
    rows = _rows(tmp_path, "--who", "fa4", "flex", "auto", "--levels", "op", "--groups", "target")["rows"]
    said = {(row["who"], row["direction"]): row.get("refused") for row in rows}
    assert said == {
        ("fa4", "forward"): "AssertionError: only SM100 is supported",
        ("fa4", "backward"): "AssertionError: only SM100 is supported",
        ("flex", "forward"): None,
        ("flex", "backward"): "RuntimeError: no backward",
        ("auto", "forward"): None,
        ("auto", "backward"): None,
    }


def test_a_contender_that_does_not_answer_ends_the_run_and_is_named(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom ringattn.launch import bench, contenders\n"
        "contenders.prepare_flex = lambda inputs: time.sleep(100)\nsys.exit(bench.main(sys.argv[1:]))"
    )
    words = ["--who", "flex", "--groups", "target", "--patience-s", "8", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *SMALL, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert (rows[-1]["who"], rows[-1]["refused"][:18]) == ("flex", "no answer in 8 s: ")


def test_what_matters_most_is_measured_first() -> None:
    planned = bench_kernels.schedule(bench.Kernels())
    groups = [group for group, _ in planned]
    assert list(dict.fromkeys(groups)) == list(bench_kernels.GROUPS)
    first = planned[0][1]
    assert (first.batch, first.heads, first.seq_len, first.head_dim, first.mask) == (1, 16, 16384, 128, "full")
    assert len(planned) == len(set(planned))
    assert {problem.seq_len for _, problem in planned} == {2**power for power in range(11, 18)}
    assert all(problem.seq_len > 4096 for _, problem in planned if problem.mask in ("window", "documents"))


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
def test_the_standard_of_a_problem_is_the_reference_on_its_last_heads(mask: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(contenders.CHUNK_ELEMENTS, "cpu", 300)
    problem = problems.Problem(mask, 41, 2, 4, 2, 16, "fp32", window=7, document=9)
    inputs = contenders.Inputs(problem, torch.device("cpu"))
    standard = contenders.make_standard(inputs)
    leaves = [x.detach().double().requires_grad_() for x in inputs.take("bshd")[:3]]
    o = ringattn.attention_reference(*leaves, documents=problem.documents, **problem.options)
    grads = torch.autograd.grad(o, leaves, inputs.take("bshd")[3].double())
    for name, x in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        head = slice(2, 4) if name in ("o", "dq") else slice(1, 2)
        torch.testing.assert_close(standard.tensors[name][0], x[-1:, :, head].detach())
        assert standard.ratio(name, x.detach().float()) < 1
        assert standard.ratio(name, x.detach().float() * 1.01) > 1
        assert standard.ratio(name, x.detach().float().index_fill(0, torch.tensor([0]), math.nan)) == math.inf


@pytest.mark.parametrize(
    ("kind", "words", "first", "rows"),
    [
        ("ring", [*TINY, "--tokens", "24", "48", "--rounds", "1", "--no-graphs"], 24, 1),
        ("memory", [*TINY, "--lengths", "24", "48"], 24, 1),
        ("prefill", [*TINY, "--total", "24", "48", "--chunks", "16", "--turns", "4", "--rounds", "1"], 24, 5),
        ("products", [*PRODUCTS, "--rounds", "1"], None, 1),
    ],
)
def test_a_bench_that_is_cut_off_leaves_what_it_has_measured(
    kind: str, words: list[str], first: int | None, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = session.write_json

    def cut_off(path: Path, content: Any) -> None:
        whole(path, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "write_json", cut_off)
    with pytest.raises(KeyboardInterrupt):
        bench.main([kind, *words, "--device", "cpu", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / f"{kind}.json").read_text())["rows"]
    assert [row.get("seq_len") for row in kept] == [first] * rows
    assert [path.name for path in tmp_path.iterdir()] == [f"{kind}.json"]


@pytest.mark.usefixtures("_wrong_backward")
@pytest.mark.parametrize("kind", ["ring", "memory", "host"])
def test_no_speed_is_shown_on_a_red_check(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([kind, *TINY, "--device", "cpu", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "red: no speed is shown" in said
    assert "tflops" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("n", [1, 5, 64, 1000])
def test_counted_pairs_are_the_visible_ones(mask: Any, n: int) -> None:
    for document in (0, 6):
        problem = problems.Problem(mask, n, 1, 1, 1, 16, "fp32", window=7, document=document)
        visible = visible_pairs(n, documents=problem.documents, **problem.options)
        assert problem.pairs == int(visible.sum())
        assert torch.equal(problems.visible_rows(problem, 0, n, torch.device("cpu")), visible)


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_same_work_is_the_shortest_length_with_a_share_of_the_pairs(mask: Any, world_size: int) -> None:
    problem = problems.Problem(mask, 5000, 1, 1, 1, 16, "fp32", window=100)
    share = problems.same_work(problem, world_size)
    shorter = dataclasses.replace(share, seq_len=share.seq_len - 1)
    assert shorter.pairs < problem.pairs / world_size <= share.pairs
    assert (share == problem) == (world_size == 1)


def test_documents_are_the_same_at_every_length() -> None:
    long, short = problems.pack_documents(100_000), problems.pack_documents(10_000)
    assert long[: len(short) - 1] == short[:-1]
    assert (short[0], short[-1], long[-1]) == (0, 10_000, 100_000)
    assert all(a < b for a, b in pairwise(long))


def _timeline(out: str) -> int:
    return timeline.main([*TINY, "--tokens", "48", "--warmup", "1", "--device", "cpu", "--out", out])


@pytest.mark.dist
def test_traces_have_named_ring_steps(pool, tmp_path: Path) -> None:
    assert pool(2).run(_timeline, str(tmp_path)) == [0, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    for rank in range(2):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {f"ring step 0: keys of rank {rank}", f"ring step 1: keys of rank {1 - rank}"} <= names
        found = summary["ranks"][rank]
        assert found["compute_ms"] > 0
        assert found["communication_ms"] > 0
        assert found["hidden_ms"] + found["exposed_ms"] == pytest.approx(found["communication_ms"])


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda x: (x[0], x[0] + x[1])), max_size=8)


@given(spans, spans)
@settings(deadline=None)
def test_intervals_count_each_moment_once(these: list[Any], those: list[Any]) -> None:
    def moments(intervals: list[Any]) -> list[int]:
        return [t for start, stop in intervals for t in range(start, stop)]

    a, b = timeline.union(these), timeline.union(those)
    assert moments(a) == sorted(set(moments(these)))
    assert moments(timeline.intersection(a, b)) == sorted(set(moments(these)) & set(moments(those)))


def test_the_time_of_replayed_calls_is_alone_waiting_and_idle() -> None:
    """Three replays of four calls, each a copy, then two kernels that overlap, and a pause."""
    rows, at = [], 5.0
    for _ in range(3):
        for _ in range(4):
            rows += [("gpu_memcpy", at - 2, 4.0), ("kernel", at, 10.0), ("kernel", at + 8, 4.0)]
            at += 15.0
        at += 100.0
    trace = {
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [{"ph": "X", "cat": c, "name": c, "ts": t, "dur": d} for c, t, d in rows]
        + [
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0.0, "dur": 1e6},
            {"ph": "M", "name": "process_name"},
        ],
    }
    events = replays.read_trace(trace)
    assert len(events) == 36
    last = replays.last_replay(events, 3)
    assert [event.kind for event in last[:3]] == ["copy", "kernel", "kernel"]
    assert last[1].start == 1000 + 5 + 2 * (60 + 100)
    assert len(last) == 12
    # of the first copy half is before the first call; a copy of the last call begins in the one before
    assert replays.Spent.of(last, 4) == replays.Spent(15.0, 12.0, (2 + 2 * 4 + 2) / 3)
    with pytest.raises(ValueError, match="as many kernels of each, got 24"):
        replays.last_replay(events, 5)
    with pytest.raises(ValueError, match="5 calls must have as many kernels each, got 8"):
        replays.Spent.of(last, 5)
    with pytest.raises(ValueError, match="calls must be at least 2"):
        replays.ReplaysArgs(calls=1)


def test_a_device_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'tpu'"):
        resolve_device("tpu", 0, 1)
    with pytest.raises(ValueError, match="start fewer with --nproc_per_node or pass --device cpu"):
        resolve_device("cuda", 0, 1000)
    assert resolve_device("cpu", 3, 4) == torch.device("cpu")


def test_ranks_share_gpus_where_torch_is_told_that_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(SHARE, raising=False)
    with pytest.raises(ValueError, match="got 3 ranks and 2 GPUs"):
        resolve_device("cuda", 2, 3)
    monkeypatch.setenv(SHARE, "1")
    found = [resolve_device("cuda", rank, 3) for rank in range(3)]
    assert found == [torch.device("cuda", index) for index in (0, 1, 0)]
    # NCCL refuses ranks that share a GPU
    assert choose_backend(found[0], 3) == choose_backend(torch.device("cpu"), 1) == "gloo"
    assert choose_backend(found[0], 2) == "nccl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="got 3 ranks and 0 GPUs"):
        resolve_device("cuda", 2, 3)


@pytest.mark.parametrize("command", [bench_links, check, doctor, timeline, train])
def test_commands_refuse_devices_that_are_not_there_in_a_line(command: Any, monkeypatch: Any, capsys: Any) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1000", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1000"}.items():
        monkeypatch.setenv(name, value)
    said = "must be at most its number of GPUs, got 1000 ranks and .* or pass --device cpu"
    if command is train:
        assert train.main(["--device", "cuda"]) == REFUSED
        assert re.search(f"^error: .*{said}$", capsys.readouterr().err, re.MULTILINE)
        return
    with pytest.raises(SystemExit, match=said):
        command.main(["--device", "cuda"])


def test_replays_refuses_what_has_no_gpus_without_naming_flags_that_it_lacks(monkeypatch: Any) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    with pytest.raises(SystemExit, match=r"must have a GPU for each rank.* got 1000 ranks and .*-nproc_per_node$"):
        replays.main([])


@pytest.mark.parametrize(
    "module", [problems, check, timeline, replays, rings, bench_ring, bench_memory, figures, session]
)
def test_examples_run(module: Any) -> None:
    import doctest

    found = doctest.testmod(module)
    assert found.failed == 0
