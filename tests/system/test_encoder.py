"""Encoders from the command line: masked language models, classifiers, fine-tuning, resume."""

import json
import random
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from shared import build_once
from system.commands import assert_refused, sets, succeed, transduce
from system.teams import assert_resumes_exactly
from transduce import MaskFiller, TextClassifier
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers

NAMES = {"cat": "milk", "dog": "bones", "bird": "seeds", "horse": "grass"}
MODEL = (
    "model.n_encoder_layers=2", "model.d_model=32", "model.d_ff=64", "model.n_heads=2", "model.positions=rotary",
    "model.dropout=0.0", "model.residual=pre", "tokenizer.kind=bpe", "tokenizer.vocab_size=100",
)  # fmt: skip
CONTEXT = "data.context=32"  # of masked models
NO_PAIRS = "model.next_sentence=false"
TRAINING = ("training.batch_tokens=512", "training.precision=float32", "training.lr=0.01", "training.matrix_lr=0.02")


def documents(n: int, seed: int) -> str:
    """Documents of four sentences in a fixed order, each about one animal."""
    draw = random.Random(seed)
    found = []
    for _ in range(n):
        name, food = draw.choice(list(NAMES.items()))
        found.append(f"the {name} wakes up\nthe {name} wants {food}\nthe {name} eats {food} now\nthe {name} sleeps\n")
    return "\n".join(found)


def sentiments(n: int, seed: int) -> str:
    draw = random.Random(seed)
    lines = []
    for _ in range(n):
        good = draw.random() < 0.5
        word = draw.choice(("good", "fine", "great") if good else ("bad", "poor", "dull"))
        lines.append(
            f"{'pos' if good else 'neg'}\tthe {draw.choice(('film', 'cat', 'dog'))} is {word} {draw.choice('.!')}\n"
        )
    return "".join(lines)


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return build_once(shared / "encoder", write_texts)


def write_texts(path: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "text.txt").write_text(documents(300, 1))
    (path / "valid.txt").write_text(documents(40, 2))
    (path / "train.tsv").write_text(sentiments(400, 1))
    (path / "valid.tsv").write_text(sentiments(60, 2))
    (path / "masked.toml").write_text(
        'task = "masked"\n[data]\ntrain = [{ path = "text.txt" }]\nvalid = [{ path = "valid.txt" }]\n'
        'test = [{ path = "valid.txt" }]\ndocuments = "blank_line"\nwhole_words = true\n[model]\nnext_sentence = true\n'
    )
    (path / "labels.toml").write_text(
        'task = "classification"\n[data]\ntrain = [{ path = "train.tsv" }]\nvalid = [{ path = "valid.tsv" }]\n'
        'test = [{ path = "valid.tsv" }]\n'
    )


@pytest.fixture(scope="module")
def masked(folder: Path) -> Path:
    """A masked run on single lines."""
    lines = ("data.documents=line", NO_PAIRS, "training.max_updates=120", "training.valid_updates=60")

    def train(path: Path) -> None:
        given = sets(*MODEL, CONTEXT, *TRAINING, *lines)
        says = ("masked-token accuracy", "tokenizer.mask", "valid.txt: ")
        done = succeed("train", folder / "masked.toml", "--run", path, *given, says=says)
        assert "next sentences" not in done.err

    return build_once(folder / "bert", train)


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Path:
    given = sets(*MODEL, *TRAINING, "training.max_updates=60", "training.valid_updates=20", "model.pooling=mean")

    def train(path: Path) -> None:
        says = ("400 labelled texts to train on", "labels: neg, pos", "training.stop_by", "accuracy")
        succeed("train", folder / "labels.toml", "--run", path, *given, says=says)

    return build_once(folder / "sst", train)


def test_a_masked_model_learns_masked_words(masked: Path) -> None:
    filler = MaskFiller.load(masked)
    for name, food in NAMES.items():
        (found,) = filler.fill([f"the {name} wants <mask>"], top=3)
        assert found.masks[0][0].text == f"the {name} wants {food}", found
        assert 0.5 < found.masks[0][0].probability <= 1 and len(found.masks[0]) == 3
    scores = json.loads((masked / "masked_scores.json").read_text())["sets"]
    assert {found["name"] for found in scores} == {"valid", "valid.txt"}
    assert all(found["masked_accuracy"] > 0.5 for found in scores), scores
    report, card = (masked / "report.html").read_text(), (masked / "README.md").read_text()
    assert "masked-token accuracy" in report and "transduce fill" in card and "| valid |" in card


