"""`transduce distill`: a student learns from its teachers' translations; kills and changed options."""

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
from system.commands import Done, small, succeed, transduce, write_corpus
from transduce import DecodingOptions, Translator, distill
from transduce.distillation.distill import most_similar
from transduce.evaluation.metrics import Scoring
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
    succeed(
        *("train", "--src", first[0], "--tgt", first[1], "--src", second[0], "--tgt", second[1]),
        *("--test-src", test[0], "--test-tgt", test[1], "--src-lang", "en", "--tgt-lang", "de"),
        *("--run", path / "teacher", *small(*TEACHER)),
    )
    return path


def command(folder: Path, name: str, *options: object) -> list[object]:
    return ["distill", folder / "teacher", "--run", folder / name, *SET, *options]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Done:
    return succeed(*command(folder, "plain", "--json", "--beam", 3))


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
    text, aside = folder / "plain.distilled", folder / "aside"
    text.rename(aside)
    try:
        done = transduce(*command(folder, "plain", "--beam", 3))
        assert not text.exists()
    finally:
        aside.rename(text)
    assert done.code == 0 and "test, student against teacher: BLEU" in done.out, done.err


def test_a_student_learns_from_several_teachers(folder: Path, plain: Done) -> None:
    done = succeed("distill", folder / "teacher", folder / "plain", "--run", folder / "both", *SET, "--beam", 2)
    assert "student against teacher: " in done.out and "student against teacher 2: " in done.out
    text, settings = folder / "both.distilled", RunFolder.open(folder / "both").settings
    names = [(corpus.src.parent.name, corpus.tgt.parent.name) for corpus in settings.data.train if corpus.src]
    assert names == [("sources", "translations")] * 2 + [("sources", "translations-2")] * 2
    for name, of_teacher in (("teacher", "translations"), ("plain", "translations-2")):
        translator = Translator.load(folder / name, device="cpu")
        expected = translator.translate(lines(text / "sources" / "train-2.txt"), DecodingOptions(beam=2))
        assert lines(text / of_teacher / "train-2.txt") == [translation.text for translation in expected]


@pytest.fixture(scope="module")
def back(folder: Path) -> Path:
    """A translator for the other direction."""
    texts = ("--src", folder / "train.de", "--tgt", folder / "train.en", "--src-lang", "de", "--tgt-lang", "en")
    succeed("train", *texts, "--run", folder / "back", *small(*TEACHER), "--set", "training.max_updates=60")
    return folder / "back"


def test_monolingual_text_is_translated_back_and_trained_on(folder: Path, back: Path) -> None:
    def train(name: str, model: Path, *options: object) -> Done:
        text = f'data.monolingual=[{{tgt="{folder / "more.de"}",model="{model}",weight=0.5,beam=2}}]'
        texts = ("--src", folder / "train.en", "--tgt", folder / "train.de", "--src-lang", "en", "--tgt-lang", "de")
        return transduce("train", *texts, *options, "--run", folder / name, *small(*TEACHER, text), *SET)

    valid = ("--valid-src", folder / "test.en", "--valid-tgt", folder / "test.de")
    done = train("enriched", back, *valid)
    assert done.code == 0, done.err
    written = folder / "enriched.back-translated" / "1" / "more.de"
    expected = Translator.load(back, device="cpu").translate(lines(folder / "more.de"), beam=2)
    assert lines(written) == [translation.text for translation in expected] and any(lines(written))
    data = RunFolder.open(folder / "enriched").settings.data
    corpus = data.train[-1]
    assert not data.monolingual, "a distillation from this run would add the pairs again"
    assert (corpus.src, corpus.tgt, corpus.weight) == (written, folder / "more.de", 0.5)
    written.unlink()  # the same command needs no translations of a finished run
    again = train("enriched", back, *valid)
    assert again.code == 0 and "is finished" in again.err and not written.exists()
    wrong = train("wrong", folder / "teacher", *valid)
    assert wrong.code == 2 and "en" in wrong.err and not (folder / "wrong").exists()
    without = train("without", back)
    assert without.code == 2 and "monolingual text needs valid" in without.err


def test_a_student_also_learns_from_references_translated_back(folder: Path, plain: Done, back: Path) -> None:
    text = f'data.monolingual=[{{tgt="{folder / "train.de"}",model="{back}",beam=2}}]'
    valid = f'data.valid=[{{src="{folder / "test.en"}",tgt="{folder / "test.de"}"}}]'
    more = ("--set", text, "--set", valid, "--set", "data.deduplicate=true", "--beam", 2, "--mix", 1)
    succeed(*command(folder, "diverse", *more))
    data = RunFolder.open(folder / "diverse").settings.data
    assert [(c.src.parent.name, c.tgt.parent.name, c.src.name) for c in data.train if c.src and c.tgt] == [
        ("sources", "translations", "train-1.txt"),
        ("sources", "translations", "train-2.txt"),
        ("sources", "references", "train-1.txt"),
        ("sources", "references", "train-2.txt"),
        ("1", folder.name, "train.de"),
    ]


