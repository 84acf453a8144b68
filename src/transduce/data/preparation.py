"""Prepare sentence pairs for training: read, clean, split, encode, check for leaks.

The corpus is read once (`read_texts`). On the way each pair is cleaned, sampled for the vocabulary, considered for the
validation set and written to a temporary file, from which it is encoded (`encode`) once the vocabulary is known. The
encoded text stays in the run folder until the run has finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transduce.config import DataSettings, Settings
from transduce.data.clean import Cleaner, CleanReport, HeldOutSources, format_cleaning
from transduce.data.corpus import Pair, distinct
from transduce.data.encoding import encode_pairs, fingerprint_of_pairs
from transduce.data.leaks import LeakCheck, comparable, watch
from transduce.data.lines import bare_suffix
from transduce.data.sources import Source, Sources, pair_sources
from transduce.data.spool import Spool, Stream
from transduce.data.store import TokenStore
from transduce.demo.corpus import demo_pairs
from transduce.errors import DataError
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.text.training import SAMPLE_LINES, Reservoir

HELD_OUT_SHARE, MAX_HELD_OUT = 0.01, 1000
DEMO_HELD_OUT = 500  # pairs of each held-out split of the built-in corpus
TRIED = 2000  # pairs that are encoded to estimate the number of tokens


@dataclass(frozen=True, slots=True)
class DemoSource:
    """Pairs of the built-in corpus."""

    name: str
    n: int
    seed: int
    files: tuple[str, ...] = ()

    def read(self) -> Iterator[Pair]:
        """The first `n` pairs of this split."""
        for number, pair in enumerate(demo_pairs(self.name, self.n, seed=self.seed), 1):
            yield Pair(pair.src, pair.tgt, (f"built-in corpus, {self.name}", number))

    def digest(self) -> bytes:
        """Nothing: the settings determine the pairs."""
        return b""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A validation or test set, in memory. `files` are the names for reports."""

    name: str
    pairs: Sequence[Pair]
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Texts:
    """The text of a run, read and cleaned.

    `train` has a stream for each corpus, without what is held out; `report` is that of the cleaning; `sample` contains
    random training pairs, or all of them in order if they are few.
    """

    train: tuple[Stream[Pair], ...]
    files: tuple[str, ...]
    digests: tuple[bytes, ...]
    n_pairs: int
    report: CleanReport
    sample: Sequence[tuple[str, str]]
    valid: HeldOut
    tests: tuple[HeldOut, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Encoded text. `judged` are the (source, reference) pairs that are translated at each validation."""

    tokenizers: Tokenizers
    train: TokenStore
    valid: TokenStore
    weights: np.ndarray | None
    judged: list[tuple[str, str]]


def sources_of(settings: Settings) -> Sources[Pair]:
    """The sentence pairs that the settings name: those of files, or of the built-in corpus."""
    if not settings.data.demo:
        return pair_sources(settings.data)
    seed = settings.training.seed
    train = DemoSource("train", settings.data.demo, seed, ("built-in corpus",))
    valid, *tests = (DemoSource(split, DEMO_HELD_OUT, seed) for split in ("valid", "test", "held_out_combinations"))
    return Sources((train,), (valid,), tuple(tests))


def read_texts(
    settings: Settings, log: Log, sources: Sources[Pair] | None = None, *, spool_in: Path | None = None
) -> Texts:
    """Read and clean all text, each source once.

    `spool_in`: the folder whose disk holds the temporary file that `Texts.train` is read from. Raises `DataError` for
    whatever is wrong with the text.
    """
    data, sources = settings.data, sources or sources_of(settings)
    files = tuple(name for source in sources.train for name in source.files)
    tests = test_sets(sources)
    cleaner, held_out = Cleaner(data), HeldOutSources(0 if sources.valid else MAX_HELD_OUT, seed=settings.training.seed)
    n_sample = SAMPLE_LINES // 2 if settings.tokenizer.joint else SAMPLE_LINES
    sample = Reservoir[tuple[str, str]](n_sample, seed=settings.training.seed)
    streams, spool = list[Stream[Pair]](), Spool(spool_in)
    for source in sources.train:
        kept = _sampled(cleaner.texts(source.read()), sample)
        streams.append(_write(spool, kept if sources.valid else held_out.watch(kept)))
    report = cleaner.report
    report.require_pairs(data, f"training text ({', '.join(files[:4])}{', ...' * (len(files) > 4)})")
    digests = tuple(source.digest() for source in sources.train)
    if sources.valid:
        valid = _held_out("valid", sources.valid)
        return Texts(tuple(streams), files, digests, report.kept, report, sample.items, valid, tests)
    n_pairs = report.kept
    if n_pairs < 2:
        raise DataError(f"{', '.join(files)}: one sentence pair is not enough to train on and to hold one out")
    chosen, report.held_out = held_out.choose(min(MAX_HELD_OUT, max(1, round(n_pairs * HELD_OUT_SHARE))))
    report.require_pairs(data, f"training text without the validation set ({', '.join(files[:4])})")
    log.say(f"no validation text given: holding out {len(chosen):,} source sentences of {n_pairs:,} pairs (by seed)")
    return Texts(
        tuple(_without(stream, chosen.keys()) for stream in streams),
        files,
        digests,
        report.kept,
        report,
        [pair for pair in sample.items if comparable(pair[0]) not in chosen],
        HeldOut("valid", list(chosen.values()), files),
        tests,
    )


def test_sets(sources: Sources[Pair]) -> tuple[HeldOut, ...]:
    """Read the test sets, without cleaning."""
    names = distinct([_stem(source) for source in sources.tests])
    return tuple(_held_out(name, (source,)) for name, source in zip(names, sources.tests, strict=True))


def lines_of(texts: Texts) -> tuple[Iterator[str], Iterator[str]]:
    """A sample of the cleaned training text of both sides."""
    return (pair[0] for pair in texts.sample), (pair[1] for pair in texts.sample)


def count_tokens(texts: Texts, tokenizers: Tokenizers) -> int:
    """Estimate the tokens of the longer side of all training pairs, including EOS, from a few thousand."""
    pairs = texts.sample[:TRIED]
    sides = (tokenizers.src.encode_batch([p[0] for p in pairs]), tokenizers.tgt.encode_batch([p[1] for p in pairs]))
    longer = [1 + max(len(src), len(tgt)) for src, tgt in zip(*sides, strict=True)]
    return round(sum(longer) * texts.n_pairs / max(1, len(longer)))


def encode(folder: RunFolder, texts: Texts, tokenizers: Tokenizers, settings: Settings, log: Log) -> Prepared:
    """Encode all text into the run folder, report the cleaning, and warn of held-out text in the training text."""
    data = settings.data
    sets = texts.tests if not data.valid else (texts.valid, *texts.tests)
    checks = [LeakCheck(held.name, map(_sides, held.pairs), places=list(map(_place, held.pairs))) for held in sets]
    tokens = folder.path / "tokens"
    tokens.mkdir(exist_ok=True)
    with log.progress("encoding") as bar:
        train = encode_pairs(
            tokens / "train",
            [watch(stream(), _sides, checks, _place) for stream in texts.train],
            tokenizers,
            data,
            report=texts.report,
            fingerprint=fingerprint(settings, tokenizers, texts.digests),
            progress=lambda n_read: bar.update(n_read / max(1, texts.n_pairs)),
        )
    cleaner = Cleaner(data)
    valid_pairs = list(cleaner.texts(texts.valid.pairs))
    valid = encode_pairs(
        tokens / "valid", [valid_pairs], tokenizers, data, report=cleaner.report, name="validation text"
    )
    judged = [_sides(pair) for pair in texts.valid.pairs[: settings.training.valid_bleu_sentences]]
    write_json(tokens / "judged.json", judged)
    write_json(tokens / "tests.json", [(held.name, list(map(_sides, held.pairs))) for held in texts.tests])
    folder.save_tokenizers(tokenizers.save)
    for line in format_cleaning(train.cleaning):
        log.say(line)
    if train.cleaning["dropped"] or train.cleaning["changed"]:
        log.say(f"  more examples: {folder.path / 'data.json'} and, after training, report.html")
    for check in checks:
        if warning := check.warning():
            log.warn(warning)
    report = {
        "fingerprint": train.fingerprint,
        "sets": [_described("train", texts.files, train), _described("valid", texts.valid.files, valid)]
        + [{"name": held.name, "files": held.files, "pairs": len(held.pairs)} for held in texts.tests],
        "leaks": [check.to_json() for check in checks],
    }
    folder.write_record("data.json", report)
    return Prepared(tokenizers, train, valid, _weights(train, data), judged)


def open_prepared(folder: RunFolder) -> Prepared:
    """Open what `encode` has written into the run folder."""
    tokens = folder.path / "tokens"
    train, valid = TokenStore.open(tokens / "train"), TokenStore.open(tokens / "valid")
    tokenizers = load_tokenizers(folder)
    for store, name in ((train, "train"), (valid, "valid")):
        store.check(tokens / name, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
    return Prepared(tokenizers, train, valid, _weights(train, folder.settings.data), read_judged(folder))


def read_judged(folder: RunFolder) -> list[tuple[str, str]]:
    """The validation pairs that are translated."""
    path = folder.path / "tokens" / "judged.json"
    return _pairs(read_json(path), path)


def read_tests(folder: RunFolder) -> dict[str, list[tuple[str, str]]]:
    """The pairs of the test sets by name, as they were when the text was read."""
    path = folder.path / "tokens" / "tests.json"
    with expecting(path):
        return {str(name): _pairs(pairs, path) for name, pairs in read_json(path)}


def fingerprint(settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
    """Of everything that decides which training pairs are stored, and as which ids."""
    data = settings.data
    marks = (f"held out: {not data.valid}", f"demo: {data.demo}", f"seed: {settings.training.seed}")
    return fingerprint_of_pairs(digests, data, tokenizers, *marks)


def _write(spool: Spool, pairs: Iterator[Pair]) -> Stream[Pair]:
    """Read the pairs of one corpus to the end; a stream that gives them again."""
    file = ""

    def pack(pair: Pair) -> list[Any]:
        nonlocal file
        file = pair.place[0]  # the same for the whole corpus
        return [pair.place[1], pair.src, pair.tgt]

    return spool.write(pairs, pack, lambda row: Pair(row[1], row[2], (file, row[0])))


def _sampled(pairs: Iterator[Pair], sample: Reservoir[tuple[str, str]]) -> Iterator[Pair]:
    for pair in pairs:
        sample.add((pair.src, pair.tgt))
        yield pair


def _without(stream: Stream[Pair], sources: Any) -> Stream[Pair]:
    return lambda: (pair for pair in stream() if comparable(pair.src) not in sources)


def _sides(pair: Pair) -> tuple[str, str]:
    return pair.src, pair.tgt


def _place(pair: Pair) -> str:
    return f"{pair.place[0]}:{pair.place[1]}"


def _held_out(name: str, sources: Sequence[Source[Pair]]) -> HeldOut:
    pairs = [pair for source in sources for pair in source.read()]
    files = tuple(file for source in sources for file in source.files)
    if not pairs:
        raise DataError(f"{', '.join(files)}: no sentence pair found")
    return HeldOut(name, pairs, files)


def _stem(source: Source[Pair]) -> str:
    """`test2016` of test2016.en.gz."""
    name = (source.files or (source.name,))[0]
    suffix = bare_suffix(Path(name))
    return name[: name.lower().rindex(suffix)] if suffix else name


def _pairs(found: Any, path: Path) -> list[tuple[str, str]]:
    """Pairs of texts from JSON."""
    with expecting(path):
        pairs = [(src, tgt) for src, tgt in found]
        if not all(isinstance(side, str) for pair in pairs for side in pair):
            raise ValueError("expected pairs of texts")
        return pairs


def _weights(train: TokenStore, data: DataSettings) -> np.ndarray | None:
    return None if data.demo else train.weights([corpus.weight for corpus in data.train])


def _described(name: str, files: Sequence[str], store: TokenStore) -> dict[str, object]:
    src_tokens, tgt_tokens = store.n_tokens
    numbers = {"pairs": len(store), "src_tokens": src_tokens, "tgt_tokens": tgt_tokens}
    return {"name": name, "files": list(files), **numbers, "cleaning": store.cleaning}
