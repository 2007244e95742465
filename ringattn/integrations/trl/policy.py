"""GRPO and RLOO of TRL on rings: rollouts over a `RingCache`, log-probabilities of shards, losses of whole sequences."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

from accelerate.utils import gather_object
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # pyright: ignore[reportPrivateImportUsage]

from ringattn.integrations.transformers.ring_cache import RingCache, share_generators
from ringattn.integrations.transformers.support import inner_model
from ringattn.integrations.transformers.trainer import TokensSeen, shard_calls
from ringattn.integrations.trl.rings import RingReferenceMixin, rings_as_processes


class RingRolloutMixin(RingReferenceMixin):
    """Trainer of rollouts whose ranks share sequences; arguments and errors beside its own are those of `RingTrainerMixin`.

    All ranks of a ring generate together, over one `RingCache`. Log-probabilities of shards are computed by TRL's own chunked head,
    and gathered over the ring: every rank has the loss of whole rollouts. A `rollout_func` is called on the first rank of each
    ring, and the others get its result, so it may ask a server. Reward functions are called on every rank, and those of the first
    one count.

    Raises:
        ValueError: There is no config; or the rings of a step do not hold whole groups of rollouts.
        NotImplementedError: vLLM, continuous batching, tools or environments are asked for.
    """

    uneven_evaluation = "refuse"  # rollouts of a prompt are a group over rings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ring, size = kwargs.get("ring"), kwargs.get("context_parallel_size") or 1
        size = size if ring is None else ring.world_size
        config: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, (GRPOConfig, RLOOConfig))), None)
        if size > 1 and config is None:
            raise ValueError("args must be a GRPOConfig or RLOOConfig where ranks share a sequence, got none; pass one")
        for name in ("tools", "environment_factory"):
            if size > 1 and kwargs.get(name):
                raise NotImplementedError(
                    f"{name} must be left out where ranks share a sequence, got some, which would run on each rank of a ring; call "
                    "them in a rollout_func, which runs once per ring"
                )
        if size > 1:
            # TRL has counted the samples of all processes
            shared = copy.copy(config)
            shared.generation_batch_size //= size
            args = tuple(shared if x is config else x for x in args)
            kwargs = {name: shared if x is config else x for name, x in kwargs.items()}
            rollout = kwargs.get("rollout_func")
            kwargs |= {} if rollout is None else {"rollout_func": self._once_per_ring(rollout)}
        super().__init__(*args, **kwargs)
        if size > 1:
            with self.ring.propagate_errors():
                self._check_groups()
            # TRL counts the tokens itself, once per ring
            self.remove_callback(TokensSeen)
            # TRL draws other numbers on each process
            share_generators(self.ring, self.args.device)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss of whole rollouts, on every rank."""
        with rings_as_processes(self):
            return super().compute_loss(*args, **kwargs)

    def _check_groups(self) -> None:
        args: Any = self.args
        rings = args.world_size // self.ring.world_size
        batches = {"num_generations": args.generation_batch_size}
        if args.eval_strategy != "no":
            batches["num_generations_eval"] = args.per_device_eval_batch_size * rings
        for name, samples in batches.items():
            if samples % (group := getattr(self, name)):
                raise ValueError(
                    f"{name} must divide the rollouts of a batch, {samples} on {rings} ring(s) of {self.ring.world_size} ranks, "
                    f"got {group}; pass a multiple as batch size per device: ranks of a ring have the same rollouts"
                )

    def _once_per_ring(self, rollout: Callable[..., Any]) -> Callable[..., Any]:
        """Make a rollout_func that runs on the first rank of each ring, and returns its result on all."""

        @functools.wraps(rollout)
        def call(prompts: list[Any], trainer: Any) -> Any:
            with self.ring.propagate_errors():
                found = rollout(prompts, trainer) if self.ring.rank == 0 else None
            self.ring.all_reduce_min(0)  # raises where the first rank has
            return gather_object([found])[self.args.process_index - self.ring.rank]

        return call

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with rings_as_processes(self):
            found = super()._generate_and_score_completions(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # TRL shuffles rollouts by random numbers, of which a rollout_func has drawn some on one rank
        share_generators(self.ring, self.args.device)
        return found

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        generate = super()._generate_single_turn  # pyright: ignore[reportAttributeAccessIssue]
        if self.ring.world_size == 1:
            return generate(prompt_ids, *args, **kwargs)
        model, config = self.accelerator.unwrap_model(self.model_wrapped), cast(Any, self.args)
        multiple, longest = config.pad_to_multiple_of or 1, max(map(len, prompt_ids))
        most = -(-longest // multiple) * multiple + config.max_completion_length
        # weights of FSDP are elsewhere at each call, and between calls perhaps in host memory
        place = {"graphs": False if self.is_fsdp_enabled else None, "device": self.accelerator.device}
        training, inner = model.training, cast(Any, inner_model(model))
        for handle in (handle for handles in self._whole_outputs for handle in handles):
            handle.remove()
        model.eval()
        try:
            with RingCache(model, self.ring, max_tokens=most, batch=len(prompt_ids), **place) as cache:
                on_ring = inner.generate
                # rings whose answers are done wait for others, with which they gather weights
                synced = self.is_fsdp_enabled and self.args.world_size > self.ring.world_size
                inner.generate = functools.partial(on_ring, past_key_values=cache, synced_gpus=synced)
                try:
                    return generate(prompt_ids, *args, **kwargs)
                finally:
                    inner.generate = on_ring
        finally:
            model.train(training)
            self._whole_outputs = [shard_calls(module, self.shard) for module in self.modules_with_whole_outputs()]


class RingGRPOTrainer(RingRolloutMixin, GRPOTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """GRPOTrainer whose ranks share sequences; arguments and errors beside its own are those of `RingRolloutMixin`.

    Every `loss_type`, `importance_sampling_level` and `scale_rewards`, KL by a reference model or by the model without its adapter,
    several iterations per rollout, and adapters of layers (LoRA) work.

    Example:
        >>> trainer = RingGRPOTrainer(model, reward_funcs=length, args=config, train_dataset=prompts, ring=ring)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """


class RingRLOOTrainer(RingRolloutMixin, RLOOTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """RLOOTrainer whose ranks share sequences; arguments and errors beside its own are those of `RingRolloutMixin`."""
