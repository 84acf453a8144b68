"""The protocol of a task (the parts of a training that depend on the kind of model), and the forms of training text.

`transduce.pipeline.train` is common to all tasks. It reads the text, chooses unset settings, trains a vocabulary, and
calls the task's `prepare`, `batches`, `loss`, `validate` and `finish`.

To add a task, write a subclass of `Task` in a file of this package and add it to TASKS in `resolve.py`, which also
checks the settings that the task refuses. Its defaults go into `defaults.py`, and the traits of settings name the tasks
in which they have an effect. Its words in reports are in `evaluation.wording`, and its scores for `transduce compare`
in `comparison.compare`. A task with one store for each set can prepare them with `prepare_sets`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import nn

from transduce.config.architectures import BertSettings
from transduce.config.section import traits_of
from transduce.config.settings import DataSettings, Direction, Settings
from transduce.data.clean import reverse_pair
from transduce.data.encoding import counted
from transduce.data.leaks import LeakCheck, watch
from transduce.data.lines import n_bytes
from transduce.data.pairs import Pair, corpus_files
from transduce.data.preparation import Texts, located, read_labelled_texts, read_pair_texts, read_plain_texts
from transduce.data.reading import Piece, Source, Sources, labelled_sources, line_sources, pair_sources, with_links
from transduce.data.store import AlignedStore, Store
from transduce.data.workers import Workplace
from transduce.demo.corpus import demo_sources
from transduce.errors import DataError, RunFolderError
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.manifest import check_sealed, seal_folder
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.training.feed import Feeder
from transduce.training.loss import Criterion
from transduce.training.validate import Validator

FormName = Literal["pairs", "text", "labelled"]
ToDraw = Sequence[tuple[Direction, str]]
"""Source sentences, each with the direction of its translation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """A form of training text, such as sentence pairs, with functions that find, read and count it."""

    name: FormName
    unit: str  # unit of the size of a set, in the plural
    example_unit: str  # name of held-out examples in warnings of leaks, in the plural
    sources: Callable[[Settings], Sources[Any]]
    read: Callable[[Settings, Log, Sources[Any], Workplace], Texts[Any]]  # reads the text once
    example: Callable[[Any], tuple[str, ...]]  # the texts of a record that the leak check looks for in other sets
    size: Callable[[Any], int]  # size of a record, in `unit`

    def read_texts(
        self, settings: Settings, log: Log, sources: Sources[Any] | None = None, *, workplace: Workplace | None = None
    ) -> Any:
        """Read the text of `sources` (default: the settings' sources) once; return its sets, and print their sizes.

        `workplace`: the folder for temporary files. Raises `DataError` for faulty text.
        """
        texts = self.read(settings, log, sources or self.sources(settings), workplace or Workplace())
        if isinstance(settings.model, BertSettings) and settings.model.next_sentence:
            for text_set in texts.sets.values():
                _check_documents(text_set.name, text_set.read())
        log.say(f"{texts.train.size:,} {self.unit} to train on, {texts.valid.size:,} to validate on")
        return texts


def _pair_sources(settings: Settings) -> Sources[Pair]:
    """Return the sources of sentence pairs; with `training.guided_alignment`, training pairs have word alignments."""
    data, links = settings.data, settings.training.guided_alignment
    sources = demo_sources(data, seed=settings.training.seed) if data.demo else pair_sources(settings)
    if data.both_directions:
        valid, tests = ((*sets, *map(_reversed, sets)) for sets in (sources.valid, sources.tests))
        sources = replace(sources, valid=valid, tests=tests)
    return sources if links is None else replace(sources, train=(with_links(sources.train[0], links),))


def _reversed(source: Source[Pair]) -> Source[Pair]:
    """Return the source with the sides of its pairs exchanged."""
    return replace(source, read=lambda: map(reverse_pair, source.read()), direction=source.direction[::-1])


