"""Plug-in of axolotl for supervised training: its trainer with `RingTrainerMixin` before it, and attention around a ring."""

from __future__ import annotations

from typing import Any, ClassVar

from axolotl.core.trainers.base import AxolotlTrainer  # pyright: ignore[reportMissingImports]
from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from ringattn.integrations.transformers import NAME, register
from ringattn.integrations.transformers.trainer import RingTrainerMixin

_OTHERS = ("rl", "reward_model", "process_reward_model", "trainer_cls", "flex_attention")
"""Options of axolotl that take another trainer, or another attention."""


class RingArgs(BaseModel):
    """Options of the plug-in in axolotl's configuration.

    Attributes:
        ring_size: Consecutive ranks that share a sequence.
        ring_recompute: As `recompute` of `RingTrainerMixin`.
        ring_offload: As `offload` of `RingTrainerMixin`.
        ring_mlp_rows: As `mlp_rows` of `RingTrainerMixin`.
    """

    ring_size: int = 1
    ring_recompute: str | None = None
    ring_offload: bool | int = False
    ring_mlp_rows: int | None = None


class RingAxolotlTrainer(RingTrainerMixin, AxolotlTrainer):
    """AxolotlTrainer whose ranks share sequences; made by `RingPlugin`, errors are those of `RingTrainerMixin`."""

    ring_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **self.ring_options, **kwargs)

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's rows of a whole batch; the mask of a packed batch, which numbers its samples, is left out."""
        positions = batch.get("position_ids")
        if positions is not None and bool((positions[..., 1:] <= positions[..., :-1]).any()):
            batch = {name: x for name, x in batch.items() if name != "attention_mask"}
        return super().shard(batch)


class RingPlugin(BasePlugin):
    """Plug-in: `plugins: [ringattn.integrations.axolotl.RingPlugin]` and `ring_size: 4` in axolotl's configuration."""

    def get_input_args(self) -> str:
        """Return where the options are."""
        return "ringattn.integrations.axolotl.RingArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Raise for jobs that cannot share sequences.

        Raises:
            NotImplementedError: An option takes another trainer or attention; the message names it.
            ValueError: axolotl's own context parallelism is on, too.
        """
        if others := [name for name in _OTHERS if cfg.get(name)]:
            raise NotImplementedError(
                f"a job on a ring must be supervised training with axolotl's own trainer, got {', '.join(others)}; leave it out"
            )
        if (size := cfg.get("context_parallel_size") or 1) > 1:
            raise ValueError(f"context_parallel_size must be 1 with ring_size, got {size}; leave it out")
        register()

    def post_model_build(self, cfg: Any, model: Any) -> None:  # noqa: ARG002
        """Let a model attend around a ring."""
        model.set_attn_implementation(NAME)

    def get_trainer_cls(self, cfg: Any) -> type[RingAxolotlTrainer]:
        """Return a trainer with the options of the configuration."""
        options = RingArgs(**{name: cfg[name] for name in RingArgs.model_fields if cfg.get(name) is not None})
        chosen = {name.removeprefix("ring_"): x for name, x in options if name != "ring_size"}
        return type(
            "RingAxolotlTrainer",
            (RingAxolotlTrainer,),
            {"ring_options": {"context_parallel_size": options.ring_size, **chosen}},
        )
