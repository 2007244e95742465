"""Losses of causal language models from their last hidden rows, without the logits of all rows at once.

A model is called as before, with `chunked_loss=True`. Its head is then applied to chunks of rows, in both passes
(`ringattn.training.cross_entropy_sum`). This is exact for models whose logits are those of a linear head, with a factor and a soft
cap; others are refused, after a comparison on a few tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from ringattn.integrations.transformers.support import inner_model
from ringattn.training import IGNORED, cross_entropy_sum

_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Names of configs for a factor of the logits; some models divide by it."""


@torch.no_grad()
def head_options(model: Any) -> dict[str, Any]:
    """Return `scale` and `softcap` of `token_log_probs` with which its head gives the logits of a model of transformers.

    Raises:
        NotImplementedError: The logits are not those of a linear head with a factor and a soft cap, as a comparison on a few tokens
            finds.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    softcap = getattr(config, "final_logit_softcapping", None) or 0.0
    factors = [x for name in _FACTORS if (x := getattr(config, name, None))]
    if _is_linear(head):
        training, implementation = model.training, config._attn_implementation
        model.eval()
        # this rank alone
        model.set_attn_implementation("eager")
        tokens = torch.arange(8, device=head.weight.device)[None] % len(head.weight)
        wanted = model(input_ids=tokens, use_cache=False).logits.float()
        rows = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        model.set_attn_implementation(implementation)
        model.train(training)
        plain = head(rows).float()
        # random weights may have logits near 0, so the difference is relative
        tolerance = (1e-4 if rows.dtype == torch.float32 else 2e-2) * wanted.norm()
        for scale in (1.0, *factors, *(1 / x for x in factors)):
            found = plain * scale
            found = softcap * torch.tanh(found / softcap) if softcap else found
            if (found - wanted).norm() <= tolerance:
                return {"scale": scale, "softcap": softcap}
    raise NotImplementedError(
        "logits must be those of a linear head without adapters, times a factor and softly capped, to compute a loss by chunks, "
        f"got other ones from {type(model).__name__}; compute its loss from whole logits"
    )


def enable_chunked_loss(model: nn.Module) -> None:
    """Let `model(**batch, chunked_loss=True)` return the loss alone, without logits of all rows; changed in place.

    The loss and its gradients are those of the model's own call, for whole batches and for those of `shard_batch`. Calls without
    the keyword are as before. Call it before the model is wrapped by DDP, FSDP or torch.compile.

    Args:
        model: A causal language model of transformers, or a PeftModel of one with adapters of layers.

    Raises:
        NotImplementedError: The model has other logits (`head_options`), another loss than that of the next token, or balances
            experts in its loss.

    Example:
        >>> enable_chunked_loss(model)  # doctest: +SKIP
        >>> loss = model(**shard_batch(batch, ring), chunked_loss=True).loss  # doctest: +SKIP
    """
    inner: Any = inner_model(model)
    kind, balanced = inner.loss_function, getattr(inner.config, "output_router_logits", False)
    if kind is not ForCausalLMLoss or balanced:
        raise NotImplementedError(
            f"the loss of a model must be that of the next token to be computed by chunks, got {kind.__name__}"
            f"{' with one that balances experts' if balanced else ''} from {type(inner).__name__}; compute it from whole logits"
        )
    options, original = head_options(inner), inner.forward

    @functools.wraps(original)
    def forward(*args: Any, chunked_loss: bool = False, **kwargs: Any) -> Any:
        if not chunked_loss:
            return original(*args, **kwargs)
        labels, shifted, count = (kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
        head = inner.get_output_embeddings()
        if (labels is None and shifted is None) or not _is_linear(head):
            raise ValueError(
                f"chunked_loss must come with labels and a linear head without adapters, got {type(head).__name__} and "
                f"{'no' if labels is None else 'some'} labels; leave it out to get logits"
            )
        if shifted is None:
            assert labels is not None, "one of the two is there"
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        rows = inner.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        total = cross_entropy_sum(rows, head.weight, shifted.to(rows.device), bias=head.bias, **options)
        if count is None:
            count = shifted.ne(IGNORED).sum().clamp(min=1)
        loss: Any = total / (count.to(total.device) if isinstance(count, Tensor) else count)
        return CausalLMOutput(loss=loss)

    inner.forward = forward


def _is_linear(head: Any) -> bool:
    # FSDP gives modules a class of its own, which inherits
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
