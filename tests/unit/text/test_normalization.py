"""What people wrote survives a vocabulary: the target is composed (NFC) and otherwise as it was."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.text.special import PLACEHOLDER_IDS, SPACE, UNK
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import normalized, train_tokenizer, train_tokenizers

WRITTEN = {
    "zh": "在公园，一只猫唱歌！（是：二）你好吗？",
    "fr": "« Bien sûr… » dit-il : 5 m², H₂O, № 5™, ½\u00a0; 10\u202f000 €",
    "fa": "می\u200cروم و نمی\u200cدانم",
    "he": "שלום\u200f (English\u200e) שָׁלוֹם",
    "ar": "\u061c١٢٣ مرحبا، كيف الحال؟",
    "ja": "ﾃｽﾄ「カッコ」〜ＡＢＣ　全角",
    "ko": "한국어 ㈜회사 ㎏",
    "th": "ภาษาไทย\u200bเขียนติดกัน ๑๒๓",
    "hi": "क्\u200dष नमस्ते। क़लम",
    "ta": "தமிழ் மொழி",
    "vi": "Tiếng Việt rất đẹp",
    "ru": "Ёлка «ёж» — №1",
}


def vocabulary_of(texts: Sequence[str], **settings: object) -> Tokenizers:
    return train_tokenizers(list(texts) * 9, list(texts) * 9, TokenizerSettings(**settings), vocab_size=600)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_targets_are_written_as_they_were(kind: str) -> None:
    tgt = vocabulary_of(WRITTEN.values(), kind=kind).tgt
    assert [tgt.decode(tgt.encode(text)) for text in WRITTEN.values()] == [
        unicodedata.normalize("NFC", text) for text in WRITTEN.values()
    ]
    assert not tgt.rewritten(WRITTEN.values())


def test_the_source_is_read_by_compatibility_but_keeps_joiners_and_direction_marks() -> None:
    src = vocabulary_of([*WRITTEN.values(), "1/2"]).src
    assert src.decode(src.encode("Ａ")) == "A" and src.decode(src.encode("ﾃ")) == "テ"
    for text in ("می\u200cروم", "שלום\u200f", "\u061c١٢٣"):
        assert src.decode(src.encode(text)) == text


def test_spaces_are_collapsed_unless_normalization_is_identity() -> None:
    text = "  a  b\tc "
    both = {"normalization": "identity", "tgt_normalization": "identity"}
    kept = vocabulary_of([text], **both)
    for vocabulary in (kept.src, kept.tgt):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    usual = vocabulary_of([text]).tgt
    assert usual.decode(usual.encode(text)) == "a b\tc"


def test_empty_words_that_a_model_writes_are_no_spaces() -> None:
    usual = vocabulary_of([WRITTEN["ru"]], placeholders=8).tgt
    (space,) = (i for i in range(usual.vocab_size) if usual.pieces([i]) == [SPACE])
    first, second, placeholder = usual.encode("Ёлка"), usual.encode("ёж"), PLACEHOLDER_IDS[0]
    written = usual.decode([space, space, *first, space, space, placeholder, space, space, *second, space])
    assert written == f"Ёлка {chr(0xF0000)} ёж"


@pytest.mark.parametrize("rule", ["nfc", "identity", "nmt_nfkc"])
def test_decomposed_letters_are_composed(rule: str) -> None:
    src = vocabulary_of(["é ệ 각"], normalization=rule).src
    others = () if rule == "nmt_nfkc" else ("e\u0302\u0323", "ê\u0323")  # marks in another order
    for text in ("e\u0301", "e\u0323\u0302", "\u1100\u1161\u11a8", *others):
        assert UNK not in src.encode(text)
        assert src.decode(src.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("rule", ["nfc", "identity", "nmt_nfkc"])
def test_text_without_a_target_has_every_normalization(rule: str) -> None:
    text = "é m² می\u200cروم"
    alone = train_tokenizer([text] * 9, TokenizerSettings(normalization=rule), vocab_size=60)  # type: ignore[arg-type]
    read = unicodedata.normalize("NFKC" if rule == "nmt_nfkc" else "NFC", text)
    assert alone.decode(alone.encode(unicodedata.normalize("NFD", text))) == read


def test_canonical_rules_are_those_of_unicode() -> None:
    every = [chr(c) for c in range(1, 0x30000) if not 0xD800 <= c < 0xE000]
    texts = every + [unicodedata.normalize("NFD", c) for c in every]
    assert list(normalized(texts, "nfc")) == [unicodedata.normalize("NFC", text) for text in texts]


def test_both_sides_share_their_pieces_and_the_source_reads_its_own_characters_only() -> None:
    src, tgt = ["the dog runs", "a bird sings"] * 60, ["der Hund läuft", "ein Vogel singt"] * 60
    found = train_tokenizers(src, tgt, TokenizerSettings(placeholders=8), vocab_size=120)
    assert found.joint and found.src.model != found.tgt.model
    assert found.src.unknown("the söng") == ["ö"] and found.tgt.unknown("ein söng") == ["ö"]
    assert found.src.unknown("thä") == ["ä"] and not found.tgt.unknown("eän")
    assert found.src.has_placeholders and found.tgt.has_placeholders
    assert found.tgt.pieces(PLACEHOLDER_IDS) == [chr(0xF0000 + i) for i in range(8)]


def test_characters_too_rare_to_learn_are_spelled_in_bytes_and_broken_bytes_are_not_written() -> None:
    lines = [f"word{i % 40} and word{i % 7}" for i in range(4000)] + ["word 漢 and", "œ"]
    tgt = train_tokenizers(lines, lines, TokenizerSettings(), vocab_size=1100).tgt
    ids = tgt.encode("word 漢")
    assert tgt.decode(ids) == "word 漢" and UNK not in ids
    assert sum(i in tgt.unreadable_ids for i in ids) == 3 and tgt.unknown("word 漢") == ["漢"]
    assert tgt.decode(ids[:-1]) == "word"
