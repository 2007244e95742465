"""Losses of policy gradients on the rows of a rank: advantages of groups, importance ratios, clipping, KL.

All follow Note [Gradients of sums over the ring] of ring_sums.py: values are those of whole sequences on every rank, and gradients
are averaged over ranks. Log-probabilities are those of `token_log_probs` for the tokens of the rollout. Masks are 1 (or True) where
a token of the rollout is predicted, and 0 for prompts and padding.

Legend: b batch, s rows of this rank, k documents of a packed row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.plan.sharding import Sharding
from ringattn.training.ring_sums import for_rows, mean_over_ring, sequence_sums, sum_over_ring

LEVELS = ("token", "sequence")
BASELINES = ("mean", "leave_one_out")
SCALES = ("group", "batch", "none")
MEANS = ("tokens", "sequences")


def group_advantages(
    rewards: Tensor, group_size: int, *, baseline: str = "mean", scale: str = "group", eps: float = 1e-4
) -> Tensor:
    """Return the advantages of rollouts, of which each group_size consecutive ones answer the same prompt.

    Every rank passes the rewards of all rollouts. A reward that is NaN is left out of all statistics, and its advantage is 0.

    Args:
        rewards: `r`, floating point; r is a multiple of group_size.
        group_size: Rollouts per prompt.
        baseline: Is subtracted: "mean" of the group (DeepSeekMath, 2402.03300, section 4.1), or "leave_one_out", the mean of
            the others (RLOO, 2402.14740, equation 8).
        scale: Divides the differences: the standard deviation (with r - 1) of the "group" or of the "batch" plus eps, or
            "none" (Dr. GRPO, 2503.20783).
        eps: Is added to the standard deviation.

    Raises:
        ValueError: The rewards are no multiple of the group, a group has fewer than two, or an option is unknown.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 3.0, 3.0]), 2, scale="none").tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    _check_option("baseline", baseline, BASELINES)
    _check_option("scale", scale, SCALES)
    if group_size < 2 or rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(
            f"rewards must be whole groups of two or more in one dimension, got shape {tuple(rewards.shape)} in groups of "
            f"{group_size}; pass the rewards of all rollouts of each prompt"
        )
    groups = rewards.view(-1, group_size)
    if baseline == "mean":
        centred = groups - groups.nanmean(1, keepdim=True)
    else:
        others = groups.isnan().logical_not().sum(1, keepdim=True) - 1
        centred = groups - (groups.nansum(1, keepdim=True) - groups) / others
    if scale != "none":
        around = groups if scale == "group" else groups.view(1, -1)
        squares = (around - around.nanmean(1, keepdim=True)).square()
        variance = squares.nansum(1, keepdim=True) / (squares.isnan().logical_not().sum(1, keepdim=True) - 1)
        centred = centred / (variance.sqrt() + eps)
    # unscored, or without another one that is scored
    return torch.where(centred.isnan(), 0.0, centred).flatten()


def importance_ratios(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, sharding: Sharding, *, level: str = "token"
) -> Tensor:
    """Return the ratios of the policy to that of the rollout, per token or per sequence; differentiable in log_probs.

    Args:
        log_probs: `b s`, of this rank's rows.
        old_log_probs: `b s`, of the policy that made the rollout.
        mask: `b s`.
        sharding: The sharding of the rows.
        level: "token": exp(log_probs - old_log_probs); "sequence": the geometric mean of those over a sequence (GSPO, 2507.18071,
            equation 7).

    Returns:
        `b s`, or for sequences `b 1` (`b s` where documents are packed).

    Raises:
        ValueError: The level is unknown.
    """
    _check_option("level", level, LEVELS)
    difference = log_probs - old_log_probs
    if level == "token":
        return difference.exp()
    counts = sequence_sums(mask, sharding).clamp(min=1)
    return for_rows((sequence_sums(difference * mask, sharding) / counts).exp(), sharding)


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the estimate k3 of KL(policy, reference) per token: r - 1 - ln r with r = p_ref / p (Schulman, 2020)."""
    difference = ref_log_probs - log_probs
    return difference.exp() - difference - 1


def clipped_loss(
    ratios: Tensor, advantages: Tensor, *, clip: tuple[float, float] = (0.2, 0.2), max_ratio: float | None = None
) -> Tensor:
    """Return -min(r A, clamp(r, 1 - clip[0], 1 + clip[1]) A) per token (PPO, 1707.06347, equation 7).

    Args:
        ratios: Of `importance_ratios`.
        advantages: That broadcast against the ratios: `b 1` or `b s`.
        clip: Distances from 1 below and above; different ones are clip-higher (DAPO, 2503.14476).
        max_ratio: Upper bound of the first r, for negative advantages of unlikely tokens.
    """
    low, high = clip
    first = ratios if max_ratio is None else ratios.clamp(max=max_ratio)
    return -torch.min(first * advantages, ratios.clamp(1 - low, 1 + high) * advantages)


def policy_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sharding: Sharding,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    level: str = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    mean_over: str | float = "tokens",
) -> Tensor:
    """Return the clipped loss of whole sequences, the same on every rank, for PPO, GRPO, DAPO, GSPO and Dr. GRPO.

    Args:
        log_probs: `b s`, of this rank's rows.
        advantages: One per sequence, `b` or `b k`, the same on every rank; or one per row, `b s`, with documents `b s` too.
        mask: `b s`.
        sharding: The sharding of the rows.
        old_log_probs: `b s`, of the policy that made the rollout; default log_probs, where it has made no step since.
        ref_log_probs: `b s`, of the reference of the KL term.
        beta: Factor of the KL term.
        level: See `importance_ratios`.
        clip: See `clipped_loss`.
        mean_over: "tokens" of the mask (DAPO); "sequences", whose losses are means over their tokens (GRPO), and of which those
            without tokens are left out; or a number that divides the sum: the tokens of several accumulated batches, or a constant
            (Dr. GRPO).

    Returns:
        A scalar. Average gradients over the ranks of the ring.

    Raises:
        ValueError: A shape does not fit, an option is unknown, or beta is given without ref_log_probs or the other way round.
    """
    if isinstance(mean_over, str):
        _check_option("mean_over", mean_over, MEANS)
    if (ref_log_probs is None) != (beta == 0.0):
        raise ValueError(
            f"beta and ref_log_probs must come together, got beta {beta} and {'no' if ref_log_probs is None else 'some'} "
            "ref_log_probs; pass both, or neither"
        )
    for name, x in (("mask", mask), ("old_log_probs", old_log_probs), ("ref_log_probs", ref_log_probs)):
        if x is not None and x.shape != log_probs.shape:
            raise ValueError(f"{name} must have the shape of log_probs, {tuple(log_probs.shape)}, got {tuple(x.shape)}")
    mask = mask.to(log_probs.dtype)
    old_log_probs = log_probs.detach() if old_log_probs is None else old_log_probs
    by_row = advantages if advantages.shape == log_probs.shape else for_rows(advantages, sharding)
    losses = clipped_loss(importance_ratios(log_probs, old_log_probs, mask, sharding, level=level), by_row, clip=clip)
    if ref_log_probs is not None:
        losses = losses + beta * kl_k3(log_probs, ref_log_probs)
    losses = losses * mask
    if not isinstance(mean_over, str):
        return sum_over_ring(losses.sum(), sharding) / mean_over
    if mean_over == "tokens":
        return mean_over_ring(losses.sum(), mask.sum(), sharding)
    counts = sequence_sums(mask, sharding)
    return (sequence_sums(losses, sharding) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def _check_option(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
