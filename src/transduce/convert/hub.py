"""The tokenizer of a folder of transformers', from tokenizer.json or the older files; and the rows of its ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from transduce.convert.folder import read_object, why_no_json
from transduce.convert.limits import check_padding, read_bytes
from transduce.convert.vocabulary import Rows
from transduce.errors import RunFolderError, UserError
from transduce.text.hub import HubTokenizer, check_ids

FILE, WORDS, PIECES, MERGES = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"
ADDED = "added_tokens.json"


def tokenizer_file(folder: Path, special: Sequence[str]) -> bytes:
    """The content of the folder's tokenizer.json, or what is made of vocab.txt, or of vocab.json and merges.txt.

    `special`: pieces that text may name.
    """
    if (folder / FILE).exists():
        return read_bytes(folder / FILE)
    try:
        from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
    except ImportError:
        raise UserError("this vocabulary needs the tokenizers library: pip install transduce[interchange]") from None
    told = read_object(folder / "tokenizer_config.json", optional=True)
    lower = bool(told.get("do_lower_case", True))
    try:
        if (folder / WORDS).exists():
            read_bytes(folder / WORDS)  # for what it refuses
            made: Any = BertWordPieceTokenizer(
                str(folder / WORDS),
                lowercase=lower,
                strip_accents=told.get("strip_accents"),
                handle_chinese_chars=bool(told.get("tokenize_chinese_chars", True)),
            )
        elif (folder / PIECES).exists() and (folder / MERGES).exists():
            read_bytes(folder / PIECES), read_bytes(folder / MERGES)
            check_ids(read_object(folder / PIECES).values())
            made = ByteLevelBPETokenizer(str(folder / PIECES), str(folder / MERGES))
        else:
            raise RunFolderError(f"{folder} has no vocabulary: neither {FILE}, nor {WORDS}, nor {PIECES} and {MERGES}")
    except UserError:
        raise
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises nothing narrower, and panics are no Exception
        raise RunFolderError(f"the vocabulary in {folder} is damaged: {' '.join(str(error).split()[:14])}") from None
    added = read_object(folder / ADDED, optional=True)
    made.add_tokens([piece for piece, _ in sorted(added.items(), key=lambda item: str(item[1]).zfill(20))])
    made.add_special_tokens([piece for piece in special if made.token_to_id(piece) is not None])
    return bytes(made.to_str(), "utf-8")


def ids_of(model: bytes, *, origin: Path) -> dict[str, int]:
    """Their id of each piece, added ones too."""
    try:
        content = json.loads(model)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{origin / FILE} is damaged: {why_no_json(error)}") from None
    try:
        pieces = content["model"]["vocab"]
        scored = enumerate(pieces) if isinstance(pieces, list) else ()  # of a unigram vocabulary: [piece, score]
        ids = dict(pieces) if isinstance(pieces, Mapping) else {piece: i for i, (piece, _) in scored}
        ids |= {added["content"]: added["id"] for added in content.get("added_tokens", ())}
        if not all(type(i) is int and i >= 0 for i in ids.values()) or len(set(ids.values())) < len(ids):
            raise ValueError("ids")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunFolderError(f"{origin / FILE} is damaged: it lists no vocabulary, or no id for each piece") from None
    return ids


def vocabulary(model: bytes, special: Sequence[str | None], *, n: int, origin: Path) -> tuple[HubTokenizer, Rows]:
    """The vocabulary with our ids, and their rows. `special`: their pieces of our first ids; None where there is none.

    n: rows of their embedding. Ids that no piece has keep their rows. A piece may stand for two of ours.
    """
    ids = ids_of(model, origin=origin)
    missing = [piece for piece in special if piece is not None and piece not in ids]
    if missing:
        raise UserError(f"{origin}: the vocabulary lacks {', '.join(missing)}")
    over = max(ids.values(), default=0)
    if over >= n:
        raise UserError(f"{origin}: the vocabulary has id {over}, and config.json says vocab_size {n}")
    check_padding(over + 1, n=n, origin=origin)
    first = [-1 if piece is None else ids[piece] for piece in special]
    index = first + [i for i in range(n) if i not in set(first)]
    try:
        return HubTokenizer(model, index), Rows(torch.tensor(index), n)
    except ValueError as error:
        raise RunFolderError(f"{origin / FILE} cannot be used: {error}") from None


def special_names(folder: Path, usual: Mapping[str, str]) -> list[str]:
    """What the folder calls its special pieces: `usual` names them by key, and holds where it does not say."""
    told: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        told |= read_object(folder / name, optional=True)

    def name_of(key: str) -> str:
        value = told.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return str(value or usual[key])

    return [name_of(key) for key in usual]
