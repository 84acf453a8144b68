"""The results of a trained model on held-out text, as statistics per example whose sums give the score.

From the statistics of several systems come scores, scores by length and significance tests, without the text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from sacrebleu.metrics import BLEU

from transduce.data.corpus import number_of
from transduce.data.preparation import read_scored_pairs
from transduce.data.sources import labelled_sources
from transduce.decoding.classifier import TextClassifier
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.demo.sources import translation_sources
from transduce.errors import DataError
from transduce.evaluation.metrics import metrics
from transduce.runs.folder import RunFolder

_BLEU = BLEU(force=True)


@dataclass(frozen=True, slots=True)
class Measure:
    """A score: `score` of summed statistics [k]. `form` formats it."""

    name: str
    score: Callable[[np.ndarray], float]
    higher_is_better: bool = True
    form: str = "{:.2f}"


def bleu_of(statistics: np.ndarray) -> float:
    """Corpus BLEU from sacreBLEU's statistics: lengths of hypothesis and reference, matches and counts by order."""
    return float(_BLEU._compute_score_from_stats(statistics.tolist()).score)


def ratio_of(statistics: np.ndarray) -> float:
    """The first statistic divided by the second."""
    return float(statistics[0] / statistics[1]) if statistics[1] else math.nan


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("BLEU", bleu_of),
        Measure("accuracy", ratio_of, form="{:.4f}"),
        Measure("masked-token accuracy", ratio_of, form="{:.4f}"),
        Measure("bits per byte", ratio_of, higher_is_better=False, form="{:.4f}"),
    )
}
"""By name."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """A model's results on one held-out set of n examples.

    `measure`: a key of MEASURES. `statistics`: [n, k]. `lengths`: source tokens of each example, [n]; empty for running
    text, which is one example. `signature`: how the measure was computed.
    """

    name: str
    measure: str
    statistics: np.ndarray
    lengths: np.ndarray
    signature: str = ""

    @property
    def value(self) -> float:
        """The score of the set."""
        return MEASURES[self.measure].score(self.statistics.sum(0))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        arrays = {"statistics": self.statistics.tolist(), "lengths": self.lengths.tolist()}
        return {"name": self.name, "measure": self.measure, "signature": self.signature, **arrays}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outputs:
        """The inverse of `to_json`. Raises `ValueError` or `KeyError` for other values."""
        statistics, lengths = np.array(values["statistics"], dtype=np.float64), np.array(values["lengths"], dtype=int)
        if values["measure"] not in MEASURES or statistics.ndim != 2 or len(lengths) not in (0, len(statistics)):
            raise ValueError("these are not the statistics of a set")
        return cls(str(values["name"]), values["measure"], statistics, lengths, str(values["signature"]))


class ScoredModel(ABC):
    """The model of a finished run, with the test sets of its settings, or else the validation set."""

    unit: ClassVar[str] = ""
    """What `run_again` counts, in the plural; empty: the model has no speed to measure."""
    engine: Literal["native library", "PyTorch"] = "PyTorch"
    """The engine that runs the model."""

    @abstractmethod
    def __init__(self, folder: RunFolder) -> None:
        """Load what `outputs` needs."""

    @abstractmethod
    def outputs(self) -> list[Outputs]:
        """The results on all sets."""

    def run_again(self, n: int) -> int:
        """Process the first n examples of the first set, for a measurement of speed; returns their number."""
        return 0

    def use_pytorch(self) -> None:
        """Compute with PyTorch from here on, as models do that the native library does not support."""
        assert self.engine == "PyTorch"


class ScoredTranslator(ScoredModel):
    """A translator: BLEU with the run's decoding and evaluation settings."""

    unit = "sentences"

    def __init__(self, folder: RunFolder) -> None:
        settings = folder.settings
        self.translator = Translator.load(folder.path, device=settings.training.device)
        on_gpu = self.translator.device.startswith("cuda")
        self.engine = "PyTorch" if self.translator.choice.slow_because or on_gpu else "native library"
        self.bleu = metrics(settings.evaluation.tokenize, settings.evaluation.lowercase)["BLEU"]
        self.sets = read_scored_pairs(translation_sources(settings))

    def outputs(self) -> list[Outputs]:
        return [self._outputs(name, pairs) for name, pairs in self.sets.items()]

    def _outputs(self, name: str, pairs: Sequence[tuple[str, str]]) -> Outputs:
        if not pairs:
            raise DataError(f"{name}: there are no sentence pairs to score")
        sources, references = [src for src, _ in pairs], [reference for _, reference in pairs]
        hypotheses = [one.text for one in self.translator.translate(sources)]
        statistics = np.array(self.bleu._extract_corpus_statistics(hypotheses, [references]), dtype=np.float64)
        lengths = np.array([len(ids) for ids in self.translator.tokenizers.src.encode_batch(sources)], dtype=int)
        return Outputs(name, "BLEU", statistics, lengths, str(self.bleu.get_signature()))

    def run_again(self, n: int) -> int:
        """Translate the first sentences."""
        some = [src for src, _ in next(iter(self.sets.values()))[:n]]
        self.translator.translate(some)
        return len(some)

    def use_pytorch(self) -> None:
        if self.engine != "PyTorch":
            old = self.translator
            engine = TorchEngine(old.model)
            self.translator = Translator(engine, old.tokenizers, settings=old.settings, longest=old.longest)
            self.engine = "PyTorch"


