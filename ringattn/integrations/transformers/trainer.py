"""`transformers.Trainer` with context parallelism."""

from __future__ import annotations

from transformers import Trainer

from ringattn.integrations.transformers.trainer_mixin import RingTrainerMixin


class RingTrainer(RingTrainerMixin, Trainer):
    """Trainer whose ranks share sequences; arguments, beside Trainer's own, and errors are those of `RingTrainerMixin`.

    Example:
        >>> RingTrainer(model, args, train_dataset=dataset, context_parallel_size=2).train()  # doctest: +SKIP
    """
