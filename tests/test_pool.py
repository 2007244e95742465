"""The pool of gloo workers keeps its promises to the tests that stand on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.pool import RankError
from tests.support.timing import assert_quick, wait_for


@dataclass
class Message:
    number: int


class NotPicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


def all_reduce(x: Tensor) -> Tensor:
    x = x + dist.get_rank()
    dist.all_reduce(x)
    return x


def place() -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.getpid()


def echo(parcel: Message, *, scale: int) -> Message:
    return Message(parcel.number * scale + dist.get_rank())


def draw() -> Tensor:
    return torch.rand(3)


def strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def raise_unpicklable() -> None:
    raise NotPicklableError(1, 2)


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def stall_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_answers_once_in_rank_order(pool, world_size):
    places = pool(world_size).run(place)
    assert [p[0] for p in places] == list(range(world_size))
    assert {p[1] for p in places} == {world_size}
    assert len({p[3] for p in places}) == world_size


def test_workers_use_one_thread(pool):
    assert [p[2] for p in pool(2).run(place)] == [1, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_a_group(pool, world_size):
    total = world_size + world_size * (world_size - 1) / 2
    for result in pool(world_size).run(all_reduce, torch.ones(5)):
        assert torch.equal(result, torch.full((5,), total))


def test_types_of_the_test_file_travel_both_ways(pool):
    assert pool(2).run(echo, Message(7), scale=10) == [Message(70), Message(71)]


def test_strides_survive_the_trip(pool):
    assert pool(1).run(strides, torch.empty(4, 6).t()) == [(1, 6)]


def test_every_call_starts_from_the_same_seed(pool):
    first, second = pool(2).run(draw)
    assert torch.equal(first, second)
    assert torch.equal(first, pool(2).run(draw)[1])


def test_fifty_calls_take_little_of_this_process(pool):
    pids = {p[3] for p in pool(2).run(place)}

    def fifty() -> None:
        for _ in range(50):
            pool(2).run(all_reduce, torch.ones(5))

    assert_quick(fifty, 1)
    assert {p[3] for p in pool(2).run(place)} == pids


def test_an_exception_comes_home_with_rank_and_traceback(pool):
    with pytest.raises(ValueError, match="rank 1 says no") as caught:
        pool(2).run(raise_on, 1)
    assert isinstance(caught.value.__cause__, RankError)
    assert "rank 1 of 2 raised" in str(caught.value.__cause__)
    assert "in raise_on" in str(caught.value.__cause__)


def test_an_exception_that_does_not_pickle_still_comes_home(pool):
    with pytest.raises(RankError, match="NotPicklableError: 1 2"):
        pool(1).run(raise_unpicklable)


def test_a_failed_call_leaves_nothing_to_the_next(pool):
    before = {p[3] for p in pool(2).run(place)}
    with pytest.raises(ValueError, match="says no"):
        pool(2).run(raise_on, 0)
    assert pool(2).pids == []
    assert before.isdisjoint(p[3] for p in pool(2).run(place))
    assert torch.equal(pool(2).run(all_reduce, torch.ones(1))[0], torch.tensor([3.0]))


def test_a_dead_rank_is_named_with_its_exit_code(pool):
    with pytest.raises(RankError, match="rank 1 of 2 died with exit code 3"):
        pool(2).run(exit_on, 1)
    assert len(pool(2).run(place)) == 2


def test_a_hung_rank_is_named_with_its_stack(pool):
    pool(2).run(place)  # started before the clock
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 did not answer in 2 s") as caught:
        pool(2, timeout=2.0).run(stall_on, 0)
    assert "in stall_on" in str(caught.value)
    assert len(pool(2).run(place)) == 2


def test_a_local_function_is_refused(pool):
    with pytest.raises(ValueError, match="fn must be a module-level function"):
        pool(2).run(lambda: 0)


SCRIPT = """
import sys, threading, time
sys.path[:0] = [{root!r}]
from tests.support.pool import Pools
from tests import test_pool
if __name__ == "__main__":
    pool = Pools()(2)
    pool.run(test_pool.place)
    print(*pool.pids, flush=True)
    pool.run(test_pool.stall_on, 0)
"""


def test_workers_do_not_outlive_a_killed_test_process(tmp_path: Path):
    script = tmp_path / "killed.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[1])))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    wait_for(lambda: not any(map(_is_alive, pids)))


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
