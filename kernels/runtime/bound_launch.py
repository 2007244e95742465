"""Launches of Triton kernels that are bound once.

Owns the table of compiled kernels, the arguments of the driver, and all knowledge of Triton's internals.

Binding the arguments of a kernel costs the host more than a short kernel takes. Binding depends on a few facts about each
argument: dtype and alignment of a tensor, width of an integer and, unless the kernel declares it in do_not_specialize,
whether it is 1 or a multiple of 16, the block of a descriptor, and the constants. The compiled kernel is looked up by these,
and launched with arguments for the driver: addresses in place of tensors, and encoded descriptors. The caching allocator
returns the same addresses again and again, so encoded descriptors are kept by address, which keeps no memory alive.
The public `compiled[grid](*args)` takes tens of microseconds: it asks for the device, makes metadata for profilers, and
encodes every descriptor. `_open` finds the function below all that, which Triton 3.6 to 3.8 keep in the same places (3.8
encodes a descriptor with one unused argument more), and skips the request for scratch memory where a kernel needs none.
Where something is not as expected (another version, another vendor, the interpreter, a test that compiles without
launching), and whenever a profiler has hooked launches, the public way is taken.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

WORD = 16  # bytes and multiples of integers: what Triton specialises on
CAPACITY = 512
"""Encoded descriptors that a compiled kernel keeps; beyond it all are forgotten, and encoded again as they come."""

_NARROW = "all in 32 bits"
_LEADING = ("self", "gridX", "gridY", "gridZ", "stream", "function")


class Template:
    """Properties that are the same for all tensors of one shape, strides and dtype that a kernel sees through one block."""

    __slots__ = ("_fields", "_kind", "fact")

    def __init__(self, descriptor: Any) -> None:
        self._kind = type(descriptor)
        self._fields = {name: value for name, value in vars(descriptor).items() if name != "base"}
        self._fields["template"] = self
        self.fact = _fact_of_descriptor(descriptor)

    def over(self, x: Any) -> Any:
        """The descriptor of a tensor, 16-byte aligned; nothing is checked again."""
        descriptor = object.__new__(self._kind)
        vars(descriptor).update(self._fields, base=x)
        return descriptor


@dataclass(eq=False)
class Bound:
    """A compiled kernel and what its launches have in common.

    Attributes:
        run: Launches with a grid, a stream and flat arguments; None: only the public way is known.
        straight: A shorter way, without a request for scratch memory at each launch, and its arguments between stream and
            arguments; None: the kernel may need scratch memory.
        encoded: What they became, by number, address and template.
    """

    compiled: Any
    tail: tuple[Any, ...]
    run: Callable[..., None] | None = None
    straight: tuple[Callable[..., None], tuple[Any, ...]] | None = None
    metas: Sequence[Any] = ()
    blanks: tuple[None, ...] = ()
    encoded: dict[tuple[int, int, Template], list[Any]] = field(default_factory=dict)

    def encode(self, number: int, descriptor: Any) -> list[Any]:
        """Encode a descriptor, by its number among the descriptors."""
        inside = importlib.import_module("triton.backends.nvidia.driver")
        return inside.make_tensordesc_arg(descriptor, self.metas[number], *self.blanks)

    def encoding(self, number: int, template: Template, address: int) -> list[Any]:
        """Encode the descriptor of a tensor at an address, once."""
        key = (number, address, template)
        found = self.encoded.get(key)
        if found is None:
            if len(self.encoded) >= CAPACITY:
                self.encoded.clear()
            # only the address of the tensor is read
            place = SimpleNamespace(data_ptr=lambda: address)
            found = self.encoded[key] = self.encode(number, template.over(place))
        return found


@dataclass(frozen=True, eq=False)
class _Places:
    """Positions of run-time arguments by kind, for one combination of types; facts about the others follow from their types.

    Attributes:
        general: Gives the integers that are never specialised on, the first of them twice; two zeros where there is none.
        special: Of the other integers.
        tensors: Of tensors.
        tuples: Of tuples of tensors.
        descriptors: Of descriptors.
    """

    general: Callable[[Sequence[Any]], tuple[int, ...]]
    special: tuple[int, ...]
    tensors: tuple[int, ...]
    tuples: tuple[int, ...]
    descriptors: tuple[int, ...]


@dataclass(eq=False)
class _Kernel:
    """A kernel and what it was compiled to."""

    kernel: Any
    names: tuple[str, ...]
    general: tuple[bool, ...]
    places: dict[tuple[type, ...], _Places] = field(default_factory=dict)
    variants: dict[Hashable, Bound] = field(default_factory=dict)


_kernels: dict[int, _Kernel] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], **options: int
) -> Bound | None:
    """Launches a kernel on the current stream of the device that its tensors are on.

    Args:
        kernel: A `triton.jit` or `gluon.jit` function.

    Returns:
        What was launched; None: nothing is known of it, as of an emulated kernel.
    """
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = _describe(kernel)
    types = tuple(map(type, args))
    places = known.places.get(types)
    if places is None:
        places = known.places[types] = _find_places(known, args)
    facts: list[Hashable] = [types]
    general = places.general(args)
    facts.append(_NARROW if max(general) < 2**31 and min(general) >= -(2**31) else tuple(map(_is_narrow, general)))
    for i in places.special:
        x = args[i]
        facts.append((_is_narrow(x), x == 1, x % WORD == 0))
    for i in places.tensors:
        facts.append(_fact_of_tensor(args[i]))
    for i in places.tuples:
        facts.append(tuple(map(_fact_of_tensor, args[i])))
    for i in places.descriptors:
        x = args[i]
        template = getattr(x, "template", None)
        facts.append(_fact_of_descriptor(x) if template is None else template.fact)
    # tensors of one launch are on one device
    index = args[places.tensors[0]].device.index if places.tensors else None
    if index is None and places.descriptors:
        index = args[places.descriptors[0]].base.device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, grid, args, constants, **options)
    key = (index, *constants, *constants.values(), *options, *options.values(), *facts)
    bound = known.variants.get(key)
    grid = (*grid, 1, 1)[:3]
    if bound is None:
        compiled = kernel[grid](*args, **constants, **options)
        if compiled is None:
            return None
        bound = known.variants[key] = _open(compiled, _tail(known, len(args), constants, options))
        return bound
    if bound.run is None or is_hooked():
        bound.compiled[grid](*args, *bound.tail)
        return bound
    flat: list[Any] = []
    number = 0
    for x in args:
        if isinstance(x, Tensor):
            flat.append(x.data_ptr())
        elif isinstance(x, tuple):
            flat.append(tuple(part.data_ptr() for part in x))
        elif hasattr(x, "block_shape"):
            template = getattr(x, "template", None)
            flat += bound.encode(number, x) if template is None else bound.encoding(number, template, x.base.data_ptr())
            number += 1
        else:
            flat.append(x)
    active: Any = driver.active  # its declared class does not say that devices have streams
    bound.run(*grid, active.get_current_stream(index), *flat, *bound.tail)
    return bound


def _describe(kernel: Any) -> _Kernel:
    params = getattr(kernel, "params", None) or ()
    general = tuple(bool(getattr(param, "do_not_specialize", False)) for param in params)
    return _Kernel(kernel, tuple(getattr(kernel, "arg_names", ())), general)


def _find_places(known: _Kernel, args: Sequence[Any]) -> _Places:
    integers = [i for i, x in enumerate(args) if type(x) is int]
    general = [i for i in integers if i < len(known.general) and known.general[i]]
    return _Places(
        general=(lambda _: (0, 0)) if not general else itemgetter(general[0], *general),
        special=tuple(i for i in integers if i not in general),
        tensors=tuple(i for i, x in enumerate(args) if isinstance(x, Tensor)),
        tuples=tuple(i for i, x in enumerate(args) if isinstance(x, tuple)),
        descriptors=tuple(i for i, x in enumerate(args) if hasattr(x, "block_shape")),
    )


def _is_narrow(x: int) -> bool:
    return -(2**31) <= x < 2**31


def _tail(
    known: _Kernel, count: int, constants: Mapping[str, Any], options: Mapping[str, int]
) -> tuple[Any, ...] | None:
    """The compile-time arguments in the order of the signature; None where a default stands for one."""
    values = {**options, **constants}
    names = known.names[count:]
    return tuple(values[name] for name in names) if all(name in values for name in names) else None


def _fact_of_tensor(x: Tensor) -> Hashable:
    return x.dtype if x.data_ptr() % WORD == 0 else (x.dtype,)


def _fact_of_descriptor(x: Any) -> Hashable:
    return x.base.dtype, *x.block_shape


def is_hooked() -> bool:
    """Return whether a profiler has hooked launches."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before)) or bool(getattr(after, "calls", after))


