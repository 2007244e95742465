"""A plugin for training loops with accelerate, whose batches are whole and whose models are those of transformers."""

from __future__ import annotations

import copy
from typing import Any

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from ringattn.integrations.accelerate.processes import check_parallelism, make_ring, replica_of, share_batches
from ringattn.integrations.transformers import register
from ringattn.integrations.transformers.batch import RingCollator
from ringattn.ring import Ring


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
    shift_labels: bool = True,
    pooling: bool = False,
    balance: dict[str, Any] | None = None,
) -> ContextParallel:
    """Let the processes of an Accelerator share sequences; every process calls it once, before `prepare` of what it returns.

    Args:
        accelerator: Plain, with DDP, or with FSDP2.
        size: Number of consecutive processes that share a sequence; more processes are data parallel rings. Default: all.
        ring: The ranks that share a sequence, instead of a size.
        layout: See `shard_batch`, as for the next three.
        shift_labels: Whether models predict the next token; False for encoders.
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
