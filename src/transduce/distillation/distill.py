"""`distill`: a student learns from the translations of one teacher or several (Kim and Rush 2016).

    FOLDER/sources/train-1.txt        cleaned sources of the first training corpus; valid.txt: held-out sources
    FOLDER/references/train-1.txt     original translations of these sources
    FOLDER/translations/train-1.txt   translations by the teacher; with reranking, all translations of a beam
    FOLDER/reranked/train-1.txt       with reranking: the translations most similar to the references
    FOLDER/distillation.json          settings of sources and references; written when these are complete

The translations of a second teacher are in `translations-2` and `reranked-2`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU

from transduce.bulk.translate import translate_to_folder
from transduce.config.architectures import preset_values
from transduce.config.decoding import DecodingOptions
from transduce.config.recipe import read_recipe
from transduce.config.settings import Corpus, DataSettings, Settings
from transduce.data.lines import read_lines
from transduce.data.pairs import Pair
from transduce.data.preparation import read_scored_sets
from transduce.data.workers import Workplace
from transduce.decoding.open_run import open_folder
from transduce.decoding.results import Style
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError
from transduce.evaluation.evaluate import measure_speeds, translation_outputs
from transduce.evaluation.metrics import Scoring
from transduce.evaluation.significance import SystemComparison
from transduce.logging import Log
from transduce.pipeline import train
from transduce.runs.atomic import advising, read_json, remove_leftovers, write_aside, write_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.lock import locked_folder
from transduce.runs.manifest import Manifest
from transduce.runs.tensor_file import count_weights
from transduce.tasks.base import PAIRS
from transduce.tasks.finetune import find_start
from transduce.tasks.resolve import check

RECORD = "distillation.json"
TIMED = 1000  # sentences per round of the speed measurement


@dataclass(frozen=True, slots=True)
class DistilledText:
    """The training text of a student, in a folder.

    `settings`: settings for reading the original text; `decoding`: decoding options of the teachers.
    """

    folder: Path
    settings: Settings
    teachers: Sequence[RunFolder]
    decoding: DecodingOptions

    def data(self, mix: float) -> DataSettings:
        """Return the student's data settings. The files need not exist yet. `mix`: see `distill`."""
        data = self.settings.data
        weights = [1.0] if data.demo else [corpus.weight for corpus in data.train]
        original = [self._corpus(f"train-{n}").model_copy(update={"weight": w}) for n, w in enumerate(weights, 1)]
        kind = "reranked" if self.decoding.n_best > 1 else "translations"
        train = [
            corpus.model_copy(update={"tgt": self._of_teacher(kind, number) / f"train-{n}.txt"})
            for number in range(1, len(self.teachers) + 1)
            for n, corpus in enumerate(original, 1)
        ]
        if mix:
            train += [corpus.model_copy(update={"weight": corpus.weight * mix}) for corpus in original]
        valid = data.valid or (self._corpus("valid"),)
        tests = PAIRS.sources(self.settings).tests if data.demo else ()
        test = data.test or tuple(self._corpus(source.name) for source in tests)
        values = {"root": None, "demo": 0, "train": tuple(train), "valid": valid, "test": test}
        return data.model_copy(update=values)

    def make(self, log: Log) -> None:
        """Write the missing files of the text; after a kill, resume.

        Raises `DataError` if the folder has text that was written with other settings.
        """
        with locked_folder(self.folder, use="distilling into it"):
            remove_leftovers(self.folder)
            self._write_pairs(log)
            for number, teacher in enumerate(self.teachers, 1):
                folder = self._of_teacher("translations", number)
                for path in self._translate(teacher, folder, log):
                    if (n_best := self.decoding.n_best) > 1:
                        references = read_lines(self.folder / "references" / path.name)
                        best = most_similar(read_lines(path), references, n_best, Scoring.of(self.settings))
                        _write_lines(self._of_teacher("reranked", number) / path.name, best)

    def _translate(self, teacher: RunFolder, folder: Path, log: Log) -> list[Path]:
        """Translate the training sources with a teacher; return the files, which are written to `folder`."""
        log.say(f"translating the training text with {teacher.path} into {folder}")
        style: Style = "nbest" if self.decoding.n_best > 1 else "text"
        texts = sorted((self.folder / "sources").glob("train-*.txt"))
        return translate_to_folder(teacher.path, texts, folder, self.decoding, style=style, log=log)

    def _write_pairs(self, log: Log) -> None:
        """Write missing sources and references. Raises `DataError` if existing files have other settings."""
        record, data = self.folder / RECORD, self.settings.data
        made_from = {"data": data.model_dump(mode="json", exclude={"root"}), "seed": self.settings.training.seed}
        if record.exists():
            with advising(f"remove {self.folder} to make the text again"):
                before = read_json(record)
            if before != made_from:
                raise DataError(
                    f"{self.folder} has text of other data or another seed; name another folder (text), or remove it"
                )
            return
        texts = PAIRS.read_texts(self.settings, log, workplace=Workplace(self.folder))
        cleaned = enumerate(texts.cleaned, 1)
        sets: dict[str, Callable[[], Iterable[Pair]]] = {f"train-{n}": corpus for n, corpus in cleaned}
        if not data.valid:
            sets["valid"] = texts.valid.read
        if data.demo:
            sets |= {test.name: test.read for test in texts.tests}
        for name, pairs in sets.items():
            _write_lines(self.folder / "sources" / f"{name}.txt", (pair.src for pair in pairs()))
            _write_lines(self.folder / "references" / f"{name}.txt", (pair.tgt for pair in pairs()))
        write_json(record, made_from)

    def _corpus(self, name: str) -> Corpus:
        return Corpus(src=self.folder / "sources" / f"{name}.txt", tgt=self.folder / "references" / f"{name}.txt")

    def _of_teacher(self, kind: str, number: int) -> Path:
        return self.folder / (f"{kind}-{number}" if number > 1 else kind)


