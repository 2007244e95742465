"""Hooks of diffusers that cut the tokens of a denoiser, redirect its attention and put its output together.

All find the sharding of the forward that runs as the current one (`use_sharding`): gradient checkpointing runs blocks again in the
backward, perhaps after forwards of other lengths.

Legend: b batch, s rows of this rank, n tokens of the whole sequence, h heads, d head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from diffusers.hooks.hooks import ModelHook
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ringattn.api import ring_attention
from ringattn.integrations.diffusers.denoisers import JOINT, AttentionCall, Cut, DenoiserSpec, TokenCount, TokenDim
from ringattn.integrations.torch.redirect import RedirectSDPA
from ringattn.plan.sharding import Sharding
from ringattn.ring import Ring
from ringattn.sharding_context import find_sharding, use_sharding
from ringattn.tensor_checks import digest_bits, is_readable

_CALLS = (
    "an attention module on a ring must make {} call(s) of torch's scaled_dot_product_attention, got {}; call "
    "transformer.set_attention_backend('native'), use neither IP adapters nor enable_parallelism, or disable_ring(transformer)"
)


class RingAttentionMode(RedirectSDPA):
    """Redirection of the calls of an attention module, each with the shardings of its queries and keys; masks are those of keys."""

    def __init__(self, calls: Sequence[tuple[Sharding, Sharding]]) -> None:
        super().__init__(self._attend)
        self.calls = calls

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002 - key heads that divide query heads need no flag here
    ) -> Tensor:
        """Return ring attention of `b h s d` rows; the signature is that of torch's function."""
        with self.calls[0][0].ring.propagate_errors():
            if self.num_calls > len(self.calls):
                raise RuntimeError(_CALLS.format(len(self.calls), "more"))
            if dropout_p:
                raise NotImplementedError(f"dropout_p must be 0 on a ring, got {dropout_p}; train without it")
            sharding, kv_sharding = self.calls[self.num_calls - 1]
            rows, expected = (query.shape[2], key.shape[2]), (sharding.shard_len, kv_sharding.shard_len)
            if rows != expected:
                raise ValueError(
                    f"queries and keys must have the {expected} rows of this rank, got {rows}; name every argument that holds "
                    "tokens in the DenoiserSpec"
                )
            key_bias = None if attn_mask is None else make_key_bias(attn_mask, query, kv_sharding)
        o = ring_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            sharding=sharding,
            kv_sharding=None if kv_sharding is sharding else kv_sharding,
            causal=is_causal,
            softmax_scale=scale,
            key_bias=key_bias,
        )
        return o.transpose(1, 2)


def make_key_bias(mask: Tensor, query: Tensor, sharding: Sharding) -> Tensor:
    """Return a mask of keys as the number that is added to the scores of each key of this rank, `b s`.

    The mask is one of all keys or of this rank's, `b 1 1 n` or `b 1 1 s`; b may be 1. Bool: True takes part. Floating point: added.
    """
    sizes = tuple(mask.shape)
    wanted = (1, query.shape[0]), (1,), (1,), (sharding.seq_len, sharding.shard_len)
    if len(sizes) != 4 or any(size not in some for size, some in zip(sizes, wanted, strict=True)):
        raise NotImplementedError(
            f"attn_mask must be a mask of keys, (batch, 1, 1, {sharding.seq_len}), or of this rank's {sharding.shard_len} keys, "
            f"got {sizes}; pass attn_mask[:, :1, :1] of a mask of padded text, or disable_ring(transformer)"
        )
    if sizes[3] != sharding.shard_len:
        mask = sharding.shard(mask, 3)
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = zeros.masked_fill(mask.logical_not(), float("-inf"))
    return mask[:, 0, 0].expand(query.shape[0], -1)


