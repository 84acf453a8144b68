"""Scores of translations (BLEU, chrF and TER by sacreBLEU, each with its signature), labels and word alignments."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.tokenizers import tokenizer_spm

from transduce.config.settings import Settings
from transduce.data.word_links import GoldLinks, WordLink
from transduce.errors import DataError, UserError, message_of, nearest
from transduce.text.languages import LETTER, base_language

ENOUGH = 100  # sentences; with fewer, a note calls the scores unreliable
_ENDS_TOKENIZED = 0.5  # fraction of hypotheses ending in " ." above which text counts as tokenized
_BY_WORDS = "13a"
_BY_LANGUAGE = {
    "zh": "zh", "yue": "zh", "ja": "ja-mecab", "ko": "ko-mecab", "th": "char", "lo": "char", "km": "char", "my": "char"
}  # fmt: skip


class Scoring(NamedTuple):
    """Options of scoring: BLEU's tokenizer, which also decides whether TER is computed, and whether to ignore case."""

    tokenize: str = _BY_WORDS
    lowercase: bool = False

    @classmethod
    def of(cls, settings: Settings, tgt_lang: str | None = None) -> Scoring:
        """Return the scoring of a run. An unset tokenizer is chosen by the target language (default: the run's)."""
        asked = settings.evaluation
        return cls(asked.tokenize or choose_tokenizer(tgt_lang or settings.data.tgt_lang)[0], asked.lowercase)


def choose_tokenizer(language: str) -> tuple[str, str]:
    """Return BLEU's tokenizer for a target language, and the reason for it."""
    tokenize = _BY_LANGUAGE.get(base_language(language), _BY_WORDS)
    reason = f"for the words of data.tgt_lang = '{language}'"
    if tokenize == "char":
        return tokenize, f"data.tgt_lang = '{language}' has no spaces between words; no TER, which needs words"
    if tokenize.endswith("-mecab"):
        try:
            BLEU(tokenize=tokenize)
        except (RuntimeError, AssertionError):  # not installed, or with another dictionary
            package = f"'sacrebleu[{tokenize[:2]}]'"
            return "char", f"by characters, without TER: {tokenize} is not installed (pip install {package})"
    return tokenize, reason


@dataclass(frozen=True, slots=True)
class Score:
    """A corpus score, from 0 to 100 (TER may be higher), and sacreBLEU's signature."""

    value: float
    signature: str


@dataclass(frozen=True, slots=True)
class BleuScore(Score):
    """BLEU with its parts: precisions of 1- to 4-grams in percent, brevity penalty, and lengths in tokens."""

    precisions: tuple[float, ...]
    brevity_penalty: float
    length: int
    reference_length: int

    @property
    def remark(self) -> str:
        """The explanation if BLEU is 0 because translations are short, else empty."""
        return "no 4-grams" if not self.value and (self.precisions[0] or not self.length) else ""


@dataclass(frozen=True, slots=True)
class TranslationScores:
    """Scores of one test set. TER counts errors, so lower is better; it is None if BLEU is by characters."""

    n_sentences: int
    bleu: BleuScore
    chrf: Score
    ter: Score | None
    exact_match: float  # fraction of hypotheses equal to the reference
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TranslationScores:
        """Read the result of `to_json`. Raises `ValueError` for other values."""
        return TypeAdapter(cls).validate_python(values)

    def signatures(self) -> dict[str, str]:
        """Return the signature of each score by its name."""
        scores = {"BLEU": self.bleu, "chrF": self.chrf, "TER": self.ter}
        return {name: score.signature for name, score in scores.items() if score is not None}

    def lines(self) -> list[str]:
        r"""Format for people.

        >>> print("\n".join(evaluate(["a b c d"], ["a b c d"]).lines()))  # doctest: +ELLIPSIS
        BLEU   100.00  nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...
                       100.0/100.0/100.0/100.0  brevity penalty 1.000  length 4, reference 4
        chrF   100.00  nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:...
        TER      0.00  nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:...
        exact  100.0%  1 of 1 sentences
        note: few sentences (1): another sample may score quite differently
        """
        b = self.bleu
        precisions = "/".join(f"{p:.1f}" for p in b.precisions)
        n_exact = round(self.exact_match * self.n_sentences)
        notes = list(self.notes)
        if self.n_sentences < ENOUGH:
            notes.append(f"few sentences ({self.n_sentences:,}): another sample may score quite differently")
        return [
            f"BLEU   {b.value:6.2f}  {b.signature}",
            f"               {precisions}  brevity penalty {b.brevity_penalty:.3f}"
            f"  length {b.length:,}, reference {b.reference_length:,}",
            f"chrF   {self.chrf.value:6.2f}  {self.chrf.signature}",
            *([f"TER    {self.ter.value:6.2f}  {self.ter.signature}"] if self.ter else []),
            f"exact  {self.exact_match:6.1%}  {n_exact:,} of {self.n_sentences:,} sentences",
            *(f"note: {note}" for note in notes),
        ]


