"""Common parts of vocabularies: special ids, tokens of languages, the mask token, and the methods of a tokenizer."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, permutations, takewhile
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from transduce.errors import SettingsError
from transduce.runs.atomic import write_aside, write_json
from transduce.text.languages import Languages, base_language, find_language, normalize_code

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>")

PLACEHOLDER_IDS = range(4, 12)
"""The ids of placeholders, which stand for parts to copy, in vocabularies that have them (`text.placeholders`)."""

MASK = 4
MASK_PIECE = "<mask>"
"""The mask token. Only vocabularies of masked models have it. In them, BOS is BERT's [CLS], and EOS is its [SEP]."""

SPACE = "\u2581"
"""SentencePiece's character for a space. It begins the first piece of a word."""

Span = tuple[int, int]
"""A part of a text: the index of its first character, and the index after its last character."""

_SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Framing:
    """The tokens that begin each source and each target.

    `src` and `tgt` of M2M-100 are ("src",) and ("tgt",), of MADLAD-400 ("tgt",) and (), of BART one id each.

    Attributes:
        languages: The id of the token of each language.
        src: The tokens that begin a source: "src" or "tgt" for the token of that side's language, or a fixed id.
        tgt: The tokens that begin a target, in the same form.
        directions: The language pairs of the training, as codes of `languages`; empty if they are not known.
    """

    languages: Mapping[str, int] = field(default_factory=dict)
    src: tuple[str | int, ...] = ()
    tgt: tuple[str | int, ...] = ()
    directions: tuple[tuple[str, str], ...] = ()

    @property
    def needed(self) -> set[str]:
        """The sides ("src", "tgt") whose language must be known before a text can be encoded."""
        return {part for part in (*self.src, *self.tgt) if isinstance(part, str)}

    @property
    def ids(self) -> set[int]:
        """The ids of all tokens that may precede a text."""
        return {*self.languages.values(), *(part for part in (*self.src, *self.tgt) if isinstance(part, int))}

    def with_language(self, code: str, token: int) -> Framing:
        return replace(self, languages={**self.languages, code: token})

    def between(self, src_lang: str | None, tgt_lang: str | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that begin a source, and the ids that begin a target, in these languages.

        Raises `SettingsError` for a language that the model lacks, or if a needed language is None.
        """
        codes, ids = {"src": src_lang, "tgt": tgt_lang}, dict[str, int]()
        if missing := {side for side in self.needed if codes[side] is None}:
            raise self.no_languages(missing)
        for side, code in codes.items():
            if code is not None and (side in self.needed or (side == "src" and self.directions)):
                ids[side] = self.languages[find_language(code, self.languages, name=f"{side}_lang")]
        src, tgt = (
            tuple(ids[part] if isinstance(part, str) else part for part in side) for side in (self.src, self.tgt)
        )
        return src, tgt

    def trained_on(self, directions: Iterable[tuple[str, str]]) -> Framing:
        """Return the framing with more directions of training, or `self` if the earlier directions are not known."""
        more = [
            (find_language(src, self.languages, name="src_lang"), find_language(tgt, self.languages, name="tgt_lang"))
            for src, tgt in (directions if self.directions else ())
        ]
        return replace(self, directions=tuple(dict.fromkeys([*self.directions, *more])))

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The directions to offer to users: the directions of the training or, if they are not known, all pairs."""
        return self.directions or tuple(permutations(self.languages, 2))

    def usual_codes(self) -> dict[str, str]:
        """Map each language's code to its usual code, such as fra_Latn to fr. Other variants keep their script."""
        bases = {code: base_language(code) for code in self.languages}
        usual = {base: find_language(base, self.languages, name="languages") for base in bases.values()}
        return {code: base if usual[base] == code else normalize_code(code) for code, base in bases.items()}

    def is_zero_shot(self, src_lang: str | None, tgt_lang: str | None) -> bool:
        """Whether the model was not trained in a direction. False if its directions or a language are not known."""
        if not self.directions or src_lang is None or tgt_lang is None:
            return False
        codes = (find_language(code, self.languages, name="languages") for code in (src_lang, tgt_lang))
        return tuple(codes) not in self.directions

    def choose(self, own: Languages, given: Languages) -> Languages:
        """Return the language of each side: `given` if set, or else `own`, the run's language.

        Raises `SettingsError` if a given language differs from the run's and the model has no language tokens.
        """
        for side, language, other in zip(("src", "tgt"), own, given, strict=True):
            if language and other and side not in self.needed:
                find_language(other, [language], name=f"{side}_lang")
        return given[0] or own[0], given[1] or own[1]

    def no_languages(self, sides: Collection[str]) -> SettingsError:
        names = [f"{side}_lang" for side in ("src", "tgt") if side in sides]
        message = f"the model has {len(self.languages)} languages: give {' and '.join(names)}"
        return SettingsError(message, *(f"data.{name}" for name in names))

    def to_json(self) -> dict[str, Any]:
        directions = {"directions": list(map(list, self.directions))} if self.directions else {}
        return {"languages": dict(self.languages), "src": list(self.src), "tgt": list(self.tgt)} | directions

    @classmethod
    def from_json(cls, content: Any, *, n_ids: int) -> Framing:
        """Restore a framing from `to_json`. Raises `ValueError` if it is invalid for a vocabulary of `n_ids` ids."""
        match content:
            case {"languages": dict(languages), "src": [*src], "tgt": [*tgt]}:
                directions = content.get("directions", [])
                sides = [part for part in (*src, *tgt) if part not in ("src", "tgt")]
                are_known = isinstance(directions, list) and all(
                    isinstance(pair, list) and all(type(code) is str and code in languages for code in pair)
                    for pair in directions
                )
                if are_known and all(type(i) is int and 0 <= i < n_ids for i in (*languages.values(), *sides)):
                    return cls(languages, tuple(src), tuple(tgt), tuple((src, tgt) for src, tgt in directions))
        raise ValueError("its framing has other ids than those of the vocabulary")


class Vocabulary(ABC):
    """Base class for the tokenizer of the source or the target. Immutable, safe to use from several threads.

    `model`: the content of its file. `frame`: the ids that begin every non-empty text, or None if they depend on
    languages that are not yet chosen.
    """

    model: bytes
    kind: ClassVar[str]
    reads_text: ClassVar[bool] = True
    """Whether inputs are text. If False, they are names of other inputs, such as sequences of vectors."""
    framing: Framing = Framing()
    frame: tuple[int, ...] | None = ()
    chunk: int = 10_000
    """Number of texts to encode at once, so that their ids fit in memory."""
    _pieces: list[str]

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def with_frame(self, frame: tuple[int, ...] | None) -> Self:
        """Return a copy whose `encode` begins every non-empty text with other ids."""
        other = copy.copy(self)
        other.frame = frame
        return other

    def with_framing(self, framing: Framing) -> Self:
        """Return a copy with another framing. If it is not empty, `Tokenizers.between` must choose the languages."""
        other = copy.copy(self)
        other.framing, other.frame = framing, () if framing == Framing() else None
        return other

    def framed(self, ids: list[int]) -> list[int]:
        """Put the frame before the ids of a text. Raises `SettingsError` if languages must be chosen first.

        A sequence of vectors in place of ids has no frame.
        """
        if self.frame == () or not ids:
            return ids
        if self.frame is None:
            raise self.framing.no_languages(self.framing.needed)
        return [*self.frame, *ids]

    def n_frame(self, ids: Sequence[int] | np.ndarray) -> int:
        """The number of ids, such as language tokens, that precede the text itself. 0 if the text is empty."""
        return sum(1 for _ in takewhile(self._hidden.__contains__, map(int, ids))) if self._hidden else 0

    @property
    def stored_as(self) -> np.dtype[Any]:
        """The dtype of ids in a token store: the smallest that fits."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ids except `UNK`."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts: the result of `encode` for each text, but faster."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """The ids of a text, and the span of each id in the original text, before any normalization.

        If several ids stand for one character, only one id has its span. The spans of the other ids are empty.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text. Special ids are left out, except `UNK`, which becomes a visible sign."""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces of ids, including special ones; SentencePiece marks the beginning of a word with U+2581."""
        return [self._pieces[int(i)] for i in ids]

    @property
    def has_placeholders(self) -> bool:
        """Whether the vocabulary has placeholders for parts to copy (`text.placeholders`)."""
        return False

    @property
    def keeps_spaces(self) -> bool:
        """Whether runs of spaces, and spaces at the edges of a text, survive encoding and decoding."""
        return False

    @property
    def of_characters(self) -> bool:
        return False

    @property
    def unreadable_ids(self) -> frozenset[int]:
        """The ids that hide the text from the model: `UNK`, bytes that spell rare characters, and placeholders."""
        return frozenset({UNK})

    def unreadable(self, text: str) -> list[Span]:
        """The spans of characters that are not in the vocabulary, in order."""
        ids, spans = self.encode_with_offsets(text)
        unreadable = self.unreadable_ids
        unknown = {
            (start, max(stop, start + 1)) for i, (start, stop) in zip(ids, spans, strict=True) if i in unreadable
        }
        return sorted((start, stop) for start, stop in unknown if start < len(text))

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that are not in the vocabulary, in order, each once."""
        return list(dict.fromkeys(text[start:stop] for start, stop in self.unreadable(text)))

    def rewritten(self, texts: Iterable[str]) -> dict[str, str]:
        """Map each character of the texts that encoding and decoding would change to its replacement."""
        characters = set(chain.from_iterable(texts)) - {" "}
        return {c: written for c in sorted(characters) if (written := self.decode(self.encode(c))) != c}

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Segment texts at random, if there are several segmentations. See `SentencePieceVocabulary.sample`."""
        return self.encode_batch(texts)

    def save(self, path: Path) -> None:
        """Write the model file atomically and, for kinds that list pieces or ids, a .json file next to it."""
        with write_aside(path) as aside:
            aside.write_bytes(self.model)
        listed = self._listed()
        if self.framing.ids:
            listed["framing"] = self.framing.to_json()
        if listed:
            write_json(path.with_suffix(".json"), {"kind": self.kind, **listed})

    def _listed(self) -> dict[str, Any]:
        """The content of the .json file beside the model, without kind and framing."""
        return {}

    def with_language(self, token: str, code: str) -> Self:
        raise NotImplementedError(f"{type(self).__name__} has no tokens for languages")

    @cached_property
    def _hidden(self) -> set[int]:
        """The ids that may begin an encoded text. Decoding leaves them out."""
        return self.framing.ids


def characters(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD. Text from files has none."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def encode_with_masks(vocabulary: Vocabulary, text: str) -> list[int]:
    """Encode a text with <mask> in place of words. Each <mask>, with the space before it, becomes one `MASK`.

    The vocabulary's own mask token, such as [MASK], is accepted too.
    """
    ids = vocabulary.encode(text.replace(MASK_PIECE, vocabulary.pieces([MASK])[0]))
    lone = {i for i in set(ids) if i != MASK and vocabulary.pieces([i])[0] == SPACE}
    return [i for i, behind in zip(ids, [*ids[1:], -1], strict=False) if not (i in lone and behind == MASK)]


def bare(piece: str) -> str:
    """Remove the marks of word beginnings from a piece.

    >>> [bare(piece) for piece in ("\u2581cat", "##s", "\u0120dog", "#")]
    ['cat', 's', 'dog', '#']
    """
    if piece.startswith("##") and len(piece) > 2:
        return piece[2:]
    return piece.lstrip("\u2581\u0120") or piece
