"""KTO and ORPO of TRL on rings."""

from __future__ import annotations

from typing import Any, cast

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

    Log-probabilities and means of logits are computed by TRL's chunked head, and gathered over the ring. The logged `logits/chosen`
    and `logits/rejected` are means over tokens, without the padding that ORPOTrainer counts too.
    """

    uneven_evaluation = "all"  # as in RingReferenceMixin
    loss_by_model = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_fused_lm_head(inner_model(self.model), outputs=("log_probs", "mean_logits"))

    def modules_with_whole_outputs(self) -> list[nn.Module]:
        """Return the policy."""
        return [cast(nn.Module, self.model)]

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return what ORPOTrainer's does, with a mean logit per token in place of logits, of which it logs the mean."""
        padding: Any = self.padding_value
        whole = self.concatenated_inputs(batch, padding_value=padding, device=self.accelerator.device)
        tokens, mask = whole["concatenated_input_ids"], whole["concatenated_attention_mask"]
        output = model(input_ids=tokens, attention_mask=mask, labels=tokens, fused_lm_head=True)
        answers = whole["concatenated_labels"][:, 1:] != IGNORED
        k, counted = len(batch["chosen_labels"]), mask[:, 1:].bool()
        logits = (output.mean_logits[half][counted[half]] for half in (slice(k), slice(k, None)))
        means = (output.log_probs * answers).sum(-1) / answers.sum(-1)
        return means[:k], means[k:], *logits, -output.log_probs[:k][counted[:k]].mean()
