"""The vocabulary of a Hugging Face folder: tokenizer.json, or the older files that it replaces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from transduce.convert.folder import read_bytes, read_object
from transduce.convert.weight_map import Rows, check_padding
from transduce.errors import RunFolderError, UserError
from transduce.text.hub import HubTokenizer, check_ids

TOKENIZER, WORDS, PIECES, MERGES, ADDED = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json"


def read_tokenizer(folder: Path, special: Sequence[str]) -> bytes:
    """The content of tokenizer.json; where there is none, one made from vocab.txt, or from vocab.json and merges.txt.

    `special`: pieces that are special tokens.
    """
    if (folder / TOKENIZER).exists():
        read_object(folder / TOKENIZER)  # refuses what is not JSON
        return read_bytes(folder / TOKENIZER)
    try:
        from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
    except ImportError:
        raise UserError("this vocabulary needs the tokenizers library: pip install transduce[interchange]") from None
    config = read_object(folder / "tokenizer_config.json", optional=True)
    try:
        if (folder / WORDS).exists():
            read_bytes(folder / WORDS)  # refuses what the library would wait for
            made: Any = BertWordPieceTokenizer(
                str(folder / WORDS),
                lowercase=bool(config.get("do_lower_case", True)),
                strip_accents=config.get("strip_accents"),
                handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
            )
        elif (folder / PIECES).exists() and (folder / MERGES).exists():
            read_bytes(folder / MERGES)
            check_ids(read_object(folder / PIECES).values())
            made = ByteLevelBPETokenizer(str(folder / PIECES), str(folder / MERGES))
        else:
            files = f"neither {TOKENIZER}, nor {WORDS}, nor {PIECES} and {MERGES}"
            raise RunFolderError(f"{folder} has no vocabulary: {files}")
    except (UserError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's panics are not an Exception
        raise RunFolderError(f"the vocabulary in {folder} is damaged: {' '.join(str(error).split()[:14])}") from None
    added = read_object(folder / ADDED, optional=True)
    made.add_tokens([piece for piece, _ in sorted(added.items(), key=lambda item: str(item[1]).zfill(20))])
    made.add_special_tokens([piece for piece in special if made.token_to_id(piece) is not None])
    return bytes(made.to_str(), "utf-8")


def ids_of(model: bytes, *, origin: Path) -> dict[str, int]:
    """The id of each piece of a tokenizer.json, added ones included."""
    try:
        content = json.loads(model)
        pieces = content["model"]["vocab"]
        if isinstance(pieces, list):  # of a unigram model: [piece, score]
            pieces = {piece: i for i, (piece, _) in enumerate(pieces)}
        ids = dict(pieces) | {added["content"]: added["id"] for added in content.get("added_tokens", ())}
        if not all(type(i) is int and i >= 0 for i in ids.values()) or len(set(ids.values())) < len(ids):
            raise ValueError("ids")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunFolderError(f"{origin / TOKENIZER} is damaged: it needs a vocabulary with one id per piece") from None
    return ids


def vocabulary(model: bytes, special: Sequence[str | None], *, n: int, origin: Path) -> tuple[HubTokenizer, Rows]:
    """The vocabulary with our ids, and their rows.

    `special`: the pieces of our first ids, None for an id without a piece; one piece may serve two of our ids.
    n: rows of their embedding; ids without a piece keep their rows.
    """
    ids = ids_of(model, origin=origin)
    missing = [piece for piece in special if piece is not None and piece not in ids]
    if missing:
        raise UserError(f"{origin}: the vocabulary lacks {', '.join(missing)}")
    largest = max(ids.values(), default=0)
    if largest >= n:
        raise UserError(f"{origin}: the vocabulary has id {largest}, and config.json says vocab_size {n}")
    check_padding(largest + 1, n=n, origin=origin)
    first = [-1 if piece is None else ids[piece] for piece in special]
    index = first + [i for i in range(n) if i not in set(first)]
    try:
        return HubTokenizer(model, index), Rows(torch.tensor(index), n)
    except ValueError as error:
        raise RunFolderError(f"{origin / TOKENIZER} cannot be used: {error}") from None


def special_names(folder: Path, defaults: Mapping[str, str]) -> list[str]:
    """The folder's names of its special pieces. `defaults`: the name for each key that the folder does not set."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= read_object(folder / name, optional=True)

    def name_of(key: str) -> str:
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return str(value or defaults[key])

    return [name_of(key) for key in defaults]
