"""What is served: a causal language model of transformers with its tokenizer, and the cache that its ranks share.

Owns where they come from, how many pages the memory holds, and how a step is computed. Refuses to know requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.inference import PagedKVCache
from ringattn.inference.step import MOST_DECODED
from ringattn.launch.distributed import Rank, Refusal
from ringattn.launch.serving.config import TINY, check_model
from ringattn.launch.serving.scheduling import Plan
from ringattn.launch.serving.text import Bytes, Pretrained, Tokenizer
from ringattn.ring import Ring

if TYPE_CHECKING:
    from ringattn.integrations.transformers.decoding import Recorder

CPU_CACHE_GIB = 0.25
"""What the cache of a rank takes on CPUs, where most memory is somebody else's."""

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")

_TINY = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2**20,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Served:
    """A model that is ready to be asked.

    Attributes:
        model: On its device, with ring attention.
        tokenizer: Its own, or bytes.
        name: By which requests call it.
        length: Tokens of a sequence at most, by its config; None where that says nothing.
        facts: What must be the same on all ranks.
        drawn: Its weights were drawn on a GPU: all ranks must take those of rank 0 (`share_weights`).
    """

    model: Any
    tokenizer: Tokenizer
    name: str
    length: int | None
    facts: str
    drawn: bool = False


