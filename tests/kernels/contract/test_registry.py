from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from ringattn.kernels import registry
from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.interface import KernelSet
from ringattn.kernels.registry import select_kernels
from ringattn.numerics.reference import visible_pairs
from tests.support.kernel_conformance import make_side

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


NO_TORCH = "torch's operators are left out of this test"


def _stand_in(monkeypatch: pytest.MonkeyPatch, name: str, kernels: str) -> type[KernelSet]:
    """Put a class in place of a kernel set that cannot be imported here."""
    module, found = types.ModuleType(f"ringattn.kernels.attention.{name}.api"), type(kernels, (KernelSet,), {})
    setattr(module, kernels, found)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def _gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], backends: tuple[str, ...] = ()
) -> type[KernelSet]:
    from ringattn.kernels.attention.torch_ops import operators

    monkeypatch.setattr(operators, "available", lambda *args, **options: (backends, " and ".join(backends) or NO_TORCH))
    portable = _stand_in(monkeypatch, "portable", "PortableKernels")
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return portable


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[KernelSet]:
    """A machine that looks like one A100 with triton; returns what stands in for the portable kernels."""
    return _gpu(monkeypatch, (8, 0))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> type[KernelSet]:
    """A machine that looks like one H100 with triton; returns what stands in for the Hopper kernels."""
    _gpu(monkeypatch, (9, 0))
    return _stand_in(monkeypatch, "hopper", "HopperKernels")


def test_cpu_tensors_are_served_by_eager_and_the_choice_says_why():
    choice = select_kernels(CPU, torch.float32, 64, 64)
    assert choice.name == "eager"
    assert choice.kernels is EagerKernels
    assert [name for name, _ in choice.rejected] == ["hopper", "torch", "portable"]
    assert str(choice).startswith("eager: plain torch serves")
    assert "not portable: device must be a CUDA or ROCm GPU" in str(choice)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(16, 16), (40, 96), (256, 256)])
def test_a_gpu_is_served_by_portable(gpu: type[KernelSet], dtype: torch.dtype, dims: tuple[int, int]):
    choice = select_kernels(GPU, dtype, *dims)
    assert choice.name == "portable"
    assert choice.kernels is gpu
    assert [name for name, _ in choice.rejected] == ["hopper", "torch"]
    assert "compute capability 8.0" in str(choice)


@pytest.mark.parametrize(
    ("dtype", "dims", "why"),
    [
        (torch.float64, (64, 64), "dtype must be float16, bfloat16 or float32, got float64"),
        (torch.float32, (8, 64), "head_dim must be between 16 and 256, got 8"),
        (torch.float32, (64, 512), "v_head_dim must be between 16 and 256, got 512"),
    ],
)
def test_what_portable_refuses_falls_to_eager_with_a_reason(
    gpu: type[KernelSet], dtype: torch.dtype, dims: tuple[int, int], why: str
):
    choice = select_kernels(GPU, dtype, *dims)
    assert choice.name == "eager"
    assert ("portable", why) in choice.rejected
    with pytest.raises(NotImplementedError, match=f'impl="portable" cannot serve .*{why}; use impl="eager"'):
        select_kernels(GPU, dtype, *dims, impl="portable")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256)])
def test_a_hopper_gpu_is_served_by_hopper(hopper: type[KernelSet], dtype: torch.dtype, dims: tuple[int, int]):
    choice = select_kernels(GPU, dtype, *dims, features=registry.FEATURES - {"bias", "dropout"})
    assert choice.name == "hopper"
    assert choice.kernels is hopper
    assert choice.rejected == ()
    assert str(choice) == "hopper: compute capability 9.0 and triton 3.6.0"


