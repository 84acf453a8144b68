"""Evaluation of a translator on files, alone or compared with another system, and with each precision.

`translation_outputs`, `classifier_outputs` and `recorded_outputs` score finished runs for `transduce compare`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Direction, Settings
from transduce.data.lines import read_inputs, read_lines, read_parallel
from transduce.data.preparation import ScoredSet
from transduce.data.reading import labelled_sources, number_of
from transduce.decoding.encoders import TextClassifier
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError, UserError
from transduce.evaluation.metrics import (
    PrecisionScores,
    Scoring,
    TranslationScores,
    check_lengths,
    evaluate,
    format_precisions,
    metrics,
)
from transduce.evaluation.significance import Outputs, SystemComparison, compare_translations, outputs_of
from transduce.kernels.library import instruction_set
from transduce.logging import Log
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder
from transduce.text.languages import Languages
from transduce.text.tokenizer import Tokenizers, load_tokenizers

N_TIMED = 256  # sentences per round of the speed measurement
ROUNDS = 3  # rounds of the speed measurement
N_WARM = 32  # sentences before the first round, to warm up threads and memory
_DEFAULT = DecodingOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationEvaluation:
    """Options of the evaluation of a translator: test text, decoding and scoring.

    `hyp`: a file of translations to score instead of the run's. `ensemble`: runs that translate together with the run.
    `against`: another run, or a file of its translations, to compare with. If `tokenize`, `lowercase` or `batch_tokens`
    is None, the run's setting is used.
    """

    src: Path
    ref: Path
    hyp: Path | None = None
    ensemble: list[Path] = field(default_factory=list)
    against: Path | None = None
    tokenize: str | None = None
    lowercase: bool | None = None
    output: Path | None = None
    decoding: DecodingOptions = _DEFAULT
    batch_tokens: int | None = None
    precision: str | None = None
    measure_precisions: bool = False
    src_lang: str | None = None
    tgt_lang: str | None = None

    @property
    def languages(self) -> Languages:
        """The languages of source and target, for a multilingual model (default: the run's)."""
        return self.src_lang, self.tgt_lang


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one system, and its comparison with another system if there is one.

    `precision`: precision of the decoding; empty if the translations were given. `precisions`: scores of each
    precision; empty if not measured.
    """

    scores: TranslationScores
    against: Path | None = None
    comparison: Sequence[SystemComparison] = ()
    precision: str = ""
    precisions: PrecisionScores = field(default_factory=dict)
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        head = [f"against {self.against}, paired bootstrap:"] if self.comparison else []
        lines = [*self.scores.lines(), *([f"precision {self.precision}"] if self.precision else [])]
        lines += format_precisions(self.precisions) if self.precisions else []
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, *head, *(row.line() for row in self.comparison)]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without empty parts."""
        optional = {
            "against": str(self.against) if self.comparison else "",
            "comparison": [row.to_json() for row in self.comparison],
            "precision": self.precision,
            "notes": list(self.notes),
            "precisions": dict(self.precisions),
        }
        return self.scores.to_json() | {name: value for name, value in optional.items() if value}


def evaluate_translations(run: Path, options: TranslationEvaluation, *, device: str = "auto") -> Evaluation:
    """Score a run, or given translations, and compare them with another system if `options.against` is set."""
    folder = RunFolder.open(run)
    if options.ensemble and (options.hyp or options.measure_precisions):
        raise SettingsError("ensemble: no effect on hyp and measure_precisions; leave them out")
    asked = {"tokenize": options.tokenize, "lowercase": options.lowercase}
    given = {name: value for name, value in asked.items() if value is not None}
    scoring = Scoring.of(folder.settings.with_values("evaluation", **given), options.tgt_lang)
    metrics(*scoring)  # refuses an unknown tokenizer before anything is translated
    sources, references = read_parallel(options.src, options.ref, load_tokenizers(folder).src)
    systems = [options.hyp or run, *([options.against] if options.against else [])]
    outputs = {file: list(read_lines(file)) for file in systems if not file.is_dir()}
    for file, lines in outputs.items():
        check_lengths(lines, references, f"lines of {file}")
    decoding = _decoding_of(options, [system for system in systems if system not in outputs])
    precisions: PrecisionScores = {}
    if options.measure_precisions:
        if not any(map(str.strip, sources)):
            raise DataError(f"{options.src}: there is no text to measure precisions on; name a file with sentences")
        pairs = list(zip(sources, references, strict=True))
        measured = measure_precisions(folder, pairs, Log(), languages=options.languages)
        if isinstance(measured, str):
            raise UserError(f"precisions are measured with the native library: {measured}")
        precisions = measured
    used, notes = list[str](), list[str]()

    def output_of(system: Path, ensemble: Sequence[Path] = ()) -> list[str]:
        if system in outputs:
            return outputs[system]
        precision: Any = options.precision or "float32"  # `load` checks it
        translator = Translator.load([system, *ensemble], device=device, precision=precision)
        translator = translator.between(*options.languages)
        read_inputs(options.src, translator.tokenizers.src)  # raises if this system reads another kind of file
        used.append(translator.choice.precision)
        notes.extend(translator.direction_notes() if system == run else ())
        return [translation.text for translation in translator.translate(sources, decoding)]

    ours, *others = [output_of(systems[0], options.ensemble), *map(output_of, systems[1:])]
    scores = evaluate(ours, references, **scoring._asdict())
    if options.output is not None:
        write_text(options.output, "".join(f"{line}\n" for line in ours))
        Log().say(f"{len(ours):,} translations are in {options.output}")
    rows: Sequence[SystemComparison] = ()
    if others:
        rows = compare_translations(ours, others[0], references, **scoring._asdict())
    if options.hyp is None:
        notes += _notes_on_text(sources, references, load_tokenizers(folder).unframed())
    return Evaluation(scores, options.against, rows, " and ".join(dict.fromkeys(used)), precisions, notes)


def _notes_on_text(sources: Sequence[str], references: Sequence[str], tokenizers: Tokenizers) -> list[str]:
    """Notes on pairs with one blank side, unreadable sources, and references that the model cannot write."""
    notes = []
    if n_lines := sum(bool(src.strip()) != bool(ref.strip()) for src, ref in zip(sources, references, strict=True)):
        notes.append(f"{n_lines:,} of {len(sources):,} pairs have a blank source or reference, but not both")
    unknown = [tokenizers.src.unknown(src) for src in sources] if tokenizers.src.unreadable_ids else []
    if n_lines := sum(map(bool, unknown)):
        shown = " ".join(list(dict.fromkeys(chain.from_iterable(unknown)))[:8])
        notes.append(f"{n_lines:,} of {len(sources):,} sources have characters that the vocabulary lacks: {shown}")
    changes = tokenizers.tgt.rewritten(references)
    pairs = zip(sources, references, strict=True)  # a translator can copy characters of the source
    if n_lines := sum(not changes.keys().isdisjoint(set(reference) - set(src)) for src, reference in pairs):
        shown = ", ".join(f"{c} → {text or 'nothing'}" for c, text in list(changes.items())[:8])
        notes.append(
            f"{n_lines:,} of {len(references):,} references have characters that the model cannot write: {shown}"
        )
    return notes


def _decoding_of(options: TranslationEvaluation, runs: Sequence[Path]) -> DecodingOptions:
    """Return the decoding options. Raises `SettingsError` if there are any although no run translates."""
    batch = {} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}
    decoding = DecodingOptions(**options.decoding.model_dump(exclude_unset=True), **batch)
    if not runs and (unused := [*decoding.model_fields_set, *(["precision"] if options.precision else [])]):
        raise SettingsError(f"{', '.join(unused)}: no effect if hyp gives the translations; leave it out")
    return decoding


