"""Base class of transports, the protocols of a gather and of returned gradients, and the buffers that receive."""

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
    """A `Message` with gradients, which answers a message of an earlier post."""

    peer: int
    x: Tensor


_NO_SPAN = nullcontext()


def span(name: str, *values: object) -> AbstractContextManager[Any]:
    """Name the work inside for a profiler, by `name.format(*values)`, while one runs: a name costs several microseconds."""
    return profiler.record_function(name.format(*values)) if profiler._is_profiler_enabled else _NO_SPAN


@dataclass(frozen=True)
class SelectedTransport:
    """The name of a transport or of a reducer of partials ("undecided" before the first call), and the reason in one clause."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class Work(Protocol):
    """Sends and receives in flight."""

    def wait(self) -> None:
        """Return when received tensors may be read and sent ones overwritten (in stream order on CUDA).

        Raises:
            RuntimeError: The transfer failed or timed out; the message names the rank, the step and the peers.
        """
        ...


class Transport:
    """Moves tensors between the ranks of one ring; base class of all transports.

    Every transport implements `post`. The other methods have defaults, for transports that hold no memory of their own.

    Attributes:
        graph_launches: Calls that were launched as one graph.
    """

    graph_launches: int = 0

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """Start one group of transfers and return at once.

        Between two ranks, the n-th send of a group is received by the n-th receive of the same group. Empty tensors are not
        moved. All ranks make the same posts in the same order, also those in which they move nothing. In one post a rank sends
        plain messages to one peer at most and `GradMessage` to one at most; a `GradMessage` is received as such.

        Args:
            sends: Contiguous tensors to send, with their peers; must not change until the wait returns.
            receives: Contiguous tensors to write, with their peers; complete when the wait returns.
            what: Names the ring step in errors and traces; the same on all ranks.

        Raises:
            RuntimeError: A peer cannot be reached, or an earlier transfer failed. `Work.wait` raises later failures of this one.
        """
        raise NotImplementedError(f"a transport must implement post, got {type(self).__name__}; define it")

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        """Reserve memory for the largest posts to come, so that nothing is allocated between two steps.

        Args:
            num_bytes: Of the plain messages of a post, the largest over all ranks: every rank passes the same number.
            grad_bytes: Of its gradient messages, the largest over all ranks.
        """

    def kv_gather(self) -> KVGather | None:
        """Return the all-gather of KV that runs beside one kernel; None where this transport has none."""

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

    def replay_or_enqueue(
        self, key: tuple[Hashable, ...], given: Sequence[Tensor], made: Sequence[Tensor], enqueue: Callable[[], object]
    ) -> None:
        """Enqueue a call; one that comes again with the same tensors may be replayed as a CUDA graph.

        Args:
            key: Everything beside the tensors that decides what is enqueued; it is kept as long as a graph.
            given: Tensors that the call reads.
            made: Tensors that the call writes, whose shapes, strides and dtypes follow from the others.
            enqueue: Enqueues the call on the current stream; returns the objects that a graph of it must keep alive.
        """
        del key, given, made
        enqueue()

    def watch_transport(self, link: Transport) -> Transport:
        """Return a transport between nodes whose waits this one's watchdog observes; the given one where there is no watchdog."""
        return link

    def check(self) -> None:
        """Raise if the transport has failed.

        Raises:
            RuntimeError: It has; the message names this rank, the step and the peers.
        """

    def close(self) -> None:
        """Release all memory and communicators; every rank calls it. Later calls make them anew."""


@dataclass(eq=False)
class KVGatherHandle:
    """Remote K/V in flight.

    Attributes:
        remote: `b remote_rows hk (d + dv)`: written while kernels wait for `ready_flags`; padding rows are zero. k and v are views.
        saved: A copy of remote for the caller, complete after `close`; None: nothing is saved.
        key_bias: `b t+remote_rows`, added to the scores of local keys, then of remote ones; None: there is none.
        ready_flags: Flags that kernels wait for; None: there are no remote rows.
    """

    remote: Tensor
    k: Tensor
    v: Tensor
    saved: Tensor | None
    key_bias: Tensor | None
    ready_flags: ReadyFlags | None

    def close(self) -> None:
        """End the gather, behind the kernels that read remote rows; then k, v, key_bias and remote may be overwritten."""
        raise NotImplementedError(f"a gather must implement close, got {type(self).__name__}; define it")


