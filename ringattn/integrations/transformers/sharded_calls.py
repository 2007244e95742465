"""Modules that are called with whole batches, and whose rows are computed by the ranks of a ring.

For losses that are no sums over tokens: of rewards, of preferences. The loss is then computed from whole outputs on every rank.

Note [Gradient of a loss that every rank computes]
    All ranks compute the same loss of the gathered rows. In the backward a rank receives the sum over ranks of the gradients of
    its rows, so R times the gradient of the loss. The mean over ranks, which DDP and FSDP compute of gradients, is then the
    gradient of one process. Layers behind the gathered rows compute the whole gradient on every rank, and have the same mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringattn.integrations.transformers.model_forward import untraced


def shard_calls(module: nn.Module, shard: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[RemovableHandle, ...]:
    """Register forward hooks that shard the batch of each call, and gather the rows of its outputs.

    Of the outputs, `b s ...` tensors with three or more dims become `b n ...`; in a call with labels also those `b s`, one number
    per predicted token, which become `b (n - 1)` as without shards. A loss in the outputs stays that of a shard.

    Args:
        module: A model of transformers, or its part below the heads.
        shard: `shard_batch` for one ring: whole tensors in, those of this rank and `sharding` out.

    Returns:
        The handles, to remove the hooks.
    """
    names = [name for name in inspect.signature(module.forward).parameters]

    def shard_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        batch = {name: x for name, x in call.items() if isinstance(x, Tensor)}
        return (), {**call, **shard(batch)}

    def gather_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        del module, args
        sharding, shifted = kwargs["sharding"], "shift_labels" in kwargs
        for name, x in list(output.items()):
            if not isinstance(x, Tensor) or x.dim() < (2 if shifted else 3) or x.shape[1] != sharding.shard_len:
                continue
            whole = sharding.unshard(x, dim=1)
            output[name] = whole if x.dim() > 2 else whole[:, :-1]
        return output

    return (
        module.register_forward_pre_hook(untraced(shard_inputs), with_kwargs=True),
        module.register_forward_hook(untraced(gather_outputs), with_kwargs=True),
    )
