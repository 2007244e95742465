"""An emulator of the part of Gluon that Hopper kernels use: runs their own source and their own launch code on a CPU.

Owns a model of one program: partitions of warps, shared memory, mbarriers, named barriers, the bulk copy engine, wgmma.
Refuses to know any kernel, and the layouts of registers: those the compiler checks.

    with emulated(), mode(seed=3):
        from ringattn.kernels.attention.hopper import api

Note [One runs at a time]
    Partitions are threads that hand a baton to one another, so a run is a function of the mode and nothing else. A
    partition runs until it blocks (or, with a seed, now and then passes the baton on); a copy completes when nobody can run
    (or, with a seed, sometimes earlier). What comes from other engines and devices, `outside`, happens when nobody can run and
    no copy is on its way (or, with a seed, sometimes earlier), one step at a time. Once nothing more comes, the patience of
    those who wait for a flag is over; if nobody waits for one, that is a deadlock, seen at once.

Note [What happened before]
    Every partition carries a clock: what it knows of each other partition, each mbarrier and each queue of wgmmas and
    stores. Clocks travel through arrivals and waits. Every access to shared memory is kept with the moment at which it is
    over (a copy: the phase it completes; a wgmma: its wait; a store: store_wait), and an access that conflicts with one that
    its partition cannot know to be over is a race, whatever order this run happened to take. A named barrier counts warps and
    not which they are: a partition that arrives again must know that its last round is over, or it may end it in another's place.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib
import inspect
import linecache
import math
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl

SHARED_BYTES = 227 * 1024
FREE_BARRIERS = range(8, 16)
WARP = 32

_TORCH = {
    tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float64: torch.float64,
    tl.int1: torch.bool, tl.int8: torch.int8, tl.int16: torch.int16, tl.int32: torch.int32, tl.int64: torch.int64,
    tl.uint8: torch.uint8, tl.uint16: torch.uint16, tl.uint32: torch.uint32, tl.uint64: torch.uint64,
    tl.float8e4nv: torch.float8_e4m3fn,
}  # fmt: skip
_TRITON = {torch_dtype: dtype for dtype, torch_dtype in _TORCH.items()}


class EmulationError(RuntimeError):
    """The kernel does what the machine forbids or leaves undefined."""


class Deadlock(EmulationError):
    """Every partition waits and no copy is on its way."""


class Race(EmulationError):
    """Two accesses to shared memory of which neither is known to come first."""


class BarrierError(EmulationError):
    """Too many arrivals, a barrier not made, a number that is taken."""


class NotWaitedFor(EmulationError):
    """The result or the accumulator of a wgmma in flight was used, or something was left in flight."""


class OutOfBounds(EmulationError):
    """A pointer left its tensor."""


class Overflow(EmulationError):
    """A 32-bit integer passed 2**31."""


class _Abandoned(BaseException):
    """Ends the threads of a program that has failed elsewhere."""


class Int(int):
    """A run-time integer scalar: division truncates, 32 bits must not overflow."""

    dtype: tl.dtype

    def __new__(cls, value: int, dtype: tl.dtype = tl.int32) -> Int:
        x = int.__new__(cls, value)
        x.dtype = dtype
        return x

    shape: tuple[int, ...] = ()
    type = property(lambda self: self.dtype)
    handle = property(lambda self: self)

    def to(self, dtype: tl.dtype, **_: Any) -> Any:
        return cast(self, dtype)

    def __invert__(self) -> Int:
        return Int(not self, tl.int1) if self.dtype == tl.int1 else Int(~int(self), self.dtype)

    def __neg__(self) -> Int:
        return Int(-int(self), self.dtype)

    def __pos__(self) -> Int:
        return self

    def __truediv__(self, other: Any) -> Any:
        return Tensor.of(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / Tensor.of(self)


def _narrow(value: int, dtype: tl.dtype) -> Int:
    bits = dtype.primitive_bitwidth
    if dtype.is_int_unsigned():
        return Int(value & (2**bits - 1), dtype)
    if bits >= 32 and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise Overflow(f"an {dtype} became {value} at {_where()}; cast to int64 before")
    return Int(value, dtype)


def _wider(a: tl.dtype, b: tl.dtype) -> tl.dtype:
    return a if a.primitive_bitwidth >= b.primitive_bitwidth else b


def _fits(value: int, dtype: tl.dtype) -> tl.dtype:
    """The dtype that a plain number takes beside a run-time integer."""
    if dtype == tl.int1:
        dtype = tl.int32
    return dtype if -(2**31) <= value < 2**31 else tl.int64


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise EmulationError(f"division by zero at {_where()}")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _integer_operation(name: str, function: Callable[[int, int], int], result: tl.dtype | None) -> None:
    def operate(a: Any, b: Any, flipped: bool) -> Any:
        if isinstance(b, tl.constexpr):
            b = b.value
        if isinstance(b, float):
            return getattr(Tensor.of(a), f"__{'r' if flipped else ''}{name}__")(b)
        if not isinstance(b, int):
            return NotImplemented
        dtype = _wider(a.dtype, b.dtype) if isinstance(b, Int) else _wider(a.dtype, _fits(b, a.dtype))
        value = function(int(b), int(a)) if flipped else function(int(a), int(b))
        if result is not None:
            return Int(value, result)
        if dtype == tl.int1 and name not in ("and", "or", "xor"):
            dtype = tl.int32
        return _narrow(value, dtype)

    setattr(Int, f"__{name}__", lambda a, b: operate(a, b, False))
    if result is None:
        setattr(Int, f"__r{name}__", lambda a, b: operate(a, b, True))


for _name, _function in {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": _divide,
    "mod": lambda a, b: a - b * _divide(a, b), "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
}.items():  # fmt: skip
    _integer_operation(_name, _function, None)
for _name, _function in {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}.items():  # fmt: skip
    _integer_operation(_name, _function, tl.int1)
Int.__hash__ = int.__hash__  # type: ignore[method-assign]


class Tensor:
    """A value in registers: immutable. Integers are kept as int64 and checked against their own width."""

    __slots__ = ("busy", "dtype", "layout", "t")

    def __init__(self, t: torch.Tensor, dtype: tl.dtype | None = None, layout: Any = None):
        self.dtype = _TRITON[t.dtype] if dtype is None else dtype
        if self.dtype.is_int() and self.dtype != tl.int1 and t.dtype != torch.int64:
            t = t.long()
        self.t = t
        self.layout = layout
        self.busy: Accumulator | None = None

    @staticmethod
    def of(x: Any, like: tl.dtype = tl.float32) -> Tensor:
        """A scalar as a tensor of no dimensions."""
        if isinstance(x, Tensor):
            return x
        if isinstance(x, tl.constexpr):
            x = x.value
        if isinstance(x, Accumulator):
            raise NotWaitedFor(f"the result of {x} is used at {_where()} without warpgroup_mma_wait")
        if isinstance(x, Int):
            return Tensor(torch.tensor(bool(x) if x.dtype == tl.int1 else int(x)), x.dtype)
        if isinstance(x, bool):
            return Tensor(torch.tensor(x), tl.int1)
        if isinstance(x, int):
            if like.is_floating():
                return Tensor(torch.tensor(float(x), dtype=_TORCH[like]), like)
            return Tensor(torch.tensor(x), _fits(x, like))
        if isinstance(x, float):
            dtype = like if like.is_floating() else tl.float32
            return Tensor(torch.tensor(x, dtype=_TORCH[dtype]), dtype)
        raise EmulationError(f"a value must be a tensor or a number, got {type(x).__name__} at {_where()}")

    def value(self) -> torch.Tensor:
        if self.busy is not None:
            if self.busy.done:
                self.busy = None
            else:
                raise NotWaitedFor(f"the accumulator of {self.busy} is used at {_where()} while it is in flight")
        return self.t

    shape = property(lambda self: list(self.t.shape))
    numel = property(lambda self: self.t.numel())
    handle = property(lambda self: self)
    T = property(lambda self: permute(self, (1, 0)))

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(
            shape=self.shape,
            layout=self.layout,
            scalar=self.dtype,
            element_ty=self.dtype,
            is_block=lambda: bool(self.shape),
        )

    def __bool__(self) -> bool:
        if self.t.dim():
            raise EmulationError(f"a condition must be a scalar, got a tensor of shape {self.shape} at {_where()}")
        return bool(self.value())

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}{self.shape})"

    def to(self, dtype: tl.dtype, *, bitcast: bool = False, **_: Any) -> Any:
        return cast(self, dtype, bitcast=bitcast)

    def reshape(self, *shape: Any) -> Tensor:
        return reshape(self, *shape)

    def permute(self, *order: Any) -> Tensor:
        return permute(self, *order)

    def trans(self, *order: Any) -> Tensor:
        return permute(self, *(order or ((1, 0),)))

    def sum(self, axis: int | None = None) -> Any:
        return sum_(self, axis)

    def max(self, axis: int | None = None) -> Any:
        return max_(self, axis)

    def min(self, axis: int | None = None) -> Any:
        return min_(self, axis)

    def split(self) -> tuple[Tensor, Tensor]:
        return split(self)

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        assert all(k is None or k == slice(None) for k in keys), "only None and : index a tensor"
        return Tensor(self.value()[keys], self.dtype)

    def __invert__(self) -> Tensor:
        t = self.value()
        return Tensor(~t, self.dtype, self.layout)

    def __neg__(self) -> Tensor:
        return Tensor(-self.value(), self.dtype, self.layout)

    def __pos__(self) -> Tensor:
        return self


def _join(a: Tensor, b: Tensor) -> tuple[torch.Tensor, torch.Tensor, tl.dtype]:
    """Both operands in the dtype of the result, with shapes that Gluon would broadcast."""
    x, y = a.value(), b.value()
    if x.dim() and y.dim():
        if x.dim() != y.dim():
            raise EmulationError(f"ranks must match, got shapes {a.shape} and {b.shape} at {_where()}; expand_dims")
        if any(m != n and 1 not in (m, n) for m, n in zip(x.shape, y.shape, strict=True)):
            raise EmulationError(f"shapes must broadcast, got {a.shape} and {b.shape} at {_where()}")
    p, q = a.dtype, b.dtype
    if p == q:
        return x, y, p
    if p.is_floating() and q.is_floating():
        dtype = tl.float32 if p.primitive_bitwidth == q.primitive_bitwidth else _wider(p, q)
    elif p.is_floating() or q.is_floating():
        dtype = p if p.is_floating() else q
    else:
        dtype = _wider(p, q)
    if dtype.is_floating():
        return x.to(_TORCH[dtype]), y.to(_TORCH[dtype]), dtype
    return x, y, dtype


def _checked(t: torch.Tensor, dtype: tl.dtype) -> torch.Tensor:
    bits = dtype.primitive_bitwidth
    if dtype.is_int_unsigned() and bits <= 32:
        return t & (2**bits - 1)
    if bits == 32 and t.numel():
        low, high = torch.aminmax(t)
        if low < -(2**31) or high >= 2**31:
            raise Overflow(f"an int32 tensor holds {int(low)} .. {int(high)} at {_where()}; cast to int64 before")
    return t


def _tensor_operation(name: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], kind: str) -> None:
    def operate(a: Tensor, b: Any, flipped: bool) -> Any:
        if isinstance(b, Pointer | Shared):
            return NotImplemented
        if type(b) in (float, int) and a.dtype != tl.int1 and (a.dtype.is_floating() or type(b) is int):
            # a plain number takes the dtype of the tensor
            x, y = a.value(), b
            dtype = a.dtype if a.dtype.is_floating() else _wider(a.dtype, _fits(int(b), a.dtype))
        else:
            x, y, dtype = _join(a, Tensor.of(b, a.dtype))
        if dtype == tl.int1 and kind == "arithmetic":
            x, y, dtype = x.long(), torch.as_tensor(y).long(), tl.int32
        if flipped:
            x, y = y, x
        if kind == "compare":
            return _scalar(Tensor(function(x, y), tl.int1, a.layout))  # type: ignore[arg-type]
        t = function(x, y)  # type: ignore[arg-type]
        if dtype.is_int() and name != "truediv":
            if dtype != tl.int1:
                t = _checked(t, dtype)
        elif not dtype.is_floating():
            dtype = tl.float32
        return _scalar(Tensor(t, dtype, a.layout))

    setattr(Tensor, f"__{name}__", lambda a, b: operate(a, b, False))
    if kind != "compare":
        setattr(Tensor, f"__r{name}__", lambda a, b: operate(a, b, True))


def _scalar(x: Tensor) -> Any:
    """Integers of no dimensions are scalars of the machine, which may index and count."""
    if x.t.dim() or x.dtype.is_floating():
        return x
    return Int(int(x.t), x.dtype)


def _float_divide(a: Any, b: Any) -> torch.Tensor:
    if not isinstance(a, torch.Tensor):
        a = torch.tensor(a, dtype=b.dtype if b.dtype.is_floating_point else torch.float32)
    return torch.true_divide(a, b)


def _whole_divide(a: Any, b: Any) -> torch.Tensor:
    return torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="trunc")


for _kind, _operations in {
    "arithmetic": {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": _float_divide,
        "floordiv": _whole_divide, "mod": lambda a, b: torch.fmod(torch.as_tensor(a), b),
    },
    "bits": {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
    },
    "compare": {
        "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
        "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    },
}.items():  # fmt: skip
    for _name, _function in _operations.items():
        _tensor_operation(_name, _function, _kind)
Tensor.__hash__ = object.__hash__  # type: ignore[method-assign]


class Pointer:
    """An address in a tensor of global memory, or a tensor of addresses; none outside the tensor may be touched."""

    def __init__(self, memory: torch.Tensor, first: int, end: int, offset: Any):
        self.memory = memory  # the whole storage, flat
        self.first, self.end = first, end  # what the tensor spans of it
        self.offset = offset  # int, or int64 tensor

    @staticmethod
    def to_tensor(x: torch.Tensor) -> Pointer:
        flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # type: ignore[call-overload]
        first = int(x.storage_offset())
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return Pointer(flat, first, first + int(span), first)

    dtype = property(lambda self: tl.pointer_type(_TRITON[self.memory.dtype]))
    handle = property(lambda self: self)

    @staticmethod
    def of_address(address: int, dtype: tl.dtype) -> Pointer:
        """What `mode(mapped=...)` says lies at an address."""
        for x in _MODE.mapped:
            begin = x.data_ptr()
            if begin <= address < begin + x.numel() * x.element_size():
                pointer = Pointer.to_tensor(x)
                if tl.pointer_type(_TRITON[x.dtype]) != dtype:
                    raise EmulationError(f"at {address} lie {x.dtype}, not {dtype}, at {_where()}")
                pointer.offset += (address - begin) // x.element_size()
                return pointer
        raise OutOfBounds(f"no mapped tensor lies at address {address} at {_where()}")

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(element_ty=_TRITON[self.memory.dtype], scalar=self.dtype, shape=self.shape)

    @property
    def shape(self) -> list[int]:
        return list(self.offset.shape) if isinstance(self.offset, torch.Tensor) else []

    def _moved(self, by: Any) -> Pointer:
        if isinstance(by, tl.constexpr):
            by = by.value
        if isinstance(by, Tensor):
            assert by.dtype.is_int(), "pointers move by integers"
            if self.shape and by.shape and len(self.shape) != len(by.shape):
                raise EmulationError(f"ranks must match, got shapes {self.shape} and {by.shape} at {_where()}")
            by = by.value()
        elif not isinstance(by, int):
            raise EmulationError(f"pointers must move by integers, got {type(by).__name__} at {_where()}")
        else:
            by = int(by)
        return Pointer(self.memory, self.first, self.end, self.offset + by)

    __add__ = __radd__ = _moved

    def __sub__(self, by: Any) -> Pointer:
        return self._moved(-by)

    def to(self, dtype: Any, **_: Any) -> Pointer:
        if dtype != self.dtype:
            raise EmulationError(f"pointers must keep their type, got {dtype} for {self.dtype} at {_where()}")
        return self

    def places(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Where the unmasked elements are, flat."""
        at = self.offset if isinstance(self.offset, torch.Tensor) else torch.tensor(self.offset)
        if mask is not None:
            at, mask = torch.broadcast_tensors(at, mask)
            at = at[mask]
        at = at.reshape(-1)
        if at.numel():
            low, high = torch.aminmax(at)
            if low < self.first or high >= self.end:
                raise OutOfBounds(
                    f"elements {int(low) - self.first} .. {int(high) - self.first} of a tensor that spans "
                    f"{self.end - self.first} are touched at {_where()}"
                )
        return at