class GradReturn(Protocol):
    """Gradient contributions on their way to the owners of the rows; begins with the gather that it is passed to, or with `begin`.

    Attributes:
        addresses: int64, one per side of the fused call: where the backward writes (`KernelSet.backward_fused`).
        local_grads: `b grad_buffer_rows hk (d + dv)` fp32: contributions of this rank to its own rows; addresses[0] points at it.
        rows: grad_buffer_rows of every region.
        bias_addresses: As addresses, for the gradient of key_bias; None: it is not wanted.
        local_bias_grads: `b hk grad_buffer_rows` fp32, as local_grads, for the gradient of key_bias.
    """

    addresses: Tensor
    local_grads: Tensor
    rows: int
    bias_addresses: Tensor | None
    local_bias_grads: Tensor | None

    def begin(self) -> None:
        """Let this rank write to its owners; called in front of a backward that gathers nothing."""
        ...

    def receive(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the regions of contributions to this rank's rows, one per reader, of local_grads and of local_bias_grads.

        Called once the backward is launched; closes the gather with which it began. Later work on this stream reads them complete.
        """
        ...

    def close(self) -> None:
        """Allow the writers to use the regions again; called once the kernels that read them are launched."""
        ...


class KVGather(Protocol):
    """All-gather of K/V that runs beside one kernel (Note [Fused call] of the interface of the kernels).

    Attributes:
        sm_margin: SMs that kernels must leave free: 0 between GPUs. Where ranks share one, those of the other ranks, and
            some for copies from a GPU to itself, which are kernels that would never begin behind one that waits for them.
    """

    sm_margin: int

    def reserve_gather(self, slot_bytes: int, remote_bytes: int, *, remote_shards: bool = False) -> None:
        """Reserve memory for the largest slot and remote rows of gathers to come, and shards of other nodes; equal on all ranks."""
        ...

    def remote_shard_buffer(
        self, turn: int, shape: tuple[int, int, int], rows: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        """Return one of two buffers, 0 or 1, for rows of another node, from which a gather of exactly them sends without a copy.

        Work that is enqueued later on this stream may overwrite its rows. shape is (batch, rows of the longest shard, key heads).

        Returns:
            `b rows hk (d + dv)`, keys and values side by side; contiguous when it has as many rows as the longest shard, else by
            batch element.
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
        """Start the gather of all ranks' k and v and return at once.

        Args:
            k: `b t hk d`, the rows that this rank holds; any strides with a contiguous last dim.
            v: `b t hk dv`, as k.
            gather_plan: The rows that each rank fetches.
            groups: Groups of key heads in which rows arrive; divides hk. The same on all ranks.
            what: Names the call in errors.
            key_bias: `b t`, of this rank's keys; sent with the first group of heads. All ranks pass one or none does.
            keep: Copy the remote rows into a tensor for the caller. Not with key_bias.
            grad_return: That of the same backward; it begins with the gather.
        """
        ...

    def saved_ready_flags(self, gather_plan: GatherPlan, groups: int) -> ReadyFlags | None:
        """Return the flags for rows that an earlier gather has saved: they are always raised."""
        ...

    def grad_return(
        self, shape: tuple[int, int, int], gather_plan: GatherPlan, what: str, *, biased: bool = False
    ) -> GradReturn:
        """Return regions for contributions (b, hk, d + dv) of one fused backward, which begins next; biased: and of key_bias."""
        ...


class Done:
    """The work of a post that moves nothing."""

    def wait(self) -> None:
        """Return."""


class Buffers:
    """Flat buffers reused in stream order across steps and calls, one per name, dtype, device and stream; they only grow."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device, int], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor in the named buffer; valid until the same name is taken again."""
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        key = (name, dtype, device, stream)
        size = math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            # it outlives the call: training cannot write into a tensor of inference mode
            with torch.inference_mode(False):
                flat = self._flat[key] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(tuple(shape))

    def num_bytes(self) -> int:
        """Return the bytes held now."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def clear(self) -> None:
        """Release all buffers."""
        self._flat.clear()


@dataclass(frozen=True)
class RingContext:
    """One rank's place in the ring: rank, transports and buffers of the loops.

    Attributes:
        transport: Moves bytes, within a node where there are several; between_nodes (None: transport) between them.
        budget: Bytes that gathered keys and their gradients may take per rank; the same on all ranks.
        nodes: The ranks of each node, in a ring of two levels (Note [Double ring] in ring_plan.py); None: one level.
        push_rate: Bytes per second of the slowest rank's push to another one; the same on all ranks. 0.0: unknown.
        hosted: Consecutive ranks that each process is.
        shared: By source, rows of other processes that the ranks of this one share.
    """

    rank: int
    world_size: int
    transport: Transport
    buffers: Buffers = field(default_factory=Buffers)
    budget: int = 0
    nodes: Nodes | None = None
    between_nodes: Transport | None = None
    push_rate: float = 0.0
    hosted: int = 1
    shared: dict[int, Any] = field(default_factory=dict)

    @property
    def slow_transport(self) -> Transport:
        """The transport between nodes: `between_nodes`, or the one transport where that serves both levels."""
        return self.transport if self.between_nodes is None else self.between_nodes
