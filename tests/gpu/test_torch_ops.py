"""The kernel set `torch` on a GPU, with each backend: every case that torch's operators serve."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn.kernels.attention.torch_ops import api
from ringattn.kernels.attention.torch_ops.delta_output import output_for
from ringattn.kernels.registry import select_kernels
from tests.support.kernel_conformance import CASES, LONG_CASES, Case, run_case, torch_serves
from tests.support.request_isolation import BAD, SPOILT, assert_kernels_isolate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SERVED = [case for case in (*CASES, *LONG_CASES) if torch_serves(case)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forward_and_backward_stay_within_budget(case: Case, backend: str, dtype: torch.dtype) -> None:
    with sdpa_kernel(BACKENDS[backend]):
        try:
            run_case(api, case, dtype, "cuda")
        except NotImplementedError as refusal:
            if backend == "flash" and case.name != "long_runs":  # its strides differ on both sides
                raise
            pytest.skip(str(refusal))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_not_finite_stays_with_its_request(backend: str, spoilt: str, bad: float) -> None:
    with sdpa_kernel(BACKENDS[backend]):
        assert_kernels_isolate(
            api, (300, 170, 90), spoilt, bad, torch.bfloat16, "cuda", heads=8, kv_heads=2, head_dim=128
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
                run_case(api, case, torch.bfloat16, "cuda")
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
