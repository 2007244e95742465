"""Choosing a token for every row of logits in one Triton launch; `kernels.draw` says what is chosen.

Owns the kernel and its launcher. Runs on CUDA and ROCm devices, and on CPU tensors in the Triton interpreter.

Shape legend: a program owns a row, which it walks in tiles `RANGES LANES VEC`: the row is cut into RANGES ranges of `length`
logits, and a tile holds the next LANES * VEC of each. A lane is what one thread loads in one word, and has sums of its own.

Note [Threshold]
    Walks over the row, which is in L2, are what costs. The largest logit takes one, the sum of all weights another. What is kept
    is a bracket of logits [a, b): the weights >= a come to what is needed (Note [Nucleus]), those >= b do not. Each further walk
    sums the weights >= a pivot between them, until no more than SLOTS tokens are in the bracket. Pivots come from SAMPLE tokens,
    evenly spaced: where these would have the threshold, somewhat lower and somewhat higher in turn. They may be wrong about the
    row, which costs walks, but nothing else: what a walk sums is exact. After GUESSES walks the bracket is halved, as a list of
    numbers and as an interval in turn, so that the search ends whatever the row holds. Then one walk writes down which tokens
    are in the bracket, and the program bisects among these in registers.

    Logits are compared as numbers, and the bracket is kept as places in their order (`_order`), of which bf16 has 2^16.

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

from ringattn.kernels import draw as definition
from ringattn.kernels.runtime.record_triton import Tape, recorded

RANGES = 16
"""Ranges of a row: a token is found in one of them, not in the whole row."""
TILE = 8192
"""Logits of a tile: two words of 16 bytes a thread of bf16, beside the two that are on their way."""
SLOTS = 8192
"""Tokens that a program holds in registers, of 16 each a thread."""
SAMPLE = 4096
"""Tokens from whom a threshold is guessed."""
WARPS = 16
_WORD = 16  # bytes that a thread loads at once
ONE = tl.constexpr(definition.ONE)
LEAST_SCALE, MOST_SCALE = tl.constexpr(definition.SCALES[0]), tl.constexpr(definition.SCALES[1])
GUESSES = tl.constexpr(6)  # rows of models need one to four


@triton.jit
def _load(row, i, length, vocab, RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Tile i: RANGES LANES VEC; -inf where the row has nothing, which is not asked for either."""
    c = i * (LANES * VEC) + (tl.arange(0, LANES) * VEC)[:, None] + tl.arange(0, VEC)[None, :]
    at = (tl.arange(0, RANGES) * length)[:, None, None] + c[None, :, :]
    return tl.load(row + at, mask=(c < length)[None, :, :] & (at < vocab), other=float("-inf"))


@triton.jit
def _weigh(x, largest, scale):
    """Note [Weights]; the product with 2^40 is exact, fused with the sum or not."""
    return (tl.exp2((x.to(tl.float32) - largest) * scale) * ONE + 0.5).to(tl.int64)


@triton.jit
def _order(x, GRAIN: tl.constexpr):
    """A number's place among all: int64. The GRAIN low bits, which no number of the dtype has, are dropped."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> GRAIN).to(tl.int64)


@triton.jit
def _number(order, GRAIN: tl.constexpr):
    """The number in a place: fp32."""
    size = tl.where(order < 0, -1 - order, order)
    x = (size << GRAIN).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(order < 0, -x, x)


@triton.jit
def _survey(
    row, tiles, length, vocab, RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, LEAST: tl.constexpr
):
    """The largest logit (a NaN counts as inf), the first token that has it, and with LEAST the smallest that is no -inf."""
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
        if LEAST:
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
        # a logit of -inf weighs nothing
        mass += tl.sum(_weigh(tl.where(inside, x, float("-inf")), largest, scale), axis=2)
        count += tl.sum(inside.to(tl.int32), axis=2)
    return mass, count


@triton.jit
def _store_each(out, at, x, mask, RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Stores numbers of a tile one by one, each from the thread that has it: what lies where is not known before."""
    if VEC == 1:
        here = tl.reshape(mask, [RANGES, LANES])
        tl.store(out + tl.reshape(at, [RANGES, LANES]), tl.reshape(x, [RANGES, LANES]), mask=here)
    else:
        HALF: tl.constexpr = VEC // 2
        at_even, at_odd = tl.split(tl.reshape(at, [RANGES, LANES, HALF, 2]))
        x_even, x_odd = tl.split(tl.reshape(x, [RANGES, LANES, HALF, 2]))
        mask_even, mask_odd = tl.split(tl.reshape(mask, [RANGES, LANES, HALF, 2]))
        _store_each(out, at_even, x_even, mask_even, RANGES, LANES, HALF)
        _store_each(out, at_odd, x_odd, mask_odd, RANGES, LANES, HALF)


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
        at = base[:, :, None] + tl.cumsum(ones, axis=2) - 1
        _store_each(out, at, token, inside, RANGES, LANES, VEC)
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
    found = tl.where(side > 0.0, below, above)
    # the sample may have nothing there, or the error be larger than the share
    return tl.where((total > 0.0) & (found > low) & (found < high), found, low + 0.5 * (high - low))


