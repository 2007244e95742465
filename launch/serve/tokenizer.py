"""Tokenizers of the server: bytes, or the tokenizer in the folder of a model."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

REPLACEMENT = "\ufffd"  # stands for bytes that are not valid text, or not yet

MAX_COMPOSED = 3
"""Bytes of text for one byte of its composed form (NFC): 9 of three Hangul letters are 3 of their syllable."""

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None  # tools of a chat, as OpenAI writes them


class ChatTemplateError(ValueError):
    """A model has no chat template, or its template rejects a field of the request."""

    def __init__(self, message: str, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field


class TextTooLongError(ValueError):
    """A text has more tokens than may be asked for, by its length alone; the argument is how many it has at least."""


def check_text(text: str, most: int | None, max_token_bytes: int | None) -> None:
    """Raise TextTooLongError for a text that cannot have `most` tokens or less; None for no limit."""
    if most is not None and max_token_bytes is not None:
        least = -(-len(text.encode()) // max_token_bytes)
        if least > most:
            raise TextTooLongError(least)


class ByteTokenizer:
    """A tokenizer without files: a token is a byte, one more ends an answer, and those above have no text.

    Attributes:
        template: The text of its chat template: it has none.
        added_texts: Texts of tokens that were added to a vocabulary: it has none.
    """

    END = 256
    MIN_VOCAB = 257
    template = ""
    added_texts: Mapping[int, str] = {}

    def __init__(self, vocab_size: int = MIN_VOCAB) -> None:
        self.stops = frozenset([self.END])
        self.vocab_size = vocab_size
        self.recipe: dict[str, Any] = {"vocab_size": vocab_size}

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the bytes of a text; raise TextTooLongError for more than `most`."""
        check_text(text, most, 1)
        return list(text.encode())

    def chat(
        self, messages: Sequence[Message], most: int | None = None, tools: Tools = None, /, **options: Any
    ) -> list[int]:
        """Return one line for each message; raises ChatTemplateError for tools and options, which belong to templates."""
        if tools:
            raise ChatTemplateError("tools must be left out for tokens of bytes, whose chats have no template", "tools")
        if options:
            what = f"chat_template_kwargs must be left out for tokens of bytes, got {sorted(options)}"
            raise ChatTemplateError(what, "chat_template_kwargs")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]), most)

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

    Attributes:
        template: The text of the chat template, or of all if it has several.
        added_texts: Texts of added tokens; `decode` leaves out special ones. Marks such as `<tool_call>` of Qwen are not special.
    """

    def __init__(self, folder: Path, stops: frozenset[int], vocab_size: int, template: str | None = None) -> None:
        from transformers import AutoTokenizer

        self.recipe: dict[str, Any] = {"folder": str(folder), "stops": sorted(stops), "vocab_size": vocab_size}
        self.recipe["template"] = template
        self.inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if template is not None:
            self.inner.chat_template = template
        self.template = str(self.inner.chat_template or "")
        added = self.inner.added_tokens_decoder
        self.added_texts: Mapping[int, str] = {name: token.content for name, token in added.items()}
        own = self.inner.eos_token_id
        self.stops = stops | ({own} if isinstance(own, int) else frozenset())
        self.vocab_size = vocab_size
        self._decoder = _fast(self.inner, "decode", "_decode")
        self._encoder = _fast(self.inner, "__call__", "_encode_plus", "_batch_encode_plus")
        if self._encoder is not None:
            self._encoder.no_truncation()
            self._encoder.no_padding()
            self._encoder.encode_special_tokens = bool(getattr(self.inner, "split_special_tokens", False))
        self._lock = threading.Lock()
        self.max_token_bytes = None if self._encoder is None else _max_token_bytes(json.loads(self._encoder.to_str()))

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the tokens of a prompt, with those that the tokenizer puts in front; in any thread.

        Raises TextTooLongError, without tokenizing, for a text that cannot have `most` tokens or less.
        """
        return self._encode(text, most, True)

    def _encode(self, text: str, most: int | None, special: bool) -> list[int]:
        check_text(text, most, self.max_token_bytes)
        if self._encoder is not None:
            # a batch: other threads run meanwhile
            return self._encoder.encode_batch_fast([text], add_special_tokens=special)[0].ids
        with self._lock:
            return list(self.inner(text, add_special_tokens=special)["input_ids"])

    def definition(self) -> str | None:
        """Return the JSON of the tokenizer, without limits of length; None if it is none of the tokenizers library."""
        return None if self._encoder is None else self._encoder.to_str()

    def chat(
        self, messages: Sequence[Message], most: int | None = None, tools: Tools = None, /, **options: Any
    ) -> list[int]:
        """Return the tokens of the model's chat template, which transformers renders in a sandbox; see `encode`.

        Raises ChatTemplateError if there is no template, or it does not take the messages, tools or options.

        Args:
            options: Variables of the template. One that it does not read is refused, and so are arguments of transformers.
        """
        from jinja2 import TemplateError

        if not self.inner.chat_template:
            raise ChatTemplateError(
                "the model must have a chat template to chat, got none in its folder; use /v1/completions"
            )
        own = {*inspect.signature(self.inner.apply_chat_template).parameters, "messages"}
        if wrong := [name for name in options if name in own or not self.template_reads(name)]:
            what = f"chat_template_kwargs must be variables that the chat template reads, got {wrong[0]!r}"
            raise ChatTemplateError(what, "chat_template_kwargs")
        if tools:
            if not self.template_reads("tools"):
                what = "tools must be left out for a model whose chat template does not read them"
                raise ChatTemplateError(what, "tools")
            options["tools"] = list(tools)
        try:
            text = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatTemplateError(f"messages must be such as the model's chat template takes, got: {error}") from None
        return self._encode(text, most, False)

    def check_template(self) -> None:
        """Raise ValueError for a chat template that does not parse; one that wants other messages than these is none."""
        from jinja2 import TemplateSyntaxError

        given = self.inner.chat_template or {}
        for text in given.values() if isinstance(given, dict) else [given]:
            try:
                self.inner.apply_chat_template([{"role": "user", "content": ""}], chat_template=text, tokenize=False)
            except TemplateSyntaxError as error:
                what = f"the chat template must parse, got {error.message!r} in line {error.lineno}"
                raise ValueError(f"{what}; mend it, or pass another one by --chat-template") from None
            except Exception:
                continue

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template has a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
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


