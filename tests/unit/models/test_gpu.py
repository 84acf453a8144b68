"""On a GPU, where attention, dropout and the loss have other implementations: the oracle, and a resumed update."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from oracle import numpy_transformer as oracle
from oracle.adapter import numpy_weights, options_of
from oracle.cases import SINGLE, VOCAB, make, pad, sentences, settings
from transduce.config.settings import TrainingSettings
from transduce.data.batch import collate, collate_rows
from transduce.data.store import Example, RowExample
from transduce.models.registry import build_model
from transduce.nn.loss import label_smoothed_loss
from transduce.training import step
from transduce.training.step import Updater

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
FLOAT32 = 2e-5  # of the largest logit


@pytest.fixture(autouse=True)
def _float32_convolutions() -> Iterator[None]:
    """Without TF32, which PyTorch allows for convolutions, though not for matrix products."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE)
def test_forward_and_steps_equal_the_oracle(options: dict[str, Any]) -> None:
    model, chosen = make(**options)
    weights, known = numpy_weights(model.state_dict(), chosen), options_of(chosen)
    srcs, tgts = sentences((5, 1, 12, 3)), sentences((6, 6, 6, 6), seed=1)
    expected = np.stack(
        [oracle.transformer(s.numpy(), t.numpy(), weights, known) for s, t in zip(srcs, tgts, strict=True)]
    )
    model, src, tgt = model.to(GPU), pad(srcs).to(GPU), pad(tgts).to(GPU)
    with torch.no_grad():
        whole = model.logits(model(src, tgt))
        state = model.start(src, capacity=6)
        steps = torch.cat([model.logits(model.advance(part, state)) for part in tgt.split(1, dim=1)], 1)
    for ours in (whole, steps):
        np.testing.assert_allclose(ours.cpu().numpy(), expected, rtol=0, atol=FLOAT32 * np.abs(expected).max())


@pytest.mark.parametrize("pattern", ["local", "strided", "fixed"])
@torch.no_grad()
def test_sparse_patterns_equal_those_of_the_cpu(pattern: str) -> None:
    sizes = {"d_model": 32, "d_ff": 48, "n_heads": 2, "n_decoder_layers": 2, "dropout": 0.0, "window": 16}
    chosen = settings(kind="gpt", decoder_pattern=pattern, **sizes)
    model, ids = build_model(chosen, n_src=VOCAB, n_tgt=VOCAB).eval(), torch.randint(1, VOCAB, (2, 150))
    torch.testing.assert_close(model(ids), model.to(GPU)(ids.to(GPU)).cpu(), rtol=0, atol=1e-4)


