"""`transduce distill`: a student learns from its teacher's translations; kills and changed options."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU

import kills
from system.commands import Done, small, transduce, write_corpus
from transduce import DecodingOptions, DistillationOptions, Translator, distill
from transduce.config.settings import EvaluationSettings
from transduce.distillation.text import rerank
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers

SET = ("--set", "training.max_updates=8", "--set", "training.save_updates=2")
TEACHER = (
    *("training.max_updates=200", "training.valid_updates=100", "training.valid_bleu_sentences=0"),
    *("data.max_ratio=4", "model.dropout=0"),
)
CHUNK_LINES = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, trained on two corpora without a validation set."""
    path = tmp_path_factory.mktemp("distill")
    first, second = write_corpus(path, "train", 300), write_corpus(path, "more", 60, seed=3)
    test = write_corpus(path, "test", 30, split="test", seed=2)
    done = transduce(
        *("train", "--src", first[0], "--tgt", first[1], "--src", second[0], "--tgt", second[1]),
        *("--test-src", test[0], "--test-tgt", test[1], "--src-lang", "en", "--tgt-lang", "de"),
        *("--run", path / "teacher", *small(*TEACHER)),
    )
    assert done.code == 0, done.err
    return path


def run(folder: Path, name: str, *options: object) -> Done:
    return transduce("distill", folder / "teacher", "--run", folder / name, *SET, *options)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Done:
    done = run(folder, "plain", "--json", "--beam", 3)
    assert done.code == 0, done.err
    return done


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_student_is_trained_on_the_translations_of_the_teacher(folder: Path, plain: Done) -> None:
    text = folder / "plain.distilled"
    teacher = Translator.load(folder / "teacher", device="cpu")
    n = 0
    for name in ("train-1.txt", "train-2.txt"):
        sources = lines(text / "sources" / name)
        found = [one.text for one in teacher.translate(sources, DecodingOptions(beam=3))]
        assert lines(text / "translations" / name) == found
        n += len(sources)
    held_out = lines(text / "sources" / "valid.txt")
    assert n + len(held_out) == 360 and not set(held_out) & set(sources)
    one, two = (RunFolder.open(folder / name) for name in ("teacher", "plain"))
    assert load_tokenizers(one).src.model == load_tokenizers(two).src.model
    assert two.settings.model == one.settings.model and two.settings.data.src_lang == "en"
    assert two.settings.data.max_ratio == 4 and two.settings.decoding == one.settings.decoding
    sets = {found["name"]: found for found in json.loads((folder / "plain" / "data.json").read_text())["sets"]}
    assert sets["valid"]["pairs"] == len(held_out) and sets["test"]["pairs"] == 30
    kept = sum(bool(line) for name in ("train-1.txt", "train-2.txt") for line in lines(text / "translations" / name))
    assert sets["train"]["cleaning"]["read"] == n >= kept >= sets["train"]["pairs"] > 0


def test_the_comparison_agrees_with_sacrebleu(folder: Path, plain: Done) -> None:
    found = json.loads(plain.out)
    sources, references = lines(folder / "test.en"), lines(folder / "test.de")
    compared = found["comparisons"]["test"]["teacher"]
    for role, name, value in (("teacher", "teacher", compared["other"]), ("student", "plain", compared["value"])):
        translator = Translator.load(folder / name, device="cpu")
        system = found["systems"][role]
        bleu = BLEU().corpus_score([one.text for one in translator.translate(sources)], [references]).score
        assert value == pytest.approx(bleu) and system["sentences_per_second"] > 0
        assert system["n_parameters"] == sum(p.numel() for p in translator.model.parameters())
    assert json.loads((folder / "plain" / "distillation.json").read_text())["systems"].keys() == found["systems"].keys()


def test_a_finished_student_is_compared_again_without_its_text(folder: Path, plain: Done) -> None:
    """Also with a baseline that is trained then: of the text, only the pairs are made again."""
    text, aside = folder / "plain.distilled", folder / "aside"
    text.rename(aside)
    try:
        assert run(folder, "plain", "--beam", 3).code == 0
        assert not text.exists()
        done = run(folder, "plain", "--beam", 3, "--baseline", folder / "base")
        assert done.code == 0, done.err
        assert {path.name for path in text.glob("*")} == {"sources", "references", "distillation.json"}
    finally:
        shutil.rmtree(text, ignore_errors=True)
        aside.rename(text)
    assert "student against baseline" in done.out and "translating" not in done.err
    base = RunFolder.open(folder / "base").settings
    assert [corpus.tgt.parent.name for corpus in base.data.train if corpus.tgt] == ["references"] * 2


