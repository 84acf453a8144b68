"""The chunked loss compared with the oracle: value, gradients, sums and counts, for any split of the batch."""

import os
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attentions import attention_maps
from oracle import numpy_transformer as oracle
from transduce.config.architectures import TransformerSettings
from transduce.data.batch import collate
from transduce.data.store import Example
from transduce.kernels.calls import precisions
from transduce.kernels.vocabulary import LibraryTable
from transduce.models.transformer import Transformer
from transduce.nn import loss as module
from transduce.nn.loss import consistency_loss, label_smoothed_loss
from transduce.training import loss as training_loss
from transduce.training.loss import alignment_loss

ROUNDING = 1e-5  # float32, relative to the largest entry


def problem(n_rows: int = 3, n_steps: int = 5, vocab: int = 11, width: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    """hidden, weight, targets: with padding at the end of each row, and at least one target."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_rows, n_steps, width, generator=generator) * 2
    weight = torch.randn(vocab, width, generator=generator)
    targets = torch.randint(1, vocab, (n_rows, n_steps), generator=generator)
    ends = torch.randint(1, n_steps + 1, (n_rows,), generator=generator)
    targets[torch.arange(n_steps) >= ends[:, None]] = 0
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def loss_by(
    kernels: str, hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, smoothing: float = 0.1
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss by the library ("auto") or by PyTorch."""
    if kernels == "torch":
        return label_smoothed_loss(hidden, weight, targets, bias=bias, smoothing=smoothing)
    table = LibraryTable(*weight.shape)
    table._parameters["weight"] = weight  # type: ignore[assignment]
    return table.loss(hidden, targets, bias=bias, smoothing=smoothing)


def expected(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> tuple[float, float, Tensor, Tensor]:
    """The oracle's loss, nll, and gradients of hidden and weight."""
    h, w, real = hidden.detach().double(), weight.detach().double(), targets != 0
    logits, gold = (h[real] @ w.T).numpy(), targets[real].numpy()
    of_logits = torch.from_numpy(oracle.label_smoothed_gradient(logits, gold, smoothing))
    of_hidden = torch.zeros_like(h)
    of_hidden[real] = of_logits @ w
    return *oracle.label_smoothed(logits, gold, smoothing), of_hidden, of_logits.T @ h[real]


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = ROUNDING) -> None:
    largest = max(theirs.abs().max().item(), 0.1)  # p - 1 of a certain prediction has the rounding of 1
    np.testing.assert_allclose(ours.double().numpy(), theirs.numpy(), rtol=0, atol=tolerance * largest)


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    n_rows=st.integers(1, 4),
    n_steps=st.integers(1, 6),
    vocab=st.integers(2, 40),
    smoothing=st.sampled_from([0.0, None, 0.5, 0.9]),
    scale=st.sampled_from([1e-3, 1.0, 100.0, 1000.0]),
    rows=st.sampled_from([1, 2, 3, 100]),
    seed=st.integers(0, 10_000),
)
def test_value_and_gradients(
    n_rows: int, n_steps: int, vocab: int, smoothing: float | None, scale: float, rows: int, seed: int
) -> None:
    """With chunks of any size. If the gold token's probability underflows, the loss is the difference of the logits."""
    hidden, weight, targets = problem(n_rows, n_steps, vocab, seed=seed)
    hidden = (hidden.detach() * scale).requires_grad_()
    given = {} if smoothing is None else {"smoothing": smoothing}
    smoothing = 0.1 if smoothing is None else smoothing  # the paper's is the default
    with mock.patch.object(module, "_LOGITS_AT_ONCE", rows * vocab):
        loss, nll, count = label_smoothed_loss(hidden, weight, targets, **given)
        loss.backward()
    value, nll_value, of_hidden, of_weight = expected(hidden, weight, targets, smoothing)
    assert count.item() == (targets != 0).sum().item()
    assert loss.item() == pytest.approx(value, rel=ROUNDING, abs=1e-4)
    assert nll.item() == pytest.approx(nll_value, rel=ROUNDING, abs=1e-4)
    tolerance = ROUNDING * max(10, scale)  # logits are rounded in proportion to their size
    assert_near(hidden.grad, of_hidden, tolerance)
    assert_near(weight.grad, of_weight, tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [2, 100])
