"""State that flows from one batch to the next: an RNN and Transformer-XL's memory, trained by the real loop."""

import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import toys
from transduce.config.architectures import model_settings
from transduce.data.store import TextStore
from transduce.logging import Log
from transduce.models.registry import build_model
from transduce.nn.embedding import TokenTable
from transduce.runs.checkpoints import Checkpoints
from transduce.runs.folder import RunFolder
from transduce.training.feed import DataPosition, StreamFeeder
from transduce.training.loop import Trainer
from transduce.training.loss import Carry, predict_tokens_with_carry
from transduce.training.step import Updater
from transduce.training.validate import Validator

VOCAB, CONTEXT = 12, 8
CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "batch_tokens": 4 * CONTEXT, "micro_batch_tokens": 2 * CONTEXT, "max_updates": 30, "valid_updates": 10,
    "label_smoothing": 0.0, "average": "none",
}  # fmt: skip


class RecurrentLM(nn.Module):
    """A GRU language model. Its carry is the hidden state [B, D]."""

    def __init__(self, d_model: int = 16) -> None:
        super().__init__()
        self.embedding = self.output_embedding = TokenTable(VOCAB, d_model)
        self.gru = nn.GRU(d_model, d_model, batch_first=True)
        self.output_weight, self.output_bias = self.embedding.weight, None

    def forward(self, ids: Tensor, *, carry: Carry = ()) -> tuple[Tensor, Carry]:
        hidden, last = self.gru(self.embedding(ids), carry[0][None] if carry else None)
        return hidden, (last[0],)


def memory_lm() -> nn.Module:
    """A Transformer-XL, with dropout. Its carry is the memory of each layer [B, M, D]."""
    settings = model_settings(
        kind="transformer-xl", d_model=16, d_ff=32, n_heads=2, n_decoder_layers=2, dropout=0.1,
        segment_length=CONTEXT, memory_length=2 * CONTEXT,
    )  # fmt: skip
    return build_model(settings, n_src=VOCAB, n_tgt=VOCAB)


def periodic(n: int, *, seed: int) -> TextStore:
    """A periodic text with noise."""
    draw = np.random.default_rng(seed)
    ids = 4 + (np.arange(n) // 3 + (draw.random(n) < 0.1)) % (VOCAB - 4)
    return TextStore(ids.astype(np.uint16), {"documents": 1, "bytes": n})


def feeder(text: TextStore) -> StreamFeeder:
    return StreamFeeder(text, toys.settings(**OPTIONS).training, device=CPU, context=CONTEXT)


def run(path: Path, kind: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, float]]:
    asked = toys.settings(**OPTIONS)
    torch.manual_seed(3)
    model = kind()
    with RunFolder.create(path, asked, "") as folder:
        training = asked.training
        updater = Updater(model, training, device=CPU, precision="float32", criterion=predict_tokens_with_carry)
        held_out = feeder(periodic(300, seed=2)).in_order
        validator = Validator(model, held_out, smoothing=0.0, criterion=predict_tokens_with_carry)
        data = feeder(periodic(500, seed=1))
        trainer = Trainer(model, folder, updater=updater, feeder=data, validator=validator, log=Log(quiet=True))
        result = trainer.run()
    return model, result.scores


def test_streams_are_contiguous_and_cover_the_text() -> None:
    text = periodic(500, seed=1)
    data = feeder(text)
    batches = data.plan(0)
    n_epoch, feeds = len(batches), data.feeds(DataPosition())
    seen = [next(feeds) for _ in range(n_epoch + 1)]
    assert [feed.position.index for feed in seen] == [*range(n_epoch), 0]
    rows = [torch.cat([batch.inputs[0] for batch in feed.batches]) for feed in seen[:-1]]
    streams = torch.cat(rows, dim=1)
    length = (len(text) - 1) // data.n_streams
    assert streams.tolist() == [text.ids[i * length : (i + 1) * length].tolist() for i in range(data.n_streams)]
    cuts = [[int(batch[0]) for batch in data.plan(epoch)] for epoch in range(4)]
    assert len({tuple(cut) for cut in cuts}) > 1 and all(cut[0] == 1 for cut in cuts), "epochs cut at other positions"
    (resumed,) = (next(data.feeds(DataPosition(0, 3))) for _ in range(1))
    assert resumed.position == DataPosition(0, 3) and resumed.indices.tolist() == batches[3].tolist()