def _check_documents(name: str, pieces: Iterable[Piece]) -> None:
    """Raise `DataError` if the pieces of text are from fewer than two documents; next-sentence prediction needs two."""
    documents = groupby(document for piece, document, _ in located(pieces) if piece.text.strip())
    n = sum(1 for _ in islice(documents, 2))
    if n < 2:
        raise DataError(
            f"{name} text has {n} document{'' if n else 's'}: model.next_sentence = true needs two or more, as half "
            "of the pairs combine two; set data.documents, which says what ends one, or model.next_sentence = false"
        )


PAIRS = TextForm(
    name="pairs",
    unit="sentence pairs",
    example_unit="pairs",
    sources=_pair_sources,
    read=read_pair_texts,
    example=lambda pair: (pair.src, pair.tgt),
    size=lambda pair: 1,
)
PLAIN = TextForm(
    name="text",
    unit="bytes of text",
    example_unit="lines",
    sources=line_sources,
    read=read_plain_texts,
    example=lambda piece: (piece.text,),
    size=lambda piece: n_bytes(piece.text),
)
LABELLED = TextForm(
    name="labelled",
    unit="labelled texts",
    example_unit="texts",
    sources=labelled_sources,
    read=read_labelled_texts,
    example=lambda labelled: (" ".join(labelled.texts),),
    size=lambda labelled: 1,
)

TextsT = TypeVar("TextsT", bound=Texts[Any])
StoreT = TypeVar("StoreT", bound=Store)


@dataclass(frozen=True)
class Prepared(Generic[StoreT]):
    """The encoded text of a run, which is stored in its folder `tokens`, and the tokenizers."""

    tokens: Path
    tokenizers: Tokenizers
    train: StoreT
    valid: StoreT


class Task(ABC, Generic[TextsT, StoreT]):
    """Base of tasks (kinds of training), without state. `TextsT`: type of the text. `StoreT`: type of encoded text."""

    name: ClassVar[str]
    form: ClassVar[TextForm]
    store: type[StoreT]
    """The class that stores encoded text."""
    evaluation: ClassVar[type[Any]]
    """The dataclass with the options of `evaluate`."""

    @abstractmethod
    def prepare(self, folder: RunFolder, texts: TextsT, tokenizers: Tokenizers, log: Log) -> Prepared[StoreT]:
        """Encode all text into `tokens/` of the run folder and seal it; then write `data.json` with the fingerprint."""

    @abstractmethod
    def batches(self, prepared: Prepared[StoreT], settings: Settings, device: torch.device) -> Feeder:
        """Return the feeder of training batches, a pure function of (settings, seed, epoch): a resume is then exact."""

    @abstractmethod
    def loss(self, settings: Settings) -> Criterion:
        """Return the criterion, a function that computes the loss of a batch."""

    @abstractmethod
    def validate(
        self, model: nn.Module, prepared: Prepared[StoreT], settings: Settings, device: torch.device
    ) -> Validator:
        """Return the validator, which scores a model on held-out text. Early stopping can use its judge's scores."""

    @abstractmethod
    def finish(self, folder: RunFolder, *, update: int, log: Log) -> ToDraw:
        """Save scores and samples after training; return sentences for the report's attention maps, best first.

        `update`: the update whose weights are the run's model. If the process is killed, the resumed run calls this
        again.
        """

    @abstractmethod
    def evaluate(self, run: Path, options: Any, *, device: str = "auto") -> Any:
        """Score a finished run on files; return scores with the methods `lines`, for printing, and `to_json`.

        `options`: an instance of the class `evaluation`.
        """


AnyTask = Task[Any, Any]


def open_prepared(task: AnyTask, folder: RunFolder) -> Prepared[Any]:
    """Open the encoded text of a run. Raises `RunFolderError` if it is missing or damaged."""
    tokens = folder.path / "tokens"
    is_aligned = folder.settings.training.guided_alignment is not None
    train = (AlignedStore if is_aligned else task.store).open(tokens / "train")
    return Prepared(tokens, load_tokenizers(folder), train, task.store.open(tokens / "valid"))