def load(path: str, *, name: str | None, dtype: str, device: torch.device, seed: int) -> Served:
    """The model of a folder, of a config (random weights), or the one that is built in.

    Nothing is fetched, and no code in the folder is run. Weights are read straight onto a GPU where accelerate is installed, and
    drawn there.

    Args:
        path: What was given as --model.
        name: By which requests call it; None for the folder's name.
        dtype: "float32", "bfloat16", "float16", or "auto": the config's on a GPU, float32 on a CPU.
        device: Of this rank.
        seed: Of random weights.

    Raises:
        Refusal: The model cannot be served.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ringattn.integrations.transformers import NAME, register

    register()
    check_model(path)
    place = Path(path).expanduser()
    if path == TINY:
        config: Any = AutoConfig.for_model("llama", **_TINY)
    else:
        config = AutoConfig.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    kind: Any = (getattr(text, "dtype", None) if device.type == "cuda" else None) or torch.float32
    chosen: torch.dtype = kind if dtype == "auto" else getattr(torch, dtype)
    options: dict[str, Any] = {"dtype": chosen, "attn_implementation": NAME}
    drawn = False
    if place.is_dir() and any(place.glob("*.safetensors")) and path != TINY:
        if device.type == "cuda" and importlib.util.find_spec("accelerate") is not None:
            options["device_map"] = {"": device}
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(place), local_files_only=True, trust_remote_code=False, use_safetensors=True, **options
        )
    else:
        # the built-in model on the CPU, whose numbers are the same everywhere; others on GPUs, where drawing takes no time
        drawn = device.type == "cuda" and path != TINY
        with torch.random.fork_rng([device] if drawn else []), device if drawn else contextlib.nullcontext():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        if path == TINY:
            _make_legible_(model)
    if "device_map" not in options:
        model = model.to(device)
    model.eval().requires_grad_(False)
    stops = _stops(model)
    embeddings: Any = model.get_input_embeddings()
    vocab: int = embeddings.weight.shape[0]
    folder = place if place.is_dir() else place.parent
    if path != TINY and any((folder / file).is_file() for file in TOKENIZERS):
        tokenizer: Tokenizer = Pretrained(folder, stops, vocab)
    else:
        tokenizer = Bytes()
        if vocab < tokenizer.vocab_size:
            raise Refusal(
                f"a model without a tokenizer must have at least {tokenizer.vocab_size} tokens, for bytes and an end, got {vocab}; "
                "put a tokenizer.json into its folder"
            )
    served_name = name or (TINY if path == TINY else (place if place.is_dir() else place.parent).resolve().name)
    length = getattr(text, "max_position_embeddings", None)
    facts = f"{type(model).__name__} {config.to_json_string(use_diff=False)} {chosen} {seed} {sorted(tokenizer.stops)}"
    return Served(model, tokenizer, served_name, length, facts, drawn)


@torch.no_grad()
def share_weights(model: Any, rank: Rank) -> None:
    """Gives all ranks the weights and buffers of rank 0: what GPUs draw from one seed may differ between kinds of them."""
    if rank.world_size > 1:
        for x in (*model.parameters(), *model.buffers()):
            dist.broadcast(x.detach(), src=0)


@torch.no_grad()
def _make_legible_(model: Any) -> None:
    """Lets random weights answer with letters: other bytes get a score of 0, which is little beside the largest."""
    head: Tensor = model.get_output_embeddings().weight
    head.mul_(3)
    letters = b"abcdefghijklmnopqrstuvwxyz ,."
    head[[x for x in range(256) if x not in letters]] = 0


def _stops(model: Any) -> frozenset[int]:
    """Tokens that end an answer, by the model's configurations."""
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        value = getattr(config, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def make_cache(model: Any, ring: Ring, *, gib: float | None, page_size: int, kv_dtype: str) -> PagedKVCache:
    """The cache of a model; every rank calls it alike.

    Args:
        model: As loaded; on its device.
        ring: All ranks.
        gib: GiB per rank; None for most of what the fullest GPU has left, or CPU_CACHE_GIB on CPUs.
        page_size: Tokens of a page.
        kv_dtype: "auto" for the model's, or "fp8".

    Raises:
        Refusal: Not even one page fits; raised on every rank.
    """
    from ringattn.integrations.transformers.generation import cache_sizes

    names = ("layers", "kv_heads", "head_dim", "v_head_dim")
    shape: dict[str, Any] = dict(zip(names, cache_sizes(model), strict=True))
    if gib is None and model.device.type == "cuda":
        torch.cuda.empty_cache()
        memory = None
    else:
        memory = int((CPU_CACHE_GIB if gib is None else gib) * 2**30)
    kind = torch.float8_e4m3fn if kv_dtype == "fp8" else None
    try:
        return PagedKVCache(
            ring,
            **shape,
            dtype=model.dtype,
            memory=memory,
            page_size=page_size,
            kv_dtype=kind,
            device=model.device,
        )
    except ValueError as error:
        raise Refusal(f"{error} (--cache-gib, --page-size)") from None


TRIED = ((0, 24), (0, 56), (0, 120), (0, 520), (0, 1024), (1024, 350), (8192, 12), (8192, 50), (8192, 200), (8192, 550))
"""Prompts that are computed before the first request: tokens on each rank that are there already, and new ones. From them follow
how kernels pack heads into tiles, what moves, and how pages are read."""


PIECES = (2, 4, 8, 16, 32)
"""Pieces of 16 rows of the graphs for short prompts: products of 512 rows take not much longer than reading the weights."""


class Replica:
    """One rank's part of every step.

    Args:
        model: As loaded.
        cache: As made for it.
        most: Requests that decode together at most.
        graphs: Whether steps of decoding and of short prompts are replayed from CUDA graphs: None: where that can be; False: never;
            or what records them.
    """

    def __init__(self, model: Any, cache: PagedKVCache, most: int, graphs: bool | Recorder | None = None) -> None:
        from ringattn.integrations.transformers.decoding import Decoding, batch_sizes, choose_recorder

        self._model, self._cache = model, cache
        self.books = cache.pages
        sizes = batch_sizes(most)
        recorder = choose_recorder(graphs, model, cache)
        most_shapes = len(sizes) + len(PIECES)
        self._decoding = Decoding(model, cache, recorder, batches=sizes, pieces=PIECES, most=most_shapes)

    @property
    def graphs(self) -> int:
        """CUDA graphs that steps are replayed from."""
        return self._decoding.recorded

    @property
    def pieces(self) -> int:
        """Pieces of short prompts that a step may bring as `Plan.packed`; 0: none."""
        return self._decoding.most_pieces

    def prepare(self, longest: int | None = None) -> list[str]:
        """Computes prompts of several lengths and captures what can be captured, so that no request waits for a compiler.

        Args:
            longest: Tokens that the model takes; None: no bound.

        Returns:
            How that went, a line each.
        """
        began, said = time.monotonic(), []
        self._decoding.prepare()
        if self.graphs:
            short = f", and prompts in parts of up to {MOST_DECODED * self.pieces} tokens" * bool(self.pieces)
            said.append(f"decoding{short}: {self.graphs} CUDA graphs captured in {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        tried = self._try_prompts(longest)
        said.append(f"prompts around the ring: {tried} steps computed in {time.monotonic() - began:.1f} s")
        return said

    def _try_prompts(self, longest: int | None) -> int:
        """Steps with the numbers of tokens on which kernels depend; how many there were."""
        from ringattn.integrations.transformers import run_step

        cache, ranks, tried = self._cache, self._cache.ring.world_size, 0
        room = min(cache.capacity_tokens, longest or cache.capacity_tokens)
        for past, new in TRIED:
            # nothing is compiled for CPUs, where a past takes time
            needless = (past and cache.device.type == "cpu") or (not past and ranks * new <= MOST_DECODED * self.pieces)
            if needless or ranks * (past + new) > room:
                continue
            request = cache.join(ranks * (past + new))
            if past:
                # what nobody has written yet is zero, and as good as anything
                cache.pages.place([request], [ranks * past])
            step = cache.extend([request], [ranks * new], mode="prefill")
            run_step(self._model, step, torch.zeros(ranks * new, dtype=torch.int64), wanted=[0])
            tried += 1
            cache.leave(request)
        return tried

    def run(self, plan: Plan) -> Tensor:
        """The logits `wanted vocab` of a step, on every rank; the next step may overwrite them."""
        from ringattn.integrations.transformers import run_step

        tokens = torch.tensor(plan.tokens)
        if plan.decodes:
            logits = self._decoding.run(plan.requests, tokens[:, None]).logits[:, -1]
            return logits if len(plan.wanted) == len(plan.requests) else logits[plan.wanted]
        if plan.packed:
            logits = self._decoding.run_packed(plan.requests, plan.counts, tokens)
            if logits is not None:
                return logits if len(plan.wanted) == len(plan.requests) else logits[plan.wanted]
        step = self._cache.extend(plan.requests, plan.counts)
        if step.mode == "decode":
            tokens = tokens.view(len(plan.requests), -1)
        return run_step(self._model, step, tokens, wanted=plan.wanted)


def describe(cache: PagedKVCache) -> str:
    """How much the cache of all ranks holds, in words."""
    books = cache.pages
    size = books.pages * cache.page_size * cache.bytes_per_token / 2**30
    kind = str(cache.kv_dtype).removeprefix("torch.")
    return (
        f"{cache.capacity_tokens} tokens in {kind} on {books.world_size} ranks, {books.pages} pages of {cache.page_size} tokens "
        f"and {size:.2f} GiB each"
    )
