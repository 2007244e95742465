"""Choosing a token for every row of logits in one Triton launch; `kernels.draw` says what is chosen.

Owns the kernel and its launcher. Runs on CUDA and ROCm devices, and on CPU tensors in the Triton interpreter.

Shape legend: a program owns a row, which it walks in tiles `RANGES LANES VEC`: the row is cut into RANGES ranges of `length`
logits, and a tile holds the next LANES * VEC of each. A lane is what one thread loads in one word, and has sums of its own.

Note [Threshold]
    Walks over the row, which is in L2, are what costs. The largest logit takes one, the sum of all weights another. What is kept
    is a bracket of logits [a, b): the weights >= a come to what is needed (Note [Nucleus]), those >= b do not. Each further walk
    sums the weights >= a pivot between them, until no more than SLOTS tokens are in the bracket. Pivots come from a sample of
    the row, SAMPLE tokens apart from each other alike: where it would have the threshold, somewhat lower and somewhat higher in
    turn. It may be wrong about the row, which costs walks, but nothing else: what a walk sums is exact. After GUESSES walks the
    bracket is halved, as an interval of numbers and as a list of numbers in turn, so that the search ends whatever the row holds.
    Then one walk writes down which tokens are in the bracket, and the program bisects among these in registers.

    Logits are compared as numbers and halved as integers in the same order (`_order`), of which there are 2^16 for bf16.

    Example: 8 logits 0 .. 7, top_p 0.9, temperature 1: the weights are 2^40 e^-7 .. 2^40, their sum 1.58 * 2^40; from 5 on they
    come to 0.95 of it, from 6 on to 0.86, so the threshold is 5.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (powers of two may be constants of kernels, says Triton)

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.record_triton import Tape, recorded

RANGES = 16
"""Ranges of a row: as many as a program has warps, so that a warp reads whole lines."""
TILE = 8192
"""Logits of a tile: two words of 16 bytes a thread, beside the two that are on their way."""
SLOTS = 8192
"""Tokens that a program holds in registers, of 16 each a thread."""
SAMPLE = 4096
"""Tokens from whom a threshold is guessed."""
WARPS = 16
_WORD = 16  # bytes that a thread loads at once


@triton.jit
def _load(row, i, length, vocab, RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Tile i: RANGES LANES VEC; -inf where the row has nothing, which is not asked for either."""
    c = i * (LANES * VEC) + (tl.arange(0, LANES) * VEC)[:, None] + tl.arange(0, VEC)[None, :]
    at = (tl.arange(0, RANGES) * length)[:, None, None] + c[None, :, :]
    return tl.load(row + at, mask=(c < length)[None, :, :] & (at < vocab), other=float("-inf"))


