"""What a run that begins with another takes over, what it refuses, and the rows of new pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import text_runs
from marians import LINES, make_run
from oracle.adapter import fitting
from transduce.config import Settings
from transduce.decoding.options import TranslationOptions
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.models.registry import ARCHITECTURES, build_model
from transduce.runs.folder import RunFolder
from transduce.tasks.finetune import _ROWS, begin, find_start, keep, learn_more, with_rows
from transduce.text.tokenizer import Tokenizers, load_tokenizers

QUIET = Log(quiet=True)
NEW = ["die Quokkas schlafen in der猫 Höhle", "ein Quokka schläft", "кошка спит"] * 9


def asked(run: Path, **sections: Any) -> Settings:
    training = {"start": str(run)} | sections.pop("training", {})
    return Settings.from_mapping({"training": training, **sections})


@pytest.mark.parametrize("tie", ["three_way", "two_way", "none"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_all_weights_that_grow_with_the_vocabulary_are_known(kind: str, tie: str) -> None:
    options: dict[str, Any] = {"d_model": 8, "d_ff": 12, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 1}
    settings = fitting(kind=kind, tie=tie, n_labels=3, next_sentence=True, output_bias=True, **options)  # type: ignore[arg-type]
    small, large = (build_model(settings, n_src=n, n_tgt=n).state_dict() for n in (50, 60))
    growing = {name for name in small if small[name].shape != large[name].shape}
    assert growing and growing <= _ROWS.keys()
    assert all(large[name].shape[0] == 60 for name in growing)


def test_the_shape_comes_along_and_wishes_that_fit_are_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tie="two_way", dropout=0.3)
    found = find_start(asked(run, model={"dropout": 0.2}, training={"lr": 0.5}), kind="transformer")
    assert found is not None
    s = found.settings
    assert (s.model.d_model, s.model.tie, s.model.dropout, s.training.lr) == (16, "two_way", 0.2, 0.5)
    same = find_start(asked(run, model={"d_model": 16}), kind="transformer")
    assert same is not None and same.settings.model.dropout == 0.3
    assert find_start(Settings(), kind="transformer") is None


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"d_ff": 9}}, "model.d_ff = 9: the run to begin with has 24; leave it out"),
        ({"model": {"preset": "base"}}, "model.preset = 'base' has n_encoder_layers = 6"),
        ({"model": {"preset": "bas"}}, "did you mean 'base'?"),
        ({"tokenizer": {"kind": "bpe"}}, "tokenizer.kind = 'bpe': the run to begin with has 'unigram'"),
        ({"tokenizer": {"vocab_size": 99}}, "--extend-vocabulary adds pieces"),
    ],
)
def test_what_contradicts_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        find_start(asked(make_run(tmp_path / "run"), **sections), kind="transformer")
    assert said in str(error.value)


def test_another_family_and_nothing_to_extend_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="of kind 'transformer'; task 'causal' needs gpt"):
        find_start(asked(make_run(tmp_path / "run"), task="causal"), kind="gpt")
    with pytest.raises(SettingsError, match="no vocabulary to extend"):
        find_start(Settings.from_mapping({"tokenizer": {"extend": 5}}), kind="transformer")


def test_rows_of_new_pieces_are_means() -> None:
    table = torch.randn(10, 3)
    grown = with_rows(table, [(4, 6), (), (9,)], 4)
    assert torch.equal(grown[:10], table) and len(grown) == 13
    torch.testing.assert_close(grown[10:], torch.stack([table[[4, 6]].mean(0), table[4:].mean(0), table[9]]))
    assert with_rows(table, [], 4) is table


@pytest.mark.parametrize(
    "options", [{"tie": "three_way"}, {"tie": "none", "output_bias": True}, {"tie": "two_way"}], ids=str
)
@pytest.mark.parametrize("joint", [True, False])
def test_before_the_first_update_nothing_has_changed(tmp_path: Path, joint: bool, options: dict[str, Any]) -> None:
    """Old rows are the same to the bit, and so are translations of text that is made of old pieces."""
    if not joint and options["tie"] == "three_way":
        pytest.skip("one table for two vocabularies is none")
    run = make_run(tmp_path / "run", joint=joint, **options)
    start = find_start(asked(run, tokenizer={"extend": 30}), kind="transformer")
    assert start is not None
    grown = learn_more(start, NEW, NEW, QUIET)
    tokenizers = grown.tokenizers
    old = load_tokenizers(RunFolder.open(run))
    assert tokenizers.n_tgt == old.n_tgt + len(grown.tgt) > old.n_tgt
    keep(start, grown, start.settings, tmp_path / "tokens")
    model = build_model(start.settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt).eval()
    begin(model, tmp_path / "tokens", QUIET)
    ours, theirs = model.state_dict(), RunFolder.open(run).load_model()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name][: len(tensor)] if name in _ROWS else ours[name], tensor), name
    known = [line for line in ("a man reads the ball .", "two women plays with books .") if same(old, tokenizers, line)]
    assert known
    one, two = Translator.load(run), Translator(model, tokenizers, start.settings.decoding)
    for before, after in zip(
        one.translate(known, TranslationOptions(beam=1)), two.translate(known, TranslationOptions(beam=1)), strict=True
    ):
        assert before.text == after.text and before.ids == after.ids
    assert "Quokka" in tokenizers.src.decode(tokenizers.src.encode("Quokka 猫"))


@pytest.mark.parametrize(("kind", "told"), [("char", True), ("bpe", False)])
def test_why_a_vocabulary_of_characters_does_not_grow(
    kind: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 400 if kind == "bpe" else 330
    run = text_runs.make_run(tmp_path / "run", kind="gpt", tokenizer=text_runs.vocabulary(kind, exact=True, size=size))
    start = find_start(asked(run, task="causal", tokenizer={"extend": 20}), kind="gpt")
    assert start is not None
    found = learn_more(start, LINES if told else NEW, (), Log())
    assert told == (not found.tgt)
    assert told == ("fewer than 20: a vocabulary of characters gets the characters" in capsys.readouterr().err)


def same(old: Tokenizers, new: Tokenizers, line: str) -> bool:
    return old.src.encode(line) == new.src.encode(line)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    start = find_start(asked(run), kind="transformer")
    assert start is not None
    grown = learn_more(start, NEW, NEW, QUIET)
    assert grown.src == grown.tgt == ()
    keep(start, grown, start.settings, tmp_path / "tokens")
    settings = start.settings.model.model_copy(update={"d_ff": 25})
    wrong = build_model(settings, n_src=grown.tokenizers.n_src, n_tgt=grown.tokenizers.n_tgt)
    with pytest.raises(SettingsError, match=r"does not fit: encoder\.blocks"):
        begin(wrong, tmp_path / "tokens", QUIET)