def in_direction(translator: Translator, direction: Direction) -> Translator:
    """Return the translator for the languages of a held-out set; without language tokens, `translator` itself."""
    return translator.between(*direction) if translator.tokenizers.src.framing.needed else translator


def score_translator(
    translator: Translator, pairs: Sequence[tuple[str, str]], scoring: Scoring
) -> tuple[TranslationScores, list[str]]:
    """Translate the sources of (source, reference) pairs; return the scores and the translations."""
    hypotheses = [translation.text for translation in translator.translate([src for src, _ in pairs])]
    references = [reference for _, reference in pairs]
    return evaluate(hypotheses, references, **scoring._asdict()), hypotheses


def measure_precisions(
    folder: RunFolder, pairs: Sequence[tuple[str, str]], log: Log, *, languages: Languages = (None, None)
) -> PrecisionScores | str:
    """Translate (source, reference) pairs with each precision that this CPU supports.

    Search and BLEU follow the run's settings. Returns the reason if the native library cannot be used. `languages`: see
    `Translator.between`.
    """
    bleu: dict[str, float] = {}
    translators: dict[str, Translator] = {}
    for precision in PRECISIONS:
        if precision == "float32-fast" and instruction_set() != "amx":
            continue  # it equals float32
        translator = Translator.load(folder.path, device="cpu", precision=precision).between(*languages)
        if translator.choice.slow_because:
            return translator.choice.slow_because
        scoring = Scoring.of(folder.settings, languages[1])
        bleu[precision] = score_translator(translator, pairs, scoring)[0].bleu.value
        translators[precision] = translator
    speeds = measure_speeds(translators, [src for src, _ in pairs[:N_TIMED]], log)
    return {name: {"bleu": bleu[name], "sentences_per_second": speeds[name]} for name in translators}


