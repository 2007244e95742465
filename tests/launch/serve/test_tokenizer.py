"""Tokens become text piece by piece: the pieces are the text, for every kind of tokenizer, with and without cached texts."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.launch.serve.http import detokenizer
from ringattn.launch.serve.http.detokenizer import Detokenizer
from ringattn.launch.serve.tokenizer import REPLACEMENT, ByteTokenizer, PretrainedTokenizer, TextTooLongError

WORDS = "the ring of keys and the ring of values, straße, naïve; it's  two  blanks, 日本 and 🙂.\n"


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([WORDS] * 20, trainer)
    inner.add_tokens(["plain added", "日"])
    return inner


def byte_fallback() -> Any:
    """Tokenizer like that of Llama 2 and Gemma: blanks are part of words, rare characters are bytes, the first blank is dropped."""
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{x:02X}>" for x in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁ring", "the", "ring", "s", ",", "▁日", "本", "é", "n't", "."]
    inner = Tokenizer(models.BPE(vocab={x: n for n, x in enumerate(pieces)}, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def word_pieces() -> Any:
    from tokenizers import Tokenizer, decoders, models

    pieces = ["[UNK]", "[CLS]", "the", "ring", "##s", "##ing", "don", "'", "t", ".", ",", "日", "##本", "naïve"]
    inner = Tokenizer(models.WordPiece(vocab={x: n for n, x in enumerate(pieces)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(["[CLS]"])
    return inner


def metaspace() -> Any:
    from tokenizers import Tokenizer, decoders, models

    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("ring", -2.0), ("▁ring", -2.0), ("本", -3.0)]
    inner = Tokenizer(models.Unigram(pieces, 0, False))
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    return inner


KINDS: dict[str, Callable[[], Any]] = {one.__name__: one for one in (byte_level, byte_fallback, word_pieces, metaspace)}


@cache
def decoder(kind: str) -> tuple[Callable[[Sequence[int]], str], int]:
    """Decode function of a kind of tokenizer, and its number of tokens."""
    if kind == "bytes":
        return ByteTokenizer().decode, ByteTokenizer().vocab_size
    inner = KINDS[kind]()
    return lambda tokens: inner.decode(list(tokens), skip_special_tokens=True), inner.get_vocab_size()


def pieces_of(decode: Any, tokens: Sequence[int], before: Sequence[int]) -> list[str]:
    pieces = Detokenizer(decode, before)
    return [*(pieces.push(token) for token in tokens), pieces.rest()]


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), before=st.integers(0, 12), count=st.integers(0, 60))
def test_pieces_are_the_text_with_and_without_cached_texts(kind, seed, before, count):
    decode, vocabulary = decoder(kind)
    draw = random.Random(seed)
    few = [draw.randrange(vocabulary) for _ in range(draw.choice([3, 30]))]  # pairs come again
    tokens = [draw.choice(few) for _ in range(before + count)]
    found = pieces_of(decode, tokens[before:], tokens[:before])
    prompt, whole = decode(tokens[:before]), decode(tokens)
    # a run of byte tokens that is no text is marks, those of its bytes that were text before too: no stream can say that
    if kind != "byte_fallback" or REPLACEMENT not in whole:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(detokenizer, "text_after", lambda *_: None)
            assert found == pieces_of(decode, tokens[before:], tokens[:before])
    # bytes that are no text, and tokens without any, are only seen in the last few
    windows = [tokens[x : x + detokenizer.CONTEXT_TOKENS] for x in range(len(tokens) - detokenizer.CONTEXT_TOKENS + 1)]
    if REPLACEMENT not in whole and whole.startswith(prompt) and all(map(decode, windows)):
        assert prompt + "".join(found) == whole


@pytest.mark.parametrize(("kind", "first"), [("bytes", 0), ("byte_fallback", 3)])
def test_characters_of_several_bytes_are_never_split(kind: str, first: int):
    decode, _ = decoder(kind)
    tokens = [first + byte for byte in "日🙂本é🙂🙂".encode()]
    for cut in range(len(tokens)):
        pieces = pieces_of(decode, tokens[cut:], tokens[:cut])
        begun = tokens[:cut]
        while decode(begun).endswith(REPLACEMENT):
            begun = begun[:-1]
        assert decode(begun) + "".join(pieces) == "日🙂本é🙂🙂"
        assert REPLACEMENT not in "".join(pieces)


def test_texts_of_known_pairs_are_cached():
    asked: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        asked.append(len(tokens))
        return ByteTokenizer().decode(tokens)

    tokens = WORDS.encode("ascii", "ignore") * 3
    pieces_of(decode, tokens, b"before")
    assert max(asked[1:]) <= 2
    asked.clear()
    assert "".join(pieces_of(decode, tokens, b"before")) == tokens.decode()
    assert asked == [6]


def test_tokenizers_with_their_own_decode_are_used_as_they_are(tmp_path: Path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>").save_pretrained(tmp_path)
    plain = PretrainedTokenizer(tmp_path, frozenset(), 400)
    tokens = [*plain.encode(WORDS), *plain.stops, *plain.encode("日 plain added")]
    wanted = plain.inner.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert plain.decode(tokens) == wanted
    assert plain._decoder is not None

    class Own(type(plain.inner)):
        def _decode(self, *args: Any, **how: Any) -> str:
            return super()._decode(*args, **how).upper()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", lambda folder, **_: Own.from_pretrained(folder))
        own = PretrainedTokenizer(tmp_path, frozenset(), 400)
    assert own.decode(tokens) == wanted.upper()


@cache
def pretrained(kind: str, normalizer: str | None = None) -> PretrainedTokenizer:
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast

    inner = KINDS[kind]()
    if normalizer is not None:
        inner.normalizer = getattr(normalizers, normalizer)()
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
        return PretrainedTokenizer(Path(folder), frozenset(), 400)


TEXTS = st.text(
    st.sampled_from("the ring of keys,straße🙂日\u1100\u1161\u11a8  ") | st.characters(codec="utf-8"), max_size=40
)


@pytest.mark.parametrize(("kind", "normalizer"), [("byte_level", None), ("byte_level", "NFC"), ("byte_fallback", None)])
@settings(deadline=None, max_examples=100)
@given(TEXTS)
def test_the_bytes_of_a_text_bound_its_tokens_from_below(kind, normalizer, text):
    tokenizer = pretrained(kind, normalizer)
    tokens = tokenizer.encode(text)
    assert tokens == tokenizer.inner(text)["input_ids"]
    assert tokenizer.max_token_bytes is not None
    assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokens)


@pytest.mark.parametrize(
    ("kind", "normalizer"),
    [("word_pieces", None), ("metaspace", None), ("byte_level", "NFKC"), ("byte_level", "Strip")],
)
def test_tokenizers_that_lose_text_have_no_such_bound(kind, normalizer):
    assert pretrained(kind, normalizer).max_token_bytes is None


def test_a_text_that_is_too_long_is_not_tokenized():
    tokenizer = pretrained("byte_level")
    most = tokenizer.max_token_bytes
    assert most is not None
    assert most == len("plain added")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_encoder", None)
        patch.setattr(tokenizer, "inner", None)
        with pytest.raises(TextTooLongError, match="6"):
            tokenizer.encode("x" * (5 * most + 1), 5)


def test_several_threads_tokenize_at_a_time():
    tokenizer = pretrained("byte_level")
    texts = [WORDS * n for n in range(200)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


def may_begin(string: str, said: str) -> int:
    return next((x for x in range(len(said)) if string.startswith(said[x:])), len(said))


@given(st.text("abE", min_size=1, max_size=6), st.text("abE", max_size=12))
def test_a_partial_match_is_the_longest_prefix_at_the_end(string, said):
    if string not in said:
        assert detokenizer.partial_match(string, said) == may_begin(string, said)
