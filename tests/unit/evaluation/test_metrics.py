"""Scores compared with sacreBLEU's command line and with equations: BLEU, labels, alignments."""

import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers import tokenizer_spm

from transduce.config.settings import EvaluationSettings, Settings
from transduce.data.word_links import parse_links
from transduce.errors import DataError, UserError
from transduce.evaluation import significance
from transduce.evaluation.metrics import Scoring, TranslationScores, evaluate, metrics, score_labels, score_links
from transduce.evaluation.significance import Difference, compare_translations

TEXT = "Ein kleiner Hund läuft über die grüne Wiese , und zwei Kinder schauen ihm zu ."
WORDS = TEXT.split()


def corpus(n: int = 60, seed: int = 1) -> list[str]:
    choose = random.Random(seed)
    return [" ".join(choose.choices(WORDS, k=choose.randint(4, 14))) for _ in range(n)]


def worse(lines: list[str], rate: float, seed: int = 2) -> list[str]:
    choose = random.Random(seed)
    return [
        " ".join(choose.choice(WORDS) if choose.random() < rate else word for word in line.split()) for line in lines
    ]


def bleu_from_the_equations(hypotheses: list[str], references: list[str]) -> float:
    """Papineni et al. 2002, on words between spaces; for corpora with a match of every order."""

    def ngrams(line: str, n: int) -> Counter[tuple[str, ...]]:
        words = line.split()
        return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

    logs = []
    for n in range(1, 5):
        pairs = [(ngrams(h, n), ngrams(r, n)) for h, r in zip(hypotheses, references, strict=True)]
        logs.append(math.log(sum((h & r).total() for h, r in pairs) / sum(h.total() for h, _ in pairs)))
    c, r = (sum(len(line.split()) for line in lines) for lines in (hypotheses, references))
    return 100 * min(1.0, math.exp(1 - r / c)) * math.exp(sum(logs) / 4)


def test_bleu_follows_its_equations() -> None:
    references = corpus()
    hypotheses = [line.rsplit(" ", 1)[0] for line in worse(references, 0.1)]
    scores = evaluate(hypotheses, references, tokenize="none")
    assert scores.bleu.value == pytest.approx(bleu_from_the_equations(hypotheses, references), abs=1e-9)
    assert scores.bleu.length == sum(len(h.split()) for h in hypotheses)
    assert scores.bleu.reference_length == sum(len(r.split()) for r in references)
    assert 0 < scores.bleu.brevity_penalty < 1


@pytest.mark.parametrize(("tokenize", "lowercase"), [("13a", False), ("none", False), ("char", True)])
def test_scores_equal_those_of_the_sacrebleu_command(tmp_path: Path, tokenize: str, lowercase: bool) -> None:
    references = corpus()
    hypotheses = [h.lower() if i % 3 else h for i, h in enumerate(worse(references, 0.2))]
    (tmp_path / "ref").write_text("\n".join(references) + "\n", encoding="utf-8")
    (tmp_path / "hyp").write_text("\n".join(hypotheses) + "\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        "ref",
        "-i",
        "hyp",
        "-m",
        "bleu",
        "chrf",
        "ter",
        "-tok",
        tokenize,
        "-w",
        "6",
    ]
    command += ["-lc", "--chrf-lowercase"] if lowercase else []
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    scores = evaluate(hypotheses, references, tokenize=tokenize, lowercase=lowercase)
    ours = [scores.bleu, scores.chrf, *([scores.ter] if scores.ter else [])]
    for theirs, mine in zip(json.loads(out), ours, strict=tokenize != "char"):
        assert mine.value == pytest.approx(theirs["score"], abs=1e-5), theirs["name"]
        assert mine.signature == theirs["signature"]


def test_a_perfect_translation() -> None:
    scores = evaluate(corpus(), corpus())
    assert (scores.bleu.value, scores.chrf.value) == pytest.approx((100, 100))
    assert scores.ter is not None and (scores.ter.value, scores.exact_match, scores.notes) == (0.0, 1.0, ())


def test_exact_match_compares_every_character() -> None:
    assert evaluate(["a b", "A b", "a b ", "a b"], ["a b"] * 4).exact_match == 0.5