def find_prepared(task: AnyTask, folder: RunFolder, log: Log) -> Prepared[Any] | None:
    """Open the text that an earlier start of the run prepared; None if there is none.

    Warns if the training text has changed since then. Raises `RunFolderError` for a damaged file.
    """
    if not has_read_text(folder.path) or not folder.has_tokenizers:
        return None
    try:
        check_sealed(folder.path / "tokens")
        prepared, settings = open_prepared(task, folder), folder.settings
    except RunFolderError as error:
        raise RunFolderError(
            f"{error}; if the training text has not changed, remove {folder.path / 'data.json'} and run the same "
            "command to read it again"
        ) from None
    with expecting(folder.path / "data.json"):
        before = read_json(folder.path / "data.json").get("fingerprint")
    files = [path for corpus in settings.data.train for path in corpus_files(corpus)]
    if not all(path.exists() for path in files):
        return prepared
    marks = [source.mark() for source in task.form.sources(settings).train]
    if before != fingerprint(settings, prepared.tokenizers, marks):
        log.warn("the training text has changed since this run began; the run continues with the original text")
    return prepared


def fingerprint(settings: Settings, tokenizers: Tokenizers, marks: Sequence[bytes]) -> str:
    """Return a sha256 of everything on which the encoded text depends. `marks`: checksums of the sources' content."""
    stored = (key for key, field in DataSettings.model_fields.items() if traits_of(field).stored)
    rules = [f"{key}: {getattr(settings.data, key)!r}" for key in stored]
    rules += [f"held out: {not settings.data.valid}", f"seed: {settings.training.seed}"]
    rules += [f"directions: {settings.data.directions}"]
    parts = (tokenizers.src.model, tokenizers.tgt.model, *map(str.encode, rules))
    return sha256(b"".join([*marks, *(sha256(part).digest() for part in parts)])).hexdigest()


def report_leaks(checks: Sequence[LeakCheck], log: Log) -> list[dict[str, Any]]:
    """Warn if training text contains held-out text; return a report of each check for data.json."""
    for check in checks:
        if warning := check.warning():
            log.warn(warning)
    return [check.to_json() for check in checks]


def prepare_sets(
    task: Task[TextsT, StoreT],
    folder: RunFolder,
    texts: TextsT,
    tokenizers: Tokenizers,
    log: Log,
    *,
    encode: Callable[[Path, Iterable[Any], str], StoreT],
    describe: Callable[[StoreT], dict[str, Any]],
) -> Prepared[StoreT]:
    """Implement `Task.prepare` for a task with one vocabulary and one store per set.

    `encode`: writes the records of a set into a folder; its last argument is the set's name, for errors. `describe`:
    returns the numbers of a set for data.json.
    """
    tokens, mark, form = folder.path / "tokens", fingerprint(folder.settings, tokenizers, texts.marks), task.form
    tokens.mkdir(exist_ok=True)
    checks = [
        LeakCheck(held_out.name, map(form.example, held_out.read()), unit=form.example_unit)
        for held_out in (texts.valid, *texts.tests)
    ]
    described, stores = list[dict[str, Any]](), list[StoreT]()
    with log.progress("encoding") as bar:
        for name, text_set in texts.sets.items():
            records: Iterator[Any] = text_set.read()
            if name == "train":
                records = counted(records, lambda n: bar.update(n / texts.train.size), form.size)
                records = watch(records, form.example, checks)
            store = encode(tokens / name, records, text_set.name)
            stores.append(store)
            described.append({"name": text_set.name, "files": text_set.files, **describe(store)})
    write_json(tokens / "tests.json", [test.name for test in texts.tests])
    folder.save_tokenizers(tokenizers.save)
    seal_folder(tokens)
    folder.write_record("data.json", {"fingerprint": mark, "sets": described, "leaks": report_leaks(checks, log)})
    return Prepared(tokens, tokenizers, stores[0], stores[1])


def held_out_stores(folder: RunFolder, store: type[StoreT]) -> Iterator[tuple[str, StoreT]]:
    """Yield the name and the encoded text of the validation set and of each test set."""
    tokens = folder.path / "tokens"
    with expecting(tokens / "tests.json"):
        tests = [str(name) for name in read_json(tokens / "tests.json")]
    yield "valid", store.open(tokens / "valid")
    for number, name in enumerate(tests):
        yield name, store.open(tokens / f"test.{number}")
