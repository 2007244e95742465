"""The put and take kernels compile for every GPU generation without a GPU, stay in registers, and move 16 bytes at a time."""

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels.kv import pages_triton  # noqa: E402
from tests.kernels.compile import sass  # noqa: E402
from tests.kernels.compile.offline import build  # noqa: E402

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("name", ["_put_kernel", "_put_kernel and contain", "_take_kernel"])
@pytest.mark.parametrize(("capability", "fp8"), [(80, False), (80, True), (90, False), (90, True), (100, True)])
def test_rows_move_in_wide_words_without_spills(name: str, capability: int, fp8: bool, latent: bool) -> None:
    name, _, contain = name.partition(" and ")
    fn = getattr(pages_triton, name)
    pool = "*u8" if fp8 else "*bf16"
    types = {"pool_k": pool, "pool_v": pool, "k": "*bf16", "v": "*bf16", "slots": "*i64"}
    constants: dict[str, object] = {
        "HK": 8, "SIZE": 64, "FP8": fp8, "D": 128, "DV": 128, "D_COLUMNS": 128, "DV_COLUMNS": 128, "ROWS": 32,
    }  # fmt: skip
    if latent:
        del types["v"]
        constants |= {"v": None, "HK": 1, "D": 576, "DV": 512, "D_COLUMNS": 1024, "DV_COLUMNS": 512, "ROWS": 4}
    scales = dict.fromkeys(("k_scale", "v_scale"), "*fp32") if fp8 else {}
    if not fp8:
        constants |= {"k_scale": None, "v_scale": None}
    if contain:
        types |= {"k_contained": "*bf16", "v_contained": "*bf16"}
    elif name == "_put_kernel":
        constants |= {"k_contained": None, "v_contained": None}
    kernel = build(fn, types | scales, constants, capability, num_warps=4)
    ptx = kernel.asm["ptx"]
    assert sass.assemble(ptx).spills == 0
    wide = r"\.global\S*\.v4\.b32|\.global\S*\.v2\.b64"
    loads, stores = (re.findall(rf"{kind}(?:{wide})", ptx) for kind in ("ld", "st"))
    if fp8:
        # a thread holds 16 bytes of bf16, so of fp8 half as much
        wide = r"\.global\S*\.v2\.b32|\.global\S*\.b64|" + wide
        loads, stores = (re.findall(rf"{kind}(?:{wide})", ptx) for kind in ("ld", "st"))
    assert len(loads) >= 2 - latent
    assert len(stores) >= 2 - latent
