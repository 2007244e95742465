"""Tokenizers of the server: bytes, or the tokenizer in the folder of a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

REPLACEMENT = "\ufffd"
"""Stands for bytes that are not valid text, or not yet."""

Message = dict[str, str]


class ChatTemplateError(ValueError):
    """A model has no chat template, or its template rejects the messages."""


class ByteTokenizer:
    """A tokenizer without files: a token is a byte, one more ends an answer, and those above have no text."""

    END = 256
    MIN_VOCAB = 257

    def __init__(self, vocab_size: int = MIN_VOCAB) -> None:
        self.stops = frozenset([self.END])
        self.vocab_size = vocab_size
        self.recipe: dict[str, Any] = {"vocab_size": vocab_size}

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def chat(self, messages: Sequence[Message], /, **options: Any) -> list[int]:
        """Return one line for each message; raises ChatTemplateError for options, which belong to templates."""
        if options:
            raise ChatTemplateError(f"chat_template_kwargs must be left out for tokens of bytes, got {sorted(options)}")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        """Return the byte of a token; None if it has none."""
        return bytes([token]) if token < 256 else None


class PretrainedTokenizer:
    """The tokenizer in the folder of a model.

    Args:
        folder: Only files there are read, and no code in them is run.
        stops: Tokens that end an answer, besides the tokenizer's own.
        template: Chat template in place of the tokenizer's own.
    """

    def __init__(self, folder: Path, stops: frozenset[int], vocab_size: int, template: str | None = None) -> None:
        from transformers import AutoTokenizer

        self.recipe: dict[str, Any] = {"folder": str(folder), "stops": sorted(stops), "vocab_size": vocab_size}
        self.recipe["template"] = template
        self.inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if template is not None:
            self.inner.chat_template = template
        own = self.inner.eos_token_id
        self.stops = stops | ({own} if isinstance(own, int) else frozenset())
        self.vocab_size = vocab_size
        self._decoder = _fast_decoder(self.inner)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that the tokenizer puts in front."""
        return list(self.inner(text)["input_ids"])

    def chat(self, messages: Sequence[Message], /, **options: Any) -> list[int]:
        """Return the tokens of the model's chat template, which transformers renders in a sandbox; raises ChatTemplateError.

        Args:
            options: Variables of the template. One that it does not read is refused, and so are arguments of transformers.
        """
        from jinja2 import TemplateError

        if not self.inner.chat_template:
            raise ChatTemplateError(
                "the model must have a chat template to chat, got none in its folder; use /v1/completions"
            )
        own, template = inspect.signature(self.inner.apply_chat_template).parameters, str(self.inner.chat_template)
        if wrong := [name for name in options if name in own or not re.search(rf"\b{re.escape(name)}\b", template)]:
            raise ChatTemplateError(
                f"chat_template_kwargs must be variables that the chat template reads, got {wrong[0]!r}"
            )
        try:
            text = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatTemplateError(f"messages must be such as the model's chat template takes, got: {error}") from None
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        if self._decoder is not None:
            return self._decoder.decode(list(tokens), skip_special_tokens=True)
        return self.inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is a part of a character; None where the vocabulary does not say them."""
        piece: str = self.inner.convert_ids_to_tokens(token) or ""
        if found := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # as SentencePiece writes a byte
            return bytes.fromhex(found[1])
        table = _byte_of_letter()
        return bytes(map(table.__getitem__, piece)) if piece and table.keys() >= set(piece) else None


Tokenizer = ByteTokenizer | PretrainedTokenizer


@cache
def _byte_of_letter() -> dict[str, int]:
    """Return the byte for which each letter of a byte-level vocabulary stands."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _fast_decoder(inner: Any) -> Any:
    """Return the tokenizer of the tokenizers library, which decodes in a tenth of the time; None if a class overrides decoding."""
    from transformers import PreTrainedTokenizerFast

    own = [getattr(type(inner), name, None) for name in ("decode", "_decode")]
    library = [getattr(PreTrainedTokenizerFast, name, None) for name in ("decode", "_decode")]
    return inner.backend_tokenizer if own == library and None not in own else None


def make_tokenizer(recipe: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a recipe: of a folder, or bytes."""
    if "folder" not in recipe:
        return ByteTokenizer(recipe["vocab_size"])
    return PretrainedTokenizer(
        Path(recipe["folder"]), frozenset(recipe["stops"]), recipe["vocab_size"], recipe["template"]
    )
