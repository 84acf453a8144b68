"""Word alignment: `Translator.align`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from transduce.data.store import Example
from transduce.data.word_links import whitespace_words
from transduce.decoding.alignment import MOST_UNITS, Alignment, words_of_tokens
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import DataError
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


class WordVocabulary(Vocabulary):
    """One id per word."""

    _pieces = ["<pad>", "<unk>", "<s>", "</s>", *WORDS, ".", ","]  # noqa: RUF012

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, places, start = [], [], 0
        for word in text.replace(".", " .").split():
            start = text.index(word, start)
            ids.append(self._pieces.index(word))
            places.append((start, start + len(word)))
            start += len(word)
        return ids, places

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_with_offsets(text)[0] for text in texts]

    decode = None  # type: ignore[assignment]


class CopyEngine(TorchEngine):
    """A word of the target is likely if its source has it too."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(1, 1))

    def score(self, pairs: Sequence[Example], **_: Any) -> list[list[float]]:
        return [[-0.1 if t in p.src else -4.0 - 0.1 * t for t in p.tgt] + [-1.0] for p in pairs]


def copier() -> Translator:
    vocabulary = WordVocabulary()
    return Translator(CopyEngine(), Tokenizers(vocabulary, vocabulary))


def test_words_are_linked_to_the_words_that_make_them_likely() -> None:
    draw = random.Random(1)
    for n in (1, 2, 5, 10):
        src = draw.sample(WORDS, n)
        tgt = draw.sample(src, n)
        src_text, tgt_text = "  ".join(src) + ".", " ".join(tgt) + "."
        (links,) = copier().align([src_text], [tgt_text])
        assert [(src_text[a:b], tgt_text[c:d]) for a, b, c, d in links] == [(w, w) for w in [*tgt, "."]]


def test_words_without_a_source_have_no_link() -> None:
    (links,) = copier().align(["alpha beta"], ["gamma beta"])
    assert links == [(6, 10, 6, 10)]


@pytest.mark.parametrize(("src", "tgt", "linked"), [("so ?!", "so !", "?!"), ('so "runs"', 'so "rennt"', "so")])
def test_only_a_final_word_of_signs_is_linked_against_the_scores(src: str, tgt: str, linked: str) -> None:
    class WhitespaceVocabulary(WordVocabulary):
        def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
            places = [match.span() for match in re.finditer(r"\S+", text)]
            return list(range(len(places))), places

    vocabulary = WhitespaceVocabulary()
    one = Alignment.read(Tokenizers(vocabulary, vocabulary), src, tgt, whitespace_words)
    last = one.links([[-1.0] * 3, [-9.0] * 3, [-1.0] * 3])[-1]  # both words are unlikely without "so"
    assert src[last.src_start : last.src_end] == linked


def test_long_sentences_are_aligned_in_groups() -> None:
    calls = []

    class Counting(CopyEngine):
        def score(self, pairs: Sequence[Example], **_: Any) -> list[list[float]]:
            calls.append(len(pairs))
            return super().score(pairs)

    vocabulary = WordVocabulary()
    translator = Translator(Counting(), Tokenizers(vocabulary, vocabulary))
    src = " ".join(["alpha", "beta"] * MOST_UNITS)
    (links,) = translator.align([src + " kappa"], ["kappa"])
    assert calls == [2 * MOST_UNITS // 3 + 2] and [src[: link[0]] for link in links] == [src[: links[0][0]]]
    assert links[0][1] == len(src + " kappa")


def test_links_do_not_depend_on_the_batch_or_the_engine(translator: Translator, texts: list[str]) -> None:
    srcs = [*texts[:6], "", "A", " ", "dog " * 80, "½ ﬁ 猫猫"]
    tgts = [*(t.text for t in translator.translate(texts[:6])), "x", "", "Ein Hund.", "Hund " * 70, "猫 …"]
    found = translator.align(srcs, tgts)
    assert found == [translator.align([src], [tgt])[0] for src, tgt in zip(srcs, tgts, strict=True)]
    for src, tgt, links in zip(srcs, tgts, found, strict=True):
        assert len({link[2:] for link in links}) == len(links)
        for a, b, c, d in links:
            assert 0 <= a < b <= len(src) and 0 <= c < d <= len(tgt)
            assert src[a:b] == src[a:b].strip() and tgt[c:d] == tgt[c:d].strip()
    reference = Translator(TorchEngine(translator.model), translator.tokenizers, settings=translator.settings)
    theirs = reference.align(srcs, tgts)
    n_same = sum(len(set(one) & set(two)) for one, two in zip(found, theirs, strict=True))
    assert n_same >= 0.95 * sum(map(len, found))


def test_bad_pairs_are_refused(translator: Translator) -> None:
    with pytest.raises(DataError, match="2 sources but 1"):
        translator.align(["a", "b"], ["c"])
    with pytest.raises(DataError, match=r"line 2: .*5000 tokens"):
        translator.align(["a", "a " * 5000], ["b", "b"])


@pytest.mark.parametrize(
    ("text", "places", "words"),
    [
        ("don't go.", [(0, 3), (3, 5), (5, 8), (8, 9)], ["don't", "go", "."]),
        ("(a-b)", [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], ["(", "a", "-", "b", ")"]),
        ("(a).", [(0, 2), (2, 4)], ["(a", ")."]),
        ("猫は好き", [(0, 1), (1, 2), (2, 4)], ["猫", "は", "好き"]),
        (" 1½ x", [(0, 1), (1, 1), (1, 2), (2, 3), (3, 5)], ["1½", "x"]),
        ("नमस्ते जी", [(0, 2), (2, 6), (6, 9)], ["नमस्ते", "जी"]),
        ("  ", [(0, 2)], []),
        ("a  ", [(0, 1), (1, 3)], ["a"]),
    ],
)
def test_tokens_are_joined_to_words(text: str, places: list[tuple[int, int]], words: list[str]) -> None:
    owners, spans = words_of_tokens(text, places)
    assert [text[a:b] for a, b in spans] == words
    assert len(owners) == len(places) and owners == sorted(owners)
