"""Read the text of a run once: clean it, hold out a part, sample it, and keep it for encoding.

Each record is sampled for the vocabulary, considered for the validation set, and written to a temporary file
(`spooled`, `CleanedPairs`). It is encoded from there once the vocabulary is known.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from transduce.config.section import traits_of
from transduce.config.settings import DataSettings, Direction, Settings
from transduce.data.clean import CHUNK, CleanedPairs, CleanReport, HeldOutSources, PairCleaning, reverse_pair
from transduce.data.copies import CaseCopies
from transduce.data.leaks import comparable
from transduce.data.lines import bare_suffix, n_bytes
from transduce.data.pairs import Pair
from transduce.data.reading import DOCUMENTS, Labelled, Piece, Source, Sources, Windows, number_of, sorted_labels
from transduce.data.workers import Stream, Workplace, spooled
from transduce.errors import DataError
from transduce.logging import Log
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import SAMPLE_LINES, Reservoir

T = TypeVar("T")


def located(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int, int]]:
    """Yield (piece, number of its document, end of the piece in the document in bytes of UTF-8)."""
    document = end = 0
    for piece in pieces:
        end += n_bytes(piece.text)
        yield piece, document, end
        if piece.ends:
            document, end = document + 1, 0


def choose_held_out(sizes: Sequence[int], *, share: float, most: int, seed: int, whole: bool) -> dict[int, int]:
    """Choose the text to hold out. Returns, for some documents, the byte at which their held-out part begins.

    sizes: bytes of each document. share: fraction of the text. most: limit in bytes. whole: hold out whole
    documents, drawn by `seed`, instead of the end of each document. At least one document is left.
    """
    total = sum(sizes)
    wanted = min(most, total * share)
    if not whole:
        return {i: math.ceil(n * (1 - wanted / total)) for i, n in enumerate(sizes)}
    held, order = dict[int, int](), list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    for i in order[:-1]:
        held[i] = 0
        wanted -= sizes[i]
        if wanted <= 0:
            break
    return held


def part_of(pieces: Iterable[Piece], held: Mapping[int, int], *, held_out: bool) -> Iterator[Piece]:
    """Yield the text that `choose_held_out` chose, or the remaining text.

    If a document is divided between both, its parts are two documents.
    """
    is_open = False  # whether a part of the document has been yielded, but not its end
    for piece, document, end in located(pieces):
        if is_held_out(held, document, end) == held_out:
            yield piece
            is_open = not piece.ends
        elif is_open:
            yield Piece("", ends=True)
            is_open = False


def is_held_out(held: Mapping[int, int], document: int, end: int) -> bool:
    """Whether the piece that ends at byte `end` of a document is held out. `held`: see `choose_held_out`."""
    return end > held.get(document, math.inf)


HELD_OUT_PAIRS, MAX_HELD_OUT_PAIRS = 0.01, 1000
ENOUGH_PAIRS, MAX_SHARE = 200, 1 / 15  # fewer give unreliable scores; small text needs every pair
HELD_OUT_TEXT, MAX_HELD_OUT_BYTES = 0.05, 1 << 20
HELD_OUT_LABELLED, MAX_HELD_OUT_LABELLED = 0.05, 2_000
N_ENCODED = 2000
"""Number of records that are encoded to estimate the number of tokens."""


@dataclass(frozen=True, slots=True)
class TextSet(Generic[T]):
    """A training, validation or test set.

    `size`: its number of pairs, labelled texts or bytes. `direction`: languages of held-out pairs.
    """

    name: str
    files: tuple[str, ...]
    read: Stream[T]
    size: int
    direction: Direction = ("src", "tgt")


@dataclass(frozen=True)
class Texts(Generic[T]):
    """The text of a run.

    `sample`: texts of random training records, or of all records in order if there are few. `marks`: hashes of the
    training files. `windows`: some consecutive records of each training corpus, not cleaned, for checks.
    """

    train: TextSet[T]
    valid: TextSet[T]
    tests: tuple[TextSet[T], ...]
    sample: Sequence[tuple[str, ...]]
    marks: tuple[bytes, ...]
    windows: tuple[Windows[Any], ...]

    @property
    def sets(self) -> dict[str, TextSet[T]]:
        """The sets by the names of their subfolders of the folder `tokens`."""
        tests = {f"test.{number}": test for number, test in enumerate(self.tests)}
        return {"train": self.train, "valid": self.valid, **tests}

    def lines(self) -> tuple[Iterator[str], Iterator[str]]:
        """A sample of the source and target lines to train on. If there is only one side, the second is empty."""
        return (text.removesuffix("\n") for text in chain.from_iterable(self.sample)), iter(())

    def count_tokens(self, tokenizers: Tokenizers) -> int:
        """Estimate the number of training tokens, counted as in batches, from a few records."""
        pieces = [text for (text,) in self.sample[:N_ENCODED]]
        size = sum(map(n_bytes, pieces))
        n_tokens = sum(map(len, tokenizers.tgt.encode_batch(pieces)))
        return round(n_tokens * self.train.size / max(1, size))


@dataclass(frozen=True)
class PairTexts(Texts[Pair]):
    """The sentence pairs of a run.

    `valid_sets`: the validation pairs of each direction. `report`: on the cleaning of the training pairs. `cleaned`:
    the training pairs of each corpus, followed by the reversed corpora if both directions are trained.
    """

    valid_sets: tuple[TextSet[Pair], ...]
    report: CleanReport
    cleaned: tuple[CleanedPairs, ...]
    workplace: Workplace

    def lines(self) -> tuple[Iterator[str], Iterator[str]]:
        return (pair[0] for pair in self.sample), (pair[1] for pair in self.sample)

    def count_tokens(self, tokenizers: Tokenizers) -> int:
        tokenizers, pairs = tokenizers.unframed(), self.sample[: min(N_ENCODED, tokenizers.src.chunk)]
        sides = (tokenizers.src.encode_batch([p[0] for p in pairs]), tokenizers.tgt.encode_batch([p[1] for p in pairs]))
        longer = [1 + max(len(src), len(tgt)) for src, tgt in zip(*sides, strict=True)]
        return round(sum(longer) * self.train.size / max(1, len(longer)))


@dataclass(frozen=True)
class LabelledTexts(Texts[Labelled]):
    """The labelled texts of a run, and all their labels."""

    labels: tuple[str, ...]

    def count_tokens(self, tokenizers: Tokenizers) -> int:
        """Estimate the tokens of all texts, with [CLS] and separators."""
        examples = self.sample[:: max(1, len(self.sample) // min(N_ENCODED, tokenizers.tgt.chunk))]
        ids = tokenizers.tgt.encode_batch([text for example in examples for text in example])
        return round((sum(map(len, ids)) / len(examples) + 1 + len(examples[0])) * self.train.size)


def read_pair_texts(settings: Settings, log: Log, sources: Sources[Pair], workplace: Workplace) -> PairTexts:
    """Read and clean sentence pairs. Each source is read once. Test sets are not cleaned.

    Raises `DataError` if the text has a fault.
    """
    data, seed, files = settings.data, settings.training.seed, _files(sources.train)
    tests = read_test_pairs(sources)
    share = (1 + settings.tokenizer.joint) * (1 + data.both_directions)
    sample = Reservoir[tuple[str, str]](SAMPLE_LINES // share, seed=seed)
    cleaning = PairCleaning(data, seed, sample, None if sources.valid else HeldOutSources(MAX_HELD_OUT_PAIRS))
    windows = tuple(map(Windows[Pair], sources.train))
    marks = tuple(source.mark() for source in sources.train)
    fields = (key for key, field in DataSettings.model_fields.items() if not traits_of(field).changeable)
    rules = [(key, getattr(data, key)) for key in fields]
    saved = workplace.results("cleaned", marks, rules, seed, not sources.valid, CHUNK)
    cleaned = cleaning.clean([corpus.read() for corpus in windows], saved, n=CHUNK)
    report, workplace = cleaning.report, replace(workplace, n_workers=data.workers)
    report.require_pairs(data, f"training text ({', '.join(files[:4])}{', ...' * (len(files) > 4)})")
    sampled = sample.items
    if cleaning.held_out is None:
        held_out = [(pair, source.direction) for source in sources.valid for pair in source.read()]
        if not held_out:
            raise DataError(f"{', '.join(_files(sources.valid)) or 'valid'}: no sentence pair found")
    else:
        n_pairs = report.kept
        if n_pairs < 2:
            raise DataError(f"{', '.join(files)}: one sentence pair is not enough to train on and to hold one out")
        fewest = max(1, min(ENOUGH_PAIRS, int(n_pairs * MAX_SHARE)))
        n_held_out = min(MAX_HELD_OUT_PAIRS, max(fewest, round(n_pairs * HELD_OUT_PAIRS)))
        chosen, report.held_out = cleaning.held_out.choose(n_held_out, n_pairs // 5)  # frequent sources have many pairs
        report.require_pairs(data, f"training text without the validation set ({', '.join(files[:4])})")
        log.say(
            f"no validation text given: holding out {len(chosen):,} source sentences of {n_pairs:,} pairs (by seed)"
        )
        cleaned = [replace(corpus, without=frozenset(chosen)) for corpus in cleaned]
        held_out = [(held.pair, sources.train[held.corpus].direction) for held in chosen.values()]
        if data.both_directions:
            held_out += [(reverse_pair(pair), direction[::-1]) for pair, direction in held_out]
        sampled = [pair for pair in sampled if comparable(pair[0]) not in chosen]
    valid_files = _files(sources.valid) or files
    valid_sets = _by_direction(held_out, valid_files)
    if data.both_directions:
        cleaned += [replace(corpus, shift=len(cleaned)) for corpus in cleaned]
        sampled += [(tgt, src) for src, tgt in sampled]
    if (case := CaseCopies.of(settings)) is not None:  # the vocabulary needs pieces in capitals too
        texts = (Pair(*pair, "", 0) for pair in sampled)
        sampled = [some[:2] for pair in texts for some in (pair, case.copy_of(pair)) if some is not None]
    n_train = report.kept * (1 + data.both_directions)
    train = TextSet("train", files, lambda: chain.from_iterable(corpus() for corpus in cleaned), n_train)
    valid = TextSet("valid", valid_files, lambda: (pair for pair, _ in held_out), len(held_out))
    return PairTexts(train, valid, tests, sampled, marks, windows, valid_sets, report, tuple(cleaned), workplace)


def _by_direction(pairs: Sequence[tuple[Pair, Direction]], files: tuple[str, ...]) -> tuple[TextSet[Pair], ...]:
    sets = defaultdict[Direction, list[Pair]](list)
    for pair, direction in pairs:
        sets[direction].append(pair)
    suffix = ".{}-{}" if len(sets) > 1 else ""
    return tuple(
        TextSet("valid" + suffix.format(*direction), files, partial(iter, held_out), len(held_out), direction)
        for direction, held_out in sets.items()
    )


def read_test_pairs(sources: Sources[Pair]) -> tuple[TextSet[Pair], ...]:
    """Read the test sets into memory. They are named after their files, and not cleaned."""
    names = [_stem(source) for source in sources.tests]
    if len({source.direction for source in (*sources.train, *sources.valid, *sources.tests)}) > 1:
        names = [f"{name}.{'-'.join(test.direction)}" for name, test in zip(names, sources.tests, strict=True)]
    return _read_tests(names, sources.tests, "sentence pair")


class ScoredSet(NamedTuple):
    """A test set to translate and score: (source, reference) pairs of one direction."""

    name: str
    direction: Direction
    pairs: list[tuple[str, str]]

    @classmethod
    def of(cls, text_set: TextSet[Pair]) -> ScoredSet:
        return cls(text_set.name, text_set.direction, [(pair.src, pair.tgt) for pair in text_set.read()])


def read_scored_sets(sources: Sources[Pair]) -> list[ScoredSet]:
    """Read the test sets or, if there are none, the validation sets."""
    if tests := read_test_pairs(sources):
        return list(map(ScoredSet.of, tests))
    held_out = [(pair, source.direction) for source in sources.valid for pair in source.read()]
    return list(map(ScoredSet.of, _by_direction(held_out, ())))


def read_plain_texts(settings: Settings, log: Log, sources: Sources[str], workplace: Workplace) -> Texts[Piece]:
    """Read running text as documents. Each source is read once.

    Raises `DataError` if the text has a fault or is too little.
    """
    data, seed, folder = settings.data, settings.training.seed, workplace.folder
    sample = Reservoir[tuple[int, int, str]](SAMPLE_LINES, seed=seed)
    windows = tuple(map(Windows[str], sources.train))

    def sampled() -> Iterator[Piece]:
        pieces = chain.from_iterable(DOCUMENTS[data.documents](corpus.read()) for corpus in windows)
        for piece, document, end in located(pieces):
            sample.add((document, end, piece.text))
            yield piece

    def read_set(name: str, *sources: Source[str]) -> TextSet[Piece]:
        pieces = chain.from_iterable(DOCUMENTS[data.documents](source.read()) for source in sources)
        return _spooled_set(name, _files(sources), pieces, folder)[0]

    everything, sizes = _spooled_set("train", _files(sources.train), sampled(), folder)
    named = zip(_distinct([source.name for source in sources.tests]), sources.tests, strict=True)
    tests = tuple(read_set(name, source) for name, source in named)
    marks = tuple(source.mark() for source in sources.train)
    given_valid = (read_set("valid", *sources.valid),) if sources.valid else ()
    for text_set in (everything, *given_valid, *tests):
        if not text_set.size:
            raise DataError(f"{', '.join(text_set.files) or text_set.name}: no text found")
    if given_valid:
        train, valid, held = everything, given_valid[0], dict[int, int]()
    else:
        whole = data.documents != "file"
        held = choose_held_out(sizes, share=HELD_OUT_TEXT, most=MAX_HELD_OUT_BYTES, seed=seed, whole=whole)
        pieces, files = part_of(everything.read(), held, held_out=True), everything.files
        valid, _ = _spooled_set("valid", files, pieces, folder)
        if not 0 < valid.size < everything.size:
            raise DataError(f"{', '.join(files)}: too little text to hold some out; give data.valid", "data.valid")
        rest = everything.size - valid.size
        train = replace(everything, read=lambda: part_of(everything.read(), held, held_out=False), size=rest)
        which = "documents drawn by seed" if whole else "the end of each file"
        log.say(f"no validation text given: holding out {valid.size:,} of {everything.size:,} bytes ({which})")
    texts = [(text,) for document, end, text in sample.items if not is_held_out(held, document, end)]
    return Texts(train, valid, tests, texts, marks, windows)


def read_labelled_texts(
    settings: Settings, log: Log, sources: Sources[Labelled], workplace: Workplace
) -> LabelledTexts:
    """Read labelled texts. Each source is read once.

    The labels are taken from the training text, unless the settings name them.

    Raises `DataError` if the text has a fault.
    """
    data, seed, files = settings.data, settings.training.seed, tuple(sorted(set(_files(sources.train))))
    counts, sample = Counter[str](), Reservoir[tuple[int, Labelled]](SAMPLE_LINES // 2, seed=seed)
    windows, n_texts = tuple(map(Windows[Labelled], sources.train)), 0

    def counted() -> Iterator[Labelled]:
        nonlocal n_texts
        for n, example in enumerate(chain.from_iterable(corpus.read() for corpus in windows)):
            n_texts = n_texts or len(example.texts)
            _check_example(example, n_texts, data.labels)
            sample.add((n, example))
            counts[example.label] += 1
            yield example

    everything = spooled(counted(), workplace.folder, lambda row: Labelled(row[0], tuple(row[1]), *row[2:]))
    marks = tuple(source.mark() for source in sources.train)
    # Count labels before texts are held out, because the only example of a label may be held out.
    n, labels = counts.total(), data.labels or sorted_labels(counts)
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
    n_held = min(MAX_HELD_OUT_LABELLED, round(n * HELD_OUT_LABELLED))
    if not n_held:
        raise DataError(
            f"{', '.join(files)}: {n} labelled texts are too few to hold some out; give data.valid", "data.valid"
        )
    held = set(random.Random(seed).sample(range(n), n_held))
    chosen = [example for i, example in enumerate(everything()) if i in held]
    return TextSet("valid", files, partial(iter, chosen), n_held), held


def _check_example(example: Labelled, n_texts: int, labels: Sequence[str] | None) -> None:
    """Raise `DataError` for an unknown label, or if the example does not have `n_texts` texts."""
    if labels is not None:
        number_of(example, labels)
    if len(example.texts) != n_texts:
        where = f"{example.file}, line {example.line}"
        raise DataError(f"{where}: {len(example.texts)} texts, but other lines have {n_texts}")


def _distinct(names: Sequence[str]) -> list[str]:
    """Append numbers to names of test sets, so that all are distinct, and none is `train` or `valid`.

    >>> _distinct(["a", "b", "a", "valid"])
    ['a', 'b', 'a.3', 'valid.4']
    """
    distinct: list[str] = []
    for number, name in enumerate(names, 1):
        while name in ("train", "valid", *distinct):
            name += f".{number}"
        distinct.append(name)
    return distinct


def _files(sources: Sequence[Source[Any]]) -> tuple[str, ...]:
    return tuple(file for source in sources for file in source.files)


def _stem(source: Source[Pair]) -> str:
    """A source's file name without the suffix, such as `test2016` for test2016.en.gz."""
    name = (source.files or (source.name,))[0]
    suffix = bare_suffix(Path(name))
    return name[: name.lower().rindex(suffix)] if suffix else name


def _read_tests(names: Sequence[str], sources: Sequence[Source[T]], unit: str) -> tuple[TextSet[T], ...]:
    """Read test sets into memory, under distinct names."""
    return tuple(_read_set(name, (source,), unit) for name, source in zip(_distinct(names), sources, strict=True))


def _read_set(name: str, sources: Sequence[Source[T]], unit: str) -> TextSet[T]:
    records, files = [record for source in sources for record in source.read()], _files(sources)
    if not records:
        raise DataError(f"{', '.join(files) or name}: no {unit} found")
    return TextSet(name, files, partial(iter, records), len(records), sources[0].direction)


def _spooled_set(
    name: str, files: tuple[str, ...], pieces: Iterable[Piece], folder: Path | None
) -> tuple[TextSet[Piece], list[int]]:
    """Write running text into a temporary file in `folder`. Returns its set, and the size of each document in bytes."""
    sizes = list[int]()

    def measured() -> Iterator[Piece]:
        for piece, _, end in located(pieces):
            yield piece
            if piece.ends:
                sizes.append(end)

    stream = spooled(measured(), folder, Piece._make)
    return TextSet(name, files, stream, sum(sizes)), sizes
