"""Common parts of the folders of BERT and GPT-2: their vocabulary, and the files of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.model import AttentionSettings
from transduce.config.settings import DataSettings, Settings, TokenizerSettings
from transduce.convert.folder import Imported, Outgoing, read_bytes, read_object
from transduce.convert.tokenizer_json import tokenizer_json
from transduce.convert.weight_map import Rows, rows_of
from transduce.errors import RunFolderError, UserError
from transduce.runs.atomic import write_json, write_text
from transduce.runs.tensors import write_tensors
from transduce.text.hub import HubTokenizer, check_ids, open_tokenizer
from transduce.text.tokenizer import Tokenizer, Tokenizers

TOKENIZER, WORDS, PIECES, MERGES, ADDED = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json"


# -- import


def special_names(folder: Path, defaults: Mapping[str, str]) -> list[str]:
    """The folder's names of its special pieces. `defaults`: the name for each key that the folder does not set."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= read_object(folder / name, optional=True)
    names = {key: name.get("content") if isinstance(name, dict) else name for key, name in config.items()}
    return [str(names.get(key) or default) for key, default in defaults.items()]


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
        return open_tokenizer(model).get_vocab(with_added_tokens=True)
    except ValueError as error:
        raise RunFolderError(f"{origin / TOKENIZER} cannot be used: {error}") from None


def make_vocabulary(
    model: bytes, ids: Mapping[str, int], special: Sequence[str | None], *, n: int, origin: Path
) -> tuple[HubTokenizer, Rows]:
    """The vocabulary with our ids, and their rows.

    `special`: the pieces of our first ids, None for an id without a piece; one piece may serve two of our ids.
    n: rows of their embedding; ids without a piece keep their rows.
    """
    if missing := [piece for piece in special if piece is not None and piece not in ids]:
        raise UserError(f"{origin}: the vocabulary lacks {', '.join(missing)}")
    rows = rows_of(ids, [-1 if piece is None else ids[piece] for piece in special], n=n, origin=origin)
    return HubTokenizer(model, rows.index.tolist()), rows


def make_imported(
    model: AttentionSettings,
    tokenizer: HubTokenizer,
    state: dict[str, Tensor],
    notes: list[str],
    *,
    labels: tuple[str, ...] | None = None,
    exact: bool = False,
) -> Imported:
    """The imported model with settings for its task; other settings keep their defaults."""
    settings = Settings(
        task=model.task,
        data=DataSettings(max_length=model.max_positions, context=model.max_positions, labels=labels),
        tokenizer=TokenizerSettings(kind="hub", vocab_size=max(tokenizer.vocab_size, 8), exact=exact),
        model=model,
    )
    return Imported(settings, Tokenizers(tokenizer, tokenizer), state, tuple(notes))


# -- export


def their_rows(run: Outgoing) -> Rows:
    """For each of our ids, its row in the exported embedding: the id in an imported tokenizer.json, else the same."""
    vocabulary = run.tokenizers.tgt
    if isinstance(vocabulary, HubTokenizer):
        index = torch.tensor(vocabulary.theirs)
        return Rows(index, int(index.max()) + 1)
    return Rows(torch.arange(vocabulary.vocab_size), vocabulary.vocab_size)


def write_folder(
    out: Path,
    run: Outgoing,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    special: Mapping[str, int],
    frame: dict[str, str],
    longest: int,
) -> None:
    """Write config.json, weights, vocabulary and card.

    `special`: our id for each of transformers' special tokens. `frame`: see `tokenizer_json`.
    """
    write_json(out / "config.json", config)
    write_tensors(out / "model.safetensors", tensors)
    vocabulary, architecture = run.tokenizers.tgt, config["architectures"][0]
    if isinstance(vocabulary, HubTokenizer):
        content, theirs = vocabulary.model, vocabulary.theirs
    else:
        assert isinstance(vocabulary, Tokenizer), "such a model has no other vocabulary"
        content, theirs = tokenizer_json(vocabulary, frame=frame), list(range(vocabulary.vocab_size))
    (out / TOKENIZER).write_bytes(content)
    segments = ["token_type_ids"] if "cls_token" in special else []
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", *segments, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **{key: vocabulary.pieces([i])[0] for key, i in special.items() if theirs[i] >= 0},
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)
    card = (
        f"# {run.settings.name or 'A model'}\n\nExported by transduce.\n\n```python\n"
        f"from transformers import AutoTokenizer, {architecture}\n\n"
        f'tokenizer, model = AutoTokenizer.from_pretrained("THIS"), {architecture}.from_pretrained("THIS")\n'
        'print(model(**tokenizer("...", return_tensors="pt")))\n```\n'
    )
    write_text(out / "README.md", card)
