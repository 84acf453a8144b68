"""Vocabularies for running text are lossless."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from transduce.config.settings import TokenizerSettings
from transduce.demo.corpus import demo_pairs
from transduce.text.tokenizer import EOS, UNK, Tokenizer, load_vocabulary
from transduce.text.training import train_tokenizer

KINDS = ("char", "bpe", "unigram")
LINES = [pair.tgt for pair in demo_pairs("train", 200, seed=3)]


def trained(kind: str) -> Tokenizer:
    settings = TokenizerSettings(kind=kind, exact=True)  # type: ignore[arg-type]
    return train_tokenizer(LINES, settings, vocab_size=500)


EXACT = {kind: trained(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@hypothesis_settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet=" \n\r\taße\u2581\ufeff<0x41>\x00", max_size=40))
@example(text=" \n\n  a\u2581\u2581 \t\x00b\r\n")
@example(text="<s></s><unk><pad><0x41>\n\u2047\ufffd")
@example(text="e\u0301 \u00a0\u3000\u2028x")
def test_decoding_restores_every_text(kind: str, text: str) -> None:
    tokenizer = EXACT[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "a", text]) == [ids, tokenizer.encode("a"), ids]
    assert UNK not in ids and all(EOS < i < tokenizer.vocab_size for i in ids)
    assert b"".join(tokenizer.bytes_of[i] for i in ids) == text.encode("utf-8")


@pytest.mark.parametrize("kind", KINDS)
@hypothesis_settings(max_examples=50, deadline=None)
@given(lines=st.lists(st.text(max_size=12).map(lambda line: line.replace("\n", " ")), max_size=4))
def test_encoding_line_by_line_equals_encoding_the_whole_text(kind: str, lines: list[str]) -> None:
    """This is why text of any size can be encoded in parts."""
    tokenizer, whole = EXACT[kind], "".join(f"{line}\n" for line in lines)
    assert [i for line in lines for i in tokenizer.encode(f"{line}\n")] == tokenizer.encode(whole)


def test_an_incomplete_character_decodes_without_error() -> None:
    tokenizer = EXACT["char"]
    ids = tokenizer.encode("ж")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode([*ids[:1], *tokenizer.encode("a")]) == "\ufffda"


def test_other_vocabularies_are_not_exact() -> None:
    for kind in KINDS:
        settings = TokenizerSettings(kind=kind)  # type: ignore[arg-type]
        assert not train_tokenizer(LINES, settings, vocab_size=200).exact


def test_an_exact_vocabulary_is_still_exact_after_save_and_load(tmp_path) -> None:  # type: ignore[no-untyped-def]
    EXACT["bpe"].save(tmp_path / "tokenizer.model")
    again = load_vocabulary(tmp_path / "tokenizer.model")
    assert again.exact and again.decode(again.encode(" x\n")) == " x\n"
