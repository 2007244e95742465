"""FSDP engines of verl whose sequence parallel ranks share packed sequences by ring attention in place of Ulysses.

verl's engine has three places in which ranks of a sequence appear: the model's attention is patched (`_build_module`), packed
inputs are sliced (`prepare_model_inputs`), and log-probabilities, entropies or values are gathered (`_gather_and_unpad_packed`).
Each is replaced here; batches, losses, FSDP and checkpoints stay verl's.

Note [Gradient of gathered numbers]
    Every rank of a ring computes the same loss from gathered numbers, so the backward of the gather adds as many equal gradients as
    the ring has ranks. FSDP averages over all ranks. verl's own gather multiplies by the number of ranks for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from verl.utils import tensordict_utils  # pyright: ignore[reportMissingImports]
from verl.utils.model import CausalLMOutputForPPO  # pyright: ignore[reportMissingImports]
from verl.workers.engine.base import EngineRegistry  # pyright: ignore[reportMissingImports]
from verl.workers.engine.fsdp.transformer_impl import (  # pyright: ignore[reportMissingImports]
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)

from ringattn.integrations.transformers import NAME, register, shard_batch
from ringattn.plan.sharding import Sharding
from ringattn.ring import Ring
from ringattn.training import token_log_probs_and_entropy

LAYOUT = "balanced"
"""Layout of packed sequences: ranks of a ring have equal visible work."""
_SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier", "final_logit_softcapping")
"""Names of configs for what a head does beside its product, of which verl's fused log-probabilities know nothing either."""

_Base = FSDPEngineWithLMHead if TYPE_CHECKING else object


class RingEngineMixin(_Base):  # pyright: ignore[reportGeneralTypeIssues]
    """Engine whose `ulysses_sequence_parallel_size` ranks are a ring; with a size of 1 it is verl's own.

    Heads need not be divisible by that size. With `use_fused_kernels`, log-probabilities and entropies are computed by chunks,
    without the logits of all rows of a rank.

    Raises:
        NotImplementedError: When the model is built: images, or with `use_fused_kernels` a head that scales or caps its logits. In
            use: distillation from the top k.
    """

    def _init_device_mesh(self) -> None:
        super()._init_device_mesh()
        self.ring = Ring(self.ulysses_device_mesh["sp"]) if self.use_ulysses_sp else None
        self._sharding: Sharding | None = None

    def _build_module(self) -> nn.Module:
        if self.ring is None:
            return super()._build_module()
        register()
        with self._without_ulysses():
            module = super()._build_module()
        with self.ring.propagate_errors():
            if hasattr(module.config, "vision_config"):
                raise NotImplementedError(
                    f"a model must take text alone on a ring, got {type(module).__name__} with images; use verl's Ulysses"
                )
            if self.model_config.use_fused_kernels:
                _check_head(module)
                # before wrappers; verl has patched the class
                head: Any = module.get_output_embeddings()
                head.forward = partial(_head_forward, head, head.forward)
                module.forward = partial(_log_probs_forward, module)
        module.set_attn_implementation(NAME)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this rank's rows of a packed micro-batch, and those of the tokens that they predict."""
        if self.ring is None:
            return super().prepare_model_inputs(micro_batch)
        with self.ring.propagate_errors():
            if tensordict_utils.get_non_tensor_data(data=micro_batch, key="distillation_use_topk", default=False):
                raise NotImplementedError(
                    "distillation from the top k must be left out on a ring, got it, whose teacher rows verl slices itself; use "
                    "verl's Ulysses"
                )
            with self._without_ulysses():
                inputs, outputs = super().prepare_model_inputs(micro_batch)
        ends = micro_batch["input_ids"].offsets().to(inputs["input_ids"].device)
        n = inputs["input_ids"].shape[1]
        if int(ends[-1]) < n:  # rows that fill a bucket are a document
            ends = nn.functional.pad(ends, (0, 1), value=n)
        documents = {"cu_seq_lens_q": ends.int(), "cu_seq_lens_k": ends.int()}
        batch = {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"], **documents}
        part = shard_batch(batch, self.ring, LAYOUT)
        del part["use_cache"]  # verl passes it
        sharding = self._sharding = part["sharding"]
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            outputs[name] = sharding.shard(outputs[name], dim=0)
        inputs |= part
        if "shift_labels" in inputs:
            inputs["shift_labels"] = outputs["input_ids_rmpad_rolled"][None]
        return inputs, outputs

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        """Return what all ranks have of packed rows, in their order (Note [Gradient of gathered numbers])."""
        if self.ring is None:
            return super()._gather_and_unpad_packed(tensor, pad_size)
        assert self._sharding is not None, "inputs are prepared before outputs"
        whole = self._sharding.unshard(tensor, dim=0)
        return whole[: len(whole) - pad_size]

    @contextmanager
    def _without_ulysses(self) -> Iterator[None]:
        """Let verl see whole sequences inside."""
        before = self.use_ulysses_sp, self.ulysses_sequence_parallel_size
        self.use_ulysses_sp, self.ulysses_sequence_parallel_size = False, 1
        try:
            yield
        finally:
            self.use_ulysses_sp, self.ulysses_sequence_parallel_size = before


def _check_head(module: Any) -> None:
    config = module.config.get_text_config()
    if scales := [name for name in _SCALES if getattr(config, name, None) not in (None, 1.0)]:
        raise NotImplementedError(
            f"use_fused_kernels must be False for a head that scales or caps its logits, got {scales} in the config of "
            f"{type(module).__name__}; leave it out"
        )


def _log_probs_forward(
    module: Any, *, shift_labels: Tensor, temperature: float = 1.0, return_dict: bool = True, **inputs: Any
) -> CausalLMOutputForPPO:
    """Return log-probabilities of `shift_labels` and entropies, `1 s` each, without logits of all rows."""
    assert return_dict, "verl asks for a dict"
    rows = module.base_model(**inputs).last_hidden_state
    log_probs, entropy = module.get_output_embeddings()(rows, shift_labels, temperature)
    return CausalLMOutputForPPO(log_probs=log_probs, entropy=entropy)


def _head_forward(
    head: Any, logits: Callable[[Tensor], Tensor], rows: Tensor, targets: Tensor | None = None, temperature: float = 1.0
) -> Any:
    """Return log-probabilities of targets and entropies, or logits.

    It is the head's own call, in which FSDP has gathered the weight: verl shards a head by itself.
    """
    if targets is None:
        return logits(rows)
    return token_log_probs_and_entropy(rows, head.weight, targets, bias=head.bias, temperature=temperature)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class RingEngineWithLMHead(RingEngineMixin, FSDPEngineWithLMHead):
    """Engine of an actor or a reference; arguments are verl's, errors those of `RingEngineMixin`."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class RingEngineWithValueHead(RingEngineMixin, FSDPEngineWithValueHead):
    """Engine of a critic; arguments are verl's, errors those of `RingEngineMixin`."""
