"""Hooks of diffusers that cut the tokens of a denoiser, redirect its attention and put its output together.

All find the sharding of the forward that runs as the current one (`use_sharding`): gradient checkpointing runs blocks again in the
backward, perhaps after forwards of other lengths.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from diffusers.hooks.hooks import ModelHook
from torch import Tensor, nn

from ringattn.integrations.diffusers.attention import RingAttentionMode
from ringattn.integrations.diffusers.denoisers import DenoiserSpec, TokenCount, TokenDim
from ringattn.plan.sharding import Sharding
from ringattn.ring import Ring
from ringattn.sharding_context import find_sharding, use_sharding


class SegmentShardings:
    """Shardings of the joined sequences that a denoiser has seen, and of their segments.

    Args:
        ring: The ring that makes them.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._joint: dict[tuple[tuple[str, int], ...], Sharding] = {}
        # by id: on one rank, joint sequences of one length are equal however they are joined
        self._segments: dict[int, dict[str, Sharding]] = {}

    def shard_joint(self, lengths: Mapping[str, int], sample: Tensor) -> Sharding:
        """Return the sharding of segments of some lengths.

        Args:
            lengths: Tokens by segment, in the order in which they are joined.
            sample: Noise that the denoiser works on, whole. The first one of these lengths is compared between ranks.

        Raises:
            ValueError: Ranks have different samples or lengths; raised on every rank.
        """
        known = tuple(lengths.items())
        if known not in self._joint:
            data = sample.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
            digest = hashlib.blake2b(data, digest_size=8).hexdigest()
            text = f"{dict(lengths)} tokens, sample {tuple(sample.shape)} with digest {digest}"
            what = "the input of a denoiser (pass generator= with one seed on all ranks; each cuts its own tokens)"
            self.ring.assert_equal_across_ranks(what, text)
            joint = self.ring.sharding(sum(lengths.values()), "segments", segments=list(lengths.values()))
            self._segments[id(joint)] = {name: self.ring.sharding(n, "contiguous") for name, n in known}
            self._joint[known] = joint
        return self._joint[known]

    def current(self) -> tuple[Sharding, dict[str, Sharding]]:
        """Return the sharding of the forward that runs, and those of its segments.

        Raises:
            RuntimeError: No forward of the model runs, or it is recomputed in the backward without its sharding.
        """
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
        return found[0], self._segments[id(found[0])]


class ForwardHook(ModelHook):
    """Hook of the model: the sharding of its input is current during its forward."""

    def __init__(self, shardings: SegmentShardings, spec: DenoiserSpec) -> None:
        super().__init__()
        self.shardings, self.spec = shardings, spec
        # it reads the sample
        untraced: Any = torch.compiler.disable(shardings.shard_joint)
        self.shard_joint: Callable[..., Sharding] = untraced

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model with the sharding of its whole input."""
        ring = self.shardings.ring
        with ring.propagate_errors():
            check_supported(module)
            arguments = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
            lengths = self.spec.lengths(module, arguments)
            for name in self.spec.not_empty:
                if lengths[name] < ring.world_size:
                    raise NotImplementedError(
                        f"{name} must have at least {ring.world_size} tokens, one per rank, got {lengths[name]}; use a "
                        "ring of fewer ranks"
                    )
            sharding = self.shard_joint(lengths, arguments["hidden_states"])
        forward: Any = self.fn_ref.original_forward
        with use_sharding(sharding):
            return forward(*args, **kwargs)


class CutHook(ModelHook):
    """Hook of a module: each rank keeps its own tokens of some arguments and outputs."""

    def __init__(
        self,
        shardings: SegmentShardings,
        inputs: Mapping[str, TokenDim | TokenCount],
        outputs: Sequence[TokenDim] = (),
    ) -> None:
        super().__init__()
        self.shardings, self.inputs, self.outputs = shardings, inputs, outputs
        self.names: list[str] = []

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Keep the names of the arguments of the module's forward; torch.compile does not trace their inspection."""
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with this rank's tokens."""
        del module
        if not self.inputs:
            return args, kwargs
        _, segments = self.shardings.current()
        # arguments stay positional or keywords, as forwards are decorated with functions that tell them apart
        positional = [
            cut(x, self.inputs[name], segments) if name in self.inputs else x
            for name, x in zip_longest(self.names[: len(args)], args)
        ]
        keywords = {
            name: cut(x, self.inputs[name], segments) if name in self.inputs else x for name, x in kwargs.items()
        }
        return positional, keywords

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the outputs with this rank's tokens."""
        del module
        if not self.outputs:
            return output
        _, segments = self.shardings.current()
        return tuple(cut(x, where, segments) for x, where in zip(output, self.outputs, strict=True))


class AttentionHook(ModelHook):
    """Hook of an attention module: its keys are those of all ranks."""

    def __init__(self, shardings: SegmentShardings) -> None:
        super().__init__()
        self.shardings = shardings

    @torch.compiler.disable  # compiled blocks break here: methods of tensors are not traced under a TorchFunctionMode
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of an attention module with ring attention."""
        del module
        forward: Any = self.fn_ref.original_forward
        with RingAttentionMode(self.shardings.current()[0]) as mode:
            output = forward(*args, **kwargs)
        mode.check_num_calls()
        return output


class GatherHook(ModelHook):
    """Hook of the last module: its output is put together on every rank."""

    def __init__(self, shardings: SegmentShardings, segment: str) -> None:
        super().__init__()
        self.shardings, self.segment = shardings, segment

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the tokens of all ranks; their gradients are summed over ranks."""
        del module
        return self.shardings.current()[1][self.segment].unshard(output, 1)


def cut(x: Any, where: TokenDim | TokenCount, segments: Mapping[str, Sharding]) -> Any:
    """Return this rank's tokens of a tensor or of each tensor in a list, or the number of the first tokens that it holds."""
    if x is None:
        return None
    sharding = segments[where.segment]
    if isinstance(where, TokenCount):
        return int((sharding.positions < x).sum())
    if isinstance(x, (list, tuple)):
        return [cut(one, where, segments) for one in x]
    return x if where.ndim not in (None, x.dim()) else sharding.shard(x, where.dim)


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
    config = getattr(model, "_parallel_config", None)
    if getattr(config, "context_parallel_config", None) is not None:
        raise NotImplementedError(
            "context parallelism must be either diffusers' or a ring, got both; load the transformer without parallel_config and "
            "do not call enable_parallelism"
        )
