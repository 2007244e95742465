"""Layers whose backward computes their activations again, from checkpoints on the device or in host memory.

Note [What a layer keeps]
    With recompute="full" a layer keeps its inputs; with "selective" also what ring attention returned (o and lse), which a second
    run would compute from keys that move again. Both wait on the device, or with `offload` in host memory. Tensors that need no
    gradient, as tables of rotary embedding, are shared by layers and stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn.sharding_context import checkpoint_contexts
from ringattn.training.offload import Offloader, Saved, SavedGroup

RECOMPUTE = ("none", "selective", "full")
Offload = bool | int | Collection[int]
"""Layers whose checkpoints wait in host memory: all, the first so many, or those with these numbers."""


def checkpoint_layers_(
    layers: Sequence[nn.Module], recompute: str = "selective", *, offload: Offload = False
) -> Offloader | None:
    """Make the backward compute layers again instead of keeping their activations; changes their `forward`.

    Values and gradients stay the same to the bit. A current sharding (`ringattn.use_sharding`) is current in the second run too.
    Call it before FSDP, DDP or torch.compile wraps the layers; `offload` needs layers that are not compiled.

    Args:
        layers: Layers in the order in which they run; tensors in their arguments that need gradients are their checkpoints.
        recompute: "full": layers keep their inputs; "selective": also what ring attention returned; "none": nothing is changed.
        offload: Layers whose checkpoints wait in host memory: True, all; a number, the first so many, which wait longest; or the
            numbers of layers. Copies run on a side stream, from and to pinned memory that is used again.

    Returns:
        The host memory of checkpoints; None without `offload`.

    Raises:
        ValueError: recompute is none of the three, or offload names no layer, or comes with recompute="none".

    Example:
        >>> layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        >>> host = checkpoint_layers_(layers, "full", offload=True)
        >>> model = nn.Sequential(*layers)
        >>> model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        >>> host.host_bytes > 0
        True
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}; use one of these")
    moved = offloaded_layers(offload, len(layers))
    if recompute == "none":
        if moved:
            raise ValueError(
                f'offload must come with recompute="selective" or "full", got offload={offload} with "none"; only checkpoints of '
                "layers are moved"
            )
        return None
    offloader = Offloader() if moved else None
    for index, layer in enumerate(layers):
        layer.forward = _checkpointed(layer, recompute, offloader, index in moved)
    return offloader


def offloaded_layers(offload: Offload, layers: int) -> frozenset[int]:
    """Return the numbers of the layers whose checkpoints wait in host memory.

    Example:
        >>> [sorted(offloaded_layers(x, 3)) for x in (True, False, 2, (0, 2))]
        [[0, 1, 2], [], [0, 1], [0, 2]]
    """
    if isinstance(offload, bool):
        return frozenset(range(layers if offload else 0))
    if isinstance(offload, int):
        if not 0 <= offload <= layers:
            raise ValueError(
                f"offload must be at most the number of layers, {layers}, got {offload}; True is all of them"
            )
        return frozenset(range(offload))
    if beyond := [x for x in offload if not 0 <= x < layers]:
        raise ValueError(f"offload must name layers from 0 to {layers - 1}, got {beyond}; True is all of them")
    return frozenset(offload)


def _checkpointed(layer: nn.Module, recompute: str, offloader: Offloader | None, moves: bool) -> Callable[..., Any]:
    # inside of the module's call, so that hooks run once
    forward = layer.forward
    selective = recompute == "selective"

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if offloader is not None:
            return _offloaded(forward, args, kwargs, offloader.begin(moves=moves), selective)
        if torch.compiler.is_compiling():  # the graph has the sharding as a constant
            options = {"context_fn": _first_keeps_attention} if selective else {}
        else:
            options = {"context_fn": functools.partial(_contexts, selective)}
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def _contexts(selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts of the first and the second run of a layer whose checkpoint stays on the device."""
    first, second = checkpoint_contexts()
    if not selective:
        return first, second
    first, again = _first_keeps_attention()
    return first, _both(second, again)


def _keep_attention(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Recompute everything in the backward but ring attention, which would move the keys again."""
    return CheckpointPolicy.MUST_SAVE if _is_ours(op) else CheckpointPolicy.PREFER_RECOMPUTE


_first_keeps_attention = functools.partial(create_selective_checkpoint_contexts, _keep_attention)


def _is_ours(op: Any) -> bool:
    return getattr(op, "namespace", None) == "ringattn"


class _both(AbstractContextManager[None]):
    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _offloaded(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: SavedGroup, selective: bool
) -> Any:
    """Run a layer whose checkpoint belongs to a group (Note [What a layer keeps])."""
    leaves, tree = tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    # the inputs of the checkpoint, and nothing else, pass through the hooks
    inputs = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None

    def call(*inputs: Tensor) -> Any:
        given = list(leaves)
        for i, x in zip(places, inputs, strict=True):
            given[i] = x
        args, kwargs = tree_unflatten(given, tree)
        return forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = checkpoint_contexts()
        if not selective:
            return first, second
        kept: list[Any] = []
        return _KeepAttention(group, kept), _both(second, _GiveAttention(kept))

    with saved_tensors_hooks(group.save, Saved.get):
        return checkpoint(call, *inputs, use_reentrant=False, context_fn=contexts)


class _KeepAttention(TorchDispatchMode):
    """Keeps what ring attention returns in the first run of a layer."""

    def __init__(self, group: SavedGroup, kept: list[Any]) -> None:
        super().__init__()
        self._group, self._kept = group, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        found = func(*args, **(kwargs or {}))
        if _is_ours(func):
            # autograd writes itself into the tensors that are returned
            self._kept.append(tree_map_only(Tensor, lambda x: self._group.save(x.detach()), found))
        return found


class _GiveAttention(TorchDispatchMode):
    """Returns in the second run of a layer what ring attention has returned in the first."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept, self._next = kept, 0

    def __enter__(self) -> Any:
        """Begin with the first call."""
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return what the first run had from it."""
        if not _is_ours(func):
            return func(*args, **(kwargs or {}))
        self._next += 1
        return tree_map_only(Saved, lambda x: x.get(), self._kept[self._next - 1])
