"""Tokenizers that use SentencePiece (Kudo and Richardson 2018).

Four ids are special in every vocabulary: padding, unknown, beginning and end of a sentence. Characters outside the
vocabulary become `UNK`. `training.py` learns vocabularies.

Vocabularies for running text are exact: `decode(encode(text)) == text` for every text, including line ends and spaces.
They do not normalize text, and have a piece for the line end. Unknown characters are encoded as bytes. So is U+2581,
which SentencePiece uses for spaces.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import sentencepiece

from transduce.config.model import OutputSettings
from transduce.config.settings import DataSettings
from transduce.errors import RunFolderError, SettingsError
from transduce.process import n_threads_to_use
from transduce.runs.atomic import read_bytes, read_json
from transduce.runs.folder import RunFolder
from transduce.text.hub import HubTokenizer
from transduce.text.languages import base_language
from transduce.text.placeholders import PLACEHOLDERS, Masked, mask_pair, shared_spans
from transduce.text.special import (
    BOS,
    EOS,
    MASK,
    PAD,
    SPACE,
    SPECIAL_PIECES,
    UNK,
    Framing,
    Span,
    Vocabulary,
    characters,
)
from transduce.text.subword_regularization import resegmented
from transduce.text.vectors import VectorReader

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PROBE = "\n \n  \n"  # only exact vocabularies reproduce it
_MANY = 1000  # fewest texts for which the library's threads are faster


class SentencePieceVocabulary(Vocabulary):
    """Base class of vocabularies with a SentencePiece model, `Tokenizer` and `PieceTokenizer`."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        if not model:  # the library would make an empty processor, and log an error
            raise ValueError("the file is empty")
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._unknown: str = self._sp.id_to_piece(self._sp.unk_id())
        except (RuntimeError, ValueError, IndexError):
            raise ValueError("not a SentencePiece model") from None

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        (code,), (rest,) = self._split([text])
        start = len(text) - len(rest)
        encoded = self._sp.encode(rest, return_type="offset_mapping")
        spans = [(start + first, start + last) for first, last in encoded["offsets"]]
        ids = self.framed(own := self._look_up(code + encoded["pieces"]))
        return ids, [(0, 0)] * (len(ids) - len(own)) + [(0, start)] * len(code) + spans

    def normalized(self, text: str) -> str:
        """Normalize a text by the model's rules, and strip the spaces at its edges."""
        return str(self._sp.normalize(text)).replace(SPACE, " ").strip(" ")

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Segment texts at random, for subword regularization. The result depends only on the arguments.

        `amount` is, for a unigram vocabulary, the share of texts that are segmented at random (Kudo 2018), and for BPE
        the share of merges dropped in every text (Provilkov et al. 2020). It has no effect on character vocabularies.
        """
        codes, rests = self._split(texts)
        drawn = resegmented(self._sp, rests, kind=self.algorithm, amount=amount, seed=seed)
        sampled = {i: self.framed(self._look_up(codes[i] + pieces)) for i, pieces in drawn.items()}
        usual = enumerate(self.encode_batch(texts)) if len(sampled) < len(texts) else ()
        return list((dict(usual) | sampled).values())

    @cached_property
    def has_placeholders(self) -> bool:
        return PLACEHOLDERS[0] in self._pieces[: MASK + 1]

    @cached_property
    def unreadable_ids(self) -> frozenset[int]:
        spelled = (i for i, piece in enumerate(self._pieces) if piece in PLACEHOLDERS or _BYTE.fullmatch(piece))
        return frozenset({UNK, *spelled})

    @cached_property
    def algorithm(self) -> str:
        """The algorithm of the SentencePiece model: "unigram", "bpe", "char" or "word"."""
        spec = parse_model(self.model).trainer_spec
        return str(spec.ModelType.Name(spec.model_type)).lower()

    @property
    def of_characters(self) -> bool:
        return self.algorithm == "char"

    def _look_up(self, pieces: list[str]) -> list[int]:
        return [UNK if i in self._unused else i for i in self._sp.piece_to_id(pieces)]

    @cached_property
    def _unused(self) -> frozenset[int]:
        """The ids of pieces that encoding never produces. Text that equals the name of such a piece becomes `UNK`."""
        return frozenset(i for i in range(self._sp.vocab_size()) if self._sp.is_unused(i) or self._sp.is_control(i))

    def _split(self, texts: Sequence[str]) -> tuple[list[list[str]], list[str]]:
        """Return the pieces at the start of each text that SentencePiece must not split, and the rest of the text."""
        return [[] for _ in texts], [characters(text) for text in texts]

    def _cut(self, texts: Sequence[str], out_type: type) -> list[list[Any]]:
        if len(texts) == 1:  # for a list, the library starts threads even for a single text
            return [self._sp.encode(texts[0], out_type=out_type, num_threads=1)]
        return self._sp.encode(texts, out_type=out_type, num_threads=n_threads_to_use() if len(texts) >= _MANY else 1)


def _single_spaced(text: str) -> str:
    """Remove repeated and outer spaces, which a model may predict although its training text has none."""
    return re.sub(" {2,}", " ", text).strip(" ") if "  " in text else text.strip(" ")


def parse_model(model: bytes) -> Any:
    """Parse a SentencePiece model to a protocol buffer: pieces with types and scores, and normalization rules."""
    from sentencepiece import sentencepiece_model_pb2 as format_of

    return format_of.ModelProto.FromString(model)  # type: ignore[attr-defined]


def with_pieces(model: bytes, pieces: Iterable[tuple[str, float]], *, control: bool = False) -> bytes:
    """Append pieces with their scores to a serialised SentencePiece model. `control`: encoding never produces them."""
    proto = parse_model(model)
    for text, score in pieces:
        piece = proto.pieces.add(piece=text, score=score)
        if control:
            piece.type = piece.CONTROL
    return bytes(proto.SerializeToString())


class Tokenizer(SentencePieceVocabulary):
    """A vocabulary with SentencePiece's own ids. Language tokens are control pieces, which no text encodes to."""

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        """`model`: a serialized SentencePiece model. Raises `ValueError` if it is invalid or has other special ids."""
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
        encoded = self._cut([characters(text) for text in texts], int)
        return encoded if self.frame == () else list(map(self.framed, encoded))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text. Special ids are left out, except `UNK`, which becomes U+2047, the double question mark.

        Bytes that are not valid UTF-8 are left out.
        """
        if self.exact:
            return b"".join([self.bytes_of[int(i)] for i in ids]).decode("utf-8", errors="replace")
        text: str = self._sp.decode([i for i in map(int, ids) if i > EOS or i == UNK]).replace("\ufffd", "")
        return text if self.keeps_spaces else _single_spaced(text)

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
        """Whether `decode(encode(text)) == text` for every text. If so, a text may be encoded line by line."""
        return self._sp.normalize("a  a") == f"a{SPACE}{SPACE}a" and self._sp.decode(self._sp.encode(_PROBE)) == _PROBE

    @cached_property
    def keeps_spaces(self) -> bool:
        return SPACE + SPACE in self._sp.normalize("a  a")

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The UTF-8 bytes of each piece of an exact vocabulary; a piece may be a part of a character."""

        def content(i: int, piece: str) -> bytes:
            if self._sp.is_byte(i):
                return bytes([int(piece[3:5], 16)])
            text = "" if self._sp.is_control(i) else "\u2047" if i == UNK else piece.replace(SPACE, " ")
            return text.encode("utf-8")

        return [content(i, piece) for i, piece in enumerate(self._pieces)]

    def with_language(self, token: str, code: str) -> Tokenizer:
        model = with_pieces(self.model, [(token, 0.0)], control=True)
        return Tokenizer(model).with_framing(self.framing.with_language(code, self.vocab_size))

    def _around_spaces(self, text: str) -> list[int]:
        """Encode a text that contains U+2581, which becomes three byte pieces."""
        own = self._look_up([f"<0x{byte:02X}>" for byte in SPACE.encode("utf-8")])
        parts = self._cut([characters(part) for part in text.split(SPACE)], int)
        return list(chain(parts[0], *(own + part for part in parts[1:])))


