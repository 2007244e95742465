"""Rings as TRL's processes.

Note [A ring is one process of TRL]
    Trainers of TRL gather rewards, lengths and logs of all processes, compute statistics of groups from them, and take the slice of
    their process. Ranks of a ring have the same samples, so each would be counted several times, and groups of rollouts would not
    be adjacent. Inside of `rings_as_processes`, the trainer's accelerator and the functions of accelerate that the module of TRL
    has imported therefore gather from the first rank of each ring, and number the rings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object, recursively_apply
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ringattn.integrations.accelerate.context_parallel import replica_of, share_batches
from ringattn.integrations.transformers.trainer import RingTrainerMixin, shard_calls
from ringattn.ring import Ring


class RingAccelerator:
    """An Accelerator whose processes are rings; other attributes are those of the Accelerator."""

    def __init__(self, accelerator: Any, ring: Ring) -> None:
        self._accelerator, self._ring = accelerator, ring
        self._place = accelerator.num_processes, accelerator.process_index
        self.num_processes, self.process_index = replica_of(ring, *self._place)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, data: Any) -> Any:
        """Return the tensors of all rings, concatenated in their order; scalars are one element each."""

        def gather(x: Tensor) -> Tensor:
            every = self._accelerator.gather(x.reshape(x.shape or (1,)))
            return every.unflatten(0, (self.num_processes, self._ring.world_size, -1))[:, 0].flatten(0, 1)

        return recursively_apply(gather, data)

    gather_for_metrics = gather
    """The same: rings do not get samples that fill a last batch, or their reader drops these."""

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        """Return the sum or the mean over rings."""
        every = self.gather(x[None])
        return every.sum(0) if reduction == "sum" else every.mean(0)

    def gather_object(self, items: list[Any]) -> list[Any]:
        """Return the items of all rings, in their order."""
        return [item for part in gather_object([items])[:: self._ring.world_size] for item in part]

    def prepare(self, dataloader: DataLoader) -> DataLoader:
        """Return the batches of this ring."""
        return share_batches(self._accelerator.prepare(dataloader), self._ring, *self._place)


@contextmanager
def rings_as_processes(trainer: RingTrainerMixin) -> Iterator[None]:
    """Let a trainer, and the module of TRL that its class is from, see rings in place of processes."""
    if trainer.ring.world_size == 1 or isinstance(trainer.accelerator, RingAccelerator):
        yield
        return
    module = next(sys.modules[x.__module__] for x in type(trainer).__mro__ if x.__module__.startswith("trl."))
    rings, before = RingAccelerator(trainer.accelerator, trainer.ring), trainer.accelerator
    functions = {name: vars(module)[name] for name in ("gather", "gather_object") if name in vars(module)}
    trainer.accelerator = rings
    for name in functions:
        setattr(module, name, getattr(rings, name))
    try:
        yield
    finally:
        trainer.accelerator = before
        for name, function in functions.items():
            setattr(module, name, function)


class RingReferenceMixin(RingTrainerMixin):
    """Trainer with a policy and a reference, whose log-probabilities of tokens are gathered over the ring."""

    loss_by_model = False
    counts_whole_batches = True
    ref_model: Any
    uneven_evaluation = "all"  # metrics of a batch are gathered from all processes
    _max_positions = None  # read while TRL's trainer is made

    def modules_with_whole_outputs(self) -> list[nn.Module]:
        """Return the policy and the reference model."""
        reference = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        return [model for model in (self.model, reference) if isinstance(model, nn.Module)]

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if self.ring.world_size > 1 and isinstance(dataset, Dataset) and not dataset.cache_files:
            raise ValueError(
                "a dataset must be on disk where precompute_ref_log_probs is set and ranks share a sequence, got one in memory, "
                "whose numbers TRL would not find on other ranks; save_to_disk where all ranks see it, then load_from_disk"
            )
        # while the trainer is made, no call is sharded yet
        modules = [] if hasattr(self, "_whole_outputs") else self.modules_with_whole_outputs()
        handles = [handle for module in modules for handle in shard_calls(module, self.shard)]
        try:
            with rings_as_processes(self):
                return super()._precompute_ref_logps(dataset, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            for handle in handles:
                handle.remove()
