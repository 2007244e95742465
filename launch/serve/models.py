"""The served model, a causal language model of transformers, with its tokenizer and its KV cache."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.inference import PagedKVCache
from ringattn.launch.common.checkpoint_files import ADAPTER, check_files, read_config, read_model, tokenizer_folder
from ringattn.launch.common.distributed import Refusal, Session
from ringattn.launch.common.planned_memory import RESERVE, check_fits
from ringattn.launch.serve.config import TINY, ServeArgs, check_model
from ringattn.launch.serve.tokenizer import ByteTokenizer, PretrainedTokenizer, Tokenizer
from ringattn.plan.mask import short_mask
from ringattn.ring import Ring
from ringattn.sizing.memory import Memory, heads_of, serving_memory
from ringattn.sizing.ring_time import RingCall
from ringattn.sizing.shapes import load_shape

if TYPE_CHECKING:
    from ringattn.integrations.transformers.sharded_weights.plan import WeightPlan

CPU_CACHE_GIB = 0.25  # GiB of the cache of a rank on CPUs, where other processes need most of the memory

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
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
class ServedModel:
    """A loaded model."""

    model: Any  # on its device, with ring attention
    tokenizer: Tokenizer
    name: str
    length: int | None  # maximum tokens of a sequence, by its config; None if that has none
    facts: str  # text that must be the same on all ranks
    defaults: dict[str, int | float]  # options of requests that leave them out, by its generation_config.json
    parameters: int  # of the whole model
    random_weights: bool = False  # they were drawn: all ranks take those of rank 0
    notes: tuple[str, ...] = ()  # lines to print
    plan: WeightPlan | None = None  # what the model has slices of; None: its weights are whole


def load_model(args: ServeArgs, device: torch.device, rank: int = 0, ranks: int = 1) -> ServedModel:
    """Load the model of a folder, of a config (random weights), or the one that is built in; see the flags of the server.

    With `weights` "sharded" among several ranks it has this rank's slices. Nothing is downloaded, and no code in the folder is run.
    Raises Refusal if the model cannot be served.
    """
    from ringattn.integrations.transformers import register
    from ringattn.integrations.transformers.positions import (
        max_learned_positions,
        rope_scaling_limits,
        use_long_factors,
    )

    register()
    path, max_len = args.model, args.max_len
    check_model(path)
    place = Path(path).expanduser()
    tokenizer_place = None if path == TINY else tokenizer_folder(path)
    config = _read(path)
    text = config.get_text_config(decoder=True)
    length = getattr(text, "max_position_embeddings", None)
    notes = []
    for most in [most for kind, most in rope_scaling_limits(text) if kind == "longrope"]:
        if (max_len or length or most) > most:
            use_long_factors(config)
            notes.append(
                f"longrope: prompts of every length get the long factors; --max-len {most} takes the short ones"
            )
    for rope_type, most in rope_scaling_limits(text):
        # the longest request of a step would choose for those beside it
        if (max_len or length or most) > most:
            raise Refusal(
                f"max_len must be at most {most} where rope_type is {rope_type!r}, whose frequencies depend on the longest request "
                f"of a step, got {max_len or length}; pass --max-len {most}"
            )
    chosen = _choose_dtype(config, args.dtype, device)
    random_weights = path == TINY or place.is_file()
    folder = None if random_weights else place
    plan, drawn = None, 0
    if args.weights == "sharded" and ranks > 1:
        plan, drawn = _build_slices(config, folder, chosen, device, args, rank, ranks)
        model: Any = plan.model
    else:
        model = _build_model(config, folder, chosen, device, args.seed, tiny=path == TINY)
    if args.adapter is not None:
        model = _merge_adapter(model, Path(args.adapter).expanduser())
    table = max_learned_positions(model)
    if table is not None:
        if (max_len or table) > table:
            # a request that came there would end the server
            raise Refusal(
                f"max_len must be at most {table}, the positions that {type(model).__name__} has learned, got {max_len}; pass "
                f"--max-len {table}, or leave it out"
            )
        length = table
    embeddings = model.get_input_embeddings()
    vocab: int = embeddings.weight.shape[0] if plan is None else embeddings.num_embeddings
    template = None if args.chat_template is None else Path(args.chat_template).expanduser().read_text(encoding="utf-8")
    if tokenizer_place is not None:
        tokenizer: Tokenizer = PretrainedTokenizer(tokenizer_place, _stops(model), vocab, template)
        tokenizer.check_template()
    elif template is not None:
        raise Refusal(f"chat_template must be left out for a model without a tokenizer, got {args.chat_template}")
    elif vocab >= ByteTokenizer.MIN_VOCAB:
        tokenizer = ByteTokenizer(vocab)
    else:
        raise Refusal(
            f"a model without a tokenizer must have at least {ByteTokenizer.MIN_VOCAB} tokens, for bytes and an end, "
            f"got {vocab}; put a tokenizer.json into its folder"
        )
    own_name = TINY if path == TINY else (place if place.is_dir() else place.parent).resolve().name
    name = args.name or next(iter(args.served_model_name), own_name)
    defaults = _sampling_defaults(place) if args.generation_defaults and not random_weights else {}
    text = config.to_json_string(use_diff=False)
    facts = f"{type(model).__name__} {text} {chosen} {args.seed} {sorted(tokenizer.stops)} {defaults} {drawn}"
    sliced = {} if plan is None else {id(slot.weight): slot.slice for slot in plan.slots}
    parameters = sum(
        prod(sliced[id(x)].whole_shape(x.shape)) if id(x) in sliced else x.numel() for x in model.parameters()
    )
    return ServedModel(model, tokenizer, name, length, facts, defaults, parameters, random_weights, tuple(notes), plan)


def _sampling_defaults(folder: Path) -> dict[str, int | float]:
    """Return the options of sampling in a folder's generation_config.json; raise ValueError for one that requests may not have."""
    from ringattn.launch.serve.http.api import Completion

    path = folder / "generation_config.json"
    given = json.loads(path.read_text()) if path.is_file() else {}  # transformers' own object has defaults of its own
    found = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    try:
        body = Completion.model_validate({"prompt": "", **found})
    except ValueError as error:
        raise Refusal(
            f"{path} must have options that requests may have, got {error}; or pass --no-generation-defaults"
        ) from None
    return {name: getattr(body, name) for name in found}


