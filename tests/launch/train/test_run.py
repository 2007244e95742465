"""Whole runs of the training job: checkpoints, the log, flags, and processes that are killed, interrupted and restarted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ringattn.launch.common import distributed
from ringattn.launch.common.distributed import (
    REFUSED,
    Refusal,
    Session,
    describe_failures,
    launch_ranks,
    record_failure,
)
from ringattn.launch.train import run
from ringattn.launch.train.__main__ import RestartPolicy, count_ranks, main, run_rank
from ringattn.launch.train.checkpoint import (
    Checkpoints,
    check_checkpoint,
    find_checkpoint,
    list_checkpoints,
    newest_step,
    read_facts,
    step_of,
)
from ringattn.launch.train.config import PRESETS, TrainConfig, parse
from ringattn.launch.train.data import load_corpus
from ringattn.launch.train.metrics import MetricsLog, plot_losses, read_rows, summarise
from ringattn.launch.train.model import Transformer
from ringattn.launch.train.parallel import make_parallel, single_process_group
from ringattn.launch.train.pretrained import read_config_json
from ringattn.launch.train.run import check_continues, check_memory, choose_checkpoint, planned_memory
from ringattn.launch.train.trainer import Recipe, StepResult, Trainer
from ringattn.sizing.shapes import ModelShape
from tests.support.timing import HANGS_S, wait_for

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
ALONE = Session(0, 1, CPU, None, os.getppid())


# checkpoints and the log


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """This process as the only rank."""
    with single_process_group(CPU):
        yield


def saved(folder: Path, *steps: int) -> list[Path]:
    checkpoints = Checkpoints(folder, ALONE)
    for step in steps:
        checkpoints.save(step, {"x": torch.full((1000,), float(step))}, {"step": step})
    checkpoints.wait()
    return list_checkpoints(folder)


def loaded(path: Path) -> torch.Tensor:
    state = {"x": torch.zeros(1000)}
    Checkpoints(path.parent, ALONE).load_(path, state)
    return state["x"]


def test_the_two_newest_checkpoints_are_kept(tmp_path):
    paths = saved(tmp_path, 5, 10, 15)
    assert [step_of(path) for path in paths] == [15, 10]
    assert newest_step(tmp_path) == read_facts(paths[0])["step"] == 15
    assert [check_checkpoint(path) for path in paths] == [None, None]
    assert torch.equal(loaded(paths[0]), torch.full((1000,), 15.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)


@pytest.mark.parametrize("damage", ["cut", "flip", "lost", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, damage):
    newer, older = saved(tmp_path, 5, 10)
    file = newer / ("manifest.json" if damage == "manifest" else "__0_0.distcp")
    content = bytearray(file.read_bytes())
    if damage in ("flip", "manifest"):
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    if damage == "lost":
        file.unlink()
    assert check_checkpoint(older) is None
    assert check_checkpoint(newer) is not None
    with pytest.warns(UserWarning, match="step-00000010.* is (damaged|incomplete).*an older one is used"):
        assert find_checkpoint(tmp_path, ALONE) == older
    with pytest.raises(Refusal, match="resume must"):
        choose_checkpoint(str(newer), tmp_path, ALONE)
    with pytest.raises(Refusal, match="resume must"):
        choose_checkpoint(str(tmp_path), tmp_path, ALONE)
    saved(tmp_path, 7)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [7, 5]


def test_a_checkpoint_that_a_run_removes_while_another_process_lists_them_is_left_out(tmp_path, monkeypatch):
    newer, older = saved(tmp_path, 5, 10)
    is_dir = Path.is_dir

    def is_dir_and_then_gone(path: Path) -> bool:
        found = is_dir(path)
        if path == older:
            path.rename(tmp_path / ".gone")
        return found

    monkeypatch.setattr(Path, "is_dir", is_dir_and_then_gone)
    assert list_checkpoints(tmp_path) == [newer]


@pytest.mark.parametrize("moment", ["torch.save", "os.fsync", "pathlib.Path.rename"])
def test_a_save_that_fails_raises_and_leaves_only_the_older_checkpoint(tmp_path, monkeypatch, moment):
    [older] = saved(tmp_path, 5)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    checkpoints = Checkpoints(tmp_path, ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(moment, fail)
        checkpoints.save(10, {"x": torch.zeros(1000)}, {})
        with pytest.raises(Refusal, match=r"the checkpoint of step 10 must be written.*disk full"):
            checkpoints.wait()
    assert list(tmp_path.iterdir()) == [older]
    checkpoints.save(10, {"x": torch.zeros(1000)}, {})
    checkpoints.wait()
    assert newest_step(tmp_path) == 10


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    written = threading.Event()
    before = FileSystemWriter.write_data

    def write_late(*args: Any) -> Any:
        assert written.wait(HANGS_S)
        return before(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    checkpoints, x = Checkpoints(tmp_path, ALONE), torch.ones(1000)
    checkpoints.save(5, {"x": x}, {"step": 5})  # returns although nothing can be written yet
    x.zero_()
    assert list_checkpoints(tmp_path) == []
    written.set()
    checkpoints.wait()
    assert torch.equal(loaded(list_checkpoints(tmp_path)[0]), torch.ones(1000))


def save_for_ever(folder: Path) -> None:
    """Saves one checkpoint after the other."""
    with single_process_group(CPU):
        checkpoints = Checkpoints(folder, ALONE)
        for step in itertools.count(newest_step(folder) + 1):
            checkpoints.save(step, {"x": torch.full((1000,), float(step))}, {"step": step})


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    context, draw, last = multiprocessing.get_context("forkserver"), random.Random(0), 0
    saved(tmp_path, 1)
    for _ in range(4):
        process = context.Process(target=save_for_ever, args=(tmp_path,), daemon=True)
        process.start()
        wait_for(lambda last=last: newest_step(tmp_path) > last)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.join()
        path = find_checkpoint(tmp_path, ALONE)  # a warning would be an error: no checkpoint is damaged
        assert path is not None
        assert step_of(path) > last
        last = step_of(path)
        assert torch.equal(loaded(path), torch.full((1000,), float(last)))


def build() -> Transformer:
    model = Transformer(ModelShape("x", 32, 2, 4, 2, 8, 48, vocab_size=256, tied=True))
    model.initialise_(0)
    return model


def steps_between(
    folder: Path, mesh: str | None, first: int, last: int, virtual_size: int | None = None
) -> list[float]:
    """Losses of some steps of a run that continues from a folder, and is saved there."""
    import torch.distributed as dist

    rank = Session(dist.get_rank(), dist.get_world_size(), CPU, "gloo", os.getppid())
    checkpoints, trainer = (
        Checkpoints(folder, rank),
        Trainer(build, Recipe(), make_parallel(CPU, mesh, virtual_size=virtual_size)),
    )
    path = find_checkpoint(folder, rank)
    if path is not None:
        state = trainer.state()
        checkpoints.load_(path, state)
        trainer.load_state_(state)
    results = []
    for step in range(first, last):
        tokens = torch.randint(256, (2, 34), generator=torch.Generator().manual_seed(step))
        results.append(trainer.step(tokens, 1e-2).loss)
    checkpoints.save(last, trainer.state(), {})
    checkpoints.wait()
    return results


def test_any_mesh_continues_from_the_checkpoint_of_another(pool, tmp_path):
    whole = pool(2).run(steps_between, tmp_path / "whole", None, 0, 6)[0]
    parts = pool(4).run(steps_between, tmp_path / "parts", "dp=2,cp=2", 0, 2)[0]
    parts += pool(2).run(steps_between, tmp_path / "parts", "dp=2", 2, 4)[0]
    assert len(list(list_checkpoints(tmp_path / "parts")[0].glob("*.distcp"))) == 2
    parts += pool(4).run(steps_between, tmp_path / "parts", "cp=4", 4, 6)[0]
    assert parts == pytest.approx(whole, rel=2e-6)


def test_a_run_of_virtual_ranks_continues_on_fewer_processes(pool, tmp_path):
    whole = pool(2).run(steps_between, tmp_path / "whole", None, 0, 6)[0]
    parts = [
        pool(ranks).run(steps_between, tmp_path / "parts", None, at, at + 2, 4)[0]
        for ranks, at in ((4, 0), (2, 2), (1, 4))
    ]
    assert parts[0] + parts[1] + parts[2] == pytest.approx(whole, rel=2e-6)


def test_the_same_mesh_continues_bit_for_bit(pool, tmp_path):
    whole = pool(2).run(steps_between, tmp_path / "whole", None, 0, 4)[0]
    parts = [pool(2).run(steps_between, tmp_path / "parts", None, at, at + 2)[0] for at in (0, 2)]
    assert parts[0] + parts[1] == whole


def test_a_run_continues_with_the_weight_decay_of_its_flags():
    parallel = make_parallel(CPU)
    before, after = (Trainer(build, Recipe(weight_decay=decay), parallel) for decay in (0.1, 0.5))
    after.load_state_(before.state())
    assert [group["weight_decay"] for group in after.optimizer.param_groups] == [0.5, 0.0]


def test_a_fresh_run_refuses_a_used_folder(tmp_path, monkeypatch):
    assert choose_checkpoint("never", tmp_path, ALONE) is None
    assert choose_checkpoint("auto", tmp_path, ALONE) is None
    [path] = saved(tmp_path, 5)
    assert choose_checkpoint("auto", tmp_path, ALONE) == path
    assert choose_checkpoint(str(path), tmp_path, ALONE) == path
    with pytest.raises(Refusal, match="out must"):
        choose_checkpoint("never", tmp_path, ALONE)
    with pytest.raises(Refusal, match="resume must"):
        choose_checkpoint("absent", tmp_path, ALONE)
    monkeypatch.setenv(distributed.RESTARTS, "1")
    assert choose_checkpoint("never", tmp_path, ALONE) == path, "a run that comes back continues its own"


def test_a_run_continues_from_a_checkpoint_only_if_a_restart_finds_it(tmp_path, monkeypatch):
    out, other = tmp_path / "out", tmp_path / "other"
    newer, older = saved(out, 5, 10)
    [elsewhere] = saved(other, 7)
    assert choose_checkpoint(str(newer), out, ALONE) == newer
    for path in (older, elsewhere):
        # a rank that dies before the first save would come back to step 10
        with pytest.raises(Refusal, match="out must"):
            choose_checkpoint(str(path), out, ALONE)
        assert choose_checkpoint(str(path), tmp_path / "empty", ALONE) == path
    monkeypatch.chdir(out)
    assert choose_checkpoint(newer.name, Path("../out"), ALONE) == Path(newer.name)
    monkeypatch.setenv(distributed.RESTARTS, "1")
    assert choose_checkpoint(str(newer), out, ALONE) == newer
    assert choose_checkpoint(str(elsewhere), tmp_path / "empty", ALONE) == elsewhere, "nothing was saved yet"


def test_a_run_continues_only_with_its_model_and_its_data(tmp_path):
    (tmp_path / "text").write_bytes(b"some text")
    corpus, config = load_corpus(str(tmp_path / "text")), PRESETS["tiny"]
    facts = {"config": dataclasses.asdict(config), "data": corpus.fingerprint}
    assert check_continues(config, corpus, facts) == []
    assert check_continues(dataclasses.replace(config, lr=0.5, out="elsewhere"), corpus, facts) == ["lr 0.003 -> 0.5"]
    with pytest.raises(Refusal, match="dim must"):
        check_continues(dataclasses.replace(config, dim=64), corpus, facts)
    with pytest.raises(Refusal, match="data must"):
        check_continues(config, corpus, facts | {"data": "other"})


def test_a_run_continues_only_with_the_configuration_of_its_model(tmp_path):
    """Only the name was compared: a run continued with half of the layers."""
    (tmp_path / "text").write_bytes(b"some text")
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 4}')
    corpus, config = load_corpus(str(tmp_path / "text")), dataclasses.replace(PRESETS["tiny"], model=str(tmp_path))
    facts = {
        "config": dataclasses.asdict(config),
        "data": corpus.fingerprint,
        "configuration": read_config_json(str(path)),
    }
    assert check_continues(config, corpus, facts) == []
    path.write_text('{"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 5.0}')
    with pytest.raises(
        Refusal, match=r"got another one \(num_hidden_layers 4 -> 2, rope_theta None -> 5.0\); put it back"
    ):
        check_continues(config, corpus, facts)
    del facts["configuration"]  # as in checkpoints of 0.16
    with pytest.raises(Refusal, match="num_hidden_layers None -> 2"):
        check_continues(config, corpus, facts)


def test_the_log_drops_rows_that_are_repeated_or_cut_short(tmp_path):
    history = MetricsLog(tmp_path, 0, writes=True)
    for step in range(1, 6):
        history.add(step=step, loss=1 / step)
    with history.path.open("a") as file:
        file.write('{"step": 6, "lo')
    again = MetricsLog(tmp_path, 3, writes=True)
    assert [row["step"] for row in again.rows] == [1, 2, 3]
    again.add(step=4, loss=0.5)
    assert [row["step"] for row in read_rows(again.path)] == [1, 2, 3, 4]
    MetricsLog(tmp_path, 0, writes=False).add(step=1, loss=9.0)
    assert len(read_rows(again.path)) == 4


def test_a_summary_counts_the_steps_of_this_start_and_not_the_first_two():
    def row(step: int, seconds: float, exposed: float | None = None) -> dict[str, Any]:
        made = {"step": step, "loss": 1 / step, "grad_norm": 1.0, "tokens_per_s": 64 / seconds, "step_s": seconds}
        return made | {"mfu": None, "exposed_ms": exposed, "peak_memory_mib": [10 * step, 5]}

    rows = [
        row(1, 9.0), row(2, 9.0), {"step": 2, "validation_loss": 2.0}, row(3, 9.0, 7.0), row(4, 2.0), row(5, 1.0, 3.0),
    ]  # fmt: skip
    whole = summarise(rows)
    assert (whole["steps"], whole["losses"], whole["step_s"]) == (5, [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], 2.0)
    assert (whole["mfu"], whole["exposed_ms"], whole["peak_memory_mib"]) == (None, 5.0, [50, 5])
    later = summarise(rows, start=3)
    assert (later["losses"], later["step_s"], later["exposed_ms"]) == (whole["losses"], 1.5, 3.0)


def test_the_curve_is_a_picture(tmp_path):
    plot_losses([{"step": 0, "validation_loss": 5.5}, {"step": 1, "loss": 5.0}], tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_peak_memory_is_that_of_the_ring_and_not_of_the_first_steps_on_one_rank(monkeypatch):
    class Single:
        def __init__(self, *_: Any) -> None:
            made.add(self)

        def seed_dropout(self, step: int) -> None:
            pass

        def step(self, windows: Any, lr: float) -> StepResult:
            return StepResult(windows, lr, [])

    made, alive = weakref.WeakSet[Single](), []
    monkeypatch.setattr(run, "Trainer", Single)
    monkeypatch.setattr(run, "single_rank", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(len(made)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: alive.append(len(made)))
    rank0 = SimpleNamespace(world_size=2, device=torch.device("cuda"), lead=lambda action: action())
    one: Any = SimpleNamespace(
        config=TrainConfig(compare_steps=2), session=rank0, build=None, recipe=None, _single=None
    )
    one.batches = SimpleNamespace(training=float)
    assert [step.loss for step in run.Run._single_rank_steps(one)] == [0, 1]
    assert alive == [0, 0]


# flags and processes


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_their_own_names(name):
    assert PRESETS[name].preset == name


def test_impossible_flags_are_refused():
    with pytest.raises(ValueError, match="steps must"):
        TrainConfig(steps=0)
    with pytest.raises(ValueError, match="nproc must"):
        TrainConfig(nproc=0)
    impossible: dict[str, tuple[Any, ...]] = {
        "max_grad_norm": (0, -1, math.nan),
        "lr": (-1, math.nan, math.inf),
        "timeout": (0, math.nan, math.inf),
        "weight_decay": (math.nan,),
        "temperature": (math.nan,),
        "seed": (2**64, -(2**63) - 1),
    }
    for name, values in impossible.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} must be .*, got {value}; pass another --"):
                TrainConfig(**{name: value})
    assert TrainConfig(max_grad_norm=math.inf).max_grad_norm == math.inf


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    flags = ["--preset", "tiny", "--device", "cpu", "--nproc", "1", "--out", str(tmp_path / "file" / "run")]
    assert main(flags) == 1
    assert "out must be a folder that can be written" in capsys.readouterr().err


def test_no_flag_is_needed():
    assert parse([], "train", None).preset in ("cpu", "gpu")


def test_flags_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="mesh must"):
        TrainConfig(mesh="2x2")
    with pytest.raises(ValueError, match="batch_size must"):
        TrainConfig(mesh="dp=2", accumulate=4).check_ranks(2)
    with pytest.raises(Refusal, match="dim must"):
        parse(["--model", "config.json", "--dim", "64", "--preset", "tiny"], "train", None)


def test_presets_and_models_that_follow_each_other_have_folders_of_their_own():
    """A checkpoint of another model cannot be continued."""
    outs = [parse(["--preset", name], "train", None).out for name in ("tiny", "cpu", "gpu-128k")]
    assert outs == ["runs/train/tiny", "runs/train/cpu", "runs/train/gpu-128k"]
    models = [parse(["--preset", "tiny", "--model", name], "train", None).out for name in ("a/b", "a/c/config.json")]
    assert models == ["runs/train/tiny-b", "runs/train/tiny-c"]
    assert parse(["--preset", "tiny", "--model", "a/b", "--out", "runs/mine"], "train", None).out == "runs/mine"


@pytest.mark.parametrize("name", ["tyro", "tqdm", "matplotlib", "psutil", "transformers"])
def test_a_package_that_is_not_installed_is_named_before_work_begins(name, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    flags = ["--preset", "tiny", "--device", "cpu", "--model", "config.json"]
    extra = "transformers" if name == "transformers" else "launch"
    assert main(flags) == 1
    assert f"train needs {name}; install it with: pip install 'ringattn[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "count"),
    [({}, 2), ({"mesh": "dp=2,cp=3"}, 6), ({"mesh": "dp=2"}, 2), ({"mesh": "dp=2", "nproc": 8}, 8), ({"nproc": 1}, 1)],
)
def test_the_mesh_gives_the_number_of_ranks(flags, count):
    assert count_ranks(TrainConfig(device="cpu", **flags)) == count


def failure(exitcode: int, timestamp: int) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, pid=100 + timestamp, timestamp=timestamp)


def test_the_rank_that_was_killed_is_named_before_ranks_that_failed_after_it():
    killed = describe_failures({0: failure(1, 5), 1: failure(-9, 7), 2: failure(-15, 4)})
    assert killed.startswith("the run ended because rank 1 (process 107) was killed by SIGKILL")
    failed = describe_failures({0: failure(1, 5), 2: failure(3, 4)})
    assert failed.startswith("the run ended because rank 2 (process 104) exited with code 3")
    refused = describe_failures({0: failure(-15, 4), 1: failure(REFUSED, 5)})
    assert refused.startswith("the run ended because rank 1 (process 105) exited with code 3; its message is above")


def test_a_rank_ended_while_it_reports_its_failure_leaves_no_half_report(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report := tmp_path / "error.json"))

    def fail() -> int:
        raise ValueError("lost")

    def write_half(data: object, file: TextIO) -> None:
        file.write(json.dumps(data)[:9])
        file.flush()
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", write_half)
        with pytest.raises(SystemExit):
            record_failure(fail)
    assert not report.exists()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    with pytest.raises(ValueError, match="lost"):
        record_failure(fail)
    assert json.loads(report.read_text())["message"]["message"] == "ValueError: lost"
    assert record_failure(lambda: 7) == 7


def test_a_run_without_progress_is_given_up_and_progress_resets_the_count(tmp_path, capsys):
    again = RestartPolicy(tmp_path, 2)
    assert [again("dead"), again("dead")] == [True, True]
    saved(tmp_path, 5)
    assert [again("dead"), again("dead"), again("dead")] == [True, True, False]
    assert "starting all ranks again from step 5 (try 2 of 2)" in (said := capsys.readouterr().err)
    assert "started again 2 time(s) without getting past the checkpoint of step 5: giving up" in said
    assert not RestartPolicy(tmp_path, 0)("dead")


@pytest.mark.parametrize(("code", "starts"), [(REFUSED, 1), (1, 3), (-9, 3)])
def test_a_refused_run_is_not_restarted(monkeypatch, code, starts):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    counts = []

    def run_once(*_: object) -> None:
        counts.append(os.environ[distributed.RESTARTS])
        raise ChildFailedError("run", {0: ProcessFailure(0, 100, code, "none")})

    monkeypatch.setattr(distributed, "_run_once", run_once)
    answers = iter([True, True, False])
    assert launch_ranks("module", [], 2, lambda _: next(answers)) == 1
    assert counts == [str(start) for start in range(starts)]


# whole runs


def run_quietly(out: Path, **flags: Any) -> tuple[int, str]:
    """Exit code and output of one rank of a tiny run in this process."""
    said = io.StringIO()
    config = dataclasses.replace(PRESETS["tiny"], device="cpu", out=str(out), **flags)
    with contextlib.redirect_stdout(said):
        return run_rank(config), said.getvalue()


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(out / "log.jsonl") if "loss" in row]


def assert_same_curve(out: Path, whole: Path) -> None:
    for one, two in zip(losses(out), losses(whole), strict=True):
        assert one[0] == two[0]
        assert one[1] == pytest.approx(two[1], rel=1e-5)


@pytest.fixture(scope="module")
def whole_run(pool, tmp_path_factory) -> tuple[Path, str]:
    """A run on two ranks that nothing disturbed."""
    out = tmp_path_factory.mktemp("train") / "whole"
    (code, said), _ = pool(2).run(run_quietly, out)
    assert code == 0
    return out, said


def why_refused(out: Path, **flags: Any) -> str:
    try:
        return f"went on with {run_quietly(out, **flags)}"
    except (Refusal, FloatingPointError) as error:
        return str(error)


def test_every_rank_raises_if_a_step_of_one_rank_is_not_finite(pool, tmp_path):
    for said in pool(2).run(why_refused, tmp_path / "run", lr=1e30, warmup_steps=0):
        assert said.startswith("loss and gradient norm must be finite")


def test_a_run_leaves_its_log_curve_sample_and_checkpoints(whole_run):
    out, said = whole_run
    rows = read_rows(out / "log.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 10, 20]
    assert all(len(row["peak_memory_mib"]) == 2 and min(row["peak_memory_mib"]) > 1 for row in steps)
    assert all(row["tokens_per_s"] == pytest.approx(2 * row["tokens_per_s_per_rank"], abs=0.2) for row in steps)
    assert all(row["mfu"] is None and row["exposed_ms"] is None for row in steps), "a CPU has neither"
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"] - 0.5
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").stat().st_size == 32
    assert [step_of(path) for path in list_checkpoints(out)] == [20, 15]
    assert not list(out.glob(".step-*"))
    assert "equal within rounding" in said
    result = json.loads((out / "result.json").read_text())
    [row] = result["rows"]
    assert (row["world_size"], row["seq_len"], row["steps"], row["mfu"]) == (2, 64, 20, None)
    assert row["losses"] == [step["loss"] for step in steps]
    assert row["tokens_per_s"] == statistics.median(step["tokens_per_s"] for step in steps[2:])
    assert len(row["peak_memory_mib"]) == result["machine"]["world_size"] == 2


@pytest.mark.slow
def test_every_mesh_has_the_same_loss_curve(whole_run, pool, tmp_path):
    (code, said), *_ = pool(4).run(run_quietly, tmp_path, mesh="dp=2", recompute="selective")
    assert code == 0
    assert "4 rank(s) (dp 2 x cp 2)" in said
    assert_same_curve(tmp_path, whole_run[0])


@pytest.mark.slow
@pytest.mark.parametrize("pack", [True, "balanced"])
def test_packed_documents_train_equally_on_one_and_two_ranks(pool, tmp_path, pack):
    (tmp_path / "text").mkdir()
    for index in range(200):
        (tmp_path / "text" / f"{index}").write_bytes(b"document %d: " % index + bytes([97 + index % 26]) * (index % 40))
    flags = {"data": str(tmp_path / "text"), "pack": pack, "steps": 6, "batch_size": 4, "compare_steps": 2}
    (code, said), _ = pool(2).run(run_quietly, tmp_path / "two", **flags, accumulate=2)
    assert code == 0
    assert "packed to 128 (balanced: " in said
    assert "equal within rounding" in said
    assert run_quietly(tmp_path / "one", **flags)[0] == 0
    assert_same_curve(tmp_path / "one", tmp_path / "two")


def test_the_memory_of_a_run_is_planned() -> None:
    one, four = (planned_memory(PRESETS["gpu-128k"], 1, cp) for cp in (1, 4))
    # measured with replicated parameters: 18.0 and 6.5 GiB
    assert 9 < one.total / 2**30 < 19
    assert 2 < four.total / 2**30 < 7
    assert planned_memory(PRESETS["gpu-1m"], 1, 1).total > 5 * one.total


def check_memory_of(**flags: Any) -> str:
    config = dataclasses.replace(PRESETS["gpu-128k"], **flags)
    return check_memory(config, 1, 16 * 2**30)


def test_a_run_that_cannot_fit_is_refused_with_what_would_fit(tmp_path, monkeypatch):
    assert check_memory_of().startswith("planned memory 1")
    monkeypatch.setattr(run, "least_gpu_bytes", lambda _: 2**30)
    monkeypatch.setattr(run.Run, "build", lambda _: pytest.fail("nothing is built before"))
    said = why_refused(tmp_path, seq_len=2**20, recompute="none")
    assert re.match(r"a rank must fit into 1.0 GiB of a GPU, got a plan of \d+.\d GiB \(.*activations \d+.\d", said)
    assert "--no-check-memory" in said
    # each choice is a run that fits
    said = check_memory_of(recompute="none", check_memory=False)
    for name, value in (("recompute", r"--recompute (\w+)"), ("seq_len", r"--seq-len (\d+)")):
        found = re.search(value, said)
        assert found is not None, said
        kind = int if name == "seq_len" else str
        assert not check_memory_of(**{"recompute": "none", name: kind(found[1])}).startswith("warning")


def test_a_plan_within_its_error_warns_and_a_flag_goes_on():
    planned = planned_memory(PRESETS["gpu-128k"], 1, 1).total
    assert check_memory(PRESETS["gpu-128k"], 1, int(planned) + 1).startswith("planned memory")
    assert check_memory(PRESETS["gpu-128k"], 1, int(planned / 1.04)).startswith("warning: planned memory")
    with pytest.raises(Refusal, match=r"take .*--seq-len 65536"):
        check_memory(PRESETS["gpu-128k"], 1, int(planned / 1.06))
    going_on = dataclasses.replace(PRESETS["gpu-128k"], check_memory=False)
    assert check_memory(going_on, 1, int(planned / 2)).startswith("warning: planned memory")


def test_a_plan_of_a_model_of_transformers_only_warns(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    said = check_memory_of(model=str(tmp_path))
    assert re.match(r"warning: planned memory \d{3}\.\d of 16.0 GiB", said), said
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="a configuration must have hidden_size"):
        check_memory_of(model=str(tmp_path))


# a validation and a picture after every other step: time to disturb a run before it ends
SLOW = ("--compare-steps", "0", "--eval-interval", "2")


# by itself, and by torchrun
OURS = ("-m", "ringattn.launch.train", "--nproc", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1", *OURS[:2])


def start(out: Path, *flags: str, launcher: Sequence[str] = OURS) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, *launcher, "--preset", "tiny", "--device", "cpu", "--out", str(out), *flags],
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Output and errors of a run, which must end."""
    try:
        return process.communicate(timeout=2 * HANGS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the run must have ended, got {process.communicate()}") from None


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids by rank, of the ranks that a launcher has started: what a rank starts has its number, too."""
    import psutil

    found = {}
    for child in psutil.Process(launcher).children():
        try:
            found[int(child.environ()["RANK"])] = child.pid
        except (psutil.Error, KeyError):
            continue
    return found


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str], saved: int = 0) -> None:
    """Waits until a run has logged a step, and has the checkpoint of one: it is written beside the steps that follow."""
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        logged = (out / "log.jsonl").exists() and any(done >= step for done, _, _ in losses(out))
        if logged and newest_step(out) >= saved:
            return
        if process.poll() is not None:
            break
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"no step {step}: {process.communicate()}")


@pytest.mark.parametrize("launcher", [OURS, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["ours", "torchrun"])
def test_a_run_whose_rank_is_killed_restarts_and_repeats_every_bit(whole_run, tmp_path, launcher):
    process = start(tmp_path, *SLOW, launcher=launcher)
    wait_for_step(tmp_path, 7, process, saved=5)
    victim = ranks_of(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    out, said = end_of(process)
    assert process.returncode == 0, said
    if launcher is OURS:
        assert f"rank 1 (process {victim}) was killed by SIGKILL" in said
        assert "starting all ranks again from step" in said
    else:
        assert f"failed (exitcode: -9) local_rank: 1 (pid: {victim})" in said
    assert out.count("continuing from step") == 1, "started again once, from a checkpoint"
    assert losses(tmp_path) == losses(whole_run[0])
    assert (tmp_path / "sample.txt").read_bytes() == (whole_run[0] / "sample.txt").read_bytes()


@pytest.mark.slow
def test_ctrl_c_saves_and_stops_after_a_step_and_another_number_of_ranks_continues(whole_run, tmp_path):
    process = start(tmp_path, *SLOW, "--checkpoint-interval", "100")
    wait_for_step(tmp_path, 3, process)
    os.kill(process.pid, signal.SIGINT)
    out, err = end_of(process)
    assert process.returncode == 130, err
    [checkpoint] = list_checkpoints(tmp_path)
    assert f"stopped after step {step_of(checkpoint)}, which is saved" in out
    assert losses(tmp_path)[-1][0] == step_of(checkpoint) < 20

    code, said = run_quietly(tmp_path)
    assert code == 0
    assert f"continuing from step {step_of(checkpoint)}" in said
    assert_same_curve(tmp_path, whole_run[0])


def test_every_flag_and_preset_is_documented():
    page = (ROOT / "docs" / "training.md").read_text()
    for field in dataclasses.fields(TrainConfig):
        value = getattr(PRESETS["cpu"], field.name)
        shown = "auto" if field.name == "preset" else f"{value:g}" if isinstance(value, float) else str(value)
        shown = {"None": "none", "True": "on", "False": "off"}.get(shown, shown)
        assert f"| `--{field.name.replace('_', '-')}` | {shown} |" in page
    for name in PRESETS:
        assert f"`{name}`" in page
