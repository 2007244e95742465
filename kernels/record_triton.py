"""Plain calls of launchers, under the names that three model kernels still use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import launch_triton


class Tape:
    """What a launcher launches with.

    Args:
        device: Where workspaces are.
    """

    launch = staticmethod(launch_triton.launch)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor for what one launch leaves to another."""
        return torch.empty(shape, dtype=dtype, device=self._device)


def recorded(launcher: Callable[..., None]) -> Callable[..., None]:
    """Gives a launcher its tape."""

    @functools.wraps(launcher)
    def run(first: Tensor, *args: Any, **kwargs: Any) -> None:
        launcher(Tape(first.device), first, *args, **kwargs)

    return run