@dataclass(frozen=True, slots=True)
class DistillationResult:
    """Comparison of the student with its teachers on the test sets.

    `systems`: for each role ("teacher", "teacher 2", "student"), `run`, `n_parameters` and `sentences_per_second`.
    `comparisons`: BLEU of the student compared with each teacher, by test set and role.
    """

    systems: Mapping[str, Mapping[str, Any]]
    comparisons: Mapping[str, Mapping[str, SystemComparison]]

    def to_json(self) -> dict[str, Any]:
        comparisons = {
            name: {role: bleu.to_json() for role, bleu in by_role.items()} for name, by_role in self.comparisons.items()
        }
        return asdict(self) | {"comparisons": comparisons}

    def lines(self) -> list[str]:
        form, lines, signature = "{:<9}  {:>12,} parameters  {:8,.1f} sentences/s  {}", [], ""
        for role, system in self.systems.items():
            n_parameters, speed = system["n_parameters"], system["sentences_per_second"]
            lines.append(form.format(role, n_parameters, speed, system["run"]))
        for name, by_role in self.comparisons.items():
            for role, bleu in by_role.items():
                lines.append(f"{name}, student against {role}: {bleu.line()}")
                signature = bleu.signature
        return [*lines, f"BLEU by {signature}; intervals of 95 % and p by paired bootstrap"]


def distill(
    teachers: str | Path | Sequence[str | Path],
    run: str | Path,
    *,
    beam: int = 5,
    length_penalty: float | None = None,
    rerank: bool = False,
    mix: float = 0.0,
    changes: Mapping[str, Any] | None = None,
    text: str | Path | None = None,
    log: Log | None = None,
) -> DistillationResult:
    """Train a student on the translations of its teachers, and compare it with them on the test sets.

    All teachers translate the training sources of the first teacher. The student has the first teacher's tokenizer,
    settings, validation and test data. After a kill, the same call resumes.

    Args:
        teachers: Run folder of a translator, or run folders of several translators for the same languages.
        run: Run folder of the student.
        beam: Number of beams of the teachers; with `rerank`, also the number of translations to choose from.
        length_penalty: Length penalty of the teachers; higher values give longer translations (default: each teacher's
            setting).
        rerank: Use the translation with the highest sentence BLEU against the reference instead of the teacher's best
            ("sequence-level interpolation", Kim and Rush 2016, section 3.3).
        mix: Passes over the original pairs per pass over a teacher's translations; 0: no original pairs.
        changes: Settings of the student that differ from the first teacher's, by section. A `model.preset` replaces the
            teacher's sizes; `data` names other text to translate.
        text: Folder for the student's text (default: RUN.distilled). Students of the same teachers can share it.
        log: Log for progress (default: to stderr).

    Raises:
        UserError: A teacher, the text or a setting cannot be used, or `text` or `run` exists with other settings.
        Interrupted: SIGINT, SIGTERM or SIGHUP arrived; everything is saved.
    """
    log, run, given = log or Log(), Path(run), dict(changes or {})
    decoding = DecodingOptions(beam=beam, n_best=beam if rerank else 1, length_penalty=length_penalty)
    if rerank and beam < 2:
        raise SettingsError(f"rerank needs several translations: beam = {beam} must be at least 2")
    plain = {name: value for name, value in given.items() if not isinstance(value, Mapping)}
    Settings.from_mapping(plain)  # refuses a value in place of a section
    folders = _open_teachers([teachers] if isinstance(teachers, str | Path) else teachers)
    distilled = DistilledText(_text_folder(run, text), text_settings(folders[0], given), folders, decoding)
    student = _student_settings(folders[0], distilled.data(mix), given)
    start = find_start(student)
    check(student if start is None else start.settings)
    if (run / "manifest.json").exists():
        Manifest.read(run).require_same(student)
    if not has_read_text(run):
        distilled.make(log)
    train(student, run, log=log)
    roles = {f"teacher {n}" if n > 1 else "teacher": folder.path for n, folder in enumerate(folders, 1)}
    result = _compare({**roles, "student": run}, student, log)
    with RunFolder.open_locked(run) as finished:
        finished.write_record(RECORD, result.to_json())
    return result


