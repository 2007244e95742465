from __future__ import annotations

import os
import re
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ringattn.kernels.hopper.backward import RUNTIME, backward_kernel
from ringattn.kernels.hopper.backward_configs import BACKWARD
from tests.compile.offline import _assemble, _loop_spills

pytestmark = pytest.mark.compile

SHARED = 227 * 1024
FEATURES = {
    "alibi_slopes": "alibi", "dalibi_out": "alibi", "key_bias": "key_bias", "dkey_bias_out": "key_bias",
    "dkey_bias_parts": "key_bias",
}  # fmt: skip


def build(d: int, dv: int, *, rows: bool = True, features: tuple[str, ...] = ()) -> Any:
    """The kernel as a launch with bf16 tensors and fp32 gradients would compile it."""
    block = BACKWARD[d, dv].block
    columns = d * block // 128

    def described(dtype: str, *shape: int) -> str:
        element = {"bf16": gl.bfloat16, "fp32": gl.float32}[dtype]
        return f"tensordesc<{dtype}{list(shape)},{gl.NVMMASharedLayout.get_default_for(list(shape), element)!r}>"

    constants: dict[str, Any] = {
        "D": d, "DV": dv, "D_WIDTH": d, "DV_WIDTH": dv, "BM": block, "PLAIN": not features, "SOFTCAP": "softcap" in features,
        "ADD": False, "WANT_DQ": rows, "SCALE_DQ": rows, "PIN": False, "UNIT": 8,
        "DS_LAYOUT": gl.NVMMASharedLayout.get_default_for([128, block], gl.bfloat16), "num_warps": 4,
    }  # fmt: skip
    constants |= {name: None for name, feature in FEATURES.items() if feature not in features}
    if not rows:
        constants["dq_desc"] = None
    types = {
        "q_desc": described("bf16", 1, 1, block, d), "do_desc": described("bf16", 1, 1, block, dv),
        "k_desc": described("bf16", 1, 1, 128, d), "v_desc": described("bf16", 1, 1, 128, dv),
        "lse_desc": described("fp32", block), "delta_desc": described("fp32", block),
        "dq_desc": described("fp32", 1, 1, 64, columns), "scale": "fp32", "cap": "fp32", "softmax_scale": "fp32",
    }  # fmt: skip
    types |= dict.fromkeys(("work", "segments", "starts", "positions", "lo_ptr", "hi_ptr"), "*i32")
    types |= dict.fromkeys(RUNTIME, "i32")
    kernel: Any = backward_kernel
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    known = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, known, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})


def notes(said: str) -> list[str]:
    """The assembler's complaints about products that wait for one another (C7510 to C7518)."""
    return re.findall(r".*(?:C75\d\d|serializ).*", said)


@pytest.mark.parametrize(("d", "dv", "rows"), [(128, 128, True), (128, 64, True), (128, 128, False), (64, 64, False)])
def test_plain_loops_stay_in_registers(d: int, dv: int, rows: bool):
    compiled = build(d, dv, rows=rows)
    assert compiled.metadata.shared <= SHARED
    assert _loop_spills(compiled.asm["cubin"]) == 0
    assert notes(_assemble(compiled.asm["ptx"])) == []


def test_loops_of_narrow_heads_hardly_leave_registers():
    compiled = build(64, 64)
    assert compiled.metadata.shared <= SHARED
    assert _loop_spills(compiled.asm["cubin"]) <= 16  # of 2700 instructions in four loops
    assert notes(_assemble(compiled.asm["ptx"])) == []


def test_the_kernel_with_every_feature_fits():
    assert build(64, 64, features=("softcap", "alibi", "key_bias")).metadata.shared <= SHARED