def test_students_share_the_text_of_their_teacher_and_may_mix_it_with_the_original(folder: Path, plain: Done) -> None:
    shared = folder / "plain.distilled"
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*.txt")}
    succeed(*command(folder, "mixed", "--text", shared, "--beam", 3, "--mix", 0.5, "--set", "model.d_ff=32"))
    assert before == {path: path.stat().st_mtime_ns for path in shared.rglob("*.txt")}
    settings = RunFolder.open(folder / "mixed").settings
    assert settings.model.d_ff == 32 and settings.model.d_model == 32
    assert [(c.tgt.parent.name, c.weight) for c in settings.data.train if c.tgt] == [
        *[("translations", 1.0)] * 2,
        *[("references", 0.5)] * 2,
    ]


def test_reranking_takes_the_translation_most_similar_to_the_reference(folder: Path) -> None:
    given = {"training": {"max_updates": 2}, "model": {"preset": "tiny", "n_encoder_layers": 1}}
    distill(folder / "teacher", folder / "inter", beam=4, rerank=True, changes=given)
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
    assert list(most_similar(rows, ["a b c d\te", "z"], 2, Scoring())) == ["a b c d\te", "q"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--beam", "4"], ["plain.distilled", "beam = 3 and not 4", "remove "]),
        (["--beam", "3", "--length-penalty", "2"], ["length_penalty = None and not 2.0"]),
        (["--beam", "3", "--rerank"], ["n_best = 1 and not 3"]),
        (["--beam", "3", "--set", "data.max_length=100"], ["text of other data"]),
    ],
)
def test_text_that_was_made_with_other_options_is_refused(
    options: list[str], parts: list[str], folder: Path, plain: Done
) -> None:
    done = transduce(*command(folder, "other", "--text", folder / "plain.distilled", *options))
    assert done.code == 2 and all(part in done.err for part in parts), done.err
    assert not (folder / "other").exists()


def test_a_student_begun_with_other_options_is_refused(folder: Path, plain: Done) -> None:
    for options, part in ((["--mix", "1"], "data.train.2"), (["--set", "model.d_ff=16"], "model.d_ff is 64")):
        done = transduce(*command(folder, "plain", "--beam", 3, *options))
        assert done.code == 2 and "contains another run" in done.err and part in done.err, done.err


def test_a_damaged_record_of_the_text_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "distillation.json").write_text("{")
    done = transduce(*command(folder, "other", "--text", tmp_path))
    assert done.code == 2 and "distillation.json" in done.err and f"remove {tmp_path}" in done.err, done.err


def test_mistakes_are_one_line_before_any_work(folder: Path, tmp_path: Path) -> None:
    teacher = folder / "teacher"
    for arguments, part in (
        ([tmp_path / "none", "--run", tmp_path / "a"], "there is no run folder"),
        ([teacher, "--run", tmp_path / "a", "--preset", "quick"], "model.preset = 'quick'"),
        ([teacher, "--run", tmp_path / "a", "--set", "model.n_heads=5"], "n_heads"),
        ([teacher, "--run", tmp_path / "a", "--set", "model=5"], "model = 5: a section, not a value"),
        ([teacher, "--run", tmp_path / "a", "--rerank", "--beam", 1], "beam = 1 must be at least 2"),
        ([teacher, "--run", tmp_path / "a", "--mix", 1e9], "weight = 1000000000.0"),
        ([teacher, "--run", tmp_path / "a", "--text", tmp_path / "a"], "is a run folder; name another"),
        ([teacher, "--run", tmp_path / "a", "--text", teacher], "is a run folder; name another"),
        ([teacher, "--run", tmp_path / "a", "--beam", 10**9], f"beam = {10**9}: input should be less"),
        ([teacher, "--run", tmp_path / "a", "--length-penalty", 1e9], "length_penalty = 1000000000.0: input"),
    ):
        done = transduce("distill", *arguments)
        assert done.code == 2 and part in done.err and done.err.count("error:") == 1, done.err
        assert not (tmp_path / "a").exists()


def test_moved_or_other_text_can_be_named(folder: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(folder / "teacher", teacher)
    names = {side: folder / f"more.{end}" for side, end in (("src", "en"), ("tgt", "de"))}
    for path in names.values():
        path.rename(tmp_path / path.name)
    try:
        refused = transduce("distill", teacher, "--run", tmp_path / "a", *SET)
        corpus = ",".join(f'{side}="{tmp_path / path.name}"' for side, path in names.items())
        given = ("--set", f"data.train=[{{{corpus}}}]", "--beam", 1, "--quiet")
        done = transduce("distill", teacher, "--run", tmp_path / "a", *SET, *given)
    finally:
        for path in names.values():
            (tmp_path / path.name).rename(path)
    assert refused.code == 2 and f"{names['src']}" in refused.err and refused.err.count("error:") == 1, refused.err
    assert done.code == 0, done.err
    n_lines = [len(lines(tmp_path / "a.distilled" / "sources" / name)) for name in ("train-1.txt", "valid.txt")]
    assert sum(n_lines) == 60


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