def _open_teachers(paths: Sequence[str | Path]) -> list[RunFolder]:
    folders = [open_folder(path, task=Translator.task) for path in paths]
    for folder in folders:
        folder.settings.model.require_text("distillation", run=folder.path)
    return folders


def _text_folder(run: Path, text: str | Path | None) -> Path:
    """Return the folder for the student's text: as given, or RUN.distilled."""
    folder = Path(os.path.realpath(text or f"{os.path.realpath(run)}.distilled"))
    if folder == Path(os.path.realpath(run)) or (folder / "manifest.json").exists():
        raise SettingsError(f"text = {folder}: this is a run folder; name another folder for the translations")
    return folder


def text_settings(teacher: RunFolder, changes: Mapping[str, Any]) -> Settings:
    """Return the settings for reading the teacher's training text: the teacher's, with the changes of `data`."""
    unaligned = teacher.settings.with_values("training", guided_alignment=None)
    settings = unaligned.with_values("data", **changes.get("data", {})).resolve_paths(Path())
    if not settings.data.train and not settings.data.demo:
        raise DataError(
            f"{teacher.path} has no training text (it was imported); name the text with data.train = "
            '[{src="a.en", tgt="a.de"}], and data.valid and data.test likewise'
        )
    if len(set(settings.data.directions)) > 1:
        raise SettingsError(f"{teacher.path} translates in several directions; distill a run of one direction")
    return settings


def _student_settings(teacher: RunFolder, data: DataSettings, changes: Mapping[str, Any]) -> Settings:
    """Return the student's settings: the teacher's recipe and tokenizer, with the student's text and `changes`."""
    recipe = teacher.path / "recipe.toml"
    known = read_recipe(recipe) if recipe.exists() else {}
    values: dict[str, Any] = {section: dict(known.get(section, {})) for section in ("tokenizer", "model", "training")}
    values["training"].pop("start", None)
    # the word links belong to the original translations
    values["training"].pop("guided_alignment", None)
    values |= {"task": "translation", "data": data.model_dump(mode="json", exclude_none=True)}
    for section in ("decoding", "evaluation"):
        values[section] = getattr(teacher.settings, section).model_dump(mode="json")
    if set(changes.get("tokenizer", {})) <= {"sampling"}:
        sampling = {key: value for key, value in values["tokenizer"].items() if key == "sampling"}
        values["tokenizer"] = {**sampling, "start": os.path.realpath(teacher.path)}
    model = changes.get("model", {})
    if "preset" in model:
        other = preset_values(Settings.from_mapping({"model": {"preset": model["preset"]}}).model)
        replaced = teacher.settings.model.size_keys() | set(other)
        values["model"] = {key: value for key, value in values["model"].items() if key not in replaced}
    for section, content in changes.items():
        if section != "data":  # already in `data`
            values[section] = values.get(section, {}) | content if isinstance(content, Mapping) else content
    return Settings.from_mapping(values)


def most_similar(rows: Iterable[str], references: Iterable[str], n: int, scoring: Scoring) -> Iterator[str]:
    """Yield for each reference the most similar of its `n` translations, from rows NUMBER<TAB>SCORE<TAB>TEXT.

    Similarity is sentence BLEU with exponential smoothing and effective order. Among equally similar texts, the first
    wins.
    """
    metric = BLEU(tokenize=scoring.tokenize, lowercase=scoring.lowercase, effective_order=True, force=True)
    for reference, *candidates in zip(references, *[iter(rows)] * n, strict=True):
        texts = [row.split("\t", 2)[2] for row in candidates]
        yield max(dict.fromkeys(texts), key=lambda text: metric.sentence_score(text, [reference]).score)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with write_aside(path) as aside, aside.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def _compare(runs: Mapping[str, Path], settings: Settings, log: Log) -> DistillationResult:
    """Translate the test sets of `settings` with each run's decoding settings; time the runs in turns."""
    sets = read_scored_sets(PAIRS.sources(settings))
    translators = {role: Translator.load(run, device=settings.training.device) for role, run in runs.items()}
    timed = [src for src, _ in sets[0].pairs[:TIMED]]
    speeds = measure_speeds(translators, timed, log)
    systems = {
        role: {
            "run": str(run),
            "n_parameters": count_weights(run / "model.safetensors"),
            "sentences_per_second": speeds[role],
        }
        for role, run in runs.items()
    }
    outputs = {
        role: {output.name: output for output in translation_outputs(translator, sets, settings)}
        for role, translator in translators.items()
    }
    student = outputs.pop("student")
    comparisons = {
        test.name: {
            role: SystemComparison.of(student[test.name], output[test.name]) for role, output in outputs.items()
        }
        for test in sets
    }
    return DistillationResult(systems, comparisons)