class ScoredClassifier(ScoredModel):
    """A classifier: accuracy."""

    unit = "texts"

    def __init__(self, folder: RunFolder) -> None:
        self.classifier = TextClassifier.load(folder.path, device=folder.settings.training.device)
        sources = labelled_sources(folder.settings)
        tests = {source.name: list(source.read()) for source in sources.tests}
        self.sets = tests or {"valid": [example for source in sources.valid for example in source.read()]}

    def outputs(self) -> list[Outputs]:
        found = []
        for name, examples in self.sets.items():
            labels = self.classifier.labels
            predicted = self.classifier.classify([example.texts for example in examples])
            right = [labels[number_of(e, labels)] == one.label for e, one in zip(examples, predicted, strict=True)]
            encode = self.classifier.vocabulary.encode_batch
            lengths = [sum(map(len, encode(list(example.texts)))) for example in examples]
            statistics = np.stack([np.array(right, dtype=np.float64), np.ones(len(right))], axis=1)
            found.append(Outputs(name, "accuracy", statistics, np.array(lengths, dtype=int)))
        return found

    def run_again(self, n: int) -> int:
        """Classify the first texts."""
        some = [example.texts for example in next(iter(self.sets.values()))[:n]]
        self.classifier.classify(some)
        return len(some)


class ScoredText(ScoredModel):
    """A language model: bits per byte, as computed at the end of its training."""

    record, measure = "text_scores.json", "bits per byte"

    def __init__(self, folder: RunFolder) -> None:
        found = {one["name"]: one for one in folder.read_record(self.record).get("sets", ())}
        self.sets = {name: one for name, one in found.items() if name != "valid"} or found

    def outputs(self) -> list[Outputs]:
        return [
            Outputs(name, self.measure, np.array([self.statistics(one)]), np.array([], dtype=int))
            for name, one in self.sets.items()
        ]

    def statistics(self, scores: Mapping[str, Any]) -> tuple[float, float]:
        """Bits and bytes of a set."""
        return scores["bits_per_byte"] * scores["bytes"], float(scores["bytes"])


class ScoredMaskedText(ScoredText):
    """A masked language model: the accuracy on masked tokens, as computed at the end of its training."""

    record, measure = "masked_scores.json", "masked-token accuracy"

    def statistics(self, scores: Mapping[str, Any]) -> tuple[float, float]:
        """The accuracy as a fraction of 1."""
        return scores["masked_accuracy"], 1.0
