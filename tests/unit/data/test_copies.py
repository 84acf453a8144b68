"""Copies of training text: with placeholders for words of both sides, and in other capitals."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transduce.config.settings import Settings, TokenizerSettings
from transduce.data.copies import FORMS, CaseCopies, Copies, capitals, title_case, without_stop
from transduce.data.pairs import Pair
from transduce.data.store import TokenStore
from transduce.errors import SettingsError
from transduce.pipeline import prepare
from transduce.runs.folder import RunFolder
from transduce.tasks.resolve import check
from transduce.text.placeholders import PLACEHOLDERS, placeholders_in
from transduce.text.tokenizer import load_tokenizers
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


ALL = CaseCopies(1.0, 1, ("en", "de"))


@pytest.mark.parametrize(
    ("form", "language", "text", "expected"),
    [
        (capitals, "de", "Größe: 5 <b>km</b> &quot;weit&quot;", "GRÖSSE: 5 <b>KM</b> &quot;WEIT&quot;"),
        (capitals, "tr", "kırmızı dil", "KIRMIZI DİL"),
        (capitals, "el", "Καλημέρα κόσμε", "ΚΑΛΗΜΕΡΑ ΚΟΣΜΕ"),
        (capitals, "ka", "გამარჯობა", "გამარჯობა"),
        (capitals, "zh", "你好。", "你好。"),
        (title_case, "en", "it's a well-known “red” house.", "It's A Well-Known “Red” House."),
        (title_case, "en", "it isn&apos;t <i class='a'>so</i> far", "It Isn&apos;t <i class='a'>So</i> Far"),
        (title_case, "tr", "iyi ılık", "İyi Ilık"),
        (without_stop, "en", "A dog runs .", "A dog runs"),
        (without_stop, "en", "And then...", "And then..."),
        (without_stop, "zh", "你好。", "你好"),
        (without_stop, "en", ".", "."),
    ],
)
def test_forms(form: Any, language: str, text: str, expected: str) -> None:
    assert form(text, language) == expected


def test_each_form_is_used_and_a_pair_always_has_the_same_copy() -> None:
    pairs = [Pair(f"Dog number {i} runs .", f"Hund Nummer {i} rennt .", "f", i, "0-0 2-2") for i in range(3000)]
    copies = [ALL.copy_of(pair) for pair in pairs]
    assert None not in copies and copies == list(map(ALL.copy_of, pairs))
    used = [0] * len(FORMS)
    for pair, copy in zip(pairs, copies, strict=True):
        assert copy is not None
        forms = [form for form in FORMS if (form(pair.src, "en"), form(pair.tgt, "de")) == copy[:2]]
        used[FORMS.index(forms[0])] += 1
        assert bool(copy.links) == (forms[0] is not without_stop)
    assert all(900 < n < 1100 for n in used)
    tenth = CaseCopies(0.1, 1, ("en", "de"))
    drawn = [copy for copy in map(tenth.copy_of, pairs) if copy]
    assert 240 < len(drawn) < 360 and all(copy in copies for copy in drawn)
    assert list(map(CaseCopies(0.1, 2, ("en", "de")).copy_of, pairs)) != list(map(tenth.copy_of, pairs))


def test_a_source_without_case_has_no_copy_with_capitals() -> None:
    chinese = [Pair(f"你好{i}。", f"Hello {i}.", "f", i) for i in range(100)]
    copies = [copy for copy in map(CaseCopies(1.0, 1, ("zh", "en")).copy_of, chinese) if copy]
    assert copies and all(copy.tgt.startswith("Hello") and copy.src[-1] != "。" for copy in copies)
    questions = [Pair(f"你好{i}?", f"Hello {i}.", "f", i) for i in range(100)]
    assert not any(map(ALL.copy_of, questions))


def settings_of(folder: Path, **data: Any) -> Settings:
    return Settings.from_mapping(
        {
            "data": {"train": [{"src": folder / "a.en", "tgt": folder / "a.de"}], **data},
            "model": {"preset": "tiny"},
            "tokenizer": {"vocab_size": 150, "placeholders": 0},
            "training": {"max_updates": 2},
        }
    )


def test_copies_are_in_the_store_and_the_vocabulary_but_not_of_held_out_pairs(tmp_path: Path) -> None:
    """The report counts no copies."""
    sentences = [f"the dog number {i} runs fast in the park." for i in range(1500)]
    (tmp_path / "a.en").write_text("\n".join(sentences) + "\n", encoding="utf-8")
    (tmp_path / "a.de").write_text("\n".join(sentences).replace("dog", "Hund") + "\n", encoding="utf-8")
    stores, vocabularies = [], []
    for share in (0.4, 0.0):
        prepare(settings_of(tmp_path, case_augmentation=share), tmp_path / f"{share}")
        stores.append(TokenStore.open(tmp_path / f"{share}" / "tokens" / "train"))
        vocabularies.append(load_tokenizers(RunFolder.open(tmp_path / f"{share}", model=False)).src)
    (with_copies, without), decode = stores, vocabularies[0].decode
    assert with_copies.facts["cleaning"] == without.facts["cleaning"]
    assert 1.3 < len(with_copies) / len(without) < 1.5
    texts = [decode(with_copies[i][0].tolist()) for i in range(len(with_copies))]
    assert 0.09 < sum(map(str.isupper, texts)) / len(without) < 0.18
    valid = TokenStore.open(tmp_path / "0.4" / "tokens" / "valid")
    held_out = {decode(valid[i][0].tolist()).rstrip(".") for i in range(len(valid))}
    assert len(held_out) == len(sentences) - len(without)
    assert held_out.isdisjoint(text.lower().rstrip(".") for text in texts)
    assert [bool(vocabulary.unknown("DOG")) for vocabulary in vocabularies] == [False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": {"normalization": "nmt_nfkc_cf"}}, "folded by tokenizer.normalization"),
        ({"model": {"source": "vectors", "tie": "two_way"}, "tokenizer": {"joint": False}}, "it is vectors"),
        ({"task": "causal"}, "has no effect in task"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    asked = Settings.from_mapping({**settings, "data": {"case_augmentation": 0.1}})
    with pytest.raises(SettingsError, match=f"data.case_augmentation.*{message}"):
        check(asked)
