"""The kernel that draws tokens compiles for every GPU generation without a GPU, reads whole words, and stays in registers."""

from __future__ import annotations

import os
import re

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels import draw_triton  # noqa: E402
from tests.kernels.compile.test_softmax_compile import build, spilled_bytes  # noqa: E402

pytestmark = pytest.mark.compile
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize(
    ("capability", "dtype", "drawn", "with_lse"),
    [(80, "fp32", True, True), (90, "bf16", True, False), (90, "bf16", False, False), (100, "bf16", True, True)],
)
def test_a_row_is_walked_in_words_and_held_in_registers(
    capability: int, dtype: str, drawn: bool, with_lse: bool, tmp_path
) -> None:
    shape = draw_triton.shape_of(128256, DTYPES[dtype].itemsize)
    types = {"logits": f"*{dtype}", "how": "*fp64", "tokens": "*i64", "lse": "*fp32", "slots": "*i32"}
    constants: dict[str, object] = {
        "RANGES": draw_triton.RANGES, "LANES": shape.lanes, "VEC": shape.vec, "SLOTS": shape.slots,
        "SAMPLE": shape.sample, "SPAN": shape.span, "GRAIN": draw_triton.GRAINS[DTYPES[dtype]],
    }  # fmt: skip
    constants |= {} if drawn else {"how": None, "slots": None}
    constants |= {} if with_lse else {"lse": None}
    compiled = build(draw_triton._draw_kernel, types, constants, shape.warps, capability)
    ptx = compiled.asm["ptx"]
    # Triton 3.6 has the assembler put a few numbers of a thread aside, outside of the walks
    assert spilled_bytes(ptx, capability, tmp_path) < 128
    # threads exchange sums; a tile that passes through shared memory needs more
    assert compiled.metadata.shared <= 8192
    walks = 1 + with_lse + 3 * drawn
    words = draw_triton.TILE // (shape.vec * 32 * shape.warps)
    # a tile before each walk, and one ahead in it
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 2 * words * walks
