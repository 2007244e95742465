from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from tests.compile.gluon_offline import Call, compile_or_say

pytestmark = pytest.mark.compile
SHARED = 227 * 1024
ROWS = "ringattn.kernels.hopper.rows_launch:launch_rows"
WIDE = "ringattn.kernels.hopper.wide_launch:launch_wide_keys"
EVERY = ("softcap", "alibi", "key_bias")

# products of one warpgroup in one round of each loop, from tile shapes: an instruction does 64 x n x 16
CALLS = {
    "rows_64": (Call("backward", 64, through=ROWS), {16}),
    "rows_128": (Call("backward", 128, through=ROWS), {24}),
    "rows_256": (Call("backward", 256, through=ROWS), {36}),
    "rows_192_128_accumulated": (Call("backward", 192, 128, accumulate=True, through=ROWS), {28}),
    "rows_128_softcap": (Call("backward", 128, features=("softcap",), through=ROWS), {20}),
    "rows_128_every_feature": (Call("backward", 128, features=EVERY, through=ROWS), {18}),
    "rows_256_every_feature": (Call("backward", 256, features=EVERY, through=ROWS), {34}),
    "keys_256": (Call("backward", 256, group=4, through=WIDE), {20}),
    "keys_192_128_accumulated": (Call("backward", 192, 128, accumulate=True, through=WIDE), {12, 20}),
    "keys_256_every_feature": (Call("backward", 256, features=EVERY, through=WIDE), {20}),
}


def test_every_launch_fits_and_keeps_its_loops_in_registers():
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = dict(zip(CALLS, pool.map(compile_or_say, [call for call, _ in CALLS.values()]), strict=True))
    for name, reports in found.items():
        assert not isinstance(reports, str), f"{name}: {reports}"
        kernels = [report for report in reports if report.products]
        assert len(kernels) == 1, f"{name}: {reports}"
        for report in kernels:
            assert report.shared <= SHARED, f"{name}: {report}"
            assert report.loop_spills == 0, f"{name}: {report}"
            assert not report.warnings, f"{name}: {report}: {report.warnings}"
            assert {products for products, _ in report.loops} == CALLS[name][1], f"{name}: {report}"
