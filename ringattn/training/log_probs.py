"""Log-probabilities of given tokens from hidden rows and the weight of the output head, without the logits of all rows at once.

Logits of 131,072 rows over 152,000 tokens are 80 GB in fp32, and as much again for their gradient. So both passes go chunk by
chunk: the forward keeps lse = ln sum_j exp(z_j) per row, and the backward computes the logits z of a chunk again. With
p = exp(z - lse), the entropy is H = -sum_j p_j ln p_j, and the gradients are

    d log p_t / d z_j = [j = t] - p_j        d H / d z_j = -p_j (z_j - lse + H)

Nothing is approximated. Statistics are fp32, or fp64 for fp64 rows. The forward takes rows with all logits. The backward takes
blocks of many rows and few columns: gradients of rows are added over columns in fp32, and those of the weight over at most
131,072 / 32,768 = 4 blocks of rows in its own dtype, in place.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringattn.numerics.softmax import online_logsumexp

IGNORED = -100
"""Target of a row that predicts nothing."""

CHUNK_ELEMENTS = 1 << 27
"""Logits at a time: 512 MiB in fp32."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Return ln softmax(z)[target] of each row, with z = cap((hidden @ weight.T + bias) * scale) / temperature.

    Differentiable once. Rows are independent: a shard gives the numbers of its rows. Under autocast the product is in its dtype.

    Args:
        hidden: `... dim`, rows before the output head.
        weight: `vocab dim`, whole: inside a model that FSDP shards, its head in the forward of the module that gathers it.
        targets: `...` int64, the token that each row predicts (labels shifted before sharding), or IGNORED.
        bias: `vocab`, or None.
        scale: Factor of the logits, as Cohere's `logit_scale` or 1 / Granite's `logits_scaling`.
        softcap: cap(z) = softcap * tanh(z / softcap), as Gemma's `final_logit_softcapping`; 0.0: none.
        temperature: Of sampling; divides the logits last.
        chunk_elements: Logits that exist at a time, at least those of one row.

    Returns:
        `...` natural logs, fp32 (fp64 for fp64 rows); 0 where the target is IGNORED.

    Raises:
        ValueError: A shape or dtype does not fit, the temperature is not positive, or the weight is sharded.
        RuntimeError: A target is no token; on GPUs that of torch's own indexing.

    Example:
        >>> token_log_probs(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([1, IGNORED])).tolist()
        [-1.3862943649291992, 0.0]
    """
    return _apply(hidden, weight, targets, bias, _Options(scale, softcap, temperature, chunk_elements, False))[0]


def token_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return `token_log_probs` and the entropy of softmax(z) of each row, in nats; both are differentiable.

    Arguments and errors are those of `token_log_probs`. The entropy is 0 where the target is IGNORED.
    """
    return _apply(hidden, weight, targets, bias, _Options(scale, softcap, temperature, chunk_elements, True))


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float = 0.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return the sum over rows of -`token_log_probs`, a scalar: the loss of supervised training before it is divided by a count."""
    options: dict[str, Any] = {"bias": bias, "scale": scale, "softcap": softcap, "chunk_elements": chunk_elements}
    return -token_log_probs(hidden, weight, targets, **options).sum()


class _Options(NamedTuple):
    scale: float
    softcap: float
    temperature: float
    elements: int  # logits at a time
    entropy: bool

    @property
    def is_product(self) -> bool:
        """Whether logits are what the product gives."""
        return self.scale == 1.0 and not self.softcap and self.temperature == 1.0


def _apply(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    if hasattr(type(weight), "to_local"):  # a DTensor, whose module takes long to import
        raise ValueError(
            "weight must be a whole tensor, got a DTensor that is sharded over ranks; compute the loss in the forward of the "
            "module that FSDP gathers, where the weight is whole"
        )
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.dim() < 2:
        raise ValueError(
            f"hidden and weight must be ... x dim and vocab x dim, got {tuple(hidden.shape)} and {tuple(weight.shape)}; pass the "
            "rows before the output head, and its weight"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 of shape {tuple(hidden.shape[:-1])}, one per row of hidden, got {targets.dtype} of shape "
            f"{tuple(targets.shape)}; shift and shard labels as the rows are"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have {weight.shape[0]} numbers, one per token, got shape {tuple(bias.shape)}")
    if not options.temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {options.temperature}; leave it out for the logits as they are"
        )
    kind = hidden.device.type
    # the products of a model under autocast are in its dtype, and the backward runs outside of it
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    rows, head, shift = (None if x is None else x.to(dtype) for x in (hidden, weight, bias))
    assert rows is not None
    found: Any = _TokenLogProbs.apply(rows.flatten(0, -2), head, shift, targets.flatten(), options)
    log_probs, entropies = found
    return log_probs.view(targets.shape), entropies.view(targets.shape) if options.entropy else log_probs


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    """Return logits before the temperature divides them: in the dtype of statistics, but plain ones as the product gives them."""
    logits = torch.nn.functional.linear(rows, weight, bias)
    if options.is_product:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(options.scale)
    return logits.div_(options.softcap).tanh_().mul_(options.softcap) if options.softcap else logits


class _TokenLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies of `r dim` rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, lse, entropies = (torch.zeros(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        rows_at_once = max(1, options.elements // len(weight))
        pieces = (x.split(rows_at_once) for x in (hidden, targets, log_probs, lse, entropies))
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, wanted, to, row_lse, to_entropy in zip(*pieces, strict=True):
                logits, counts = _logits(rows, weight, bias, options), wanted != IGNORED
                logits = logits if options.temperature == 1.0 else logits.div_(options.temperature)
                row_lse.copy_(online_logsumexp(logits))
                to += counts * (logits.gather(-1, wanted.where(counts, 0)[:, None])[:, 0] - row_lse)
                if options.entropy:
                    # not lse - sum p z, which multiplies the rounding of lse by z
                    logs = logits.to(dtype).sub_(row_lse[:, None])
                    to_entropy -= counts * logs.exp().mul_(logs).sum(-1)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
        return log_probs, entropies if options.entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        options: _Options = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        counts = targets != IGNORED
        to_target = counts * (torch.zeros_like(lse) if grad is None else grad)
        to_entropy = None if grad_entropy is None else counts * grad_entropy
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        dbias = torch.zeros(len(weight), dtype=lse.dtype, device=weight.device) if needs_bias else None
        rows, columns = _block(len(hidden), len(weight), options.elements)
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(hidden), rows):
                here = slice(first, first + rows)
                sums = torch.zeros(hidden[here].shape, dtype=lse.dtype, device=hidden.device) if needs_hidden else None
                for column in range(0, len(weight), columns):
                    there = slice(column, column + columns)
                    logits = _logits(hidden[here], weight[there], None if bias is None else bias[there], options)
                    wanted, back = targets[here] - column, None if to_entropy is None else to_entropy[here]
                    stats = lse[here], entropies[here], to_target[here]
                    dlogits = _logit_gradients(logits, wanted, *stats, back, options).to(hidden.dtype)
                    if sums is not None:
                        sums += dlogits @ weight[there]
                    if dweight is not None:
                        dweight[there].addmm_(dlogits.T, hidden[here])
                    if dbias is not None:
                        dbias[there] += dlogits.sum(0, dtype=lse.dtype)
                if dhidden is not None and sums is not None:
                    dhidden[here] = sums
        return dhidden, dweight, None if dbias is None else dbias.to(hidden.dtype), None, None


def _block(rows: int, columns: int, elements: int) -> tuple[int, int]:
    """Return rows and columns of blocks of at most `elements` logits: eight times as many rows, so that few add to the weight.

    Example:
        >>> _block(131072, 151936, 1 << 27), _block(8192, 151936, 1 << 27), _block(131072, 1000, 1 << 27)
        ((32768, 4096), (8192, 16384), (32768, 1000))
    """
    rows = max(1, min(rows, math.isqrt(8 * elements)))
    return rows, max(1, min(columns, elements // rows))


def _logit_gradients(
    logits: Tensor,
    wanted: Tensor,
    lse: Tensor,
    entropies: Tensor,
    to_target: Tensor,
    to_entropy: Tensor | None,
    options: _Options,
) -> Tensor:
    """Return the gradients of some columns of logits `r c`, which are overwritten; `wanted` counts from the first of them."""
    inside = (wanted >= 0) & (wanted < logits.shape[1])
    place = wanted.clamp(0, logits.shape[1] - 1)[:, None]
    if options.is_product and to_entropy is None:
        at_target = logits.gather(1, place)[:, 0]
        dlogits = torch.ops.ringattn.online_logsumexp_backward(-to_target, logits, lse, 1, None, "auto")
        # one rounding: near p = 1 a sum of rounded terms would be far off
        exact = (to_target * -torch.expm1(at_target - lse)).to(dlogits.dtype)
        return dlogits.scatter_(1, place, torch.where(inside, exact, dlogits.gather(1, place)[:, 0])[:, None])
    slope = 1 - (logits / options.softcap).square_() if options.softcap else None
    logs = logits.to(lse.dtype).div_(options.temperature).sub_(lse[:, None])
    if to_entropy is None:
        dlogits = logs.exp_().mul_(-to_target[:, None])
    else:
        dlogits = logs.exp()
        dlogits.mul_(logs.add_(entropies[:, None]).mul_(-to_entropy[:, None]).sub_(to_target[:, None]))
    dlogits.scatter_add_(1, place, (inside * to_target)[:, None])
    dlogits.mul_(options.scale / options.temperature)
    return dlogits if slope is None else dlogits.mul_(slope)
