"""Vocabularies with <mask>, and text with masks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.text.special import BOS, EOS, MASK, MASK_PIECE, PAD, UNK, encode_with_masks
from transduce.text.tokenizer import Tokenizer
from transduce.text.training import train_tokenizer

LINES = ["the capital of France is Paris.", "the capital of Spain is Madrid.", "is the dog of France here?"] * 20


@pytest.fixture(scope="module", params=["unigram", "bpe", "char"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(LINES, TokenizerSettings(kind=request.param, mask=True), vocab_size=60)


def test_the_mask_token_has_its_own_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces([PAD, UNK, BOS, EOS, MASK]) == ["<pad>", "<unk>", "<s>", "</s>", MASK_PIECE]
    exact = train_tokenizer(LINES, TokenizerSettings(mask=True, exact=True), vocab_size=340)
    assert exact.pieces([MASK]) == [MASK_PIECE] and exact.decode(exact.encode("a\n <b>")) == "a\n <b>"
    plain = train_tokenizer(LINES, TokenizerSettings(), vocab_size=60)
    assert plain.pieces([MASK]) != [MASK_PIECE]


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("the capital of France is <mask>.", "the capital of France is Paris."),
        ("<mask> capital of France", "the capital of France"),
        ("the <mask> of <mask>", None),
        ("the<mask>of", None),
    ],
)
def test_a_mask_replaces_a_word_and_its_space(tokenizer: Tokenizer, text: str, filled: str | None) -> None:
    ids = encode_with_masks(tokenizer, text)
    pieces = tokenizer.pieces(ids)
    assert ids.count(MASK) == text.count(MASK_PIECE)
    assert not any(a == "\u2581" and b == MASK_PIECE for a, b in pairwise(pieces))
    if filled is not None:  # the text around the mask is the text around the word
        whole = tokenizer.encode(filled)
        place = ids.index(MASK)
        assert whole[:place] == ids[:place] and whole[len(whole) - (len(ids) - place - 1) :] == ids[place + 1 :]
