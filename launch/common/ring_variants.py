"""Rings by the name of how they move keys, so that commands can compare one schedule with another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

import ringattn
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.common.session import Session
from ringattn.plan.ring_plan import make_nodes

ScheduleName = Literal["auto", "fused", "fused_saved_kv", "fused_kv_buffer", "stepwise", "process_group"]
SCHEDULES: dict[str, dict[str, Any]] = {
    "auto": {},
    "fused": {"transport": "copy_engine"},
    "fused_saved_kv": {"transport": "copy_engine", "save_gathered_kv": True},
    "fused_kv_buffer": {"transport": "copy_engine"},
    "stepwise": {"transport": "copy_engine", "memory_budget": 0},
    "process_group": {"transport": "process_group"},
}
"""Options of a ring by schedule. Without a memory budget for the KV of other ranks, it arrives step by step.

"fused_kv_buffer" is "fused" for callers that write their KV into the ring's own memory (`Ring.kv_buffer`)."""


def make_ring(schedule: str, group: dist.ProcessGroup | None = None, **options: Any) -> ringattn.Ring:
    """Return a ring over `group` (None: all ranks) that moves keys as `schedule` says; `options` are others of `Ring`."""
    return ringattn.Ring(group, **SCHEDULES[schedule], **options)


def check_nodes(nodes: int, ranks: int) -> None:
    """Exit if the ranks of a command cannot be divided into `nodes` nodes."""
    try:
        make_nodes(ranks, nodes)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def display_name(schedule: str, session: Session) -> str:
    """Return the name of a schedule in rows: the group's backend for a ring over the process group.

    Example:
        >>> import torch
        >>> display_name("process_group", Session(0, 4, torch.device("cuda"), "nccl"))
        'nccl'
    """
    return (session.backend or schedule) if schedule == "process_group" else schedule


def open_rings(schedules: Sequence[str], session: Session, **options: Any) -> dict[str, ringattn.Ring]:
    """Return a ring per schedule, by display name, the same names on every rank; print the reason for those that fail.

    Raises Refusal if all fail.
    """
    rings: dict[str, ringattn.Ring] = {}
    refused: dict[str, str] = {}
    for schedule in schedules:
        name, ring, why = display_name(schedule, session), None, None
        try:
            ring = make_ring(schedule, **options)
            # a ring chooses its transport at its first call, which may raise
            x = torch.zeros(1, 1, 1, 16, device=session.device)
            ringattn.ring_attention(x, x, x, ring.sharding(ring.world_size))
        except (ValueError, NotImplementedError, RuntimeError) as error:
            why = f"{type(error).__name__}: {error}"
        reasons = [f"rank {rank}: {one}" for rank, one in enumerate(session.gather(why)) if one is not None]
        if reasons:
            refused[name] = "; ".join(reasons)
        elif ring is not None:
            rings[name] = ring
    if not rings:
        listed = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise Refusal(f"one of the schedules must give a ring here, got none ({listed}); choose another schedule")
    for name, why in refused.items():
        session.say(f"no {name} ring: {why}")
    return rings


def check_schedule(schedule: str, session: Session, **options: Any) -> None:
    """Exit on every rank, with the reason, if the ranks cannot move keys as `schedule` says."""
    if schedule == "auto" or session.world_size == 1:
        return  # "auto" works everywhere, and one rank moves nothing
    try:
        rings = open_rings([schedule], session, **options)
    except Refusal as error:
        raise SystemExit(f"error: {error}") from None
    for ring in rings.values():
        ring.close()


def single_rank_ring(session: Session) -> ringattn.Ring:
    """Return a ring of this rank alone."""
    if session.world_size == 1:
        return ringattn.Ring()
    group, _ = dist.new_subgroups(group_size=1)
    assert isinstance(group, dist.ProcessGroup), "this rank belongs to the group made for it"
    return ringattn.Ring(group)
