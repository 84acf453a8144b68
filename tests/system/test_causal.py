"""Language models from the command line: train on plain text, generate, evaluate, resume."""

import json
import math
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from shared import build_once
from system.commands import assert_refused, sets, succeed, transduce
from system.teams import assert_resumes_exactly
from transduce import Generator
from transduce.config.decoding import DecodingOptions
from transduce.demo.corpus import demo_pairs
from transduce.metrics_log import MetricsFile
from transduce.runs.folder import RunFolder

LINES = [pair.src for pair in demo_pairs("train", 24, seed=5)]
POEM = "".join(f"{line}\n" for line in LINES)
SMALL = (
    "model.d_model=32", "model.d_ff=64", "model.n_heads=2", "model.n_decoder_layers=1", "data.context=16",
    "training.batch_tokens=128", "training.precision=float32", "decoding.max_length=20",
)  # fmt: skip


def small(*more: str) -> list[str]:
    return sets(*SMALL, "training.max_updates=6", *more)


@pytest.fixture(scope="module")
def text(shared: Path) -> Path:
    path = shared / "poem" / "poem.txt"
    return build_once(path, lambda path: path.write_text(POEM, encoding="utf-8", newline="\n"))


@pytest.fixture(scope="module")
def run(text: Path) -> Path:
    """A run that has memorized the poem."""

    def train(folder: Path) -> None:
        learning = ("training.max_updates=300", "model.d_model=64", "model.n_decoder_layers=2", "data.context=32")
        more = ("training.batch_tokens=384", "training.lr=0.01", "training.matrix_lr=0.02", "model.dropout=0.0")
        given = ["--text", text, "--valid-text", text, "--test-text", text]
        says = ("bytes of text to train on", "tokenizer.exact", "model.positions", "bits per byte", "txt: perplexity")
        succeed("train", *given, "--run", folder, *small(*learning, *more), says=says)

    return build_once(text.parent / "run", train)


def test_training_memorizes_a_short_text(run: Path) -> None:
    (found,) = Generator.load(run).generate([POEM[:20]], DecodingOptions(max_length=80, sample=True, temperature=0))
    assert f"{found.prompt}{found.text}" == POEM[:100]


