"""Decoding of a causal model over a sharded cache: calls with few new tokens, replayed from CUDA graphs where that can be.

Owns the static inputs of such calls, which of them are captured and when, and the word of all ranks on it. Refuses to know where
tokens come from: generation.py, the server and the bench bring them.

Legend: b requests, n new tokens of each.

Note [Replays]
    A call of a model with a token is hundreds of launches, which take the host longer than the device. Captured once in a CUDA
    graph, they are one launch. A graph reads the addresses that it was captured with, so tokens and the step (`StaticStep`) are
    written in place and the graph is replayed; its logits stay where they are until the next replay, of this or another graph:
    graphs share their memory.

Note [Batches]
    A graph is of one shape: requests, new tokens, rows of logits. Fewer requests than it has places for are fine: the other rows
    hold token 0, see nothing, are kept nowhere, and their logits are dropped. So a few batch sizes serve all (`batch_sizes`),
    which double as long as a call's time is that of reading the weights. A graph also has room for so many blocks of a request on
    one rank: a power of two, at least LEAST_BLOCKS, and enough for what requests have reserved when it is captured. Requests that
    need more have it captured anew.

Note [Short prompts]
    A prompt of a few hundred tokens is a call of few products and as many launches as any other, so it is replayed, too: in a
    packed step (Note [Pieces] of inference/static.py), with a number of pieces that doubles from shape to shape. Prompts, or
    what is left of them, share a call as far as there are pieces. In pieces of a single row they share it with the next tokens
    of answers, which would leave 15 of 16 rows of a larger piece empty; but every row then reads the keys before it by itself.

Note [All ranks alike]
    What is captured, and which call is replayed, follows from numbers that all ranks hold alike. Before a capture the call is
    made once with no requests at all, which compiles kernels and lets ranks compare what they have not compared, and once more
    with an error for whatever waits for the device. Then ranks agree: a call that one of them could not capture is made without a
    graph by all, and nothing more is captured. The first replay of a graph is checked against a plain call, because a number that
    a model has worked out on the host is in the graph for ever; logits that are not the same within rounding refuse it likewise.

Note [A replay that does not end]
    A rank that dies leaves the others in a replay whose exchange nobody answers, and torch's watchdog does not see it. So after
    a replay the host waits for what it has computed in a way that ends (`Ring.synchronize`), before anybody blocks to read it. Who
    makes calls before it reads what earlier ones gave waits so by itself (`awaited=False`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ringattn.inference import PagedKVCache, StaticStep
from ringattn.inference.static import most_blocks
from ringattn.inference.step import MOST_DECODED
from ringattn.integrations.transformers.replacing import distance
from ringattn.integrations.transformers.steps import forward_step
from ringattn.transport.timeout import EventPair

LEAST_BLOCKS = 1024
"""Blocks of a request on one rank for which there is room at first."""
PACKED_BLOCKS = 16384
"""The same of packed calls, which are not recorded again: what has more is a prompt for the ring."""
DOUBLED = 64
"""Batch sizes double up to this one, and then grow by it (Note [Batches])."""
ROW_TOKENS = 8192
"""Tokens of a request on one rank for which packed calls in pieces of one row have room, in blocks that are half full; each row
has blocks of its own."""
MOST_GRAPHS = 16
"""Shapes that are captured, where nobody says which ones will come."""


class CannotRecord(RuntimeError):
    """A call can not be replayed; the message says why."""


class Recorder(Protocol):
    """What makes a call that can be made again and again, at the same addresses."""

    def record(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], EventPair | None]]:
        """Records a call, which it may make before.

        Args:
            call: Reads and writes at addresses that stay.

        Returns:
            Where the result of the call is, and what writes it there anew, and returns where that begins and ends; None for on the
            current stream, from now on.

        Raises:
            CannotRecord: It can not be recorded.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory.

    Args:
        device: Of all calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], EventPair | None]]:
        """See `Recorder.record`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # the default stream can not be captured; what fails here fails without a graph, too
        with torch.cuda.stream(self._stream):
            call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # a capture that fails leaves more behind than a call that is refused
            with torch.cuda.stream(self._stream), _refused_waits():
                call()
            # torch leaves its stream in place when a capture fails
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                out = call()
        except Exception as error:
            torch.cuda.synchronize(self._device)
            _release_generator(self._device)
            _release_allocator(self._device, self._pool)
            self._pool = torch.cuda.graph_pool_handle()  # torch refuses one that nobody holds any more
            lines = str(error).strip().splitlines() or ["no message"]
            raise CannotRecord(f"{type(error).__name__}: {lines[0]}") from error
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
def _refused_waits() -> Iterator[None]:
    """Inside, operations that wait for the device are errors, as they are in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # that it does not find all of them; the capture does
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _release_generator(device: torch.device) -> None:
    """Lets a device's generator draw again, which a capture that failed may have left in the state of one."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def _release_allocator(device: torch.device, pool: tuple[int, int]) -> None:
    """Ends the capture in the books of a device's allocator, which torch leaves open where a stream's capture ends in an error.

    With one open, `torch.cuda.empty_cache` raises, and so does the end of the process; torch has no public way to end it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(AttributeError, RuntimeError):  # another torch; no capture is open
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


