"""Rings by the name of how they move keys, so that commands can compare one way with another.

Owns the names and what each asks of a `Ring`. Refuses to know how bytes move, and what a ring is used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

import ringattn
from ringattn.launch.runtime.distributed import Refusal
from ringattn.launch.runtime.session import Session
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
"""What a ring of each name is made with. Without a budget for other ranks' keys, they come step by step.

"fused_kv_buffer" is "fused" for callers whose keys were written into the ring's own memory (`Ring.kv_buffer`)."""


def make_ring(schedule: str, group: dist.ProcessGroup | None = None, **options: Any) -> ringattn.Ring:
    """A ring that moves keys as its name says.

    Args:
        schedule: One of SCHEDULES.
        group: Its ranks; None: all.
        **options: Others of the ring.

    Raises:
        Exception: Whatever the ring refuses with, where it cannot.
    """
    return ringattn.Ring(group, **SCHEDULES[schedule], **options)


def check_nodes(nodes: int, ranks: int) -> None:
    """Ends a command whose ranks cannot share its nodes: fewer of them would be measured than were asked for.

    Raises:
        SystemExit: As `make_nodes` refuses.
    """
    try:
        make_nodes(ranks, nodes)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def shown_name(schedule: str, session: Session) -> str:
    """What rows call it: a ring over the process group goes by the name of the group's backend.

    Example:
        >>> import torch
        >>> shown_name("process_group", Session(0, 4, torch.device("cuda"), "nccl"))
        'nccl'
    """
    return (session.backend or schedule) if schedule == "process_group" else schedule


def open_rings(schedules: Sequence[str], session: Session, **options: Any) -> dict[str, ringattn.Ring]:
    """A ring per schedule, by shown name, the same names on every rank; says why the others cannot be.

    Args:
        schedules: Some of SCHEDULES.
        session: The ranks.
        **options: Others of the rings.

    Raises:
        Refusal: There is none.
    """
    rings: dict[str, ringattn.Ring] = {}
    refused: dict[str, str] = {}
    for schedule in schedules:
        name, ring, why = shown_name(schedule, session), None, None
        try:
            ring = make_ring(schedule, **options)
            # a ring settles how it moves keys at its first call, which is where it may refuse
            x = torch.zeros(1, 1, 1, 16, device=session.device)
            ringattn.ring_attention(x, x, x, ring.sharding(ring.world_size))
        except (ValueError, NotImplementedError, RuntimeError) as error:
            why = f"{type(error).__name__}: {error}"
        said = {rank: one for rank, one in enumerate(session.gather(why)) if one is not None}
        if said:
            refused[name] = "; ".join(f"rank {rank}: {one}" for rank, one in said.items())
        elif ring is not None:
            rings[name] = ring
    if not rings:
        listed = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise Refusal(f"one of the schedules must give a ring here, got none ({listed}); choose another schedule")
    for name, why in refused.items():
        session.say(f"no {name} ring: {why}")
    return rings


def check_schedules(schedules: Sequence[str], session: Session, **options: Any) -> None:
    """Ends a command whose ranks cannot move keys in one of these ways, on every rank, and says why; as `open_rings`.

    Raises:
        SystemExit: As `open_rings` refuses.
    """
    for schedule in schedules:
        if schedule == "auto" or session.world_size == 1:
            continue  # users get it everywhere, and one rank moves nothing
        try:
            rings = open_rings([schedule], session, **options)
        except Refusal as error:
            raise SystemExit(str(error)) from None
        for ring in rings.values():
            ring.close()


def lonely_ring(session: Session) -> ringattn.Ring:
    """A ring of this rank alone."""
    if session.world_size == 1:
        return ringattn.Ring()
    group, _ = dist.new_subgroups(group_size=1)
    assert isinstance(group, dist.ProcessGroup), "this rank belongs to the group made for it"
    return ringattn.Ring(group)
