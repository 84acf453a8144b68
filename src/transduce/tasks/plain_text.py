"""Plain text becomes what training eats: what all tasks on running text share. As `prepare.py` does it for pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from transduce.config import Settings
from transduce.data.arrays import check_ids
from transduce.data.corpus import distinct
from transduce.data.leaks import SeenCheck, watch
from transduce.data.sources import Source, Sources, line_sources
from transduce.data.stored import read_names
from transduce.data.text import DOCUMENTS, Piece, choose_held_out, measure, part_of
from transduce.data.text_store import TextStore, build_text_store, fingerprint_of_text
from transduce.errors import DataError, SettingsError
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import PreparedT, Task
from transduce.tasks.choices import Facts
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers, load_tokenizers

HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 1 << 20  # of the text, and bytes
TRIED = 2000  # pieces that are encoded to estimate the tokens

Stream = Callable[[], Iterator[Piece]]


@dataclass(frozen=True, slots=True)
class PlainTexts:
    """The text of a run, as streams that can be read again and again, and how much there is of each."""

    train: Stream
    valid: Stream
    tests: tuple[tuple[str, Stream], ...]
    n_bytes: int
    n_valid_bytes: int
    files: tuple[str, ...]
    valid_files: tuple[str, ...]
    digests: tuple[bytes, ...]

    def checks(self) -> list[SeenCheck]:
        """What looks for the lines of the held-out sets in the training text."""
        sets = {"valid": self.valid, **dict(self.tests)}
        return [SeenCheck(name, (piece.text for piece in stream()), unit="lines") for name, stream in sets.items()]


@dataclass(frozen=True, slots=True)
class PreparedText:
    """What training eats."""

    tokenizers: Tokenizers
    train: TextStore
    valid: TextStore


def check_files(settings: Settings) -> None:
    """Refuse text that is not plain."""
    data = settings.data
    if data.demo:
        raise SettingsError(
            f"data.demo = {data.demo}: the built-in corpus is of sentence pairs, for task 'translation'"
        )
    for corpus in (*data.train, *data.valid, *data.test):
        if corpus.path is None:
            raise SettingsError(f"task '{settings.task}' takes plain text: give path = \"...\", not src and tgt")
        if corpus.weight != 1:
            raise SettingsError(f"weight = {corpus.weight:g}: plain text has no weights; name a file twice instead")


def check_text(settings: Settings) -> None:
    """Refuse settings that text which must come back as it was does not know."""
    check_files(settings)
    if settings.training.start is not None:  # whose vocabulary gives text back too
        return
    given = settings.tokenizer.model_fields_set
    if "exact" in given and not settings.tokenizer.exact:
        raise SettingsError(f"tokenizer.exact = false: task '{settings.task}' needs text to come back as it was")
    if "normalization" in given and settings.tokenizer.normalization != "identity":
        raise SettingsError(
            f"tokenizer.normalization = '{settings.tokenizer.normalization}': task '{settings.task}' keeps text as it "
            "is; leave it out"
        )


def read_plain_texts(settings: Settings, log: Log, sources: Sources[str] | None = None) -> PlainTexts:
    """Open and count. Raises `DataError` for whatever is wrong with the files, or where there is too little text."""
    data, sources = settings.data, sources or line_sources(settings.data)
    files, valid_files = (tuple(n for s in part for n in s.files) for part in (sources.train, sources.valid))
    digests = tuple(source.digest() for source in sources.train)
    everything = _stream(sources.train, data.documents)
    size = measure(everything())
    if not size.n_bytes:
        raise DataError(f"{', '.join(files)}: there is no text")
    tests = _tests(sources.tests, data.documents)
    if sources.valid:
        valid = _stream(sources.valid, data.documents)
        n_valid = measure(valid()).n_bytes
        if not n_valid:
            raise DataError(f"{', '.join(valid_files)}: there is no text")
        return PlainTexts(everything, valid, tests, size.n_bytes, n_valid, files, valid_files, digests)
    whole = data.documents != "file"
    held = choose_held_out(size, share=HELD_OUT_SHARE, most=HELD_OUT_MOST, seed=settings.training.seed, whole=whole)
    train, valid = (_part(everything, held, held_out=held_out) for held_out in (False, True))
    n_train, n_valid = (measure(part()).n_bytes for part in (train, valid))
    if not n_train or not n_valid:
        raise DataError(f"{', '.join(files)}: too little text to hold some out to validate on; give --valid-text")
    which = "documents drawn by seed" if whole else "the end of each file"
    log.say(f"no validation text given: {n_valid:,} of {size.n_bytes:,} bytes are held out for it ({which})")
    return PlainTexts(train, valid, tests, n_train, n_valid, files, files, digests)


class PlainTextTask(Task[PlainTexts, PreparedT]):
    """What all tasks on running text do alike."""

    def sources(self, settings: Settings) -> Sources[str]:
        """Lines of plain text."""
        return line_sources(settings.data)

    def facts(self, asked: Settings, texts: PlainTexts, machine: Machine) -> Facts:
        """The number of bytes decides."""
        return Facts(asked, asked, machine, self.defaults, texts.n_bytes)

    def lines(self, texts: PlainTexts, settings: Settings) -> tuple[Iterator[str], Iterator[str]]:
        """The lines of the training text, and nothing, as there is one side only."""
        return (piece.text.removesuffix("\n") for piece in texts.train()), iter(())

    def count_tokens(self, texts: PlainTexts, tokenizers: Tokenizers, settings: Settings) -> int:
        """Tokens of the training text, estimated from its first few thousand pieces."""
        pieces = [piece.text for piece in islice(texts.train(), TRIED)]
        n_bytes = sum(len(text.encode("utf-8")) for text in pieces)
        return round(sum(map(len, tokenizers.tgt.encode_batch(pieces))) * texts.n_bytes / max(1, n_bytes))


def encode_text(
    folder: RunFolder, texts: PlainTexts, tokenizers: Tokenizers, settings: Settings, log: Log
) -> PreparedText:
    """Encode all into the run folder."""
    tokens, tokenizer = folder.path / "tokens", tokenizers.tgt
    tokens.mkdir(exist_ok=True)
    checks = texts.checks()
    with log.progress("encoding") as bar:
        train = build_text_store(
            tokens / "train",
            watched(texts.train(), checks),
            tokenizer,
            fingerprint=fingerprint_of_plain(settings, tokenizer, texts.digests),
            progress=lambda n_read: bar.update(n_read / texts.n_bytes),
        )
    valid = build_text_store(tokens / "valid", texts.valid(), tokenizer, name="validation text")
    tests = [
        (name, build_text_store(tokens / f"test.{i}", stream(), tokenizer, name=name))
        for i, (name, stream) in enumerate(texts.tests)
    ]
    write_json(tokens / "tests.json", [name for name, _ in tests])
    folder.save_tokenizers(tokenizers)
    described = [_described("train", texts.files, train), _described("valid", texts.valid_files, valid)]
    described += [_described(name, (), s) for name, s in tests]
    report = {"fingerprint": train.fingerprint, "sets": described, "leaks": told_leaks(checks, log)}
    folder.write_record("data.json", report)
    return PreparedText(tokenizers, train, valid)


def watched(pieces: Iterator[Piece], checks: Sequence[SeenCheck]) -> Iterator[Piece]:
    """Training text that all checks look through on its way."""
    return watch(pieces, lambda piece: piece.text, checks)


def told_leaks(checks: Sequence[SeenCheck], log: Log) -> list[dict[str, Any]]:
    """Warn of held-out text in the training text; what data.json keeps of it."""
    for check in checks:
        if warning := check.warning():
            log.warn(warning)
    return [check.to_json() for check in checks]


def open_prepared_text(folder: RunFolder) -> PreparedText:
    """What `encode_text` wrote into the run folder."""
    tokens, tokenizers = folder.path / "tokens", load_tokenizers(folder)
    train, valid = TextStore.open(tokens / "train"), TextStore.open(tokens / "valid")
    for store, name in ((train, "train"), (valid, "valid")):
        check_ids(tokens / name / "ids.npy", store.ids, tokenizers.n_tgt)
    return PreparedText(tokenizers, train, valid)


def read_test_stores(folder: RunFolder) -> dict[str, TextStore]:
    """The test sets, by name."""
    tokens = folder.path / "tokens"
    return {name: TextStore.open(tokens / f"test.{i}") for i, name in enumerate(read_names(tokens / "tests.json"))}


def _tests(sources: Sequence[Source[str]], documents: str) -> tuple[tuple[str, Stream], ...]:
    tests = []
    for name, source in zip(distinct([source.name for source in sources]), sources, strict=True):
        stream = _stream((source,), documents)
        if not measure(stream()).n_bytes:
            raise DataError(f"{source.name}: there is no text")
        tests.append((name, stream))
    return tuple(tests)


def _stream(sources: Sequence[Source[str]], documents: str) -> Stream:
    return lambda: chain.from_iterable(DOCUMENTS[documents](source.read()) for source in sources)


def _part(stream: Stream, held: dict[int, int], *, held_out: bool) -> Stream:
    return lambda: part_of(stream(), held, held_out=held_out)


def fingerprint_of_plain(settings: Settings, tokenizer: Vocabulary, digests: Sequence[bytes], *marks: str) -> str:
    """Of the training text and everything that decides what is stored of it."""
    data = settings.data
    usual = (f"held out: {not data.valid}", f"documents: {data.documents}", f"seed: {settings.training.seed}")
    return fingerprint_of_text(digests, tokenizer, *usual, *marks)


def _described(name: str, files: Sequence[str], store: TextStore) -> dict[str, object]:
    numbers = {"documents": store.n_documents, "bytes": store.n_bytes, "tokens": store.n_tokens}
    return {"name": name, "files": list(files), **numbers}
