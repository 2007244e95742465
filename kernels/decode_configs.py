"""How a decode call is shaped on each kind of device: one table and a few rules, so that a measured choice is a changed number.

Owns tile sizes, pipeline depth and how much of a device one call should fill. Refuses to know tensors, and needs no Triton.

Note [Slots]
    The unit of work is a slot: a share of one request's blocks, for all its key heads and tiles of rows. `slots` of them fill
    the device, `splits` of them at most belong to one request (it is the height of the stack). On the device every program
    computes from the table how many blocks a share has, the same for all requests: the smallest number such that at most
    `slots + b` shares come out, and at most `splits` for a request. A long request among short ones so gets many programs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

MIN_TOKENS = 128
"""Keys below which a share is not made smaller: starting a program costs as much."""
PARTS_ROOM = 8
"""Keys per row of a tile that a share has at least: a partial then costs at most about an eighth of the keys' bytes."""
UNEVEN = 4
"""How many times its even share of the device a request may take when others are short."""


@dataclass(frozen=True)
class Config:
    """The shape of a decode launch.

    Attributes:
        block_n: Keys of a tile; at most a page.
        num_warps: Warps of a program.
        num_stages: Depth of the load pipeline, in tiles of K and of V.
        per_sm: Programs for each multiprocessor.
        tma: Load pages through tensor descriptors, where strides and addresses allow it.
        block_m: Query rows of a tile, at most.
    """

    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    tma: bool = False
    block_m: int = 64


INTERPRETED = Config(block_n=32, num_warps=1, num_stages=1, per_sm=2, block_m=32)


@functools.lru_cache
def choose(kind: str, itemsize: int, head_dim: int) -> Config:
    """The configuration of a call.

    Args:
        kind: From `portable.configs.kind_of`.
        itemsize: Bytes per element of the pool.
        head_dim: The larger of the padded head_dim of q and of v.
    """
    if kind == "interpreter":
        return INTERPRETED
    row = 2 * itemsize * max(head_dim, 64)  # bytes of a key and its value
    block_n = max(16, min(64, 32768 // row))
    stages = {"sm90": 3, "sm100": 3, "sm80": 3, "sm86": 2, "amd": 1}[kind]
    return Config(block_n=block_n, num_warps=4, num_stages=stages, per_sm=2)


def row_tiles(s: int, group: int, block_m: int) -> tuple[int, int]:
    """(rows of a tile, tiles) of the s * group query rows that share a key head."""
    rows = s * group
    tile = max(16, min(block_m, 1 << (rows - 1).bit_length()))
    return tile, -(-rows // tile)


def slots(s: int, h: int, hk: int, sms: int, per_sm: int, block_m: int) -> int:
    """Slots that fill a device (Note [Slots])."""
    _, tiles = row_tiles(s, h // hk, block_m)
    return max(1, sms * per_sm // (hk * tiles))


def least_blocks(s: int, group: int, page_size: int) -> int:
    """Blocks of the smallest share."""
    return -(-max(MIN_TOKENS, PARTS_ROOM * s * group) // page_size)


def splits(
    b: int, s: int, h: int, hk: int, blocks: int, page_size: int, sms: int, per_sm: int = 2, block_m: int = 64
) -> int:
    """The height of the stack: `kernels.decode.num_splits` for a device of `sms` multiprocessors."""
    full = slots(s, h, hk, sms, per_sm, block_m)
    alone = slots(s, h, hk, sms, 1, block_m)
    wanted = min(full, max(-(-UNEVEN * full // max(b, 1)), alone))
    return max(1, min(wanted, -(-blocks // least_blocks(s, h // hk, page_size))))


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
