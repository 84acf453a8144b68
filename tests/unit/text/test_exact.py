"""Vocabularies for running text are lossless; ids with the parts of the text that they stand for."""

from itertools import pairwise
from unicodedata import normalize

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hard_strings import HARD
from transduce.config.settings import TokenizerSettings
from transduce.demo.corpus import demo_pairs
from transduce.text.hub import HubTokenizer
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import EOS, UNK, PieceTokenizer, Tokenizer, load_vocabulary
from transduce.text.training import train_tokenizer

KINDS = ("char", "bpe", "unigram")
LINES = [pair.tgt for pair in demo_pairs("train", 200, seed=3)]


def trained(kind: str) -> Tokenizer:
    settings = TokenizerSettings(kind=kind, exact=True)  # type: ignore[arg-type]
    return train_tokenizer(LINES, settings, vocab_size=500)


EXACT = {kind: trained(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@hypothesis_settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet=" \n\r\taße\u2581\ufeff<0x41>\x00", max_size=40))
@example(text=" \n\n  a\u2581\u2581 \t\x00b\r\n")
@example(text="<s></s><unk><pad><0x41>\n\u2047\ufffd")
@example(text="e\u0301 \u00a0\u3000\u2028x")
def test_decoding_restores_every_text(kind: str, text: str) -> None:
    tokenizer = EXACT[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "a", text]) == [ids, tokenizer.encode("a"), ids]
    assert UNK not in ids and all(EOS < i < tokenizer.vocab_size for i in ids)
    assert b"".join(tokenizer.bytes_of[i] for i in ids) == text.encode("utf-8")


@pytest.mark.parametrize("kind", KINDS)
@hypothesis_settings(max_examples=50, deadline=None)
@given(lines=st.lists(st.text(max_size=12).map(lambda line: line.replace("\n", " ")), max_size=4))
def test_encoding_line_by_line_equals_encoding_the_whole_text(kind: str, lines: list[str]) -> None:
    """This is why text of any size can be encoded in parts."""
    tokenizer, whole = EXACT[kind], "".join(f"{line}\n" for line in lines)
    assert [i for line in lines for i in tokenizer.encode(f"{line}\n")] == tokenizer.encode(whole)


def test_an_incomplete_character_decodes_without_error() -> None:
    tokenizer = EXACT["char"]
    ids = tokenizer.encode("ж")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode([*ids[:1], *tokenizer.encode("a")]) == "\ufffda"


def test_other_vocabularies_are_not_exact() -> None:
    for kind in KINDS:
        settings = TokenizerSettings(kind=kind)  # type: ignore[arg-type]
        assert not train_tokenizer(LINES, settings, vocab_size=200).exact


def test_an_exact_vocabulary_is_still_exact_after_save_and_load(tmp_path) -> None:  # type: ignore[no-untyped-def]
    EXACT["bpe"].save(tmp_path / "tokenizer.model")
    again = load_vocabulary(tmp_path / "tokenizer.model")
    assert again.exact and again.decode(again.encode(" x\n")) == " x\n"


def offset_trained(kind: str, *, exact: bool = False) -> Vocabulary:
    settings = TokenizerSettings(kind=kind, exact=exact)  # type: ignore[arg-type]
    return train_tokenizer(LINES, settings, vocab_size=500)


def listed() -> Vocabulary:
    own = offset_trained("bpe")
    pieces = own.pieces(range(own.vocab_size))
    return PieceTokenizer(own.model, [*pieces[:4], ">>deu<<", *pieces[4:]])


VOCABULARIES = {
    **{kind: offset_trained(kind) for kind in ("unigram", "bpe", "char")},
    **{f"exact {kind}": offset_trained(kind, exact=True) for kind in ("unigram", "bpe", "char")},
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