@pytest.mark.parametrize(
    ("dtype", "dims", "features", "why"),
    [
        (torch.float32, (64, 64), (), "dtype must be float16 or bfloat16, got float32"),
        (torch.bfloat16, (68, 64), (), "head_dim must be a multiple of 8 between 16 and 256, got 68"),
        (torch.bfloat16, (64, 20), (), "v_head_dim must be a multiple of 8 between 16 and 256, got 20"),
        (torch.bfloat16, (64, 64), ("bias",), "bias is served by the portable kernels"),
        (torch.bfloat16, (64, 64), ("dropout", "sinks"), "dropout is served by the portable kernels"),
    ],
)
def test_what_hopper_refuses_falls_to_portable_with_a_reason(
    hopper: type[KernelSet], dtype: torch.dtype, dims: tuple[int, int], features: tuple[str, ...], why: str
):
    choice = select_kernels(GPU, dtype, *dims, features=features)
    assert choice.name == "portable"
    assert choice.rejected[0] == ("hopper", why)
    assert [name for name, _ in choice.rejected] == ["hopper", "torch"]
    with pytest.raises(NotImplementedError, match=f'impl="hopper" cannot serve .*{why}; use impl="portable"'):
        select_kernels(GPU, dtype, *dims, features=features, impl="hopper")


def test_an_unproven_triton_is_passed_over_with_a_reason(hopper: type[KernelSet], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.10.0"))
    choice = select_kernels(GPU, torch.bfloat16, 64, 64)
    assert choice.name == "portable"
    assert "triton must be 3.6 or 3.7 or 3.8, on which these kernels were proven, got 3.10.0" in str(choice)
    with pytest.raises(NotImplementedError, match=r"got 3\.10\.0; use"):
        select_kernels(GPU, torch.bfloat16, 64, 64, impl="hopper")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_gpus_are_served_by_torch_where_it_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
):
    _gpu(monkeypatch, capability, ("cudnn", "flash"))
    choice = select_kernels(GPU, dtype, 128, 128, features={"sinks", "per_batch_bounds"}, steps=lambda: ())
    assert choice.name == "torch"
    assert choice.reason == f"torch {torch.__version__} with cudnn and flash"
    assert [name for name, _ in choice.rejected] == ["hopper"]


def test_a_rocm_gpu_is_served_by_torch_where_it_can_and_by_portable_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    portable = _gpu(monkeypatch, (9, 4), ("aotriton",))
    choice = select_kernels(GPU, torch.bfloat16, 128, 128, steps=lambda: ())
    assert choice.name == "torch"
    assert choice.reason == f"torch {torch.__version__} with aotriton"
    for asked in ({"features": {"softcap"}}, {"dtype": torch.float32}, {"impl": "portable"}):
        call = {"device": GPU, "dtype": torch.bfloat16, "head_dim": 128, "v_head_dim": 128, **asked}
        assert select_kernels(**call).kernels is portable


def test_a_hopper_gpu_is_served_by_torch_only_when_asked(monkeypatch: pytest.MonkeyPatch, hopper: type[KernelSet]):
    from ringattn.kernels.attention.torch_ops import operators

    monkeypatch.setattr(operators, "available", lambda *args, **options: (("cudnn", "flash"), "cudnn and flash"))
    assert select_kernels(GPU, torch.bfloat16, 64, 64).kernels is hopper
    assert select_kernels(GPU, torch.bfloat16, 64, 64, impl="torch").name == "torch"


@pytest.mark.parametrize(
    ("dtype", "feature", "why"),
    [
        (torch.float32, None, "dtype must be float16 or bfloat16, got float32"),
        *(
            (torch.bfloat16, feature, f"{feature} is no part of torch's attention operators")
            for feature in ("softcap", "dropout", "alibi", "key_bias", "bias", "prefill")
        ),
    ],
)
def test_what_torch_refuses_falls_to_portable_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, feature: str | None, why: str
):
    portable = _gpu(monkeypatch, (8, 0), ("flash",))
    features = () if feature is None else (feature,)
    choice = select_kernels(GPU, dtype, 64, 64, features=features)
    assert choice.kernels is portable
    assert choice.rejected[1] == ("torch", why)
    with pytest.raises(NotImplementedError, match=f'impl="torch" cannot serve .*{why}; use impl="portable"'):
        select_kernels(GPU, dtype, 64, 64, features=features, impl="torch")


