"""Encode text as ids and decode it, with SentencePiece (Kudo and Richardson 2018).

Four ids are special in every vocabulary: padding, unknown, beginning and end of a sentence. Characters outside the
vocabulary become `UNK`. `training.py` learns vocabularies.

Vocabularies for running text are exact: `decode(encode(text)) == text` for every text, including line ends and spaces.
They do not normalise and have a piece for the line end. Unknown characters are encoded as bytes, and so is U+2581,
which SentencePiece uses for spaces.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import sentencepiece

from transduce.errors import RunFolderError
from transduce.process import n_threads_to_use
from transduce.runs.atomic import read_bytes, read_json
from transduce.runs.folder import RunFolder
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS, PAD, SPACE, SPECIAL_PIECES, UNK, Span, Vocabulary, characters
from transduce.text.subword_regularization import resegmented
from transduce.text.vectors import VectorReader

_PROBE = "\n \n  \n"  # only an exact vocabulary gives it back
_MANY = 1000  # texts from which on the library's threads pay


class SentencePieceVocabulary(Vocabulary):
    """Base of both kinds of vocabularies with a SentencePiece model."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._unknown: str = self._sp.id_to_piece(self._sp.unk_id())
        except (RuntimeError, ValueError, IndexError):
            raise ValueError("not a SentencePiece model") from None

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        (code,), (rest,) = self._split([text])
        start = len(text) - len(rest)
        found = self._sp.encode(rest, return_type="offset_mapping")
        places = [(start + first, start + last) for first, last in found["offsets"]]
        return self._look_up(code + found["pieces"]), [(0, start)] * len(code) + places

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Segmentations drawn at random, for subword regularisation: a function of (texts, amount, seed) alone.

        `amount` is, for a unigram vocabulary, the share of texts that are segmented at random (Kudo 2018), for BPE the
        share of merges dropped in every text (Provilkov et al. 2020). Characters have one segmentation only.
        """
        codes, rests = self._split(texts)
        drawn = resegmented(self._sp, rests, kind=self.algorithm, amount=amount, seed=seed)
        found = {i: self._look_up(codes[i] + pieces) for i, pieces in drawn.items()}
        usual = enumerate(self.encode_batch(texts)) if len(found) < len(texts) else ()
        return list((dict(usual) | found).values())

    @cached_property
    def algorithm(self) -> str:
        """unigram, bpe, char or word."""
        spec = parse_model(self.model).trainer_spec
        return str(spec.ModelType.Name(spec.model_type)).lower()

    def _look_up(self, pieces: list[str]) -> list[int]:
        return self._sp.piece_to_id(pieces)

    def _split(self, texts: Sequence[str]) -> tuple[list[list[str]], list[str]]:
        """The pieces at the start of each text that SentencePiece must not split, and the rest of the text."""
        return [[] for _ in texts], [characters(text) for text in texts]

    def _cut(self, texts: Sequence[str], out_type: type) -> list[list[Any]]:
        if len(texts) == 1:  # the library starts threads for a list, even of one text
            return [self._sp.encode(texts[0], out_type=out_type, num_threads=1)]
        return self._sp.encode(texts, out_type=out_type, num_threads=n_threads_to_use() if len(texts) >= _MANY else 1)


def parse_model(model: bytes) -> Any:
    """The protocol buffer of a SentencePiece model: its pieces with their types and scores, and its normalization."""
    from sentencepiece import sentencepiece_model_pb2 as format_of

    return format_of.ModelProto.FromString(model)  # type: ignore[attr-defined]


class Tokenizer(SentencePieceVocabulary):
    """A vocabulary with SentencePiece's own ids."""

    def __init__(self, model: bytes) -> None:
        """`model`: a serialised SentencePiece model. Raises `ValueError`."""
        super().__init__(model)
        special = self._sp.pad_id(), self._sp.unk_id(), self._sp.bos_id(), self._sp.eos_id()
        if special != (PAD, UNK, BOS, EOS):
            raise ValueError(
                f"its ids of padding, unknown, beginning and end are {special}, not {(PAD, UNK, BOS, EOS)}"
            )
        self._pieces = self._sp.id_to_piece(list(range(self._sp.vocab_size())))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self.exact and any(SPACE in text for text in texts):
            return [self._around_spaces(text) for text in texts]
        return self._cut([characters(text) for text in texts], int)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids are left out, except `UNK`, which shows as U+2047, the double question mark."""
        if self.exact:
            return b"".join([self.bytes_of[int(i)] for i in ids]).decode("utf-8", errors="replace")
        return self._sp.decode([i for i in map(int, ids) if i > EOS or i == UNK]).strip(" ")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        if not self.exact:
            return super().encode_with_offsets(text)
        ids = self.encode(text)
        ends = list(accumulate((len(c.encode("utf-8")) for c in characters(text)), initial=0))
        stops = list(accumulate((len(self.bytes_of[i]) for i in ids), initial=0))
        spans = [(bisect(ends, first) - 1, bisect(ends, stop) - 1) for first, stop in pairwise(stops)]
        return ids, spans

    @cached_property
    def exact(self) -> bool:
        """Whether `decode(encode(text))` is always the text. Then a text may be encoded line by line."""
        return bool(self._sp.decode(self._sp.encode(_PROBE)) == _PROBE)

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The UTF-8 bytes of each piece of an exact vocabulary; a piece may be a part of a character."""

        def content(i: int, piece: str) -> bytes:
            if self._sp.is_byte(i):
                return bytes([int(piece[3:5], 16)])
            text = "" if self._sp.is_control(i) else "\u2047" if i == UNK else piece.replace(SPACE, " ")
            return text.encode("utf-8")

        return [content(i, piece) for i, piece in enumerate(self._pieces)]

    def _around_spaces(self, text: str) -> list[int]:
        """The ids of a text whose U+2581 are encoded as bytes."""
        own = self._look_up([f"<0x{byte:02X}>" for byte in SPACE.encode("utf-8")])
        parts = self._cut([characters(part) for part in text.split(SPACE)], int)
        return list(chain(parts[0], *(own + part for part in parts[1:])))


