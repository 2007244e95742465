"""Ring: the process group, the transport and the buffers that calls share.

Note [Names]
    A custom operator takes strings, and a live ProcessGroup at interpreter exit aborts gloo processes. So a group is kept
    by name and resolved at each use, and a Ring is found by its name in a table of weak references: it lives as long as
    a Ring, a Sharding or an autograd graph holds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringattn.kernels.registry import resolve_impl
from ringattn.plan.attention_spec import describe_record, parse
from ringattn.plan.expressions import Mask
from ringattn.plan.flops import register_flops
from ringattn.plan.layouts import shard_len
from ringattn.plan.options import resolve_flag, resolve_integer
from ringattn.plan.ring_plan import make_nodes
from ringattn.plan.sharding import Sharding, check_sharding, resolve_shards
from ringattn.ring_registry import RINGS, get_ring
from ringattn.transport.base import Buffers, RingContext, SelectedTransport, Transport
from ringattn.transport.call_order import CallMark, CallOrder
from ringattn.transport.consensus import GIVE_THE_SAME, RankConsensus
from ringattn.transport.copy_engine.peer_reads import PeerReads
from ringattn.transport.gpu_sharing import ranks_per_gpu, sm_margin_of
from ringattn.transport.local import LocalTransport
from ringattn.transport.lockstep import Lockstep, LockstepTransport
from ringattn.transport.process_group import ProcessGroupTransport, abort_communicators, resolve_group
from ringattn.transport.reduce.base import PartialReducer
from ringattn.transport.row_collectives import exchange_rows, gather_rows, post_gather
from ringattn.transport.select import TRANSPORTS, choose, choose_peer_reads, choose_reducer, group_by_host
from ringattn.transport.timeout import BoundedWait, EventPair, record_events

MOST_SHARDINGS = 64
"""Shardings that a ring keeps; beyond it all are dropped, and made again as they are asked for."""

CHECK_INPUTS = "RINGATTN_CHECK_INPUTS"
"""Environment variable: 1 switches `check_inputs` on in every ring that is not given it."""

VIRTUAL_BUDGET = 2**31
"""Default memory budget of a virtual rank on a GPU, in bytes."""
VIRTUAL_CTAS = 32
"""Default `nccl_max_ctas` where a process hosts several virtual ranks."""

_COUNTS: Counter[str] = Counter()
T = TypeVar("T")


@dataclass
class Agreement:
    """Agreement of the ranks of a ring about a call.

    Attributes:
        faster: This rank's `KernelSet.choose_faster`; afterwards that of the first rank that has one, on all ranks.
    """

    faster: tuple[str, str] | None = None


class Ring:
    """The ranks that share a sequence, with the transport and the buffers of their calls.

    Make it once and keep it. All ranks of the group make their rings in the same order and the same calls on them.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh (`mesh["cp"]`), or None for the default group; a ring of one
            rank when torch.distributed is not initialised and WORLD_SIZE, which torchrun sets, is at most 1. For sequences of
            its own on each rank pass a group of this rank alone: `torch.distributed.new_subgroups(group_size=1)[0]`.
        impl: Kernel set for calls that do not name one: "auto", "hopper", "torch", "portable" or "eager".
        transport: "copy_engine" (GPUs of one host that reach each other; with several nodes, within each), "process_group"
            (NCCL or gloo), or "auto": the copy engine where it can serve, decided by all ranks together at the first call
            with tensors on a GPU.
        memory_budget: Bytes per rank that gathered keys, and gradients to be returned, may take; None for a quarter of
            the memory that is free on the fullest GPU at the first call. The same on all ranks.
        save_gathered_kv: Keep the K/V that a fused forward has gathered until its backward has run, which then gathers nothing:
            less traffic for the memory of all other ranks' visible keys per layer, beyond the memory budget. A permission:
            stepwise calls, and calls with `key_bias`, or through `torch.compile` or selective checkpointing, keep nothing. The
            same on all ranks.
        timeout: Time that a rank waits for the others: when a call of a new shape is compared, for rows of the copy engine,
            and for replays of graphs (`synchronize`). Plain transfers of the process group obey the group's own timeout.
        nodes: Number of nodes, consecutive ranks sharing one, or "auto": by host name. With more than one the ring has two
            levels, and each shard crosses between nodes once per node.
        virtual_size: Compute as a ring of this many *virtual ranks*, which the processes host in equal, consecutive parts. Results
            and gradients have the same bits for every number of processes that divides it (docs/numerics.md), and gradients
            are deterministic. memory_budget then counts per virtual rank, and None is `VIRTUAL_BUDGET` on GPUs and 0 on CPUs,
            because free memory differs between machines. None: each process is one rank.
        check_inputs: Compare a digest of each whole tensor given to `Sharding.shard` and `shift_labels` between ranks: it must be
            the same on all. Each tensor costs a read of the device and a round of messages, so use it for the first steps. None:
            whether the environment variable RINGATTN_CHECK_INPUTS is 1. Traces, captures and workers of a DataLoader compare
            nothing. The same on all ranks.
        nccl_max_ctas: Thread blocks, and so SMs, that NCCL may use for a transfer, in communicators of the ring's own; more
            are faster and leave less to attention. None: the group's own communicator, for within and between nodes. "auto": 4,
            or 32 where a process hosts several virtual ranks, because their keys arrive before the first launch.

    Attributes:
        name: Name by which operators find this ring.
        rank: This process's place, 0 .. world_size - 1.
        world_size: Number of ranks: processes.
        virtual_size: Number of virtual ranks; world_size where the ring has none.
        is_virtual: Whether virtual_size was given.
        hosted: The virtual ranks of this process; range(rank, rank + 1) where the ring has none.
        nodes: The ranks of each node, virtual ones where there are some; None: one level.
        impl: Default kernel set.
        save_gathered_kv: As given.
        check_inputs: Whether `Sharding.shard` compares; may be set at the same place of the program on all ranks.
        generation: Number of times it was closed, or its transport was decided.
        call_order: The comparison of the order of calls between ranks; None: there are no others.

    Raises:
        ValueError: The mesh has more than one dimension, this process is not in the group, the transport or impl is unknown,
            the memory budget is negative, the nodes cannot hold equally many ranks each, the number of processes does not divide
            virtual_size, or an option is out of range.
        TypeError: The timeout is no timedelta, the group is something else, or what counts is no integer.
        RuntimeError: torch.distributed is not initialised, and WORLD_SIZE is more than 1.
        NotImplementedError: An option does not go with virtual_size.

    Example:
        >>> ring = Ring()                       # one process: no group needed
        >>> ring.rank, ring.world_size
        (0, 1)
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        impl: str = "auto",
        transport: str = "auto",
        memory_budget: int | None = None,
        save_gathered_kv: bool = False,
        timeout: timedelta = timedelta(minutes=5),
        nodes: int | str = 1,
        nccl_max_ctas: int | Literal["auto"] | None = "auto",
        virtual_size: int | None = None,
        check_inputs: bool | None = None,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {TRANSPORTS}, got {transport!r}; leave it out for 'auto'")
        impl, save_gathered_kv = resolve_impl(impl), resolve_flag("save_gathered_kv", save_gathered_kv)
        memory_budget = None if memory_budget is None else resolve_integer("memory_budget", memory_budget)
        if memory_budget is not None and memory_budget < 0:
            raise ValueError(f"memory_budget must be a number of bytes, got {memory_budget}; None for a default")
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}; timedelta(seconds=60) is a minute")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be longer than 0, got {timeout!r}; leave it out for 5 minutes")
        check_inputs = _resolve_check_inputs(check_inputs)
        group = _resolve_members(group)
        self._group_name = "" if group is None else str(group.group_name)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.is_virtual = virtual_size is not None
        self.virtual_size = self.world_size if virtual_size is None else resolve_integer("virtual_size", virtual_size)
        if self.is_virtual:
            self._check_virtual(transport, nodes, save_gathered_kv)
        self.impl = impl
        self.save_gathered_kv = save_gathered_kv
        self.check_inputs = check_inputs
        self.generation = 0
        if nccl_max_ctas == "auto":
            nccl_max_ctas = 4 if self.virtual_size == self.world_size else VIRTUAL_CTAS
        nccl_max_ctas = None if nccl_max_ctas is None else resolve_integer("nccl_max_ctas", nccl_max_ctas)
        if nccl_max_ctas is not None and nccl_max_ctas < 1:
            raise ValueError(f"nccl_max_ctas must be at least 1, got {nccl_max_ctas}; or None for no limit")
        if isinstance(nodes, str) and nodes != "auto":
            raise ValueError(f"nodes must be a number or 'auto', got {nodes!r}; 'auto' groups ranks by host name")
        levels = None if isinstance(nodes, str) else make_nodes(self.virtual_size, resolve_integer("nodes", nodes))
        # every rank counts its rings per group, so equal rings have equal names: checks that may fail on one rank come first
        self.name = f"{self._group_name}#{_COUNTS[self._group_name]}"
        _COUNTS[self._group_name] += 1
        alone = self.world_size == 1
        self._wanted_transport, self._memory_budget = transport, memory_budget
        self._has_transport = alone
        undecided = SelectedTransport(
            "undecided", f"transport={transport!r} is decided at the first call with tensors on a GPU"
        )
        self._choice = SelectedTransport("none", "one rank: every key is here already") if alone else undecided
        self._consensus = (
            None if alone else RankConsensus(self._group_name, self.rank, self.world_size, self.name, timeout)
        )
        if levels is None:
            hosts = [""]
            if self._consensus is not None:
                hosts = self._consensus.share("host", socket.gethostname(), "Ring(nodes='auto')")
            levels = group_by_host(hosts)
        levels = self.nodes = None if len(levels) == 1 else levels
        each = self.virtual_size // self.world_size
        self.hosted = range(self.rank * each, (self.rank + 1) * each)
        if each > 1:
            levels = None  # of virtual ranks, which one transport serves
        names = [] if alone else [f"{self.name}/ring"]
        if levels is not None:
            names.append(f"{self.name}/between nodes")
        self._links = [
            ProcessGroupTransport(self._group_name, self.rank, self.world_size, name, nccl_max_ctas) for name in names
        ]
        self.call_order = None if self._consensus is None else CallOrder(self._consensus, self._links[0])
        moves: Transport = LocalTransport() if alone else self._links[0]
        between = None if levels is None else self._links[1]
        self.context = RingContext(self.rank, self.world_size, moves, Buffers(), memory_budget or 0, levels, between)
        self._kv_buffers = Buffers()  # of kv_buffer, where the transport has none
        release = partial(abort_communicators, self._group_name, names)
        self._bounded_wait = BoundedWait(self.rank, self.world_size, self.name, timeout.total_seconds(), release)
        self._virtual_contexts: dict[torch.device, tuple[RingContext, ...]] = {}
        # by digest: a job with packed documents makes a new call in every step
        self._agreed: dict[bytes, tuple[str, str] | None] = {}
        self._warm: set[torch.device] = set()
        self._shardings: dict[Hashable, Sharding] = {}
        self._reducers: dict[torch.device, PartialReducer] = {}
        RINGS[self.name] = self
        # not at import: torch's FLOP counter imports triton
        register_flops()

    @property
    def transport(self) -> SelectedTransport:
        """The way in which shards move between the ranks, and the reason; prints as text."""
        return self._choice

    def __repr__(self) -> str:
        return f"Ring(rank={self.rank}, world_size={self.world_size}, impl={self.impl!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # copies of a model share its ring: a second one would meet the other ranks under the name of the first
        return _restore, (os.getpid(), *_place_of(self))

    def sharding(
        self,
        seq_len: int,
        layout: str = "zigzag",
        documents: Sequence[int] | Tensor | None = None,
        *,
        balance: dict[str, Any] | Mask | None = None,
        segments: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> Sharding:
        """Return the sharding of a sequence over the ring, seen from this rank; the same one for the same arguments.

        Args:
            seq_len: Tokens of the whole sequence, at least 1; nothing has to divide it.
            layout: "contiguous", "striped", "zigzag" (even work under a causal mask), "balanced" (even work under
                the mask given by `balance` and documents) or "segments" (a contiguous share of every segment).
            documents: Cumulative boundaries (0, ..., seq_len) of packed documents: attention stays inside them.
            balance: For "balanced": the mask to balance for, a dict of options of `ring_attention` or a mask of
                `ringattn.masks`; default {"causal": True}.
            segments: For "segments": tokens of each segment, as text and image, in the order in which they are joined.
            device: Device of `sharding.positions`; default the CPU.

        Raises:
            ValueError: An unknown layout, or boundaries or segments that do not fit; other ranks find it when they compare their
                next call.
            TypeError: The length, a boundary or a segment is no integer, or balance no dict.
            RuntimeError: torch.compile traces the call; without `fullgraph` it is then made beside the graph.
        """
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "a sharding must be made outside of compiled code, got a trace of it; pass it as an argument"
            )
        key = (seq_len, layout, balance, segments, device)
        # documents differ from batch to batch; 1 equals True
        usual = documents is None and type(seq_len) is int
        usual = usual and all(x is None or isinstance(x, (str, Mask)) for x in key[1:])
        if usual and (found := self._shardings.get(key)) is not None:
            return found
        with self.propagate_errors():
            size, boundaries, shards = resolve_shards(seq_len, layout, documents, balance, segments, self.virtual_size)
            sharding = Sharding(size, layout, shards, self.rank, boundaries, ring=self, device=device)
            # torch.compile reads what is there, and cannot make it: cached_property takes a lock
            _ = sharding.positions, sharding.shard_lens
        if usual:
            if len(self._shardings) >= MOST_SHARDINGS:
                self._shardings.clear()
            self._shardings[key] = sharding
        return sharding

    @property
    def failures(self) -> int:
        """Number of calls that failed here or on another rank, equal on all ranks; state that ranks cache in step depends on it."""
        return 0 if self._consensus is None else self._consensus.failures

    @contextmanager
    def consistent_call(self, call: str, tensors: Sequence[Tensor | None], seed: int = 0) -> Iterator[Agreement]:
        """Turn an exception raised inside, and any difference between ranks, into an error on every rank.

        The first call of each signature compares texts, and the seed (0 where seeds may differ between ranks); later ones cost
        a lookup. Dtypes, devices, requires_grad and shapes but for the row counts must be equal on all ranks.

        Yields:
            What the ranks agree on when the context ends.

        Raises:
            ValueError: Ranks differ, or another rank raised; the message names the ranks. An exception of this rank is raised
                as it is.
        """
        here = json.dumps(
            [None if x is None else (list(x.shape), str(x.dtype), x.device.type, x.requires_grad) for x in tensors]
        )
        signature = hashlib.blake2b((here + call).encode(), digest_size=16).digest()
        known = signature in self._agreed
        agreement = Agreement()
        try:
            yield agreement
        except Exception as error:
            if not known:
                self.raise_on_all_ranks(error)
            raise
        if known:
            agreement.faster = self._agreed[signature]
            return
        if self._consensus is not None:
            record = {**parse(call), "tensors": _without_rows(tensors), "nodes": self.nodes}
            record |= {"save_gathered_kv": self.save_gathered_kv, "dropout_seed": seed}
            found = self._consensus.compare_calls(record, describe_record(record), agreement.faster)
            agreement.faster = None if found is None else tuple(found)
            self.init_transport(next(x.device for x in tensors if x is not None))
        self._agreed[signature] = agreement.faster

    def mark_call(self, call: str, tensors: Sequence[Tensor | None]) -> CallMark:
        """Return the mark of a call's signature (Note [Call marks] of call_order.py); arguments as in `consistent_call`."""
        text = json.dumps([call, _without_rows(tensors)])
        digest = hashlib.blake2b(text.encode(), digest_size=7)
        return CallMark(
            int.from_bytes(digest.digest()), f"{describe_record(parse(call))}, digest {digest.hexdigest()[:6]}"
        )

    def raise_on_all_ranks(self, error: Exception) -> NoReturn:
        """Raise an error of this rank, and publish it: other ranks raise it at their next comparison, before their timeout."""
        if self._consensus is not None:
            self._consensus.publish_error(error)
        raise error

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Return a context that publishes an exception raised inside to the other ranks; in a trace, it is only raised here.

        The error takes the place of this rank's next comparison. A program that catches it on all ranks goes on in step. Errors
        that are equal on all ranks cost none of them a later call.
        """
        if torch.compiler.is_compiling() or self._consensus is None:
            return nullcontext()
        return self._consensus.publishing_errors()

    def assert_equal_across_ranks(self, what: str, text: str, doing: str = "", fix: str = GIVE_THE_SAME) -> None:
        """Raise ValueError on every rank unless a text, named in messages, is equal on all ranks, each of which calls this.

        Args:
            what: Meaning of the text, for the message.
            text: Text that must be equal.
            doing: The call that this rank makes, for messages of ranks that make another one; default what and text.
            fix: How to correct a difference, for the message.
        """
        if self._consensus is not None:
            self._consensus.assert_equal_across_ranks(what, text, doing, fix)

    def assert_equal_once(self, what: str, text: str, doing: str = "") -> None:
        """Do `assert_equal_across_ranks` at the first call with a text; later ones cost a set lookup."""
        known = hashlib.blake2b(f"{what}: {text}".encode(), digest_size=16).digest()
        if known not in self._agreed:
            self.assert_equal_across_ranks(what, text, doing)
            self._agreed[known] = None

    def init_transport(self, device: torch.device) -> None:
        """Decide the transport, as the first attention call does; every rank calls it when the ranks have agreed on a call.

        Raises:
            ValueError: The ranks have different memory budgets; raised on every rank.
            RuntimeError: `transport="copy_engine"` was asked for and can not serve; raised on every rank.
        """
        self._init_transport(device)
        if device not in self._warm:
            for link in self._links[self._choice.name == "copy_engine" :]:
                link.prepare(device)
            self._warm.add(device)

    def contexts(self, device: torch.device) -> tuple[RingContext, ...]:
        """Return the places of this process in the ring, once the transport is decided: one, or one per virtual rank."""
        if not self.is_virtual or (len(self.hosted) == 1 and self._choice.name == "copy_engine"):
            return (self.context,)
        found = self._virtual_contexts.get(device)
        if found is None:
            link = self._links[0] if self._links else None
            margin, budget = sm_margin_of(device, ranks_per_gpu()), self._virtual_budget(device) or 0
            ranks = Lockstep(self.virtual_size, self.hosted, device, link, sm_margin=margin)
            place: dict[str, Any] = {"budget": budget, "nodes": self.nodes, "hosted": len(self.hosted), "shared": {}}
            found = self._virtual_contexts[device] = tuple(
                RingContext(rank, self.virtual_size, LockstepTransport(ranks, rank), **place) for rank in self.hosted
            )
        return found

    def run_ranks(self, device: torch.device, body: Callable[[int], T]) -> list[T]:
        """Run a body for each rank that this process is, with its index in `contexts`, and return the results in their order.

        The bodies of virtual ranks take turns where they post (`transport/lockstep.py`).
        """
        transport = self.contexts(device)[0].transport
        return transport.ranks.run(body) if isinstance(transport, LockstepTransport) else [body(0)]

    def _virtual_budget(self, device: torch.device) -> int | None:
        """Return the memory budget of a call's virtual ranks, the same for every number of processes; else that given."""
        if not self.is_virtual or self._memory_budget is not None:
            return self._memory_budget
        return VIRTUAL_BUDGET if device.type == "cuda" else 0

    def _check_virtual(self, transport: str, nodes: int | str, save_gathered_kv: bool) -> None:
        if self.virtual_size < 1 or self.virtual_size % self.world_size:
            raise ValueError(
                f"virtual_size must be a multiple of the {self.world_size} ranks of the ring, got {self.virtual_size}; pass a "
                "number that every number of processes of the job divides"
            )
        if nodes == "auto":
            raise NotImplementedError(
                "nodes must be a number with virtual_size, got 'auto', which depends on the hosts; pass that of virtual ranks"
            )
        if save_gathered_kv:
            raise NotImplementedError("save_gathered_kv must be False with virtual_size, got True; leave it out")
        if transport == "copy_engine" and self.virtual_size > self.world_size:
            raise NotImplementedError(
                "transport must be 'auto' or 'process_group' where a process hosts "
                f"{self.virtual_size // self.world_size} virtual ranks, got 'copy_engine'; leave it out"
            )

    def ordered_sum(self, shares: Sequence[Tensor]) -> Tensor:
        """Return on rank 0 the sum of all virtual ranks' tensors in their order, and zeros elsewhere.

        So the sum over processes has the same bits however many there are. Every rank calls it with the tensors of its virtual
        ranks, which have one shape and dtype.
        """
        mine = torch.stack(list(shares))
        total = sum_in_order(torch.cat(self.gather(mine, 0, [len(shares)] * self.world_size)))
        return total if self.rank == 0 else torch.zeros_like(total)

    def all_reduce_min(self, number: int) -> int:
        """Return the least of all ranks' numbers; every rank must call it. ValueError if another rank's call has failed."""
        if self._consensus is None:
            return number
        return min(self._consensus.share("number", number, "the least of all ranks' numbers"))

    def gather(self, x: Tensor, dim: int, lengths: Sequence[int]) -> list[Tensor]:
        """Return every rank's tensor, in rank order; differentiable (gradients are summed over ranks).

        The tensor of rank r is lengths[r] long along dim, and they are alike otherwise. Every rank must call it.
        """
        if len(lengths) == 1:
            return [x.clone()]
        return gather_rows(x, dim, lengths, self.rank, self._group_name)

    def post_gather(self, x: Tensor, out: Tensor) -> Callable[[], object]:
        """Begin an all-gather and return a function that waits for it; not differentiable. Every rank makes the same call.

        Args:
            x: Contiguous, the same shape and dtype on every rank; unchanged until the wait.
            out: `world_size, *x.shape`, contiguous, the dtype of x; written. On a GPU the transfer begins when the current stream
                has come here, beside what is enqueued later; the wait is one of the current stream at that time.
        """
        return post_gather(x, out, self.rank, self._group_name)

    def peer_reads(self, device: torch.device) -> PeerReads | str:
        """Return reads of constant tensors of all ranks by copy engine, or why there are none. Every rank must call it."""
        self.init_transport(device)
        return choose_peer_reads(self._choice, self.context)

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Return the rows that all ranks send to this one, in rank order; differentiable. Every rank must call it.

        The first sends[0] rows of x, in dim 0, go to rank 0, and so on; receives[r] rows come from rank r.
        """
        return x.clone() if self.world_size == 1 else exchange_rows(x, sends, receives, self.rank, self._group_name)

    def sum(self, x: Tensor) -> Tensor:
        """Return x overwritten with the sum of all ranks' contiguous x, the same bits on every rank; not differentiable.

        x has one shape and dtype on all ranks, each of which must call it. Exact where at most one rank has a nonzero number.
        """
        if self.world_size > 1 and x.numel():
            dist.all_reduce(x, group=resolve_group(self._group_name, (self.rank, self.world_size)))
        return x

    def kv_buffer(
        self,
        sharding: Sharding,
        batch: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        dtype: torch.dtype,
        name: str,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return K and V tensors in the ring's own memory: attention calls send them from there without packing them.

        Calls with `key_bias` pack them like others. The buffer belongs to the name until that is asked for again; work enqueued
        after that may overwrite it. A backward reads its keys again, so use one name per layer: writing before the backward
        has run changes what it reads. Every rank makes the same calls, and passes either all of both tensors or neither of
        them to an attention call. Without the copy engine it is plain memory.

        Args:
            sharding: The sharding of the keys.
            batch: Batch elements.
            kv_heads: Key heads.
            head_dim: Of the keys.
            v_head_dim: Of the values; default head_dim.
            dtype: Of both.
            name: Name of the buffer in this ring.
            device: Default the current GPU, or the CPU where there is none.

        Returns:
            K `b t hk d` and v `b t hk dv`, this rank's rows, uninitialised; the last dim is contiguous.
        """
        with self.propagate_errors():
            check_sharding(sharding)
            if device is None:
                device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            device = torch.device(device)
            dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
            rows, mine = max(map(shard_len, sharding.shards)), sharding.shard_len
        self._init_transport(device)
        found = None
        if device.type == "cuda":
            found = self.context.transport.zero_copy_kv(name, batch, rows, mine, kv_heads, dims, dtype)
        if found is not None:
            k, v = found
        else:
            with self.propagate_errors():
                whole = self._kv_buffers.take(name, (batch, rows, kv_heads, sum(dims)), dtype, device)
            k, v = whole[:, :mine, :, :head_dim], whole[:, :mine, :, head_dim:]
        # fresh tensors each time: what autograd ties to them in one step is not there in the next
        return k.detach(), v.detach()

    def partial_reducer(self, device: torch.device | str) -> PartialReducer:
        """Return the reducer of partials across ranks, made at the first call for a device; all ranks make this call.

        Args:
            device: Device of the partials, or addends, or columns.

        Returns:
            The reducer; `print` names it, and the reason. It lives until the ring is closed.

        Raises:
            RuntimeError: `transport="copy_engine"` was asked for and can not serve; raised on every rank.
        """
        device = _with_index(device)
        found = self._reducers.get(device)
        if found is None:
            if self._consensus is not None:
                self._init_transport(device)
            found = choose_reducer(device, self._choice, self._consensus, self.context, self._bounded_wait)
            self._reducers[device] = found
        return found

    def synchronize(
        self, device: torch.device | str, *, events: EventPair | None = None, what: str = "a replay"
    ) -> None:
        """Wait, on the host, for the work of the current stream of a device, with the ring's timeout.

        For replays of CUDA graphs that hold calls of this ring: torch's watchdog does not know the collectives in a graph, so
        a host that blocks behind a replay whose peer has died (`torch.cuda.synchronize()`, `.item()`) may block for ever. Call
        it after a replay, and before blocking calls.

        Args:
            device: Device of the work; on a CPU calls have ended when they return.
            events: Begin and end of the work, from when on time counts; None: all work of the current stream, and now.
            what: Names the work in the message.

        Raises:
            RuntimeError: It has not ended within the ring's `timeout` and 2 s of its beginning, so a rank is missing; or one
                was missing in an earlier call, and results since then are NaN. The message names ranks. The ring can not be used
                any more then, and with NCCL the process group can not, either.

        Example:
            >>> graph.replay()  # doctest: +SKIP
            >>> ring.synchronize("cuda", what=f"decoding step {number}")  # doctest: +SKIP
            >>> token = tokens.tolist()  # doctest: +SKIP
        """
        device = _with_index(device)
        if events is None and device.type == "cuda":
            events = record_events(device)
        ended = events is None or self._bounded_wait.wait(events)
        # a reducer and a transport that timed out by themselves name more
        reducer = self._reducers.get(device)
        if reducer is not None:
            reducer.check()
        self.context.transport.check()
        if not ended:
            self._bounded_wait.raise_timeout(what, device)

    def close(self) -> None:
        """Release buffers and NCCL communicators; every rank must call it, when its calls are over.

        The ring may be used again; they are then made anew.
        """
        self.generation += 1
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        self.context.transport.close()
        self.context.buffers.clear()
        self._kv_buffers.clear()
        self._agreed.clear()
        self._virtual_contexts.clear()
        self._warm.clear()
        for link in self._links:
            link.close()

    def _init_transport(self, device: torch.device) -> None:
        if self._has_transport or (device.type != "cuda" and self._wanted_transport == "auto"):
            return
        assert self._consensus is not None, "a ring of one rank is settled from the start"
        # virtual ranks of one process share a GPU
        wanted = "process_group" if self.virtual_size > self.world_size else self._wanted_transport
        moves, self._choice, budget, rate = choose(
            wanted, device, self._consensus, self._virtual_budget(device), self._links[0], self.context.nodes
        )
        if self.save_gathered_kv and (self._choice.name != "copy_engine" or self.context.nodes is not None):
            self._choice = replace(self._choice, why=f"{self._choice.why}; save_gathered_kv finds nothing to keep")
        between = self.context.between_nodes
        if between is not None:
            between = moves.watch_transport(between)
        self.context = replace(self.context, transport=moves, between_nodes=between, budget=budget, push_rate=rate)
        self.generation += 1
        self._has_transport = True


def sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the sum of tensors, added one by one."""
    first, *rest = parts
    total = first.clone()
    for part in rest:
        total.add_(part)
    return total


class RingPlace:
    """A ring in another process than its own, as the spawned worker of a DataLoader: it makes shardings and does not communicate.

    Its shardings find the ring when they are sent back to the process that holds it. Attributes are those of `Ring`.
    """

    check_inputs = False

    def __init__(self, name: str, rank: int, world_size: int, impl: str, virtual_size: int | None = None) -> None:
        self.name, self.rank, self.world_size, self.impl = name, rank, world_size, impl
        self.is_virtual, self.virtual_size = virtual_size is not None, virtual_size or world_size
        self._shardings: dict[Hashable, Sharding] = {}

    sharding = Ring.sharding

    def __repr__(self) -> str:
        return f"RingPlace(rank={self.rank}, world_size={self.world_size})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (-1, *_place_of(self))

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: an error is raised where the result is waited for."""
        return nullcontext()

    def raise_on_all_ranks(self, error: Exception) -> NoReturn:
        """Raise an error of this process."""
        raise error

    def __getattr__(self, name: str) -> NoReturn:
        """Raise: other attributes need the ring."""
        raise AttributeError(
            f"a ring must be used by the process that made it, got {name!r} of one in another process, which can make shardings "
            "only; use it in that process"
        )


