"""Hooks on models that are called with a sharding: they cut whole inputs, gather for heads that choose a row, and check outputs.

Note [Whole inputs]
    A model that is called with a sharding usually gets this rank's rows. Models with images and heads that choose a row (sequence
    classification, rewards) read tokens of the whole sequence, so `shard_batch` gives them whole ones. The innermost model, which
    embeds tokens or gets embeddings, then takes this rank's rows of them: everything before it runs on whole inputs on every rank,
    as image encoders, and everything after it on the rows of a rank, as a head for the next token. With `gather_outputs=True` it
    returns the hidden states of the whole sequence, so a head chooses as in one process.

Models ignore keywords that they do not know. So these hooks also raise where a model did not attend with the sharding, or returns
fewer rows than this rank has. They are torch's public hooks, on every `PreTrainedModel`, and do nothing without a sharding.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ringattn.autograd import num_forwards, side
from ringattn.inference import ForwardBatch
from ringattn.integrations.linear.transformers_layers import PENDING
from ringattn.integrations.transformers.latents import hand_latents_on
from ringattn.integrations.transformers.model_forward import new_tokens, own_rows, replicated_rows_ring
from ringattn.integrations.transformers.positions import has_sections
from ringattn.integrations.transformers.support import (
    NAME,
    check_supported,
    is_tower,
    layers_that_attend,
    predicts_in_place,
)
from ringattn.plan.sharding import Sharding

LOSS_ROWS = 1024
"""Rows of logits that are copied to fp32 at a time, to check the loss."""

_OF_ROWS = ("last_hidden_state",)
_LAST = ("cache_position", "position_ids")  # tokens are their last dim
_WHOLE = ("input_ids", "inputs_embeds", "token_type_ids", "visual_pos_masks", *_LAST)

_loss_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_forwards_before: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_watching: list[bool] = []


def watch_models() -> None:
    """Add the hooks to all models of this process, and to those made later; calling it again changes nothing."""
    if _watching:
        return
    _watching.append(True)
    register_module_module_registration_hook(_watch)
    _watch_existing()


def _watch_existing() -> None:
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):  # isinstance would ask proxies for their class
            _watch(found)


def _watch(module: nn.Module, *_: Any) -> None:
    hand_latents_on(module, NAME)
    if isinstance(module, OptimizedModule) and not module._forward_pre_hooks:
        # hooks of the model in it are traced
        module.register_forward_pre_hook(_note_batch, with_kwargs=True)
    # a copy has the hooks and this attribute
    if isinstance(module, PreTrainedModel) and "_watched_by_ringattn" not in vars(module):
        vars(module)["_watched_by_ringattn"] = True
        check_supported(module, "new model")
        module.register_forward_pre_hook(_before, with_kwargs=True)
        module.register_forward_hook(_after, with_kwargs=True)


def _note_batch(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let compiled layers find the digest of the batch, which is no part of their graphs."""
    sharding = kwargs.get("sharding")
    if isinstance(sharding, Sharding) and not torch.compiler.is_compiling():
        side.batch = sharding.batch


def _shared(module: nn.Module, kwargs: dict[str, Any]) -> Sharding | None:
    """Return the sharding of a call whose rows are on several ranks; None for others, and for encoders of images."""
    sharding = kwargs.get("sharding")
    shared = isinstance(sharding, Sharding) and sharding.world_size > 1
    return sharding if shared and not is_tower(module) else None


