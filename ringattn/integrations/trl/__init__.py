"""Trainers of TRL whose ranks share sequences by ring attention: change the import, and pass `context_parallel_size`."""

from ringattn.integrations.trl.policy import RingGRPOTrainer, RingRLOOTrainer
from ringattn.integrations.trl.preferences import RingKTOTrainer, RingORPOTrainer
from ringattn.integrations.trl.trainers import RingDPOTrainer, RingRewardTrainer, RingSFTTrainer

__all__ = [
    "RingDPOTrainer",
    "RingGRPOTrainer",
    "RingKTOTrainer",
    "RingORPOTrainer",
    "RingRLOOTrainer",
    "RingRewardTrainer",
    "RingSFTTrainer",
]
