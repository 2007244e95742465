"""Inputs that differ between the ranks of a ring are refused before they are cut; labels are shifted before that."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.plan.layouts import contiguous, zigzag
from ringattn.plan.sharding import Sharding
from ringattn.tensor_checks import digest_bits
from tests.support.pool import Pools

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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16])
def test_tensors_that_differ_in_one_place_have_different_digests(dtype: torch.dtype) -> None:
    changed = torch.zeros(1025, 1024, dtype=torch.bool)
    changed[torch.arange(1024), torch.arange(1024)] = True
    assert len({int(digest_bits(x.to(dtype))) for x in changed}) == 1025


def test_the_digest_of_a_lazy_conjugate_is_that_of_its_numbers() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert digest_bits(x.conj()) == digest_bits(x.conj().resolve_conj()) != digest_bits(x)


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
    ring, said = Ring(timeout=20 * SECOND), []
    for right in (False, True):
        try:
            sharding = ring.sharding(8, "contiguous")
            sharding.check_positions(sharding.positions if right else torch.arange(sharding.shard_len))
            ring.all_reduce_min(0)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.dist
def test_local_positions_of_one_rank_are_an_error_on_all(pool: Pools) -> None:
    for said, after in pool(2).run(local_positions):
        assert "position_ids must be the positions of this rank's 4 rows, [4, 5, 6, 7]" in said
        assert "got [0, 1, 2, 3]" in said
        assert after == ""


def test_position_ids_without_rows_are_right() -> None:
    sharding = Sharding(1, "contiguous", contiguous(1, 2), rank=1)
    sharding.check_positions(torch.empty(2, 0, dtype=torch.int64))
