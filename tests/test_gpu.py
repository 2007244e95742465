"""What only a GPU can show: the compiled kernels on the shared cases, and addresses beyond 32 bits."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from ringattn import Ring, attention_reference, ring_attention_with_lse
from ringattn.kernels.contract import KernelSet
from tests.budget import assert_within_budget
from tests.kernel_conformance import CASES, LONG_CASES, Case, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP32_CASES = ("causal", "zigzag_window", "head_dim_128", "everything", "gqa_3", "dropout")


IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER_CASES = [
    replace(case, name=f"{case.name}{'_deterministic' if deterministic else ''}", deterministic=deterministic)
    for case in (*CASES, *LONG_CASES)
    for deterministic in (False, True)
    if case.bias is None and not case.dropout_p
]


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES], ids=str)
def test_compiled_kernels_stay_within_budget(case: Case) -> None:
    portable = pytest.importorskip("ringattn.kernels.portable.api")
    run_case(portable, case, torch.bfloat16, "cuda")


@pytest.fixture
def hopper() -> KernelSet:
    if not IS_HOPPER:
        pytest.skip("needs compute capability 9.0")
    return importlib.import_module("ringattn.kernels.hopper.api")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_hopper_kernels_stay_within_budget(hopper: KernelSet, case: Case, dtype: torch.dtype) -> None:
    run_case(hopper, case, dtype, "cuda")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FP32_CASES], ids=str)
def test_fp32_is_not_tf32(case: Case) -> None:
    portable = pytest.importorskip("ringattn.kernels.portable.api")
    run_case(portable, case, torch.float32, "cuda")


def test_elements_beyond_32_bits_are_found() -> None:
    n, heads, head_dim, window, tail = 1_100_000, 32, 128, 63, 256
    assert n * heads * head_dim > 2**32
    needed = 10 * n * heads * head_dim * 2
    if torch.cuda.get_device_properties(0).total_memory < needed:
        pytest.skip(f"needs a device with {needed / 2**30:.0f} GiB")
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, n, heads, head_dim, device="cuda", dtype=torch.bfloat16, generator=g) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sharding = Ring().sharding(n)
    o, lse = ring_attention_with_lse(q, k, v, sharding, causal=True, window=(window, 0))
    dq, dk, dv = torch.autograd.grad(o, leaves, do)

    # the last rows see, and are seen by, nothing before this slice
    last = slice(n - tail - window, n)
    answers = {}
    for dtype in (torch.float64, torch.bfloat16):
        parts = [x[:, last].detach().to(dtype).requires_grad_() for x in (q, k, v)]
        o_part, lse_part = attention_reference(*parts, causal=True, window=(window, 0), return_lse=True)
        answers[dtype] = [o_part, lse_part.transpose(1, 2), *torch.autograd.grad(o_part, parts, do[:, last].to(dtype))]
    found = [o, lse.transpose(1, 2), dq, dk, dv]
    for name, x, exact, low in zip("o lse dq dk dv".split(), found, *answers.values(), strict=True):
        assert_within_budget(x[:, -tail:], exact[:, -tail:], low[:, -tail:], name)
