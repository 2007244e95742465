"""Histories of a cache: requests that join, grow, fork and leave; what ranks make of them, and what is right.

Owns the play on ranks and the definition beside it. Refuses to know how either is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn import Ring, attention_reference
from ringattn.inference import PagedKVCache, StaticBatch, attend
from ringattn.launch.check.poison import poison_flat

Op = tuple[Any, ...]
"""("add_request", name, reserve, first), ("fork", name, parent, length, reserve), ("truncate", name, length), ("free", name) or
("extend", names, counts, mode, alike). Names are integers of the history; modes beside those of `extend` are those of
PIECES: into one packed static step that serves the whole history."""

PIECES = {"packed": (64, 4), "rows": (200, 1)}
"""Pieces of packed steps, and rows of each."""


@dataclass(frozen=True)
class Sizes:
    """A cache and the heads that use it."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    page_size: int = 4
    pages: int = 120
    layers: int = 2
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class History:
    """What happens to a cache, and the options of its layers, the first one's for even layers.

    Attributes:
        sizes: Of the cache.
        ops: In order.
        options: Of `attend`; one per kind of layer. Names in `features` are drawn.
        features: "sinks", "alibi_slopes".
        comm_mode: As in `attend`.
        seed: Of all tokens.
        kv_access: As in `attend`.
    """

    sizes: Sizes
    ops: tuple[Op, ...]
    options: tuple[dict[str, Any], ...] = ({},)
    features: tuple[str, ...] = ()
    comm_mode: str = "auto"
    seed: int = 0
    kv_access: str = "auto"

    def of_layer(self, layer: int) -> dict[str, Any]:
        """The options of a layer that are numbers."""
        return self.options[layer % len(self.options)]

    def tensors(self) -> dict[str, Tensor]:
        """The options that are tensors; those of every layer."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        found = {}
        wide = torch.float64 if self.sizes.dtype == torch.float64 else torch.float32
        for name in self.features:
            x = torch.randn(self.sizes.heads, generator=generator, dtype=torch.float32)
            found[name] = (x if name == "sinks" else x.abs() / 8).to(wide)
        return found

    def tokens(self, index: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the new tokens of an op, `batch rows heads dim`."""
        _, names, counts, _, same_length = self.ops[index]
        together = same_length or self.is_decode(index)
        shape = (len(names), counts[0]) if together else (1, sum(counts))
        generator = torch.Generator().manual_seed(self.seed * 1000 + index * 10 + layer)
        sizes = self.sizes
        rows = ((sizes.heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.v_head_dim))
        q, k, v = (torch.randn(*shape, *row, generator=generator).to(sizes.dtype) for row in rows)
        return q, k, v

    def is_decode(self, index: int) -> bool:
        """Whether an op is a step of decoding."""
        _, _, counts, mode, _ = self.ops[index]
        return mode == "decode" or (mode == "auto" and len(set(counts)) == 1 and counts[0] <= 16)


@dataclass
class Answer:
    """What a rank answered to one extend: per layer the rows that it computed, and which they are."""

    mode: str
    taken: Tensor
    moved: tuple[str, ...]
    layers: list[Tensor] = field(default_factory=list)


def play(history: History, ring: Ring, device: torch.device | str) -> list[Answer]:
    """One rank's part of a history; whatever was never written is NaN.

    Args:
        history: What happens.
        ring: The ranks.
        device: Of the cache and all tokens.
    """
    sizes = history.sizes
    cache = PagedKVCache(
        ring,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        v_head_dim=sizes.v_head_dim,
        dtype=sizes.dtype,
        pages=sizes.pages,
        page_size=sizes.page_size,
        device=device,
    )
    for pool in (cache.k, cache.v):
        pool.fill_(float("nan"))
    tensors = {name: x.to(device) for name, x in history.tensors().items()}
    known: dict[int, int] = {}
    packed: dict[str, StaticBatch] = {}
    answers = []
    for index, op in enumerate(history.ops):
        what, name, *rest = op
        if what == "add_request":
            known[name] = cache.add_request(*rest)
        elif what == "fork":
            known[name] = cache.fork(known[rest[0]], *rest[1:])
        elif what == "truncate":
            cache.truncate(known[name], *rest)
        elif what == "free":
            cache.free(known.pop(name))
        else:
            counts, mode, same_length = rest
            requests = [known[one] for one in name]
            if mode in PIECES:
                if mode not in packed:
                    packed[mode] = cache.static_batch(*PIECES[mode], max_tokens=cache.capacity_tokens, packed=True)
                step, rows = cache.extend(requests, counts, into=packed[mode]), _rows_of(counts, PIECES[mode][1])
            else:
                step, rows = cache.extend(requests, counts, mode=mode, same_length=same_length), None
            answer = Answer(step.mode, step.taken.cpu() if rows is None else torch.arange(len(rows)), ())
            for layer in range(sizes.layers):
                local = [x.to(device) for x in history.tokens(index, layer)]
                if rows is None:
                    local = [step.take(x) for x in local]
                else:
                    # rows that hold no token may hold anything
                    local = [
                        x.new_full((1, step.rows, *x.shape[2:]), 7.0).index_copy(1, rows.to(device), x) for x in local
                    ]
                o = attend(
                    step,
                    layer,
                    *local,
                    comm_mode=history.comm_mode,
                    kv_access=history.kv_access,
                    **history.of_layer(layer),
                    **tensors,
                ).cpu()
                answer.layers.append(o if rows is None else o[:, rows])
                if ring.context.buffers.num_bytes():
                    poison_flat(ring.context.buffers)
            answer.moved = step.comm_modes
            answers.append(answer)
    return answers


