"""Cut text of any size into chunks, and the sentences of a chunk into batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

CHUNK_LINES, CHUNK_CHARACTERS = 4096, 1 << 20  # a chunk is sorted and translated at once; only one is in memory

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Source:
    """Token ids to translate or to continue.

    `key` identifies it: what is drawn for it is a function of the seed and the key. `limit`: most new tokens.
    """

    key: tuple[int, ...]
    ids: Sequence[int]
    limit: int


def chunks(
    lines: Iterable[str], *, n_lines: int = CHUNK_LINES, n_characters: int = CHUNK_CHARACTERS
) -> Iterator[list[str]]:
    """Lists of at most `n_lines` lines; a list also ends with the line that brings it to `n_characters`."""
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


def make_batches(
    items: Sequence[ItemT], *, budget: int, most: int, width: Callable[[ItemT], int]
) -> list[list[tuple[int, ItemT]]]:
    """Batches of (place in `items`, item), widest first.

    Each has at most `most` items and at most `budget` padded tokens, but at least one item.
    """
    batches: list[list[tuple[int, ItemT]]] = []
    room = 0
    for place, item in sorted(enumerate(items), key=lambda pair: width(pair[1]), reverse=True):
        if not room:
            room = max(1, min(most, budget // max(1, width(item))))
            batches.append([])
        batches[-1].append((place, item))
        room -= 1
    return batches
