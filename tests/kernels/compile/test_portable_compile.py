"""The portable kernels compile for every GPU generation without a GPU, fit, and do not spill in their loops."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

pytest.importorskip("triton")
configs = pytest.importorskip("ringattn.kernels.attention.portable.configs")

from ringattn.kernels.attention.portable.backward import keys_kernel, rows_kernel  # noqa: E402
from ringattn.kernels.attention.portable.forward import forward_kernel  # noqa: E402
from tests.kernels.compile import sass  # noqa: E402
from tests.kernels.compile.offline import SHARED, build  # noqa: E402

KERNELS = {"forward": forward_kernel, "keys": keys_kernel, "rows": rows_kernel}
STREAMED = {"forward": ("k", "v"), "keys": ("do", "q"), "rows": ("k", "v")}
TENSOR_OPS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
TYPES = {
    **dict.fromkeys(("q", "k", "v", "o", "do"), "*bf16"),
    **dict.fromkeys(("lse", "lse2", "delta", "sinks", "alibi_slopes", "key_bias", "bias"), "*fp32"),
    **dict.fromkeys(("dk_out", "dv_out", "dq_out", "dkey_bias_out", "dalibi_out", "dbias"), "*fp32"),
    **dict.fromkeys(("positions", "lo_ptr", "hi_ptr", "runs", "tables", "of_term"), "*i32"),
    **dict.fromkeys(("scale", "cap", "softmax_scale", "drop_factor"), "fp32"),
    **dict.fromkeys(("bias_sn", "dbias_sn"), "i32"),
}
OPTIONAL = {
    "carry": ("carry_m", "carry_l", "carry_acc"),
    "sinks": ("sinks",),
    "alibi": ("alibi_slopes", "dalibi_out"),
    "key_bias": ("key_bias", "dkey_bias_out"),
    "bias": ("bias", "dbias"),
    "terms": ("term_count", "lo_st", "hi_st"),
    "tables": ("tables", "of_term", "table_size", "table_width", "block_size"),
}
"""Arguments by the feature that brings them."""
EVERYTHING = ("softcap", "sinks", "alibi", "key_bias", "bias", "dropout")
OF_MASKS = ("terms", "tables")
"""Features that the score is not made of: several terms, and tables of blocks that cut them."""

PLAIN = [(kernel, arch, head_dim) for head_dim in (64, 128) for kernel in KERNELS for arch in SHARED]

pytestmark = pytest.mark.compile


def compiled(kernel: str, arch: int, head_dim: int, features: tuple[str, ...] = ()) -> Any:
    """One kernel in bf16 without a carry, with the configuration of a launch; it fits, and its products are tensor cores'."""
    fn = KERNELS[kernel]
    config = configs.choose(f"sm{arch}", 2, head_dim, set(features) <= {*OF_MASKS})[kernel]
    padded = max(16, 2 ** math.ceil(math.log2(head_dim)))
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "D": padded, "D_WIDTH": head_dim, "DV": padded, "DV_WIDTH": head_dim,
        "SOFTCAP": "softcap" in features, "DROPOUT": "dropout" in features, "TMA": config.tma, "PRECISION": "ieee",
        "FIRST": True, "LAST": True, "DOT_ONLY": set(features) <= {*OF_MASKS}, "ADD": False,
        "SAME_STRIDE": True, "group": 1,
    }  # fmt: skip
    constants |= {name: None for feature, names in OPTIONAL.items() if feature not in features for name in names}
    types = dict(TYPES)
    if config.tma:
        block = config.block_m if kernel == "keys" else config.block_n
        types |= dict.fromkeys(STREAMED[kernel], f"tensordesc<bf16[1, 1, {block}, {padded}]>")
        types |= dict.fromkeys(("lse2", "delta"), f"tensordesc<fp32[{block}]>") if kernel == "keys" else {}
    integers = {name for name in fn.arg_names if name not in TYPES and not re.fullmatch(r"\w+_s[bsh]", name)}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    built = build(fn, types, constants, arch, unaligned=integers, **options)
    assert built.metadata.shared <= SHARED[arch]
    assert TENSOR_OPS[arch] in built.asm["ptx"]
    return built


@pytest.mark.compiled
@pytest.mark.parametrize(("kernel", "arch", "head_dim"), PLAIN)
def test_plain_kernels_fit_and_do_not_spill_in_their_loops(kernel: str, arch: int, head_dim: int):
    built = compiled(kernel, arch, head_dim)
    notes = sass.assemble(built.asm["ptx"])
    loops = sass.loops_with_products(sass.disassemble(built.asm["cubin"])) if notes.spills else []
    assert not any(loop.spills for loop in loops), notes
    assert not notes.warnings, notes


@pytest.mark.parametrize("features", [("terms",), OF_MASKS], ids=["terms", "tables"])
@pytest.mark.parametrize(("kernel", "arch"), [("forward", 90), ("keys", 90), ("rows", 80)])
def test_kernels_of_several_terms_fit(kernel: str, arch: int, features: tuple[str, ...]):
    compiled(kernel, arch, 128, features)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_with_every_feature_fit(kernel: str):
    compiled(kernel, 90, 128, EVERYTHING)
