"""Recurrent layers beside ring attention: their state crosses ranks.

Gated delta rule, Mamba-2 and causal convolutions over a sharded sequence, on any device. Importing this needs torch alone; models
of transformers are in transformers_layers.py (`ringattn.integrations.transformers.replace_recurrent_layers`).
"""

from ringattn.integrations.linear.ops import causal_conv1d, gated_delta_rule, mamba2_scan

__all__ = ["causal_conv1d", "gated_delta_rule", "mamba2_scan"]
