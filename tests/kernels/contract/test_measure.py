"""The choice between torch's operators on GPUs without a table: timed once, kept in a file, the same on all ranks."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ringattn import Ring, dispatch, ring_attention
from ringattn.kernels.attention.torch_ops import measure, operators
from ringattn.kernels.attention.torch_ops.api import TorchKernels
from ringattn.kernels.runtime import found_file
from ringattn.launch import doctor
from tests.support.flash_operator import flash_operator
from tests.support.pool import Pools

GPU = torch.device("cuda", 0)
TIMES = {"forward": {"flash": 2.0, "cudnn": 1.0}, "backward": {"flash": 3.0, "cudnn": 4.0}}
ASKED = (GPU, torch.bfloat16, 128, 128)


class Machine:
    """A GPU of compute capability 8.6 that is not there; counts its measurements."""

    def __init__(self, patches: pytest.MonkeyPatch, folder: Path) -> None:
        self.measured, self.capability, self.name = 0, (8, 6), "RTX 3090"
        self.times: Any = TIMES
        patches.setenv("XDG_CACHE_HOME", str(folder))
        patches.delenv(measure.SWITCH, raising=False)
        patches.setattr(measure, "_known", {})
        patches.setattr(measure, "measure", self._measure)
        patches.setattr(operators, "runnable", lambda *asked: ("flash", "cudnn"))
        patches.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        patches.setattr(torch.cuda, "get_device_name", lambda device: self.name)
        patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def _measure(self, *asked: Any) -> Any:
        self.measured += 1
        return self.times

    def restart(self) -> None:
        measure._known.clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_each_direction_has_its_fastest_operator(machine: Machine) -> None:
    assert measure.choose_faster(*ASKED) == ("cudnn", "flash")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_a_gpu_of_the_table_is_not_measured(machine: Machine, capability: tuple[int, int]) -> None:
    machine.capability = capability
    assert measure.choose_faster(*ASKED) == ("cudnn", "cudnn")
    assert machine.measured == 0
    assert not found_file.read(measure.environment(GPU), "bfloat16 128 128")


def test_a_dtype_and_head_dims_are_measured_once_for_all_processes(machine: Machine) -> None:
    first = [measure.choose_faster(*ASKED) for _ in range(2)]
    machine.restart()
    assert {*first, measure.choose_faster(*ASKED)} == {("cudnn", "flash")}
    assert machine.measured == 1
    for other in ((GPU, torch.float16, 128, 128), (GPU, torch.bfloat16, 64, 128), (GPU, torch.bfloat16, 128, 64)):
        measure.choose_faster(*other)
    assert machine.measured == 4


@pytest.mark.parametrize("changed", ["name", "capability", "torch", "cudnn", "ringattn"])
def test_times_of_another_environment_do_not_count(
    machine: Machine, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure.choose_faster(*ASKED)
    machine.restart()
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9.0")
    elif changed == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 99999)
    elif changed == "ringattn":
        monkeypatch.setattr(measure.metadata, "version", lambda name: "0.0.1")
    else:
        setattr(machine, changed, {"name": "RTX 4090", "capability": (8, 9)}[changed])
    measure.choose_faster(*ASKED)
    assert machine.measured == 2


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"ENV": 3}', b'{"ENV": {"bfloat16 128 128": []}}',
        b'{"ENV": {"bfloat16 128 128": {"forward": {"flash": 1.0}}}}',
        b'{"ENV": {"bfloat16 128 128": {"forward": {"flash": NaN}, "backward": {"flash": 1.0}}}}',
        b'{"ENV": {"bfloat16 128 128": {"forward": {"other": 1.0}, "backward": {"flash": 1.0}}}}',
        b'{"ENV": {"bfloat16 128 128": {"forward": {"flash": "1"}, "backward": {"flash": 1.0}}}}',
        b'{"ENV": {"bfloat16 128 128": {"forward": {}, "backward": {}}}}',
    ],
)  # fmt: skip
def test_a_corrupt_file_is_measured_again_and_replaced(machine: Machine, content: bytes) -> None:
    path = found_file.find_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(content.replace(b"ENV", measure.environment(GPU).encode()))
    assert measure.choose_faster(*ASKED) == ("cudnn", "flash")
    machine.restart()
    assert measure.choose_faster(*ASKED) == ("cudnn", "flash")
    assert machine.measured == 1


@pytest.mark.parametrize("broken", ["no folder", "no home", "disk full"])
def test_a_file_that_cannot_be_written_fails_no_call(
    machine: Machine, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ringattn"
    if broken == "no folder":
        folder.write_text("a file")
    elif broken == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        found_file.write("kept", "key", 1)
        monkeypatch.setattr(found_file.json, "dump", lambda *given, **options: (_ for _ in ()).throw(OSError("full")))
    assert measure.choose_faster(*ASKED) == measure.choose_faster(*ASKED) == ("cudnn", "flash")
    assert machine.measured == 1
    if broken == "disk full":
        assert [x.name for x in folder.iterdir()] == [found_file.NAME], "no part of a file is left"
        assert found_file.read("kept", "key") == 1


def test_a_value_leaves_others_alone(machine: Machine) -> None:
    for environment, key in (("a", "x"), ("a", "y"), ("b", "x")):
        found_file.write(environment, key, environment + key)
    assert [found_file.read(*at) for at in (("a", "x"), ("a", "y"), ("b", "x"), ("c", "x"))] == ["ax", "ay", "bx", None]


@pytest.mark.parametrize("reason", ["capture", "trace", "deterministic", "activated", "one operator"])
def test_nothing_is_measured_where_it_must_not_or_need_not_be(
    machine: Machine, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, value = {
        "capture": (torch.cuda, "is_current_stream_capturing", True),
        "trace": (torch.compiler, "is_compiling", True),
        "deterministic": (torch, "are_deterministic_algorithms_enabled", True),
        "activated": (operators, "active_flash", "FA3"),
        "one operator": (operators, "runnable", ("flash",)),
    }[reason]
    with monkeypatch.context() as patches:
        patches.setattr(owner, name, lambda *given: value)
        assert measure.choose_faster(*ASKED) is None
        assert machine.measured == 0
    assert measure.choose_faster(*ASKED) == ("cudnn", "flash"), "it is measured at a later call"


def test_the_switch_keeps_the_default_and_reads_no_file(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    measure.choose_faster(*ASKED)
    machine.restart()
    monkeypatch.setenv(measure.SWITCH, "0")
    assert measure.choose_faster(*ASKED) == ("flash", "flash")
    assert doctor.measure_operators(GPU) == []
    assert machine.measured == 1
    monkeypatch.setenv(measure.SWITCH, "no")
    with pytest.raises(ValueError, match="RINGATTN_MEASURE_KERNELS must be 0 or 1, got 'no'"):
        measure.choose_faster(*ASKED)


def test_a_measurement_that_fails_is_no_choice_and_is_not_kept(machine: Machine) -> None:
    machine.times = None
    assert measure.choose_faster(*ASKED) is None
    machine.times = TIMES
    assert measure.choose_faster(*ASKED) == ("cudnn", "flash")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose flash operators take 2 ms, and whose cuDNN has no plan."""
    monkeypatch.setattr(operators, "operator", flash_operator)
    monkeypatch.setattr(measure, "ROWS", 32)
    monkeypatch.setattr(measure, "HEADS", 2)
    monkeypatch.setattr(measure, "exempt_thread", contextlib.nullcontext)
    monkeypatch.setattr(measure, "time_ms", lambda run: (run(), 2.0)[1])