def measure_speeds(translators: Mapping[str, Translator], sources: Sequence[str], log: Log) -> dict[str, float]:
    """Return the sentences per second of each translator, the median of `ROUNDS` rounds.

    The translators take turns, so that other work on the machine slows all of them down.
    """
    for translator in translators.values():
        translator.translate(sources[:N_WARM])
    speeds: dict[str, list[float]] = {name: [] for name in translators}
    with log.progress("measuring speed") as bar:
        for number in range(ROUNDS):
            for position, (name, translator) in enumerate(translators.items(), 1):
                began = time.perf_counter()
                translator.translate(sources)
                speeds[name].append(len(sources) / (time.perf_counter() - began))
                bar.update((number * len(translators) + position) / (ROUNDS * len(translators)))
    return {name: statistics.median(values) for name, values in speeds.items()}


def translation_outputs(translator: Translator, sets: Sequence[ScoredSet], settings: Settings) -> list[Outputs]:
    """Translate sets of pairs; return the BLEU statistics by `settings`. Raises `DataError` for an empty set."""
    outputs = []
    for name, direction, pairs in sets:
        if not pairs:
            raise DataError(f"{name}: there are no sentence pairs to score")
        bleu = metrics(*Scoring.of(settings, direction[1]))["BLEU"]
        translations = in_direction(translator, direction).translate([src for src, _ in pairs])
        hypotheses = [translation.text for translation in translations]
        outputs.append(outputs_of(hypotheses, [ref for _, ref in pairs], bleu, measure="BLEU", name=name))
    return outputs


def classifier_outputs(folder: RunFolder) -> list[Outputs]:
    """Classify a run's test sets, or its validation set if it has none; return the statistics of the accuracy."""
    classifier = TextClassifier.load(folder.path, device=folder.settings.training.device)
    sources = labelled_sources(folder.settings)
    tests = {source.name: list(source.read()) for source in sources.tests}
    sets = tests or {"valid": [example for source in sources.valid for example in source.read()]}
    outputs = []
    for name, examples in sets.items():
        predictions = classifier.classify([example.texts for example in examples])
        labels = [classifier.labels[number_of(example, classifier.labels)] for example in examples]
        right = np.array([label == predicted.label for label, predicted in zip(labels, predictions, strict=True)])
        outputs.append(Outputs(name, "accuracy", np.stack([right, np.ones(len(right))], axis=1).astype(np.float64)))
    return outputs


def recorded_outputs(folder: RunFolder) -> list[Outputs]:
    """Return a language model's recorded scores on its test sets or, if it has none, on the validation set."""
    if folder.settings.task == "masked":
        record, measure, key, unit = "masked_scores.json", "masked-token accuracy", "masked_accuracy", None
    else:
        record, measure, key, unit = "text_scores.json", "bits per byte", "bits_per_byte", "bytes"
    sets = folder.read_record(record).get("sets", ())
    outputs = []
    for scores in [scores for scores in sets if scores["name"] != "valid"] or sets:
        n = scores[unit] if unit else 1.0
        outputs.append(Outputs(scores["name"], measure, np.array([[scores[key] * n, n]], dtype=np.float64)))
    return outputs
