"""Import and export of parts that BERT's and GPT-2's folders share: the vocabulary and the model's files."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.model import AttentionSettings
from transduce.config.settings import DataSettings, Settings, TokenizerSettings
from transduce.convert.folder import Imported, Outgoing, read_bytes, read_object
from transduce.convert.parity import TEXTS
from transduce.convert.weight_map import Rows, rows_of
from transduce.errors import RunFolderError, UserError, needing
from transduce.runs.atomic import write_json, write_text
from transduce.runs.tensors import write_tensors
from transduce.text.hub import HubTokenizer, check_ids, open_tokenizer
from transduce.text.special import BOS, EOS, MASK, MASK_PIECE, SPECIAL_PIECES, UNK, encode_with_masks
from transduce.text.tokenizer import Tokenizer, Tokenizers, parse_model

_SPACE = "\u2581"
_SPACES = ((" {2,}", " "), (r" +\z", ""))  # SentencePiece's treatment of spaces: regular expressions and replacements
_UNLIKELY = -1e9  # score of pieces that must not be chosen


def tokenizer_json(vocabulary: Tokenizer, *, frame: dict[str, str]) -> bytes:
    """Make a tokenizer.json. `frame`: templates for special tokens of a text ("single") or pair ("pair"), if any.

    Raises `UserError` if the tokenizers library would split a text differently.
    """
    with needing("interchange", "a tokenizer.json needs tokenizers"):
        import tokenizers
    proto = parse_model(vocabulary.model)
    made = tokenizers.Tokenizer(_model(vocabulary, proto))
    _set_normalization(made, proto, exact=vocabulary.exact)
    named = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
    special = [(piece, False) for piece in SPECIAL_PIECES] + [(piece, True) for piece in named if piece != "\n"]
    made.add_special_tokens(
        [tokenizers.AddedToken(piece, special=True, normalized=False, lstrip=strip) for piece, strip in special]
    )
    made.add_tokens([tokenizers.AddedToken("\n", normalized=False)] if "\n" in named else [])
    if frame:
        ends = [(SPECIAL_PIECES[i], i) for i in (BOS, EOS)]
        made.post_processor = tokenizers.processors.TemplateProcessing(**frame, special_tokens=ends)
    _compare(made, vocabulary)
    return bytes(made.to_str(), "utf-8")


def _model(vocabulary: Tokenizer, proto: Any) -> Any:
    """Return the segmentation model. If exact, spaces stay spaces, and U+2581 is an ordinary character."""
    from tokenizers import models

    own = [_named(piece.piece, vocabulary.exact) for piece in proto.pieces]
    if len(set(own)) < len(own):
        raise UserError("the vocabulary contains a piece twice, which tokenizer.json does not support")
    kind = vocabulary.algorithm
    if kind == "unigram":
        scores = [piece.score if piece.type == piece.NORMAL else _UNLIKELY for piece in proto.pieces]
        return models.Unigram(list(zip(own, scores, strict=True)), UNK, vocabulary.exact)
    ids = {piece: i for i, piece in enumerate(own)}
    merges = (
        _merges([piece for piece in proto.pieces if piece.type == piece.NORMAL], vocabulary.exact)
        if kind == "bpe"
        else []
    )
    return models.BPE(
        ids, merges, unk_token=SPECIAL_PIECES[UNK], fuse_unk=not vocabulary.exact, byte_fallback=vocabulary.exact
    )


def _named(piece: str, exact: bool) -> str:
    return piece.replace(_SPACE, " ") if exact else piece


def _merges(pieces: list[Any], exact: bool) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is a piece, in the order in which SentencePiece merges them."""
    score = {_named(piece.piece, exact): piece.score for piece in pieces}
    merges = []
    for piece in sorted(score, key=score.__getitem__, reverse=True):
        pairs = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += [pair for pair in pairs if pair[0] in score and pair[1] in score]
    return merges


def _set_normalization(made: Any, proto: Any, *, exact: bool) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    if exact:
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return
    spec = proto.normalizer_spec
    parts: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        parts += [normalizers.Replace(Regex(regex), content) for regex, content in _SPACES]
    made.normalizer = normalizers.Sequence(parts)
    scheme = "first" if spec.add_dummy_prefix else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)


def hard_texts(vocabulary: Tokenizer, *, n: int = 300, seed: int = 1) -> list[str]:
    """Return texts on which tokenizers tend to differ, and random sequences of pieces and characters."""
    draw = random.Random(seed)
    pieces = [piece.replace(_SPACE, " ") for piece in vocabulary.pieces(range(EOS + 1, vocabulary.vocab_size))]
    pieces = [piece for piece in pieces if piece != MASK_PIECE and not piece.startswith("<0x")]
    signs = [*sorted(set("".join(pieces))), "  ", "😀", "é", "e\u0301", "\u3000", "漢"]
    texts = [*TEXTS, "a" * 90, " ", "\n\n a\n", "x" * 7 + " ", "\u00a0a\u200b", "\ufffd", "\x00\x7f", "ÀÉÎ ß ẞ İ"]
    for number in range(n):
        source = pieces if number % 2 else signs
        texts.append("".join(draw.choice(source) for _ in range(draw.randint(1, 30))))
    return texts


