"""Checkpoints on disk: whole or absent, and known to be intact.

Owns file names, durability and what to keep. Refuses to know what a state means.

Note [File]
    A checkpoint is one file `step-<step>-<digest>.pt`, written by torch.save under another name, flushed to the disk,
    then renamed. The name carries the first 16 hex digits of the SHA-256 of the content, so one rename publishes the
    content and its proof together: a file cut short or damaged later does not match its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder by name, newest first, intact or not."""
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_of(path), path.stat().st_mtime_ns), reverse=True)


def step_of(path: Path) -> int:
    """The number of steps that a checkpoint's name says it holds."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(
            f"a checkpoint must be named step-<step>-<digest>.pt, got {path.name}; keep the name it was given"
        )
    return int(match[1])


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Writes a checkpoint so that a crash at any moment leaves the older ones or this one whole (Note [File]).

    Args:
        folder: Where; made if absent.
        step: How many steps the state has seen.
        state: Tensors, numbers, strings, and lists and dicts of them.
        keep: How many checkpoints stay; older ones are removed.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".step-{step:08d}.part"
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"step-{step:08d}-{_digest(part)}.pt"
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(folder)
    # newer ones are damaged, or belong to a history that this run has left
    stale = [other for other in list_checkpoints(folder) if step_of(other) > step]
    for old in [*stale, *[other for other in list_checkpoints(folder) if other not in stale][keep:]]:
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
    return path


def check_checkpoint(path: Path) -> str | None:
    """What is wrong with a checkpoint: None when its content matches its name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return "is not named step-<step>-<digest>.pt"
    try:
        found = _digest(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if found == match[2] else f"is damaged or incomplete (its content has digest {found})"


def find_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint of a folder; warns about each newer one that is not."""
    for path in list_checkpoints(folder):
        wrong = check_checkpoint(path)
        if wrong is None:
            return path
        warnings.warn(f"checkpoint {path} {wrong}; an older one is used", stacklevel=2)
    return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Holds data only: reading it runs no code."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
