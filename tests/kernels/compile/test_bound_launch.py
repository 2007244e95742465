"""A launch that was bound once hands the driver what Triton's own launch hands it."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import LazyDict
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ringattn.kernels.runtime import bound_launch

pytestmark = pytest.mark.compile
nvidia = importlib.import_module("triton.backends.nvidia.driver")


@triton.jit(do_not_specialize=["general"])
def copy_kernel(x, out, absent, general, special, scale, BLOCK: tl.constexpr, ADD: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * special, mask=at < general, other=0.0) * scale
    if absent is not None:
        value += tl.load(absent)
    if ADD:
        value += tl.load(out + at, mask=at < general, other=0.0)
    tl.store(out + at, value, mask=at < general)


@triton.jit(do_not_specialize=["row"])
def tile_kernel(source, row, target, other, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = source.load([row, 0]) + other.load([row, 0])
    target.store([row, 0], tile)


class Launches:
    """In place of the C function that launches: writes down what it is given. Not a function, as that is none."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.seen.append(args)

    def last(self) -> tuple[Any, ...]:
        """Addresses in place of tensors; without hooks and metadata, which are absent in one way and idle in the other."""
        args = self.seen[-1]
        flat = [*args[:-1], *args[-1]] if isinstance(args[-1], tuple | list) else list(args)
        idle = (knobs.HookChain, LazyDict, type(None))
        return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in flat if not isinstance(x, idle))


class Utils:
    """In place of what talks to the device."""

    def __init__(self, launches: Launches) -> None:
        self.launch = launches
        self.encoded = 0

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        del args
        return 1, 7, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        del device
        return {"max_shared_mem": 227 * 1024}

    def fill_tma_descriptor(self, *args: Any) -> tuple[Any, ...]:
        self.encoded += 1
        return "map", *(tuple(x) if isinstance(x, list) else x for x in args)

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Driver:
    """A GPU of compute capability 9.0 that only writes down."""

    def __init__(self, launches: Launches) -> None:
        self.utils = Utils(launches)
        self.launcher_cls = nvidia.CudaLauncher
        self.stream = 5

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None) -> int:
        del device
        return self.stream


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    launches = Launches()
    here = Driver(launches)
    for name, value in (
        ("compile_module_from_src", lambda **kwargs: SimpleNamespace(launch=launches)),
        ("library_dirs", list),
        ("annotate_arguments", lambda signature: None),
        ("make_kernel_signature", tuple),
    ):
        if hasattr(nvidia, name):
            monkeypatch.setattr(nvidia, name, value)
    before = driver._active
    driver.set_active(here)  # pyright: ignore[reportArgumentType]
    bound_launch._kernels.clear()
    for kernel in (copy_kernel, tile_kernel):
        kernel.device_caches.clear()
    yield here
    driver._active = before
    bound_launch._kernels.clear()
    for kernel in (copy_kernel, tile_kernel):
        kernel.device_caches.clear()


def publicly(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], **options: int
) -> None:
    kernel[grid](*args, **constants, **options)


def bound_of(kernel: Any) -> list[Any]:
    return list(bound_launch._kernels[id(kernel)].variants.values())


def test_arguments_are_those_of_the_public_launch(machine: Driver) -> None:
    x, out, one = torch.zeros(256), torch.zeros(256), torch.zeros(1)
    seen = machine.utils.launch
    variants = [
        ((3,), (x, out, None, 250, 1, 0.5), {"BLOCK": 64, "ADD": False}),
        ((3, 2), (x, out, one, 250, 16, 0.5), {"BLOCK": 64, "ADD": True}),
        ((1, 2, 3), (x[1:], out, one, 2**40, 3, 1.0), {"BLOCK": 32, "ADD": True}),
        ((3,), (x, out, None, 7, 2**33, 2.0), {"BLOCK": 64, "ADD": False}),
    ]
    for grid, args, constants in [*variants, *variants]:
        publicly(copy_kernel, grid, args, constants, num_warps=4)
        expected = seen.last()
        bound_launch.launch(copy_kernel, grid, args, constants, num_warps=4)
        assert seen.last() == expected
    assert len(bound_of(copy_kernel)) == len(variants)
    assert all(bound.run is not None for bound in bound_of(copy_kernel)), "Triton must be taken apart, got a fallback"


