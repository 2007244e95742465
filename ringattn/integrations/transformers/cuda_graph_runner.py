"""Model calls with few new tokens over a sharded cache, replayed from CUDA graphs where that is possible.

Legend: b requests, n new tokens of each.

Note [Replays]
    A call of a model with one token is hundreds of launches, which take the host longer than the device. Captured once in a CUDA
    graph, they are one launch. A graph reads the addresses that it was captured with, so tokens and the batch (`StaticBatch`) are
    written in place and the graph is replayed. Its logits stay valid until the next replay, of this or another graph: graphs
    share their memory.
    A graph has one shape: requests, new tokens, rows of logits. It also serves fewer requests: the other rows have token 0, attend
    to nothing and are not stored. So a few batch sizes serve all (`batch_sizes`). A graph has memory for a maximum number of blocks
    of a request on one rank, at least LEAST_BLOCKS. Requests that need more have it captured again.
    A prompt of a few hundred tokens is replayed too, as a packed batch (Note [Pieces] of inference/static_batch.py), with a number
    of pieces that doubles from shape to shape. Such mixed calls have pieces of 16 rows, or of a single row, which prompts share
    with the next tokens of answers; every row then reads the keys before it separately.

Note [All ranks alike]
    Captures and replays follow from numbers that are equal on all ranks. Before a capture the call is made once with no requests,
    which compiles kernels and makes all outstanding comparisons, and once more with waits for the device as errors.
    Then ranks agree: when one of them cannot capture a call, all make it without a graph, and nothing more is captured. The first
    replay of a graph is compared with a plain call, because a number that a model computes on the host is constant in the graph.
    If logits differ by more than rounding, nothing more is captured either.

Note [A replay that does not end]
    When a rank dies, the replays of the others wait in an all-reduce that never ends, which torch's watchdog does not detect. So
    after a replay the host waits with a timeout (`Ring.synchronize`), before anything blocks to read the result. A caller that
    enqueues calls before it reads earlier results waits by itself (`awaited=False`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ringattn.inference import PagedKVCache, StaticBatch
from ringattn.inference.forward_batch import MAX_DECODE_TOKENS
from ringattn.integrations.transformers.model_forward import describe_error, forward_step, rms_difference
from ringattn.plan.options import resolve_flag
from ringattn.transport.timeout import EventPair

LEAST_BLOCKS = 1024
"""Blocks of a request on one rank that a first graph has memory for."""
PACKED_BLOCKS = 16384
"""The same for mixed calls, which are not captured again: longer contexts are prefilled on all ranks."""
DOUBLED = 64
"""Batch sizes double up to this one, as long as a call's time is that of reading the weights, and then grow by it."""
ROW_TOKENS = 8192
"""Tokens of a request on one rank in mixed calls with pieces of one row, if blocks are half full; each row has its own blocks."""
MAX_GRAPHS = 16
"""Shapes that are captured by default."""


class CaptureError(RuntimeError):
    """A call cannot be captured; the message says why."""


@runtime_checkable
class GraphCapturer(Protocol):
    """Captures a call so that it can be replayed at the same addresses."""

    def capture(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], EventPair | None]]:
        """Capture a call that reads and writes at fixed addresses, after calling it to warm up.

        Returns:
            The result of the call, and a function that computes it again in place. That function returns the events at its begin
            and end; None for the current stream, from now on.

        Raises:
            CaptureError: It cannot be captured.
        """
        ...


