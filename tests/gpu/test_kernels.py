"""What only a GPU can show: the compiled kernels on shared and random cases, long addresses, and how time is taken."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, attention_reference, masks, ring_attention_with_lse
from ringattn.kernels.interface import KernelSet
from ringattn.kernels.runtime.table_cache import protect_from_reuse, upload, wait_for_uploads
from ringattn.launch.check import fuzz
from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import time_calls
from tests.support.budget import assert_within_budget
from tests.support.kernel_conformance import (
    CASES,
    LONG_CASES,
    LONG_TERM_CASES,
    MILLION_KEY_CASES,
    SMALL_WEIGHT_CASES,
    TERM_CASES,
    Case,
    run_case,
)
from tests.support.request_isolation import BAD, SPOILT, assert_kernels_isolate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FP32_CASES = ("causal", "zigzag_window", "head_dim_128", "everything", "gqa_3", "dropout")


IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER_CASES = [
    replace(case, name=f"{case.name}{'_deterministic' if deterministic else ''}", deterministic=deterministic)
    for case in (*CASES, *LONG_CASES, *SMALL_WEIGHT_CASES, *TERM_CASES, *LONG_TERM_CASES)
    for deterministic in (False, True)
    if case.bias is None and not case.dropout_p
]
LONG = tuple(case.name for case in (*LONG_CASES, *LONG_TERM_CASES))


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES, *TERM_CASES, *LONG_TERM_CASES], ids=str)
def test_compiled_kernels_stay_within_budget(case: Case) -> None:
    portable = pytest.importorskip("ringattn.kernels.attention.portable.api").PortableKernels
    run_case(portable, case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [*SMALL_WEIGHT_CASES, *MILLION_KEY_CASES], ids=str)
def test_small_weights_keep_their_digits(case: Case, dtype: torch.dtype) -> None:
    portable = pytest.importorskip("ringattn.kernels.attention.portable.api").PortableKernels
    run_case(portable, case, dtype, "cuda")


@pytest.fixture
def hopper() -> type[KernelSet]:
    if not IS_HOPPER:
        pytest.skip("needs compute capability 9.0")
    return importlib.import_module("ringattn.kernels.attention.hopper.api").HopperKernels


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs take all tiles of a Hopper launch: several each, of different lengths, which a device has room to avoid."""
    launcher = importlib.import_module("ringattn.kernels.attention.hopper.launcher")
    monkeypatch.setattr(launcher, "multiprocessors", lambda device: 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_hopper_kernels_stay_within_budget(hopper: type[KernelSet], case: Case, dtype: torch.dtype) -> None:
    run_case(hopper, case, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (64, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("case", MILLION_KEY_CASES, ids=str)
def test_weights_of_a_million_keys_keep_their_digits(
    hopper: type[KernelSet], case: Case, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    scale = (case.softmax_scale or 0.25) * 4 / dims[0] ** 0.5
    case = replace(case, head_dim=dims[0], v_head_dim=dims[1], softmax_scale=scale)
    run_case(hopper, case, dtype, "cuda")


MASKS = {
    "tree": masks.tree([None, 0, 1, 1, 0], [700, 300, 401, 250, 396]),
    "sinks": masks.causal() & (masks.sinks(4) | masks.window(500)),
    "blocks": masks.causal()
    & masks.blocks([[(3 * i + j) % 4 < 2 or i == j for j in range(16)] for i in range(16)], 128),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("impl", ["hopper", "portable"])
@pytest.mark.parametrize("name", MASKS)
def test_calls_under_masks_of_several_intervals_stay_within_budget(name: str, impl: str) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(1, 2047, h, 128, device="cuda", dtype=torch.bfloat16, generator=g) for h in (4, 2, 2, 4))

    def gradients(dtype: torch.dtype, attention: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        o = attention(*leaves, mask=MASKS[name], **options)
        return o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return ring_attention_with_lse(q, k, v, Ring().sharding(2047), impl=impl, **options)[0]

    exact, low = (gradients(dtype, attention_reference) for dtype in (torch.float64, torch.bfloat16))
    for what, x, y, z in zip("o dq dk dv".split(), gradients(torch.bfloat16, call), exact, low, strict=True):
        assert_within_budget(x, y, z, f"{name}: {what}", torch.bfloat16)


@pytest.mark.parametrize("lengths", [(300, 300), (300, 300, 300), (1000, 1000)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("name", ["portable", "hopper"])
def test_what_is_not_finite_stays_with_its_request(
    request: pytest.FixtureRequest, name: str, spoilt: str, bad: float, head_dim: int, lengths: tuple[int, ...]
) -> None:
    if name == "hopper":
        kernels = request.getfixturevalue("hopper")
    else:
        kernels = pytest.importorskip("ringattn.kernels.attention.portable.api").PortableKernels
    assert_kernels_isolate(
        kernels, lengths, spoilt, bad, torch.bfloat16, "cuda", heads=8, kv_heads=2, head_dim=head_dim
    )


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", [case for case in HOPPER_CASES if case.name.startswith(LONG)], ids=str)
def test_few_programs_work_through_many_tiles(hopper: type[KernelSet], case: Case) -> None:
    run_case(hopper, case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("programs", ["few", "many"])
@pytest.mark.parametrize("features", [(), ("softcap", "alibi")], ids=["plain", "features"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.usefixtures("hopper")
def test_fixed_order_gives_the_same_bits_from_run_to_run(
    head_dim: int, features: tuple[str, ...], programs: str, request: pytest.FixtureRequest
) -> None:
    if programs == "few":
        request.getfixturevalue("few_programs")
    n, heads, kv_heads = 3000, 8, 2
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, n, h, head_dim, device="cuda", dtype=torch.bfloat16, generator=g)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    score: dict[str, Any] = {"softcap": 20.0} if "softcap" in features else {}
    if "alibi" in features:
        score["alibi_slopes"] = torch.rand(heads, device="cuda", generator=g)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runs = []
    for _ in range(4):
        o, lse = ring_attention_with_lse(
            q, k, v, Ring().sharding(n), causal=True, window=1700, deterministic=True, impl="hopper", **score
        )
        runs.append((o, lse, *torch.autograd.grad(o, leaves, do)))
    for again in runs[1:]:
        for name, x, y in zip("o lse dq dk dv".split(), runs[0], again, strict=True):
            assert torch.equal(x, y), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [case for case in HOPPER_CASES if not case.deterministic], ids=str)
@pytest.mark.usefixtures("hopper")
def test_ordered_sums_stay_within_budget(case: Case, dtype: torch.dtype) -> None:
    run_case(importlib.import_module("tests.support.in_turns").InTurns, case, dtype, "cuda")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mask", [{"causal": True}, {}, {"causal": True, "window": 1000}], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ordered_sums_repeat_and_are_timed_beside_both_others(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, kv_heads: int, mask: dict[str, Any]
) -> None:
    """Times are printed (`-s`); docs/kernel_notes.md has those of one H200."""
    launcher = importlib.import_module("ringattn.kernels.attention.hopper.launcher")
    n, heads = 8192, 32
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, n, h, head_dim, device="cuda", dtype=torch.bfloat16, generator=g)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    calls = {}
    for name, in_turns in (("any order", False), ("chosen", None), ("pair", False), ("ordered", True)):
        o, _ = ring_attention_with_lse(
            q, k, v, Ring().sharding(n), impl="hopper", deterministic=name != "any order", **mask
        )

        def gradients(o: Tensor = o, in_turns: bool | None = in_turns) -> tuple[Tensor, ...]:
            with monkeypatch.context() as patch:
                if in_turns is not None:
                    patch.setattr(launcher, "_waits_little", lambda *_: in_turns)
                return torch.autograd.grad(o, leaves, do, retain_graph=True)

        calls[name] = gradients
    runs = [calls["ordered"]() for _ in range(5)]
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    found = time_calls(calls, Session(0, 1, torch.device("cuda"), None), 9, "calls")
    print(head_dim, kv_heads, mask, found)  # noqa: T201


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FP32_CASES], ids=str)
def test_fp32_is_not_tf32(case: Case) -> None:
    portable = pytest.importorskip("ringattn.kernels.attention.portable.api").PortableKernels
    run_case(portable, case, torch.float32, "cuda")


def test_elements_beyond_32_bits_are_found() -> None:
    n, heads, head_dim, window, tail = 1_100_000, 32, 128, 63, 256
    assert n * heads * head_dim > 2**32
    needed = 10 * n * heads * head_dim * 2
    if torch.cuda.get_device_properties(0).total_memory < needed:
        pytest.skip(f"needs a device with {needed / 2**30:.0f} GiB")
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, n, heads, head_dim, device="cuda", dtype=torch.bfloat16, generator=g) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sharding = Ring().sharding(n)
    o, lse = ring_attention_with_lse(q, k, v, sharding, causal=True, window=(window, 0))
    dq, dk, dv = torch.autograd.grad(o, leaves, do)

    # the last rows see, and are seen by, nothing before this slice
    last = slice(n - tail - window, n)
    answers = {}
    for dtype in (torch.float64, torch.bfloat16):
        parts = [x[:, last].detach().to(dtype).requires_grad_() for x in (q, k, v)]
        o_part, lse_part = attention_reference(*parts, causal=True, window=(window, 0), return_lse=True)
        answers[dtype] = [o_part, lse_part.transpose(1, 2), *torch.autograd.grad(o_part, parts, do[:, last].to(dtype))]
    found = [o, lse.transpose(1, 2), dq, dk, dv]
    for name, x, exact, low in zip("o lse dq dk dv".split(), found, *answers.values(), strict=True):
        assert_within_budget(x[:, -tail:], exact[:, -tail:], low[:, -tail:], name)


def test_a_graph_holds_all_the_work_of_a_backward_and_no_host() -> None:
    session = Session(0, 1, torch.device("cuda"), None)
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
        y = (x @ x).sum()
        calls = {"backward": lambda: torch.autograd.grad(y, x, retain_graph=True)}
        found = time_calls(calls, session, 5, "both")["backward"]
    assert found.graph_refused is None
    assert found.calls_ms is not None
    assert found.graph_ms is not None
    assert 0.5 * found.calls_ms < found.graph_ms < 1.2 * found.calls_ms


def test_work_on_another_stream_gets_no_time() -> None:
    session, other = Session(0, 1, torch.device("cuda"), None), torch.cuda.Stream()
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()

    def elsewhere() -> None:
        with torch.cuda.stream(other):
            torch.mm(x, x)

    found = time_calls({"elsewhere": elsewhere}, session, 3, "calls")["elsewhere"]
    assert found.refused is not None
    assert "its work must run on the current stream" in found.refused


def test_random_visits_are_inside_the_budget() -> None:
    session = Session(0, 1, torch.device("cuda"), None)
    tally = fuzz.fuzz(20.0, 0, "auto", session)
    assert tally.red == []
    assert tally.cases


def test_a_table_is_not_read_in_another_stream_before_it_is_there() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        (table,) = upload([torch.full((1 << 16,), 7)], device)
    with torch.cuda.stream(second):
        wait_for_uploads(device)
        seen = table.clone()
    torch.cuda.synchronize()
    assert bool((seen == 7).all())


def test_the_memory_of_a_table_is_nobody_elses_until_other_streams_have_read_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(first):
        protect_from_reuse(device)
        (table,) = upload([torch.full((1 << 16,), 7)], device)
    with torch.cuda.stream(second):
        wait_for_uploads(device)
        protect_from_reuse(device)
        torch.cuda._sleep(200_000_000)
        seen = table.clone()
    del table
    with torch.cuda.stream(first):
        others = [torch.zeros(1 << 16, dtype=torch.int32, device=device) for _ in range(8)]
    torch.cuda.synchronize()
    assert bool((seen == 7).all())
    assert not any(bool(x.any()) for x in others)
