"""Running text in sentences, and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.serving.texts import LONGEST, joined_parts, split_sentences

PIECES = [
    *("a", "B", ". ", "! ", "B\u00a0.", "J. ", "\n", "\r\n", " ", "\u2028", "\u3000", "。", "？", "Mr. ", "1.5"),
    *("'", '"', "é", "中", "ひ", "한", "😀", "…", "\x00", "\x1c", "עברית. ", "\u202f", "नमस्ते। "),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(["en", "de-AT", "zh", "hi", "x"]))
def test_a_text_is_joined_from_its_parts(text: str, language: str) -> None:
    parts = split_sentences(text, language)
    assert "".join(parts) == text and len(parts) >= 1
    assert all(sentence == sentence.strip() and "\n" not in sentence for sentence in parts[::2])
    assert not any(space.strip() for space in parts[1::2])
    assert "".join(joined_parts(parts[::2], parts, language, language)) == text


@pytest.mark.parametrize(
    ("language", "text", "sentences"),
    [
        (
            "en",
            "Mr. Smith paid 3.5 dollars. Why?  Nobody knows.",
            ["Mr. Smith paid 3.5 dollars.", "Why?", "Nobody knows."],
        ),
        ("de", "Das kam z.B. am 3. Oktober. Gut!", ["Das kam z.B. am 3. Oktober.", "Gut!"]),
        ("zh", "你好。今天天气很好！", ["你好。", "今天天气很好！"]),
        ("ja", "こんにちは。元気ですか？", ["こんにちは。", "元気ですか？"]),
        ("ko", "안녕하세요. 갈까요?", ["안녕하세요.", "갈까요?"]),
    ],
)
def test_sentences(language: str, text: str, sentences: list[str]) -> None:
    assert split_sentences(text, language)[::2] == sentences


def test_line_breaks_stay_and_spaces_are_those_of_the_target_language() -> None:
    parts = split_sentences("你好。今天！\n\n好。", "zh")
    assert "".join(joined_parts(["Hello.", "Today!", "Good."], parts, "zh", "en")) == "Hello. Today!\n\nGood."
    parts = split_sentences("Hello.  Today!\r\n- Good. ", "en")
    assert "".join(joined_parts(["你好。", "今天！", "- 好。"], parts, "en", "zh")) == "你好。今天！\r\n- 好。 "


def test_a_text_without_ends_of_sentences_is_cut() -> None:
    for text in ("a, b " * 2000, "x" * 5000):
        parts = split_sentences(text, "en")
        assert "".join(parts) == text and max(map(len, parts)) <= LONGEST