def test_a_source_of_padding_only_stays_finite() -> None:
    model, _ = make()
    src, tgt = pad([torch.tensor([3, 4]), torch.tensor([], dtype=torch.long)]).to(GPU), pad(sentences((3, 3))).to(GPU)
    for enabled in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            result = model.to(GPU).logits(model(src, tgt))
        result.float().square().mean().backward()
        assert result.isfinite().all()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_loss_equals_the_oracle(scale: float) -> None:
    hidden, weight = torch.randn(3, 5, 8) * scale, torch.randn(11, 8)
    targets = torch.tensor([[4, 1, 9, 0, 0], [10, 2, 3, 4, 5], [6, 0, 0, 0, 0]])
    real = targets != 0
    logits, gold = (hidden[real].double() @ weight.double().T).numpy(), targets[real].numpy()
    h, w = hidden.to(GPU).requires_grad_(), weight.to(GPU).requires_grad_()
    loss, nll, count = label_smoothed_loss(h, w, targets.to(GPU), smoothing=0.1)
    loss.backward()
    assert count.item() == 9
    assert (loss.item(), nll.item()) == pytest.approx(oracle.label_smoothed(logits, gold, 0.1), rel=1e-5)
    of_logits = torch.from_numpy(oracle.label_smoothed_gradient(logits, gold, 0.1))
    of_hidden = torch.zeros(3, 5, 8, dtype=torch.float64)
    of_hidden[real] = of_logits @ weight.double()
    torch.testing.assert_close(h.grad.cpu().double(), of_hidden, rtol=0, atol=1e-4)
    of_weight = of_logits.T @ hidden[real].double()
    torch.testing.assert_close(w.grad.cpu().double(), of_weight, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("kind", ["transformer", "gpt"])
def test_cuda_graphs_give_the_losses_of_eager_execution(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shapes alternate, with dropout. The learning rate is 0, so that rounding does not accumulate."""
    sizes = [(3, 5, 4), (17, 12, 9), (3, 6, 4), (2, 30, 2)]
    draw = np.random.default_rng(1)

    def ids(n: int) -> list[int]:
        return draw.integers(4, VOCAB, n).tolist()

    pairs = [[Example(src=ids(n_src), tgt=ids(n_tgt)) for _ in range(n)] for n, n_src, n_tgt in sizes * 3]
    rows = [[RowExample(np.array(one.src), np.array(one.src)) for one in batch] for batch in pairs]
    batches = list(map(collate, pairs)) if kind == "transformer" else list(map(collate_rows, rows))
    results = {}
    for n_graphs in (512, 0):
        monkeypatch.setattr(step, "_MAX_GRAPHS", n_graphs)
        torch.manual_seed(1)
        chosen = settings(kind=kind, dropout=0.3) if kind == "gpt" else settings(dropout=0.3)
        model = build_model(chosen, n_src=VOCAB, n_tgt=VOCAB)
        updater = Updater(model, TrainingSettings(optimizer="adam", lr=5e-3), device=GPU, precision="bfloat16")
        updates = [[one.to(GPU) for one in two] for two in product(batches, batches[:2])]
        found = [updater.update(two, 0.0) for two in updates]
        results[n_graphs] = [number for one in found for number in (one.loss_sum, one.grad_norm)]
    assert results[512] == pytest.approx(results[0], rel=1e-2)


def test_running_out_of_memory_ends_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate([Example(src=[5, 6], tgt=[7])] * 4).to(GPU)
    model = build_model(settings(), n_src=VOCAB, n_tgt=VOCAB)
    updater = Updater(model, TrainingSettings(optimizer="adam", lr=5e-3), device=GPU, precision="bfloat16")
    expected = [updater.update([batch], 0.0).loss_sum for _ in range(3)]
    backward, tried = updater._backward, list[int]()

    def fail(batch: Any, *rest: Any, **options: Any) -> Any:
        results = backward(batch, *rest, **options)
        if torch.cuda.is_current_stream_capturing():
            tried.append(batch.n_rows)
            torch.empty(1 << 60, dtype=torch.uint8, device=GPU)  # the allocator's own error
        return results

    larger = collate([Example(src=[5, 6], tgt=[7])] * 5).to(GPU)
    updater.update([larger], 0.0)
    monkeypatch.setattr(updater, "_backward", fail)
    assert [updater.update([larger], 0.0).loss_sum for _ in range(4)] == pytest.approx(
        [1.25 * expected[0]] * 4, rel=1e-2
    )
    assert tried == [5]
    assert updater.graphs is None
    assert updater.too_large is None


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_updater_continues_up_to_rounding(optimizer: str, precision: str) -> None:
    batches = [
        collate([Example(src=[5, 6, n + 4], tgt=[7, n + 4]), Example(src=[8], tgt=[9] * (n + 1))]).to(GPU)
        for n in range(5)
    ]

    def fresh() -> Updater:
        torch.manual_seed(1)
        model = build_model(settings(dropout=0.3), n_src=VOCAB, n_tgt=VOCAB).to(GPU)
        training = TrainingSettings(optimizer=optimizer, lr=5e-3, matrix_lr=1e-2)
        return Updater(model, training, device=GPU, precision=precision)

    updater = fresh()
    for batch in batches[:3]:
        updater.update([batch], 0.5)
    tensors, state = updater.state()
    saved = {name: tensor.cpu().clone() for name, tensor in tensors.items()}  # as they come from a file
    kept = {name: tensor.cpu().clone() for name, tensor in updater.model.state_dict().items()}
    further = [updater.update([batch], 0.5).loss_sum for batch in batches[3:]]
    again = fresh()
    again.model.load_state_dict(kept)
    again.load_state(saved, state, n_updates=3)
    # some GPU kernels sum in no fixed order; another dropout mask or a lost state would change the first digits
    resumed = [again.update([batch], 0.5).loss_sum for batch in batches[3:]]
    assert resumed == pytest.approx(further, rel=1e-4 if precision == "float32" else 1e-2)