class SegmentShardings:
    """Shardings of the joined sequences that a denoiser has seen, and of their segments."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._joint: dict[tuple[tuple[str, int], ...], Sharding] = {}
        # by id: on one rank, joint sequences of one length are equal however they are joined
        self._segments: dict[int, dict[str, Sharding]] = {}

    def shard_joint(self, lengths: Mapping[str, int], arguments: Mapping[str, Any]) -> Sharding:
        """Return the sharding of segments of some lengths, in the order in which they are joined.

        Ranks compare the arguments of every forward: one of them with other text, timesteps or noise would mix two samples.
        """
        if self.ring.world_size > 1:
            what = "the input of a denoiser (pass generator= with one seed on all ranks; each cuts its own tokens)"
            self.ring.assert_equal_across_ranks(what, f"{dict(lengths)} tokens, {describe_input(arguments)}")
        known = tuple(lengths.items())
        if known not in self._joint:
            joint = self.ring.sharding(sum(lengths.values()), "segments", segments=list(lengths.values()))
            segments = {name: self.ring.sharding(n, "contiguous") for name, n in known}
            self._segments[id(joint)] = {**segments, JOINT: joint}
            self._joint[known] = joint
        return self._joint[known]

    def current(self) -> dict[str, Sharding]:
        """Return the shardings of the forward that runs, by segment."""
        try:
            found = find_sharding()
        except RuntimeError as error:
            raise RuntimeError(
                "gradient checkpointing must carry the sharding of the forward, got blocks that are recomputed without it; call "
                "transformer.enable_gradient_checkpointing(ringattn.integrations.diffusers.checkpoint)"
            ) from error
        if found is None or id(found[0]) not in self._segments:
            raise RuntimeError(
                "blocks of a transformer on a ring must run inside its forward, got a block alone; call the transformer, or "
                "disable_ring(transformer)"
            )
        return self._segments[id(found[0])]


class ForwardHook(ModelHook):
    """Hook of the model: the sharding of its input is current during its forward."""

    def __init__(self, shardings: SegmentShardings, spec: DenoiserSpec, last_modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.shardings, self.spec, self.last_modules = shardings, spec, last_modules
        # it reads the arguments
        untraced: Any = torch.compiler.disable(shardings.shard_joint)
        self.shard_joint: Callable[..., Sharding] = untraced

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Refuse a copy of the model, whose hooks run the original, and one without the modules that gather its output."""
        if changed := [name for name, last in self.last_modules.items() if module.get_submodule(name) is not last]:
            error = (
                f"a transformer on a ring must keep its modules, got another {changed[0]} than at enable_ring: it is a copy, or "
                "adapters were loaded or unloaded; call disable_ring(transformer), then enable_ring again"
            )
            self.shardings.ring.raise_on_all_ranks(RuntimeError(error))
        return args, kwargs

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model with the sharding of its whole input."""
        ring = self.shardings.ring
        with ring.propagate_errors():
            check_supported(module)
            arguments = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
            arguments = dict(list(arguments.items())[1:])  # without self
            for name, reason in self.spec.refused.items():
                if arguments.get(name) is not None:
                    raise NotImplementedError(f"{name} must be None on a ring, got one: {reason}")
            lengths = self.spec.lengths(module, arguments)
            for name in self.spec.not_empty:
                if lengths[name] < ring.world_size:
                    raise NotImplementedError(
                        f"{name} must have at least {ring.world_size} tokens, one per rank, got {lengths[name]}; use a "
                        "ring of fewer ranks"
                    )
            sharding = self.shard_joint(lengths, arguments)
        forward: Any = self.fn_ref.original_forward
        with use_sharding(sharding):
            return forward(*args, **kwargs)


class CutHook(ModelHook):
    """Hook of a module: each rank keeps its own tokens of some arguments and outputs."""

    names: Sequence[str] = ()

    def __init__(
        self, shardings: SegmentShardings, inputs: Mapping[str, Cut], outputs: tuple[TokenDim, ...] = ()
    ) -> None:
        super().__init__()
        self.shardings, self.inputs, self.outputs = shardings, inputs, outputs

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Keep the names of the arguments of the module's forward; torch.compile does not trace their inspection."""
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the arguments with this rank's tokens."""
        if not self.inputs:
            return args, kwargs
        segments = self.shardings.current()
        # arguments stay positional or keywords, as forwards are decorated with functions that tell them apart
        names = zip_longest(self.names[: len(args)], args)
        positional = [cut(x, self.inputs.get(name), segments) for name, x in names]
        return positional, {name: cut(x, self.inputs.get(name), segments) for name, x in kwargs.items()}

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        """Return the outputs with this rank's tokens."""
        return cut(output, self.outputs, self.shardings.current()) if self.outputs else output


