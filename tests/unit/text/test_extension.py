"""Extended vocabularies: old ids and the segmentation of old text stay, new characters and words get pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from transduce.config.settings import TokenizerSettings
from transduce.demo.corpus import demo_pairs
from transduce.errors import SettingsError
from transduce.text.extension import Extended, add_language, extend, new_pieces
from transduce.text.hub import HubTokenizer
from transduce.text.special import SPECIAL_PIECES, UNK
from transduce.text.tokenizer import PieceTokenizer, Tokenizer, Tokenizers, with_pieces
from transduce.text.training import train_tokenizer, train_tokenizers, with_language_tokens

OLD = [pair.src for pair in demo_pairs("train", 300, seed=1)]
NEW = [
    f"{who} {does} {what}"
    for who in ("кошка", "большая собака", "猫", "Quokkas")
    for does in ("спит", "видит", "zwitschern")
    for what in ("в саду", "Eukalyptus", "在家")
]


def vocabulary(kind: str = "unigram", *, exact: bool = False, size: int = 200, lines: list[str] = OLD) -> Tokenizer:
    own = {"exact": True, "normalization": "identity"} if exact else {}
    return train_tokenizer(lines, TokenizerSettings(kind=kind, **own), vocab_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_old_pieces_keep_their_ids_and_new_pieces_are_used(kind: str, exact: bool) -> None:
    old = vocabulary(kind, exact=exact, size=400 if exact else 200)
    found = extend(Tokenizers(old, old), NEW, (), n=80)
    new, n = found.tokenizers.tgt, old.vocab_size
    assert found.tokenizers.joint and found.src == found.tgt
    assert new.pieces(range(n)) == old.pieces(range(n))
    pieces = new_pieces(old, new)
    assert 0 < len(pieces) == len(found.tgt) <= 80 and len(set(pieces)) == len(pieces)
    cut = new.encode_batch(NEW)
    assert all(new.decode(ids) == line for ids, line in zip(cut, NEW, strict=True))
    assert not any(UNK in ids for ids in cut) and any(i >= n for ids in cut for i in ids)
    if kind != "char":
        assert {"猫", "к"} <= set(pieces) and any(piece.endswith("собака") for piece in pieces), pieces
    # old text without new pieces is split exactly as before
    same = [(a, b) for a, b in zip(old.encode_batch(OLD), new.encode_batch(OLD), strict=True) if max(b) < n]
    assert len(same) > 200 and all(a == b for a, b in same)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_new_pieces_list_the_old_pieces_that_they_replace(kind: str) -> None:
    old = vocabulary(kind)
    text = [f"{line} whistledown" for line in OLD]
    found = extend(Tokenizers(old, old), text, (), n=40)
    pieces = new_pieces(old, found.tokenizers.tgt)
    for piece, parts in zip(pieces, found.tgt, strict=True):
        assert "".join(old.pieces(parts)) == piece
    assert any("whistledown"[:6] in piece for piece in pieces)
    exact = vocabulary("char", exact=True, size=400)
    grown = extend(Tokenizers(exact, exact), ["ŝ" * 9], (), n=5)
    assert [exact.pieces(parts) for parts in grown.tgt] == [["<0xC5>", "<0x9D>"]]


def test_no_piece_crosses_words_scripts_or_signs() -> None:
    old = vocabulary()
    text = ["dog,dog,dog iPhone猫 iPhone猫 it's 2024"] * 30
    grown = extend(Tokenizers(old, old), text, (), n=200)
    for piece in new_pieces(old, grown.tokenizers.tgt):
        body = piece.removeprefix("\u2581")
        assert len(body) == 1 or (body.isalpha() and not {"猫", "e"} <= set(body)), piece


def test_a_limit_keeps_the_most_frequent_characters() -> None:
    old = vocabulary()
    grown = extend(Tokenizers(old, old), ["жжжж щщщ ф"], (), n=2).tokenizers.tgt
    assert new_pieces(old, grown) == ["ж", "щ"] and grown.unknown("жщф") == ["ф"]


def marian(tokenizer: Tokenizer, pieces: list[str]) -> PieceTokenizer:
    return PieceTokenizer(tokenizer.model, pieces)


def test_both_sides_of_marian_share_the_new_pieces() -> None:
    src, tgt = vocabulary(), vocabulary(lines=[pair.tgt for pair in demo_pairs("train", 300, seed=1)])
    ordinary = dict.fromkeys([*src.pieces(range(4, src.vocab_size)), *tgt.pieces(range(4, tgt.vocab_size))])
    listed = [*SPECIAL_PIECES, *ordinary]
    old = Tokenizers(marian(src, listed), marian(tgt, listed))
    found = extend(old, NEW, [f"{line} überall" for line in NEW], n=60)
    new = found.tokenizers
    assert not new.joint and new.n_src == new.n_tgt == len(listed) + len(found.src) and found.src == found.tgt
    assert new.src.pieces(range(new.n_src)) == new.tgt.pieces(range(new.n_tgt))
    assert 0 < len(found.src) <= 60
    assert not any(UNK in ids for ids in [*new.src.encode_batch(NEW), *new.tgt.encode_batch(NEW)])
    assert all(
        a == b
        for a, b in zip(old.src.encode_batch(OLD), new.src.encode_batch(OLD), strict=True)
        if max(b) < len(listed)
    )
    # pieces of the model that are missing from the list get rows
    short = Tokenizers(*[marian(src, [*SPECIAL_PIECES, *list(ordinary)[:-30]])] * 2)
    separate = Tokenizers(short.src, marian(tgt, listed))
    grown = extend(separate, OLD, (), n=1000).tokenizers
    lost = {p for line in OLD for p in short.src.unknown(line)}
    assert not any(grown.src.unknown(line) for line in OLD) and (not lost or grown.n_src > short.n_src)


def test_appended_pieces_are_valid_protobuf() -> None:
    old = vocabulary()
    long = "a" * 200
    sp = sentencepiece.SentencePieceProcessor(model_proto=with_pieces(old.model, [("ёж", -3.5), (long, -7.25)]))
    n = old.vocab_size
    assert sp.vocab_size() == n + 2
    assert [(sp.id_to_piece(i), sp.get_score(i)) for i in (n, n + 1)] == [("ёж", -3.5), (long, -7.25)]


def test_extending_a_vocabulary_of_another_library_is_refused() -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    hub = HubTokenizer(model.to_str().encode(), [-1, 0, -1, -1, 1])
    with pytest.raises(SettingsError, match="stays as it came"):
        extend(Tokenizers(hub, hub), NEW, (), n=5)


@pytest.mark.parametrize("joint", [True, False])
def test_language_tokens_survive_an_extension_and_get_another_language(joint: bool, tmp_path: Path) -> None:
    settings = TokenizerSettings(joint=joint, placeholders=0)
    plain = train_tokenizers(iter(OLD), iter(OLD), settings, vocab_size=200)
    old = with_language_tokens(plain, [("en", "de"), ("en", "fr")], src=("tgt",))
    extended = extend(old.unframed(), NEW, NEW, n=10)
    known = extended.tokenizers.src.framing
    assert known == old.src.framing and extended.tokenizers.tgt.framing == old.tgt.framing
    grown = add_language(extended, "nl", like="de")
    grown.tokenizers.save(tmp_path)
    tokenizers = Tokenizers.load(tmp_path)
    (token, *pieces), n = tokenizers.between("en", "nl").src.encode(OLD[0]), tokenizers.n_src
    assert tokenizers.src.pieces([token]) == ["<2nl>"] and token == n - 1
    assert pieces == extended.tokenizers.between("en", "de").src.encode(OLD[0])[1:]
    assert token not in tokenizers.unframed().src.encode("<2nl> a dog")
    assert grown.src[-1] == (known.languages["de"],) and len(grown.src) == n - old.n_src
    assert len(grown.tgt) == tokenizers.n_tgt - old.n_tgt


def test_a_language_needs_a_vocabulary_with_languages() -> None:
    old = vocabulary()
    with pytest.raises(SettingsError, match="has no tokens for languages"):
        add_language(Extended(Tokenizers(old, old), (), ()), "nl", like="de")
