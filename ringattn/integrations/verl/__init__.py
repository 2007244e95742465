"""verl: engines of the FSDP backends whose sequence parallel ranks are a ring; importing this module registers them.

Name it in the config of a job, as `actor_rollout_ref.model.external_lib=ringattn.integrations.verl`.
"""

from ringattn.integrations.verl.engine import RingEngineWithLMHead, RingEngineWithValueHead

__all__ = ["RingEngineWithLMHead", "RingEngineWithValueHead"]