def batch_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that serve all up to the largest one (Note [Batches]).

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


def find_obstacle(model: nn.Module, cache: PagedKVCache) -> str | None:
    """Why calls of a model over a cache are not captured, by what can be known before; None where they can be tried.

    Every rank calls it alike: it asks for the ring's exchange, which is made at its first use.

    Args:
        model: Whose calls.
        cache: Over which cache.
    """
    device = cache.device
    if device.type != "cuda":
        return f"graphs need a GPU, and the cache is in {device.type} memory"
    reducer = cache.ring.partial_reducer(device)
    if not reducer.capturable:
        return f"the exchange of partials can not be captured ({reducer})"
    elsewhere = sorted({str(x.device) for x in model.parameters() if x.device != device})
    if elsewhere:
        return f"the model has weights on {', '.join(elsewhere)} beside {device}"
    return None


def choose_recorder(graphs: bool | Recorder | None, model: nn.Module, cache: PagedKVCache) -> Recorder | None:
    """What records the calls of a model over a cache; every rank calls it alike.

    Args:
        graphs: True: CUDA graphs; False: nothing; None: CUDA graphs on GPUs, unless something speaks against it, of which it
            warns; or a recorder of one's own.
        model: Whose calls.
        cache: Over which cache.

    Raises:
        ValueError: There can be no graphs, and they were asked for.
    """
    if graphs is False or not isinstance(graphs, bool | None):
        return None if graphs is False else graphs
    if graphs is None and cache.device.type != "cuda":
        return None
    why = find_obstacle(model, cache)
    if why is None:
        return CudaGraphs(cache.device)
    if graphs:
        raise ValueError(f"graphs must be False or left out where calls can not be captured, got True: {why}")
    warnings.warn(f"decoding goes without CUDA graphs: {why}", stacklevel=2)
    return None


class _Shape(NamedTuple):
    """What a graph serves.

    Attributes:
        batch: Places for requests, or pieces.
        new: New tokens of each.
        last: Of how many of these logits are wanted, which are the last ones; 0: of packed requests, of each the last one.
        most: Packed: how many requests.
    """

    batch: int
    new: int
    last: int
    most: int = 0

    @property
    def packed(self) -> bool:
        """Whether requests are cut into pieces."""
        return self.last == 0


@dataclass(eq=False)
class _Recorded:
    """One recorded call.

    Attributes:
        step: What it reads of the cache's books.
        tokens: `batch new` int64: what else it reads; packed: `1 (batch new)`.
        wanted: Rows whose logits it writes: packed: `most` int64, which it reads too.
        logits: `batch last vocab`: what it writes; packed: `1 most vocab`.
        replay: Makes it again; returns where that begins and ends.
        kind: What the model returns.
        checked: It has been found to be right.
    """

    step: StaticStep
    tokens: Tensor
    wanted: range | Tensor
    logits: Tensor
    replay: Callable[[], EventPair | None]
    kind: Callable[..., Any]
    checked: bool = False


