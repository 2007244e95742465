"""Choice of a ring's transport, made by all ranks together, and the memory that gathered keys may take."""

from __future__ import annotations

import importlib.util
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringattn.plan.ring_plan import Nodes
from ringattn.transport.base import RingContext, SelectedTransport, Transport
from ringattn.transport.consensus import RankConsensus
from ringattn.transport.copy_engine.peer_reads import PeerReads
from ringattn.transport.copy_engine.symmetric_memory import Memory
from ringattn.transport.gpu_sharing import SHARE, may_share_gpus, ranks_per_gpu, sm_margin_of
from ringattn.transport.process_group import name_part
from ringattn.transport.reduce.base import LocalReducer, PartialReducer, ProcessGroupReducer
from ringattn.transport.timeout import BoundedWait

PROBE_BYTES = 16 * 2**20
"""Size of the push that measures a link: large enough for full speed."""


def look(device: torch.device) -> dict[str, Any]:
    """Return the facts of this rank that decide whether a copy engine can serve, as JSON has them."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    missing = None
    if device.type != "cuda":
        missing = f"its tensors are in {device.type} memory"
    elif torch.version.hip is not None:
        missing = "it has an AMD GPU"
    uuid = str(torch.cuda.get_device_properties(device).uuid) if missing is None else None
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return {"host": host, "missing": missing, "uuid": uuid, "free": free, "ranks": ranks_per_gpu()}


def find_obstacle(
    rank: int, device: torch.device, found: Sequence[dict[str, Any]], nodes: Nodes | None = None
) -> str | None:
    """Return the reason why the GPUs of a rank's node can not reach each other, by the results of `look` of all ranks, or None."""
    for peer, other in enumerate(found):
        if other["missing"] is not None:
            return f"ring rank {peer} can not take part: {other['missing']}"
    mates = node_of(rank, nodes, len(found))
    if len(mates) == 1:
        return "a node of one rank has no peers within"
    for peer in mates:
        if found[peer]["host"] != found[rank]["host"]:
            hint = '; pass nodes="auto" for a ring of several hosts' if nodes is None else ""
            return f"ring ranks {rank} and {peer} are on different hosts{hint}"
    here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    mine = here.get(found[rank]["uuid"])
    for peer in mates:
        if peer == rank:
            continue
        theirs = here.get(found[peer]["uuid"])
        if theirs is None:
            return f"ring rank {rank} does not see the GPU of ring rank {peer}; do not hide it by CUDA_VISIBLE_DEVICES"
        if theirs == mine and not may_share_gpus():
            return f"ring ranks {rank} and {peer} share a GPU; {SHARE}=1 allows it, to try a ring on one GPU"
        if theirs != mine and not torch.cuda.can_device_access_peer(device, theirs):
            return f"the GPU of ring rank {rank} has no access to that of ring rank {peer}"
    return None


def most_on_one_gpu(found: Sequence[dict[str, Any]]) -> int:
    """Return the number of ranks on the fullest GPU, of this ring or of all, by the results of `look` on every rank."""
    here = Counter((one["host"], one["uuid"]) for one in found)
    return max(*here.values(), *(one["ranks"] for one in found))


def group_by_host(hosts: Sequence[str]) -> Nodes:
    """Return the nodes of a ring: ranks of one host share a node, in the order in which hosts appear.

    Example:
        >>> group_by_host(["a", "a", "b", "b"])
        ((0, 1), (2, 3))
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = {host: len(ranks) for host, ranks in nodes.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"nodes='auto' must find equally many ring ranks on every host, got {sizes}; pass nodes=1 for a ring of one level"
        )
    return tuple(tuple(ranks) for ranks in nodes.values())


def node_of(rank: int, nodes: Nodes | None, world_size: int) -> tuple[int, ...]:
    """Return the ranks that share a node with a rank, itself among them, in the order of their places.

    Example:
        >>> node_of(2, ((0, 1), (2, 3)), 4)
        (2, 3)
    """
    return tuple(range(world_size)) if nodes is None else next(node for node in nodes if rank in node)


def measure_push(
    place: int, size: int, time_copy: Callable[[int, int, int], float], memory: Memory, consensus: RankConsensus
) -> float:
    """Return the bytes per second of the slowest rank's push to the next one while all do; the same on all ranks."""
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=memory.device)
    region = memory.region(PROBE_BYTES, "probe")
    seconds = time_copy(region.addresses[(place + 1) % size], source.data_ptr(), PROBE_BYTES)
    # the region must outlive the pushes of all ranks
    memory.barrier("probe ends")
    return min(consensus.share("bytes per second", PROBE_BYTES / seconds))


class _Offer(NamedTuple):
    transport: Transport
    why: str
    rate: float