def test_a_bias_is_one_more_column(rows: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias on the logits is the weight of an input that is always 1; -10,000 excludes a token from the softmax."""
    hidden, weight, targets = problem()
    bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(1))
    bias[0] = -1e4
    bias.requires_grad_()
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", rows * weight.shape[0])
    loss, nll, _ = label_smoothed_loss(hidden, weight, targets, bias=bias, smoothing=smoothing)
    loss.backward()
    wider = torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1)
    value, nll_value, of_hidden, of_weight = expected(wider, torch.cat([weight, bias[:, None]], 1), targets, smoothing)
    assert loss.item() == pytest.approx(value, rel=ROUNDING)
    assert nll.item() == pytest.approx(nll_value, rel=ROUNDING)
    assert_near(hidden.grad, of_hidden[..., :-1])
    assert_near(weight.grad, of_weight[:, :-1])
    assert_near(bias.grad, of_weight[:, -1])


@pytest.mark.parametrize("cuts", [[1, 1, 1, 1], [2, 2], [3, 1], [4]], ids=str)
def test_sums_and_gradients_do_not_depend_on_the_split_of_the_batch(cuts: list[int]) -> None:
    """The mean over all targets is the sum of sums divided by the sum of counts, not a mean of means."""
    hidden, weight, targets = problem(4, 7)
    parts = [
        label_smoothed_loss(h, weight, t, smoothing=0.1)
        for h, t in zip(hidden.split(cuts), targets.split(cuts), strict=True)
    ]
    total = sum(part[2].item() for part in parts)
    assert total == (targets != 0).sum().item()
    for loss, _, _ in parts:
        (loss / total).backward()
    value, nll_value, of_hidden, of_weight = expected(hidden, weight, targets, 0.1)
    assert sum(part[0].item() for part in parts) == pytest.approx(value, rel=ROUNDING)
    assert sum(part[1].item() for part in parts) == pytest.approx(nll_value, rel=ROUNDING)
    assert_near(hidden.grad, of_hidden / total)
    assert_near(weight.grad, of_weight / total)


def test_a_batch_of_padding_only() -> None:
    hidden, weight, targets = problem()
    loss, nll, count = label_smoothed_loss(hidden, weight, torch.zeros_like(targets), smoothing=0.1)
    loss.backward()
    assert (loss.item(), nll.item(), count.item()) == (0, 0, 0)
    assert not hidden.grad.any() and not weight.grad.any()


def test_only_the_loss_carries_a_gradient() -> None:
    loss, nll, count = label_smoothed_loss(*problem(), smoothing=0.1)
    assert loss.requires_grad and not nll.requires_grad and not count.requires_grad


def test_gradients_are_computed_in_training_only() -> None:
    """One product for the value; two more for the gradients."""
    hidden, weight, targets = problem()
    with FlopCounterMode(display=False) as training:
        label_smoothed_loss(hidden, weight, targets, smoothing=0.0)[0].backward()
    assert training.get_total_flops() == 3 * 2 * targets.numel() * weight.numel()
    with torch.no_grad():
        assert not label_smoothed_loss(hidden, weight, targets, smoothing=0.0)[0].requires_grad


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The setting of `training.kernels`."""
    return str(request.param)


def test_bfloat16_products_stay_near(kernels: str) -> None:
    """2**-8 is bfloat16's rounding; it enters the logits (of size 10 here) and the gradient's products."""
    hidden, weight, targets = problem(8, 16, 50, 32)
    with torch.no_grad():
        weight *= 32**-0.5
    with torch.autocast("cpu", torch.bfloat16):
        loss, nll, _ = loss_by(kernels, hidden, weight, targets)
    loss.backward()
    value, nll_value, of_hidden, of_weight = expected(hidden, weight, targets, 0.1)
    assert loss.dtype == nll.dtype == torch.float32
    assert (loss.item(), nll.item()) == pytest.approx((value, nll_value), rel=2**-8)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert_near(hidden.grad, of_hidden, 2**-6)
    assert_near(weight.grad, of_weight, 2**-6)


PRECISIONS = precisions()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("n_rows", "n_steps", "vocab", "width"),
    [(1, 1, 2, 1), (1, 1, 65, 33), (3, 17, 64, 16), (7, 31, 130, 40), (4, 60, 513, 72), (30, 70, 600, 128)],
)
def test_native_kernels_are_nearer_to_float64_than_pytorch(
    n_rows: int, n_steps: int, vocab: int, width: int, has_bias: bool, smoothing: float, precision: torch.dtype
) -> None:
    hidden, weight, targets = problem(n_rows, n_steps, vocab, width)
    bias = torch.randn(vocab).requires_grad_() if has_bias else None
    given = [hidden, weight] if bias is None else [hidden, weight, bias]
    with torch.no_grad():
        weight *= width**-0.5

    def gradients(dtype: torch.dtype, kernels: str = "torch") -> tuple[list[float], list[Tensor]]:
        inputs = [x.detach().to(dtype if dtype == torch.float64 else x.dtype).requires_grad_() for x in given]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, nll, _ = loss_by(
                kernels, *inputs[:2], targets, bias=None if bias is None else inputs[2], smoothing=smoothing
            )
        (loss * 0.5).backward()
        return [loss.item(), nll.item()], [x.grad.double() for x in inputs if x.grad is not None]

    exact_sums, exact = gradients(torch.float64)
    sums, ours = gradients(precision, "auto")
    _, theirs = gradients(precision)
    rounding = 2**-7 if precision == torch.bfloat16 else 2**-18
    assert sums == pytest.approx(exact_sums, rel=rounding)
    assert len(ours) == len(theirs) == len(given)
    for one, other, best in zip(ours, theirs, exact, strict=True):
        error, of_torch = ((x - best).norm() for x in (one, other))
        assert error <= max(of_torch, rounding / 4 * best.norm())


