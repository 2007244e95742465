"""Answers that share a prompt: loss and gradients of a tree equal those of the answers one by one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring, masks
from ringattn.integrations.transformers import pack_answers, shard_batch
from tests.integrations.transformers.models import gradients, learn, make, tokens
from tests.integrations.transformers.test_models import assert_equal
from tests.support.pool import Pools
from tests.support.scripts import run_on_ranks


def samples() -> list[tuple[Tensor, list[Tensor]]]:
    """Two prompts, one of a single token, with answers of several lengths."""
    draw = [tokens(n, seed=n)[0] for n in (9, 4, 7, 1, 1, 3, 6)]
    return [(draw[0], draw[1:4]), (draw[4], draw[5:])]


def on_tree(kind: str, layout: str, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ring = Ring()
    model = make(kind, "ringattn", torch.float64, **changes)
    batch, tree = pack_answers(samples())
    loss = learn(model, shard_batch(batch, ring, layout, tree=tree))
    grads = gradients(model)
    for x in (loss, *grads.values()):
        if ring.world_size > 1:
            dist.all_reduce(x)
            x /= ring.world_size
    return loss, grads


def one_by_one(kind: str, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over the labels of all answers, each behind its prompt in a call of its own, over their number."""
    model = make(kind, "sdpa", torch.float64, **changes)
    pairs = [(prompt, answer) for prompt, answers in samples() for answer in answers]
    total = torch.zeros(())
    for prompt, answer in pairs:
        ids = torch.cat([prompt, answer])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits.float(), answer, reduction="sum")
    loss = total / sum(len(answer) for _, answer in pairs)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 64})])
@pytest.mark.parametrize(("world_size", "layout"), [(1, "zigzag"), (2, "contiguous"), (3, "zigzag")])
def test_answers_that_share_a_prompt_learn_as_they_do_alone(
    pool: Pools, kind: str, changes: dict[str, Any], world_size: int, layout: str
) -> None:
    expected = one_by_one(kind, **changes)
    for found in pool(world_size).run(on_tree, kind, layout, **changes):
        assert_equal(found, expected)


def test_a_shared_prompt_is_stored_once() -> None:
    batch, tree = pack_answers(samples())
    assert batch["input_ids"].shape == (1, 8 + (4 + 7 + 1 + 3) + (3 + 6 + 2))
    assert tree.parents == (-1, 0, 0, 0, -1, -1)
    part = shard_batch(batch, Ring(), tree=tree)
    assert part["position_ids"][0].tolist() == tree.positions
    assert int((part["labels"] != -100).sum()) == 4 + 7 + 1 + 3 + 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position_ids": torch.arange(34)[None]}, "must come without position_ids"),
        ({"input_ids": torch.zeros(1, 5, dtype=torch.long), "labels": None}, "tree must hold the 5 tokens"),
    ],
)
def test_batches_that_are_no_tree_are_refused(change: dict[str, Any], says: str) -> None:
    batch, tree = pack_answers(samples())
    with pytest.raises(ValueError, match=says):
        shard_batch({**batch, **change}, Ring(), tree=tree)


def test_windows_shorter_than_a_path_are_refused() -> None:
    batch, tree = pack_answers(samples())
    with pytest.raises(NotImplementedError, match="longest path of a tree, 16 tokens, got 5"):
        make("mistral", "ringattn", sliding_window=5)(**shard_batch(batch, Ring(), tree=tree))


def test_a_tree_without_a_sharding_is_refused() -> None:
    batch, tree = pack_answers(samples())
    with pytest.raises(ValueError, match="tree must come with a sharding"):
        make("llama", "ringattn")(input_ids=batch["input_ids"], tree=tree, use_cache=False)


def test_positions_of_another_tree_are_refused() -> None:
    batch, tree = pack_answers(samples())
    part = shard_batch(batch, Ring(), tree=tree)
    part["tree"] = masks.tree([None], [tree.starts[-1]])
    with pytest.raises(ValueError, match="count along the paths of the tree"):
        make("llama", "ringattn")(**part)


def test_the_example_learns_the_same_with_fewer_tokens() -> None:
    printed = run_on_ranks("shared_prompts")
    losses = re.findall(r"loss (\S+) shared, (\S+) one by one", printed)
    assert len(losses) == 2
    assert all(abs(float(a) - float(b)) < 2e-5 for a, b in losses)
    assert "359 tokens per step instead of 1472" in printed
