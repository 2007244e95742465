"""`model.generate` on the ranks of a ring, over a cache that all of them hold together.

Owns `RingCache`: what generation asks of a cache, as calls of a sharded, paged one, and the model's forward as long as it is
entered. Refuses to know attention, and how a call's rows and logits are dealt (steps.py).

    with RingCache(model, ring, max_tokens=100_000) as cache:
        ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=200)

Note [Alike on all ranks]
    Every rank runs all of `generate` on the whole inputs, and computes and keeps a part of it. That goes well as long as all
    choose the same tokens: logits are the same bits everywhere, and the random generators of all ranks are set to the state of
    rank 0's when `generate` begins, and by calls outside of it that bring a prompt.
    Ranks compare what they were given, and where they differ it is an error on every rank before anything is computed:
    - when `generate` begins: its arguments;
    - at its first call of the model, and at any other call that brings more than few tokens: tokens, padding, places, and
      whose logits are wanted. So do calls outside of `generate` that bring more than one token.
    A call that goes on from there brings tokens which every rank has chosen from what all hold alike. It sends nothing. What it
    brings is noted, and travels along with the comparisons of steps (Note [Words that travel along] of accord.py), one in 17
    tokens; when `generate` ends, the rest is compared together with what it returns, and when the cache is left, what came
    since. So a rank that chose otherwise is found by the end, and what is returned was the same on all ranks.
    Such a call that is refused on one rank alone says so to whoever compares next, and so does what fails between two calls (a
    streamer or a logits processor of one rank); ranks that are in the exchange already wait for it until the timeout.

Note [Beams]
    Sequences that go on from the same one share its full pages, so beams take no more room than sequences do: reordering copies
    at most the last, partly filled page of each.

Note [Drafts]
    With `assistant_early_exit` the model proposes tokens by its first layers and checks them by all. What the first layers keep of
    a token is the same either way, so a draft goes on in the cache itself, and when it ends the cache is cropped to where it
    began: the check brings the draft's tokens anew, for all layers. A draft takes no memory of its own, and ranks share its calls
    like any other.
    transformers would keep the cache of one draft for the next. It is given a `_Drafted` instead, from which nothing can be taken
    back. How many layers there are it says by changing the model's config, for as long as no error comes between. So `generate`
    puts back what was changed on the model (`_unchanged`), however it ends.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from hashlib import blake2b
from math import ceil
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, MaxTimeCriteria, PretrainedConfig, PreTrainedModel

from ringattn.inference import PagedKVCache
from ringattn.inference.step import MOST_DECODED
from ringattn.integrations.transformers.attention import check_layers
from ringattn.integrations.transformers.decoding import Decoding, Recorder, choose_recorder
from ringattn.integrations.transformers.positions import find_table
from ringattn.integrations.transformers.replacing import OfOne
from ringattn.integrations.transformers.steps import forward_step
from ringattn.ring import Ring

CROPS_BY_COUNT = "tokens_to_remove" in inspect.signature(Cache.crop).parameters
"""Whether `crop` takes a number of tokens to remove, as a negative number, and nothing else; older releases take a length too."""

NO_COPY = "a model must be copied or saved whole outside of `with RingCache(...)`, got one inside; copy it before"
"""What whoever copies a model inside of it is told."""

SHOWN = 400
"""Letters of what generate is called with that an error shows."""
_OWN = ("past_key_values", "streamer")
"""Arguments of generate that each rank has for itself: who listens may listen on one rank only."""
_LEARNT = ("num_assistant_tokens", "assistant_confidence_threshold")
"""What a call of generate may leave in the generation config for the next one, if asked to."""
_PASSED_ON = ("output_router_logits", "output_attentions")
_TAKEN = (
    "attention_mask",
    "cache_position",
    "input_ids",
    "inputs_embeds",
    "logits_to_keep",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
)


class RingCache(Cache):
    """The cache of `model.generate` on the ranks of a ring, each of which keeps a part of it.

    Inside of `with`, calls of the model with this cache as past_key_values share their work: every rank makes the same calls with
    the whole inputs, computes its rows of a prompt, and gets the same logits. Calls without it are as before. A second call goes
    on where the first ended; `reset` starts anew.

    Args:
        model: A causal language model with `attn_implementation="ringattn"`, whole on every rank, in eval mode.
        ring: Who shares the work.
        max_tokens: What a sequence may grow to, prompt, padding and answer.
        batch: Sequences at a time: prompts times beams or returned sequences.
        page_size: Tokens of a page.
        kv_dtype: As in `PagedKVCache`: torch.float8_e4m3fn halves the memory of 16-bit keys; default the dtype of the model.
        graphs: Whether calls with few tokens are captured in CUDA graphs when they come for the second time, and replayed
            (Note [Replays] of decoding.py): None for wherever that can be, or True, False, or what records calls. A model
            whose call can not be captured, or not truly, goes on without, with a warning.

    Attributes:
        ring: As given.
        max_tokens: As given.
        kv: The cache that keeps the keys; None after the `with`, which frees its memory.

    Raises:
        ValueError: A number is less than 1, max_tokens is more than the positions that a model learned, the memory is not there,
            or graphs are asked for where there can be none; raised on every rank.
        NotImplementedError: In some layers of the model tokens meet otherwise than in attention, or keys have other sizes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ring: Ring,
        *,
        max_tokens: int,
        batch: int = 1,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        graphs: bool | Recorder | None = None,
    ) -> None:
        with ring.propagate_errors():
            for name, value in (("max_tokens", max_tokens), ("batch", batch), ("page_size", page_size)):
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}")
            layers, kv_heads, head_dim, v_head_dim = cache_sizes(model)
            table = find_table(model)
            if table is not None and max_tokens > table:
                raise ValueError(
                    f"max_tokens must be at most {table}, the positions that {type(model).__name__} has learned, got {max_tokens}; "
                    f"pass max_tokens={table}"
                )
        super().__init__(layers=[_Layer() for _ in range(layers)])  # pyright: ignore[reportArgumentType]
        self.ring, self.max_tokens = ring, max_tokens
        # sequences of a batch get their pages from the same ranks
        pages = batch * ceil(ceil(max_tokens / page_size) / ring.world_size)
        self.kv: PagedKVCache | None = PagedKVCache(
            ring,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=model.dtype,
            pages=pages,
            page_size=page_size,
            kv_dtype=kv_dtype,
            device=model.device,
        )
        self._model = model
        self._requests: list[int] = []
        self._firsts: list[int] = []
        self._generating = 0  # calls of generate that have begun, within one another
        self._compared = False  # whether the generate that goes on has made its first call
        self._calling = False  # whether a call of the model has begun and not come to its end
        self._forked = False  # whether sequences were repeated, which may then be kept by different ranks
        self._unwrap: Callable[[], None] | None = None
        with ring.propagate_errors():
            self._recorder = choose_recorder(graphs, model, self.kv)
        # which neither the cache shows nor every call
        ring.assert_equal_across_ranks(
            "a RingCache", f"max_tokens={max_tokens}, batch={batch}, CUDA graphs: {self._recorder is not None}"
        )
        # by layers that are called (Note [Drafts]); made with the model's own forward, at the first call
        self._decodings: dict[int, Decoding] = {}

    def __enter__(self) -> RingCache:
        """Wraps forward and generate of the model, on this instance of it."""
        if self._unwrap is not None or self.kv is None:
            raise RuntimeError("a RingCache must be entered once, got a second time; make another one")
        self._unwrap = _wrap(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the model its forward back, and the memory; compares what ranks have not compared, unless an error ends it."""
        assert self._unwrap is not None, "a cache that is left was entered"
        self._unwrap()
        kv, self.kv, self._requests = self.kv, None, []
        self._recorder, self._decodings = None, {}
        if kind is None and kv is not None:
            kv.accord.compare("what the model was called with before the RingCache was left")

    def __repr__(self) -> str:
        if self.kv is None:
            return "RingCache(left)"
        here = f"{len(self._requests)} sequences of {self.get_seq_length()} tokens"
        return f"RingCache({here}, at most {self.max_tokens}, {self.ring})"

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002
        """Tokens of each sequence, on all ranks together."""
        kv = self._open()
        return kv.length(self._requests[0]) if self._requests else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """What a sequence may grow to."""
        return self.max_tokens

    def get_max_cache_shape(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002
        """What a sequence may grow to, as 4.x asks."""
        return self.max_tokens

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int | None = 0) -> tuple[int, int]:  # noqa: ARG002
        """Keys after a call with so many new tokens (4.x gives their places), and the first of them."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Refused: a model that asks for it was not wrapped."""
        raise RuntimeError(
            "a RingCache must be entered before its model is called: with RingCache(model, ring, max_tokens=...) as cache"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens: as many as a negative number says, or, where the release has it so, all from a length on."""
        length = self.get_seq_length()
        with self.ring.propagate_errors():
            tokens_to_remove = int(tokens_to_remove)  # which may come as a tensor
            if CROPS_BY_COUNT and tokens_to_remove > 0:
                raise ValueError(
                    f"crop must be told a negative number of tokens to remove, got {tokens_to_remove}, which earlier releases of "
                    "transformers took for a length; subtract get_seq_length() from it"
                )
        by_count = tokens_to_remove < 0 or CROPS_BY_COUNT
        left = max(0, length + tokens_to_remove) if by_count else min(length, tokens_to_remove)
        self._crop(left)

    def reset(self) -> None:
        """Forgets everything."""
        for request in self._requests:
            self._open().leave(request)
        self._requests, self._firsts, self._forked = [], [], False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Lets sequence i go on from sequence beam_idx[i], without a copy (Note [Beams])."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence, without a copy."""
        self._select([i for i in range(len(self._requests)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some sequences, by place or by a bool for each."""
        self._select((indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist())

    def activate_past_recording(self) -> None:
        """Nothing to do: all tokens are kept until they are cropped."""

    def offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise NotImplementedError(
            "a RingCache must stay on its device, got a call of offload; use more ranks for more room"
        )

    def prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise NotImplementedError(
            "a RingCache must stay on its device, got a call of prefetch; use more ranks for more room"
        )

    @property
    def batch_size(self) -> int:
        """Sequences that are here; -1 before the first call."""
        return len(self._requests) or -1

    @property
    def max_batch_size(self) -> int:
        """As batch_size."""
        return self.batch_size

    @property
    def max_cache_len(self) -> int:
        """What a sequence may grow to."""
        return self.max_tokens

    @property
    def is_initialized(self) -> bool:
        """The memory is there from the beginning."""
        return True

    def _open(self) -> PagedKVCache:
        if self.kv is None:
            raise RuntimeError("a RingCache must be used inside of its `with`, got a call after it; make another one")
        return self.kv

    def _generate(self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model's own generate with this cache (Note [Alike on all ranks])."""
        kv = self._open()
        with self.ring.propagate_errors():
            _check_clock(self._model, self.ring.world_size, args, kwargs)
            _check_guidance(self._model, args, kwargs)
            _check_early_exit(self._model, args, kwargs)
            _check_longer(self.get_seq_length(), args, kwargs)
        if self.ring.world_size == 1:
            return self._run(generate, args, kwargs)
        said = {name: value for name, value in kwargs.items() if name not in _OWN}
        words = _in_words([*args, said, self._model.generation_config])
        digest = blake2b(words.encode(), digest_size=8).hexdigest()
        self.ring.assert_equal_across_ranks("what generate is called with", f"{words[:SHOWN]}, digest {digest}")
        _share_generators(self.ring, kv.device)
        self._compared = self._calling = False
        try:
            out = self._run(generate, args, kwargs)
        except Exception as error:
            if self._calling:
                raise  # ranks have raised it together, or were told
            kv.accord.forget()
            self.ring.raise_on_all_ranks(error)
        kv.accord.note("generate", _hash(out if isinstance(out, Tensor) else out.sequences)[None])
        kv.accord.compare("what generate returns")
        return out

    def _run(self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of generate that leaves the model as it was."""
        self._generating += 1
        try:
            with _unchanged(self._model):
                return generate(*args, **kwargs)
        finally:
            self._generating -= 1

    def _draft(self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model's own generate, by which it proposes tokens to itself (Note [Drafts])."""
        before, settings = self.get_seq_length(), kwargs["generation_config"]  # the draft's own
        settings.cache_implementation = None  # 4.x asks for a new cache
        if before:
            settings.prefill_chunk_size = None  # what comes after the prompt is few tokens
        try:
            out = generate(*args, **{**kwargs, "past_key_values": self})
        finally:
            self._crop(before)
        out.past_key_values = _Drafted()
        return out

    def _crop(self, length: int) -> None:
        if length == 0:
            # whoever comes next may be other sequences
            return self.reset()
        for request in self._requests:
            self._open().crop(request, length)

    def _select(self, sources: list[int]) -> None:
        """Lets sequence i go on from what sequence sources[i] was."""
        kv, were = self._open(), self._requests
        kv.accord.note(f"sequences {sources}")
        if sources == list(range(len(were))):
            return
        if len(sources) == len(were) and not self._forked:
            kv.reorder(were, sources)
        else:
            for place, request in enumerate(were):
                if place not in sources:
                    kv.leave(request)
            seen: set[int] = set()
            self._requests = []
            for source in sources:
                self._requests.append(kv.fork(were[source]) if source in seen else were[source])
                self._forked = self._forked or source in seen
                seen.add(source)
        self._firsts = [self._firsts[source] for source in sources]

    def _is_alike(self) -> bool:
        return not self._forked or self._open().pages.are_alike(self._requests)

    def _call(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        """A call of the model, whose own forward is given, with this cache and these arguments."""
        kv = self._open()
        self._calling = True
        name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
        if self._generating:
            given = _drop_cached(given, name, self._firsts, self.get_seq_length())
        firsts, compared = self._agree(given, name)
        new = given[name].to(kv.device)
        n, before = new.shape[1], self.get_seq_length()
        if compared and not self._generating:
            _share_generators(self.ring, kv.device)
        if not self._requests:
            self._requests, self._firsts = kv.join_alike(self.max_tokens, firsts), firsts
        keep = given.get("logits_to_keep", 0)
        wanted = [x % n for x in keep.tolist()] if isinstance(keep, Tensor) else list(range(n)[-keep:])
        positions = given.get("position_ids")
        positions = torch.arange(before, before + n, device="cpu")[None] if positions is None else positions
        options = {name: given[name] for name in _PASSED_ON if given.get(name) is not None}
        try:
            if (
                name == "input_ids"
                and n <= MOST_DECODED
                and wanted == list(range(n))[-len(wanted) :]
                and not any(options.values())
            ):
                out = self._decode(forward, new, positions, len(wanted))
            else:
                out = self._bring(forward, name, new, positions, wanted, options)
        except BaseException:
            # rows that some layers have not written are nobody's
            self._crop(before)
            kv.accord.forget()
            raise
        out.past_key_values = self
        self._calling = False
        return out

    def _decode(self, forward: Callable[..., Any], new: Tensor, positions: Tensor, last: int) -> Any:
        """A call with few tokens, of whose last ones logits are wanted."""
        layers = _layers(self._model)
        if layers not in self._decodings:
            self._decodings[layers] = Decoding(forward, self._open(), self._recorder, patience=2)
        out = self._decodings[layers].run(self._requests, new, positions=positions, last=last, alike=self._is_alike())
        # callers may keep them
        out.logits = out.logits.clone()
        return out

    def _bring(
        self,
        forward: Callable[..., Any],
        name: str,
        new: Tensor,
        positions: Tensor,
        wanted: list[int],
        options: dict[str, Any],
    ) -> Any:
        """Any other call."""
        kv, (b, n) = self._open(), new.shape[:2]
        step = kv.extend(self._requests, [n] * b, alike=self._is_alike())
        if step.batch != b:
            # sequences that are kept by different ranks are computed one after another
            new, positions = new.flatten(0, 1)[None], positions.expand(b, -1).flatten()[None]
            wanted = [i * n + x for i in range(b) for x in wanted]
        out = forward_step(forward, step, {name: new}, step.take(positions.to(kv.device)), wanted, **options)
        if step.batch != b:
            out.logits = out.logits.unflatten(1, (b, -1))[0]
        return out

    def _agree(self, given: dict[str, Any], name: str) -> tuple[list[int], bool]:
        """Padding in front of each sequence, and whether ranks have compared the call (Note [Alike on all ranks]).

        Refuses what is wrong, or differs between ranks.
        """
        with self.ring.propagate_errors():
            firsts = self._read(given, name)
        if self.ring.world_size == 1:
            return firsts, True
        new, positions, keep = given[name], given.get("position_ids"), given.get("logits_to_keep", 0)
        b, n = new.shape[:2]
        few = 1 if not self._generating else MOST_DECODED
        goes_on = bool(self._requests) and n <= few and name == "input_ids" and (self._compared or not self._generating)
        options = [
            keep if isinstance(keep, int) else keep.tolist(),
            *(bool(given.get(option)) for option in _PASSED_ON),
        ]
        words = f"{b} sequences, {n} new tokens after {self.get_seq_length()}, options {options}"
        if goes_on:
            self._open().accord.note(words, new, *(() if positions is None else (positions.to(new.device),)))
            return firsts, False
        numbers = [
            int(_hash(x))
            for x in (new, torch.tensor(firsts, device="cpu"), *(() if positions is None else (positions,)))
        ]
        self.ring.assert_equal_across_ranks(
            "what the model is called with", f"{words}, digests of tokens, padding and places {numbers}"
        )
        self._compared = True
        return firsts, True

    def _read(self, given: dict[str, Any], name: str) -> list[int]:
        """The padding in front of each sequence, of a call that can be made."""
        _check_given(given)
        if self._model.training and self.ring.world_size > 1:
            raise NotImplementedError(
                f"a model must be in eval mode among {self.ring.world_size} ranks, got {type(self._model).__name__} in training, "
                "which drops other numbers on each of them; call model.eval()"
            )
        new, mask, positions = (given.get(one) for one in (name, "attention_mask", "position_ids"))
        if new is None:
            raise ValueError("the model must be called with input_ids or inputs_embeds, got neither")
        if positions is not None and positions.dim() != 2:
            raise NotImplementedError(
                f"position_ids must be 2-dimensional, sequences x new tokens, got shape {tuple(positions.shape)}; several "
                "positions per token (images, video) are not supported"
            )
        (b, n), before = new.shape[:2], self.get_seq_length()
        if self._requests and len(self._requests) != b:
            raise ValueError(
                f"the batch must be of the {len(self._requests)} sequences that the cache has, got {b}; "
                "call reset() before other prompts"
            )
        if before + n > self.max_tokens:
            raise ValueError(
                f"a sequence must stay within max_tokens={self.max_tokens}, got {before} tokens and {n} more; "
                "make the RingCache with more, or call reset() between prompts"
            )
        known = self._firsts or [0] * b
        firsts = known if mask is None else _padding(mask, b, before + n)
        if self._requests and firsts != known:
            raise ValueError(
                f"attention_mask must begin with the padding that the cache knows of, {known} tokens by sequence, got {firsts}; "
                "call reset() before other prompts"
            )
        if any(firsts) and n > MOST_DECODED and not self._is_alike():
            raise NotImplementedError(
                f"sequences with padding must be kept by the same ranks to go on with {n} tokens, got some that were repeated; "
                "call reset() and give the whole prompts again"
            )
        return firsts


class _Layer:
    """What transformers may ask a layer of the cache."""

    is_compileable = False
    is_croppable = True
    is_initialized = True
    is_sliding = False
    supports_early_init = False


class _Drafted:
    """What transformers takes for the cache of a draft, of which nothing is left (Note [Drafts])."""

    def get_seq_length(self) -> int:
        return 0

    def crop(self, tokens_to_remove: int) -> None:
        pass


def cache_sizes(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """Layers, key heads, and the dims of their keys and values; refuses models that keep more, or layers that differ."""
    config = model.config.get_text_config(decoder=True)
    check_layers(config)
    # later releases of 5.x know configs whose layers differ
    configs = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = {_key_sizes(one) for one in configs}
    if len(sizes) > 1:
        raise NotImplementedError(
            f"all layers must have as many key heads, of the same width, for one cache to keep, got {sorted(sizes)} (heads, width "
            f"of keys, of values) in the config of {config.model_type}; use attn_implementation='sdpa' on one process"
        )
    return _layers(model), *sizes.pop()


def _key_sizes(config: Any) -> tuple[int, int, int]:
    """Key heads, and the dims of their keys and values, by the config of a layer."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "qk_nope_head_dim", None):
        # latent attention, which gives attention keys of all heads
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim


def _layers(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).num_hidden_layers


def _wrap(model: PreTrainedModel) -> Callable[[], None]:
    """Lets calls with a RingCache go through it; what is returned undoes that.

    An instance of its own, since parts of generation call `self.forward`, which hooks do not see.
    """
    original, original_generate = model.forward, getattr(model, "generate", None)
    signature = inspect.signature(original)
    spread = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    generating: list[RingCache] = []

    def call_without(cache: Any, /, *args: Any, **kwargs: Any) -> Any:
        if generating and cache is None:
            generating[-1]._calling = True
            generating[-1].ring.raise_on_all_ranks(
                NotImplementedError(
                    f"generation must hand the RingCache to every call of the model, got one of {type(model).__name__} without, "
                    "which drops a cache at this length to compute all tokens anew (Phi 3 and its kin do beyond "
                    "original_max_position_embeddings); keep sequences shorter, or use attn_implementation='sdpa' on one process"
                )
            )
        return original(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if not args and not isinstance(cache, RingCache):
            return call_without(cache, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop(spread, {}) if spread is not None else {}
        cache = given.get("past_key_values")
        if not isinstance(cache, RingCache):
            return call_without(cache, *args, **kwargs)
        if cache._model is not model:
            cache._calling = True
            cache.ring.raise_on_all_ranks(
                ValueError(
                    f"past_key_values must be a RingCache of the model that is called, a {type(model).__name__}, got one of "
                    f"another {type(cache._model).__name__}; make each model a RingCache of its own"
                )
            )
        return cache._call(original, given)

    wrapped: dict[str, Callable[..., Any]] = {"forward": OfOne(forward, original, NO_COPY)}
    if callable(original_generate):

        def generate(*args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("past_key_values")
            if isinstance(cache, RingCache) and cache._model is model:
                generating.append(cache)
                try:
                    return cache._generate(original_generate, args, kwargs)
                finally:
                    generating.pop()
            if generating and _is_draft(kwargs):
                return generating[-1]._draft(original_generate, args, kwargs)
            return original_generate(*args, **kwargs)

        wrapped["generate"] = OfOne(generate, original_generate, NO_COPY)
    owns = {name: model.__dict__.get(name) for name in wrapped}
    for name, call in wrapped.items():
        setattr(model, name, call)

    def unwrap() -> None:
        if model.__dict__.get("forward") is not wrapped["forward"]:
            raise RuntimeError(
                "RingCaches of one model must be left in the reverse order in which they were entered; nest them"
            )
        for name, own in owns.items():
            if own is None:
                del model.__dict__[name]
            else:
                model.__dict__[name] = own

    return unwrap


def _is_draft(given: dict[str, Any]) -> bool:
    """Whether transformers asks for tokens to check, by these arguments of generate."""
    ours = isinstance(given.get("past_key_values"), _Drafted | None)
    return ours and bool(getattr(given.get("generation_config"), "is_assistant", False))


@contextlib.contextmanager
def _unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Puts back what is changed inside on the configs of a model, all but what generation learns for the next time."""
    found = (getattr(part, "config", None) for part in model.modules())
    settings = model.generation_config
    changeable = {id(x): x for x in (*found, settings) if isinstance(x, PretrainedConfig | GenerationConfig)}
    were = [(x, dict(vars(x))) for x in changeable.values()]
    try:
        yield
    finally:
        for config, was in were:
            now = vars(config)
            learnt = {name: now[name] for name in _LEARNT if config is settings and name in now}
            # never without what there was, since others may read it
            now.update(was | learnt)
            for name in now.keys() - was.keys() - learnt.keys():
                del now[name]


def _asked(model: PreTrainedModel, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """An option of generate, wherever it is said; None: nowhere."""
    passed = given.get("generation_config", args[1] if len(args) > 1 else None)
    asked = (given, vars(passed) if passed is not None else {}, vars(model.generation_config))
    return next((x for where in asked if (x := where.get(name)) is not None), None)


def _check_clock(model: PreTrainedModel, ranks: int, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuses to stop by the clock, which ranks do not read at the same time."""
    criteria = given.get("stopping_criteria", args[3] if len(args) > 3 else None) or ()
    clocks = [one.max_time for one in criteria if isinstance(one, MaxTimeCriteria)]
    seconds = _asked(model, "max_time", args, given) if not clocks else clocks[0]
    if seconds is not None and ranks > 1:
        raise NotImplementedError(
            f"max_time must be left out among {ranks} ranks, whose clocks would stop some of them a token before others, got "
            f"{seconds}; pass max_new_tokens"
        )


def _check_guidance(model: PreTrainedModel, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuses guidance, which keeps a second answer in a cache of its own."""
    scale = _asked(model, "guidance_scale", args, given)
    if scale not in (None, 1):
        raise NotImplementedError(
            f"guidance_scale must be left out with a RingCache, got {scale}: the keys of the answer without the prompt would be "
            "in a cache of transformers; generate on one process with attn_implementation='sdpa'"
        )


def _check_early_exit(model: PreTrainedModel, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuses layers to draft with that the model has not, or that transformers can not leave out."""
    layers = _asked(model, "assistant_early_exit", args, given)
    if layers is None:
        return
    whole = _layers(model)
    if not isinstance(layers, int) or not 1 <= layers <= whole:
        raise ValueError(
            f"assistant_early_exit must be from 1 to the {whole} layers of the model, got {layers!r}; leave it out to decode "
            "without drafts"
        )
    base: Any = getattr(model, model.base_model_prefix, None)
    told = getattr(base, "config", None) is model.config.get_text_config(decoder=True)
    if not told or not any(map(_counts_layers, {type(part) for part in base.modules()})):
        raise NotImplementedError(
            f"assistant_early_exit must be left out with {type(model).__name__}, whose layers transformers can not leave out, "
            f"got {layers}; pass a smaller model as assistant_model, or prompt_lookup_num_tokens"
        )


def _counts_layers(kind: type[nn.Module]) -> bool:
    """Whether the forward of modules of a kind asks the config how many layers there are; True where that can not be told."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is None or "num_hidden_layers" in code.co_names


def _check_longer(before: int, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuses whole sequences, by these arguments of generate, that bring nothing after the tokens that the cache has."""
    named = (given.get(name) for name in ("inputs_embeds", "input_ids", "inputs"))
    whole, mask = next((x for x in (*named, *args[:1]) if x is not None), None), given.get("attention_mask")
    # the new tokens alone come with a mask of all
    if not before or whole is None or (mask is not None and mask.shape[1] != whole.shape[1]):
        return
    if whole.shape[1] <= before:
        raise ValueError(
            f"sequences must be longer than the {before} tokens that the cache has, got {whole.shape[1]}; give them whole, "
            "or call reset() before other prompts and after a call of generate that failed"
        )


def _drop_cached(given: dict[str, Any], name: str, firsts: list[int], before: int) -> dict[str, Any]:
    """A call's arguments without the tokens that the cache has, which 5.x brings again when a turn begins with candidates."""
    new, positions = given.get(name), given.get("position_ids")
    if new is None or positions is None or positions.dim() != 2 or not 0 < before < new.shape[1]:
        return given
    n = new.shape[1]
    if not bool((positions[:, -1].cpu() + torch.tensor(firsts, device="cpu") == n - 1).all()):
        return given
    return {**given, name: new[:, before:], "position_ids": positions[:, before:]}


def _in_words(value: Any) -> str:
    """What generate is called with, in words that are the same on all ranks where it is."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {int(_hash(value))}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_in_words(value[name])}" for name in sorted(value, key=repr)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_in_words, value)) + "]"
    if isinstance(value, GenerationConfig):
        return _in_words(value.to_diff_dict())
    # of others, streamers and criteria say, the address tells nothing
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _check_given(given: dict[str, Any]) -> None:
    if given.get("use_cache") is False:
        raise NotImplementedError(
            "use_cache must be True in a call with a RingCache, got False; leave past_key_values out"
        )
    if given.get("return_dict") is False:
        raise NotImplementedError("return_dict must be True in a call with a RingCache, got False; leave it out")
    if given.get("output_hidden_states"):
        raise NotImplementedError(
            "output_hidden_states must be False in a call with a RingCache, whose ranks have rows of their own each; "
            "use attn_implementation='sdpa' on one process"
        )
    for name, value in given.items():
        # generate of 5.x hands on an empty dict where there are no images
        said = value is not None and value is not False and not (isinstance(value, dict) and not value)
        if name not in (*_TAKEN, *_PASSED_ON) and said:
            raise NotImplementedError(
                f"{name} must be left out of a call with a RingCache, which does not know how to share it between ranks"
            )


def _padding(mask: Tensor, b: int, length: int) -> list[int]:
    """Tokens of padding in front of each sequence."""
    if tuple(mask.shape) != (b, length):
        raise ValueError(
            f"attention_mask must be of {b} sequences and the {length} tokens that they have with this call, got "
            f"{tuple(mask.shape)}; pass that of the whole sequences"
        )
    held = mask != 0
    first = held.int().argmax(-1)
    *firsts, others = torch.cat([first, (held.sum(-1) + first != length).sum()[None]]).tolist()
    if others:
        raise NotImplementedError(
            f"attention_mask must have padding on the left only, got other padding in {others} of {b} sequences; "
            "set tokenizer.padding_side='left'"
        )
    return firsts


def _hash(x: Tensor) -> Tensor:
    """A number that tells tokens, or embeddings, from others."""
    if x.is_floating_point():
        x = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    x = x.flatten().to(torch.int64)
    # odd factors without a pattern; overflow wraps around
    factors = torch.arange(1, x.numel() + 1, device=x.device) * -7046029254386353131 | 1
    return (x * factors).sum()


def _share_generators(ring: Ring, device: torch.device) -> None:
    """Gives the generators of all ranks the state of rank 0's: those that sampling may draw from."""
    if ring.world_size == 1:
        return
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    lengths = [len(state) for state in states]
    mine = torch.cat(states).to(device)
    shared = ring.gather(mine, 0, [len(mine)] * ring.world_size)[0].cpu().split(lengths)
    torch.set_rng_state(shared[0].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(shared[1].clone(), device)