class AttentionHook(ModelHook):
    """Hook of an attention module: its keys are those of all ranks."""

    def __init__(self, shardings: SegmentShardings, calls: Sequence[AttentionCall], skip: str) -> None:
        super().__init__()
        self.shardings, self.calls, self.skip = shardings, calls, skip

    @torch.compiler.disable  # compiled blocks break here: methods of tensors are not traced under a TorchFunctionMode
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Run the forward of an attention module with ring attention."""
        forward: Any = self.fn_ref.original_forward
        segments = self.shardings.current()
        with RingAttentionMode([(segments[call.queries], segments[call.keys]) for call in self.calls]) as mode:
            output = forward(*args, **kwargs)
        expected = 0 if kwargs.get(self.skip) else len(self.calls)
        if mode.num_calls != expected:
            self.shardings.ring.raise_on_all_ranks(RuntimeError(_CALLS.format(expected, mode.num_calls)))
        return output


class GatherHook(ModelHook):
    """Hook of a last module: its output is put together on every rank."""

    def __init__(self, shardings: SegmentShardings, where: TokenDim) -> None:
        super().__init__()
        self.shardings, self.where = shardings, where

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        """Return the tokens of all ranks; their gradients are summed over ranks."""
        return self.shardings.current()[self.where.segment].unshard(output, self.where.dim)


def describe_input(arguments: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal arguments: numbers, and shapes and digests of tensors.

    It reads them, so that the host waits for their device once per tensor.
    """
    leaves: list[tuple[Any, Any]] = tree_flatten_with_path(dict(arguments))[0]
    return ", ".join(f"{path[0].key}{keystr(path[1:])} {_describe(x)}" for path, x in leaves if x is not None)


def _describe(x: Any) -> str:
    if not isinstance(x, Tensor):
        # addresses of objects differ between processes
        return repr(x) if isinstance(x, (int, float, str, torch.dtype)) else type(x).__name__
    return f"{list(x.shape)}" + (f" digest {int(digest_bits(x)) % 2**64:016x}" if is_readable(x) else "")


def cut(x: Any, where: Cut | None, segments: Mapping[str, Sharding]) -> Any:
    """Return this rank's tokens of a tensor or of each tensor in a list, or the number of the first tokens that it holds."""
    if x is None or where is None:
        return x
    if isinstance(where, tuple):
        return tuple(cut(one, dim, segments) for one, dim in zip(x, where, strict=True))
    sharding = segments[where.segment]
    if isinstance(where, TokenCount):
        # integers: torch.compile breaks its graph at a number that a tensor holds
        return min(max(x - sum(sharding.shard_lens[: sharding.rank]), 0), sharding.shard_len)
    if isinstance(x, (list, tuple)):
        return [cut(one, where, segments) for one in x]
    # one number may stand for all tokens
    whole = where.ndim not in (None, x.dim()) or x.shape[where.dim] == 1 < sharding.seq_len
    return x if whole else sharding.shard(x, where.dim)


def check_supported(model: nn.Module) -> None:
    """Refuse features that give wrong results, or different decisions by rank, on a ring."""
    if getattr(model, "is_cache_enabled", False):
        raise NotImplementedError(
            "the cache of a transformer must be off on a ring, whose ranks would decide apart what to skip, got one that is "
            "enabled; call transformer.disable_cache()"
        )
    if getattr(model, "encoder_hid_proj", None) is not None:
        raise NotImplementedError(
            "IP adapters must be off on a ring, got a transformer with encoder_hid_proj; call pipe.unload_ip_adapter()"
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise NotImplementedError(
            "context or tensor parallelism must be either diffusers' or a ring, got both; load the transformer without "
            "parallel_config, do not call enable_parallelism, and shard weights with FSDP2 (fully_shard)"
        )