def _rows_of(counts: Sequence[int], new: int) -> Tensor:
    """Where a packed step has the new tokens of its requests: `sum(counts)` int64."""
    rows, begin = [], 0
    for count in counts:
        rows.append(torch.arange(begin, begin + count))
        begin += -(-count // new) * new
    return torch.cat(rows)


def join_answers(by_rank: list[Answer]) -> list[Tensor]:
    """What all ranks answered to one extend together, `batch rows h dv` per layer; of decode, what the first one did."""
    first = by_rank[0]
    if first.mode == "decode":
        return first.layers
    found = []
    order = torch.cat([one.taken for one in by_rank]).argsort()
    for parts in zip(*(one.layers for one in by_rank), strict=True):
        found.append(torch.cat(parts, 1).index_select(1, order))
    return found


def has_same_bits(by_rank: list[Answer]) -> bool:
    """Whether all ranks answered to a step of decoding with the same bits."""
    return all(torch.equal(x, y) for other in by_rank for x, y in zip(by_rank[0].layers, other.layers, strict=True))


class Definition:
    """The same history by `attention_reference` on whole requests, in a dtype of its own.

    Args:
        history: What happens.
        dtype: Of all arithmetic.
        device: Where.
    """

    def __init__(self, history: History, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._history, self._dtype, self._device = history, dtype, device
        self._kept: dict[int, list[list[Tensor]]] = {}  # per request and layer: q, k, v of all its tokens
        self._first: dict[int, int] = {}

    def play(self) -> list[list[Tensor]]:
        """Per extend and layer `batch rows h dv`."""
        history, answers = self._history, []
        for index, op in enumerate(history.ops):
            what, name, *rest = op
            if what == "add_request":
                sizes = history.sizes
                rows = (
                    (sizes.heads, sizes.head_dim),
                    (sizes.kv_heads, sizes.head_dim),
                    (sizes.kv_heads, sizes.v_head_dim),
                )
                self._kept[name] = [
                    [torch.empty(1, 0, *row, dtype=self._dtype, device=self._device) for row in rows]
                    for _ in range(sizes.layers)
                ]
                self._first[name] = rest[1] if len(rest) > 1 else 0
            elif what == "fork":
                self._kept[name] = [[x[:, : rest[1]] for x in layer] for layer in self._kept[rest[0]]]
                self._first[name] = self._first[rest[0]]
            elif what == "truncate":
                self._kept[name] = [[x[:, : rest[0]] for x in layer] for layer in self._kept[name]]
            elif what == "free":
                del self._kept[name]
            else:
                answers.append(
                    [self._extend(index, layer, name, rest[0], rest[2]) for layer in range(history.sizes.layers)]
                )
        return answers

    def _extend(
        self, index: int, layer: int, names: tuple[int, ...], counts: tuple[int, ...], same_length: bool
    ) -> Tensor:
        history = self._history
        together = same_length or history.is_decode(index)
        tokens = [x.to(self._device, self._dtype) for x in history.tokens(index, layer)]
        found = []
        for i, (name, count) in enumerate(zip(names, counts, strict=True)):
            begin = 0 if together else sum(counts[:i])
            mine = [x[i : i + 1] if together else x[:, begin : begin + count] for x in tokens]
            kept = self._kept[name][layer] = [
                torch.cat(pair, 1) for pair in zip(self._kept[name][layer], mine, strict=True)
            ]
            n = kept[0].shape[1]
            options = dict(history.of_layer(layer))
            window = options.get("window")
            if isinstance(window, int):
                options["window"] = (window - 1, 0)
            options = (
                {"causal": True}
                | options
                | {name: x.to(self._device, self._dtype) for name, x in history.tensors().items()}
            )
            # only tokens that are there yet are seen, and none before the first; chunks are counted from there
            first = self._first[name]
            o = attention_reference(*(x[:, first:] for x in kept), **options)
            o = torch.cat((o.new_zeros(1, first, *o.shape[2:]), o), 1)
            found.append(o[:, n - count :])
        return torch.cat(found, 0 if together else 1)


def extend(names: tuple[int, ...], counts: tuple[int, ...], mode: str = "auto", same_length: bool = False) -> Op:
    """An op that brings new tokens."""
    return "extend", names, counts, mode, same_length


CHUNKS: tuple[Op, ...] = (
    ("add_request", 0, 200, 0),
    extend((0,), (37,)),
    extend((0,), (1,), "prefill"),
    extend((0,), (64,)),
    extend((0,), (2,), "prefill"),
    extend((0,), (17,)),
    extend((0,), (1,)),
    extend((0,), (5,)),
    extend((0,), (16,), "prefill"),
    extend((0,), (1,)),
)
"""One request in pieces of all sizes, both ways."""

CROWD: tuple[Op, ...] = (
    ("add_request", 0, 120, 0),
    extend((0,), (41,)),
    ("fork", 1, 0, 41, 90),
    ("fork", 2, 0, 18, 60),
    ("add_request", 3, 50, 0),
    extend((0, 1, 2, 3), (3, 20, 1, 23), "prefill"),
    extend((0, 1, 2, 3), (1, 1, 1, 1)),
    ("truncate", 1, 44),
    ("free", 0),
    extend((3, 1), (3, 3)),
    extend((2, 1, 3), (9, 2, 1), "prefill"),
    extend((1, 2, 3), (16, 16, 16)),
)
"""Requests that share beginnings and steps."""

PACKED: tuple[Op, ...] = (
    ("add_request", 0, 120, 0),
    ("add_request", 1, 60, 0),
    extend((0, 1), (41, 7), "packed"),
    ("fork", 2, 0, 30, 90),
    ("add_request", 3, 50, 0),
    extend((0, 1, 2), (1, 1, 1)),
    extend((2, 3, 0), (33, 4, 1), "rows"),
    extend((3,), (16,)),
    ("truncate", 0, 35),
    extend((1,), (50,), "packed"),
    extend((2, 0), (9, 20), "prefill"),
    ("free", 2),
    extend((0, 3), (6, 8), "packed"),
    extend((3, 0), (1, 5), "rows"),
    extend((0, 1, 3), (2, 2, 2)),
)
"""Prompts, and what goes on from them, as steps of decoding in pieces."""

PADDED: tuple[Op, ...] = (
    ("add_request", 0, 80, 0),
    ("add_request", 1, 80, 7),
    ("add_request", 2, 80, 20),
    extend((0, 1, 2), (21, 21, 21), "prefill", True),
    extend((0, 1, 2), (1, 1, 1), same_length=True),
    extend((0, 1, 2), (4, 4, 4), same_length=True),
    extend((0, 1, 2), (19, 19, 19), "prefill", True),
    extend((0, 1, 2), (1, 1, 1)),
)
"""A batch with padding in front."""

LONG: tuple[Op, ...] = (
    ("add_request", 0, 2600, 0),
    ("add_request", 1, 900, 0),
    extend((0,), (1100,)),
    extend((0,), (1,), "prefill"),
    extend((0, 1), (611, 333), "prefill"),
    ("fork", 2, 0, 1500, 2000),
    extend((2,), (40,), "prefill"),
    extend((0, 1, 2), (1, 1, 1)),
    extend((0, 1, 2), (5, 5, 5)),
    ("free", 1),
    ("truncate", 0, 1700),
    extend((0, 2), (301, 200), "prefill"),
    extend((2, 0), (16, 16)),
    extend((0,), (1,)),
)
"""Prompts of many tiles, in chunks, over turns and with a shared beginning."""

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"options": ({"causal": False},)},
    "window": {"options": ({"window": (11, 0)}, {})},
    "int window": {"options": ({"window": 6},)},
    "both sides": {"options": ({"causal": False, "window": (9, 4)},)},
    "chunks": {"options": ({"chunk_len": 16}, {"chunk_len": 7, "window": (4, None), "causal": False})},
    "softcap": {"options": ({"softcap": 1.5, "softmax_scale": 0.6},)},
    "sinks": {"features": ("sinks",)},
    "alibi": {"features": ("alibi_slopes",)},
    "everything": {
        "options": ({"window": (20, 0), "softcap": 2.0}, {"softmax_scale": 0.3}),
        "features": ("sinks", "alibi_slopes"),
    },
}
