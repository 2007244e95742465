"""A call of a causal model whose new tokens go to a sharded cache: this rank's rows in, logits on every rank out.

Owns what becomes of a model's inputs and logits in such a call. Refuses to know generation (generation.py) and how requests are
scheduled: it is given the step of a cache.

Legend: b batch, s rows of this rank, n new tokens per batch element of the model, k wanted rows.

Note [A row for nobody]
    A prefill's rows are dealt in pages, so a rank may get none. Its layers must still be called, for the other ranks' keys come
    by. Not all code of models takes tensors without rows, so such a rank brings one row, whose keys are not kept and whose
    attention is 0.

Note [Wanted rows]
    In a prefill the last token is on one rank, and every rank must go on from its logits. Each rank computes the logits of the
    wanted rows it has and lays them among zeros. In the sum over ranks every number meets zeros only, so it is exact.

Note [Rows everywhere]
    In decode all ranks compute the same rows, to the same bits. Parts of a model may then share the work (splitting.py): they ask
    `whose_rows`, because a model hands them nothing but rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ringattn.inference import Step
from ringattn.ring import Ring

_everywhere: ContextVar[Ring | None] = ContextVar("rows_everywhere", default=None)
_attended: ContextVar[set[int] | None] = ContextVar("attended", default=None)


@contextmanager
def rows_everywhere(ring: Ring | None) -> Iterator[None]:
    """Inside, the rows that a model computes are the same on all ranks of a ring; None: each rank has its own."""
    before = _everywhere.set(ring)
    try:
        yield
    finally:
        _everywhere.reset(before)


def whose_rows() -> Ring | None:
    """The ring all of whose ranks have the rows that are being computed (Note [Rows everywhere]); None: there is none."""
    return _everywhere.get()


def attends_again(layer: int) -> bool:
    """Whether a layer has attended before in the call of a model that goes on; notes that it does now."""
    layers = _attended.get()
    again = layers is not None and layer in layers
    if layers is not None:
        layers.add(layer)
    return again


class PassingCache(Cache):
    """What a model takes for a cache in a call with a step: it hands keys through, which attention then keeps.

    With one, models neither make a cache of their own nor read positions for signs of packed documents.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def __bool__(self) -> bool:
        return True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The new keys and values."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002
        """Nothing came before, as far as the model knows: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int | None = 0) -> tuple[int, int]:  # noqa: ARG002
        """How many keys there are, and which is the first: those of the call (4.x says where queries are, 5.x how many)."""
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0


def run_step(model: nn.Module, step: Step, tokens: Tensor, *, wanted: Sequence[int] | None = None) -> Tensor:
    """Runs a causal model of transformers over the new tokens of a step; every rank calls it alike.

    Args:
        model: With `attn_implementation="ringattn"`, in eval mode; whole on every rank.
        step: What `PagedKVCache.extend` returned.
        tokens: All new tokens, the same on every rank: of packed requests one after another, `n` or `1 n`; of a batch that is
            alike, and in decode, `b n`. int64, on any device.
        wanted: Places in `step.requests` of those whose logits are wanted, ascending; None: all. Chunks of a prompt before its
            last one want none, and then none are computed.

    Returns:
        Logits of the last new token of each wanted request, `wanted vocab`, the same bits on every rank.

    Raises:
        ValueError: The tokens are not those that the step counts; other ranks find it when they compare the step.
        RuntimeError: The model does not attend with ringattn.

    Example:
        >>> step = cache.extend([first, second], [700, 300])  # doctest: +SKIP
        >>> run_step(model, step, torch.cat([prompt, other]), wanted=[1]).shape  # doctest: +SKIP
        torch.Size([1, 32000])
    """
    with step.cache.ring.propagate_errors():
        tokens = tokens[None] if tokens.dim() == 1 else tokens
        new = _new_tokens(step)
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
    step: Step,
    inputs: dict[str, Tensor],
    positions: Tensor,
    wanted: Sequence[int] | Tensor | None,
    **others: Any,
) -> Any:
    """One call of a model with the rows of this rank, and the logits of the wanted rows of all.

    Args:
        forward: The model, or its forward.
        step: Whose new tokens.
        inputs: `input_ids` `b n` or `inputs_embeds` `b n e`: all new tokens, the same on every rank.
        positions: `b s` or `1 s`: what rotary embeddings get, of this rank's rows.
        wanted: Rows among n whose logits are wanted, ascending; None: all. In decode also as `k` int64 on the device, in any order.
        others: Keywords for the model.

    Returns:
        What the model returned, with logits `b k vocab` that are the same on every rank.

    Raises:
        RuntimeError: The model does not attend with ringattn.
    """
    device = step.cache.device
    rows = {name: step.take(x.to(device), dim=1) for name, x in inputs.items()}
    positions = positions.to(device)
    if step.rows == 0:
        # Note [A row for nobody]
        rows = {name: x[:, :1].to(device) for name, x in inputs.items()}
        positions = positions.new_zeros(positions.shape[0], 1)
    new = _new_tokens(step)
    wanted = range(new) if wanted is None else wanted
    keep, places = _kept_rows(step, new, wanted, device)
    can_keep = "logits_to_keep" in inspect.signature(getattr(forward, "forward", forward)).parameters
    if can_keep:
        others["logits_to_keep"] = keep
    before = _attended.set(set())
    try:
        with rows_everywhere(step.cache.ring if step.mode == "decode" else None), step.one_call():
            out = forward(
                **rows,
                position_ids=positions,
                past_key_values=PassingCache(),
                use_cache=True,
                step=step,
                return_dict=True,
                **others,
            )
    finally:
        _attended.reset(before)
    if not step.calls:
        raise RuntimeError(
            "the model must attend with ringattn, got one that did not, whose tokens saw no cache; make it with "
            "attn_implementation='ringattn', or call model.set_attn_implementation('ringattn'); one that was made so and hands no "
            "keywords on to attention (as StableLM and Nemotron) is not supported"
        )
    logits = out.logits
    if not can_keep:
        logits = logits[:, logits.shape[1] - keep :] if isinstance(keep, int) else logits[:, keep]
    if places is not None:
        # Note [Wanted rows]
        whole = logits.new_zeros(logits.shape[0], len(wanted), logits.shape[2])
        whole[:, places] = logits
        logits = step.cache.ring.sum(whole)
    out.logits = logits
    return out


def _new_tokens(step: Step) -> int:
    """New tokens of each batch element of the model."""
    if step.mode == "decode":
        return step.rows
    return sum(step.counts) if step.batch == 1 else step.counts[0]


def _kept_rows(
    step: Step, new: int, wanted: Sequence[int] | Tensor, device: torch.device
) -> tuple[int | Tensor, Tensor | None]:
    """Which of this rank's rows are wanted, as transformers takes them, and their places among all wanted (None: no others)."""
    if isinstance(wanted, Tensor):
        assert step.mode == "decode", "rows of a prefill are looked up on the host"
        return wanted, None
    if step.mode == "decode":
        last = len(wanted)
        tail = last > 0 and list(wanted) == list(range(new - last, new))
        return (last if tail else torch.tensor(list(wanted), dtype=torch.int64, device=device)), None
    where = torch.full((new,), -1, device="cpu")
    where[step.taken.cpu()] = torch.arange(step.rows, device="cpu")
    rows = where[torch.tensor(list(wanted), dtype=torch.int64, device="cpu")]
    places = (rows >= 0).nonzero()[:, 0]
    keep = rows[places].to(device)
    return keep, None if step.cache.ring.world_size == 1 else places.to(device)
