"""The softmax and merge kernels compile for every GPU generation without a GPU, and stay in registers."""

import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels.attention.torch_ops import carry as carry_parts  # noqa: E402
from ringattn.kernels.attention.torch_ops import rows_triton  # noqa: E402
from ringattn.kernels.partials import merge_triton  # noqa: E402
from ringattn.kernels.softmax import softmax_triton  # noqa: E402
from ringattn.kernels.softmax.softmax_triton import choose_launch  # noqa: E402
from tests.kernels.compile import sass  # noqa: E402
from tests.kernels.compile.offline import build  # noqa: E402

pytestmark = pytest.mark.compile


def kernels(dtype: str, n: int):
    """(kernel, types, constexprs, warps) of every launch for rows of n logits."""
    itemsize = 4 if dtype == "fp32" else 2
    how, back = (
        choose_launch(1, n, (1 << 28) // n, unit_columns=True, itemsize=itemsize, num_sms=132, per_thread=per_thread)
        for per_thread in (16, 8)
    )
    tensors = {name: f"*{dtype}" for name in ("x_ptr", "y_ptr", "dy_ptr", "dx_ptr")}
    stats = {name: "*fp32" for name in ("lse_ptr", "m_ptr", "l_ptr", "dot_ptr", "g_ptr")}
    types = {**tensors, **stats}
    tiling, back_tiling = ({"ROWS": x.rows, "LANES": x.lanes, "VEC": x.vec} for x in (how, back))
    if n <= how.tile:
        block = {"ROWS": how.rows, "BLOCK": how.tile}
        yield softmax_triton._softmax_block_kernel, types, {**block, "WANT_LSE": False}, how.warps
        yield softmax_triton._softmax_backward_block_kernel, types, block, back.warps
        return
    splits = triton.next_power_of_2(how.splits)
    for reduce, write in [(True, True)] if splits == 1 else [(True, False), (False, True)]:
        phase = {"SPLITS": splits, "REDUCE": reduce, "WRITE": write}
        yield softmax_triton._softmax_rows_kernel, types, {**tiling, **phase, "WANT_LSE": False}, how.warps
        yield softmax_triton._softmax_backward_rows_kernel, types, {**back_tiling, **phase}, back.warps
    yield softmax_triton._logsumexp_backward_kernel, types, tiling, how.warps


@pytest.mark.parametrize(
    ("dtype", "n", "capability"),
    [
        ("bf16", 1 << 15, 80),
        ("bf16", 1 << 15, 90),
        ("bf16", 1 << 15, 100),
        ("bf16", 1 << 18, 90),
        ("fp32", 1024, 90),
        ("fp32", 1 << 20, 90),
    ],
)
def test_kernels_compile_without_spills_and_keep_tiles_in_registers(dtype, n, capability) -> None:
    seen = 0
    for fn, types, constexprs, warps in kernels(dtype, n):
        kernel = build(fn, types, constexprs, capability, num_warps=warps)
        ptx = kernel.asm["ptx"]
        # threads exchange one number per row and warp; a tile that passes through shared memory needs more
        assert kernel.metadata.shared <= 4 * warps * constexprs["ROWS"], fn
        assert sass.assemble(ptx).spills == 0, fn
        assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx), fn
        assert re.search(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", ptx) or constexprs.get("WRITE") is False, fn
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_merge_compiles_without_spills(capability) -> None:
    fn = merge_triton._merge_stack_kernel
    types = {name: "*fp32" for name in fn.arg_names if name.endswith("_ptr")}
    tile = merge_triton.merging(4, 4096, 128, programs=132)
    options = {"ROWS": tile.rows, "COLUMNS": tile.columns, "LOG2": True, "FINISH": True, "TOGETHER": tile.together}
    assert sass.assemble(build(fn, types, options, capability, num_warps=tile.warps).asm["ptx"]).spills == 0


def kernels_between_calls() -> Iterator[tuple[Any, dict[str, Any], dict[str, object]]]:
    """(kernel, types, constexprs) of every launch around torch's operators."""
    carry, output = rows_triton._merge_kernel, rows_triton._output_for_kernel
    sums = rows_triton._add_rows_kernel
    wide = {name: "*fp32" for fn in (carry, output, sums) for name in fn.arg_names if name.endswith("_ptr")}
    narrow = wide | {name: "*bf16" for name in ("o_ptr", "do_ptr", "used_ptr")}
    floats = dict.fromkeys(("most", "least", "root"), "fp32")
    launches: list[tuple[Any, dict[str, object]]] = [
        (carry, {"ROWS": rows_triton.NUMBERS // 128, "DV": 128, **dict.fromkeys(absent)})
        for absent in ((), ("total_ptr",), ("m_ptr", "l_ptr", "acc_ptr"), ("o_ptr", "lse_ptr", "total_ptr"))
    ]
    launches += [
        (rows_triton._merge_parts_kernel, {"ROWS": rows_triton.NUMBERS // 128, "DV": 128, **dict.fromkeys(absent)})
        for absent in ((), ("m_ptr", "l_ptr", "acc_ptr", "total_ptr"))
    ]
    launches.append((output, {"ROWS": rows_triton.NUMBERS // 128, "D": 128}))
    launches += [
        (sums, {"ROWS": rows_triton.NUMBERS // 128, "D": 128, "ADD": add, "EVEN": even})
        for add, even in itertools.product((False, True), repeat=2)
    ]
    parts = {name: ("*bf16",) * carry_parts.PARTS for name in ("os", "found")}
    parts["lses"] = ("*fp32",) * carry_parts.PARTS
    for fn, options in launches:
        yield fn, narrow | floats | parts, options


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_between_calls_of_torch_compile_without_spills(capability) -> None:
    for fn, types, options in kernels_between_calls():
        ptx = build(fn, types, options, capability, num_warps=4).asm["ptx"]
        assert sass.assemble(ptx).spills == 0, fn
        assert re.search(r"(ld|st)\.global\S*\.v4\.b32", ptx), fn
        assert fn is rows_triton._output_for_kernel or "st.shared" not in ptx, (
            "numbers go from loads to stores in registers"
        )


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_kernels_between_calls_of_torch_compile_for_amd_without_spills(arch: str) -> None:
    for fn, types, options in kernels_between_calls():
        spilled = re.findall(r"[sv]gpr_spill_count: (\d+)", build(fn, types, options, arch, num_warps=4).asm["amdgcn"])
        assert spilled, fn
        assert set(spilled) == {"0"}, fn
