"""`model.generate` on the ranks of a ring, over a KV cache that is sharded between them.

    with RingCache(model, ring, max_tokens=100_000) as cache:
        ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=200)

Note [Same tokens on all ranks]
    Every rank runs all of `generate` on the whole inputs, and computes and stores a part of it. That requires all ranks to choose
    the same tokens. Logits are the same bits everywhere, and the random generators of all ranks are set to the state of rank 0's
    when `generate` begins, and by calls outside of it that bring a prompt.
    Ranks compare their inputs, and a difference is an error on every rank before anything is computed: the arguments of `generate`
    when it begins; and tokens, padding, positions and rows of wanted logits at its first call of the model, at any other call with
    more than a few tokens, and at calls outside of `generate` with more than one token.
    A later call brings tokens that every rank has chosen from the same logits. Its inputs are recorded and compared together with
    batches (Note [When ranks compare] of consistency.py). The rest is compared with the result when `generate` ends, and when the
    cache is left. So a rank with other tokens is found by the end, and a result that is returned was the same on all ranks.
    When a call, or code between two calls (a streamer, a logits processor), raises on one rank alone, that rank publishes the
    error to the next comparison. Ranks that are in the all-reduce already wait until the timeout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from hashlib import blake2b
from math import ceil
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from ringattn.inference import PagedKVCache
from ringattn.inference.forward_batch import MAX_DECODE_TOKENS
from ringattn.integrations.transformers.cuda_graph_runner import CUDAGraphRunner, GraphCapturer, select_capturer
from ringattn.integrations.transformers.model_forward import (
    CACHE_KEYWORDS,
    SHARDED,
    BoundPatch,
    cache_keyword,
    forward_step,
    untraced,
)
from ringattn.integrations.transformers.positions import has_sections, max_learned_positions
from ringattn.integrations.transformers.support import (
    IMAGE_KEYWORDS,
    GenerateCall,
    cache_sizes,
    check_supported,
    inner_model,
)
from ringattn.plan.options import resolve_size
from ringattn.ring import Ring, check_ring
from ringattn.tensor_checks import digest_bits

CROPS_BY_COUNT = "tokens_to_remove" in inspect.signature(Cache.crop).parameters
"""Whether `crop` takes a number of tokens to remove, as a negative number, and nothing else; older releases take a length too."""

COPY_REFUSAL = "a model must be copied or saved whole outside of `with RingCache(...)`, got one inside; copy it before"

MAX_SHOWN = 400
"""Characters of the arguments of generate that an error message has."""
_PER_RANK = (*CACHE_KEYWORDS, "streamer")
"""Arguments of generate that may differ between ranks: a streamer may be on one rank only."""
_PASSED_ON = ("output_router_logits", "output_attentions")
_LAYER: Any = SimpleNamespace(
    is_compileable=False, is_croppable=True, is_initialized=True, is_sliding=False, supports_early_init=False
)
"""Attributes that transformers reads of a layer of a cache."""


class RingCache(Cache):
    """KV cache of `model.generate`, sharded between the ranks of a ring.

    Inside of `with`, calls of the model with this cache as past_key_values, or as cache (since transformers 5.24), share their
    work: every rank makes the same calls with the whole inputs, computes its rows of a prompt, and gets the same logits. Calls
    without it are as before. A second call continues where the first ended; `reset` empties the cache.

    Args:
        model: A causal language model with `attn_implementation="ringattn"`, whole on every rank, in eval mode. It may be in
            `torch.compile(model)`, or in a PeftModel with LoRA or other adapters that change rows independently.
        ring: The ranks that share the work.
        max_tokens: Maximum length of a sequence: prompt, padding and answer.
        batch: Sequences at a time: prompts times beams or returned sequences.
        page_size: Tokens of a page.
        kv_dtype: See `PagedKVCache`: torch.float8_e4m3fn halves the memory of 16-bit keys; default the dtype of the model.
        graphs: Whether calls with few tokens are captured in CUDA graphs at their second occurrence, and replayed: None where that
            is possible, or True, False, or a `GraphCapturer`. A model whose call cannot be captured, or whose replay gives other
            numbers, runs without graphs, with a warning.
        device: Where the model computes; default where its weights are, which FSDP's CPU offload keeps in host memory.

    Attributes:
        kv: The paged cache; None after the `with`, which frees its memory.

    Raises:
        TypeError: ring is no Ring, or a number no integer.
        ValueError: A number is less than 1, max_tokens exceeds the learned positions of the model, memory is missing, or graphs
            are required where there can be none; raised on every rank.
        NotImplementedError: Tokens interact in some layers other than by attention, layers have keys of different sizes, the model
            is in a wrapper that is not known to call it unchanged, or a process of the ring hosts several virtual ranks.
        RuntimeError: In use: it is entered twice, or used outside of its `with`.

    Example:
        >>> with RingCache(model, ring, max_tokens=100_000) as cache:  # doctest: +SKIP
        ...     ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=200)
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
        graphs: bool | GraphCapturer | None = None,
        device: torch.device | None = None,
    ) -> None:
        check_ring(ring)
        with ring.propagate_errors():
            check_supported(ring, "ring")
            max_tokens, batch = resolve_size("max_tokens", max_tokens), resolve_size("batch", batch)
            page_size = resolve_size("page_size", page_size)
            model = inner_model(model)
            if model in SHARDED:
                SHARDED[model].check_unchanged()
            sizes = cache_sizes(model)
            positions = max_learned_positions(model)
            if positions is not None and max_tokens > positions:
                raise ValueError(
                    f"max_tokens must be at most {positions}, the positions that {type(model).__name__} has learned, got "
                    f"{max_tokens}; pass max_tokens={positions}"
                )
        super().__init__(layers=[_LAYER] * sizes["layers"])
        self.ring, self.max_tokens, self._batch = ring, max_tokens, batch
        # sequences of a batch get their pages on the same ranks
        pages = batch * ceil(ceil(max_tokens / page_size) / ring.world_size)
        sizes |= {"dtype": model.dtype, "pages": pages, "page_size": page_size, "kv_dtype": kv_dtype}
        self.kv: PagedKVCache | None = PagedKVCache(ring, **sizes, device=device or model.device)
        self._model = model
        self._requests: list[int] = []
        self._paddings: list[int] = []  # tokens in front of each sequence
        self._generating = 0  # nested calls of generate
        self._compared = False  # the current generate has made its first call
        self._calling = False  # a call of the model has begun and has not ended
        self._has_images = False  # of some sequence that is cached
        self._unwrap: Callable[[], None] | None = None
        with ring.propagate_errors():
            self._capturer = select_capturer(graphs, model, self.kv)
        # neither the paged cache nor every call compares these
        ring.assert_equal_across_ranks(
            "a RingCache", f"max_tokens={max_tokens}, batch={batch}, CUDA graphs: {self._capturer is not None}"
        )
        self._runner: CUDAGraphRunner | None = None  # made at the first call

    def __enter__(self) -> RingCache:
        """Patch forward and generate of the model instance."""
        if self._unwrap is not None or self.kv is None:
            raise RuntimeError("a RingCache must be entered once, got a second time; make another one")
        self._unwrap = _wrap(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the model, free the memory, and compare the remaining records of ranks unless an error ends it."""
        assert self._unwrap is not None, "a cache that is left was entered"
        self._unwrap()
        kv, self.kv, self._requests = self.kv, None, []
        self._capturer = self._runner = None
        if kind is None and kv is not None:
            kv.consistency.check_recorded("what the model was called with before the RingCache was left")

    def __repr__(self) -> str:
        if self.kv is None:
            return "RingCache(left)"
        sequences = f"{len(self._requests)} sequences of {self.get_seq_length()} tokens"
        return f"RingCache({sequences}, at most {self.max_tokens}, {self.ring})"

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002
        """Return the tokens of each sequence, over all ranks."""
        kv = self._open()
        return kv.length(self._requests[0]) if self._requests else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """Return the maximum length of a sequence."""
        return self.max_tokens

    get_max_cache_shape = get_max_length  # in 4.x

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int | None = 0) -> tuple[int, int]:  # noqa: ARG002
        """Return the keys after a call with so many new tokens (4.x gives their positions), and the index of the first."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Raise: the model was called outside of `with`, or another model was."""
        raise RuntimeError(
            "a RingCache must be entered before its model is called: with RingCache(model, ring, max_tokens=...) as cache"
            if self._unwrap is None or self.kv is None
            else f"a RingCache must be passed to the {type(self._model).__name__} that it was made of, got one passed to another "
            "model; make each model a RingCache of its own"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: a negative number of them, or, in older releases, all beyond a length."""
        length = self.get_seq_length()
        with self.ring.propagate_errors():
            tokens_to_remove = int(tokens_to_remove)  # it may be a tensor
            if CROPS_BY_COUNT and tokens_to_remove > 0:
                raise ValueError(
                    f"crop must be given a negative number of tokens to remove, got {tokens_to_remove}, which earlier releases of "
                    "transformers took for a length; subtract get_seq_length() from it"
                )
        by_count = tokens_to_remove < 0 or CROPS_BY_COUNT
        self._crop(max(0, length + tokens_to_remove) if by_count else min(length, tokens_to_remove))

    def reset(self) -> None:
        """Remove all sequences."""
        for request in self._requests:
            self._open().free(request)
        self._requests, self._paddings, self._has_images = [], [], False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i continue sequence beam_idx[i]; full pages are shared, at most one page per sequence is copied."""
        kv, sources = self._open(), beam_idx.tolist()
        kv.consistency.record(f"sequences {sources}")
        if sources != list(range(len(self._requests))):
            kv.reorder(self._requests, sources)
            self._paddings = [self._paddings[source] for source in sources]

    def activate_past_recording(self) -> None:
        """Do nothing: all tokens are kept until they are cropped."""

    def offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: pages stay on their device, and sequences where they are."""
        raise NotImplementedError(
            "a RingCache must keep its device and its sequences, got a call of offload, prefetch, batch_repeat_interleave or "
            "batch_select_indices; use more ranks for more memory, and give generate() all sequences"
        )

    prefetch = batch_repeat_interleave = batch_select_indices = offload

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the first call."""
        return len(self._requests) or -1

    @property
    def is_initialized(self) -> bool:
        """True: the memory is allocated by the constructor."""
        return True

    def _open(self) -> PagedKVCache:
        if self.kv is None:
            raise RuntimeError("a RingCache must be used inside of its `with`, got a call after it; make another one")
        return self.kv

    def _generate(self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's own generate with this cache (Note [Same tokens on all ranks])."""
        kv = self._open()
        with self.ring.propagate_errors():
            call = GenerateCall(self._model, args, kwargs, self.ring.world_size, self.get_seq_length())
            check_supported(call, "generate")
        if self.ring.world_size == 1:
            return generate(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in _PER_RANK}
        text = _describe([*args, given, self._model.generation_config])
        digest = blake2b(text.encode(), digest_size=8).hexdigest()
        self.ring.assert_equal_across_ranks("what generate is called with", f"{text[:MAX_SHOWN]}, digest {digest}")
        share_generators(self.ring, kv.device)
        self._compared = self._calling = False
        try:
            out = generate(*args, **kwargs)
        except Exception as error:
            if self._calling:
                raise  # raised on all ranks, or published to them
            kv.consistency.discard()
            self.ring.raise_on_all_ranks(error)
        kv.consistency.record("generate", digest_bits(out if isinstance(out, Tensor) else out.sequences)[None])
        kv.consistency.check_recorded("what generate returns")
        return out

    def _crop(self, length: int) -> None:
        if length == 0:
            return self.reset()  # other sequences may come next
        for request in self._requests:
            self._open().truncate(request, length)

    @untraced
    def _call(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Call the model, whose own forward is given, with this cache and these arguments."""
        kv = self._open()
        self._calling = True
        name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
        if self._generating:
            given = _drop_cached(given, name, self._paddings, self.get_seq_length())
        paddings, compared = self._compare(given, name)
        new = given[name].to(kv.device)
        n, before = new.shape[1], self.get_seq_length()
        if compared and not self._generating:
            share_generators(self.ring, kv.device)
        if not self._requests:
            self._requests = kv.add_batch(self.max_tokens, paddings)
        elif paddings != self._paddings:
            for request, padding in zip(self._requests, paddings, strict=True):
                kv.set_padding(request, padding)
        self._paddings = paddings
        keep = given.get("logits_to_keep", 0)
        wanted = [x % n for x in keep.tolist()] if isinstance(keep, Tensor) else list(range(n)[-keep:])
        positions = given.get("position_ids")
        positions = torch.arange(before, before + n, device="cpu")[None] if positions is None else positions
        options = {name: given[name] for name in _PASSED_ON if given.get(name) is not None}
        images = _images(given)
        self._has_images = self._has_images or bool(images)
        if positions.dim() == 3 and not images:
            positions = positions[-1]  # those of text are equal but for the first, which attention does not need
        try:
            are_last = wanted == list(range(n))[-len(wanted) :]
            if name == "input_ids" and n <= MAX_DECODE_TOKENS and are_last and not any((*options.values(), images)):
                self._runner = self._runner or CUDAGraphRunner(forward, kv, self._capturer, capture_at=2)
                out = self._runner.run(self._requests, new, positions=positions, last=len(wanted), same_length=True)
                # callers may keep them, and the next replay overwrites them
                out.logits = out.logits.clone()
            else:
                step = kv.extend(self._requests, [n] * len(new), same_length=True)
                placed = positions if images else step.take(positions.to(new.device))
                out = forward_step(forward, step, {name: new}, placed, wanted, images, **options)
        except BaseException:
            # some layers have not written these rows
            self._crop(before)
            kv.consistency.discard()
            raise
        self._calling = False
        return out

    def _compare(self, given: dict[str, Any], name: str) -> tuple[list[int], bool]:
        """Return the padding in front of each sequence, and whether ranks compared the call (Note [Same tokens on all ranks])."""
        with self.ring.propagate_errors():
            paddings = self._read_padding(given, name)
        if self.ring.world_size == 1:
            return paddings, True
        new, positions, keep = given[name], given.get("position_ids"), given.get("logits_to_keep", 0)
        b, n = new.shape[:2]
        few = MAX_DECODE_TOKENS if self._generating else 1
        continues = self._requests and n <= few and name == "input_ids" and (self._compared or not self._generating)
        options = [keep if isinstance(keep, int) else keep.tolist(), *(bool(given.get(one)) for one in _PASSED_ON)]
        tensors = [new] if positions is None else [new, positions.to(new.device)]
        text = f"{b} sequences, {n} new tokens after {self.get_seq_length()}, padding {paddings}, options {options}"
        if continues:
            self._open().consistency.record(text, *tensors)
            return paddings, False
        tensors += [x for _, x in sorted(_images(given).items()) if isinstance(x, Tensor)]
        text += f", digests of tokens and positions {[int(digest_bits(x)) for x in tensors]}"
        self.ring.assert_equal_across_ranks("what the model is called with", text)
        self._compared = True
        return paddings, True

    def _check_positions(self, positions: Tensor | None, n: int, *, has_images: bool) -> None:
        several = has_sections(self._model.config.get_text_config(decoder=True))
        if positions is None:
            if several and (has_images or self._has_images):
                raise ValueError(
                    "position_ids must be given with images to a model with several positions per token, got none; pass them as "
                    "generate() of transformers 5 does, or use that release"
                )
            return
        if positions.dim() != 2 and not (several and positions.dim() == 3 and len(positions) in (1, 3, 4)):
            raise NotImplementedError(
                f"position_ids must be 2-dimensional, sequences x new tokens, got shape {tuple(positions.shape)}; leave them out, "
                "or pass them as generate() does"
            )
        if positions.dim() == 3 and not has_images and n > 1 and bool((positions[-3:] != positions[-1]).any()):
            raise NotImplementedError(
                "tokens of images must come in one call with their pixel_values, got positions of some without; leave "
                "prefill_chunk_size out"
            )

    def _read_padding(self, given: dict[str, Any], name: str) -> list[int]:
        """Check a call, and return the padding in front of each sequence."""
        images = _images(given)
        check_supported({name: x for name, x in given.items() if name not in images}, "RingCache call")
        if self._model.training and self.ring.world_size > 1:
            raise NotImplementedError(
                f"a model must be in eval mode among {self.ring.world_size} ranks, got {type(self._model).__name__} in training, "
                "which drops other numbers on each of them; call model.eval()"
            )
        new, mask, positions = (given.get(one) for one in (name, "attention_mask", "position_ids"))
        if new is None:
            raise ValueError("the model must be called with input_ids or inputs_embeds, got neither")
        (b, n), before = new.shape[:2], self.get_seq_length()
        self._check_positions(positions, n, has_images=bool(images))
        if self._requests and len(self._requests) != b:
            raise ValueError(
                f"the batch must be of the {len(self._requests)} sequences that the cache has, got {b}; "
                "call reset() before other prompts"
            )
        if b > self._batch:
            raise ValueError(
                f"the batch must be of at most batch={self._batch} sequences, prompts times beams or returned sequences, got {b}; "
                f"make the RingCache with batch={b}"
            )
        if before + n > self.max_tokens:
            raise ValueError(
                f"a sequence must stay within max_tokens={self.max_tokens}, got {before} tokens and {n} more; "
                "make the RingCache with more, or call reset() between prompts"
            )
        known = [min(padding, before) for padding in self._paddings] or [0] * b
        paddings = known if mask is None else _padding(mask, b, before + n)
        # a sequence that is padding alone so far may have more of it
        if any(found < held or found > held < before for found, held in zip(paddings, known, strict=True)):
            raise ValueError(
                f"attention_mask must begin with the padding of the earlier calls, {known} tokens by sequence, got {paddings}; "
                "call reset() before other prompts"
            )
        return paddings


def _wrap(model: PreTrainedModel) -> Callable[[], None]:
    """Route calls of a model with a RingCache through that cache; return a function that undoes it and never raises.

    Forward is patched on the instance, because parts of generation call `self.forward`, which hooks do not see. RingCaches of one
    model share the patch, which the last one removes.
    """
    if isinstance(shared := model.__dict__.get("forward"), _SharedPatch):
        shared.users += 1
        return shared.unwrap
    original, original_generate = model.forward, getattr(model, "generate", None)
    signature = inspect.signature(original)
    spread = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    keyword = cache_keyword(signature.parameters)
    generating: list[RingCache] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = kwargs = _rename_cache(kwargs, keyword)
        if args or isinstance(kwargs.get(keyword), RingCache):
            given = dict(signature.bind(*args, **kwargs).arguments)
            given |= given.pop(spread, {}) if spread is not None else {}
        cache, error = given.get(keyword), None
        if not isinstance(cache, RingCache):
            if cache is not None or not generating:
                return original(*args, **kwargs)
            cache = generating[-1]
            error = NotImplementedError(
                f"generation must pass the RingCache to every call of the model, got a call of {type(model).__name__} without it, "
                f"after {cache.get_seq_length()} tokens; generate with attn_implementation='sdpa' on one process"
            )
        elif cache._model is not model:
            error = ValueError(
                f"a RingCache must be of the model that is called, a {type(model).__name__}, got one of "
                f"another {type(cache._model).__name__}; make each model a RingCache of its own"
            )
        if error is not None:
            cache._calling = True
            cache.ring.raise_on_all_ranks(error)
        out = cache._call(original, given)
        setattr(out, keyword, cache)
        return out

    patch = _SharedPatch(forward, original, COPY_REFUSAL)
    wrapped: dict[str, Callable[..., Any]] = {"forward": patch}
    if callable(original_generate):
        keyword_of_generate = cache_keyword(inspect.signature(original_generate).parameters)

        def generate(*args: Any, **kwargs: Any) -> Any:
            kwargs = _rename_cache(kwargs, keyword_of_generate)
            cache = kwargs.get(keyword_of_generate)
            if not isinstance(cache, RingCache) or cache._model is not model:
                return original_generate(*args, **kwargs)
            generating.append(cache)
            cache._generating += 1
            try:
                return cache._generate(original_generate, args, kwargs)
            finally:
                generating.pop()
                cache._generating -= 1

        wrapped["generate"] = BoundPatch(generate, original_generate, COPY_REFUSAL)
    owns = {name: model.__dict__.get(name) for name in wrapped}
    for name, call in wrapped.items():
        setattr(model, name, call)

    def unwrap() -> None:
        patch.users -= 1
        for name, own in owns.items():
            # a method that replaced the patch calls it, and it passes calls without a RingCache on
            if patch.users == 0 and model.__dict__.get(name) is wrapped[name]:
                if own is None:
                    del model.__dict__[name]
                else:
                    model.__dict__[name] = own

    patch.unwrap = unwrap
    return unwrap


class _SharedPatch(BoundPatch):
    """The forward of a model with RingCaches, `users` of them."""

    users = 1
    unwrap: Callable[[], None]


def _rename_cache(kwargs: dict[str, Any], keyword: str) -> dict[str, Any]:
    """Pass a RingCache by the keyword that a function has for it; releases of transformers differ."""
    given = {name: x for name in CACHE_KEYWORDS if (x := kwargs.get(name)) is not None}
    cache = next((x for x in given.values() if isinstance(x, RingCache)), None)
    if cache is None:
        return kwargs
    if len(given) > 1:
        cache.ring.raise_on_all_ranks(
            ValueError("a cache must be passed once, got cache and past_key_values; leave one out")
        )
    return {**{name: x for name, x in kwargs.items() if name not in CACHE_KEYWORDS}, keyword: cache}


def _drop_cached(given: dict[str, Any], name: str, paddings: list[int], before: int) -> dict[str, Any]:
    """Drop the cached tokens from a call's arguments: 5.x passes them again when a turn begins with candidates."""
    new, positions = given.get(name), given.get("position_ids")
    if new is None or positions is None or positions.dim() != 2 or not 0 < before < new.shape[1]:
        return given
    n = new.shape[1]
    if not bool((positions[:, -1].cpu() + torch.tensor(paddings, device="cpu") == n - 1).all()):
        return given
    return {**given, name: new[:, before:], "position_ids": positions[:, before:]}


def _describe(value: Any) -> str:
    """Return a text of arguments of generate, equal on all ranks that pass equal ones."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {int(digest_bits(value))}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_describe(value[name])}" for name in sorted(value, key=repr)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_describe, value)) + "]"
    if isinstance(value, GenerationConfig):
        return _describe(value.to_diff_dict())
    # the repr of other objects (streamers, criteria) has an address
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _images(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with images that the model reads whole; empty for a call without pixels.

    generate() of 5.x encodes images before its first call of the model, on every rank.
    """
    encoded = any(x is not None for x in (given.get("mm_encoder_outputs") or {}).values())
    if not encoded and given.get("pixel_values") is None and given.get("pixel_values_videos") is None:
        return {}
    names = (*IMAGE_KEYWORDS, "mm_encoder_outputs", "token_type_ids")
    return {name: given[name] for name in names if given.get(name) is not None}


def _padding(mask: Tensor, b: int, length: int) -> list[int]:
    """Return the tokens of padding in front of each sequence."""
    if tuple(mask.shape) != (b, length):
        raise ValueError(
            f"attention_mask must be of {b} sequences and the {length} tokens that they have with this call, got "
            f"{tuple(mask.shape)}; pass that of the whole sequences"
        )
    held = mask != 0
    first = (held.cumsum(-1) == 0).sum(-1)
    *paddings, others = torch.cat([first, (held.sum(-1) + first != length).sum()[None]]).tolist()
    if others:
        raise NotImplementedError(
            f"attention_mask must have padding on the left only, got other padding in {others} of {b} sequences; "
            "pass masks whose zeros come before all ones, as a tokenizer with padding_side='left' does"
        )
    return paddings


def share_generators(ring: Ring, device: torch.device) -> None:
    """Set the random generators that sampling draws from to the state of rank 0's, on all ranks."""
    if ring.world_size == 1:
        return
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    mine = torch.cat(states).to(device)
    shared = ring.gather(mine, 0, [len(mine)] * ring.world_size)[0].cpu().split([len(state) for state in states])
    torch.set_rng_state(shared[0].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(shared[1].clone(), device)
