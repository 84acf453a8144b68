"""Fine-tuning by low-rank adapters: what is learned, what stays, and what a run consists of."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from system.commands import assert_refused, sets, succeed, transduce
from system.teams import assert_resumes_without_start
from transduce import Translator
from transduce.runs.checkpoints import Checkpoints
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import load_tensors

WORDS = ("the", "old", "young", "doctor", "dog", "cat", "reads", "sees", "a", "book", "house", "red", "small")
QUOKKAS = (*WORDS, "短尾", "quokka")
SIZES = ("d_model=64", "d_ff=128", "n_heads=2", "n_encoder_layers=1", "n_decoder_layers=1", "dropout=0.0")
COMMON = ("training.precision=float32", "training.valid_bleu_sentences=0", "training.label_smoothing=0.0")


def write(folder: Path, name: str, n: int, *, seed: int, reverse: bool, words: Sequence[str] = WORDS) -> list[object]:
    """Write sentences with translations, word by word, in the same or in reversed order; return options with them."""
    draw = random.Random(seed)
    lines = [draw.choices(words, k=draw.randint(2, 6)) for _ in range(n)]
    targets = [[word[::-1] + "x" for word in (line[::-1] if reverse else line)] for line in lines]
    for side, texts in (("src", lines), ("tgt", targets)):
        (folder / f"{name}.{side}").write_text("".join(f"{' '.join(words)}\n" for words in texts))
    files = folder / f"{name}.src", folder / f"{name}.tgt"
    return ["--src", files[0], "--tgt", files[1], "--valid-src", files[0], "--valid-tgt", files[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained translator, `start`."""
    path = tmp_path_factory.mktemp("lora")
    options = ["tokenizer.vocab_size=90", "training.max_updates=150", "training.valid_updates=150"]
    model = [f"model.{value}" for value in SIZES]
    text = write(path, "old", 300, seed=1, reverse=False)
    succeed("train", *text, "--run", path / "start", *sets(*COMMON, *model, *options))
    return path


def asked(folder: Path, run: str, *more: str, words: Sequence[str] = WORDS) -> list[object]:
    text = write(folder, "new", 200, seed=2, reverse=True, words=words)
    limits = ("training.max_updates=6", "training.valid_updates=3", "training.batch_tokens=256")
    values = ("training.lora={ rank = 4 }", *limits)
    return ["train", "--from", folder / "start", *text, "--run", folder / run, *sets(*COMMON, *values, *more)]


def test_new_sentences_are_learned_by_heart_on_frozen_weights(folder: Path) -> None:
    """The result is an ordinary run. Weights without adapters are the start's, bit for bit."""
    before = (folder / "start" / "model.safetensors").read_bytes()
    more = ("training.lora.rank=16", "training.lora.on=all", "training.lr=0.02", "training.max_updates=200")
    done = succeed(*asked(folder, "heart", *more, "training.valid_updates=200", "training.batch_tokens=1024"))
    assert "are trained" in done.err and "are frozen" in done.err, done.err
    sources, references = ((folder / f"new.{side}").read_text().splitlines() for side in ("src", "tgt"))
    outputs = [translation.text for translation in Translator.load(folder / "heart").translate(sources)]
    n_right = sum(output == reference for output, reference in zip(outputs, references, strict=True))
    assert n_right >= 190
    assert (folder / "start" / "model.safetensors").read_bytes() == before
    start, run = (load_tensors(folder / name / "model.safetensors") for name in ("start", "heart"))
    assert start.keys() == run.keys()
    changed = {name for name in start if not torch.equal(start[name], run[name])}
    matrices = {name for name in start if ".blocks." in name and start[name].ndim == 2}
    assert changed == matrices


def test_kept_adapters_are_a_small_file_that_gives_the_merged_weights(folder: Path, tmp_path: Path) -> None:
    for run, merge in (("merged", "true"), ("kept", "false")):
        succeed(*asked(folder, run, f"training.lora.merge={merge}"))
    kept, merged = (RunFolder.open(folder / run) for run in ("kept", "merged"))
    assert kept.has_adapters and not merged.has_adapters
    files = [(run.path / "model.safetensors").stat().st_size for run in (kept, merged)]
    assert files[0] < files[1] / 5
    expected = merged.load_model()
    for path in (folder, tmp_path):  # also after both runs were moved
        if path != folder:
            for name in ("start", "kept"):
                shutil.copytree(folder / name, path / name)
        run = RunFolder.open(path / "kept")
        weights = run.load_model()
        with run.open_weights() as arrays:
            assert weights.keys() == expected.keys() == arrays.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
            assert all((arrays[name] == expected[name].numpy()).all() for name in expected)
    kept_text, merged_text = (Translator.load(run.path).translate("the dog reads").text for run in (kept, merged))
    assert kept_text == merged_text
    names = Checkpoints(folder / "kept" / "checkpoints").latest().tensors()  # type: ignore[union-attr]
    assert names and not any("adapters" not in name for name in names if name.startswith("model/"))


def test_adapters_without_their_weights_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    assert transduce(*asked(folder, "alone", "training.lora.merge=false")).code == 0
    shutil.copytree(folder / "alone", tmp_path / "alone")
    (folder / "start").rename(folder / "aside")
    try:
        assert_refused(transduce("translate", tmp_path / "alone", "a dog"), "only adapters", "start", "missing")
        shutil.copytree(folder / "alone", folder / "start")  # another model in its place
        assert_refused(transduce("translate", folder / "alone", "a dog"), "have changed")
    finally:
        shutil.rmtree(folder / "start", ignore_errors=True)
        (folder / "aside").rename(folder / "start")
    command = asked(folder, "no", "training.lora.merge=false")
    command[command.index(folder / "start")] = folder / "alone"
    more = [*asked(folder, "no", "training.lora.merge=false", words=QUOKKAS), "--extend-vocabulary", 5]
    for done in (transduce(*command), transduce(*more)):
        assert done.code == 2 and "training.lora.merge = false: the adapters" in done.err.splitlines()[-1], done.err
        assert not (folder / "no").exists()


@pytest.mark.parametrize("number", [1, 5])
def test_an_interrupted_training_resumes_exactly_without_the_start(folder: Path, number: int) -> None:
    more = ("training.lora.weights=bfloat16", "training.recompute=true", "model.dropout=0.1")
    run = assert_resumes_without_start(
        folder, lambda run: [*asked(folder, run, *more, words=QUOKKAS), "--extend-vocabulary", 9], number
    )
    tables = [RunFolder.open(path).load_model()["tgt_embedding.table.weight"] for path in (folder / "start", run)]
    n = len(tables[0])
    assert torch.equal(tables[1][:n], tables[0]) and n < len(tables[1]) <= n + 9


def test_settings_that_cannot_be_adapted_are_refused(folder: Path) -> None:
    for value, part in (
        ("training.optimizer=muon", "adamw"),
        ("training.parallel=shard", "replicate"),
        ("training.lora.rnak=3", "did you mean 'rank'"),
        ("training.lora.on=embeddings", "attention"),
    ):
        assert_refused(transduce(*asked(folder, "no", value)), "training.lora", part)
    command = asked(folder, "no")
    del command[1:3]
    assert_refused(transduce(*command), "no weights to adapt", "--from")
    assert not (folder / "no").exists()
