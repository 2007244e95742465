"""Parts of a trainer whose ranks share sequences: label smoothing, and a callback."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from ringattn.integrations.transformers.batch import IGNORE_INDEX


class ShiftedLabelSmoother:
    """Label smoothing of rows whose labels are shifted already: in place of transformers' LabelSmoother, with its formula."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self.num_items: Any = None

    def __call__(self, model_output: Any, labels: Tensor, **_: Any) -> Tensor:
        """Return the smoothed sum over this rank's labels `b s`, divided by `num_items`."""
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        flat, options = (logits.flatten(0, 1), labels.flatten()), {"label_smoothing": self.epsilon, "reduction": "sum"}
        return nn.functional.cross_entropy(*flat, ignore_index=IGNORE_INDEX, **options) / self.num_items


class TokensSeen(TrainerCallback):
    """Corrects `state.num_input_tokens_seen`, which Trainer sums over ranks that have read the same tokens."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._seen = ranks, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on from the number of a checkpoint."""
        del args, control, kwargs
        self._seen = state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the tokens of the last batch once per ring."""
        del args, control, kwargs
        self._seen += (state.num_input_tokens_seen - self._seen) // self._ranks
        state.num_input_tokens_seen = self._seen

    on_substep_end = on_step_end
