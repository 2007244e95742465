"""Trees of tokens in a batch: several answers that share a prompt, stored and computed once.

Note [Trees of tokens]
    The tokens of a batch may be nodes of a tree in depth-first order (`ringattn.masks.tree`): a row sees the nodes above its own.
    A row predicts the next token of its own node, and the last row of a node nothing, since several tokens may follow it. So each
    answer begins with the last token of its prompt, whose row predicts the first token of the answer. Positions count along
    each path from its root. The loss and the gradients are then those of the answers one by one, each behind its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.plan.expressions import Tree, tree
from ringattn.plan.sharding import Sharding

IGNORE_INDEX = -100
"""Label of a token that is not predicted, as in transformers."""


def pack_answers(samples: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> tuple[dict[str, Tensor], Tree]:
    """Return a batch in which each prompt is stored once for all its answers, and its tree for `shard_batch(..., tree=...)`.

    Args:
        samples: (prompt, answers) each: token ids, 1-D; a prompt has a token at least.

    Returns:
        `input_ids` and `labels` `1 n`, the prompts' labels -100; and the tree.

    Raises:
        ValueError: A prompt is empty, or a tensor is not 1-D.

    Example:
        >>> batch, shared = pack_answers([(torch.tensor([1, 2, 3]), [torch.tensor([7, 8]), torch.tensor([9])])])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[1, 2, 3, 7, 8, 3, 9]], [[-100, -100, -100, 7, 8, -100, 9]])
        >>> shared
        tree((-1, 0, 0), (2, 3, 2))
    """
    parents, ids, labels = list[int | None](), list[Tensor](), list[Tensor]()
    for prompt, answers in samples:
        if prompt.dim() != 1 or not len(prompt) or any(answer.dim() != 1 for answer in answers):
            raise ValueError(
                f"samples must be (prompt, answers) of 1-D token ids, got a prompt of shape {tuple(prompt.shape)}; a prompt needs "
                "a token, whose row predicts the first one of an answer"
            )
        root = None
        if len(prompt) > 1:
            root = len(parents)
            ids.append(prompt[:-1])
            labels.append(torch.full_like(prompt[:-1], IGNORE_INDEX))
            parents.append(None)
        parents += [root] * len(answers)
        ids += [torch.cat([prompt[-1:], answer]) for answer in answers]
        labels += [torch.cat([torch.full_like(prompt[-1:], IGNORE_INDEX), answer]) for answer in answers]
    shared = tree(parents, [len(tokens) for tokens in ids])
    return {"input_ids": torch.cat(ids)[None], "labels": torch.cat(labels)[None]}, shared


def check_tree_batch(batch: Mapping[str, Any], shared: Tree, tokens: int) -> None:
    """Refuse a batch of other tokens than a tree has, and entries that a tree replaces."""
    if shared.starts[-1] != tokens:
        raise ValueError(
            f"tree must hold the {tokens} tokens of the batch, got {shared.starts[-1]}; pass the tree of this batch"
        )
    given = [name for name in ("position_ids", "attention_mask", "cu_seq_lens_q") if batch.get(name) is not None]
    if given:
        raise ValueError(
            f"a batch with a tree must come without {', '.join(given)}, which follow from it; leave them out"
        )


def check_tree(shared: Tree, position_ids: Tensor | str | None, sharding: Sharding) -> None:
    """Refuse positions that do not count along the paths of a tree."""
    if isinstance(position_ids, Tensor) and not torch.compiler.is_compiling():
        wanted = sharding.shard(torch.tensor(shared.positions, device=position_ids.device), dim=0)
        if not bool((position_ids == wanted).all()):
            raise ValueError(
                "position_ids must count along the paths of the tree, got others; pass the batch through shard_batch(tree=...)"
            )


def check_window(shared: Tree, window: tuple[int, int] | None) -> None:
    """Refuse a window that is shorter than the longest path: rows of a path are not neighbours in the batch."""
    longest = max(shared.positions) + 1
    if window is not None and window[0] + 1 < longest:
        raise NotImplementedError(
            f"sliding windows must hold the longest path of a tree, {longest} tokens, got {window[0] + 1}; "
            "run the answers one by one"
        )