def _read(path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("llama", **_TINY) if path == TINY else read_config(path)


def _choose_dtype(config: Any, dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a model by a flag: auto is that of its config on GPUs, float32 on CPUs."""
    kind: Any = getattr(config.get_text_config(decoder=True), "dtype", None) if device.type == "cuda" else None
    return (kind or torch.float32) if dtype == "auto" else getattr(torch, dtype)


class _Planned(NamedTuple):
    """Planned memory of a rank.

    Attributes:
        memory: All of it, with the cache that the flags ask for.
        room: Bytes that are left for the cache.
        token: Bytes of a token in the cache.
    """

    memory: Memory
    room: float
    token: float


def resolve_weights(args: ServeArgs, device: torch.device, world_size: int, whole: int | None) -> ServeArgs:
    """Return the flags with `weights` "sharded" or "whole": auto shards where GPUs of `whole` bytes cannot hold whole weights.

    Raises:
        Refusal: Sharded weights are asked for beside an adapter.
    """
    if args.weights == "sharded" and args.adapter is not None:
        raise Refusal(
            f"adapter must be left out with sharded weights, got {args.adapter}; merge it into the model's folder with peft "
            "(merge_and_unload, save_pretrained) and serve that"
        )
    if args.weights != "auto":
        return args
    wanted = "whole"
    if whole is not None and world_size > 1 and args.adapter is None:
        planned = _plan_memory(replace(args, weights="whole"), device, world_size, whole)
        if planned is not None and planned.memory.total > whole:
            sharded = _plan_memory(replace(args, weights="sharded"), device, world_size, whole)
            wanted = "whole" if sharded is None else "sharded"
    return replace(args, weights=wanted)


def check_memory(args: ServeArgs, device: torch.device, world_size: int, whole: int) -> str:
    """Return the planned memory of a rank in words, or "" for a model whose numbers the planner does not know.

    Counts weights, whole or sharded, a chunk of a prompt, and the cache: that of --cache-gib, else one for --max-len and
    --max-tokens.

    Raises:
        Refusal: GPUs of `whole` bytes cannot hold it, and --check-memory is on; raised before anything is allocated.
    """
    planned = _plan_memory(args, device, world_size, whole)
    if planned is None:
        return ""
    room, token = planned.room, planned.token
    if room < args.page_size * token:
        sharded = args.weights == "sharded"
        held = "slices of the weights" if sharded else "the weights, which every rank holds"
        ways = "more ranks, " if sharded else ""
        remedy = f"no cache fits beside {held}: take {ways}larger GPUs, a smaller --dtype or another model"
        if not sharded and world_size > 1:
            remedy += ", or --weights sharded"
    elif args.cache_gib is not None:
        remedy = f"pass --cache-gib {int(room / 2**30 * 100) / 100:g} or less"
    else:
        remedy = f"pass --max-len and --max-tokens of at most {int(room / token)}, take more ranks, or --kv-dtype fp8"
    remedy += "; --no-check-memory goes on anyway"
    return check_fits(planned.memory, whole, remedy, refuse=args.check_memory)


def _plan_memory(args: ServeArgs, device: torch.device, world_size: int, whole: int) -> _Planned | None:
    """Return the planned memory of a rank; None for a model that the planner does not know, or that cannot be sharded as asked."""
    from transformers import AutoModelForCausalLM

    from ringattn.integrations.transformers.sharded_weights.plan import plan_weights

    config = _read(args.model)
    dtype = _choose_dtype(config, args.dtype, device)
    try:
        shape = load_shape(config.to_dict())
    except ValueError:
        return None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    weights = sum(x.numel() * x.element_size() for x in model.parameters())
    sharded = args.weights == "sharded" and world_size > 1
    if sharded:
        try:
            sliced = plan_weights(model, world_size)
        except NotImplementedError:
            return None
        weights = sliced.bytes_per_rank() + sliced.gather_bytes()
    elif files := list(Path(args.model).expanduser().glob("*.safetensors")):
        weights = min(weights, sum(file.stat().st_size for file in files))  # quantised ones are smaller
    rows = args.chunk * world_size  # of the longest steps
    call = RingCall(short_mask(rows, causal=True), world_size, heads_of(shape))
    fixed = serving_memory(shape, rows, 0, rows, call, sharded=sharded, reserve=RESERVE)
    fixed = replace(fixed, weights=weights)
    sizes, row = _cache_sizes(model), 1 if args.kv_dtype == "fp8" else dtype.itemsize
    latent = sizes.get("latent")
    columns = sum(latent) if latent else sizes["kv_heads"] * (sizes["head_dim"] + sizes["v_head_dim"])
    token = sizes["layers"] * columns * row / world_size
    length = max(args.max_len or 0, args.max_tokens or 0, args.page_size)
    cache = length * token if args.cache_gib is None else args.cache_gib * 2**30
    return _Planned(replace(fixed, kv_cache=cache), whole - fixed.total, token)


def _build_slices(
    config: Any, folder: Path | None, dtype: torch.dtype, device: torch.device, args: ServeArgs, rank: int, ranks: int
) -> tuple[WeightPlan, int]:
    """Return a model with a rank's slices of the weights of a folder, or of random ones, and a digest of the latter."""
    from ringattn.integrations.transformers.sharded_weights.load import draw_weights, empty_model, read_slices
    from ringattn.integrations.transformers.sharded_weights.plan import plan_weights
    from ringattn.integrations.transformers.sharded_weights.shard import slice_weights

    try:
        if args.model == TINY:
            plan = plan_weights(_build_model(config, None, dtype, device, args.seed, tiny=True), ranks)
            slice_weights(plan, rank)
            return plan, 0
        with _refusals():
            model = empty_model(config, dtype)
        plan = plan_weights(model, ranks)
        if folder is None:
            return plan, draw_weights(plan.model, device, args.seed, plan, rank)
        check_files(folder)
        read_slices(folder, plan, rank, device)
        return plan, 0
    except NotImplementedError as error:
        raise Refusal(f"{error} (--weights whole)") from None


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Refuse what the integration refuses while a model is made."""
    try:
        yield
    except NotImplementedError as error:
        raise Refusal(str(error)) from None


def _build_model(
    config: Any, folder: Path | None, dtype: torch.dtype, device: torch.device, seed: int, tiny: bool
) -> Any:
    """Return a model on the device with the weights of a folder, or with random ones."""
    from transformers import AutoModelForCausalLM

    from ringattn.integrations.transformers import NAME
    from ringattn.integrations.transformers.sharded_weights.load import draw_weights, empty_model

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME}
    with _refusals():
        if folder is not None:
            if device.type == "cuda":
                options["device_map"] = {"": device}  # straight onto the GPU
            model: Any = read_model(folder, config=config, use_safetensors=True, **options)
        elif tiny:
            # on the CPU, where numbers are the same everywhere
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
            _prefer_letters_(model)
        else:
            model = empty_model(config, dtype)
            # on a GPU, where it takes no time; the numbers of slices are the same
            draw_weights(model, device, seed)
    if "device_map" not in options:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _merge_adapter(model: Any, folder: Path) -> Any:
    """Return a model with the adapter in a folder merged into its weights; raise Refusal if that is not possible in full."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise Refusal("adapter needs peft; install it with: pip install peft") from None
    if not ((folder / ADAPTER).is_file() and (folder / "adapter_model.safetensors").is_file()):
        raise Refusal(f"adapter must be a folder with {ADAPTER} and adapter_model.safetensors, got {folder}")
    try:
        adapted: Any = PeftModel(model, PeftConfig.from_pretrained(str(folder)))
        found = adapted.load_adapter(str(folder), "default")
        if wrong := [key for key in found.missing_keys if ".default" in key] + found.unexpected_keys:
            raise ValueError(f"{len(wrong)} weights that only one of them has, such as {wrong[0]}")
        return adapted.merge_and_unload(safe_merge=True).eval().requires_grad_(False)
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise Refusal(
            f"adapter must be one of {type(model).__name__} that peft can merge, got {folder}: {type(error).__name__}: {error}"
        ) from None


@torch.no_grad()
def broadcast_weights(model: Any, session: Session) -> None:
    """Broadcast weights and buffers of rank 0: different GPUs may draw different numbers from the same seed."""
    if session.world_size > 1:
        for x in (*model.parameters(), *model.buffers()):
            dist.broadcast(x.detach(), src=0)


@torch.no_grad()
def _prefer_letters_(model: Any) -> None:
    """Make random weights answer with letters: other bytes get a logit of 0, which is far below the largest."""
    head: Tensor = model.get_output_embeddings().weight
    head.mul_(3)
    letters = b"abcdefghijklmnopqrstuvwxyz ,."
    head[[x for x in range(256) if x not in letters]] = 0


def _stops(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        value = getattr(config, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def make_cache(model: Any, ring: Ring, *, gib: float | None, page_size: int, kv_dtype: str) -> PagedKVCache:
    """Return the cache of a model; raise Refusal, on every rank, if not even one page fits, or it keeps more than keys."""
    shape = _cache_sizes(model)
    if gib is None and model.device.type == "cuda":
        torch.cuda.empty_cache()
        memory = None
    else:
        memory = int((CPU_CACHE_GIB if gib is None else gib) * 2**30)
    try:
        return PagedKVCache(
            ring,
            **shape,
            dtype=model.dtype,
            memory=memory,
            page_size=page_size,
            kv_dtype=torch.float8_e4m3fn if kv_dtype == "fp8" else None,
            device=model.device,
        )
    except ValueError as error:
        raise Refusal(f"{error} (--cache-gib, --page-size)") from None


def _cache_sizes(model: Any) -> dict[str, Any]:
    from ringattn.integrations.transformers.support import cache_sizes

    try:
        return cache_sizes(model)
    except NotImplementedError as error:
        raise Refusal(str(error)) from None


def describe_cache(cache: PagedKVCache) -> str:
    """Return a description of the cache of all ranks."""
    allocator, kind = cache.allocator, str(cache.kv_dtype).removeprefix("torch.")
    size = allocator.pages * cache.page_size * cache.bytes_per_token / 2**30
    return (
        f"{cache.capacity_tokens} tokens in {kind} on {allocator.world_size} ranks, {allocator.pages} pages of "
        f"{cache.page_size} tokens and {size:.2f} GiB each"
    )