class PieceTokenizer(SentencePieceVocabulary):
    """Marian's tokenizer. SentencePiece splits the text, and the ids come from a separate list of pieces.

    The ids of the SentencePiece model itself are not used. Pieces outside the list are `UNK`. A text may begin with a
    language code, `>>deu<< ...`, which is one piece.
    """

    kind = "marian"

    def __init__(self, model: bytes, pieces: Sequence[str]) -> None:
        """`pieces`: the piece of each id, special ids first. Raises `ValueError` if an argument is invalid."""
        super().__init__(model)
        if tuple(pieces[: len(SPECIAL_PIECES)]) != SPECIAL_PIECES or not all(isinstance(p, str) for p in pieces):
            raise ValueError(f"its list must contain texts, and its first pieces must be {list(SPECIAL_PIECES)}")
        self._pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i > EOS}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        codes, rests = self._split(texts)
        cut = zip(codes, self._cut(rests, str), strict=True)
        return [self.framed(self._look_up(code + pieces)) for code, pieces in cut]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text. Special ids are left out, except `UNK`, which becomes U+2047, a double question mark."""
        read = [i for i in map(int, ids) if (i > EOS or i == UNK) and i not in self._hidden]
        pieces = [self._unknown if i == UNK else self._pieces[i] for i in read]
        return _single_spaced(str(self._sp.decode_pieces(pieces)).replace(SPACE, " "))

    def with_language(self, token: str, code: str) -> PieceTokenizer:
        framing = self.framing.with_language(code, self.vocab_size)
        return PieceTokenizer(self.model, [*self._pieces, token]).with_framing(framing)

    def _look_up(self, pieces: list[str]) -> list[int]:
        return [self._ids.get(piece, UNK) for piece in pieces]

    def _split(self, texts: Sequence[str]) -> tuple[list[list[str]], list[str]]:
        texts = [characters(text) for text in texts]
        if self.framing.ids:
            return super()._split(texts)
        ends = [text.find("<<") + 2 if text.startswith(">>") and "<<" in text else 0 for text in texts]
        cut = [(text[:end], text[end:]) for text, end in zip(texts, ends, strict=True)]
        return [[code] if code else [] for code, _ in cut], [rest for _, rest in cut]

    def _listed(self) -> dict[str, Any]:
        return {"pieces": self._pieces}


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """The vocabularies of the source and the target. If they share a vocabulary, both are the same object."""

    src: Vocabulary
    tgt: Vocabulary

    @property
    def joint(self) -> bool:
        """Whether both sides have the same pieces. Their models may still have different normalization."""
        if self.is_one:
            return True
        both = type(self.src) is type(self.tgt) is Tokenizer and self.n_src == self.n_tgt
        return both and self.src.pieces(range(self.n_src)) == self.tgt.pieces(range(self.n_tgt))

    @property
    def is_one(self) -> bool:
        """Whether both sides share one vocabulary, regardless of the ids that begin their texts."""
        unframed = type(self.src) is type(self.tgt) and self.src.model is self.tgt.model
        return self.src is self.tgt or (unframed and bool(self.src.framing.ids))

    def between(self, src_lang: str | None, tgt_lang: str | None) -> Tokenizers:
        """Return vocabularies that encode texts in these languages, or `self` if the model has no language tokens.

        Raises `SettingsError` for a language that the model lacks, or if a needed language is None.
        """
        if not self.src.framing.ids:
            return self
        src, tgt = self.src.framing.between(src_lang, tgt_lang)
        return Tokenizers(self.src.with_frame(src), self.tgt.with_frame(tgt))

    def unframed(self) -> Tokenizers:
        """Return vocabularies that encode texts without language tokens."""
        if not self.src.framing.ids:
            return self
        return Tokenizers(self.src.with_frame(()), self.tgt.with_frame(()))

    def trained_on(self, directions: Iterable[tuple[str, str]]) -> Tokenizers:
        """Return vocabularies that record further directions of training. See `Framing.trained_on`."""
        framing = self.src.framing.trained_on(directions)
        if framing == self.src.framing:
            return self
        src, tgt = self.src.with_framing(framing), self.tgt.with_framing(framing)
        return Tokenizers(src, src if self.src is self.tgt else tgt)

    def masked(self, src: str, tgt: str, src_ids: Sequence[int]) -> tuple[Masked, Masked]:
        """Put placeholders in a source and its translation for shared words that the source vocabulary cannot read."""
        if not self.have_placeholders:
            return Masked(src), Masked(tgt)
        return mask_pair(src, tgt, shared_spans(src, tgt, self.src, src_ids))

    @property
    def have_placeholders(self) -> bool:
        return self.src.has_placeholders and self.tgt.has_placeholders

    @property
    def n_src(self) -> int:
        return self.src.vocab_size

    @property
    def n_tgt(self) -> int:
        return self.tgt.vocab_size

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model` if shared, else `tokenizer.src.model` and `tokenizer.tgt.model`. Remove the others.

        Some kinds of tokenizer also write a list of pieces or ids, such as `tokenizer.src.json`.
        """
        joint, src, tgt = _files(folder)
        wanted = {joint: self.src} if self.is_one else {src: self.src, tgt: self.tgt}
        for path, tokenizer in wanted.items():
            tokenizer.save(path)
        for path in {joint, src, tgt} - wanted.keys():
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizers:
        """Load the files that `save` wrote. Raises `RunFolderError`, which names the missing or damaged file."""
        joint, src, tgt = _files(folder)
        if not joint.exists() and (src.exists() or tgt.exists()):
            return cls(load_vocabulary(src), load_vocabulary(tgt))
        both = load_vocabulary(joint)
        return cls(both, both)


