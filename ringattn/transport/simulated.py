"""Transport between all ranks of a ring in one process: mailboxes between threads of which exactly one runs at a time.

Kernels and interpreters that are not thread-safe see one caller. Messages are copies, and buffers are poisoned, so that a rank
that reads too early or writes too late gets NaN.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ringattn.kernels.interface import ReadyFlags
from ringattn.plan.ring_plan import GatherPlan, Nodes
from ringattn.transport.base import GradMessage, GradReturn, KVGatherHandle, Message, RingContext, Transport, Work

T = TypeVar("T")
_CPU = torch.device("cpu")

MessageTag = tuple[int, bool]
"""(number of the post, whether it is a `GradMessage`): equal on both sides (`Transport.post`)."""


@dataclass
class _SimulatedWork:
    hub: _Hub
    rank: int
    receives: list[tuple[Message, MessageTag]]
    what: str

    def wait(self) -> None:
        for (peer, x), tag in self.receives:
            x.copy_(self.hub.collect(peer, self.rank, self.what, tag))


class _Hub:
    """Mailboxes of all pairs of ranks, and the condition that lets one rank run at a time."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.device = device
        self.running = threading.Condition()
        self.failed: BaseException | None = None
        self.world_size = world_size
        self._running = world_size
        self._waiting: dict[int, int] = {}
        self._mail: dict[tuple[int, int], deque[tuple[Tensor, MessageTag | None]]] = {
            (a, b): deque() for a in range(world_size) for b in range(world_size)
        }

    def deliver(self, source: int, target: int, x: Tensor, tag: MessageTag | None = None) -> None:
        self._mail[source, target].append((x.clone(), tag))
        self.running.notify_all()

    def collect(self, source: int, target: int, what: str, tag: MessageTag | None = None) -> Tensor:
        box = self._mail[source, target]
        self._waiting[target] = source
        while not box:
            if self.failed is None and self._stuck():
                self.failed = RuntimeError(f"ring rank {target}: {what}: every rank waits; rank {source} never sent")
                self.running.notify_all()
            if self.failed is not None:
                raise RuntimeError(f"ring rank {target}: {what}: another rank failed first") from self.failed
            self.running.wait()
        del self._waiting[target]
        x, found = box.popleft()
        assert found == tag, f"{what}: rank {source} sent in post and kind {found} what rank {target} expects in {tag}"
        return x

    def _stuck(self) -> bool:
        return len(self._waiting) == self._running and not any(
            self._mail[source, target] for target, source in self._waiting.items()
        )

    def end_rank(self, error: BaseException | None) -> None:
        self._running -= 1
        self.failed = self.failed or error
        self.running.notify_all()


