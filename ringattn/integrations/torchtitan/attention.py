"""Inner attention of torchtitan's decoders over the cp mesh dimension, and the config that uses it.

Owns two things that torchtitan leaves to a config: the inner attention of each layer, and the function that parallelizes the
model. The trainer itself is torchtitan's: it shards tokens, labels and positions, in the order of a zigzag for its load balancer
"headtail".

Legend: b rows of the batch, s tokens of a row on this rank, n tokens of a row, h heads, hk key heads, d head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.config.override import derive  # pyright: ignore[reportMissingImports]
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # pyright: ignore[reportMissingImports]
from torchtitan.protocols.module import Module  # pyright: ignore[reportMissingImports]
from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

from ringattn.api import ring_attention
from ringattn.autograd import ring_attention_op
from ringattn.plan.layouts import Run
from ringattn.plan.sharding import Sharding, check_sharding
from ringattn.ring import Ring

_MODELS = ("llama3", "qwen3")
_LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


class RingAttention(Module):
    """Inner attention of a torchtitan decoder: ring attention over packed documents, in place of Flex or Varlen attention.

    Its `attention_masks` is the sharding of the batch, which a hook of `with_ring` passes to the model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Config of the layer.

        Attributes:
            window: (left, right) tokens that a query attends to beside its own; None is unbounded.
        """

        window: tuple[int | None, int | None] = (None, 0)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window = config.window

    def parallelize(self, parallel_dims: Any) -> None:
        """Leave keys and values sharded over cp, which torchtitan gathers for Flex attention."""
        if (config := self._sharding_config) is not None:
            rows = config.in_src_shardings
            local_map = dataclasses.replace(config.local_map, in_grad_placements=tuple(rows.values()))
            self._sharding_config = dataclasses.replace(config, in_dst_shardings=rows, local_map=local_map)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Sharding,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002 - key heads that divide query heads need no flag here
    ) -> Tensor:
        """Return attention of this rank's rows; torchtitan's config names the arguments.

        Args:
            q_BLNH: Queries, `b s h d`.
            k_BLNH: Keys, `b s hk d`.
            v_BLNH: Values, `b s hk dv`.
            attention_masks: Sharding of the batch as one sequence of b * n tokens.
            scale: Factor on q.k; default d ** -0.5.
            enable_gqa: Whether there are fewer key heads than query heads.

        Returns:
            `b s h dv`.

        Raises:
            TypeError: attention_masks is no sharding: the model was parallelized without `with_ring`.
        """
        check_sharding(attention_masks, "attention_masks")
        # rows of a batch have different documents: they are one sequence
        q, k, v = (x.flatten(0, 1)[None] for x in (q_BLNH, k_BLNH, v_BLNH))
        o = ring_attention(q, k, v, attention_masks, window=self.window, softmax_scale=scale)
        return o.view(*q_BLNH.shape[:3], v_BLNH.shape[3])


def with_ring(config: Trainer.Config) -> Trainer.Config:
    """Return a config of torchtitan's trainer, changed in place, whose model attends around the ring of the cp mesh dimension.

    Rows of a batch are packed documents, as torchtitan's data loaders make them: a document begins where positions are 0.
    `parallelism.context_parallel_degree` is the number of ranks that share a row; options may follow on the command line.

    Args:
        config: Config of a job with llama3 or qwen3, made with attn_backend="flex" or "varlen".

    Raises:
        NotImplementedError: Another model, or attention that is neither Flex nor Varlen; when the model is parallelized, an option
            that cannot be served, by its name.
        ValueError: The config has no model_spec.

    Example:
        >>> from torchtitan.models.llama3.config_registry import llama3_debugmodel  # doctest: +SKIP
        >>> config = with_ring(llama3_debugmodel())  # doctest: +SKIP
    """
    spec = config.model_spec
    if spec is None:
        raise ValueError("config must have a model_spec, got None; pass what a function of a config_registry returns")
    if spec.name not in _MODELS:
        raise NotImplementedError(
            f"model_spec must be of {', '.join(_MODELS)}, got {spec.name}; train it with torchtitan's own context parallelism"
        )
    for layer in spec.model.layers:  # pyright: ignore[reportAttributeAccessIssue]
        layer.attention = dataclasses.replace(
            layer.attention, inner_attention=_ring_config(layer.attention.inner_attention)
        )
    config.model_spec = dataclasses.replace(spec, parallelize_fn=_RingParallelize(spec.parallelize_fn))
    return config


def _ring_config(inner: Any) -> RingAttention.Config:
    """Return the config of ring attention with the window of another inner attention."""
    if isinstance(inner, VarlenAttention.Config):
        left, right = (None if x < 0 else x for x in inner.window_size)
        return RingAttention.Config(window=(left, right))
    if isinstance(inner, FlexAttention.Config):
        return RingAttention.Config()
    raise NotImplementedError(
        f"inner_attention must be FlexAttention or VarlenAttention, got {type(inner).__qualname__}; make the model with "
        'attn_backend="flex", and call with_ring once'
    )


class RingSelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing that saves the output of ring attention, too, as it does that of Flex."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Config of the policy, with torchtitan's options."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators whose outputs are saved."""
        return {*super().get_save_ops(), ring_attention_op}