def load_tokenizers(folder: RunFolder) -> Tokenizers:
    """Load and validate the vocabularies of a run.

    If the settings leave the languages of a multilingual model open, choose them later with `Tokenizers.between`.
    """
    folder.manifest.check("tokenizer")
    tokenizers = Tokenizers.load(folder.path)
    both_ours, model = type(tokenizers.src) is type(tokenizers.tgt) is Tokenizer, folder.settings.model
    is_shared = isinstance(model, OutputSettings) and model.ties_inputs
    if both_ours and is_shared and not tokenizers.joint:
        raise RunFolderError(f"{_files(folder.path)[2]} is damaged: its pieces are not those of tokenizer.src.model")
    data = folder.settings.data
    if all(data.is_changed(f"{side}_lang") for side in tokenizers.src.framing.needed):
        return tokenizers.between(*data.named_languages)
    return tokenizers


def check_directions(data: DataSettings, framing: Framing) -> None:
    """Raise `SettingsError` unless a model with this framing can learn all translation directions of the data."""
    given = [data.direction_of(corpus) for corpus in data.corpora]
    if data.monolingual or not given:
        given.append((data.src_lang, data.tgt_lang))
    needed = {"src", "tgt"} if framing.needed and (framing.directions or data.both_directions) else framing.needed
    for direction in given:
        if unnamed := {side for side, code in zip(("src", "tgt"), direction, strict=True) if code == side} & needed:
            raise framing.no_languages(unnamed)
    for src, tgt in dict.fromkeys([*given, *((tgt, src) for src, tgt in given if data.both_directions)]):
        framing.between(src, tgt)
    targets = dict.fromkeys(base_language(tgt) for _, tgt in given)
    if not framing.needed and len(targets) > 1:
        raise SettingsError(
            f"data.languages = 'none': the model cannot know whether to write {' or '.join(targets)}; set "
            "data.languages = 'tag'",
            "data.languages",
        )