@dataclass(eq=False)
class SimulatedTransport(Transport):
    """One rank's end of the mailboxes, whose buffers are NaN except where kernels may read and write."""

    hub: _Hub
    rank: int
    sm_margin: int = 0
    _posts: int = 0

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:  # noqa: D102
        self._posts += 1
        peers: dict[bool, int] = {}
        for message in sends:
            peer, x = message
            if x.numel():
                assert peers.setdefault(isinstance(message, GradMessage), peer) == peer, (
                    f"{what}: one peer per kind of message"
                )
                self.hub.deliver(self.rank, peer, x, (self._posts, isinstance(message, GradMessage)))
        expected = list[tuple[Message, MessageTag]]()
        for message in receives:
            # all bits set is NaN in every float dtype, in messages of bytes too
            message[1].view(-1).view(torch.uint8).fill_(255)
            if message[1].numel():
                expected.append((message, (self._posts, isinstance(message, GradMessage))))
        return _SimulatedWork(self.hub, self.rank, expected, what)

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        """Return: mailboxes hold any size."""

    def kv_gather(self) -> SimulatedTransport:
        """Return this transport, which fetches all rows before the kernel starts."""
        return self

    def reserve_gather(self, slot_bytes: int, remote_bytes: int, *, remote_shards: bool = False) -> None:
        """Return: mailboxes hold any size."""

    def remote_shard_buffer(  # noqa: D102
        self, turn: int, shape: tuple[int, int, int], rows: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        del turn
        return torch.full((*shape, sum(dims)), float("nan"), dtype=dtype, device=self.hub.device)[:, :rows]

    def gather(  # noqa: D102
        self,
        k: Tensor,
        v: Tensor,
        gather_plan: GatherPlan,
        groups: int,
        what: str,
        *,
        key_bias: Tensor | None = None,
        keep: bool = False,
        grad_return: GradReturn | None = None,
    ) -> _SimulatedHandle:
        assert k.shape[2] % groups == 0, "head groups divide the key heads"
        mine = torch.cat((k, v), -1)
        remote = self._fetch(
            mine, mine.new_zeros(mine.shape[0], gather_plan.remote_rows, *mine.shape[2:]), gather_plan, what
        )
        table = None
        if key_bias is not None:
            # padding rows stay NaN
            unset = key_bias.new_full((key_bias.shape[0], gather_plan.remote_rows), float("nan"))
            table = torch.cat((key_bias, self._fetch(key_bias, unset, gather_plan, what)), 1)
        ready_flags = self.saved_ready_flags(gather_plan, groups)
        saved = remote.clone() if keep else None
        handle = _SimulatedHandle(
            remote, remote[..., : k.shape[-1]], remote[..., k.shape[-1] :], saved, table, ready_flags
        )
        if grad_return is not None:
            assert isinstance(grad_return, _SimulatedGradReturn), "gradients are returned in the same ring"
            grad_return.begin()
            grad_return.handle = handle
        return handle

    def _fetch(self, mine: Tensor, remote: Tensor, gather_plan: GatherPlan, what: str) -> Tensor:
        """Write the rows of all others into remote, whose dimension 1 is rows, and return it."""
        for reader in gather_plan.sends:
            self.hub.deliver(
                self.rank, reader.peer, torch.cat([mine.narrow(1, offset, length) for offset, length in reader.rows], 1)
            )
        for fetch in gather_plan.recvs:
            rows = self.hub.collect(
                fetch.owner, self.rank, f"{what}, keys of ring step {gather_plan.first + fetch.step}"
            )
            remote[:, fetch.at : fetch.at + rows.shape[1]] = rows
        return remote

    def saved_ready_flags(self, gather_plan: GatherPlan, groups: int) -> ReadyFlags:  # noqa: D102
        del gather_plan
        # raised from the start; flags are passed as on real ranks, so that the same kernels run
        flags = torch.ones(groups, self.hub.world_size, dtype=torch.int32, device=self.hub.device)
        return ReadyFlags(flags, torch.zeros(1, dtype=torch.int32, device=self.hub.device), timeout_ns=10**9)

    def grad_return(  # noqa: D102
        self, shape: tuple[int, int, int], gather_plan: GatherPlan, what: str, *, biased: bool = False
    ) -> _SimulatedGradReturn:
        return _SimulatedGradReturn(self.hub, self.rank, shape, gather_plan, what, biased=biased)


class _SimulatedHandle(KVGatherHandle):
    def close(self) -> None:
        # a kernel that is launched later must not read it
        self.remote.fill_(float("nan"))
        if self.key_bias is not None:
            self.key_bias.fill_(float("nan"))


class _SimulatedGradReturn:
    def __init__(
        self, hub: _Hub, rank: int, shape: tuple[int, int, int], gather_plan: GatherPlan, what: str, *, biased: bool
    ) -> None:
        b, hk, width = shape
        self._hub, self._rank, self._gather_plan, self._what = hub, rank, gather_plan, what
        self.rows = gather_plan.slot_rows
        self.handle: _SimulatedHandle | None = None
        self._begun = False
        sides = len(gather_plan.recvs) + 1
        unset = functools.partial(torch.full, fill_value=float("nan"), dtype=torch.float32, device=hub.device)
        self._contributions = unset((sides, b, self.rows, hk, width))
        self.local_grads = self._contributions[0]
        self.addresses = _addresses(self._contributions)
        self._biases = unset((sides, b, hk, self.rows)) if biased else None
        self.local_bias_grads = None if self._biases is None else self._biases[0]
        self.bias_addresses = None if self._biases is None else _addresses(self._biases)

    def begin(self) -> None:
        self._begun = True

    def receive(self) -> tuple[list[Tensor], list[Tensor]]:
        assert self._begun, "a return of gradients begins before its backward"
        if self.handle is not None:
            self.handle.close()
        return self._exchange(self._contributions), [] if self._biases is None else self._exchange(self._biases)

    def _exchange(self, regions: Tensor) -> list[Tensor]:
        for fetch, made in zip(self._gather_plan.recvs, regions[1:], strict=True):
            self._hub.deliver(self._rank, fetch.owner, made)
        return [
            self._hub.collect(
                reader.peer, self._rank, f"{self._what}, gradients of ring step {self._gather_plan.first + reader.step}"
            )
            for reader in self._gather_plan.sends
        ]

    def close(self) -> None:
        self._contributions.fill_(float("nan"))
        if self._biases is not None:
            self._biases.fill_(float("nan"))


def _addresses(regions: Tensor) -> Tensor:
    return torch.tensor([x.data_ptr() for x in regions], dtype=torch.int64, device=regions.device)


def run_ranks(
    world_size: int,
    body: Callable[[RingContext], T],
    nodes: Nodes | None = None,
    *,
    budget: int = 0,
    sm_margin: int = 0,
    device: torch.device = _CPU,
) -> list[T]:
    """Run `body` once per rank in lockstep and return the results in rank order; raise the first exception.

    nodes, budget and sm_margin are those of `RingContext` and `KVGather`, device that of gathered rows.
    """
    hub = _Hub(world_size, device)
    results: dict[int, T] = {}
    grad = torch.is_grad_enabled()
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(rank: int) -> None:
        error: BaseException | None = None
        with hub.running:
            try:
                if current is not None:
                    torch.cuda.set_device(current)
                with torch.set_grad_enabled(grad):
                    transport = SimulatedTransport(hub, rank, sm_margin)
                    context = RingContext(rank, world_size, transport, budget=budget, nodes=nodes)
                    results[rank] = body(context)
            except BaseException as caught:  # the caller's thread raises it
                error = caught
            hub.end_rank(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"ring rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hub.failed is not None:
        raise hub.failed
    return [results[rank] for rank in range(world_size)]
