"""Common parts of the tasks on one-sided text, plain or labelled: their encoding, and the reading of plain text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from transduce.config.model import ModelSettings
from transduce.config.settings import Settings
from transduce.data.encoding import counted
from transduce.data.leaks import LeakCheck, watch
from transduce.data.preparation import Texts, read_plain_texts
from transduce.data.sources import line_sources
from transduce.data.text import Piece
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import seal_folder
from transduce.tasks.base import TRIED, Prepared, StoreT, Task, TextsT, report_leaks
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers


class OneSidedTask(Task[TextsT, StoreT]):
    """A task with one vocabulary, and one store for each set."""

    leak_unit: str
    """The name, in the plural, of the held-out examples that are searched for in the training text."""

    @abstractmethod
    def encode_set(
        self, folder: Path, records: Iterable[Any], vocabulary: Vocabulary, settings: Settings, *, name: str
    ) -> StoreT:
        """Encode a set into `folder`. `name`: what errors call it."""

    def check_set(self, store: StoreT, name: str, vocabulary: Vocabulary, settings: Settings, log: Log) -> None:
        """Raise `DataError` for a set that the task cannot use, or log what should be known of it."""

    @abstractmethod
    def text_of(self, record: Any) -> str:
        """The text of a record, which held-out text is compared with."""

    def size_of(self, record: Any) -> int:
        """The contribution of a record to `TextSet.size`."""
        return 1

    @abstractmethod
    def describe(self, store: StoreT, settings: Settings) -> dict[str, Any]:
        """The numbers of a set in data.json."""

    def check(self, settings: Settings, model: ModelSettings) -> None:
        data, form = settings.data, "plain text" if self.reads == "text" else "label<TAB>text"
        if data.demo:
            raise SettingsError(f"data.demo = {data.demo}: the built-in corpus is for task 'translation'")
        for corpus in (*data.train, *data.valid, *data.test):
            if corpus.path is None:
                raise SettingsError(f"task '{settings.task}' reads {form}; give path = \"...\", not src and tgt")
            if corpus.weight != 1:
                raise SettingsError(f"weight = {corpus.weight:g}: {form} has no weights; list a file twice instead")

    def lines(self, texts: TextsT) -> tuple[Iterable[str], Iterable[str]]:
        return (text.removesuffix("\n") for text in chain.from_iterable(texts.sample)), ()

    def encode(
        self, folder: RunFolder, texts: TextsT, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> Prepared[StoreT]:
        tokens, mark = folder.path / "tokens", self.fingerprint(settings, tokenizers, texts.marks)
        tokens.mkdir(exist_ok=True)

        def example_of(record: Any) -> tuple[str]:
            return (self.text_of(record),)

        held_out = (texts.valid, *texts.tests)
        checks = [LeakCheck(found.name, map(example_of, found.read()), unit=self.leak_unit) for found in held_out]
        described, stores = list[dict[str, Any]](), list[StoreT]()
        with log.progress("encoding") as bar:
            for at, found in texts.sets.items():
                records: Iterator[Any] = found.read()
                if at == "train":
                    records = counted(records, lambda n: bar.update(n / texts.train.size), self.size_of)
                    records = watch(records, example_of, checks)
                store = self.encode_set(tokens / at, records, tokenizers.tgt, settings, name=f"{found.name} text")
                self.check_set(store, found.name, tokenizers.tgt, settings, log)
                stores.append(store)
                described.append({"name": found.name, "files": found.files, **self.describe(store, settings)})
        write_json(tokens / "tests.json", [test.name for test in texts.tests])
        self.save_samples(tokens, texts)
        folder.save_tokenizers(tokenizers.save)
        seal_folder(tokens)
        folder.write_record("data.json", {"fingerprint": mark, "sets": described, "leaks": report_leaks(checks, log)})
        return Prepared(tokens, tokenizers, stores[0], stores[1])

    def save_samples(self, tokens: Path, texts: TextsT) -> None:
        """Keep what `finish` needs of the text besides the stores."""

    def held_out_stores(self, folder: RunFolder) -> Iterator[tuple[str, StoreT]]:
        """The validation set and the test sets, by name."""
        tokens = folder.path / "tokens"
        with expecting(tokens / "tests.json"):
            names = [str(name) for name in read_json(tokens / "tests.json")]
        for name, at in [("valid", "valid"), *((name, f"test.{i}") for i, name in enumerate(names))]:
            yield name, self.store.open(tokens / at)


class PlainTextTask(OneSidedTask[Texts[Piece], StoreT]):
    """Base of the tasks on plain text."""

    reads = "text"
    unit = "bytes of text"
    leak_unit = "lines"
    sources = staticmethod(line_sources)
    read_texts = staticmethod(read_plain_texts)

    def check(self, settings: Settings, model: ModelSettings) -> None:
        super().check(settings, model)
        context, limit = settings.data.context, model.position_limit
        if context is not None and limit is not None and context > limit:
            raise SettingsError(
                f"data.context = {context}: more than model.max_positions = {limit} learned positions; "
                "lower the first or raise the second"
            )

    def count_tokens(self, texts: Texts[Piece], tokenizers: Tokenizers) -> int:
        """Estimate the tokens of the training text from a few thousand pieces."""
        pieces = [text for (text,) in texts.sample[:TRIED]]
        n_bytes = sum(len(text.encode("utf-8")) for text in pieces)
        n_tokens = sum(map(len, tokenizers.tgt.encode_batch(pieces)))
        return round(n_tokens * texts.train.size / max(1, n_bytes))

    def text_of(self, record: Piece) -> str:
        return record.text

    def size_of(self, record: Piece) -> int:
        return len(record.text.encode("utf-8"))
