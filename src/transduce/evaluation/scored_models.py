"""The models of finished runs, scored on held-out text example by example, for comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transduce.config.settings import Settings
from transduce.data.corpus import number_of
from transduce.data.sources import labelled_sources
from transduce.decoding.classifier import TextClassifier
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import DataError
from transduce.evaluation.metrics import metrics
from transduce.evaluation.significance import Outputs, ScoredModel, outputs_of
from transduce.runs.folder import RunFolder


class ScoredTranslator(ScoredModel):
    """A translator: BLEU of `sets` of (source, reference) pairs with the run's decoding settings.

    `settings`: those of the evaluation and the device; by default the run's.
    """

    unit = "sentences"

    def __init__(
        self, folder: RunFolder, sets: Mapping[str, Sequence[tuple[str, str]]], settings: Settings | None = None
    ) -> None:
        settings = settings or folder.settings
        self.translator = Translator.load(folder.path, device=settings.training.device)
        on_gpu = self.translator.device.startswith("cuda")
        self.engine = "PyTorch" if self.translator.choice.slow_because or on_gpu else "native library"
        self.bleu = metrics(settings.evaluation.tokenize, settings.evaluation.lowercase)["BLEU"]
        self.sets = sets

    def outputs(self) -> list[Outputs]:
        return [self._outputs(name, pairs) for name, pairs in self.sets.items()]

    def _outputs(self, name: str, pairs: Sequence[tuple[str, str]]) -> Outputs:
        if not pairs:
            raise DataError(f"{name}: there are no sentence pairs to score")
        sources, references = [src for src, _ in pairs], [reference for _, reference in pairs]
        hypotheses = [one.text for one in self.translator.translate(sources)]
        lengths = [len(ids) for ids in self.translator.tokenizers.src.encode_batch(sources)]
        return outputs_of(hypotheses, references, self.bleu, measure="BLEU", name=name, lengths=lengths)

    def run_again(self, n: int) -> int:
        """Translate the first sentences."""
        some = [src for src, _ in next(iter(self.sets.values()))[:n]]
        self.translator.translate(some)
        return len(some)

    def use_pytorch(self) -> None:
        if self.engine != "PyTorch":
            old = self.translator
            engine, limit = TorchEngine(old.model), old.position_limit
            self.translator = Translator(engine, old.tokenizers, settings=old.settings, position_limit=limit)
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
