"""Rows chosen from a sharded sequence, and heads that choose them, equal those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring
from ringattn.integrations.transformers import last_positions, take_rows
from tests.support.pool import Pools


def take_on_ranks(x: Tensor, positions: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Rows of a sharded tensor, and the mean over ranks of gradients of a loss that every rank computes."""
    ring = Ring()
    sharding = ring.sharding(x.shape[1], layout)
    mine = sharding.shard(x).requires_grad_()
    rows = take_rows(mine, sharding, positions)
    rows.square().sum().backward()
    assert mine.grad is not None
    grad = sharding.unshard(mine.grad) / ring.world_size
    return rows.detach(), grad


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize(("world_size", "length"), [(1, 5), (2, 13), (4, 3)])  # the last leaves a rank without rows
def test_rows_and_their_gradients_come_from_the_rank_that_holds_them(
    pool: Pools, layout: str, world_size: int, length: int
) -> None:
    x = torch.randn(2, length, 3, dtype=torch.float64)
    for positions in (torch.tensor([length - 1, 0]), torch.tensor([[0, 1, 1], [length - 1, 2, 0]])):
        whole = x.clone().requires_grad_()
        expected = whole[torch.arange(2)[:, None], positions.view(2, -1)].view(*positions.shape, 3)
        expected.square().sum().backward()
        for rows, grad in pool(world_size).run(take_on_ranks, x, positions, layout):
            assert torch.equal(rows, expected.detach())
            torch.testing.assert_close(grad, whole.grad)


@pytest.mark.parametrize(
    ("x", "positions", "match"),
    [
        (torch.ones(2, 5, 3), torch.tensor([0, 1]), "x must have this rank's 6 rows in dim 1"),
        (torch.ones(2, 6, 3), torch.tensor([0]), "positions must be integers, 2 or 2 x k"),
        (torch.ones(2, 6, 3), torch.tensor([0.0, 1.0]), "positions must be integers"),
        (torch.ones(2, 6, 3), torch.tensor([0, 6]), "positions must be from 0 to 5"),
        (torch.ones(2, 6, 3), torch.tensor([0, -1]), "positions must be from 0 to 5"),
    ],
)
def test_rows_that_do_not_fit_are_refused(x: Tensor, positions: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        take_rows(x, Ring().sharding(6), positions)


def refuse_on_one_rank() -> str:
    """The error of every rank when the positions of one are out of range."""
    sharding = Ring().sharding(6)
    try:
        take_rows(torch.ones(1, 3, 2), sharding, torch.tensor([6 if dist.get_rank() == 1 else 0]))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_position_that_one_rank_refuses_is_refused_on_all(pool: Pools) -> None:
    for found in pool(2).run(refuse_on_one_rank):
        assert "positions must be from 0 to 5, got [[6]]" in found


def test_last_positions_are_those_of_the_last_tokens() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]])
    assert last_positions(mask).tolist() == [3, 1, 2]