def test_steps_of_too_many_launches_fall_to_portable_with_a_reason(monkeypatch: pytest.MonkeyPatch):
    portable = _gpu(monkeypatch, (8, 0), ("cudnn",))
    side = make_side(((0, 1, 80),), visible_pairs(80, window=(0, 0)), "cpu")
    choice = select_kernels(GPU, torch.float16, 64, 64, steps=lambda: [(side, side)])
    assert choice.kernels is portable
    assert "at most 64 rectangles, triangles and bands" in choice.rejected[1][1]
    _gpu(monkeypatch, (8, 0), ("flash", "cudnn"))
    assert select_kernels(GPU, torch.float16, 64, 64, steps=lambda: [(side, side)]).name == "torch"


def test_an_old_gpu_is_served_by_eager(gpu: type[KernelSet], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    choice = select_kernels(GPU, torch.float16, 64, 64)
    assert choice.name == "eager"
    assert choice.rejected[2:] == (("portable", "compute capability must be at least 8.0, got 7.5"),)


def test_a_rocm_gpu_is_served_by_portable(gpu: type[KernelSet], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.delattr(torch.cuda, "get_device_capability")
    assert select_kernels(GPU, torch.bfloat16, 64, 64).name == "portable"


def test_without_triton_a_gpu_is_served_by_eager(gpu: type[KernelSet], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    choice = select_kernels(GPU, torch.float16, 64, 64)
    assert choice.name == "eager"
    assert choice.rejected[2:] == (("portable", "triton must be installed, got none"),)


def test_portable_on_a_cpu_needs_the_interpreter_and_an_explicit_wish(
    gpu: type[KernelSet], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(NotImplementedError, match=r'TRITON_INTERPRET=1 be set.*use impl="eager"'):
        select_kernels(CPU, torch.float32, 64, 64, impl="portable")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_kernels(CPU, torch.float32, 64, 64, impl="portable").kernels is gpu
    assert select_kernels(CPU, torch.float32, 64, 64).name == "eager"


def test_the_interpreter_is_refused_bfloat16(gpu: type[KernelSet], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(NotImplementedError, match=r'float16 or float32 in the Triton interpreter.*use impl="eager"'):
        select_kernels(CPU, torch.bfloat16, 64, 64, impl="portable")
    assert select_kernels(CPU, torch.bfloat16, 64, 64).name == "eager"
    assert select_kernels(GPU, torch.bfloat16, 64, 64, impl="portable").kernels is gpu


def test_an_explicit_eager_is_taken_without_looking_at_the_others(gpu: type[KernelSet]):
    choice = select_kernels(GPU, torch.float16, 64, 64, impl="eager")
    assert choice.kernels is EagerKernels
    assert choice.rejected == ()


def test_a_dtype_that_nobody_serves_is_refused():
    with pytest.raises(NotImplementedError, match=r"no kernel set serves .*got int32; cast q, k and v"):
        select_kernels(CPU, torch.int32, 64, 64)
    with pytest.raises(NotImplementedError, match=r'impl="eager" cannot serve .*got int32; cast q, k and v'):
        select_kernels(CPU, torch.int32, 64, 64, impl="eager")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="impl must be \"auto\" or one of hopper, torch, portable, eager, got 'flash'"):
        select_kernels(CPU, torch.float32, 64, 64, impl="flash")
    with pytest.raises(ValueError, match=r"features must be among .*, got rope"):
        select_kernels(CPU, torch.float32, 64, 64, features={"rope", "sinks"})


def test_every_feature_is_served_by_eager():
    assert select_kernels(CPU, torch.float32, 64, 64, features=registry.FEATURES).name == "eager"
