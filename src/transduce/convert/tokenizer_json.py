"""A SentencePiece vocabulary of ours as a tokenizer.json, which transformers loads without code of ours.

The `tokenizers` library does the same in other ways; what it makes is held against ours on hard texts before it goes.
Two differences are left. The names of special pieces in a text are these pieces there, as in all folders of
transformers. And where the same pieces of a unigram vocabulary can stand in two orders, `ll l` or `l ll`, both are as
likely; SentencePiece, which adds up in float32, and the library, in float64, may choose the other.
"""

from __future__ import annotations

import random
from typing import Any

from transduce.convert.check import TEXTS
from transduce.errors import UserError
from transduce.text.hub_parts import SPACES
from transduce.text.masks import encode_gaps
from transduce.text.special import BOS, EOS, MASK, MASK_PIECE, SPECIAL_PIECES, UNK
from transduce.text.tokenizer import Tokenizer

_SPACE = "\u2581"
_UNLIKELY = -1e9  # the score of what only stands in for other pieces


def tokenizer_json(vocabulary: Tokenizer, *, frame: dict[str, str]) -> bytes:
    """The content of tokenizer.json. `frame`: what is put around a text ("single") and a pair ("pair"), or nothing.

    Raises `UserError` where it would cut a text otherwise than ours.
    """
    try:
        import tokenizers
        from sentencepiece import sentencepiece_model_pb2 as format_of
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'transduce[interchange]'") from None
    proto = format_of.ModelProto.FromString(vocabulary.model)  # type: ignore[attr-defined]
    made = tokenizers.Tokenizer(_model(vocabulary, proto))
    _normalization(made, proto, exact=vocabulary.exact)
    named = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
    made.add_special_tokens(
        [tokenizers.AddedToken(piece, special=True, normalized=False) for piece in SPECIAL_PIECES]
        + [
            tokenizers.AddedToken(piece, special=True, normalized=False, lstrip=True)
            for piece in named
            if piece != "\n"
        ]
    )
    made.add_tokens([tokenizers.AddedToken("\n", normalized=False)] if "\n" in named else [])
    if frame:
        ends = [(SPECIAL_PIECES[i], i) for i in (BOS, EOS)]
        made.post_processor = tokenizers.processors.TemplateProcessing(**frame, special_tokens=ends)
    _check(made, vocabulary)
    return bytes(made.to_str(), "utf-8")


def _model(vocabulary: Tokenizer, proto: Any) -> Any:
    """What cuts. In an exact vocabulary a space is a space: U+2581 in a text is then a character like any other."""
    from tokenizers import models

    own = [_named(piece.piece, vocabulary.exact) for piece in proto.pieces]
    if len(set(own)) < len(own):
        raise UserError("the vocabulary holds a piece twice, which tokenizer.json cannot have")
    kind = vocabulary.algorithm
    if kind == "unigram":
        scores = [piece.score if piece.type == piece.NORMAL else _UNLIKELY for piece in proto.pieces]
        return models.Unigram(list(zip(own, scores, strict=True)), UNK, vocabulary.exact)
    ids = {piece: i for i, piece in enumerate(own)}
    merges = _merges([one for one in proto.pieces if one.type == one.NORMAL], vocabulary.exact) if kind == "bpe" else []
    return models.BPE(
        ids, merges, unk_token=SPECIAL_PIECES[UNK], fuse_unk=not vocabulary.exact, byte_fallback=vocabulary.exact
    )


def _named(piece: str, exact: bool) -> str:
    return piece.replace(_SPACE, " ") if exact else piece


def _merges(pieces: list[Any], exact: bool) -> list[tuple[str, str]]:
    """Every pair of pieces that makes one, the best one first: SentencePiece joins what makes a piece, however."""
    score = {_named(one.piece, exact): one.score for one in pieces}
    found = []
    for piece in sorted(score, key=score.__getitem__, reverse=True):
        pairs = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found += [pair for pair in pairs if pair[0] in score and pair[1] in score]
    return found


def _normalization(made: Any, proto: Any, *, exact: bool) -> None:
    """Before the cutting, and after it."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    if exact:
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return
    spec = proto.normalizer_spec
    parts: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        parts += [normalizers.Replace(Regex(regex), content) for regex, content in SPACES]
    made.normalizer = normalizers.Sequence(parts)
    scheme = "first" if spec.add_dummy_prefix else "never"
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)


def hard_texts(vocabulary: Tokenizer, *, n: int = 300, seed: int = 1) -> list[str]:
    """Texts that tokenizers disagree about, and random ones of the vocabulary's own pieces, joined anyhow."""
    draw = random.Random(seed)
    pieces = [piece.replace(_SPACE, " ") for piece in vocabulary.pieces(range(EOS + 1, vocabulary.vocab_size))]
    pieces = [piece for piece in pieces if piece != MASK_PIECE and not piece.startswith("<0x")]
    signs = [*sorted(set("".join(pieces))), "  ", "😀", "é", "e\u0301", "\u3000", "漢"]
    found = [*TEXTS, "a" * 90, " ", "\n\n a\n", "x" * 7 + " ", "\u00a0a\u200b", "\ufffd", "\x00\x7f", "ÀÉÎ ß ẞ İ"]
    for number in range(n):
        source = pieces if number % 2 else signs
        found.append("".join(draw.choice(source) for _ in range(draw.randint(1, 30))))
    return found


def _check(made: Any, vocabulary: Tokenizer) -> None:
    texts = hard_texts(vocabulary)
    asked = [(text, vocabulary.encode(text)) for text in texts]
    if vocabulary.pieces([MASK])[0] == MASK_PIECE:
        gapped = [f"{a} {MASK_PIECE}{b}" for a, b in zip(texts[:40], texts[40:80], strict=True)]
        asked += [(text, encode_gaps(vocabulary, text)) for text in gapped]
    for text, ids in asked:
        found = made.encode(text, add_special_tokens=False).ids
        if found != ids and sorted(found) != sorted(ids):
            raise UserError(
                f"the vocabulary cannot be written as tokenizer.json: the tokenizers library cuts {text!r} otherwise"
            )
