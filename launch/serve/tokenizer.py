"""Text to tokens and back, piece by piece.

Owns tokenizers as the server calls them, the pieces of text that a stream of tokens gives, and where a stop string ends them.
Refuses to know requests and HTTP.

Note [Text of one more token]
    Where the text so far is whole, what a token adds is the text of it and the token before, less the text of that one alone. Both
    are remembered, for most pairs of a language come again and again: a token then costs one look-up. Where one of the two texts
    does not say enough (bytes that are no text yet, a token without text, a text that changes when something follows) the
    tokenizer is asked for the text of the last few tokens instead, until the text is whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
"""What stands in place of bytes that are no text, or none yet."""

FEW = 8
"""Tokens of the prompt before an answer: some tokenizers write a token's text by what stands before it."""

MOST_BEGUN = 3
"""Bytes, and so tokens, of a character that has begun and not ended."""

MOST_KEPT = FEW + MOST_BEGUN
"""Of the tokens before: the last few, and those that may have begun a character of which these have the end."""

LONGEST_DOUBT = 64
"""Tokens after which text that never becomes valid is given as it is."""

MOST_TEXTS = 2**16
"""Texts of tokens, and of pairs of them, that are remembered; 2**16 pairs take about 15 MiB."""

Decode = Callable[[Sequence[int]], str]

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
        """The tokens of a prompt.

        Raises:
            UnicodeEncodeError: It is no text: it has half a surrogate pair.
        """
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of messages, up to where the answer begins.

        Raises:
            NoTemplate: There is no template, or it refuses the messages.
            UnicodeEncodeError: As `encode`.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones; REPLACEMENT for bytes that are no text."""
        ...

    def recipe(self) -> dict[str, Any]:
        """What `make_tokenizer` makes it of in another process, as JSON takes it."""
        ...


class Bytes:
    """A tokenizer that needs nothing: a token is a byte, one more ends an answer, and those above have no text.

    Args:
        vocab_size: Of the model: what it may answer with can be sent back in a prompt.
    """

    END = 256
    LEAST = 257

    def __init__(self, vocab_size: int = LEAST) -> None:
        self.stops = frozenset([self.END])
        self.vocab_size = vocab_size

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
        """How many tokens the model has."""
        return {"vocab_size": self.vocab_size}


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
        self._plain = _plain_tokenizer(self.inner)

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with what the tokenizer puts in front."""
        return self._tokens(text)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The messages in the model's chat template, which transformers renders in a sandbox.

        Raises:
            NoTemplate: There is none, or it refuses the messages.
            UnicodeEncodeError: As `encode`.
        """
        from jinja2 import TemplateError

        if not self.inner.chat_template:
            raise NoTemplate("the model must have a chat template to chat, got none in its folder; use /v1/completions")
        try:
            text = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise NoTemplate(f"messages must be such as the model's chat template takes, got: {error}") from None
        return self._tokens(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        if self._plain is not None:
            return self._plain.decode(list(tokens), skip_special_tokens=True)
        return self.inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def recipe(self) -> dict[str, Any]:
        """Its folder, and what the model says."""
        return self._recipe

    def _tokens(self, text: str, **how: bool) -> list[int]:
        text.encode()  # half a surrogate pair is no text: tokenizers take it for another type, or for something else
        return list(self.inner(text, **how)["input_ids"])


def _plain_tokenizer(inner: Any) -> Any:
    """The tokenizer of the tokenizers library where decoding is all its own, at a tenth of the time; None elsewhere."""
    from transformers import PreTrainedTokenizerFast

    own = [getattr(type(inner), name, None) for name in ("decode", "_decode")]
    plain = [getattr(PreTrainedTokenizerFast, name, None) for name in ("decode", "_decode")]
    return inner.backend_tokenizer if own == plain and None not in own else None


def make_tokenizer(recipe: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a recipe: of a folder, or bytes."""
    if "folder" not in recipe:
        return Bytes(recipe["vocab_size"])
    return Pretrained(Path(recipe["folder"]), frozenset(recipe["stops"]), recipe["vocab_size"])


@lru_cache(MOST_TEXTS)
def text_alone(decode: Decode, token: int) -> str:
    """The text of a token by itself."""
    return decode([token])


@lru_cache(MOST_TEXTS)
def text_after(decode: Decode, before: int, token: int) -> str | None:
    """What a token adds to a text that ends with another token; None where the two do not say it."""
    known, both = text_alone(decode, before), decode([before, token])
    if not known or REPLACEMENT in both or not both.startswith(known):
        return None
    return both[len(known) :]


class Pieces:
    """The text of tokens that come one by one: all pieces together are the text of all tokens.

    A character whose bytes come in several tokens is given with the last of them (Note [Text of one more token]).

    Args:
        decode: A tokenizer's.
        before: The tokens of the prompt; the last few are enough.

    Example:
        >>> pieces = Pieces(Bytes().decode)
        >>> [pieces.push(token) for token in "aß".encode()], pieces.rest()
        (['a', '', 'ß'], '')
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        tokens = list(before[-MOST_KEPT - MOST_BEGUN :])
        # a character that the prompt began belongs to the answer that ends it
        for begun in range(MOST_BEGUN + 1):
            self._tokens = tokens[: len(tokens) - begun]
            text = self._last_few()
            if not text.endswith(REPLACEMENT):
                self._tokens += tokens[len(tokens) - begun :]
                # characters of the text of `_tokens`; None: all of it
                self._given = len(text) if begun else None
                return
        self._tokens = tokens
        self._given = len(self._last_few()) - 1

    def push(self, token: int) -> str:
        """The text that is certain now; may be empty."""
        tokens = self._tokens
        if self._given is None:
            piece = text_after(self._decode, tokens[-1], token) if tokens else None
            if piece is not None:
                tokens.append(token)
                if len(tokens) > LONGEST_DOUBT:
                    del tokens[:-MOST_KEPT]
                return piece
            self._given = len(self._last_few())
        tokens.append(token)
        text = self._decode(tokens)
        if not text.endswith(REPLACEMENT):
            piece, self._given = text[self._given :], None
        elif len(tokens) < LONGEST_DOUBT:
            # all marks: some tokenizers write one for each byte that stands beside one that is no text yet
            piece = text[self._given : len(text.rstrip(REPLACEMENT))]
            self._given += len(piece)
        else:
            piece = text[self._given :]
            self._given = len(self._last_few())
        return piece

    def _last_few(self) -> str:
        """The text of the last few tokens, which are kept: from where a character begins, if one does."""
        tokens = self._tokens
        for count in range(FEW, MOST_KEPT + 1):
            text = self._decode(tokens[-count:])
            if REPLACEMENT not in text:
                break
        else:
            count = FEW
            text = self._decode(tokens[-count:])
        del tokens[:-count]
        return text

    def rest(self) -> str:
        """What was held back, at the end."""
        if self._given is None:
            return ""
        text = self._decode(self._tokens)[self._given :]
        self._given = None
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
        certain = min(_may_begin(string, text) for string in self._strings)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held


def _may_begin(string: str, text: str) -> int:
    """Where a string may begin that a text does not have to its end; the length of the text where it can not.

    Example:
        >>> _may_begin("END", "an EEN"), _may_begin("END", "an E D")
        (4, 6)
    """
    place = text.find(string[0], max(0, len(text) - len(string) + 1))
    while place >= 0 and not string.startswith(text[place:]):
        place = text.find(string[0], place + 1)
    return place if place >= 0 else len(text)