def evaluate(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = _BY_WORDS, lowercase: bool = False
) -> TranslationScores:
    """Score `hypotheses` against one reference each.

    Args:
        hypotheses: Translations.
        references: References, one per hypothesis.
        tokenize: BLEU tokenizer: "13a" for detokenized text, "none" for tokenized text, "zh", "char", ... With "zh",
            "ja-mecab" and "ko-mecab", TER splits Asian characters too; with "char" there is no TER.
        lowercase: Ignore case in BLEU and chrF; TER always ignores it, as in sacreBLEU.

    Raises:
        DataError: `hypotheses` and `references` differ in length or are empty.
        UserError: The tokenizer is unknown.
    """
    check_lengths(hypotheses, references)
    scores, results = dict[str, Score](), dict[str, Any]()
    for name, metric in metrics(tokenize, lowercase).items():
        results[name] = metric.corpus_score(list(hypotheses), [list(references)])
        scores[name] = Score(float(results[name].score), str(metric.get_signature()))
    details = results["BLEU"]
    bleu = BleuScore(
        **asdict(scores["BLEU"]),
        precisions=tuple(map(float, details.precisions)),
        brevity_penalty=float(details.bp),
        length=int(details.sys_len),
        reference_length=int(details.ref_len),
    )
    return TranslationScores(
        n_sentences=len(references),
        bleu=bleu,
        chrf=scores["chrF"],
        ter=scores.get("TER"),
        exact_match=sum(map(str.__eq__, hypotheses, references)) / len(references),
        notes=_notes(hypotheses, references, tokenize, bleu),
    )


def metrics(tokenize: str, lowercase: bool) -> dict[str, Metric]:
    """Return sacreBLEU's metrics by name. Raises `UserError` if the tokenizer cannot be used."""
    if tokenize not in BLEU.TOKENIZERS:
        allowed = ", ".join(BLEU.TOKENIZERS)
        raise UserError(f"unknown BLEU tokenizer '{tokenize}'{nearest(tokenize, BLEU.TOKENIZERS)}; allowed: {allowed}")
    if (model := tokenizer_spm.SPM_MODELS.get(tokenize)) is not None:
        file = Path(tokenizer_spm.SACREBLEU_DIR, "models", PurePosixPath(model["url"]).name)
        if not file.exists():  # sacreBLEU would download it
            raise UserError(f"BLEU tokenizer '{tokenize}' needs {file}, which is not there; get it from {model['url']}")
    try:
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)  # `_notes` replaces its warning
    except Exception as error:  # each missing package or download fails differently
        why = message_of(error)
        raise UserError(f"BLEU tokenizer '{tokenize}' cannot be used here: {why}") from error
    scores = {"BLEU": bleu, "chrF": CHRF(lowercase=lowercase)}
    if tokenize == "char":
        return scores
    is_asian = tokenize in ("zh", "ja-mecab", "ko-mecab")
    return scores | {"TER": TER(normalized=is_asian, asian_support=is_asian)}


def check_lengths(hypotheses: Sequence[str], references: Sequence[str], name: str = "hypotheses") -> None:
    """Raise `DataError` unless each reference has one hypothesis and there is at least one. `name`: for the error."""
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses):,} {name} but {len(references):,} references: they must be aligned line by line"
        )
    if not references:
        raise DataError("there is nothing to score: the references are empty")


