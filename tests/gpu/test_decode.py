"""Decode on a GPU: the compiled kernel on every case, long pools, and CUDA graphs that outlive what they were captured with."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ringattn.kernels.decode.dispatch import FP8, PageTable, decode, num_splits, select_decode_kernel
from ringattn.kernels.interface import Score
from tests.support.decoding import (
    CASES,
    HOPPER_LATENTS,
    HOPPER_PAGES,
    Case,
    Scene,
    are_same,
    assert_exact,
    dense,
    empty_parts,
    finish,
    make_scene,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
LONG = (
    Case(lengths=(9000, 100, 0, 2500), heads=32, kv_heads=8, head_dim=128, page_size=64, splits=33),
    Case(lengths=(9000, 100, 2500), tokens=16, heads=32, kv_heads=8, head_dim=128, page_size=64, splits=20),
    Case(lengths=(5000, 40), tokens=4, heads=32, kv_heads=32, head_dim=64, page_size=128, splits=16),
    Case(lengths=(5000,), tokens=3, heads=16, kv_heads=1, head_dim=256, page_size=32, splits=40),
    Case(lengths=(70000, 300), window=3000, heads=8, kv_heads=2, head_dim=128, page_size=64, ragged=0.5, splits=33),
    Case(lengths=(9000, 100), fp8=True, heads=32, kv_heads=8, head_dim=128, page_size=64, splits=50),
    Case(lengths=(3000, 200), tokens=16, fp8=True, softcap=20.0, alibi=True, heads=32, kv_heads=8, head_dim=128, page_size=64),
    Case(lengths=(9000, 100), latent=True, heads=16, kv_heads=1, head_dim=576, v_head_dim=512, page_size=64, splits=66),
    Case(lengths=(3000, 90), latent=True, fp8=True, heads=128, kv_heads=1, head_dim=576, v_head_dim=512, page_size=32, splits=9),
)  # fmt: skip
LONG_LATENTS = (
    Case(lengths=(9000, 100, 0, 2500), latent=True, heads=128, kv_heads=1, head_dim=576, v_head_dim=512, page_size=64, splits=33),
    Case(lengths=(40000,), latent=True, heads=16, kv_heads=1, head_dim=576, v_head_dim=512, page_size=64, ragged=0.6, splits=132),
    Case(lengths=(9000, 700), latent=True, tokens=4, heads=40, kv_heads=1, head_dim=288, v_head_dim=256, page_size=128, splits=16),
    Case(lengths=(7000,), latent=True, window=900, heads=64, kv_heads=1, head_dim=320, v_head_dim=256, page_size=256, splits=40),
)  # fmt: skip
needs_hopper = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) != (9, 0), reason="needs compute capability 9.0"
)


def run(scene: Scene, splits: int, impl: str = "portable") -> torch.Tensor:
    parts = empty_parts(scene, splits)
    decode(scene.call(), parts, impl=impl)
    return parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_the_compiled_kernel_stays_within_budget(case: Case, dtype: torch.dtype) -> None:
    scene = make_scene(case, dtype).to(DEVICE)
    parts = run(scene, case.splits)
    assert_exact(scene, parts)
    for _ in range(3):
        assert are_same(run(scene, case.splits), parts), "the same bits from run to run"


@pytest.fixture(scope="module")
def hopper_ends() -> None:
    """Fails where the Hopper kernel hangs, in a process that can be killed."""
    code = "from tests.gpu.test_decode import *\nrun(make_scene(HOPPER_LATENTS[0], torch.bfloat16).to(DEVICE), 3, 'hopper').cpu()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_hopper
@pytest.mark.usefixtures("hopper_ends")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        *HOPPER_LATENTS, *LONG_LATENTS, *HOPPER_PAGES, replace(HOPPER_PAGES[0], lengths=(9000, 100), head_dim=128, tokens=4),
        *(replace(case, fp8=not case.fp8) for case in (*HOPPER_LATENTS, *LONG_LATENTS, *HOPPER_PAGES)),
    ],
    ids=str,
)  # fmt: skip
def test_hopper_stays_within_budget(case: Case, dtype: torch.dtype) -> None:
    scene = make_scene(case, dtype).to(DEVICE)
    parts = run(scene, case.splits, "hopper")
    assert_exact(scene, parts)
    for _ in range(10):
        assert are_same(run(scene, case.splits, "hopper"), parts), "the same bits from run to run"


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_page_size_is_served(page_size: int, fp8: bool) -> None:
    case = Case(lengths=(1500, 70), tokens=2, heads=8, kv_heads=2, head_dim=128, page_size=page_size, fp8=fp8)
    scene = make_scene(case, torch.bfloat16).to(DEVICE)
    assert_exact(scene, run(scene, 6))


@pytest.mark.parametrize("how", ["instructions", "bits", "portable"])
def test_two_bytes_are_two_numbers(how: str) -> None:
    if how == "instructions" and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("needs instructions that convert float8_e4m3fn")
    # it needs Triton, which not every machine without a GPU has
    from tests.support.decode_bytes import assert_bytes_are_numbers

    assert_bytes_are_numbers(DEVICE, how)


def test_a_gpu_is_served_by_portable() -> None:
    assert select_decode_kernel(DEVICE, torch.bfloat16, FP8, 128, 128, 32).name == "portable"
    splits = num_splits(1, 1, 32, 8, 4096, 64, DEVICE)
    assert 1 < splits <= 4096


@pytest.mark.parametrize(
    "kind", ["portable", "fp8", *(pytest.param(kind, marks=needs_hopper) for kind in ("hopper", "latents"))]
)
def test_a_graph_serves_what_is_written_into_its_tables_later(kind: str) -> None:
    """Captured with one token a request; replayed with other lengths, an empty request, other bounds and other pages."""
    base = Case(
        lengths=(40, 40, 40),
        tokens=2,
        heads=8,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        fp8=kind in ("fp8", "hopper"),
        mine=1.0,
    )
    impl = "portable"
    if kind == "latents":
        impl, base = "hopper", replace(base, latent=True, kv_heads=1, head_dim=160, v_head_dim=128, page_size=64)
    if kind == "hopper":
        impl, base = "hopper", replace(base, page_size=64)
    columns, pages, splits = 300, 600, 9
    scene = make_scene(base, torch.bfloat16).to(DEVICE)
    pools = {name: getattr(scene, name) for name in ("k", "v", "k_scale", "v_scale")}
    pools = {
        name: None if x is None else torch.empty(pages, *x.shape[1:], dtype=x.dtype, device=DEVICE)
        for name, x in pools.items()
    }
    if base.latent:
        assert pools["k"] is not None
        pools["v"] = pools["k"][..., : base.v_head_dim]
    names = ("pages", "starts", "lengths")
    table = PageTable(
        **{name: torch.zeros(3, columns, dtype=torch.int32, device=DEVICE) for name in names},
        counts=torch.zeros(3, dtype=torch.int32, device=DEVICE),
    )
    static = replace(
        scene, table=table, q=scene.q.clone(), lo=scene.lo.clone(), hi=scene.hi.clone(), positions=scene.positions.clone(), **pools
    )  # fmt: skip
    parts = empty_parts(static, splits)

    def write(case: Case) -> Scene:
        new = make_scene(case, torch.bfloat16).to(DEVICE)
        for name in ("q", "lo", "hi", "positions"):
            getattr(static, name).copy_(getattr(new, name))
        for name, pool in pools.items():
            if pool is not None:
                if name != "v" or not base.latent:
                    pool.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
                pool[: getattr(new, name).shape[0]].copy_(getattr(new, name))
        for name in names:
            getattr(table, name).fill_(-(2**31))[:, : getattr(new.table, name).shape[1]] = getattr(new.table, name)
        table.counts.copy_(new.table.counts)
        parts.fill_(torch.nan)
        return new

    def call() -> None:
        decode(static.call(), parts, impl=impl)

    write(base)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()  # compiles, then plays back
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    for number, lengths in enumerate([(40, 40, 40), (3000, 2, 300), (5, 0, 2900), (2, 2, 2), (700, 900, 1100)]):
        for window in (None, 50):
            new = write(replace(base, lengths=lengths, window=window, seed=number, ragged=0.3))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert_exact(new, parts)
            replayed = parts.clone()
            call()
            assert are_same(parts, replayed), "a replay gives the bits of a call"


def test_pages_beyond_32_bits_are_found() -> None:
    hk, page_size, d, count = 8, 64, 128, 64
    pages = 2**31 // (hk * page_size * d) + 1000  # the last pages begin beyond element 2^31
    needed = 2 * pages * hk * page_size * d * 2 * 1.2
    if torch.cuda.get_device_properties(0).total_memory < needed:
        pytest.skip(f"needs a device with {needed / 2**30:.0f} GiB")
    g = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.zeros(pages, hk, page_size, d, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    for x in (k, v):
        x[-count:] = torch.randn(count, hk, page_size, d, device=DEVICE, generator=g).bfloat16()
    blocks = tuple((pages - count + i, i * page_size, page_size) for i in range(count))
    columns = torch.tensor(blocks, dtype=torch.int32, device=DEVICE).T.unsqueeze(1).contiguous()
    counts = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    table = PageTable(columns[0], columns[1], columns[2], counts)
    q = torch.randn(1, 1, 32, d, device=DEVICE, generator=g).bfloat16()
    zero = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    scene = Scene(q, k, v, table, zero, zero + count * page_size, zero, Score(d**-0.5), None, None, (blocks,))
    parts = run(scene, 8)
    small = replace(scene, k=k[-count:], v=v[-count:], blocks=(tuple((p - pages + count, s, n) for p, s, n in blocks),))
    exact = dense(small, torch.float64)[0]
    assert (finish(scene, parts)[0].double() - exact).abs().max() < 1e-2
