"""Reads what the assembler made of a kernel: its notes, its instructions, its loops.

Owns the tools that Triton brings for NVIDIA, and the notion of a loop with products. Knows no kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
LOCAL = re.compile(r"\b(STL|LDL)\b")
PRODUCT = re.compile(r"\b\w*MMA\b|\b\w*MMA\.")


@dataclass(frozen=True)
class Loop:
    """An innermost loop with products.

    Attributes:
        start: Address of the first instruction.
        end: Address of the branch back.
        body: The instructions, without addresses.
    """

    start: int
    end: int
    body: tuple[str, ...]

    @property
    def products(self) -> int:
        """Warpgroup products (HGMMA) of one round."""
        return sum("HGMMA" in line for line in self.body)

    @property
    def spills(self) -> int:
        """Accesses to local memory."""
        return sum(bool(LOCAL.search(line)) for line in self.body)


@dataclass(frozen=True)
class Notes:
    """What ptxas reports.

    Attributes:
        registers: Per thread.
        spills: Bytes of spill stores and loads.
        warnings: Lines that say so, those on serialised wgmma (C7510 to C7518) among them.
        injected: Lines on waits for products that the assembler put in (C7517): it then waits earlier than the source
            says, which costs overlap and may not cost time.
    """

    registers: int
    spills: int
    warnings: tuple[str, ...]
    injected: tuple[str, ...]


def assemble(ptx: str) -> Notes:
    """What ptxas reports on the final PTX; the cubin itself does not record spilled bytes."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target is not None, "PTX without a target"
    binary = os.path.join(TOOLS, "ptxas-blackwell" if target.group(1).startswith("sm_10") else "ptxas")
    if not os.path.exists(binary):
        binary = os.path.join(TOOLS, "ptxas")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "kernel.ptx")
        source.write_text(ptx)
        command = [binary, "-v", f"--gpu-name={target.group(1)}", str(source), "-o", str(Path(scratch, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    used = re.search(r"Used (\d+) registers", said)
    assert spilled is not None, said
    assert used is not None, said
    remarks = [line for line in said.splitlines() if re.search(r"warning|serializ|C75\d\d", line, re.IGNORECASE)]
    return Notes(
        registers=int(used.group(1)),
        spills=int(spilled.group(1)) + int(spilled.group(2)),
        warnings=tuple(line for line in remarks if "C7517" not in line),
        injected=tuple(line for line in remarks if "C7517" in line),
    )


def disassemble(cubin: bytes) -> list[tuple[int, str]]:
    """Addresses and instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [os.path.join(TOOLS, "cuobjdump"), "-sass", f.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [(int(m.group(1), 16), m.group(2)) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", done.stdout)]


def loops_with_products(code: list[tuple[int, str]]) -> list[Loop]:
    """The innermost loops that multiply, in order of address."""
    line_at = {address: i for i, (address, _) in enumerate(code)}
    found: list[tuple[int, int]] = []
    for i, (address, text) in enumerate(code):
        branch = re.search(r"BRA\S* .*?0x([0-9a-f]+)", text)
        target = int(branch.group(1), 16) if branch else address
        if target < address and target in line_at:
            body = [line for _, line in code[line_at[target] : i + 1]]
            # a wait that failed retries beyond the end of its part and jumps back from there: not a loop
            if any(PRODUCT.search(line) for line in body) and not any("EXIT" in line for line in body):
                found.append((line_at[target], i))
    inner = {x for x in found if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in found)}
    return [
        Loop(code[first][0], code[last][0], tuple(line for _, line in code[first : last + 1]))
        for first, last in sorted(inner)
    ]


def unfenced_stores(code: list[tuple[int, str]]) -> tuple[int, ...]:
    """Return the addresses of bulk stores whose shared memory was written without a fence and then a barrier behind it.

    Every thread that writes must fence before the barrier; the fence of the thread that issues the store covers only its own.
    Straight code is assumed from the writes to the store.
    """
    found: list[int] = []
    written = fenced = False
    for address, text in code:
        if re.search(r"\bSTS\b|\bSTSM\b", text):
            written, fenced = True, False
        elif "FENCE.VIEW.ASYNC" in text:
            fenced = written
        elif "BAR.SYNC" in text and fenced:
            written = fenced = False
        elif "UTMASTG" in text and written:
            found.append(address)
    return tuple(found)


_EVENTS = (
    (r"DEPBAR\.LE gsb0, (\S+)", "wait for products, {} left"),
    (r"WARPGROUP\.ARRIVE", "fence of registers"),
    (r"(BAR\.(?:SYNC|ARV)\S* .*)", "{}"),
    (r"SYNCS\.PHASECHK", "try mbarrier"),
    (r"SYNCS\.ARRIVE", "arrive at mbarrier"),
    (r"(UTMALDG|UTMASTG|UTMAREDG)", "{}"),
)
_COUNTED = (
    ("HGMMA", "HGMMA"), ("EX2", r"MUFU\.EX2"), ("MUFU", r"MUFU"), ("SHFL", "SHFL"), ("CVT", "F2FP"), ("SPILL", LOCAL.pattern),
    ("FFMA", "FFMA"), ("FMUL", "FMUL"), ("FADD", "FADD"), ("FMNMX", "FMNMX"), ("FSEL", "FSEL"), ("MOV", r"\bMOV|IMAD\.MOV"),
    ("LDS", r"\bLDS"), ("STS", r"\bST(S|SM)\b"), ("LDSM", "LDSM"), ("LDG", r"\bLDG"), ("STG", r"\bSTG"),
)  # fmt: skip


def events(loop: Loop) -> list[str]:
    """A loop as a schedule: waits and barriers one by one, what lies between them counted."""
    lines: list[str] = []
    between: Counter[str] = Counter()

    def flush() -> None:
        if between:
            lines.append("  " + " ".join(f"{name} x{n}" for name, n in sorted(between.items())))
            between.clear()

    for text in loop.body:
        for pattern, said in _EVENTS:
            match = re.search(pattern, text)
            if match:
                flush()
                lines.append(said.format(*match.groups()))
                break
        else:
            between[next((name for name, pattern in _COUNTED if re.search(pattern, text)), "other")] += 1
    flush()
    return lines