@pytest.mark.slow
def test_a_masked_model_learns_next_sentences(folder: Path) -> None:
    given = sets(*MODEL, CONTEXT, *TRAINING, "training.max_updates=300", "training.valid_updates=100")
    succeed("train", folder / "masked.toml", "--run", folder / "pairs", *given, says=["next-sentence accuracy"])
    scores = json.loads((folder / "pairs" / "masked_scores.json").read_text())["sets"]
    assert all(found["next_sentence_accuracy"] > 0.7 for found in scores), scores
    found_ = json.loads(transduce("evaluate", folder / "pairs", "--text", folder / "valid.txt", "--json").out)
    assert found_["next_sentence_accuracy"] == scores[0]["next_sentence_accuracy"]
    tune = ["train", "--from", folder / "pairs", "--run", folder / "tuned", *sets("task=masked"), "--dry-run"]
    succeed(*tune, "--text", folder / "valid.txt", says=["data.documents = blank_line"])  # data.documents is inherited
    (folder / "one.txt").write_text("the cat wakes up\nthe cat wants milk\n")  # one document has no negative pairs
    tune += ["--text", folder / "one.txt", "--valid-text", folder / "valid.txt"]
    done = transduce(*tune)
    assert done.code == 2 and "error: train text has 1 document: model.next_sentence = true" in done.err, done.err
    succeed(*tune, "--set", NO_PAIRS)
    found_ = json.loads(transduce("evaluate", folder / "pairs", "--text", folder / "one.txt", "--json").out)
    assert "next_sentence_accuracy" not in found_ and found_["hidden"] > 0


def test_evaluate_a_masked_run(masked: Path, folder: Path) -> None:
    """The validation text gives the scores of the training; options of other tasks are refused."""
    text = ["evaluate", masked, "--text", folder / "valid.txt"]
    found_ = json.loads(transduce(*text, "--json").out)
    kept = json.loads((masked / "masked_scores.json").read_text())["sets"]
    for name in ("loss", "perplexity", "masked_accuracy"):
        assert found_[name] == pytest.approx(kept[0][name], rel=1e-4), name
    assert "next_sentence_accuracy" not in found_ and 0 < found_["hidden"] < found_["tokens"]
    small = json.loads(transduce(*text, "--json", "--batch-tokens", 40).out)
    assert small["nll"] == pytest.approx(found_["nll"], rel=1e-4) and small["hidden"] == found_["hidden"]
    done = transduce(*text)
    assert done.code == 0 and "masked-token accuracy" in done.out and done.out.count("\n") == 2
    assert_refused(transduce(*text, "--stride", 4), "--stride: no effect for a run of task 'masked'")
    assert_refused(transduce("evaluate", masked, "--labels", folder / "valid.tsv"), "evaluate it with --text")
    (folder / "nothing.txt").write_text("\n")
    assert_refused(transduce("evaluate", masked, "--text", folder / "nothing.txt"), "nothing.txt: no text found")


def test_options_of_other_tasks_are_refused(classifier: Path, folder: Path) -> None:
    others = ("--stride", 4, "--beam", 4, "--batch-tokens", 4, "--cased", "--hyp", "x")
    done = transduce("evaluate", classifier, "--labels", folder / "valid.tsv", *others)
    assert_refused(done, *others[:6:2], "--hyp, --lowercase/--cased", "no effect for a run of task 'classification'")


def test_fill_prints_candidates(masked: Path) -> None:
    done = transduce("fill", masked, "the dog wants <mask>", "--top", "2")
    assert (
        done.code == 0 and len(done.out.splitlines()) == 2 and "bones\tthe dog wants bones" in done.out.splitlines()[0]
    )
    done = transduce("fill", masked, "--json", stdin="the <mask> wants <mask>\nthe cat <mask> milk now\n")
    first, second = map(json.loads, done.out.splitlines())
    assert len(first["masks"]) == 2 and len(first["masks"][0]) == 5 and second["masks"][0][0]["token"] == "eats"
    assert_refused(transduce("fill", masked, "no gap"), "there is no <mask> in 'no gap'")
    assert_refused(transduce("fill", masked, "<mask> " + "the cat " * 40), "context is 32")
    assert_refused(transduce("translate", masked, stdin=""), "task 'masked', not 'translation'", "README.md")


def test_a_classifier_learns_labels(classifier: Path, folder: Path) -> None:
    found = TextClassifier.load(classifier).classify(["the film is great !", "the cat is dull ."])
    assert [one.label for one in found] == ["pos", "neg"] and all(one.probability > 0.7 for one in found)
    assert found[0].probabilities.keys() == {"neg", "pos"} and sum(found[0].probabilities.values()) == pytest.approx(1)
    done = transduce("classify", classifier, stdin="the dog is poor .\nthe dog is fine .\n")
    assert [line.split("\t")[0] for line in done.out.splitlines()] == ["neg", "pos"]
    assert "exceed" not in done.err
    done = transduce("classify", classifier, stdin="a\n" + "the dog is poor . " * 300 + "\n")
    assert len(done.out.splitlines()) == 2 and "1 texts fill or exceed the" in done.err
    done = transduce("classify", classifier, "--json", stdin="a\n\n")
    assert len(done.out.splitlines()) == 2 and "probabilities" in done.out
    done = transduce("evaluate", classifier, "--labels", folder / "valid.tsv", "--json")
    found_ = json.loads(done.out)
    assert found_["n"] == 60 and found_["accuracy"] > 0.95 and found_["labels"] == ["neg", "pos"]
    kept = json.loads((classifier / "label_scores.json").read_text())["sets"]
    assert kept[0]["accuracy"] == found_["accuracy"] and {one["name"] for one in kept} == {"valid", "valid.tsv"}
    card = (classifier / "README.md").read_text()
    assert "`neg`, `pos`" in card and "Matthews" in card and "trained from scratch" in card


