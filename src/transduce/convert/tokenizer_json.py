"""A SentencePiece vocabulary as a tokenizer.json, which transformers loads.

The `tokenizers` library is configured to do the same as SentencePiece, and compared with it on hard texts. Two
differences remain. Names of special pieces in a text are special pieces there, as in all folders of transformers. And
where a unigram vocabulary has two segmentations of equal probability, such as `ll l` and `l ll`, the library, which
adds in float64, may choose another than SentencePiece, which adds in float32.
"""

from __future__ import annotations

import random
from typing import Any

from transduce.convert.parity import TEXTS
from transduce.errors import UserError
from transduce.text.special import BOS, EOS, MASK, MASK_PIECE, SPECIAL_PIECES, UNK, encode_with_masks
from transduce.text.tokenizer import Tokenizer, parse_model

_SPACE = "\u2581"
_SPACES = ((" {2,}", " "), (r" +\z", ""))  # what SentencePiece does to spaces: expressions and their replacements
_UNLIKELY = -1e9  # score of pieces that must not be chosen


def tokenizer_json(vocabulary: Tokenizer, *, frame: dict[str, str]) -> bytes:
    """The content of tokenizer.json. `frame`: templates for a text ("single") and a pair ("pair"), if any.

    Raises `UserError` where the library would split a text differently.
    """
    try:
        import tokenizers
    except ImportError:
        raise UserError("tokenizers is not installed: pip install 'transduce[interchange]'") from None
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
    """The segmentation model. In an exact vocabulary a space is a space, and U+2581 an ordinary character."""
    from tokenizers import models

    own = [_named(piece.piece, vocabulary.exact) for piece in proto.pieces]
    if len(set(own)) < len(own):
        raise UserError("the vocabulary contains a piece twice, which tokenizer.json does not support")
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
    """Every pair of pieces that makes a piece, by its score: SentencePiece merges any such pair."""
    score = {_named(one.piece, exact): one.score for one in pieces}
    found = []
    for piece in sorted(score, key=score.__getitem__, reverse=True):
        pairs = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found += [pair for pair in pairs if pair[0] in score and pair[1] in score]
    return found


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
    """Texts on which tokenizers tend to differ, and random sequences of the vocabulary's pieces and characters."""
    draw = random.Random(seed)
    pieces = [piece.replace(_SPACE, " ") for piece in vocabulary.pieces(range(EOS + 1, vocabulary.vocab_size))]
    pieces = [piece for piece in pieces if piece != MASK_PIECE and not piece.startswith("<0x")]
    signs = [*sorted(set("".join(pieces))), "  ", "😀", "é", "e\u0301", "\u3000", "漢"]
    found = [*TEXTS, "a" * 90, " ", "\n\n a\n", "x" * 7 + " ", "\u00a0a\u200b", "\ufffd", "\x00\x7f", "ÀÉÎ ß ẞ İ"]
    for number in range(n):
        source = pieces if number % 2 else signs
        found.append("".join(draw.choice(source) for _ in range(draw.randint(1, 30))))
    return found


def _compare(made: Any, vocabulary: Tokenizer) -> None:
    texts = hard_texts(vocabulary)
    expected = [(text, vocabulary.encode(text)) for text in texts]
    if vocabulary.pieces([MASK])[0] == MASK_PIECE:
        masked = [f"{a} {MASK_PIECE}{b}" for a, b in zip(texts[:40], texts[40:80], strict=True)]
        expected += [(text, encode_with_masks(vocabulary, text)) for text in masked]
    for text, ids in expected:
        found = made.encode(text, add_special_tokens=False).ids
        if found != ids and sorted(found) != sorted(ids):
            raise UserError(
                f"the vocabulary cannot become a tokenizer.json: the tokenizers library splits {text!r} differently"
            )