def _is_innermost(module: nn.Module) -> bool:
    return not any(isinstance(child, PreTrainedModel) and not is_tower(child) for child in module.children())


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    step = kwargs.get("step")
    if isinstance(step, ForwardBatch) and _is_innermost(module) and not is_tower(module):
        with step.cache.ring.propagate_errors():
            check_supported(step.cache.ring, "ring")
        if replicated_rows_ring() is not None:
            return None
        return _take(args, kwargs, new_tokens(step), partial(own_rows, step))
    sharding = kwargs.get("sharding")
    if not isinstance(sharding, Sharding) or is_tower(module):
        return None
    _note_batch(module, args, kwargs)
    with sharding.ring.propagate_errors():
        check_supported(sharding.ring, "ring")
        check_supported((module, kwargs), "labelled call")
    if sharding.world_size == 1:
        return None
    with sharding.ring.propagate_errors():
        check_supported((module, kwargs), "sharded call")
        replaced = hasattr(module, PENDING) or not _is_innermost(module)
        if not torch.compiler.is_compiling():
            replaced = any(hasattr(part, PENDING) for part in module.modules())
        check_supported(module.config, "recurrent model" if replaced else "model")
        if not torch.compiler.is_compiling():
            check_attention(module)
            _forwards_before[module] = num_forwards()
    if not _is_innermost(module):
        return None
    taken = _take(args, kwargs, sharding.seq_len, sharding.shard)
    args, kwargs = taken or (args, kwargs)
    positions = kwargs.get("position_ids")
    if positions is None and taken is None:
        with sharding.ring.propagate_errors():
            raise ValueError(
                "position_ids must be given to a model whose rows are sharded, got none; pass the batch through shard_batch (the "
                "model would number the rows of a shard from 0)"
            )
    # not where the weights are, which FSDP's CPU offload keeps in host memory
    device = next(x.device for x in (positions, _tokens(args, kwargs)) if x is not None)
    counted = sharding.document_positions.to(device)[None]
    return args, {**kwargs, "position_ids": _with_text(counted if positions is None else positions, counted, module)}


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((x for x in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1]) if x is not None), None)


