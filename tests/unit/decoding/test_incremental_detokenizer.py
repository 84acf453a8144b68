"""Text in parts: stop strings that begin and end anywhere in tokens, characters of several tokens."""

from __future__ import annotations

import random

import pytest

import text_runs
from transduce.decoding.generator import IncrementalDetokenizer

TOKENIZER = text_runs.vocabulary(exact=True, size=400)
TEXT = "Zwei Männer 😀 lesen.\n\nEin Hund läuft: aaab, aab!\n"


def in_parts(ids: list[int], stop: list[str]) -> tuple[list[str], IncrementalDetokenizer]:
    growing = IncrementalDetokenizer(TOKENIZER, stop)
    return [*(growing.add([one]) for one in ids), growing.end()], growing


@pytest.mark.parametrize(
    "stop", [[], ["\n\n"], ["aab"], ["b!", "aab,"], ["Hund läuft"], ["😀"], ["Z"], ["xyz", "!\nx"]]
)
def test_the_text_ends_before_the_first_stop_string(stop: list[str]) -> None:
    places = [place for one in stop if (place := TEXT.find(one)) >= 0]
    expected = TEXT[: min(places)] if places else TEXT
    ids = TOKENIZER.encode(TEXT)
    parts, growing = in_parts(ids, stop)
    assert "".join(parts) == expected and growing.is_stopped == bool(places)
    assert growing.ids == ids[: len(growing.ids)] and (bool(places) or growing.ids == ids)
    whole = IncrementalDetokenizer(TOKENIZER, stop)
    assert whole.add(ids) + whole.end() == expected and whole.ids == growing.ids


def test_no_part_has_to_be_taken_back() -> None:
    drawn = random.Random(1)
    for _ in range(300):
        text = "".join(drawn.choices("aab\n", k=30))
        stop = ["".join(drawn.choices("aab\n", k=drawn.randint(2, 4)))]
        parts, growing = in_parts(TOKENIZER.encode(text), stop)
        assert "".join(parts) == text.partition(stop[0])[0]
        assert growing.is_stopped == (stop[0] in text)


def test_characters_of_several_tokens() -> None:
    ids = TOKENIZER.encode("ж😀")
    parts, _ = in_parts(ids, [])
    assert "".join(parts) == "ж😀" and all("\ufffd" not in part for part in parts) and len(ids) > 2
    assert "".join(in_parts(ids[:-1], [])[0]) == "ж\ufffd"
