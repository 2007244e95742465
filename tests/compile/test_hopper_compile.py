from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from tests.compile.gluon_offline import FEATURES, Call, Report, compile_or_say

pytestmark = pytest.mark.compile
SHARED = 227 * 1024

CALLS = {
    **{f"forward_{d}": Call("forward", d) for d in (64, 96, 128, 192, 256)},
    **{f"forward_{d}_carried": Call("forward", d, first=False, last=False) for d in (64, 128, 256)},
    **{f"forward_{d}_every_feature": Call("forward", d, features=FEATURES) for d in (64, 128, 256)},
    "forward_192_128": Call("forward", 192, 128),
    "forward_128_packed_group": Call("forward", 128, group=8, seq_len=40),
    **{f"backward_{d}": Call("backward", d) for d in (64, 96, 128, 256)},
    **{f"backward_{d}_every_feature": Call("backward", d, features=FEATURES) for d in (64, 128, 256)},
    "backward_128_accumulated": Call("backward", 128, accumulate=True, group=4),
    "backward_192_128": Call("backward", 192, 128),
    **{f"backward_{d}_deterministic": Call("backward", d, deterministic=True) for d in (64, 128, 256)},
    "backward_128_deterministic_every_feature": Call("backward", 128, deterministic=True, features=FEATURES),
}

# HGMMA of one warpgroup in one round of each loop, from tile shapes: an instruction does 64 x n x 16, n up to 256
PRODUCTS: dict[str, Callable[[dict[str, int]], set[int]]] = {
    "forward_kernel": lambda c: {(c["D"] + c["BLOCK_N"]) // 16},
    "rows_kernel": lambda c: {(c["D"] + c["DV"] + c["BLOCK"]) // 16},
    "backward_kernel": lambda c: {(c["D"] + c["DV"] + 2 * c["BM"] + 128 * c["WANT_DQ"]) // 16},
    "wide_keys_kernel": lambda c: {(c["D"] + 64) // 16, (c["DV"] + 64) // 16},
}


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, Future[list[Report] | str]]]:
    """Every call of this module, on its way through two compilers at a time."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        jobs = {name: pool.submit(compile_or_say, call) for name, call in CALLS.items()}
        yield jobs
        for job in jobs.values():
            job.cancel()


def constants_of(report: Report) -> dict[str, int]:
    return {
        name: int(value == "True") if value in ("True", "False") else int(value)
        for name, value in report.constants
        if value in ("True", "False") or value.isdecimal()
    }


@pytest.mark.parametrize("name", CALLS)
def test_every_launch_fits_and_keeps_its_loops_in_registers(reports: dict[str, Future[list[Report] | str]], name: str):
    found = reports[name].result()
    assert not isinstance(found, str), found
    assert any(report.products for report in found), found
    for report in found:
        assert report.shared <= SHARED, report
        assert report.loop_spills == 0, report
        assert not report.warnings, f"{report}: {report.warnings}"
        if report.products or report.name in PRODUCTS:
            each = PRODUCTS[report.name](constants_of(report))
            assert {products for products, _ in report.loops} == each, f"{report}: {each} per round"