@dataclass
class _Access:
    """One access to shared memory: over for those who know `agent` to have reached `epoch`."""

    key: tuple[Any, ...]
    writes: bool
    agent: Any
    epoch: int
    by_threads: bool
    fenced: tuple[Any, int] | None
    what: str


class _Allocation:
    """A piece of shared memory and who touched it."""

    def __init__(self, name: str, numel: int, dtype: tl.dtype):
        self.name = name
        self.memory = torch.zeros(numel, dtype=_TORCH[dtype])
        _poison(self.memory)
        self.bytes = self.memory.view(torch.uint8)
        self.accesses: list[_Access] = []
        self._relations: dict[tuple[Any, Any], tuple[bool, bool]] = {}
        self._places: dict[Any, torch.Tensor] = {}

    def _mask(self, key: tuple[Any, ...]) -> torch.Tensor:
        if key not in self._places:
            size, offset, shape, strides = key
            mask = torch.zeros(self.bytes.numel(), dtype=torch.bool)
            mask.view(-1, size)[:, 0].as_strided(shape, [s * size for s in strides], offset * size).fill_(True)
            mask = mask.view(-1, size)[:, :1].expand(-1, size).reshape(-1)
            self._places[key] = mask
        return self._places[key]

    def relation(self, a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[bool, bool]:
        """Whether two regions overlap, and whether the first contains the second."""
        if a == b:
            return True, True
        if (a, b) not in self._relations:
            x, y = self._mask(a), self._mask(b)
            self._relations[a, b] = bool((x & y).any()), not bool((y & ~x).any())
        return self._relations[a, b]


def _poison(t: torch.Tensor) -> None:
    t.fill_(math.nan if t.dtype.is_floating_point else torch.iinfo(t.dtype).min)


class Shared:
    """A view of shared memory."""

    def __init__(self, allocation: _Allocation, t: torch.Tensor, dtype: tl.dtype, layout: Any, barriers: Any = None):
        self.allocation, self.t, self.dtype, self.layout, self.barriers = allocation, t, dtype, layout, barriers

    shape = property(lambda self: list(self.t.shape))
    rank = property(lambda self: self.t.dim())
    numel = property(lambda self: self.t.numel())
    handle = property(lambda self: self)

    @property
    def type(self) -> Any:
        nbytes = self.t.numel() * self.t.element_size()
        return types.SimpleNamespace(shape=self.shape, layout=self.layout, element_ty=self.dtype, nbytes=nbytes)

    def __str__(self) -> str:
        return f"{self.allocation.name}{self._at()}"

    def _at(self) -> str:
        flat = self.t.storage_offset()
        return f"[{flat}:{flat + self.t.numel()}]" if self.t.numel() < self.allocation.memory.numel() else ""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.t.element_size(), self.t.storage_offset(), tuple(self.t.shape), self.t.stride()

    def _view(self, t: torch.Tensor, layout: Any = None) -> Shared:
        return Shared(self.allocation, t, self.dtype, self.layout if layout is None else layout)

    def index(self, i: Any) -> Any:
        i = int(_plain(i))
        if not 0 <= i < self.t.shape[0]:
            raise OutOfBounds(f"index {i} of {self.allocation.name}, which has {self.t.shape[0]}, at {_where()}")
        if self.barriers is not None:
            return self.barriers[i]
        return self._view(self.t[i])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        start, length, dim = (_plain(x) for x in (start, length, dim))
        for what, x in (("start", start), ("length", length)):
            if isinstance(x, Int) or not isinstance(x, int):
                raise EmulationError(f"the {what} of a slice must be known to the compiler at {_where()}")
        return self._view(self.t.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(self.t.permute(*(_plain(x) for x in order)))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(self.t.view([_plain(x) for x in shape]))

    def _reinterpret(self, dtype: tl.dtype, shape: Sequence[int], layout: Any) -> Shared:
        shape = [_plain(x) for x in shape]
        wanted = math.prod(shape) * dtype.primitive_bitwidth // 8
        t = self.t.reshape(-1).view(torch.uint8)
        assert t.data_ptr() == self.t.data_ptr(), "only a contiguous view can be reinterpreted"
        if wanted > t.numel():
            raise OutOfBounds(f"{self} has {t.numel()} bytes, {wanted} are reinterpreted at {_where()}")
        return Shared(self.allocation, t[:wanted].view(_TORCH[dtype]).view(shape), dtype, layout)

    def load(self, layout: Any = None) -> Tensor:
        _point("shared load")
        _touch(self, writes=False)
        return Tensor(self.t.clone(), self.dtype, layout)

    def store(self, value: Any) -> None:
        value = Tensor.of(value)
        if value.shape != self.shape or value.dtype != self.dtype:
            raise EmulationError(
                f"what is stored must be {self.dtype}{self.shape}, got {value.dtype}{value.shape} at {_where()}"
            )
        _point("shared store")
        _touch(self, writes=True)
        self.t.copy_(value.value())


def _touch(
    view: Shared, *, writes: bool, agent: Any = None, epoch: int = 0, by_threads: bool = True, what: str = ""
) -> None:
    """Records an access and fails if it races with an earlier one; Note [What happened before]."""
    me = _me()
    if agent is None:
        agent, epoch = me, me.clock[me]
    allocation, key = view.allocation, view.key
    what = f"{what or ('store' if writes else 'load')} of {view} by {me.name} at {_where()}"
    kept: list[_Access] = []
    for old in allocation.accesses:
        overlaps, contains = allocation.relation(key, old.key)
        if not overlaps:
            kept.append(old)
            continue
        if writes or old.writes:
            if old.epoch > me.clock.get(old.agent, 0):
                raise Race(f"{what}\n  is not ordered after\n    {old.what}")
            if old.writes and old.by_threads and not by_threads and not writes:
                if old.fenced is None or old.fenced[1] > me.clock.get(old.fenced[0], 0):
                    raise Race(f"{what}\n  needs a fence_async_shared after\n    {old.what}")
        if not ((writes and contains) or (not writes and not old.writes and old.agent is agent and old.key == key)):
            kept.append(old)
    access = _Access(key, writes, agent, epoch, by_threads, None, what)
    kept.append(access)
    allocation.accesses = kept
    if writes and by_threads:
        me.unfenced.append(access)


Clock = dict[Any, int]


def _learn(clock: Clock, news: Clock) -> None:
    for agent, epoch in news.items():
        if epoch > clock.get(agent, 0):
            clock[agent] = epoch


class Barrier:
    """An mbarrier: a phase is over when all arrivals and all expected bytes have come."""

    def __init__(self, name: str):
        self.name = name
        self.count = 0
        self.pending = 0
        self.bytes = 0
        self.phases = 0  # completed
        self.coming: Clock = {}  # what the arrivals of this phase knew
        self.clock: Clock = {}  # what a waiter learns

    handle = property(lambda self: self)
    dtype = tl.int64

    def __str__(self) -> str:
        arrived = f"{self.count - self.pending} of {self.count} arrivals"
        return f"{self.name} (phase {self.phases}: {arrived}, {self.bytes} bytes missing)"

    def index(self, i: Any) -> Barrier:
        assert int(_plain(i)) == 0, "a single barrier has index 0"
        return self

    def init(self, count: int) -> None:
        if self.count:
            raise BarrierError(f"{self.name} is initialised twice at {_where()}")
        if not 1 <= count < 2**20:
            raise BarrierError(f"{self.name} must count 1 or more arrivals, got {count} at {_where()}")
        self.count = self.pending = count

    def alive(self) -> Barrier:
        if not self.count:
            raise BarrierError(f"{self.name} is used at {_where()} and was not initialised")
        return self

    def arrive(self, count: int, clock: Clock) -> None:
        self.alive()
        if count > self.pending:
            raise BarrierError(f"{count} arrivals at {self} are too many at {_where()}")
        self.pending -= count
        _learn(self.coming, clock)
        self._finish()

    def expect(self, nbytes: int, clock: Clock) -> None:
        self.alive().bytes += nbytes
        if self.bytes >= 2**20:
            raise BarrierError(f"{self} expects 2**20 bytes or more at {_where()}")
        self.arrive(1, clock)

    def complete(self, nbytes: int) -> None:
        self.bytes -= nbytes
        self._finish()

    def _finish(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count
            _learn(self.clock, self.coming)
            self.clock[self] = self.phases


class _NamedBarrier:
    def __init__(self, number: int):
        self.number = number
        self.threads = 0
        self.here = 0
        self.times = 0
        self.coming: Clock = {}
        self.clock: Clock = {}
        self.arrived: Clock = {}  # of this round: when each partition arrived
        self.last: dict[Any, Clock] = {}  # of each partition: its last round

    def __str__(self) -> str:
        return f"named barrier {self.number} ({self.here} of {self.threads} threads)"

    def arrive(self, threads: int, me: _Partition) -> None:
        clock, before = me.publish(), self.last.get(me, {})
        if self.here and threads != self.threads:
            raise BarrierError(f"{self} is given {threads} threads at {_where()}")
        if before is self.arrived or any(clock.get(agent, 0) < epoch for agent, epoch in before.items()):
            raise BarrierError(f"{self} may still be in the round before when {me.name} arrives again at {_where()}")
        self.arrived[me], self.last[me] = clock[me], self.arrived
        self.threads = threads
        self.here += WARP * me.warps
        if self.here > threads:
            raise BarrierError(f"{self} has too many arrivals at {_where()}")
        _learn(self.coming, clock)
        if self.here == threads:
            self.here = 0
            self.times += 1
            self.clock, self.arrived = dict(self.coming), {}


@dataclass(eq=False)
class _Partition:
    """Some warps with a thread of control; what they wait for and know."""

    name: str
    warps: int
    clock: Clock = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    waits_for: Callable[[], str] | None = None
    where: str = ""
    is_patient: bool = False  # waits for a flag, and will not for ever
    finished: bool = False
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: list[Accumulator] = field(default_factory=list)  # wgmmas in flight
    products_issued: int = 0
    stores: list[Callable[[], Callable[[], None]]] = field(default_factory=list)  # read shared memory; then write
    landing: list[Callable[[], None]] = field(default_factory=list)  # have read shared memory, and are to write
    stores_issued: int = 0
    unfenced: list[_Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock[self] = 1
        self.wgmma, self.bulk = (self.name, "wgmma"), (self.name, "stores")

    def land(self) -> None:
        """Writes to global memory what bulk stores have read."""
        while self.landing:
            self.landing.pop(0)()

    def publish(self) -> Clock:
        """What this partition knows now; what it does later is later."""
        clock = dict(self.clock)
        self.clock[self] += 1
        return clock


@dataclass(eq=False)
class _Copy:
    """A bulk load in flight."""

    finish: Callable[[], None]
    barrier: Barrier
    phase: int
    what: str


class _Program:
    """One program of a grid, and its scheduler; Note [One runs at a time]."""

    def __init__(self, position: tuple[int, int, int], grid: tuple[int, int, int], warps: int):
        self.position, self.grid = position, grid
        main = _Partition("partition 0", warps)
        self.partitions = [main]
        self.current = main
        self.copies: list[_Copy] = []
        self.all_copies: list[_Copy] = []
        self.named = {number: _NamedBarrier(number) for number in FREE_BARRIERS}
        self.failure: BaseException | None = None
        self.shared_bytes = 0
        self.random = None if _MODE.seed is None else random.Random(f"{_MODE.seed} {position}")
        self.neighbours: list[_Program] = []  # that run side by side, this one among them
        self.idle = False  # nobody could run when it was last asked

    def give_way(self) -> None:
        """Lets the next neighbour run, and returns when this program is to run again."""
        me = self.current
        at = self.neighbours.index(self)
        _resume(self.neighbours[(at + 1) % len(self.neighbours)])
        me.baton.acquire()
        if self.failure is not None:
            raise _Abandoned

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for partition in self.partitions:
            partition.baton.release()

    def point(self) -> None:
        """A place where the baton may pass on."""
        if self.random is None:
            return
        if self.copies and self.random.random() < 0.2:
            self._complete()
        if _MODE.outside is not None and self.random.random() < 0.02:
            _MODE.outside()
        if self.current.landing and self.random.random() < 0.2:
            self.current.landing.pop(self.random.randrange(len(self.current.landing)))()
        if len(self.neighbours) > 1 and self.random.random() < 0.1:
            self.give_way()
        if len(self.partitions) > 1 and self.random.random() < 0.3:
            self.pass_on()

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        me = self.current
        if not ready():
            me.ready, me.waits_for, me.where = ready, what, _where()
            self.pass_on()
            me.ready = None
            assert ready()

    def pass_on(self) -> None:
        """Hands the baton to a partition that can run, maybe this one, and returns when it is back."""
        me = self.current
        chosen = self._choose()
        if chosen is me:
            return
        self.current = chosen
        chosen.baton.release()
        if not me.finished:
            me.baton.acquire()
            if self.failure is not None:
                raise _Abandoned
            assert self.current is me

    def _choose(self) -> _Partition:
        at = self.partitions.index(self.current)
        circle = self.partitions[at + 1 :] + self.partitions[: at + 1]
        while True:
            able = [p for p in circle if not p.finished and (p.ready is None or p.ready())]
            if able:
                for program in self.neighbours:
                    program.idle = False  # what runs may let it run, too
                return able[0] if self.random is None else self.random.choice(able)
            if self.copies:
                self._complete()
                continue
            if _MODE.outside is not None and _MODE.outside():
                continue
            self.idle = True
            if not all(program.idle for program in self.neighbours):
                self.give_way()
                continue
            patient = [p for program in self.neighbours or [self] for p in program.partitions if p.is_patient]
            if not patient:
                waiting = [
                    f"  {p.name} waits for {p.waits_for() if p.waits_for else '?'} at {p.where}"
                    for p in self.partitions
                    if not p.finished
                ]
                raise Deadlock(f"program {self.position} is deadlocked:\n" + "\n".join(waiting))
            for partition in patient:
                partition.is_patient = False
            for program in self.neighbours:
                program.idle = False

    def _complete(self) -> None:
        copy = self.copies.pop(0 if self.random is None else self.random.randrange(len(self.copies)))
        copy.finish()

    def specialize(self, functions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Sequence[int]) -> Any:
        main = self.partitions[0]
        assert len(self.partitions) == 1, "warp_specialize is not nested"
        known = main.publish()
        workers = [
            _Partition(f"partition {i + 1} ({_name_of(functions[i + 1][0])})", n, dict(known))
            for i, n in enumerate(warps)
        ]
        main.name = f"partition 0 ({_name_of(functions[0][0])})"
        main.wgmma, main.bulk = (main.name, "wgmma"), (main.name, "stores")
        self.partitions += workers

        def body(worker: _Partition, function: Any, args: tuple[Any, ...]) -> None:
            worker.baton.acquire()
            try:
                if self.failure is None:
                    with torch.no_grad():
                        function(*args)
                        _finish_partition(worker)
                    worker.finished = True
                    self.pass_on()
            except _Abandoned:
                pass
            except BaseException as error:
                worker.finished = True
                self.fail(error)

        threads = [
            threading.Thread(target=body, args=(worker, *functions[i + 1]), daemon=True)
            for i, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        result = None
        try:
            result = functions[0][0](*functions[0][1])
            _finish_partition(main)
            self.wait(lambda: all(w.finished for w in workers), lambda: "the other partitions to end")
        except _Abandoned:
            pass
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure
        self.partitions = [main]
        for worker in workers:
            _learn(main.clock, worker.clock)
        return result

    def end(self) -> None:
        main = self.partitions[0]
        _finish_partition(main)
        for copy in self.all_copies:
            if main.clock.get(copy.barrier, 0) < copy.phase:
                raise NotWaitedFor(f"the program ends and nobody waited for the {copy.what}")


def _finish_partition(partition: _Partition) -> None:
    if partition.products:
        raise NotWaitedFor(f"{partition.name} ends with {partition.products[0]} in flight")
    partition.land()
    if partition.stores:
        raise NotWaitedFor(f"{partition.name} ends with {len(partition.stores)} bulk stores that read shared memory")


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", "?")


@dataclass(frozen=True)
class Mode:
    """How the machine resolves what the hardware leaves open.

    Attributes:
        eager: wgmma and bulk stores read shared memory when issued, not when waited for.
        seed: None: programs run in order, each partition until it blocks, copies come as late as possible. Else at random.
        trace: Write every event to stderr.
        mapped: Contiguous tensors that kernels reach by their addresses.
        outside: What happens beside the kernel: each call does one thing to global memory; False: nothing is left to do.
        resident: Programs that run side by side. Beyond 1 a bulk store writes when it is known to be complete, and not when it
            has read shared memory.
    """

    eager: bool = False
    seed: int | None = None
    trace: bool = False
    mapped: tuple[torch.Tensor, ...] = ()
    outside: Callable[[], bool] | None = None
    resident: int = 1


_MODE = Mode()
_program: _Program | None = None


@contextlib.contextmanager
def mode(**changes: Any) -> Iterator[None]:
    """Runs what is inside in another mode."""
    global _MODE
    before = _MODE
    _MODE = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        _MODE = before


def _now() -> _Program:
    assert _program is not None, "only inside a kernel"
    return _program


def _me() -> _Partition:
    return _now().current


def _where() -> str:
    """The line of the kernel that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} ({frame.f_code.co_name})"


def _point(what: str) -> None:
    program = _now()
    if _MODE.trace:
        sys.stderr.write(f"{program.position[0]} {program.current.name}: {what} at {_where()}\n")
    program.point()


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


class Accumulator:
    """The result of a wgmma that may still be in flight."""

    def __init__(self, compute: Callable[[], torch.Tensor], number: int, where: str, shape: list[int]):
        self.compute, self.number, self.where, self.shape = compute, number, where, shape
        self.result: torch.Tensor | None = None
        self.done = False

    dtype = tl.float32
    handle = property(lambda self: self)

    def __str__(self) -> str:
        return f"the wgmma of {self.where}"

    def run(self) -> torch.Tensor:
        if self.result is None:
            self.result = self.compute()
        return self.result

    def __getattr__(self, name: str) -> Any:
        raise NotWaitedFor(f"the result of {self} is used at {_where()} without warpgroup_mma_wait ({name})")

    def _refuse(self, *_: Any) -> Any:
        raise NotWaitedFor(f"the result of {self} is used at {_where()} without warpgroup_mma_wait")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = __bool__ = _refuse


def warpgroup_mma(
    a: Any,
    b: Any,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:
    del precision, max_num_imprecise_acc
    _point("wgmma")
    me = _me()
    if me.warps % 4:
        raise EmulationError(f"wgmma must be issued by whole warpgroups, got {me.warps} warps at {_where()}")
    if not isinstance(b, Shared):
        raise EmulationError(f"the second operand of wgmma must be in shared memory at {_where()}")
    if a.dtype != b.dtype:
        raise EmulationError(f"the operands of wgmma must have one dtype, got {a.dtype} and {b.dtype} at {_where()}")
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or list(acc.shape) != [m, n] or m % (16 * me.warps) or k % 16 or n % 8:
        raise EmulationError(
            f"wgmma does not do {a.shape} x {b.shape} + {list(acc.shape)} on {me.warps} warps at {_where()}"
        )
    if b.dtype == tl.float32:
        raise EmulationError(f"wgmma of fp32 is not emulated, at {_where()}")
    where = f"{me.name} at {_where()}"
    me.products_issued += 1
    number = me.products_issued
    for operand in (a, b):
        if isinstance(operand, Shared):
            _touch(operand, writes=False, agent=me.wgmma, epoch=number, by_threads=False, what="wgmma read")
    held = None if isinstance(a, Shared) else a.value()
    start: Any = None
    if bool(_plain(use_acc)):
        start = acc if isinstance(acc, Accumulator) else acc.value()

    def compute() -> torch.Tensor:
        left = a.t if held is None else held
        product = left.float() @ b.t.float()
        if start is None:
            return product
        return product.add_(start.run() if isinstance(start, Accumulator) else start)

    result = Accumulator(compute, number, where, [m, n])
    if isinstance(acc, Tensor) and start is not None and is_async:
        acc.busy = result
    if isinstance(acc, Accumulator) and acc.done and start is None:
        raise EmulationError(f"the accumulator of {acc} was waited for and is used again at {_where()}")
    me.products.append(result)
    if _MODE.eager:
        result.run()
    if not is_async:
        return warpgroup_mma_wait(0, [result])
    return result


def mma_v2(a: Any, b: Any, acc: Any, **_: Any) -> Tensor:
    """A product of registers."""
    _point("mma")
    (m, k), (k2, n) = a.shape, b.shape
    if a.dtype != b.dtype or k != k2 or list(acc.shape) != [m, n] or m % 16 or k % 16 or n % 8:
        raise EmulationError(
            f"mma does not do {a.dtype}{a.shape} x {b.dtype}{b.shape} + {list(acc.shape)} at {_where()}"
        )
    return Tensor(acc.value() + a.value().float() @ b.value().float(), tl.float32, acc.layout)


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    _point("wgmma wait")
    me = _me()
    if deps is None:
        raise EmulationError(f"warpgroup_mma_wait must be given deps at {_where()}")
    while len(me.products) > _plain(num_outstanding):
        product = me.products.pop(0)
        product.run()
        product.done = True
        me.clock[me.wgmma] = product.number
    found = []
    for x in deps:
        if isinstance(x, Accumulator):
            if not x.done:
                raise NotWaitedFor(f"{x} is still in flight after the wait at {_where()}")
            found.append(Tensor(x.run(), tl.float32))
        else:
            found.append(x)
    return found[0] if len(found) == 1 else tuple(found)


def fence_async_shared(cluster: Any = False) -> None:
    del cluster
    me = _me()
    me.clock[me] += 1
    for access in me.unfenced:
        access.fenced = (me, me.clock[me])
    me.unfenced = []


class Descriptor:
    """A tensor descriptor in a kernel."""

    def __init__(self, host: Any):
        base = host.base.detach()
        self.view = torch.as_strided(base, list(host.shape), list(host.strides), base.storage_offset())
        self.shape, self.strides = [Int(x) for x in host.shape], [Int(x, tl.int64) for x in host.strides]
        self.block_shape = list(host.block_shape)
        self.layout = host.layout
        self.dtype = _TRITON[base.dtype]
        self.nbytes_per_cta = math.prod(self.block_shape) * base.element_size()
        self.block_type = types.SimpleNamespace(
            nbytes=self.nbytes_per_cta, shape=self.block_shape, element_ty=self.dtype
        )
        self.type = types.SimpleNamespace(block_type=self.block_type, layout=self.layout)
        self.padding = math.nan if host.padding == "nan" else 0

    handle = property(lambda self: self)

    def place(self, coordinates: Sequence[Any]) -> list[int]:
        at = [int(_plain(c)) for c in coordinates]
        if len(at) != len(self.block_shape):
            raise EmulationError(f"a descriptor of {len(self.block_shape)} dimensions is given {at} at {_where()}")
        for c, x in zip(coordinates, at, strict=True):
            if (isinstance(c, Int) and c.dtype.primitive_bitwidth > 32) or not -(2**31) <= x < 2**31:
                raise EmulationError(f"coordinates must be int32, got {at} at {_where()}")
        if at[-1] * self.view.element_size() % 16:
            raise EmulationError(f"the last coordinate must be a multiple of 16 bytes, got {at} at {_where()}")
        return at

    def _cut(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a block that lies in the tensor: in the tensor, and in the block."""
        outer, inner = [], []
        for start, length, end in zip(at, self.block_shape, self.view.shape, strict=True):
            low, high = min(max(start, 0), end), max(min(start + length, end), 0)
            high = max(high, low)
            outer.append(slice(low, high))
            inner.append(slice(low - start, high - start) if high > low else slice(0, 0))
        return tuple(outer), tuple(inner)

    def read(self, at: Sequence[int]) -> torch.Tensor:
        outer, inner = self._cut(at)
        block = torch.full(self.block_shape, self.padding, dtype=self.view.dtype)
        block[inner] = self.view[outer]
        return block

    def write(self, at: Sequence[int], block: torch.Tensor, add: bool) -> None:
        outer, inner = self._cut(at)
        part = block.view(self.block_shape)[inner]
        if add:
            self.view[outer] += part
        else:
            self.view[outer] = part

    def check(self, smem: Any) -> None:
        if not isinstance(smem, Shared):
            raise EmulationError(f"a block must be copied to or from shared memory at {_where()}")
        if [n for n in smem.shape if n > 1] != [n for n in self.block_shape if n > 1] or smem.dtype != self.dtype:
            raise EmulationError(
                f"shared memory must be {self.dtype}{self.block_shape} like the block, got {smem.dtype}{smem.shape} at {_where()}"
            )
        # views of several dimensions lie elsewhere in the true layout
        if len(self.block_shape) == 1 and smem.t.storage_offset() * smem.t.element_size() % 128:
            raise EmulationError(f"{smem} must begin at a multiple of 128 bytes at {_where()}")


def _load_block(desc: Any, coord: Any, barrier: Any, result: Any, pred: Any = True, multicast: Any = False) -> None:
    del multicast
    _point("bulk load")
    if not pred:
        return
    desc.check(result)
    at = desc.place(coord)
    program, phase = _now(), barrier.alive().phases + 1
    _touch(result, writes=True, agent=barrier, epoch=phase, by_threads=False, what="bulk load")
    _poison(result.t)
    where = f"bulk load of {result} at {_where()}"

    def finish() -> None:
        result.t.copy_(desc.read(at).view(result.t.shape))
        if barrier.phases + 1 != phase:
            raise BarrierError(f"{barrier} moved on before the {where} completed; expect counts too few bytes")
        barrier.complete(desc.nbytes_per_cta)

    copy = _Copy(finish, barrier, phase, where)
    program.copies.append(copy)
    program.all_copies.append(copy)


def _store_block(desc: Any, coord: Any, smem: Any, add: bool) -> None:
    _point("bulk store")
    desc.check(smem)
    at = desc.place(coord)
    me = _me()
    me.stores_issued += 1
    _touch(smem, writes=False, agent=me.bulk, epoch=me.stores_issued, by_threads=False, what="bulk store")
    held = smem.t.clone() if _MODE.eager else smem.t

    def read() -> Callable[[], None]:
        block = held.clone(memory_format=torch.contiguous_format)
        return lambda: desc.write(at, block, add)

    me.stores.append(read)


def _store_wait(pendings: Any) -> None:
    _point("store wait")
    me = _me()
    while len(me.stores) > _plain(pendings):
        me.landing.append(me.stores.pop(0)())
    if _MODE.resident == 1:
        me.land()
    me.clock[me.bulk] = me.stores_issued - len(me.stores)


class BarrierLayout:
    """Marks an allocation of mbarriers."""

    def __init__(self, *_: Any, **__: Any):
        pass


def _barrier_wait(barrier: Any, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    del deps
    _point("wait")
    if not pred:
        return
    parity = int(_plain(phase))
    if parity not in (0, 1):
        raise BarrierError(f"a phase must be 0 or 1, got {parity} for {barrier} at {_where()}")
    barrier.alive()
    _now().wait(lambda: barrier.phases & 1 != parity, lambda: f"parity {parity} of {barrier}")
    _learn(_me().clock, barrier.clock)


def _barrier_arrive(barrier: Any, *, count: Any = 1, pred: Any = True) -> None:
    _point("arrive")
    if pred:
        barrier.arrive(_plain(count), _me().publish())


def _barrier_expect(barrier: Any, bytes_per_cta: Any = None, pred: Any = True, bytes: Any = None) -> None:
    _point("expect")
    if pred:
        barrier.expect(_plain(bytes_per_cta if bytes is None else bytes), _me().publish())


def _allocate_barriers(batch: Any = None, two_ctas: Any = False) -> Any:
    del two_ctas
    made = allocate_shared_memory(tl.int64, [_plain(batch) or 1, 1], BarrierLayout())
    return made if batch is not None else made.index(0)


_ASSEMBLY: list[tuple[re.Pattern[str], Callable[..., Any]]] = []


def assembly(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what a piece of inline assembly does: `handler(match, args, dtype) -> value`; spaces are collapsed."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        _ASSEMBLY.append((re.compile(pattern), handler))
        return handler

    return register


_PINS = r"(\{ )?(\.reg \.pred \w+; setp[^;]*; @\w+ (griddepcontrol\.launch_dependents|bra \w+|nanosleep\.u32 \d+); )?"


@assembly(r"bar\.(?P<kind>sync|arrive) (?P<number>\d+|\$1)(, (?P<threads>\d+|\$\d))?;( mov\.[us]32 \$0, (0|\$1);)?")
def _named_barrier(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    program, me = _now(), _me()
    number, threads = (int(args[int(x[1:]) - 1]) if x[0] == "$" else int(x) for x in match.group("number", "threads"))
    if number not in FREE_BARRIERS:
        raise BarrierError(f"named barriers must be 8 to 15 (the compiler uses the others), got {number} at {_where()}")
    if threads % WARP or threads == 0:
        raise BarrierError(f"named barrier {number} must take whole warps, got {threads} threads at {_where()}")
    barrier = program.named[number]
    times = barrier.times
    barrier.arrive(threads, me)
    if match["kind"] == "sync":
        program.wait(lambda: barrier.times > times, lambda: str(barrier))
        _learn(me.clock, barrier.clock)
    return Int(0)


@assembly(_PINS + r"mov\.\w+ \$0, \$1;( \})?")
def _move(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    return args[0]


@assembly(
    r"\{ \.reg \.pred p; (setp\.[^;]*; )+vote\.sync\.any\.pred p, p, -1; @!p bra SAME; (mul\.f32 [^;]*; )+SAME: \}"
)
def _scale_unless_one(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    return args[0] * args[1]


@assembly(
    r"\{ \.reg \.pred p; \.reg \.b32 t; and\.b32 t, \$2, \$3; setp\.ne\.u32 p, t, 0; selp\.f32 \$0, \$1, 0fFF800000, p; \}"
)
def _hide_unless_set(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    return where((args[1] & args[2]) != 0, args[0], -math.inf)


@assembly(r"fence\.proxy\.async(\.shared::cta)?;( mov\.[us]32 \$0, (0|\$1);)?")
def _fence(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    fence_async_shared()
    return Int(0)


@assembly(
    r"\{ \.reg \.pred p; \.reg \.s32 v; \.reg \.u64 began, now; mov\.u64 began, %globaltimer; "
    r"POLL: ld\.acquire\.sys\.global\.s32 v, \[\$1\]; setp\.ne\.s32 p, v, 0; @p bra SEEN; "
    r"mov\.u64 now, %globaltimer; sub\.s64 now, now, began; setp\.gt\.s64 p, now, \$3; @p bra SEEN; "
    r"nanosleep\.u32 \d+; bra POLL; SEEN: setp\.le\.s32 p, v, 0; vote\.sync\.any\.pred p, p, -1; "
    r"@p st\.relaxed\.sys\.global\.s32 \[\$2\], 1; fence\.proxy\.async\.global; selp\.s32 \$0, 0, 1, p; \}"
)
def _wait_flag(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    flag, error, patience = args
    for pointer in (flag, error):
        if pointer.memory.dtype != torch.int32:
            raise EmulationError(f"flags and error words must be int32, got {pointer.memory.dtype} at {_where()}")
    if patience.dtype != tl.int64:
        raise EmulationError(f"patience must be int64, got {patience.dtype} at {_where()}")
    (place,), (word,) = flag.places(None).tolist(), error.places(None).tolist()
    me = _me()
    me.is_patient = True
    _now().wait(lambda: bool(flag.memory[place]) or not me.is_patient, lambda: f"flag {place - flag.first}")
    me.is_patient = False
    if flag.memory[place] > 0:
        return Int(1)
    error.memory[word] = 1
    return Int(0)


@assembly(
    r"\{ \.reg \.pred p; \.reg \.s32 v; \.reg \.u64 began, now; mov\.u64 began, %globaltimer; "
    r"POLL: ld\.acquire\.gpu\.global\.s32 v, \[\$1\]; setp\.ge\.s32 p, v, \$2; @p bra SEEN; "
    r"mov\.u64 now, %globaltimer; sub\.s64 now, now, began; setp\.gt\.s64 p, now, \$3; @p trap; bra POLL; "
    r"SEEN: fence\.proxy\.async\.global; mov\.u32 \$0, 0; \}"
)
def _wait_turn(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    counter, turn, _patience = args
    (place,) = counter.places(None).tolist()
    memory = counter.memory
    _now().wait(lambda: bool(memory[place] >= int(turn)), lambda: f"turn {int(turn)} of counter {place}")
    if memory[place] != int(turn):
        raise EmulationError(f"counter {place} is {int(memory[place])} at turn {int(turn)} at {_where()}")
    return Int(0)


@assembly(
    r"\{ \.reg \.pred p; \.reg \.u32 lane; cp\.async\.bulk\.wait_group (?P<after>\d+); fence\.proxy\.async\.global; "
    r"bar\.warp\.sync -1; mov\.u32 lane, %laneid; setp\.eq\.u32 p, lane, 0; "
    r"@p red\.release\.gpu\.global\.add\.s32 \[\$1\], 1; mov\.u32 \$0, 0; \}"
)
def _pass_turn(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    _store_wait(int(match["after"]))
    _now().current.land()
    (place,) = args[0].places(None).tolist()
    args[0].memory[place] += 1
    return Int(0)


@assembly(
    r"\{ \.reg \.pred p; \.reg \.u32 lane; \.reg \.s32 v; \.reg \.u64 began, now; mov\.u32 lane, %laneid; "
    r"setp\.eq\.u32 p, lane, 0; @p red\.relaxed\.gpu\.global\.add\.s32 \[\$1\], 1; mov\.u64 began, %globaltimer; "
    r"POLL: ld\.relaxed\.gpu\.global\.s32 v, \[\$2\]; setp\.ge\.s32 p, v, \$3; @p bra SEEN; "
    r"mov\.u64 now, %globaltimer; sub\.s64 now, now, began; setp\.gt\.s64 p, now, \d+; @p bra SEEN; "
    r"nanosleep\.u32 \d+; bra POLL; SEEN: setp\.ge\.s32 p, v, \$3; vote\.sync\.all\.pred p, p, -1; selp\.s32 \$0, 1, 0, p; \}"
)
def _check_in(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    place, awaited, enough = args
    for pointer in (place, awaited):
        if pointer.memory.dtype != torch.int32:
            raise EmulationError(f"boards must be int32, got {pointer.memory.dtype} at {_where()}")
    (own,), (other,) = place.places(None).tolist(), awaited.places(None).tolist()
    place.memory[own] += 1
    me = _me()
    me.is_patient = True
    _now().wait(
        lambda: bool(awaited.memory[other] >= int(enough)) or not me.is_patient,
        lambda: f"place {other - awaited.first} of a board",
    )
    me.is_patient = False
    return Int(int(awaited.memory[other] >= int(enough)))


_FUNCTIONS = {"ex2": torch.exp2, "lg2": torch.log2, "tanh": torch.tanh, "rcp": torch.reciprocal, "rsqrt": torch.rsqrt}


@assembly(r"(?P<name>ex2|lg2|tanh|rcp|rsqrt)\.approx(\.ftz)?\.(f32|f16x2|bf16x2|ftz\.bf16x2) \$0, \$1;")
def _function(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    return _apply(args[0], _FUNCTIONS[match["name"]])


def _bytes_of_pairs(x: Tensor) -> torch.Tensor:
    """The bytes of each two neighbouring int16 of a row, `... 4`."""
    return x.t.to(torch.int16).contiguous().view(torch.uint8).unflatten(-1, (-1, 4))


@assembly(r"\{ \.reg \.b16 a, b; mov\.b32 \{a, b\}, \$1; cvt\.rn\.f16x2\.e4m3x2 \$0, (?P<half>a|b); \}")
def _numbers_of_half(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    half = _bytes_of_pairs(args[0]).chunk(2, -1)[match["half"] == "b"]
    return Tensor(half.contiguous().view(torch.float8_e4m3fn).to(torch.float16).flatten(-2), dtype, args[0].layout)


@assembly(r"prmt\.b32 \$0, \$1, 0, 0x3120;")
def _sorted_bytes(match: re.Match[str], args: Sequence[Any], dtype: Any) -> Any:
    del match
    found = _bytes_of_pairs(args[0])[..., [0, 2, 1, 3]].contiguous().flatten(-2)
    return Tensor(found.view(torch.int16), dtype, args[0].layout)


def inline_asm_elementwise(asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any) -> Any:
    del constraints, is_pure, pack
    text = " ".join(_plain(asm).split())
    _point(text)
    for pattern, handler in _ASSEMBLY:
        match = pattern.fullmatch(text)
        if match is not None:
            return handler(match, args, dtype)
    raise EmulationError(
        f"no meaning is known for the inline assembly {text!r} at {_where()}; register one with `assembly`"
    )


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Shared:
    program = _now()
    assert len(program.partitions) == 1, "shared memory is allocated before warp_specialize"
    shape = [_plain(x) for x in shape]
    name = _assigned_name()
    numel = math.prod(shape)
    allocation = _Allocation(name, numel, dtype)
    program.shared_bytes += allocation.bytes.numel()
    if program.shared_bytes > SHARED_BYTES:
        raise EmulationError(f"shared memory must hold {SHARED_BYTES} bytes, {name} makes it {program.shared_bytes}")
    barriers = [Barrier(f"{name}[{i}]") for i in range(shape[0])] if isinstance(layout, BarrierLayout) else None
    view = Shared(allocation, allocation.memory.view(shape), dtype, layout, barriers)
    if value is not None:
        view.store(value)
    return view


def _assigned_name() -> str:
    """The variable that the running line of the kernel assigns."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    found = re.match(r"\s*(\w+)\s*(:[^=]*)?=", linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    return found[1] if found else f"memory of line {frame.f_lineno}"


def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
    program = _now()
    functions = [(function, tuple(args)) for function, args in functions_and_args]
    warps = [_plain(x) for x in worker_num_warps]
    if len(functions) != len(warps) + 1 or (worker_num_regs is not None and len(worker_num_regs) != len(warps)):
        raise EmulationError(f"every worker must have its warps and registers, at {_where()}")
    for registers in worker_num_regs or ():
        if _plain(registers) % 8 or not 24 <= _plain(registers) <= 256:
            raise EmulationError(f"registers must be a multiple of 8 from 24 to 256, got {registers} at {_where()}")
    return program.specialize(functions, warps)


def program_id(axis: Any) -> Int:
    return Int(_now().position[_plain(axis)])


def num_programs(axis: Any) -> Int:
    return Int(_now().grid[_plain(axis)])


def _mask_of(mask: Any) -> torch.Tensor | None:
    return None if mask is None else Tensor.of(mask).value().bool()


def load(pointer: Any, mask: Any = None, other: Any = None, **_: Any) -> Any:
    kept = _mask_of(mask)
    places = pointer.places(kept)
    found = pointer.memory[places]
    shape = pointer.shape if kept is None else torch.broadcast_shapes(pointer.shape, kept.shape)
    if kept is None:
        t = found.view(shape)
    else:
        t = torch.empty(shape, dtype=pointer.memory.dtype)
        if other is None:
            _poison(t)
        else:
            t.copy_(Tensor.of(other).value().to(t.dtype))
        t[kept.expand(shape)] = found
    return _scalar(Tensor(t))


def _spread(pointer: Any, value: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kept = _mask_of(mask)
    v = Tensor.of(value).value()
    if len({x.dim() if isinstance(x, torch.Tensor) else len(x.shape) for x in (pointer, v)} - {0}) > 1:
        raise EmulationError(f"ranks must match, got shapes {pointer.shape} and {list(v.shape)} at {_where()}")
    shapes = [pointer.shape, list(v.shape), [] if kept is None else list(kept.shape)]
    shape = torch.broadcast_shapes(*shapes)
    if list(shape) != pointer.shape and pointer.shape:
        raise EmulationError(
            f"pointers of shape {pointer.shape} must have that of the value, {list(shape)}, at {_where()}"
        )
    v = v.expand(shape)
    places = pointer.places(kept)
    return places, (v if kept is None else v[kept.expand(shape)]).reshape(-1).to(pointer.memory.dtype)


def store(pointer: Any, value: Any, mask: Any = None, **_: Any) -> None:
    places, values = _spread(pointer, value, mask)
    if places.numel() != values.numel():
        raise EmulationError(f"{values.numel()} values are stored at {places.numel()} places at {_where()}")
    pointer.memory[places] = values


def atomic_add(pointer: Any, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Any:
    del sem, scope
    places, values = _spread(pointer, value, mask)
    before = pointer.memory[places]
    pointer.memory.index_add_(0, places, values)
    return _scalar(Tensor(before.view(pointer.shape))) if mask is None else None


def cast(x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **_: Any) -> Any:
    del fp_downcast_rounding
    dtype = _plain(dtype)
    if isinstance(x, Pointer):
        return x.to(dtype)
    if isinstance(dtype, tl.pointer_type):
        if not (isinstance(x, Int) and x.dtype == tl.int64):
            raise EmulationError(f"an address must be an int64 scalar, got {x} at {_where()}")
        return Pointer.of_address(int(x), dtype)
    x = Tensor.of(x, dtype) if not isinstance(x, int) or isinstance(x, bool) else x
    if isinstance(x, int):
        if dtype.is_floating():
            return Tensor(torch.tensor(float(x), dtype=_TORCH[dtype]), dtype)
        return Int(bool(x), tl.int1) if dtype == tl.int1 else _wrap(int(x), dtype)
    t = x.value()
    if x.dtype == dtype:
        return x
    if _plain(bitcast):
        t = t.to(_TORCH[x.dtype]).view(_TORCH[dtype])
    elif dtype.is_floating():
        t = t.to(_TORCH[dtype])
    elif dtype == tl.int1:
        t = t != 0
    else:
        bits = dtype.primitive_bitwidth
        t = t.long()
        if bits < 64:
            t = t & (2**bits - 1)
            if dtype.is_int_signed():
                t = t - ((t >> (bits - 1)) << bits)
    return _scalar(Tensor(t, dtype, x.layout))


def _wrap(x: int, dtype: tl.dtype) -> Int:
    bits = dtype.primitive_bitwidth
    x &= 2**bits - 1
    return Int(x - (x >> (bits - 1) << bits) if dtype.is_int_signed() else x, dtype)


def to_tensor(x: Any) -> Any:
    x = _plain(x)
    if isinstance(x, bool):
        return Int(x, tl.int1)
    if type(x) is int:
        return Int(x, _fits(x, tl.int32))
    return Tensor.of(x) if isinstance(x, float) else x


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    value = Tensor.of(value, dtype).value().to(torch.int64 if dtype.is_int() and dtype != tl.int1 else _TORCH[dtype])
    return Tensor(value.expand([_plain(n) for n in shape]).clone(), dtype, layout)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


def full_like(x: Tensor, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Tensor:
    return full(shape or x.shape, value, dtype or x.dtype, layout or x.layout)


def zeros_like(x: Tensor, **changes: Any) -> Tensor:
    return full_like(x, 0, **changes)


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    start, end = _plain(start), _plain(end)
    if isinstance(start, Int) or isinstance(end, Int) or (end - start) & (end - start - 1) or end <= start:
        raise EmulationError(f"arange must be a power of two known to the compiler, got {start} .. {end} at {_where()}")
    return Tensor(torch.arange(start, end), tl.int32, layout)


def _apply(x: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    x = Tensor.of(x)
    t = x.value()
    if not x.dtype.is_floating():
        raise EmulationError(f"a floating point number is wanted, got {x.dtype} at {_where()}")
    return Tensor(function(t), x.dtype, x.layout)


def _math(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda x, **_: _apply(x, function)


def _pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor, tl.dtype, Any]:
    like = next((x.dtype for x in (a, b) if isinstance(x, Tensor | Int)), tl.int32)
    if isinstance(a, float) or isinstance(b, float):
        like = like if like.is_floating() else tl.float32
    a, b = Tensor.of(a, like), Tensor.of(b, like)
    x, y, dtype = _join(a, b)
    return x, y, dtype, a.layout or b.layout


def _of_two(whole: Any, real: Any, plain: Any) -> Callable[..., Any]:
    def operate(a: Any, b: Any, propagate_nan: Any = None, **_: Any) -> Any:
        a, b = _plain(a), _plain(b)
        if type(a) in (int, float) and type(b) in (int, float):
            return plain(a, b)
        x, y, dtype, layout = _pair(a, b)
        # without propagate_nan the hardware returns the operand that is a number
        return _scalar(Tensor((real if dtype.is_floating() else whole)(x, y), dtype, layout))

    return operate


def where(condition: Any, a: Any, b: Any) -> Any:
    condition = _plain(condition)
    if not isinstance(condition, Tensor) and not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a, b = to_tensor(a), to_tensor(b)
        if isinstance(a, Pointer):
            return a if condition else b
        if isinstance(a, Int) and isinstance(b, Int):
            return _narrow(int(a if condition else b), _wider(a.dtype, b.dtype))
    c = Tensor.of(bool(condition) if isinstance(condition, int) else condition).value()
    x, y, dtype, layout = _pair(a, b)
    if len({t.dim() for t in (c, x, y)} - {0}) > 1:
        raise EmulationError(f"ranks must match, got {[list(t.shape) for t in (c, x, y)]} at {_where()}")
    return _scalar(Tensor(torch.where(c.bool(), x, y), dtype, layout))


def expand_dims(x: Tensor, axis: Any) -> Tensor:
    return Tensor(x.value().unsqueeze(_plain(axis)), x.dtype)


def broadcast(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a, b = Tensor.of(a), Tensor.of(b)
    x, y = torch.broadcast_tensors(a.value(), b.value())
    return Tensor(x, a.dtype, b.layout or a.layout), Tensor(y, b.dtype, b.layout or a.layout)


def convert_layout(x: Any, layout: Any, assert_trivial: Any = False) -> Tensor:
    return Tensor(Tensor.of(x).value(), x.dtype, layout)


def reshape(x: Tensor, *shape: Any) -> Tensor:
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return Tensor(x.value().reshape([_plain(n) for n in shape]), x.dtype)


def permute(x: Tensor, *order: Any) -> Tensor:
    order = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
    return Tensor(x.value().permute(*(_plain(n) for n in order)), x.dtype)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x.value().unbind(-1)
    return Tensor(a, x.dtype), Tensor(b, x.dtype)


def join(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(torch.stack((a.value(), b.value()), -1), a.dtype)


def _reduction(function: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Any]:
    def operate(x: Tensor, axis: Any = None, keep_dims: Any = False, **_: Any) -> Any:
        t = x.value()
        axis = _plain(axis)
        if x.dtype in (tl.float16, tl.bfloat16):
            t = t.float()
        t = function(t.reshape(-1) if axis is None else t, 0 if axis is None else axis)
        if _plain(keep_dims) and axis is not None:
            t = t.unsqueeze(axis)
        return _scalar(Tensor(t.to(_TORCH[x.dtype]) if x.dtype.is_floating() else t, x.dtype))

    return operate


sum_ = _reduction(lambda t, axis: t.sum(axis))
max_ = _reduction(lambda t, axis: t.amax(axis))
min_ = _reduction(lambda t, axis: t.amin(axis))
xor_sum = _reduction(lambda t, axis: _fold(t, axis, torch.bitwise_xor))
reduce_or = _reduction(lambda t, axis: _fold(t, axis, torch.bitwise_or))


def _fold(t: torch.Tensor, axis: int, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    parts = list(t.unbind(axis))
    while len(parts) > 1:
        parts = [function(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def reduce(x: Any, axis: Any, combine: Any, keep_dims: Any = False) -> Any:
    """Folds halves of an axis; `combine` takes and returns values, or as many as there are inputs."""
    several = isinstance(x, tuple)
    inputs = x if several else (x,)
    parts = list(zip(*([Tensor(t, v.dtype) for t in v.value().unbind(_plain(axis))] for v in inputs), strict=True))
    while len(parts) > 1:
        made = [combine(*parts[i], *parts[i + 1]) for i in range(0, len(parts), 2)]
        parts = [m if several else (m,) for m in made]
    found = [expand_dims(v, axis) if _plain(keep_dims) else v for v in parts[0]]
    return tuple(found) if several else found[0]


def fma(a: Any, b: Any, c: Any) -> Any:
    x, y, dtype, layout = _pair(a, b)
    exact = Tensor(x.double() * y.double() + Tensor.of(c).value().double(), tl.float64, layout)
    return cast(exact, dtype)


def cdiv(a: Any, b: Any) -> Any:
    return (_plain(a) + _plain(b) - 1) // _plain(b)


def device_assert(condition: Any, message: Any = "", **_: Any) -> None:
    t = Tensor.of(condition).value()
    if not bool(t.all()):
        raise EmulationError(f"device_assert {message!r} fails at {_where()}")


def static_assert(condition: Any, message: Any = "") -> None:
    if not _plain(condition):
        raise EmulationError(f"static_assert {message!r} fails at {_where()}")


def _number(*bounds: Any) -> Iterator[Int]:
    """`range` in a kernel: run-time integers."""
    return (Int(i) for i in range(*(int(_plain(x)) for x in bounds)))


def _tl_range(*bounds: Any, **_: Any) -> Iterator[Int]:
    return _number(*bounds)


def _static_range(*bounds: Any) -> range:
    if any(isinstance(x, Int) for x in bounds):
        raise EmulationError(f"static_range must be known to the compiler at {_where()}")
    return range(*(_plain(x) for x in bounds))


def _extremum(plain: Any, of_tensors: Callable[..., Any]) -> Callable[..., Any]:
    def operate(*args: Any) -> Any:
        if len(args) == 2 and any(isinstance(x, Tensor | Int) for x in args):
            return of_tensors(*args)
        return plain(*args)

    return operate


class _Constexpr:
    """`gl.constexpr`: an annotation, or a call that leaves a value as it is."""

    def __new__(cls, value: Any) -> Any:
        return _plain(value)


class _Semantic:
    """What an `@builtin` is given; only what reaches the machine through it is there."""

    class _Builder:
        @staticmethod
        def create_async_tma_reduce(kind: Any, descriptor: Any, coordinates: Any, source: Any) -> None:
            if "ADD" not in str(kind):
                raise EmulationError(f"only additions are emulated, got {kind} at {_where()}")
            _store_block(descriptor, coordinates, source, add=True)

        @staticmethod
        def create_fence_async_shared(cluster: Any) -> None:
            fence_async_shared(cluster)

        def __getattr__(self, name: str) -> Any:
            raise EmulationError(f"the builder's {name} is not emulated, at {_where()}")

    builder = _Builder()

    @staticmethod
    def _convert_to_ir_values(values: Any, require_i64: bool = True) -> Any:
        return [to_tensor(x) for x in values]

    @staticmethod
    def to_tensor(x: Any) -> Any:
        return to_tensor(x)


def builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs, _semantic=_Semantic)


def aggregate(cls: type) -> type:
    """A record of values; one without a constructor gets that of a dataclass."""
    return cls if "__init__" in cls.__dict__ else dataclass(cls)


_BUILTINS = {
    **vars(builtins),
    "range": _number,
    "max": _extremum(max, lambda a, b: language.maximum(a, b)),
    "min": _extremum(min, lambda a, b: language.minimum(a, b)),
}
_OPTIONS = frozenset(
    {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug", "launch_cooperative_grid"}
)


class JitFunction:
    """A `gluon.jit` function: called from kernels as it is, launched over a grid from the host."""

    def __init__(self, function: Any, **options: Any):
        self.fn = function
        self.options = options
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, function.__module__
        self.signature = inspect.signature(function)
        self.arg_names = list(self.signature.parameters)
        self.constants = {
            name
            for name, parameter in self.signature.parameters.items()
            if "constexpr" in str(parameter.annotation).lower()
        }
        # the function with the built-in names of a kernel, and its own globals as they are and become
        names = function.__globals__
        own = names.get("__builtins__")
        names["__builtins__"] = _BUILTINS
        try:
            self.body = types.FunctionType(
                function.__code__, names, function.__name__, function.__defaults__, function.__closure__
            )
        finally:
            names["__builtins__"] = own
        self.body.__kwdefaults__ = function.__kwdefaults__

    def is_gluon(self) -> bool:
        return True

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})

    def __getitem__(self, grid: Any) -> Callable[..., _Compiled]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> _Compiled:
        options = {name: kwargs.pop(name) for name in list(kwargs) if name in _OPTIONS}
        if "num_warps" in self.arg_names:
            kwargs["num_warps"] = options.get("num_warps", 4)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if callable(grid):
            grid = grid(bound.arguments)
        warps, cap = options.get("num_warps", 4), options.get("maxnreg")
        if cap is not None and cap % 8:
            raise EmulationError(f"maxnreg must be a multiple of 8, got {cap}")
        compiled = _Compiled(self, warps)
        if not warmup:
            compiled.launch(grid, bound.arguments)
        return compiled


@dataclass
class _Compiled:
    """What a launch returns: launches again, with all arguments in order."""

    function: JitFunction
    warps: int

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        names = self.function.arg_names

        def call(*args: Any) -> None:
            if len(args) != len(names):
                raise EmulationError(f"a compiled kernel must be given {len(names)} arguments, got {len(args)}")
            self.launch(grid, dict(zip(names, args, strict=True)))

        return call

    def launch(self, grid: Any, arguments: dict[str, Any]) -> None:
        global _program
        assert _program is None, "a kernel does not launch kernels"
        x, y, z = (*grid, 1, 1)[:3]
        with torch.no_grad():
            programs = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
            if _MODE.seed is not None:
                random.Random(_MODE.seed).shuffle(programs)
            waiting = [_Program(at, (x, y, z), self.warps) for at in programs]

            def run(program: _Program) -> None:
                values = [
                    _plain(v) if name in self.function.constants else _argument(name, v)
                    for name, v in arguments.items()
                ]
                self.function(*values)
                program.end()

            try:
                if _MODE.resident > 1:
                    _run_side_by_side(waiting, run)
                for program in waiting if _MODE.resident == 1 else ():
                    _program = program
                    run(program)
            finally:
                _program = None


def _resume(program: _Program) -> None:
    global _program
    _program = program
    program.current.baton.release()


def _run_side_by_side(waiting: list[_Program], run: Callable[[_Program], None]) -> None:
    """Runs programs in this order, `resident` of them at a time, each in a thread; they hand a baton to one another, too."""
    neighbours: list[_Program] = []
    failures: list[BaseException] = []

    def multiprocessor(program: _Program) -> None:
        program.current.baton.acquire()
        try:
            while program.failure is None:
                with torch.no_grad():
                    run(program)
                neighbours.remove(program)
                if waiting:
                    program = enter()
                    _resume(program)
                elif neighbours:
                    return _resume(neighbours[0])
                else:
                    return None
                program.current.baton.acquire()
        except BaseException as error:
            failures.append(error)
            for other in neighbours:
                other.fail(error)

    def enter() -> _Program:
        program = waiting.pop(0)
        program.neighbours = neighbours
        neighbours.append(program)
        return program

    threads = [
        threading.Thread(target=multiprocessor, args=(enter(),), daemon=True)
        for _ in range(min(_MODE.resident, len(waiting)))
    ]
    for thread in threads:
        thread.start()
    if neighbours:
        _resume(neighbours[0])
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _argument(name: str, x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.to_tensor(x.detach())
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    if isinstance(x, bool):
        return Int(x, tl.int1)
    if isinstance(x, int):
        return Int(x, _fits(x, tl.int32))
    if isinstance(x, float):
        return Tensor.of(x)
    if x is None:
        return None
    if isinstance(x, tuple):
        return tuple(_argument(name, v) for v in x)
    raise EmulationError(f"argument {name} must be a tensor, a descriptor or a number, got {type(x).__name__}")


def jit(function: Any = None, **options: Any) -> Any:
    return JitFunction(function, **options) if function is not None else lambda f: JitFunction(f, **options)


def _module(name: str, names: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name, "Emulated.")
    module.__dict__.update(names)
    module.__path__ = []  # a package
    return module


def _modules() -> dict[str, types.ModuleType]:
    import triton.experimental.gluon.language as real
    from triton.experimental.gluon.nvidia import hopper as real_host

    layouts = {name: getattr(real, name) for name in dir(real) if name.endswith("Layout")}
    dtypes = {str(name): getattr(tl, name) for name in dir(tl) if isinstance(getattr(tl, name), tl.dtype)}
    root = "triton.experimental.gluon"
    barrier = _module(
        f"{root}.language.nvidia.hopper.mbarrier",
        {
            "MBarrierLayout": BarrierLayout,
            "allocate_mbarrier": _allocate_barriers,
            "init": lambda barrier, count: barrier.init(_plain(count)),
            "invalidate": lambda barrier: None,
            "wait": _barrier_wait,
            "arrive": _barrier_arrive,
            "expect": _barrier_expect,
        },
    )
    tma = _module(
        f"{root}.language.nvidia.hopper.tma",
        {
            "tensor_descriptor": Descriptor,
            "async_copy_global_to_shared": _load_block,
            "async_load": _load_block,
            "async_copy_shared_to_global": lambda desc, coord, src: _store_block(desc, coord, src, add=False),
            "async_store": lambda desc, coord, src: _store_block(desc, coord, src, add=False),
            "store_wait": _store_wait,
        },
    )
    hopper = _module(
        f"{root}.language.nvidia.hopper",
        {
            "mbarrier": barrier,
            "tma": tma,
            "warpgroup_mma": warpgroup_mma,
            "warpgroup_mma_wait": warpgroup_mma_wait,
            "warpgroup_mma_accumulator": Accumulator,
            "warpgroup_mma_init": lambda x: x,
            "fence_async_shared": fence_async_shared,
        },
    )
    ampere = _module(f"{root}.language.nvidia.ampere", {"mma_v2": mma_v2})
    nvidia = _module(f"{root}.language.nvidia", {"ampere": ampere, "hopper": hopper})
    core = _module(f"{root}.language._core", {"builtin": builtin, "_unwrap_if_constexpr": _plain})
    functions = {
        "exp2": torch.exp2, "exp": torch.exp, "log2": torch.log2, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
        "sqrt_rn": torch.sqrt, "sin": torch.sin, "cos": torch.cos, "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil,
    }  # fmt: skip
    gl = _module(
        f"{root}.language",
        {
            **layouts,
            **dtypes,
            **{name: _math(function) for name, function in functions.items()},
            "pointer_type": tl.pointer_type,
            "dtype": tl.dtype,
            "constexpr": _Constexpr,
            "tensor": Tensor,
            "tuple": tuple,
            "shared_memory_descriptor": Shared,
            "nvidia": nvidia,
            "_core": core,
            "abs": lambda x: (
                Int(abs(int(x)), x.dtype) if isinstance(x, Int) else Tensor(x.value().abs(), x.dtype, x.layout)
            ),
            "maximum": _of_two(torch.maximum, torch.fmax, max),
            "minimum": _of_two(torch.minimum, torch.fmin, min),
            "fdiv": lambda a, b: Tensor.of(a) / b,
            "div_rn": lambda a, b: Tensor.of(a) / b,
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "sum": sum_,
            "max": max_,
            "min": min_,
            "xor_sum": xor_sum,
            "reduce_or": reduce_or,
            "static_range": _static_range,
            "range": _tl_range,
            "static_print": lambda *args, **kwargs: None,
            "device_print": lambda *args, **kwargs: None,
            "barrier": lambda **kwargs: None,
            "thread_barrier": lambda: None,
            "num_warps": lambda: _me().warps,
            "num_ctas": lambda: 1,
            "assume": lambda condition: device_assert(condition, "assume"),
            "multiple_of": lambda x, *values: x,
            "max_contiguous": lambda x, *values: x,
            "max_constancy": lambda x, *values: x,
            "set_auto_layout": convert_layout,
            **{
                function.__name__: function
                for function in (
                    allocate_shared_memory,
                    warp_specialize,
                    inline_asm_elementwise,
                    program_id,
                    num_programs,
                    load,
                    store,
                    atomic_add,
                    cast,
                    to_tensor,
                    full,
                    zeros,
                    full_like,
                    zeros_like,
                    arange,
                    where,
                    expand_dims,
                    broadcast,
                    convert_layout,
                    reshape,
                    permute,
                    split,
                    join,
                    reduce,
                    fma,
                    cdiv,
                    device_assert,
                    static_assert,
                )
            },
        },
    )
    # Triton itself asks for the other kinds of descriptors that it has (3.8)
    kinds = {name: kind for name, kind in vars(real_host).items() if name.startswith("TensorDescriptor")}
    host = _module(f"{root}.nvidia.hopper", kinds)
    gluon = _module(
        root,
        {
            "jit": jit,
            "constexpr_function": lambda f: (
                lambda *args, **kwargs: f(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})
            ),
            "aggregate": aggregate,
            "language": gl,
            "nvidia": _module(f"{root}.nvidia", {"hopper": host}),
        },
    )
    everything = [gluon, gl, nvidia, ampere, hopper, barrier, tma, core, gluon.nvidia, host]
    return {module.__name__: module for module in everything}


language: Any = None


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """While this is open, importing Gluon gives the emulator; kernels imported inside stay emulated.

    Raises:
        RuntimeError: A Hopper kernel was imported before and would run on the hardware's compiler.
    """
    global language
    early = [
        name
        for name in sys.modules
        if name.startswith("ringattn.kernels.attention.hopper.") and not name.endswith(".plan")
    ]
    if early:
        raise RuntimeError(f"kernels must be imported after the emulator is installed, got {', '.join(early)} before")
    parent: Any = importlib.import_module("triton.experimental")
    modules = _modules()
    before = {name: sys.modules.get(name) for name in modules}
    real = parent.gluon
    language = modules["triton.experimental.gluon.language"]
    sys.modules.update(modules)
    parent.gluon = modules["triton.experimental.gluon"]
    try:
        yield
    finally:
        parent.gluon = real
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
