"""Read sentence pairs from two text files, TSV, JSON lines or TMX, and labelled texts; each with its file and line."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.config import Corpus, DataSettings
from transduce.data.lines import COMPRESSIONS, Digests, LineParser, bare_suffix, read_lines, read_rows
from transduce.data.tmx import choose_language, read_units
from transduce.errors import DataError, SettingsError, nearest
from transduce.text.vectors import VectorFile, is_vectors

_SPACES = re.compile(r"\s+")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(slots=True)
class Pair:
    """A source sentence, its translation, and the file and line that they come from."""

    src: str
    tgt: str
    place: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Labelled:
    """One example: its label, one or two texts, and the file and line that it comes from."""

    label: str
    texts: tuple[str, ...]
    place: tuple[str, int]


def read_pairs(corpus: Corpus, *, src_lang: str, tgt_lang: str, digests: Digests | None = None) -> Iterator[Pair]:
    """Yield the pairs of a corpus in order, including pairs with an empty side.

    The language codes select the sides of TSV, JSONL and TMX files. `digests` receives the sha256 of each file that has
    been read to its end. Raises `DataError` with file and line for text that cannot be read, and immediately a
    `SettingsError` for a file of an unknown format.
    """
    if corpus.path is None:
        assert corpus.src is not None and corpus.tgt is not None, "Corpus checks that it names either both or path"
        return _read_text(corpus.src, corpus.tgt, digests)
    suffix = bare_suffix(corpus.path)
    if suffix == ".tmx":
        return _read_tmx(corpus.path, src_lang, tgt_lang, digests)
    if suffix not in LINE_FORMATS:
        known, packed = ", ".join((*LINE_FORMATS, ".tmx")), ", ".join(COMPRESSIONS)
        raise SettingsError(f"{corpus.path}: unknown format; known: {known} (also {packed}), or two files src and tgt")
    place, parse = str(corpus.path), LINE_FORMATS[suffix](src_lang, tgt_lang)
    return (Pair(row[0], row[1], (place, number)) for number, row in read_rows(corpus.path, parse, digests))


def read_labelled(path: Path | str, digests: Digests | None = None, *, names: bool = False) -> Iterator[Labelled]:
    """Yield the examples of a file (also .gz, .xz, .zst; `-`: standard input). All have one text, or all have two.

    Raises `DataError` with file and line for a line without a tab, with an empty label or text, or with another number
    of texts than the lines before. With `names`, a file of vectors gives the names of its sequences and their labels.
    """
    name = str(path)
    if names and is_vectors(path):
        file = VectorFile(Path(path))
        for number, (label, text) in enumerate(zip(file.labels, file.names, strict=True), 1):
            yield Labelled(label, (text,), (name, number))
        return
    for number, (label, *texts) in read_rows(path, labelled_parser(), digests):
        yield Labelled(label, tuple(texts), (name, number))


def labelled_parser() -> LineParser:
    """Turns lines into a label and its texts; all have as many texts as the first."""
    n_texts = 0

    def parse(line: str, number: int) -> tuple[str, ...]:
        nonlocal n_texts
        label, *texts = line.split("\t")
        if not texts or len(texts) > 2:
            found = "no tab" if not texts else f"{len(texts)} tabs"
            raise ValueError(f"expected label<TAB>text or label<TAB>text<TAB>text, found {found}")
        if not label.strip() or not all(text.strip() for text in texts):
            raise ValueError(f"the {'text' if label.strip() else 'label'} is empty")
        n_texts = n_texts or len(texts)
        if len(texts) != n_texts:
            raise ValueError(f"{len(texts)} texts, but the lines before have {n_texts}")
        return label.strip(), *texts

    return parse


def sorted_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sort labels: numerically if all are whole numbers, else alphabetically."""
    found = set(labels)
    if all(label.lstrip("-").isdecimal() for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    return tuple(sorted(found))


def number_of(example: Labelled, labels: Sequence[str]) -> int:
    """The index of an example's label. Raises `DataError` with file and line for an unknown one."""
    try:
        return labels.index(example.label)
    except ValueError:
        file, line = example.place
        hint = nearest(example.label, labels)
        raise DataError(
            f"{file}, line {line}: unknown label {example.label!r}{hint}; known: {', '.join(labels)}"
        ) from None


def corpus_files(corpus: Corpus) -> list[Path]:
    """The files that a corpus is read from."""
    return [path for path in (corpus.src, corpus.tgt, corpus.path) if path is not None]


def text_files(data: DataSettings) -> dict[str, Path]:
    """All files of the training, validation and test text, by their places in the settings."""
    return {
        f"data.{key}[{number}][{side}]": path
        for key in ("train", "valid", "test")
        for number, corpus in enumerate(getattr(data, key))
        for side, path in enumerate(corpus_files(corpus))
    }


def corpus_name(corpus: Corpus) -> str:
    """The name of a corpus in reports: its file names."""
    return " + ".join(path.name for path in corpus_files(corpus))


def _read_text(src: Path, tgt: Path, digests: Digests | None) -> Iterator[Pair]:
    """Two files, line by line. Files of different lengths are an error that names both lengths."""
    name, number = str(src), 0
    sides = read_lines(src, digests, names=True), read_lines(tgt, digests)
    for number, (s, t) in enumerate(itertools.zip_longest(*sides), 1):
        if s is None or t is None:
            break
        yield Pair(s, t, (name, number))
    else:
        return
    longer, rest, shorter = (src, sides[0], tgt) if t is None else (tgt, sides[1], src)
    total = number + sum(1 for _ in rest)
    raise DataError(
        f"{longer} has {total} lines, {shorter} has {number - 1}: line {number} of {longer.name} has no counterpart"
    )


def _tsv_parser(src_lang: str, tgt_lang: str) -> LineParser:
    """Tab-separated columns without quoting: the first two, or those that line 1 names by language.

    A blank line is a pair with two empty sides.
    """
    n, src, tgt, has_header = 0, 0, 1, False

    def parse(line: str, number: int) -> tuple[str, str] | None:
        nonlocal n, src, tgt, has_header
        fields = line.split("\t")
        if not n:
            if len(fields) < 2:
                raise ValueError("no tab; expected source<TAB>target")
            n, names = len(fields), [field.strip().lower() for field in fields]
            if src_lang.lower() in names and tgt_lang.lower() in names:
                src, tgt, has_header = names.index(src_lang.lower()), names.index(tgt_lang.lower()), True
        if number == 1 and has_header:
            return None
        if len(fields) != n and line.strip():
            raise ValueError(f"line 1 has {n} columns, this line has {len(fields)}")
        return (fields[src], fields[tgt]) if len(fields) == n else ("", "")

    return parse


def _json_parser(src_lang: str, tgt_lang: str) -> LineParser:
    """One JSON object per line with the keys `src` and `tgt` or the language codes, possibly inside `translation`."""

    def parse(line: str, number: int) -> tuple[str, str]:
        if not line.strip():
            return "", ""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {getattr(error, 'msg', None) or error}") from None
        sides = _json_sides(value, src_lang, tgt_lang)
        if sides is None:
            keys = dict.fromkeys([("src", "tgt"), (src_lang, tgt_lang)])  # the same twice if the languages are unset
            raise ValueError("expected " + " or ".join(f'{{"{src}": "...", "{tgt}": "..."}}' for src, tgt in keys))
        if "\\u" in line and any(_SURROGATES.search(side) for side in sides):
            raise ValueError("half of a surrogate pair is not a character")
        return _one_line(sides[0]), _one_line(sides[1])

    return parse


def _json_sides(value: Any, src_lang: str, tgt_lang: str) -> tuple[str, str] | None:
    """Source and target of a JSON object, or None where it does not contain both as strings."""
    if isinstance(value, dict) and isinstance(value.get("translation"), dict):
        value = value["translation"]
    if not isinstance(value, dict):
        return None
    for src_key, tgt_key in (("src", "tgt"), (src_lang, tgt_lang)):
        src, tgt = value.get(src_key), value.get(tgt_key)
        if isinstance(src, str) and isinstance(tgt, str):
            return src, tgt
    return None


def _read_tmx(path: Path, src_lang: str, tgt_lang: str, digests: Digests | None) -> Iterator[Pair]:
    """Translation units. A missing side is empty, so that cleaning counts it."""
    name, known, n_pairs = str(path), set[str](), 0
    for line, segments in read_units(path, digests):
        known |= segments.keys()
        codes = [choose_language(wanted, set(segments)) for wanted in (src_lang, tgt_lang)]
        src, tgt = ("" if code is None else _one_line(segments[code]) for code in codes)
        n_pairs += None not in codes
        if codes != [None, None]:
            yield Pair(src, tgt, (name, line))
    if known and not n_pairs:
        languages = ", ".join(sorted(known))
        raise DataError(f"{path}: no unit has both '{src_lang}' and '{tgt_lang}'; languages in the file: {languages}")


def _one_line(text: str) -> str:
    """Replace line breaks inside a sentence, which JSON and XML allow, and the white space around them by a space."""
    if "\n" not in text and "\r" not in text:
        return text
    return _SPACES.sub(lambda found: " " if {"\n", "\r"} & {*found[0]} else found[0], text.strip("\r\n"))


LINE_FORMATS: dict[str, Callable[[str, str], LineParser]] = {".tsv": _tsv_parser, ".jsonl": _json_parser}
"""By suffix: parsers for formats with one pair per line, made for a source and a target language."""
