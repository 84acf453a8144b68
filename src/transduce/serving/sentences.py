"""Split running text into sentences, and join their translations with the line breaks and spaces of the original."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from transduce.text.languages import base_language

LONGEST = 1000
"""Characters of a sentence; a longer one is cut, at a comma or a space where there is one."""

_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "km", "my")
_LINE = re.compile(r"[^\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+")
_WIDE_SPACE = re.compile(r"[^\S ]")  # sentencex takes all spaces for one byte, and fails
_CUT = re.compile(r"(?<=[,;:，；、])\s*|\s+")


def split_sentences(text: str, language: str) -> list[str]:
    """Parts that give `text` when joined: sentences at even places, what is between them (white space) at odd ones.

    The first sentence is empty if the text begins with white space. A sentence never contains a line end.
    """
    parts = [""]
    for sentence in _sentences(text, language):
        core = sentence.strip()
        if not core:
            _add_space(parts, sentence)
            continue
        start = sentence.index(core)
        _add_space(parts, sentence[:start])
        if len(parts) % 2 == 0:
            parts.append(core)
        elif parts == [""]:
            parts[0] = core
        else:
            parts += ["", core]
        _add_space(parts, sentence[start + len(core) :])
    return parts


def join_sentences(sentences: Sequence[str], parts: Sequence[str], source: str, target: str) -> str:
    """`parts` of `split_sentences` with other sentences: line breaks stay, and spaces become those of the language."""
    return "".join(joined_parts(sentences, parts, source, target))


def joined_parts(sentences: Sequence[str], parts: Sequence[str], source: str, target: str) -> list[str]:
    """What `join_sentences` joins: sentences at even places, what is between them at odd ones."""
    if len(parts) == 1:
        return list(sentences)
    space = "" if base_language(target) in _WITHOUT_SPACES else " "
    same_spaces = (base_language(source) in _WITHOUT_SPACES) == (not space)
    joined = [sentences[0]] if sentences else []
    for between, sentence in zip(parts[1::2], [*sentences[1:], ""], strict=False):
        breaks_line = bool(between) and not _LINE.fullmatch(between)
        keep = breaks_line or same_spaces or not (joined[-1] and sentence)
        joined += [between if keep else space, sentence]
    return joined


def _add_space(parts: list[str], space: str) -> None:
    if not space:
        return
    if len(parts) % 2 == 0:
        parts[-1] += space
    else:
        parts.append(space)


def _sentences(text: str, language: str) -> Iterator[str]:
    import sentencex  # an optional package

    code, end = base_language(language), 0
    for line in _LINE.finditer(text):
        yield text[end : line.start()]
        end = line.start()
        for sentence in sentencex.segment(code, _WIDE_SPACE.sub(" ", line[0])):
            start, end = end, end + len(sentence)
            yield from _cut(text[start:end])
    yield text[end:]


def _cut(sentence: str) -> Iterator[str]:
    """A sentence in pieces of at most LONGEST characters."""
    while len(sentence) > LONGEST:
        ends = [found.end() for found in _CUT.finditer(sentence, LONGEST // 2, LONGEST)]
        end = ends[-1] if ends else LONGEST
        yield sentence[:end]
        sentence = sentence[end:]
    yield sentence
