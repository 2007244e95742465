"""Transfers over process groups: a ring's own communicator carries a post as one group of messages, and ends with it."""

from __future__ import annotations

import os
import random
import select
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ringattn import Ring, ring_attention
from ringattn.transport import process_group
from ringattn.transport.consensus import _client, raise_differences
from ringattn.transport.process_group import ProcessGroupTransport, end_communicator, make_communicator
from tests.support.pool import Pools


class FakeGroup:
    """Writes down what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append(("start", device))

    def _end_coalescing(self, device: torch.device) -> Any:
        self.asked.append(("end", device))
        return self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.asked.append(("send", tensors[0].numel(), peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.asked.append(("recv", tensors[0].numel(), peer, tag))

    def wait(self) -> None:
        self.asked.append(("wait",))

    def shutdown(self) -> None:
        self.asked.append(("shutdown",))


def test_a_post_is_one_group_of_messages_on_the_communicator_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    group, cpu = FakeGroup(), torch.device("cpu")
    monkeypatch.setitem(process_group._COMMUNICATORS, "mine", group)  # pyright: ignore[reportArgumentType]
    transport = ProcessGroupTransport("no such group", 0, 2, "mine", 4)
    sends = [(1, torch.zeros(3)), (2, torch.zeros(0))]
    transport.post(sends, [(2, torch.zeros(5)), (1, torch.zeros(7))], "test").wait()
    assert group.asked == [
        ("start", cpu), ("send", 3, 1, 0), ("recv", 5, 2, 0), ("recv", 7, 1, 0), ("end", cpu), ("wait",),
    ]  # fmt: skip
    transport.post([(1, torch.zeros(0))], [], "nothing").wait()
    assert group.asked[-1] == ("wait",)
    transport.close()
    transport.close()
    assert group.asked[-2:] == [("wait",), ("shutdown",)]
    assert "mine" not in process_group._COMMUNICATORS


def refuse() -> None:
    parent = dist.group.WORLD
    assert parent is not None, "the pool made a group"
    make_communicator("refused", parent, torch.device("cpu"), 4)


@pytest.mark.skipif(dist.is_nccl_available(), reason="NCCL is there")
def test_a_communicator_that_cannot_be_made_names_the_option(pool: Pools) -> None:
    with pytest.raises(
        RuntimeError, match=r"NCCL must make a communicator of at most 4 thread blocks, got .*nccl_max_ctas"
    ):
        pool(2).run(refuse)
    end_communicator("refused")


def close_and_go_on() -> bool:
    ring = Ring(nodes=2)
    sharding = ring.sharding(16)
    x = torch.ones(1, 8, 1, 16)
    first = ring_attention(x, x, x, sharding)
    ring.close()
    return torch.equal(first, ring_attention(x, x, x, sharding))


def test_a_closed_ring_may_be_used_again(pool: Pools) -> None:
    assert pool(2).run(close_and_go_on) == [True, True]


def prepare_after_a_close() -> list[int]:
    """How often links were prepared after a call, the same call, and the same call behind `close`."""
    prepared = list[None]()
    prepare = ProcessGroupTransport.prepare
    ring = Ring()
    sharding = ring.sharding(16)
    x = torch.ones(1, 8, 1, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupTransport, "prepare", lambda self, device: prepared.append(prepare(self, device)))
        counts = list[int]()
        for close in (False, False, True, False):
            if close:
                ring.close()
            ring_attention(x, x, x, sharding)
            counts.append(len(prepared))
    return counts


def test_a_closed_ring_makes_communicators_anew(pool: Pools) -> None:
    assert pool(2).run(prepare_after_a_close) == [[1, 1, 2, 2]] * 2


def step_by_the_host() -> list[torch.Tensor]:
    """What an attention call gives, plainly and with rows that pass through copies in host memory, and both gradients."""
    found, prepare = list[torch.Tensor](), ProcessGroupTransport.prepare
    for by_host in (False, True):
        ring = Ring()
        sharding = ring.sharding(37)
        q = torch.randn(1, sharding.shard_lens[ring.rank], 2, 16, generator=torch.Generator().manual_seed(ring.rank))
        q.requires_grad_()
        with pytest.MonkeyPatch.context() as patch:

            def prepare_so(self: ProcessGroupTransport, device: torch.device, by_host: bool = by_host) -> None:
                prepare(self, device)
                self._by_host = by_host

            patch.setattr(ProcessGroupTransport, "prepare", prepare_so)
            o = ring_attention(q, q, q, sharding, causal=True)
        found += [o.detach(), *torch.autograd.grad(o, q, torch.ones_like(o))]
    return found


def test_rows_that_pass_through_the_host_are_the_same(pool: Pools) -> None:
    for o, dq, by_host, dq_by_host in pool(3).run(step_by_the_host):
        assert torch.equal(o, by_host)
        assert torch.equal(dq, dq_by_host)


def test_rows_land_in_host_memory_whatever_the_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    group, rows = FakeGroup(), torch.zeros(5)
    monkeypatch.setattr(group, "recv", lambda tensors, *_: tensors[0].fill_(3.0))
    monkeypatch.setitem(process_group._COMMUNICATORS, "mine", group)  # pyright: ignore[reportArgumentType]
    transport = ProcessGroupTransport("no such group", 0, 2, "mine")
    transport._by_host = True
    with torch.device("meta"):
        transport.post([], [(1, rows)], "test").wait()
    assert rows.tolist() == [3.0] * 5


def prepare_for_a_gpu(level: str) -> bool:
    torch_distributed: Any = dist
    before = torch_distributed.get_debug_level()
    torch_distributed.set_debug_level(torch_distributed.DebugLevel.__members__[level])
    group: Any = dist.new_group()
    torch_distributed.set_debug_level(before)
    transport = ProcessGroupTransport(group.group_name, dist.get_rank(), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda x, group: None)
        patch.setattr(torch, "zeros", lambda size, device: None)
        transport.prepare(torch.device("cuda", 0))
    dist.barrier()  # a rank that closes the group while another still connects fails that one
    dist.destroy_process_group(group)
    return transport._by_host


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_rows_of_gpus_pass_through_the_host_where_their_group_has_gloo(pool: Pools, level: str) -> None:
    """However much of it torch is to say."""
    assert pool(2).run(prepare_for_a_gpu, level) == [True, True]


def test_a_capture_is_refused_where_rows_pass_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ProcessGroupTransport("no such group", 0, 2, "mine")
    transport._by_host = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="captured into a CUDA graph must have a group of NCCL or the copy engine, got"
    ):
        transport.post([(1, torch.ones(3))], [], "test")


def test_numbers_of_another_kind_are_shown_as_a_difference() -> None:
    with pytest.raises(
        ValueError, match=r"ring ranks \[1\] \(save_gathered_kv: True on most ranks, 1 on ring rank 1\)"
    ):
        raise_differences([{"save_gathered_kv": True, "softcap": 0.0}, {"save_gathered_kv": 1, "softcap": 0.0}])


def settle(ring: Ring) -> None:
    """The keys of a first comparison are there, and on all ranks, before anybody counts keys."""
    dist.barrier()
    consensus = ring._consensus
    assert consensus is not None
    for _ in range(2):
        consensus.compare("settled")
    dist.barrier()


def compare_often() -> int:
    """Keys that a hundred comparisons have left in the store, refusals among them."""
    ring, draw = Ring(), random.Random(0)
    consensus = ring._consensus
    assert consensus is not None
    settle(ring)
    before = consensus._store().num_keys()
    for number in range(100):
        refuses = draw.randrange(8)
        if refuses == ring.rank:
            consensus.publish(f"{number} refused")
            continue
        texts = consensus.compare(f"{number}")
        assert texts == [f"{number} refused" if rank == refuses else f"{number}" for rank in range(ring.world_size)]
    consensus.compare("the end")
    dist.barrier()
    return consensus._store().num_keys() - before


def test_compared_texts_do_not_stay_in_the_store(pool: Pools) -> None:
    # one key of each rank, which others may still read
    assert max(pool(3).run(compare_often)) <= 3


def come_late_often() -> int:
    """Keys that comparisons to which one rank came after the timeout have left in the store."""
    ring = Ring(timeout=timedelta(seconds=2))
    consensus = ring._consensus
    assert consensus is not None
    settle(ring)
    before = consensus._store().num_keys()
    for number in range(3):
        consensus.compare(f"{number}")
        dist.barrier()
        late, gave_up = number % 2, torch.zeros(1)
        if ring.rank == late:
            dist.recv(gave_up, 1 - late)
        with pytest.raises(RuntimeError, match="gave it up" if ring.rank == late else "did not make"):
            consensus.compare(f"{number} again")
        if ring.rank != late:
            dist.send(gave_up, late)
        dist.barrier()
    for _ in range(2):
        consensus.compare("the end")
        dist.barrier()
    return consensus._store().num_keys() - before


def test_texts_of_late_ranks_do_not_stay_in_the_store(pool: Pools) -> None:
    assert max(pool(2).run(come_late_often)) <= 2


def test_a_store_that_is_taken_is_cloned_once_where_it_can_be() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("a", server)
    with _client(store) as one, _client(store) as other:
        assert one is store
        assert other is not store
        other.set("x", "1")
        assert one.get("x") == b"1"
    with _client(store), _client(store) as again:
        assert again is other
    with _client(store) as alone:
        assert alone is store
    for plain in (HashStore(), PythonStore(), PrefixStore("a", PythonStore())):
        with _client(plain) as one, _client(plain) as other:
            assert one is other is plain


class PythonStore(Store):
    """Has no clone."""


def call_in_a_fork() -> list[str]:
    """What calls of a ring say in a process that rank 0 forks, and whether the ring still serves its ranks."""
    ring = Ring()
    x, sharding = torch.ones(1, 4, 1, 16), ring.sharding(8)
    calls = [
        lambda: ring_attention(x, x, x, sharding, causal=True),
        lambda: ring.gather(x, 1, [4, 4]),
        lambda: Ring().all_reduce_min(1),
    ]
    calls[0]()
    said = list[str]()
    if ring.rank == 0:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    said.append(str(error))
            os.write(writing, "\n".join(said).encode())
            os._exit(0)
        os.close(writing)
        if not select.select([reading], [], [], 60)[0]:
            os.kill(child, signal.SIGKILL)
        said = os.read(reading, 65536).decode().splitlines()
        os.waitpid(child, 0)
    calls[0]()
    return said


def test_a_forked_process_is_refused_at_once(pool: Pools) -> None:
    said, _ = pool(2).run(call_in_a_fork)
    assert len(said) == 3
    assert all(
        "a ring must be used by the process that made its group, got a call in a process that was forked" in x
        for x in said
    )