def test_lowercase_ignores_case() -> None:
    upper = [line.upper() for line in corpus()]
    assert evaluate(upper, corpus(), lowercase=True).bleu.value == pytest.approx(100)
    assert evaluate(upper, corpus()).bleu.value < 60


def test_bad_input_is_refused() -> None:
    with pytest.raises(DataError, match="1 hypotheses but 2 references"):
        evaluate(["a"], ["a", "b"])
    with pytest.raises(DataError, match="nothing to score"):
        evaluate([], [])
    with pytest.raises(UserError, match=r"unknown BLEU tokenizer '13b'; did you mean '13a'\?; allowed: none, zh"):
        evaluate(["a"], ["a"], tokenize="13b")


@pytest.mark.parametrize(
    ("language", "sentence", "tokenizers", "ter"),
    [
        ("zh", "在公园里，一只猫唱歌！（是：二）", {"zh"}, "norm:yes|punct:yes|asian:yes"),
        ("zho_Hans", "在公园里，一只猫唱歌！（是：二）", {"zh"}, "norm:yes|punct:yes|asian:yes"),
        ("ja", "猫が公園で歌っています。", {"ja-mecab", "char"}, "norm:yes|punct:yes|asian:yes"),
        ("ko-KR", "고양이가 공원에서 노래를 부른다.", {"ko-mecab", "char"}, "norm:yes|punct:yes|asian:yes"),
        ("th", "แมวร้องเพลงในสวน", {"char"}, ""),
        ("lo", "ແມວຮ້ອງເພງຢູ່ໃນສວນ", {"char"}, ""),
        ("km", "ឆ្មាច្រៀងនៅក្នុងឧទ្យាន", {"char"}, ""),
        ("my", "ကြောင်သည်ပန်းခြံတွင်သီချင်းဆိုသည်", {"char"}, ""),
        ("de", "Eine Katze singt im Park.", {"13a"}, "norm:no|punct:yes|asian:no"),
        ("tgt", "Eine Katze singt im Park.", {"13a"}, "norm:no|punct:yes|asian:no"),
    ],
)
def test_scores_take_their_tokenizer_from_the_language(
    language: str, sentence: str, tokenizers: set[str], ter: str
) -> None:
    scoring = Scoring.of(Settings.from_mapping({"data": {"tgt_lang": language}}))
    assert scoring.tokenize in tokenizers
    scores = evaluate([sentence], [sentence], **scoring._asdict())
    assert (scores.bleu.value, scores.notes) == (pytest.approx(100), ())
    if scoring.tokenize == "char":
        assert scores.ter is None and "TER" not in "".join(scores.lines())
        assert len(compare_translations([sentence], [sentence], [sentence], **scoring._asdict())) == 2
    else:
        assert scores.ter is not None and ter in scores.ter.signature
    assert TranslationScores.from_json(json.loads(json.dumps(scores.to_json()))) == scores
    asked = Settings.from_mapping({"data": {"tgt_lang": language}, "evaluation": {"tokenize": "none"}})
    assert Scoring.of(asked).tokenize == "none"


def test_a_chinese_ter_counts_characters() -> None:
    reference, hypothesis = "在公园里，一只猫唱歌！", "在公园里，一只狗唱歌！"
    scores = evaluate([hypothesis], [reference], tokenize="zh")
    assert scores.ter is not None and scores.ter.value == pytest.approx(100 / 11)


def test_a_bleu_of_zero_beside_exact_translations_has_its_reason() -> None:
    scores = evaluate(["Ein Hund.", "Ja."], ["Ein Hund.", "Ja."])
    assert (scores.bleu.value, scores.exact_match, scores.bleu.remark) == (0, 1, "no 4-grams")
    assert "no 4-grams" in "\n".join(scores.lines())
    assert evaluate(["Katze"] * 9, ["Ein kleiner Hund läuft"] * 9).bleu.remark == ""


def test_words_without_spaces_are_noted_if_the_language_is_not_set() -> None:
    lines = ["在公园里，一只猫唱歌！", "猫が公園で歌っています。"]
    assert "data.tgt_lang" in evaluate(lines, lines).notes[-1]
    assert evaluate(lines, lines, tokenize="zh").notes == ()


