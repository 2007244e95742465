"""Compiles a portable kernel for a GPU that is not there, with the arguments and switches a launch would have.

Owns the translation of a configuration into types and constants; `sass` reads what the assembler made of it.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringattn.kernels.attention.portable.backward import keys_kernel, rows_kernel
from ringattn.kernels.attention.portable.configs import Config
from ringattn.kernels.attention.portable.forward import forward_kernel
from tests.kernels.compile import sass

KERNELS = {"forward": forward_kernel, "keys": keys_kernel, "rows": rows_kernel}
STREAMED = {"forward": ("k", "v"), "keys": ("do", "q"), "rows": ("k", "v")}
FLOATS = {"scale", "cap", "softmax_scale", "drop_factor"}
POINTERS = {
    "lse": "fp32", "lse2": "fp32", "delta": "fp32", "carry_m": "fp32", "carry_l": "fp32", "carry_acc": "fp32",
    "dk_out": "fp32", "dv_out": "fp32",
    "dq_out": "fp32", "dkey_bias_out": "fp32", "dalibi_out": "fp32", "dbias": "fp32", "positions": "i32", "lo_ptr": "i32",
    "hi_ptr": "i32", "runs": "i32", "sinks": "fp32", "alibi_slopes": "fp32", "key_bias": "fp32", "bias": "fp32",
    "tables": "i32", "of_term": "i32",
}  # fmt: skip
OPTIONAL = {  # which feature brings an argument
    "carry_m": "carry", "carry_l": "carry", "carry_acc": "carry", "sinks": "sinks", "alibi_slopes": "alibi",
    "key_bias": "key_bias", "bias": "bias", "dkey_bias_out": "key_bias", "dalibi_out": "alibi", "dbias": "bias",
    "term_count": "terms", "lo_st": "terms", "hi_st": "terms", "tables": "tables", "of_term": "tables", "table_size": "tables",
    "table_width": "tables", "block_size": "tables",
}  # fmt: skip

OF_MASKS = ("terms", "tables")
"""Features that the score is not made of: several terms, and tables of blocks that cut them."""


@dataclass(frozen=True)
class Report:
    """What the compiler made of a kernel.

    Attributes:
        shared: Bytes of shared memory.
        registers: Per thread.
        spills: Bytes of spill stores and loads, outside and inside loops.
        loop_spills: Accesses to local memory inside the innermost loops that hold products.
        tensor_ops: The tensor core instruction of each product in the PTX.
        warnings: Lines of the assembler that say so.
    """

    shared: int
    registers: int
    spills: int
    loop_spills: int
    tensor_ops: frozenset[str]
    warnings: tuple[str, ...]


def compile_kernel(
    kernel: str,
    arch: int,
    config: Config,
    *,
    head_dim: int,
    dtype: str = "bf16",
    features: tuple[str, ...] = (),
    first: bool = True,
    last: bool = True,
    group: int = 1,
    dump: str | None = None,
) -> Report:
    """Compiles one kernel for compute capability `arch` (80, 90, 100)."""
    fn = KERNELS[kernel]
    padded = max(16, 2 ** math.ceil(math.log2(head_dim)))
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "D": padded, "D_WIDTH": head_dim, "DV": padded, "DV_WIDTH": head_dim,
        "SOFTCAP": "softcap" in features, "DROPOUT": "dropout" in features, "TMA": config.tma,
        "PRECISION": "tf32x3" if dtype == "fp32" else "ieee", "FIRST": first, "LAST": last,
        "DOT_ONLY": set(features) <= set(OF_MASKS),
        "SKEW": config.skew, "ADD": not first, "SAME_STRIDE": True,
    }  # fmt: skip
    present = set(features) | ({"carry"} if not (first and last) else set())
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    dynamic = {fn.arg_names[i] if isinstance(i, int) else i for i in fn.do_not_specialize or ()}
    block = config.block_m if kernel == "keys" else config.block_n
    for i, name in enumerate(fn.arg_names):
        if name == "group" and group == 1:
            signature[name] = "constexpr"  # what a launch makes of an argument that is 1
            constants[name] = 1
        elif name in constants:
            signature[name] = "constexpr"
        elif name in OPTIONAL and OPTIONAL[name] not in present:
            signature[name] = "constexpr"
            constants[name] = None
        elif config.tma and name in STREAMED[kernel]:
            signature[name] = f"tensordesc<{dtype}[1, 1, {block}, {padded}]>"
        elif config.tma and kernel == "keys" and name in ("lse2", "delta"):
            signature[name] = f"tensordesc<fp32[{block}]>"
        elif name in ("q", "k", "v", "o", "do") or name in POINTERS:
            signature[name] = "*" + POINTERS.get(name, dtype)
            attributes[i,] = [["tt.divisibility", 16]]
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name not in dynamic and re.fullmatch(r"\w+_s[bshn]", name):
                attributes[i,] = [["tt.divisibility", 16]]
    known = {(fn.arg_names.index(name),): value for name, value in constants.items() if name in fn.arg_names}
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    compiled = triton.compile(
        ASTSource(fn, signature, known, attributes), target=GPUTarget("cuda", arch, 32), options=options
    )
    ptx = compiled.asm["ptx"]
    if dump is not None:
        os.makedirs(dump, exist_ok=True)
        for kind in ("ttgir", "ptx", "cubin"):
            mode = "wb" if kind == "cubin" else "w"
            with open(os.path.join(dump, f"{kernel}.{kind}"), mode) as f:
                f.write(compiled.asm[kind])
    notes = sass.assemble(ptx)
    loops = sass.loops_with_products(sass.disassemble(compiled.asm["cubin"])) if notes.spills else []
    return Report(
        shared=compiled.metadata.shared,
        registers=notes.registers,
        spills=notes.spills,
        loop_spills=sum(loop.spills for loop in loops),
        tensor_ops=frozenset(re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)", ptx)),
        warnings=notes.warnings,
    )
