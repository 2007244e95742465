"""Scenarios of a KV cache: requests that are added, grow, fork and are freed; the answers of ranks, and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn import Ring, attention_reference, masks
from ringattn.inference import PagedKVCache, StaticBatch, attend
from ringattn.launch.check.poison import poison_flat

Op = tuple[Any, ...]
"""("add_request", name, reserve, first), ("fork", name, parent, length, reserve), ("truncate", name, length), ("free", name) or
("extend", names, counts, mode, same_length). Names are integers of the history; modes beside those of `extend` are those of
PIECES: into one packed static batch that serves the whole history."""

PIECES = {"packed": (64, 4), "rows": (200, 1)}
"""Pieces of packed batches, and rows of each."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a cache and of the heads that use it."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    page_size: int = 4
    pages: int = 120
    layers: int = 2
    dtype: torch.dtype = torch.float32

    @property
    def row_shapes(self) -> tuple[tuple[int, int], ...]:
        """Heads and head dim of a row of q, k and v."""
        return (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim)


@dataclass(frozen=True)
class History:
    """Operations on a cache in order, and the options of its layers.

    Attributes:
        options: Of `attend`, one per kind of layer; layers take turns.
        features: Tensor-valued options to draw: "sinks", "alibi_slopes".
    """

    sizes: Sizes
    ops: tuple[Op, ...]
    options: tuple[dict[str, Any], ...] = ({},)
    features: tuple[str, ...] = ()
    comm_mode: str = "auto"
    seed: int = 0
    kv_access: str = "auto"

    def options_of(self, layer: int) -> dict[str, Any]:
        """Return the options of a layer that are no tensors."""
        return self.options[layer % len(self.options)]

    def tensors(self, device: torch.device | str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the options that are tensors, the same for every layer; without a dtype in fp32, or fp64 beside fp64 tokens."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        wide = torch.float64 if self.sizes.dtype == torch.float64 else torch.float32
        found = {}
        for name in self.features:
            x = torch.randn(self.sizes.heads, generator=generator, dtype=torch.float32)
            found[name] = (x if name == "sinks" else x.abs() / 8).to(device, dtype or wide)
        return found

    def tokens(self, index: int, layer: int) -> list[Tensor]:
        """Return q, k and v of the new tokens of an op, `batch rows heads dim`."""
        _, names, counts, _, _ = self.ops[index]
        shape = (len(names), counts[0]) if self.is_batched(index) else (1, sum(counts))
        generator = torch.Generator().manual_seed(self.seed * 1000 + index * 10 + layer)
        rows = self.sizes.row_shapes
        return [torch.randn(*shape, *row, generator=generator).to(self.sizes.dtype) for row in rows]

    def is_batched(self, index: int) -> bool:
        """Whether the requests of an op are a batch of rows of one length: in decode, or with `same_length`."""
        _, _, counts, mode, same_length = self.ops[index]
        few = mode == "auto" and len(set(counts)) == 1 and counts[0] <= 16
        return same_length or mode == "decode" or few


@dataclass
class Answer:
    """Output of one rank for one extend: per layer the rows that it computed, and their indices in `taken`."""

    mode: str
    taken: Tensor
    moved: tuple[str, ...]
    layers: list[Tensor] = field(default_factory=list)


def play(history: History, ring: Ring, device: torch.device | str) -> list[Answer]:
    """Run one rank's part of a history on a cache that is NaN wherever nothing was written."""
    sizes = history.sizes
    numbers = {name: x for name, x in vars(sizes).items() if name != "heads"}
    cache = PagedKVCache(ring, device=device, **numbers)
    for pool in (cache.k, cache.v):
        pool.fill_(float("nan"))
    named: dict[str, Any] = {"comm_mode": history.comm_mode, "kv_access": history.kv_access, **history.tensors(device)}
    requests: dict[int, int] = {}
    packed: dict[str, StaticBatch] = {}
    answers = []
    for index, (what, name, *rest) in enumerate(history.ops):
        if what == "add_request":
            requests[name] = cache.add_request(*rest)
        elif what == "fork":
            requests[name] = cache.fork(requests[rest[0]], *rest[1:])
        elif what == "truncate":
            cache.truncate(requests[name], *rest)
        elif what == "free":
            cache.free(requests.pop(name))
        else:
            counts, mode, same_length = rest
            extended, rows = [requests[one] for one in name], None
            if mode in PIECES:
                if mode not in packed:
                    packed[mode] = cache.static_batch(*PIECES[mode], max_tokens=cache.capacity_tokens, packed=True)
                batch, rows = cache.extend(extended, counts, into=packed[mode]), _packed_rows(counts, PIECES[mode][1])
            else:
                batch = cache.extend(extended, counts, mode=mode, same_length=same_length)
            answer = Answer(batch.mode, batch.taken.cpu() if rows is None else torch.arange(len(rows)), ())
            for layer in range(sizes.layers):
                local = [x.to(device) for x in history.tokens(index, layer)]
                if rows is None:
                    local = [batch.take(x) for x in local]
                else:
                    # rows that hold no token may hold anything
                    shapes = [(1, batch.rows, *x.shape[2:]) for x in local]
                    pairs = zip(local, shapes, strict=True)
                    local = [x.new_full(shape, 7.0).index_copy(1, rows.to(device), x) for x, shape in pairs]
                o = attend(batch, layer, *local, **named, **history.options_of(layer)).cpu()
                answer.layers.append(o if rows is None else o[:, rows])
                if ring.context.buffers.num_bytes():
                    poison_flat(ring.context.buffers)
            answer.moved = batch.comm_modes
            answers.append(answer)
    return answers


def _packed_rows(counts: Sequence[int], size: int) -> Tensor:
    """Indices of the new tokens in a packed batch of pieces of `size` rows: `sum(counts)` int64."""
    rows, begin = [], 0
    for count in counts:
        rows.append(torch.arange(begin, begin + count))
        begin += -(-count // size) * size
    return torch.cat(rows)


def gather_answers(by_rank: Sequence[Answer]) -> list[Tensor]:
    """Whole output of all ranks for one extend, `batch rows h dv` per layer; of decode the first rank's, which has all rows."""
    if by_rank[0].mode == "decode":
        return by_rank[0].layers
    order = torch.cat([one.taken for one in by_rank]).argsort()
    layers = zip(*(one.layers for one in by_rank), strict=True)
    return [torch.cat(parts, 1).index_select(1, order) for parts in layers]


def has_same_bits(by_rank: Sequence[Answer]) -> bool:
    """Whether the outputs of a decode step are equal to the bit on all ranks."""
    return all(torch.equal(x, y) for other in by_rank for x, y in zip(by_rank[0].layers, other.layers, strict=True))


def reference_answers(history: History, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[list[Tensor]]:
    """Output of `attention_reference` on whole requests in `dtype`: per extend and layer `batch rows h dv`."""
    qkv: dict[int, list[list[Tensor]]] = {}  # per request and layer: q, k, v of all its tokens
    first: dict[int, int] = {}
    layers, tensors, answers = range(history.sizes.layers), history.tensors(device, dtype), []

    def extend_layer(index: int, layer: int, names: Sequence[int], counts: Sequence[int]) -> Tensor:
        batched = history.is_batched(index)
        tokens = [x.to(device, dtype) for x in history.tokens(index, layer)]
        options = {"causal": True, **history.options_of(layer), **tensors}
        if isinstance(window := options.get("window"), int):
            options["window"] = (window - 1, 0)
        found = []
        for i, (name, count) in enumerate(zip(names, counts, strict=True)):
            begin = 0 if batched else sum(counts[:i])
            new = [x[i : i + 1] if batched else x[:, begin : begin + count] for x in tokens]
            whole = qkv[name][layer] = [torch.cat(pair, 1) for pair in zip(qkv[name][layer], new, strict=True)]
            # only tokens that are there yet are seen, and none before the first; chunks are counted from there
            o = attention_reference(*(x[:, first[name] :] for x in whole), **options)
            o = torch.cat((o.new_zeros(1, first[name], *o.shape[2:]), o), 1)
            found.append(o[:, o.shape[1] - count :])
        return torch.cat(found, 0 if batched else 1)

    for index, (what, name, *rest) in enumerate(history.ops):
        if what == "add_request":
            rows = history.sizes.row_shapes
            qkv[name] = [[torch.empty(1, 0, *row, dtype=dtype, device=device) for row in rows] for _ in layers]
            first[name] = rest[1] if len(rest) > 1 else 0
        elif what in ("fork", "truncate"):
            source, length = (rest[0], rest[1]) if what == "fork" else (name, rest[0])
            qkv[name] = [[x[:, :length] for x in layer] for layer in qkv[source]]
            first[name] = first[source]
        elif what == "free":
            del qkv[name]
        else:
            answers.append([extend_layer(index, layer, name, rest[0]) for layer in layers])
    return answers


def extend(names: tuple[int, ...], counts: tuple[int, ...], mode: str = "auto", same_length: bool = False) -> Op:
    """Return the op that appends `counts` new tokens to requests `names`."""
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
"""One request in chunks of all sizes, by prefill and decode."""

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
"""Requests that share prefixes and batches."""

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
"""Prompts and their continuations as packed decode batches."""

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
"""A batch with left padding."""

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
"""Prompts of many tiles, in chunks, over several turns and with a shared prefix."""

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"options": ({"causal": False},)},
    "window": {"options": ({"window": (11, 0)}, {})},
    "int window": {"options": ({"window": 6},)},
    "both sides": {"options": ({"causal": False, "window": (9, 4)},)},
    "sinks and window": {"options": ({"mask": masks.causal() & (masks.sinks(3) | masks.window(6))}, {})},
    "chunks": {"options": ({"chunk_len": 16}, {"chunk_len": 7, "window": (4, None), "causal": False})},
    "softcap": {"options": ({"softcap": 1.5, "softmax_scale": 0.6},)},
    "sinks": {"features": ("sinks",)},
    "alibi": {"features": ("alibi_slopes",)},
    "everything": {
        "options": ({"window": (20, 0), "softcap": 2.0}, {"softmax_scale": 0.3}),
        "features": ("sinks", "alibi_slopes"),
    },
}
