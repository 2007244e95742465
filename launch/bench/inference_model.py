"""A Llama-shaped model of transformers with random weights and caches full of random numbers, to measure inference on.

transformers is imported where it is used.

Note [Cost of tokens]
    FLOPs are those of `ringattn.sizing.ModelShape`. A decode step reads every parameter but the embedding once, and every key
    and value of its requests: of these a rank reads its own. No step is faster than these bytes at the bandwidth of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ringattn import Ring
from ringattn.inference import ForwardBatch, PagedKVCache
from ringattn.launch.bench.rows import BenchFlags
from ringattn.launch.common.session import check_numbers
from ringattn.sizing.shapes import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ringattn.integrations.transformers.cuda_graph_runner import GraphCapturer

PAGE_SIZE = 64


@dataclass(frozen=True)
class ModelArgs(BenchFlags):
    """Llama-shaped model of a bench; that of Llama 3 8B by default.

    Attributes:
        dim: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        mlp_dim: Hidden width of SwiGLU.
        vocab_size: Tokens in the vocabulary.
        dtype: Of parameters and activations, and of keys and values.
    """

    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp_dim: int = 14336
    vocab_size: int = 128256
    dtype: Literal["bf16", "fp32"] = "bf16"

    def __post_init__(self) -> None:
        """Raise for shapes that no model has."""
        check_numbers(self)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}; rotary embedding turns pairs")

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the model but its layers, as fields of a row."""
        return {name: getattr(self, name) for name in ("dim", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab_size")}

    def shape(self, layers: int) -> ModelShape:
        """Return the shape of a model of so many layers."""
        return ModelShape("bench", layers=layers, **self.sizes)


@dataclass(frozen=True)
class ContextArgs(ModelArgs):
    """Lengths of context, and layers of the model at each.

    Attributes:
        lengths: Tokens of context, of all ranks together.
        layers: Layers at each length; one number for all. 32 is the whole 8B model.
    """

    lengths: tuple[int, ...] = (131072, 262144, 524288, 1048576)
    layers: tuple[int, ...] = (32,)

    def __post_init__(self) -> None:
        """Raise for shapes that no model has."""
        if len(self.layers) not in (1, len(self.lengths)):
            raise ValueError(f"layers must be one number or one per length, got {self.layers} for {self.lengths}")
        super().__post_init__()

    @property
    def contexts(self) -> dict[int, int]:
        """Layers by tokens of context."""
        depths = self.layers if len(self.layers) > 1 else self.layers * len(self.lengths)
        return dict(zip(self.lengths, depths, strict=True))


def make_model(shape: ModelShape, longest: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a model of random weights for up to `longest` positions; the same on every rank with the same kind of device."""
    from transformers import AutoModelForCausalLM

    from ringattn.integrations.transformers import NAME

    config = make_config(shape, longest)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    return model.eval().requires_grad_(False)


def make_sharded_model(
    shape: ModelShape, longest: int, dtype: torch.dtype, device: torch.device, ring: Ring
) -> PreTrainedModel:
    """Make a model of random weights of which each rank draws whole modules, one by one, and keeps its slices; collective."""
    from ringattn.integrations.transformers.sharded_weights.load import draw_weights, empty_model
    from ringattn.integrations.transformers.sharded_weights.plan import plan_weights
    from ringattn.integrations.transformers.sharded_weights.shard import use_slices

    plan = plan_weights(empty_model(make_config(shape, longest), dtype), ring.world_size)
    digest = draw_weights(plan.model, device, 0, plan, ring.rank)
    ring.assert_equal_across_ranks("random weights", str(digest))
    use_slices(plan, ring)
    return plan.model


def make_config(shape: ModelShape, longest: int) -> PretrainedConfig:
    """Return the config of a model of Llama's architecture for up to `longest` positions."""
    from transformers import LlamaConfig

    from ringattn.integrations.transformers import register

    register()
    return LlamaConfig(
        hidden_size=shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=longest,
        rope_theta=500000.0,  # pyright: ignore[reportCallIssue]
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        # no random token ends a text
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@contextmanager
def use_attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let another implementation of attention serve the model inside the context."""
    before = model.config._attn_implementation or "eager"
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def draw_tokens(count: int, vocab_size: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw random tokens, the same on every rank: `count` int64."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).to(device)


def pages_for(batch: int, tokens: int, world_size: int) -> int:
    """Return the pages that every rank needs for requests of equal length.

    Example:
        >>> pages_for(2, 1000, 4)  # 16 pages of each, 4 on each rank, and two for uneven shares
        12
    """
    pages = math.ceil(tokens / PAGE_SIZE)
    return batch * (math.ceil(pages / world_size) + 2)


def make_cache(
    ring: Ring,
    shape: ModelShape,
    pages: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> PagedKVCache:
    """Make an empty cache for a model, with `pages` pages on every rank."""
    sizes: Any = {name: getattr(shape, name) for name in ("layers", "kv_heads", "head_dim")} | {"page_size": PAGE_SIZE}
    return PagedKVCache(ring, pages=pages, dtype=dtype, kv_dtype=kv_dtype, device=device, **sizes)


def fill_at_random(cache: PagedKVCache, batch: int, tokens: int, new_tokens: int) -> list[int]:
    """Fill a cache with random numbers, and return `batch` requests of `tokens` tokens; each may get `new_tokens` more.

    No prefill is computed: decoding costs the same whatever the numbers are.
    """
    for pool in (cache.k, cache.v):
        if pool.dtype.itemsize > 1:
            pool.normal_()
            continue
        for page in pool.flatten(0, 1).split(4096):
            page.copy_(torch.randn(page.shape, device=pool.device))
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None:
            scale.fill_(1.0)
    requests = [cache.add_request(reserve=tokens + new_tokens) for _ in range(batch)]
    for request in requests:
        cache.extend([request], [tokens], mode="prefill")
    return requests


def local_bytes(step: ForwardBatch) -> int:
    """Return the bytes of K and V of one layer that this rank reads in a decode step, by the step's own table."""
    table, cache = step.table, step.cache
    assert table is not None, "a decode step has a table"
    there = torch.arange(table.lengths.shape[1], device=table.lengths.device) < table.counts[:, None]
    return int((table.lengths * there).sum()) * cache.bytes_per_token // cache.layers


class Decoder:
    """Greedy decoding of requests, one token per step; with `capturer` as a CUDA graph.

    Attributes:
        tokens: `b 1`: tokens of the next step.
        logits: `b vocab` of the last step; those of a replayed step are overwritten by the next.
    """

    logits: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedKVCache,
        requests: Sequence[int],
        capturer: GraphCapturer | None = None,
    ) -> None:
        from ringattn.integrations.transformers.cuda_graph_runner import CUDAGraphRunner

        self._requests = list(requests)
        self.runner = CUDAGraphRunner(model, cache, capturer)
        self.tokens = torch.zeros(len(requests), 1, dtype=torch.int64, device=cache.device)

    def next_tokens(self) -> list[list[int]]:
        """Return the next token of each request, on the host."""
        self.logits = self.runner.run(self._requests, self.tokens).logits[:, -1]
        torch.argmax(self.logits, -1, keepdim=True, out=self.tokens)
        return self.tokens.tolist()


def fill_by_prompt(model: PreTrainedModel, cache: PagedKVCache, request: int, prompt: Tensor, chunk: int) -> Tensor:
    """Bring a prompt `n` to a cache in chunks over all ranks; return the logits of its last token, `1 vocab`, on every rank."""
    from ringattn.integrations.transformers import run_step

    logits: Any = None
    for tokens in prompt.split(chunk):
        step = cache.extend([request], [len(tokens)], mode="prefill")
        last = cache.length(request) == len(prompt)
        logits = run_step(model, step, tokens, wanted=None if last else [])
    return logits
