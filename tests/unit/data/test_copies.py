"""Training text with placeholders for words that are the same on both sides, or each other's translation."""

from __future__ import annotations

import random
from dataclasses import replace

from transduce.config.settings import TokenizerSettings
from transduce.data.copies import Copies
from transduce.data.pairs import Pair
from transduce.text.placeholders import PLACEHOLDERS, placeholders_in
from transduce.text.training import train_tokenizers

NOUNS = {"dog": "Hund", "cat": "Katze", "house": "Haus", "tree": "Baum", "car": "Auto"}


def corpus(n: int) -> list[tuple[str, str]]:
    draw = random.Random(1)
    rows = []
    for i in range(n):
        noun = draw.choice(list(NOUNS)) if i % 12 == 0 else "man"
        name = f"Name{draw.randrange(9000)}"
        rows.append((f"the {noun} sees {name} .", f"der {NOUNS.get(noun, 'Mann')} sieht {name} ."))
    return rows


def test_words_of_both_sides_become_the_same_placeholders_in_few_pairs() -> None:
    rows = corpus(6000)
    tokenizers = train_tokenizers(*zip(*rows, strict=True), TokenizerSettings(placeholders=8), vocab_size=200)  # type: ignore[arg-type]
    copies = Copies.learn(tokenizers, rows, seed=1)
    assert ("dog", "Hund") in copies.translations and ("the", "der") not in copies.translations
    pairs = [Pair(src, tgt, "file", i, "") for i, (src, tgt) in enumerate(rows)]
    masked = [copies.masked(pair, tokenizers.src.encode(pair.src)) for pair in pairs]
    changed = [(old, new) for old, new in zip(pairs, masked, strict=True) if new is not old]
    assert 0.01 < len(changed) / len(rows) < 0.02
    for _, new in changed:
        assert placeholders_in(new.src) and sorted(placeholders_in(new.src)) == sorted(placeholders_in(new.tgt))
    used = {sign for _, new in changed for sign in placeholders_in(new.src)}
    assert len(used) == 8 and any(len(placeholders_in(new.src)) > 1 for _, new in changed)
    again = [copies.masked(pair, tokenizers.src.encode(pair.src)) for pair in pairs]
    assert again == masked


def test_a_pair_with_other_words_has_no_links_between_words() -> None:
    rows = corpus(600)
    tokenizers = train_tokenizers(*zip(*rows, strict=True), TokenizerSettings(placeholders=8), vocab_size=200)  # type: ignore[arg-type]
    copies = replace(Copies.learn(tokenizers, rows, seed=1), share=1.0)
    texts = [*rows, ("the dog sees Øde Gård .", "der Hund sieht Øde Gård ."), ("Ød sees", "Ød sieht")]
    pairs = [Pair(src, tgt, "file", i, "0-0 1-1") for i, (src, tgt) in enumerate(texts)]
    n_words, have_links = set[int](), set[bool]()
    for pair in pairs:
        masked = copies.masked(pair, tokenizers.src.encode(pair.src))
        n_words.add(len(masked.src.split()) - len(pair.src.split()))
        have_links.add(bool(masked.links))
        assert bool(masked.links) == (len(masked.src.split()) == len(pair.src.split()))
    assert n_words == {-1, 0, 1, 2} and have_links == {True, False}


def test_words_that_the_source_cannot_read_always_become_placeholders() -> None:
    rows = corpus(600)
    tokenizers = train_tokenizers(*zip(*rows, strict=True), TokenizerSettings(placeholders=8), vocab_size=200)  # type: ignore[arg-type]
    copies = Copies.learn(tokenizers, rows, seed=1)
    pair = Pair("the dog sees Ødegård .", "der Hund sieht Ødegård .", "file", 1, "")
    masked = copies.masked(pair, tokenizers.src.encode(pair.src))
    (sign,) = placeholders_in(masked.src)
    assert (masked.src, masked.tgt) == (f"the dog sees {sign} .", f"der Hund sieht {sign} .")
    other = pair._replace(tgt="der Hund sieht jemand .")
    assert copies.masked(other, tokenizers.src.encode(other.src)) is other


def test_a_pair_that_contains_the_characters_of_placeholders_gets_none() -> None:
    rows, sign = corpus(600), PLACEHOLDERS[0]
    tokenizers = train_tokenizers(*zip(*rows, strict=True), TokenizerSettings(placeholders=8), vocab_size=200)  # type: ignore[arg-type]
    copies = replace(Copies.learn(tokenizers, rows, seed=1), share=1.0)
    for number in range(20):
        pair = Pair(f"{sign} dog {sign} Name{number}", f"Hund Name{number}", "file", 1)
        assert copies.masked(pair, tokenizers.src.encode(pair.src)) is pair
