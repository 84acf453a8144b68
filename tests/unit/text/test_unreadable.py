"""A part that a vocabulary cannot read is a whole word, and code, links and emphasis are kept with both their signs."""

from __future__ import annotations

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.text.placeholders import PLACEHOLDERS, Masked, prepare, restore
from transduce.text.training import train_tokenizers

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
