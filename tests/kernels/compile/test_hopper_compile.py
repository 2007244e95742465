from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

import triton
from triton.experimental.gluon import language as gl

from ringattn.kernels.attention.hopper import progress_barrier
from ringattn.kernels.attention.hopper.configs import BUCKETS, PANELS
from tests.kernels.compile.gluon_offline import FEATURES, Call, Report, compile_or_say

pytestmark = pytest.mark.compile
SHARED = 227 * 1024

PAIRS = tuple(itertools.product(BUCKETS, BUCKETS))
"""Columns of q and k, and of v: each pair has a configuration of its own."""
OF_PANELS = {"192_128": (192, 128), "192": (192, 192), "96": (96, 96)}
"""Head dims of the forward that are no power of two; of these pairs, too, each has a configuration of its own."""
BACKWARD_PAIRS = tuple(pair for pair in PAIRS if pair != (64, 128))
"""The backward takes a narrow q beside a wide v for a wide one."""

ORDERED = "tests.support.in_turns:InTurns"

CALLS = {
    **{f"forward_{d}_{dv}": Call("forward", d, dv) for d, dv in PAIRS},
    **{f"forward_{d}_{dv}_every_feature": Call("forward", d, dv, features=FEATURES) for d, dv in PAIRS},
    **{f"forward_{d}_carried": Call("forward", d, first=False, last=False) for d in BUCKETS},
    "forward_128_begins": Call("forward", 128, last=False),
    "forward_128_ends": Call("forward", 128, first=False),
    "forward_128_carried_every_feature": Call("forward", 128, first=False, last=False, features=FEATURES),
    "forward_128_packed_group": Call("forward", 128, group=8, seq_len=40),
    **{f"forward_{name}": Call("forward", *dims) for name, dims in OF_PANELS.items()},
    **{f"forward_{name}_every_feature": Call("forward", *dims, features=FEATURES) for name, dims in OF_PANELS.items()},
    **{f"forward_{name}_carried": Call("forward", *dims, first=False, last=False) for name, dims in OF_PANELS.items()},
    "forward_192_128_gathered_packed_group": Call("forward", 192, 128, group=8, seq_len=40, gathered=True),
    "forward_192_128_terms_every_feature": Call("forward", 192, 128, terms=True, features=FEATURES),
    "forward_128_gathered_packed_group": Call("forward", 128, group=8, seq_len=40, gathered=True),
    "forward_128_gathered_wide": Call("forward", 128, gathered=True, wide=True),
    "forward_128_gathered_every_feature": Call("forward", 128, features=FEATURES, gathered=True),
    **{f"backward_{d}_{dv}": Call("backward", d, dv) for d, dv in BACKWARD_PAIRS},
    **{f"backward_{d}_{dv}_every_feature": Call("backward", d, dv, features=FEATURES) for d, dv in BACKWARD_PAIRS},
    **{f"backward_{d}_accumulated": Call("backward", d, accumulate=True, group=4) for d in BUCKETS},
    "backward_96": Call("backward", 96),
    **{f"backward_{d}_rounded": Call("backward", d, rounded=True, group=8) for d in (64, 128)},
    **{f"backward_{d}_deterministic": Call("backward", d, deterministic=True) for d in (64, 128)},
    **{
        f"backward_{d}_deterministic_every_feature": Call("backward", d, deterministic=True, features=FEATURES)
        for d in (64, 128)
    },
    "backward_128_deterministic_softcap": Call("backward", 128, deterministic=True, features=("softcap",)),
    # scores that the fused kernel keeps at 128 columns
    "backward_128_softcap": Call("backward", 128, features=("softcap",)),
    "backward_64_softcap": Call("backward", 64, features=("softcap",)),
    **{f"backward_{d}_gathered": Call("backward", d, gathered=True) for d in (64, 128)},
    **{
        f"backward_{d}_gathered_deterministic": Call("backward", d, gathered=True, deterministic=True)
        for d in (64, 128)
    },
    **{f"backward_{d}_gathered_every_feature": Call("backward", d, gathered=True, features=FEATURES) for d in BUCKETS},
    **{f"backward_{d}_ordered": Call("backward", d, through=ORDERED) for d in (64, 96, 128)},
    **{f"backward_{d}_ordered_gathered": Call("backward", d, gathered=True, through=ORDERED) for d in (64, 128)},
    **{f"backward_{d}_ordered_softcap": Call("backward", d, features=("softcap",), through=ORDERED) for d in (64, 128)},
    **{
        f"backward_{d}_ordered_accumulated": Call("backward", d, accumulate=True, terms=True, group=4, through=ORDERED)
        for d in (64, 128)
    },
    "backward_192_128": Call("backward", 192, 128),
    "backward_192_128_every_feature": Call("backward", 192, 128, features=FEATURES),
    "backward_192_128_gathered": Call("backward", 192, 128, gathered=True),
    "backward_192_gathered": Call("backward", 192, gathered=True),
    "backward_192_gathered_every_feature": Call("backward", 192, gathered=True, features=FEATURES),
    "backward_192_terms_accumulated": Call("backward", 192, terms=True, accumulate=True, group=4),
    "backward_96_deterministic": Call("backward", 96, deterministic=True),
    "backward_256_gathered": Call("backward", 256, gathered=True),
    "backward_256_128_gathered": Call("backward", 256, 128, gathered=True),
    **{f"{kernel}_{d}_terms": Call(kernel, d, terms=True) for kernel in ("forward", "backward") for d in BUCKETS},
    **{
        f"{kernel}_128_terms_gathered": Call(kernel, 128, terms=True, gathered=True)
        for kernel in ("forward", "backward")
    },
    **{
        f"{kernel}_{d}_terms_every_feature": Call(kernel, d, terms=True, features=FEATURES)
        for kernel, d in (("forward", 128), ("backward", 64), ("backward", 128))
    },
    "backward_128_terms_deterministic": Call("backward", 128, terms=True, deterministic=True),
    "backward_64_gathered_key_bias": Call("backward", 64, gathered=True, features=("key_bias",)),
}


