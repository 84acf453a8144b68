"""`transduce align`: symmetrization by hand, and words from attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from text_runs import make_run
from transduce.config.settings import Settings
from transduce.data.word_links import WordLink, parse_links, whitespace_words
from transduce.decoding.alignment import Heads, word_weights
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.decoding.word_alignment import align_words, common_method, heads_of, symmetrize
from transduce.errors import DataError, SettingsError
from transduce.runs.folder import RunFolder

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
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "run", kind="transformer")


def test_attention_is_the_average_of_the_heads_and_both_engines_agree(run: Path) -> None:
    translator, settings = Translator.load(run, device="cpu"), RunFolder.open(run).settings
    heads = heads_of(settings, "attention")
    assert heads == Heads(tuple((0, head) for head in range(4)), reads=False)  # the last but one of two layers
    assert heads_of(settings, "attention", 2) == Heads(tuple((1, head) for head in range(4)), reads=False)
    found = list(align_words(translator, LINES, OTHERS, heads))
    reference = Translator(TorchEngine(translator.engine.pytorch_model()), translator.tokenizers)
    assert list(align_words(reference, LINES, OTHERS, heads)) == found
    assert found[1] == found[3] == []
    for one, src, tgt in zip(found, LINES, OTHERS, strict=True):
        assert all(link.src < len(src.split()) and link.tgt < len(tgt.split()) for link in one)
        assert len({link.tgt for link in one}) == len(one)


def test_rows_of_heads_are_of_the_step_that_reads_or_writes_a_token() -> None:
    weights = np.arange(12.0).reshape(2, 3, 2)  # two heads, two target tokens and the end
    average = [[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    assert Heads(((0, 0), (0, 1)), reads=True).rows(weights).tolist() == average[1:]
    assert Heads(((0, 0), (0, 1)), reads=False).rows(weights).tolist() == average[:-1]


def test_leaving_out_links_the_word_of_white_space_whose_loss_hurts_most(run: Path) -> None:
    """Against the definition, by one call of `Translator.score` for each word that is left out."""
    translator = Translator.load(run, device="cpu")
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


def test_errors(run: Path) -> None:
    translator, settings = Translator.load(run, device="cpu"), RunFolder.open(run).settings
    with pytest.raises(DataError, match="1 sources but 2"):
        list(align_words(translator, ["a"], ["b", "c"], None))
    with pytest.raises(DataError, match="line 2"):
        list(align_words(translator, ["a", "a " * 5000], ["b", "b"], None))
    assert common_method([settings]) == "leave-out" and translator.guided_head is None
    for method, layer, part in (
        ("guided", None, "training.guided_alignment"),
        ("guidde", None, "did you mean"),
        ("attention", 3, "layers 1 to 2"),
        ("leave-out", 1, "only for --method attention"),
    ):
        with pytest.raises(SettingsError, match=part):
            heads_of(settings, method, layer)
    rnn = Settings.from_mapping({"model": {"kind": "rnn"}})
    with pytest.raises(SettingsError, match="'rnn' has no such heads"):
        heads_of(rnn, "attention")
    assert heads_of(rnn, "leave-out") is None