@pytest.mark.parametrize("vocab_size", [700, 9000])  # chunks of rows for one thread, and for several
@pytest.mark.parametrize("precision", PRECISIONS)
def test_native_kernels_give_the_same_bits_with_any_number_of_threads(precision: torch.dtype, vocab_size: int) -> None:
    found, n_before = [], torch.get_num_threads()
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        hidden, weight, targets = problem(20, 60, vocab_size, 48)
        with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            loss, nll, _ = loss_by("auto", hidden, weight, targets)
        loss.backward()
        found.append((loss.item(), nll.item(), hidden.grad, weight.grad))
    torch.set_num_threads(n_before)
    for loss, nll, of_hidden, of_weight in found[1:]:
        assert (loss, nll) == found[0][:2]
        assert torch.equal(of_hidden, found[0][2]) and torch.equal(of_weight, found[0][3])


@pytest.mark.skipif(not PRECISIONS, reason="this CPU has no kernels of training")
def test_native_kernels_in_a_fork() -> None:
    """The child starts its threads itself. PyTorch's do not survive a fork, so all other work is small."""

    def norm() -> float:
        hidden, weight, targets = problem(20, 30, 700, 40)
        loss_by("auto", hidden, weight, targets)[0].backward()
        return float(weight.grad.norm())

    n_before = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = norm()
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, f"{norm()!r}".encode())
        os._exit(0)
    torch.set_num_threads(n_before)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert float(pipe.read()) == expected
    assert os.waitpid(child, 0)[1] == 0


def test_infinities_are_not_hidden(kernels: str) -> None:
    hidden, weight, targets = problem()
    with torch.no_grad():
        hidden[0, 0, 0] = float("inf")
    with torch.autocast("cpu", torch.bfloat16):
        loss, nll, _ = loss_by(kernels, hidden, weight, targets)
    assert not loss.isfinite() and not nll.isfinite()
    loss, nll, _ = loss_by(kernels, hidden, weight, targets)
    assert not loss.isfinite() and not nll.isfinite()


def test_alignment_loss_and_its_gradient_by_definition() -> None:
    """-sum_ts G log softmax(scores), whose gradient is rows * (softmax - G), in float64 NumPy."""
    draw = np.random.default_rng(1)
    scores = draw.normal(size=(2, 4, 5)) * 3
    links = [(0, 1, 0), (0, 1, 2), (0, 3, 4), (1, 0, 1), (1, 2, 0), (1, 2, 1), (1, 2, 4)]
    gold = np.zeros_like(scores)
    for place in links:
        gold[place] = 1
    rows = gold.sum(-1, keepdims=True)
    gold /= np.maximum(rows, 1)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    given = torch.tensor(scores, requires_grad=True)
    loss = alignment_loss(given.softmax(-1), torch.tensor(links))
    loss.backward()
    assert loss.item() == pytest.approx(-(gold * np.log(p)).sum(), rel=1e-6)
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), np.where(rows > 0, p - gold, 0), atol=1e-7)
    assert alignment_loss(given.softmax(-1), torch.zeros((0, 3), dtype=torch.long)).item() == 0


