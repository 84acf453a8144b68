"""Vocabularies of the `tokenizers` library (WordPiece, byte-level BPE), from a tokenizer.json, which has no code.

The run folder contains the unchanged file and a list that maps our ids to the library's. Our special ids come first.
The library is an extra: `pip install transduce[interchange]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from transduce.errors import UserError, needing
from transduce.text.special import BOS, EOS, UNK, Span, Vocabulary, characters

_MOST_IDS = 1 << 24
_PROBES = ("", " A dog's 2 cafés \t\n", "\u732b\U0001f600\ue000")  # fails if a vocabulary lacks its own UNK


class HubTokenizer(Vocabulary):
    """A tokenizer from a tokenizer.json, with our ids. It adds no special tokens and does not truncate.

    An encoded text may contain `UNK` and the special tokens that are in the text, such as `[MASK]`.
    """

    kind = "hub"

    def __init__(self, model: bytes, theirs: Sequence[int]) -> None:
        """`model`: the content of tokenizer.json; `theirs`: the library's id for each of our ids, or -1.

        Raises `ValueError` if either is invalid.
        """
        self.model, self.theirs = model, list(theirs)
        self._tokenizer = open_tokenizer(model)
        if len(self.theirs) <= EOS or any(type(i) is not int or not -1 <= i < _MOST_IDS for i in self.theirs):
            raise ValueError("it does not list the ids of a vocabulary")
        self._ours = {their: ours for ours, their in reversed(list(enumerate(self.theirs))) if their >= 0}
        if (end := self.theirs[EOS]) == self.theirs[BOS] and end >= 0:
            self._ours[end] = EOS  # one piece for BOS and EOS: in a text it is read as EOS, which is predicted
        names = [self._tokenizer.id_to_token(their) if their >= 0 else None for their in self.theirs]
        self._pieces = [name or f"<unnamed {i}>" for i, name in enumerate(names)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch([characters(text) for text in texts], add_special_tokens=False)
        return [self.framed([self._ours.get(i, UNK) for i in encoding.ids]) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        encoding = self._tokenizer.encode(characters(text), add_special_tokens=False)
        ids = self.framed([self._ours.get(i, UNK) for i in encoding.ids])
        return ids, [(0, 0)] * (len(ids) - len(encoding.ids)) + list(encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids are left out, except `UNK`, which becomes the library's piece for it."""
        if self._named_bytes:  # the library would drop a whole sequence of bytes for one invalid byte
            return b"".join([self.bytes_of[int(i)] for i in ids]).decode("utf-8", errors="replace")
        theirs = [self.theirs[i] for i in map(int, ids) if (i > EOS or i == UNK) and i not in self._hidden]
        return str(self._tokenizer.decode([i for i in theirs if i >= 0], skip_special_tokens=False))

    def with_language(self, token: str, code: str) -> HubTokenizer:
        grown = open_tokenizer(self.model)
        grown.add_special_tokens([token])
        theirs = [*self.theirs, grown.token_to_id(token)]
        framing = self.framing.with_language(code, self.vocab_size)
        return HubTokenizer(grown.to_str().encode(), theirs).with_framing(framing)

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The UTF-8 bytes of each piece. Raises `UserError` unless the vocabulary encodes every text exactly.

        GPT-2's vocabulary does, because its characters stand for bytes. So do vocabularies with 256 byte pieces.
        """
        named, table = self._named_bytes, _byte_of()
        if not named and "\u0120" not in "".join(self._pieces):
            raise UserError(
                "the vocabulary of this imported model is not byte-level, as GPT-2's is: text cannot be served; use "
                "transduce generate"
            )

        def content(piece: str) -> bytes:
            if not named and set(piece) <= table.keys():
                return bytes(table[c] for c in piece)
            return named.get(piece, piece.encode("utf-8"))

        unknown = "\u2047".encode() if named else b""
        return [b"", unknown, b"", b"", *map(content, self._pieces[EOS + 1 :])]

    @cached_property
    def _named_bytes(self) -> dict[str, bytes]:
        """The byte of each of 256 byte pieces, such as `<0x0A>`; empty if a piece is missing or spaces are not kept."""
        named = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        whole = self._tokenizer.pre_tokenizer is None and named.keys() <= set(self._pieces)
        return named if whole else {}

    def _listed(self) -> dict[str, Any]:
        return {"theirs": self.theirs}


def _byte_of() -> dict[str, int]:
    """Map the characters of GPT-2's byte-level pieces to bytes (Radford et al. 2019).

    A printable character stands for its own byte. The characters from U+0100 on stand for the other bytes, in order.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


def open_tokenizer(model: bytes) -> Any:
    """Load the content of a tokenizer.json with the library. Its truncation and padding are disabled.

    Raises `ValueError` if the content is invalid.
    """
    with needing("interchange", "this vocabulary needs tokenizers"):
        from tokenizers import Tokenizer
    try:
        _check(json.loads(model))
        tokenizer = Tokenizer.from_str(model.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_batch(_PROBES, add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit, MemoryError, ValueError):
        raise
    except BaseException as error:  # the library raises plain Exception, and its panics are only BaseException
        raise ValueError(f"not a tokenizer.json ({' '.join(str(error).split()[:12])})") from None
    return tokenizer


def check_ids(ids: Iterable[object]) -> None:
    """Raise `ValueError` for ids that would crash the library, which allocates memory up to the largest id."""
    if not all(type(i) is int and 0 <= i < _MOST_IDS for i in ids):
        raise ValueError(f"its vocabulary needs one id per piece, each below {_MOST_IDS:,}")


def _check(content: Any) -> None:
    """Raise `ValueError` for settings that the library accepts, but that split text at random or crash it."""
    vocabulary, dropout = content["model"]["vocab"], content["model"].get("dropout")
    if dropout not in (None, 0):
        raise ValueError(f"its model has dropout {str(dropout)[:20]}: a text would be split at random")
    check_ids(vocabulary.values() if isinstance(vocabulary, dict) else ())
    check_ids([one["id"] for one in content.get("added_tokens") or ()])
