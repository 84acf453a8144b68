"""Fine-tuning: inherited settings, contradictions, and the rows of new pieces."""

from pathlib import Path
from typing import Any

import pytest
import torch

import text_runs
from marians import LINES, make_run
from oracle.adapter import fitting
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.models.registry import ARCHITECTURES, build_model
from transduce.runs.folder import RunFolder
from transduce.tasks.finetune import (
    _ROWS,
    extend_vocabulary,
    find_start,
    load_start_weights,
    save_start_weights,
    with_rows,
)
from transduce.text.tokenizer import Tokenizers, load_tokenizers

QUIET = Log(quiet=True)
NEW = ["die Quokkas schlafen in der猫 Höhle", "ein Quokka schläft", "кошка спит"] * 9


def asked(run: Path, **sections: Any) -> Settings:
    training = {"start": str(run)} | sections.pop("training", {})
    return Settings.from_mapping({"training": training, **sections})


@pytest.mark.parametrize("tie", ["three_way", "two_way", "inputs", "none"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_all_weights_that_grow_with_the_vocabulary_are_listed(kind: str, tie: str) -> None:
    options: dict[str, Any] = {"d_model": 8, "d_ff": 12, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 1}
    settings = fitting(kind=kind, tie=tie, n_labels=3, next_sentence=True, output_bias=True, **options)  # type: ignore[arg-type]
    small, large = (build_model(settings, n_src=n, n_tgt=n).state_dict() for n in (50, 60))
    growing = {name for name in small if small[name].shape != large[name].shape}
    assert growing and growing <= _ROWS.keys()
    assert all(large[name].shape[0] == 60 for name in growing)


def test_the_shape_is_inherited_and_compatible_settings_are_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tie="two_way", dropout=0.3)
    found = find_start(asked(run, model={"dropout": 0.2}, training={"lr": 0.5}))
    assert found is not None
    s = found.settings
    assert (s.model.d_model, s.model.tie, s.model.dropout, s.training.lr) == (16, "two_way", 0.2, 0.5)
    same = find_start(asked(run, model={"d_model": 16}))
    assert same is not None and same.settings.model.dropout == 0.3
    assert find_start(Settings()) is None


def test_the_architecture_is_that_of_the_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", kind="rnn", cell="gru", d_hidden=24)
    found = find_start(asked(run))
    assert found is not None and (found.settings.model.kind, found.settings.model.cell) == ("rnn", "gru")
    with pytest.raises(SettingsError, match="its model is of kind 'rnn'"):
        find_start(asked(run, model={"kind": "convs2s"}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"d_ff": 9}}, "model.d_ff = 9: training.start has 24; leave it out"),
        ({"model": {"preset": "base"}}, "model.preset = 'base' has n_encoder_layers = 6"),
        ({"model": {"preset": "bas"}}, "did you mean 'base'?"),
        ({"tokenizer": {"kind": "bpe"}}, "tokenizer.kind = 'bpe': training.start has 'unigram'"),
        ({"tokenizer": {"vocab_size": 99}}, "tokenizer.extend adds pieces"),
    ],
)
def test_contradicting_settings_are_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        find_start(asked(make_run(tmp_path / "run"), **sections))
    assert message in str(error.value)


def test_models_of_another_family_and_extension_without_a_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="of kind 'transformer'; task 'causal' needs gpt"):
        find_start(asked(make_run(tmp_path / "run"), task="causal"))
    with pytest.raises(SettingsError, match="no vocabulary to extend"):
        find_start(Settings.from_mapping({"tokenizer": {"extend": 5}}))


def test_rows_of_new_pieces_are_means_of_their_parts() -> None:
    table = torch.randn(10, 3)
    grown = with_rows(table, [(4, 6), (), (9,)], 4)
    assert torch.equal(grown[:10], table) and len(grown) == 13
    torch.testing.assert_close(grown[10:], torch.stack([table[[4, 6]].mean(0), table[4:].mean(0), table[9]]))
    assert with_rows(table, [], 4) is table


@pytest.mark.parametrize(
    "options",
    [{"tie": "three_way"}, {"tie": "none", "output_bias": True}, {"tie": "two_way"}, {"tie": "inputs"}],
    ids=str,
)
@pytest.mark.parametrize("joint", [True, False])
def test_extension_changes_no_translation_before_the_first_update(
    tmp_path: Path, joint: bool, options: dict[str, Any]
) -> None:
    """Old rows are bit-identical, and so are translations of text that consists of old pieces."""
    if not joint and options["tie"] in ("three_way", "inputs"):
        pytest.skip("two vocabularies cannot share one table")
    run = make_run(tmp_path / "run", joint=joint, **options)
    start = find_start(asked(run, tokenizer={"extend": 30}))
    assert start is not None
    grown = extend_vocabulary(start, (NEW, NEW), QUIET)
    tokenizers = grown.tokenizers
    old = load_tokenizers(RunFolder.open(run))
    assert tokenizers.n_tgt == old.n_tgt + len(grown.tgt) > old.n_tgt
    save_start_weights(start, grown, start.settings, tmp_path / "tokens")
    model = build_model(start.settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt).eval()
    load_start_weights(model, tmp_path / "tokens", QUIET)
    ours, theirs = model.state_dict(), RunFolder.open(run).load_model()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name][: len(tensor)] if name in _ROWS else ours[name], tensor), name
    known = [line for line in ("a man reads the ball .", "two women plays with books .") if same(old, tokenizers, line)]
    assert known
    one, two = Translator.load(run), Translator(TorchEngine(model), tokenizers)
    for before, after in zip(
        one.translate(known, DecodingOptions(beam=1)), two.translate(known, DecodingOptions(beam=1)), strict=True
    ):
        assert before.text == after.text and before.ids == after.ids
    assert "Quokka" in tokenizers.src.decode(tokenizers.src.encode("Quokka 猫"))


@pytest.mark.parametrize(("kind", "explained"), [("char", True), ("bpe", False)])
def test_a_character_vocabulary_grows_by_characters_only(
    kind: str, explained: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 400 if kind == "bpe" else 330
    run = text_runs.make_run(tmp_path / "run", kind="gpt", tokenizer=text_runs.vocabulary(kind, exact=True, size=size))
    start = find_start(asked(run, task="causal", tokenizer={"extend": 20}))
    assert start is not None
    found = extend_vocabulary(start, (LINES if explained else NEW, ()), Log())
    assert explained == (not found.tgt)
    assert explained == ("fewer than 20: a character vocabulary" in capsys.readouterr().err)


def same(old: Tokenizers, new: Tokenizers, line: str) -> bool:
    return old.src.encode(line) == new.src.encode(line)


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    start = find_start(asked(run))
    assert start is not None
    grown = extend_vocabulary(start, (NEW, NEW), QUIET)
    assert grown.src == grown.tgt == ()
    save_start_weights(start, grown, start.settings, tmp_path / "tokens")
    settings = start.settings.model.model_copy(update={"d_ff": 25})
    wrong = build_model(settings, n_src=grown.tokenizers.n_src, n_tgt=grown.tokenizers.n_tgt)
    with pytest.raises(SettingsError, match=r"do not fit this model: encoder\.blocks"):
        load_start_weights(wrong, tmp_path / "tokens", QUIET)
