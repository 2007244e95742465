"""Transport between virtual ranks: several ranks of a ring run in one process, of which exactly one runs at a time.

A process hosts some ranks of a ring, or all of them (`simulate_ring`). Each has a thread, and hands over to the next one where it
posts. A post starts when all ranks of the process have made it: messages among them are copied, and those to other processes are
one post of the transport beneath. A gather is such a post, in which a row comes once for all ranks of the process. Gradients of a
fused call leave rank by rank. So kernels and interpreters that are not thread-safe see one caller, and the order of messages
between two processes follows from the plan alone.
With `poison` messages are delivered at the wait, and buffers hold NaN until then, so that a rank that reads too early or writes too
late gets NaN.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.interface import ReadyFlags
from ringattn.plan.ring_plan import GatherPlan, Nodes, RecvSpec, Rows, SendSpec, union, within
from ringattn.transport.base import GradMessage, GradReturn, KVGatherHandle, Message, RingContext, Transport, Work

T = TypeVar("T")
Moves = Sequence[tuple[Tensor, Tensor]]
"""Tensors of rows, contiguous, and those that rows of other ranks are written into."""
_CPU = torch.device("cpu")


@dataclass(eq=False)
class _Posted:
    """One post of all ranks of a process: copies to make at the waits, by rank, what each gives the others, and messages."""

    late: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    given: dict[int, Any] = field(default_factory=dict)
    link: Work | None = None

    def wait(self, rank: int) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.wait()
        for target, source in self.late.pop(rank, ()):
            target.copy_(source)


@dataclass(eq=False)
class _RankWork:
    posted: _Posted
    rank: int

    def wait(self) -> None:
        self.posted.wait(self.rank)


class Lockstep:
    """The turns of the ranks that a process hosts, and their posts.

    Args:
        world_size: Ranks of the ring.
        ranks: Those of this process, consecutive ones; every process has equally many.
        device: Device of gathered rows.
        link: Moves messages between processes; None: there is no other one.
        poison: Fill what must not be read with NaN.
        sm_margin: SMs that fused kernels leave free.
    """

    def __init__(
        self,
        world_size: int,
        ranks: range,
        device: torch.device,
        link: Transport | None = None,
        *,
        poison: bool = False,
        sm_margin: int = 0,
    ) -> None:
        self.world_size, self.ranks, self.device = world_size, ranks, device
        self.link, self.poison, self.sm_margin = link, poison, sm_margin
        self.returns: dict[int, _GradReturn] = {}
        self._turns = {rank: threading.Semaphore(0) for rank in ranks}
        self._order = deque[int]()
        self._failed: BaseException | None = None
        self._handed_in: dict[int, tuple[Any, ...]] = {}
        self._posted = _Posted()

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Run body with the index of each hosted rank, in turns, and return the results in order; raise the first exception."""
        if len(self.ranks) == 1:
            found, self._posted = [body(0)], _Posted()
            return found
        self._failed = None
        self._handed_in.clear()
        self._order.extend(self.ranks)
        results: dict[int, T] = {}
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def run(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                with torch.cuda.stream(stream), torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    results[rank] = body(rank - self.ranks[0])
            except BaseException as caught:  # the caller's thread raises it
                self._failed = self._failed or caught
            self._order.popleft()
            self._begin_turn()

        threads = [threading.Thread(target=run, args=(rank,), name=f"ring rank {rank}") for rank in self.ranks]
        for thread in threads:
            thread.start()
        self._begin_turn()
        for thread in threads:
            thread.join()
        self._posted = _Posted()
        if self._failed is not None:
            raise self._failed
        return [results[rank] for rank in self.ranks]

    def post(self, rank: int, sends: Sequence[Message], receives: Sequence[Message], what: str) -> _RankWork:
        """Start a post once all hosted ranks have made it; see `Transport.post`."""
        return self._meet(rank, (sends, receives), self._start, what)

    def exchange(self, rank: int, given: object, what: str) -> dict[int, Any]:
        """Return what each hosted rank gives, once all have given it."""
        return self._meet(rank, (given,), self._share, what).posted.given

    def gather(self, rank: int, moves: Moves, gather_plan: GatherPlan, what: str) -> None:
        """Write the rows of all others, from the first tensors of their moves, into the second ones; dimension 1 is rows."""
        self._meet(rank, (moves, gather_plan), self._gather, what)

    def _meet(self, rank: int, given: tuple[Any, ...], start: Callable[[str], _Posted], what: str) -> _RankWork:
        self._handed_in[rank] = given
        if len(self._handed_in) == len(self.ranks):
            self._posted = start(what)
            self._handed_in.clear()
        if len(self.ranks) == 1:
            return _RankWork(self._posted, rank)
        self._order.rotate(-1)
        self._begin_turn()
        self._turns[rank].acquire()
        if self._failed is None and rank in self._handed_in:
            ended = sorted({*self.ranks} - {*self._order})
            self._failed = RuntimeError(
                f"ring rank {rank}: {what}: ring ranks {ended} must make the same posts, got an end before this one"
            )
        if self._failed is not None:
            raise RuntimeError(f"ring rank {rank}: {what}: another rank failed first") from self._failed
        return _RankWork(self._posted, rank)

    def _begin_turn(self) -> None:
        if self._order:
            self._turns[self._order[0]].release()

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory."""
        x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return x.fill_(float("nan")) if self.poison else x

    def _gather(self, what: str) -> _Posted:
        """Copy the rows that each rank reads; those of another process come once for all ranks that read some of them here."""
        each, given = len(self.ranks), self._handed_in.items()
        outgoing, incoming, tensors = list[Message](), list[Message](), list[Tensor]()
        held: dict[int, tuple[Rows, list[Tensor]]] = {}
        for rank, (moves, gather_plan) in given:
            tensors = [mine for mine, _ in moves]
            held[rank] = ((0, tensors[0].shape[1]),), tensors
            there = ((to.peer // each, to.rows) for to in gather_plan.sends if to.peer not in self.ranks)
            outgoing += [(process, torch.cat(_parts(x, rows), 1)) for process, rows in _unions(there) for x in tensors]
        fetches = [(moves, fetch) for _, (moves, gather_plan) in given for fetch in gather_plan.recvs]
        for owner, rows in _unions((fetch.owner, fetch.rows) for _, fetch in fetches if fetch.owner not in self.ranks):
            size = sum(length for _, length in rows)
            held[owner] = rows, [x.new_empty(x.shape[0], size, *x.shape[2:]) for x in tensors]
            incoming += [(owner // each, x) for x in held[owner][1]]
        work = _Posted(link=None if self.link is None else self.link.post(outgoing, incoming, what))
        # rows of this process are copied while those of others travel
        for moves, fetch in sorted(fetches, key=lambda made: made[1].owner not in self.ranks):
            if fetch.owner not in self.ranks:
                work.wait(self.ranks[0])
            whole, sources = held[fetch.owner]
            rows = within(fetch.rows, whole)
            for (_, remote), source in zip(moves, sources, strict=True):
                places = remote.narrow(1, fetch.at, fetch.num_rows).split([length for _, length in rows], 1)
                for place, part in zip(places, _parts(source, rows), strict=True):
                    place.copy_(part)
        work.wait(self.ranks[0])
        return work

    def _share(self, what: str) -> _Posted:
        del what
        return _Posted(given={rank: given for rank, (given,) in self._handed_in.items()})

    def _start(self, what: str) -> _Posted:
        """Copy what stays in this process, and post the rest in one order on both sides: by sender, receiver and kind."""
        sends, receives = dict[tuple[int, int, bool], list[Tensor]](), dict[tuple[int, int, bool], list[Tensor]]()
        for rank, (sent, received) in self._handed_in.items():
            for message in sent:
                if message[1].numel():
                    sends.setdefault((rank, message[0], isinstance(message, GradMessage)), []).append(message[1])
            for message in received:
                if self.poison:
                    # all bits set is NaN in every float dtype, in messages of bytes too
                    message[1].view(-1).view(torch.uint8).fill_(255)
                if message[1].numel():
                    receives.setdefault((message[0], rank, isinstance(message, GradMessage)), []).append(message[1])
        posted = _Posted()
        for key in [key for key in receives if key[0] in self.ranks]:
            given, wanted = sends.pop(key, []), receives.pop(key)
            assert len(given) == len(wanted), f"{what}: rank {key[1]} expects {len(wanted)} messages, got {len(given)}"
            if self.poison:
                posted.late.setdefault(key[1], []).extend((y, x.clone()) for x, y in zip(given, wanted, strict=True))
                continue
            for x, y in zip(given, wanted, strict=True):
                y.copy_(x)
        assert all(key[1] not in self.ranks for key in sends), f"{what}: a message within the process has no receiver"
        if self.link is not None:
            each = len(self.ranks)
            outgoing = [(peer // each, x) for _, peer, kind in sorted(sends) for x in sends[_, peer, kind]]
            incoming = [(owner // each, x) for owner, _, kind in sorted(receives) for x in receives[owner, _, kind]]
            posted.link = self.link.post(outgoing, incoming, what)
        return posted


@dataclass(eq=False)
class LockstepTransport(Transport):
    """One virtual rank's end."""

    ranks: Lockstep
    rank: int

    def __post_init__(self) -> None:
        self.sm_margin = self.ranks.sm_margin

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:  # noqa: D102
        for kind in (False, True):
            peers = {message[0] for message in sends if message[1].numel() and isinstance(message, GradMessage) is kind}
            assert len(peers) <= 1, f"{what}: one peer per kind of message"
        return self.ranks.post(self.rank, sends, receives, what)

    def kv_gather(self) -> LockstepTransport:
        """Return this transport, which fetches all rows before the kernel starts."""
        return self

    def reserve_gather(self, slot_bytes: int, remote_bytes: int, *, remote_shards: bool = False) -> None:
        """Return: each gather has its own memory."""

    def remote_shard_buffer(  # noqa: D102
        self, turn: int, shape: tuple[int, int, int], rows: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        del turn
        return self.ranks.make((*shape, sum(dims)), dtype)[:, :rows]

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
    ) -> _Handle:
        assert k.shape[2] % groups == 0, "head groups divide the key heads"
        mine = torch.cat((k, v), -1)
        remote = mine.new_empty(mine.shape[0], gather_plan.remote_rows, *mine.shape[2:])
        begins = [fetch.at for fetch in gather_plan.recvs]
        for fetch, end in zip(gather_plan.recvs, [*begins[1:], gather_plan.remote_rows], strict=False):
            remote[:, fetch.at + fetch.num_rows : end].zero_()
        moves = [(mine, remote)]
        table = None
        if key_bias is not None:
            # padding rows stay NaN
            unset = key_bias.new_full((key_bias.shape[0], gather_plan.remote_rows), float("nan"))
            moves.append((key_bias.contiguous(), unset))
        if grad_return is not None:
            assert isinstance(grad_return, _GradReturn), "gradients are returned in the same ring"
            # before the first launch: the first rank to return receives for all ranks here
            grad_return.begin()
        self.ranks.gather(self.rank, moves, gather_plan, f"{what}, keys of ring step {gather_plan.first}")
        if key_bias is not None:
            table = torch.cat((key_bias, moves[1][1]), 1)
        ready_flags = self.saved_ready_flags(gather_plan, groups)
        saved = remote.clone() if keep else None
        d = k.shape[-1]
        handle = _Handle(remote, remote[..., :d], remote[..., d:], saved, table, ready_flags, self.ranks.poison)
        if grad_return is not None:
            grad_return.handle = handle
        return handle

    def saved_ready_flags(self, gather_plan: GatherPlan, groups: int) -> ReadyFlags:  # noqa: D102
        del gather_plan
        # raised from the start; flags are passed as on real ranks, so that the same kernels run
        flags = torch.ones(groups, self.ranks.world_size, dtype=torch.int32, device=self.ranks.device)
        return ReadyFlags(flags, torch.zeros(1, dtype=torch.int32, device=self.ranks.device), timeout_ns=10**9)

    def grad_return(  # noqa: D102
        self, shape: tuple[int, int, int], gather_plan: GatherPlan, what: str, *, biased: bool = False
    ) -> _GradReturn:
        return _GradReturn(self, shape, gather_plan, what, biased=biased)


@dataclass(eq=False)
class _Handle(KVGatherHandle):
    poison: bool

    def close(self) -> None:
        if not self.poison:
            return
        # a kernel that is launched later must not read it
        self.remote.fill_(float("nan"))
        if self.key_bias is not None:
            self.key_bias.fill_(float("nan"))


class _GradReturn:
    def __init__(
        self, end: LockstepTransport, shape: tuple[int, int, int], gather_plan: GatherPlan, what: str, *, biased: bool
    ) -> None:
        (b, hk, width), make = shape, end.ranks.make
        self._ranks, self._rank, self._gather_plan, self._what = end.ranks, end.rank, gather_plan, what
        self.rows = gather_plan.slot_rows
        self.handle: _Handle | None = None
        self._received: dict[int, list[Tensor]] = {}
        self._read: list[Tensor] = []
        sides = len(gather_plan.recvs) + 1
        shapes = [(b, self.rows, hk, width), *([(b, hk, self.rows)] if biased else [])]
        self._regions = [make((sides, *one), torch.float32) for one in shapes]
        self.local_grads, self.local_bias_grads = self._regions[0][0], self._regions[1][0] if biased else None
        self.addresses = _addresses(self._regions[0])
        self.bias_addresses = _addresses(self._regions[1]) if biased else None

    def begin(self) -> None:
        self._ranks.returns[self._rank] = self

    def receive(self) -> tuple[list[Tensor], list[Tensor]]:
        assert self._ranks.returns.get(self._rank) is self, "a return of gradients begins before its backward"
        if self.handle is not None:
            self.handle.close()
        what = f"{self._what}, gradients of ring step {self._gather_plan.first}"
        made = {fetch.owner: [x[i] for x in self._regions] for i, fetch in enumerate(self._gather_plan.recvs, 1)}
        given = self._ranks.exchange(self._rank, (made, self._send(made, what)), what)
        for _, sent in given.values():
            sent.wait(self._rank)
        # what a rank of this process has made is read where it lies
        readers = [one.peer for one in self._gather_plan.sends]
        found = [self._received.get(peer) or given[peer][0][self._rank] for peer in readers]
        self._read = [x[0] for x in self._regions] + [x for parts in found for x in parts]
        return [parts[0] for parts in found], [parts[1] for parts in found if len(parts) > 1]

    def _send(self, made: dict[int, list[Tensor]], what: str) -> _Posted:
        """Post what this rank has made for other processes, beside the next rank's launch.

        In the same post this process receives what the ranks in the same place of other processes have made for any rank here.
        """
        ranks = self._ranks
        if ranks.link is None:
            return _Posted()
        here, each, receives = ranks.ranks, len(ranks.ranks), list[Message]()
        fetches = sorted((to for to in self._gather_plan.recvs if to.owner not in here), key=lambda to: to.owner)
        sends = [(to.owner // each, x) for to in fetches for x in _filled(made[to.owner], to)]
        for rank in here:
            owner = ranks.returns[rank]
            for one in owner._gather_plan.sends:
                if one.peer not in here and one.peer % each == self._rank % each:
                    parts = owner._received[one.peer] = [torch.empty_like(x[0]) for x in owner._regions]
                    receives += [(one.peer // each, x) for x in _filled(parts, one)]
        return _Posted(link=ranks.link.post(sends, receives, what))

    def close(self) -> None:
        del self._ranks.returns[self._rank]
        if self._ranks.poison:
            for x in self._read:
                x.fill_(float("nan"))


def _parts(x: Tensor, rows: Rows) -> list[Tensor]:
    return [x.narrow(1, at, length) for at, length in rows]


def _filled(regions: list[Tensor], moved: RecvSpec | SendSpec) -> list[Tensor]:
    """Return what is written of a reader's regions: their first rows by batch element, and gradients of biases whole."""
    return [*regions[0][:, : moved.num_rows], *regions[1:]]


def _unions(pairs: Iterable[tuple[int, Rows]]) -> list[tuple[int, Rows]]:
    """Return the union of the rows of each key, in the order of keys."""
    found: dict[int, list[Rows]] = {}
    for key, rows in pairs:
        found.setdefault(key, []).append(rows)
    return [(key, union(rows)) for key, rows in sorted(found.items())]


def _addresses(regions: Tensor) -> Tensor:
    # made on the device: a copy of host memory would wait for the launches before it
    stride = regions.stride(0) * regions.element_size()
    return torch.arange(len(regions), device=regions.device) * stride + regions.data_ptr()


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

    nodes, budget and sm_margin are those of `RingContext` and `KVGather`, device that of gathered rows. Memory is poisoned.
    """
    ranks = Lockstep(world_size, range(world_size), device, poison=True, sm_margin=sm_margin)
    return ranks.run(
        lambda rank: body(RingContext(rank, world_size, LockstepTransport(ranks, rank), budget=budget, nodes=nodes))
    )
