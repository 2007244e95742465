"""Rings of the processes of accelerate or torchrun, DataLoaders that their ranks share, and a plugin for training loops."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ringattn.integrations.transformers import register
from ringattn.integrations.transformers.batch import RingCollator
from ringattn.plan.options import resolve_integer
from ringattn.ring import Ring, default_world_size, make_ring_of

_SPLIT_BY_ACCELERATE = {
    "cp_size": "accelerate would take torch's context parallelism; leave it out, and pass {instead}",
    "sp_size": "accelerate would take DeepSpeed's sequence parallelism; leave it out, and pass {instead}",
    "tp_size": "layers would be split over ranks too, which is not supported beside a ring; leave it out",
}


def make_ring(context_parallel_size: int) -> Ring:
    """Return the ring of this process: as many consecutive processes as given share a sequence."""
    size = resolve_integer("context_parallel_size", context_parallel_size)
    processes = default_world_size()
    if size < 1 or processes % size:
        raise ValueError(
            f"context_parallel_size must divide the number of processes, {processes}, got {size}; start a multiple of {size} "
            "processes, or choose a divisor"
        )
    return make_ring_of(size)


def check_parallelism(config: Any, instead: str) -> None:
    """Raise when a ParallelismConfig, or None that of `accelerate launch`, makes accelerate split sequences or layers itself.

    The message names the argument that does the same with ringattn, `instead`, in which `{size}` is replaced.
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


