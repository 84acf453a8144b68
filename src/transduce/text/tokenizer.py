"""Encode text as ids and decode it, with SentencePiece (Kudo and Richardson 2018).

Four ids are special in every vocabulary: padding, unknown, beginning and end of a sentence. Characters outside the
vocabulary become `UNK`. `training.py` learns vocabularies.

Vocabularies for running text are exact: `decode(encode(text)) == text` for every text, including line ends and spaces.
They do not normalise and have a piece for the line end. Unknown characters are encoded as bytes, and so is U+2581,
which SentencePiece uses for spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import sentencepiece

from transduce.runs.atomic import read_json, write_aside
from transduce.runs.folder import RunFolder
from transduce.text.hub import HubTokenizer
from transduce.text.pieces import PieceTokenizer
from transduce.text.sampling import kind_of, resegmented
from transduce.text.special import BOS, EOS, PAD, UNK, Vocabulary, characters, opened

_SPACE = "\u2581"
_PROBE = "\n \n  \n"  # only an exact vocabulary gives it back
_MANY = 1000  # texts from which on the library's threads pay


class Tokenizer:
    """A vocabulary. Immutable, safe to use from several threads."""

    def __init__(self, model: bytes, *, notes: Sequence[str] = ()) -> None:
        """`model`: a serialised SentencePiece model; `notes`: remarks of its training. Raises `ValueError`."""
        self.model, self.notes = model, tuple(notes)
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
            special = self._sp.pad_id(), self._sp.unk_id(), self._sp.bos_id(), self._sp.eos_id()
        except (RuntimeError, ValueError):
            raise ValueError("not a SentencePiece model") from None
        if special != (PAD, UNK, BOS, EOS):
            raise ValueError(
                f"its ids of padding, unknown, beginning and end are {special}, not {(PAD, UNK, BOS, EOS)}"
            )

    @property
    def vocab_size(self) -> int:
        """Pieces, special ones included."""
        return int(self._sp.vocab_size())

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones but `UNK`."""
        if self.exact and _SPACE in text:
            return self._around_spaces(text)
        return self._sp.encode(characters(text), num_threads=1)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts; the same as `encode` of each, and faster."""
        threads = -1 if len(texts) >= _MANY else 1
        if self.exact and any(_SPACE in text for text in texts):
            return [self.encode(text) for text in texts]
        return self._sp.encode([characters(text) for text in texts], num_threads=threads)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids vanish, but for `UNK`, which shows as U+2047, the double question mark."""
        if self.exact:
            return b"".join([self.bytes_of[int(i)] for i in ids]).decode("utf-8", errors="replace")
        return self._sp.decode([i for i in map(int, ids) if i > EOS or i == UNK]).strip(" ")

    @cached_property
    def exact(self) -> bool:
        """Whether `decode(encode(text))` is always the text. Then a text may be encoded line by line."""
        return bool(self._sp.decode(self._sp.encode(_PROBE)) == _PROBE)

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The UTF-8 bytes of each piece of an exact vocabulary; a piece may be a part of a character."""
        return [self._bytes(i) for i in range(self.vocab_size)]

    def _bytes(self, i: int) -> bytes:
        piece = self._sp.id_to_piece(i)
        if self._sp.is_byte(i):
            return bytes([int(piece[3:5], 16)])
        text = "" if self._sp.is_control(i) else "\u2047" if i == UNK else piece.replace(_SPACE, " ")
        return text.encode("utf-8")

    def _around_spaces(self, text: str) -> list[int]:
        """The ids of a text whose U+2581 are encoded as bytes."""
        own = [self._sp.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode("utf-8")]
        parts = self._sp.encode([characters(part) for part in text.split(_SPACE)], num_threads=1)
        return list(chain(parts[0], *(own + part for part in parts[1:])))

    def normalize(self, text: str) -> str:
        """The text as the vocabulary sees it; equals `decode(encode(text))` where nothing is unknown."""
        if self.exact:
            return characters(text)
        return self._sp.normalize(characters(text)).replace("\u2581", " ").strip(" ")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces of ids, including special ones; U+2581 marks the beginning of a word."""
        return [self._sp.id_to_piece(int(i)) for i in ids]

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that are not in the vocabulary, in order, each once."""
        ids, parts = self.encode(text), self._sp.encode(characters(text), out_type=str, num_threads=1)
        return list(dict.fromkeys(part for i, part in zip(ids, parts, strict=True) if i == UNK))

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Segmentations drawn at random, for subword regularisation: a function of (texts, amount, seed) alone.

        `amount` is, for a unigram vocabulary, the share of texts that are segmented at random (Kudo 2018), for BPE the
        share of merges dropped in every text (Provilkov et al. 2020). Characters have one segmentation only.
        """
        texts = [characters(text) for text in texts]
        drawn = resegmented(self._sp, texts, kind=self.algorithm, amount=amount, seed=seed)
        if len(drawn) == len(texts):
            return list(drawn.values())
        ids = self.encode_batch(texts)
        for i, other in drawn.items():
            ids[i] = other
        return ids

    @cached_property
    def algorithm(self) -> str:
        """unigram, bpe or char."""
        return kind_of(self._sp)

    def save(self, path: Path) -> None:
        """Write the model file (aside, then renamed)."""
        with write_aside(path) as aside:
            aside.write_bytes(self.model)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a model file; a `RunFolderError` names one that is missing or damaged."""
        return opened(Path(path), cls)


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """The vocabularies of both sides; one object twice where they share one."""

    src: Vocabulary
    tgt: Vocabulary

    @property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.src is self.tgt

    @property
    def n_src(self) -> int:
        """Size of the source vocabulary."""
        return self.src.vocab_size

    @property
    def n_tgt(self) -> int:
        """Size of the target vocabulary."""
        return self.tgt.vocab_size

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks of the training, each once."""
        return tuple(dict.fromkeys(self.src.notes + self.tgt.notes))

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model`, or `tokenizer.src.model` and `tokenizer.tgt.model`; the other kind is removed.

        Some kinds of tokenizer also write a list of pieces or ids, `tokenizer.src.json`.
        """
        joint, src, tgt = _files(folder)
        wanted = {joint: self.src} if self.joint else {src: self.src, tgt: self.tgt}
        for path, tokenizer in wanted.items():
            tokenizer.save(path)
        for path in {joint, src, tgt} - wanted.keys():
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizers:
        """Read what `save` wrote; a `RunFolderError` names a file that is missing or damaged."""
        joint, src, tgt = _files(folder)
        if not joint.exists() and (src.exists() or tgt.exists()):
            return cls(_load(src), _load(tgt))
        both = _load(joint)
        return cls(both, both)


def load_tokenizers(folder: RunFolder) -> Tokenizers:
    """Load the vocabulary of both sides of a run, its files validated."""
    folder.manifest.check("tokenizer")
    return Tokenizers.load(folder.path)


def _load(path: Path) -> Vocabulary:
    """The tokenizer at `path`. A JSON file with the same stem, if there is one, names its kind."""
    listed = path.with_suffix(".json")
    if not listed.exists():
        return Tokenizer.load(path)
    content = read_json(listed)
    kind = content.get("kind") if isinstance(content, dict) else None
    return (HubTokenizer if kind == HubTokenizer.kind else PieceTokenizer).load(path)


def _files(folder: Path) -> tuple[Path, Path, Path]:
    return tuple(Path(folder) / name for name in ("tokenizer.model", "tokenizer.src.model", "tokenizer.tgt.model"))  # type: ignore[return-value]
