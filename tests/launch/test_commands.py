"""Impossible command lines are refused in one line, and results are written whole."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.launch import doctor
from ringattn.launch.bench import __main__ as bench
from ringattn.launch.check import __main__ as check_command
from ringattn.launch.check import attention as check
from ringattn.launch.check import fault_injection as faults
from ringattn.launch.common import session
from ringattn.launch.common.distributed import REFUSED, choose_backend, resolve_device
from ringattn.launch.common.session import check_numbers, check_output
from ringattn.launch.plan import __main__ as plan
from ringattn.launch.train import __main__ as train_command
from ringattn.transport.gpu_sharing import SHARE
from tests.launch.common import TINY


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (bench, ["ring", "--heads", "3", "--kv-heads", "2"], "kv_heads must divide the 3 heads, got 2; pass another --kv-heads"),
        (bench, ["ring", "--rounds", "0"], "rounds must be at least 1, got 0; pass another --rounds"),
        (bench, ["ring", "--seconds", "nan"], "seconds must be at least 0, got nan; pass another --seconds"),
        (bench, ["ring", "--tokens"], "tokens must have at least one value, got none; pass another --tokens"),
        (bench, ["ring", "--total", "-4"], "total must be at least 1, got -4; pass another --total"),
        (bench, ["ring", "--calls", "0"], "calls must be at least 1, got 0; pass another --calls"),
        (bench, ["ring", "--kv-heads", "0"], "kv_heads must be at least 1, got 0; pass another --kv-heads"),
        (check_command, ["--simulate", "-1"], "simulate must be at least 0, got -1; pass another --simulate"),
        (check_command, ["--seed", str(2**64)], r"seed must be from -2\*\*63 to 2\*\*64 - 1, got 184.*; pass another --seed"),
        (check_command, ["--fuzz-seed", str(-(2**63) - 1)], r"fuzz_seed must be from .* got -9223.*; pass another --fuzz-seed"),
        (check_command, ["faults", "--times", "0"], "times must be at least 1, got 0; pass another --times"),
        (bench, ["ring", "--head-dim", "0"], "head_dim must be at least 1, got 0; pass another --head-dim"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(command: Any, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: {said}$"):
        command.main([*words, "--device", "cpu"])


def test_every_count_of_a_command_has_a_least() -> None:
    kinds = [bench.KernelsFlags, bench.RingFlags, bench.ModelFlags, bench.TrainerFlags]
    kinds += [bench.InferenceFlags, bench.ServerFlags, check.CheckArgs, doctor.DoctorArgs]
    kinds += [faults.FaultArgs]
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
        (check_command, ["--json"]),
        (doctor, ["--json"]),
        (doctor, ["--profile"]),
        (plan, ["--model", "llama3-8b", "--picture"]),
        (check_command, ["faults", "--out"]),
    ],
)
def test_results_that_could_not_be_kept_are_not_measured(command: Any, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = [tmp_path / "file" / "x" / "y", tmp_path / "file" if words[-1] == "--out" else tmp_path]
    for path in wrong:
        with pytest.raises(
            SystemExit, match=f"{words[-1][2:]} must be a place that can be written, got {path}: .*; pass another"
        ):
            command.main([*words, str(path)])
    check_output(bench.RingFlags(out=tmp_path / "not" / "there"))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("name", "said"), [("taken", "taken: .*taken.json is a folder"), ("", "''"), (".", "'.'")])
def test_names_that_no_file_can_have_are_refused_before_anything_is_measured(
    name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "taken.json").mkdir()
    for kind in ("ring", "ring --host", "kernels", "server"):
        with pytest.raises(SystemExit, match=f"^error: name must be that of a file, got {said}; pass another --name$"):
            bench.main([*kind.split(), "--out", str(tmp_path), "--name", name])


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
        (check_command, ["--fuzz", "1"]),
        (check_command, []),
        (check_command, ["faults"]),
        (bench, ["ring"]),
        (bench, ["ring", "--host"]),
    ],
)
def test_unknown_kernels_are_refused_at_once(command: Any, words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^error: impl must be \"auto\" or one of .*, got 'hooper'; use \"auto\"$"):
        command.main([*words, "--impl", "hooper", "--device", "cpu"])


def test_contenders_that_nobody_knows_are_refused() -> None:
    with pytest.raises(
        ValueError, match="who must be of cudnn, fa2, flex, flex_flash, fa4 and our kernel sets, got fa5: impl must be"
    ):
        bench.KernelsFlags(who=("hopper", "fa5"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: bench.ModelFlags(head_dim=3), "head_dim must be even, got 3"),
        (lambda: bench.InferenceFlags(head_dim=3), "head_dim must be even, got 3"),
    ],
)
def test_shapes_that_a_bench_cannot_measure_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="grouped must be query heads and a divisor of them, got"):
        bench.KernelsFlags(grouped=(3, 2))


@pytest.mark.parametrize(
    ("command", "flags", "ranks"),
    [
        (doctor, [], 1),
        (check_command, ["--simulate", "3"], 3),
        (check_command, ["--simulate", "0"], 1),
        (check_command, ["--soak", "5"], 1),
    ],
)
def test_nodes_that_the_ranks_cannot_share_are_refused(command: Any, flags: list[str], ranks: int) -> None:
    with pytest.raises(SystemExit, match=f"^error: nodes must divide the ring of {ranks} ranks, got 2"):
        command.main(["--device", "cpu", "--nodes", "2", *flags])


def _refusal(name: str, words: list[str]) -> str:
    command = {"bench": bench, "check": check_command}[name]
    with pytest.raises(SystemExit) as refused:
        command.main([*words, "--device", "cpu"])
    return str(refused.value)


def test_schedules_and_nodes_that_cannot_be_are_refused_on_every_rank(pool) -> None:
    for name, words in (("check", ["--schedule", "stepwise"]), ("check", ["--schedule", "fused_saved_kv"])):
        for said in pool(2).run(_refusal, name, words):
            assert said.startswith(
                f"error: one of the schedules must give a ring here, got none ({words[-1]}: rank 0: "
            ), said
            assert said.endswith("); choose another schedule")
    assert (
        pool(2).run(_refusal, "check", ["--nodes", "3"])
        == ["error: nodes must divide the ring of 2 ranks, got 3; use nodes of equal size, or nodes=1"] * 2
    )


@pytest.mark.parametrize(
    ("kind", "words", "first", "rows"),
    [
        ("ring", [*TINY, "--tokens", "24", "48", "--rounds", "1", "--no-graphs"], 24, 1),
        ("ring --host", [*TINY, "--tokens", "24", "48", "--calls", "4"], 24, 1),
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
        bench.main([*kind.split(), *words, "--device", "cpu", "--out", str(tmp_path)])
    name = kind.rpartition("--")[2]
    kept = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert [row.get("seq_len") for row in kept] == [first] * rows
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


@pytest.mark.usefixtures("_wrong_backward")
@pytest.mark.parametrize("kind", ["ring", "ring --host"])
def test_no_speed_is_shown_on_a_red_check(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*kind.split(), *TINY, "--device", "cpu", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "red: no speed is shown" in said
    assert "tflops" not in said
    assert not list(tmp_path.iterdir())


def test_a_device_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'tpu'"):
        resolve_device("tpu", 0, 1)
    with pytest.raises(ValueError, match="start fewer with --nproc_per_node or pass --device cpu"):
        resolve_device("cuda", 0, 1000)
    assert resolve_device("cpu", 3, 4) == torch.device("cpu")


def test_ranks_share_gpus_if_the_environment_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("command", [check_command, doctor, train_command])
def test_commands_refuse_absent_devices_in_one_line(command: Any, monkeypatch: Any, capsys: Any) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1000", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1000"}.items():
        monkeypatch.setenv(name, value)
    said = "must be at most its number of GPUs, got 1000 ranks and .* or pass --device cpu"
    if command is train_command:
        assert train_command.main(["--device", "cuda"]) == REFUSED
        assert re.search(f"^error: .*{said}$", capsys.readouterr().err, re.MULTILINE)
        return
    with pytest.raises(SystemExit, match=said):
        command.main(["--device", "cuda"])
