"""Transformer-XL: it learns what needs a memory, and the commands of language models work with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from kills import events
from shared import build_once
from system.commands import assert_refused, succeed, transduce
from system.test_causal import LINES, POEM, small
from transduce import Generator
from transduce.config.architectures import model_settings
from transduce.config.decoding import DecodingOptions
from transduce.data.store import TextStore
from transduce.models.registry import build_model
from transduce.runs.folder import RunFolder
from transduce.training.feed import DataPosition, StreamFeeder
from transduce.training.loss import predict_tokens_with_carry
from transduce.training.step import Updater

pytestmark = pytest.mark.usefixtures("unchecked")
VERSE = f"{POEM[:60]}\n" * 8
CPU = torch.device("cpu")
VOCAB, LENGTH, SEGMENT = 12, 4, 5
XL = ("model.kind=transformer-xl", "model.memory_length=24")


def strings(n: int, *, seed: int, reverse: bool) -> TextStore:
    """Random strings, each followed by its copy or mirror image: about one segment for each half."""
    drawn = np.random.default_rng(seed).integers(6, VOCAB, size=(n, LENGTH))
    units = [np.concatenate([[4], one, [5], one[::-1] if reverse else one]) for one in drawn]
    return TextStore(np.concatenate(units).astype(np.uint16), {"documents": 1, "bytes": 1})


def accuracy(*, reverse: bool, memory: int, updates: int) -> float:
    """The fraction of second halves that a trained model predicts."""
    torch.manual_seed(1)
    settings = model_settings(
        kind="transformer-xl", d_model=32, d_ff=64, n_heads=4, n_decoder_layers=2, dropout=0.0, residual="pre",
        segment_length=SEGMENT, memory_length=memory,
    )  # fmt: skip
    model: Any = build_model(settings, n_src=VOCAB, n_tgt=VOCAB)
    asked = toys.settings(batch_tokens=64 * SEGMENT, optimizer="muon", lr=5e-3, matrix_lr=0.04, label_smoothing=0.0)
    updater = Updater(model, asked.training, device=CPU, precision="float32", criterion=predict_tokens_with_carry)
    text = strings(4000, seed=1, reverse=reverse)
    data, carry = StreamFeeder(text, asked.training, device=CPU, context=SEGMENT), ()
    for i, feed in zip(range(updates), data.feeds(DataPosition()), strict=False):
        before = () if feed.position.index == 0 else carry
        carry = updater.update(
            feed.batches, min(1.0, 2 - 2 * i / updates), n_targets=feed.n_targets, carry=before
        ).carry
    ids = torch.from_numpy(strings(50, seed=2, reverse=reverse).ids.astype(np.int64))[None]
    with torch.no_grad():
        best = torch.cat([model.logits(hidden).argmax(-1) for hidden in model.eval().read(ids)], 1)[0, :-1]
    is_second = torch.arange(1, ids.shape[1]) % (2 * LENGTH + 2) >= LENGTH + 2
    return float((best == ids[0, 1:])[is_second].float().mean())


@pytest.mark.parametrize(
    ("reverse", "updates"),
    [(False, 90), pytest.param(True, 320, marks=pytest.mark.slow)],
    ids=["copy", "reverse"],
)
def test_learns_to_copy_and_to_reverse_from_the_memory(reverse: bool, updates: int) -> None:
    assert accuracy(reverse=reverse, memory=SEGMENT + 3, updates=updates) > 0.9


def test_without_a_memory_the_earlier_segment_is_unknown() -> None:
    assert accuracy(reverse=False, memory=0, updates=40) < 0.35


@pytest.fixture(scope="module")
def text(shared: Path) -> Path:
    path = shared / "verse" / "poem.txt"
    return build_once(path, lambda path: path.write_text(VERSE, encoding="utf-8", newline="\n"))


@pytest.fixture(scope="module")
def run(text: Path) -> Path:
    """A run that has memorized a verse, in two streams and segments of 16 characters."""

    def train(folder: Path) -> None:
        learning = (
            *("training.max_updates=120", "model.d_model=64", "model.n_decoder_layers=2", "training.batch_tokens=32"),
            *("training.lr=0.01", "training.matrix_lr=0.02", "model.dropout=0.0", "model.eval_memory_length=24"),
            "training.precision=float32",  # as the evaluation, with which the validation is compared
        )
        done = succeed("train", "--text", text, "--valid-text", text, "--run", folder, *small(*XL, *learning))
        assert "model.segment_length" in done.err, done.err
        assert {event["padding"] for event in events(folder, "update")} == {0.0}

    return build_once(text.parent / "run", train)


def test_generation_continues_prompts_and_texts_of_any_length(run: Path) -> None:
    generator = Generator.load(run)
    options = DecodingOptions(max_length=100, sample=True, temperature=0)
    prompts = [VERSE[:40], VERSE[:90], VERSE[:1]]
    together = generator.generate(prompts, options)
    assert [f"{one.prompt}{one.text}" for one in together[:2]] == [VERSE[:140], VERSE[:190]]
    assert together == [generator.generate([prompt], options)[0] for prompt in prompts], "alone as in a batch"
    assert "transformer-xl" in generator.choice.slow_because or "librar" in generator.choice.slow_because


def test_evaluation_carries_the_memory_over_the_text(run: Path, text: Path) -> None:
    command = ["evaluate", run, "--text", text, "--json", "--memory"]
    scores = {n: json.loads(transduce(*command, n).out) for n in (0, 16, 24)}
    assert scores[0]["nll"] > 2 * scores[16]["nll"], "it has learned to use the memory"
    saved = json.loads((run / "text_scores.json").read_text())["sets"][0]
    assert saved["memory"] == 24 and saved["nll"] == pytest.approx(scores[24]["nll"], rel=1e-5)
    assert {one["tokens"] for one in scores.values()} == {len(VERSE) + 1}
    validation = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = [event for event in validation if event["event"] == "validation" and event["best"]][-1]  # the saved weights
    assert best["nll"] == pytest.approx(scores[24]["nll"], rel=1e-4), "validation has the same memory"
    card = (run / "README.md").read_text("utf-8")
    assert "sees 16 tokens at once, and the last 24" in card


def test_a_score_is_that_of_generation(run: Path) -> None:
    """One text alone, the same in a batch with longer and shorter ones, token by token."""
    generator = Generator.load(run)
    texts = [VERSE[:50], "", VERSE[3:200], "a"]
    together = generator.score(texts)
    assert together == [generator.score([one])[0] for one in texts]
    assert [one.n_tokens for one in together] == [len(one) + 1 for one in texts]


def test_a_fine_tuned_run_keeps_the_architecture(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{line}\n" for line in LINES[::-1]), encoding="utf-8")
    updates = ["--set", "training.max_updates=2", "--set", "model.memory_length=8", "--set", "training.device=cpu"]
    updates += ["--set", "model.kind=transformer-xl"]
    succeed("train", "--from", run, "--text", other, "--run", tmp_path / "tuned", *updates)
    model: Any = RunFolder.open(tmp_path / "tuned").settings.model
    assert (model.kind, model.memory_length, model.segment_length, model.d_model) == ("transformer-xl", 8, 16, 64)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["model.segment_length=8"], ["segment_length = 8", "data.context = 16"]),
        (["data.separate_documents=true"], ["data.separate_documents"]),
        (["model.feed_forward=conv"], ["model.feed_forward = 'conv'", "plain, gated"]),
        (["model.positions=rotary"], ["positions"]),
    ],
    ids=lambda values: values[0],
)
def test_settings_that_do_not_fit_are_refused(
    text: Path, tmp_path: Path, settings: list[str], parts: list[str]
) -> None:
    done = transduce("train", "--text", text, "--run", tmp_path / "run", "--quiet", *small(*XL, *settings))
    assert_refused(done, *parts)


def test_options_that_do_not_fit_are_refused(run: Path, gpt: Path, text: Path, tmp_path: Path) -> None:
    assert_refused(transduce("evaluate", run, "--text", text, "--stride", 4), "stride = 4", "memory")
    assert_refused(transduce("evaluate", run, "--text", text, "--batch-tokens", 4), "batch_tokens = 4", "memory")
    assert_refused(transduce("export", run, tmp_path / "out", "--to", "huggingface"), "huggingface")
    assert_refused(transduce("generate", gpt, "-p", "a", "--memory", 4), "memory = 4", "gpt")
