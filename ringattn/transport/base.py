"""The protocol between the ring's loops and whatever moves bytes.

Owns the calls (posts, gathers, homecomings), the word for what was chosen and why, and the buffers that receive. Refuses to know
who chooses, and how bytes move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import profiler

from ringattn.kernels.interface import ReadyFlags
from ringattn.plan.ring_plan import GatherPlan, Nodes

Message = tuple[int, Tensor]
"""(ring rank of the peer, contiguous tensor)."""


class GradMessage(NamedTuple):
    """A parcel that answers one of an earlier post; in every other way a `Message`.

    Attributes:
        peer: Ring rank.
        x: A contiguous tensor.
    """

    peer: int
    x: Tensor


_NO_SPAN = nullcontext()


def span(name: str, *values: object) -> AbstractContextManager[Any]:
    """Name the work inside for a profiler, while one runs: a name costs the host several microseconds.

    Args:
        name: A template of `str.format`.
        *values: Fill the template.
    """
    return profiler.record_function(name.format(*values)) if profiler._is_profiler_enabled else _NO_SPAN


COMM_SMS = 4
"""Multiprocessors that a launch leaves to what moves bytes by them beside it: as many as a ring's NCCL communicator may take."""


@dataclass(frozen=True)
class Choice:
    """A transport, or an exchange, and the reason for it.

    Attributes:
        name: Of transports "none", "process_group" or "copy_engine", "undecided" before the first call; of exchanges "alone",
            "group", "one_shot" or "simulated".
        why: One clause.
    """

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class Work(Protocol):
    """Sends and receives that are under way."""

    def wait(self) -> None:
        """Returns when received tensors may be read and sent ones overwritten (in stream order on CUDA).

        Raises:
            RuntimeError: The transfer failed or timed out; the message names the rank, the step and the peers.
        """
        ...


