"""Shapes of decode calls on each kind of device: tile sizes, pipeline depth, and the share of a device that one call fills.

The unit of work is a slot: a share of one request's blocks, for all its key heads and tiles of rows. `slots` of them fill the
device; at most `splits` of them, the height of the stack, belong to one request.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

MIN_TOKENS = 128
"""Keys below which a share is not made smaller: starting a program costs as much."""
MIN_TOKENS_PER_ROW = 8
"""Keys per row of a tile that a share has at least: a partial then costs at most about an eighth of the keys' bytes."""
ROUNDS = 4
"""How many programs of many rows one after another a multiprocessor should get at most."""
BEGIN_BLOCKS = 4
"""What beginning and ending a program of many rows costs, in blocks of keys."""
ROWS_FREE = 2**17
"""Rows of all parts of a stack for which there is memory. Beyond it a request has as many programs as multiprocessors, at most."""


@dataclass(frozen=True)
class DecodeConfig:
    """The shape of a decode launch.

    Attributes:
        block_n: Keys of a tile; at most a page.
        num_warps: Warps of a program.
        num_stages: Depth of the load pipeline, in tiles of K and of V.
        per_sm: Programs for each multiprocessor.
        block_m: Query rows of a tile, at most.
        maxnreg: Cap on registers per thread, so that the programs fit; None for the compiler's choice.
    """

    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    block_m: int = 64
    maxnreg: int | None = None


INTERPRETER = "interpreter"  # small tiles: many tiles and edges in a small test
FEW_ROWS = 16
"""Rows of the smallest tile: a few new tokens of grouped heads fit."""

MANY_ROWS = 64
"""Rows of a tile beyond which a call is bound by products instead of memory: rows of a prompt, not of decoding."""

LATENT = 0
"""Bucket of pools of latents, whatever their columns: one tile of K and V together."""

LATENT_HOPPER = {1: DecodeConfig(64, 4, 2, 2, block_m=32), 2: DecodeConfig(64, 9, 2, 1)}
"""Of latents by bytes per element on sm90: the tiles of latent_fp8.py and of latent_hopper.py, which know no others."""

PAGED_HOPPER = {1: DecodeConfig(64, 1, 2, 4), 2: DecodeConfig(64, 1, 3, 2)}
"""By bytes per element, of up to FEW_ROWS rows on sm90: the tiles of paged_hopper.py."""

