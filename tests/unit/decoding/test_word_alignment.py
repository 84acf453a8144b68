"""`transduce align`: symmetrization by hand, words and characters from attention, links of translations."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from text_runs import make_run
from transduce.config.settings import Settings
from transduce.data.store import Example
from transduce.data.word_links import WordLink, parse_links, whitespace_words
from transduce.decoding.alignment import MOST_UNITS, Alignment, word_weights, words_of_tokens
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.decoding.word_alignment import align_words, common_method, head_of, symmetrize
from transduce.errors import DataError, SettingsError
from transduce.runs.folder import RunFolder
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers

LINES = ["a man rides a horse", "", "two dogs  run", "   "]
OTHERS = ["ein Mann reitet ein Pferd", "", "zwei Hunde rennen", "x"]


def links(text: str) -> list[WordLink]:
    return sorted(parse_links(text).sure)


def reversed_links(text: str) -> list[WordLink]:
    return [WordLink(j, i) for i, j in links(text)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("intersection", "0-0 3-3"),
        ("union", "0-0 0-1 1-1 2-2 3-2 3-3 5-6 6-6 8-1"),
        # By hand. The intersection is 0-0 and 3-3. Grow-diag adds, next to 0-0, 0-1 (its target is new) and then 1-1
        # (its source is new); next to 3-3, 3-2 (its target is new) and then 2-2 (its source is new). Final-and adds
        # 5-6, both of whose words are new, but not 6-6 and 8-1, whose targets are linked by then.
        ("grow-diag-final-and", "0-0 0-1 1-1 2-2 3-2 3-3 5-6"),
    ],
)
def test_symmetrization_by_hand(how: str, expected: str) -> None:
    forward, backward = "0-0 1-1 2-2 3-3 5-6 6-6", "0-0 0-1 3-2 3-3 8-1"
    assert symmetrize(links(forward), reversed_links(backward), how) == links(expected)


def test_final_and_takes_only_links_of_two_unlinked_words() -> None:
    # 4-4 and 4-5 have a word in common: the first one wins; 1-5 needs neither neighbour nor intersection.
    assert symmetrize(links("0-0 4-4"), reversed_links("0-0 4-5 1-5")) == links("0-0 1-5 4-4")


def test_growing_continues_from_links_that_were_added() -> None:
    assert symmetrize(links("0-0 1-1 2-2"), reversed_links("0-0")) == links("0-0 1-1 2-2")


def test_unknown_symmetrization_is_refused() -> None:
    with pytest.raises(SettingsError, match="grow-diag-final-and, intersection, union"):
        symmetrize([], [], "intersect")


def test_weights_of_words_are_sums_over_their_tokens() -> None:
    weights = np.arange(12.0).reshape(3, 4)  # target tokens; three source tokens and the end
    found = word_weights(weights, [0, 0, -1], [0, 1, 1])
    assert found.tolist() == [[0 + 1, 2 + 3], [4 + 5 + 8 + 9, 6 + 7 + 10 + 11]]


@pytest.fixture(scope="module")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "run", kind="transformer")


def test_both_engines_find_the_links_of_a_head(random_run: Path) -> None:
    translator = Translator.load(random_run, device="cpu")
    found = list(align_words(translator, LINES, OTHERS, (0, 1)))
    reference = Translator(TorchEngine(translator.engine.pytorch_model()), translator.tokenizers)
    assert list(align_words(reference, LINES, OTHERS, (0, 1))) == found
    assert found[1] == found[3] == []
    for one, src, tgt in zip(found, LINES, OTHERS, strict=True):
        assert all(link.src < len(src.split()) and link.tgt < len(tgt.split()) for link in one)
        assert len({link.tgt for link in one}) == len(one)


def test_leaving_out_links_the_word_of_white_space_whose_loss_hurts_most(random_run: Path) -> None:
    """Against the definition, by one call of `Translator.score` for each word that is left out."""
    translator = Translator.load(random_run, device="cpu")
    src, tgt = "a man-rides a  horse", "ein Mann reitet"
    words, tokens = src.split(), translator.tokenizers.tgt
    owners, _ = whitespace_words(tgt, tokens.encode_with_offsets(tgt)[1])

    def log_probs(text: str) -> np.ndarray:
        (found,) = translator.score([text], [tgt])
        return np.bincount(owners, np.array(found.token_log_probs)[:-1])

    without = np.array([log_probs(" ".join(words[:i] + words[i + 1 :])) for i in range(len(words))])
    losses = np.maximum(log_probs(src) - without, 0)  # [source words, target words]
    shares = losses / (np.linalg.norm(losses, axis=1, keepdims=True) + 0.5)
    expected = [WordLink(int(shares[:, j].argmax()), j) for j in range(3) if losses[shares[:, j].argmax(), j] >= 0.05]
    assert expected
    assert list(align_words(translator, [src], [tgt], None)) == [expected]


def test_errors(random_run: Path) -> None:
    translator, settings = Translator.load(random_run, device="cpu"), RunFolder.open(random_run).settings
    with pytest.raises(DataError, match="1 sources but 2"):
        list(align_words(translator, ["a"], ["b", "c"], None))
    with pytest.raises(DataError, match="line 2"):
        list(align_words(translator, ["a", "a " * 5000], ["b", "b"], None))
    assert common_method([settings]) == "leave-out" and translator.guided_head is None
    for method, part in (("guided", "training.guided_alignment"), ("guidde", "did you mean")):
        with pytest.raises(SettingsError, match=part):
            head_of(settings, method)
    rnn = Settings.from_mapping({"model": {"kind": "rnn"}})
    with pytest.raises(SettingsError, match="guided_alignment"):
        head_of(rnn, "guided")
    assert head_of(rnn, "leave-out") is None


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