def test_a_classifier_is_fine_tuned_from_a_masked_model(masked: Path, folder: Path) -> None:
    given = sets("training.max_updates=8", "training.valid_updates=8", "training.precision=float32")
    run = folder / "fine"
    done = succeed("train", folder / "labels.toml", "--from", masked, "--run", run, *given)
    assert f"starting from {masked}: vocabulary (100 pieces, bpe), model (bert, d_model 32" in done.err
    assert "random: pooler.dense.weight, pooler.dense.bias, labels.weight" in done.err and "adamw" in done.err
    assert "unused: " in done.err and "update 0  epoch 0.0" in done.err
    settings = RunFolder.open(run).settings
    assert (settings.model.d_model, settings.model.positions, settings.model.kind) == (32, "rotary", "bert-classifier")
    assert settings.data.labels == ("neg", "pos") and settings.tokenizer.mask
    ours, theirs = (load_tokenizers(RunFolder.open(path)).tgt for path in (run, masked))
    assert ours.model == theirs.model
    assert "fine-tuned from the weights of `bert`" in (run / "README.md").read_text()
    done = transduce("train", folder / "labels.toml", "--from", masked, "--run", run / "x", *sets("model.d_ff=9"))
    assert_refused(done, "model.d_ff = 9: training.start has 64")
    assert not (run / "x").exists()


def test_a_masked_model_is_fine_tuned_on_plain_text(masked: Path, folder: Path) -> None:
    """The task is that of the start; new pieces follow <mask>, which keeps its id."""
    (folder / "fish.txt").write_text("the fish wants algae\nthe octopus eats 蟹 now\n" * 30, encoding="utf-8")
    given = sets("training.max_updates=4", "training.valid_updates=2", "training.precision=float32")
    text = ["--text", folder / "fish.txt", "--valid-text", folder / "valid.txt"]
    run = folder / "fish"
    succeed("train", *text, "--from", masked, "--run", run, "--extend-vocabulary", 20, *given)
    settings, tokenizer = RunFolder.open(run).settings, load_tokenizers(RunFolder.open(run)).tgt
    assert (settings.task, settings.model.kind) == ("masked", "bert")
    assert tokenizer.pieces([4]) == ["<mask>"] and "蟹" in tokenizer.pieces(range(100, tokenizer.vocab_size))
    assert MaskFiller.load(run).fill(["the <mask> eats 蟹"])[0].masks


@pytest.mark.parametrize("recipe", ["masked", "labels"])
def test_a_resumed_run_ends_with_the_same_weights(
    recipe: str, folder: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    """Masks and batches are functions of the seed and the epoch, so the checkpoint need not store them."""
    given = sets(*MODEL, *TRAINING, "training.valid_updates=10", "training.max_updates=20")
    context = sets(CONTEXT) if recipe == "masked" else []
    command = ["train", folder / f"{recipe}.toml", *given, *context]
    assert_resumes_exactly(processes, tmp_path, command, ("update", 13))


@pytest.mark.parametrize(
    ("recipe", "values", "message"),
    [
        ("masked", ["data.documents=line"], "one sentence has no next sentence"),
        ("masked", ["tokenizer.mask=false"], "task 'masked' needs a piece <mask>"),
        ("masked", ["model.positions=learned", "model.max_positions=16"], "model.max_positions = 16 learned positions"),
        ("masked", ["model.n_segments=1"], "model.n_segments must be 2"),
        ("labels", ["data.labels=['pos', 'pos']"], "at least two, all different"),
        ("labels", ["data.labels=['pos', 'meh']"], "unknown label 'neg'; known: pos, meh"),
    ],
)
def test_settings_that_do_not_fit_the_task_are_refused(
    folder: Path, recipe: str, values: list[str], message: str
) -> None:
    usual = (*MODEL, CONTEXT) if recipe == "masked" else MODEL
    given = [value for value in usual if value.split("=")[0] not in {v.split("=")[0] for v in values}]
    done = transduce("train", folder / f"{recipe}.toml", "--run", folder / "bad", *sets(*given, *values))
    assert_refused(done, message)
    assert not (folder / "bad").exists()
