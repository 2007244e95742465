"""Recurrent layers beside ring attention: their state crosses ranks.

Gated delta rule, Mamba-2 and causal convolutions over a sharded sequence, and recurrent layers of transformers models.

    replace_recurrent_layers(model)                once, after the model is made
    loss = model(**shard_batch(batch, ring)).loss
"""

from ringattn.integrations.linear.ops import causal_conv1d, gated_delta_rule, mamba2_scan
from ringattn.integrations.linear.reference import (
    causal_conv1d_reference,
    gated_delta_rule_reference,
    mamba2_reference,
)

__all__ = [
    "causal_conv1d",
    "causal_conv1d_reference",
    "gated_delta_rule",
    "gated_delta_rule_reference",
    "mamba2_reference",
    "mamba2_scan",
]
