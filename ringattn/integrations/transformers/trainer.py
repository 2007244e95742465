"""`transformers.Trainer` with context parallelism: only its data loading and the mean of reported losses change."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from ringattn.integrations.transformers import NAME
from ringattn.integrations.transformers.attention import num_attention_calls
from ringattn.integrations.transformers.batch import RingCollator
from ringattn.integrations.transformers.positions import max_learned_positions, rank_end_positions
from ringattn.integrations.transformers.support import check_supported
from ringattn.ring import Ring


class RingTrainer(Trainer):
    """Trainer whose `data_collator` is a `RingCollator`: all ranks of its ring read the same samples, each its rows of them.

    With more ranks than the ring has, rings are data parallel replicas. Ranks of a ring must be consecutive, as in the innermost
    dimension of a device mesh. Losses, of training and evaluation, are those of whole sequences.

    Raises:
        ValueError: The collator is not a RingCollator, the ranks of the ring are not consecutive, or an option would weight the
            ranks wrongly; or another rank of the ring failed to make its RingTrainer, or makes one for another model. In use:
            a sequence is longer than the learned positions, or rings cannot share the samples of an evaluation evenly.
        NotImplementedError: An option would see labels of a shard; the message names it. At the first batch: the model averages
            the loss over the labels of a shard. When data is loaded: a dataset has no length.
        RuntimeError: In training: the model did not attend with ringattn.

    Example:
        >>> collator = RingCollator(default_data_collator, ring)  # doctest: +SKIP
        >>> RingTrainer(model, args, data_collator=collator, train_dataset=dataset).train()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        collator = self.data_collator
        if not isinstance(collator, RingCollator):
            raise ValueError(
                f"data_collator must be a RingCollator, got {type(collator).__name__}; wrap it: RingCollator(collator, ring)"
            )
        self.ring = collator.ring
        self._max_positions = max_learned_positions(self.model)
        self._loss_checked = False
        with self.ring.propagate_errors():
            if self.ring.world_size > 1:
                check_supported(self.args, "shared training")
            _replica_of(self.ring, self.args.world_size, self.args.process_index)
            check_supported(self, "trainer")
        # ranks wait for each other when the model is wrapped, and would for one whose options were refused
        self.ring.assert_equal_across_ranks("the model of a RingTrainer", type(self.model).__name__)

    def get_train_dataloader(self) -> DataLoader:
        """Return Trainer's, with the same samples and worker seeds on all ranks of a ring."""
        dataloader = self._share(super().get_train_dataloader())
        loader: Any = getattr(dataloader, "base_dataloader", dataloader)
        seed = loader.worker_init_fn
        if isinstance(seed, partial) and "rank" in seed.keywords:
            replica = self.args.process_index // self.ring.world_size
            loader.worker_init_fn = partial(seed.func, *seed.args, **{**seed.keywords, "rank": replica})
        return dataloader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return Trainer's, with the same samples on all ranks of a ring; several rings must be able to share them evenly."""
        return self._share(super().get_eval_dataloader(eval_dataset), evenly=True)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return Trainer's, with the same samples on all ranks of a ring; several rings must be able to share them evenly."""
        return self._share(super().get_test_dataloader(test_dataset), evenly=True)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute Trainer's loss; raise for a model that attends to the rows of its rank only, or averages the loss over them."""
        sharding = inputs.get("sharding")
        if self._max_positions is not None and sharding is not None:
            longest = max(rank_end_positions(sharding), default=0)
            if longest > self._max_positions:
                raise ValueError(
                    f"sequences must be of at most {self._max_positions} tokens, the positions that {type(self.model).__name__} "
                    f"has learned, got one of {longest}; cut them, or train a model with rotary positions"
                )
        if not self._loss_checked and self.ring.world_size > 1 and "num_items_in_batch" in inputs:
            self._check_count(model, inputs, num_items_in_batch)
        before = num_attention_calls()
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_attention_calls() == before and not self.args.torch_compile:
            whole: Any = self.model
            config = getattr(whole, "config", None)
            if getattr(config, "_attn_implementation", None) == NAME:
                raise RuntimeError(
                    f"the model must attend with ringattn, got {type(whole).__name__}, which takes the name and attends "
                    "by itself, or not at all; train this model on one process, with a Trainer"
                )
            raise RuntimeError(
                "the model must attend with ringattn, got one that did not; make it with attn_implementation='ringattn', or call "
                "model.set_attn_implementation('ringattn')"
            )
        return result

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Run Trainer's; the loss is that of whole sequences, on every rank. Raises for logits where ranks share a sequence."""
        if not prediction_loss_only and self.ring.world_size > 1:
            error = NotImplementedError(
                "prediction_loss_only must be True where ranks share a sequence, got False: logits and labels would be those of "
                "shards, each in the order of its rows; set args.prediction_loss_only = True, or predict on one process"
            )
            self.ring.raise_on_all_ranks(error)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None and self.ring.world_size > 1:
            shares = self.ring.gather(loss.reshape(1), 0, [1] * self.ring.world_size)
            loss = torch.stack(shares).mean()
            state = self.accelerator.gradient_state
            if state.active_dataloader is not None and state.end_of_dataloader and state.remainder > 0:
                # accelerate keeps so many losses of a short last batch: each rank of the ring reports all of it
                state.active_dataloader.remainder *= self.ring.world_size
        return loss, logits, labels

    def _check_count(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        """Raise unless the model divides its loss by the labels of all ranks (Note [Loss of a shard] of batch.py).

        Many models accept num_items_in_batch and ignore it: encoders, and token classifiers. So the first batch is tried with
        twice the number, for which the loss must be half as large.
        """
        losses = []
        for times in (1, 2):
            tried = {**inputs, "num_items_in_batch": times * inputs["num_items_in_batch"]}
            number = None if num_items_in_batch is None else times * num_items_in_batch
            devices = [self.args.device] if self.args.device.type == "cuda" else []
            # the dropout of training stays the same without a trial
            with torch.no_grad(), torch.random.fork_rng(devices):
                loss: Any = super().compute_loss(model, tried, num_items_in_batch=number)
                losses.append(float(loss))
        # a rank without labels has a loss of 0, and passes
        halved = not abs(losses[0] - 2 * losses[1]) > abs(losses[0]) / 4
        if not self.ring.all_reduce_min(int(halved)):
            raise NotImplementedError(
                "the loss must be divided by num_items_in_batch where ranks share a sequence, got that of "
                f"{type(self.model).__name__}, which is averaged over the labels of each rank; train this model on one process, or "
                "let its forward divide the sum by num_items_in_batch"
            )
        self._loss_checked = True

    def _share(self, dataloader: DataLoader, evenly: bool = False) -> DataLoader:
        return share_batches(dataloader, self.ring, self.args.world_size, self.args.process_index, evenly=evenly)


def share_batches(
    dataloader: DataLoader, ring: Ring, world_size: int, process_index: int, *, evenly: bool = False
) -> DataLoader:
    """Let the ranks of a ring read the same batches of a DataLoader that `Accelerator.prepare` made, changed in place.

    Batches are then distributed over rings instead of processes. `evenly` refuses samples that several rings cannot share evenly,
    some of which accelerate would read twice.
    """
    replicas, index = _replica_of(ring, world_size, process_index)
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


def _replica_of(ring: Ring, world_size: int, process_index: int) -> tuple[int, int]:
    """Return the number of rings, and the index of this one."""
    replicas, rest = divmod(world_size, ring.world_size)
    index, rank = divmod(process_index, ring.world_size)
    if rest or rank != ring.rank:
        raise ValueError(
            f"a ring must be of consecutive processes that divide all of them, got {ring.world_size} of {world_size} and process "
            f"{process_index} as its rank {ring.rank}; make it of the innermost dimension of a device mesh"
        )
    return replicas, index