def test_run_folder_contains_scores_report_and_card(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert {"text_scores.json", "samples.json", "data.json", "report.html", "README.md", "model.safetensors"} <= names
    assert not {"tokens", "scores.json", "attention.json"} & names
    settings = RunFolder.open(run).settings
    assert (settings.task, settings.model.kind, settings.training.label_smoothing) == ("causal", "gpt", 0.0)
    report, card = (run / "report.html").read_text("utf-8"), (run / "README.md").read_text("utf-8")
    for part in ("bits per byte", "nats per token", "poem.txt", "Texts", LINES[0].split()[0]):
        assert part in report
    for part in ("transduce generate", "Generator.load", "continues text", "sees 32 tokens"):
        assert part in card
    assert "label-smoothed" not in report and "translat" not in card.lower()
    data = json.loads((run / "data.json").read_text())
    assert [found["name"] for found in data["sets"]] == ["train", "valid", "poem.txt"]
    assert data["sets"][0] == data["sets"][1] | {"name": "train"} and data["sets"][0]["bytes"] == len(POEM)
    last = [event for event in MetricsFile(run / "metrics.jsonl").read() if event["event"] == "validation"][-1]
    assert last["bits_per_byte"] == pytest.approx(last["nll"] * data["sets"][1]["tokens"] / math.log(2) / len(POEM))
    scores = json.loads((run / "text_scores.json").read_text())["sets"]
    assert scores[0]["nll"] == pytest.approx(last["nll"], rel=1e-3)


def test_evaluate_agrees_with_the_scores_of_the_run(run: Path, text: Path) -> None:
    done = transduce("evaluate", run, "--text", text)
    assert done.code == 0 and "bits per byte" in done.out and f"{len(POEM):,} bytes" in done.out
    scores = json.loads(transduce("evaluate", run, "--text", text, "--json").out)
    known = json.loads((run / "text_scores.json").read_text())["sets"][1]
    assert {key: pytest.approx(value, rel=1e-4) for key, value in scores.items()} == {
        key: value for key, value in known.items() if key != "name"
    }
    closer = json.loads(transduce("evaluate", run, "--text", text, "--json", "--stride", 8).out)
    assert closer["nll"] < scores["nll"] and closer["tokens"] == scores["tokens"]


def test_generate_from_options_and_stdin(run: Path) -> None:
    greedy = transduce("generate", run, "--prompt", POEM[:9], "--temperature", 0, "--max-length", 30)
    assert (greedy.code, greedy.out) == (0, POEM[:39] + "\n")
    piped = transduce("generate", run, "--temperature", 0, "--max-length", 30, stdin=f"{POEM[:9]}\n")
    assert piped.out == greedy.out

    drawn = ["--temperature", 1.3, "--top-k", 20, "--top-p", 0.95, "--seed", 3, "--max-length", 20]
    done = transduce("generate", run, "-p", "1", "-p", "2", "--samples", 2, "--json", *drawn)
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [one["prompt"] for one in found] == ["1", "1", "2", "2"]
    assert all(one["n_tokens"] <= 20 and one["log_prob"] < 0 for one in found)
    again = transduce("generate", run, "-p", "1", "-p", "2", "--samples", 2, *drawn)
    assert again.out.split("---\n") == [f"{one['prompt']}{one['text']}\n" for one in found]
    assert transduce("generate", run, "-p", "1", "--seed", 4, *drawn[:-4], "--max-length", 20).out != again.out


def test_prompts_beyond_the_context_and_bad_options_are_refused(run: Path) -> None:
    long = "x" * 33
    assert_refused(transduce("generate", run, "-p", long), "33 tokens", "is 32", "--cut-prompt")
    assert transduce("generate", run, "-p", long, "--cut-prompt", "--max-length", 3).code == 0
    assert_refused(transduce("evaluate", run, "--text", run / "report.html", "--stride", 33), "stride", "32")


def test_commands_and_options_of_other_tasks_are_refused(run: Path, text: Path) -> None:
    for command in (
        ["translate", run, text],
        ["score", run, "--src", text, "--tgt", text],
        ["evaluate", run, "--src", text, "--ref", text],
    ):
        assert_refused(transduce(*command), "task 'causal'")
    assert_refused(transduce("evaluate", run, "--src", text, "--ref", text), "evaluate it with --text")
    useless = ["--beam", 7, "--hyp", text, "--tokenize", "zh"]
    assert_refused(transduce("evaluate", run, "--text", text, *useless), "--beam, --hyp, --tokenize: no effect")
    assert_refused(transduce("evaluate", run), "a run of task 'causal' is evaluated with --text")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["model.positions=learned", "model.max_positions=15"], ["data.context = 16", "max_positions = 15"]),
        (["training.batch_tokens=15"], ["batch_tokens = 15", "data.context = 16"]),
        (["model.kind=transformer"], ["transformer", "causal", "gpt"]),
        (["tokenizer.normalization=nfkc"], ["nfkc"]),
        (["data.demo=100"], ["data.demo"]),
    ],
    ids=lambda values: values[0],
)
def test_settings_that_do_not_fit_the_task_are_refused(
    text: Path, tmp_path: Path, settings: list[str], parts: list[str]
) -> None:
    folder = tmp_path / "run"
    done = transduce("train", "--text", text, "--run", folder, "--quiet", *small(*settings))
    assert_refused(done, *parts)
    assert not folder.exists()


def test_unusable_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one line\n")
    asked = ["train", "--text", tmp_path / "a.txt", "--run", tmp_path / "run", "--quiet", *small()]
    assert_refused(transduce(*asked), "too little text", "data.valid")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, text: Path, processes: ForkServerContext) -> None:
    """After SIGKILL at the second checkpoint. Dropout and batches continue exactly."""
    more = small("model.dropout=0.2", "training.max_updates=30", "training.valid_updates=10", "training.device=cpu")
    assert_resumes_exactly(processes, tmp_path, ["train", "--text", text, "--quiet", *more], ("prune", 2))
