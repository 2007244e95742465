"""The kernel of products of few rows compiles for every GPU generation without a GPU, reads ahead and stays in registers."""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels.few_rows_triton import _few_rows_kernel, shape_of  # noqa: E402
from tests.kernels.compile.test_softmax_compile import build, spilled_bytes  # noqa: E402

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("rows", "outer", "activation", "dtype"),
    [
        (1, 6144, "", "bf16"),
        (16, 4096, "", "fp16"),
        (8, 7168, "silu", "bf16"),
        (64, 7168, "gelu", "bf16"),
        (64, 4096, "", "bf16"),
    ],
)
def test_weights_are_read_ahead(capability: int, rows: int, outer: int, activation: str, dtype: str, tmp_path):
    shape = shape_of(rows, outer, 4096, gated=bool(activation))
    constants: dict[str, object] = {
        "ROWS": shape.rows, "COLUMNS": shape.columns, "INNER": shape.inner, "STAGES": shape.stages, "ACTIVATION": activation,
        "bias": None, "other_bias": None,
    }  # fmt: skip
    if not activation:
        constants |= {"other": None, "other_stride": 0}
    types = {name: f"*{dtype}" for name in ("x", "weight", "other", "out")}
    compiled = build(_few_rows_kernel, types, constants, shape.warps, capability)
    # blocks of the weight go to shared memory while earlier ones are multiplied
    weights = 2 if activation else 1
    assert compiled.metadata.shared >= (shape.stages - 1) * weights * shape.columns * shape.inner * 2
    assert compiled.metadata.shared <= 160 * 1024
    assert spilled_bytes(compiled.asm["ptx"], capability, tmp_path) == 0
