"""Recomputation, offload and chunks of a whole model: what bounds the activations of a step at long context."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ringattn.training.checkpoints import Offload, checkpoint_layers_
from ringattn.training.offload import Offloader
from ringattn.training.row_chunks import chunk_rows_

MLP_NAMES = ("mlp", "feed_forward", "ffn")
"""Names under which layers have their MLP, in the models of transformers and of `launch.train`."""


def save_memory_(
    model: nn.Module, *, recompute: str = "none", offload: Offload = False, mlp_rows: int | None = None
) -> Offloader | None:
    """Bound the activations of a model's layers; changes their `forward`, and no value or gradient beyond rounding.

    Call it on whole weights, before FSDP or DDP wraps the model, and do not compile the model with `offload` or `mlp_rows`. Layers
    must be called without a KV cache in training (`use_cache=False`, as `shard_batch` passes). At 131,072 tokens per rank:
    `save_memory_(model, recompute="selective", offload=True, mlp_rows=16384)`.

    Args:
        model: A model whose `nn.ModuleList` of most parameters is its layers, as those of transformers.
        recompute: See `checkpoint_layers_`.
        offload: See `checkpoint_layers_`.
        mlp_rows: Tokens of this rank that go through an MLP at a time; None: all. Its rows must not depend on each other.

    Returns:
        The host memory of checkpoints; None without `offload`.

    Raises:
        ValueError: An option is wrong; see the two functions.
        NotImplementedError: The model has no list of layers, or a layer has no MLP of one tensor; or MLPs by chunks are asked for
            where the model, or in use a call of it, returns the logits of its routers.
    """
    layers = decoder_layers(model) if recompute != "none" or offload is not False or mlp_rows is not None else []
    if mlp_rows is not None:
        for module in model.modules():
            asked = getattr(getattr(module, "config", None), "output_router_logits", False)
            _check_routers(module, (), {"output_router_logits": asked})
            if layers[0] in module.modules():
                module.register_forward_pre_hook(_check_routers, with_kwargs=True)
        chunk_rows_([_mlp_of(layer) for layer in layers], mlp_rows)
    return checkpoint_layers_(layers, recompute, offload=offload)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: its list of modules with the most parameters, as experts and image encoders have fewer.

    Raises:
        NotImplementedError: The model has no list of modules.
    """
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise NotImplementedError(
            f"a model must have its layers in an nn.ModuleList, got none in {type(model).__name__}; pass its layers to "
            "checkpoint_layers_ and its MLPs to chunk_rows_"
        )
    return max(lists, key=lambda layers: sum(x.numel() for layer in layers for x in layer.parameters()))


def _check_routers(_: nn.Module, __: Any, options: Mapping[str, Any]) -> None:
    """Raise where a config, or a call of a model, asks for the logits of routers."""
    if options.get("output_router_logits"):
        raise NotImplementedError(
            "MLPs by chunks of rows must be those of a model that returns no logits of its routers, which would be those of a "
            "chunk, without a gradient; got output_router_logits=True: set it to False in model.config, leave it out of calls, "
            "or drop mlp_rows"
        )


def _mlp_of(layer: nn.Module) -> nn.Module:
    found = next((x for name in MLP_NAMES if isinstance(x := getattr(layer, name, None), nn.Module)), None)
    if found is None or sum(x.default is x.empty for x in inspect.signature(found.forward).parameters.values()) != 1:
        raise NotImplementedError(
            f"a layer must have an MLP of one tensor as {', '.join(MLP_NAMES)} to be computed by chunks of rows, got "
            f"{type(layer).__name__}; leave mlp_rows out, or pass its MLPs to chunk_rows_"
        )
    return found
