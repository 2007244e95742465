"""Ring attention in torchtitan's trainer: `with_ring(config)` on the config of a job, torchtitan 0.3."""

from ringattn.integrations.torchtitan.attention import RingAttention, with_ring

__all__ = ["RingAttention", "with_ring"]
