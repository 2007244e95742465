"""Checkpoints on disk: published atomically, verified by digests, and written in the background.

A checkpoint is a folder `step-<step>-<digest>`. All ranks write their parts at once (torch.distributed.checkpoint: one file of
tensors per rank, and an index) into a folder of another name. Then rank 0 writes `manifest.json`, which holds size and SHA-256
of every file and the facts of the run, and renames the folder; its name has the first 16 hex digits of the SHA-256 of the
manifest. One rename publishes the content and its proof together: a process that dies at any moment leaves the older
checkpoints or this one whole, and a file that is damaged later does not match. Tensors are stored by name and place, so that
ranks of any other mesh read the parts they need.

A save copies this rank's part to host memory and returns. A thread writes and publishes it, over a gloo group of its own beside
the collectives of a step. The next save, or the end of the run, waits for it and raises its error.
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

from ringattn.launch.common.distributed import Refusal, Session

MANIFEST = "manifest.json"
KEPT = 2  # checkpoints of a run that are kept
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest is of Python 3.11
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
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
    found = []
    for path in folder.glob("step-*"):
        with contextlib.suppress(FileNotFoundError):  # the run that writes here removes old ones
            if _NAME.fullmatch(path.name) and path.is_dir():
                found.append((step_of(path), path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The number of steps in the name of a checkpoint."""
    return int(path.name.split("-")[1])


def newest_step(folder: Path) -> int:
    """The number of steps of the newest checkpoint of a folder, by its name; 0 without any."""
    return max(map(step_of, list_checkpoints(folder)), default=0)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that were saved with a checkpoint."""
    return json.loads((path / MANIFEST).read_text())["facts"]


def check_checkpoint(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """Return a description of the damage of a checkpoint, or None when names, sizes and digests match.

    Digests are checked of every `shares`-th file from number `share` on.
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


def find_damage(path: Path, session: Session) -> str | None:
    """Verify a checkpoint on all ranks, each reading a share of the files; all return the same result."""
    return next(filter(None, session.gather(check_checkpoint(path, session.rank, session.world_size))), None)


def find_checkpoint(folder: Path, session: Session) -> Path | None:
    """Return the newest intact checkpoint of a folder, verified by all ranks; warn about each damaged newer one."""
    for name in session.broadcast([path.name for path in list_checkpoints(folder)]):
        damage = find_damage(folder / name, session)
        if damage is None:
            return folder / name
        if session.first:
            warnings.warn(f"checkpoint {folder / name} {damage}; an older one is used", stacklevel=2)
    return None


class Checkpoints:
    """Writes the checkpoints of one run and keeps the newest. A collective: every rank calls the same methods."""

    def __init__(self, folder: Path, session: Session) -> None:
        self.folder, self.session = folder, session
        # a group by itself: its collectives run beside those of steps
        self._group: Any = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: str | None = None
        if session.first:
            folder.mkdir(parents=True, exist_ok=True)
            for left in (*folder.glob(".step-*.part"), *folder.glob(".step-*.old")):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, step: int, state: dict[str, Any], facts: dict[str, Any]) -> None:
        """Copy a state, which may then change, and begin to write it; raise Refusal if the save before failed on any rank."""
        self.wait()
        part = self.folder / f".step-{step:08d}.part"
        self.session.lead(lambda: shutil.rmtree(part, ignore_errors=True))
        writing = async_save(state, storage_writer=FileSystemWriter(part), process_group=self._group)
        self._step = step
        self._thread = threading.Thread(target=self._publish, args=(part, writing, facts), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is on the disk; raise Refusal on every rank if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        errors = self.session.gather(self._error)
        self._thread = self._error = None
        for index, error in enumerate(errors):
            if error is not None:
                raise Refusal(
                    f"the checkpoint of step {self._step} must be written to {self.folder}, got on rank {index}: {error}; "
                    "correct it, and start again: the run continues from the checkpoint before"
                )

    def load_(self, path: Path, state: dict[str, Any]) -> None:
        """Fill a state with any sharding from a checkpoint with any other."""
        load(state, storage_reader=FileSystemReader(path), process_group=self._group)

    def _publish(self, part: Path, writing: Any, facts: dict[str, Any]) -> None:
        """Wait for all parts; then rank 0 publishes them as a checkpoint. Runs in a thread."""
        parts: Any
        try:
            writing.result()
            mine = [*part.glob(f"__{self.session.rank}_*"), *(part.glob(".metadata") if self.session.first else ())]
            parts = {path.name: (path.stat().st_size, _digest(path)) for path in mine}
        except BaseException as error:
            parts = self._error = _reason(error)
        try:
            all_ranks: list[Any] = [None] * self.session.world_size
            dist.all_gather_object(all_ranks, parts, group=self._group)
            if self.session.first:
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
        for old in [*stale, *[other for other in list_checkpoints(self.folder) if other not in stale][KEPT:]]:
            _remove(old)


def _reason(error: BaseException) -> str:
    """Return the cause of a failure without the traces that torch.distributed.checkpoint wraps around it."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {error}"
