"""Texts of a few words, and a tokenizer that knows them."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.integrations.transformers.models import VOCAB


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the tiny models have tokens: `w3`, `w4`, ..."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{token}": token for token in range(3, VOCAB)}}
    model = Tokenizer(WordLevel(words, unk_token="w3"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def text(length: int, seed: int) -> str:
    """Random words."""
    draw = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{token}" for token in draw)


def completions(count: int = 12) -> Dataset:
    """Prompts and completions of different lengths."""
    rows: list[dict[str, Any]] = [
        {"prompt": text(3 + i % 4, i), "completion": " " + text(4 + 5 * i % 13, 100 + i)} for i in range(count)
    ]
    return Dataset.from_list(rows)


def preferences(count: int = 12) -> Dataset:
    """Prompts with a chosen and a rejected completion."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": text(3 + i % 4, i),
            "chosen": " " + text(4 + 5 * i % 13, 100 + i),
            "rejected": " " + text(3 + 3 * i % 11, 200 + i),
        }
        for i in range(count)
    ]
    return Dataset.from_list(rows)


def margins(count: int = 12) -> Dataset:
    """Preferences with the margin of each."""
    found: Any = preferences(count)
    return found.add_column("margin", [i / count for i in range(count)])
