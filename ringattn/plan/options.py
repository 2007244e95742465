"""Conversion of options as users give them to Python's own values; an option of another kind is refused by name.

Owns the kinds: flags, numbers, integers, words, and the options of a mask. Their range is checked by masks and calls.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor


class MaskOptions(TypedDict, total=False):
    """Short forms of a mask as users give them, as in `ring_attention`."""

    causal: bool
    window: int | Sequence[int | None] | None
    prefix_len: int
    chunk_len: int | None
    lengths: Sequence[Sequence[int]] | Tensor | None


class ScoreOptions(TypedDict, total=False):
    """Options of the score, as in `ring_attention`."""

    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    key_bias: Tensor | None
    bias: Tensor | None
    dropout_p: float


def as_integer(number: Any) -> int | None:
    """Return an integer of any type as Python's own; None for anything else, flags and whole floats included."""
    if type(number) is int:
        return operator.index(number)  # of a symbol in a trace: its value, which the text of a call needs
    if isinstance(number, (bool, float)) or not hasattr(type(number), "__index__"):
        return None
    try:
        return operator.index(number)
    except TypeError:  # tensors and arrays have the method, whatever they hold
        return None


def resolve_integer(name: str, number: Any, kind: str = "an integer") -> int:
    """Return an integer as Python's own; `kind` is the name of the whole option in the error."""
    found = as_integer(number)
    if found is None:
        raise TypeError(f"{name} must be {kind}, got {number!r}; convert it first")
    return found


def resolve_integers(name: str, numbers: Any) -> list[int]:
    """Return the integers of a sequence or tensor as Python's own."""
    try:
        found = list(numbers)
    except TypeError:
        raise TypeError(f"{name} must be a list of integers, got {numbers!r}; put one into a list") from None
    if set(map(type, found)) <= {int}:
        return found
    return [resolve_integer(name, number, "of integers") for number in found]


def resolve_size(name: str, number: Any, most: int | None = None) -> int:
    """Return an integer of at least 1, and at most `most`, as Python's own."""
    found = resolve_integer(name, number)
    if found < 1 or (most is not None and found > most):
        wanted = "at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"{name} must be {wanted}, got {number}; give a number that fits")
    return found


def resolve_flag(name: str, flag: Any) -> bool:
    """Return a flag as a bool; words are refused, because "no" would count as true."""
    if type(flag) is bool:
        return flag
    try:
        known = flag in (True, False)
    except (RuntimeError, ValueError):  # several elements have no truth value
        known = False
    if not known:
        raise ValueError(f"{name} must be True or False, got {flag!r}; convert it first")
    return bool(flag)


def resolve_real(name: str, number: Any) -> float:
    """Return a finite number as a float; a tensor that requires a gradient is refused, because it would not get one."""
    if type(number) is not float:
        if isinstance(number, Tensor) and number.requires_grad:
            raise ValueError(
                f"{name} must be a number, got a tensor that requires a gradient, which it would not get; "
                "pass its item(), or multiply q by a scale that is learned"
            )
        try:
            if isinstance(number, (bool, str)):
                raise TypeError("words and flags are no numbers")
            number = float(number)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} must be a number, got {number!r}; convert it first") from None
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # imports sympy

        number = guard_scalar(number)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def resolve_word(name: str, word: Any, choices: tuple[str, ...]) -> str:
    """Return one of some words."""
    if not isinstance(word, str) or word not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {word!r}; use one of these")
    return choices[choices.index(word)]


def resolve_width(name: str, number: Any, given: Any = None) -> int:
    """Return an integer of a mask; `given` is shown in its place where a sequence holds it."""
    found = as_integer(number)
    if found is None:
        raise ValueError(f"{name} must be of integers, got {number if given is None else given!r}; convert it first")
    return found


def resolve_window(window: int | Sequence[int | None] | None) -> tuple[int | None, int | None] | None:
    """Return (left, right) of a window."""
    if window is None:
        return None
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(f"window must be (left, right), got {window}; None on a side means unbounded")
        left, right = (None if side is None else resolve_width("window", side, window) for side in window)
        return left, right
    if as_integer(window) is None:
        raise ValueError(f"window must be an int, (left, right) or None, got {window!r}; convert it first")
    width = resolve_width("window", window)
    if width < 1:
        raise ValueError(f"window must be at least 1, got {window}; an int counts the row's own key, None is no window")
    return width - 1, 0


def resolve_chunk_len(chunk_len: int | None) -> int | None:
    """Return the length of chunks."""
    return None if chunk_len is None else resolve_width("chunk_len", chunk_len)


def resolve_lengths(lengths: Sequence[Sequence[int]] | Tensor | None) -> tuple[tuple[int, int], ...] | None:
    """Return (start, stop) of each batch element."""
    if lengths is None:
        return None
    rows = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    try:
        pairs = [(start, stop) for start, stop in rows]
    except (TypeError, ValueError):
        raise ValueError(
            f"lengths must have one (start, stop) per batch element, got {rows!r}; (0, n) are the first n tokens"
        ) from None
    kind = "of integers"
    return tuple((resolve_integer("lengths", a, kind), resolve_integer("lengths", b, kind)) for a, b in pairs)


def resolve_documents(documents: Sequence[int] | Tensor | None) -> tuple[int, ...] | None:
    """Return the boundaries of documents."""
    if documents is None:
        return None
    try:
        boundaries = tuple(documents.tolist() if isinstance(documents, Tensor) else documents)
    except TypeError:
        raise TypeError(
            f"documents must be boundaries (0, ..., seq_len), got {documents!r}; pass cumulative lengths"
        ) from None
    return tuple(resolve_integer("documents", boundary, "of integers") for boundary in boundaries)


def resolve_segments(segments: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the lengths of segments."""
    if segments is None:
        return None
    if not isinstance(segments, (tuple, list)):
        raise TypeError(f"segments must be a list of lengths, got {segments!r}; pass one such as [512, 4096]")
    return tuple(resolve_integer("segments", length, "of integers") for length in segments)


MOVEMENTS = ("auto", "keys", "queries")
EXPANDS = ("auto", "owner", "reader")

_MASK: dict[str, Callable[[Any], Any]] = {
    "causal": partial(resolve_flag, "causal"),
    "window": resolve_window,
    "prefix_len": partial(resolve_width, "prefix_len"),
    "chunk_len": resolve_chunk_len,
    "lengths": resolve_lengths,
}
_OPTIONS = _MASK | {
    **{name: partial(resolve_real, name) for name in ("softmax_scale", "softcap", "dropout_p")},
    "backward": partial(resolve_word, "backward", choices=MOVEMENTS),
    "deterministic": partial(resolve_flag, "deterministic"),
}


def resolve_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call as Python's own values; mask and impl are left as they are."""
    return {**given, **{name: resolve(given[name]) for name, resolve in _OPTIONS.items()}}


def resolve_balance(balance: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the mask to balance for, as keyword arguments of `fold_mask`; a causal one by default."""
    if balance is None:
        return {"causal": True}
    if not isinstance(balance, Mapping):
        raise TypeError(f"balance must be a dict of mask options, got {balance!r}; pass one such as {{'causal': True}}")
    unknown = [option for option in balance if option not in _MASK]
    if unknown:
        raise ValueError(f"balance must have options among {', '.join(_MASK)}, got {unknown}; leave out the others")
    return {name: _MASK[name](option) for name, option in balance.items()}
