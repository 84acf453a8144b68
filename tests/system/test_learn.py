"""Training and search together learn to copy and to reverse strings."""

from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from transduce.config.decoding import DecodingOptions
from transduce.data.batch import pad_sources
from transduce.decoding.search import beam_search
from transduce.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("unchecked")
VOCAB_SIZE = 16
STRINGS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "longest": 6}
MODEL = {"d_model": 64, "d_ff": 128, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0}
SMALL = {"residual": "pre", "n_encoder_layers": 1, "n_decoder_layers": 1}
SPARSE = {
    "residual": "pre", "positions": "shaw", "encoder_pattern": "strided", "decoder_pattern": "fixed", "window": 4,
}  # fmt: skip
SHORT: dict[str, Any] = {"max_updates": 250, "valid_updates": 50, "average_n": 2}
TRAINING = {
    "optimizer": "muon", "label_smoothing": 0.0, "ema_decay": 0.98, "lr": 5e-3, "matrix_lr": 0.02,
    "batch_tokens": 512, "micro_batch_tokens": 512, "max_updates": 350, "valid_updates": 175, "warmup_updates": 30,
}  # fmt: skip
RNN = {
    "kind": "rnn", "cell": "gru", "attention": "bahdanau", "d_model": 32, "d_hidden": 64,
    "n_encoder_layers": 1, "n_decoder_layers": 1,
}  # fmt: skip


def limits(updates: int) -> dict[str, Any]:
    return {"max_updates": updates, "valid_updates": updates // 2}


SIMCUT = {"kind": "simcut", "from": 0.4}
CASES: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {  # whether to reverse, the model, the training
    "as in the paper": (False, {"residual": "post"}, {"optimizer": "adam"}),
    "reverse, pre-norm": (True, {"residual": "pre"}, {}),
    "reverse, ConvS2S": (True, {"kind": "convs2s", "d_conv": 64}, limits(180) | {"optimizer": "adam"}),
    "star encoder": (False, SMALL | {"kind": "star"}, limits(250)),
    "SSRU": (False, SMALL | {"decoder_self": "ssru"}, limits(250)),
    "reverse, Shaw and sparse": (True, SPARSE, limits(240)),
    "reverse, RNN": (True, RNN, limits(340)),
    "SimCut and word dropout": (False, SMALL, {**SHORT, "consistency": SIMCUT, "word_dropout": 0.02}),
    "R-Drop, mean of the best": (
        False, SMALL | {"dropout": 0.1}, {**SHORT, "consistency": {"kind": "rdrop"}, "average": "best"},
    ),
}  # fmt: skip
SLOW = ("reverse, pre-norm", "star encoder", "reverse, Shaw and sparse")


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_learns_to_copy_and_to_reverse(tmp_path: Path, case: str) -> None:
    reverse, options, training = CASES[case]
    train_on = toys.pairs(8000, seed=1, reverse=reverse, **STRINGS)
    seen = {tuple(train_on[i][0].tolist()) for i in range(len(train_on))}
    asked = toys.settings(model={**MODEL, **options}, **{**TRAINING, **training})
    validate_on = toys.pairs(100, seed=2, reverse=reverse, **STRINGS)
    model, _ = toys.run(tmp_path / "run", asked, train_on=train_on, validate_on=validate_on, vocab_size=VOCAB_SIZE)
    model.load_state_dict(RunFolder.open(tmp_path / "run", model=False).load_model())
    model.eval()

    fresh = toys.pairs(400, seed=3, **STRINGS)
    sources = [ids for i in range(400) if tuple(ids := fresh[i][0].tolist()) not in seen][:200]
    assert len(sources) == 200, "held-out strings must be new"
    for beam in (1, 4):
        found = beam_search(model, pad_sources(sources), DecodingOptions(beam=beam), max_length=20)
        right = [ids[::-1] if reverse else ids for ids in sources]
        wrong = [(s, best.ids) for s, r, (best, *_) in zip(sources, right, found, strict=True) if list(best.ids) != r]
        # 0 to 5 with other seeds and instruction sets, which round differently; 200 before the training.
        assert len(wrong) <= 20, wrong
