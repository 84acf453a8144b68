"""Training text of a student: the teacher's translations of training sources.

    FOLDER/sources/train-1.txt        the sources of the first training corpus, cleaned
    FOLDER/references/train-1.txt     their original translations
    FOLDER/translations/train-1.txt   those of the teacher; with reranking, n lines per source
    FOLDER/reranked/train-1.txt       with reranking: the one most similar to the reference
    FOLDER/distillation.json          what all this was made from; written when sources and references are complete

`sources` and `references` also have held-out sets that have no separate files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sacrebleu.metrics import BLEU

from transduce.bulk.translate import translate_to_folder
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Corpus, DataSettings, EvaluationSettings, Settings
from transduce.data.corpus import Pair
from transduce.data.lines import read_lines
from transduce.data.workers import Workplace
from transduce.decoding.loading import check_precision
from transduce.distillation.training_text import read_training_text
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.logging import Log
from transduce.machine import is_cpu
from transduce.runs.atomic import expecting, read_json, remove_leftovers, write_aside, write_json
from transduce.runs.folder import RunFolder
from transduce.runs.lock import locked_folder
from transduce.tasks.registry import find_task

RECORD = "distillation.json"
_TEXT: Any = {"encoding": "utf-8", "newline": "\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationOptions:
    """Settings of the training text of a student.

    Args:
        beam: The teacher's number of beams; with `rerank`, also the number of translations to choose from.
        length_penalty: The teacher's; higher values give longer translations. None: the teacher's setting.
        rerank: Take the translation with the highest sentence BLEU against the reference instead of the teacher's best
            ("sequence-level interpolation", Kim and Rush 2016, section 3.3).
        mix: Passes over the original pairs per pass over the teacher's translations; 0: these alone.
        precision: The teacher's; see `Translator.load`.
    """

    beam: int = 5
    length_penalty: float | None = None
    rerank: bool = False
    mix: float = 0.0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.mix and not 0 < self.mix <= 1e6:
            raise SettingsError(f"mix = {self.mix}: must be from 0 to 1,000,000; 1 mixes equal parts")
        if self.rerank and self.beam < 2:
            raise SettingsError(f"rerank needs several translations: beam = {self.beam} must be at least 2")
        check_precision(self.precision, on_cpu=is_cpu("auto"))
        _ = self.translation  # refuses a beam or length penalty out of range

    @property
    def translation(self) -> DecodingOptions:
        """The decoding options of the teacher."""
        n_best = self.beam if self.rerank else 1
        return DecodingOptions(beam=self.beam, n_best=n_best, length_penalty=self.length_penalty)


@dataclass(frozen=True)
class DistilledText:
    """The text of one teacher in one folder. `settings`: the teacher's, with the data that is to be translated."""

    folder: Path
    teacher: RunFolder
    settings: Settings
    options: DistillationOptions

    def data(self, *, distilled: bool) -> DataSettings:
        """The data settings of a student; not `distilled`: those of a baseline. The files need not exist yet."""
        data = self.settings.data
        weights = [1.0] if data.demo else [corpus.weight for corpus in data.train]
        train = [self._corpus(f"train-{n}", weight=weight) for n, weight in enumerate(weights, 1)]
        if distilled:
            mix = self.options.mix
            original = [one.model_copy(update={"weight": one.weight * mix}) for one in train] if mix else []
            kind = "reranked" if self.options.rerank else "translations"
            train = [one.model_copy(update={"tgt": self._path(kind, f"train-{n}")}) for n, one in enumerate(train, 1)]
            train += original
        names = [source.name for source in find_task("translation").sources(self.settings).tests] if data.demo else []
        return data.model_copy(
            update={
                "root": None,
                "demo": 0,
                "train": tuple(train),
                "valid": data.valid or (self._corpus("valid"),),
                "test": data.test or tuple(map(self._corpus, names)),
            }
        )

    def make(self, *, check_text: bool, translate: bool, log: Log) -> None:
        """Write the text as far as it is missing; resumes where a kill has interrupted it.

        Args:
            check_text: Whether the text must be that of the teacher's training.
            translate: False: only sources and references, which a baseline needs.
            log: For progress.

        Raises:
            DataError: The text is not that of the teacher's training, or the folder has text that was made in another
                way.
        """
        with locked_folder(self.folder, use="distilling into it"):
            remove_leftovers(self.folder)
            if not self.is_complete():
                self._write_pairs(check_text=check_text, log=log)
            if not translate:
                return
            self._translate(log)
            if self.options.rerank:
                self._rerank(log)
            log.say(f"the student's text is in {self.folder}; it may be removed after training")

    def _made_from(self) -> dict[str, Any]:
        """Everything that the text depends on, for JSON."""
        data = self.settings.data.model_dump(mode="json", exclude={"root"})
        return {
            "length penalty": self.options.length_penalty,
            "teacher": self.teacher.model_digest(),
            "data": data,
            "seed": self.settings.training.seed,
            "beam": self.options.beam,
            "translations per source": self.options.translation.n_best,
            "precision": self.options.precision,
        }

    def is_complete(self) -> bool:
        """Whether sources and references are written. Raises `DataError` if the text was made in another way."""
        path = self.folder / RECORD
        if not path.exists():
            return False
        try:
            with expecting(path):
                found = dict(read_json(path))
        except RunFolderError as error:
            raise RunFolderError(f"{error}; remove {self.folder} to make the text again") from error
        for name, value in self._made_from().items():
            if (was := found.get(name)) != value:
                other = f"another {name}" if name in ("teacher", "data") else f"{name} = {was!r} and not {value!r}"
                raise DataError(
                    f"{self.folder} has text that was made with {other}; give the same options to resume, name another "
                    "folder (text), or remove it"
                )
        return True

    def _write_pairs(self, *, check_text: bool, log: Log) -> None:
        texts = read_training_text(self.teacher, self.settings, log, place=Workplace(self.folder), check=check_text)
        sets: list[tuple[str, Iterable[Pair]]] = [
            (f"train-{n}", cleaned()) for n, cleaned in enumerate(texts.cleaned, 1)
        ]
        if not self.settings.data.valid:
            sets.append(("valid", texts.valid.read()))
        if self.settings.data.demo:
            sets += [(test.name, test.read()) for test in texts.tests]
        for name, pairs in sets:
            self._write_set(name, pairs)
        write_json(self.folder / RECORD, self._made_from())

    def _write_set(self, name: str, pairs: Iterable[Pair]) -> None:
        paths = self._path("sources", name), self._path("references", name)
        for path in paths:
            path.parent.mkdir(exist_ok=True)
        with (
            write_aside(paths[0]) as src,
            write_aside(paths[1]) as tgt,
            src.open("w", **_TEXT) as src_file,
            tgt.open("w", **_TEXT) as tgt_file,
        ):
            for pair in pairs:
                src_file.write(f"{pair.src}\n")
                tgt_file.write(f"{pair.tgt}\n")

    def _translate(self, log: Log) -> None:
        options = self.options.translation
        sources = sorted((self.folder / "sources").glob("train-*.txt"))
        size = sum(path.stat().st_size for path in sources)
        n_mb = max(1, size * options.n_best >> 20)
        log.say(f"translating the training text with {self.teacher.path}; disk use: about {n_mb:,} MB")
        translate_to_folder(
            self.teacher.path,
            sources,
            self.folder / "translations",
            options,
            style="nbest" if self.options.rerank else "text",
            precision=cast(Any, self.options.precision),  # `DistillationOptions` checks it
            log=log,
        )

    def _rerank(self, log: Log) -> None:
        for path in sorted((self.folder / "translations").glob("train-*.txt")):
            target = self._path("reranked", path.stem)
            if target.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            references = self._path("references", path.stem)
            n_lines = sum(1 for _ in read_lines(references))
            with log.progress("reranking") as bar, write_aside(target) as aside, aside.open("w", **_TEXT) as file:
                chosen = rerank(read_lines(path), read_lines(references), self.options.beam, self.settings.evaluation)
                for number, text in enumerate(chosen, 1):
                    file.write(f"{text}\n")
                    if number % 100 == 0:
                        bar.update(number / n_lines)

    def _corpus(self, name: str, *, weight: float = 1.0) -> Corpus:
        return Corpus(src=self._path("sources", name), tgt=self._path("references", name), weight=weight)

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}.txt"


def rerank(rows: Iterable[str], references: Iterable[str], n: int, scoring: EvaluationSettings) -> Iterator[str]:
    """Of each `n` rows NUMBER<TAB>SCORE<TAB>TEXT, best first, yield the text most similar to the reference.

    Similarity is sentence BLEU with exponential smoothing and effective order; the earlier of equals wins.
    """
    metric = BLEU(tokenize=scoring.tokenize, lowercase=scoring.lowercase, effective_order=True, force=True)
    for reference, *found in zip(references, *[iter(rows)] * n, strict=True):
        texts = [row.split("\t", 2)[2] for row in found]
        yield max(dict.fromkeys(texts), key=lambda text: metric.sentence_score(text, [reference]).score)
