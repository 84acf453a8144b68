"""Read the text of a run once: clean it, hold some out, sample it, and keep it for encoding.

On the way each record is sampled for the vocabulary, considered for the validation set and written to a temporary file
(`spooled`, `CleanedPairs`), from which it is encoded once the vocabulary is known.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from transduce.config.settings import Settings
from transduce.data.check_sample import Windows
from transduce.data.clean import CleanReport, HeldOutSources
from transduce.data.cleaned_pairs import CHUNK, VECTOR_CHUNK, CleanedPairs, PairCleaning
from transduce.data.corpus import Labelled, Pair, PairColumns, columns_of, number_of, sorted_labels
from transduce.data.leaks import comparable
from transduce.data.lines import bare_suffix
from transduce.data.sources import Source, Sources
from transduce.data.spool import Stream, spooled
from transduce.data.text import DOCUMENTS, Meter, Piece, choose_held_out, is_held_out, part_of
from transduce.data.workers import LocalWorkers, Workplace
from transduce.errors import DataError
from transduce.logging import Log
from transduce.text.training import SAMPLE_LINES, Reservoir

HELD_OUT_PAIRS, MAX_HELD_OUT_PAIRS = 0.01, 1000
HELD_OUT_TEXT, MAX_HELD_OUT_BYTES = 0.05, 1 << 20
HELD_OUT_LABELLED, MAX_HELD_OUT_LABELLED = 0.05, 2_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextSet(Generic[T]):
    """A training, validation or test set. `size`: its pairs, labelled texts or bytes."""

    name: str
    files: tuple[str, ...]
    read: Stream[T]
    size: int


@dataclass(frozen=True)
class Texts(Generic[T]):
    """The text of a run.

    `sample` contains the texts of random training records, or of all in order if they are few; `windows` a few places
    of each training corpus as it was read, for checks.
    """

    train: TextSet[T]
    valid: TextSet[T]
    tests: tuple[TextSet[T], ...]
    sample: Sequence[tuple[str, ...]]
    marks: tuple[bytes, ...]
    windows: tuple[Windows[Any], ...]

    @property
    def sets(self) -> dict[str, TextSet[T]]:
        """The sets by the names of their folders under `tokens`."""
        tests = {f"test.{number}": found for number, found in enumerate(self.tests)}
        return {"train": self.train, "valid": self.valid, **tests}


@dataclass(frozen=True)
class PairTexts(Texts[Pair]):
    """Sentence pairs; `report` is that of the cleaning of the training pairs, `cleaned` the pairs of each corpus."""

    report: CleanReport
    cleaned: tuple[CleanedPairs, ...]
    place: Workplace


@dataclass(frozen=True)
class LabelledTexts(Texts[Labelled]):
    """Labelled texts, and all their labels."""

    labels: tuple[str, ...]


def read_pair_texts(settings: Settings, log: Log, sources: Sources[Pair], place: Workplace) -> PairTexts:
    """Read and clean sentence pairs, each source once; test sets are not cleaned.

    Raises `DataError` for whatever is wrong with the text.
    """
    data, seed, files = settings.data, settings.training.seed, _files(sources.train)
    tests = read_test_pairs(sources)
    sample = Reservoir[tuple[str, str]](SAMPLE_LINES // (1 + settings.tokenizer.joint), seed=seed)
    cleaning = PairCleaning(data, seed, sample, None if sources.valid else HeldOutSources(MAX_HELD_OUT_PAIRS))
    windows, workers = tuple(map(Windows[Pair], sources.train)), place.workers or LocalWorkers(data.workers)
    marks = tuple(source.mark() for source in sources.train)
    rules = (data.demo, data.src_lang, data.tgt_lang, data.deduplicate, data.drop_copies, seed, not sources.valid)
    n = VECTOR_CHUNK if settings.model.reads_vectors else CHUNK
    corpora = [_watched(source, one, n) for source, one in zip(sources.train, windows, strict=True)]
    cleaned = cleaning.clean(corpora, place.results("cleaned", marks, rules, n), workers)
    report, place = cleaning.report, replace(place, workers=workers)
    report.require_pairs(data, f"training text ({', '.join(files[:4])}{', ...' * (len(files) > 4)})")
    sampled = sample.items
    if cleaning.held_out is None:
        valid = _read_set("valid", sources.valid, "sentence pair")
    else:
        n_pairs = report.kept
        if n_pairs < 2:
            raise DataError(f"{', '.join(files)}: one sentence pair is not enough to train on and to hold one out")
        n_held_out = min(MAX_HELD_OUT_PAIRS, max(1, round(n_pairs * HELD_OUT_PAIRS)))
        chosen, report.held_out = cleaning.held_out.choose(n_held_out)
        report.require_pairs(data, f"training text without the validation set ({', '.join(files[:4])})")
        log.say(
            f"no validation text given: holding out {len(chosen):,} source sentences of {n_pairs:,} pairs (by seed)"
        )
        cleaned = [replace(one, without=frozenset(chosen)) for one in cleaned]
        first = list(chosen.values())
        valid = TextSet("valid", files, lambda: iter(first), len(first))
        sampled = [pair for pair in sampled if comparable(pair[0]) not in chosen]
    train = TextSet("train", files, lambda: chain.from_iterable(one() for one in cleaned), report.kept)
    return PairTexts(train, valid, tests, sampled, marks, windows, report, tuple(cleaned), place)


def _watched(source: Source[Pair], windows: Windows[Pair], n: int) -> Iterator[PairColumns]:
    """The pairs of a corpus, `n` at a time, of which the windows keep some."""
    for pairs in source.columns(n) if source.columns else columns_of(source.read(), n):
        windows.see(len(pairs), pairs.pair)
        yield pairs


def read_test_pairs(sources: Sources[Pair]) -> tuple[TextSet[Pair], ...]:
    """The test sets, under distinct names: those of their files. They are not cleaned."""
    return _read_tests([_stem(source) for source in sources.tests], sources.tests, "sentence pair")


def read_scored_pairs(sources: Sources[Pair]) -> dict[str, list[tuple[str, str]]]:
    """(Source, reference) pairs of the test sets by name; without any, those of the validation set."""
    sets = {test.name: test.read() for test in read_test_pairs(sources)}
    if not sets:
        sets = {"valid": (pair for source in sources.valid for pair in source.read())}
    return {name: [(pair.src, pair.tgt) for pair in pairs] for name, pairs in sets.items()}


def read_plain_texts(settings: Settings, log: Log, sources: Sources[str], place: Workplace) -> Texts[Piece]:
    """Read running text as documents, each source once.

    Raises `DataError` for whatever is wrong with the text, or where there is too little.
    """
    data, seed = settings.data, settings.training.seed
    sample = Reservoir[tuple[int, int, str]](SAMPLE_LINES, seed=seed)
    windows = tuple(map(Windows[str], sources.train))
    lines = [places.watch(source.read()) for source, places in zip(sources.train, windows, strict=True)]
    everything, sizes = _read_documents(
        "train", sources.train, data.documents, place.folder, lines=lines, sample=sample
    )
    named = zip(_distinct([source.name for source in sources.tests]), sources.tests, strict=True)
    tests = tuple(_read_documents(name, (source,), data.documents, place.folder)[0] for name, source in named)
    marks = tuple(source.mark() for source in sources.train)
    if sources.valid:
        valid, _ = _read_documents("valid", sources.valid, data.documents, place.folder)
        return Texts(everything, valid, tests, [(text,) for _, _, text in sample.items], marks, windows)
    whole = data.documents != "file"
    held = choose_held_out(sizes, share=HELD_OUT_TEXT, most=MAX_HELD_OUT_BYTES, seed=seed, whole=whole)
    meter = Meter()
    held_pieces = meter.watch(part_of(everything.read(), held, held_out=True))
    stream = spooled(held_pieces, place.folder, lambda row: Piece(*row))
    n_held, files = sum(meter.sizes), everything.files
    if not 0 < n_held < everything.size:
        raise DataError(f"{', '.join(files)}: too little text to hold some out; give data.valid")
    which = "documents drawn by seed" if whole else "the end of each file"
    log.say(f"no validation text given: holding out {n_held:,} of {everything.size:,} bytes ({which})")
    return Texts(
        replace(
            everything,
            read=lambda: part_of(everything.read(), held, held_out=False),
            size=everything.size - n_held,
        ),
        TextSet("valid", files, stream, n_held),
        tests,
        [(text,) for document, end, text in sample.items if not is_held_out(held, document, end)],
        marks,
        windows,
    )


def read_labelled_texts(settings: Settings, log: Log, sources: Sources[Labelled], place: Workplace) -> LabelledTexts:
    """Read labelled texts, each source once. The labels are those of the training text, unless the settings name them.

    Raises `DataError` for whatever is wrong with the text.
    """
    data, seed, files = settings.data, settings.training.seed, tuple(sorted(set(_files(sources.train))))
    counts, sample = Counter[str](), Reservoir[tuple[int, Labelled]](SAMPLE_LINES // 2, seed=seed)
    n = n_texts = 0

    windows = tuple(map(Windows[Labelled], sources.train))

    def counted() -> Iterator[Labelled]:
        nonlocal n, n_texts
        everything = (places.watch(source.read()) for source, places in zip(sources.train, windows, strict=True))
        for example in chain.from_iterable(everything):
            n_texts = n_texts or len(example.texts)
            _check_example(example, n_texts, data.labels)
            sample.add((n, example))
            counts[example.label] += 1
            n += 1
            yield example

    everything = spooled(counted(), place.folder, lambda row: Labelled(row[0], tuple(row[1]), tuple(row[2])))
    marks = tuple(source.mark() for source in sources.train)
    labels = data.labels or sorted_labels(counts)  # of all text: an only example may be held out
    if len(labels) < 2:
        only = repr(labels[0]) if labels else "none"
        raise DataError(f"the training text has only one label, {only}: there is nothing to classify")
    tests = _read_tests([source.name for source in sources.tests], sources.tests, "text")
    if sources.valid:
        valid, held = _read_set("valid", sources.valid, "text"), set[int]()
    else:
        valid, held = _hold_out(everything, n, files, seed=seed)
        counts -= Counter(example.label for example in valid.read())
        log.say(f"no validation text given: holding out {valid.size:,} texts (by seed)")
    for example in chain(valid.read(), *(test.read() for test in tests)):
        _check_example(example, n_texts, labels)
    log.say(f"labels: {', '.join(labels)}")
    for label in sorted(set(labels) - counts.keys()):
        log.warn(f"label {label!r} does not occur in the training text: it will not be learned")
    return LabelledTexts(
        TextSet("train", files, lambda: (e for i, e in enumerate(everything()) if i not in held), n - len(held)),
        valid,
        tests,
        [example.texts for i, example in sample.items if i not in held],
        marks,
        windows,
        labels,
    )


def _hold_out(
    everything: Stream[Labelled], n: int, files: tuple[str, ...], *, seed: int
) -> tuple[TextSet[Labelled], set[int]]:
    """Random examples as the validation set, and their numbers."""
    n_held = min(MAX_HELD_OUT_LABELLED, round(n * HELD_OUT_LABELLED))
    if not n_held:
        raise DataError(f"{', '.join(files)}: {n} labelled texts are too few to hold some out; give data.valid")
    held = set(random.Random(seed).sample(range(n), n_held))
    chosen = [example for i, example in enumerate(everything()) if i in held]
    return TextSet("valid", files, lambda: iter(chosen), n_held), held


def _check_example(example: Labelled, n_texts: int, labels: Sequence[str] | None) -> None:
    """Refuse an unknown label, or another number of texts than in other lines."""
    if labels is not None:
        number_of(example, labels)
    if len(example.texts) != n_texts:
        file, line = example.place
        raise DataError(f"{file}, line {line}: {len(example.texts)} texts, but other lines have {n_texts}")


def _distinct(names: Sequence[str]) -> list[str]:
    """Make the names of test sets unique, and different from `train` and `valid`: a later one gets its number.

    >>> _distinct(["a", "b", "a", "valid"])
    ['a', 'b', 'a.3', 'valid.4']
    """
    found: list[str] = []
    for number, name in enumerate(names, 1):
        while name in ("train", "valid", *found):
            name += f".{number}"
        found.append(name)
    return found


def _files(sources: Sequence[Source[Any]]) -> tuple[str, ...]:
    return tuple(file for source in sources for file in source.files)


def _stem(source: Source[Pair]) -> str:
    """`test2016` of test2016.en.gz."""
    name = (source.files or (source.name,))[0]
    suffix = bare_suffix(Path(name))
    return name[: name.lower().rindex(suffix)] if suffix else name


def _read_tests(names: Sequence[str], sources: Sequence[Source[T]], unit: str) -> tuple[TextSet[T], ...]:
    """Test sets, in memory, under distinct names."""
    return tuple(_read_set(name, (one,), unit) for name, one in zip(_distinct(names), sources, strict=True))


def _read_set(name: str, sources: Sequence[Source[T]], unit: str) -> TextSet[T]:
    """A held-out set, in memory."""
    records, files = [record for source in sources for record in source.read()], _files(sources)
    if not records:
        raise DataError(f"{', '.join(files) or name}: no {unit} found")
    return TextSet(name, files, lambda: iter(records), len(records))


def _read_documents(
    name: str,
    sources: Sequence[Source[str]],
    documents: str,
    spool_in: Path | None,
    *,
    lines: Sequence[Iterator[str]] | None = None,
    sample: Reservoir[tuple[int, int, str]] | None = None,
) -> tuple[TextSet[Piece], list[int]]:
    """Read a set of running text into the spool; and the sizes of its documents.

    `lines`: of each source, if they are read already.
    """
    meter = Meter()

    def pieces() -> Iterator[Piece]:
        each = lines or (source.read() for source in sources)
        for piece in meter.watch(chain.from_iterable(DOCUMENTS[documents](one) for one in each)):
            if sample is not None:
                sample.add((meter.document, meter.position, piece.text))
            yield piece

    stream = spooled(pieces(), spool_in, lambda row: Piece(*row))
    if not sum(meter.sizes):
        raise DataError(f"{', '.join(_files(sources)) or name}: no text found")
    return TextSet(name, _files(sources), stream, sum(meter.sizes)), meter.sizes