def load_vocabulary(path: Path) -> Vocabulary:
    """Load the tokenizer at `path`. Raises `RunFolderError`, which names the missing or damaged file.

    A JSON file with the same stem, if it exists, names the kind of tokenizer and lists its pieces or ids.
    """
    listed = path.with_suffix(".json")
    content = read_json(listed) if listed.exists() else {"kind": Tokenizer.kind}
    model = read_bytes(path, most=sys.maxsize)
    vocabulary: Vocabulary
    try:
        match content:
            case {"kind": Tokenizer.kind}:
                vocabulary = Tokenizer(model)
            case {"kind": PieceTokenizer.kind, "pieces": [*pieces]}:
                vocabulary = PieceTokenizer(model, pieces)
            case {"kind": HubTokenizer.kind, "theirs": [*theirs]}:
                vocabulary = HubTokenizer(model, theirs)
            case {"kind": VectorReader.kind, "width": int(width)}:
                vocabulary = VectorReader(width)
            case _:
                raise RunFolderError(f"{listed} is damaged: it does not list the pieces or ids of a vocabulary")
        if (framing := content.get("framing")) is None:
            return vocabulary
        return vocabulary.with_framing(Framing.from_json(framing, n_ids=vocabulary.vocab_size))
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from None


def _files(folder: Path) -> tuple[Path, Path, Path]:
    joint, src, tgt = (Path(folder) / f"tokenizer{side}.model" for side in ("", ".src", ".tgt"))
    return joint, src, tgt