@pytest.mark.usefixtures("runs")
def test_an_operator_that_fails_is_no_candidate_and_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    found = measure.measure(torch.device("cpu"), torch.float32, (16, 16), ("cudnn", "flash"))
    assert found == {"forward": {"flash": 2.0}, "backward": {"flash": 2.0}}
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("refusal", [OSError("no driver"), RuntimeError("refused")])
def test_without_a_driver_that_exempts_the_thread_nothing_is_measured(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def exempt() -> Iterator[None]:
        raise refusal
        yield

    monkeypatch.setattr(measure, "exempt_thread", exempt)
    assert measure.measure(torch.device("cpu"), torch.float32, (16, 16), ("flash",)) is None


def test_a_thread_is_exempt_while_it_measures_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = [0]

    def exchange(given: Any) -> int:
        given._obj.value, mode[0] = mode[0], given._obj.value
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    with measure.exempt_thread():
        assert mode == [2]
    assert mode == [0]


def test_the_best_of_several_runs_counts_behind_a_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done, clock = [0], iter([0.0, 8.0, 10.0, 14.0, 20.0, 40.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert measure.time_ms(lambda: done.__setitem__(0, done[0] + 1)) == 2.0
    assert done == [1 + measure.REPEATS * measure.RUNS]


def test_the_agreed_operator_is_tried_first_unless_another_kernel_was_activated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [operators.preferred(GPU, faster)[0] for faster in (None, "cudnn", "flash")] == ["flash", "cudnn", "flash"]
    machine.capability = (9, 0)
    assert [operators.preferred(GPU, faster)[0] for faster in (None, "cudnn", "flash")] == ["cudnn", "cudnn", "flash"]
    monkeypatch.setattr(operators, "active_flash", lambda: "FA4")
    assert operators.preferred(GPU, "cudnn")[0] == "flash"


@contextlib.contextmanager
def observed(offer: Any) -> Iterator[list[str | None]]:
    """CPUs with an operator that can be run, of which a kernel set offers a choice; yields what steps try first."""
    tried: list[str | None] = []

    def preferred(device: torch.device, *faster: str | None) -> tuple[str, ...]:
        tried.extend(faster)
        return ("flash_cpu",)

    with (
        patch.object(operators, "preferred", preferred),
        patch.object(TorchKernels, "choose_faster", staticmethod(offer)),
    ):
        yield tried


def _attend(ring: Ring) -> None:
    sharding = ring.sharding(12)
    q, k, v = (torch.ones(1, sharding.shard_len, 2, 16, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v, sharding, causal=True, impl="torch").sum().backward()


def test_steps_try_the_operator_of_their_direction_first() -> None:
    with observed(lambda *asked: ("cudnn", "flash")) as tried:
        _attend(Ring())
    assert tried[-2:] == ["cudnn", "flash"]


def _choices(times: list[dict[str, Any] | None]) -> list[str]:
    """What the steps of a rank tried first, where times were found on each rank alone; forgotten plans are made again."""
    ring, here = Ring(), times
    with observed(lambda *asked: measure.choose_faster(GPU, *asked[1:])) as tried:
        preferred = operators.preferred
        with (
            patch.object(operators, "by_table", lambda device: None),
            patch.object(operators, "preferred", lambda device, *given: (*preferred(device, *given),) * 2),
            patch.object(measure, "find_times", lambda *asked: here[ring.rank]),
        ):
            _attend(ring)
            dispatch._plans.clear()
            here = times[::-1]
            _attend(ring)
    return sorted({str(x) for x in tried})


@pytest.mark.parametrize("silent", [False, True])
def test_ranks_that_measure_differently_make_one_choice(pool: Pools, silent: bool) -> None:
    faster, slower = ({"forward": {name: 1.0}, "backward": {name: 1.0}} for name in ("cudnn", "flash"))
    times = [None, slower] if silent else [faster, slower]
    chosen = ["flash"] if silent else ["cudnn"]
    assert pool(2).run(_choices, times) == [chosen, chosen]


def test_doctor_shows_what_was_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = doctor.measure_operators(GPU)
    assert [(row["dtype"], row["head_dim"], row["direction"], row["chosen"]) for row in rows][:2] == [
        ("bfloat16", 64, "forward", "cudnn"),
        ("bfloat16", 64, "backward", "flash"),
    ]
    machine.capability = (9, 0)
    assert doctor.measure_operators(GPU) == []
    monkeypatch.setattr(doctor, "measure_operators", lambda device: rows)
    assert doctor.main(["--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    said = capsys.readouterr().out
    assert "flash 2.000, cudnn 1.000" in said
    assert found_file.NAME in said.replace("\n", "")
    assert json.loads((tmp_path / "report.json").read_text())["operators"] == rows
