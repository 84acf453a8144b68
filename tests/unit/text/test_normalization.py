"""What people wrote survives a vocabulary: composed (NFC), otherwise as it was, or kept as a whole word."""

import unicodedata
from collections.abc import Sequence

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.text.placeholders import PLACEHOLDERS, Masked, prepare, restore
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


A, B, C, D = PLACEHOLDERS[:4]
LINES = ["The old doctor calls the dog - now.", "A man can't run, or jump: (why?)", "A man [who] has quiz books."] * 40


def masked_by(lines: list[str], text: str) -> Masked:
    """The text as prepared for a model whose vocabulary has the characters of these lines."""
    known = train_tokenizers(lines, lines, TokenizerSettings(placeholders=8), vocab_size=90).src
    return prepare(text, known, known.encode(text))


UNSPACED = {
    "km": ["ឆ្កែធំឃើញសៀវភៅថ្មីថ្ងៃនេះ", "អានីទិញផ្ទះចាស់ ថ្ងៃស្អែក"],
    "lo": ["ໝາໃຫຍ່ເຫັນ ປຶ້ມໃໝ່ມື້ນີ້", "ອານີຊື້ເຮືອນເກົ່າ ມື້ອື່ນ"],
    "th": ["หมาใหญ่เห็นหนังสือใหม่วันนี้", "แม่ซื้อบ้านเก่าพรุ่งนี้"],
    "my": ["ခွေးကြီးက စာအုပ်ကိုမြင်တယ်", "အမေက အိမ်ကိုဝယ်တယ်"],
    "bo": ["ཁྱི་ཆེན་པོས་དེབ་མཐོང་།", "ཨ་མས་ཁང་པ་ཉོས།"],
    "jv": ["ꦲꦱꦸꦒꦼꦝꦺꦤꦺꦤꦺꦴꦤ꧀", "ꦲꦶꦧꦸꦠꦸꦏꦸꦲꦺꦴꦩꦃ"],
}


@pytest.mark.parametrize(
    ("language", "text", "parts"),
    [
        ("km", "ឆ្កែឃើញ ភ្នំពេញ ថ្មី", ["ភ្នំពេញ"]),  # ព is not in the training text
        ("km", "ឆ្កែឃើញ ហ៊ុនសែន ថ្មី", ["ហ៊ុនសែន"]),
        ("km", "ឆ្កែ\u200bភ្នំពេញ\u200bថ្មី", ["ភ្នំពេញ"]),
        ("km", "ឆ្កែ “ព្រះ” ថ្មី", ["“ព្រះ”"]),
        ("km", "ឆ្កែធំឃើញសៀវភៅភ្នំព្រះថ្មីថ្ងៃនេះ", ["ព្រះ"]),  # too long to be a word: a syllable
        ("lo", "ໝາເຫັນ ໂຮງຮຽນ ມື້ນີ້", ["ໂຮງຮຽນ"]),
        ("lo", "ໝາໃຫຍ່ເຫັນປຶ້ມໂຮງໃໝ່ມື້ນີ້ ມື້ນີ້", ["ໂຮງ"]),
        ("th", "หมาเห็น วุฒิ ใหม่", ["วุฒิ"]),
        ("th", "หมาใหญ่เห็นหนังสือเฒ่าใหม่วันนี้", ["เฒ่า"]),
        ("my", "ခွေးကြီးက ပုဂံ ကိုမြင်တယ်", ["ပုဂံ"]),
        ("bo", "ཁྱི་གཞིས་དེབ་མཐོང་།", ["གཞིས"]),  # the sign between syllables is no part
        ("jv", "ꦲꦱꦸ ꦪꦺꦴꦒꦾ ꦤꦺꦴꦤ꧀", ["ꦪꦺꦴꦒꦾ"]),
        ("th", "หมาเห็น Zürich ใหม่", ["Zürich"]),
    ],
)
def test_words_of_scripts_without_spaces_are_kept_whole(language: str, text: str, parts: list[str]) -> None:
    masked = masked_by(UNSPACED[language] * 60, text)
    assert list(masked.parts) == parts and masked.unreadable == tuple(parts)
    assert restore(masked.text, masked) == text


@pytest.mark.parametrize(
    ("text", "read", "parts"),
    [
        ("The old Ødegård(1) runs", f"The old {A} runs", ["Ødegård(1)"]),
        ("The old (Ødegård) runs", f"The old ({A}) runs", ["Ødegård"]),
        ("The dog_man() runs", f"The {A} runs", ["dog_man()"]),
        ("The old [dog Ødegård[1]] runs", f"The old [dog {A}] runs", ["Ødegård[1]"]),
        ("The dog (Ødegård()) runs", f"The dog {A} runs", ["(Ødegård())"]),
        ("The __dog__.py runs", f"The {A} runs", ["__dog__.py"]),
        ("The (https://a.b/c_(d)) runs", f"The {A} runs", ["(https://a.b/c_(d))"]),
        ("The (dog, https://a.b/c) runs", f"The (dog, {A}) runs", ["https://a.b/c"]),
        ("The [old dog](http://a.b/c) runs", f"The {A} old dog {B} runs", ["[", "](http://a.b/c)"]),
        ("The ![dog](a_(1).png) runs", f"The {A} dog {B} runs", ["![", "](a_(1).png)"]),
        ("The [Ødegård](http://a.b) runs", f"The {A} runs", ["[Ødegård](http://a.b)"]),
        ("The dog[^1] runs", f"The {A} runs", ["dog[^1]"]),
        ("The dog [^1] runs", f"The dog {A} runs", ["[^1]"]),
        ("The _old dog_ runs", f"The {A} old dog {B} runs", ["_", "_"]),
        ("The __dog__, ___man___ runs", f"The {A} dog {B}, {C} man {D} runs", ["__", "__", "___", "___"]),
        ("The dog_man and _man and _a_b_ run", f"The {A} and {B} and {C} run", ["dog_man", "_man", "_a_b_"]),
        ("The _Ødegård_ runs", f"The {A} runs", ["_Ødegård_"]),
    ],
)
def test_code_links_and_emphasis_are_kept_with_both_signs_of_a_pair(text: str, read: str, parts: list[str]) -> None:
    masked = masked_by(LINES, text)
    assert (masked.text, list(masked.parts)) == (read, parts)
    assert restore(masked.text, masked) == text