def test_the_setting_names_every_tokenizer() -> None:
    description = EvaluationSettings.model_fields["tokenize"].description or ""
    assert set(BLEU.TOKENIZERS) <= set(re.findall(r"[\w-]+", description))


@pytest.mark.parametrize("tokenize", ["spm", "flores101", "flores200", "spBLEU-1K"])
def test_nothing_is_downloaded(tokenize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer without its file is refused; with it, it is used."""
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer_spm, "download_file", lambda *_: pytest.fail("a download"))
    with pytest.raises(UserError, match=f"BLEU tokenizer '{tokenize}' needs {tmp_path}/models/.*not there") as caught:
        metrics(tokenize, False)
    file = Path(str(caught.value).split(" needs ")[1].split(",")[0])
    lines = [f"the number {i} and {i * 7}" for i in range(60)]
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "x"), vocab_size=30, minloglevel=2
    )
    file.parent.mkdir()
    (tmp_path / "x.model").rename(file)
    assert evaluate(lines, lines, tokenize=tokenize).bleu.value == pytest.approx(100)


def test_tokenized_and_empty_text_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    tokenized = [f"{line} ." for line in corpus(150)]
    assert "look tokenized" in evaluate(tokenized, tokenized).notes[0]
    assert evaluate(tokenized, tokenized, tokenize="none").notes == ()
    assert evaluate(["", WORDS[0] * 4], ["", WORDS[0] * 4], tokenize="char").notes == ("1 of 2 references are empty",)
    assert not caplog.records, "no warnings of libraries"


# --- two systems


def test_a_clear_difference_is_significant() -> None:
    references = corpus(120)
    good, bad = worse(references, 0.1), worse(references, 0.4, seed=3)
    for c in compare_translations(good, bad, references):
        low, high = c.by.interval
        assert c.by.p_value < 0.05 and c.by.verdict == "better", c
        assert low < c.by.difference < high and not low < 0 < high
        assert c.by.margin > 0 and c.by.other_margin > 0
        assert f"bs:1000|seed:{12345}" in c.signature
    assert [c.by.verdict for c in compare_translations(bad, good, references)] == ["worse"] * 3


def test_equal_systems_do_not_differ_significantly() -> None:
    references = corpus(120)
    one, two = worse(references, 0.2), worse(references, 0.2, seed=4)
    for c in compare_translations(one, two, references):
        assert c.by.p_value > 0.05 and c.by.verdict == "no significant difference"
        assert c.by.interval[0] < 0 < c.by.interval[1]
    for c in compare_translations(one, one, references):
        assert (c.by.difference, c.by.interval, c.by.p_value) == (0.0, (0.0, 0.0), 1.0)


def test_one_sentence_shows_nothing() -> None:
    for c in compare_translations(["ein Hund"], ["eine Katze"], ["ein Hund"]):
        assert c.by.verdict == "no significant difference"


def test_p_values_are_uniform_where_there_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of 60 comparisons of equal systems are significant."""
    monkeypatch.setattr(significance, "N_SAMPLES", 60)
    references = corpus(40)
    p_values = []
    for seed in range(60):
        one, two = worse(references, 0.3, seed=1000 + seed), worse(references, 0.3, seed=2000 + seed)
        p_values.append(compare_translations(one, two, references, tokenize="none")[0].by.p_value)
    assert sum(p < 0.05 for p in p_values) <= 9  # 3 expected; the probability of more than 9 is below 0.1 %
    assert sum(p < 0.5 for p in p_values) >= 15


def test_p_values_equal_those_of_sacrebleu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "N_SAMPLES", 300)
    references = corpus(80)
    one, two = worse(references, 0.2), worse(references, 0.25, seed=3)
    for name, lines in (("ref", references), ("one", one), ("two", two)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "two", "one", "-m", "bleu", "chrf", "ter"]
    command += ["--paired-bs", "--paired-bs-n", "300", "-f", "text", "-w", "4"]
    env = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", env=env, check=True)
    scores = [(float(a), float(b)) for a, b in re.findall(r"([\d.]+) \([\d.]+ ± ([\d.]+)\)", done.stdout)]
    p_values = [float(p) for p in re.findall(r"\(p = ([\d.]+)\)", done.stdout)]
    ours = compare_translations(one, two, references)
    for c, base, this, p in zip(ours, scores[:3], scores[3:], p_values, strict=True):
        assert (c.other, c.by.other_margin) == pytest.approx(base, abs=1e-3)
        assert (c.value, c.by.margin) == pytest.approx(this, abs=1e-3)
        assert c.by.p_value == pytest.approx(p, abs=1e-4)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_difference_is_significant_if_its_interval_excludes_0_too(higher_is_better: bool) -> None:
    """The test and the interval differ slightly, so that one may contain 0 at p < 0.05."""
    clear = Difference(-1.0, (-1.5, -0.5), 0.04, 0.9, 0.9, higher_is_better)
    assert clear.verdict == ("worse" if higher_is_better else "better")
    assert replace(clear, interval=(-1.5, 0.1)).verdict == "no significant difference"
    assert replace(clear, p_value=0.06).verdict == "no significant difference"


