"""A Llama-shaped model of transformers with random weights and caches full of random numbers, to measure inference on.

transformers is imported where it is used.

Note [Cost of tokens]
    FLOPs until the first token: 2 per parameter and token (the embedding's rows are looked up, and the head is needed for the
    last token only), and 4 * heads * head_dim per layer and visible pair. A decode step reads every parameter but the embedding
    once, and every key and value of its requests: of these a rank reads its own. No step is faster than these bytes at
    the bandwidth of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringattn import Ring
from ringattn.inference import ForwardBatch, PagedKVCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ringattn.integrations.transformers.cuda_graph_runner import GraphCapturer

PAGE_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama model; `mlp_dim` is the hidden width of SwiGLU."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer.

        Example:
            >>> Shape(4096, 32, 32, 8, 128, 14336, 128256).layer_parameters
            218103808
        """
        heads = 2 * self.heads + 2 * self.kv_heads
        return self.dim * (heads * self.head_dim + 3 * self.mlp_dim)

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, which makes logits."""
        return self.dim * self.vocab_size

    def prompt_flops(self, tokens: int) -> int:
        """Return the FLOPs until the first token (Note [Cost of tokens]).

        Example:
            >>> Shape(4, 1, 1, 1, 4, 8, 3).prompt_flops(2)
            712
        """
        return (
            2 * self.layers * self.layer_parameters * tokens + 2 * self.head_parameters + self.attention_flops(tokens)
        )

    def attention_flops(self, tokens: int) -> int:
        """Return the part of them that is attention."""
        return 4 * self.heads * self.head_dim * self.layers * (tokens * (tokens + 1) // 2)

    def weight_bytes(self, itemsize: int, sharing: int = 1) -> int:
        """Return the bytes of parameters that a rank reads in a decode step (Note [Cost of tokens]).

        `sharing` ranks read a slice each of MLPs and of the head.

        Example:
            >>> shape = Shape(4096, 32, 32, 8, 128, 14336, 128256)
            >>> shape.weight_bytes(2), shape.weight_bytes(2, 4)
            (15009316864, 5765595136)
        """
        mlp = 3 * self.dim * self.mlp_dim
        split = self.layers * mlp + self.head_parameters
        return (self.layers * (self.layer_parameters - mlp) + split // sharing) * itemsize


def make_model(shape: Shape, longest: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a model of random weights for up to `longest` positions; the same on every rank with the same kind of device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ringattn.integrations.transformers import NAME, register

    register()
    config = LlamaConfig(
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
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    return model.eval().requires_grad_(False)


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


def pages_for(batch: int, tokens: int, world_size: int, page_size: int = PAGE_SIZE) -> int:
    """Return the pages that every rank needs for requests of equal length.

    Example:
        >>> pages_for(2, 1000, 4, page_size=64)  # 16 pages of each, 4 on each rank, and two for uneven shares
        12
    """
    pages = math.ceil(tokens / page_size)
    return batch * (math.ceil(pages / world_size) + 2)


def make_cache(
    ring: Ring,
    shape: Shape,
    pages: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> PagedKVCache:
    """Make an empty cache for a model, with `pages` pages on every rank."""
    return PagedKVCache(
        ring,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        pages=pages,
        page_size=PAGE_SIZE,
        device=device,
    )


def full_cache(
    ring: Ring,
    shape: Shape,
    batch: int,
    tokens: int,
    new_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> tuple[PagedKVCache, list[int]]:
    """Make a cache with `batch` requests of `tokens` tokens each, and return both; each may get `new_tokens` more.

    The cache is filled with random numbers and no prefill is computed: decoding costs the same whatever the numbers are.
    """
    pages = pages_for(batch, tokens + new_tokens, ring.world_size)
    cache = make_cache(ring, shape, pages, dtype, device, kv_dtype)
    for pool in (cache.k, cache.v):
        if pool.dtype == dtype:
            pool.normal_()
            continue
        for page in pool.flatten(0, 1).split(4096):
            page.copy_(torch.randn(page.shape, dtype=dtype, device=device))
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None:
            scale.fill_(1.0)
    requests = [cache.add_request(reserve=tokens + new_tokens) for _ in range(batch)]
    for request in requests:
        cache.extend([request], [tokens], mode="prefill")
    return cache, requests


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
        self._runner = CUDAGraphRunner(model, cache, capturer)
        self.tokens = torch.zeros(len(requests), 1, dtype=torch.int64, device=cache.device)

    @property
    def refusal(self) -> str | None:
        """Reason for steps that are not replayed."""
        return self._runner.refusal

    def next_tokens(self) -> list[list[int]]:
        """Return the next token of each request, on the host."""
        self.logits = self._runner.run(self._requests, self.tokens).logits[:, -1]
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
