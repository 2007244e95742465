"""The kernels of packed parts compile for every GPU generation, stay in registers, and keep what orders memory in its order."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels.comm import one_shot_triton  # noqa: E402
from ringattn.kernels.partials import packed_triton  # noqa: E402
from ringattn.kernels.partials.merge_triton import merging, together  # noqa: E402
from tests.kernels.compile import sass  # noqa: E402
from tests.kernels.compile.offline import build  # noqa: E402

pytestmark = pytest.mark.compile
TYPES = {"stack": "*fp32", "sinks": "*fp32", "o": "*bf16", "lse": "*fp32", "table": "*i64"}
CAPABILITIES = [80, 90, 100]


@pytest.mark.parametrize(("capability", "parts", "rows"), [(90, 33, 32), (80, 4, 4096), (90, 4, 4096), (100, 4, 4096)])
def test_a_finishing_program_waits_for_memory_twice(capability: int, parts: int, rows: int) -> None:
    tile = merging(parts, rows, 128, programs=132)
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "TOGETHER": tile.together}
    compiled = build(packed_triton._finish_parts_kernel, TYPES, constants, capability, num_warps=tile.warps)
    assert sass.assemble(compiled.asm["ptx"]).spills == 0
    code = [line for _, line in sass.disassemble(compiled.asm["cubin"])]
    loads = [i for i, line in enumerate(code) if "LDG" in line]
    weights = [i for i, line in enumerate(code) if "MUFU.EX2" in line]
    # one 2^x comes before: that of the sinks
    early = [i for i in loads if i < weights[1]]
    # Triton 3.8.0 asks for the last of acc between the first weights of a row alone, which need m
    share = 0.7 if tile.rows == 1 and triton.__version__.startswith("3.8.") else 1.0
    if tile.rows == 1:
        assert len(early) >= share * len(loads), (
            "m, l and acc of all parts are asked for before the first of them is used"
        )
    assert len(early) >= share * 3 * tile.together


def build_one_shot(capability: int, ranks: int, rows: int, columns: int, *, sinks: bool, parts: int = 6):
    constants = {"RANKS": ranks, "PROGRAMS": one_shot_triton.PROGRAMS, "ROWS": rows, "COLUMNS": columns}
    constants["TOGETHER"] = together(parts, rows * columns, one_shot_triton.WARPS)
    constants |= {} if sinks else {"sinks": None}
    return build(
        one_shot_triton._one_shot_kernel, TYPES, constants, capability, num_warps=one_shot_triton.WARPS, num_stages=1
    )


class Order:
    """Where a kernel of exchanges stores, announces, awaits and reads, in lines of its PTX."""

    def __init__(self, ptx: str) -> None:
        self.lines = [line.strip() for line in ptx.splitlines()]
        # what a compiler may keep in a cache of its own is never a share of a peer
        assert "ld.global.nc" not in ptx
        (self.stored, self.awaited) = self.places(r"^barrier\.red\.or\.pred")
        (announced,), (acquired,) = (
            self.places(r"st\.release\.sys\.global\.b64"),
            self.places(r"ld\.acquire\.sys\.global\.b64"),
        )
        assert self.stored < announced < acquired < self.awaited
        self.read = self.places(r"ld\.global\.cg")
        assert min(self.read) > self.awaited, "shares are read from L2, once they are there"
        # a wait is bounded by a clock of the device, not by a count
        assert len(self.places(r"%globaltimer")) == 2

    def places(self, pattern: str) -> list[int]:
        return [i for i, line in enumerate(self.lines) if re.search(pattern, line)]

    def mailed(self, pattern: str) -> int:
        """How many stores are so, of those whose results peers await."""
        found = [i for i in self.places(pattern) if i < self.awaited]
        assert max(found) < self.stored
        return len(found)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "sinks"), [(4, 1, 128, False), (8, 8, 128, True), (2, 4, 256, False)]
)
def test_parts_are_stored_then_announced_then_awaited_then_read(
    capability: int, ranks: int, rows: int, columns: int, sinks: bool
) -> None:
    ptx = build_one_shot(capability, ranks, rows, columns, sinks=sinks).asm["ptx"]
    # the assembler puts a few addresses aside to fit more programs on an SM; a thread's share of a tile is 32 bytes
    assert sass.assemble(ptx).spills < 2 * 32
    order = Order(ptx)
    assert order.mailed(r"st\.global\.(v\d\.)?b32") >= 3 * ranks, "acc, m and l go to every rank"
    assert len(order.read) >= 3, "m, l and acc are read from L2"
    if rows * columns >= 1024:
        assert order.mailed(r"st\.global\.v4\.b32")
        assert re.search(r"ld\.global\.cg\.v4\.b32", ptx)


@pytest.mark.parametrize(
    ("capability", "x", "ranks", "adds"),
    [
        (80, "fp32", 4, True),
        (90, "fp32", 8, True),
        (100, "fp32", 2, True),
        (90, "bf16", 8, False),
        (100, "bf16", 4, False),
    ],
)
def test_shares_travel_in_the_widest_words_and_are_asked_for_at_once(
    capability: int, x: str, ranks: int, adds: bool
) -> None:
    unit, units = 16 // (4 if x == "fp32" else 2), one_shot_triton.UNITS
    constants = {
        "RANKS": ranks, "PROGRAMS": one_shot_triton.PROGRAMS, "UNIT": unit, "UNITS": units, "ADDS": adds, "TOGETHER": ranks,
    }  # fmt: skip
    types = {"x": f"*{x}", "out": "*bf16", "table": "*i64"}
    compiled = build(
        one_shot_triton._share_kernel, types, constants, capability, num_warps=one_shot_triton.WARPS, num_stages=1
    )
    ptx = compiled.asm["ptx"]
    assert sass.assemble(ptx).spills == 0
    moved = [line for line in compiled.asm["ttgir"].splitlines() if "convert_layout" in line and "xi1," not in line]
    assert not moved, "what a thread has read is what it writes"
    order = Order(ptx)
    each = units // (32 * one_shot_triton.WARPS)
    assert order.mailed(r"st\.global\.v4\.b32") == order.mailed(r"st\.global\.") == ranks * each
    assert len(order.read) == len(order.places(r"ld\.global\.cg\.v4\.b32")) == ranks * each
    written = [i for i in order.places(rf"st\.global\.v{2 if adds else 4}\.b32") if i > order.awaited]
    assert len(written) == (1 if adds else ranks) * each
    assert max(order.read) < min(written), "the shares of all ranks are under way before the first of them is written"
