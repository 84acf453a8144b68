"""What a task is: the stations of a training that differ from one kind of model to another.

`run.train` goes the same way for all of them: read, choose, learn a vocabulary, encode into the run folder, train and
validate, finish. A task says how each of these is done. It keeps nothing: what it reads and prepares is handed on.

Another task is one more class here beside, one line of its table, and a test; and, as what stands below this folder
cannot ask it, a line in each of these: `purposes.PURPOSES` (what its models are for), `evaluation.wording.WORDINGS`
(what report and card say) and, where other programs can take its models, `exchange.EXPORTS`; and, where settings come
from the run that it begins with, `tasks.start._TAKEN`. What it needs to think of:

- `read` opens and counts the text, so that every fault of the files is found before anything is made;
- `lines` gives the text that a vocabulary is learned from, or grows by (`vocabulary.py`, `start.py`);
- `encode` writes what training eats into `tokens/` of the run folder, and `data.json` with its `fingerprint` at the
  very end; `open_prepared` reads it back, so that a killed run goes on;
- `uses` names the settings that have an effect here and not everywhere: others are refused;
- `feeder` gives batches (`TrainingBatch`) as a function of (settings, seed, epoch), so that a resume is exact; their
  `inputs` go to the model's `forward`, which gives hidden states for their `targets`;
- `reads` is the form of its rows, by which the doctor looks at the files, and `longest` its largest batch;
- `validator` may bring a judge, whose scores are logged, drawn in the report and can be stopped by;
- `finish` scores, keeps samples, and ends with `conclude`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import nn

from transduce.config import DataSettings, DecodingSettings, EvaluationSettings, ModelSettings, Settings
from transduce.config.model import kinds_for
from transduce.data.corpus import corpus_files
from transduce.data.sources import Sources
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import expecting, read_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.tasks.defaults import Chooser, Facts
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.training.criteria import Criterion, tell_tokens
from transduce.training.feed import Feeder
from transduce.training.validate import Validator

SOME = frozenset(
    {
        *(f"data.{key}" for key in DataSettings.model_fields if key not in ("root", "train", "valid", "test", "demo")),
        *(f"tokenizer.{key}" for key in ("joint", "sampling", "mask", "exact")),
        "training.valid_bleu_sentences",
        *(f"decoding.{key}" for key in DecodingSettings.model_fields),
        *(f"evaluation.{key}" for key in EvaluationSettings.model_fields),
    }
)
"""Settings that have an effect in some tasks only; what is not among a task's `uses` is refused."""

Form = Literal["pairs", "text", "labelled"]
"""(source, target), (line,), or (label, text[, text])."""

TextsT = TypeVar("TextsT")
PreparedT = TypeVar("PreparedT")


class Task(ABC, Generic[TextsT, PreparedT]):
    """What is trained for. `TextsT`: what it reads; `PreparedT`: what training eats."""

    name: ClassVar[str]
    before_text: ClassVar[Sequence[Chooser]]
    before_training: ClassVar[Sequence[Chooser]]
    uses: ClassVar[frozenset[str]]
    """The settings of SOME that have an effect."""
    reads: ClassVar[Form]
    """What a row of its text is, for whoever looks at the files without reading all of them."""

    criterion: Criterion = staticmethod(tell_tokens)
    """What is made small."""

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse what cannot work for this task, before any work is done; `model` has the preset's sizes."""
        if model.kind not in (kinds := kinds_for(self.name)):
            raise SettingsError(
                f"model.kind = '{model.kind}' does not fit task '{self.name}'; use {' or '.join(kinds)}"
            )
        for name in sorted(SOME - self.uses):
            section, key = name.split(".")
            part = getattr(settings, section)
            if key in part.model_fields_set and getattr(part, key) != type(part).model_fields[key].default:
                raise SettingsError(f"{name} has no effect in task '{self.name}'; leave it out")

    @abstractmethod
    def sources(self, settings: Settings) -> Sources[Any]:
        """The text that the settings name; nothing is opened yet."""

    @abstractmethod
    def read(self, settings: Settings, log: Log, sources: Sources[Any] | None = None) -> TextsT:
        """Read the text, by default that of `self.sources(settings)`.

        Raises `DataError` for whatever is wrong with it.
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
        """What an earlier start of the run has prepared, or None where it did not come that far.

        Warns where the training text is no more what it was.
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
            log.warn("the training text has changed since this run began; the run goes on with the text of then")
        return prepared

    @abstractmethod
    def open_prepared(self, folder: RunFolder) -> PreparedT:
        """What `encode` wrote into the run folder."""

    @abstractmethod
    def fingerprint(self, settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
        """Of everything that decides what is stored; `encode` writes it into data.json. `digests`: of the sources."""

    @abstractmethod
    def feeder(self, prepared: PreparedT, settings: Settings, device: torch.device) -> Feeder:
        """What the loop eats."""

    @abstractmethod
    def longest(self, prepared: PreparedT, settings: Settings) -> PreparedT:
        """What was prepared, with training rows of the greatest length, enough for a batch: what takes most memory."""

    @abstractmethod
    def validator(self, model: nn.Module, prepared: PreparedT, settings: Settings, device: torch.device) -> Validator:
        """What scores the weights on held-out text."""

    @abstractmethod
    def tokenizers(self, prepared: PreparedT) -> Tokenizers:
        """The vocabulary of what was prepared."""

    @abstractmethod
    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """What follows training, whose weights are those of `update`: scores, samples, report, card."""
