"""The decode kernel compiles for every GPU generation without a GPU, streams its pages asynchronously, and does not spill."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on, and it replaces the compiler", allow_module_level=True)

from ringattn.kernels.decode import configs as decode_configs  # noqa: E402
from ringattn.kernels.decode import decode_triton, latent_hopper, paged_hopper  # noqa: E402
from ringattn.kernels.decode.configs import DecodeConfig  # noqa: E402
from tests.kernels.compile import offline, sass  # noqa: E402
from tests.kernels.compile.gluon_offline import captured, report  # noqa: E402
from tests.kernels.compile.offline import SHARED  # noqa: E402
from tests.support.decoding import HOPPER_LATENTS, Case, empty_parts, make_scene  # noqa: E402

pytestmark = pytest.mark.compile
KEYS = 64
SMALL = {"b", "s", "hk", "group", "tiles", "slots", "splits", "least", "rows"}
UNALIGNED = {"lo_sb", "hi_sb", "positions_sb", "table_sb"}


@dataclass(frozen=True)
class Built:
    """A compiled kernel, and what the assembler says of it."""

    shared: int
    ptx: str
    notes: sass.Notes
    code: list[tuple[int, str]]

    @property
    def loop(self) -> sass.Loop:
        """The loop over tiles."""
        return max(sass.loops_with_products(self.code), key=lambda loop: len(loop.body))


def build(
    arch: int,
    config: DecodeConfig,
    *,
    b: int = 1,
    s: int = 1,
    group: int = 4,
    head_dim: int = 128,
    page_size: int = 64,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    softcap: bool = False,
    alibi: bool = False,
    split_plan: bool = True,
    how: tuple[str, str] | None = None,
    latent: int = 0,
) -> Built:
    """Compiles the kernel as a launch of these sizes would, with 16-byte aligned pointers and strides; `latent`: its columns."""
    fn = decode_triton._decode_kernel
    padded = max(16, triton.next_power_of_2(head_dim))
    fp8 = kv_dtype == "fp8"
    how = how or decode_triton.bytes_of((arch // 10, arch % 10))
    constants: dict[str, Any] = {
        "PAGE": page_size, "BLOCK_M": decode_configs.row_tiles(s, group, config.block_m)[0],
        "BLOCK_N": min(config.block_n, page_size), "D": padded, "D_WIDTH": head_dim,
        "DV": latent or padded, "DV_WIDTH": latent or head_dim,
        "B": triton.next_power_of_2(b), "S": triton.next_power_of_2(s), "SOFTCAP": softcap, "DENSE": not latent,
        "PRECISION": "tf32x3" if dtype == "fp32" else "ieee", "STAGES": config.num_stages, "SEARCH": decode_triton.FAN,
        "FINER": decode_triton.FINER, "tiles": 1, "K_BYTES": how[0], "V_BYTES": how[1],
        "LATENT": bool(latent),
    }  # fmt: skip
    if not fp8:
        constants |= {"k_scale": None, "v_scale": None}
    if not alibi:
        constants["alibi_slopes"] = None
    if not split_plan:
        constants["split_plan"] = None
    kv = "*i16" if fp8 else f"*{dtype}"
    types = {"q": f"*{dtype}", "k": kv, "v": kv, "scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(("parts", "k_scale", "v_scale", "alibi_slopes"), "*fp32")
    integers = {name for name in fn.arg_names if name in SMALL or re.fullmatch(r"\w+_s[bshp]", name)}
    types = dict.fromkeys(set(fn.arg_names) - integers, "*i32") | types
    options = {"num_warps": config.num_warps} | ({} if config.maxnreg is None else {"maxnreg": config.maxnreg})
    compiled = offline.build(fn, types, constants, arch, unaligned=SMALL | UNALIGNED, **options)
    ptx = compiled.asm["ptx"]
    return Built(compiled.metadata.shared, ptx, sass.assemble(ptx), sass.disassemble(compiled.asm["cubin"]))


def chosen(arch: int, itemsize: int, head_dim: int, rows: int, *, latent: bool = False) -> DecodeConfig:
    return decode_configs.choose(f"sm{arch}", itemsize, head_dim, rows, latent=latent)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("arch", "head_dim", "fp8"),
    [(arch, d, fp8) for arch in SHARED for d, fp8 in ((128, False), (128, True))] + [(90, 64, False), (90, 256, False)],
)
def test_pages_stream_past_registers_and_programs_fit_side_by_side(arch: int, head_dim: int, fp8: bool) -> None:
    config = chosen(arch, 1 if fp8 else 2, head_dim, 4)
    built = build(arch, config, head_dim=head_dim, kv_dtype="fp8" if fp8 else None)
    assert built.notes.spills <= 64, built.notes
    assert built.loop.spills == 0, built.notes
    # what each multiprocessor shall run at once fits into its shared memory (1 KiB of each program is reserved) and registers
    assert config.per_sm * (built.shared + 1024) <= SHARED[arch] + 1024, built.shared
    assert config.per_sm * config.num_warps * 32 * built.notes.registers <= 65536, built.notes
    # 16 bytes at a time, straight into shared memory; a tile of K and V of one thread each
    tile = 2 * config.block_n * head_dim * (1 if fp8 else 2) // (32 * config.num_warps * 16)
    assert sum("LDGSTS.E.BYPASS.128" in line for line in built.loop.body) == tile
    # nothing else of a page comes one number at a time (U8: transposing bytes)
    assert not any(re.search(r"LDS\.[US]8|LDG\.E\.[US]", line) for line in built.loop.body)


@pytest.mark.compiled
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sixteen_new_tokens_fit(arch: int, head_dim: int) -> None:
    config = chosen(arch, 2, head_dim, 64)
    built = build(arch, config, s=16, head_dim=head_dim, split_plan=False)
    assert config.per_sm * (built.shared + 1024) <= SHARED[arch] + 1024, built.shared
    assert config.per_sm * config.num_warps * 32 * built.notes.registers <= 65536, built.notes
    assert built.loop.spills == 0, built.notes


@pytest.mark.compiled
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_tile_of_latents_is_loaded_once_for_both_products(arch: int, heads: int, kv_dtype: str | None) -> None:
    config = chosen(arch, 1 if kv_dtype else 2, 576, heads, latent=True)
    built = build(arch, config, group=heads, head_dim=64, latent=512, kv_dtype=kv_dtype)
    assert built.loop.spills == 0, built.notes
    assert built.shared <= SHARED[arch], built.shared
    assert config.num_warps * 32 * built.notes.registers <= 65536, built.notes
    # of one thread, 16 bytes each; what is less than a copy per thread is one
    copies = sum("LDGSTS.E.BYPASS.128" in line for line in built.loop.body)
    tiles = [config.block_n * columns * (1 if kv_dtype else 2) // (32 * config.num_warps * 16) for columns in (512, 64)]
    assert sum(tiles) <= copies <= sum(max(1, n) for n in tiles), (tiles, copies)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [HOPPER_LATENTS[i] for i in (7, 6, 0, 2)], ids=str)
def test_the_hopper_kernel_of_latents_keeps_its_loops_in_registers(case: Case, dtype: torch.dtype) -> None:
    scene = make_scene(case, dtype)
    with captured() as launches:
        latent_hopper.decode(scene.call(), empty_parts(scene, 3))
    found = report(*launches[-1])
    assert found.shared <= SHARED[90], str(found)
    assert found.loop_spills == 0, str(found)
    assert not found.stale + found.warnings + found.injected, str(found)
    # in one round of each warpgroup: q . k of one tile, and weights times half of the values of two
    products = (scene.v.shape[-1] + 64) // 16 + 2 * 64 // 16
    assert [products for products, _ in found.loops] == [products] * 2, str(found)


@pytest.mark.compiled
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("case", [HOPPER_LATENTS[i] for i in (7, 6, 2)], ids=str)
def test_fp8_latents_are_widened_on_their_way_to_registers(case: Case, heads: int) -> None:
    scene, config = make_scene(replace(case, fp8=True, heads=heads), torch.bfloat16), decode_configs.LATENT_HOPPER[1]
    with captured() as launches:
        latent_hopper.decode(scene.call(), empty_parts(scene, 3))
    found = report(*launches[-1])
    assert config.per_sm * (found.shared + 1024) <= SHARED[90] + 1024, str(found)
    # 32 rows of 512 columns: a few numbers are loaded again for each tile; Triton 3.8 loads more
    most = 0 if heads == 16 or scene.v.shape[-1] < 512 else 20 if triton.__version__.startswith("3.8") else 4
    assert found.loop_spills <= most, str(found)
    assert not found.stale + found.warnings + found.injected, str(found)
    loops = sass.loops_with_products(sass.disassemble(launches[-1][1].asm["cubin"]))
    body = max(loops, key=lambda loop: len(loop.body)).body
    counts = {name: sum(name in line for line in body) for name in ("HGMMA", "UNPACK_B", "LDSM")}
    # 64 x 16 numbers of a tile in a product, two numbers of a thread in a conversion, 512 bytes of a warp in a load
    numbers = KEYS * (2 * scene.v.shape[-1] + 64)
    assert counts == {"HGMMA": numbers // 1024, "UNPACK_B": numbers // 256, "LDSM": numbers // 2048}, counts


@pytest.mark.parametrize(
    ("fp8", "tokens"),
    [(True, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((False, 1), (True, 4), (False, 4)))],
)
def test_a_warp_reads_a_page_as_the_first_operand(fp8: bool, tokens: int) -> None:
    case = Case(lengths=(300,), heads=32, kv_heads=8, head_dim=128, page_size=64, tokens=tokens, fp8=fp8)
    scene, config = make_scene(case, torch.bfloat16), decode_configs.PAGED_HOPPER[1 if fp8 else 2]
    with captured() as launches:
        paged_hopper.decode(scene.call(), empty_parts(scene, 3))
    _, kernel, _ = launches[-1]
    notes = sass.assemble(kernel.asm["ptx"])
    loop = max(sass.loops_with_products(sass.disassemble(kernel.asm["cubin"])), key=lambda loop: len(loop.body))
    assert config.per_sm * (kernel.metadata.shared + 1024) <= SHARED[90] + 1024, kernel.metadata.shared
    # 16 rows spill a little on Triton 3.7
    assert loop.spills <= (16 if tokens > 1 else 0), notes
    counts = {name: sum(name in line for line in loop.body) for name in ("HMMA", "UNPACK_B", "LDSM", "UTMALDG")}
    # 16 x 16 numbers of a tile and 8 rows of queries in a product, 512 bytes in a load, two numbers in a conversion
    numbers = 2 * KEYS * 128
    assert counts == {
        "HMMA": numbers // 256 * (2 if tokens > 1 else 1),
        "UNPACK_B": numbers // 64 if fp8 else 0,
        "LDSM": numbers * (1 if fp8 else 2) // 512,
        "UTMALDG": 4,
    }, counts
    # of four warps that share a tile: 548 each in fp8. A third is skipped: edges, and pages that are not full
    assert len(loop.body) <= (1220 if tokens == 1 else 1600), len(loop.body)


@pytest.mark.parametrize("arch", SHARED)
def test_every_feature_and_fp32_fit(arch: int) -> None:
    for itemsize, dtype, kv_dtype in ((1, "bf16", "fp8"), (4, "fp32", None)):
        config = chosen(arch, itemsize, 128, 4)
        built = build(arch, config, b=8, softcap=True, alibi=True, dtype=dtype, kv_dtype=kv_dtype)
        assert built.shared <= SHARED[arch]
        assert built.loop.spills == 0, built.notes
        config = chosen(arch, itemsize, 576, 4, latent=True)
        features = {"softcap": True, "alibi": True, "dtype": dtype, "kv_dtype": kv_dtype}
        built = build(arch, config, b=8, head_dim=64, latent=512, **features)
        assert built.shared <= SHARED[arch]
        # q of 512 columns in three parts of TF32 fits no register file
        assert built.loop.spills == 0 or dtype == "fp32", built.notes


@pytest.mark.parametrize("arch", [90, 100])
def test_four_bytes_cost_a_permutation_and_two_conversions(arch: int) -> None:
    config = chosen(arch, 1, 128, 4)
    body = build(arch, config, kv_dtype="fp8").loop.body
    numbers = 2 * config.block_n * 128 // (32 * config.num_warps)  # of K and V in a thread
    assert sum("UNPACK_B" in line for line in body) == numbers // 2
    assert sum(bool(re.search(r"\bPRMT\b", line)) for line in body) <= numbers // 4 + 2
    # a tile of bf16 takes 360 (Triton 3.6 and 3.7), this one 548 and 484: half the bytes leave no time for more
    assert len(body) <= 560, len(body)
