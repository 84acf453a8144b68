"""Labelled texts for classification: reading them once, holding some out, encoding them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transduce.config import Settings, resolved
from transduce.data.arrays import check_ids, check_lengths
from transduce.data.corpus import distinct
from transduce.data.encoding import encode_labelled, fingerprint_of_text
from transduce.data.labelled import Labelled, number_of, sorted_labels
from transduce.data.leaks import LeakCheck, watch
from transduce.data.sources import Source, Sources, labelled_sources
from transduce.data.spool import Spool, Stream
from transduce.data.store import LabelStore
from transduce.decoding.classifier import longest_of
from transduce.errors import DataError
from transduce.logging import Log
from transduce.runs.atomic import write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.plain_text import PreparedStores, open_stores, report_leaks
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import SAMPLE_LINES, Reservoir

HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 2_000
TRIED = 2000  # texts that are encoded to estimate the number of tokens
N_SAMPLES = 24


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """The text of a run. `sample` contains random training examples, or all of them in order if they are few."""

    train: Stream[Labelled]
    n_train: int
    files: tuple[str, ...]
    sample: Sequence[Labelled]
    valid: list[Labelled]
    tests: dict[str, list[Labelled]]
    labels: tuple[str, ...]
    digests: tuple[bytes, ...]

    def lines(self) -> Iterator[str]:
        """The texts of the sample without their labels."""
        return chain.from_iterable(example.texts for example in self.sample)

    def count_tokens(self, tokenizers: Tokenizers) -> int:
        """Estimate the tokens of all training texts."""
        some = self.sample[:: max(1, len(self.sample) // TRIED)]
        ids = tokenizers.tgt.encode_batch([text for example in some for text in example.texts])
        return round((sum(map(len, ids)) / len(some) + 1 + len(some[0].texts)) * self.n_train)


PreparedLabels = PreparedStores[LabelStore]


def read_labelled_texts(
    settings: Settings, log: Log, sources: Sources[Labelled] | None = None, *, spool_in: Path | None = None
) -> LabelledTexts:
    """Read all text, each source once. The labels are those of the training text, unless the settings name them.

    `spool_in`: the folder whose disk holds the temporary file that the training text is read from. Raises `DataError`
    for whatever is wrong with the text.
    """
    data, sources = settings.data, sources or labelled_sources(settings.data)
    counts, sample = Counter[str](), Reservoir[tuple[int, Labelled]](SAMPLE_LINES // 2, seed=settings.training.seed)
    counted = _counted(sources.train, counts, sample, data.labels)
    everything = Spool(spool_in).write(counted, lambda e: [e.label, e.texts, e.place], _labelled)
    digests = tuple(source.digest() for source in sources.train)
    n = counts.total()
    files = tuple(file for source in sources.train for file in source.files)
    labels = data.labels or sorted_labels(counts)  # of all text: the only example of a label may be held out
    names = distinct([source.name for source in sources.tests])
    tests = {name: list(source.read()) for name, source in zip(names, sources.tests, strict=True)}
    held = set[int]()
    if sources.valid:
        valid = list(chain.from_iterable(source.read() for source in sources.valid))
    else:
        n_held = min(MAX_HELD_OUT, round(n * HELD_OUT_SHARE))
        if not n_held:
            raise DataError(f"{', '.join(files)}: {n} labelled texts are too few to hold some out; give data.valid")
        held = set(random.Random(settings.training.seed).sample(range(n), n_held))
        valid = [example for i, example in enumerate(everything()) if i in held]
        counts -= Counter(example.label for example in valid)
        log.say(f"no validation text given: holding out {n_held:,} texts (by seed)")
    found = LabelledTexts(
        train=lambda: (example for i, example in enumerate(everything()) if i not in held),
        n_train=n - len(held),
        files=files,
        sample=[example for i, example in sample.items if i not in held],
        valid=valid,
        tests=tests,
        labels=labels,
        digests=digests,
    )
    _check(found)
    for label in sorted(set(labels) - counts.keys()):
        log.warn(f"label {label!r} does not occur in the training text: it will not be learned")
    return found


def encode_labelled_texts(
    folder: RunFolder, texts: LabelledTexts, tokenizers: Tokenizers, settings: Settings, log: Log
) -> PreparedLabels:
    """Encode all text into the run folder."""
    tokens, described, stores = folder.path / "tokens", list[dict[str, Any]](), list[LabelStore]()
    tokens.mkdir(exist_ok=True)
    longest = longest_of(settings.model, settings.data.max_length)
    mark = fingerprint(settings, tokenizers, texts.digests)
    held_out = {"valid": texts.valid, **texts.tests}
    checks = [LeakCheck(name, map(_whole, examples), unit="texts") for name, examples in held_out.items()]
    sets: dict[str, Iterable[Labelled]] = {"train": watch(texts.train(), _whole, checks), **held_out}
    for number, (name, examples) in enumerate(sets.items()):
        at = tokens / (name if number < 2 else f"test.{number - 2}")
        store = encode_labelled(
            at, examples, texts.labels, tokenizers.tgt, longest=longest, fingerprint="" if number else mark, name=name
        )
        stores.append(store)
        files = sorted({Path(e.place[0]).name for e in held_out[name]}) if number else sorted(set(texts.files))
        numbers = {"texts": len(store), "tokens": int(store.lengths.sum()), "labels": store.count_labels(texts.labels)}
        described.append({"name": name, "files": files, **numbers})
        if cut := store.facts["longest"]:
            log.say(f"{name}: {cut:,} texts have at least data.max_length = {longest} tokens and are cut there")
    write_json(tokens / "tests.json", list(texts.tests))
    write_json(tokens / "samples.json", [[e.label, list(e.texts)] for e in texts.valid[:N_SAMPLES]])
    folder.save_tokenizers(tokenizers.save)
    folder.write_record("data.json", {"fingerprint": mark, "sets": described, "leaks": report_leaks(checks, log)})
    return PreparedLabels(tokenizers, *stores[:2])


def open_prepared_labels(folder: RunFolder) -> PreparedLabels:
    """Open what `encode_labelled_texts` has written into the run folder."""
    tokens = folder.path / "tokens"
    labels = resolved(folder.settings.data.labels, "data.labels")
    prepared = open_stores(folder, LabelStore.open)
    longest = longest_of(folder.settings.model, folder.settings.data.max_length)
    for name, store in (("train", prepared.train), ("valid", prepared.valid)):
        check_ids(tokens / name / "labels.npy", store.labels, len(labels))
        check_lengths(tokens / name / "offsets.npy", store.offsets, longest)
    return prepared


def fingerprint(settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
    """Of the training text and everything that decides how it is stored."""
    data = settings.data
    marks = (f"held out: {not data.valid}", f"labels: {data.labels}", f"seed: {settings.training.seed}")
    return fingerprint_of_text(digests, tokenizers.tgt, *marks)


def _counted(
    sources: Sequence[Source[Labelled]],
    counts: Counter[str],
    sample: Reservoir[tuple[int, Labelled]],
    labels: Sequence[str] | None,
) -> Iterator[Labelled]:
    """The training text, while its labels are counted and some examples sampled. `labels`: the only ones allowed."""
    n_texts = 0
    for i, example in enumerate(chain.from_iterable(source.read() for source in sources)):
        n_texts = n_texts or len(example.texts)
        if len(example.texts) != n_texts:
            file, line = example.place
            raise DataError(f"{file}, line {line}: {len(example.texts)} texts, but the lines before have {n_texts}")
        if labels is not None:
            number_of(example, labels)
        counts[example.label] += 1
        sample.add((i, example))
        yield example


def _check(texts: LabelledTexts) -> None:
    """Refuse too few labels, unknown labels, empty sets, and sets with another number of texts per line."""
    labels = texts.labels
    if len(labels) < 2:
        only = repr(labels[0]) if labels else "none"
        raise DataError(f"the training text has only one label, {only}: there is nothing to classify")
    n_texts = len(texts.sample[0].texts)
    for name, examples in {"validation": texts.valid, **texts.tests}.items():
        found = 0
        for example in examples:
            number_of(example, labels)
            found = len(example.texts)
        if not found:
            raise DataError(f"{name} text: no text found")
        if found != n_texts:
            raise DataError(f"{name} text has {found} texts per line, training text {n_texts}")


def _labelled(row: list[Any]) -> Labelled:
    return Labelled(row[0], tuple(row[1]), tuple(row[2]))


def _whole(example: Labelled) -> tuple[str]:
    """What is compared with other examples."""
    return (" ".join(example.texts),)
