"""The allowed parts of a tokenizer.json.

An untrusted file could contain a regular expression that does not terminate, a replacement that grows without bound, or
a part that makes the library abort. Allowed are the parts of BERT's and GPT-2's vocabularies, and those that
`convert.tokenizer_json` writes for a SentencePiece vocabulary.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

from transduce.errors import nearest

MOST_IDS = 1 << 24
"""Larger ids are refused: the library allocates memory up to the largest id, and would crash the process."""

PARTS: dict[str, tuple[str, ...]] = {
    "model": ("WordPiece", "BPE", "WordLevel", "Unigram"),
    "normalizer": (
        *("BertNormalizer", "Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip"),
        *("Precompiled", "Replace"),
    ),
    "pre_tokenizer": (
        *("BertPreTokenizer", "ByteLevel", "Sequence", "Split", "Whitespace", "WhitespaceSplit"),
        *("Punctuation", "Digits", "Metaspace"),
    ),
    "post_processor": ("TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel", "Sequence"),
    "decoder": ("WordPiece", "ByteLevel", "BPEDecoder", "Metaspace", "Sequence", "ByteFallback", "Fuse"),
}

PATTERNS = frozenset(
    {
        # GPT-2's, and what followed it: GPT-4's with numbers of three digits, of one, or of any length
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + numbers
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            for numbers in (r"\p{N}{1,3}", r"\p{N}", r"\p{N}+")
        ),
    }
)
"""Regular expressions that are known to run in linear time on any text."""

SPACES = ((" {2,}", " "), (r" +\z", ""))
"""What SentencePiece does to spaces: expressions, and what each match becomes, which is never longer."""

CHARSMAPS = frozenset(
    {
        "1e2c7b43d3ee9755ceaa2ac335e253d8703604e0249ee1e81156c92b46423844",  # nmt_nfkc
        "2c03512e62f9ed965ec90d85314211b63b5b8aa0395311ea2147eec9ff738907",  # nmt_nfkc_cf
        "7e46d9e08af4b6a37991b04fb8388644c1595a0abcd0f26d6a5d575e2a3663ea",  # nfkc
        "d8dfef3d6db0eef0742f8b55a73aee7fce6c1e21d26a09b8d3d4b52c42a791cb",  # nfkc_cf
    }
)
"""sha256 of SentencePiece's own normalizations; a table that was made otherwise can break the library's memory."""


def check_ids(ids: Iterable[object]) -> None:
    """Raise `ValueError` for an id that would crash the library."""
    if not all(type(i) is int and 0 <= i < MOST_IDS for i in ids):
        raise ValueError("its vocabulary has ids that are none")


def check_content(model: bytes) -> None:
    """Raise `ValueError` if a tokenizer.json is unsafe or random; the library itself refuses other invalid files."""
    try:
        content = json.loads(model)
        vocabulary, dropout = content["model"]["vocab"], content["model"].get("dropout")
        added = [one["id"] for one in content.get("added_tokens") or ()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a tokenizer.json ({' '.join(str(error).split()[:12])})") from None
    if dropout not in (None, 0):
        raise ValueError(f"its model has dropout {str(dropout)[:20]}: a text would be split at random")
    check_ids([*(vocabulary.values() if isinstance(vocabulary, dict) else ()), *added])
    try:
        parts = [(place, part) for place in PARTS for part in _flat(content.get(place))]
    except RecursionError:
        raise ValueError("not a tokenizer.json (nested too deeply)") from None
    for place, part in parts:
        kind = str(part.get("type") or ("BPE" if "merges" in part else "WordPiece" if place == "model" else None))
        if kind not in PARTS[place]:
            raise ValueError(
                f"its {place} is {kind[:60]!r}{nearest(kind, PARTS[place])}; known: {', '.join(PARTS[place])}"
            )
        if (check := WRITTEN.get(kind)) is not None:
            check(part)
        elif isinstance(pattern := part.get("pattern"), dict) and "Regex" in pattern:
            _check_pattern(place, pattern["Regex"])


def _check_precompiled(part: Mapping[str, Any]) -> None:
    table = part.get("precompiled_charsmap")
    content = base64.b64decode(table) if isinstance(table, str) else b""
    if hashlib.sha256(content).hexdigest() not in CHARSMAPS:
        raise ValueError("its normalizer is 'Precompiled' with a table that is none of SentencePiece's own")


def _check_replace(part: Mapping[str, Any]) -> None:
    if (part.get("pattern"), part.get("content")) not in [({"Regex": regex}, content) for regex, content in SPACES]:
        raise ValueError(f"its normalizer is 'Replace' of what is not known: {str(part.get('pattern'))[:60]!r}")


def _check_metaspace(part: Mapping[str, Any]) -> None:
    if part.get("replacement") != "\u2581":
        raise ValueError(f"its 'Metaspace' has another sign than U+2581: {str(part.get('replacement'))[:20]!r}")


def _check_unigram(part: Mapping[str, Any]) -> None:
    """Require a list of pieces with finite scores."""
    pieces: Any = part.get("vocab")
    try:
        valid = all(piece and isinstance(piece, str) and type(x) in (int, float) and isfinite(x) for piece, x in pieces)
    except (TypeError, ValueError, OverflowError):
        valid = False
    if not valid:
        raise ValueError("its model is 'Unigram', and its vocabulary no list of pieces with their scores")


WRITTEN: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "Precompiled": _check_precompiled,
    "Replace": _check_replace,
    "Metaspace": _check_metaspace,
    "Unigram": _check_unigram,
}
"""Checks of parts that are accepted only in the form that SentencePiece's vocabularies have."""


def _check_pattern(place: str, pattern: object) -> None:
    if not isinstance(pattern, str) or pattern not in PATTERNS:
        raise ValueError(f"its {place} has a regular expression that is not known: {str(pattern)[:60]!r}")


def _flat(part: Any) -> Iterator[Mapping[str, Any]]:
    """A part and the parts inside it, recursively."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise ValueError("a part is no object")
    yield part
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner = part.get(key)
        if inner is not None and not isinstance(inner, list):
            raise ValueError(f"its {key} are no list")
        for one in inner or ():
            yield from _flat(one)
