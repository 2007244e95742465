"""Batches on several ranks: their comparison between ranks, counts of labels, and batches of fewer tokens than ranks."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from ringattn import Ring
from ringattn.integrations.transformers import RingCollator, labels_per_ring, shard_batch
from ringattn.plan.layouts import zigzag
from ringattn.plan.sharding import Sharding
from ringattn.ring import RingPlace
from tests.integrations.transformers.models import gradients, learn, make, tokens
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")


def stack(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([x[name] for x in features]) for name in features[0]}


@contextlib.contextmanager
def in_a_worker() -> Iterator[None]:
    """What the worker of a DataLoader is seen by; processes of the pool may not have workers."""
    worker._worker_info = object()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        worker._worker_info = None


def disagree_later(what: str, where: str) -> list[str]:
    """Errors of four batches, of which rank 1 has other labels or tokens in the third."""
    ring = Ring(timeout=timedelta(seconds=60))
    model: Any = make("llama", "ringattn", torch.float32, num_hidden_layers=1)
    # as unpickled in a spawned process
    place: Any = RingPlace(ring.name, ring.rank, ring.world_size, ring.impl)
    collate = RingCollator(stack, place if where == "spawned worker" else ring)
    run = torch.compile(model, backend="eager") if where == "compiled" else model
    errors = []
    for number in range(4):
        ids = tokens(8, seed=number)[0]
        sample = {"input_ids": ids, "labels": ids.clone()}
        sample[what][5] += number == 2 and ring.rank
        with in_a_worker() if "worker" in where else contextlib.nullcontext():
            sent = pickle.dumps(collate([sample]))
        part = pickle.loads(sent)
        assert part["sharding"].ring is ring
        try:
            run(**part).loss.backward()
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("labels", "loop"),
        ("input_ids", "worker"),
        ("labels", "spawned worker"),
        pytest.param("labels", "compiled", marks=pytest.mark.models),
    ],
)
def test_every_batch_is_compared_beside_its_calls(pool: Pools, what: str, where: str) -> None:
    """From workers of a DataLoader too, and of a model that is compiled whole."""
    for first, second, third, fourth in pool(2).run(disagree_later, what, where):
        assert (first, second, fourth) == ("", "", "")
        assert "the batch must be the same on all ranks of a ring, got tokens and labels with digests" in third


@pytest.mark.parametrize("start", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_that_are_started_anew_shard_batches(start: str) -> None:
    ring = Ring()
    data: Any = [{"input_ids": tokens(9)[0]}]
    (part,) = DataLoader(data, collate_fn=RingCollator(stack, ring), num_workers=1, multiprocessing_context=start)
    assert part["sharding"].ring is ring
    assert torch.equal(part["input_ids"], tokens(9))


def test_a_ring_of_another_process_names_what_it_cannot_do() -> None:
    place = pickle.loads(pickle.dumps(RingPlace("a ring that is not here", 1, 2, "auto")))
    assert place.sharding(5).shard_lens == Sharding(5, "zigzag", zigzag(5, 2), 1).shard_lens
    with pytest.raises(AttributeError, match="a ring must be used by the process that made it, got 'gather'"):
        place.gather(torch.ones(1), 0, [1, 1])
    with pytest.raises(ValueError, match="must be from 1 to"):
        place.sharding(0)


def disagree_in_labels() -> str:
    labels = tokens(8, seed=dist.get_rank())
    with pytest.raises(ValueError, match="the tokens and labels of a batch must be the same") as caught:
        shard_batch({"input_ids": tokens(8), "labels": labels}, Ring())
    return str(caught.value)


def test_labels_of_first_batches_are_compared_before_any_call(pool: Pools) -> None:
    for text in pool(2).run(disagree_in_labels):
        assert "ring ranks [1] differ" in text


def count_labels(count: int) -> tuple[float, float]:
    """Loss and norm of the gradients with a count of the caller, averaged over ranks."""
    batch = {"input_ids": tokens(9), "labels": tokens(9), "num_items_in_batch": count}
    model = make("llama", "ringattn")
    loss = learn(model, shard_batch(batch, Ring()))
    grads = torch.cat([x.flatten() for x in gradients(model).values()])
    if dist.is_initialized():
        for x in (loss, grads):
            dist.all_reduce(x)
            x /= dist.get_world_size()
    return float(loss), float(grads.norm())


def test_a_count_of_the_caller_means_what_it_means_on_one_process(pool: Pools) -> None:
    model = make("llama", "sdpa")
    loss = learn(model, {"input_ids": tokens(9), "labels": tokens(9), "num_items_in_batch": torch.tensor(20)})
    norm = torch.cat([x.flatten() for x in gradients(model).values()]).norm()
    for found in ([count_labels(20)], pool(2).run(count_labels, 20)):
        for values in found:
            assert values == pytest.approx((float(loss), float(norm)), rel=1e-5)


def uneven_batches() -> list[dict[str, Tensor]]:
    batches = []
    for number, left in enumerate((0, 9, 3, 12)):
        ids = tokens(14, seed=number)
        batches.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(14) < left, -100)})
    return batches


def learn_from_two_rings() -> dict[str, Tensor]:
    """Gradients of two micro-batches on each of two rings, averaged over four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ring, replicas = Ring(mesh["cp"]), Ring(mesh["dp"])
    mine = uneven_batches()[2 * replicas.rank :][:2]
    count = labels_per_ring(mine, replicas)
    model = make("llama", "ringattn")
    for batch in mine:
        learn(model, shard_batch({**batch, "num_items_in_batch": count}, ring))
    found = gradients(model)
    for x in found.values():
        dist.all_reduce(x)
    return {name: x / 4 for name, x in found.items()}