def test_an_unfinished_baseline_with_other_settings_is_refused_at_once(folder: Path, plain: Done) -> None:
    settings = RunFolder.open(folder / "plain").settings
    RunFolder.create(folder / "begun", settings, "").close()
    done = run(folder, "never", "--baseline", folder / "begun")
    assert done.code == 2 and "begun contains another run" in done.err, done.err
    assert not (folder / "never").exists()


def test_students_share_the_text_of_their_teacher_and_may_mix_it_with_the_original(folder: Path, plain: Done) -> None:
    shared = folder / "plain.distilled"
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*.txt")}
    done = run(folder, "mixed", "--text", shared, "--beam", 3, "--mix", 0.5, "--set", "model.d_ff=32")
    assert done.code == 0, done.err
    assert before == {path: path.stat().st_mtime_ns for path in shared.rglob("*.txt")}
    settings = RunFolder.open(folder / "mixed").settings
    assert settings.model.d_ff == 32 and settings.model.d_model == 32
    assert [(c.tgt.parent.name, c.weight) for c in settings.data.train if c.tgt] == [
        *[("translations", 1.0)] * 2,
        *[("references", 0.5)] * 2,
    ]


def test_reranking_takes_the_translation_most_similar_to_the_reference(folder: Path) -> None:
    given = {"training": {"max_updates": 2}, "model": {"preset": "tiny", "n_encoder_layers": 1}}
    distill(folder / "teacher", folder / "inter", DistillationOptions(beam=4, rerank=True), changes=given)
    text = folder / "inter.distilled"
    chosen, sources = lines(text / "reranked" / "train-2.txt"), lines(text / "sources" / "train-2.txt")
    teacher, metric = Translator.load(folder / "teacher", device="cpu"), BLEU(effective_order=True)
    found = teacher.translate(sources, DecodingOptions(beam=4, n_best=4))
    better = 0
    for translation, reference, one in zip(found, lines(text / "references" / "train-2.txt"), chosen, strict=True):
        scores = [metric.sentence_score(candidate.text, [reference]).score for candidate in translation.candidates]
        assert one == translation.candidates[scores.index(max(scores))].text
        better += max(scores) > scores[0]
    assert better
    model = RunFolder.open(folder / "inter").settings.model
    assert (model.d_model, model.depth) == (128, (1, 4)), "a preset replaces the sizes of the teacher"


def test_reranking_prefers_the_earlier_of_equals() -> None:
    rows = ["1\t-0.1\tx y", "1\t-0.2\ta b c d\te", "2\t-0.1\tq", "2\t-0.2\tr"]
    assert list(rerank(rows, ["a b c d\te", "z"], 2, EvaluationSettings())) == ["a b c d\te", "q"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--beam", "4"], ["plain.distilled", "beam = 3 and not 4", "another folder"]),
        (["--beam", "3", "--length-penalty", "2"], ["length penalty = None and not 2.0"]),
        (["--beam", "3", "--rerank"], ["translations per source = 1 and not 3"]),
        (["--beam", "3", "--precision", "int8"], ["precision = 'float32' and not 'int8'"]),
        (["--beam", "3", "--set", "data.max_length=100"], ["made with another data"]),
    ],
)
def test_text_that_was_made_with_other_options_is_refused(
    options: list[str], parts: list[str], folder: Path, plain: Done
) -> None:
    done = run(folder, "other", "--text", folder / "plain.distilled", *options)
    assert done.code == 2 and all(part in done.err for part in parts), done.err
    assert not (folder / "other").exists()


def test_a_student_begun_with_other_options_is_refused(folder: Path, plain: Done) -> None:
    for options, part in ((["--mix", "1"], "data.train.2"), (["--set", "model.d_ff=16"], "model.d_ff is 64")):
        done = run(folder, "plain", "--beam", 3, *options)
        assert done.code == 2 and "contains another run" in done.err and part in done.err, done.err


def test_a_damaged_record_of_the_text_is_named(folder: Path, tmp_path: Path) -> None:
    for content in ("{", "[1]"):
        (tmp_path / "distillation.json").write_text(content)
        done = run(folder, "other", "--text", tmp_path)
        assert done.code == 2 and "is damaged" in done.err and f"remove {tmp_path}" in done.err, done.err


