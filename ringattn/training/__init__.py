"""Losses of supervised and reinforcement learning on the rows of a rank, and what bounds the memory of a step at long context."""

from ringattn.training.checkpoints import RECOMPUTE, Offload, checkpoint_layers_, offloaded_layers
from ringattn.training.log_probs import IGNORED, cross_entropy_sum, token_log_probs, token_log_probs_and_entropy
from ringattn.training.memory import save_memory_
from ringattn.training.offload import Offloader
from ringattn.training.policy_loss import clipped_loss, group_advantages, importance_ratios, kl_k3, policy_loss
from ringattn.training.ring_sums import for_rows, mean_over_ring, sequence_sums, sum_over_ring
from ringattn.training.row_chunks import chunk_rows_, chunked_rows

__all__ = [
    "IGNORED",
    "RECOMPUTE",
    "Offload",
    "Offloader",
    "checkpoint_layers_",
    "chunk_rows_",
    "chunked_rows",
    "clipped_loss",
    "cross_entropy_sum",
    "for_rows",
    "group_advantages",
    "importance_ratios",
    "kl_k3",
    "mean_over_ring",
    "offloaded_layers",
    "policy_loss",
    "save_memory_",
    "sequence_sums",
    "sum_over_ring",
    "token_log_probs",
    "token_log_probs_and_entropy",
]
