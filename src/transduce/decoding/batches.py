"""Sentences of like length share a batch; text of any size goes through in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

CHUNK_LINES, CHUNK_CHARACTERS = 4096, 1 << 20  # a chunk is sorted and translated at once, and only it is in memory


@dataclass(frozen=True, slots=True)
class Sentence:
    """A line to work on: its number in the text from 0, its token ids, and the most tokens that its output may have."""

    number: int
    ids: Sequence[int]
    limit: int


def chunks(
    lines: Iterable[str], *, n_lines: int = CHUNK_LINES, n_characters: int = CHUNK_CHARACTERS
) -> Iterator[list[str]]:
    """The lines in lists of at most n_lines; a list also ends with the line that brings it to n_characters."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += len(line)
        if len(chunk) == n_lines or size >= n_characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def once(sentences: Iterable[Sentence]) -> tuple[list[Sentence], dict[int, list[int]]]:
    """The first of each that is the same, and the numbers of the others by that of the first."""
    firsts: dict[tuple[int, ...], Sentence] = {}
    others: dict[int, list[int]] = {}
    for sentence in sentences:
        first = firsts.setdefault(tuple(sentence.ids), sentence)
        if first is not sentence:
            others.setdefault(first.number, []).append(sentence.number)
    return list(firsts.values()), others


def cut(
    sentences: Iterable[Sentence], *, budget: int, most: int, width: Callable[[Sentence], int]
) -> list[list[Sentence]]:
    """Batches, widest first, of at most `most` sentences and at most `budget` padded tokens, at least one sentence."""
    batches: list[list[Sentence]] = []
    room = 0
    for sentence in sorted(sentences, key=width, reverse=True):
        if not room:
            room = max(1, min(most, budget // max(1, width(sentence))))
            batches.append([])
        batches[-1].append(sentence)
        room -= 1
    return batches
