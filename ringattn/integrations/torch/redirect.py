"""Redirect a model's calls of torch's scaled_dot_product_attention to ring attention, without changes to its code.

Refuses to replace functions of torch for the process: a `TorchFunctionMode` holds inside the forward of one module only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringattn.integrations.torch.sdpa import scaled_dot_product_attention
from ringattn.ring import default_world_size
from ringattn.sharding_context import find_sharding

_OTHERS: dict[str, str] = {
    "multi_head_attention_forward": "replace_multihead_attention(model)",
    "flex_attention": "masks of ringattn.masks with ring_attention",
}
"""Functions of torch that attend by themselves, by name, and what serves them on a ring."""


class RedirectSDPA(TorchFunctionMode):
    """Run another function in place of torch's scaled_dot_product_attention inside a `with` statement.

    Args:
        attend: Function with the arguments of torch's.

    Attributes:
        num_calls: Calls that it took.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or the other one in place of scaled_dot_product_attention."""
        if func is F.scaled_dot_product_attention:
            self.num_calls += 1
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _OnlySDPA(RedirectSDPA):
    """Redirection in a model of any kind: other functions of torch that attend are refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OTHERS:
            raise NotImplementedError(
                f"a module with redirected attention must call scaled_dot_product_attention, got {name}, which would attend to "
                f"this rank's keys only; use {_OTHERS[name]}"
            )
        # a call of ring attention itself, such as that of a RingMultiheadAttention
        self.num_calls += getattr(func, "namespace", "") == "ringattn"
        return super().__torch_function__(func, types, args, kwargs)


def redirect_sdpa(model: nn.Module) -> None:
    """Make every call of torch's `scaled_dot_product_attention` inside a model ring attention, in place.

    For models whose code calls the function, as those of timm: each call becomes `ringattn.scaled_dot_product_attention` with the
    current sharding (`use_sharding`). The model's input must be this rank's rows, so redirect the part of a model that works on
    rows, as its blocks. On one process, outside of any `use_sharding`, the function is torch's. Compiled code breaks its
    graph at the module. Call it once, after weights are loaded; copies of the model are redirected too.

    Args:
        model: Module whose forward, with all modules below it, is redirected.

    Raises:
        TypeError: model is no module.
        ValueError: It, or a module in it, is redirected already.
        RuntimeError: In a forward: it never called the function, or there is no current sharding among several ranks.
        NotImplementedError: In a forward: it attended by another function of torch (`nn.MultiheadAttention`, FlexAttention).

    Example:
        >>> from ringattn import Ring, use_sharding
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):  # b h s d
        ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> model = Attention()
        >>> redirect_sdpa(model)
        >>> with use_sharding(Ring().sharding(5)):
        ...     model(torch.ones(1, 2, 5, 16)).shape
        torch.Size([1, 2, 5, 16])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}; pass the model itself")
    redirected = [name for name, module in model.named_modules() if _is_redirected(module)]
    if redirected:
        raise ValueError(f"model must not be redirected yet, got {redirected[0]!r} that is; call redirect_sdpa once")
    # a bound method in a partial: copies of the module have their own
    model.forward = partial(_untraced_forward(), model.forward)


def _is_redirected(module: nn.Module) -> bool:
    forward: Any = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _untraced_forward()


@cache  # not at import: it imports the compiler
def _untraced_forward() -> Callable[..., Any]:
    """Return `_forward`, at which compiled code breaks: methods of tensors are not traced under a TorchFunctionMode."""
    untraced: Any = torch.compiler.disable(_forward)
    return untraced


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a redirected module."""
    found = find_sharding()
    if found is None and default_world_size() == 1:
        return forward(*args, **kwargs)
    with _OnlySDPA(scaled_dot_product_attention) as mode:
        output = forward(*args, **kwargs)
    if not mode.num_calls:
        error = RuntimeError(
            "a module with redirected attention must call torch.nn.functional.scaled_dot_product_attention, got no call; "
            "switch its fused attention on (timm: set_fused_attn(True)), or call ringattn.ring_attention in its code"
        )
        if found is not None:
            found[0].ring.raise_on_all_ranks(error)
        raise error
    return output
