"""Text becomes what training eats: read, cleaned, split, encoded into the run folder, and looked through for leaks.

Training text is streamed, several times: counted (which also finds every fault of the files before anything is made),
split, learned a vocabulary from, and encoded. What is kept of it in the run folder stays there until the run is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from transduce.config import DataSettings, Settings
from transduce.data.clean import LeakCheck, choose_held_out, clean, comparable, told
from transduce.data.corpus import Pair, distinct
from transduce.data.lines import bare_suffix
from transduce.data.sources import Source, Sources, pair_sources
from transduce.data.store import TokenStore, build_store, fingerprint_of
from transduce.demo.corpus import demo_pairs
from transduce.errors import DataError, RunFolderError
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.manifest import check_file, seal_folder, sealed_files
from transduce.text.tokenizer import Tokenizers, load_tokenizers

HELD_OUT_SHARE, HELD_OUT_MOST = 0.01, 1000
DEMO_HELD_OUT = 500  # pairs of each held-out split of the built-in corpus
TRIED = 2000  # pairs that a dry run encodes

Stream = Callable[[], Iterator[Pair]]


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
        """Nothing: the settings say it all."""
        return b""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A validation or test set, whole in memory. `files` are the names that reports show."""

    name: str
    pairs: Sequence[Pair]
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Texts:
    """The text of a run: training streams, one a corpus, that can be read again and again, and held-out sets."""

    train: tuple[Stream, ...]
    files: tuple[str, ...]
    digests: tuple[bytes, ...]
    n_pairs: int
    valid: HeldOut
    tests: tuple[HeldOut, ...]

    def cleaned(self, settings: DataSettings) -> Iterator[Pair]:
        """All training pairs that the rules on text let pass."""
        return clean(chain.from_iterable(stream() for stream in self.train), settings)[0]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What training eats. `judged` are the (source, reference) pairs that validation translates."""

    tokenizers: Tokenizers
    train: TokenStore
    valid: TokenStore
    weights: np.ndarray | None
    judged: list[tuple[str, str]]


def sources_of(settings: Settings) -> Sources[Pair]:
    """The sentence pairs that the settings name, in files or of the built-in corpus."""
    if not settings.data.demo:
        return pair_sources(settings.data)
    seed = settings.training.seed
    train = DemoSource("train", settings.data.demo, seed, ("built-in corpus",))
    valid, *tests = (DemoSource(split, DEMO_HELD_OUT, seed) for split in ("valid", "test", "held_out_combinations"))
    return Sources((train,), (valid,), tuple(tests))


def read_texts(settings: Settings, log: Log, sources: Sources[Pair] | None = None) -> Texts:
    """Open and count the text that the settings name. Raises `DataError` for whatever is wrong with the files."""
    data, sources = settings.data, sources or sources_of(settings)
    streams = tuple(source.read for source in sources.train)
    files = tuple(name for source in sources.train for name in source.files)
    digests = tuple(source.digest() for source in sources.train)
    n_pairs = _count(streams, data, files)
    tests = test_sets(sources)
    if sources.valid:
        return Texts(streams, files, digests, n_pairs, _held_out("valid", sources.valid), tests)
    n = min(HELD_OUT_MOST, max(1, round(n_pairs * HELD_OUT_SHARE)))
    if n_pairs < 2:
        raise DataError(f"{', '.join(files)}: one sentence pair is too little to train on and hold one out")
    chosen = choose_held_out(clean(chain.from_iterable(s() for s in streams), data)[0], n, seed=settings.training.seed)
    log.say(f"no validation text given: {len(chosen):,} of {n_pairs:,} source sentences are held out for it (by seed)")
    valid = HeldOut("valid", _first_of_each(chosen, streams, data), files)
    streams = tuple(_without(stream, chosen) for stream in streams)
    return Texts(streams, files, digests, _count(streams, data, files), valid, tests)


def test_sets(sources: Sources[Pair]) -> tuple[HeldOut, ...]:
    """The test sets, read whole, nothing cleaned away."""
    names = distinct([_stem(source) for source in sources.tests])
    return tuple(_held_out(name, (source,)) for name, source in zip(names, sources.tests, strict=True))


def lines_of(texts: Texts, settings: Settings) -> tuple[Iterator[str], Iterator[str]]:
    """The cleaned training text of both sides."""
    return (
        (pair.src for pair in texts.cleaned(settings.data)),
        (pair.tgt for pair in texts.cleaned(settings.data)),
    )


def count_tokens(texts: Texts, tokenizers: Tokenizers, settings: Settings) -> int:
    """Tokens of the longer side of all training pairs, EOS counted, estimated from the first few thousand."""
    pairs = list(islice(texts.cleaned(settings.data), TRIED))
    sides = (tokenizers.src.encode_batch([p.src for p in pairs]), tokenizers.tgt.encode_batch([p.tgt for p in pairs]))
    longer = [1 + max(len(src), len(tgt)) for src, tgt in zip(*sides, strict=True)]
    return round(sum(longer) * texts.n_pairs / max(1, len(longer)))


def encode(folder: RunFolder, texts: Texts, tokenizers: Tokenizers, settings: Settings, log: Log) -> Prepared:
    """Encode all into the run folder, report what was cleaned away, and warn of held-out text in the training text."""
    data = settings.data
    sets = texts.tests if not data.valid else (texts.valid, *texts.tests)
    checks = [LeakCheck(held.pairs) for held in sets]

    def watched(stream: Stream) -> Iterator[Pair]:
        pairs = stream()
        for check in checks:
            pairs = check.watch(pairs)
        return pairs

    tokens = folder.path / "tokens"
    tokens.mkdir(exist_ok=True)
    with log.progress("encoding") as bar:
        train = build_store(
            tokens / "train",
            [watched(stream) for stream in texts.train],
            tokenizers,
            data,
            fingerprint=fingerprint(settings, tokenizers, texts.digests),
            progress=lambda n_read: bar.update(n_read / max(1, texts.n_pairs)),
        )
    valid = build_store(tokens / "valid", [texts.valid.pairs], tokenizers, data, name="validation text")
    judged = [(pair.src, pair.tgt) for pair in texts.valid.pairs[: settings.training.valid_bleu_sentences]]
    write_json(tokens / "judged.json", judged)
    write_json(tokens / "tests.json", [(held.name, [(p.src, p.tgt) for p in held.pairs]) for held in texts.tests])
    folder.save_tokenizers(tokenizers)
    for line in told(train.cleaning):
        log.say(line)
    if train.cleaning["dropped"] or train.cleaning["changed"]:
        log.say(f"  more examples are in {folder.path / 'data.json'} and, at the end, in report.html")
    found = [(held.name, check.report) for held, check in zip(sets, checks, strict=True)]
    for name, leak in found:
        if warning := leak.warning(name):
            log.warn(warning)
    report = {
        "fingerprint": train.fingerprint,
        "sets": [_described("train", texts.files, train), _described("valid", texts.valid.files, valid)]
        + [{"name": held.name, "files": held.files, "pairs": len(held.pairs)} for held in texts.tests],
        "leaks": [leak.to_json(name) for name, leak in found],
    }
    folder.write_record("data.json", report)
    return Prepared(tokenizers, train, valid, _weights(train, data), judged)


def open_prepared(folder: RunFolder) -> Prepared:
    """What `encode` wrote into the run folder."""
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
    """The pairs of the test sets, by their names, as they were when the training text was looked through for them."""
    path = folder.path / "tokens" / "tests.json"
    with expecting(path):
        return {str(name): _pairs(pairs, path) for name, pairs in read_json(path)}


def _pairs(found: Any, path: Path) -> list[tuple[str, str]]:
    """Pairs of texts as JSON keeps them."""
    with expecting(path):
        pairs = [(src, tgt) for src, tgt in found]
        if not all(isinstance(side, str) for pair in pairs for side in pair):
            raise ValueError("these are no texts")
        return pairs


def seal_prepared(folder: RunFolder) -> None:
    """Note the checksum of every file of the encoded text, once all of it is there."""
    seal_folder(folder.path / "tokens")


def check_prepared(folder: RunFolder) -> RunFolder:
    """The folder, if the encoded text is as it was written; a `RunFolderError` names a damaged file and what to do.

    Of a run that has not read all of its text there is nothing to check: it will be read again.
    """
    tokens = folder.path / "tokens"
    if not has_read_text(folder.path):
        (tokens / "manifest.json").unlink(missing_ok=True)
    elif (tokens / "manifest.json").exists():  # a run of an early version has none
        try:
            for name, was in sealed_files(tokens).items():
                check_file(tokens / name, was)
        except RunFolderError as error:
            raise RunFolderError(
                f"{error}; where the training text is still what it was, remove {folder.path / 'data.json'}, and the "
                "same command reads it again"
            ) from None
    return folder


def has_prepared(folder: RunFolder) -> bool:
    """Whether encoded text is still there."""
    return (folder.path / "tokens").exists()


def forget_prepared(folder: RunFolder) -> None:
    """Remove the encoded text, at once by its name: a finished run does not need it."""
    leaving = folder.path / ".tokens.done.aside"  # what a kill leaves of it, the next start clears
    (folder.path / "tokens").rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def fingerprint(settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
    """Of the training text and everything that decides what is stored of it."""
    data = settings.data
    marks = (f"held out: {not data.valid}", f"demo: {data.demo}", f"seed: {settings.training.seed}")
    return fingerprint_of(digests, data, tokenizers, *marks)


def _weights(train: TokenStore, data: DataSettings) -> np.ndarray | None:
    return None if data.demo else train.weights([corpus.weight for corpus in data.train])


def _without(stream: Stream, sources: frozenset[str]) -> Stream:
    return lambda: (pair for pair in stream() if comparable(pair.src) not in sources)


def _count(streams: Sequence[Stream], data: DataSettings, files: Sequence[str]) -> int:
    """Pairs that cleaning keeps; reads everything once, so that faults are found before anything is made."""
    kept, report = clean(chain.from_iterable(stream() for stream in streams), data)
    n = sum(1 for _ in kept)
    some = ", ".join(files[:4]) + ", ..." * (len(files) > 4)
    report.require_pairs(data, f"training text ({some})")
    return n


def _first_of_each(sources: frozenset[str], streams: Sequence[Stream], data: DataSettings) -> list[Pair]:
    """The first pair of each of these sources."""
    found: dict[str, Pair] = {}
    for pair in clean(chain.from_iterable(stream() for stream in streams), data)[0]:
        if (key := comparable(pair.src)) in sources:
            found.setdefault(key, pair)
    return list(found.values())


def _held_out(name: str, sources: Sequence[Source[Pair]]) -> HeldOut:
    pairs = [pair for source in sources for pair in source.read()]
    files = tuple(file for source in sources for file in source.files)
    if not pairs:
        raise DataError(f"{', '.join(files)}: there is no text, not one sentence pair")
    return HeldOut(name, pairs, files)


def _stem(source: Source[Pair]) -> str:
    """`test2016` of test2016.en.gz."""
    name = (source.files or (source.name,))[0]
    suffix = bare_suffix(Path(name))
    return name[: name.lower().rindex(suffix)] if suffix else name


def _described(name: str, files: Sequence[str], store: TokenStore) -> dict[str, object]:
    src_tokens, tgt_tokens = store.n_tokens
    numbers = {"pairs": len(store), "src_tokens": src_tokens, "tgt_tokens": tgt_tokens}
    return {"name": name, "files": list(files), **numbers, "cleaning": store.cleaning}
