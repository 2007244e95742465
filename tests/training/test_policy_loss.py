"""Sums and losses of shards are those of whole sequences: in value on every rank, in gradient after the mean over ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn import Ring, Sharding
from ringattn.training import (
    clipped_loss,
    for_rows,
    group_advantages,
    importance_ratios,
    kl_k3,
    mean_over_ring,
    policy_loss,
    sequence_sums,
    sum_over_ring,
    token_log_probs_and_entropy,
)

N, VOCAB, DIM = 23, 11, 4
DOCUMENTS = (0, 3, 3, 14, 23)
RANKS = [1, 2, 3]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sharding_of(documents: tuple[int, ...] | None) -> Sharding:
    return Ring(dist.group.WORLD).sharding(N, "zigzag", documents)


def averaged(gradients: Any) -> list[Tensor]:
    """Gradients of parameters as DDP and FSDP reduce them."""
    for x in gradients:
        dist.all_reduce(x)
    return [x / dist.get_world_size() for x in gradients]


def bounds(documents: tuple[int, ...] | None) -> list[tuple[int, int]]:
    return list(pairwise(documents or (0, N)))


# a policy: rows times weight, whose log-probabilities are compared with older ones


def policy_inputs(documents: tuple[int, ...] | None) -> dict[str, Tensor]:
    b = 1 if documents else 3
    mask = (drawn(b, N, seed=5) > -0.3).double()
    if documents:
        mask[:, :3] = 0  # a document that predicts nothing
    else:
        mask[2] = 0
    advantages = drawn(*((1, len(documents) - 1) if documents else (b,)), seed=6)
    return {
        "hidden": drawn(b, N, DIM, seed=1),
        "targets": torch.randint(VOCAB, (b, N), generator=torch.Generator().manual_seed(2)),
        "old": -3 + 0.3 * drawn(b, N, seed=3),
        "ref": -3 + 0.3 * drawn(b, N, seed=4),
        "mask": mask,
        "advantages": advantages,
    }


def weight_of_head() -> Tensor:
    return drawn(VOCAB, DIM, seed=7).requires_grad_()


def on_ranks(documents: tuple[int, ...] | None, options: dict[str, Any]) -> list[Tensor]:
    """The loss, and the averaged gradient of the weight."""
    sharding, weight, whole = sharding_of(documents), weight_of_head(), policy_inputs(documents)
    advantages = whole.pop("advantages")
    rows = {name: sharding.shard(x) for name, x in whole.items()}
    log_probs, entropy = token_log_probs_and_entropy(rows["hidden"], weight, rows["targets"])
    loss = policy_loss(
        log_probs,
        advantages,
        rows["mask"],
        sharding,
        old_log_probs=rows["old"],
        ref_log_probs=rows["ref"],
        beta=0.1,
        **options,
    )
    bonus = mean_over_ring((entropy * rows["mask"]).sum(), rows["mask"].sum(), sharding)
    (loss - 0.01 * bonus).backward()
    return [loss.detach(), *averaged([weight.grad])]


def by_hand(documents: tuple[int, ...] | None, options: dict[str, Any]) -> list[Tensor]:
    """The same of whole sequences, one after another, from the equations."""
    whole, weight = policy_inputs(documents), weight_of_head()
    logs = (whole["hidden"] @ weight.T).log_softmax(-1)
    picked = logs.gather(-1, whole["targets"][..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    sums, counts = [], []
    for row in range(len(picked)):
        for k, (start, end) in enumerate(bounds(documents)):
            m, new, old, ref = (x[row, start:end] for x in (whole["mask"], picked, whole["old"], whole["ref"]))
            advantage = whole["advantages"][row, k] if documents else whole["advantages"][row]
            ratio = (new - old).exp()
            if options.get("level") == "sequence":
                ratio = (((new - old) * m).sum() / m.sum().clamp(min=1)).exp().expand(end - start)
            low, high = options.get("clip", (0.2, 0.2))
            losses = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            losses = losses + 0.1 * ((ref - new).exp() - (ref - new) - 1)
            sums.append((losses * m).sum())
            counts.append(m.sum())
    over = options.get("mean_over", "tokens")
    if over == "tokens":
        loss = sum(sums) / sum(counts)
    elif over == "sequences":
        loss = sum(x / c for x, c in zip(sums, counts, strict=True) if c > 0) / sum(c > 0 for c in counts)
    else:
        loss = sum(sums) / over
    assert isinstance(loss, Tensor)
    bonus = (entropy * whole["mask"]).sum() / whole["mask"].sum()
    (loss - 0.01 * bonus).backward()
    assert weight.grad is not None
    return [loss.detach(), weight.grad]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip": (0.1, 0.28), "mean_over": "sequences"},
    {"level": "sequence", "mean_over": "sequences"},
    {"level": "sequence", "mean_over": 100.0},
]


@pytest.mark.rings
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "packed"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_loss_of_shards_is_that_of_whole_sequences(pool, ranks, documents, options):
    expected = by_hand(documents, options)
    for found in pool(ranks).run(on_ranks, documents, options):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def sums_on_ranks(documents: tuple[int, ...] | None) -> list[Tensor]:
    sharding, factor = sharding_of(documents), torch.ones(3, dtype=torch.float64, requires_grad=True)
    rows = sharding.shard(drawn(3, N, seed=8)) * factor[:, None]
    sums = sequence_sums(rows, sharding)
    back = for_rows(sums, sharding).expand(rows.shape)
    total = sum_over_ring((back * sharding.shard(drawn(3, N, seed=9))).sum(), sharding)
    total.backward()
    return [sums.detach(), total.detach(), *averaged([factor.grad])]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "packed"])
def test_sums_of_sequences_and_their_values_for_rows_go_round_the_ring(pool, ranks, documents):
    x, y = drawn(3, N, seed=8), drawn(3, N, seed=9)
    parts = torch.stack([x[:, start:end].sum(1) for start, end in bounds(documents)], 1)
    others = torch.stack([y[:, start:end].sum(1) for start, end in bounds(documents)], 1)
    by_row = (parts * others).sum(1)
    for sums, total, gradient in pool(ranks).run(sums_on_ranks, documents):
        torch.testing.assert_close(sums, parts if documents else parts[:, 0])
        torch.testing.assert_close(total, by_row.sum())
        torch.testing.assert_close(gradient, by_row)


def mean_of_unequal_counts() -> list[Tensor]:
    """Rank r adds the squares of r rows; the first has none."""
    rank, weight = dist.get_rank(), torch.tensor(2.0, requires_grad=True)
    rows = torch.arange(1.0, rank + 1) * weight
    ring = Ring(dist.group.WORLD)
    with ringattn.use_sharding(ring.sharding(N)):
        loss = ringattn.mean_over_ring(rows.square().sum(), rank)
    assert torch.equal(loss, mean_over_ring(rows.square().sum(), rank, ring))
    loss.backward()
    return [loss.detach(), *averaged([weight.grad])]


def test_a_mean_over_the_ring_divides_by_the_counts_of_all_ranks(pool):
    # 1 + (1 + 4) over three rows, times the square of 2
    for loss, gradient in pool(3).run(mean_of_unequal_counts):
        assert loss.item() == 8.0
        assert gradient.item() == 8.0


def test_counts_beyond_fp32_and_no_counts_at_all():
    count = 2**24 + 1
    assert mean_over_ring(torch.tensor(2.0 * count, dtype=torch.float64), count, Ring()).item() == 2.0
    assert mean_over_ring(torch.tensor(0.0), 0, Ring()).item() == 0.0


# advantages, from the equations


REWARDS = [1.0, 2.0, 4.0, 0.5, 0.5, 0.5, 3.0, float("nan"), 5.0, 7.0, float("nan"), float("nan")]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_compare_a_reward_with_the_others_of_its_group(baseline, scale):
    found = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), 3, baseline=baseline, scale=scale)
    scored = [x for x in REWARDS if x == x]
    for i, reward in enumerate(REWARDS):
        group = [x for x in REWARDS[i - i % 3 : i - i % 3 + 3] if x == x]
        alone = len(group) < 2 and (baseline == "leave_one_out" or scale == "group")
        if reward != reward or alone:
            assert found[i] == 0
            continue
        mean = sum(group) / len(group)
        wanted = reward - (mean if baseline == "mean" else (sum(group) - reward) / (len(group) - 1))
        if scale != "none":
            wanted /= torch.tensor(group if scale == "group" else scored, dtype=torch.float64).std().item() + 1e-4
        assert found[i].item() == pytest.approx(wanted, rel=1e-12)


def test_the_first_ratio_may_be_bounded_for_negative_advantages():
    ratios, advantages = torch.tensor([0.5, 1.0, 9.0, 9.0]), torch.tensor([-1.0, 1.0, 1.0, -1.0])
    assert clipped_loss(ratios, advantages).tolist() == pytest.approx([0.8, -1.0, -1.2, 9.0])
    assert clipped_loss(ratios, advantages, max_ratio=4.0).tolist() == pytest.approx([0.8, -1.0, -1.2, 4.0])


def test_the_kl_estimate_is_zero_for_equal_policies_and_positive_otherwise():
    logs = torch.tensor([-1.0, -2.0])
    assert kl_k3(logs, logs).tolist() == [0.0, 0.0]
    assert (kl_k3(logs, logs.flip(0)) > 0).all()


def test_one_process_needs_no_ring_and_old_log_probs_default_to_these():
    sharding = Ring().sharding(4)
    logs = torch.full((1, 4), -2.0, requires_grad=True)
    loss = policy_loss(logs, torch.tensor([1.0]), torch.ones(1, 4, dtype=torch.bool), sharding)
    loss.backward()
    assert loss.item() == -1.0
    assert logs.grad is not None
    assert logs.grad.tolist() == [[-0.25] * 4]


ROWS = torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("ring", lambda _: mean_over_ring(torch.tensor(1.0), 1)),
        ("loss_sum", lambda s: mean_over_ring(ROWS, 1, s)),
        ("loss_sum", lambda s: mean_over_ring(torch.tensor(1.0), ROWS, s)),
        ("x", lambda s: sequence_sums(ROWS[:, :3], s)),
        ("values", lambda s: for_rows(ROWS, s)),
        ("rewards", lambda _: group_advantages(torch.zeros(5), 2)),
        ("rewards", lambda _: group_advantages(torch.zeros(4), 1)),
        ("baseline", lambda _: group_advantages(torch.zeros(4), 2, baseline="median")),
        ("scale", lambda _: group_advantages(torch.zeros(4), 2, scale="rank")),
        ("level", lambda s: importance_ratios(ROWS, ROWS, ROWS, s, level="word")),
        ("mean_over", lambda s: policy_loss(ROWS, ROWS, ROWS, s, mean_over="words")),
        ("beta", lambda s: policy_loss(ROWS, ROWS, ROWS, s, beta=0.1)),
        ("beta", lambda s: policy_loss(ROWS, ROWS, ROWS, s, ref_log_probs=ROWS)),
        ("mask", lambda s: policy_loss(ROWS, ROWS, ROWS[:, :3], s)),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(named, call):
    with pytest.raises(ValueError, match=f"^{named} "):
        call(Ring().sharding(4))