@triton.jit
def _span(row, first, end, threshold, largest, scale, SPAN: tl.constexpr):
    """The weights of the next SPAN tokens of a range that are in."""
    token = first + tl.arange(0, SPAN)
    x = tl.load(row + token, mask=token < end, other=float("-inf")).to(tl.float32)
    return _weigh(tl.where(x >= threshold, x, float("-inf")), largest, scale)


@triton.jit
def _nucleus(
    row, mine, need, a, mass, count, a_sum, largest, scale, tiles, length, vocab,
    RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, SLOTS: tl.constexpr, SAMPLE: tl.constexpr,
    GRAIN: tl.constexpr,
):  # fmt: skip
    """The threshold of a row whose weights >= a come to a_sum, by lane mass of count tokens (Note [Threshold]).

    Returns:
        The threshold; the weights that are certainly in, by lane; and the other tokens that may be in and their logits, SLOTS.
    """
    end = _order(largest, GRAIN) + 1
    end_mass, end_count = tl.zeros([RANGES, LANES], tl.int64), tl.zeros([RANGES, LANES], tl.int32)
    end_sum = a_sum * 0
    between = tl.sum(tl.sum(count, axis=1), axis=0)
    sample = tl.load(row + tl.arange(0, SAMPLE).to(tl.int64) * vocab // SAMPLE).to(tl.float32)
    weights = tl.exp2((sample - largest) * scale)
    walks = 0
    while (end - a > 1) & (between > SLOTS):
        low, high = _number(a, GRAIN), _number(end, GRAIN)
        if walks < GUESSES:
            share = (need - end_sum).to(tl.float32) / (a_sum - end_sum).to(tl.float32)
            side = tl.where(walks % 2 == 0, 1.0, -1.0)
            pivot = _order(_guess(sample, weights, low, high, share, side), GRAIN)
        else:
            pivot = tl.where(walks % 2 == 0, a + (end - a) // 2, _order(low + 0.5 * (high - low), GRAIN))
        pivot = tl.minimum(tl.maximum(pivot, a + 1), end - 1)
        new_mass, new_count = _sum_from(
            row, _number(pivot, GRAIN), largest, scale, tiles, length, vocab, RANGES, LANES, VEC
        )
        new_sum = tl.sum(tl.sum(new_mass, axis=1), axis=0)
        enough = new_sum >= need
        a, end = tl.where(enough, pivot, a), tl.where(enough, end, pivot)
        a_sum, end_sum = tl.where(enough, new_sum, a_sum), tl.where(enough, end_sum, new_sum)
        mass, end_mass = tl.where(enough, new_mass, mass), tl.where(enough, end_mass, new_mass)
        count, end_count = tl.where(enough, new_count, count), tl.where(enough, end_count, new_count)
        between = tl.sum(tl.sum(count - end_count, axis=1), axis=0)
        walks += 1
    open_x = tl.full([SLOTS], float("-inf"), tl.float32)
    open_token = tl.zeros([SLOTS], tl.int32)
    if end - a > 1:
        # the end may still be the first: next to the largest logit, which two zeros, or one that is flushed, are not
        low, high = _number(a, GRAIN), tl.where(end_sum > 0, _number(end, GRAIN), float("inf"))
        _write_down(row, mine, low, high, count - end_count, tiles, length, vocab, RANGES, LANES, VEC)
        tl.debug_barrier()  # what other threads have written is read
        slot = tl.arange(0, SLOTS)
        open_token = tl.load(mine + slot, mask=slot < between, other=0, cache_modifier=".cg")
        open_x = tl.load(row + open_token, mask=slot < between, other=float("-inf")).to(tl.float32)
        open_weight = _weigh(open_x, largest, scale)
        while end - a > 1:
            middle = a + (end - a) // 2
            above = tl.sum(tl.where(open_x >= _number(middle, GRAIN), open_weight, 0), axis=0)
            enough = end_sum + above >= need
            a, end = tl.where(enough, middle, a), tl.where(enough, end, middle)
        mass = end_mass
    return _number(a, GRAIN), mass, open_token, open_x


@triton.jit
def _find(
    row, number, threshold, mass, open_token, open_x, largest, scale, length, vocab,
    RANGES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The token on which a number in [0, 1) falls, among those >= threshold; arguments as `_nucleus` returns them."""
    open_weight = _weigh(tl.where(open_x >= threshold, open_x, float("-inf")), largest, scale)
    in_ranges = tl.sum(mass, axis=1)
    kept = tl.sum(in_ranges, axis=0) + tl.sum(open_weight, axis=0)
    goal = tl.minimum((number * kept.to(tl.float64)).to(tl.int64), kept - 1)
    # the last range before which there is no more than the goal, by bisection
    r, step, before = 0, RANGES // 2, kept * 0
    while step > 0:
        sums = tl.sum(tl.where(tl.arange(0, RANGES) < r + step, in_ranges, 0), axis=0)
        sums += tl.sum(tl.where(open_token < (r + step) * length, open_weight, 0), axis=0)
        before = tl.where(sums <= goal, sums, before)
        r = tl.where(sums <= goal, r + step, r)
        step = step // 2
    goal -= before
    first, end = r * length, tl.minimum((r + 1) * length, vocab)
    weights = _span(row, first, end, threshold, largest, scale, SPAN)
    total = tl.sum(weights, axis=0)
    while (goal >= total) & (first + SPAN < end):
        goal -= total
        first += SPAN
        weights = _span(row, first, end, threshold, largest, scale, SPAN)
        total = tl.sum(weights, axis=0)
    return first + tl.sum((tl.cumsum(weights, axis=0) <= goal).to(tl.int32), axis=0)


@triton.jit
def _draw_kernel(
    logits, how, tokens, lse, slots, row_stride, tiles, length, vocab,
    RANGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, SLOTS: tl.constexpr, SAMPLE: tl.constexpr,
    SPAN: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """A program owns a row."""
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * row_stride
    largest, token, least = _survey(row, tiles, length, vocab, RANGES, LANES, VEC, how is not None)
    finite = (largest > float("-inf")) & (largest < float("inf"))
    if lse is not None:
        every, _ = _sum_from(row, float("-inf"), largest, 1.4426950408889634, tiles, length, vocab, RANGES, LANES, VEC)
        tl.store(lse + b, largest + tl.log(tl.sum(tl.sum(every, axis=1), axis=0).to(tl.float32) / ONE))
    if how is not None:
        temperature = tl.load(how + 3 * b)
        if finite & (temperature > 0.0):
            top_p = tl.load(how + 3 * b + 1)
            scale = tl.minimum(tl.maximum((1.4426950408889634 / temperature).to(tl.float32), LEAST_SCALE), MOST_SCALE)
            # all that has a weight is from here on
            a = _order(tl.maximum(least, largest - 42.0 / scale), GRAIN)
            threshold = _number(a, GRAIN)
            mass, count = _sum_from(row, threshold, largest, scale, tiles, length, vocab, RANGES, LANES, VEC)
            open_x = tl.full([SLOTS], float("-inf"), tl.float32)
            open_token = tl.zeros([SLOTS], tl.int32)
            if top_p < 1.0:
                total = tl.sum(tl.sum(mass, axis=1), axis=0)
                need = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
                need = tl.minimum(tl.maximum(need, 1), total)
                threshold, mass, open_token, open_x = _nucleus(
                    row, slots + b * SLOTS, need, a, mass, count, total, largest, scale, tiles, length, vocab,
                    RANGES, LANES, VEC, SLOTS, SAMPLE, GRAIN,
                )  # fmt: skip
            number = tl.load(how + 3 * b + 2)
            token = _find(
                row, number, threshold, mass, open_token, open_x, largest, scale, length, vocab, RANGES, SPAN
            )  # fmt: skip
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


def draw(logits: Tensor, how: Tensor | None, lse: Tensor | None = None, shape: Shape | None = None) -> Tensor:
    """As `kernels.draw.draw`; `shape` overrides `shape_of`."""
    assert how is None or (how.is_contiguous() and how.dtype == torch.float64), (
        "three fp64 numbers of each row, row by row"
    )
    if logits.dtype not in GRAINS:
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _launch(logits, how, tokens, lse, shape or shape_of(logits.shape[1], logits.element_size()))
    return tokens


@recorded
def _launch(tape: Tape, logits: Tensor, how: Tensor | None, tokens: Tensor, lse: Tensor | None, shape: Shape) -> None:
    b, vocab = logits.shape
    slots = None if how is None else tape.room(b, shape.slots, dtype=torch.int32)
    tape.launch(
        _draw_kernel,
        (b,),
        (logits, how, tokens, lse, slots, logits.stride(0), shape.tiles, shape.length, vocab),
        {
            "RANGES": RANGES, "LANES": shape.lanes, "VEC": shape.vec, "SLOTS": shape.slots, "SAMPLE": shape.sample,
            "SPAN": shape.span, "GRAIN": GRAINS[logits.dtype],
        },
        num_warps=shape.warps,
    )  # fmt: skip