def test_comparisons_are_plain_data() -> None:
    (bleu, *_) = compare_translations(worse(corpus(), 0.1), worse(corpus(), 0.4), corpus())
    assert json.loads(json.dumps(bleu.to_json()))["verdict"] == bleu.by.verdict
    assert bleu.line().startswith("BLEU ") and "p = 0.0" in bleu.line()


NAMES = "abcd"


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    n_labels = draw(st.integers(2, 4))
    n = draw(st.integers(1, 30))
    numbers = st.lists(st.integers(0, n_labels - 1), min_size=n, max_size=n)
    return n_labels, draw(numbers), draw(numbers)


@given(answers())
def test_scores_follow_their_definitions(case: tuple[int, list[int], list[int]]) -> None:
    n_labels, truth, predicted = case
    found = score_labels(truth, predicted, NAMES[:n_labels])
    pairs = list(zip(truth, predicted, strict=True))
    assert found.n == len(pairs)
    assert found.accuracy == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    f1 = []
    for label in range(n_labels):
        right = sum(a == b == label for a, b in pairs)
        precision = right / predicted.count(label) if predicted.count(label) else 0.0
        recall = right / truth.count(label) if truth.count(label) else 0.0
        f1.append(2 * precision * recall / (precision + recall) if right else 0.0)
    assert found.f1 == pytest.approx(f1)
    assert found.macro_f1 == pytest.approx(sum(f1) / n_labels)
    assert found.binary_f1 == (pytest.approx(f1[1]) if n_labels == 2 else None)
    one_hot = np.eye(n_labels)
    a, b = (one_hot[side] - one_hot[side].mean(0) for side in (truth, predicted))
    spread = math.sqrt((a * a).sum() * (b * b).sum())
    assert found.matthews == pytest.approx((a * b).sum() / spread if spread > 1e-12 else 0.0, abs=1e-9)


def test_matthews_of_two_labels_is_their_correlation() -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 2, 200)
    predicted = np.where(draw.random(200) < 0.8, truth, 1 - truth)
    found = score_labels(truth.tolist(), predicted.tolist(), ("0", "1"))
    assert found.matthews == pytest.approx(float(np.corrcoef(truth, predicted)[0, 1]))
    assert score_labels([0, 1], [1, 0], ("0", "1")).matthews == -1
    assert "accuracy" in found.lines()[0] and len(found.lines()) == 3
    assert found.to_json()["confusion"] == found.table.tolist()


def test_possible_links_count_for_precision_only() -> None:
    gold = [parse_links("0-0 1-1 2?1"), parse_links("0?0")]
    found = [parse_links("0-0 2-1 3-3").sure, parse_links("0-0").sure]
    score = score_links(found, gold)
    # A has 4 links, S 2; A & S = {0-0}; A & P = {0-0, 2-1} and {0-0}
    assert score.precision == pytest.approx(3 / 4)
    assert score.recall == pytest.approx(1 / 2)
    assert score.error_rate == pytest.approx(1 - (1 + 3) / (4 + 2))
    assert "33.33%" in score.line()


def test_extremes() -> None:
    gold = [parse_links("0-0 1-1")]
    assert score_links([gold[0].sure], gold).error_rate == 0
    assert score_links([parse_links("0-1").sure], gold).error_rate == 1
    nothing = score_links([[]], [parse_links("")])
    assert (nothing.precision, nothing.recall, nothing.error_rate) == (1, 1, 0)
