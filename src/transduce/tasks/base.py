"""What a task is: the stations of a training that differ from one kind of model to another.

`run.train` goes the same way for all of them: read, choose, learn a vocabulary, encode into the run folder, train and
validate, finish. A task says how each of these is done. It keeps nothing: what it reads and prepares is handed on.

Another task is one more class here beside, one line of the table, and a test. What it needs to think of:

- `read` opens and counts the text, so that every fault of the files is found before anything is made;
- `encode` writes what training eats into `tokens/` of the run folder, `data.json` at the very end, and `find_prepared`
  reads it back, so that a killed run goes on;
- `feeder` gives batches (`TrainingBatch`) as a function of (settings, seed, epoch), so that a resume is exact; their
  `inputs` go to the model's `forward`, which gives hidden states for their `targets`;
- `validator` may bring a judge, whose scores are logged, drawn in the report and can be stopped by;
- `finish` scores, keeps samples, and ends with `conclude`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn

from transduce.checkpoint import RunFolder
from transduce.choose import Chooser, Facts
from transduce.config import ModelSettings, Settings
from transduce.errors import SettingsError
from transduce.log import Log
from transduce.machine import Machine
from transduce.text.tokenizer import Tokenizers
from transduce.training.criteria import Criterion, tell_tokens
from transduce.training.feed import Feeder
from transduce.training.validate import Validator

TextsT = TypeVar("TextsT")
PreparedT = TypeVar("PreparedT")


class Task(ABC, Generic[TextsT, PreparedT]):
    """What is trained for. `TextsT`: what it reads; `PreparedT`: what training eats."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    """Names in MODELS that do this task; the first where none is asked for."""
    before_text: ClassVar[Sequence[Chooser]]
    before_training: ClassVar[Sequence[Chooser]]
    begins: ClassVar[bool] = False
    """Whether a training can begin with the weights of another run (`begin`)."""
    samples_pieces: ClassVar[bool] = False
    """Whether `tokenizer.sampling` has an effect."""
    use: ClassVar[str]
    """What one does with a finished run, as in: it is finished already; ... with it."""

    criterion: Criterion = staticmethod(tell_tokens)
    """What is made small."""

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse what cannot work for this task, before any work is done; `model` has the preset's sizes."""
        if "kind" in model.model_fields_set and model.kind not in self.kinds:
            raise SettingsError(
                f"model.kind = '{model.kind}' does not do task '{self.name}', which takes {' or '.join(self.kinds)}"
            )
        if settings.training.start is not None and not self.begins:
            raise SettingsError(f"--from (training.start): task '{self.name}' cannot begin with a run's weights yet")
        if settings.tokenizer.sampling and not self.samples_pieces:
            raise SettingsError(f"tokenizer.sampling has no effect in task '{self.name}'; leave it out")

    @abstractmethod
    def read(self, settings: Settings, log: Log) -> TextsT:
        """Open, count and tell the text that the settings name. Raises `DataError` for what is wrong with the files."""

    @abstractmethod
    def facts(self, asked: Settings, texts: TextsT, machine: Machine) -> Facts:
        """What choices may depend on, before encoding."""

    @abstractmethod
    def learn_vocabulary(self, texts: TextsT, settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
        """Train the vocabulary on the training text; with `may_grow`, a larger one where its characters need it."""

    @abstractmethod
    def count_tokens(self, texts: TextsT, tokenizers: Tokenizers, settings: Settings) -> int:
        """Tokens of the training text, as far as a batch's budget counts them, estimated."""

    @abstractmethod
    def encode(
        self, folder: RunFolder, texts: TextsT, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> PreparedT:
        """Encode all into the run folder."""

    @abstractmethod
    def find_prepared(self, folder: RunFolder, log: Log) -> PreparedT | None:
        """What an earlier start of the run has prepared, or None where it did not come that far."""

    def begin(self, model: nn.Module, settings: Settings, log: Log) -> None:
        """Give a fresh model what it is to begin with; most begin with nothing."""

    @abstractmethod
    def feeder(self, prepared: PreparedT, settings: Settings, device: torch.device) -> Feeder:
        """What the loop eats."""

    @abstractmethod
    def validator(self, model: nn.Module, prepared: PreparedT, settings: Settings, device: torch.device) -> Validator:
        """What scores the weights on held-out text."""

    @abstractmethod
    def tokenizers(self, prepared: PreparedT) -> Tokenizers:
        """The vocabulary of what was prepared."""

    @abstractmethod
    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """What follows training, whose weights are those of `update`: scores, samples, report, card."""
