"""Checkpoints on disk: published atomically, verified by digests, and written in the background.

Owns folder names, durability, which checkpoints are kept, and the writer thread. Does not interpret the state.

Note [Folder]
    A checkpoint is a folder `step-<step>-<digest>`. All ranks write their parts at once (torch.distributed.checkpoint:
    one file of tensors per rank, and an index) into a folder of another name, flushed to the disk. Then rank 0 writes
    `manifest.json`, which holds size and SHA-256 of every file, and the facts of the run, and renames the folder; its
    name carries the first 16 hex digits of the SHA-256 of the manifest. So one rename publishes the content and its
    proof together, a process that dies at any moment leaves the older checkpoints or this one whole, and a file that is
    cut short, lost or damaged later does not match. Tensors are kept by name and place, so that ranks of any other mesh
    read the parts they need.

Note [Stalls]
    A save copies this rank's part of the state to host memory, and returns. Writing, digests and publication happen in
    a thread, over a gloo group of its own, so that they are never in the way of the collectives of a step. The next save,
    or the end of the run, waits for the thread and raises what it met, on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ringattn.launch.runtime.distributed import Rank, Refusal

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Remove a folder so that a partly removed one is never taken for a checkpoint."""
    renamed = folder.with_name(f".{folder.name.lstrip('.')}.old")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(renamed, ignore_errors=True)
        folder.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder by name, newest first, intact or not."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), path.stat().st_mtime_ns), reverse=True)


def step_of(path: Path) -> int:
    """The number of steps that a checkpoint's name says it holds."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(
            f"a checkpoint must be named step-<step>-<digest>, got {path.name}; keep the name it was given"
        )
    return int(match[1])


def newest_step(folder: Path) -> int:
    """The steps that the newest checkpoint of a folder holds, by its name; 0 where there is none."""
    return max(map(step_of, list_checkpoints(folder)), default=0)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that were saved with a checkpoint."""
    return json.loads((path / MANIFEST).read_text())["facts"]


def check_checkpoint(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """Verify a checkpoint: return a description of the damage, or None when all digests match.

    Args:
        path: The folder.
        share: Index of this reader: it reads every `shares`-th file from this one on; names and sizes are always checked.
        shares: Number of readers that the files are divided among.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return "is not named step-<step>-<digest>"
    try:
        if _digest(path / MANIFEST)[:16] != match[2]:
            return f"is damaged ({MANIFEST} does not match the folder's name)"
        files: dict[str, Any] = json.loads((path / MANIFEST).read_text())["files"]
        for index, (name, (size, digest)) in enumerate(sorted(files.items())):
            if (path / name).stat().st_size != size:
                return f"is damaged or incomplete ({name} has not its {size} bytes)"
            if index % shares == share and _digest(path / name) != digest:
                return f"is damaged ({name} has other content than when it was saved)"
    except OSError as error:
        return f"is incomplete or cannot be read ({error.strerror}: {Path(error.filename or path).name})"
    return None


def find_damage(path: Path, rank: Rank) -> str | None:
    """Verify a checkpoint on all ranks, each reading a share of the files; all return the same result."""
    return next(filter(None, rank.gather(check_checkpoint(path, rank.index, rank.world_size))), None)


def find_checkpoint(folder: Path, rank: Rank) -> Path | None:
    """Return the newest intact checkpoint of a folder, verified by all ranks; warn about each damaged newer one."""
    for name in rank.broadcast([path.name for path in list_checkpoints(folder)]):
        damage = find_damage(folder / name, rank)
        if damage is None:
            return folder / name
        if rank.first:
            warnings.warn(f"checkpoint {folder / name} {damage}; an older one is used", stacklevel=2)
    return None


class Checkpoints:
    """Writes the checkpoints of one run. A collective: every rank makes one and calls the same methods.

    Args:
        folder: Where; made if absent.
        rank: This rank.
        keep: Number of checkpoints to keep; older ones are removed.
    """

    def __init__(self, folder: Path, rank: Rank, keep: int = 2) -> None:
        self.folder, self.rank, self.keep = folder, rank, keep
        # a group by itself: its collectives run beside those of steps
        self._group: Any = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: str | None = None
        if rank.first:
            folder.mkdir(parents=True, exist_ok=True)
            for left in (*folder.glob(".step-*.part"), *folder.glob(".step-*.old")):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, step: int, state: dict[str, Any], facts: dict[str, Any]) -> None:
        """Copies a state and begins to write it (Note [Stalls]); waits for the save before.

        Args:
            step: Number of steps done.
            state: Tensors, sharded or replicated, and numbers, in dicts; by the time this returns they may change.
            facts: JSON that `read_facts` returns.

        Raises:
            Refusal: The save before failed, here or on another rank.
        """
        self.wait()
        part = self.folder / f".step-{step:08d}.part"
        self.rank.lead(lambda: shutil.rmtree(part, ignore_errors=True))
        writing = async_save(state, storage_writer=FileSystemWriter(part), process_group=self._group)
        self._step = step
        self._thread = threading.Thread(target=self._publish, args=(part, writing, facts), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last save is on the disk.

        Raises:
            Refusal: It failed; the message says on which rank and why. Raised on every rank.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        errors = self.rank.gather(self._error)
        self._error = None
        for index, error in enumerate(errors):
            if error is not None:
                raise Refusal(
                    f"the checkpoint of step {self._step} must be written to {self.folder}, got on rank {index}: {error}; "
                    "see to it, and start again: the run continues from the checkpoint before"
                )

    def load_(self, path: Path, state: dict[str, Any]) -> None:
        """Fills a state, sharded as it is here, from a checkpoint that was sharded in any way."""
        load(state, storage_reader=FileSystemReader(path), process_group=self._group)

    def _publish(self, part: Path, writing: Any, facts: dict[str, Any]) -> None:
        """The thread: waits for all parts, then rank 0 makes them a checkpoint (Note [Folder])."""
        parts: Any
        try:
            writing.result()
            mine = [*part.glob(f"__{self.rank.index}_*"), *(part.glob(".metadata") if self.rank.first else ())]
            parts = {path.name: (path.stat().st_size, _digest(path)) for path in mine}
        except BaseException as error:
            parts = self._error = _reason(error)
        try:
            all_ranks: list[Any] = [None] * self.rank.world_size
            dist.all_gather_object(all_ranks, parts, group=self._group)
            if self.rank.first:
                self._rename(part, all_ranks, facts)
        except BaseException as error:
            self._error = self._error or _reason(error)

    def _rename(self, part: Path, parts: Iterable[Any], facts: dict[str, Any]) -> None:
        if any(isinstance(one, str) for one in parts):
            shutil.rmtree(part, ignore_errors=True)
            return
        try:
            files = {name: proof for one in parts for name, proof in one.items()}
            manifest = part / MANIFEST
            manifest.write_text(json.dumps({"facts": facts, "files": files}, indent=1))
            _sync(manifest)
            _sync(part)
            path = self.folder / f"step-{self._step:08d}-{_digest(manifest)[:16]}"
            if path.exists():  # the same content, byte for byte, or what is left of it
                _remove(path)
            part.rename(path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _sync(self.folder)
        # newer ones are damaged, or are from before this run was restarted at an earlier step
        stale = [other for other in list_checkpoints(self.folder) if step_of(other) > self._step]
        for old in [*stale, *[other for other in list_checkpoints(self.folder) if other not in stale][self.keep :]]:
            _remove(old)


def _reason(error: BaseException) -> str:
    """Return the cause of a failure without the traces that torch.distributed.checkpoint wraps around it."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {error}"
