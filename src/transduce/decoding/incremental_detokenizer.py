"""Text of tokens as they come, to show to a reader."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from transduce.text.hub import HubTokenizer
from transduce.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Gives the text of tokens in parts, none of which ends within a character or contains a part of a stop string.

    Attributes:
        ids: The tokens, up to the one that completed a stop string.
        is_stopped: Whether a stop string was found; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer | HubTokenizer, stop: Sequence[str] = ()) -> None:
        """Start an empty text that ends before the first of the strings `stop`."""
        self.ids: list[int] = []
        self.is_stopped = False
        self._bytes_of, self._stop = tokenizer.bytes_of, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # may be the start of a stop string

    def add(self, tokens: Iterable[int]) -> str:
        """The text that is certain after these tokens, and was not before."""
        parts: list[str] = []
        for token in tokens:
            if self.is_stopped:
                break
            self.ids.append(token)
            parts.append(self._certain(self._decoder.decode(self._bytes_of[token])))
        return "".join(parts)

    def end(self) -> str:
        """The rest of the text, at its end."""
        return "" if self.is_stopped else self._certain(self._decoder.decode(b"", final=True), is_last=True)

    def _certain(self, new: str, *, is_last: bool = False) -> str:
        text = self._held + new
        found = [place for one in self._stop if (place := text.find(one)) >= 0]
        self.is_stopped = bool(found)
        end = min(found) if found else len(text) if is_last else len(text) - self._n_uncertain(text)
        self._held = text[end:]
        return text[:end]

    def _n_uncertain(self, text: str) -> int:
        """Characters at the end of a text that may be the start of a stop string."""
        starts = (n for one in self._stop for n in range(1, min(len(one), len(text) + 1)) if text.endswith(one[:n]))
        return max(starts, default=0)
