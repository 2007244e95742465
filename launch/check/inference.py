"""Cases of attention over a KV cache: histories of requests, by prefill and decode, against the fp64 reference.

In a history requests are added, grow in chunks of all sizes, fork, are truncated and freed, with NaN wherever nothing was
written. The outputs of all ranks are put together and compared with `attention_reference` on whole requests. Prefill moves keys,
moves queries, reads pages without a copy, or does what the byte counts say. In decode all ranks must return the same bits.
Over virtual ranks every answer must have the bits of one process that hosts them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn import Ring, attention_reference, masks
from ringattn.inference import PagedKVCache, StaticBatch, attend, latent_attend
from ringattn.launch.check.poison import poison_flat
from ringattn.launch.common.session import Session
from ringattn.numerics.error_budget import Budget, error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MOVES = ("auto", "keys", "queries", "pages")
"""How prefill gets keys: by byte counts; keys or queries move, over copies of pages; queries move, over pages in place."""

Op = tuple[Any, ...]
"""("add_request", name, reserve, first), ("fork", name, parent, length, reserve), ("truncate", name, length), ("free", name) or
("extend", names, counts, mode, same_length). Names are integers of the history; modes beside those of `extend` are those of
PIECES: into one packed static batch that serves the whole history."""

PIECES = {"packed": (64, 4), "rows": (200, 1)}
"""Pieces of packed batches, and rows of each."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a cache and of the heads that use it.

    Attributes:
        latent: (r, dr) of a cache of latents, which are expanded to kv_heads heads of head_dim and v_head_dim.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    page_size: int = 4
    pages: int = 120
    layers: int = 2
    dtype: torch.dtype = torch.float32
    latent: tuple[int, int] | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def row_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Heads and head dim of a row of q, k and v; or of q, and columns of latents and rotary keys."""
        heads = (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim)
        return (self.heads, self.head_dim), *(heads if self.latent is None else ((x,) for x in self.latent))

    @property
    def of_cache(self) -> dict[str, Any]:
        """Arguments of the cache."""
        names = ["page_size", "pages", "layers", "dtype", "kv_dtype", "latent"]
        names += [] if self.latent else ["kv_heads", "head_dim", "v_head_dim"]
        return {name: getattr(self, name) for name in names}


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
        """Return q, k and v, or latents and rotary keys, of the new tokens of an op, `batch rows heads dim`.

        Pages of fp8 hold them without rounding: the largest number of each row is 448 steps.
        """
        _, names, counts, _, _ = self.ops[index]
        shape = (len(names), counts[0]) if self.is_batched(index) else (1, sum(counts))
        generator = torch.Generator().manual_seed(self.seed * 1000 + index * 10 + layer)
        found = [torch.randn(*shape, *row, generator=generator) for row in self.sizes.row_shapes]
        if self.sizes.kv_dtype is not None:
            for x in found[1:]:
                x[..., 0] = 3.5 * x[..., 0].sign()
                x.copy_((x.clamp(-3.5, 3.5) * 128).to(self.sizes.kv_dtype).float() / 128)
        return [x.to(self.sizes.dtype) for x in found]

    def up(self, layer: int, device: torch.device | str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return k_up and v_up of a layer over latents, else nothing."""
        sizes = self.sizes
        if sizes.latent is None:
            return []
        generator, (r, dr) = torch.Generator().manual_seed(self.seed * 1000 + 500 + layer), sizes.latent
        dims = sizes.head_dim - dr, sizes.v_head_dim
        found = [torch.randn(sizes.kv_heads, dim, r, generator=generator) / r**0.5 for dim in dims]
        return [x.to(sizes.dtype).to(device, dtype or sizes.dtype) for x in found]

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

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return the rows that this rank computed from those of all ranks."""
        return whole if self.mode == "decode" else whole.index_select(1, self.taken)


def play(history: History, ring: Ring, device: torch.device | str) -> list[Answer]:
    """Run one rank's part of a history on a cache that is NaN wherever nothing was written."""
    sizes = history.sizes
    cache = PagedKVCache(ring, device=device, **sizes.of_cache)
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
                run = attend if sizes.latent is None else latent_attend
                o = run(batch, layer, *local, *history.up(layer, device), **named, **history.options_of(layer)).cpu()
                answer.layers.append(o if rows is None else o[:, rows])
                poison_flat(ring, cache.device)
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


