"""The protocol of a task: what differs between trainings of one kind of model and another.

`transduce.pipeline.train` is the same for all tasks: read the text, choose unset settings, train a vocabulary, encode
into the run folder, train and validate, finish. A task defines each of these steps.

To add a task, write a subclass of `Task` in a file of this package, add it to TASKS in `registry.py`, and test it:

- `wording`, `evaluated_on` and `inherited` are what commands, reports and fine-tuning need to know about it;
- `uses` names the settings that have an effect here but not in every task;
- `read` opens and counts the text, so that every error in the files is found before anything is made;
- `lines` yields the text that a vocabulary is trained on;
- `encode` writes the encoded text to `tokens/` in the run folder, and at the very end `data.json` with its
  `fingerprint`; `open_prepared` reads it, so that a killed run can resume;
- `feeder` yields batches (`TrainingBatch`) as a function of (settings, seed, epoch), so that a resume is exact;
- `reads` is the form of its rows, by which the doctor checks files; `longest` makes its largest batch;
- `validator` may have a judge, whose scores are logged, drawn in the report and used for early stopping;
- `finish` scores, keeps samples, and calls `finalize`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import nn

from transduce.config import ModelSettings, Settings
from transduce.data.corpus import corpus_files
from transduce.data.sources import Sources
from transduce.evaluation.records import Wording
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import expecting, read_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.tasks.choices import Defaults, Facts
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.training.feed import Feeder
from transduce.training.loss import Criterion, predict_tokens
from transduce.training.validate import Validator

Form = Literal["pairs", "text", "labelled"]
"""(source, target), (line,), or (label, text[, text])."""

TextsT = TypeVar("TextsT")
PreparedT = TypeVar("PreparedT")


class TaskInfo:
    """What the models of a task are for. `Task` adds how they are trained."""

    name: ClassVar[str]
    wording: ClassVar[Wording]
    evaluated_on: ClassVar[str] = ""
    """The option of `transduce evaluate` that names the text to evaluate on; empty: there is none."""
    evaluate_options: ClassVar[frozenset[str]] = frozenset()
    """The other options of `transduce evaluate` that have an effect, besides those of all tasks."""


class Task(TaskInfo, ABC, Generic[TextsT, PreparedT]):
    """A kind of training. `TextsT`: what it reads; `PreparedT`: what the training loop reads.

    A task has no state: what it reads and prepares is passed on.
    """

    defaults: ClassVar[Defaults]
    """Values of unset settings."""
    uses: ClassVar[frozenset[str]]
    """Settings that have an effect in this task and not in all. Those that only other tasks use are refused."""
    inherited: ClassVar[tuple[str, ...]] = ()
    """Settings that a fine-tuned run takes, where unset, from the run of the same task that it starts from."""
    reads: ClassVar[Form]
    """The form of a row of its text, by which the doctor checks the files."""

    criterion: Criterion = staticmethod(predict_tokens)
    """The loss."""

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse settings that cannot work, before any work is done. `model` has the preset's sizes."""

    @abstractmethod
    def sources(self, settings: Settings) -> Sources[Any]:
        """The text that the settings name; nothing is opened yet."""

    @abstractmethod
    def read(
        self, settings: Settings, log: Log, sources: Sources[Any] | None = None, *, spool_in: Path | None = None
    ) -> TextsT:
        """Read the text once, by default that of `self.sources(settings)`.

        `spool_in`: the folder whose disk holds the temporary file from which it is encoded (default: the system's
        temporary folder). Raises `DataError` for whatever is wrong with the text.
        """

    @abstractmethod
    def facts(self, asked: Settings, texts: TextsT, machine: Machine) -> Facts:
        """What choices may depend on, before encoding."""

    @abstractmethod
    def lines(self, texts: TextsT, settings: Settings) -> tuple[Iterable[str], Iterable[str]]:
        """The training text of both sides, to learn a vocabulary from; the second is empty where there is one."""

    @abstractmethod
    def count_tokens(self, texts: TextsT, tokenizers: Tokenizers, settings: Settings) -> int:
        """Tokens of the training text, as far as a batch's budget counts them, estimated."""

    @abstractmethod
    def encode(
        self, folder: RunFolder, texts: TextsT, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> PreparedT:
        """Encode all into the run folder."""

    def find_prepared(self, folder: RunFolder, log: Log) -> PreparedT | None:
        """What an earlier start of the run has prepared, or None if it did not get that far.

        Warns if the training text has changed since then.
        """
        if not has_read_text(folder.path) or not folder.has_tokenizers:
            return None
        prepared, settings = self.open_prepared(folder), folder.settings
        with expecting(folder.path / "data.json"):
            then = read_json(folder.path / "data.json").get("fingerprint")
        files = [path for corpus in settings.data.train for path in corpus_files(corpus)]
        if not all(path.exists() for path in files):
            return prepared
        digests = [source.digest() for source in self.sources(settings).train]
        if then != self.fingerprint(settings, load_tokenizers(folder), digests):
            log.warn("the training text has changed since this run began; the run continues with the original text")
        return prepared

    @abstractmethod
    def open_prepared(self, folder: RunFolder) -> PreparedT:
        """What `encode` wrote into the run folder."""

    @abstractmethod
    def fingerprint(self, settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
        """Of everything that decides what is stored; `encode` writes it into data.json. `digests`: of the sources."""

    @abstractmethod
    def feeder(self, prepared: PreparedT, settings: Settings, device: torch.device) -> Feeder:
        """Yields the batches of the training loop."""

    @abstractmethod
    def longest(self, prepared: PreparedT, settings: Settings) -> PreparedT:
        """`prepared` with training rows of the maximum length, enough for a batch: the batch that needs most memory."""

    @abstractmethod
    def validator(self, model: nn.Module, prepared: PreparedT, settings: Settings, device: torch.device) -> Validator:
        """Scores the weights on held-out text."""

    @abstractmethod
    def tokenizers(self, prepared: PreparedT) -> Tokenizers:
        """The vocabulary of what was prepared."""

    @abstractmethod
    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """Write scores, samples, report and card after training; the final weights are those of `update`."""