def _offer_copy_engine(
    device: torch.device, consensus: RankConsensus, nodes: Nodes | None, found: Sequence[dict[str, Any]]
) -> _Offer | str:
    rank, world_size, timeout = consensus.rank, consensus.world_size, consensus.timeout
    obstacle = consensus.first("obstacle", find_obstacle(rank, device, found, nodes))
    if obstacle is not None:
        return obstacle
    from ringattn.transport.copy_engine.cuda_driver import CudaStreams
    from ringattn.transport.copy_engine.symmetric_memory import SymmetricMemory
    from ringattn.transport.copy_engine.transport import CopyEngineTransport

    streams, error = None, None
    try:
        streams = CudaStreams(device)
    except RuntimeError as refusal:
        error = f"ring rank {rank}: {refusal}"
    # one rank may have a broken installation: all must be ready before memory is made
    obstacle = consensus.first("error", error)
    if obstacle is not None:
        return obstacle
    assert streams is not None, "all ranks have streams"
    mates, within, together = node_of(rank, nodes, world_size), consensus.group_name, consensus
    why = f"the {world_size} GPUs of the ring are on one host and reach each other"
    if nodes is not None:
        why = f"the {world_size // len(nodes)} GPUs of each of {len(nodes)} nodes reach each other"
        number = mates.index(rank)
        within = f"ringattn/{consensus.name}/node {nodes.index(mates)}"
        name_part(within, consensus.group_name, number, len(mates))
        together = RankConsensus(consensus.group_name, number, len(mates), within, timeout)
    memory = SymmetricMemory(within, together, device, streams.synchronize)
    rate = measure_push(mates.index(rank), len(mates), streams.time_copy, memory, consensus)
    sm_margin = sm_margin_of(device, most_on_one_gpu(found))
    transport = CopyEngineTransport(
        rank, mates, consensus.name, streams, memory, timeout.total_seconds(), sm_margin=sm_margin
    )
    transport.watchdog.start()
    return _Offer(transport, why, rate)


class TransportRow(NamedTuple):
    """A transport: its name, what a ring must have for it, and a function that makes it on all ranks, or says what is missing.

    The function takes the device, the consensus and the nodes of the ring, and the results of `look` of all ranks.
    """

    name: str
    needs: str
    offer: Callable[[torch.device, RankConsensus, Nodes | None, Sequence[dict[str, Any]]], _Offer | str]


_TABLE = (TransportRow("copy_engine", "GPUs of one host that reach each other, in every node", _offer_copy_engine),)
"""Tried in order; a ring that no row serves takes the process group."""
TRANSPORTS = ("auto", *(row.name for row in _TABLE), "process_group")


def choose(
    wanted: str,
    device: torch.device,
    consensus: RankConsensus,
    memory_budget: int | None,
    fallback: Transport,
    nodes: Nodes | None = None,
) -> tuple[Transport, SelectedTransport, int, float]:
    """Choose the transport of a ring; every rank calls it. Errors are raised on every rank.

    wanted is one of `TRANSPORTS`, fallback the transport over the process group. memory_budget is in bytes; None for a quarter of
    the free memory of the fullest device. Where nodes are given, the transport serves within this rank's.

    Returns:
        The transport, the reason, the bytes that gathered keys may take per rank, and `RingContext.push_rate`.
    """
    if wanted == "process_group":
        return fallback, SelectedTransport("process_group", "asked for"), memory_budget or 0, 0.0
    found = consensus.share("place", look(device) | {"memory_budget": memory_budget})
    budgets = [other["memory_budget"] for other in found]
    if len(set(budgets)) > 1:
        raise ValueError(f"memory_budget must be the same on all ring ranks, got {budgets} by rank; pass one number")
    budget = memory_budget if memory_budget is not None else min(other["free"] for other in found) // 4
    missing: list[str] = []
    for row in _TABLE:
        if wanted not in ("auto", row.name):
            continue
        offer = row.offer(device, consensus, nodes, found)
        if isinstance(offer, _Offer):
            why = "asked for" if wanted == row.name else offer.why
            selected = SelectedTransport(row.name, f"{why}, {offer.rate / 1e9:.0f} GB/s")
            return offer.transport, selected, budget, offer.rate
        if wanted == row.name:
            raise RuntimeError(
                f"transport {row.name!r} must have {row.needs}, got: {offer}; use transport='auto' or 'process_group'"
            )
        missing.append(offer)
    return fallback, SelectedTransport("process_group", "; ".join(missing)), budget, 0.0


def choose_reducer(
    device: torch.device,
    choice: SelectedTransport,
    consensus: RankConsensus | None,
    context: RingContext,
    bounded_wait: BoundedWait,
) -> PartialReducer:
    """Choose the reducer of a ring for partials on a device, after its transport. Every rank calls it."""
    if consensus is None:
        return LocalReducer()
    why = f"the partials are in {device.type} memory" if choice.name == "undecided" else str(choice)
    if choice.name == "copy_engine" and context.nodes is not None:
        why = f"partials cross between nodes ({why})"
    elif choice.name == "copy_engine" and device.type == "cuda":
        from ringattn.transport.copy_engine.transport import CopyEngineTransport

        missing = None if importlib.util.find_spec("triton") else f"ring rank {consensus.rank} has no triton"
        missing = consensus.first("missing for a reducer", missing)
        if missing is None:
            assert isinstance(context.transport, CopyEngineTransport), "the copy engine was chosen"
            return context.transport.one_shot(consensus, why)
        why = missing
    return ProcessGroupReducer(consensus, bounded_wait, why)


def choose_peer_reads(choice: SelectedTransport, context: RingContext) -> PeerReads | str:
    """Return reads of constant tensors of all ranks, or why a ring with this transport has none; the same on all ranks."""
    if context.nodes is not None:
        return f"a ring of {len(context.nodes)} nodes"
    if choice.name != "copy_engine":
        return str(choice)
    from ringattn.transport.copy_engine.transport import CopyEngineTransport

    assert isinstance(context.transport, CopyEngineTransport), "the copy engine was chosen"
    return context.transport.peer_reads()
