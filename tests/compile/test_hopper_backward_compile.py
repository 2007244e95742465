from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from tests.compile.gluon_offline import Call, compile_or_say

pytestmark = pytest.mark.compile
SHARED = 227 * 1024
FUSED = ["backward_kernel"]
PAIR = ["backward_kernel", "rows_kernel"]
EVERY = ("softcap", "alibi", "key_bias")
FIXED = "tests.compile.test_hopper_backward_compile:backward_with_fixed_terms"


def backward_with_fixed_terms(*args: Any) -> None:
    """The backward where nobody wants gradients of slopes and key bias."""
    from ringattn.kernels.hopper import api

    grads = args[-1]
    kernels: Any = api
    kernels.backward(*args[:-1], replace(grads, dalibi=None, dkey_bias=None))


CALLS = {
    "64": (Call("backward", 64), FUSED),
    "128": (Call("backward", 128, causal=True), FUSED),
    "128_v_64_accumulated": (Call("backward", 128, 64, accumulate=True), FUSED),
    "64_group_float16": (Call("backward", 64, group=4, dtype="float16"), FUSED),
    "64_softcap": (Call("backward", 64, features=("softcap",)), FUSED),
    "64_every_feature": (Call("backward", 64, features=EVERY), FUSED),
    "128_softcap": (Call("backward", 128, features=("softcap",)), FUSED),
    "128_fixed_slopes": (Call("backward", 128, features=("alibi",), through=FIXED), FUSED),
    "128_fixed_key_bias_softcap": (Call("backward", 128, features=("softcap", "key_bias"), through=FIXED), FUSED),
    "128_alibi": (Call("backward", 128, features=("alibi",)), PAIR),
    "128_every_feature": (Call("backward", 128, features=EVERY), PAIR),
    "64_deterministic_every_feature": (Call("backward", 64, features=EVERY, deterministic=True), PAIR),
    "128_deterministic": (Call("backward", 128, deterministic=True), PAIR),
}


def test_every_launch_fits_and_keeps_its_loops_in_registers():
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = dict(zip(CALLS, pool.map(compile_or_say, [call for call, _ in CALLS.values()]), strict=True))
    for name, reports in found.items():
        assert not isinstance(reports, str), f"{name}: {reports}"
        kernels = [report for report in reports if report.products]
        assert [report.name for report in kernels] == CALLS[name][1], f"{name}: {reports}"
        for report in kernels:
            assert report.shared <= SHARED, f"{name}: {report}"
            assert report.loops, f"{name}: {report}"
            assert report.loop_spills == 0, f"{name}: {report}"
            assert not report.warnings, f"{name}: {report}: {report.warnings}"
