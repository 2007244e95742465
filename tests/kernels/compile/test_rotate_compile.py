"""The kernel of rotations compiles for every GPU generation without a GPU, and reads whole words."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels.rotate_triton import NUMBERS, WARPS, _rotate_kernel  # noqa: E402
from tests.kernels.compile.test_softmax_compile import build, spilled_bytes  # noqa: E402

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("dtype", "angles", "d"), [("bf16", "bf16", 128), ("fp32", "fp32", 64)])
def test_heads_are_read_in_words(capability: int, dtype: str, angles: str, d: int, tmp_path):
    types = {name: f"*{dtype}" for name in ("q", "k", "q_out", "k_out")} | {"cos": f"*{angles}", "sin": f"*{angles}"}
    compiled = build(_rotate_kernel, types, {"HALF": d // 2, "HEADS": NUMBERS // d}, WARPS, capability)
    ptx = compiled.asm["ptx"]
    assert spilled_bytes(ptx, capability, tmp_path) == 0
    words = r"\.v4\.b32" if dtype == "fp32" else r"\.(v2\.b32|b64)"
    assert len(re.findall(rf"ld\.global\S*{words}", ptx)) >= 2
    assert len(re.findall(rf"st\.global\S*{words}", ptx)) >= 2
