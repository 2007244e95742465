"""Text, and the batches of a step: reading, the validation split, and documents.

A batch is a function of seed and step, so any world size sees the same batches and a resumed run continues where it stopped. A
token is a byte, unless there is a tokenizer.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn.plan.layouts import Shard
from ringattn.training import IGNORED

NUM_BYTES = 256
VALIDATION_SHARE = 20  # one token in this many is held out
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Tokens of all files, one after the other: bytes (uint8), or token ids of a tokenizer (int32)."""

    text: Tensor
    source: str
    num_files: int
    fingerprint: str  # digest of the length and of 1,024 pieces of the tokens
    separator: int = 0  # the token between files, which none of them contains: the zero byte

    def encoded(self, tokenizer: Any, name: str) -> Corpus:
        """Return the same files as tokens of a tokenizer of transformers, its end-of-text token between them."""
        end = tokenizer.eos_token_id
        if end is None:
            raise ValueError(f"the tokenizer must have an eos_token, got none in {name}; set one in its configuration")
        files = bytes(self.text.numpy()).decode(errors="replace").split("\0")
        tokens: list[int] = []
        for file in files:
            if tokens:
                tokens.append(end)
            tokens.extend(token for token in tokenizer(file, add_special_tokens=False)["input_ids"] if token != end)
        content = torch.tensor(tokens, dtype=torch.int32)
        return replace(self, text=content, fingerprint=_fingerprint(content.numpy().tobytes()), separator=end)


def _text_files(folder: Path, suffix: str, without: Path | None) -> Iterator[tuple[str, bytes]]:
    """Relative names and contents of the text files below a folder, but not below another, in no particular order."""
    for where, folders, names in os.walk(folder):
        if without is not None and Path(where).resolve() == without:
            folders.clear()
            continue
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


def load_corpus(data: str | None = None, out: str | None = None) -> Corpus:
    """Read a file, the text files of a folder, or the sources of Python's standard library (None).

    Files of a folder come in the order of a digest of their names: the same on every machine, and with no topic at the
    end, where the validation tokens are. The folder `out` of the run is left out, as its content changes. Raises ValueError
    if there is no text.
    """
    path = Path(sysconfig.get_path("stdlib")) if data is None else Path(data).expanduser()
    source = f"Python {sysconfig.get_python_version()} standard library" if data is None else str(path)
    if path.is_dir():
        without = None if out is None else Path(out).resolve()
        files = dict(_text_files(path, ".py" if data is None else "", without))
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
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
        text = torch.frombuffer(content, dtype=torch.uint8)
    return Corpus(text, source, num_files, _fingerprint(content))


@dataclass(frozen=True)
class Rows:
    """Inputs of a model `b n`, their targets `b n`: the token after each, or `IGNORED`; and bounds (0, ..., n) of documents.

    shards are those of every rank where documents were placed; None: a layout makes them.
    """

    tokens: Tensor
    targets: Tensor
    documents: tuple[int, ...] | None = None
    shards: tuple[Shard, ...] | None = None


def count_targets(windows: Tensor, separator: int | None) -> int:
    """Return the number of targets in `b n+1` windows: all but each first, and but the firsts of documents."""
    count = windows.shape[0] * (windows.shape[1] - 1)
    return count if separator is None else count - int((windows[:, :-1] == separator).sum())


def make_rows(windows: Tensor, separator: int | None) -> Rows:
    """Rows from `b n+1` windows of text, in which each token but the first is the target of the one before it.

    With a separator, the last token of every document, all windows become one row, cut into documents after each separator
    and at the ends of windows, and no token predicts the first one of a document.

    Example:
        >>> rows = make_rows(torch.tensor([[5, 0, 6, 7], [8, 9, 0, 4]]), separator=0)
        >>> rows.tokens.tolist(), rows.documents
        ([[5, 0, 6, 8, 9, 0]], (0, 2, 3, 6))
        >>> rows.targets.tolist()
        [[0, -100, 7, 9, 0, -100]]
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    if separator is None:
        return Rows(tokens, targets)
    ends = (tokens == separator).flatten().nonzero().flatten() + 1
    bounds = {0, *range(tokens.shape[1], tokens.numel() + 1, tokens.shape[1]), *ends.tolist()}
    targets = targets.masked_fill(tokens == separator, IGNORED)
    return Rows(tokens.reshape(1, -1), targets.reshape(1, -1), tuple(sorted(bounds)))


@dataclass(frozen=True)
class Batches:
    """Windows of a corpus: `batch_size` rows of `seq_len + 1` tokens, of which the last `seq_len` are to be predicted."""

    text: Tensor
    seq_len: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        needed = 2 * (self.seq_len + 1)
        if self.text.numel() < needed:
            raise ValueError(
                f"data must hold at least {needed} tokens for a context of {self.seq_len}, got {self.text.numel()}; "
                "pass a smaller --seq-len or more --data"
            )

    @property
    def num_training_tokens(self) -> int:
        """Index of the first validation token."""
        return self.text.numel() - max(self.text.numel() // VALIDATION_SHARE, self.seq_len + 1)

    def _windows(self, starts: list[int]) -> Tensor:
        return torch.stack([self.text[start : start + self.seq_len + 1] for start in starts]).long()

    def training(self, step: int) -> Tensor:
        """The batch of one step, `b n+1`: windows at random places of the training tokens."""
        draw = random.Random(f"{self.seed} {step}")
        last = self.num_training_tokens - self.seq_len - 1
        return self._windows([draw.randint(0, last) for _ in range(self.batch_size)])

    def validation(self, num_batches: int) -> Iterator[Tensor]:
        """Batches that are always the same: windows evenly spread over the validation tokens."""
        first, last = self.num_training_tokens, self.text.numel() - self.seq_len - 1
        count = num_batches * self.batch_size
        starts = [first + index * (last - first) // max(count - 1, 1) for index in range(count)]
        for index in range(num_batches):
            yield self._windows(starts[index * self.batch_size : (index + 1) * self.batch_size])

    def prompt(self, length: int) -> Tensor:
        """The first `length` validation tokens (fewer when there are fewer), 1-dimensional."""
        return self.text[self.num_training_tokens :][:length].long()
