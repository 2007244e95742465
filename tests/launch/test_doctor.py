"""`doctor` reports versions, devices and faults."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.kernels.attention import eager
from ringattn.launch import doctor
from ringattn.launch.common.session import open_session


def test_doctor_reports_a_healthy_machine_and_why_a_kernel_is_not_used(tmp_path: Path) -> None:
    assert doctor.main(["--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] == []
    assert report["machine"]["torch"] == torch.__version__
    assert {row["kernels"] for row in report["kernels"]} == {"eager"}
    assert all(row["why"] and row["rejected"].get("portable") for row in report["kernels"])


def test_ranks_that_do_not_meet_raise_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SystemExit, match=r"^error: ranks must meet at MASTER_ADDR:MASTER_PORT, got nothing:nothing: .*MASTER_ADDR"
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

    monkeypatch.setattr(eager.EagerKernels, "forward", broken)
    assert doctor.main(["--device", "cpu"]) == 1
    assert "no such instruction" in capsys.readouterr().out


def test_doctor_reports_gpus_that_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # as with a driver that is too old for torch
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = doctor.machine
    monkeypatch.setattr(doctor, "machine", lambda session: machine(session) | {"driver": "1.0"})
    assert doctor.main(["--device", "cpu"]) == 1
    assert "torch must see the GPUs that nvidia-smi sees, got none" in capsys.readouterr().out


def _doctor() -> dict[str, Any]:
    with open_session("cpu") as session:
        return doctor.examine(session)


def test_doctor_measures_links_with_equal_reports_on_every_rank(pool) -> None:
    reports = pool(2).run(_doctor)
    assert reports[0]["faults"] == reports[1]["faults"] == []
    assert [row["mib"] for row in reports[0]["links"]] == [1, 8, 64]
    assert all(row["intact"] and row["gb_per_s"] > 0 for row in reports[0]["links"])
