"""Forward of a causal model over a sharded KV cache: this rank's rows in, logits on every rank out.

Legend: b batch, s rows of this rank, n new tokens per batch element of the model, k rows whose logits are wanted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn, Protocol, SupportsIndex, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from ringattn.inference import ForwardBatch
from ringattn.ring import Ring

ROUNDINGS = 4
"""Rounding errors by which outputs may differ in the mean: a layer rounds between its matrix products."""

Function = TypeVar("Function", bound=Callable[..., Any])

_replicated: ContextVar[Ring | None] = ContextVar("replicated_rows", default=None)
_attended: ContextVar[set[int] | None] = ContextVar("attended", default=None)
_prefill: ContextVar[PrefillRows | None] = ContextVar("prefill_rows", default=None)


@contextmanager
def _setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def replicated_rows(ring: Ring | None) -> AbstractContextManager[None]:
    """Declare that all ranks of a ring compute the same rows inside; None: each rank has its own."""
    return _setting(_replicated, ring)


def replicated_rows_ring() -> Ring | None:
    """Return the ring whose ranks all compute the current rows, to the same bits; None: there is none.

    Parts of a model may then use tensor parallelism (tensor_parallel.py). A model passes them nothing but rows, so they read it
    here.
    """
    return _replicated.get()


def one_forward() -> AbstractContextManager[None]:
    """Mark one call of a model inside, in which each layer attends once."""
    return _setting(_attended, set())


def is_in_forward() -> bool:
    """Return whether a call of a model with a step of a cache is running."""
    return _attended.get() is not None


def attended_before(layer: int) -> bool:
    """Return whether a layer has attended before in this call of a model, and record that it does now."""
    layers = _attended.get()
    again = layers is not None and layer in layers
    if layers is not None:
        layers.add(layer)
    return again


@dataclass(eq=False)
class PrefillRows:
    """Rows of a prefill by a model whose weights are sharded (Note [Sharded weights] of sharded_weights/shard.py).

    Attributes:
        step: The new tokens.
        replicated: Every rank computes all rows, except in attention, where it has those of the step.
        positions: Replicated: `b n` or `1 n`: positions of all rows.
        places: Not replicated: the places of this rank's wanted rows among all wanted ones.
        wanted: Number of all wanted rows.
        whole_tokens: The tokens that are embedded are all new ones on every rank.
    """

    step: ForwardBatch
    replicated: bool
    positions: Tensor | None = None
    places: Tensor | None = None
    wanted: int = 0
    whole_tokens: bool = False

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows `b s ...` of all rows `b n ...`."""
        return self.step.take(x)

    def all_rows(self, own: Tensor) -> Tensor:
        """Return all rows `b n ...`, in the order of the new tokens, from the rows `b s ...` of each rank. Collective."""
        step = self.step
        assert step.sharding is not None, "a prefill has a sharding"
        parts = step.cache.ring.gather(own.contiguous(), 1, step.sharding.shard_lens)
        order = step.once("rows of ranks", lambda: torch.cat(step.taken_by_rank()).argsort().to(own.device))
        assert order is not None, "ranks have rows"
        return torch.cat(parts, 1).index_select(1, order)


def prefill_rows() -> PrefillRows | None:
    """Return the rows of the current prefill by a model with sharded weights; None in other calls."""
    return _prefill.get()


class StepWeights(Protocol):
    """Weights of a model that are sharded over the ranks of a ring."""

    def gathers(self, rows: int) -> bool:
        """Return whether a prefill of so many rows computes with gathered weights."""
        ...

    def check_unchanged(self) -> None:
        """Raise where layers or weights are no longer those that were sharded."""
        ...

    def gather_ahead(self) -> AbstractContextManager[None]:
        """Gather the weights of layers ahead inside, which is one call of the model. Collective."""
        ...


SHARDED: WeakKeyDictionary[nn.Module, StepWeights] = WeakKeyDictionary()
"""Models whose weights are sharded."""


