"""The commands end to end: from text to a run folder, and every use of it."""

import asyncio
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sacrebleu.metrics import BLEU, CHRF, TER

from kills import events
from system.commands import small, succeed, transduce, write_corpus
from transduce import Translator
from transduce.kernels.library import load_library
from transduce.runs.folder import RunFolder
from transduce.serving.access import Limits
from transduce.serving.service import RunSpec, Service


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_corpus(folder, "train", 400)
    write_corpus(folder, "test", 12, split="test")
    return folder


@pytest.fixture(scope="module")
def run(texts: Path) -> Path:
    sides = ["--src", texts / "train.en", "--tgt", texts / "train.de"]
    tests = ["--test-src", texts / "test.en", "--test-tgt", texts / "test.de"]
    settings = small("training.max_updates=120", "training.lr=0.005")
    facts = ("374 sentence pairs", "held out", "machine:", "training.optimizer", "test:", "BLEU", "nrefs:1|")
    succeed("train", *sides, *tests, "--run", texts / "run", *settings, says=facts)
    return texts / "run"


def test_a_run_folder_contains_the_model_and_its_records(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    records = {f"{name}.json" for name in ("config", "manifest", "data", "scores", "samples", "attention")}
    others = {"recipe.toml", "metrics.jsonl", "model.safetensors", "checkpoints"} | {
        f"tokenizer.{side}.model" for side in ("src", "tgt")
    }
    assert names == records | others | {"README.md", "report.html"}
    settings = RunFolder.open(run).settings
    resolved = settings.training.model_dump(include={"batch_tokens", "optimizer", "lr", "schedule", "warmup_updates"})
    assert None not in resolved.values() and settings.tokenizer.vocab_size
    data = json.loads((run / "data.json").read_text())
    assert [found["name"] for found in data["sets"]] == ["train", "valid", "test"]
    assert data["sets"][0]["pairs"] == 374
    padding = [event["padding"] for event in events(run, "update")]
    assert (
        0 < max(padding) < 0.5 and "of the tokens in training batches are padding" in (run / "report.html").read_text()
    )
    assert str(run.parent) not in (run / "README.md").read_text()


def test_training_a_finished_run_again_changes_nothing(run: Path, texts: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    done = transduce("train", run / "recipe.toml", "--run", run)
    assert (done.code, "is finished" in done.err) == (0, True)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_translate_is_aligned_line_by_line(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "in.en"
    text.write_bytes("The dog sleeps.\n\nÜ unseen ☃ sign\r\n   \nNo line end".encode())
    done = transduce("translate", run, text)
    lines = done.out.split("\n")
    assert done.code == 0 and len(lines) == 6 and lines[5] == ""
    assert lines[1] == "" and lines[3] == "   " and lines[0] and lines[4]  # spaces around a text stay
    packed = tmp_path / "in.en.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    assert transduce("translate", run, packed, text).out == done.out * 2
    assert transduce("translate", run, text, "-o", tmp_path / "out.de").out == ""
    assert (tmp_path / "out.de").read_text(encoding="utf-8") == done.out
    python = Translator.load(run).translate(text.read_text(encoding="utf-8").replace("\r", "").split("\n"))
    assert [translation.text for translation in python] == lines[:5]


def test_texts_are_arguments_and_their_sentences_are_translated_one_by_one(run: Path) -> None:
    text = "The dog sleeps. (The doctor reads.) A cat runs!"
    first, second, third = transduce(
        "translate", run, "The dog sleeps.", "(The doctor reads.)\nA cat runs!"
    ).out.splitlines()
    assert transduce("translate", run, text).out == f"{first} {second} {third}\n"
    assert transduce("translate", run, f"1. {text}").out == f"1. {first} {second} {third}\n"
    whole = transduce("translate", run, text, "--no-split").out
    assert whole == transduce("translate", run, text, "--no-split").out != f"{first} {second} {third}\n"
    scored = transduce("translate", run, text, "--max-length", "1", "--json")
    assert '"finished": false' in scored.out and "cut off at 1 tokens" in scored.out


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("command", "closed", "code"),
    [
        ("train --help", ">&-", 1),
        ("translate RUN", "<&-", 0),
        ("translate RUN", ">&-", 1),
        ("train", "<&- >&- 2>&-", 0),
    ],
)
def test_only_output_to_a_closed_standard_stream_is_an_error(
    command: str, closed: str, code: int, run: Path, texts: Path, tmp_path: Path
) -> None:
    arguments = [str(run) if part == "RUN" else part for part in command.split()]
    if command == "train":
        sides = ["--src", texts / "train.en", "--tgt", texts / "train.de", "--run", tmp_path / "run"]
        arguments += [*map(str, sides), *small("training.max_updates=1")]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "transduce", *arguments]
    done = subprocess.run(shell, input="A dog runs.\n", capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert not code or done.stderr.splitlines()[-1].endswith("Bad file descriptor")
    assert command != "train" or (tmp_path / "run" / "README.md").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output_is_named(run: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "transduce", "translate", str(run)]
        done = subprocess.run(command, input="A dog runs.\n", stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "transduce: error: standard output: No space left on device" in done.stderr.splitlines()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_a_full_disk_behind_standard_error_does_not_change_the_exit_code(options: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "transduce", "verify", str(tmp_path / "none"), *options]
        assert subprocess.run(command, stderr=full).returncode == 2


@pytest.mark.parametrize(
    ("options", "columns"), [(["--scores"], 2), (["--nbest", "3", "--beam", "4"], 3), (["--nbest", "2", "--sample"], 3)]
)
def test_translate_with_scores_and_several_candidates(options: list[str], columns: int, run: Path, texts: Path) -> None:
    done = transduce("translate", run, texts / "test.en", *options)
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert all(len(row) == columns for row in rows)
    assert len(rows) == 12 * (int(options[1]) if "--nbest" in options else 1)
    assert all(float(row[-2]) < 0 for row in rows)
    if columns == 3 and "--sample" not in options:
        scores = [float(row[1]) for row in rows]
        assert all(scores[i] >= scores[i + 1] >= scores[i + 2] for i in range(0, 36, 3))
        assert [int(row[0]) for row in rows] == [n for n in range(1, 13) for _ in range(3)]


def test_json_output_equals_text_output(run: Path, texts: Path) -> None:
    values = [json.loads(line) for line in transduce("translate", run, texts / "test.en", "--json").out.splitlines()]
    assert [value["src"] for value in values] == (texts / "test.en").read_text().splitlines()
    plain = transduce("translate", run, texts / "test.en").out
    assert [value["text"] for value in values] == plain.splitlines()


def test_score_prints_the_scores_of_the_translator(run: Path, texts: Path) -> None:
    sides = [texts / "test.en", texts / "test.de"]
    expected = Translator.load(run).score(*(side.read_text("utf-8").splitlines() for side in sides))
    command = ["score", run, "--src", sides[0], "--tgt", sides[1]]
    assert transduce(*command).out.splitlines() == [f"{score.log_prob:.4f}" for score in expected]
    values = [json.loads(line) for line in transduce(*command, "--json").out.splitlines()]
    assert [tuple(value["token_log_probs"]) for value in values] == [tuple(s.token_log_probs) for s in expected]
    assert [value["n_tokens"] for value in values] == [score.n_tokens for score in expected]


def test_evaluate_equals_sacrebleu_of_the_translations(run: Path, texts: Path, tmp_path: Path) -> None:
    files = ["--src", texts / "test.en", "--ref", texts / "test.de"]
    value = json.loads(transduce("evaluate", run, *files, "--json", "-o", tmp_path / "out.de").out)
    translated = transduce("translate", run, texts / "test.en")
    assert (tmp_path / "out.de").read_text(encoding="utf-8") == translated.out
    outputs, references = (path.read_text("utf-8").splitlines() for path in (tmp_path / "out.de", texts / "test.de"))
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF()), ("ter", TER())):
        assert value[name]["value"] == pytest.approx(metric.corpus_score(outputs, [references]).score)
    trained = json.loads((run / "scores.json").read_text())["sets"][0]["scores"]
    assert trained["chrf"]["value"] == pytest.approx(value["chrf"]["value"])


def test_the_default_precision_is_float32_everywhere(run: Path, texts: Path, tmp_path: Path) -> None:
    src, lines = texts / "train.en", (texts / "train.en").read_text(encoding="utf-8").splitlines()
    expected = [one.text for one in Translator.load(run, precision="float32").translate(lines)]
    if not isinstance(load_library(), str):
        assert expected != [one.text for one in Translator.load(run, precision="int8").translate(lines)]
    assert [one.text for one in Translator.load(run).translate(lines)] == expected
    assert transduce("translate", run, src).out.splitlines() == expected
    transduce("translate", run, src, "--output-dir", tmp_path / "bulk")
    assert (tmp_path / "bulk" / src.name).read_text(encoding="utf-8").splitlines() == expected
    transduce("evaluate", run, "--src", src, "--ref", texts / "train.de", "-o", tmp_path / "out.de")
    assert (tmp_path / "out.de").read_text(encoding="utf-8").splitlines() == expected

    async def serve() -> list[str]:
        service = Service([RunSpec.parse(f"en-de={run}")], limits=Limits(max_tokens=10**6, seconds=60))
        await service.start()
        found = await service.translate(lines, service.route())
        await service.close()
        return [one.text for one in found.sentences]

    assert asyncio.run(serve()) == expected


def test_precisions_are_measured_and_reported(run: Path, texts: Path, tmp_path: Path) -> None:
    if isinstance(load_library(), str):
        pytest.skip("the native library is not built")
    assert json.loads((run / "scores.json").read_text())["sets"][0]["search"]["precision"] == "float32"
    files = ["--src", texts / "test.en", "--ref", texts / "test.de"]
    done = transduce("evaluate", run, *files, "--precision", "int8", "--measure-precisions", "--json")
    found = json.loads(done.out)
    assert found["precision"] == "int8"
    assert found["bleu"]["value"] == pytest.approx(found["precisions"]["int8"]["bleu"])
    lines = transduce("evaluate", run, *files, "--measure-precisions").out
    assert "\nprecision float32\n" in lines and "\nprecision int8: " in lines and "times as fast as float32" in lines
    assert "times as fast" not in transduce("evaluate", run, *files).out
    (tmp_path / "blank").write_text("\n \n")
    blank = ["--src", tmp_path / "blank", "--ref", tmp_path / "blank"]
    done = transduce("evaluate", run, *blank, "--measure-precisions")
    assert done.code == 2 and "there is no text to measure" in done.err and done.err.count("\n") == 1, done.err


def test_evaluate_against_another_run_or_its_output(run: Path, texts: Path) -> None:
    files = ["--src", texts / "test.en", "--ref", texts / "test.de"]
    perfect = transduce("evaluate", run, *files, "--hyp", texts / "test.de", "--against", run, "--json")
    value = json.loads(perfect.out)
    assert value["bleu"]["value"] == pytest.approx(100) and value["exact_match"] == 1
    assert [row["verdict"] for row in value["comparison"]] == ["better"] * 3
    same = transduce("evaluate", run, "--src", files[1], "--tgt", files[3], "--hyp", texts / "test.de", "--json")
    assert json.loads(same.out)["bleu"] == value["bleu"]
    text = transduce("evaluate", run, *files, "--against", texts / "test.de").out
    assert "paired bootstrap" in text and text.count("worse") == 3


def test_an_ensemble_translates_scores_and_is_evaluated(run: Path, texts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    with RunFolder.open_locked(other) as folder:
        noise = torch.Generator().manual_seed(0)
        weights = folder.load_model().items()
        folder.save_model({name: w + 0.1 * w.std() * torch.randn(w.shape, generator=noise) for name, w in weights})
    test, reference = texts / "test.en", texts / "test.de"
    sources, references = (file.read_text("utf-8").splitlines() for file in (test, reference))
    expected = Translator.load([run, other], device="cpu")
    done = transduce("translate", run, test, "--ensemble", other, "--beam", 2, "--scores")
    assert "PyTorch, which is slower: the native library does not support ensembles" in done.err
    translations = expected.translate(sources, beam=2)
    assert done.out.splitlines() == [f"{t.score:.4f}\t{t.text}" for t in translations]
    bulk = transduce("translate", run, test, "--ensemble", other, "--beam", 2, "--output-dir", tmp_path / "out")
    assert (tmp_path / "out" / "test.en").read_text("utf-8").splitlines() == [t.text for t in translations], bulk.err
    refused = transduce("translate", run, test, "--beam", 2, "--output-dir", tmp_path / "out")
    assert refused.code == 2 and "another model" in refused.err
    pairs = ["--src", test, "--tgt", reference]
    scores = transduce("score", run, "--ensemble", other, *pairs).out.splitlines()
    assert scores == [f"{score.log_prob:.4f}" for score in expected.score(sources, references)]
    value = json.loads(
        transduce("evaluate", run, "--ensemble", other, *pairs, "--beam", 2, "--against", run, "--json").out
    )
    bleu = BLEU().corpus_score([t.text for t in translations], [references]).score
    assert value["bleu"]["value"] == pytest.approx(bleu) and len(value["comparison"]) == 3
    for options, part in (
        (["--ensemble", other, "--measure-precisions"], "ensemble: no effect on hyp and measure_precisions"),
        (["--ensemble", tmp_path / "none"], "there is no run folder"),
    ):
        done = transduce("evaluate", run, *options, *pairs)
        assert done.code == 2 and part in done.err and done.err.count("\n") == 1, done.err


def test_inspect_draws_in_the_terminal_and_into_files(run: Path, tmp_path: Path) -> None:
    page, drawing = tmp_path / "a.html", tmp_path / "a.svg"
    done = transduce(
        "inspect", run, "The dog sleeps.", "--target", "Der Hund schläft.", "--html", page, "--svg", drawing
    )
    assert done.code == 0 and "Der Hund schläft." in done.out and "</s>" in done.out
    assert "<svg" in drawing.read_text()
    text = page.read_text()
    assert "https:" not in text and "default-src 'none'" in text and len(text) < 3_000_000
    record = json.loads(transduce("inspect", run, "The dog sleeps.", "--json").out)
    assert record["sides"]["src"]["text"] == "The dog sleeps." and record["parts"][0]["values"][0]["data"]
    changed = transduce("inspect", run, "The dog sleeps.", "--off", "src_embedding.positions", "--json")
    assert json.loads(changed.out)["off"] == ["src_embedding.positions"]
    refused = transduce("inspect", run, "The dog sleeps.", "--off", "everything")
    assert refused.code == 2 and "cannot be switched off" in refused.err
    wide = transduce("inspect", run, "The dog sleeps.", "--beam", "3", "--length-penalty", "0", "--json")
    steps = json.loads(wide.out)["steps"]
    assert steps["beam"] == len(steps["results"]) == 3 and steps["length_penalty"] == 0


def test_a_dry_run_prints_settings_and_writes_nothing(texts: Path, tmp_path: Path) -> None:
    sides = ["--src", texts / "train.en", "--tgt", texts / "train.de"]
    done = transduce("train", *sides, "--run", tmp_path / "run", "--dry-run")
    assert done.code == 0
    for key in ("tokenizer.vocab_size", "model.preset", "training.lr", "training.max_epochs", "training.max_minutes"):
        assert key in done.err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_shows_translations_attention_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.demo.corpus.HELD_OUT", 20)
    options = small("data.demo=300", "training.valid_updates=2", "decoding.beam=1")
    done = succeed("demo", "--run", tmp_path / "demo", "--updates", "4", *options)
    for text in ("Held-out sentences", "Combinations never seen", "exact", "BLEU", "nrefs:1|", "</s>"):
        assert text in done.out
    assert str(tmp_path / "demo" / "report.html") in done.out
    again = transduce("demo", "--run", tmp_path / "demo", "--updates", "4", *options)
    assert (again.code, again.out) == (0, done.out)
