"""Compilation of a Triton kernel for a GPU that is not there, as a launch with given types and constants would have it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory of a program, by compute capability."""


def _leaves(index: int, kind: str | tuple[str, ...]) -> list[tuple[tuple[int, ...], str]]:
    """Return the places and types of an argument, or of the elements of a tuple."""
    return [((index,), kind)] if isinstance(kind, str) else [((index, i), x) for i, x in enumerate(kind)]


def build(
    fn: Any,
    types: Mapping[str, str | tuple[str, ...]],
    constants: Mapping[str, object],
    arch: int | str,
    *,
    unaligned: Collection[str] = (),
    **options: int,
) -> Any:
    """Compile for compute capability `arch` (80, 90, 100), or a GPU of AMD ("gfx942").

    Args:
        types: Of arguments, by name, of a tuple's elements in a tuple; others are i32, and unit column strides (`_sn`) constants.
        unaligned: Integers that are not multiples of 16, besides those that the kernel does not specialise.
    """
    names = fn.arg_names
    constants = {name: 1 for name in names if name.endswith("_sn") and name not in types} | dict(constants)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    general = {names[x] if isinstance(x, int) else x for x in fn.do_not_specialize or ()} | {*unaligned}
    leaves = [(at, n, x) for i, n in enumerate(names) for at, x in _leaves(i, signature[n])]
    aligned = [at for at, n, x in leaves if x.startswith(("*", "i32")) and n not in general]
    attributes = {at: [["tt.divisibility", 16]] for at in aligned}
    known = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn, signature, known, attributes)
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    return triton.compile(source, target=target, options=options)