class CUDAGraphCapturer:
    """Captures CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], EventPair | None]]:
        """See `GraphCapturer.capture`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # the default stream cannot be captured; an error here is one without a graph, too
        with torch.cuda.stream(self._stream):
            call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # an error in a plain call leaves less behind than one in a capture
            with torch.cuda.stream(self._stream), _syncs_are_errors():
                call()
            # torch leaves its stream current when a capture fails
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                out = call()
        except Exception as error:
            torch.cuda.synchronize(self._device)
            _recover_from_failed_capture(self._device, self._pool)
            self._pool = torch.cuda.graph_pool_handle()  # torch refuses one without graphs
            raise CaptureError(describe_error(error)) from error
        current.wait_stream(self._stream)
        begun, ended = torch.cuda.Event(), torch.cuda.Event()
        events = EventPair(begun, ended)

        def replay() -> EventPair:
            stream = torch.cuda.current_stream(self._device)
            begun.record(stream)
            graph.replay()
            ended.record(stream)
            return events

        return out, replay


@contextlib.contextmanager
def _syncs_are_errors() -> Iterator[None]:
    """Make operations that wait for the device errors, as they are in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that it does not find all of them; the capture does
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _recover_from_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Reset what torch leaves in capture state: a device's random generator, and the allocator's redirection to a graph pool.

    While redirected, `torch.cuda.empty_cache` raises, and so does the end of the process; torch has no public function for it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(AttributeError, RuntimeError):  # another torch; no capture is open
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return batch sizes that serve all up to the largest one.

    Example:
        >>> batch_sizes(48)
        (1, 2, 4, 8, 16, 32, 48)
        >>> batch_sizes(200)
        (1, 2, 4, 8, 16, 32, 64, 128, 192, 200)
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, 2 * sizes[-1] if sizes[-1] < DOUBLED else sizes[-1] + DOUBLED))
    return tuple(sizes)


def capture_obstacle(model: nn.Module, cache: PagedKVCache) -> str | None:
    """Return why calls of a model over a cache cannot be captured, as far as that is known; collective at its first use."""
    device = cache.device
    if device.type != "cuda":
        return f"graphs need a GPU, and the cache is in {device.type} memory"
    if cache.ranks:
        return f"its ring has virtual ranks, virtual_size={cache.ring.virtual_size}"
    reducer = cache.ring.partial_reducer(device)
    if not reducer.capturable:
        return f"the exchange of partials can not be captured ({reducer})"
    elsewhere = sorted({str(x.device) for x in model.parameters() if x.device != device})
    if elsewhere:
        return f"the model has weights on {', '.join(elsewhere)} beside {device}"
    return None


def select_capturer(graphs: bool | GraphCapturer | None, model: nn.Module, cache: PagedKVCache) -> GraphCapturer | None:
    """Return the capturer for calls of a model over a cache; collective over the ring.

    graphs: True: CUDA graphs, or an error; False: none; None: CUDA graphs on GPUs where they are possible, with a warning where
    not; or a capturer to use.
    """
    if isinstance(graphs, GraphCapturer):
        return graphs
    if graphs is not None and not resolve_flag("graphs", graphs):
        return None
    if graphs is None and cache.device.type != "cuda":
        return None
    why = capture_obstacle(model, cache)
    if why is None:
        return CUDAGraphCapturer(cache.device)
    if graphs:
        raise ValueError(f"graphs must be False or left out where calls can not be captured, got True: {why}")
    warnings.warn(f"decoding runs without CUDA graphs: {why}", stacklevel=2)
    return None


class _Shape(NamedTuple):
    """Shape of the calls that a graph serves: packed calls have last 0, pieces in place of requests, and `requests` at most."""

    batch: int  # requests, or pieces
    new: int  # new tokens of each
    last: int  # last tokens of each whose logits are wanted
    requests: int = 0

    @property
    def packed(self) -> bool:
        """Whether requests are cut into pieces."""
        return self.last == 0


@dataclass(eq=False)
class _Captured:
    """One captured call."""

    step: StaticBatch
    tokens: Tensor  # `batch new` int64; packed: `1 (batch new)`
    wanted: range | Tensor  # rows whose logits it writes; packed: `requests` int64, read by the graph
    logits: Tensor  # `batch last vocab`; packed: `1 requests vocab`
    replay: Callable[[], EventPair | None]
    kind: Callable[..., Any]  # output type of the model
    checked: bool = False  # whether its first replay was compared with a plain call


class CUDAGraphRunner:
    """Calls of a model with few new tokens of each request, replayed where possible (Note [Replays]).

    Every rank makes the same one, and the same calls.

    Args:
        forward: A causal model of transformers with `attn_implementation="ringattn"`, in eval mode, or its forward.
        cache: The cache of the requests.
        capturer: Captures calls; None: all calls are plain.
        batches: Batch sizes, ascending (`batch_sizes`); None: each batch size has a graph of its own.
        pieces: Numbers of pieces of mixed calls, ascending; none: prompts are not replayed.
        rows: Numbers of rows of mixed calls in pieces of one row, ascending; none: there are no such calls. They take as many
            requests as the largest of `batches`.
        capture_at: Occurrence of a shape at which it is captured. A capture takes about as long as three calls.
        max_graphs: Maximum number of shapes.
        awaited: Whether replays are waited for (Note [A replay that does not end]); False: the caller does it.

    Attributes:
        refusal: Why nothing more is captured; None as long as calls are.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: PagedKVCache,
        capturer: GraphCapturer | None,
        *,
        batches: Sequence[int] | None = None,
        pieces: Sequence[int] = (),
        rows: Sequence[int] = (),
        capture_at: int = 1,
        max_graphs: int = MAX_GRAPHS,
        awaited: bool = True,
    ) -> None:
        self._forward, self._cache, self._capturer = forward, cache, capturer
        self._batches, self._capture_at, self._max_graphs = batches, capture_at, max_graphs
        few = max(batches or (1,))
        self._packed = [
            *(_Shape(batch, MAX_DECODE_TOKENS, 0, batch) for batch in pieces),
            *(_Shape(batch, 1, 0, min(batch, few)) for batch in rows),
        ]
        self._graphs: dict[_Shape, _Captured] = {}
        self._occurrences: Counter[_Shape] = Counter()
        self._replays = 0
        self._awaited = awaited
        self.refusal: str | None = None if capturer is not None else "there is no capturer"

    @property
    def captured(self) -> int:
        """Number of captured shapes."""
        return len(self._graphs)

    @property
    def most_pieces(self) -> int:
        """Maximum number of pieces of MAX_DECODE_TOKENS rows in one mixed call; 0: there are no such calls."""
        return self._most(MAX_DECODE_TOKENS)

    @property
    def most_rows(self) -> int:
        """Maximum number of rows of a mixed call in pieces of one row; 0: there are no such calls."""
        return self._most(1)

    def _most(self, piece: int) -> int:
        return max((shape.batch for shape in self._graphs if shape.packed and shape.new == piece), default=0)

    def prepare(self, new: int = 1) -> None:
        """Capture all batch sizes with `new` tokens per request and all mixed calls, so that no later call waits for it."""
        # the largest first: the others reuse its memory
        for shape in reversed([*(_Shape(batch, new, 1) for batch in self._batches or ()), *self._packed]):
            if self.refusal is None and shape not in self._graphs:
                rows = -(-2 * ROW_TOKENS // self._cache.page_size)
                self._capture(shape, 1 if not shape.packed else PACKED_BLOCKS if shape.new > 1 else rows)

    @torch.no_grad()
    def run(
        self,
        requests: Sequence[int],
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        last: int = 1,
        same_length: bool = False,
    ) -> Any:
        """Append new tokens of requests to the cache, and compute their logits.

        Args:
            requests: The requests.
            tokens: `b n` int64, 1 <= n <= 16, the same on every rank, on any device.
            positions: `b n` or `1 n`: positions for rotary embeddings; None: those of the tokens in their requests.
            last: Number of last tokens whose logits are wanted, at least 1.
            same_length: See `PagedKVCache.extend`.

        Returns:
            The output of the model, with logits `b last vocab`, the same bits on every rank. After a replay it has nothing else,
            and the next call overwrites the logits.
        """
        b, new = tokens.shape
        captured = self._find(requests, new, last)
        if captured is None:
            step = self._cache.extend(requests, [new] * b, mode="decode", same_length=same_length)
            return self._call(step, tokens, step.positions if positions is None else positions, range(new - last, new))
        self._check_ring()
        self._cache.extend(requests, [new] * b, mode="decode", same_length=same_length, into=captured.step)
        captured.tokens[:b].copy_(_pinned(tokens, captured.tokens), non_blocking=True)
        if positions is not None:
            captured.step.positions[:b].copy_(positions)
        logits = self._replay(captured, "decode step", f"{b} requests, {new} new tokens each")
        return captured.kind(logits=logits[:b] if captured.checked else self._check(captured, logits[:b]))

    @torch.no_grad()
    def run_mixed(
        self, requests: Sequence[int], counts: Sequence[int], tokens: Tensor, *, piece: int = MAX_DECODE_TOKENS
    ) -> Tensor | None:
        """Append short prompts, parts of prompts or next tokens, and compute the logits of their last tokens (Note [Replays]).

        Args:
            requests: The requests.
            counts: New tokens of each.
            tokens: `sum(counts)` int64, one request after another, the same on every rank, on any device.
            piece: Rows of the pieces into which requests are cut: 1 when many bring one token.

        Returns:
            Logits `requests vocab`, which the next call overwrites; None: they fit into no captured call, and nothing was done.
        """
        pieces, many = sum(-(-count // piece) for count in counts), len(requests)
        fitting = (s for s in self._graphs if s.packed and s.new == piece and s.batch >= pieces and s.requests >= many)
        captured = min((self._graphs[s] for s in fitting), key=lambda one: one.step.tiles[0], default=None)
        allocator = self._cache.allocator
        if captured is None or allocator.max_blocks_after(requests, max(counts)) > captured.step.max_blocks:
            return None
        self._check_ring()
        step = captured.step
        self._cache.extend(requests, counts, into=step)
        # pieces of one row leave no gaps, and tokens on the device stay there
        laid = tokens[None] if piece == 1 else step.arrange(tokens)
        captured.tokens[:, : laid.shape[1]].copy_(_pinned(laid, captured.tokens), non_blocking=True)
        lasts = torch.tensor([row for one in step.last_rows if one is not None for row in one[1:]], device="cpu")
        assert isinstance(captured.wanted, Tensor), "rows of packed requests are written in place"
        captured.wanted[: len(lasts)].copy_(_pinned(lasts, captured.wanted), non_blocking=True)
        described = f"{len(requests)} requests, {sum(counts)} new tokens"
        logits = self._replay(captured, "step of short prompts", described)[:, : len(requests)]
        return (logits if captured.checked else self._check(captured, logits))[0]

    def _call(self, step: Any, tokens: Tensor, positions: Tensor, wanted: range | Tensor) -> Any:
        return forward_step(self._forward, step, {"input_ids": tokens}, positions, wanted)

    def _check_ring(self) -> None:
        """Raise if the ring has failed, which a replay does not check."""
        self._cache.ring.partial_reducer(self._cache.device).check()

    def _replay(self, captured: _Captured, name: str, described: str) -> Tensor:
        """Replay a call whose inputs are written, and return all logits; the texts are for errors."""
        events, ring = captured.replay(), self._cache.ring
        self._replays += 1
        if ring.world_size > 1 and (self._awaited or not captured.checked):
            ring.synchronize(self._cache.device, events=events, what=f"replayed {name} {self._replays} ({described})")
        return captured.logits

    def _find(self, requests: Sequence[int], new: int, last: int) -> _Captured | None:
        """Return the graph for a call, captured now if it is time; None: the call is plain."""
        if self._capturer is None:
            return None
        sizes = (len(requests),) if self._batches is None else self._batches
        batch = next((size for size in sizes if size >= len(requests)), None)
        if batch is None:
            return None
        shape = _Shape(batch, new, last)
        allocator = self._cache.allocator
        blocks = allocator.max_blocks_after(requests, new)
        found = self._graphs.get(shape)
        if found is not None and blocks <= found.step.max_blocks:
            return found
        self._occurrences[shape] += 1
        if self.refusal is not None or (found is None and len(self._graphs) >= self._max_graphs):
            return None
        if found is None and self._occurrences[shape] < self._capture_at:
            return None
        ahead = max(one.reserved_tokens - one.length for one in allocator.get_requests(requests))
        return self._capture(shape, max(blocks, allocator.max_blocks_after(requests, ahead)))

    def _capture(self, shape: _Shape, blocks: int) -> _Captured | None:
        """Capture a shape with room for so many blocks; None when a rank cannot (Note [All ranks alike])."""
        assert self._capturer is not None, "without a capturer nothing is captured"
        # a graph that is too small is freed first
        self._graphs.pop(shape, None)
        cache = self._cache
        max_blocks = min(blocks if shape.packed else LEAST_BLOCKS, cache.allocator.pages + 1)
        while max_blocks < blocks and not shape.packed:
            max_blocks *= 2
        kinds: list[Callable[..., Any]] = []
        made, why = None, ""
        # tensors that are written in place must not be inference tensors of the first caller
        with torch.inference_mode(False), torch.no_grad():
            sizes = {"max_tokens": cache.capacity_tokens, "max_blocks": max_blocks}
            step = cache.static_batch(shape.batch, shape.new, **sizes, packed=shape.packed)
            zeros = partial(torch.zeros, dtype=torch.int64, device=cache.device)
            tokens = zeros(step.batch, step.rows)
            wanted = zeros(shape.requests) if shape.packed else range(shape.new - shape.last, shape.new)

            def call() -> Tensor:
                out = self._call(step, tokens, step.positions, wanted)
                kinds.append(type(out))
                return out.logits

            try:
                logits, replay = self._capturer.capture(call)
                made = _Captured(step, tokens, wanted, logits, replay, kinds[-1])
            except CaptureError as error:
                why = str(error)
        if not cache.ring.all_reduce_min(int(made is not None)):
            self._refuse(why or "another rank could not capture a call", own=bool(why))
            return None
        assert made is not None, "a minimum of 1 includes this rank"
        self._graphs[shape] = made
        return made

    def _check(self, captured: _Captured, found: Tensor) -> Tensor:
        """Return the logits of a first replay when they equal a plain call's on every rank; else the latter, and drop the graph."""
        plain = self._call(captured.step, captured.tokens, captured.step.positions, captured.wanted).logits
        plain = plain[: len(found), : found.shape[1]]
        # NaN in both is equal
        difference, size = rms_difference(found.float().nan_to_num(), plain.float().nan_to_num())
        good = difference <= 4 * torch.finfo(plain.dtype).eps * size
        captured.checked = bool(self._cache.ring.all_reduce_min(int(good)))
        if captured.checked:
            return found
        self._graphs = {shape: one for shape, one in self._graphs.items() if one is not captured}
        here = f"a replay's logits differ from a plain call's by {difference:.2g} where these are of {size:.2g}"
        self._refuse("another rank got wrong logits" if good else f"wrong answer: {here}", own=not good)
        return plain

    def _refuse(self, why: str, own: bool) -> None:
        """Capture nothing more; warn on the rank that has the reason and on rank 0."""
        self.refusal = why
        if own or self._cache.ring.rank == 0:
            warnings.warn(f"decoding continues without more CUDA graphs: {why}", stacklevel=2)


def _pinned(tokens: Tensor, target: Tensor) -> Tensor:
    """Return tokens in memory from which they can be copied without waiting."""
    return tokens.pin_memory() if target.is_cuda and not tokens.is_cuda else tokens
