"""The kernels of packed parts compile for every GPU generation, stay in registers, and keep what orders memory in its order."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels import one_shot_triton, parts_triton  # noqa: E402
from tests.compile.test_softmax_compile import build, spilled_bytes  # noqa: E402

pytestmark = pytest.mark.compile
TYPES = {"stack": "*fp32", "sinks": "*fp32", "o": "*bf16", "lse": "*fp32", "table": "*i64"}
CAPABILITIES = [80, 90, 100]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_finishing_compiles_without_spills(capability: int, tmp_path) -> None:
    compiled = build(parts_triton._finish_parts_kernel, TYPES, {"ROWS": 8, "COLUMNS": 128}, 4, capability)
    assert spilled_bytes(compiled.asm["ptx"], capability, tmp_path) == 0


def build_one_shot(capability: int, ranks: int, rows: int, columns: int, *, sinks: bool):
    constants = {"RANKS": ranks, "PROGRAMS": one_shot_triton.PROGRAMS, "ROWS": rows, "COLUMNS": columns}
    constants |= {} if sinks else {"sinks": None}
    return build(one_shot_triton._one_shot_kernel, TYPES, constants, one_shot_triton.WARPS, capability, num_stages=1)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "sinks"), [(4, 1, 128, False), (8, 8, 128, True), (2, 4, 256, False)]
)
def test_parts_are_stored_then_announced_then_awaited_then_read(
    capability: int, ranks: int, rows: int, columns: int, sinks: bool, tmp_path
) -> None:
    ptx = build_one_shot(capability, ranks, rows, columns, sinks=sinks).asm["ptx"]
    # the assembler puts a few addresses aside to fit more programs on an SM; a thread's share of a tile is 32 bytes
    assert spilled_bytes(ptx, capability, tmp_path) < 2 * 32
    # what a compiler may keep in a cache of its own is never a part of a peer
    assert "ld.global.nc" not in ptx
    lines = [line.strip() for line in ptx.splitlines()]

    def places(pattern: str) -> list[int]:
        return [i for i, line in enumerate(lines) if re.search(pattern, line)]

    (stored, awaited), (announced,) = places(r"^barrier\.red\.or\.pred"), places(r"st\.release\.sys\.global\.b64")
    (acquired,) = places(r"ld\.acquire\.sys\.global\.b64")
    assert stored < announced < acquired < awaited
    mailed = [i for i in places(r"st\.global\.(v\d\.)?b32") if i < awaited]
    assert len(mailed) >= 3 * ranks, "acc, m and l go to every rank"
    assert max(mailed) < stored
    read = places(r"ld\.global\.cg")
    assert len(read) >= 3, "m, l and acc are read from L2"
    assert min(read) > awaited
    if rows * columns >= 1024:
        assert re.search(r"st\.global\.v4\.b32", "\n".join(lines[:stored]))
        assert re.search(r"ld\.global\.cg\.v4\.b32", ptx)
    # a wait is bounded by a clock of the device, not by a count
    assert len(places(r"%globaltimer")) == 2