class Transport:
    """Moves tensors between the ranks of one ring; base class of all transports.

    Every transport implements `post` and `reserve`. The other methods have defaults, for transports that hold no memory of
    their own.

    Attributes:
        graph_launches: Calls that were launched as one graph since memory was made.
    """

    graph_launches: int = 0

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """Starts one group of transfers and returns at once.

        Between two ranks, the n-th send of a group meets the n-th receive of the same group on the other side. Empty
        tensors are not moved. All ranks make the same posts in the same order, also those in which they move nothing. In
        one post a rank sends plain parcels to one peer at most and replies to one at most; a `GradMessage` is received as such.

        Args:
            sends: What goes out; must not change until the wait returns.
            receives: Where incoming bytes land.
            what: Names the ring step in errors and traces; the same on all ranks.
        """
        raise NotImplementedError(f"a transport must implement post, got {type(self).__name__}; define it")

    def reserve(self, num_bytes: int, replies: int = 0) -> None:
        """Announces how much one post will send at most, so that nothing is allocated between two steps.

        Args:
            num_bytes: Of plain parcels, the largest over all ranks: every rank passes the same number.
            replies: Of replies, likewise.
        """
        raise NotImplementedError(f"a transport must implement reserve, got {type(self).__name__}; define it")

    def kv_gather(self) -> KVGather | None:
        """Return the all-gather of KV that runs beside one kernel; None where this transport has none."""
        return None

    def zero_copy_kv(
        self, name: str, batch: int, rows: int, mine: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Return K and V buffers that a gather of exactly these tensors does not pack; None where there are none.

        Args:
            name: Name of the buffer.
            batch: Batch elements.
            rows: Rows of the longest shard.
            mine: Rows of this rank's shard.
            heads: Key heads.
            dims: Head dims of k and of v.
            dtype: Dtype of both.

        Returns:
            K `b t hk d` and v `b t hk dv`, views of one buffer.
        """
        del name, batch, rows, mine, heads, dims, dtype
        return None

    def replay_or_enqueue(
        self,
        key: tuple[Hashable, ...],
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        enqueue: Callable[[], object],
        held: tuple[Any, ...],
    ) -> None:
        """Enqueue a call; one that comes again with the same tensors may be replayed as a CUDA graph.

        Args:
            key: Everything beside the tensors that decides what is enqueued; objects by identity.
            given: Tensors that the call reads.
            made: Tensors that the call writes, whose shapes, strides and dtypes follow from the others.
            enqueue: Enqueues the call on the current stream; returns the objects that a graph of it must keep alive.
            held: The objects that the key names.
        """
        del key, given, made, held
        enqueue()

    def one_shot(self, consensus: Any, why: str) -> Any:
        """Return a `PartialReducer` in this transport's memory; None where there is none. Every rank calls it.

        Args:
            consensus: `RankConsensus` of the ring.
            why: The reason for this reducer.
        """
        del consensus, why
        return None

    def watch_transport(self, link: Transport) -> Transport | None:
        """Return a transport between nodes whose waits this one's watchdog observes; None where there is no watchdog.

        Args:
            link: The transport between nodes.
        """
        del link
        return None

    def check(self) -> None:
        """Raise if the transport has failed.

        Raises:
            RuntimeError: It has; the message names this rank, the step and the peers.
        """

    def poison(self) -> None:
        """Fill idle buffers with NaN, for tests; every rank calls it."""

    def close(self) -> None:
        """Release all memory and communicators; every rank calls it. Later calls make them anew."""


class KVGatherHandle(Protocol):
    """Keys of other owners that are on their way.

    Attributes:
        remote: `b remote_rows hk (d + dv)`: fills while kernels wait for `ready_flags`; guard rows are zero.
        k: `b remote_rows hk d`, the keys in it.
        v: `b remote_rows hk dv`, the values in it.
        saved: Like far, a tensor of the caller's own, complete behind `close`; None: nothing is kept.
        key_bias: `b t+remote_rows`, what is added to the scores of keys: this rank's own, then those of far; None: nothing is.
        ready_flags: How kernels wait; None when everything is there.
    """

    remote: Tensor
    k: Tensor
    v: Tensor
    saved: Tensor | None
    key_bias: Tensor | None
    ready_flags: ReadyFlags | None

    def close(self) -> None:
        """To be called once the kernels that read far are launched, on the same stream; `GradReturn.receive` may do it.

        Work that is enqueued later may overwrite this rank's k, v and key_bias, and far.
        """
        ...


class GradReturn(Protocol):
    """Contributions to gradients on their way to their owners.

    It begins with a gather that is given it, or by itself.

    Attributes:
        addresses: int64, one per side of the gathered visit: where the backward writes (`KernelSet.backward_fused`).
        local_grads: `b grad_buffer_rows hk (d + dv)` fp32: contributions of this rank to its own rows; addresses[0] points at it.
        rows: grad_buffer_rows of every region.
        bias_addresses: Likewise, of what goes to the gradient of key_bias; None: it is not wanted.
        local_bias_grads: `b hk grad_buffer_rows` fp32, likewise.
    """

    addresses: Tensor
    local_grads: Tensor
    rows: int
    bias_addresses: Tensor | None
    local_bias_grads: Tensor | None

    def begin(self) -> None:
        """To be called in front of the backward where nothing is gathered: its owners let this rank write."""
        ...

    def receive(self) -> tuple[list[Tensor], list[Tensor]]:
        """To be called once the backward is launched, on the same stream: what came home, one region per reader, in order.

        Closes the gather with which it began. Work that is enqueued later on this stream sees the regions complete.

        Returns:
            Regions like own, and like own_bias (none where that is not wanted).
        """
        ...

    def close(self) -> None:
        """To be called once what reads the regions is launched: their writers may use them again."""
        ...


class KVGather(Protocol):
    """Brings the keys of all owners at once (Note [Fused call] of the interface of the kernels).

    Attributes:
        sm_margin: SMs that kernels must leave free: 0 between GPUs. Where ranks share one, those of the other ranks, and
            some for copies from a GPU to itself, which are kernels that would never begin behind one that waits for them.
    """

    sm_margin: int

    def reserve_gather(self, slot_bytes: int, remote_bytes: int, *, remote_shards: bool = False) -> None:
        """Announces the largest gathers to come, so that nothing is allocated between them; every rank passes the same.

        Args:
            slot_bytes: Of the longest shard's keys and values, and its biases.
            remote_bytes: Of far on the rank that has the largest, its biases, and their table.
            remote_shards: There will be guests, of a longest shard each.
        """
        ...

    def remote_shard_buffer(
        self,
        turn: int,
        shape: tuple[int, int, int],
        rows: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Where rows of another node are to land so that a gather of exactly them copies nothing; there are two places.

        Work that is enqueued later on this stream may overwrite what was there.

        Args:
            turn: Which place: 0 or 1.
            shape: Batch elements, rows of the longest shard, and key heads; the same on all ranks.
            rows: Of this guest.
            dims: Head dims of k and of v.
            dtype: Of both.
            device: Where.

        Returns:
            `b rows hk (d + dv)`, keys and values side by side; rows of a batch element are contiguous, and so is all of it
            when it has as many rows as the longest shard.
        """
        ...

    def gather(
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
        """Starts bringing this rank's keys to their readers, and those of others here, and returns at once.

        Args:
            k: `b t hk d`, the rows that this rank holds; any strides with a contiguous last dim.
            v: `b t hk dv`, likewise.
            gather_plan: Who fetches what.
            groups: Groups of key heads in which rows come; divides hk. The same on all ranks.
            what: Names the call in errors.
            key_bias: `b t`, what is added to the scores of this rank's keys; it comes with the first group of their heads.
                All ranks give one or none does.
            keep: What comes is also copied into a tensor of the caller's own. Not with key_bias.
            grad_return: That of the same backward; it begins with the gather, and must not begin by itself.
        """
        ...

    def saved_ready_flags(self, gather_plan: GatherPlan, groups: int, device: torch.device) -> ReadyFlags | None:
        """How kernels wait for rows that an earlier gather has brought and kept: as there, and not at all.

        Args:
            gather_plan: That of the gather.
            groups: Likewise.
            device: Where kernels run.
        """
        ...

    def grad_return(
        self,
        shape: tuple[int, int, int],
        gather_plan: GatherPlan,
        device: torch.device,
        what: str,
        *,
        biased: bool = False,
    ) -> GradReturn:
        """Regions for the gradients of one gathered backward, which has to begin next.

        Args:
            shape: (b, hk, d + dv) of the contributions.
            gather_plan: That of the gather, here or in the forward.
            device: Where kernels run.
            what: Names the call in errors.
            biased: There is a gradient of key_bias; the same on all ranks.
        """
        ...


class Done:
    """Nothing was under way."""

    def wait(self) -> None:
        """Returns."""


class Buffers:
    """Flat buffers that are reused across steps and calls, one per name, dtype, device and stream; they only grow.

    On CUDA, reuse is ordered by the stream: a buffer is handed out again only to work that is enqueued later.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device, int], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor; valid until the same name is taken again.

        Args:
            name: Which buffer.
            shape: Shape of the view that is returned.
            dtype: Its dtype.
            device: Its device.
        """
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        key = (name, dtype, device, stream)
        size = math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            # it outlives the call that takes it: training cannot write into what was made under inference mode
            with torch.inference_mode(False):
                flat = self._flat[key] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(tuple(shape))

    def poison(self) -> None:
        """Sets all bits of all buffers: NaN in every floating dtype. To be called when none is in use."""
        for flat in self._flat.values():
            flat.view(torch.uint8).fill_(255)

    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def clear(self) -> None:
        """Lets go of all buffers."""
        self._flat.clear()


@dataclass(frozen=True)
class RingContext:
    """One rank's place at the ring, which is all that the loops know of it.

    Attributes:
        rank: Ring rank.
        world_size: Ranks of the ring.
        transport: What moves bytes, within a node where there are several.
        buffers: Where received and packed rows live.
        budget: Bytes that gathered keys and their gradients may take per rank; the same on all ranks.
        push_rate: Bytes per second at which the slowest rank pushes into another one's memory; the same on all ranks. 0.0:
            unknown.
        nodes: Who shares a node, in a ring of two levels (Note [Double ring] in ring_plan.py); None: one level.
        between_nodes: What moves bytes between nodes; None: `transport` does.
    """

    rank: int
    world_size: int
    transport: Transport
    buffers: Buffers = field(default_factory=Buffers)
    budget: int = 0
    nodes: Nodes | None = None
    between_nodes: Transport | None = None
    push_rate: float = 0.0

    @property
    def slow_transport(self) -> Transport:
        """What crosses between nodes: `between_nodes`, or the one transport where that serves both."""
        return self.transport if self.between_nodes is None else self.between_nodes