# (kind of device, bytes per element of the pool, padded head_dim or LATENT) -> for FEW_ROWS, for more, for more than MANY_ROWS
_TABLE: dict[tuple[str, int, int], tuple[DecodeConfig, ...]] = {
    # 227 KiB of shared memory
    ("sm90", 1, 64): (DecodeConfig(64, 4, 4, 4), DecodeConfig(64, 8, 4, 2), DecodeConfig(64, 8, 4, 1, block_m=128)),
    ("sm90", 1, 128): (DecodeConfig(64, 4, 4, 3, maxnreg=168), DecodeConfig(64, 8, 4, 2), DecodeConfig(64, 8, 4, 1, block_m=128)),
    ("sm90", 1, 256): (DecodeConfig(32, 4, 4, 3, maxnreg=168), DecodeConfig(32, 8, 3, 1)),
    ("sm90", 2, 64): (DecodeConfig(64, 4, 4, 4), DecodeConfig(64, 4, 3, 2), DecodeConfig(64, 8, 4, 1, block_m=128)),
    ("sm90", 2, 128): (DecodeConfig(64, 4, 4, 2), DecodeConfig(64, 4, 3, 2), DecodeConfig(64, 8, 3, 1, block_m=128)),
    ("sm90", 2, 256): (DecodeConfig(32, 4, 4, 2), DecodeConfig(32, 8, 3, 1)),
    ("sm100", 1, 64): (DecodeConfig(64, 4, 4, 4), DecodeConfig(64, 8, 4, 2), DecodeConfig(64, 8, 4, 1, block_m=128)),
    ("sm100", 1, 128): (DecodeConfig(64, 4, 4, 3, maxnreg=168), DecodeConfig(64, 8, 4, 2), DecodeConfig(64, 8, 4, 1, block_m=128)),
    ("sm100", 1, 256): (DecodeConfig(32, 4, 4, 3, maxnreg=168), DecodeConfig(32, 8, 3, 1)),
    ("sm100", 2, 64): (DecodeConfig(64, 4, 4, 4), DecodeConfig(64, 8, 4, 1), DecodeConfig(64, 8, 4, 1, block_m=128)),
    ("sm100", 2, 128): (DecodeConfig(64, 4, 4, 2), DecodeConfig(64, 8, 3, 1), DecodeConfig(64, 8, 3, 1, block_m=128)),
    ("sm100", 2, 256): (DecodeConfig(32, 4, 4, 2), DecodeConfig(32, 8, 3, 1)),
    # 163 KiB
    ("sm80", 1, 64): (DecodeConfig(64, 4, 4, 4), DecodeConfig(64, 8, 4, 2)),
    ("sm80", 1, 128): (DecodeConfig(64, 4, 4, 2), DecodeConfig(32, 8, 4, 1)),
    ("sm80", 1, 256): (DecodeConfig(32, 4, 4, 2), DecodeConfig(32, 8, 3, 1, block_m=32)),
    ("sm80", 2, 64): (DecodeConfig(64, 4, 4, 3), DecodeConfig(64, 8, 4, 1)),
    ("sm80", 2, 128): (DecodeConfig(64, 4, 3, 2), DecodeConfig(64, 8, 3, 1)),
    ("sm80", 2, 256): (DecodeConfig(32, 4, 3, 2), DecodeConfig(32, 8, 3, 1, block_m=32)),
    # 99 KiB: consumer and workstation parts of every generation since
    ("sm86", 1, 64): (DecodeConfig(64, 4, 3, 3), DecodeConfig(32, 8, 3, 1)),
    ("sm86", 1, 128): (DecodeConfig(64, 4, 3, 2), DecodeConfig(32, 8, 3, 1)),
    ("sm86", 1, 256): (DecodeConfig(32, 4, 3, 2), DecodeConfig(32, 8, 2, 1, block_m=32)),
    ("sm86", 2, 64): (DecodeConfig(64, 4, 3, 2), DecodeConfig(32, 8, 3, 1)),
    ("sm86", 2, 128): (DecodeConfig(32, 4, 3, 2), DecodeConfig(32, 8, 3, 1)),
    ("sm86", 2, 256): (DecodeConfig(16, 4, 3, 2), DecodeConfig(16, 8, 2, 1, block_m=32)),
    # 64 KiB of LDS
    ("amd", 2, 64): (DecodeConfig(64, 4, 2, 2), DecodeConfig(32, 4, 2, 1)),
    ("amd", 2, 128): (DecodeConfig(32, 4, 2, 2), DecodeConfig(32, 4, 2, 1, block_m=32)),
    ("amd", 2, 256): (DecodeConfig(16, 4, 2, 2), DecodeConfig(16, 4, 2, 1, block_m=16)),
} | {
    # fp32: products of three TF32 products each, which take registers
    (kind, 4, bucket): (DecodeConfig(16 if bucket == 256 else 32, 4, 2, 2, block_m=16),) * 2
    for kind in ("sm80", "sm86", "sm90", "sm100", "amd")
    for bucket in (64, 128, 256)
} | {
    # 32 rows of 576 columns are 36 KiB in bf16
    (kind, size, LATENT): (
        DecodeConfig(16 if size == 4 else 32, 8, 2 if size == 4 else stages, 1, block_m=16),
        DecodeConfig(16 if size == 4 else 32, 8, 2 if size == 4 else stages - 1, 1, block_m=16 if size == 4 else 32),
    )
    for kind, stages in (("sm80", 4), ("sm86", 3), ("sm90", 5), ("sm100", 5))
    for size in (1, 2, 4)
} | {
    ("amd", size, LATENT): (DecodeConfig(16, 8, 3 - size // 2, 1, block_m=16),) for size in (1, 2, 4)
} | {
    (INTERPRETER, size, bucket): (DecodeConfig(16, 1, 1, 2, block_m=32), DecodeConfig(32, 1, 1, 2, block_m=32))
    for size in (1, 2, 4)
    for bucket in (64, 128, 256, LATENT)
}  # fmt: skip


def choose(kind: str, itemsize: int, head_dim: int, rows: int, *, latent: bool = False) -> DecodeConfig:
    """The configuration of a call.

    Args:
        kind: From `portable.configs.kind_of`.
        itemsize: Bytes per element of the pool.
        latent: Whether values are columns of the keys.
    """
    bucket = LATENT if latent else next(b for b in (64, 128, 256) if head_dim <= b)
    found = _TABLE[kind, itemsize, bucket]
    return found[min((rows > FEW_ROWS) + (rows > MANY_ROWS), len(found) - 1)]


def row_tiles(s: int, group: int, block_m: int) -> tuple[int, int]:
    """(rows of a tile, tiles) of the s * group query rows that share a key head."""
    rows = s * group
    tile = max(16, min(block_m, 1 << (rows - 1).bit_length()))
    return tile, -(-rows // tile)


def slots(s: int, h: int, hk: int, sms: int, config: DecodeConfig) -> int:
    """Return the number of slots that fill a device at once."""
    _, tiles = row_tiles(s, h // hk, config.block_m)
    return max(1, sms * config.per_sm // (hk * tiles))


def shares(weights: Sequence[int], s: int, h: int, hk: int, page_size: int, sms: int, config: DecodeConfig) -> int:
    """The height of the stack with which requests of many rows are soonest done, by an estimate of rounds.

    Programs that multiply are long, so they are cut until the last round costs little; few enough that parts cost little.

    Example:
        >>> one = DecodeConfig(64, 8, 3, 1, block_m=128)
        >>> [shares([2048] * b, 32, 32, 8, 64, 132, one) for b in (1, 4, 12)]
        [16, 4, 4]
    """
    _, tiles = row_tiles(s, h // hk, config.block_m)
    at_once = sms * config.per_sm
    least = least_blocks(s, h // hk, page_size)
    total, longest = sum(weights), max(weights, default=0)
    best, soonest = 1, None
    for height in range(1, 1 + max(1, -(-ROUNDS * at_once // max(1, hk * tiles * len(weights))))):
        share = max(-(-total // (height * max(1, len(weights)))), -(-longest // height), least)
        programs = hk * tiles * sum(max(1, -(-weight // share)) for weight in weights)
        time = -(-programs // at_once) * (share + BEGIN_BLOCKS)
        if soonest is None or time < soonest:
            best, soonest = height, time
    return best


def least_blocks(s: int, group: int, page_size: int) -> int:
    """Blocks of the smallest share."""
    return -(-max(MIN_TOKENS, MIN_TOKENS_PER_ROW * s * group) // page_size)


def splits(
    b: int,
    s: int,
    h: int,
    hk: int,
    blocks: int,
    page_size: int,
    sms: int,
    config: DecodeConfig,
    *,
    same_length: bool = False,
) -> int:
    """The height of the stack: `kernels.decode.dispatch.num_splits` for a device of `sms` multiprocessors.

    Example:
        >>> one = DecodeConfig(64, 4, 3, 2)
        >>> [splits(b, 1, 32, 8, 1024, 64, 132, one) for b in (2, 8, 64, 200)]
        [33, 33, 33, 20]
        >>> [splits(b, 16, 32, 8, 1024, 64, 132, one, same_length=True) for b in (2, 8, 32)]
        [17, 5, 2]
    """
    if s * h // hk > MANY_ROWS:
        return shares((blocks,) * b, s, h, hk, page_size, sms, config)
    full, rows = slots(s, h, hk, sms, config), max(1, b * s * h)
    most = -(-blocks // least_blocks(s, h // hk, page_size))
    if same_length:
        return max(1, min(-(-full // max(b, 1)), most))
    # what a request does not need costs it next to nothing: a long one among short ones may take the whole device
    return max(1, min(full, most, max(ROWS_FREE // rows, slots(s, h, hk, sms, replace(config, per_sm=1)))))


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a few on a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
