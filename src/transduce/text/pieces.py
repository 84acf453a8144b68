"""The tokenizer of Marian's models: SentencePiece splits the text, a separate list of pieces gives the ids.

The ids of the SentencePiece model itself are not used. Each side has such a model; both may share the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece

from transduce.errors import RunFolderError
from transduce.runs.atomic import read_json, write_aside, write_json
from transduce.text.sampling import kind_of, resegmented
from transduce.text.special import EOS, SPECIAL_PIECES, UNK, characters, opened

_MANY = 1000  # texts from which on the library's threads pay


class PieceTokenizer:
    """A SentencePiece model and the list of its pieces, in the order of their ids. Immutable, safe for threads.

    What the list lacks is `UNK`. A text may begin with a language code, `>>deu<< ...`, which is one piece.
    """

    kind = "marian"

    def __init__(self, model: bytes, pieces: Sequence[str]) -> None:
        """`pieces`: of all ids, the special ones first. `ValueError` if either is unfit."""
        self.model, self.notes = model, tuple[str, ...]()
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._unknown: str = self._sp.id_to_piece(self._sp.unk_id())
        except (RuntimeError, ValueError, IndexError):
            raise ValueError("not a SentencePiece model") from None
        if tuple(pieces[: len(SPECIAL_PIECES)]) != SPECIAL_PIECES:
            raise ValueError(f"its first pieces are {list(pieces[:4])}, not {list(SPECIAL_PIECES)}")
        self._pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i > EOS}

    @property
    def vocab_size(self) -> int:
        """Pieces, special ones included."""
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones but `UNK`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts; the same as `encode` of each, and faster."""
        codes, rests = self._split(texts)
        cut = self._sp.encode(rests, out_type=str, num_threads=-1 if len(texts) >= _MANY else 1)
        return [self._look_up(code + pieces) for code, pieces in zip(codes, cut, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids vanish, but for `UNK`, which shows as U+2047, the double question mark."""
        pieces = [self._unknown if i == UNK else self._pieces[i] for i in map(int, ids) if i > EOS or i == UNK]
        return str(self._sp.decode_pieces(pieces)).replace("\u2581", " ").strip(" ")

    def normalize(self, text: str) -> str:
        """The text as the vocabulary sees it; equals `decode(encode(text))` where nothing is unknown."""
        return str(self._sp.normalize(characters(text))).replace("\u2581", " ").strip(" ")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces of ids, including special ones; U+2581 marks the beginning of a word."""
        return [self._pieces[int(i)] for i in ids]

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that are not in the vocabulary, in order, each once."""
        codes, rests = self._split([text])
        pieces = codes[0] + self._sp.encode(rests[0], out_type=str, num_threads=1)
        return list(dict.fromkeys(piece for piece in pieces if piece not in self._ids))

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Segmentations drawn at random, for subword regularisation: a function of (texts, amount, seed) alone."""
        codes, rests = self._split(texts)
        ids = self.encode_batch(texts)
        drawn = resegmented(self._sp, rests, kind=self._kind, amount=amount, seed=seed, out_type=str)
        for i, pieces in drawn.items():
            ids[i] = self._look_up(codes[i] + pieces)
        return ids

    def save(self, path: Path) -> None:
        """Write the SentencePiece model, and the list of pieces as .json (each atomically)."""
        with write_aside(path) as aside:
            aside.write_bytes(self.model)
        write_json(path.with_suffix(".json"), {"kind": self.kind, "pieces": self._pieces})

    @classmethod
    def load(cls, path: Path) -> PieceTokenizer:
        """Read what `save` wrote; a `RunFolderError` names a file that is missing or damaged."""
        listed = path.with_suffix(".json")
        content: Any = read_json(listed)
        pieces = content.get("pieces") if isinstance(content, dict) and content.get("kind") == cls.kind else None
        if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
            raise RunFolderError(f"{listed} is damaged: it does not list the pieces of a vocabulary")
        return opened(path, lambda model: cls(model, pieces))

    @cached_property
    def _kind(self) -> str:
        return kind_of(self._sp)

    def _look_up(self, pieces: Iterable[str]) -> list[int]:
        return [self._ids.get(piece, UNK) for piece in pieces]

    @staticmethod
    def _split(texts: Sequence[str]) -> tuple[list[list[str]], list[str]]:
        """Language codes, none or one a text, and what follows them."""
        codes: list[list[str]] = []
        rests = []
        for text in map(characters, texts):
            end = text.find("<<") + 2 if text.startswith(">>") else 1
            codes.append([text[:end]] if end > 1 else [])
            rests.append(text[end:] if end > 1 else text)
        return codes, rests