def _compare(made: Any, vocabulary: Tokenizer) -> None:
    texts = hard_texts(vocabulary)
    expected = [(text, vocabulary.encode(text)) for text in texts]
    if vocabulary.pieces([MASK])[0] == MASK_PIECE:
        masked = [f"{a} {MASK_PIECE}{b}" for a, b in zip(texts[:40], texts[40:80], strict=True)]
        expected += [(text, encode_with_masks(vocabulary, text)) for text in masked]
    for text, ids in expected:
        their_ids = made.encode(text, add_special_tokens=False).ids
        if their_ids != ids and sorted(their_ids) != sorted(ids):
            raise UserError(
                f"the vocabulary cannot become a tokenizer.json: the tokenizers library splits {text!r} differently"
            )


TOKENIZER, WORDS, PIECES, MERGES, ADDED = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json"


# -- import


def special_names(folder: Path, defaults: Mapping[str, str]) -> list[str]:
    """Return the folder's names of special pieces. `defaults`: for each key, the name if the folder does not set it."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= read_object(folder / name, optional=True)
    names = {key: name.get("content") if isinstance(name, dict) else name for key, name in config.items()}
    return [str(names.get(key) or default) for key, default in defaults.items()]


def read_tokenizer(folder: Path, special: Sequence[str], *, instead_of: str | None = None) -> bytes:
    """Return the content of tokenizer.json; if it is missing, make it from vocab.txt, or vocab.json and merges.txt.

    `special`: pieces that are special tokens. `instead_of`: a missing file with another kind of vocabulary.
    """
    if (folder / TOKENIZER).exists():
        read_object(folder / TOKENIZER)  # raises an error if the file is not JSON
        return read_bytes(folder / TOKENIZER)
    with needing("interchange", "this vocabulary needs tokenizers"):
        from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
    config = read_object(folder / "tokenizer_config.json", optional=True)
    try:
        if (folder / WORDS).exists():
            made: Any = BertWordPieceTokenizer(
                str(folder / WORDS),
                lowercase=bool(config.get("do_lower_case", True)),
                strip_accents=config.get("strip_accents"),
                handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
            )
        elif (folder / PIECES).exists() and (folder / MERGES).exists():
            check_ids(read_object(folder / PIECES).values())
            made = ByteLevelBPETokenizer(str(folder / PIECES), str(folder / MERGES))
        else:
            files = [instead_of or WORDS, TOKENIZER, f"{PIECES} and {MERGES}"]
            raise RunFolderError(f"{folder} has no vocabulary: neither {', nor '.join(files)}")
    except (UserError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's panics are not an Exception
        raise RunFolderError(f"the vocabulary in {folder} is damaged: {' '.join(str(error).split()[:14])}") from None
    added = read_object(folder / ADDED, optional=True)
    made.add_tokens([piece for piece, _ in sorted(added.items(), key=lambda item: str(item[1]).zfill(20))])
    made.add_special_tokens([piece for piece in special if made.token_to_id(piece) is not None])
    return bytes(made.to_str(), "utf-8")


def ids_of(model: bytes, *, origin: Path) -> dict[str, int]:
    """Return the id of each piece of a tokenizer.json, including added tokens."""
    try:
        return open_tokenizer(model).get_vocab(with_added_tokens=True)
    except ValueError as error:
        raise RunFolderError(f"{origin / TOKENIZER} cannot be used: {error}") from None


def make_vocabulary(
    model: bytes, ids: Mapping[str, int], special: Sequence[str | None], *, n: int, origin: Path
) -> tuple[HubTokenizer, Rows]:
    """Make our vocabulary from a tokenizer.json; also return the imported embedding's row for each of our ids.

    `special`: the pieces of our first ids, None for an id without a piece; two ids may have the same piece. n: rows of
    the imported embedding; ids without a piece keep their rows.
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
    """Make an `Imported` with settings from the sizes and the vocabulary; other settings keep their defaults."""
    settings = Settings(
        task=model.task,
        data=DataSettings(max_length=model.max_positions, context=model.max_positions, labels=labels),
        tokenizer=TokenizerSettings(kind="hub", vocab_size=max(tokenizer.vocab_size, 8), exact=exact),
        model=model,
    )
    return Imported(settings, Tokenizers(tokenizer, tokenizer), state, tuple(notes))


# -- export


def their_rows(run: Outgoing) -> Rows:
    """Map our ids to rows of the exported embedding: the ids of an imported tokenizer.json, or our own ids."""
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
    """Write config.json, weights, vocabulary and model card.

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