def _place_of(ring: Ring | RingPlace) -> tuple[Any, ...]:
    return ring.name, ring.rank, ring.world_size, ring.impl, ring.virtual_size if ring.is_virtual else None


def _restore(process: int, name: str, *place: Any) -> Ring | RingPlace:
    """Return the ring of a name, or in another process than the one that pickled it its place."""
    if name in RINGS or process == os.getpid():
        return get_ring(name)
    return RingPlace(name, *place)


def default_world_size() -> int:
    """Return the ranks of the default group; 1 when torch.distributed is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def make_ring_of(size: int) -> Ring:
    """Return the ring of this process; `size`, which divides the ranks of the default group, consecutive ones are a ring."""
    ranks = default_world_size()
    if size == ranks:
        return Ring()
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    return Ring(init_device_mesh(device, (ranks // size, size), mesh_dim_names=("dp", "cp"))["cp"])


def _with_index(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return (
        torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
    )


def _resolve_check_inputs(check_inputs: bool | None) -> bool:
    if check_inputs is not None:
        return resolve_flag("check_inputs", check_inputs)
    value = os.environ.get(CHECK_INPUTS, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{CHECK_INPUTS} must be 0 or 1, got {value!r}; unset it to compare no inputs")
    return value == "1"


def _resolve_members(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a ring; None where torch.distributed is not initialised."""
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"a mesh must have one dimension, got {group.ndim}; pass a slice such as mesh['cp']")
        is_member = group.get_coordinate() is not None
        group = group.get_group() if is_member else None
    if not is_member:
        raise ValueError(
            "this process must be a member of the group, got a group without it; make the Ring on members only"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    processes = os.environ.get("WORLD_SIZE", "1")
    if group is None and processes not in ("", "0", "1"):
        raise RuntimeError(
            f"Ring() must find a process group where WORLD_SIZE is {processes}, got none; call "
            "torch.distributed.init_process_group() before, and where each rank has sequences of its own, pass the group of this "
            "rank alone: Ring(torch.distributed.new_subgroups(group_size=1)[0])"
        )
    return group


def check_ring(ring: Any) -> None:
    """Raise TypeError for what is no Ring: it has no ranks on which an error could be raised."""
    if not isinstance(ring, Ring):
        raise TypeError(f"ring must be a Ring, got {type(ring).__name__}; make one with ringattn.Ring()")


def _without_rows(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Describe tensors without their row counts, which differ by rank: dim 1 of `b s h d`, `b t c` and `b t`, dim 2 of bias."""
    result: list[Any] = []
    for x in tensors:
        if x is None:
            result.append(None)
            continue
        shape: list[Any] = list(x.shape)
        index = len(result)
        if x.dim() in (2, 4) or (x.dim(), index) == (3, 1):  # the only weights, k_up and v_up, have three dims too
            shape[2 if x.dim() == 4 and index >= 3 else 1] = "rows"
        result.append([shape, str(x.dtype), x.device.type, x.requires_grad])
    return result