@triton.jit
def _weigh(x, largest, scale):
    """Note [Weights]; the product with 2^40 is exact, fused with the sum or not."""
    return (tl.exp2((x.to(tl.float32) - largest) * scale) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def _order(x, GRAIN: tl.constexpr):
    """A number's place among all: int64. The GRAIN low bits, which no number of the dtype has, are dropped."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> GRAIN).to(tl.int64)


@triton.jit
def _number(order, GRAIN: tl.constexpr):
    """The number in a place: fp32."""
    high = (order << GRAIN).to(tl.int32)
    low: tl.constexpr = 0x7FFFFFFF >> GRAIN << GRAIN
    return tl.where(order < 0, high ^ low, high).to(tl.float32, bitcast=True)


@triton.jit
def _survey(row, tiles, length, vocab, RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """The largest logit (a NaN counts as inf), the first token that has it, and the smallest that is no -inf."""
    best = tl.full([RANGES, LANES], float("-inf"), tl.float32)
    least = tl.full([RANGES, LANES], float("inf"), tl.float32)
    when = tl.zeros([RANGES, LANES], tl.int32)
    ahead = _load(row, 0, length, vocab, RANGES, LANES, VEC)
    for i in range(tiles):
        x = ahead.to(tl.float32)
        ahead = _load(row, i + 1, length, vocab, RANGES, LANES, VEC)
        x = tl.where(x == x, x, float("inf"))
        top = tl.max(x, axis=2)
        when = tl.where(top > best, i, when)
        best = tl.maximum(best, top)
        least = tl.minimum(least, tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=2))
    largest = tl.max(tl.max(best, axis=1), axis=0)
    # the first word that holds it, then the first in this word
    words = (tl.arange(0, RANGES) * length)[:, None] + when * (LANES * VEC) + (tl.arange(0, LANES) * VEC)[None, :]
    word = tl.min(tl.min(tl.where(best == largest, words, 2147483647), axis=1), axis=0)
    at = word + tl.arange(0, VEC)
    x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    token = tl.min(tl.where(x == largest, at, 2147483647), axis=0)
    return largest, token, tl.min(tl.min(least, axis=1), axis=0)


@triton.jit
def _sum_from(
    row, pivot, largest, scale, tiles, length, vocab, RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr
):
    """What the weights >= pivot come to, and how many they are, by lane: int64 and int32."""
    mass = tl.zeros([RANGES, LANES], tl.int64)
    count = tl.zeros([RANGES, LANES], tl.int32)
    ahead = _load(row, 0, length, vocab, RANGES, LANES, VEC)
    for i in range(tiles):
        x = ahead.to(tl.float32)
        ahead = _load(row, i + 1, length, vocab, RANGES, LANES, VEC)
        inside = x >= pivot
        mass += tl.sum(tl.where(inside, _weigh(x, largest, scale), 0), axis=2)
        count += tl.sum(inside.to(tl.int32), axis=2)
    return mass, count


@triton.jit
def _write_down(
    row, out, low, high, counts, tiles, length, vocab, RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr
):
    """Writes which tokens are in [low, high), those of a lane together; counts: how many these are."""
    flat = tl.reshape(counts, [RANGES * LANES])
    base = tl.reshape(tl.cumsum(flat, axis=0) - flat, [RANGES, LANES])
    ahead = _load(row, 0, length, vocab, RANGES, LANES, VEC)
    for i in range(tiles):
        x = ahead.to(tl.float32)
        ahead = _load(row, i + 1, length, vocab, RANGES, LANES, VEC)
        inside = (x >= low) & (x < high)
        ones = inside.to(tl.int32)
        c = i * (LANES * VEC) + (tl.arange(0, LANES) * VEC)[:, None] + tl.arange(0, VEC)[None, :]
        token = (tl.arange(0, RANGES) * length)[:, None, None] + c[None, :, :]
        tl.store(out + (base[:, :, None] + tl.cumsum(ones, axis=2) - 1), token, mask=inside)
        base += tl.sum(ones, axis=2)


@triton.jit
def _guess(x, weight, low, high, share, side):
    """Where a sample has so much of its weight in [low, high) from there on, give or take two standard errors."""
    inside = (x >= low) & (x < high)
    weight = tl.where(inside, weight, 0.0)
    total = tl.sum(weight, axis=0)
    error = tl.sqrt(share * (1.0 - share) * tl.sum(weight * weight, axis=0))
    goal = share * total + side * 2.0 * error
    below, above = low, high
    for _ in range(10):
        middle = below + 0.5 * (above - below)
        enough = tl.sum(tl.where(x >= middle, weight, 0.0), axis=0) >= goal
        below = tl.where(enough, middle, below)
        above = tl.where(enough, above, middle)
    return tl.where(total > 0.0, tl.where(side > 0.0, below, above), below + 0.5 * (high - low))


@triton.jit
def _kept(row, at, end, threshold, largest, scale, SPAN: tl.constexpr):
    """The weights of the next SPAN tokens of a range that are in."""
    token = at + tl.arange(0, SPAN)
    x = tl.load(row + token, mask=token < end, other=float("-inf")).to(tl.float32)
    return tl.where(x >= threshold, _weigh(x, largest, scale), 0)


@triton.jit
def _draw_kernel(
    logits, how, tokens, slots, row_stride, tiles, length, vocab,
    RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, SLOTS: tl.constexpr, SAMPLE: tl.constexpr,
    SPAN: tl.constexpr, GRAIN: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """A program owns a row."""
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * row_stride
    largest, token, least = _survey(row, tiles, length, vocab, RANGES, LANES, VEC)
    finite = (largest > float("-inf")) & (largest < float("inf"))
    if DRAWN:
        temperature = tl.load(how + 3 * b)
        if finite & (temperature > 0.0):
            scale = (1.4426950408889634 / temperature).to(tl.float32)
            top_p = tl.load(how + 3 * b + 1)
            # the bracket [a, b), as places: all that has a weight is above a
            a = _order(tl.maximum(least, largest - 42.0 / scale), GRAIN)
            a_mass, a_count = _sum_from(
                row, _number(a, GRAIN), largest, scale, tiles, length, vocab, RANGES, LANES, VEC
            )
            b_mass, b_count = tl.zeros([RANGES, LANES], tl.int64), tl.zeros([RANGES, LANES], tl.int32)
            end = _order(largest, GRAIN) + 1
            a_sum = tl.sum(tl.sum(a_mass, axis=1), axis=0)
            b_sum = a_sum * 0
            between = tl.sum(tl.sum(a_count, axis=1), axis=0)
            need = tl.ceil(top_p * a_sum.to(tl.float64)).to(tl.int64)
            need = tl.minimum(tl.maximum(need, 1), a_sum)
            threshold = _number(a, GRAIN)
            kept_x = tl.full([SLOTS], float("-inf"), tl.float32)
            kept_at = tl.zeros([SLOTS], tl.int32)
            if top_p < 1.0:
                some = tl.arange(0, SAMPLE).to(tl.int64) * vocab // SAMPLE
                sample = tl.load(row + some).to(tl.float32)
                sample_weight = tl.exp2((sample - largest) * scale)
                walks = 0
                while (end - a > 1) & (between > SLOTS):
                    low, high = _number(a, GRAIN), _number(end, GRAIN)
                    if walks < 6:
                        share = ((need - b_sum).to(tl.float32)) / ((a_sum - b_sum).to(tl.float32))
                        side = tl.where(walks % 2 == 0, 1.0, -1.0)
                        pivot = _order(_guess(sample, sample_weight, low, high, share, side), GRAIN)
                    else:
                        pivot = tl.where(walks % 2 == 0, a + (end - a) // 2, _order(low + 0.5 * (high - low), GRAIN))
                    pivot = tl.minimum(tl.maximum(pivot, a + 1), end - 1)
                    mass, count = _sum_from(
                        row, _number(pivot, GRAIN), largest, scale, tiles, length, vocab, RANGES, LANES, VEC
                    )
                    total = tl.sum(tl.sum(mass, axis=1), axis=0)
                    enough = total >= need
                    a, a_sum = tl.where(enough, pivot, a), tl.where(enough, total, a_sum)
                    a_mass, a_count = tl.where(enough, mass, a_mass), tl.where(enough, count, a_count)
                    end, b_sum = tl.where(enough, end, pivot), tl.where(enough, b_sum, total)
                    b_mass, b_count = tl.where(enough, b_mass, mass), tl.where(enough, b_count, count)
                    between = tl.sum(tl.sum(a_count - b_count, axis=1), axis=0)
                    walks += 1
                threshold = _number(a, GRAIN)
                if end - a > 1:
                    mine = slots + b * SLOTS
                    high = _number(end, GRAIN)
                    _write_down(
                        row, mine, threshold, high, a_count - b_count, tiles, length, vocab, RANGES, LANES, VEC
                    )
                    tl.debug_barrier()
                    slot = tl.arange(0, SLOTS)
                    there = slot < between
                    kept_at = tl.load(mine + slot, mask=there, other=0, cache_modifier=".cg")
                    kept_x = tl.load(row + kept_at, mask=there, other=float("-inf")).to(tl.float32)
                    kept_weight = _weigh(kept_x, largest, scale)
                    while end - a > 1:
                        middle = a + (end - a) // 2
                        total = b_sum + tl.sum(tl.where(kept_x >= _number(middle, GRAIN), kept_weight, 0), axis=0)
                        enough = total >= need
                        a = tl.where(enough, middle, a)
                        end = tl.where(enough, end, middle)
                    threshold = _number(a, GRAIN)
                    # what is in: all from the end of the bracket on, and of those that were in the bracket some
                    a_mass = b_mass
            in_slots = tl.where(kept_x >= threshold, _weigh(kept_x, largest, scale), 0)
            in_ranges = tl.sum(a_mass, axis=1)
            kept = tl.sum(in_ranges, axis=0) + tl.sum(in_slots, axis=0)
            goal = (tl.load(how + 3 * b + 2) * kept.to(tl.float64)).to(tl.int64)
            goal = tl.minimum(goal, kept - 1)
            # the range, then the span, then the token in which the sum passes the goal
            ranges = tl.arange(0, RANGES)
            r = 0
            before = kept * 0
            step = RANGES // 2
            while step > 0:
                sums = tl.sum(tl.where(ranges < r + step, in_ranges, 0), axis=0)
                sums += tl.sum(tl.where(kept_at < (r + step) * length, in_slots, 0), axis=0)
                before = tl.where(sums <= goal, sums, before)
                r = tl.where(sums <= goal, r + step, r)
                step = step // 2
            goal -= before
            first = r * length
            stop = tl.minimum(first + length, vocab)
            weights = _kept(row, first, stop, threshold, largest, scale, SPAN)
            total = tl.sum(weights, axis=0)
            while (goal >= total) & (first + SPAN < stop):
                goal -= total
                first += SPAN
                weights = _kept(row, first, stop, threshold, largest, scale, SPAN)
                total = tl.sum(weights, axis=0)
            token = first + tl.sum((tl.cumsum(weights, axis=0) <= goal).to(tl.int32), axis=0)
    tl.store(tokens + b, tl.where(finite, token, -1).to(tl.int64))


@dataclass(frozen=True)
class Shape:
    """How a row is walked.

    Attributes:
        length: Logits of a range, a multiple of 16.
        lanes: Words of a range in a tile.
        vec: Logits of a word.
        slots: Tokens that are held in registers.
        sample: Tokens from whom a threshold is guessed.
        span: Tokens among whom the drawn one is found at once.
        warps: Of the program.
    """

    length: int
    lanes: int
    vec: int
    slots: int
    sample: int
    span: int
    warps: int

    @property
    def tiles(self) -> int:
        """Of a row."""
        return -(-self.length // (self.lanes * self.vec))


@functools.lru_cache(maxsize=64)
def shape_of(vocab: int, itemsize: int, most: int = TILE) -> Shape:
    """How rows are walked.

    Args:
        vocab: Logits of a row.
        itemsize: Bytes of a logit.
        most: Logits of a tile, and tokens in registers, at most.

    Example:
        >>> shape_of(128256, 2)
        Shape(length=8016, lanes=64, vec=8, slots=8192, sample=4096, span=8192, warps=16)
    """
    vec = _WORD // itemsize
    length = -(-vocab // (RANGES * 16)) * 16
    lanes = min(triton.next_power_of_2(-(-length // vec)), most // (RANGES * vec))
    slots = min(most, SLOTS, triton.next_power_of_2(vocab))
    warps = max(1, min(WARPS, RANGES * lanes * vec // 512))
    span = min(triton.next_power_of_2(length), most)
    return Shape(length, lanes, vec, slots, max(1, min(SAMPLE, slots // 2)), span, warps)


GRAINS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of an fp32 number that a number of the dtype does not have."""


def draw(logits: Tensor, how: Tensor | None, shape: Shape | None = None) -> Tensor:
    """As `kernels.draw.draw`; `shape` overrides `shape_of`."""
    if logits.dtype not in GRAINS:
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _launch(logits, how, tokens, shape or shape_of(logits.shape[1], logits.element_size()))
    return tokens


@recorded
def _launch(tape: Tape, logits: Tensor, how: Tensor | None, tokens: Tensor, shape: Shape) -> None:
    b, vocab = logits.shape
    slots = None if how is None else tape.room(b, shape.slots, dtype=torch.int32)
    tape.launch(
        _draw_kernel,
        (b,),
        (logits, how, tokens, slots, logits.stride(0), shape.tiles, shape.length, vocab),
        {
            "RANGES": RANGES, "LANES": shape.lanes, "VEC": shape.vec, "SLOTS": shape.slots, "SAMPLE": shape.sample,
            "SPAN": shape.span, "GRAIN": GRAINS[logits.dtype], "DRAWN": how is not None,
        },
        num_warps=shape.warps,
    )  # fmt: skip