def differences(by_rank: Sequence[Answer], whole: Sequence[Tensor]) -> list[float]:
    """Largest difference of each rank's outputs from its rows of whole outputs; 0.0 where all bits are equal."""
    return [max(error(o, one.rows_of(x)) for o, x in zip(one.layers, whole, strict=True)) for one in by_rank]


def reference_answers(history: History, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[list[Tensor]]:
    """Output of `attention_reference` on whole requests in `dtype`: per extend and layer `batch rows h dv`."""
    qkv: dict[int, list[list[Tensor]]] = {}  # per request and layer: q, k, v of all its tokens
    first: dict[int, int] = {}
    layers, tensors, answers = range(history.sizes.layers), history.tensors(device, dtype), []

    def extend_layer(index: int, layer: int, names: Sequence[int], counts: Sequence[int]) -> Tensor:
        batched = history.is_batched(index)
        tokens = [x.to(device, dtype) for x in history.tokens(index, layer)]
        if up := history.up(layer, device, dtype):
            tokens = [tokens[0], *expand_latents(*tokens[1:], *up)]
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
            rows = dataclasses.replace(history.sizes, latent=None).row_shapes
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


def expand_latents(latents: Tensor, rotary_keys: Tensor, k_up: Tensor, v_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys `b t hk (dn + dr)` and values `b t hk dv` by their definition."""
    k, v = (torch.einsum("btr,hdr->bthd", latents, up) for up in (k_up, v_up))
    return torch.cat([k, rotary_keys[:, :, None].expand(*k.shape[:3], -1)], -1), v


def extend(names: tuple[int, ...], counts: tuple[int, ...], mode: str = "auto", same_length: bool = False) -> Op:
    """Return the op that appends `counts` new tokens to requests `names`."""
    return "extend", names, counts, mode, same_length


def parse_ops(text: str) -> tuple[Op, ...]:
    """Return the ops of a text, divided by semicolons; an extend names its requests with their new tokens, then its mode.

    Example:
        >>> parse_ops("add_request 0 200 0; extend 0:37 2:1 prefill")
        (('add_request', 0, 200, 0), ('extend', (0, 2), (37, 1), 'prefill', False))
    """
    ops: list[Op] = []
    for what, *words in (op.split() for op in text.split(";")):
        if what != "extend":
            ops.append((what, *map(int, words)))
            continue
        names, counts = zip(*(map(int, word.split(":")) for word in words if ":" in word), strict=True)
        mode = next((word for word in words if word.isalpha()), "auto")
        ops.append(extend(names, counts, mode, "same_length" in words))
    return tuple(ops)


CHUNKS = parse_ops(
    "add_request 0 200 0; extend 0:37; extend 0:1 prefill; extend 0:64; extend 0:2 prefill; extend 0:17; extend 0:1;"
    "extend 0:5; extend 0:16 prefill; extend 0:1"
)
"""One request in chunks of all sizes, by prefill and decode."""
CROWD = parse_ops(
    "add_request 0 120 0; extend 0:41; fork 1 0 41 90; fork 2 0 18 60; add_request 3 50 0;"
    "extend 0:3 1:20 2:1 3:23 prefill; extend 0:1 1:1 2:1 3:1; truncate 1 44; free 0; extend 3:3 1:3;"
    "extend 2:9 1:2 3:1 prefill; extend 1:16 2:16 3:16"
)
"""Requests that share prefixes and batches."""
PACKED = parse_ops(
    "add_request 0 120 0; add_request 1 60 0; extend 0:41 1:7 packed; fork 2 0 30 90; add_request 3 50 0;"
    "extend 0:1 1:1 2:1; extend 2:33 3:4 0:1 rows; extend 3:16; truncate 0 35; extend 1:50 packed;"
    "extend 2:9 0:20 prefill; free 2; extend 0:6 3:8 packed; extend 3:1 0:5 rows; extend 0:2 1:2 3:2"
)
"""Prompts and their continuations as packed decode batches."""
PADDED = parse_ops(
    "add_request 0 80 0; add_request 1 80 7; add_request 2 80 20; extend 0:21 1:21 2:21 prefill same_length;"
    "extend 0:1 1:1 2:1 same_length; extend 0:4 1:4 2:4 same_length; extend 0:19 1:19 2:19 prefill same_length;"
    "extend 0:1 1:1 2:1"
)
"""A batch with left padding."""
LONG = parse_ops(
    "add_request 0 2600 0; add_request 1 900 0; extend 0:1100; extend 0:1 prefill; extend 0:611 1:333 prefill;"
    "fork 2 0 1500 2000; extend 2:40 prefill; extend 0:1 1:1 2:1; extend 0:5 1:5 2:5; free 1; truncate 0 1700;"
    "extend 0:301 2:200 prefill; extend 2:16 0:16; extend 0:1"
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


def budget_dtypes(dtype: str) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of the rounded reference of a budget, and that to which it is scaled.

    fp64 has nothing wider to be compared with: its budget is that of fp32, scaled.
    """
    return (torch.float32, torch.float64) if dtype == "fp64" else (DTYPES[dtype], None)


@dataclass(frozen=True)
class InferenceCase:
    """One history, to be run with each of `moves`."""

    name: str
    dtype: str
    history: History
    moves: tuple[str, ...] = MOVES

    @property
    def shape(self) -> str:
        """Text of the sizes."""
        sizes, dims = self.history.sizes, f"{self.head_dim}"
        dims += "" if self.head_dim == self.v_head_dim else f"/{self.v_head_dim}"
        dims += "" if sizes.latent is None else f" of {sizes.latent[0]}+{sizes.latent[1]}"
        return f"{len(self.history.ops)} ops h{sizes.heads}/{sizes.kv_heads} d{dims} page {sizes.page_size}"

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options."""
        return (*dict.fromkeys(name for one in self.history.options for name in one), *self.history.features)

    @property
    def head_dim(self) -> int:
        """Head dim of q and k."""
        return self.history.sizes.head_dim

    @property
    def v_head_dim(self) -> int:
        """Head dim of v."""
        return self.history.sizes.v_head_dim


@dataclass
class Finding:
    """Result of one rank for one case in one layout (of inference: one way to move).

    Attributes:
        ratios: Part of the error budget that is used up, per tensor; the same on every rank.
        errors: The largest error per tensor, in the rows of this rank.
        broken: The refusal, if there is no answer at all.
    """

    layout: str
    ratios: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    budgets: dict[str, float] = field(default_factory=dict)
    broken: str | None = None


def inference_cases(*, full: bool, device: str, packed: bool = True) -> Iterator[InferenceCase]:
    """Every kind of history, and all options at once; in full every option, dtype, head dim and head group, too.

    Without `packed` none has packed batches, which virtual ranks do not serve.
    """
    gpu = device == "cuda"
    main = "bf16" if gpu else "fp32"
    size: dict[str, Any] = {"head_dim": 64, "v_head_dim": 64, "page_size": 16} if gpu else {"pages": 400}

    def case(title: str, ops: tuple[Op, ...], dtype: str, named: dict[str, Any], **changes: Any) -> InferenceCase:
        sizes = Sizes(dtype=DTYPES[dtype], **(size | changes))
        return InferenceCase(f"inference: {title}", dtype, History(sizes, ops, **named))

    histories = {"chunks": CHUNKS, "crowd": CROWD, "padded": PADDED} | ({"packed": PACKED} if packed else {})
    for title, ops in histories.items():
        yield case(title, ops, main, {})
    dims = (96, 64, (128, 32)) if gpu else (12, 10, (16, 4))
    latents = {"kv_heads": 4, **dict(zip(("head_dim", "v_head_dim", "latent"), dims, strict=True))}
    yield case("crowd, latents", CROWD, main, {}, **latents)
    # the fastest decode kernels take pages of 64
    fp8: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, **({"page_size": 64} if gpu else {})}
    yield case("crowd, fp8", CROWD, main, {}, **fp8)
    if not full:
        yield case("everything", CROWD, main, OPTIONS["everything"])
        return
    for name, named in OPTIONS.items():
        for title, ops in histories.items():
            if named:
                yield case(f"{title}, {name}", ops, main, named)
    for dtype in DTYPES:
        if dtype != main and not (gpu and dtype == "fp64"):
            yield case("crowd", CROWD, dtype, OPTIONS["everything"])
    for title, ops in histories.items():
        yield case(f"{title}, everything, latents", ops, main, OPTIONS["everything"], **latents, page_size=64)
    yield case("crowd, everything, latents in fp8", CROWD, main, OPTIONS["everything"], **latents, **fp8)
    for heads, kv_heads in ((1, 1), (3, 3), (8, 1), (12, 2)):
        yield case("heads", CROWD, main, {}, heads=heads, kv_heads=kv_heads)
    for dims in ((16, 16), (40, 40), (96, 96), (256, 256), (192, 128)) if gpu else ((24, 16), (16, 40)):
        yield case("head dim", CROWD, main, {}, head_dim=dims[0], v_head_dim=dims[1])
    if gpu:
        # the reference of thousands of tokens is too slow on a CPU
        long: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "v_head_dim": 128}
        for name in ("causal", "window", "everything"):
            yield case(f"long, {name}", LONG, main, OPTIONS[name], **long, page_size=64, pages=120)


def examine_history(
    case: InferenceCase, moves: str, ring: Ring, session: Session, layout: str | None = None, alone: Ring | None = None
) -> Finding:
    """Run a case on all ranks with one of MOVES, shown as `layout`, and compare the outputs with the reference.

    With `alone`, the same ring of virtual ranks on one process, every extend (named by its place in the history, from 0) must have
    the bits of rank 0's on that ring.
    """
    history = case.history
    if moves != "auto":
        mode, access = ("auto", "pages") if moves == "pages" else (moves, "copies")
        history = dataclasses.replace(history, comm_mode=mode, kv_access=access)
    mine = play(history, ring, session.device)
    by_rank: Sequence[Sequence[Answer]] = session.gather(mine)
    lone = None
    if alone is not None:
        lone = session.broadcast(play(history, alone, session.device) if session.first else None)
    low, scaled = budget_dtypes(case.dtype)
    exact, rounded = (reference_answers(history, dtype, session.device) for dtype in (torch.float64, low))
    found = Finding(layout or moves)

    def keep(what: str, *values: float) -> None:
        for kept, value in zip((found.ratios, found.budgets, found.errors), values, strict=True):
            kept[what] = max(kept.get(what, 0.0), value)

    for index, answers in enumerate(zip(*by_rank, strict=True)):
        name, here = answers[0].mode, mine[index]
        bits = {"same bits on all ranks": answers[0].layers} if name == "decode" else {}
        if lone is not None:
            bits[f"bits of one process in extend {index} ({name})"] = gather_answers([lone[index]])
        for what, expected in bits.items():
            differ = differences(answers, expected)
            keep(what, float("inf") if any(differ) else 0.0, 0.0, differ[session.rank])
        for layer, whole in enumerate(gather_answers(answers)):
            right, budget = exact[index][layer].cpu(), Budget.of(exact[index][layer], rounded[index][layer], scaled)
            keep(name, budget.ratio(whole, right), budget.largest, error(here.layers[layer], here.rows_of(right)))
    return found
