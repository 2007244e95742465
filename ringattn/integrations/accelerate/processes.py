"""Rings of the processes that accelerate or torchrun started, and DataLoaders whose batches the ranks of a ring share."""

from __future__ import annotations

import os
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader

from ringattn.plan.options import resolve_integer
from ringattn.ring import Ring, default_world_size, make_ring_of

_SPLIT_BY_ACCELERATE = {
    "cp_size": "accelerate would take torch's context parallelism; leave it out, and pass {instead}",
    "sp_size": "accelerate would take DeepSpeed's sequence parallelism; leave it out, and pass {instead}",
    "tp_size": "layers would be split over ranks too, which is not supported beside a ring; leave it out",
}


def make_ring(context_parallel_size: int) -> Ring:
    """Return the ring of this process: as many consecutive processes as given share a sequence.

    Raises:
        ValueError: The size does not divide the number of processes.
    """
    size = resolve_integer("context_parallel_size", context_parallel_size)
    processes = default_world_size()
    if size < 1 or processes % size:
        raise ValueError(
            f"context_parallel_size must divide the number of processes, {processes}, got {size}; start a multiple of {size} "
            "processes, or choose a divisor"
        )
    return make_ring_of(size)


def check_parallelism(config: Any, instead: str) -> None:
    """Raise when a ParallelismConfig, or that of `accelerate launch`, makes accelerate split sequences or layers itself.

    Args:
        config: The ParallelismConfig; None: that of the environment, if there is one.
        instead: The argument that does the same with ringattn; `{size}` in it is replaced.
    """
    from_environment = config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    for name, why in _SPLIT_BY_ACCELERATE.items():
        size = getattr(config, name, 1)
        if from_environment:
            size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
        if size > 1:
            raise NotImplementedError(
                f"parallelism_config must leave {name} at 1, got {size}: {why.format(instead=instead.format(size=size))}"
            )


def replica_of(ring: Ring, world_size: int, process_index: int) -> tuple[int, int]:
    """Return the number of rings, and the index of this one."""
    replicas, rest = divmod(world_size, ring.world_size)
    index, rank = divmod(process_index, ring.world_size)
    if rest or rank != ring.rank:
        raise ValueError(
            f"a ring must be of consecutive processes that divide all of them, got {ring.world_size} of {world_size} and process "
            f"{process_index} as its rank {ring.rank}; make it of the innermost dimension of a device mesh"
        )
    return replicas, index


def share_batches(
    dataloader: DataLoader, ring: Ring, world_size: int, process_index: int, *, evenly: bool = False
) -> DataLoader:
    """Let the ranks of a ring read the same batches of a DataLoader that `Accelerator.prepare` made, changed in place.

    Batches are then distributed over rings instead of processes. `evenly` refuses samples that several rings cannot share evenly,
    some of which accelerate would read twice.
    """
    replicas, index = replica_of(ring, world_size, process_index)
    if world_size == 1 or ring.world_size == 1:
        return dataloader
    sampler = getattr(dataloader, "batch_sampler", None)
    if not isinstance(sampler, BatchSamplerShard):
        raise NotImplementedError(
            f"a dataset must have a length and be read by every rank, got batches from {type(sampler).__name__}; pass one with "
            "__len__ and __getitem__, and leave dispatch_batches out"
        )
    sampler.num_processes, sampler.process_index = replicas, index
    if replicas == 1:
        # a last batch that is short is then read as one process reads it
        sampler.even_batches = False
    elif evenly:
        samples = len(dataloader.dataset)  # pyright: ignore[reportArgumentType]
        if left := len(sampler.batch_sampler) % replicas or samples % (sampler.batch_size or 1):
            raise ValueError(
                f"samples to evaluate must be full batches for each of {replicas} rings, got {samples} in batches of "
                f"{sampler.batch_size} with {left} left over; drop those, or evaluate with one ring"
            )
    return dataloader
