"""KTO and ORPO of TRL on rings."""

from __future__ import annotations

from typing import Any

from torch import nn
from trl import KTOTrainer  # pyright: ignore[reportPrivateImportUsage]
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ringattn.integrations.transformers.support import inner_model
from ringattn.integrations.transformers.trainer import RingTrainerMixin
from ringattn.integrations.trl.rings import RingReferenceMixin
from ringattn.integrations.trl.trainers import TokenCount
from ringattn.training import IGNORED


class RingKTOTrainer(RingReferenceMixin, KTOTrainer, TokenCount):  # pyright: ignore[reportIncompatibleMethodOverride]
    """KTOTrainer whose ranks share sequences; arguments, beside KTOTrainer's own, and errors are those of `RingTrainerMixin`.

    Every `loss_type` works, and so does `precompute_ref_log_probs`.
    """


class RingORPOTrainer(RingTrainerMixin, ORPOTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """ORPOTrainer whose ranks share sequences; arguments, beside ORPOTrainer's own, and errors are those of `RingTrainerMixin`.

    Log-probabilities and means of logits are computed by TRL's chunked head, and gathered over the ring.
    """

    loss_by_model = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_fused_lm_head(inner_model(self.model), outputs=("log_probs", "mean_logits"))

    def modules_with_whole_outputs(self) -> list[nn.Module]:
        """Return the policy."""
        return [self.model]

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return what ORPOTrainer's does, with means over the vocabulary in place of logits, of which it logs the mean."""
        whole = self.concatenated_inputs(batch, padding_value=self.padding_value, device=self.accelerator.device)
        tokens, mask = whole["concatenated_input_ids"], whole["concatenated_attention_mask"]
        output = model(input_ids=tokens, attention_mask=mask, labels=tokens, fused_lm_head=True)
        answers = whole["concatenated_labels"][:, 1:] != IGNORED
        chosen, counted = len(batch["chosen_labels"]), mask[:, 1:]
        loss = -(output.log_probs * counted)[:chosen].sum() / counted[:chosen].sum()
        means = (output.log_probs * answers).sum(-1) / answers.sum(-1)
        return means[:chosen], means[chosen:], output.mean_logits[:chosen], output.mean_logits[chosen:], loss
