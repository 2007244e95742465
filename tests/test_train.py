from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn
from ringattn.launch.distributed import Refusal, describe_failures
from ringattn.launch.training.checkpoint import (
    check_checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    step_of,
)
from ringattn.launch.training.config import PRESETS, Config
from ringattn.launch.training.data import Batches, load_corpus
from ringattn.launch.training.history import History, draw_curve, read_rows
from ringattn.launch.training.model import ModelConfig, Transformer, apply_rope, rope_tables
from ringattn.launch.training.run import check_continues, choose_checkpoint, comparison
from ringattn.launch.training.trainer import Recipe, StepResult, Trainer

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SMALL = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48)


def make_model(config: ModelConfig = SMALL, recompute: str = "none", seed: int = 0) -> Transformer:
    model = Transformer(config, recompute)
    model.initialise_(seed)
    return model


def some_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


# the model


def test_rope_is_multiplication_by_a_unit_complex_number():
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 5, 100, 9_999, 1_000_003])
    cos, sin = rope_tables(positions, 8, theta=10_000.0)
    turned = apply_rope(x, cos.double(), sin.double())
    z = torch.complex(x[..., :4].float().double(), x[..., 4:].float().double())
    for row, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            want = z[:, row, :, pair] * complex(math.cos(angle), math.sin(angle))
            got = torch.complex(turned[:, row, :, pair], turned[:, row, :, 4 + pair])
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_rope_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1))

    def score(i: int, j: int) -> torch.Tensor:
        qi = apply_rope(q, *rope_tables(torch.tensor([i]), 16, 500_000.0))
        kj = apply_rope(k, *rope_tables(torch.tensor([j]), 16, 500_000.0))
        return (qi * kj).sum()

    torch.testing.assert_close(score(1_000_000, 999_990), score(10, 0), atol=1e-5, rtol=0)


def logits_by_definition(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """The whole model written out for a whole sequence, head by head."""
    config, n = model.config, tokens.shape[1]
    weights = dict(model.named_parameters())
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    visible = j <= i
    if config.window is not None:
        visible &= j > i - config.window

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    tables = rope_tables(torch.arange(n), config.head_dim, config.rope_theta)
    x = weights["embedding.weight"][tokens]
    for layer in range(config.num_layers):
        at = f"blocks.{layer}."
        y = norm(x, at + "attention_norm.weight")
        q, k, v = (y @ weights[f"{at}attention.{name}.weight"].T for name in "qkv")
        heads = []
        for head in range(config.num_heads):
            group = head * config.num_kv_heads // config.num_heads
            mine, theirs = (slice(h * config.head_dim, (h + 1) * config.head_dim) for h in (head, group))
            qh, kh = (apply_rope(t[:, :, None], *tables)[:, :, 0] for t in (q[..., mine], k[..., theirs]))
            scores = (qh @ kh.transpose(1, 2)) / math.sqrt(config.head_dim)
            heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[..., theirs])
        x = x + torch.cat(heads, -1) @ weights[at + "attention.out.weight"].T
        y = norm(x, at + "mlp_norm.weight")
        gate, up = y @ weights[at + "mlp.gate.weight"].T, y @ weights[at + "mlp.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[at + "mlp.down.weight"].T
    head = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
    return norm(x, "norm.weight") @ head.T


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_follow_the_definition(window, tied):
    model = make_model(dataclasses.replace(SMALL, window=window, tie_embeddings=tied))
    tokens = some_tokens(2, 19)
    sharding = ringattn.Ring().sharding(19)
    torch.testing.assert_close(model(tokens, sharding), logits_by_definition(model, tokens), atol=2e-5, rtol=1e-5)


def test_no_row_sees_a_later_token():
    model, sharding = make_model(), ringattn.Ring().sharding(12)
    tokens = some_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens, sharding), model(changed, sharding)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=0, rtol=0)
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_gradient(recompute):
    gradients = []
    for how in ("none", recompute):
        model, tokens = make_model(recompute=how), some_tokens(2, 16)
        model(tokens, ringattn.Ring().sharding(16)).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], atol=0, rtol=0)


