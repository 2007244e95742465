"""Parallelism of the training job: a mesh of data-parallel x context-parallel ranks, and FSDP2 over all of them.

rank = dp_rank * cp + cp_rank, so the ranks of a ring are neighbours. The cp ranks of one dp rank share sequences; other dp ranks
have others. Parameters, gradients and optimiser state are sharded over all dp x cp ranks, because every rank computes a
part of the same sum (Note [Exact gradient] in trainer.py).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import ringattn


def mesh_sizes(text: str | None, world_size: int | None) -> tuple[int, int]:
    """Return the sizes of dp and cp of a flag like "dp=2,cp=2"; an absent size is what the ranks leave, or 1 if None.

    Example:
        >>> mesh_sizes("dp=2", 8), mesh_sizes(None, 4), mesh_sizes("cp=2,dp=3", None)
        ((2, 4), (1, 4), (3, 2))
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, number = part.strip().partition("=")
        if name not in ("dp", "cp") or name in sizes or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"mesh must be like dp=2,cp=4, got {text!r}; sizes are at least 1, and each is named once")
        sizes[name] = int(number)
    if world_size is None:
        return sizes.get("dp", 1), sizes.get("cp", 1)
    if "cp" not in sizes:
        sizes["cp"] = max(1, world_size // sizes.setdefault("dp", 1))
    dp = sizes.setdefault("dp", max(1, world_size // sizes["cp"]))
    if dp * sizes["cp"] != world_size:
        raise ValueError(
            f"mesh must have one place for each rank, got dp={dp} x cp={sizes['cp']} for {world_size} rank(s); "
            "pass sizes whose product is the number of ranks"
        )
    return dp, sizes["cp"]


@dataclass(frozen=True)
class Parallel:
    """Position of this rank in the mesh: its ring, and all ranks as a mesh of one dimension, over which parameters are sharded."""

    dp: int
    dp_rank: int
    ring: ringattn.Ring
    all_ranks: DeviceMesh
    device: torch.device

    def all_reduce_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.all_ranks.size() > 1:
            dist.all_reduce(values, group=self.all_ranks.get_group())
        return values


def make_parallel(
    device: torch.device,
    text: str | None = None,
    timeout_s: float = 600.0,
    virtual_size: int | None = None,
    ring_gib: float | None = None,
) -> Parallel:
    """Build the mesh of all ranks. A collective; the process group must exist.

    See `mesh_sizes` for `text`. `ring_gib` is what buffers of the fused ring may take; None: a quarter of the free memory.
    """
    world_size = dist.get_world_size()
    dp, cp = mesh_sizes(text, world_size)
    mesh = init_device_mesh(device.type, (dp, cp), mesh_dim_names=("dp", "cp"))
    all_ranks = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_cp",))
    timeout, budget = datetime.timedelta(seconds=timeout_s), None if ring_gib is None else int(ring_gib * 2**30)
    ring = ringattn.Ring(mesh["cp"], timeout=timeout, virtual_size=virtual_size, memory_budget=budget)
    return Parallel(dp, mesh.get_local_rank("dp"), ring, all_ranks, device)


def single_rank(group: dist.ProcessGroup, device: torch.device, virtual_size: int | None = None) -> Parallel:
    """Build a mesh of this rank only, from a process group of this rank only."""
    all_ranks = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp_cp",))
    return Parallel(1, 0, ringattn.Ring(group, virtual_size=virtual_size), all_ranks, device)


@contextlib.contextmanager
def single_process_group(device: torch.device) -> Iterator[None]:
    """Context with a process group: the existing one, or a temporary one of this process only."""
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_model_(
    model: nn.Module, blocks: Sequence[nn.Module], all_ranks: DeviceMesh, dtype: torch.dtype, reshard: bool
) -> None:
    """Shard the parameters of a model over all ranks: FSDP2, one unit per block and one for the rest.

    Parameters, gradients and optimiser state stay float32; a unit is gathered in `dtype` where it is used. Gradients are
    *added* over ranks in float32, not averaged.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotary tables stay as they are
    )
    for block in blocks:
        fully_shard(block, mesh=all_ranks, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=all_ranks, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # with a factor alone FSDP uses a reduction that gloo does not have
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
