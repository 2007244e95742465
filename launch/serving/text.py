"""Text to tokens and back, piece by piece.

Owns tokenizers as the server calls them, the pieces of text that a stream of tokens gives, and where a stop string ends them.
Refuses to know requests and HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
"""What stands in place of bytes that are no text, or none yet."""

FEW = 8
"""Tokens of the prompt before an answer: some tokenizers write a token's text by what stands before it."""

LONGEST_DOUBT = 64
"""Tokens after which text that never becomes valid is given as it is."""

Message = dict[str, str]


class NoTemplate(ValueError):
    """A model has no chat template, or its template refuses the messages."""


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    stops: frozenset[int]
    """Tokens that end an answer."""

    vocab_size: int
    """Tokens are below it."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of messages, up to where the answer begins."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones; REPLACEMENT for bytes that are no text."""
        ...

    def recipe(self) -> dict[str, Any]:
        """What `make_tokenizer` makes it of in another process, as JSON takes it."""
        ...


class Bytes:
    """A tokenizer that needs nothing: a token is a byte, and one more ends an answer."""

    END = 256

    def __init__(self) -> None:
        self.stops = frozenset([self.END])
        self.vocab_size = 257

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """One line for each message."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def recipe(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class Pretrained:
    """The tokenizer in the folder of a model.

    Args:
        folder: Where it is. Only files there are read, and no code in them is run.
        stops: Tokens that end an answer, besides the tokenizer's own.
        vocab_size: Of the model.
    """

    def __init__(self, folder: Path, stops: frozenset[int], vocab_size: int) -> None:
        from transformers import AutoTokenizer

        self._recipe = {"folder": str(folder), "stops": sorted(stops), "vocab_size": vocab_size}
        self.inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        own = self.inner.eos_token_id
        self.stops = stops | ({own} if isinstance(own, int) else frozenset())
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with what the tokenizer puts in front."""
        return list(self.inner(text)["input_ids"])

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The messages in the model's chat template, which transformers renders in a sandbox.

        Raises:
            NoTemplate: There is none, or it refuses the messages.
        """
        from jinja2 import TemplateError

        if not self.inner.chat_template:
            raise NoTemplate("the model must have a chat template to chat, got none in its folder; use /v1/completions")
        try:
            text = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise NoTemplate(f"messages must be such as the model's chat template takes, got: {error}") from None
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def recipe(self) -> dict[str, Any]:
        """Its folder, and what the model says."""
        return self._recipe


def make_tokenizer(recipe: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a recipe: of a folder, or bytes."""
    if not recipe:
        return Bytes()
    return Pretrained(Path(recipe["folder"]), frozenset(recipe["stops"]), recipe["vocab_size"])


class Pieces:
    """The text of tokens that come one by one: all pieces together are the text of all tokens.

    A character whose bytes come in several tokens is given with the last of them.

    Args:
        decode: A tokenizer's.
        before: The tokens of the prompt; the last few are enough.

    Example:
        >>> pieces = Pieces(Bytes().decode)
        >>> [pieces.push(token) for token in "aß".encode()], pieces.rest()
        (['a', '', 'ß'], '')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before[-FEW:])
        text = self._decode(self._tokens)
        # a character that the prompt began belongs to the answer that ends it
        self._given = len(text) - text.endswith(REPLACEMENT)

    def push(self, token: int) -> str:
        """The text that is certain now; may be empty."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        doubtful = text.endswith(REPLACEMENT) and len(self._tokens) < LONGEST_DOUBT
        piece = text[self._given : -1] if doubtful else text[self._given :]
        self._given += len(piece)
        if not doubtful and len(self._tokens) > 2 * FEW:
            self._tokens = self._tokens[-FEW:]
            self._given = len(self._decode(self._tokens))
        return piece

    def rest(self) -> str:
        """What was held back, at the end."""
        text = self._decode(self._tokens)[self._given :]
        self._given += len(text)
        return text


class Stops:
    """Cuts a text that comes in pieces before the first stop string.

    Args:
        strings: Those that end it; empty ones are not allowed.

    Example:
        >>> stops = Stops(["END"])
        >>> stops.push("a E"), stops.push("Nb"), stops.push("ENDc"), stops.found
        ('a ', 'ENb', '', True)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that certainly comes before any stop string."""
        if self.found:
            return ""
        if not self._strings:
            return piece
        text = self._held + piece
        places = [place for place in (text.find(string) for string in self._strings) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        longest = max(map(len, self._strings), default=1) - 1
        held = next((n for n in range(min(longest, len(text)), 0, -1) if self._begins(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _begins(self, text: str) -> bool:
        return any(string.startswith(text) for string in self._strings)
