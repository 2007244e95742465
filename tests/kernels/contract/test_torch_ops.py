import pytest
import torch

from ringattn.kernels.attention.torch_ops import api
from tests.support.kernel_conformance import CASES, run_case


def serves(c):
    return not (c.softcap or c.alibi or c.key_bias or c.bias or c.dropout_p) and (c.v_head_dim in (None, c.head_dim))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if serves(c)], ids=str)
def test_c(case, dtype):
    run_case(api, case, dtype, "cpu")
