"""The tokenizer with a separate list of ids, and the one with <mask>."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.errors import RunFolderError, SettingsError
from transduce.text.special import BOS, EOS, MASK, MASK_PIECE, PAD, UNK, encode_with_masks
from transduce.text.tokenizer import PieceTokenizer, Tokenizer, Tokenizers, load_vocabulary
from transduce.text.training import train_tokenizer

LINES = [f"{who} {does} {what} ." for who in ("a man", "ein Hund") for does in ("reads", "läuft") for what in "xyz"]
OWN = train_tokenizer(LINES, TokenizerSettings(), vocab_size=60)
PIECES = OWN.pieces(range(OWN.vocab_size))
SHUFFLED = [*PIECES[:4], ">>deu<<", *reversed(PIECES[4:])]


@pytest.fixture
def tokenizer() -> PieceTokenizer:
    return PieceTokenizer(OWN.model, SHUFFLED)


def test_pieces_get_the_ids_of_the_list(tokenizer: PieceTokenizer) -> None:
    for line, ids in zip(LINES, tokenizer.encode_batch(LINES), strict=True):
        assert tokenizer.pieces(ids) == OWN.pieces(OWN.encode(line))
        assert ids == tokenizer.encode(line) != OWN.encode(line)
        assert tokenizer.decode(ids) == line
    assert tokenizer.vocab_size == len(SHUFFLED)
    assert tokenizer.pieces([PAD, UNK, BOS, EOS]) == ["<pad>", "<unk>", "<s>", "</s>"]


def test_pieces_missing_from_the_list_are_unknown() -> None:
    shorter = PieceTokenizer(OWN.model, SHUFFLED[:4] + [piece for piece in SHUFFLED[4:] if "a" not in piece])
    ids = shorter.encode("a man 猫")
    assert UNK in ids and "猫" in shorter.unknown("a man 猫")
    pieces = [piece.replace("▁", "") for piece in OWN.pieces(OWN.encode("a man"))]
    assert {part.strip() for part in shorter.unknown("a man")} == {piece for piece in pieces if "a" in piece}
    assert "⁇" in shorter.decode(ids)


def test_special_pieces_in_text_are_text(tokenizer: PieceTokenizer) -> None:
    for text in ("</s>", "a </s> man", "<pad><s><unk>"):
        assert not {PAD, BOS, EOS} & set(tokenizer.encode(text))


def test_a_language_code_is_one_piece(tokenizer: PieceTokenizer) -> None:
    assert tokenizer.encode(">>deu<< a man") == [4, *tokenizer.encode(" a man")]
    assert tokenizer.encode(">>fra<< a man")[0] == UNK
    assert tokenizer.encode("a >>deu<< man")[0] != 4
    assert tokenizer.encode("") == []


def test_sampling_depends_only_on_its_arguments(tokenizer: PieceTokenizer) -> None:
    drawn = [tokenizer.sample(LINES, amount=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [tokenizer.decode(ids) for ids in drawn[0]] == LINES
    assert tokenizer.sample(LINES, amount=0.0, seed=1) == tokenizer.encode_batch(LINES)


def test_save_and_load_round_trip(tmp_path: Path, tokenizer: PieceTokenizer) -> None:
    pair = Tokenizers(tokenizer, PieceTokenizer(OWN.model, SHUFFLED[:-3]))
    pair.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"tokenizer.{side}.{kind}" for side in ("src", "tgt") for kind in ("json", "model")
    ]
    again = Tokenizers.load(tmp_path)
    assert again.src.encode_batch(LINES) == tokenizer.encode_batch(LINES)
    assert (again.n_src, again.n_tgt) == (pair.n_src, pair.n_tgt)
    Tokenizers(OWN, OWN).save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.model"]
    assert isinstance(Tokenizers.load(tmp_path).src, Tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.json", b"{", "t.json is damaged"),
        ("t.json", b'{"kind": "other", "pieces": []}', "does not list the pieces"),
        ("t.json", json.dumps({"kind": "marian", "pieces": ["a"]}).encode(), "first pieces"),
        ("t.model", b"nonsense", "t.model is damaged"),
    ],
)
def test_errors_name_damaged_files(tmp_path: Path, tokenizer: PieceTokenizer, name: str, content: bytes, said: str):
    tokenizer.save(tmp_path / "t.model")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=said):
        load_vocabulary(tmp_path / "t.model")


def test_piece_lists_cannot_be_trained() -> None:
    with pytest.raises(SettingsError, match="imported"):
        train_tokenizer(LINES, TokenizerSettings(kind="marian"), vocab_size=60)


MASKED_LINES = ["the capital of France is Paris.", "the capital of Spain is Madrid.", "is the dog of France here?"] * 20


@pytest.fixture(scope="module", params=["unigram", "bpe", "char"])
def with_mask(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(MASKED_LINES, TokenizerSettings(kind=request.param, mask=True), vocab_size=60)


def test_the_mask_token_has_its_own_id(with_mask: Tokenizer) -> None:
    assert with_mask.pieces([PAD, UNK, BOS, EOS, MASK]) == ["<pad>", "<unk>", "<s>", "</s>", MASK_PIECE]
    exact = train_tokenizer(MASKED_LINES, TokenizerSettings(mask=True, exact=True), vocab_size=340)
    assert exact.pieces([MASK]) == [MASK_PIECE] and exact.decode(exact.encode("a\n <b>")) == "a\n <b>"
    plain = train_tokenizer(MASKED_LINES, TokenizerSettings(), vocab_size=60)
    assert plain.pieces([MASK]) != [MASK_PIECE]


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("the capital of France is <mask>.", "the capital of France is Paris."),
        ("<mask> capital of France", "the capital of France"),
        ("the <mask> of <mask>", None),
        ("the<mask>of", None),
    ],
)
def test_a_mask_replaces_a_word_and_its_space(with_mask: Tokenizer, text: str, filled: str | None) -> None:
    ids = encode_with_masks(with_mask, text)
    pieces = with_mask.pieces(ids)
    assert ids.count(MASK) == text.count(MASK_PIECE)
    assert not any(a == "\u2581" and b == MASK_PIECE for a, b in pairwise(pieces))
    if filled is not None:  # the text around the mask is the text around the word
        whole = with_mask.encode(filled)
        place = ids.index(MASK)
        assert whole[:place] == ids[:place] and whole[len(whole) - (len(ids) - place - 1) :] == ids[place + 1 :]