def test_mistakes_are_one_line_before_any_work(folder: Path, tmp_path: Path) -> None:
    teacher = folder / "teacher"
    for arguments, part in (
        ([tmp_path / "none", "--run", tmp_path / "a"], "there is no run folder"),
        ([teacher, "--run", tmp_path / "a", "--preset", "quick"], "model.preset = 'quick'"),
        ([teacher, "--run", tmp_path / "a", "--set", "model.n_heads=5"], "n_heads"),
        ([teacher, "--run", tmp_path / "a", "--set", "model.d_modell=8"], "d_modell"),
        ([teacher, "--run", tmp_path / "a", "--set", "model.preset=5"], "model.preset = 5: input should be"),
        ([teacher, "--run", tmp_path / "a", "--set", "model=5"], "model = 5: a section, not a value"),
        ([teacher, "--run", tmp_path / "a", "--set", "tokenizer=5"], "tokenizer = 5: a section, not a value"),
        ([teacher, "--run", tmp_path / "a", "--set", "data=texts"], "data = 'texts': a section, not a value"),
        ([teacher, "--run", tmp_path / "a", "--rerank", "--beam", 1], "beam = 1 must be at least 2"),
        ([teacher, "--run", tmp_path / "a", "--data", tmp_path], "there is no file"),
        ([teacher, "--run", tmp_path / "a", "--text", tmp_path / "a"], "is a run folder; name another"),
        ([teacher, "--run", tmp_path / "a", "--text", teacher], "is a run folder; name another"),
        ([teacher, "--run", tmp_path / "a", "--baseline", tmp_path / "a"], "this is the student's run folder"),
        ([teacher, "--run", tmp_path / "a", "--precision", "int9"], "precision = 'int9': allowed are float32"),
        ([teacher, "--run", tmp_path / "a", "--beam", 10**9], f"beam = {10**9}: input should be less"),
        ([teacher, "--run", tmp_path / "a", "--length-penalty", 1e9], "length_penalty = 1000000000.0: input"),
    ):
        done = transduce("distill", *arguments)
        assert done.code == 2 and part in done.err and done.err.count("error:") == 1, done.err
        assert not (tmp_path / "a").exists()


def test_a_changed_training_text_is_refused_and_a_moved_one_is_found(folder: Path, tmp_path: Path) -> None:
    files = [folder / f"{name}.{side}" for name in ("train", "more", "test") for side in ("en", "de")]
    for file in files:
        shutil.copy(file, tmp_path / file.name)
    done = run(folder, "moved", "--data", tmp_path, "--beam", 1, "--set", "training.max_updates=2", "--quiet")
    assert done.code == 0 and all(line.startswith("warning: ") for line in done.err.splitlines()), done.err
    with (tmp_path / "more.de").open("a", encoding="utf-8") as file:
        file.write("Noch eine Zeile.\n")
    with (tmp_path / "more.en").open("a", encoding="utf-8") as file:
        file.write("One more line.\n")
    done = run(folder, "changed", "--data", tmp_path)
    assert done.code == 2 and "has changed since its training" in done.err, done.err
    assert not (folder / "changed").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forkserver")
def test_kills_in_every_phase_change_nothing(folder: Path, processes: ForkServerContext) -> None:
    """SIGKILL while the text is written, translated and reranked, and while the student is trained."""
    whole, killed, text, errors = folder / "whole", folder / "killed", folder / "killed.distilled", folder / "errors"

    def process(run: Path) -> ForkServerProcess:
        command = ["distill", folder / "teacher", "--beam", 3, "--rerank", *SET, "--run", run]
        return processes.Process(target=kills.bulk_child, args=([*map(str, command)], str(errors), CHUNK_LINES))

    draw = random.Random(1)
    for mark in (
        text / "sources",
        text / "translations" / ".transduce" / "train-1.txt.partial",
        text / "reranked",
        killed / "data.json",
        killed / "checkpoints" / "u00000002",
    ):
        code = kills.kill_when(process(killed), mark, seconds=draw.uniform(0.0, 0.01))
        assert code == -signal.SIGKILL, errors.read_text()
    for run in (whole, killed):
        (last := process(run)).start()
        last.join()
        assert last.exitcode == 0, errors.read_text()
    for name in ("sources/train-1.txt", "translations/train-1.txt", "reranked/train-2.txt"):
        assert (folder / "whole.distilled" / name).read_bytes() == (text / name).read_bytes()
    assert not list(text.glob(".*.aside"))
    for name in ("model.safetensors", "scores.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
