"""Fine-tuning from the command line, from our own runs and from imported models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import berts
from marians import make_folder, make_run
from system.commands import assert_refused, sets, small, succeed, transduce, write_corpus
from system.teams import assert_resumes_without_start
from transduce import Translator
from transduce.decoding.torch_engine import TorchEngine
from transduce.metrics_log import MetricsFile
from transduce.runs.folder import RunFolder
from transduce.text.special import BOS, EOS, PAD, UNK
from transduce.text.tokenizer import load_tokenizers

SHORT = (
    "training.max_updates=6",
    "training.valid_updates=3",
    "training.batch_tokens=512",
    "training.precision=float32",
)


def validations(run: Path) -> list[dict[str, Any]]:
    return [event for event in MetricsFile(run / "metrics.jsonl").read() if event["event"] == "validation"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained translator, and text of another domain with unknown characters."""
    path = tmp_path_factory.mktemp("tuning")
    src, tgt = write_corpus(path, "old", 400)
    valid = write_corpus(path, "old_valid", 20, seed=2)
    options = ("training.max_updates=80", "training.lr=0.01", "training.optimizer=adam", "tokenizer.vocab_size=400")
    succeed(
        *("train", "--src", src, "--tgt", tgt, "--valid-src", valid[0], "--valid-tgt", valid[1]),
        *("--src-lang", "en", "--tgt-lang", "de", "--run", path / "start", *small(*options)),
    )
    animals = [("quokka", "Quokka", "短尾矮袋鼠"), ("wombat", "Wombat", "袋熊"), ("axolotl", "Axolotl", "六角恐龙")]
    pairs = [(f"the {en} sees {i} {zh}", f"der {de} sieht {i} {zh}") for i in range(60) for en, de, zh in animals]
    for name, some in (("new", pairs[:150]), ("new_valid", pairs[150:])):
        (path / f"{name}.en").write_text("".join(f"{en}\n" for en, _ in some), encoding="utf-8")
        (path / f"{name}.de").write_text("".join(f"{de}\n" for _, de in some), encoding="utf-8")
    return path


def asked(folder: Path, run: str, *more: object) -> list[object]:
    text = ["--src", folder / "new.en", "--tgt", folder / "new.de"]
    held = ["--valid-src", folder / "new_valid.en", "--valid-tgt", folder / "new_valid.de"]
    return ["train", "--from", folder / "start", *text, *held, "--run", folder / run, *sets(*SHORT), *more]


def test_a_translator_learns_new_words_and_keeps_the_old_vocabulary(folder: Path) -> None:
    says = (
        *("starting from", "data.src_lang = en", "vocabulary: kept 400 pieces", "unknown tokens", "0 now"),
        *("training.lr", "far below a fresh model's", "adamw", "update 0  epoch 0.0  validation loss"),
    )
    succeed(*asked(folder, "grown", "--extend-vocabulary", 60, *sets("training.max_updates=40")), says=says)
    start, run = RunFolder.open(folder / "start"), RunFolder.open(folder / "grown")
    old, new = load_tokenizers(start).tgt, load_tokenizers(run).tgt
    n = old.vocab_size
    assert new.pieces(range(n)) == old.pieces(range(n)) and n < new.vocab_size <= n + 60
    assert run.settings.tokenizer.vocab_size == new.vocab_size and run.settings.data.tgt_lang == "de"
    assert not new.unknown("der Quokka sieht 短尾矮袋鼠") and old.unknown("短尾矮袋鼠")
    found = validations(folder / "grown")
    assert found[0]["update"] == 0 and found[-1]["loss"] < found[0]["loss"] - 0.3
    assert "fine-tuned from the weights of `start`" in (folder / "grown" / "README.md").read_text("utf-8")
    assert not (folder / "grown" / "tokens").exists()


def test_without_new_pieces_the_first_validation_scores_the_start(folder: Path) -> None:
    """The validation before the first update scores the start's weights, and the translations are the same."""
    succeed(*asked(folder, "plain", *sets("training.lr=1e-9", "training.valid_bleu_sentences=30")))
    first, *_, last = validations(folder / "plain")
    lines = (folder / "new_valid.en").read_text("utf-8").splitlines()
    one, two = (Translator.load(folder / run) for run in ("start", "plain"))
    assert first["loss"] == pytest.approx(last["loss"], abs=1e-4)
    settings = one.settings.model_copy(update={"max_length": two.settings.max_length})
    one = Translator(TorchEngine(one.model), one.tokenizers, settings=settings)
    assert [t.text for t in one.translate(lines)] == [t.text for t in two.translate(lines)]


@pytest.mark.parametrize("number", [1, 5])
def test_resume_needs_neither_the_start_nor_its_text(folder: Path, number: int) -> None:
    assert_resumes_without_start(folder, lambda run: asked(folder, run, "--extend-vocabulary", 20), number)


