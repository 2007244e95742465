from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.train import metrics
from ringattn.launch.train.config import PRESETS, TrainConfig
from ringattn.launch.train.data import Batches, count_targets, load_corpus, make_rows
from ringattn.launch.train.model import ROPE_THETA, Transformer, apply_rope, rope_tables
from ringattn.launch.train.parallel import Parallel, make_parallel, mesh_sizes, single_process_group
from ringattn.launch.train.run import compare_results
from ringattn.launch.train.trainer import CHECKED_STEPS, Recipe, StepResult, Trainer
from ringattn.sizing.shapes import ModelShape
from ringattn.training import checkpoint_layers_

CPU = torch.device("cpu")
SMALL = ModelShape("x", 32, 2, 4, 2, 8, 48, vocab_size=256, tied=True)


def make_model(config: ModelShape = SMALL, recompute: str = "none", seed: int = 0) -> Transformer:
    model = Transformer(config)
    model.initialise_(seed)
    checkpoint_layers_(list(model.blocks), recompute)
    return model


@pytest.fixture(scope="module")
def alone() -> Iterator[Parallel]:
    """This process as the only rank."""
    with single_process_group(CPU):
        yield make_parallel(CPU)


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
    shape, n = model.shape, tokens.shape[1]
    weights = dict(model.named_parameters())
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    visible = j <= i
    if shape.window is not None:
        visible &= j > i - shape.window

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    tables = rope_tables(torch.arange(n), shape.head_dim, ROPE_THETA)
    x = weights["embedding.weight"][tokens]
    for layer in range(shape.layers):
        at = f"blocks.{layer}."
        y = norm(x, at + "attention_norm.weight")
        q, k, v = (y @ weights[f"{at}attention.{name}.weight"].T for name in "qkv")
        heads = []
        for head in range(shape.heads):
            group = head * shape.kv_heads // shape.heads
            mine, theirs = (slice(h * shape.head_dim, (h + 1) * shape.head_dim) for h in (head, group))
            qh, kh = (apply_rope(t[:, :, None], *tables)[:, :, 0] for t in (q[..., mine], k[..., theirs]))
            scores = (qh @ kh.transpose(1, 2)) / math.sqrt(shape.head_dim)
            heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[..., theirs])
        x = x + torch.cat(heads, -1) @ weights[at + "attention.out.weight"].T
        y = norm(x, at + "mlp_norm.weight")
        gate, up = y @ weights[at + "mlp.gate.weight"].T, y @ weights[at + "mlp.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[at + "mlp.down.weight"].T
    head = weights["embedding.weight" if shape.tied else "head.weight"]
    return norm(x, "norm.weight") @ head.T


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_follow_the_definition(window, tied):
    model = make_model(dataclasses.replace(SMALL, window=window, tied=tied))
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
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4; pass another --num-kv-heads"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"offload": "all"}, "recompute must be selective or full with --offload, got none and all"),
        ({"mlp_rows": 8, "compile": True}, "compile must be off with --offload and --mlp-rows"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


# the trainer, on one rank and on many


def take_steps(
    seq_len: int, mesh: str | None = None, count: int = 3, batch: int = 4, lr: float = 1e-2, **recipe: Any
) -> dict[str, object]:
    """Results of one rank after some steps and a validation."""
    with single_process_group(CPU):
        trainer = Trainer(make_model, Recipe(**recipe), make_parallel(CPU, mesh))
        steps = [trainer.step(some_tokens(batch, seq_len + 1, seed=step), lr, [1.0]) for step in range(count)]
        weights = [parameter.full_tensor().flatten() for parameter in trainer.model.parameters()]
        return {
            "losses": [step.loss for step in steps],
            "norms": [step.grad_norm for step in steps],
            "said": [step.sums for step in steps],
            "validation": trainer.evaluate([some_tokens(batch, seq_len + 1, seed=9)]),
            "text": trainer.generate(some_tokens(5), 4, 0.0, seed=0).tolist(),
            "weights": torch.cat(weights).detach(),
            "held": sum(parameter.to_local().numel() for parameter in trainer.model.parameters()),
        }


def assert_alike(rank: dict[str, Any], one: dict[str, Any]) -> None:
    assert rank["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert rank["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert rank["validation"] == pytest.approx(one["validation"], rel=1e-5)
    assert rank["text"] == one["text"]


def take_other_steps(differing: int) -> list[str]:
    """The errors of one rank in steps of which one has another batch on rank 1."""
    trainer = Trainer(make_model, Recipe(), make_parallel(CPU, "cp=2"))
    said = []
    for step in range(CHECKED_STEPS + 1):
        try:
            trainer.step(some_tokens(2, 18, seed=step + 9 * (step == differing) * dist.get_rank()), 1e-3)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_of_a_ring_with_different_batches_are_refused_in_the_first_steps(pool):
    for said in pool(2).run(take_other_steps, CHECKED_STEPS - 1):
        assert said.pop(CHECKED_STEPS - 1).startswith("x of Sharding.shard must be the same on all ranks")
        assert said == [""] * CHECKED_STEPS
    for said in pool(2).run(take_other_steps, CHECKED_STEPS):
        assert said == [""] * (CHECKED_STEPS + 1)


def test_a_step_is_a_step_of_the_definition(alone):
    trainer, model = Trainer(make_model, Recipe(max_grad_norm=1e9), alone), make_model()
    windows = some_tokens(3, 18)
    loss = F.cross_entropy(logits_by_definition(model, windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    result = trainer.step(windows, 1e-3)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [1e-310, 1e-300, 5e-324])
def test_the_coldest_temperatures_take_the_likeliest_token(alone, temperature):
    trainer = Trainer(make_model, Recipe(), alone)
    likeliest = trainer.generate(some_tokens(5), 4, 0.0, seed=0)
    assert torch.equal(trainer.generate(some_tokens(5), 4, temperature, seed=0), likeliest)


@pytest.mark.parametrize(
    ("mesh", "seq_len", "layout"),
    [("cp=2", 33, "zigzag"), ("dp=2,cp=2", 29, "balanced"), ("cp=4", 3, "contiguous"), ("dp=2", 24, "striped")],
)
def test_any_mesh_trains_like_one_rank(pool, mesh, seq_len, layout):
    # Adam makes whole steps of gradients that are nothing but rounding: small ones
    one = take_steps(seq_len, lr=1e-3)
    world_size = 4 if mesh in ("dp=2,cp=2", "cp=4") else 2
    ranks = pool(world_size).run(take_steps, seq_len, mesh, layout=layout, lr=1e-3)
    for rank in ranks:
        assert_alike(rank, one)
        assert rank["said"] == [[world_size]] * 3
        assert torch.equal(rank["weights"], ranks[0]["weights"])
    assert sum(rank["held"] for rank in ranks) == one["held"], "every parameter has one owner"


def test_micro_batches_documents_and_reshards_change_no_step(pool):
    packed = {"separator": 7, "layout": "balanced"}
    one = take_steps(50, **packed)
    assert_alike(take_steps(50, accumulate=4, **packed), one)
    for rank in pool(2).run(take_steps, 50, None, accumulate=2, recompute="selective", **packed):
        assert_alike(rank, one)
    bounded = {"recompute": "selective", "offload": "all", "mlp_rows": 9}
    for rank in pool(2).run(take_steps, 50, None, accumulate=2, **bounded, **packed):
        assert_alike(rank, one)
    for rank in pool(4).run(take_steps, 50, "dp=2", accumulate=2, reshard=False, **packed):
        assert_alike(rank, one)


def test_documents_that_are_placed_over_ranks_change_no_step(pool):
    packed = {"separator": 7, "layout": "balanced"}
    one = take_steps(50, **packed)
    assert_alike(take_steps(50, pairs_per_token=100.0, **packed), one)
    for rank in pool(2).run(take_steps, 50, None, accumulate=2, pairs_per_token=100.0, **packed):
        assert_alike(rank, one)
    for rank in pool(4).run(take_steps, 50, "dp=2", pairs_per_token=100.0, **packed):
        assert_alike(rank, one)


def test_attention_stays_inside_documents_and_positions_begin_anew(alone):
    trainer = Trainer(make_model, Recipe(separator=0, layout="balanced"), alone)
    text = some_tokens(2, 31) % 200 + 1
    text[0, 9] = text[0, 20] = text[1, 4] = text[1, 29] = 0
    model, parts, count = make_model(), [], 0
    for row in text:
        ends = [0, *((row[:-1] == 0).nonzero().flatten() + 1).tolist(), 30]
        for first, last in itertools.pairwise(ends):
            # the last token of a document predicts nothing; what the window cuts off is no last token
            document, targets = row[first:last][None], row[first + 1 : last + int(row[last - 1] != 0)]
            if targets.numel():
                logits = logits_by_definition(model, document)[0, : targets.numel()]
                parts.append(F.cross_entropy(logits, targets, reduction="sum"))
                count += targets.numel()
    assert count == count_targets(text, 0) == 60 - 4
    assert trainer.evaluate([text]) == pytest.approx(sum(part.item() for part in parts) / count, rel=1e-6)


def test_the_positions_of_packed_rows_begin_at_each_document():
    sharding = ringattn.Ring().sharding(9, "contiguous", documents=(0, 2, 2, 6, 9))
    assert sharding.document_positions.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert ringattn.Ring().sharding(4).document_positions.tolist() == [0, 1, 2, 3]


def bf16_steps() -> dict[str, object]:
    """A few steps in bfloat16, and the dtypes of parameters, gradients and states."""
    with single_process_group(CPU):
        trainer = Trainer(make_model, Recipe(dtype=torch.bfloat16, accumulate=2), make_parallel(CPU))
        steps = [trainer.step(some_tokens(4, 33, seed=step), 1e-2) for step in range(3)]
        kept = [x for p in trainer.model.parameters() for x in (p, p.grad, *trainer.optimizer.state[p].values())]
        return {
            "losses": [step.loss for step in steps],
            "dtypes": {str(x.dtype) for x in kept},
            "sharded": all(isinstance(p, DTensor) for p in trainer.model.parameters()),
        }


def test_bfloat16_computes_in_low_and_stores_in_high_precision(pool):
    exact = take_steps(32, accumulate=2)
    for rank in pool(2).run(bf16_steps):
        assert rank["losses"] == pytest.approx(exact["losses"], rel=2e-3)
        assert rank["losses"] != exact["losses"]
        assert rank["dtypes"] == {"torch.float32"}
        assert rank["sharded"]


def test_a_loss_that_is_not_finite_updates_nothing(alone):
    trainer = Trainer(make_model, Recipe(), alone)
    with torch.no_grad():
        trainer.model.norm.weight.to_local()[0] = math.nan
    before = {name: value.to_local().clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(FloatingPointError, match="must be finite, got nan"):
        trainer.step(some_tokens(1, 9), 1e-3)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value.to_local(), before[name], atol=0, rtol=0, equal_nan=True)


def test_a_large_gradient_is_scaled_down_to_the_limit(alone):
    trainer = Trainer(make_model, Recipe(max_grad_norm=0.125), alone)
    assert trainer.step(some_tokens(1, 9), 0.0).grad_norm > 0.125
    left = torch.cat([parameter.grad.to_local().flatten() for parameter in trainer.model.parameters()])
    assert left.norm().item() == pytest.approx(0.125, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "world_size", "sizes"),
    [
        (None, 4, (1, 4)),
        ("dp=2,cp=2", 4, (2, 2)),
        ("cp=2,dp=4", 8, (4, 2)),
        ("dp=2", 8, (2, 4)),
        ("cp=2", 8, (4, 2)),
        ("dp=2,cp=3", None, (2, 3)),
        (None, None, (1, 1)),
    ],
)
def test_an_unnamed_size_of_a_mesh_is_the_rest(text, world_size, sizes):
    assert mesh_sizes(text, world_size) == sizes


@pytest.mark.parametrize("text", ["2,2", "dp=0", "dp=2,dp=2", "tp=2", "dp=two"])
def test_an_invalid_mesh_is_refused(text):
    with pytest.raises(ValueError, match="mesh must be like dp=2,cp=4"):
        mesh_sizes(text, 4)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="got dp=3 x cp=1 for 4"):
        mesh_sizes("dp=3", 4)


# what a step costs


def test_flops_are_counted_by_visible_pairs(alone):
    trainer, windows = Trainer(make_model, Recipe(separator=0), alone), some_tokens(2, 65) % 9
    attention, others = metrics.count_flops(lambda: trainer.evaluate([windows]))
    matrices = sum(p.numel() for name, p in make_model().named_parameters() if p.ndim == 2)
    assert others == 2 * matrices * 128  # the tied embedding counts once, as the output projection
    pairs = trainer.pairs(windows)
    documents = make_rows(windows, 0).documents or ()
    assert pairs == sum((b - a) * (b - a + 1) // 2 for a, b in itertools.pairwise(documents))
    assert attention == SMALL.layers * 4 * SMALL.head_dim * SMALL.heads * pairs


class FakeEvent:
    """An event of a GPU on which every call of an operator takes a millisecond."""

    now = 0.0

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        FakeEvent.now += 0.5
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return 2 * (end.at - self.at)


def test_exposed_time_is_the_time_beyond_that_of_the_pairs_alone(alone, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    asked: list[Any] = []

    def per_pair(*call: Any) -> dict[str, float]:
        asked.append(call)
        return {"forward": 0.001, "backward": 0.002}

    monkeypatch.setattr(metrics, "_ms_per_pair", per_pair)
    trainer, clock = Trainer(make_model, Recipe(), alone), metrics.AttentionTimer(None)
    assert clock.exposed_ms() is None
    pairs = 2 * 16 * 17 // 2
    for _ in range(2):
        with clock:
            trainer.step(some_tokens(2, 17), 1e-3)
        # two layers, forward and backward
        assert clock.exposed_ms() == pytest.approx(2 * (1.0 - 0.001 * pairs) + 2 * (1.0 - 0.002 * pairs))
    assert [tuple(map(tuple, asked[0][0])), *asked[0][1:]] == [((4, 8), (2, 8), (2, 8)), torch.float32, pairs, None]
    assert len(asked) == 1, "what kernels take alone is measured once"


def test_a_known_gpu_has_a_peak_and_an_unknown_one_has_none():
    assert metrics.peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    assert metrics.peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert metrics.peak_flops("NVIDIA L40S", torch.bfloat16) == 362e12
    assert metrics.peak_flops("NVIDIA H200", torch.float32) is None
    assert metrics.peak_flops("another", torch.bfloat16) is None
    assert metrics.mfu(989e12, 2.0, 4, 989e12) == 0.125
    assert metrics.mfu(1.0, 1.0, 1, None) is None


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
    text = compare_results(alone, results((5.5000004, 2.0), (5.25, 2.5000002)), 4, torch.float32)
    assert len(text.splitlines()) == 5
    assert text.endswith("equal within rounding")
    for wrong in (
        results((5.5, 2.0), (5.2501, 2.5)),
        results((5.5, 2.0), (5.25, 2.5001)),
        results((5.5, 2.0), (math.nan, 2.5)),
    ):
        with pytest.raises(Refusal, match="the ring must equal one rank within rounding"):
            compare_results(alone, wrong, 4, torch.float32)


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


def test_no_validation_token_is_trained_on():
    text = torch.zeros(4000, dtype=torch.uint8)
    batches = Batches(text, 50, 2, seed=0)
    text[batches.num_training_tokens :] = 1
    assert not any(batches.training(step).any() for step in range(500))
    held_out = list(batches.validation(3))
    assert len(held_out) == 3
    assert all(windows.shape == (2, 51) and windows.all() for windows in held_out)
    assert batches.prompt(10).tolist() == [1] * 10


@pytest.mark.parametrize("seq_len", [1, 499])
def test_the_smallest_corpus_is_enough(seq_len):
    batches = Batches(torch.ones(2 * (seq_len + 1), dtype=torch.uint8), seq_len, 1, seed=0)
    assert batches.training(0).shape == next(batches.validation(1)).shape == (1, seq_len + 1)
    with pytest.raises(ValueError, match=f"data must hold at least {2 * (seq_len + 1)} tokens"):
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


def test_files_of_a_run_are_not_data_of_its_next_start(tmp_path, monkeypatch):
    """With --data . and the default --out the log was new data, so a run could not continue."""
    (tmp_path / "a.txt").write_bytes(b"some text")
    before = load_corpus(str(tmp_path), str(tmp_path / "runs" / "train"))
    (tmp_path / "runs" / "train").mkdir(parents=True)
    (tmp_path / "runs" / "train" / "log.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for data, out in ((".", "runs/train"), (str(tmp_path), "runs/../runs/train")):
        assert load_corpus(data, out).fingerprint == before.fingerprint
    assert load_corpus(".", "elsewhere").fingerprint != before.fingerprint


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
