"""Compiles a portable kernel for a GPU that is not there, with the arguments and switches a launch would have.

Owns the translation of a configuration into types and constants, and the reading of what the assembler reports.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringattn.kernels.portable.backward import keys_kernel, rows_kernel
from ringattn.kernels.portable.configs import Config
from ringattn.kernels.portable.forward import forward_kernel

KERNELS = {"forward": forward_kernel, "keys": keys_kernel, "rows": rows_kernel}
STREAMED = {"forward": ("k", "v"), "keys": ("do", "q"), "rows": ("k", "v")}
TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
FLOATS = {"scale", "cap", "softmax_scale", "drop_factor"}
POINTERS = {
    "lse": "fp32", "lse2": "fp32", "delta": "fp32", "carry_m": "fp32", "carry_l": "fp32", "carry_acc": "fp32",
    "dk_out": "fp32", "dv_out": "fp32",
    "dq_out": "fp32", "dkey_bias_out": "fp32", "dalibi_out": "fp32", "dbias": "fp32", "positions": "i32", "lo_ptr": "i32",
    "hi_ptr": "i32", "runs": "i32", "sinks": "fp32", "alibi_slopes": "fp32", "key_bias": "fp32", "bias": "fp32",
}  # fmt: skip
OPTIONAL = {  # which feature brings a pointer
    "carry_m": "carry", "carry_l": "carry", "carry_acc": "carry", "sinks": "sinks", "alibi_slopes": "alibi",
    "key_bias": "key_bias", "bias": "bias", "dkey_bias_out": "key_bias", "dalibi_out": "alibi", "dbias": "bias",
}  # fmt: skip


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
        "PRECISION": "tf32x3" if dtype == "fp32" else "ieee", "FIRST": first, "LAST": last, "PLAIN": not features,
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
    said = _assemble(ptx)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    used = re.search(r"Used (\d+) registers", said)
    assert spilled is not None, said
    assert used is not None, said
    return Report(
        shared=compiled.metadata.shared,
        registers=int(used.group(1)),
        spills=int(spilled.group(1)) + int(spilled.group(2)),
        loop_spills=_loop_spills(compiled.asm["cubin"]) if spilled.group(1) != "0" else 0,
        tensor_ops=frozenset(re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)", ptx)),
        warnings=tuple(line for line in said.splitlines() if "warning" in line.lower() or "serializ" in line.lower()),
    )


def _assemble(ptx: str) -> str:
    """What ptxas reports on the final PTX."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target is not None, "PTX without a target"
    name = "ptxas-blackwell" if target.group(1).startswith("sm_10") else "ptxas"
    binary = os.path.join(TOOLS, name)
    if not os.path.exists(binary):
        binary = os.path.join(TOOLS, "ptxas")
    with tempfile.TemporaryDirectory() as scratch:
        source = os.path.join(scratch, "kernel.ptx")
        with open(source, "w") as f:
            f.write(ptx)
        command = [binary, "-v", f"--gpu-name={target.group(1)}", source, "-o", os.path.join(scratch, "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _loop_spills(cubin: bytes) -> int:
    """Accesses to local memory between the target of a backward branch and the branch, in innermost loops with products."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run(
            [os.path.join(TOOLS, "cuobjdump"), "-sass", f.name], capture_output=True, text=True, check=True
        )
    code = [(int(m.group(1), 16), m.group(2)) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", done.stdout)]
    line_at = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        branch = re.search(r"BRA\S* .*?0x([0-9a-f]+)", text)
        target = int(branch.group(1), 16) if branch else address
        if target < address and target in line_at:
            body = [line for _, line in code[line_at[target] : i + 1]]
            # a wait that failed retries beyond the end of the kernel and jumps back from there: not a loop
            if any("MMA" in line for line in body) and not any("EXIT" in line for line in body):
                loops.append((line_at[target], i, body))
    inner = [x for x in loops if not any(y is not x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return sum(bool(re.search(r"\b(STL|LDL)\b", line)) for _, _, body in inner for line in body)
