"""Makes Triton's interpreter patch its language once per launch instead of once per call of a device function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def language_patched_once_per_launch() -> Iterator[None]:
    """The interpreter patches `triton.language` at every call of a device function: most of the time of its tests.

    A launch patches the module its kernel names; Triton's own device functions name another one, which stays patched from
    the first call on. So one call for each set of names is enough.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patched: set[tuple[bool, bool]] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = self.fn.__globals__.values()
        names = (any(value is tl for value in values), any(value is tl.core for value in values))
        if names not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(names)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