def _open(compiled: Any, tail: tuple[Any, ...] | None) -> Bound:
    public = Bound(compiled, () if tail is None else tail)
    try:
        inside = importlib.import_module("triton.backends.nvidia.driver")
        outer = compiled.run
        if tail is None or type(outer) is not inside.CudaLauncher:
            return public
        if tuple(inspect.signature(type(outer).__call__).parameters)[:6] != _LEADING:
            return public
        bare, metas = copy.copy(outer), []
        if inspect.isfunction(outer.launch):
            # what encodes descriptors, around what launches
            cells = inspect.getclosurevars(outer.launch).nonlocals
            bare.launch, metas = cells["launcher"], cells["tensordesc_meta"]
        function, packed = compiled.function, compiled.packed_metadata
        blanks = _blanks(inside.make_tensordesc_arg)
    except (ImportError, AttributeError, KeyError):
        return public
    if blanks is None:
        return public
    public.metas, public.blanks = metas, blanks
    public.straight = _find_straight(bare, function, packed)
    if public.straight is None:
        public.run = lambda x, y, z, stream, *args: bare(x, y, z, stream, function, packed, None, None, None, *args)
    else:
        launch, constants = public.straight
        public.run = lambda x, y, z, stream, *args: launch(x, y, z, stream, *constants, *args)
    return public


def _find_straight(bare: Any, function: int, packed: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """See `Bound.straight`; which arguments Triton hands on, and in which order, is seen from a launch that goes nowhere."""
    marks = [object() for _ in range(6)]  # a grid, a stream and two arguments, which support no arithmetic
    seen: list[tuple[Any, ...]] = []
    astray = copy.copy(bare)
    astray.launch = lambda *args: seen.append(args)
    try:
        astray(*marks[:4], function, packed, None, None, None, *marks[4:])
        [(*first, last)] = seen
    except (TypeError, ValueError):
        return None
    launch: Callable[..., None] = bare.launch
    if [*first[:4], *first[-1:], last] == marks:
        return launch, tuple(first[4:-1])
    if first[:4] + list(last if isinstance(last, (tuple, list)) else ()) == marks:
        constants = tuple(first[4:])
        return lambda x, y, z, stream, *args: launch(x, y, z, stream, *constants, args), ()
    return None


def _blanks(encode: Callable[..., Any]) -> tuple[None, ...] | None:
    """Arguments that are passed to Triton's encoding behind descriptor and meta; None: it is not known."""
    names = tuple(inspect.signature(encode).parameters)
    if names[:2] != ("arg", "metadata") or set(names[2:]) - {"_"}:
        return None
    return (None,) * (len(names) - 2)
