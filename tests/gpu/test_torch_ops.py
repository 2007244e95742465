"""The kernel set `torch` on a GPU, with each backend: every case that torch's operators serve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

from ringattn import attention_reference, masks, simulate_ring
from ringattn.kernels.attention.torch_ops.api import TorchKernels
from ringattn.kernels.attention.torch_ops.delta_output import output_for
from ringattn.kernels.registry import select_kernels
from tests.support.budget import assert_within_budget
from tests.support.kernel_conformance import (
    CASES,
    LONG_CASES,
    LONG_TERM_CASES,
    SMALL_WEIGHT_CASES,
    TERM_CASES,
    Case,
    run_case,
    torch_serves,
)
from tests.support.request_isolation import BAD, SPOILT, assert_kernels_isolate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SERVED = [case for case in (*CASES, *LONG_CASES, *TERM_CASES, *LONG_TERM_CASES) if torch_serves(case)]
ACTIVATED = ("long_causal_128", "gqa_4", "window_left", "documents", "zigzag_window", "two_visits", "sinks_over_visits")
STREAMING = masks.causal() & (masks.sinks(8) | masks.window(40))
TREE = masks.tree([None, 0, 1, 0], [64, 40, 32, 56])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forward_and_backward_stay_within_budget(case: Case, backend: str, dtype: torch.dtype) -> None:
    with sdpa_kernel(BACKENDS[backend]):
        try:
            run_case(TorchKernels, case, dtype, "cuda")
        except NotImplementedError as refusal:
            if backend == "flash" and case.name != "long_runs":  # its strides differ on both sides
                raise
            pytest.skip(str(refusal))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("case", [case for case in SMALL_WEIGHT_CASES if torch_serves(case)], ids=str)
def test_small_weights_keep_their_digits_in_bfloat16(case: Case, backend: str) -> None:
    test_forward_and_backward_stay_within_budget(case, backend, torch.bfloat16)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_an_activated_kernel_serves_within_budget_or_is_left_out_in_words(name: str) -> None:
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError, ValueError) as missing:
        pytest.skip(str(missing))
    try:
        said = select_kernels(torch.device("cuda", 0), torch.bfloat16, 128, 128, impl="torch").reason
        if f"flash ({name})" not in said:
            assert f"not flash: the activated {name} must run and return lse" in said
            pytest.skip(said)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for case in SERVED:
                if case.name in ACTIVATED:
                    run_case(TorchKernels, case, torch.bfloat16, "cuda")
    finally:
        restore_flash_attention_impl()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize("mask", [masks.causal(), STREAMING, TREE], ids=["causal", "streaming", "tree"])
def test_a_simulated_ring_is_attention_within_budget(mask: masks.Mask, layout: str, backend: str) -> None:
    n, generator = 192, torch.Generator().manual_seed(0)
    q, do = (torch.randn(2, n, 4, 64, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, n, 2, 64, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
    with sdpa_kernel(BACKENDS[backend]):
        try:
            ring = simulate_ring(q, k, v, 3, layout=layout, mask=mask, do=do, impl="torch")
        except NotImplementedError as refusal:
            assert backend == "cudnn" or layout == "striped", "steps of a zigzag ring are few bands"
            pytest.skip(str(refusal))
    assert ring.grads is not None
    found = [ring.o, *(ring.grads[name] for name in "qkv")]
    wide, plain = ([x.double() for x in (q, k, v, do)], [q, k, v, do])
    for name, x, exact, low in zip(
        ("o", "dq", "dk", "dv"), found, _reference(wide, mask), _reference(plain, mask), strict=True
    ):
        assert_within_budget(x, exact, low, name, torch.bfloat16)


def _reference(given: list[Tensor], mask: masks.Mask) -> list[Tensor]:
    q, k, v, do = given
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention_reference(*leaves, mask=mask)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_not_finite_stays_with_its_request(backend: str, spoilt: str, bad: float) -> None:
    with sdpa_kernel(BACKENDS[backend]):
        assert_kernels_isolate(
            TorchKernels, (300, 170, 90), spoilt, bad, torch.bfloat16, "cuda", heads=8, kv_heads=2, head_dim=128
        )


def test_deterministic_gradients_repeat_to_the_bit_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (torch.device("cuda", 0), torch.bfloat16, 64, 64)
    with pytest.raises(NotImplementedError, match=r"needs torch.use_deterministic_algorithms\(True\)"):
        select_kernels(*asked, impl="torch", features={"deterministic"})
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        assert "with flash" in str(select_kernels(*asked, impl="torch", features={"deterministic"}))
        for case in SERVED:
            if case.name in ("long_causal_128", "gqa_4"):
                run_case(TorchKernels, case, torch.bfloat16, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_output_made_for_delta_is_that_of_a_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    do, delta = torch.randn(2, 40, 3, 72, generator=generator).to(dtype), torch.randn(2, 3, 40, generator=generator)
    do[:, ::4] = 0.0
    do[:, 1::4] *= 1e-5
    for x, y in zip(output_for(do.cuda(), delta.cuda()), output_for(do, delta), strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).smallest_normal)
