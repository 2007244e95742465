"""Grammars of answers, compiled by llguidance: which tokens may come next.

Rank 0 samples, so only its masks count. The HTTP process compiles a grammar first, to refuse it with a status.

Note [Grammars]
    A mask needs the token before it, which the host learns after the next step was started (Note [Asynchronous steps] of
    scheduler.py). So an answer with a grammar is left out of that step, and of all steps until its mask is there. Threads compute
    masks (`TokenGrammar.advance`), and llguidance runs without the interpreter's lock: a slow grammar delays its own answer only.
    Its work per token, its memory, and the size of a grammar are bounded (`_limits`); a request that exceeds them fails by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn.launch.serve.tokenizer import PretrainedTokenizer, Tokenizer

MAX_BYTES = 2**17
"""Bytes of a grammar; one of this size that llguidance takes compiles in less than a second."""
MAX_SYMBOLS = 20_000  # of a compiled grammar
MAX_STATES = 2**14  # of its lexer: some 30 MiB
WHITESPACE = "[ \\n\\r\\t]{0,40}"
"""White space between the parts of JSON: without an end a model that repeats itself would fill its answer with it."""
TEXT = "/(.|\\n)*/"  # any text, in Lark's syntax
NEEDED = "needs llguidance on the server; install it there with: pip install 'ringattn[structured]'"


class GrammarError(ValueError):
    """A grammar cannot be compiled, or an answer has become too complex for it."""


@dataclass
class Grammar:
    """A grammar in Lark's syntax, whose rule `start` may refer to `parts` by @name.

    Attributes:
        rules: Lines of rules.
        parts: Name to kind and definition: "json" (a JSON schema), "json_lenient" (the same, keywords that are unknown are
            ignored), "regex", "choice" (texts), or "grammar" (in the syntax of Lark or GBNF).
    """

    rules: list[str]
    parts: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def check_size(self) -> None:
        """Raise GrammarError for too many bytes."""
        size = len(json.dumps([self.rules, self.parts]))
        if size > MAX_BYTES:
            raise GrammarError(f"it must have at most {MAX_BYTES} bytes, got {size}; ask for a smaller one")

    def text(self) -> str:
        """Return the grammar as llguidance takes it; raise GrammarError if a part has another syntax."""
        parts = [{"name": name, **_part(kind, what)} for name, (kind, what) in self.parts.items()]
        return json.dumps({"grammars": [{"name": "top", "lark_grammar": "\n".join(self.rules)}, *parts]})


def _part(kind: str, what: Any) -> dict[str, Any]:
    if kind in ("json", "json_lenient"):
        if not isinstance(what, dict):  # true and false are schemas
            return {"json_schema": what}
        options = {"whitespace_pattern": WHITESPACE, "lenient": kind == "json_lenient"}
        return {"json_schema": {**what, "x-guidance": options}}
    if kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(json.dumps, what))}
    from llguidance import LLMatcher, grammar_from

    if kind == "regex":
        return {"lark_grammar": json.loads(LLMatcher.grammar_from_regex(what))["grammars"][0]["lark_grammar"]}
    try:
        return {"lark_grammar": grammar_from("grammar", what)}
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{type(error).__name__}: {error}") from None


class GrammarCompiler:
    """Compiles grammars for the tokens of a tokenizer; making one takes a second.

    Raises ImportError without llguidance, and GrammarError for a tokenizer that it cannot read.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLParserLimits

        self._vocabulary = _vocabulary(tokenizer)
        self._limits: Any = LLParserLimits(
            max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES, verbose_errors=False
        )

    def compile(self, text: str) -> TokenGrammar:
        """Return the state of a grammar (`Grammar.text`) before the first token; raise GrammarError. In any thread."""
        from llguidance import LLMatcher

        return TokenGrammar(LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits))


def make_compiler(tokenizer: Tokenizer) -> GrammarCompiler | str:
    """Return the compiler of a tokenizer, or what is missing for one."""
    try:
        return GrammarCompiler(tokenizer)
    except ImportError:
        return NEEDED
    except GrammarError as error:
        return str(error)


class TokenGrammar:
    """A grammar and the tokens of an answer so far.

    Attributes:
        mask: Bits of the tokens that may come next, `ceil(vocab / 8)` uint8, the first token in the lowest bit.
    """

    def __init__(self, matcher: Any, mask: Tensor | None = None) -> None:
        self._matcher = matcher
        self.mask = self._next_mask() if mask is None else mask

    def copy(self) -> TokenGrammar:
        """Return the grammar of another answer."""
        return TokenGrammar(self._matcher.deep_copy(), self.mask)

    def advance(self, token: int) -> None:
        """Add a token that the mask allows, and compute the next mask; raise GrammarError at the limits."""
        self._matcher.consume_token(token)
        self.mask = self._next_mask()

    def _next_mask(self) -> Tensor:
        found = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(str(self._matcher.get_error()).partition("\n")[0])
        return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def _vocabulary(tokenizer: Tokenizer) -> Any:
    """Return the vocabulary of a tokenizer as llguidance reads it; tokens without bytes are never sampled, unless named."""
    from llguidance import LLTokenizer, TokenizerWrapper

    size = tokenizer.vocab_size
    stops = sorted(token for token in tokenizer.stops if token < size)
    if isinstance(tokenizer, PretrainedTokenizer):
        known = set(tokenizer.inner.get_vocab().values())  # the model may have fewer tokens, or more
        size, stops = max(size, *(token + 1 for token in known)), [token for token in stops if token in known]
    if not stops:
        raise GrammarError("needs a model with a token that ends answers")
    if isinstance(tokenizer, PretrainedTokenizer):
        if (definition := tokenizer.definition()) is None:
            raise GrammarError("needs a tokenizer of the tokenizers library")
        try:
            return LLTokenizer(definition, n_vocab=size, eos_token=stops)
        except ValueError as error:
            raise GrammarError(f"needs a tokenizer that llguidance can read, got one with: {error}") from None
    raw = [None if token in stops else tokenizer.token_bytes(token) for token in range(size)]
    return LLTokenizer(TokenizerWrapper(_Bytes(raw, stops)), eos_token=stops)


class _Bytes:
    """Tokens with their bytes, as llguidance reads a vocabulary; a text is tokenized by the longest token that fits."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes | None], stops: list[int]) -> None:
        self.tokens = [b"" if one is None else one for one in tokens]
        self.eos_token_id = stops[0]
        self.special_token_ids = [token for token, one in enumerate(tokens) if one is None]
        self._of_bytes: Mapping[bytes, int] = {one: token for token, one in enumerate(self.tokens) if one}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        data, found = text.encode() if isinstance(text, str) else text, []
        while data:
            sizes = (size for size in range(self._longest, 0, -1) if data[:size] in self._of_bytes)
            size = next(sizes, len(data))  # the rest has no tokens
            found += [self._of_bytes[data[:size]]] if data[:size] in self._of_bytes else []
            data = data[size:]
        return found