def test_streams_of_another_number_of_ranks_read_each_target_once() -> None:
    lengths = []
    for n_ranks in (2, 3):
        data = feeder(periodic(500, seed=1))
        data.n_ranks = n_ranks
        feeds = data.feeds(DataPosition())
        lengths.append(sum(next(feeds).n_tokens for _ in data.plan(0)))
    assert lengths == [499 // 4 * 4, 499 // 3 * 3], "what streams leave over is left out"


def test_resume_with_a_carry_is_bit_identical_after_sigkill_in_mid_epoch(tmp_path: Path) -> None:
    offsets: list[int] = []

    def watched() -> nn.Module:
        def note(_: nn.Module, ids: Any, given: dict[str, Any]) -> None:
            offsets.extend(part.data_ptr() % 64 for part in given["carry"])

        model = memory_lm()
        model.register_forward_pre_hook(note, with_kwargs=True)
        return model

    model, scores = run(tmp_path / "whole", memory_lm)
    assert scores["loss"] < math.log(VOCAB), "it learns"
    assert toys.start_script(__file__, tmp_path / "cut", 24).wait() == -signal.SIGKILL
    checkpoint = Checkpoints(tmp_path / "cut" / "checkpoints").latest()
    assert checkpoint is not None and checkpoint.update == 20
    assert checkpoint.state["training"]["position"]["index"] > 0, "in mid-epoch"
    assert [name for name in checkpoint.tensors() if name.startswith("carry/")] == ["carry/0", "carry/1"]
    resumed, again = run(tmp_path / "cut", watched)
    assert offsets and not any(offsets), "products of few rows depend on the place in memory"
    assert again == scores
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_carry_matters_and_is_reset_at_the_start_of_an_epoch() -> None:
    seen: list[Carry] = []
    torch.manual_seed(1)
    model = RecurrentLM()

    def noted(model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> Any:
        seen.append(carry)
        return predict_tokens_with_carry(model, batch, smoothing=smoothing, carry=carry)

    updater = Updater(model, toys.settings(**OPTIONS).training, device=CPU, precision="float32", criterion=noted)
    data, carry = feeder(periodic(200, seed=1)), ()
    n_epoch = len(data.plan(0))
    feeds = data.feeds(DataPosition())
    for _ in range(n_epoch + 1):
        feed = next(feeds)
        before = () if feed.position.index == 0 else carry
        carry = updater.update(feed.batches, 1.0, n_targets=feed.n_targets, carry=before).carry
        assert [part.shape for part in carry] == [(4, 16)] and not carry[0].requires_grad
    per_update = len(seen) // (n_epoch + 1)
    assert per_update == 2, "micro-batches have the rows of their streams"
    assert seen[0] == seen[1] == () and seen[-1] == ()
    assert all(part[0].shape == (2, 16) for part in seen[2:-2])


def test_validation_with_a_carry_is_one_long_forward() -> None:
    torch.manual_seed(1)
    model, text = RecurrentLM(), periodic(203, seed=5)
    data = feeder(text)
    found = Validator(model, data.in_order, smoothing=0.0, criterion=predict_tokens_with_carry)()
    ids = torch.from_numpy(text.ids.astype(np.int64))
    with torch.no_grad():
        hidden, _ = model(ids[None, :-1])
        expected = nn.functional.cross_entropy(hidden[0] @ model.output_weight.t(), ids[1:])
    assert found["nll"] == pytest.approx(float(expected), rel=1e-6)


def test_models_without_a_carry_save_none(tmp_path: Path) -> None:
    toys.toy_run(tmp_path / "run", toys.settings(max_updates=5, valid_updates=5))
    checkpoint = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert checkpoint is not None and checkpoint.state["carry"] == 0
    assert not any(name.startswith("carry/") for name in checkpoint.tensors())


if __name__ == "__main__":
    toys.kill_at("update", int(sys.argv[2]))
    run(Path(sys.argv[1]), memory_lm)
