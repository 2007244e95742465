"""Put the transformer of a diffusion pipeline on a ring, and take it off."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.utils.torch_utils import unwrap_module
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ringattn.integrations.diffusers.denoisers import AttentionCall, Cut, DenoiserSpec, find_spec
from ringattn.integrations.diffusers.hooks import (
    AttentionHook,
    CutHook,
    ForwardHook,
    GatherHook,
    SegmentShardings,
    check_supported,
)
from ringattn.ring import Ring, check_ring
from ringattn.sharding_context import checkpoint_contexts

_HOOKS = ("ringattn_cut", "ringattn_attention", "ringattn_gather", "ringattn")


def enable_ring(transformer: nn.Module, ring: Ring, *, spec: DenoiserSpec | None = None) -> None:
    """Run the transformer of a diffusion pipeline on a ring: each rank computes its share of the tokens.

    Every rank passes the whole input, as on one process, and gets the whole output. Text and image or video tokens are each split
    over the ranks; attention spans all of them. The mean over ranks of the gradients of a loss that every rank computes of the
    whole output equals the gradients of one process, as DDP and FSDP average them.

    Load weights and LoRA adapters first: hooks belong to the modules that are there. The transformer may be compiled. Gradient
    checkpointing needs `transformer.enable_gradient_checkpointing(checkpoint)`.

    Args:
        transformer: Model of a class in `denoisers.DENOISERS` (`docs/diffusers.md` lists them), or another model with a spec. It
            attends with diffusers' backend "native".
        ring: The ranks that share each sample. All call this, and then the transformer with the same input.
        spec: Where the tokens of another model are; default by the class of the transformer.

    Raises:
        NotImplementedError: There is no spec for the model; or, here or in a forward, a cache, an IP adapter or diffusers' own
            parallelism is enabled, a mask differs between queries, or a segment is shorter than the model can split.
        ValueError: The transformer is on a ring already, or a spec does not name its modules; in a forward, ranks have different
            input.
        RuntimeError: In a forward, a layer does not attend with `torch.nn.functional.scaled_dot_product_attention`, or the model is
            a copy of the one on the ring, or has another last module.
        TypeError: ring is no Ring, or transformer no module.
    """
    check_ring(ring)
    with ring.propagate_errors():
        if not isinstance(transformer, nn.Module):
            raise TypeError(f"transformer must be a module, got {type(transformer).__name__}; pass pipe.transformer")
        transformer = unwrap_module(transformer)
        check_supported(transformer)
        if ring.virtual_size > ring.world_size:
            raise NotImplementedError(
                f"ring must have one virtual rank per process, got virtual_size={ring.virtual_size} on {ring.world_size}: segments "
                "are joined in another order; leave virtual_size out"
            )
        if _registry(transformer).get_hook("ringattn") is not None:
            raise ValueError("transformer must not be on a ring yet, got one that is; call disable_ring(transformer)")
        hooks = list(_make_hooks(transformer, SegmentShardings(ring), spec or find_spec(transformer)))
    for name, module, hook in hooks:
        _registry(module).register_hook(hook, name)


def disable_ring(transformer: nn.Module) -> None:
    """Take a transformer off its ring: it runs on one process as before `enable_ring`.

    Args:
        transformer: As passed to `enable_ring`; nothing changes when it is on no ring.
    """
    for name in reversed(_HOOKS):
        _registry(unwrap_module(transformer)).remove_hook(name)


def checkpoint(module: nn.Module, *args: Any) -> Any:
    """Run a block of a transformer on a ring without keeping activations: the function of `enable_gradient_checkpointing`.

    Args:
        module: The block.
        *args: Its arguments.

    Returns:
        Output of the block.
    """
    return torch_checkpoint(module, *args, use_reentrant=False, context_fn=checkpoint_contexts)


def _make_hooks(
    model: nn.Module, shardings: SegmentShardings, spec: DenoiserSpec
) -> Iterator[tuple[str, nn.Module, ModelHook]]:
    """Yield name, module and hook; that of the model's forward last, around the others."""
    modules = dict(model.named_modules())
    patterns = {**dict.fromkeys(spec.attention, (AttentionCall(),)), **spec.calls}
    attention = {name: calls for pattern, calls in patterns.items() for name in _match(modules, pattern)}
    known = attention.keys() | {name for pattern in spec.local for name in _match(modules, pattern)}
    present = {name.removesuffix(".processor") for name in getattr(model, "attn_processors", {})}
    if unknown := sorted(present - known):
        raise ValueError(
            f"a DenoiserSpec must name every attention module, got {type(model).__name__} with {', '.join(unknown[:3])} beside "
            "those named; add them to attention=, calls= or local="
        )
    inputs: dict[str, dict[str, Cut]] = {}
    for pattern, arguments in spec.inputs.items():
        for name in _match(modules, pattern):
            inputs.setdefault(name, {}).update(arguments)
    outputs = {name: dims for pattern, dims in spec.outputs.items() for name in _match(modules, pattern)}
    for name in inputs.keys() | outputs.keys():
        yield "ringattn_cut", modules[name], CutHook(shardings, inputs.get(name, {}), outputs.get(name, ()))
    for name, calls in attention.items():
        yield "ringattn_attention", modules[name], AttentionHook(shardings, calls, spec.skip)
    gathered = {name: where for pattern, where in spec.outputs_gathered.items() for name in _match(modules, pattern)}
    for name, where in gathered.items():
        yield "ringattn_gather", modules[name], GatherHook(shardings, where)
    yield "ringattn", model, ForwardHook(shardings, spec, {name: modules[name] for name in gathered})


def _match(modules: dict[str, nn.Module], pattern: str) -> list[str]:
    """Return the names that a pattern matches part by part; refuse a pattern that matches none."""
    parts = pattern.split(".")

    def matches(name: str) -> bool:
        names = name.split(".")
        return len(names) == len(parts) and all(map(fnmatchcase, names, parts))

    if found := [name for name in modules if matches(name)]:
        return found
    raise ValueError(
        f"a DenoiserSpec must name modules of the transformer, got {pattern!r}, which {type(modules['']).__name__} does not have; "
        "print [name for name, _ in transformer.named_modules()]"
    )


def _registry(module: nn.Module) -> HookRegistry:
    return HookRegistry.check_if_exists_or_initialize(module)