def test_options_that_contradict_the_start_are_refused(folder: Path) -> None:
    """`tests/unit/tasks/test_finetune.py` has the settings; here the error names the options."""
    done = transduce(*asked(folder, "no", *sets("tokenizer.vocab_size=900")))
    assert_refused(done, "(training.start: --from; tokenizer.extend: --extend-vocabulary)")
    text = ["--src", folder / "new.en", "--tgt", folder / "new.de", "--run", folder / "no"]
    assert_refused(transduce("train", *text, "--from", folder / "nowhere"), "nowhere")
    assert not (folder / "no").exists()


def test_a_dry_run_reports_and_writes_nothing(folder: Path) -> None:
    done = transduce(*asked(folder, "dry", "--dry-run", "--extend-vocabulary", 10))
    assert done.code == 0 and "kept 400 pieces" in done.err and not (folder / "dry").exists(), done.err


def test_an_imported_translator_is_fine_tuned(folder: Path, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "theirs", make_run(tmp_path / "ours", output_bias=True))
    assert transduce("import", source, tmp_path / "start").code == 0
    text = ["--src", folder / "new.en", "--tgt", folder / "new.de"]
    succeed("train", "--from", tmp_path / "start", *text, "--run", tmp_path / "run", *sets(*SHORT),
                     "--extend-vocabulary", 40)  # fmt: skip
    found = validations(tmp_path / "run")
    assert found[0]["update"] == 0 and found[-1]["loss"] < found[0]["loss"]
    tokenizers = load_tokenizers(RunFolder.open(tmp_path / "run"))
    assert not tokenizers.src.unknown("短尾矮袋鼠") and tokenizers.n_src == tokenizers.n_tgt
    assert len(Translator.load(tmp_path / "run").translate(["the quokka"])) == 1


def test_an_imported_gpt2_is_fine_tuned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lines, text = ["the cat sleeps all day long"] * 60, tmp_path / "text.txt"
    text.write_text("".join(f"{line}\n" for line in lines))
    berts.make_gpt2(tmp_path / "theirs", lines, n_layer=1, n_head=2, n_positions=32)
    succeed("import", tmp_path / "theirs", tmp_path / "start")
    command = ["train", "--text", text, "--from", tmp_path / "start", "--run", tmp_path / "run", *sets(*SHORT)]
    assert_refused(transduce(*command, "--extend-vocabulary", 5), "cannot be extended")
    succeed(*command, *sets("training.max_updates=20", "training.lr=0.01"))
    found = validations(tmp_path / "run")
    assert found[-1]["bits_per_byte"] < found[0]["bits_per_byte"] - 0.3
    assert RunFolder.open(tmp_path / "run").settings.data.context == 32
    scores = json.loads((tmp_path / "run" / "text_scores.json").read_text())["sets"]
    assert scores[0]["bits_per_byte"] == pytest.approx(found[-1]["bits_per_byte"], rel=0.2)
    before, after = (RunFolder.open(tmp_path / name).load_model() for name in ("start", "run"))
    assert torch.equal(before["output_bias"], after["output_bias"]) and float(after["output_bias"][0]) < -1e3
    assert not torch.equal(after["embedding.table.weight"][EOS], before["embedding.table.weight"][EOS])
    done = transduce("export", tmp_path / "run", "--to", "huggingface", tmp_path / "back")
    assert done.code == 0 and "checked: outputs of transformers" in done.out + done.err
    assert transduce("import", tmp_path / "back", tmp_path / "again").code == 0
    again = RunFolder.open(tmp_path / "again").load_model()
    rows = [i for i in range(len(again["output_bias"])) if i not in (PAD, UNK, BOS)]
    table = "embedding.table.weight"
    assert torch.equal(again[table][rows], after[table][rows]) and torch.equal(again[table][BOS], after[table][EOS])
    assert all(torch.equal(after[name], again[name]) for name in after if len(after[name]) != len(after[table]))


def test_a_run_can_use_the_tokenizer_of_another_run(folder: Path) -> None:
    text = ["--src", folder / "new.en", "--tgt", folder / "new.de", "--run", folder / "borrowed"]
    values = ("training.max_updates=1", "model.d_model=16", "model.d_ff=16", "model.n_heads=2", "training.lr=0.01")
    start = f"tokenizer.start={folder / 'start'}"
    succeed("train", *text, *sets(*values, start), says=["tokenizer of"])
    one, two = RunFolder.open(folder / "start"), RunFolder.open(folder / "borrowed")
    assert load_tokenizers(one).tgt.model == load_tokenizers(two).tgt.model
    assert (two.settings.model.d_model, two.settings.tokenizer.vocab_size) == (16, one.settings.tokenizer.vocab_size)
    text[-1] = folder / "refused"
    for wrong, parts in (
        ((start, "tokenizer.vocab_size=77"), ("tokenizer.vocab_size = 77", "tokenizer.start has")),
        (("tokenizer.start=nowhere",), ("there is no run folder", "nowhere")),
        ((start, f"training.start={folder / 'start'}"), ("tokenizer.start", "leave it out")),
    ):
        assert_refused(transduce("train", *text, *sets(*wrong)), *parts)
        assert not (folder / "refused").exists()