class Decoding:
    """Calls of a model with few new tokens of each request, replayed where they can be (Note [Replays]).

    Every rank makes the same one, and the same calls.

    Args:
        forward: A causal model of transformers with `attn_implementation="ringattn"`, in eval mode, or its forward.
        cache: Where the requests are.
        recorder: What records calls; None: each is made plainly.
        batches: Batch sizes, ascending (`batch_sizes`); None: each batch that comes is a size of its own.
        pieces: Numbers of pieces of packed calls, ascending (Note [Short prompts]); none: prompts are not replayed.
        rows: Numbers of rows of packed calls in pieces of one row, ascending (likewise); none: there are no such calls. They
            take as many requests as the largest of `batches`.
        patience: The how manieth call of a shape is recorded first. Recording takes about as long as three calls.
        most: Shapes that are recorded at most.
        awaited: Whether replays are waited for (Note [A replay that does not end]); False: the caller does it.

    Attributes:
        refusal: Why nothing more is recorded; None as long as calls are.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: PagedKVCache,
        recorder: Recorder | None,
        *,
        batches: Sequence[int] | None = None,
        pieces: Sequence[int] = (),
        rows: Sequence[int] = (),
        patience: int = 1,
        most: int = MOST_GRAPHS,
        awaited: bool = True,
    ) -> None:
        self._forward, self._cache, self._recorder = forward, cache, recorder
        self._batches, self._patience, self._most = batches, patience, most
        few = max(batches or (1,))
        self._packed = [
            *(_Shape(batch, MOST_DECODED, 0, batch) for batch in pieces),
            *(_Shape(batch, 1, 0, min(batch, few)) for batch in rows),
        ]
        self._recorded: dict[_Shape, _Recorded] = {}
        self._met: Counter[_Shape] = Counter()
        self._replays = 0
        self._awaited = awaited
        self.refusal: str | None = None if recorder is not None else "nothing records"

    @property
    def recorded(self) -> int:
        """How many shapes are replayed."""
        return len(self._recorded)

    @property
    def most_pieces(self) -> int:
        """Pieces of MOST_DECODED rows that requests may be cut into to be replayed in one packed call; 0: none are."""
        return max((shape.batch for shape in self._recorded if shape.packed and shape.new == MOST_DECODED), default=0)

    @property
    def most_rows(self) -> int:
        """Rows of a packed call in pieces of one row; 0: there are no such calls."""
        return max((shape.batch for shape in self._recorded if shape.packed and shape.new == 1), default=0)

    def prepare(self, new: int = 1) -> None:
        """Records all batch sizes and numbers of pieces, so that no later call waits for it.

        Args:
            new: New tokens of each request.
        """
        # the largest first: the others find room in its memory
        for shape in reversed([*(_Shape(batch, new, 1) for batch in self._batches or ()), *self._packed]):
            if self.refusal is None and shape not in self._recorded:
                rows = -(-2 * ROW_TOKENS // self._cache.page_size)
                self._record(shape, 1 if not shape.packed else PACKED_BLOCKS if shape.new > 1 else rows)

    @torch.no_grad()
    def run(
        self,
        requests: Sequence[int],
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        last: int = 1,
        alike: bool = False,
    ) -> Any:
        """Brings new tokens of requests to the cache, and computes their logits.

        Args:
            requests: Which ones.
            tokens: `b n` int64, 1 <= n <= 16, the same on every rank, on any device.
            positions: `b n` or `1 n`: what rotary embeddings get; None: the places of the tokens in their requests.
            last: Of how many of the new tokens logits are wanted, at least 1.
            alike: As in `PagedKVCache.extend`.

        Returns:
            What the model returns, with logits `b last vocab`, the same bits on every rank. Of a call that was replayed it has
            nothing else, and the logits are overwritten by the next call.

        Raises:
            ValueError: As `PagedKVCache.extend`.
            CacheFull: Likewise.
            RuntimeError: A rank did not come within the ring's timeout; of a replay as `Ring.synchronize` says.
        """
        b, new = tokens.shape
        recorded = self._find(requests, new, last)
        if recorded is None:
            step = self._cache.extend(requests, [new] * b, mode="decode", alike=alike)
            return self._call(step, tokens, step.positions if positions is None else positions, range(new - last, new))
        self._check_ring()
        self._cache.extend(requests, [new] * b, mode="decode", alike=alike, into=recorded.step)
        recorded.tokens[:b].copy_(_ready(tokens, recorded.tokens), non_blocking=True)
        if positions is not None:
            recorded.step.positions[:b].copy_(positions)
        logits = self._replay(recorded, "decoding step", f"{b} requests, {new} new tokens each")[:b]
        if not recorded.checked:
            logits = self._check(recorded, logits)
        return recorded.kind(logits=logits)

    @torch.no_grad()
    def run_packed(
        self, requests: Sequence[int], counts: Sequence[int], tokens: Tensor, *, piece: int = MOST_DECODED
    ) -> Tensor | None:
        """Brings short prompts, or parts of prompts, and computes the logits of their last tokens (Note [Short prompts]).

        Args:
            requests: Which ones.
            counts: New tokens of each.
            tokens: `sum(counts)` int64, one request after another, the same on every rank, on any device.
            piece: Rows of the pieces into which requests are cut: 1 where many bring one token.

        Returns:
            Logits `requests vocab`, the same bits on every rank, which the next call overwrites; None: no recorded call has room
            for them, and nothing was done.

        Raises:
            ValueError: As `PagedKVCache.extend`.
            RuntimeError: As `run`.
        """
        pieces, many = sum(-(-count // piece) for count in counts), len(requests)
        found = [
            one
            for shape, one in self._recorded.items()
            if shape.packed and shape.new == piece and shape.batch >= pieces and shape.most >= many
        ]
        recorded = min(found, key=lambda one: one.step.tiles[0], default=None)
        books = self._cache.pages
        if recorded is None or most_blocks(books, requests, max(counts)) > recorded.step.max_blocks:
            return None
        self._check_ring()
        step = recorded.step
        self._cache.extend(requests, counts, into=step)
        # pieces of one row leave no gaps, and tokens that only the device knows stay there
        laid = tokens[None] if piece == 1 else step.lay(tokens)
        recorded.tokens[:, : laid.shape[1]].copy_(_ready(laid, recorded.tokens), non_blocking=True)
        lasts = torch.tensor([row for one in step.last_rows if one is not None for row in one[1:]], device="cpu")
        assert isinstance(recorded.wanted, Tensor), "rows of packed requests are written in place"
        recorded.wanted[: len(lasts)].copy_(_ready(lasts, recorded.wanted), non_blocking=True)
        brought = f"{len(requests)} requests, {sum(counts)} new tokens"
        logits = self._replay(recorded, "step of short prompts", brought)[:, : len(requests)]
        if not recorded.checked:
            logits = self._check(recorded, logits)
        return logits[0]

    def _call(self, step: Any, tokens: Tensor, positions: Tensor, wanted: range | Tensor) -> Any:
        return forward_step(self._forward, step, {"input_ids": tokens}, positions, wanted)

    def _check_ring(self) -> None:
        """A replay asks nobody whether the ring has failed."""
        self._cache.ring.partial_reducer(self._cache.device).check()

    def _replay(self, recorded: _Recorded, name: str, brought: str) -> Tensor:
        """All logits of a call whose inputs are there (Note [A replay that does not end]); the words are for an error."""
        events, ring = recorded.replay(), self._cache.ring
        self._replays += 1
        if ring.world_size > 1 and (self._awaited or not recorded.checked):
            ring.synchronize(self._cache.device, events=events, what=f"replayed {name} {self._replays} ({brought})")
        return recorded.logits

    def _find(self, requests: Sequence[int], new: int, last: int) -> _Recorded | None:
        """What serves a call; recorded now, if it is to be."""
        if self._recorder is None:
            return None
        sizes = (len(requests),) if self._batches is None else self._batches
        batch = next((size for size in sizes if size >= len(requests)), None)
        if batch is None:
            return None
        shape = _Shape(batch, new, last)
        books = self._cache.pages
        blocks = most_blocks(books, requests, new)
        found = self._recorded.get(shape)
        if found is not None and blocks <= found.step.max_blocks:
            return found
        self._met[shape] += 1
        if self.refusal is not None or (found is None and len(self._recorded) >= self._most):
            return None
        if found is None and self._met[shape] < self._patience:
            return None
        ahead = max(books.reserved(request) - books.length(request) for request in requests)
        return self._record(shape, max(blocks, most_blocks(books, requests, ahead)))

    def _record(self, shape: _Shape, blocks: int) -> _Recorded | None:
        """Records a shape with room for so many blocks; None where a rank can not (Note [All ranks alike])."""
        assert self._recorder is not None, "whoever has no recorder records nothing"
        # what is outgrown is let go first
        self._recorded.pop(shape, None)
        cache = self._cache
        if shape.packed:
            room = min(blocks, cache.pages.pages + 1)
        else:
            room = min(LEAST_BLOCKS, cache.pages.pages + 1)
            while room < blocks:
                room *= 2
        kinds: list[Callable[..., Any]] = []
        made, why = None, ""
        # what is written in place must not be bound to the mode of whoever came first
        with torch.inference_mode(False), torch.no_grad():
            step = cache.static_step(
                shape.batch, shape.new, max_tokens=cache.capacity_tokens, max_blocks=room, packed=shape.packed
            )
            tokens = torch.zeros(step.batch, step.rows, dtype=torch.int64, device=cache.device)
            wanted = (
                torch.zeros(shape.most, dtype=torch.int64, device=cache.device)
                if shape.packed
                else range(shape.new - shape.last, shape.new)
            )

            def call() -> Tensor:
                out = self._call(step, tokens, step.positions, wanted)
                kinds.append(type(out))
                return out.logits

            try:
                logits, replay = self._recorder.record(call)
                made = _Recorded(step, tokens, wanted, logits, replay, kinds[-1])
            except CannotRecord as error:
                why = str(error)
        if not cache.ring.all_reduce_min(int(made is not None)):
            self._refuse(why or "another rank could not capture a call", own=bool(why))
            return None
        assert made is not None, "the least of all ranks is not more than this one's"
        self._recorded[shape] = made
        return made

    def _check(self, recorded: _Recorded, found: Tensor) -> Tensor:
        """The logits of a first replay, if they are what a plain call gives, on every rank; else those, and it is dropped."""
        plain = self._call(recorded.step, recorded.tokens, recorded.step.positions, recorded.wanted).logits
        plain = plain[: len(found), : found.shape[1]]
        # what is no number in both is alike
        apart, size = distance(found.float().nan_to_num(), plain.float().nan_to_num())
        good = apart <= 4 * torch.finfo(plain.dtype).eps * size
        recorded.checked = bool(self._cache.ring.all_reduce_min(int(good)))
        if recorded.checked:
            return found
        self._recorded = {shape: one for shape, one in self._recorded.items() if one is not recorded}
        apart_here = f"a replay's logits differ from a plain call's by {apart:.2g} where these are of {size:.2g}"
        self._refuse("another rank was answered wrongly" if good else f"wrong answer: {apart_here}", own=not good)
        return plain

    def _refuse(self, why: str, own: bool) -> None:
        """Records nothing more; says so, where the reason is and on rank 0."""
        self.refusal = why
        if own or self._cache.ring.rank == 0:
            warnings.warn(f"decoding goes on without more CUDA graphs: {why}", stacklevel=2)


def _ready(tokens: Tensor, target: Tensor) -> Tensor:
    """Tokens that can be copied to where they go without waiting."""
    return tokens.pin_memory() if target.is_cuda and not tokens.is_cuda else tokens
