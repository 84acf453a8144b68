"""What a tokenizer.json may be made of.

The file is data, but data that steers: a regular expression that never ends, a replacement that grows with each round,
or a part that makes the library abort would come with it. Named here is what vocabularies of BERT and GPT-2 consist of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from transduce.errors import nearest

PARTS: dict[str, tuple[str, ...]] = {
    "model": ("WordPiece", "BPE", "WordLevel"),
    "normalizer": ("BertNormalizer", "Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip"),
    "pre_tokenizer": (
        *("BertPreTokenizer", "ByteLevel", "Sequence", "Split", "Whitespace", "WhitespaceSplit"),
        *("Punctuation", "Digits"),
    ),
    "post_processor": ("TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel", "Sequence"),
    "decoder": ("WordPiece", "ByteLevel", "BPEDecoder"),
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
"""Regular expressions that are known to be quick on any text."""


def check_parts(model: bytes) -> None:
    """`ValueError` where a tokenizer.json holds a part that is not known."""
    try:
        content = json.loads(model)
        parts = [(place, part) for place in PARTS for part in _flat(content.get(place))]
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"not a tokenizer.json ({' '.join(str(error).split()[:12])})") from None
    for place, part in parts:
        kind = str(part.get("type") or ("BPE" if "merges" in part else "WordPiece" if place == "model" else None))
        if kind not in PARTS[place]:
            raise ValueError(
                f"its {place} is {kind[:60]!r}{nearest(kind, PARTS[place])}; known: {', '.join(PARTS[place])}"
            )
        pattern = part.get("pattern")
        if isinstance(pattern, dict) and pattern.get("Regex", "") not in PATTERNS | {""}:
            raise ValueError(f"its {place} has a regular expression that is not known: {str(pattern['Regex'])[:60]!r}")


def _flat(part: Any) -> Iterator[Mapping[str, Any]]:
    """A part and what it consists of, to any depth."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise ValueError("a part is no object")
    yield part
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        for inner in part.get(key) or ():
            yield from _flat(inner)