class CountRingOperators(TorchDispatchMode):
    """Counts the calls of this package's operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "ringattn"
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_runs_no_ring_twice():
    counts = {}
    for how in ("none", "selective", "full"):
        model, sharding = make_model(recompute=how), ringattn.Ring().sharding(16)
        with CountRingOperators() as calls:
            model(some_tokens(2, 16), sharding).sum().backward()
        counts[how] = calls.count
    assert 0 < counts["none"] == counts["selective"] < counts["full"]


def test_initialisation_depends_on_the_seed_alone():
    torch.manual_seed(1)
    first = make_model(seed=3).state_dict()
    torch.manual_seed(2)
    again, other = make_model(seed=3).state_dict(), make_model(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.mlp.up.weight"], other["blocks.0.mlp.up.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


# the trainer, on one rank and on many


def take_steps(seq_len: int, layout: str, count: int = 3) -> dict[str, object]:
    """What one rank knows after some steps and a validation."""
    trainer = Trainer(SMALL, Recipe(layout=layout), ringattn.Ring(), CPU, num_said=1)
    steps = [trainer.step(some_tokens(2, seq_len + 1, seed=step), 1e-2, [1.0]) for step in range(count)]
    trainer.check_replicas()
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "said": [step.said for step in steps],
        "validation": trainer.evaluate([some_tokens(2, seq_len + 1, seed=9)]),
        "text": trainer.generate(some_tokens(5), 4, 0.0, seed=0).tolist(),
        "weights": torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]),
    }


def test_a_step_is_a_step_of_the_definition():
    trainer, model = Trainer(SMALL, Recipe(max_grad_norm=1e9), ringattn.Ring(), CPU), make_model()
    windows = some_tokens(3, 18)
    loss = F.cross_entropy(logits_by_definition(model, windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    result = trainer.step(windows, 1e-3)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "seq_len", "layout"),
    [(2, 33, "zigzag"), (2, 24, "striped"), (4, 29, "balanced"), (4, 3, "contiguous")],
)
def test_any_number_of_ranks_trains_like_one(pool, world_size, seq_len, layout):
    alone = take_steps(seq_len, layout)
    ranks = pool(world_size).run(take_steps, seq_len, layout)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=2e-6)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert rank["validation"] == pytest.approx(alone["validation"], rel=1e-5)
        assert rank["text"] == alone["text"]
        assert rank["said"] == [[world_size]] * 3
        assert torch.equal(rank["weights"], ranks[0]["weights"])


def disagree(rank_that_differs: int) -> str:
    trainer = Trainer(SMALL, Recipe(), ringattn.Ring(), CPU)
    if trainer.ring.rank == rank_that_differs:
        with torch.no_grad():
            parameter = dict(trainer.model.named_parameters())["blocks.1.mlp.up.weight"]
            parameter[0, 0] = torch.nextafter(parameter[0, 0], torch.tensor(1.0))
    try:
        trainer.check_replicas()
    except RuntimeError as error:
        return str(error)
    return "agree"


@pytest.mark.dist
def test_one_wrong_bit_in_one_replica_is_seen_by_every_rank(pool):
    assert pool(2).run(disagree, -1) == ["agree", "agree"]
    for said in pool(2).run(disagree, 1):
        assert "parameters must be the same on all 2 ranks" in said


def test_a_loss_that_is_not_finite_updates_nothing():
    trainer = Trainer(SMALL, Recipe(), ringattn.Ring(), CPU)
    with torch.no_grad():
        trainer.model.norm.weight[0] = math.nan
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(FloatingPointError, match="must be finite, got nan"):
        trainer.step(some_tokens(1, 9), 1e-3)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0, equal_nan=True)


def test_a_large_gradient_is_scaled_down_to_the_limit():
    trainer = Trainer(SMALL, Recipe(max_grad_norm=0.125), ringattn.Ring(), CPU)
    assert trainer.step(some_tokens(1, 9), 0.0).grad_norm > 0.125
    left = torch.cat(
        [parameter.grad.flatten() for parameter in trainer.model.parameters() if parameter.grad is not None]
    )
    assert left.norm().item() == pytest.approx(0.125, rel=1e-5)


def test_the_learning_rate_rises_and_then_falls_to_a_tenth():
    config = dataclasses.replace(PRESETS["tiny"], lr=1.0, warmup_steps=4, steps=24)
    rates = [config.lr_at(step) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert rates[24] == pytest.approx(0.1)


def results(*pairs: tuple[float, float]) -> list[StepResult]:
    return [StepResult(loss, norm, []) for loss, norm in pairs]


def test_the_comparison_shows_rounding_and_refuses_more():
    alone = results((5.5, 2.0), (5.25, 2.5))
    text = comparison(alone, results((5.5000004, 2.0), (5.25, 2.5000002)), 4, torch.float32)
    assert len(text.splitlines()) == 5
    assert text.endswith("equal within rounding")
    for wrong in (
        results((5.5, 2.0), (5.2501, 2.5)),
        results((5.5, 2.0), (5.25, 2.5001)),
        results((5.5, 2.0), (math.nan, 2.5)),
    ):
        with pytest.raises(Refusal, match="the ring must equal one rank within rounding"):
            comparison(alone, wrong, 4, torch.float32)


# the data


def test_batches_are_a_function_of_seed_and_step():
    text = torch.arange(5000).remainder(256).to(torch.uint8)
    batches, again = Batches(text, 64, 3, seed=7), Batches(text, 64, 3, seed=7)
    random.seed(0)
    first = [batches.training(step) for step in range(5)]
    random.seed(1)
    for step in (4, 0, 2):
        assert torch.equal(again.training(step), first[step])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(Batches(text, 64, 3, seed=8).training(0), first[0])
    assert first[0].shape == (3, 65)
    assert first[0].dtype == torch.int64


def test_no_validation_byte_is_trained_on():
    text = torch.zeros(4000, dtype=torch.uint8)
    batches = Batches(text, 50, 2, seed=0)
    text[batches.num_training_bytes :] = 1
    assert not any(batches.training(step).any() for step in range(500))
    held_out = list(batches.validation(3))
    assert len(held_out) == 3
    assert all(windows.shape == (2, 51) and windows.all() for windows in held_out)
    assert batches.prompt(10).tolist() == [1] * 10


@pytest.mark.parametrize("seq_len", [1, 499])
def test_the_smallest_corpus_is_enough(seq_len):
    batches = Batches(torch.ones(2 * (seq_len + 1), dtype=torch.uint8), seq_len, 1, seed=0)
    assert batches.training(0).shape == next(batches.validation(1)).shape == (1, seq_len + 1)
    with pytest.raises(ValueError, match=f"data must hold at least {2 * (seq_len + 1)} bytes"):
        Batches(torch.ones(2 * seq_len + 1, dtype=torch.uint8), seq_len, 1, seed=0)


def test_a_folder_is_its_text_files_in_a_fixed_order(tmp_path):
    for name, content in {"b.txt": b"bee", "a/a.txt": b"ay", "c.bin": b"\0\1", ".git/x": b"no", "empty": b""}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    corpus = load_corpus(str(tmp_path))
    assert bytes(corpus.text.tolist()) in (b"bee\0ay", b"ay\0bee")
    assert corpus.num_files == 2
    assert load_corpus(str(tmp_path)).fingerprint == corpus.fingerprint
    (tmp_path / "b.txt").write_bytes(b"bed")
    assert load_corpus(str(tmp_path)).fingerprint != corpus.fingerprint


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 3)
    assert bytes(load_corpus(str(path)).text.tolist()) == bytes(range(256)) * 3


@pytest.mark.parametrize(
    ("name", "message"), [("absent", "must be a file or a folder that exists"), ("", "must contain text")]
)
def test_missing_data_is_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=f"data {message}"):
        load_corpus(str(tmp_path / name))


# checkpoints and the log


def saved(folder: Path, *steps: int) -> list[Path]:
    return [save_checkpoint(folder, step, {"step": step, "x": torch.full((1000,), float(step))}) for step in steps]


def test_the_two_newest_checkpoints_are_kept(tmp_path):
    paths = saved(tmp_path, 5, 10, 15)
    assert list_checkpoints(tmp_path) == [paths[2], paths[1]]
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [15, 10]
    state = load_checkpoint(paths[2])
    assert state["step"] == 15
    assert torch.equal(state["x"], torch.full((1000,), 15.0))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, damage):
    older, newer = saved(tmp_path, 5, 10)
    content = bytearray(newer.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    newer.write_bytes(content if damage == "flip" else content[: len(content) // 2 if damage == "cut" else 0])
    assert "damaged or incomplete" in str(check_checkpoint(newer))
    with pytest.warns(UserWarning, match="step-00000010.*damaged or incomplete.*an older one is used"):
        assert find_checkpoint(tmp_path) == older
    saved(tmp_path, 7)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [7, 5]


@pytest.mark.parametrize("moment", ["torch.save", "os.fsync", "pathlib.Path.replace"])
def test_a_save_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path, monkeypatch, moment):
    [older] = saved(tmp_path, 5)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(moment, fail)
        with pytest.raises(OSError, match="disk full"):
            saved(tmp_path, 10)
    assert list(tmp_path.iterdir()) == [older]
    assert find_checkpoint(tmp_path) == older


def test_a_fresh_run_refuses_a_used_folder(tmp_path):
    assert choose_checkpoint("never", tmp_path) is None
    assert choose_checkpoint("auto", tmp_path) is None
    [path] = saved(tmp_path, 5)
    assert choose_checkpoint("auto", tmp_path) == path
    assert choose_checkpoint(str(path), tmp_path) == path
    with pytest.raises(Refusal, match="out must hold no checkpoints for a fresh run, got 1"):
        choose_checkpoint("never", tmp_path)
    with pytest.raises(Refusal, match="resume must be auto, never or a checkpoint that exists"):
        choose_checkpoint("absent.pt", tmp_path)


def test_a_run_continues_only_with_its_model_and_its_data(tmp_path):
    (tmp_path / "text").write_bytes(b"some text")
    corpus, config = load_corpus(str(tmp_path / "text")), PRESETS["tiny"]
    state = {"config": dataclasses.asdict(config), "data": corpus.fingerprint}
    assert check_continues(config, corpus, state) == []
    assert check_continues(dataclasses.replace(config, lr=0.5, out="elsewhere"), corpus, state) == ["lr 0.003 -> 0.5"]
    with pytest.raises(Refusal, match="dim must be 32 as in the checkpoint, got 64"):
        check_continues(dataclasses.replace(config, dim=64), corpus, state)
    with pytest.raises(Refusal, match="data must be the bytes of the checkpoint"):
        check_continues(config, corpus, state | {"data": "other"})


def test_the_log_forgets_what_is_repeated_and_what_was_cut_short(tmp_path):
    history = History(tmp_path, 0, writes=True)
    for step in range(1, 6):
        history.add(step=step, loss=1 / step)
    with history.path.open("a") as file:
        file.write('{"step": 6, "lo')
    again = History(tmp_path, 3, writes=True)
    assert [row["step"] for row in again.rows] == [1, 2, 3]
    again.add(step=4, loss=0.5)
    assert [row["step"] for row in read_rows(again.path)] == [1, 2, 3, 4]
    History(tmp_path, 0, writes=False).add(step=1, loss=9.0)
    assert len(read_rows(again.path)) == 4


def test_the_curve_is_a_picture(tmp_path):
    draw_curve([{"step": 0, "validation_loss": 5.5}, {"step": 1, "loss": 5.0}], tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


# flags and processes


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_name_themselves(name):
    assert PRESETS[name].preset == name


def test_impossible_flags_are_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0; pass another --steps"):
        Config(steps=0)
    with pytest.raises(ValueError, match="nproc must be at least 1, got 0"):
        Config(nproc=0)


def failure(exitcode: int, timestamp: int) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, pid=100 + timestamp, timestamp=timestamp)


def test_the_rank_that_was_killed_is_named_before_those_it_took_along():
    killed = describe_failures({0: failure(1, 5), 1: failure(-9, 7), 2: failure(-15, 4)})
    assert killed.startswith("the run ended because rank 1 (process 107) was killed by SIGKILL")
    assert "the same command continues" in killed
    failed = describe_failures({0: failure(1, 5), 2: failure(3, 4)})
    assert failed.startswith("the run ended because rank 2 (process 104) exited with code 3")


# a validation and a picture after each step: time to disturb a run before it ends
SLOW = ("--compare-steps", "0", "--eval-interval", "1")


def command(out: Path, nproc: int, *flags: str) -> list[str]:
    given = ["--preset", "tiny", "--device", "cpu", "--out", str(out), "--nproc", str(nproc)]
    return [sys.executable, "-m", "ringattn.launch.train", *given, *(flags or ("--compare-steps", "0"))]


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return clean | {"OMP_NUM_THREADS": "1"}


def run_to_the_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(out / "log.jsonl") if "loss" in row]


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids by rank, of the ranks that a launcher has started."""
    import psutil

    found = {}
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            found[int(child.environ()["RANK"])] = child.pid
        except (psutil.Error, KeyError):
            continue
    return found


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (out / "log.jsonl").exists() and any(done >= step for done, _, _ in losses(out)):
            return
        if process.poll() is not None:
            break
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"no step {step}: {process.communicate()}")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run on two ranks that nothing disturbed."""
    out = tmp_path_factory.mktemp("train") / "whole"
    done = run_to_the_end(*command(out, 2, "--compare-steps", "3"))
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.mark.dist
def test_a_run_leaves_its_log_curve_sample_and_checkpoints(whole_run):
    out, done = whole_run
    rows = read_rows(out / "log.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 21))
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 10, 20]
    assert all(len(row["peak_memory_mib"]) == 2 and min(row["peak_memory_mib"]) > 1 for row in rows if "loss" in row)
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"] - 0.5
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").stat().st_size == 32
    assert [step_of(path) for path in list_checkpoints(out)] == [20, 15]
    assert "equal within rounding" in done.stdout


@pytest.mark.dist
def test_one_rank_has_the_loss_curve_of_two(whole_run, tmp_path):
    done = run_to_the_end(*command(tmp_path, 1))
    assert done.returncode == 0, done.stderr
    for one, two in zip(losses(tmp_path), losses(whole_run[0]), strict=True):
        assert one[0] == two[0]
        assert one[1] == pytest.approx(two[1], rel=1e-5)


@pytest.mark.dist
def test_a_killed_rank_ends_the_run_and_the_same_command_continues_it_exactly(whole_run, tmp_path):
    process = subprocess.Popen(
        command(tmp_path, 2, *SLOW),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(tmp_path, 7, process)
    victim = ranks_of(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"rank 1 (process {victim}) was killed by SIGKILL" in said
    lost = losses(tmp_path)[-1][0]
    assert 7 <= lost < 20

    newest = list_checkpoints(tmp_path)[0]
    if step_of(newest) > 5:
        # also lose the newest file: the one before it serves
        newest.write_bytes(newest.read_bytes()[:-1000])
    again = run_to_the_end(*command(tmp_path, 2))
    assert again.returncode == 0, again.stderr
    assert "continuing from step" in again.stdout
    assert losses(tmp_path) == losses(whole_run[0])
    assert (tmp_path / "sample.txt").read_bytes() == (whole_run[0] / "sample.txt").read_bytes()


@pytest.mark.dist
def test_ctrl_c_saves_and_stops_after_a_step_and_another_number_of_ranks_continues(whole_run, tmp_path):
    process = subprocess.Popen(
        command(tmp_path, 2, *SLOW, "--checkpoint-interval", "100"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(tmp_path, 3, process)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    [checkpoint] = list_checkpoints(tmp_path)
    assert f"stopped after step {step_of(checkpoint)}, which is saved" in out
    assert losses(tmp_path)[-1][0] == step_of(checkpoint) < 20

    again = run_to_the_end(*command(tmp_path, 1))
    assert again.returncode == 0, again.stderr
    for one, two in zip(losses(tmp_path), losses(whole_run[0]), strict=True):
        assert one[1] == pytest.approx(two[1], rel=1e-5)


def test_every_flag_and_preset_is_documented():
    page = (ROOT / "docs" / "training.md").read_text()
    for field in dataclasses.fields(Config):
        value = getattr(PRESETS["cpu"], field.name)
        shown = "auto" if field.name == "preset" else f"{value:g}" if isinstance(value, float) else str(value)
        shown = {"None": "none", "True": "on", "False": "off"}.get(shown, shown)
        assert f"| `--{field.name.replace('_', '-')}` | {shown} |" in page
    for name in PRESETS:
        assert f"`{name}`" in page
