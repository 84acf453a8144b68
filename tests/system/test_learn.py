"""Training and search together learn to copy and to reverse strings."""

from __future__ import annotations

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
STAR = {"kind": "star", "residual": "pre", "n_encoder_layers": 1, "n_decoder_layers": 1}
SSRU = {"residual": "pre", "n_encoder_layers": 1, "n_decoder_layers": 1, "decoder_self": "ssru"}
TRAINING = {
    "optimizer": "muon", "label_smoothing": 0.0, "ema_decay": 0.98, "lr": 5e-3, "matrix_lr": 0.02,
    "batch_tokens": 512, "micro_batch_tokens": 512, "max_updates": 350, "valid_updates": 175, "warmup_updates": 30,
}  # fmt: skip
RNN = {
    "kind": "rnn", "cell": "gru", "attention": "bahdanau", "d_model": 32, "d_hidden": 64,
    "n_encoder_layers": 1, "n_decoder_layers": 1,
}  # fmt: skip


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("reverse", "options", "training"),
    [
        (False, {"residual": "post"}, {"optimizer": "adam", "max_updates": 350}),
        (True, {"residual": "pre"}, {}),
        (True, {"kind": "convs2s", "d_conv": 64}, {"optimizer": "adam", "max_updates": 180, "valid_updates": 90}),
        (False, STAR, {"max_updates": 250, "valid_updates": 125}),
        (False, SSRU, {"max_updates": 250, "valid_updates": 125}),
        (
            True,
            {
                "residual": "pre",
                "positions": "shaw",
                "encoder_pattern": "strided",
                "decoder_pattern": "fixed",
                "window": 4,
            },
            {"max_updates": 240, "valid_updates": 120},
        ),
        (True, RNN, {"max_updates": 340, "valid_updates": 170}),
    ],
    ids=[
        "as in the paper",
        "reverse, pre-norm",
        "reverse, ConvS2S",
        "star encoder",
        "SSRU",
        "reverse, Shaw and sparse",
        "reverse, RNN",
    ],
)
def test_learns_to_copy_and_to_reverse(
    tmp_path: Path, reverse: bool, options: dict[str, Any], training: dict[str, Any]
) -> None:
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
