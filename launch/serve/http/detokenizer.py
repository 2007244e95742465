"""Text of the tokens of an answer, as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ringattn.launch.serve.tokenizer import REPLACEMENT

CONTEXT_TOKENS = 8  # tokens of the prompt before an answer: the text of a token may depend on those before it
MAX_BEGUN = 3  # bytes, and so tokens, of a character that has begun and not ended
MAX_KEPT = CONTEXT_TOKENS + MAX_BEGUN
MAX_UNDECODED = 64  # tokens after which text that never becomes valid is given as it is
MAX_TEXTS = 2**16  # texts of tokens, and of pairs of them, that are cached; 2**16 pairs take about 15 MiB

Decode = Callable[[Sequence[int]], str]


@lru_cache(MAX_TEXTS)
def text_alone(decode: Decode, token: int) -> str:
    """Return the text of a single token."""
    return decode([token])


@lru_cache(MAX_TEXTS)
def text_after(decode: Decode, before: int, token: int) -> str | None:
    """Return the text that a token adds after another token; None where the two are not enough to tell."""
    known, both = text_alone(decode, before), decode([before, token])
    if not known or REPLACEMENT in both or not both.startswith(known):
        return None
    return both[len(known) :]


class Detokenizer:
    """Incremental detokenizer: the pieces together are the text of all tokens.

    A character whose bytes come in several tokens is given with the last of them. If the text so far is whole, a token adds the
    text of it and the token before, less the text of that one alone; both are cached. If one of these texts does not say enough
    (bytes that are not text yet, a token without text), the last few tokens are decoded instead, until the text is whole again.

    Example:
        >>> detokenizer = Detokenizer(lambda tokens: bytes(tokens).decode(errors="replace"))
        >>> [detokenizer.push(token) for token in "aß".encode()], detokenizer.rest()
        (['a', '', 'ß'], '')
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        tokens = list(before[-MAX_KEPT - MAX_BEGUN :])
        # a character that the prompt began belongs to the answer that ends it
        for begun in range(MAX_BEGUN + 1):
            self._tokens = tokens[: len(tokens) - begun]
            text = self._context_text()
            if not text.endswith(REPLACEMENT):
                self._tokens += tokens[len(tokens) - begun :]
                # characters of the text of `_tokens`; None: all of it
                self._emitted = len(text) if begun else None
                return
        self._tokens = tokens
        self._emitted = len(self._context_text()) - 1

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now, which may be empty."""
        tokens = self._tokens
        if self._emitted is None:
            piece = text_after(self._decode, tokens[-1], token) if tokens else None
            if piece is not None:
                tokens.append(token)
                if len(tokens) > MAX_UNDECODED:
                    del tokens[:-MAX_KEPT]
                return piece
            self._emitted = len(self._context_text())
        tokens.append(token)
        text = self._decode(tokens)
        if not text.endswith(REPLACEMENT):
            piece, self._emitted = text[self._emitted :], None
        elif len(tokens) < MAX_UNDECODED:
            # all marks: some tokenizers write one for each byte that stands beside one that is no text yet
            piece = text[self._emitted : len(text.rstrip(REPLACEMENT))]
            self._emitted += len(piece)
        else:
            piece = text[self._emitted :]
            self._emitted = len(self._context_text())
        return piece

    def _context_text(self) -> str:
        """Return the text of the last few tokens, from where a character begins, and keep only these."""
        tokens = self._tokens
        for count in range(CONTEXT_TOKENS, MAX_KEPT + 1):
            text = self._decode(tokens[-count:])
            if REPLACEMENT not in text:
                break
        else:
            count = CONTEXT_TOKENS
            text = self._decode(tokens[-count:])
        del tokens[:-count]
        return text

    def rest(self) -> str:
        """Return the text that was held back, at the end."""
        if self._emitted is None:
            return ""
        text = self._decode(self._tokens)[self._emitted :]
        self._emitted = None
        return text


class StopStrings:
    """Cuts a text that comes in pieces before the first stop string; none of these may be empty.

    Example:
        >>> stops = StopStrings(["END"])
        >>> stops.push("a E"), stops.push("Nb"), stops.push("ENDc"), stops.found
        ('a ', 'ENb', '', True)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._begun = [0] * len(strings)  # characters of each that the text ends with
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece; return the text that certainly comes before any stop string."""
        if self.found:
            return ""
        if not self._strings:
            return piece
        text = self._held + piece
        slots = [place for place in (text.find(string) for string in self._strings) if place >= 0]
        if slots:
            self.found, self._held = True, ""
            return text[: min(slots)]
        self._begun = [_begun(*both, piece) for both in zip(self._strings, self._begun, strict=True)]
        certain = len(text) - max(self._begun)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Return the text that was held back, at the end."""
        held, self._held = self._held, ""
        return held


@lru_cache(1024)
def _borders(string: str) -> list[int]:
    """Return for each prefix of a string how many of its first characters it ends with, but for all of them."""
    borders = [0]
    for x in string[1:]:
        borders.append(_next(string, borders, borders[-1], x))
    return borders


def _next(string: str, borders: list[int], begun: int, x: str) -> int:
    while begun and string[begun] != x:
        begun = borders[begun - 1]
    return begun + (string[begun] == x)


def _begun(string: str, begun: int, piece: str) -> int:
    """Return how many first characters of a string a text ends with after a piece that does not end the string.

    As in Knuth, Morris, Pratt 1977: comparing each suffix took 6 ms a token with sixteen strings of a thousand characters.
    """
    borders = _borders(string)
    for x in piece:
        begun = _next(string, borders, begun, x)
    return begun


def partial_match(string: str, text: str) -> int:
    """Return where a string may begin that a text contains only in part; the length of the text if nowhere.

    Example:
        >>> partial_match("END", "an EEN"), partial_match("END", "an E D")
        (4, 6)
    """
    return len(text) - _begun(string, 0, text[max(0, len(text) - len(string) + 1) :])
