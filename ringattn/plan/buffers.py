"""Sizes of the buffers of a fused call, and the number of head groups in which its keys arrive: integers only.

The schedule that runs a call and the planner that predicts it both take them from here.
"""

from __future__ import annotations

from ringattn.plan.ring_plan import GatherPlan

PUSH_SECONDS = 50e-6
"""Least duration of one push, over all heads of a group: shorter ones cost more to begin than they hide."""
PUSH_RATE = 335e9
"""Bytes per second of a push where the ring has not measured it."""
GROUP_HEADS = 8
"""Key heads of the smallest head group."""


def count_groups(batch: int, kv_heads: int, width: int, element: int, slot_rows: int, push_rate: float = 0.0) -> int:
    """Return the number of head groups in which keys arrive; the same on all ranks.

    With more groups the first tiles wait for fewer bytes, but pushes must stay long.

    Args:
        width: Columns of a key and a value together.
        element: Bytes of an element.
        slot_rows: Rows of the longest shard of all ranks.
        push_rate: Bytes per second between two ranks; 0.0: not measured.
    """
    shard = batch * slot_rows * kv_heads * width * element
    most = min(kv_heads // GROUP_HEADS, int(shard / (PUSH_SECONDS * (push_rate or PUSH_RATE))))
    return max((groups for groups in (1, 2, 4, 8) if groups <= most and kv_heads % groups == 0), default=1)


def gather_bytes(
    batch: int,
    kv_heads: int,
    width: int,
    element: int,
    gather_plan: GatherPlan,
    members: int,
    *,
    backward: bool,
    bias_bytes: int = 0,
    hierarchical: bool = False,
) -> int:
    """Return the bytes that the fused schedule takes on the rank that needs most, of members that fetch from each other.

    These are the buffer of remote rows, the send slot and, in a backward, two sets of gradient regions. A hierarchical ring adds
    two buffers for remote shards and one for sends, and in the backward two sums in flight and one that arrives.
    """
    row = batch * kv_heads * width
    slots = gather_plan.most_remote_rows + (1 + 3 * hierarchical) * gather_plan.slot_rows
    keys = slots * (row * element + batch * bias_bytes)
    keys += gather_plan.slot_rows * batch * bias_bytes  # the table of biases holds local keys too
    regions = (2 * (members - 1) + 1 + 3 * hierarchical) * gather_plan.slot_rows
    return keys + regions * (row + batch * kv_heads * bool(bias_bytes)) * 4 * backward
