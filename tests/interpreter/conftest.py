from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start of the process")
    for item in items:
        if "interpreter" in item.path.parts:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def patch_the_language_once_per_launch() -> Iterator[None]:
    """The interpreter patches `triton.language` at every call of a device function: most of the time of these tests.

    A launch patches the module its kernel names; Triton's own device functions name another one, which stays patched from
    the first call on. So one call for each set of names is enough.
    """
    if not INTERPRETED:
        yield
        return
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
