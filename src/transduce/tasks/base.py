"""The protocol of a task: what differs between trainings of one kind of model and another.

`transduce.pipeline.train` is the same for all tasks: read the text, choose unset settings, train a vocabulary, encode
into the run folder, train and validate, finish. A task defines each of these steps.

To add a task, write a subclass of `Task` in a file of this package, add it to TASKS in `registry.py`, and test it:

- `wording` and `inherited` are what commands, reports and fine-tuning need to know about it;
- `uses` names the settings that have an effect here but not in every task;
- `sources` and `read_texts` open and count the text, so that every error in the files is found before anything is made;
- `lines` yields the text that a vocabulary is trained on;
- `encode` writes stores of class `store` to `tokens/` in the run folder, seals it, and at the very end writes
  `data.json` with the `fingerprint`, so that a killed run can resume; the settings that decide what is stored are in
  STORED;
- `feeder` yields batches (`TrainingBatch`) as a function of (settings, seed, epoch), so that a resume is exact;
- `reads` is the form of its rows, by which the doctor checks files; `longest_rows` makes its largest batch;
- `validation` may have a judge, whose scores are logged, drawn in the report and used for early stopping;
- `finish` scores the finished run and keeps samples, from which the report and the model card are made;
- `evaluate` scores a finished run on files, with the options of its class in `evaluation.options`;
- `scored_model` scores a finished run once more, example by example, for comparisons.

Tasks on one-sided text start from `monolingual.OneSidedTask`, which defines the steps that depend on the text only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import nn

from transduce.config.model import ModelSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.batch import TrainingBatch
from transduce.data.corpus import corpus_files
from transduce.data.encoding import fingerprint_of
from transduce.data.leaks import LeakCheck
from transduce.data.preparation import Texts
from transduce.data.sources import Sources
from transduce.data.store import Store
from transduce.data.workers import Workplace
from transduce.errors import RunFolderError
from transduce.evaluation.result_files import Wording
from transduce.evaluation.significance import ScoredModel
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import expecting, read_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.manifest import check_sealed
from transduce.tasks.defaults import Defaults, Facts
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.training.feed import Feeder
from transduce.training.loss import Criterion, predict_tokens
from transduce.training.validate import Judge, Validator

TRIED = 2000  # records that are encoded to estimate the number of tokens

Form = Literal["pairs", "text", "labelled"]
"""(source, target), (line,), or (label, text[, text])."""

STORED = (
    *("src_lang", "tgt_lang", "max_length", "max_ratio", "deduplicate", "drop_copies", "demo"),
    *("documents", "context", "labels"),
)
"""Settings of `data` that decide, in some task, what is stored."""

TextsT = TypeVar("TextsT", bound=Texts[Any])
StoreT = TypeVar("StoreT", bound=Store)


@dataclass(frozen=True)
class Prepared(Generic[StoreT]):
    """Encoded text, in the folder `tokens`."""

    tokens: Path
    tokenizers: Tokenizers
    train: StoreT
    valid: StoreT


@dataclass(frozen=True)
class Validation:
    """The arguments of `Validator` that depend on the task. `criterion`: None for that of the training."""

    batches: Callable[[], Iterable[TrainingBatch]]
    judge: Judge | None = None
    n_bytes: int = 0
    criterion: Criterion | None = None
    in_order: bool = False


class Task(ABC, Generic[TextsT, StoreT]):
    """A kind of training. `TextsT`: what it reads; `StoreT`: what it stores.

    A task has no state: what it reads and prepares is passed on.
    """

    name: ClassVar[str]
    wording: ClassVar[Wording]
    """Wording for its models in reports."""
    defaults: ClassVar[Defaults]
    """Values of unset settings."""
    uses: ClassVar[frozenset[str]]
    """Settings that have an effect in this task and not in all. Those that only other tasks use are refused."""
    inherited: ClassVar[tuple[str, ...]] = ()
    """Settings that a fine-tuned run takes, where unset, from the run of the same task that it starts from."""
    reads: ClassVar[Form]
    """The form of a row of its text, by which the doctor checks the files."""
    store: type[StoreT]
    """The class of its encoded text."""

    sources: Callable[[Settings], Sources[Any]]
    """Names the text that the settings ask for; nothing is opened yet."""
    read_texts: Callable[..., TextsT]
    """Reads it, one of the functions of `data.preparation`."""
    unit: ClassVar[str]
    """The unit of the size of a set, in the plural."""
    scored_model: Callable[[RunFolder], ScoredModel]
    """Loads a finished run for `transduce compare`, to be scored on its held-out text."""

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse settings that cannot work, before any work is done. `model` has the preset's sizes."""

    def read(
        self, settings: Settings, log: Log, sources: Sources[Any] | None = None, *, place: Workplace | None = None
    ) -> TextsT:
        """Read the text once, by default that of `self.sources(settings)`.

        Raises `DataError` for whatever is wrong with the text.
        """
        texts = self.read_texts(settings, log, sources or self.sources(settings), place or Workplace())
        self.check_texts(texts, settings)
        log.say(f"{texts.train.size:,} {self.unit} to train on, {texts.valid.size:,} to validate on")
        return texts

    def check_texts(self, texts: TextsT, settings: Settings) -> None:
        """Raise `DataError` for text that the task cannot use."""

    def facts(self, asked: Settings, texts: TextsT, machine: Machine) -> Facts:
        """The facts that choices may depend on, before encoding."""
        return Facts(
            asked=asked,
            settings=asked,
            machine=machine,
            sizes=self.defaults.sizes,
            amount=texts.train.size,
            unit=self.unit,
        )

    @abstractmethod
    def lines(self, texts: TextsT) -> tuple[Iterable[str], Iterable[str]]:
        """A sample of the training text of both sides; the second is empty where there is one."""

    @abstractmethod
    def count_tokens(self, texts: TextsT, tokenizers: Tokenizers) -> int:
        """Tokens of the training text, as far as a batch's budget counts them, estimated from a few records."""

    @abstractmethod
    def encode(
        self, folder: RunFolder, texts: TextsT, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> Prepared[StoreT]:
        """Encode all into the run folder."""

    def find_prepared(self, folder: RunFolder, log: Log) -> Prepared[StoreT] | None:
        """The data that an earlier start of the run has prepared, or None if it did not get that far.

        Warns if the training text has changed since then. Raises `RunFolderError` for a damaged file.
        """
        if not has_read_text(folder.path) or not folder.has_tokenizers:
            return None
        try:
            check_sealed(folder.path / "tokens")
            prepared, settings = self.open_prepared(folder), folder.settings
        except RunFolderError as error:
            raise RunFolderError(
                f"{error}; if the training text has not changed, remove {folder.path / 'data.json'} and run the same "
                "command to read it again"
            ) from None
        with expecting(folder.path / "data.json"):
            then = read_json(folder.path / "data.json").get("fingerprint")
        files = [path for corpus in settings.data.train for path in corpus_files(corpus)]
        if not all(path.exists() for path in files):
            return prepared
        marks = [source.mark() for source in self.sources(settings).train]
        if then != self.fingerprint(settings, prepared.tokenizers, marks):
            log.warn("the training text has changed since this run began; the run continues with the original text")
        return prepared

    def open_prepared(self, folder: RunFolder) -> Prepared[StoreT]:
        """The data that `encode` wrote into the run folder. Raises `RunFolderError` where it is missing or damaged."""
        tokens = folder.path / "tokens"
        stores = (self.store.open(tokens / name) for name in ("train", "valid"))
        return Prepared(tokens, load_tokenizers(folder), *stores)

    def fingerprint(self, settings: Settings, tokenizers: Tokenizers, marks: Sequence[bytes]) -> str:
        """Of everything that decides what is stored; `encode` writes it into data.json. `marks`: of the sources."""
        data = settings.data
        rules = (f"{key}: {getattr(data, key)!r}" for key in STORED)
        return fingerprint_of(
            marks, tokenizers, *rules, f"held out: {not data.valid}", f"seed: {settings.training.seed}"
        )

    def criterion(self, settings: Settings) -> Criterion:
        """The loss of a training."""
        return predict_tokens

    @abstractmethod
    def feeder(self, prepared: Prepared[StoreT], settings: Settings, device: torch.device) -> Feeder:
        """Yields the batches of the training loop."""

    @abstractmethod
    def longest_rows(self, prepared: Prepared[StoreT], settings: Settings) -> Prepared[StoreT]:
        """Return `prepared` with training rows of the maximum length, enough for the batch that needs most memory."""

    @abstractmethod
    def validation(self, prepared: Prepared[StoreT], settings: Settings, device: torch.device) -> Validation:
        """The validation of this task."""

    def validator(
        self, model: nn.Module, prepared: Prepared[StoreT], settings: Settings, device: torch.device
    ) -> Validator:
        """Scores the weights on held-out text."""
        found, training = self.validation(prepared, settings, device), settings.training
        return Validator(
            model,
            found.batches,
            smoothing=training.label_smoothing,
            judge=found.judge,
            n_bytes=found.n_bytes,
            precision=training.precision,
            criterion=found.criterion or self.criterion(settings),
            in_order=found.in_order,
        )

    @abstractmethod
    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """Save scores and samples after training; the final weights are those of `update`. A kill repeats it."""

    @abstractmethod
    def evaluate(self, run: Path, options: Any, *, device: str = "auto") -> Any:
        """Score a finished run on files. `options`: of the class that EVALUATION_OPTIONS has for the task.

        The result has `lines`, to print, and `to_json`.
        """


def n_rows_for(length: int, settings: Settings) -> int:
    """A number of rows of this length that is more than a batch."""
    training = settings.training
    budget = training.micro_batch_tokens or resolved(training.batch_tokens, "training.batch_tokens")
    return 2 + budget // length * 2


def report_leaks(checks: Sequence[LeakCheck], log: Log) -> list[dict[str, Any]]:
    """Warn of held-out text in the training text; the reports for data.json."""
    for check in checks:
        if warning := check.warning():
            log.warn(warning)
    return [check.to_json() for check in checks]