def _notes(hypotheses: Sequence[str], references: Sequence[str], tokenize: str, bleu: BleuScore) -> tuple[str, ...]:
    """Return notes on texts with misleading scores."""
    notes = []
    if bleu.remark:
        notes.append("BLEU is 0 because there are no 4-grams: no translation has four tokens; see chrF and exact")
    text = "\n".join(references)
    if tokenize == _BY_WORDS and len(re.findall(LETTER, text)) < len(re.findall(r"\w", text)) / 2:
        notes.append(
            f"tokenize '{tokenize}' needs spaces between words, which the references do not have: set data.tgt_lang "
            "for training, or score with tokenize 'zh', 'ja-mecab' or 'char'"
        )
    n_empty = sum(not reference.strip() for reference in references)
    if n_empty:
        notes.append(f"{n_empty:,} of {len(references):,} references are empty")
    n_tokenized = sum(hypothesis.endswith(" .") for hypothesis in hypotheses)
    if tokenize not in ("none", "char") and n_tokenized > _ENDS_TOKENIZED * len(hypotheses):
        notes.append(
            "the hypotheses look tokenized: score tokenized text with tokenize 'none', or detokenize both sides"
        )
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Scores of predicted labels. `table[i, j]`: number of examples with true label i and predicted label j."""

    labels: tuple[str, ...]
    table: np.ndarray

    @property
    def n(self) -> int:
        return int(self.table.sum())

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions."""
        return float(np.trace(self.table)) / self.n if self.n else 0.0

    @property
    def f1(self) -> tuple[float, ...]:
        """F1 of each label, 2 TP / (2 TP + FP + FN); 0 if the label neither occurs nor is predicted."""
        both = (self.table.sum(0) + self.table.sum(1)).tolist()
        right = np.diagonal(self.table).tolist()
        return tuple(2.0 * r / b if b else 0.0 for r, b in zip(right, both, strict=True))

    @property
    def binary_f1(self) -> float | None:
        """F1 of the second of two labels, as in GLUE; None for more labels."""
        return self.f1[1] if len(self.labels) == 2 else None

    @property
    def macro_f1(self) -> float:
        return sum(self.f1) / len(self.labels)

    @property
    def matthews(self) -> float:
        """Correlation of true and predicted labels (Matthews 1975; more than two labels: Gorodkin 2004).

        1: all correct; 0: no better than chance, or all true or all predicted labels are equal; -1 (two labels): all
        wrong.
        """
        n, correct = float(self.n), float(np.trace(self.table))
        truth, predicted = self.table.sum(1).astype(float), self.table.sum(0).astype(float)
        spread = math.sqrt((n**2 - float(truth @ truth)) * (n**2 - float(predicted @ predicted)))
        return (correct * n - float(truth @ predicted)) / spread if spread else 0.0

    def lines(self) -> list[str]:
        """Format for people: overall scores, then one line per label."""
        binary = "" if self.binary_f1 is None else f"  F1 of {self.labels[1]} {self.binary_f1:.1%}"
        head = f"accuracy {self.accuracy:.1%}  macro F1 {self.macro_f1:.1%}{binary}  Matthews {self.matthews:.3f}"
        rows = [
            f"{label}: {int(self.table[i].sum()):,} examples, {int(self.table[i, i]):,} correct, F1 {self.f1[i]:.1%}"
            for i, label in enumerate(self.labels)
        ]
        return [f"{head}  ({self.n:,} examples)", *rows]

    def to_json(self) -> dict[str, Any]:
        names = ("n", "accuracy", "macro_f1", "binary_f1", "matthews")
        return {name: getattr(self, name) for name in names} | {
            "f1": dict(zip(self.labels, self.f1, strict=True)),
            "labels": list(self.labels),
            "confusion": self.table.tolist(),
        }


def score_labels(truth: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> LabelScores:
    """Score predicted label numbers; both are indices into `labels`."""
    assert len(truth) == len(predicted)
    table = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(table, (np.asarray(truth, dtype=np.int64), np.asarray(predicted, dtype=np.int64)), 1)
    return LabelScores(tuple(labels), table)


PrecisionScores = Mapping[str, Mapping[str, float]]
"""BLEU (`bleu`) and `sentences_per_second` of a translator for each precision, float32 first."""


def format_precisions(scores: PrecisionScores) -> list[str]:
    """Format a line for each precision but float32, compared with float32."""
    base, lines = scores["float32"], list[str]()
    for name, row in scores.items():
        times, difference = row["sentences_per_second"] / base["sentences_per_second"], row["bleu"] - base["bleu"]
        if name != "float32":
            compared = f"{row['bleu']:.2f} BLEU ({difference:+.2f}), {times:.1f} times as fast as float32"
            lines.append(f"precision {name}: {compared}")
    return lines


@dataclass(frozen=True, slots=True)
class AlignmentScore:
    """Alignment error rate, precision and recall of word alignments (Och and Ney 2003, section 5).

    The fields count sure gold links, predicted links, and predicted links that are sure or possible. Without any links,
    precision and recall are 1 and the error rate is 0.
    """

    n_sure: int
    n_predicted: int
    n_predicted_sure: int
    n_predicted_possible: int

    @property
    def precision(self) -> float:
        """A & P| / |A|: the share of predicted links (A) that are possible or sure (P)."""
        return self.n_predicted_possible / self.n_predicted if self.n_predicted else 1.0

    @property
    def recall(self) -> float:
        """A & S| / |S|: the share of sure links (S) that are predicted (A)."""
        return self.n_predicted_sure / self.n_sure if self.n_sure else 1.0

    @property
    def error_rate(self) -> float:
        """1 - (|A & S| + |A & P|) / (|A| + |S|), with predicted links A, sure links S, and possible or sure links P."""
        n = self.n_predicted + self.n_sure
        return 1 - (self.n_predicted_sure + self.n_predicted_possible) / n if n else 0.0

    def line(self) -> str:
        rates = f"AER {self.error_rate:.2%}  precision {self.precision:.2%}  recall {self.recall:.2%}"
        return f"{rates}  ({self.n_predicted:,} links, {self.n_sure:,} sure gold links)"


def score_links(predicted: Iterable[Collection[WordLink]], gold: Iterable[GoldLinks]) -> AlignmentScore:
    """Compare each sentence pair's predicted links with its gold links; every sure link is also possible."""
    n_sure = n_predicted = n_predicted_sure = n_predicted_possible = 0
    for links, known in zip(map(set, predicted), gold, strict=True):
        n_sure += len(known.sure)
        n_predicted += len(links)
        n_predicted_sure += len(known.sure & links)
        n_predicted_possible += len(known.possible & links)
    return AlignmentScore(n_sure, n_predicted, n_predicted_sure, n_predicted_possible)