def _fast(inner: Any, *methods: str) -> Any:
    """Return the tokenizer of the tokenizers library, a tenth of the time; None if a class overrides one of the methods."""
    from transformers import PreTrainedTokenizerFast

    own, library = ([getattr(kind, name, None) for name in methods] for kind in (type(inner), PreTrainedTokenizerFast))
    return inner.backend_tokenizer if own == library else None


def _max_token_bytes(tokenizer: Mapping[str, Any]) -> int | None:
    """Return how many bytes of text a token of a tokenizer's JSON stands for at most; None where one may stand for any number.

    Only tokenizers that lose nothing have such a bound: in others an unknown word is one token, or white space is dropped.
    """
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    parts = _parts(tokenizer["normalizer"]) + _parts(tokenizer["pre_tokenizer"])
    bytewise = any(part["type"] == "ByteLevel" for part in parts)
    if not (
        model["type"] == "BPE"
        and (bytewise or model.get("byte_fallback"))
        and all(map(_is_lossless, parts))
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    # a byte is a character of such a vocabulary
    lengths = [len(text if bytewise else text.encode()) for text in model["vocab"]]
    longest = max([*lengths, *(len(token["content"].encode()) for token in added)])
    return longest * (MAX_COMPOSED if any(part["type"] == "NFC" for part in parts) else 1)


def _parts(part: Any) -> list[Any]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if not part:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for one in inner for step in _parts(one)]


def _is_lossless(part: Mapping[str, Any]) -> bool:
    """Return whether the length of a text bounds that of the text after a step from below (NFC: see MAX_COMPOSED)."""
    if part["type"] == "Replace":
        before = part["pattern"].get("String")
        return before is not None and len(part["content"].encode()) >= len(before.encode())
    kinds = ("ByteLevel", "Digits", "Metaspace", "Prepend", "NFC", "Split", "Punctuation")
    return part["type"] in kinds and part.get("behavior") != "Removed"


def make_tokenizer(recipe: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a recipe: of a folder, or bytes."""
    if "folder" not in recipe:
        return ByteTokenizer(recipe["vocab_size"])
    return PretrainedTokenizer(
        Path(recipe["folder"]), frozenset(recipe["stops"]), recipe["vocab_size"], recipe["template"]
    )
