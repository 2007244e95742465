"""Trainers of TRL with context parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer
from trl import DPOTrainer, RewardTrainer, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from ringattn.integrations.transformers.trainer import RingTrainerMixin
from ringattn.integrations.trl.rings import RingReferenceMixin


class TokenCount(Trainer):
    """Trainer that logs `num_tokens` of TRL, a sum over ranks, with the tokens of a ring counted once."""

    counts_whole_batches = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does."""
        ranks = self.ring.world_size if self.counts_whole_batches else 1  # pyright: ignore[reportAttributeAccessIssue]
        counts = {name: number / ranks for name, number in logs.items() if name.endswith("num_tokens")}
        logs.update(counts)
        super().log(logs, *args, **kwargs)


class RingSFTTrainer(RingTrainerMixin, SFTTrainer, TokenCount):  # pyright: ignore[reportIncompatibleMethodOverride]
    """SFTTrainer whose ranks share sequences; arguments, beside SFTTrainer's own, and errors are those of `RingTrainerMixin`.

    Packing, padding-free batches, completion-only loss and adapters of layers (LoRA) work. Losses of mixtures of experts that
    balance the experts are refused: pass `router_aux_loss_coef=0.0`.

    Example:
        >>> RingSFTTrainer(model, args=config, train_dataset=dataset, context_parallel_size=2).train()  # doctest: +SKIP
    """

    loss_by_model = False

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's rows of a whole batch."""
        self.counts_whole_batches = batch.get("attention_mask") is not None
        return super().shard(batch)


class RingDPOTrainer(RingReferenceMixin, DPOTrainer, TokenCount):  # pyright: ignore[reportIncompatibleMethodOverride]
    """DPOTrainer whose ranks share sequences; arguments, beside DPOTrainer's own, and errors are those of `RingTrainerMixin`.

    Log-probabilities of tokens are gathered over the ring, so every `loss_type` works, and so does `precompute_ref_log_probs`.
    """


class RingRewardTrainer(RingTrainerMixin, RewardTrainer, TokenCount):  # pyright: ignore[reportIncompatibleMethodOverride]
    """RewardTrainer whose ranks share sequences; arguments beside its own, and errors, are those of `RingTrainerMixin`.

    The hidden states of the last layer are gathered over the ring, and every rank scores whole sequences.
    """

    uneven_evaluation = "all"  # as in RingReferenceMixin
    loss_by_model = False
    counts_whole_batches = True

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's rows of a whole batch, whose margins are not for the model."""
        return super().shard({name: x for name, x in batch.items() if name != "margin"})

    def modules_with_whole_outputs(self) -> list[nn.Module]:
        """Return the model below the head."""
        model: Any = self.model
        model = model.get_base_model() if hasattr(model, "peft_config") else model
        return [model.base_model]