def test_guided_loss_is_that_of_the_tokens_and_of_one_recorded_head() -> None:
    settings = TransformerSettings(
        d_model=16, d_ff=16, n_heads=4, n_kv_heads=2, n_encoder_layers=1, n_decoder_layers=3, dropout=0.0
    )
    torch.manual_seed(1)
    model = Transformer(settings, n_src=12, n_tgt=12)
    links = [np.array([[0, 0], [1, 1], [3, 2]]), np.array([[0, 0]])]
    examples = [Example([5, 6, 7], [8, 9, 10], links[0]), Example([5], [6, 7], links[1])]
    batch = collate(examples)
    plain, nll, _ = training_loss.predict_tokens(model, batch, smoothing=0.1)
    guided, same_nll, _ = training_loss.predict_tokens_and_links(settings, weight=0.5)(model, batch, smoothing=0.1)
    assert torch.equal(nll, same_nll)
    expected = 0.0
    for one in examples:
        alone = collate([one])
        maps = attention_maps(model, alone.src, alone.tgt_in)["cross"]
        assert one.links is not None
        expected -= sum(np.log(maps[1, 0, tgt + 1, src]) for src, tgt in one.links)  # the step that reads the token
    assert (guided - plain).item() == pytest.approx(0.5 * expected, rel=1e-4)
    (guided - plain).backward()
    of_query = model.decoder.blocks[1].cross_attention.query.weight.grad.unflatten(0, (4, 4))
    assert of_query[0].abs().max() > 1e-6 and of_query[1:].abs().max() < 1e-7
    without = collate([Example(one.src, one.tgt) for one in examples])
    criterion = training_loss.predict_tokens_and_links(settings, weight=0.5)
    assert torch.equal(criterion(model, without, smoothing=0.1)[0], plain)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rows", [2, 100])
def test_the_consistency_loss_and_its_gradients(symmetric: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of KL(p || q) is p (log p - log q - KL) for the logits of p, and q - p for those of q."""
    first, weight, targets = problem()
    second = torch.randn(first.shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", 2 * rows * weight.shape[0])
    strength, real = 1.7, targets != 0
    loss, nll = consistency_loss(
        first,
        second,
        targets,
        logits=lambda rows: rows @ weight.T,
        vocab_size=len(weight),
        strength=strength,
        symmetric=symmetric,
    )
    loss.backward()

    w, gold = weight.detach().double().numpy(), targets[real].numpy()
    hidden = [x.detach()[real].double().numpy() for x in (first, second)]
    logits = [x @ w.T for x in hidden]
    value = nll_value = 0.0
    of_logits = [np.zeros_like(logits[0]), np.zeros_like(logits[0])]
    sides = [(0, 1), (1, 0)] if symmetric else [(0, 1)]
    for p, q in sides:
        smoothed, own_nll = oracle.label_smoothed(logits[p], gold, 0.1)
        log_p, log_q = log_softmax(logits[p]), log_softmax(logits[q])
        each = np.exp(log_p) * (log_p - log_q)
        value += (smoothed + strength * each.sum()) / len(sides)
        nll_value += own_nll / len(sides)
        of_p = oracle.label_smoothed_gradient(logits[p], gold, 0.1)
        of_logits[p] += (of_p + strength * (each - np.exp(log_p) * each.sum(-1, keepdims=True))) / len(sides)
        of_logits[q] += strength * (np.exp(log_q) - np.exp(log_p)) / len(sides)
    assert loss.item() == pytest.approx(value, rel=ROUNDING)
    assert nll.item() == pytest.approx(nll_value, rel=ROUNDING)
    for ours, theirs in zip((first, second), of_logits, strict=True):
        assert_near(ours.grad[real], torch.from_numpy(theirs @ w))
        assert not ours.grad[~real].any()
    assert_near(weight.grad, torch.from_numpy(sum(g.T @ h for g, h in zip(of_logits, hidden, strict=True))))
