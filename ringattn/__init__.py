"""Exact attention over sequences that no single device can hold.

Importing this package touches no device, imports no kernel compiler and takes no process group.
"""

from ringattn.api import ring_attention, ring_attention_with_lse
from ringattn.partial import Partial, finalize, merge, reduce_partials
from ringattn.reference import attention_reference
from ringattn.ring import Ring
from ringattn.sharding import Sharding
from ringattn.simulate import simulate_ring
from ringattn.softmax import online_logsumexp, online_softmax

__all__ = [
    "Partial",
    "Ring",
    "Sharding",
    "attention_reference",
    "finalize",
    "merge",
    "online_logsumexp",
    "online_softmax",
    "reduce_partials",
    "ring_attention",
    "ring_attention_with_lse",
    "simulate_ring",
]