def test_only_kernels_that_need_scratch_memory_are_asked_for_it(
    machine: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(64)
    args, constants = (x, x, None, 64, 3, 1.0), {"BLOCK": 16, "ADD": False}
    kernel: Any = copy_kernel
    compiled = kernel[(1,)](*args, **constants, num_warps=1)
    seen, launcher = machine.utils.launch, copy.copy(compiled.run)
    if inspect.isfunction(launcher.launch):
        launcher.launch = seen
    straight = bound_launch._find_straight(launcher, 7, compiled.packed_metadata)
    assert straight is not None, "Triton must be taken apart, got a fallback"
    launch, constants = straight
    flat = (x.data_ptr(), x.data_ptr(), None, 64, 3, 1.0, 16, False)
    launcher(1, 2, 3, 5, 7, compiled.packed_metadata, None, None, None, *flat)
    expected = seen.seen[-1]
    launch(1, 2, 3, 5, *constants, *flat)
    assert seen.seen[-1] == expected
    for name in ("global_scratch_size", "profile_scratch_size"):
        with monkeypatch.context() as patch:
            patch.setattr(launcher, name, 16)
            assert bound_launch._find_straight(launcher, 7, compiled.packed_metadata) is None


def test_facts_that_compile_alike_share_a_kernel(machine: Driver) -> None:
    x = torch.zeros(64)
    for general in (1, 2, 16, 250):
        bound_launch.launch(copy_kernel, (1,), (x, x, None, general, 3, 1.0), {"BLOCK": 16, "ADD": False}, num_warps=1)
    assert len(bound_of(copy_kernel)) == 1


def test_facts_that_compile_otherwise_have_kernels_of_their_own(machine: Driver) -> None:
    x, apart = torch.zeros(64), torch.zeros(65)[1:]
    usual = (x, x, None, 64, 3, 1.0)
    kernel: Any = copy_kernel
    constants = {"BLOCK": 16, "ADD": False}
    changes = [
        *({4: special} for special in (1, 16, 5, 48, 2**33, 2**33 + 1)),
        *({3: general} for general in (2**31, -(2**31) - 1, 2**31 - 1)),
        *({0: given} for given in (apart, x.half(), apart.half())),
        {1: apart},
        {2: x},
    ]
    for change in changes:
        for args in (usual, tuple(change.get(i, x) for i, x in enumerate(usual))):
            bound = bound_launch.launch(kernel, (1,), args, constants, num_warps=1)
            assert bound is not None
            assert bound.compiled is kernel[(1,)](*args, **constants, num_warps=1), "Triton would launch another"


def test_descriptors_are_encoded_once_per_address(machine: Driver) -> None:
    seen = machine.utils.launch
    tensors = [torch.zeros(64, 64, dtype=torch.float16) for _ in range(4)]
    template = bound_launch.Template(TensorDescriptor(tensors[0], [64, 64], [64, 1], [32, 64]))

    def args(a: int, b: int) -> tuple[Any, ...]:
        return template.over(tensors[a]), 3, template.over(tensors[b]), template.over(tensors[a])

    def plain(a: int, b: int) -> tuple[Any, ...]:
        made = [TensorDescriptor(tensors[i], [64, 64], [64, 1], [32, 64]) for i in (a, b, a)]
        return made[0], 3, *made[1:]

    constants = {"ROWS": 32, "COLUMNS": 64}
    for a, b in ((0, 1), (2, 3), (0, 3), (0, 1), (2, 3)):
        publicly(tile_kernel, (1,), plain(a, b), constants, num_warps=4)
        expected = seen.last()
        bound_launch.launch(tile_kernel, (1,), args(a, b), constants, num_warps=4)
        assert seen.last() == expected
        bound_launch.launch(tile_kernel, (1,), plain(a, b), constants, num_warps=4)
        assert seen.last() == expected
    assert len(bound_of(tile_kernel)) == 1
    before = machine.utils.encoded
    bound_launch.launch(tile_kernel, (1,), args(2, 1), constants, num_warps=4)
    assert machine.utils.encoded == before
    assert seen.last() != expected


def test_kept_descriptors_are_bounded_and_keep_nothing_alive(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_launch, "CAPACITY", 7)
    fields = [64, 64], [64, 1], [32, 64]
    template = bound_launch.Template(TensorDescriptor(torch.zeros(64, 64, dtype=torch.float16), *fields))
    held: list[torch.Tensor] = []
    x = d = None
    for _ in range(20):
        x = torch.zeros(64, 64, dtype=torch.float16)
        held.append(x)
        d = template.over(x)
        bound_launch.launch(tile_kernel, (1,), (d, 3, d, d), {"ROWS": 32, "COLUMNS": 64}, num_warps=4)
        assert len(bound_of(tile_kernel)[0].encoded) <= 7
    gone = weakref.ref(held.pop())
    machine.utils.launch.seen.clear()
    del x, d
    assert bound_of(tile_kernel)[0].encoded
    assert gone() is None


def test_launches_go_to_the_current_stream(machine: Driver) -> None:
    x = torch.zeros(64)
    streams = []
    for stream in (5, 5, 9, 5):
        machine.stream = stream
        bound_launch.launch(copy_kernel, (1,), (x, x, None, 64, 1, 1.0), {"BLOCK": 16, "ADD": False}, num_warps=1)
        streams.append(machine.utils.launch.seen[-1][3])
    assert streams == [5, 5, 9, 5]


def test_a_profiler_hears_of_launches(machine: Driver) -> None:
    x = torch.zeros(64)
    names: list[str] = []

    def hook(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    def go() -> Any:
        bound_launch.launch(copy_kernel, (1,), (x, x, None, 64, 1, 1.0), {"BLOCK": 16, "ADD": False}, num_warps=1)
        # the C function calls the hooks that it is given
        return [arg for arg in machine.utils.launch.seen[-1] if isinstance(arg, knobs.HookChain) and arg.calls]

    go()
    assert not go()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert go()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert not go()


def test_a_triton_that_encodes_with_one_argument_more_is_known(
    machine: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nvidia.make_tensordesc_arg
    blank = (None,) * (len(inspect.signature(real).parameters) - 2)
    x = torch.zeros(64, 64, dtype=torch.float16)
    args = (
        *[TensorDescriptor(x, [64, 64], [64, 1], [32, 64]), 3],
        *[TensorDescriptor(x, [64, 64], [64, 1], [32, 64])] * 2,
    )
    constants = {"ROWS": 32, "COLUMNS": 64}
    publicly(tile_kernel, (1,), args, constants, num_warps=4)
    expected = machine.utils.launch.last()
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda arg, metadata, _=None: real(arg, metadata, *blank))
    bound_launch.launch(tile_kernel, (1,), args, constants, num_warps=4)
    assert machine.utils.launch.last() == expected
    assert bound_of(tile_kernel)[0].run is not None


def test_a_triton_that_encodes_otherwise_is_launched_publicly(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    real = nvidia.make_tensordesc_arg
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda arg, metadata, device: real(arg, metadata))
    x = torch.zeros(64)
    bound_launch.launch(copy_kernel, (1,), (x, x, None, 64, 1, 1.0), {"BLOCK": 16, "ADD": False}, num_warps=1)
    assert all(bound.run is None for bound in bound_of(copy_kernel))


@pytest.mark.parametrize("change", ["another launcher", "another signature", "no function below"])
def test_an_unknown_triton_is_launched_publicly(machine: Driver, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    if change == "another launcher":
        machine.launcher_cls = type("Other", (nvidia.CudaLauncher,), {})
    elif change == "another signature":
        call = nvidia.CudaLauncher.__call__
        monkeypatch.setattr(nvidia.CudaLauncher, "__call__", lambda self, *args: call(self, *args))
    else:
        real = nvidia.wrap_handle_tensordesc
        monkeypatch.setattr(nvidia, "wrap_handle_tensordesc", lambda *args: lambda *inner: real(*args)(*inner))
    x = torch.zeros(64)
    seen = machine.utils.launch
    for _ in range(3):
        args, constants = (x, x, None, 64, 1, 1.0), {"BLOCK": 16, "ADD": False}
        publicly(copy_kernel, (1,), args, constants, num_warps=1)
        expected = seen.last()
        bound_launch.launch(copy_kernel, (1,), args, constants, num_warps=1)
        assert seen.last() == expected
    assert all(bound.run is None for bound in bound_of(copy_kernel))


def test_a_template_gives_what_its_class_gives() -> None:
    x, y = torch.zeros(64, 64), torch.ones(64, 64)
    made = TensorDescriptor(x, [64, 64], [64, 1], [32, 32])
    found = bound_launch.Template(made).over(y)
    assert type(found) is TensorDescriptor
    assert found.base is y
    for one in dataclasses.fields(TensorDescriptor):
        if one.name != "base":
            assert getattr(found, one.name) == getattr(made, one.name)
