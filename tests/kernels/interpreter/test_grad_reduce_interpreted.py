"""The Triton sum of what came home is the plain one, to the bit."""

import pytest
import torch

from tests.kernels.contract.test_grad_reduce import WIDTHS, assert_added_in_order, assert_biases_are_added_in_order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("parts", "d", "dv"), WIDTHS)
def test_contributions_are_added_in_order(dtype: torch.dtype, parts: int, d: int, dv: int) -> None:
    from ringattn.kernels.comm import grad_reduce_triton

    assert_added_in_order(grad_reduce_triton.reduce_kv_grads_on_gpu, dtype, parts, d, dv)


@pytest.mark.parametrize("parts", [0, 3])
def test_biases_are_added_in_order(parts: int) -> None:
    from ringattn.kernels.comm import grad_reduce_triton

    assert_biases_are_added_in_order(grad_reduce_triton.reduce_key_bias_grads_on_gpu, parts)


def test_a_rank_without_keys_has_nothing_to_add() -> None:
    from ringattn.kernels.comm import grad_reduce_triton

    dk = torch.empty(1, 0, 2, 64)
    grad_reduce_triton.reduce_kv_grads_on_gpu(
        dk, dk.clone(), torch.empty(1, 4, 2, 128), [], torch.empty(0, 0, dtype=torch.int32)
    )
    grad_reduce_triton.reduce_key_bias_grads_on_gpu(
        torch.empty(1, 0), torch.empty(1, 2, 4), [], torch.empty(0, 0, dtype=torch.int32)
    )
