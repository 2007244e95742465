"""Measured parts of a machine: kernels, matrix products, memory, links and launches, and the files that hold them.

A profile is a JSON file of numbers with their units in their names. `fitted_from` names the measurements; those of profiles that
are scaled from another GPU by datasheets are named in `assumed`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class KernelCost:
    """Time of an attention kernel's program, in microseconds. Blocks with and without a mask take equally long.

    Attributes:
        block: One block of the other side that streams past a tile.
        tile: Prologue and epilogue of a tile.
    """

    block: float
    tile: float


@dataclass(frozen=True)
class Link:
    """Point-to-point transfers of one rank: a message of `n` bytes takes `latency_us + n / gbps / 1000` microseconds.

    Attributes:
        gbps: 10^9 bytes per second that a rank receives while it sends as many.
        latency_us: Fixed time of a message.
    """

    gbps: float
    latency_us: float

    def ms(self, num_bytes: float) -> float:
        """Return the milliseconds of a message; 0.0 without bytes."""
        return (self.latency_us + num_bytes / self.gbps / 1e3) / 1e3 if num_bytes else 0.0


@dataclass(frozen=True, eq=False)
class Profile:
    """Numbers of one kind of GPU and its links.

    Attributes:
        peak_tflops: Dense bf16 of the datasheet, the denominator of MFU.
        memory_gib: Memory that a process can use.
        multiprocessors: Persistent programs of a kernel.
        forward: Cost of the forward kernel by head_dim in shared memory (64, 128, 256).
        backward: Cost of the backward kernels by the same.
        launch_us: A kernel launch, beside its programs.
        sustained: Factor of a kernel that runs longer than `sustained_ms`, where the clock falls.
        matmul_tflops: Large bf16 matrix products.
        matmul_sustained_tflops: The same within a training step.
        memory_gbps: Memory traffic of plain kernels, 10^9 bytes per second.
        copy_engine: Pushes between GPUs of a host.
        nccl: Messages between GPUs of a host over NCCL.
        collective_gbps: 10^9 bytes per second that a GPU receives in an all-gather or a reduce-scatter within a host.
        network: Messages of a GPU to another host.
        host_gbps: 10^9 bytes per second between a GPU and pinned host memory while all GPUs of a host copy; not measured.
        slowdown: Factor of kernels beside transfers, by schedule and direction: `fused_forward`, ...
        semaphores_us: Device time of semaphores and joins of streams by name: of a launch of the fused schedule by direction, and
            `turn`, from the push of one owner to that of the next.
        host_us: Host time by name: of a call, of each peer of a call, of a layer. A fused call is one CUDA graph for any peers.
        schedule: Schedule of a ring within a host by default; "fused" needs the Hopper kernels and the copy engine.
        reserve_gib: Memory that libraries take outside of tensors.
        fitted_from: Files of rows to which numbers were fitted.
        assumed: Numbers that were not measured on this GPU, with their source.
    """

    name: str
    peak_tflops: float
    memory_gib: float
    multiprocessors: int
    forward: Mapping[int, KernelCost]
    backward: Mapping[int, KernelCost]
    launch_us: float
    sustained: float
    sustained_ms: float
    matmul_tflops: float
    matmul_sustained_tflops: float
    memory_gbps: float
    copy_engine: Link
    nccl: Link
    collective_gbps: float
    network: Link
    host_us: Mapping[str, float]
    slowdown: Mapping[str, float] = field(default_factory=dict)
    semaphores_us: Mapping[str, float] = field(default_factory=dict)
    schedule: str = "fused"
    reserve_gib: float = 1.5
    host_gbps: float = 20.0
    fitted_from: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def sustained_factor(self, ms: float) -> float:
        """Return the factor of a kernel by its duration: 1 for short ones, `sustained` for long ones."""
        return 1 + (self.sustained - 1) * ms / (ms + self.sustained_ms)


def load_profile(name: str | Path | Profile) -> Profile:
    """Return a profile by the name of a committed one, or from a file that `doctor --profile` wrote.

    Args:
        name: "h100", "h200", "a100", "b200", or the path of a JSON file.

    Raises:
        ValueError: There is no such profile, or the file is not one.

    Example:
        >>> load_profile("h200").multiprocessors
        132
    """
    if isinstance(name, Profile):
        return name
    known = sorted(path.stem for path in PROFILES.glob("*.json"))
    path = PROFILES / f"{name}.json" if str(name) in known else Path(name)
    if not path.is_file():
        raise ValueError(
            f"gpu must be one of {', '.join(known)} or a file that doctor --profile wrote, got {str(name)!r}; "
            "measure one with: python -m ringattn.launch.doctor --profile profile.json"
        )
    try:
        return _read(json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"a profile must hold the fields of ringattn.sizing.Profile, got {error} in {path}; measure it again with: "
            f"python -m ringattn.launch.doctor --profile {path}"
        ) from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON that `load_profile` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(profile), indent=1) + "\n")


def _read(fields: dict[str, Any]) -> Profile:
    costs = {name: {int(d): KernelCost(**x) for d, x in fields[name].items()} for name in ("forward", "backward")}
    links = {name: Link(**fields[name]) for name in ("copy_engine", "nccl", "network")}
    texts = {name: tuple(fields.get(name, ())) for name in ("fitted_from", "assumed")}
    return Profile(**{**fields, **costs, **links, **texts})
