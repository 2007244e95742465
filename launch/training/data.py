"""Bytes of real text, and the batches a step takes from them.

Owns reading, the split into training and validation bytes, and which windows a step sees: a pure function of seed and
step, so that any world size sees the same batches and a resumed run continues where it stopped. Refuses to know ranks
and models.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_SHARE = 20  # one byte in this many is held out
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """One string of bytes.

    Attributes:
        text: uint8, one dimension. Files of a folder are separated by a zero byte, which none of them contains.
        source: What was read.
        num_files: How many files it was.
        fingerprint: Changes when the bytes do: a digest of the length and of 1,024 pieces spread over them.
    """

    text: Tensor
    source: str
    num_files: int
    fingerprint: str


def _text_files(folder: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Relative names and contents of the text files below a folder, in no particular order."""
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in names:
            path = Path(where, name)
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            content = path.read_bytes()
            if content and b"\0" not in content:
                yield path.relative_to(folder).as_posix(), content


def _fingerprint(content: bytes | mmap.mmap) -> str:
    digest = hashlib.sha256(str(len(content)).encode())
    for index in range(1024):
        start = index * len(content) // 1024
        digest.update(content[start : start + 4096])
    return digest.hexdigest()[:16]


def load_corpus(data: str | None = None) -> Corpus:
    """Reads a file, the text files of a folder, or the sources of Python's standard library.

    Files of a folder come in the order of a digest of their names: the same on every machine, and with no topic at the
    end, where the validation bytes are.

    Args:
        data: A file (mapped into memory, not read whole), a folder, or None: the standard library.

    Returns:
        The bytes.

    Raises:
        ValueError: There is no such file or folder, or no text in it.
    """
    path = Path(sysconfig.get_path("stdlib")) if data is None else Path(data).expanduser()
    source = f"Python {sysconfig.get_python_version()} standard library" if data is None else str(path)
    if path.is_dir():
        files = dict(_text_files(path, suffix=".py" if data is None else ""))
        order = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
        content = b"\0".join(files[name] for name in order)
        num_files = len(files)
    elif path.is_file():
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        num_files = 1
    else:
        raise ValueError(
            f"data must be a file or a folder that exists, got {path}; leave it out for the standard library"
        )
    if not len(content):
        raise ValueError(f"data must contain text, got none in {path}; pass --data a file or folder with text in it")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
        text = torch.frombuffer(content, dtype=torch.uint8)
    return Corpus(text, source, num_files, _fingerprint(content))


@dataclass(frozen=True)
class Batches:
    """Windows of a corpus: `batch_size` rows of `seq_len + 1` bytes, of which the last `seq_len` are to be predicted.

    Attributes:
        text: The whole corpus, uint8.
        seq_len: Tokens a model sees.
        batch_size: Rows of a batch.
        seed: Of the order of training windows.
    """

    text: Tensor
    seq_len: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        needed = 2 * (self.seq_len + 1)
        if self.text.numel() < needed:
            raise ValueError(
                f"data must hold at least {needed} bytes for a context of {self.seq_len}, got {self.text.numel()}; "
                "pass a smaller --seq-len or more --data"
            )

    @property
    def num_training_bytes(self) -> int:
        """Where the validation bytes begin."""
        return self.text.numel() - max(self.text.numel() // VALIDATION_SHARE, self.seq_len + 1)

    def _windows(self, starts: list[int]) -> Tensor:
        return torch.stack([self.text[start : start + self.seq_len + 1] for start in starts]).long()

    def training(self, step: int) -> Tensor:
        """The batch of one step, `b s+1`: windows at random places of the training bytes."""
        draw = random.Random(f"{self.seed} {step}")
        last = self.num_training_bytes - self.seq_len - 1
        return self._windows([draw.randint(0, last) for _ in range(self.batch_size)])

    def validation(self, num_batches: int) -> Iterator[Tensor]:
        """The same batches every time: windows evenly spread over the validation bytes."""
        first, last = self.num_training_bytes, self.text.numel() - self.seq_len - 1
        count = num_batches * self.batch_size
        starts = [first + index * (last - first) // max(count - 1, 1) for index in range(count)]
        for index in range(num_batches):
            yield self._windows(starts[index * self.batch_size : (index + 1) * self.batch_size])

    def prompt(self, length: int) -> Tensor:
        """The first `length` validation bytes (fewer when there are fewer), 1-dimensional."""
        return self.text[self.num_training_bytes :][:length].long()