def sharded_weights(forward: Callable[..., Any]) -> StepWeights | None:
    """Return the sharded weights of a model, or of that of a bound forward; None where each rank has whole weights."""
    owner: Any = forward
    while not isinstance(owner, nn.Module | None):
        # a bound method, or what replaced one
        owner = getattr(owner, "__self__", None) or getattr(owner, "__wrapped__", None)
    owner = getattr(owner, "_orig_mod", owner)  # in torch.compile(model)
    return SHARDED.get(owner) if isinstance(owner, nn.Module) else None


CACHE_KEYWORDS = ("cache", "past_key_values")
"""Keywords of a call's cache: since transformers 5.24, and before."""
_BY_RELEASE = inspect.signature(cast(Any, GenerationMixin).prepare_inputs_for_generation).parameters


def cache_keyword(parameters: Container[str]) -> str:
    """Return the keyword by which a function with these parameters takes its cache; that of the release if it names none."""
    named = (name for known in (parameters, _BY_RELEASE) for name in CACHE_KEYWORDS if name in known)
    return next(named)


class PassthroughCache(Cache):
    """The cache of a call with a step: returns new keys and values unchanged; attention stores them.

    With one, models neither create a cache of their own nor search positions for packed documents.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def __bool__(self) -> bool:
        return True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the new keys and values."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002
        """Return 0: positions are given, so the model need not know what is cached."""
        return 0

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int | None = 0) -> tuple[int, int]:  # noqa: ARG002
        """Return the number of keys of this call and the index of the first (4.x passes positions, 5.x a number)."""
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0


def run_step(model: nn.Module, step: ForwardBatch, tokens: Tensor, *, wanted: Sequence[int] | None = None) -> Tensor:
    """Run a causal model of transformers over the new tokens of a step; collective over the ring.

    Args:
        model: With `attn_implementation="ringattn"`, in eval mode; whole on every rank.
        step: As returned by `PagedKVCache.extend`.
        tokens: All new tokens, the same on every rank: of packed requests one after another, `n` or `1 n`; of a batch with equal
            lengths, and in decode, `b n`. int64, on any device.
        wanted: Indices into `step.requests` of those whose logits are wanted, ascending; None: all. Chunks of a prompt before its
            last one want none, and then none are computed.

    Returns:
        Logits of the last new token of each wanted request, `wanted vocab`, the same bits on every rank.

    Raises:
        ValueError: The tokens are not those that the step counts; other ranks raise when they compare the step.
        RuntimeError: The model does not attend with ringattn.

    Example:
        >>> step = cache.extend([first, second], [700, 300])  # doctest: +SKIP
        >>> run_step(model, step, torch.cat([prompt, other]), wanted=[1]).shape  # doctest: +SKIP
        torch.Size([1, 32000])
    """
    with step.cache.ring.propagate_errors():
        tokens = tokens[None] if tokens.dim() == 1 else tokens
        new = new_tokens(step)
        if tuple(tokens.shape) != (step.batch, new):
            raise ValueError(
                f"tokens must be the {step.batch} x {new} new tokens that the step counts, got {tuple(tokens.shape)}; "
                "pass all of them on every rank"
            )
        chosen = list(range(len(step.requests))) if wanted is None else list(wanted)
        packed = step.mode == "prefill" and step.batch == 1
        ends = [end - 1 for end in accumulate(step.counts)]
        rows = [ends[place] for place in chosen] if packed else [new - 1] if chosen else []
    with torch.no_grad():
        out = forward_step(model, step, {"input_ids": tokens}, step.positions, rows)
    if packed:
        return out.logits[0]
    logits = out.logits[:, 0] if chosen else out.logits[:0].flatten(0, 1)
    return logits if len(chosen) in (0, step.batch) else logits[chosen]


def forward_step(
    forward: Callable[..., Any],
    step: ForwardBatch,
    inputs: dict[str, Tensor],
    positions: Tensor,
    wanted: Sequence[int] | Tensor | None,
    images: Mapping[str, Any] | None = None,
    **others: Any,
) -> Any:
    """Call a model with the rows of this rank, and return its output with the logits `b k vocab` of the wanted rows of all ranks.

    Args:
        forward: The model, or its forward.
        step: The new tokens.
        inputs: `input_ids` `b n` or `inputs_embeds` `b n e`: all new tokens, the same on every rank.
        positions: `b s` or `1 s`: positions for rotary embeddings, of this rank's rows; with images of all new tokens, `b n`,
            `3 b n` or `4 b n`.
        wanted: Rows among n whose logits are wanted, ascending; None: all. In decode also as `k` int64 on the device, in any order.
        images: Keywords that the model reads whole. The model then gets all new tokens, and takes this rank's rows of their
            embeddings (Note [Whole inputs] of model_hooks.py).
        others: Keywords for the model.
    """
    device, ring = step.cache.device, step.cache.ring
    positions, new = positions.to(device), new_tokens(step)
    wanted = range(new) if wanted is None else wanted
    weights = None if step.mode == "decode" else sharded_weights(forward)
    prefill = None
    if weights is not None:
        with ring.propagate_errors():
            weights.check_unchanged()
        prefill = PrefillRows(
            step, not weights.gathers(step.batch * new), wanted=len(wanted), whole_tokens=bool(images)
        )
    replicated = step.mode == "decode" or (prefill is not None and prefill.replicated)
    keep, places = _kept_rows(step, new, wanted, device, replicated)
    if prefill is not None:
        prefill.places = places
    if images or replicated:
        rows = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in {**inputs, **(images or {})}.items()}
    else:
        rows = {name: own_rows(step, x.to(device)) for name, x in inputs.items()}
    if prefill is not None and prefill.replicated:
        prefill.positions = positions = positions if images else prefill.all_rows(positions)
    elif not images and step.rows == 0:
        positions = positions.new_zeros(positions.shape[0], 1)
    parameters = inspect.signature(getattr(forward, "forward", forward)).parameters
    others[cache_keyword(parameters)] = PassthroughCache()
    can_keep = "logits_to_keep" in parameters
    others |= {"logits_to_keep": keep} if can_keep else {}
    ahead = nullcontext() if weights is None or replicated else weights.gather_ahead()
    with (
        one_forward(),
        replicated_rows(ring if replicated else None),
        _setting(_prefill, prefill),
        ahead,
        step.one_call(),
    ):
        out = forward(**rows, position_ids=positions, use_cache=True, step=step, return_dict=True, **others)
    if not step.calls:
        raise RuntimeError(
            "the model must attend with ringattn, got one that did not, whose tokens saw no cache; make it with "
            "attn_implementation='ringattn', or call model.set_attn_implementation('ringattn'); one that was made so and hands no "
            "keywords on to attention (as StableLM and Nemotron) is not supported"
        )
    logits = out.logits
    if not can_keep:
        logits = logits[:, logits.shape[1] - keep :] if isinstance(keep, int) else logits[:, keep]
    if places is not None and prefill is None:
        # every row is computed on one rank and zero on the others, so the sum is exact
        whole = logits.new_zeros(logits.shape[0], len(wanted), logits.shape[2])
        whole[:, places] = logits
        logits = step.cache.ring.sum(whole)
    out.logits = logits
    return out


def own_rows(step: ForwardBatch, x: Tensor, dim: int = 1) -> Tensor:
    """Return this rank's rows of all new tokens.

    A rank without rows runs its layers on one padding row, because KV shards of other ranks pass through them.
    """
    return step.take(x, dim) if step.rows else x.narrow(dim, 0, 1)


def new_tokens(step: ForwardBatch) -> int:
    """Return the new tokens of each batch element of the model."""
    if step.mode == "decode":
        return step.rows
    return sum(step.counts) if step.batch == 1 else step.counts[0]


def _kept_rows(
    step: ForwardBatch, new: int, wanted: Sequence[int] | Tensor, device: torch.device, replicated: bool
) -> tuple[int | Tensor, Tensor | None]:
    """Return the wanted rows of this rank as `logits_to_keep`, and their places among all wanted (None: there are no others)."""
    if isinstance(wanted, Tensor):
        assert step.mode == "decode", "rows of a prefill are looked up on the host"
        return wanted, None
    if replicated:
        last = len(wanted)
        tail = last > 0 and list(wanted) == list(range(new - last, new))
        return (last if tail else torch.tensor(list(wanted), dtype=torch.int64, device=device)), None
    where = torch.full((new,), -1, device="cpu")
    where[step.taken.cpu()] = torch.arange(step.rows, device="cpu")
    rows = where[torch.tensor(list(wanted), dtype=torch.int64, device="cpu")]
    places = (rows >= 0).nonzero()[:, 0]
    keep = rows[places].to(device)
    return keep, None if step.cache.ring.world_size == 1 else places.to(device)


class BoundPatch:
    """A method that replaces one of a module, with its name and signature, and raises when it is copied.

    A copy would run the first module's weights.
    """

    def __init__(self, call: Callable[..., Any], original: Callable[..., Any], refusal: str) -> None:
        functools.update_wrapper(self, original)
        self._call, self._refusal = call, refusal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the new method."""
        return self._call(*args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise RuntimeError(self._refusal)


def untraced(function: Function, *, nested: bool = True) -> Function:
    """Return a function at which torch.compile breaks its graph; nested: it does not compile what the function calls, either."""
    disabled: Any = torch.compiler.disable(function, recursive=nested)
    return disabled


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or its forward was replaced by other code."""
    replaced = not isinstance(vars(module).get("forward"), BoundPatch | None)
    return replaced or hasattr(module, "_hf_hook") or bool(module._forward_hooks or module._forward_pre_hooks)


def failure_on_any_rank(failure: str, ring: Ring, what: str = "", digest: str = "") -> str:
    """Return this rank's failure, or that another rank failed or has another digest; else empty. Collective over the ring."""
    if not ring.all_reduce_min(int(not failure)):
        return failure or "another rank failed"
    try:
        if what:
            ring.assert_equal_across_ranks(what, digest)
    except ValueError as error:
        return str(error)
    return ""


def describe_error(error: Exception) -> str:
    """Return an error in one line; for a compiler's error, its cause."""
    cause = getattr(error, "inner_exception", error)
    lines = str(cause).strip().splitlines() or ["no message"]
    return f"{type(cause).__name__}: {lines[0]}"


def rms_difference(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the root mean square of the difference, and of the expected numbers."""
    x, y = found.float(), expected.float()
    difference, size = (float(z.square().mean().sqrt()) for z in (x - y, y))
    return difference, size


def describe_difference(name: str, found: Tensor, expected: Tensor, module: nn.Module) -> str:
    """Return how a new forward's output differs from the old one's by more than rounding; empty when it does not.

    The tolerance is `ROUNDINGS` units of the dtype, plus the error of a sum of n fp32 products in another order, sqrt(n) units
    of fp32. n is the largest dimension of the module's weights.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        before, after = (f"{tuple(x.shape)} {x.dtype}" for x in (expected, found))
        return f"{name} gives {after} instead of {before}"
    difference, size = rms_difference(found, expected)
    terms = max((length for x in module.parameters() for length in x.shape), default=1)
    tolerance = ROUNDINGS * torch.finfo(expected.dtype).eps + terms**0.5 * torch.finfo(torch.float32).eps
    is_close = difference <= tolerance * size
    return "" if is_close else f"{name} differs by {difference:.2g} where numbers are of {size:.2g}"
