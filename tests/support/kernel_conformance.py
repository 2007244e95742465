"""What every kernel set must satisfy, as a list of cases and one function that runs a case.

Sides are built here from dense masks and global positions, in plain Python, so that neither the intervals of the
library nor a kernel set judges itself. The judge is `dense_attention` in fp64 on the rows and keys of the case, under the error
budget of `ringattn.numerics.error_budget`. Lengths of CASES stay below 80 rows: they also run in the Triton interpreter.

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_forward_and_backward_stay_within_budget(case):
        run_case(portable, case, torch.float32, "cpu")
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.interface import (
    BackwardStep,
    CallShape,
    Grads,
    KernelSet,
    RowMetadata,
    Score,
    SoftmaxState,
    Step,
    accumulation_dtype,
)
from ringattn.numerics.reference import dense_attention, visible_pairs
from tests.support import term_masks
from tests.support.budget import assert_within_budget
from tests.support.term_masks import TermMask, TermMaskMaker

Runs = tuple[tuple[int, int, int], ...]
"""Where the rows of one buffer sit: (start, stride, length) each, positions ascending."""


@dataclass(frozen=True)
class Case:
    """One query shard, the buffers of keys that visit it in order, and how scores are made.

    Attributes:
        name: Said by pytest.
        seq_len: Queries in the whole sequence.
        q_runs: The rows of this shard; None: the whole sequence.
        ring_steps: The key buffers, disjoint; None: all keys at once. Keys in no buffer take no part.
        kv_len: Keys in the whole sequence; None: seq_len.
        mask: Arguments of `visible_pairs`.
        terms: In place of mask: makes a mask of several terms from seq_len.
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q and k.
        v_head_dim: Of v; None: head_dim.
        softmax_scale: None: head_dim ** -0.5.
        softcap: As in Score.
        dropout_p: As in Score.
        dropout_seed: As in Score.
        sinks: With sinks; a number: all of them, which makes weights small where it is high.
        small_weights: Weights are as small as those of a long sequence, and do is large: all must keep their digits. The yardstick
            is plain torch in fp32, its results rounded, since in fp16 it loses them too.
        alibi: With ALiBi slopes.
        key_bias: With a bias per key.
        hidden_keys: A key bias of -inf hides the first keys, and all of the last batch element.
        bias: None, "dense" (fp32, `b h s n`), or "shared" (q's dtype, one row of batch and heads, expanded).
        heads_first: q, k, v and do are transposed views of `b h s d`.
        accumulate: Key gradients and the first visit's row gradients are added to what is there.
        deterministic: Gradients are summed in a fixed order.
        seed: Of the random inputs.
    """

    name: str
    seq_len: int = 40
    q_runs: Runs | None = None
    ring_steps: tuple[Runs, ...] | None = None
    kv_len: int | None = None
    mask: dict[str, Any] = field(default_factory=dict)
    terms: TermMaskMaker | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    sinks: bool | float = False
    small_weights: bool = False
    alibi: bool = False
    key_bias: bool = False
    hidden_keys: bool = False
    bias: str | None = None
    heads_first: bool = False
    accumulate: bool = False
    deterministic: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def make_mask(self) -> TermMask:
        """The mask of the whole sequence."""
        if self.terms is not None:
            return self.terms(self.seq_len)
        return TermMask(visible_pairs(self.seq_len, self.kv_len or self.seq_len, **self.mask)[None])


def _zigzag(rank: int, world_size: int, chunk: int) -> Runs:
    return ((rank * chunk, 1, chunk), ((2 * world_size - 1 - rank) * chunk, 1, chunk))


def _striped(rank: int, world_size: int, seq_len: int) -> Runs:
    return ((rank, world_size, len(range(rank, seq_len, world_size))),)


CAUSAL: dict[str, Any] = {"causal": True}
MANY: dict[str, Any] = {
    "softcap": 3.0, "sinks": True, "alibi": True, "key_bias": True, "bias": "dense", "dropout_p": 0.3,
    "dropout_seed": 0x1234_5678_9ABC,
}  # fmt: skip

CASES: tuple[Case, ...] = (
    # lengths and dims
    Case("full"),
    Case("causal", mask=CAUSAL),
    Case("one_row_one_key", seq_len=1, mask=CAUSAL),
    Case("odd_length", seq_len=67, mask=CAUSAL),
    Case("whole_tiles", seq_len=64, mask=CAUSAL, head_dim=32),
    Case("cross_more_keys", seq_len=19, kv_len=53),
    Case("cross_fewer_keys_causal", seq_len=53, kv_len=19, mask=CAUSAL),
    Case("head_dim_40", mask=CAUSAL, head_dim=40),
    Case("head_dim_64_v_32", mask=CAUSAL, head_dim=64, v_head_dim=32),
    Case("head_dim_96_v_128", seq_len=33, mask=CAUSAL, head_dim=96, v_head_dim=128),
    Case("head_dim_128", seq_len=37, mask=CAUSAL, head_dim=128),
    Case("head_dim_256", seq_len=35, mask=CAUSAL, head_dim=256),
    Case("head_dim_80_v_72", seq_len=35, head_dim=80, v_head_dim=72),
    # heads, batches and strides
    Case("gqa_4", mask=CAUSAL, batch=2, heads=8, kv_heads=2),
    Case("gqa_3", seq_len=29, batch=2, heads=6, kv_heads=2),
    Case("mqa_8", seq_len=33, mask=CAUSAL, heads=8, kv_heads=1),
    Case("heads_first", mask=CAUSAL, batch=2, heads=4, kv_heads=2, heads_first=True, v_head_dim=24),
    # masks
    Case("window_left", seq_len=61, mask={"causal": True, "window": (7, None)}),
    Case("window_both_sides", seq_len=61, mask={"window": (5, 9)}),
    Case("window_of_one", seq_len=21, mask={"window": (0, 0)}),
    Case("documents", seq_len=61, mask={"causal": True, "documents": (0, 3, 3, 30, 31, 61)}),
    Case("documents_full", seq_len=50, mask={"documents": (0, 20, 50)}),
    Case("prefix", seq_len=45, mask={"causal": True, "prefix_len": 13}),
    Case("chunks", seq_len=45, mask={"causal": True, "chunk_len": 16}),
    Case(
        "every_mask",
        seq_len=60,
        batch=2,
        mask={
            "causal": True, "window": (11, None), "documents": (0, 25, 60), "prefix_len": 5, "chunk_len": 20,
            "lengths": ((0, 60), (9, 41)),
        },
    ),
    Case("left_padding", batch=3, mask={"causal": True, "lengths": ((0, 40), (13, 40), (39, 40))}),
    Case("right_padding_and_nothing", batch=3, mask={"lengths": ((0, 40), (0, 17), (5, 5))}),
    Case("per_batch_gqa", seq_len=36, batch=2, heads=4, kv_heads=2, mask={"lengths": ((3, 30), (0, 36))}),
    # buffers that hold nothing, or nothing that is seen
    Case("keys_in_the_future", seq_len=60, q_runs=((0, 1, 20),), ring_steps=(((30, 1, 20),),), mask=CAUSAL),
    Case("empty_keys", q_runs=((5, 1, 20),), ring_steps=((),), mask=CAUSAL),
    Case("empty_keys_with_sinks", q_runs=((5, 1, 20),), ring_steps=((),), mask=CAUSAL, sinks=True),
    Case("empty_queries", q_runs=(), ring_steps=(((0, 1, 20),),), mask=CAUSAL),
    Case("empty_queries_accumulate", q_runs=(), ring_steps=(((0, 1, 20),),), mask=CAUSAL, accumulate=True),
    Case(
        "keys_in_a_hole",
        seq_len=7,
        q_runs=((2, 4, 2),),
        ring_steps=(((2, 4, 2),), ((3, 1, 1),)),
        mask={"causal": True, "chunk_len": 3},
    ),
    Case(
        "empty_visits_between",
        q_runs=((20, 1, 20),),
        ring_steps=((), ((20, 1, 20),), (), ((0, 1, 20),), ()),
        mask=CAUSAL,
    ),
    Case(
        "hidden_rows", seq_len=60, q_runs=((0, 1, 30),), ring_steps=(((15, 1, 15),), ((40, 1, 20),)), mask=CAUSAL,
        accumulate=True,
    ),
    # layouts and carries
    Case("two_visits", q_runs=((20, 1, 20),), ring_steps=(((20, 1, 20),), ((0, 1, 20),)), mask=CAUSAL),
    Case(
        "zigzag", seq_len=72, q_runs=_zigzag(1, 4, 9),
        ring_steps=(_zigzag(1, 4, 9), _zigzag(0, 4, 9), _zigzag(3, 4, 9), _zigzag(2, 4, 9)), mask=CAUSAL, heads=4,
        batch=2,
    ),
    Case(
        "zigzag_window", seq_len=72, q_runs=_zigzag(0, 2, 18), ring_steps=(_zigzag(0, 2, 18), _zigzag(1, 2, 18)),
        mask={"causal": True, "window": (10, None)}, accumulate=True,
    ),
    Case(
        "window_over_fewer_keys_than_rows",
        seq_len=80,
        q_runs=((30, 1, 50),),
        ring_steps=(((12, 1, 16),),),
        mask={"causal": True, "window": (45, None)},
    ),
    Case(
        "striped",
        seq_len=62,
        q_runs=_striped(2, 4, 62),
        ring_steps=(_striped(2, 4, 62), _striped(1, 4, 62), _striped(0, 4, 62), _striped(3, 4, 62)),
        mask=CAUSAL,
    ),
    Case("striped_full", seq_len=40, q_runs=_striped(1, 2, 40), ring_steps=(_striped(1, 2, 40), _striped(0, 2, 40))),
    Case(
        "many_runs", seq_len=80, q_runs=((3, 1, 2), (9, 3, 7), (40, 1, 11), (60, 2, 9)),
        ring_steps=(((0, 1, 3), (5, 2, 2), (31, 1, 9), (51, 1, 9)), ((8, 1, 1), (61, 2, 9))), mask=CAUSAL, heads=4,
        kv_heads=1,
    ),
    Case(
        "padded_ring", seq_len=60, batch=2, q_runs=((20, 1, 20),), ring_steps=(((20, 1, 20),), ((0, 1, 20),)),
        mask={"causal": True, "lengths": ((0, 60), (12, 33))}, accumulate=True,
    ),
    # scores
    Case("scale", mask=CAUSAL, softmax_scale=0.7),
    Case("negative_scale", mask=CAUSAL, softmax_scale=-0.4),
    Case("zero_scale", mask=CAUSAL, softmax_scale=0.0),
    Case("softcap", mask=CAUSAL, softcap=1.5, softmax_scale=1.0),
    Case("sinks", mask=CAUSAL, heads=4, sinks=True),
    Case(
        "sinks_over_visits", q_runs=((20, 1, 20),), ring_steps=(((20, 1, 20),), ((0, 1, 20),)), mask=CAUSAL, sinks=True
    ),
    Case("alibi", heads=4, kv_heads=2, alibi=True),
    Case("key_bias", mask=CAUSAL, batch=2, heads=4, kv_heads=2, key_bias=True),
    Case("hidden_keys", seq_len=72, mask=CAUSAL, batch=3, heads=4, kv_heads=2, key_bias=True, hidden_keys=True),
    Case(
        "hidden_keys_over_visits", seq_len=60, q_runs=((20, 1, 20),),
        ring_steps=(((0, 1, 20),), ((20, 1, 20),), ((40, 1, 20),)), batch=2, sinks=True, key_bias=True,
        hidden_keys=True,
    ),
    Case("dense_bias", mask=CAUSAL, batch=2, bias="dense"),
    Case("shared_bias", batch=2, heads=4, kv_heads=2, bias="shared"),
    Case("dropout", mask=CAUSAL, batch=2, heads=4, kv_heads=2, dropout_p=0.25, dropout_seed=42),
    Case("everything", seq_len=45, mask={"causal": True, "window": (30, None)}, batch=2, heads=4, kv_heads=2, **MANY),
    Case(
        "everything_over_visits", seq_len=72, q_runs=_zigzag(1, 2, 18),
        ring_steps=(_zigzag(1, 2, 18), _striped(0, 2, 18), _striped(1, 2, 18), ((54, 1, 18),)),
        mask={"causal": True, "lengths": ((0, 72), (9, 60))}, batch=2, heads=4, kv_heads=2, head_dim=40, v_head_dim=24,
        heads_first=True, accumulate=True, **{**MANY, "bias": "shared"},
    ),
    Case("vanishing_scale", mask=CAUSAL, softmax_scale=1e-46),
)  # fmt: skip
"""Small, and each in the list for a reason that its name says."""


NOT_PLAIN: dict[str, Any] = {"softcap": 3.0, "sinks": True, "alibi": True, "key_bias": True}

LONG_CASES: tuple[Case, ...] = (
    Case("long_full", seq_len=333, kv_len=450, head_dim=64),
    Case("long_causal_64", seq_len=400, mask=CAUSAL, heads=2, kv_heads=1, head_dim=64),
    Case("long_causal_128", seq_len=385, mask=CAUSAL, heads=2, kv_heads=1, head_dim=128),
    Case("long_causal_256", seq_len=260, mask=CAUSAL, heads=1, kv_heads=1, head_dim=256),
    Case("long_v_narrower", seq_len=270, mask=CAUSAL, head_dim=192, v_head_dim=128, heads=1, kv_heads=1),
    Case("long_v_wider", seq_len=270, mask=CAUSAL, head_dim=64, v_head_dim=128, heads=1, kv_heads=1),
    Case("long_window", seq_len=500, mask={"causal": True, "window": (150, None)}, head_dim=64),
    Case("long_window_both_sides", seq_len=420, mask={"window": (70, 133)}, head_dim=128, heads=1, kv_heads=1),
    Case(
        "long_documents", seq_len=520, mask={"causal": True, "documents": (0, 128, 131, 131, 400, 520)}, head_dim=64,
        heads=4, kv_heads=2,
    ),
    Case(
        "long_lengths", seq_len=300, batch=3, mask={"causal": True, "lengths": ((0, 300), (170, 290), (5, 5))},
        head_dim=64, accumulate=True,
    ),
    Case(
        "long_zigzag", seq_len=600, q_runs=_zigzag(1, 2, 150), ring_steps=(_zigzag(1, 2, 150), _zigzag(0, 2, 150)),
        mask=CAUSAL, heads=2, kv_heads=1, head_dim=128,
    ),
    Case(
        "long_striped", seq_len=600, q_runs=_striped(1, 2, 600), ring_steps=(_striped(1, 2, 600), _striped(0, 2, 600)),
        mask={"causal": True, "window": (333, None)}, head_dim=64, accumulate=True,
    ),
    Case(
        "long_runs",
        seq_len=700,
        q_runs=((3, 1, 70), (100, 3, 60), (300, 1, 150)),
        ring_steps=(((0, 1, 3), (5, 2, 40), (131, 1, 200)), ((90, 1, 1), (400, 2, 90))),
        mask=CAUSAL,
        head_dim=64,
    ),
    Case("few_rows_many_keys", seq_len=900, q_runs=((880, 1, 9),), mask=CAUSAL, heads=16, kv_heads=2, head_dim=64),
    Case(
        "few_rows_many_keys_not_plain", seq_len=700, q_runs=((650, 1, 21),),
        ring_steps=(((0, 1, 350),), ((350, 1, 350),)), mask={"causal": True, "window": (600, None)}, heads=8,
        kv_heads=2, head_dim=128, **NOT_PLAIN,
    ),
    Case(
        "long_not_plain", seq_len=300, mask={"causal": True, "window": (200, None)}, batch=2, heads=4, kv_heads=2,
        head_dim=64, heads_first=True, **NOT_PLAIN,
    ),
    Case("long_negative_scale", seq_len=270, mask=CAUSAL, head_dim=128, softmax_scale=-0.1, heads=1, kv_heads=1),
    Case(
        "long_hidden_rows", seq_len=600, q_runs=((0, 1, 300),), ring_steps=(((140, 1, 160),), ((400, 1, 200),)),
        mask=CAUSAL, head_dim=64, accumulate=True,
    ),
)  # fmt: skip
"""Several tiles of 128 and 192 rows, for kernels whose tiles are larger than CASES."""

FEW: dict[str, Any] = {"seq_len": 4, "kv_len": 2**20, "heads": 1, "kv_heads": 1, "small_weights": True}

SMALL_WEIGHT_CASES: tuple[Case, ...] = (
    Case("small_weights", small_weights=True, sinks=14.0),
    Case("small_weights_causal", mask=CAUSAL, heads=4, head_dim=64, v_head_dim=32, small_weights=True, sinks=14.0),
    Case("small_weights_of_one_key", seq_len=21, mask={"window": (0, 0)}, small_weights=True, sinks=14.0),
    Case("smaller_weights_64_v_256", seq_len=70, head_dim=64, v_head_dim=256, small_weights=True, sinks=17.0),
    Case(
        "small_weights_192_v_128", seq_len=150, mask=CAUSAL, head_dim=192, v_head_dim=128, small_weights=True,
        sinks=14.0,
    ),
    Case("small_weights_256", seq_len=66, head_dim=256, small_weights=True, sinks=14.0),
    Case("small_weights_128", seq_len=130, head_dim=128, small_weights=True, sinks=14.0),
    Case(
        "small_weights_over_visits", q_runs=((20, 1, 20),), ring_steps=(((20, 1, 20),), ((0, 1, 20),)), mask=CAUSAL,
        small_weights=True, sinks=14.0,
    ),
    Case(
        "small_weights_not_plain", mask=CAUSAL, head_dim=64, softcap=3.0, alibi=True, key_bias=True, small_weights=True,
        sinks=14.0,
    ),
    Case("small_weights_everything", mask=CAUSAL, heads=4, small_weights=True, **{**MANY, "sinks": 14.0}),
    Case("small_weights_most_dropped", small_weights=True, sinks=14.0, dropout_p=0.99, dropout_seed=3, seq_len=80),
    Case("large_weights_most_dropped", dropout_p=0.99, dropout_seed=3, softmax_scale=3.0, seq_len=80),
)  # fmt: skip
"""Weights of about 2^-20 and 2^-24: subnormal in fp16."""

MILLION_KEY_CASES: tuple[Case, ...] = (
    Case("million_keys", **FEW),
    Case("million_keys_far_apart", softmax_scale=0.75, **FEW),
)
"""Weights of about 2^-20 on 2^20 keys, in the second case from 2^-6 down to 2^-46: few rows, for fast kernels."""

TERM_CASES: tuple[Case, ...] = (
    Case("sinks_and_window", seq_len=61, terms=term_masks.sinks_and_window, heads=4, kv_heads=2, sinks=True),
    Case("global_tokens", seq_len=61, terms=term_masks.global_tokens),
    Case("tree", seq_len=64, terms=term_masks.tree, batch=2, head_dim=64),
    Case("padded_sinks", seq_len=45, terms=term_masks.padded_sinks, batch=3, accumulate=True),
    Case("causal_blocks", seq_len=75, terms=term_masks.causal_blocks, heads=4, kv_heads=2),
    Case("blocks_and_window", seq_len=66, terms=term_masks.blocks_and_window, heads=4, kv_heads=1, accumulate=True),
    Case(
        "tree_over_visits", seq_len=72, terms=term_masks.tree, q_runs=_zigzag(1, 2, 18),
        ring_steps=(_zigzag(1, 2, 18), _zigzag(0, 2, 18)), batch=2,
    ),
    Case(
        "blocks_over_visits_everything", seq_len=72, terms=term_masks.blocks_and_window, q_runs=_striped(1, 2, 72),
        ring_steps=(_striped(1, 2, 72), _striped(0, 2, 72)), batch=2, heads=4, kv_heads=2, accumulate=True, **MANY,
    ),
    Case(
        "tree_not_plain", seq_len=64, terms=term_masks.tree, heads=4, kv_heads=2, softcap=3.0, alibi=True,
        key_bias=True, sinks=True,
    ),
)  # fmt: skip
"""Masks of several terms and of blocks, as small as CASES."""

LONG_TERM_CASES: tuple[Case, ...] = (
    Case(
        "long_sinks_and_window", seq_len=500, terms=lambda n: term_masks.sinks_and_window(n, left=150), heads=2,
        kv_heads=1, head_dim=128,
    ),
    Case("long_tree", seq_len=520, terms=term_masks.tree, heads=4, kv_heads=2, head_dim=64),
    Case(
        "long_blocks", seq_len=600, terms=lambda n: term_masks.causal_blocks(n, 128, 0.5), head_dim=128, heads=2,
        kv_heads=1,
    ),
    Case(
        "long_blocks_and_window", seq_len=600, terms=lambda n: term_masks.blocks_and_window(n, 64, 100),
        q_runs=_zigzag(0, 2, 150), ring_steps=(_zigzag(0, 2, 150), _zigzag(1, 2, 150)), head_dim=64, heads=4,
        kv_heads=2, accumulate=True, **NOT_PLAIN,
    ),
    Case(
        "long_blocks_256", seq_len=260, terms=lambda n: term_masks.causal_blocks(n, 32), head_dim=256, heads=1,
        kv_heads=1,
    ),
)  # fmt: skip
"""As LONG_CASES."""


def torch_serves(case: Case) -> bool:
    """Whether torch's own operators compute the score, the mask and the head dims of a case."""
    if case.terms is not None and case.make_mask().tables is not None:
        return False
    absent = case.bias is None and not (case.softcap or case.alibi or case.key_bias or case.dropout_p)
    return absent and case.v_head_dim in (None, case.head_dim)


def positions_of(runs: Runs) -> list[int]:
    """Global positions of the rows of a buffer, in row order."""
    positions = [start + stride * x for start, stride, length in runs for x in range(length)]
    assert positions == sorted(set(positions)), "positions ascend over a buffer"
    return positions


def _intervals(visible: Tensor) -> Tensor:
    """(lo, hi) of every row of a mask `b n m`, as `2 b n` int32: empty rows are placed so that neither decreases."""
    if not visible.numel():
        return torch.zeros(2, *visible.shape[:2], dtype=torch.int32)
    count, columns = visible.sum(-1), visible.shape[-1]
    lo, hi = visible.int().argmax(-1), columns - visible.flip(-1).int().argmax(-1)
    full = count > 0
    assert (hi - lo == count)[full].all(), "visibility is an interval"
    first = lo.where(full, columns).amin(1, keepdim=True) * full.any(1, keepdim=True)
    before = hi.where(full, -1).cummax(1).values
    empty_at = before.where(before >= 0, first)
    bounds = torch.stack((lo.where(full, empty_at), hi.where(full, empty_at))).int()
    assert (bounds.diff(dim=2) >= 0).all(), "bounds do not decrease"
    return bounds


def make_side(runs: Runs, mask: Tensor | TermMask, device: torch.device | str) -> RowMetadata:
    """The rows of one buffer under a mask whose rows are all positions of this side; a tensor `b n m` is one term."""
    mask = mask if isinstance(mask, TermMask) else TermMask(mask[None])
    positions = positions_of(runs)
    run_list: list[tuple[int, int, int, int]] = []
    offset = 0
    for start, stride, length in runs:
        run_list.append((offset, length, start, stride))
        offset += length
    lo, hi = torch.cat([_intervals(term) for term in mask.terms], 1)[:, :, positions]
    return RowMetadata(
        runs=torch.tensor(run_list, dtype=torch.int32, device=device).view(-1, 4),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        lo=lo.contiguous().to(device),
        hi=hi.contiguous().to(device),
        run_list=tuple(run_list),
        lo_host=lo.contiguous(),
        hi_host=hi.contiguous(),
        terms=mask.terms.shape[0],
        patterns=mask.patterns(device),
    )


@dataclass
class _Inputs:
    """The tensors of a case: leaves of the oracle and arguments of the kernels."""

    q: Tensor
    k: Tensor  # all keys of all visits, in visit order
    v: Tensor
    do: Tensor
    dlse: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None  # h
    key_bias: Tensor | None
    bias: Tensor | None  # b h s n, maybe expanded


def _make_inputs(case: Case, rows: int, keys: int, dtype: torch.dtype, device: torch.device | str) -> _Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    stat_dtype = accumulation_dtype(dtype)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def draw_rows(length: int, heads: int, dim: int) -> Tensor:
        if case.heads_first:
            return draw(case.batch, heads, length, dim, dtype=dtype).transpose(1, 2)
        return draw(case.batch, length, heads, dim, dtype=dtype)

    def draw_key_bias() -> Tensor | None:
        if not case.key_bias:
            return None
        x = draw(case.batch, keys, dtype=stat_dtype)
        if case.hidden_keys:
            x[:, : keys // 2] = float("-inf")
            x[-1] = float("-inf")
        return x

    def draw_sinks() -> Tensor | None:
        if not case.sinks:
            return None
        x = draw(case.heads, dtype=stat_dtype)
        return x if case.sinks is True else torch.full_like(x, case.sinks)

    v_head_dim = case.v_head_dim or case.head_dim
    kv_len = case.kv_len or case.seq_len
    bias = None
    if case.bias == "dense":
        bias = draw(case.batch, case.heads, rows, kv_len, dtype=stat_dtype)
    elif case.bias == "shared":
        bias = draw(1, 1, rows, kv_len, dtype=dtype).expand(case.batch, case.heads, rows, kv_len)
    return _Inputs(
        q=draw_rows(rows, case.heads, case.head_dim),
        k=draw_rows(keys, case.kv_heads, case.head_dim),
        v=draw_rows(keys, case.kv_heads, v_head_dim),
        # as large as scaled losses make it, where the gradients of small weights shall keep their digits
        do=draw_rows(rows, case.heads, v_head_dim) * (2**10 if case.small_weights else 1),
        dlse=draw(case.batch, case.heads, rows, dtype=stat_dtype),
        sinks=draw_sinks(),
        alibi_slopes=draw(case.heads, dtype=stat_dtype).abs() * 0.2 if case.alibi else None,
        key_bias=draw_key_bias(),
        bias=bias,
    )


def _oracle(case: Case, inputs: _Inputs, i: list[int], j: list[int], visible: Tensor, dtype: torch.dtype) -> dict:
    """Every output and gradient by plain autograd through dense attention in one dtype."""
    device = inputs.q.device
    stat_dtype = accumulation_dtype(dtype)
    half = dtype in (torch.float16, torch.bfloat16)

    def leaf(x: Tensor | None, to: torch.dtype) -> Tensor | None:
        return None if x is None else x.detach().to(to, copy=True).contiguous().requires_grad_()

    q, k, v = (leaf(x, dtype) for x in (inputs.q, inputs.k, inputs.v))
    assert q is not None
    assert k is not None
    assert v is not None
    slopes = inputs.alibi_slopes
    if slopes is not None:
        slopes = leaf(slopes.view(1, -1, 1).expand(case.batch, -1, len(i)), stat_dtype)
    key_bias = leaf(inputs.key_bias, stat_dtype)
    bias = None if inputs.bias is None else leaf(inputs.bias[..., j], inputs.bias.dtype if half else dtype)
    o, lse = dense_attention(
        q,
        k,
        v,
        visible[:, i][:, :, j].to(device),
        q_positions=torch.tensor(i, device=device, dtype=torch.int64),
        k_positions=torch.tensor(j, device=device, dtype=torch.int64),
        softmax_scale=case.softmax_scale,
        softcap=case.softcap,
        sinks=None if inputs.sinks is None else inputs.sinks.to(stat_dtype),
        alibi_slopes=slopes,
        key_bias=key_bias,
        bias=bias,
        dropout_p=case.dropout_p,
        dropout_seed=case.dropout_seed,
    )
    torch.autograd.backward([o, lse], [inputs.do.to(o.dtype), inputs.dlse.to(lse.dtype)])
    leaves = {"dq": q, "dk": k, "dv": v, "dalibi": slopes, "dkey_bias": key_bias, "dbias": bias}
    found = {"o": o.detach(), "lse": lse.detach()}
    for name, x in leaves.items():
        if x is not None:
            # gradients reach a user in the dtype of the inputs, those of fp32 biases and slopes too
            found[name] = (torch.zeros_like(x) if x.grad is None else x.grad).to(dtype)
    return found


def run_case(
    kernels: Callable[[CallShape], KernelSet], case: Case, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Runs forward over all visits, delta and backward, and asserts every output and gradient within the error budget.

    Asserts besides that a visit writes all it owns (buffers start as NaN) and nothing else: no o and lse before the
    last visit, no carry in the last one, no bias gradient outside the visit's own columns. Every
    carry on the way is the partial of the keys so far.

    Args:
        kernels: The kernel set.
        case: What to run.
        dtype: Of q, k, v and do.
        device: Where to run.
    """
    stat_dtype = accumulation_dtype(dtype)
    kv_len = case.kv_len or case.seq_len
    v_head_dim = case.v_head_dim or case.head_dim
    q_runs = ((0, 1, case.seq_len),) if case.q_runs is None else case.q_runs
    ring_steps = (((0, 1, kv_len),),) if case.ring_steps is None else case.ring_steps
    mask = case.make_mask()
    visible = mask.visible
    i = positions_of(q_runs)
    j = [position for runs in ring_steps for position in positions_of(runs)]
    assert len(set(j)) == len(j), "buffers of keys are disjoint"

    inputs = _make_inputs(case, len(i), len(j), dtype, device)
    exact = _oracle(case, inputs, i, j, visible, torch.float64)
    # no dtype is lower than fp64 and exact at that scale: the fp32 error is scaled to fp64's epsilon
    low_dtype = torch.float32 if dtype == torch.float64 or case.small_weights else dtype
    low = _oracle(case, inputs, i, j, visible, low_dtype)
    if case.small_weights and dtype != torch.float64:
        low = {name: x if name == "lse" else x.to(dtype) for name, x in low.items()}

    def carry_within_budget(step: int) -> None:
        """The carry is the partial of the keys so far, m in log2 units (the maximum itself is the kernel's choice)."""
        n = sum(widths[: step + 1])
        key_bias = None if inputs.key_bias is None else inputs.key_bias[:, :n]
        so_far = replace(inputs, k=inputs.k[:, :n], v=inputs.v[:, :n], key_bias=key_bias)
        wanted, yardstick = (_oracle(case, so_far, i, j[:n], visible, to) for to in (torch.float64, low_dtype))
        safe_m = carry.m.masked_fill(carry.l == 0, 0.0)
        found_lse = (math.log(2) * safe_m + carry.l.log()).masked_fill(carry.l == 0, -math.inf)
        found_o = carry.acc / carry.l.masked_fill(carry.l == 0, 1.0).transpose(1, 2)[..., None]
        for name, x in (("lse", found_lse), ("o", found_o)):
            if name == "lse" or not case.dropout_p:
                what = f"{case.name} {dtype}: {name} of the carry after visit {step}"
                assert_within_budget(x, wanted[name], yardstick[name], what, dtype)

    def within_budget(actual: Tensor, name: str, base: Tensor | None = None) -> None:
        shift = torch.zeros((), dtype=torch.float64, device=actual.device) if base is None else base.double()
        rounded = low[name] if base is None else (low[name].double() + shift).to(low[name].dtype)
        assert_within_budget(actual, exact[name] + shift, rounded, f"{case.name} {dtype}: {name}", dtype)

    rows = make_side(q_runs, mask, device)
    sides = [make_side(runs, mask.transpose(), device) for runs in ring_steps]
    widths = [side.positions.shape[0] for side in sides]
    buffers_k, buffers_v = inputs.k.split(widths, dim=1), inputs.v.split(widths, dim=1)
    scores = [
        Score(
            softmax_scale=case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale,
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            dropout_seed=case.dropout_seed,
            sinks=inputs.sinks,
            alibi_slopes=inputs.alibi_slopes,
            key_bias=None if inputs.key_bias is None else inputs.key_bias.split(widths, dim=1)[step].contiguous(),
            bias=inputs.bias,
        )
        for step in range(len(ring_steps))
    ]

    shape = CallShape.of(inputs.q, inputs.k, inputs.v, scores[0], deterministic=case.deterministic)
    bound = kernels(shape)

    def poisoned(*shape: int, dtype: torch.dtype = stat_dtype) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    b, h, s = case.batch, case.heads, len(i)
    o = poisoned(b, s, h, v_head_dim, dtype=dtype)
    lse = poisoned(b, h, s)
    carry = SoftmaxState(m=poisoned(b, h, s), l=poisoned(b, h, s), acc=poisoned(b, s, h, v_head_dim))
    for step, side in enumerate(sides):
        first, last = step == 0, step == len(sides) - 1
        before = [x.clone() for x in (carry.m, carry.l, carry.acc)]
        given = inputs.q, buffers_k[step], buffers_v[step], rows, side, scores[step], o, lse
        bound.forward(Step(*given, None if first and last else carry, first, last))
        if last:
            for old, new in zip(before, (carry.m, carry.l, carry.acc), strict=True):
                assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)), "the last visit leaves the carry alone"
        else:
            assert o.isnan().all(), "only the last visit writes o"
            assert lse.isnan().all(), "only the last visit writes lse"
            for x in (carry.m, carry.l, carry.acc):
                assert not x.isnan().any(), "a visit writes the whole carry"
            carry_within_budget(step)
    within_budget(o, "o")
    within_budget(lse, "lse")

    # one visit alone may make delta itself
    makes = len(sides) == 1
    delta = torch.full_like(lse, float("nan")) if makes else bound.delta(o, inputs.do, inputs.dlse)
    products = o.double() * inputs.do.double()
    expected = products.sum(-1).transpose(1, 2) - inputs.dlse.double()
    slack = torch.finfo(stat_dtype).eps * v_head_dim * (products.abs().sum(-1).transpose(1, 2) + inputs.dlse.abs())

    def delta_within_slack() -> None:
        assert delta.dtype == stat_dtype
        assert ((delta.double() - expected).abs() <= slack).all(), "delta is rowsum(o * do) - dlse"

    if not makes:
        delta_within_slack()

    # what gradients are added to: small beside them, so that rounding the sum stays within the band
    generator = torch.Generator().manual_seed(1)

    def target(*shape: int, accumulate: bool) -> Tensor:
        if not accumulate:
            return poisoned(*shape)
        return (torch.randn(*shape, generator=generator) * 0.25).to(device, stat_dtype)

    dq = target(b, s, h, case.head_dim, accumulate=case.accumulate)
    dalibi = target(b, h, s, accumulate=case.accumulate) if case.alibi else None
    dbias = torch.zeros(b, h, s, kv_len, dtype=stat_dtype, device=device) if case.bias else None
    bases: dict[str, Tensor] = {"dq": dq.clone()} if case.accumulate else {}
    if dalibi is not None and case.accumulate:
        bases["dalibi"] = dalibi.clone()
    found: dict[str, list[Tensor]] = {"dk": [], "dv": [], "dkey_bias": []}
    key_bases: dict[str, list[Tensor]] = {"dk": [], "dv": [], "dkey_bias": []}
    for step, side in enumerate(sides):
        t = widths[step]
        mine = {
            "dk": target(b, t, case.kv_heads, case.head_dim, accumulate=case.accumulate),
            "dv": target(b, t, case.kv_heads, v_head_dim, accumulate=case.accumulate),
        }
        if case.key_bias:
            mine["dkey_bias"] = target(b, t, accumulate=case.accumulate)
        for name, x in mine.items():
            key_bases[name].append(x.clone())
            found[name].append(x)
        outside = torch.ones(kv_len, dtype=torch.bool, device=device)
        outside[side.positions.long()] = False
        others = None if dbias is None else dbias[..., outside].clone()
        given = inputs.do, inputs.q, buffers_k[step], buffers_v[step], lse, delta, rows, side, scores[step]
        grads = Grads(
            dq=dq,
            dk=mine["dk"],
            dv=mine["dv"],
            dkey_bias=mine.get("dkey_bias"),
            dalibi=dalibi,
            dbias=dbias,
            accumulate_rows=case.accumulate or step > 0,
            accumulate_keys=case.accumulate,
        )
        bound.backward(BackwardStep(*given, *((o, inputs.dlse) if makes else (None, None))), grads)
        delta_within_slack()
        if dbias is not None and others is not None:
            assert torch.equal(dbias[..., outside], others), "a visit writes the bias gradient of its own keys only"

    within_budget(dq, "dq", bases.get("dq"))
    if dalibi is not None:
        within_budget(dalibi, "dalibi", bases.get("dalibi"))
    if dbias is not None:
        within_budget(dbias[..., j], "dbias")
    for name, parts in found.items():
        if parts:
            within_budget(torch.cat(parts, 1), name, torch.cat(key_bases[name], 1) if case.accumulate else None)