class StreamReader:
    """An Accelerator that lets each rank of a ring read a whole stream; other attributes are those of the Accelerator.

    Ranks of a ring compare the batches they have read (`shard_batch`). Several rings take turns of a batch each, or shards of a
    stream of `datasets`, and a last batch is filled up from the first ones, as accelerate does for processes.
    """

    def __init__(self, accelerator: Any, ring: Ring) -> None:
        self._accelerator, self._ring = accelerator, ring

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def prepare(self, dataloader: DataLoader) -> DataLoader:
        """Return what the Accelerator makes of a DataLoader."""
        if isinstance(dataloader, DataLoaderShard) or not isinstance(dataloader.dataset, IterableDataset):
            return self._accelerator.prepare(dataloader)
        if self.dispatch_batches:
            raise NotImplementedError(
                "dispatch_batches must be left out where ranks share a sequence, got True, by which each rank would get another "
                "part of a stream; every rank then reads the stream itself"
            )
        replicas, index = replica_of(self._ring, self.num_processes, self.process_index)
        made = prepare_data_loader(
            dataloader,
            self.device,
            num_processes=replicas,
            process_index=index,
            split_batches=self.split_batches,
            put_on_device=self.device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(made)
        return made


Uneven = Literal["twice", "last", "all", "refuse"]
"""What is done with samples that several rings cannot share evenly (`share_batches`)."""


class FilledBatches:
    """Batches of a sampler, after them the first one again until their number is a multiple of the rings.

    Attributes:
        samples: Those of the dataset, which the batches have once.
        rings: Number of rings.
        batch_size: Of the sampler, as is `drop_last`.
    """

    def __init__(self, sampler: BatchSampler, samples: int, rings: int) -> None:
        self.samples, self.rings = samples, rings
        self.batch_size, self.drop_last = sampler.batch_size, sampler.drop_last
        self._sampler = sampler

    def __len__(self) -> int:
        return -(-len(self._sampler) // self.rings) * self.rings

    def __iter__(self) -> Iterator[list[Any]]:
        first: list[Any] = []
        for batch in self._sampler:
            first = first or batch
            yield batch
        yield from [first] * (len(self) - len(self._sampler))

    def counts(self, step: int) -> list[int]:
        """Return the samples of the dataset that each ring has in a step; those of a batch that is read again are none."""
        begins = [(step * self.rings + ring) * self.batch_size for ring in range(self.rings)]
        return [max(0, min(self.batch_size, self.samples - begin)) for begin in begins]


def share_batches(
    dataloader: DataLoader, ring: Ring, world_size: int, process_index: int, *, uneven: Uneven = "twice"
) -> DataLoader:
    """Let the ranks of a ring read the same batches of a DataLoader that `Accelerator.prepare` made, changed in place.

    Batches are then distributed over rings instead of processes. Where several rings cannot share the samples evenly, accelerate
    reads some "twice". "last" leaves the last batches as one process reads them (`FilledBatches`), "all" lets every ring read all
    samples, as one process does, and "refuse" raises.
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
    elif uneven != "twice" and not isinstance(sampler.batch_sampler, FilledBatches):
        samples = len(dataloader.dataset)  # pyright: ignore[reportArgumentType]
        if sampler.drop_last:
            samples = min(samples, len(sampler.batch_sampler) * (sampler.batch_size or 1))
        left = len(sampler.batch_sampler) % replicas or samples % (sampler.batch_size or 1)
        once = sampler.batch_size and len(sampler.batch_sampler) == -(-samples // sampler.batch_size)
        if left and uneven == "all":
            warnings.warn(
                f"samples to evaluate should be full batches for each of {replicas} rings, got {samples} in batches of "
                f"{sampler.batch_size} with {left} left over; each ring evaluates all of them, so drop those to share the work",
                stacklevel=2,
            )
            sampler.num_processes, sampler.process_index, sampler.even_batches = 1, 0, False
        elif left and (uneven == "refuse" or not once):
            raise ValueError(
                f"samples to evaluate must be full batches for each of {replicas} rings, got {samples} in batches of "
                f"{sampler.batch_size} with {left} left over; drop those, or evaluate with one ring"
            )
        elif left:
            filled: Any = FilledBatches(sampler.batch_sampler, samples, replicas)
            sampler.batch_sampler, sampler.even_batches = filled, False
    return dataloader


class ContextParallel:
    """Context parallelism of an Accelerator; `context_parallel` makes one.

    Attributes:
        accelerator: As given.
        ring: The ranks that share a sequence.
        replicas: Number of rings, which read different batches.
    """

    def __init__(self, accelerator: Accelerator, ring: Ring, options: dict[str, Any]) -> None:
        self.accelerator, self.ring, self._options = accelerator, ring, options
        self.replicas, _ = replica_of(ring, accelerator.num_processes, accelerator.process_index)

    def prepare(self, *objects: Any) -> Any:
        """Return `Accelerator.prepare` of models, optimizers, schedulers and DataLoaders.

        A DataLoader then yields this rank's rows of each batch, as `shard_batch` returns them, and all ranks of a ring have the
        same samples. A scheduler makes one step per step of the optimizer, and not one per process.

        Raises:
            NotImplementedError: A dataset has no length, or dispatch_batches is set.
        """
        with self.ring.propagate_errors():
            prepared = self.accelerator.prepare(*(self._sharded(x) for x in objects))
            for x in prepared if len(objects) > 1 else (prepared,):
                if isinstance(x, DataLoader):
                    share_batches(x, self.ring, self.accelerator.num_processes, self.accelerator.process_index)
                elif isinstance(x, AcceleratedScheduler):
                    # as where a batch is split over processes: ranks of a ring are no more data
                    x.split_batches = True
        return prepared

    def _sharded(self, x: Any) -> Any:
        if isinstance(x, DataLoader):
            x = copy.copy(x)
            x.collate_fn = RingCollator(x.collate_fn, self.ring, **self._options)
        return x


def context_parallel(
    accelerator: Accelerator,
    size: int | None = None,
    *,
    ring: Ring | None = None,
    layout: str = "zigzag",
    shift_labels: bool | None = None,
    pooling: bool = False,
    balance: dict[str, Any] | None = None,
) -> ContextParallel:
    """Let the processes of an Accelerator share sequences; every process calls it once, before `prepare` of what it returns.

    Args:
        accelerator: Plain, with DDP, or with FSDP2.
        size: Number of consecutive processes that share a sequence; more processes are data parallel rings. Default: all.
        ring: The ranks that share a sequence, instead of a size.
        layout: See `shard_batch`, as for the next three.
        shift_labels: See `shard_batch`; False for encoders.
        pooling: Whether heads choose rows of the whole sequence.
        balance: The mask to balance for.

    Raises:
        ValueError: The size does not divide the number of processes, both a size and a ring are given, or ranks of the ring are
            not consecutive.
        NotImplementedError: The Accelerator has a ParallelismConfig that splits sequences or layers itself, or runs DeepSpeed or
            Megatron-LM.

    Example:
        >>> plugin = context_parallel(accelerator, size=2)  # doctest: +SKIP
        >>> model, optimizer, loader = plugin.prepare(model, optimizer, loader)  # doctest: +SKIP
    """
    register()
    check_parallelism(getattr(accelerator, "parallelism_config", None), "size={size} to context_parallel")
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise NotImplementedError(
            f"an Accelerator must be plain, with DDP or with FSDP2, got {accelerator.distributed_type.value}, which is not tested "
            "with a ring; launch with a config of FSDP"
        )
    if size is not None and ring is not None:
        raise ValueError(f"a ring must be given, or a size, got both, {size} and {ring!r}; drop one")
    if ring is None:
        ring = make_ring(accelerator.num_processes if size is None else size)
    options: dict[str, Any] = {"layout": layout, "shift_labels": shift_labels, "pooling": pooling, "balance": balance}
    return ContextParallel(accelerator, ring, options)