def test_rings_and_micro_batches_with_other_numbers_of_labels_learn_as_one_process(pool: Pools) -> None:
    model = make("llama", "sdpa")
    count = labels_per_ring(uneven_batches())
    for batch in uneven_batches():
        learn(model, {**batch, "num_items_in_batch": count})
    for found in pool(4).run(learn_from_two_rings):
        for name, x in gradients(model).items():
            torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-6)


def learn_short(kind: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits and gradients of a batch of fewer tokens than ranks, averaged over ranks."""
    ring = Ring()
    model = make(kind, "ringattn")
    part = shard_batch(batch, ring)
    assert all(part["sharding"].shard_lens)
    out = model(**part)
    out.loss.backward()
    found = gradients(model)
    for x in (loss := out.loss.detach(), *found.values()):
        dist.all_reduce(x)
        x /= ring.world_size
    return loss, part["sharding"].unshard(out.logits.detach()), found


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("llama", "tokens"),
        ("llama", "mask"),
        ("gemma3", "positions"),
    ],
)
def test_batches_of_fewer_tokens_than_ranks_equal_one_process(pool: Pools, kind: str, given: str) -> None:
    ids = tokens(3, rows=2)
    batch = {"input_ids": ids, "labels": ids}
    if given == "mask":
        batch["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
    if given == "positions":
        batch["position_ids"] = torch.arange(7, 10)[None]
    model = make(kind, "eager")
    expected = model(**batch)
    expected.loss.backward()
    for loss, logits, grads in pool(4).run(learn_short, kind, batch):
        torch.testing.assert_close(loss, expected.loss.detach(), rtol=2e-6, atol=0)
        assert logits.shape[1] == 3
        seen = batch.get("attention_mask", torch.ones_like(ids)).bool()
        torch.testing.assert_close(logits[seen], expected.logits.detach()[seen], rtol=1e-5, atol=1e-5)
        for name, x in gradients(model).items():
            torch.testing.assert_close(grads[name], x, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def short_rows(batch: dict[str, Tensor]) -> Tensor:
    part = shard_batch(batch, Ring())
    return part["sharding"].unshard(make("modernbert", "ringattn").eval()(**part).logits)


@pytest.mark.skipif(not FIVE, reason="ModernBERT of 4.x attends by itself")
def test_rows_that_fill_a_short_batch_are_not_seen_by_others(pool: Pools) -> None:
    batch = {"input_ids": tokens(2, rows=2)}
    expected = make("modernbert", "sdpa").eval()(**batch).logits.detach()
    for found in pool(4).run(short_rows, batch):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def short_and_pooled() -> str:
    with pytest.raises(ValueError, match="must leave each of 4 ranks a row with pooling, got 2 tokens") as caught:
        shard_batch({"input_ids": tokens(2)}, Ring(), pooling=True)
    return str(caught.value)


def test_heads_that_choose_a_row_refuse_batches_of_fewer_tokens_than_ranks(pool: Pools) -> None:
    assert all(pool(4).run(short_and_pooled))