class _RingParallelize:
    """`parallelize_fn` of a model that attends around a ring. Parts of a pipeline share the ring."""

    def __init__(self, parallelize_fn: Callable[..., nn.Module]) -> None:
        self._parallelize_fn = parallelize_fn
        self._ring: Ring | None = None

    def __call__(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return the parallelized model, which finds the documents of each batch; arguments are those of torchtitan's function."""
        parallelism, ac_config = options["parallelism"], options["ac_config"]
        _check_options(options["training"], parallelism, options["compile_config"])
        if type(ac_config) is SelectiveAC.Config:
            options["ac_config"] = derive(ac_config, RingSelectiveAC.Config)
        if self._ring is None:
            self._ring = Ring(options["parallel_dims"].get_optional_mesh("cp", include_singleton_axes=True))
        shard = _BatchSharding(self._ring, _LAYOUTS[parallelism.context_parallel_load_balancer])
        model.register_forward_pre_hook(shard, with_kwargs=True)
        return self._parallelize_fn(model, **options)


def _check_options(training: Any, parallelism: Any, compile_config: Any) -> None:
    """Raise where an option of the job cannot be served."""
    if parallelism.spmd_backend != "full_dtensor":
        raise NotImplementedError(
            f'parallelism.spmd_backend must be "full_dtensor" with a ring, got "{parallelism.spmd_backend}"; pass '
            "--parallelism.spmd_backend full_dtensor"
        )
    if (balancer := parallelism.context_parallel_load_balancer) not in _LAYOUTS:
        raise NotImplementedError(
            f'parallelism.context_parallel_load_balancer must be "headtail" or None with a ring, got "{balancer}", which orders '
            "tokens by a BlockMask; leave it out"
        )
    if not training.disable_cuda_graphs:
        raise NotImplementedError(
            "training.disable_cuda_graphs must be True with a ring, got False: documents of a batch are read on the host; pass "
            "--training.disable_cuda_graphs"
        )
    if compile_config.enable and "model" in compile_config.components:
        raise NotImplementedError(
            'compile.components must leave "model" out with a ring, got it: each batch has other documents, and each would compile '
            "anew; pass --compile.components loss"
        )


class _BatchSharding:
    """Hook of a model's forward that passes the sharding of the batch to its layers, as `attention_masks`.

    It is an argument, so that activation checkpointing recomputes a layer with the documents of its own forward.
    """

    def __init__(self, ring: Ring, layout: str) -> None:
        self._ring, self._layout = ring, layout

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("positions")
        with self._ring.propagate_errors():
            if positions is None:
                raise ValueError(
                    "a batch must have positions, which say where documents begin, got none; pass them in the input of the "
                    "data loader, as torchtitan's own do"
                )
        return args, {**kwargs, "attention_masks": shard_rows(self._ring, self._layout, positions.to_local())}


def shard_rows(ring: Ring, layout: str, positions: Tensor) -> Sharding:
    """Return the sharding of a batch as one sequence, rows one after another, each of which is sharded alone.

    Every rank of the ring calls it. Row i of the batch is the positions from i * n; its documents are those of the sequence.

    Args:
        ring: The ranks that share each row.
        layout: Layout of each row.
        positions: Positions of this rank's tokens in their documents, `b s`, integers.

    Example:
        >>> shard_rows(Ring(), "zigzag", torch.tensor([[0, 1, 2, 0], [0, 1, 2, 3]])).documents  # doctest: +SKIP
        (0, 3, 4, 8)
    """
    b, n = positions.shape[0], positions.shape[1] * ring.world_size
    row = ring.sharding(n, layout)
    starts = row.unshard((positions == 0).to(torch.uint8))
    starts[:, 0] = 1
    edges = starts.flatten().nonzero()[:, 0].tolist()
    shards = [tuple(Run(run.start + i * n, run.stride, run.length) for i in range(b) for run in x) for x in row.shards]
    return Sharding(b * n, layout, shards, ring.rank, (*edges, b * n), ring=ring)