def panels(columns: int) -> int:
    return columns // PANELS[columns]


# HGMMA of one warpgroup in one round of each loop, from tile shapes: an instruction does 64 x n x 16, n up to 256
PRODUCTS: dict[str, Callable[[dict[str, int]], set[int]]] = {
    "forward_kernel": lambda c: {(c["D"] + c["V_PANELS"] * c["BLOCK_N"]) // 16},
    "backward_dq_kernel": lambda c: {(c["D"] + c["DV"] + c["BLOCK"] * panels(c["D"])) // 16},
    "backward_kernel": lambda c: {(c["SCORED"] + c["V_SCORED"] + 2 * c["BM"] + 128 * c["WANT_DQ"]) // 16},
    "backward_dkv_wide_kernel": lambda c: {
        (c["D"] + 64 * panels(c["DV"])) // 16,
        (c["DV"] + 64 * panels(c["D"])) // 16,
    },
}


SPILLS = {
    "3.7": {"backward_64_gathered": 2},
    "3.8": {
        "backward_64_64_every_feature": 8,
        "backward_64_gathered_every_feature": 8,
        "backward_64_terms_every_feature": 12,
        "backward_128_softcap": 2,
    },
}
"""Accesses to local memory in loops with products, at most, by release of Triton; other releases make none."""


def constants_of(report: Report) -> dict[str, int]:
    return {
        name: int(value == "True") if value in ("True", "False") else int(value)
        for name, value in report.constants
        if value in ("True", "False") or value.isdecimal()
    }


@pytest.mark.compiled
@pytest.mark.parametrize("name", CALLS)
def test_every_launch_fits_and_keeps_its_loops_in_registers(name: str):
    found = compile_or_say(CALLS[name])
    assert not isinstance(found, str), found
    assert any(report.products for report in found), found
    spills = SPILLS.get(triton.__version__.rpartition(".")[0], {}).get(name, 0)
    for report in found:
        assert report.shared <= SHARED, str(report)
        assert not report.stale, f"{report}: {report.stale}"
        assert report.loop_spills <= spills, str(report)
        assert not report.warnings, f"{report}: {report.warnings}"
        assert not report.unfenced, f"{report}: bulk stores at {report.unfenced}"
        if report.products or report.name in PRODUCTS:
            each = PRODUCTS[report.name](constants_of(report))
            assert {products for products, _ in report.loops} == each, f"{report}: {each} per round"


@pytest.mark.compiled
def test_exponentials_run_beneath_a_late_dq():
    found = compile_or_say(Call("backward", 192, 128))
    assert not isinstance(found, str), found
    (schedules,) = (report.schedule for report in found if report.name == "backward_dq_kernel")
    for schedule in schedules:
        last_product = max(i for i, event in enumerate(schedule) if "HGMMA" in event)
        end = schedule.index("wait for products, 0x0 left")
        exponentials = [i for i, event in enumerate(schedule) if "EX2" in event]
        assert last_product < min(exponentials) <= max(exponentials) < end, schedule


@pytest.mark.compiled
@pytest.mark.parametrize("features", [(), FEATURES], ids=["plain", "every_feature"])
@pytest.mark.parametrize("head_dim", BUCKETS)
def test_waiting_for_rows_costs_the_loops_nothing(head_dim: int, features: tuple[str, ...]):
    alone, gathered = (
        compile_or_say(Call("forward", head_dim, features=features, gathered=waits)) for waits in (False, True)
    )
    assert not isinstance(alone, str), alone
    assert not isinstance(gathered, str), gathered
    for before, after in zip(alone, gathered, strict=True):
        assert not after.stale, after.stale
        assert not after.warnings, after.warnings
        assert (after.loops, after.products) == (before.loops, before.products)
        assert (after.registers, after.injected) == (before.registers, before.injected)
        assert after.shared - before.shared < 64, "arguments of the partitions"
        assert after.loop_spills == 0


@pytest.mark.compiled
@pytest.mark.parametrize(("kernel", "head_dim"), [("forward", 128), ("backward", 128), ("backward", 256)])
def test_keeping_pace_costs_the_loops_nothing(kernel: str, head_dim: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_barrier, "L2_BYTES", 0)
    monkeypatch.setattr(progress_barrier, "EPOCH", gl.constexpr(1))
    found = compile_or_say(Call(kernel, head_dim))
    assert not isinstance(found, str), found
    for report in (x for x in found if x.products):
        assert ("board", "None") not in report.constants
        assert not report.stale, report.stale
        assert not report.warnings, report.warnings
        assert report.loop_spills == 0
        assert {products for products, _ in report.loops} == PRODUCTS[report.name](constants_of(report))
