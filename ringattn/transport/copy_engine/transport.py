"""Transport between the GPUs of one host by copy engine: each owner pushes its rows into the memory of their readers.

Enqueues each call's programs on its streams, in order. It uses `Streams` and `Memory` only, so that the whole protocol also runs
on a CPU, in any interleaving. The constant programs are in kv_gather.py, grad_return.py and send_recv.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.interface import ReadyFlags
from ringattn.kernels.kv.pack import pack
from ringattn.plan.ring_plan import GatherPlan
from ringattn.transport.base import Done, GradMessage, GradReturn, KVGatherHandle, Message, Transport, Work
from ringattn.transport.consensus import RankConsensus
from ringattn.transport.copy_engine.buffers import GRADS, KINDS, PLAIN, RankBuffers, ZeroCopyKV
from ringattn.transport.copy_engine.grad_return import CombinedPrograms, GradReturnPrograms
from ringattn.transport.copy_engine.graph_cache import CachedCall
from ringattn.transport.copy_engine.kv_gather import GatherPrograms
from ringattn.transport.copy_engine.peer_buffers import padded
from ringattn.transport.copy_engine.peer_reads import PeerReads
from ringattn.transport.copy_engine.send_recv import SendRecvPrograms, send_recv_programs
from ringattn.transport.copy_engine.streams import Program, Streams
from ringattn.transport.copy_engine.symmetric_memory import Memory
from ringattn.transport.copy_engine.watchdog import BETWEEN_NODES, POSTS, ProgramInfo
from ringattn.transport.reduce.one_shot import OneShotReducer

RECEIVED = 256
"""Most tensors that posts receive into which recovery knows."""


class CopyEngineTransport(RankBuffers, Transport):
    """One rank's end of the transport, whose watchdog the caller starts; sm_margin is that of `KVGather`."""

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        name: str,
        streams: Streams,
        memory: Memory,
        timeout: float,
        *,
        sm_margin: int = 0,
    ) -> None:
        super().__init__(rank, members, name, streams, memory, timeout)
        self.sm_margin = sm_margin
        self._grad_turn = self._post_turn = 0
        self._posted = 0
        self._kept: list[Any] | None = None  # by the graph that is being captured, so that it lives as long
        self._stream: int | None = None
        self._handle: _CopyEngineGather | None = None
        self._grad_return: _CopyEngineGradReturn | None = None
        self._posts: list[_CopyEngineWork | None] = [None] * POSTS

    def __del__(self) -> None:
        watchdog = getattr(self, "watchdog", None)
        if watchdog is not None:
            watchdog.stop()

    def kv_gather(self) -> CopyEngineTransport:  # noqa: D102
        return self

    def peer_reads(self) -> PeerReads:
        """Return new reads of constant tensors of the ranks of this node."""
        return PeerReads(self.streams, self._memory)

    def reserve_gather(self, slot_bytes: int, remote_bytes: int, *, remote_shards: bool = False) -> None:  # noqa: D102
        remote_capacity = self._remote_buffers[0].num_bytes if self._remote_buffers else 0
        shard_capacity = min(x.numel() for x in self._shard_buffers) if remote_shards else slot_bytes
        if slot_bytes > min(self._slot.numel(), shard_capacity) or remote_bytes > remote_capacity:
            self._enter()
            self._make_slot(slot_bytes)
            for turn in range(2 * remote_shards):
                self._make_shard_buffer(turn, slot_bytes)
            self._make_remote_buffer(remote_bytes)

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
    ) -> KVGatherHandle:
        assert key_bias is None or not keep, "saved rows have no bias"
        assert grad_return is None or isinstance(grad_return, _CopyEngineGradReturn), (
            "gradients are returned by the transport of the gather"
        )
        stream, capturing = self._enter()
        # a zero-copy slot has no room for a bias: such keys are packed
        zero_copy = self._find_zero_copy(k, v) if self._zero_copy_at and key_bias is None else None
        of_bias = None if key_bias is None else key_bias.dtype
        # a captured call is launched again without this method, and keeps its name
        how = what if self._kept is not None else capturing
        key = (id(gather_plan), k.shape, k.dtype, v.shape[-1], groups, id(zero_copy), how, keep, of_bias)
        found: GatherPrograms | None = self.find(key)
        if found is None:
            found = self.keep(key, self._prepare_gather(k, v, gather_plan, groups, zero_copy, what, of_bias, keep=keep))
            if zero_copy is not None:
                zero_copy.infos.add(key)
            if grad_return is not None:
                self.keep(grad_return.key, grad_return.plans)  # which growing for the gather has dropped
        found.info.what = found.push_info.what = what
        if self._kept is not None:
            self._kept.append(found)

        launch, streams = self.streams.launch, self.streams
        remote, flag_program, saved = found.remote[0], found.flag_program, None
        combined = None if grad_return is None else grad_return.plan.beside(found, streams)
        start = found.start if combined is None else combined.start
        places = []
        if self._captured or (found.layout is not self._remote_layout and found.layout != self._remote_layout):
            places.append(remote)
        if keep:
            saved = self._make_saved(tuple(remote.shape), k.dtype)
            flag_program = self._save_program(found, saved.data_ptr())
            places.append(saved)
        if not found.starts_last:
            launch(start, stream)
        if found.opening is not None:
            streams.order(stream, streams.copy_stream)
            launch(found.opening, streams.copy_stream)
        cleared = None
        memory = found.memory
        if memory.cleared is not None:
            cleared = memory.cleared[remote is next(iter(places), None)]
            places = [place for place in places if place is not remote]
        for place in places:
            for first, last in found.pad_rows:
                streams.call(place[:, first:last].zero_)
        self._remote_layout = found.layout
        if memory.packed is not None:
            slot = memory.packed
            streams.call(lambda: pack(slot, k, v, cleared))
        if found.bias is not None and key_bias is not None:
            for target in found.bias[:2]:
                if target is not None:
                    streams.call(functools.partial(target.copy_, key_bias))
        if found.starts_last:
            launch(start, stream)
        if found.push is not None:
            if capturing:
                streams.order(stream, streams.copy_stream)
            launch(found.push, streams.copy_stream)
        # behind the push: where they share a queue, pushed rows do not wait for received ones
        if flag_program is not None:
            if capturing:
                streams.order(stream, streams.flag_stream)
            launch(flag_program, streams.flag_stream)
        self._handle = handle = _CopyEngineGather(self, found, saved, flagged=flag_program is not None)
        if grad_return is not None and combined is not None:
            grad_return.begin_with(handle, combined)
        return handle

    def remote_shard_buffer(  # noqa: D102
        self, turn: int, shape: tuple[int, int, int], rows: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        self._enter()
        key = ("remote shard", turn, shape, rows, dims, dtype)
        found: ZeroCopyKV | None = self.find(key)
        if found is None:
            found = self.keep(key, self._prepare_shard_buffer(turn, (*shape, sum(dims)), rows, dims[0], dtype))
        self._zero_copy_at[found.slot.untyped_storage().data_ptr()] = found
        return found.slot[:, :rows]

    def saved_ready_flags(self, gather_plan: GatherPlan, groups: int) -> ReadyFlags | None:  # noqa: D102
        if not gather_plan.recvs:
            return None
        flags = self._raised.get(groups)
        if flags is None:
            flags = self._make_raised(groups)
        return ReadyFlags(flags, self._error, self._timeout_ns)

    def grad_return(  # noqa: D102
        self, shape: tuple[int, int, int], gather_plan: GatherPlan, what: str, *, biased: bool = False
    ) -> GradReturn:
        if self._grad_return is not None:
            self._grad_return.receive()
            self._grad_return.close()
        key = (id(gather_plan), shape, biased)
        plans: tuple[GradReturnPrograms, GradReturnPrograms] | None = self.find(key)
        if plans is None:
            self._enter()
            plans = self.keep(key, self._prepare_grad_return(gather_plan, shape, what, biased=biased))
        plans[self._grad_turn].info.what = what
        if self._kept is not None:
            self._kept.append(plans)
        return _CopyEngineGradReturn(self, key, plans)

    def replay_or_enqueue(  # noqa: D102
        self, key: tuple[Hashable, ...], given: Sequence[Tensor], made: Sequence[Tensor], enqueue: Callable[[], object]
    ) -> None:
        _, capturing = self._enter()
        if capturing or self._grad_return is not None:
            enqueue()
            return
        known, turn = self._graphs.find(key, given, made), self._grad_turn
        graph = self._graph_of(known, enqueue)
        if graph is not None:
            self._remote_layout, self._grad_turn = known.layout, 1 - turn if known.takes_turn else turn
            self.streams.launch(graph, self.streams.main())
            self.graph_launches += 1
            return
        enqueue()
        known.count()
        known.layout, known.takes_turn = self._remote_layout, self._grad_turn != turn

    def _graph_of(self, known: CachedCall, enqueue: Callable[[], object]) -> Program | None:
        """Return the graph of a call in the present state; None: it cannot be captured."""
        turn, layout = self._grad_turn, self._remote_layout
        clears = self._captured or (known.layout is not layout and known.layout != layout)
        self._kept = kept = []
        graph = None
        try:
            graph = self._graphs.graph(known, (clears, turn if known.takes_turn else 0), self.streams, enqueue, kept)
        finally:
            self._kept = None
            if graph is None:
                # none of its work has run
                self._grad_turn, self._remote_layout = turn, layout
                self._handle = self._grad_return = None
        return graph

    def one_shot(self, consensus: RankConsensus, why: str) -> OneShotReducer:
        """Return a reducer in this transport's memory; every member calls it."""
        place = self._members.index(self._rank), len(self._members), self._name
        return OneShotReducer(*place, self.streams, self._memory, consensus, self.watchdog, self._timeout, why)

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:  # noqa: D102
        for kind, size in zip(KINDS, (num_bytes, grad_bytes), strict=True):
            if size > self._reserved[kind]:
                self._enter()
                self._make_boxes(kind, size)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:  # noqa: D102
        out, into = self._payloads(sends, what), self._payloads(receives, what)
        if len({kind for _, kind in out}) < len(out):
            raise RuntimeError(
                f"ring rank {self._rank}: {what}: a post must send messages of one kind to one peer at most, got ring ranks "
                f"{[peer for peer, _ in out]}; make more posts"
            )
        turn = self._post_turn
        self._post_turn = 1 - turn
        if not out and not into:
            return Done()
        stream, capturing = self._enter()
        index = next((i for i, pending in enumerate(self._posts) if pending is None), None)
        if index is None:  # wait for the oldest one early
            oldest = min((pending for pending in self._posts if pending is not None), key=lambda pending: pending.order)
            oldest.wait()
            index = oldest.index
        key = (tuple(out), tuple(into), turn, index, capturing)
        found: SendRecvPrograms | None = self.find(key)
        if found is None:
            boxes = {kind: self._boxes[kind][turn] for _, kind in (*out, *into)}
            found = self.keep(key, send_recv_programs(self.semaphores, boxes, tuple(out), tuple(into), index, what))
        found.info.what = what
        streams = self.streams
        streams.launch(found.begin, stream)
        for box, messages in zip(found.boxes, out.values(), strict=True):
            for _, address, num_bytes in messages:
                streams.copy(box, address, num_bytes, stream)
                box += padded(num_bytes)
        streams.launch(found.end, stream)
        if not into:
            return Done()
        if capturing:
            streams.order(stream, streams.copy_stream)
        copy_stream, received = streams.copy_stream, self.watchdog.recovery.received
        for program, box, messages in zip(found.copy_programs, found.sources, into.values(), strict=False):
            streams.launch(program, copy_stream)
            for x, address, num_bytes in messages:
                if (address, num_bytes) not in received:
                    received[address, num_bytes] = x
                    if len(received) > RECEIVED and not self._captured:
                        received.pop(next(iter(received)), None)
                streams.copy(address, box, num_bytes, copy_stream)
                box += padded(num_bytes)
        streams.launch(found.copy_programs[-1], copy_stream)
        self._posted += 1
        pending = _CopyEngineWork(self, index, found, self._posted)
        self._posts[index] = pending
        return pending

    def watch_transport(self, link: Transport) -> Transport:  # noqa: D102
        return _WatchedTransport(self, link)

    def zero_copy_kv(
        self, name: str, batch: int, rows: int, mine: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `Transport.zero_copy_kv`; closes a gather that the caller has left open, which may read what was there before."""
        self._enter()
        d, dv = dims
        shape = (batch, rows, heads, d + dv)
        key = (name, (shape, d, dtype))
        zero_copy = self._zero_copy.get(key)
        if zero_copy is None:
            zero_copy = self._make_zero_copy(key, mine)
        if zero_copy.k.shape[1] != mine:
            # another sharding of as many rows on the longest shard
            zero_copy.k, zero_copy.v = zero_copy.slot[:, :mine, :, :d], zero_copy.slot[:, :mine, :, d:]
        return zero_copy.k, zero_copy.v

    def check(self) -> None:  # noqa: D102
        self.watchdog.check()

    def close(self) -> None:  # noqa: D102
        self._finish()
        if self.watchdog.failure is None:
            self._memory.barrier("close")
        else:
            self.streams.synchronize()
        self._grad_turn = self._post_turn = 0
        self._reset()

    def _finish(self) -> None:
        """Close and wait for all that the caller has left open."""
        if self._handle is not None:
            self._handle.close()
        if self._grad_return is not None:
            self._grad_return.receive()
            self._grad_return.close()
        for pending in self._posts:
            if pending is not None:
                pending.wait()

    def _enter(self) -> tuple[int, bool]:
        """Begin a call: raise on a failed ring, and order it behind the one before; return the caller's stream and `capturing`."""
        if self._handle is not None:
            self._handle.close()
        if self.watchdog.failure is not None:
            self.watchdog.check()
        stream, capturing = self.streams.main(), self.streams.capturing()
        if capturing:
            self._captured |= self._kept is None
        elif stream != self._stream:
            if self._stream is not None:
                self.streams.order(self._stream, stream)
            self._stream = stream
        return stream, capturing

    def _payloads(self, messages: Sequence[Message], what: str) -> dict[tuple[int, int], list[tuple[Tensor, int, int]]]:
        """Return (tensor, address, bytes) of what is not empty, by (peer, kind)."""
        found: dict[tuple[int, int], list[tuple[Tensor, int, int]]] = {}
        for message in messages:
            peer, x = message
            num_bytes = x.numel() * x.element_size()
            if not num_bytes:
                continue
            if not x.is_contiguous():
                raise RuntimeError(f"ring rank {self._rank}: {what}: a posted tensor must be contiguous, got strides")
            kind = GRADS if isinstance(message, GradMessage) else PLAIN
            found.setdefault((peer, kind), []).append((x, x.data_ptr(), num_bytes))
        for (peer, kind), tensors in found.items():
            total, reserved = sum([num_bytes for _, _, num_bytes in tensors]), self._reserved[kind]
            capacity = self._boxes[kind][0].num_bytes if reserved else 0
            if total > reserved or sum([padded(num_bytes) for _, _, num_bytes in tensors]) > capacity:
                raise RuntimeError(
                    f"ring rank {self._rank}: {what}: a post must move at most the {reserved} bytes per peer that were "
                    f"reserved, got {total} in {len(tensors)} tensors with ring rank {peer}; reserve more before the loop"
                )
        return found


class _CopyEngineGather(KVGatherHandle):
    def __init__(
        self, transport: CopyEngineTransport, plan: GatherPrograms, saved: Tensor | None, *, flagged: bool
    ) -> None:
        super().__init__(*plan.remote, saved, None if plan.bias is None else plan.bias[2], plan.ready_flags)
        self._transport = transport
        self._plan: GatherPrograms | None = plan
        self._flagged = flagged

    def close(self) -> None:
        self.finish()

    def finish(self, combined: CombinedPrograms | None = None) -> bool:
        """Close, together with the operations of a return of gradients; return False if it was closed before."""
        plan, self._plan = self._plan, None
        if plan is None:
            return False
        here = self._transport
        if here._handle is self:
            here._handle = None
        streams = here.streams
        stream = streams.main()
        if streams.capturing():
            # a graph holds event dependencies only; the place is written before the join (Note [Recovery] of watchdog.py)
            streams.launch(plan.joining if combined is None else combined.joining, stream)
            if plan.push is not None:
                streams.order(streams.copy_stream, stream)
            if self._flagged:
                streams.order(streams.flag_stream, stream)
        streams.launch(plan.join if combined is None else combined.receive, stream)
        return True


class _CopyEngineGradReturn:
    __slots__ = (
        "_begun", "_closed", "_combined", "_handle", "_received", "_transport",
        "addresses", "bias_addresses", "key", "local_bias_grads", "local_grads", "plan", "plans", "rows",
    )  # fmt: skip

    def __init__(
        self, transport: CopyEngineTransport, key: Any, plans: tuple[GradReturnPrograms, GradReturnPrograms]
    ) -> None:
        self._transport = transport
        self.key, self.plans = key, plans
        self.plan = plan = plans[transport._grad_turn]
        self._begun = self._received = self._closed = False
        self._handle: _CopyEngineGather | None = None
        self._combined: CombinedPrograms | None = None
        self.addresses = plan.addresses
        self.local_grads = plan.local_grads
        self.rows = plan.local_grads.shape[1]
        self.bias_addresses, self.local_bias_grads = (None, None) if plan.bias is None else plan.bias[:2]

    def begin(self) -> None:
        stream, _ = self._transport._enter()
        self._begin()
        self._transport.streams.launch(self.plan.start, stream)

    def begin_with(self, handle: _CopyEngineGather, combined: CombinedPrograms) -> None:
        """Begin with a gather, which the combined programs close."""
        self._begin()
        self._handle, self._combined = handle, combined

    def _begin(self) -> None:
        assert not self._begun, "a return of gradients begins once"
        self._begun = True
        here = self._transport
        here._grad_return, here._grad_turn = self, 1 - here._grad_turn

    def receive(self) -> tuple[list[Tensor], list[Tensor]]:
        if not self._received:
            assert self._begun, "a return of gradients begins in front of its backward"
            self._received = True
            handle, combined = self._handle, self._combined
            if handle is None or combined is None or not handle.finish(combined):
                streams = self._transport.streams
                streams.launch(self.plan.receive, streams.main())
        bias = self.plan.bias
        return self.plan.regions, [] if bias is None else bias[2]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._transport._grad_return is self:
                self._transport._grad_return = None
            streams = self._transport.streams
            streams.launch(self.plan.close, streams.main())


@dataclass(eq=False, slots=True)
class _CopyEngineWork:
    transport: CopyEngineTransport
    index: int
    programs: SendRecvPrograms
    order: int
    waited: bool = False

    def wait(self) -> None:
        if self.waited:
            return
        self.waited = True
        here = self.transport
        if here._posts[self.index] is self:
            here._posts[self.index] = None
        streams = here.streams
        stream = streams.main()
        if streams.capturing():
            streams.launch(self.programs.fetching, stream)
            streams.order(streams.copy_stream, stream)
        streams.launch(self.programs.join, stream)
        if here.watchdog.failure is not None:
            here.watchdog.check()


@dataclass(eq=False)
class _WatchedTransport(Transport):
    """A `Transport` between nodes that reports its waits to the watchdog of this rank's node."""

    buffers: RankBuffers
    link: Transport

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        work = self.link.post(sends, receives, what)
        peers = tuple(sorted({peer for peer, x in (*sends, *receives) if x.numel()}))
        return _WatchedWork(self.buffers, work, peers, what) if peers else work

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        self.link.reserve(num_bytes, grad_bytes)


@dataclass(eq=False, slots=True)
class _WatchedWork:
    buffers: RankBuffers
    work: Work
    peers: tuple[int, ...]
    what: str

    def wait(self) -> None:
        here = self.buffers
        streams = here.streams
        key = ("between nodes", self.peers)
        found: tuple[ProgramInfo, Program, Program] | None = here.find(key)
        if found is None:
            info = ProgramInfo(self.what, self.peers, since=None)
            place = here.semaphores.report_place(here.watchdog.number(info), BETWEEN_NODES)
            found = here.keep(key, (info, streams.compile([place]), streams.compile(here.semaphores.exit_ring())))
        info, begin, end = found
        info.what = self.what
        stream = streams.main()
        streams.launch(begin, stream)
        self.work.wait()
        streams.launch(end, stream)
        if here.watchdog.failure is not None:
            here.watchdog.check()
