"""Inputs that differ between the ranks of a ring are refused before they are cut; labels are shifted before that."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringattn import Ring
from ringattn.plan.layouts import contiguous, zigzag
from ringattn.plan.sharding import Sharding
from ringattn.tensor_checks import digest_bits
from tests.support.pool import Pools
from tests.support.random_masks import layouts

DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64]
SECOND = timedelta(seconds=1)


def whole(dtype: torch.dtype) -> Tensor:
    return torch.arange(2 * 9 * 3).remainder(2).reshape(2, 9, 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_that_of_the_numbers_wherever_they_lie(dtype: torch.dtype) -> None:
    x = whole(dtype)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    within = torch.cat([x[:1, :1], x.flatten(0, 1)[None]], 1)[:, 1:].view(x.shape)  # begins at no multiple of 8 bytes
    assert not turned.is_contiguous()
    assert digest_bits(turned) == digest_bits(within) == digest_bits(x)
    one = x.flatten()[:1]
    assert digest_bits(one[0].expand(1, 1)) == digest_bits(one)  # contiguous, with strides of 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16])
def test_tensors_that_differ_in_one_place_have_different_digests(dtype: torch.dtype) -> None:
    changed = torch.zeros(1025, 1024, dtype=torch.bool)
    changed[torch.arange(1024), torch.arange(1024)] = True
    assert len({int(digest_bits(x.to(dtype))) for x in changed}) == 1025


def test_the_digest_of_a_lazy_conjugate_is_that_of_its_numbers() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert digest_bits(x.conj()) == digest_bits(x.conj().resolve_conj()) != digest_bits(x)


def shard_checked(dtype: torch.dtype, differing: int | None) -> tuple[str, bool]:
    """The error of a rank where one rank has another tensor, and whether the rows of the next call are right."""
    ring = Ring(check_inputs=True, timeout=20 * SECOND)
    sharding, x = ring.sharding(9), whole(dtype)
    other = x.clone()
    other[1, 4] = x[1, 5]
    if ring.rank % 2:  # the same numbers in another order in memory
        x, other = (y.transpose(0, 2).contiguous().transpose(0, 2) for y in (x, other))
    said = ""
    try:
        sharding.shard(other if ring.rank == differing else x)
    except ValueError as error:
        said = str(error)
    mine = sharding.shard(x, dim=-2)
    return said, torch.equal(*(y.to(torch.complex64) for y in (mine, x[:, sharding.positions])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_with_equal_tensors_get_their_rows(pool: Pools, world_size: int, dtype: torch.dtype) -> None:
    assert pool(world_size).run(shard_checked, dtype, None) == [("", True)] * world_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_with_another_tensor_is_refused_on_all(pool: Pools, world_size: int, dtype: torch.dtype) -> None:
    for said, after in pool(world_size).run(shard_checked, dtype, 1):
        assert said.startswith(
            "x of Sharding.shard must be the same on all ranks of a ring, got [2, 9, 3] to cut in dim 1"
        )
        assert str(dtype) in said
        assert "ring ranks [1] differ" in said
        assert "data-parallel groups" in said
        assert after


def other_lengths() -> list[str]:
    """Errors of a rank where rank 1 passes labels for tokens, a longer batch, or rows that were cut before."""
    ring, said = Ring(check_inputs=True, timeout=20 * SECOND), []
    x = torch.arange(18).view(2, 9)
    for kind in ("labels", "batch", "rows", ""):
        sharding, odd = ring.sharding(9), ring.rank == 1
        try:
            if kind == "labels" and odd:
                sharding.shift_labels(x)
            else:
                sharding.shard({"batch": x[:1], "rows": x[:, :4]}.get(kind, x) if odd else x)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_other_calls_and_sizes_of_a_rank_are_refused_on_all(pool: Pools) -> None:
    for labels, batch, rows, after in pool(2).run(other_lengths):
        assert "Sharding.shard([2, 9]" in labels
        assert "Sharding.shift_labels([2, 9]" in labels
        assert "[1, 9] to cut in dim 1" in batch
        assert "x must have seq_len 9 in dim 1, got 4" in rows
        assert after == ""


def shard_unchecked(kind: str) -> bool:
    """Whether a rank gets its rows of what is different on each rank, where nothing compares."""
    ring = Ring(check_inputs=kind != "off", timeout=SECOND)
    sharding = ring.sharding(9)
    x = torch.arange(9) + ring.rank
    if kind == "compiled":
        mine = torch.compile(lambda y: sharding.shard(y, 0), fullgraph=True, backend="eager")(x)
    elif kind == "fake":
        with FakeTensorMode() as mode:
            return sharding.shard(mode.from_tensor(x), 0).shape == (sharding.shard_len,)
    elif kind == "meta":
        return sharding.shard(x.to("meta"), 0).shape == (sharding.shard_len,)
    elif kind == "worker":
        # processes of the pool may not start workers
        with mock.patch("torch.utils.data._utils.worker._worker_info", object()):
            mine = sharding.shard(x, 0)
    else:
        mine = sharding.shard(x, 0)
    return torch.equal(mine, x[sharding.positions])


@pytest.mark.parametrize("kind", ["off", "compiled", "fake", "meta", "worker"])
def test_traces_and_workers_compare_nothing(pool: Pools, kind: str) -> None:
    assert pool(2).run(shard_unchecked, kind) == [True, True]


def test_the_environment_decides_where_the_ring_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGATTN_CHECK_INPUTS", raising=False)
    assert not Ring().check_inputs
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("RINGATTN_CHECK_INPUTS", value)
        assert Ring().check_inputs == wanted
        assert not Ring(check_inputs=False).check_inputs
        assert Ring(check_inputs=True).check_inputs
    monkeypatch.setenv("RINGATTN_CHECK_INPUTS", "yes")
    with pytest.raises(ValueError, match="RINGATTN_CHECK_INPUTS must be 0 or 1"):
        Ring()
    with pytest.raises(ValueError, match="check_inputs must be True or False, got 'yes'"):
        Ring(check_inputs="yes")  # pyright: ignore[reportArgumentType]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(1, 8), st.integers(1, 3))
def test_shifted_labels_are_those_of_one_process(data: st.DataObject, seq_len: int, world_size: int, ndim: int) -> None:
    shards = data.draw(layouts(seq_len, world_size))
    inner = data.draw(st.none() | st.lists(st.integers(0, seq_len), max_size=4).map(sorted))
    documents = None if inner is None else (0, *inner, seq_len)
    dim = data.draw(st.integers(-ndim, ndim - 1))
    shape = [2, 3, 1][:ndim]
    shape[dim] = seq_len
    labels = torch.randint(100, shape)
    kept = labels.clone()
    expected = torch.cat(
        [
            torch.cat([part.narrow(dim, 1, stop - start - 1), torch.full_like(part.narrow(dim, 0, 1), -7)], dim)
            for start, stop in pairwise(documents or (0, seq_len))
            if stop > start
            for part in [labels.narrow(dim, start, stop - start)]
        ],
        dim,
    )
    everyone = [Sharding(seq_len, "balanced", shards, rank, documents) for rank in range(world_size)]
    parts = [sharding.shift_labels(labels, -7, dim) for sharding in everyone]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(everyone[0].assemble(parts, dim), expected)
    assert torch.equal(labels, kept)


def test_labels_that_cannot_be_shifted_are_refused() -> None:
    sharding = Ring().sharding(6)
    for labels, match in (
        (torch.ones(1, 6), "labels must be integers, got torch.float32"),
        (torch.ones(1, 6, dtype=torch.bool), "labels must be integers, got torch.bool"),
        (torch.ones(1, 6, dtype=torch.uint8), "ignore_index must be from 0 to 255 for labels of torch.uint8, got -100"),
        (torch.ones(1, 5, dtype=torch.int64), "labels must have seq_len 6 in dim 1, got 5"),
    ):
        with pytest.raises(ValueError, match=match):
            sharding.shift_labels(labels)
    with pytest.raises(TypeError, match="labels must be a tensor"):
        sharding.shift_labels([1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="ignore_index must be an integer"):
        sharding.shift_labels(torch.ones(1, 6, dtype=torch.int64), 0.5)  # pyright: ignore[reportArgumentType]


def shift_checked() -> tuple[str, list[int]]:
    ring = Ring(check_inputs=True, timeout=20 * SECOND)
    sharding, labels = ring.sharding(9, documents=(0, 4, 9)), torch.arange(9)
    with pytest.raises(ValueError, match=r"labels of Sharding\.shift_labels must be the same on all ranks") as caught:
        sharding.shift_labels(labels + ring.rank, dim=0)
    return str(caught.value), sharding.unshard(sharding.shift_labels(labels, dim=0), 0).tolist()


def test_labels_that_differ_are_refused_on_all_ranks(pool: Pools) -> None:
    for said, shifted in pool(2).run(shift_checked):
        assert "ring ranks [1] differ" in said
        assert shifted == [1, 2, 3, -100, 5, 6, 7, 8, -100]


@pytest.mark.parametrize("rank", [0, 1])
def test_local_positions_are_refused(rank: int) -> None:
    sharding = Sharding(8, "zigzag", zigzag(8, 2), rank, documents=(0, 3, 3, 8))
    inside = torch.tensor([[0, 1, 3, 4], [2, 0, 1, 2]][rank])
    assert torch.equal(sharding.document_positions, inside)
    for right in (sharding.positions, inside):
        sharding.check_positions(right)
        sharding.check_positions(right.int().expand(3, 2, 4))
    for wrong in (torch.arange(4), torch.stack([sharding.positions, sharding.positions + 1])):
        with pytest.raises(ValueError, match="position_ids must be the positions of this rank's 4 rows"):
            sharding.check_positions(wrong)
    with pytest.raises(ValueError, match="position_ids must have shard_len 4 in dim 0, got 8"):
        sharding.check_positions(torch.arange(8))
    with pytest.raises(TypeError, match="position_ids must be a tensor"):
        sharding.check_positions(range(4))  # pyright: ignore[reportArgumentType]
    torch.compile(sharding.check_positions, fullgraph=True, backend="eager")(torch.arange(4))


def local_positions() -> list[str]:
    """Errors of a rank whose contiguous shard has local positions, which are right on rank 0 alone, and of the next call."""
    ring, said = Ring(check_inputs=True, timeout=20 * SECOND), []
    for right in (False, True):
        try:
            sharding = ring.sharding(8, "contiguous")
            sharding.check_positions(sharding.positions if right else torch.arange(sharding.shard_len))
            sharding.shard(torch.arange(8), 0)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_local_positions_of_one_rank_are_an_error_on_all(pool: Pools) -> None:
    for said, after in pool(2).run(local_positions):
        assert "position_ids must be the positions of this rank's 4 rows, [4, 5, 6, 7]" in said
        assert "got [0, 1, 2, 3]" in said
        assert after == ""


def test_position_ids_without_rows_are_right() -> None:
    sharding = Sharding(1, "contiguous", contiguous(1, 2), rank=1)
    sharding.check_positions(torch.empty(2, 0, dtype=torch.int64))
