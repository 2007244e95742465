"""Losses of supervised and reinforcement learning on the rows of a rank: values and gradients of whole sequences."""

from ringattn.training.log_probs import IGNORED, cross_entropy_sum, token_log_probs, token_log_probs_and_entropy
from ringattn.training.policy_loss import clipped_loss, group_advantages, importance_ratios, kl_k3, policy_loss
from ringattn.training.ring_sums import for_rows, mean_over_ring, sequence_sums, sum_over_ring

__all__ = [
    "IGNORED",
    "clipped_loss",
    "cross_entropy_sum",
    "for_rows",
    "group_advantages",
    "importance_ratios",
    "kl_k3",
    "mean_over_ring",
    "policy_loss",
    "sequence_sums",
    "sum_over_ring",
    "token_log_probs",
    "token_log_probs_and_entropy",
]