def _take(
    args: tuple[Any, ...], kwargs: dict[str, Any], length: int, take: Callable[..., Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with this rank's rows of whole inputs, of that length; None for inputs that are not whole."""
    tokens = _tokens(args, kwargs)
    if tokens is None or tokens.shape[1] != length:
        return None
    whole = {name: x for name, x in kwargs.items() if name in _WHOLE and x is not None}
    mine: dict[str, Any] = {name: take(x, dim=x.dim() - 1 if name in _LAST else 1) for name, x in whole.items()}
    seen, added = whole.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if seen is not None and added is not None:
        # rows of images that are added to their tokens, in the order of these
        order = (seen.flatten().cumsum(0) - 1).view(seen.shape)
        rows = take(order, dim=1)[mine["visual_pos_masks"]]
        mine["deepstack_visual_embeds"] = [x[rows] for x in added]
    first = (take(args[0], dim=1),) if args and args[0] is not None else args[:1]
    return (*first, *args[1:]), {**kwargs, **mine}


def _with_text(positions: Tensor, counted: Tensor, module: nn.Module) -> Tensor:
    """Return positions in the shape in which models with several per token pass those of the text, the first, to attention."""
    if positions.dim() == 2:
        return positions.expand(4, *positions.shape) if has_sections(module.config) else positions
    return positions if len(positions) == 4 else torch.cat([counted.expand(1, *positions.shape[1:]), positions])


def _after(module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    sharding = _shared(module, kwargs)
    if sharding is None:
        return None
    with sharding.ring.propagate_errors():
        if not torch.compiler.is_compiling():
            check_attention(module, _forwards_before.pop(module, None))
    gather = bool(kwargs.get("gather_outputs"))
    if _is_innermost(module):
        _gather(module, output, sharding, gather)
        # rows that fill a short batch are in its mask, if it has one
        filled = kwargs.get("attention_mask") is not None
        _gather_routers(module, output, sharding.with_padding(0) if filled else sharding)
    if not gather:
        with sharding.ring.propagate_errors():
            _check_rows(module, output, sharding)
        if module not in _loss_checked and not torch.compiler.is_compiling():
            _check_loss(module, kwargs, output, sharding)
    return output


def check_attention(model: nn.Module, forwards: int | None = None) -> None:
    """Raise when a model has no layer that will attend with ringattn, or none did after so many forwards of it had begun."""
    if forwards is not None and num_forwards() != forwards:
        return
    by_name, directly = layers_that_attend(model)
    config: Any = getattr(model, "config", None)
    named = config is not None and getattr(config.get_text_config(), "_attn_implementation", None) == NAME
    # models around the innermost one may have no implementation of their own
    if forwards is None and (named or directly or not _is_innermost(model)) if by_name else directly:
        return
    raise RuntimeError(
        f"a model that is called with a sharding must attend with ringattn, got {type(model).__name__}, "
        + (
            "which takes the name and attends by itself, or not at all; run this model on one process"
            if named
            else "which did not; make it with attn_implementation='ringattn', or call model.set_attn_implementation('ringattn'), "
            "after ringattn.integrations.transformers.register()"
        )
    )


def check_models_of(module: nn.Module) -> None:
    """Raise when none of the models in a module will attend with ringattn; a module without a model passes."""
    parts = (part for part in module.modules() if isinstance(part, PreTrainedModel) and not is_tower(part))
    error: RuntimeError | None = None
    for part in filter(_is_innermost, parts):
        try:
            return check_attention(part)
        except RuntimeError as found:
            error = found
    if error is not None:
        raise error


def _gather(module: nn.Module, output: Any, sharding: Sharding, gather: bool) -> None:
    """Set the pooled output to that of the whole sequence, and the hidden states too where they are to be gathered."""
    hidden, pooled = (getattr(output, name, None) for name in ("last_hidden_state", "pooler_output"))
    if hidden is None and gather:
        error = NotImplementedError(
            f"a model must return last_hidden_state to be gathered, got {type(output).__name__} from {type(module).__name__}; "
            "leave return_dict out"
        )
        sharding.ring.raise_on_all_ranks(error)
    if hidden is None or not (gather or pooled is not None) or hidden.shape[1] != sharding.shard_len:
        return
    whole = sharding.unshard(hidden)
    if pooled is not None:
        pooler = getattr(module, "pooler", None)
        output.pooler_output = pooler(whole) if isinstance(pooler, nn.Module) else None
        if getattr(output.pooler_output, "shape", None) != pooled.shape:
            error = NotImplementedError(
                "the pooler of a model must be a module of its hidden states where ranks share a sequence, got that of "
                f"{type(module).__name__}; make the model without a pooler, and choose rows with take_rows"
            )
            sharding.ring.raise_on_all_ranks(error)
    if gather:
        output.last_hidden_state = whole


def _gather_routers(module: nn.Module, output: Any, sharding: Sharding) -> None:
    """Give every rank the router logits of all rows, from which a model computes the loss that balances its experts.

    That loss is no mean over the rows of ranks, and all ranks then compute that of one process. Its gradient is right in the mean
    over ranks (Note [Gradient of a loss that every rank computes] of trainer.py).
    """
    logits: Any = getattr(output, "router_logits", None)
    if not logits or sharding.world_size == 1:
        return
    lost = output.last_hidden_state.requires_grad and not any(x.requires_grad for x in logits)
    # without checkpoints the layers of all routers are frozen
    if lost and any(getattr(x, "gradient_checkpointing", False) for x in module.modules()):
        raise NotImplementedError(
            "router logits must have gradients where their balance is a loss, got some of reentrant checkpoints, which have none; "
            "pass gradient_checkpointing_kwargs={'use_reentrant': False}, or set model.config.output_router_logits = False"
        )
    b = output.last_hidden_state.shape[0]
    rows = [x.reshape(b, sharding.shard_len, -1) for x in logits]  # b s e
    whole = sharding.unshard(torch.cat(rows, -1)).split([x.shape[-1] for x in rows], -1)
    output.router_logits = tuple(
        x.reshape(*((-1,) if old.dim() == 2 else (b, -1)), x.shape[-1]) for x, old in zip(whole, logits, strict=True)
    )


def balancing_loss(module: nn.Module, output: Any) -> Tensor | None:
    """Return the part of a model's loss that balances its experts; None where it has none."""
    loss: Any = getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor) or getattr(output, "loss", None) is None:
        return None
    config: Any = getattr(module, "config", None)
    names = ("router_aux_loss_coef", "aux_loss_coef")
    found = [x for owner in (module, config) for name in names if (x := getattr(owner, name, None)) is not None]
    if not found:
        raise NotImplementedError(
            f"a model that balances experts must have router_aux_loss_coef where ranks share a sequence, got none in "
            f"{type(module).__name__}; set model.config.output_router_logits = False"
        )
    return found[0] * loss


def _check_rows(module: nn.Module, output: Any, sharding: Sharding) -> None:
    """Raise when an output does not have this rank's rows: something chose among them."""
    routers: Any = getattr(output, "router_logits", None) or ()
    lengths = sharding.seq_len, sharding.seq_len - sharding.padding
    if any(isinstance(x, Tensor) and all(x.shape[:-1].numel() % n for n in lengths) for x in routers):
        raise NotImplementedError(
            f"router logits must be those of the {sharding.seq_len} rows of all ranks, got {tuple(routers[0].shape)} from "
            f"{type(module).__name__}, which does not return them with its hidden states; leave output_router_logits out, and set "
            "model.config.output_router_logits = False"
        )
    if isinstance(output, ModelOutput):
        entries = {name: x for name, x in output.items() if name.endswith(("logits", "embeddings")) or name in _OF_ROWS}
    else:
        parts = output if isinstance(output, tuple) else (output,)
        entries = {f"output {i}": x for i, x in enumerate(parts) if isinstance(x, Tensor) and x.dim()}
    for name, x in entries.items():
        if isinstance(x, Tensor) and (x.dim() < (3 if name == "logits" else 2) or x.shape[1] != sharding.shard_len):
            raise NotImplementedError(
                f"outputs must have this rank's {sharding.shard_len} rows where ranks share a sequence, got {name} of shape "
                f"{tuple(x.shape)} from {type(module).__name__}, which chooses among them; pass pooling=True to shard_batch, or "
                "choose rows with take_rows"
            )


def _check_loss(module: nn.Module, kwargs: dict[str, Any], output: Any, sharding: Sharding) -> None:
    """Raise on every rank when the loss of the first call with labels of tokens is not their sum over num_items_in_batch.

    Some models pass only labels to their loss, which shifts them once more and averages over those of a rank.
    """
    labels, count = (
        kwargs.get("labels" if predicts_in_place(module) else "shift_labels"),
        kwargs.get("num_items_in_batch"),
    )
    if isinstance(output, tuple) and kwargs.get("labels") is not None and len(output) > 1:
        loss, logits = output[:2]
    else:
        loss, logits = (getattr(output, name, None) for name in ("loss", "logits"))
    if labels is None or loss is None or logits is None or not count:
        return  # without labels in all of a step, there is nothing to divide
    rows, wanted = logits.detach().flatten(0, 1), labels.flatten().to(logits.device)
    pieces = zip(rows.split(LOSS_ROWS), wanted.split(LOSS_ROWS), strict=True)
    total = sum(float(nn.functional.cross_entropy(x.float(), y, reduction="sum")) for x, y in pieces)
    balance = balancing_loss(module, output)
    found = float(loss.detach()) - (0.0 if balance is None else float(balance))
    expected = total / float(count)
    # models that have just been made have much the same loss with any labels
    tolerance = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 1e-2
    equal = abs(found - expected) <= tolerance * (1 + abs(expected))
    ring: Any = sharding.ring
    if not ring.all_reduce_min(int(equal)):
        raise NotImplementedError(
            "the loss must be divided by num_items_in_batch where ranks share a sequence, got that of "
            f"{type(module).__name__}: {found:.5g} instead of {expected:.5g} on rank {sharding.rank}; leave labels out of the "
            "call, and take the sum over the labels from its logits"
        )
    _loss_checked.add(module)
