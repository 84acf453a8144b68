"""What the tasks on plain text share: reading it once, holding some out, encoding it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from transduce.config import Settings
from transduce.data.arrays import check_ids, read_names
from transduce.data.corpus import distinct
from transduce.data.encoding import encode_text, fingerprint_of_text
from transduce.data.leaks import LeakCheck, watch
from transduce.data.sources import Source, Sources, line_sources
from transduce.data.spool import Spool, Stream
from transduce.data.store import LabelStore, SentenceStore, TextStore
from transduce.data.text import DOCUMENTS, Meter, Piece, Size, choose_held_out, is_held_out, part_of
from transduce.errors import DataError, SettingsError
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import PreparedT, Task
from transduce.tasks.choices import Facts
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.text.training import SAMPLE_LINES, Reservoir

StoreT = TypeVar("StoreT", TextStore, SentenceStore, LabelStore)

HELD_OUT_SHARE, MAX_HELD_OUT_BYTES = 0.05, 1 << 20
TRIED = 2000  # pieces that are encoded to estimate the number of tokens


@dataclass(frozen=True, slots=True)
class TextPart:
    """One set of text: training, validation or test."""

    name: str
    files: tuple[str, ...]
    stream: Stream[Piece]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class PlainTexts:
    """The text of a run. `sample` contains random training pieces, or all of them in order if they are few."""

    train: TextPart
    valid: TextPart
    tests: tuple[TextPart, ...]
    sample: Sequence[str]
    digests: tuple[bytes, ...]

    @property
    def parts(self) -> dict[str, TextPart]:
        """The folders of the encoded parts under `tokens`, and what they contain."""
        tests = {f"test.{number}": part for number, part in enumerate(self.tests)}
        return {"train": self.train, "valid": self.valid, **tests}

    def checks(self) -> list[LeakCheck]:
        """Search the training text for lines of the held-out sets."""
        held_out = (self.valid, *self.tests)
        return [LeakCheck(part.name, ((p.text,) for p in part.stream()), unit="lines") for part in held_out]


@dataclass(frozen=True)  # no slots: they break the constructors of aliases such as PreparedText
class PreparedStores(Generic[StoreT]):
    """Encoded text of one side."""

    tokenizers: Tokenizers
    train: StoreT
    valid: StoreT


PreparedText = PreparedStores[TextStore]


def check_files(settings: Settings) -> None:
    """Refuse data that is not plain text."""
    data = settings.data
    if data.demo:
        raise SettingsError(f"data.demo = {data.demo}: the built-in corpus has sentence pairs, for task 'translation'")
    for corpus in (*data.train, *data.valid, *data.test):
        if corpus.path is None:
            raise SettingsError(f"task '{settings.task}' reads plain text; give path = \"...\", not src and tgt")
        if corpus.weight != 1:
            raise SettingsError(f"weight = {corpus.weight:g}: plain text has no weights; list a file twice instead")


def check_text(settings: Settings) -> None:
    """Refuse tokenizer settings with which text would not be reproduced exactly."""
    check_files(settings)
    if settings.training.start is not None:  # its vocabulary is exact already
        return
    given = settings.tokenizer.model_fields_set
    if "exact" in given and not settings.tokenizer.exact:
        raise SettingsError(f"tokenizer.exact = false: task '{settings.task}' needs exact text; leave it out")
    if "normalization" in given and settings.tokenizer.normalization != "identity":
        raise SettingsError(
            f"tokenizer.normalization = '{settings.tokenizer.normalization}': task '{settings.task}' needs exact "
            "text; leave it out"
        )


def read_plain_texts(
    settings: Settings, log: Log, sources: Sources[str] | None = None, *, spool_in: Path | None = None
) -> PlainTexts:
    """Read all text, each source once.

    `spool_in`: the folder whose disk holds the temporary file that the parts are read from. Raises `DataError` for
    whatever is wrong with the text, or where there is too little.
    """
    data, sources, spool = settings.data, sources or line_sources(settings.data), Spool(spool_in)
    seed, whole = settings.training.seed, data.documents != "file"
    sample = Reservoir[tuple[int, int, str]](SAMPLE_LINES, seed=seed)
    everything, size = _read("training text", sources.train, data.documents, spool, sample=sample)
    names = distinct([source.name for source in sources.tests])
    tests = [_read(n, (s,), data.documents, spool)[0] for n, s in zip(names, sources.tests, strict=True)]
    digests = tuple(source.digest() for source in sources.train)
    if sources.valid:
        valid, _ = _read("valid", sources.valid, data.documents, spool)
        return PlainTexts(everything, valid, tuple(tests), [text for _, _, text in sample.items], digests)
    held = choose_held_out(size, share=HELD_OUT_SHARE, most=MAX_HELD_OUT_BYTES, seed=seed, whole=whole)
    meter = Meter()
    stream = _spooled(meter.watch(part_of(everything.stream(), held, held_out=True)), spool)
    valid = TextPart("valid", everything.files, stream, meter.size.n_bytes)
    train = TextPart(
        "training text",
        everything.files,
        lambda: part_of(everything.stream(), held, held_out=False),
        size.n_bytes - valid.n_bytes,
    )
    if not train.n_bytes or not valid.n_bytes:
        raise DataError(f"{', '.join(train.files)}: too little text to hold some out; give --valid-text")
    which = "documents drawn by seed" if whole else "the end of each file"
    log.say(f"no validation text given: holding out {valid.n_bytes:,} of {size.n_bytes:,} bytes ({which})")
    kept = [text for document, end, text in sample.items if not is_held_out(held, document, end)]
    return PlainTexts(train, valid, tuple(tests), kept, digests)


class PlainTextTask(Task[PlainTexts, PreparedT]):
    """What the tasks on plain text have in common."""

    def sources(self, settings: Settings) -> Sources[str]:
        """Lines of plain text."""
        return line_sources(settings.data)

    def read(
        self, settings: Settings, log: Log, sources: Sources[str] | None = None, *, spool_in: Path | None = None
    ) -> PlainTexts:
        """Documents of plain text."""
        texts = read_plain_texts(settings, log, sources, spool_in=spool_in)
        self.check_texts(texts, settings)
        log.say(f"{texts.train.n_bytes:,} bytes of text to train on, {texts.valid.n_bytes:,} to validate on")
        return texts

    def check_texts(self, texts: PlainTexts, settings: Settings) -> None:
        """Raise `DataError` for text that the task cannot use."""

    def facts(self, asked: Settings, texts: PlainTexts, machine: Machine) -> Facts:
        """The number of bytes."""
        return Facts(asked, asked, machine, self.defaults, texts.train.n_bytes)

    def lines(self, texts: PlainTexts, settings: Settings) -> tuple[Iterable[str], Iterable[str]]:
        """A sample of the lines of the training text; the second side is empty."""
        return (text.removesuffix("\n") for text in texts.sample), ()

    def count_tokens(self, texts: PlainTexts, tokenizers: Tokenizers, settings: Settings) -> int:
        """Estimate the tokens of the training text from a few thousand pieces."""
        pieces = texts.sample[:TRIED]
        n_bytes = sum(len(text.encode("utf-8")) for text in pieces)
        n_tokens = sum(map(len, tokenizers.tgt.encode_batch(pieces)))
        return round(n_tokens * texts.train.n_bytes / max(1, n_bytes))


def encode_texts(
    folder: RunFolder, texts: PlainTexts, tokenizers: Tokenizers, settings: Settings, log: Log
) -> PreparedText:
    """Encode all text into the run folder."""
    tokens, tokenizer, checks = folder.path / "tokens", tokenizers.tgt, texts.checks()
    described, stores = list[dict[str, Any]](), dict[str, TextStore]()
    tokens.mkdir(exist_ok=True)
    mark = fingerprint_of_plain(settings, tokenizer, texts.digests)
    with log.progress("encoding") as bar:
        for at, part in texts.parts.items():
            train = part is texts.train
            store = stores[at] = encode_text(
                tokens / at,
                watched(part.stream(), checks) if train else part.stream(),
                tokenizer,
                fingerprint=mark if train else "",
                name=part.name,
                progress=(lambda n_read: bar.update(n_read / texts.train.n_bytes)) if train else None,
            )
            numbers = {"documents": store.n_documents, "bytes": store.n_bytes, "tokens": store.n_tokens}
            described.append({"name": at if at in ("train", "valid") else part.name, "files": part.files, **numbers})
    write_records(folder, texts, tokenizers, {"fingerprint": mark, "sets": described}, checks, log)
    return PreparedText(tokenizers, stores["train"], stores["valid"])


def watched(pieces: Iterator[Piece], checks: Sequence[LeakCheck]) -> Iterator[Piece]:
    """Yield training text unchanged and compare it with the held-out sets."""
    return watch(pieces, lambda piece: (piece.text,), checks)


def write_records(
    folder: RunFolder,
    texts: PlainTexts,
    tokenizers: Tokenizers,
    report: dict[str, Any],
    checks: Sequence[LeakCheck],
    log: Log,
) -> None:
    """Store the names of the test sets, the vocabulary, and at the very end data.json, which completes the text."""
    write_json(folder.path / "tokens" / "tests.json", [part.name for part in texts.tests])
    folder.save_tokenizers(tokenizers.save)
    folder.write_record("data.json", report | {"leaks": report_leaks(checks, log)})


def report_leaks(checks: Sequence[LeakCheck], log: Log) -> list[dict[str, Any]]:
    """Warn of held-out text in the training text; the reports for data.json."""
    for check in checks:
        if warning := check.warning():
            log.warn(warning)
    return [check.to_json() for check in checks]


def open_prepared_text(folder: RunFolder) -> PreparedText:
    """Open what `encode_texts` has written into the run folder."""
    return open_stores(folder, TextStore.open)


def open_stores(folder: RunFolder, open_store: Callable[[Path], StoreT]) -> PreparedStores[StoreT]:
    """Open the training and validation store of a run. Raises `RunFolderError` where one is missing or damaged."""
    tokens, tokenizers = folder.path / "tokens", load_tokenizers(folder)
    stores = {name: open_store(tokens / name) for name in ("train", "valid")}
    for name, store in stores.items():
        check_ids(tokens / name / "ids.npy", store.ids, tokenizers.n_tgt)
    return PreparedStores(tokenizers, **stores)


def read_test_stores(folder: RunFolder) -> dict[str, TextStore]:
    """The test sets by name."""
    tokens = folder.path / "tokens"
    return {name: TextStore.open(tokens / f"test.{i}") for i, name in enumerate(read_names(tokens / "tests.json"))}


def fingerprint_of_plain(settings: Settings, tokenizer: Vocabulary, digests: Sequence[bytes], *marks: str) -> str:
    """Of the training text and everything that decides how it is stored."""
    data = settings.data
    usual = (f"held out: {not data.valid}", f"documents: {data.documents}", f"seed: {settings.training.seed}")
    return fingerprint_of_text(digests, tokenizer, *usual, *marks)


def _read(
    name: str,
    sources: Sequence[Source[str]],
    documents: str,
    spool: Spool,
    *,
    sample: Reservoir[tuple[int, int, str]] | None = None,
) -> tuple[TextPart, Size]:
    """Read sources to the end, into the spool; and the sizes of their documents."""
    meter, files = Meter(), tuple(file for source in sources for file in source.files)
    pieces = meter.watch(chain.from_iterable(DOCUMENTS[documents](source.read()) for source in sources))

    def sampled() -> Iterator[Piece]:
        for piece in pieces:
            if sample is not None:
                sample.add((meter.document, meter.position, piece.text))
            yield piece

    stream = _spooled(sampled(), spool)
    if not meter.size.n_bytes:
        raise DataError(f"{', '.join(files) or name}: no text found")
    return TextPart(name, files, stream, meter.size.n_bytes), meter.size


def _spooled(pieces: Iterator[Piece], spool: Spool) -> Stream[Piece]:
    return spool.write(pieces, lambda piece: [piece.text, piece.ends], lambda row: Piece(*row))
