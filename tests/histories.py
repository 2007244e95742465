"""Histories of a cache: requests that join, grow, fork and leave; what ranks make of them, and what is right.

Owns the play on ranks and the definition beside it. Knows nothing of how either is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn import Ring, attention_reference
from ringattn.inference import PagedKVCache, attend

Op = tuple[Any, ...]
"""("join", name, reserve, first), ("fork", name, parent, length, reserve), ("crop", name, length), ("leave", name) or
("extend", names, counts, mode, alike). Names are integers of the history."""


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
        moves: As in `attend`.
        seed: Of all tokens.
    """

    sizes: Sizes
    ops: tuple[Op, ...]
    options: tuple[dict[str, Any], ...] = ({},)
    features: tuple[str, ...] = ()
    moves: str = "auto"
    seed: int = 0

    def of_layer(self, layer: int) -> dict[str, Any]:
        return self.options[layer % len(self.options)]

    def tensors(self) -> dict[str, Tensor]:
        """The options that are tensors."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        found = {}
        wide = torch.float64 if self.sizes.dtype == torch.float64 else torch.float32
        for name in self.features:
            x = torch.randn(self.sizes.heads, generator=generator, dtype=torch.float32)
            found[name] = (x if name == "sinks" else x.abs() / 8).to(wide)
        return found

    def tokens(self, index: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the new tokens of an op, `batch rows heads dim`."""
        _, names, counts, _, alike = self.ops[index]
        together = alike or self.is_decode(index)
        shape = (len(names), counts[0]) if together else (1, sum(counts))
        generator = torch.Generator().manual_seed(self.seed * 1000 + index * 10 + layer)
        sizes = self.sizes
        rows = ((sizes.heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.v_head_dim))
        q, k, v = (torch.randn(*shape, *row, generator=generator).to(sizes.dtype) for row in rows)
        return q, k, v

    def is_decode(self, index: int) -> bool:
        _, _, counts, mode, _ = self.ops[index]
        return mode == "decode" or (mode == "auto" and len(set(counts)) == 1 and counts[0] <= 16)


@dataclass
class Answer:
    """What a rank answered to one extend: per layer the rows that it computed, and which they are."""

    mode: str
    taken: Tensor
    moved: tuple[str, ...]
    layers: list[Tensor] = field(default_factory=list)


def play(history: History, device: str = "cpu", **ring: Any) -> list[Answer]:
    """One rank's part of a history; whatever was never written is NaN."""
    sizes = history.sizes
    here = Ring(**ring)
    cache = PagedKVCache(
        here,
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
    answers = []
    for index, op in enumerate(history.ops):
        what, name, *rest = op
        if what == "join":
            known[name] = cache.join(*rest)
        elif what == "fork":
            known[name] = cache.fork(known[rest[0]], *rest[1:])
        elif what == "crop":
            cache.crop(known[name], *rest)
        elif what == "leave":
            cache.leave(known.pop(name))
        else:
            counts, mode, alike = rest
            step = cache.extend([known[one] for one in name], counts, mode=mode, alike=alike)
            answer = Answer(step.mode, step.taken.cpu(), ())
            for layer in range(sizes.layers):
                local = (step.take(x.to(device)) for x in history.tokens(index, layer))
                o = attend(step, layer, *local, moves=history.moves, **history.of_layer(layer), **tensors)
                answer.layers.append(o.cpu())
                here.seat.buffers.poison()
            answer.moved = step.moved
            answers.append(answer)
    return answers


def join_answers(by_rank: list[Answer]) -> list[Tensor]:
    """What all ranks answered to one extend, `batch rows h dv` per layer; those of decode must be the same bits."""
    first = by_rank[0]
    if first.mode == "decode":
        for other in by_rank[1:]:
            for x, y in zip(first.layers, other.layers, strict=True):
                assert torch.equal(x, y), "ranks must hold the same bits"
        return first.layers
    found = []
    order = torch.cat([one.taken for one in by_rank]).argsort()
    for parts in zip(*(one.layers for one in by_rank), strict=True):
        found.append(torch.cat(parts, 1).index_select(1, order))
    assert torch.equal(torch.cat([one.taken for one in by_rank]).sort()[0], torch.arange(len(order)))
    return found


class Definition:
    """The same history by `attention_reference` on whole requests, in a dtype of its own."""

    def __init__(self, history: History, dtype: torch.dtype) -> None:
        self._history, self._dtype = history, dtype
        self._kept: dict[int, list[list[Tensor]]] = {}  # per request and layer: q, k, v of all its tokens
        self._first: dict[int, int] = {}

    def play(self) -> list[list[Tensor]]:
        """Per extend and layer `batch rows h dv`."""
        history, answers = self._history, []
        for index, op in enumerate(history.ops):
            what, name, *rest = op
            if what == "join":
                sizes = history.sizes
                rows = (
                    (sizes.heads, sizes.head_dim),
                    (sizes.kv_heads, sizes.head_dim),
                    (sizes.kv_heads, sizes.v_head_dim),
                )
                self._kept[name] = [
                    [torch.empty(1, 0, *row, dtype=self._dtype) for row in rows] for _ in range(sizes.layers)
                ]
                self._first[name] = rest[1] if len(rest) > 1 else 0
            elif what == "fork":
                self._kept[name] = [[x[:, : rest[1]] for x in layer] for layer in self._kept[rest[0]]]
                self._first[name] = self._first[rest[0]]
            elif what == "crop":
                self._kept[name] = [[x[:, : rest[0]] for x in layer] for layer in self._kept[name]]
            elif what == "leave":
                del self._kept[name]
            else:
                answers.append(
                    [self._extend(index, layer, name, rest[0], rest[2]) for layer in range(history.sizes.layers)]
                )
        return answers

    def _extend(self, index: int, layer: int, names: tuple[int, ...], counts: tuple[int, ...], alike: bool) -> Tensor:
        history = self._history
        together = alike or history.is_decode(index)
        tokens = [x.to(self._dtype) for x in history.tokens(index, layer)]
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
            options = {"causal": True} | options | {name: x.to(self._dtype) for name, x in history.tensors().items()}
            if self._first[name]:
                options["lengths"] = ((self._first[name], n),)
            # only tokens that are there yet are seen
            o = attention_reference(*kept, **options)
            found.append(o[:, n - count :])
        return torch.cat(found, 0 if together else 1)
