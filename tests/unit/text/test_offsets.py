"""Ids with the parts of the text that they stand for."""

from __future__ import annotations

from itertools import pairwise
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hard_strings import HARD
from transduce.config.settings import TokenizerSettings
from transduce.demo.corpus import demo_pairs
from transduce.text.hub import HubTokenizer
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import PieceTokenizer
from transduce.text.training import train_tokenizer

LINES = [pair.tgt for pair in demo_pairs("train", 200, seed=3)]


def trained(kind: str, *, exact: bool = False) -> Vocabulary:
    settings = TokenizerSettings(kind=kind, exact=exact)  # type: ignore[arg-type]
    return train_tokenizer(LINES, settings, vocab_size=500)


def listed() -> Vocabulary:
    own = trained("bpe")
    pieces = own.pieces(range(own.vocab_size))
    return PieceTokenizer(own.model, [*pieces[:4], ">>deu<<", *pieces[4:]])


VOCABULARIES = {
    **{kind: trained(kind) for kind in ("unigram", "bpe", "char")},
    **{f"exact {kind}": trained(kind, exact=True) for kind in ("unigram", "bpe", "char")},
    "marian": listed(),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_hard_strings(name: str) -> None:
    for text in HARD:
        check(VOCABULARIES[name], text)


@pytest.mark.parametrize("name", VOCABULARIES)
@hypothesis_settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40) | st.text(alphabet=" \n\r\taßeÄ½ﬁ…\u2581\ufeff<0x41>\x00\ud800", max_size=40))
def test_any_text(name: str, text: str) -> None:
    check(VOCABULARIES[name], text)


def check(vocabulary: Vocabulary, text: str) -> None:
    ids, places = vocabulary.encode_with_offsets(text)
    assert ids == vocabulary.encode(text) and len(places) == len(ids)
    assert all(0 <= first <= last <= len(text) for first, last in places)
    assert all(one[0] <= two[0] and one[1] <= two[1] for one, two in pairwise(places)), (text, places)
    covered = {i for first, last in places for i in range(first, last)}
    left_out = "".join(c for i, c in enumerate(text) if i not in covered)
    assert not any(c.isalnum() for c in left_out), (text, places, left_out)


@pytest.mark.parametrize("name", [name for name in VOCABULARIES if name != "exact char"])
def test_each_word_is_at_its_place(name: str) -> None:
    text = "  Ｅine  ½ ﬁne Frau…"
    vocabulary = VOCABULARIES[name]
    for word in ("Ｅine", "ﬁne", "Frau"):
        start = text.index(word)
        ids, places = vocabulary.encode_with_offsets(text)
        first = [a + len(text[a:]) - len(text[a:].lstrip()) for a, _ in places]
        inside = [i for i, a in zip(ids, first, strict=True) if start <= a < start + len(word)]
        assert vocabulary.decode(inside).strip() in (word, normalize("NFKC", word)), (word, places)


def test_hub_vocabularies() -> None:
    library = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[SEP]": 1, "ein": 2, "##e": 3, "frau": 4}
    model = library.Tokenizer(library.models.WordPiece(words, unk_token="[UNK]"))
    model.normalizer = library.normalizers.BertNormalizer()
    model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    vocabulary = HubTokenizer(model.to_str().encode(), [-1, 0, -1, 1, 2, 3, 4])
    assert vocabulary.encode_with_offsets(" Eine  FRAU ?") == ([4, 5, 6, 1], [(1, 4), (4, 5), (7, 11), (12, 13)])
