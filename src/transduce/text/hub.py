"""Vocabularies of the `tokenizers` library (WordPiece, byte-level BPE): a tokenizer.json, which is data only.

The run folder contains the unchanged file and a list of the library's id for each of ours; our special ids come first.
The library is an extra: `pip install transduce[interchange]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transduce.errors import RunFolderError, UserError
from transduce.runs.atomic import read_json, write_aside, write_json
from transduce.text.hub_parts import MOST_IDS, check_content
from transduce.text.special import BOS, EOS, UNK, characters, opened

_PROBES = ("", " A dog's 2 cafés \t\n", "\u732b\U0001f600\ue000")  # a vocabulary that lacks its own UNK fails here


class HubTokenizer:
    """A tokenizer.json with our ids. Immutable and thread-safe; adds no special tokens and does not truncate."""

    kind = "hub"

    def __init__(self, model: bytes, theirs: Sequence[int]) -> None:
        """`model`: the content of tokenizer.json; `theirs`: the library's id for each of ours, -1 for none.

        Raises `ValueError` if either is invalid.
        """
        self.model, self.notes = model, tuple[str, ...]()
        self._tokenizer = _open(model)
        self._theirs = list(theirs)
        if len(self._theirs) <= EOS or any(type(i) is not int or not -1 <= i < MOST_IDS for i in self._theirs):
            raise ValueError("it does not list the ids of a vocabulary")
        self._ours = {their: ours for ours, their in reversed(list(enumerate(self._theirs))) if their >= 0}
        if (end := self._theirs[EOS]) == self._theirs[BOS] and end >= 0:
            self._ours[end] = EOS  # one piece for both: in a text it is read as EOS, which is predicted

    @property
    def vocab_size(self) -> int:
        """Pieces, special ones included."""
        return len(self._theirs)

    @property
    def theirs(self) -> list[int]:
        """The library's id for each of ours, -1 for none."""
        return list(self._theirs)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Special ids are `UNK` and those that the text names, such as `[MASK]`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts."""
        found = self._tokenizer.encode_batch([characters(text) for text in texts], add_special_tokens=False)
        return [[self._ours.get(i, UNK) for i in one.ids] for one in found]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids are left out, except `UNK`, which becomes the library's piece for it."""
        if self._named_bytes:  # the library would drop a whole run of bytes for one invalid byte
            return b"".join([self.bytes_of[int(i)] for i in ids]).decode("utf-8", errors="replace")
        theirs = [self._theirs[i] for i in map(int, ids) if i > EOS or i == UNK]
        return str(self._tokenizer.decode([i for i in theirs if i >= 0], skip_special_tokens=False))

    def normalize(self, text: str) -> str:
        """The text as the vocabulary sees it."""
        normalizer = self._tokenizer.normalizer
        return characters(text) if normalizer is None else str(normalizer.normalize_str(characters(text)))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces of ids, including special ones."""
        return [self._piece(int(i)) for i in ids]

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that are not in the vocabulary, in order, each once."""
        text = characters(text)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        parts = [text[a:b] for i, (a, b) in zip(found.ids, found.offsets, strict=True) if self._ours.get(i, UNK) == UNK]
        return list(dict.fromkeys(parts))

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """The usual segmentation: these vocabularies have only one."""
        return self.encode_batch(texts)

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The UTF-8 bytes of each piece of an exact vocabulary; `ValueError` for other vocabularies.

        GPT-2's, whose characters stand for bytes, and ours, which have a piece for each byte, are exact.
        """
        pieces = self.pieces(range(self.vocab_size))
        if named := self._named_bytes:
            own = {i: b"" for i in range(EOS + 1)} | {UNK: "\u2047".encode()}
            return [own[i] if i in own else named.get(p, p.encode("utf-8")) for i, p in enumerate(pieces)]
        if "\u0120" not in "".join(pieces):
            raise ValueError("only an exact vocabulary knows the bytes of its pieces")
        table = _byte_of()
        return [
            b"" if i <= EOS else bytes(table[c] for c in piece) if set(piece) <= table.keys() else piece.encode("utf-8")
            for i, piece in enumerate(pieces)
        ]

    @cached_property
    def _named_bytes(self) -> dict[str, bytes]:
        """The 256 pieces for bytes, such as `<0x0A>`; empty if one is missing or spaces are not kept."""
        named = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        whole = self._tokenizer.pre_tokenizer is None and named.keys() <= set(self.pieces(range(self.vocab_size)))
        return named if whole else {}

    def save(self, path: Path) -> None:
        """Write the library's file as `path`, and the list of ids as .json (each atomically)."""
        with write_aside(path) as aside:
            aside.write_bytes(self.model)
        write_json(path.with_suffix(".json"), {"kind": self.kind, "theirs": self._theirs})

    @classmethod
    def load(cls, path: Path) -> HubTokenizer:
        """Read what `save` wrote; a `RunFolderError` names a file that is missing or damaged."""
        content: Any = read_json(path.with_suffix(".json"))
        theirs = content.get("theirs") if isinstance(content, dict) and content.get("kind") == cls.kind else None
        if not isinstance(theirs, list):
            raise RunFolderError(f"{path.with_suffix('.json')} is damaged: it does not list the ids of a vocabulary")
        return opened(path, lambda model: cls(model, theirs))

    def _piece(self, i: int) -> str:
        their = self._theirs[i]
        return (self._tokenizer.id_to_token(their) if their >= 0 else None) or f"<unnamed {i}>"


def _byte_of() -> dict[str, int]:
    """The byte of each character of a byte-level piece (Radford et al. 2019).

    Printable characters are their own bytes; the other bytes are the characters from 256 on, in order.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _open(model: bytes) -> Any:
    """The library's tokenizer, without the truncation and padding that a file may ask for."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("this vocabulary needs the tokenizers library: pip install transduce[interchange]") from None
    check_content(model)
    try:
        tokenizer = Tokenizer.from_str(model.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_batch(_PROBES, add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises nothing narrower, and panics are no Exception
        raise ValueError(f"not a tokenizer.json ({' '.join(str(error).split()[:12])})") from None
    return tokenizer