class PieceTokenizer(SentencePieceVocabulary):
    """Marian's tokenizer: SentencePiece splits the text, and a separate list of pieces gives the ids.

    The ids of the SentencePiece model itself are not used. What the list lacks is `UNK`. A text may begin with a
    language code, `>>deu<< ...`, which is one piece.
    """

    kind = "marian"

    def __init__(self, model: bytes, pieces: Sequence[str]) -> None:
        """`pieces`: of all ids, the special ones first. Raises `ValueError` if either is invalid."""
        super().__init__(model)
        if tuple(pieces[: len(SPECIAL_PIECES)]) != SPECIAL_PIECES or not all(isinstance(p, str) for p in pieces):
            raise ValueError(f"its list must contain texts, and its first pieces must be {list(SPECIAL_PIECES)}")
        self._pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i > EOS}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        codes, rests = self._split(texts)
        return [self._look_up(code + pieces) for code, pieces in zip(codes, self._cut(rests, str), strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids are left out, except `UNK`, which shows as U+2047, the double question mark."""
        pieces = [self._unknown if i == UNK else self._pieces[i] for i in map(int, ids) if i > EOS or i == UNK]
        return str(self._sp.decode_pieces(pieces)).replace(SPACE, " ").strip(" ")

    def _look_up(self, pieces: list[str]) -> list[int]:
        return [self._ids.get(piece, UNK) for piece in pieces]

    def _split(self, texts: Sequence[str]) -> tuple[list[list[str]], list[str]]:
        texts = [characters(text) for text in texts]
        ends = [text.find("<<") + 2 if text.startswith(">>") and "<<" in text else 0 for text in texts]
        cut = [(text[:end], text[end:]) for text, end in zip(texts, ends, strict=True)]
        return [[code] if code else [] for code, _ in cut], [rest for _, rest in cut]

    def _listed(self) -> dict[str, Any]:
        return {"kind": self.kind, "pieces": self._pieces}


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
            return cls(load_vocabulary(src), load_vocabulary(tgt))
        both = load_vocabulary(joint)
        return cls(both, both)


def load_tokenizers(folder: RunFolder) -> Tokenizers:
    """Load the vocabulary of both sides of a run, its files validated."""
    folder.manifest.check("tokenizer")
    return Tokenizers.load(folder.path)


def load_vocabulary(path: Path) -> Vocabulary:
    """The tokenizer at `path`; a `RunFolderError` names a file that is missing or damaged.

    A JSON file with the same stem, if there is one, names its kind and lists its pieces or ids.
    """
    listed = path.with_suffix(".json")
    content = read_json(listed) if listed.exists() else None
    model = read_bytes(path, most=sys.maxsize)
    try:
        match content:
            case None:
                return Tokenizer(model)
            case {"kind": PieceTokenizer.kind, "pieces": [*pieces]}:
                return PieceTokenizer(model, pieces)
            case {"kind": HubTokenizer.kind, "theirs": [*theirs]}:
                return HubTokenizer(model, theirs)
            case {"kind": VectorReader.kind, "width": int(width)}:
                return VectorReader(width)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from None
    raise RunFolderError(f"{listed} is damaged: it does not list the pieces or ids of a vocabulary")


def _files(folder: Path) -> tuple[Path, Path, Path]:
    joint, src, tgt = (Path(folder) / f"tokenizer{side}.model" for side in ("", ".src", ".tgt"))
    return joint, src, tgt
