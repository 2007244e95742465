"""The decode kernel compiles for every GPU generation without a GPU, streams its pages asynchronously, and does not spill."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ringattn.kernels import decode_configs, decode_triton  # noqa: E402
from ringattn.kernels.decode_configs import Config  # noqa: E402
from tests.compile import sass  # noqa: E402

pytestmark = pytest.mark.compile
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
SMALL = {"b", "s", "hk", "group", "tiles", "slots", "splits", "least", "rows"}


@dataclass(frozen=True)
class Built:
    """A compiled kernel, and what the assembler says of it."""

    shared: int
    ptx: str
    notes: sass.Notes
    code: list[tuple[int, str]]

    @property
    def loop(self) -> sass.Loop:
        """The loop over tiles."""
        return max(sass.loops_with_products(self.code), key=lambda loop: len(loop.body))


def build(
    arch: int,
    config: Config,
    *,
    b: int = 1,
    s: int = 1,
    group: int = 4,
    head_dim: int = 128,
    page_size: int = 64,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    softcap: bool = False,
    alibi: bool = False,
) -> Built:
    """Compiles the kernel as a launch of these sizes would, with 16-byte aligned pointers and strides."""
    fn = decode_triton._decode_kernel
    padded = max(16, triton.next_power_of_2(head_dim))
    kv = kv_dtype or dtype
    constants: dict[str, Any] = {
        "PAGE": page_size, "BLOCK_M": decode_configs.row_tiles(s, group, config.block_m)[0],
        "BLOCK_N": min(config.block_n, page_size), "D": padded, "D_WIDTH": head_dim, "DV": padded, "DV_WIDTH": head_dim,
        "B": triton.next_power_of_2(b), "S": triton.next_power_of_2(s), "SOFTCAP": softcap, "TMA": config.tma, "DENSE": True,
        "PRECISION": "tf32x3" if dtype == "fp32" else "ieee", "STAGES": config.num_stages, "SEARCH": decode_triton.FAN,
        "tiles": 1,
    }  # fmt: skip
    if kv == dtype:
        constants |= {"k_scale": None, "v_scale": None}
    if not alibi:
        constants["alibi_slopes"] = None
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    pointers = {
        "q": dtype,
        "k": kv,
        "v": kv,
        "parts": "fp32",
        "k_scale": "fp32",
        "v_scale": "fp32",
        "alibi_slopes": "fp32",
    }
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif config.tma and name in ("k", "v"):
            signature[name] = f"tensordesc<{kv}[1, 1, {constants['BLOCK_N']}, {padded}]>"
        elif name in ("scale", "cap"):
            signature[name] = "fp32"
        elif name in SMALL or re.fullmatch(r"\w+_s[bshp]", name):
            signature[name] = "i32"
            if name not in SMALL and name not in ("lo_sb", "hi_sb", "positions_sb", "table_sb"):
                attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "*" + pointers.get(name, "i32")
            attributes[i,] = [["tt.divisibility", 16]]
    known = {(fn.arg_names.index(name),): x for name, x in constants.items()}
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(
        ASTSource(fn, signature, known, attributes), target=target, options={"num_warps": config.num_warps}
    )
    ptx = compiled.asm["ptx"]
    return Built(compiled.metadata.shared, ptx, sass.assemble(ptx), sass.disassemble(compiled.asm["cubin"]))
