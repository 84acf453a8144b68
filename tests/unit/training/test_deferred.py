"""Calls of the library that are made later, and calls of whole sub-layers: the same numbers as one after another."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import toys
from native_engines import needs_training_kernels
from oracle.adapter import fitting
from oracle.cases import SINGLE
from transduce.config.settings import TrainingSettings
from transduce.data.batch import MaskedBatch, RowBatch, collate
from transduce.errors import SettingsError
from transduce.models.registry import build_model
from transduce.native import kernels as native
from transduce.native import operators, sublayer
from transduce.native.deferred import Pending, _calls, _of_thread, deferred, taking_gradients
from transduce.nn import sublayer as connections
from transduce.nn.linear import Linear
from transduce.nn.positions import unchanged
from transduce.nn.recording import recorded_heads
from transduce.nn.residual import LayerNorm
from transduce.training.loss import predict_masked_tokens, predict_tokens, predict_tokens_with_carry
from transduce.training.step import PRECISIONS, Updater, autocast

pytestmark = needs_training_kernels

CPU = torch.device("cpu")

Gradients = dict[str, Tensor]


@pytest.fixture(params=[name for name, dtype in PRECISIONS.items() if native.kernels_in_use(dtype) != "torch"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    with autocast(CPU, request.param):
        yield request.param


@pytest.fixture
def n_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each sub-layer that is one call."""
    found: list[int] = []
    apply = sublayer._Sublayer.apply

    def counted(*args: Any) -> Any:
        found.append(1)
        return apply(*args)

    monkeypatch.setattr(sublayer._Sublayer, "apply", counted)
    return found


def translator(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return build_model(fitting(**{"d_model": 32, "n_heads": 4, **options}), n_src=40, n_tgt=40).train()


def gradients(model: nn.Module, batch: Any, how: str, criterion: Any = predict_tokens) -> Gradients:
    """`how`: one call after another; with deferred calls; or with gradients that are taken too."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with nullcontext() if how == "now" else deferred():
        loss = criterion(model, batch, smoothing=0.1)[0]
        if how == "taken":
            with taking_gradients():
                loss.backward()
    if how != "taken":
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(type(grad) is Tensor for grad in found.values())
    return {name: grad.clone() for name, grad in found.items()}


def assert_same(model: nn.Module, batch: Any, criterion: Any = predict_tokens) -> None:
    expected = gradients(model, batch, "now", criterion)
    for how in ("deferred", "taken"):
        found = gradients(model, batch, how, criterion)
        assert expected.keys() == found.keys()
        for name, grad in expected.items():  # tied tables add in another order
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-5, msg=f"{how}: {name}")


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradients_of_all_transformers(name: str, dropout: float, precision: str) -> None:
    assert_same(translator(**{**SINGLE[name], "dropout": dropout}), collate(toys.examples(9)))


def batch_for(kind: str) -> Any:
    ids = torch.randint(4, 40, (3, 11), generator=torch.Generator().manual_seed(2))
    if kind in ("gpt", "transformer-xl"):
        return RowBatch((ids,), ids.roll(1, 1), ids.numel())
    if kind == "bert":
        places = torch.tensor([0, 5, 14, 32])
        return MaskedBatch(ids, ids % 2, places, ids.flatten()[places], torch.tensor([0, 1, 1]), 4 / 3)
    return collate(toys.examples(9))


CRITERIA = {"transformer-xl": predict_tokens_with_carry, "bert": predict_masked_tokens}


@pytest.mark.parametrize("kind", ["gpt", "bert", "transformer-xl", "convs2s", "rnn", "star"])
def test_the_gradients_of_other_models(kind: str, precision: str) -> None:
    assert_same(translator(kind=kind, dropout=0.2), batch_for(kind), CRITERIA.get(kind, predict_tokens))


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({}, 10),
        ({"residual": "pre", "activation": "gelu", "norm": "rms", "n_kv_heads": 2}, 10),
        ({"positions": "alibi"}, 10),
        ({"kind": "gpt"}, 4),
        ({"kind": "bert"}, 4),
        ({"feed_forward": "conv", "kernel_size": 3}, 6),
        ({"projection": "shared"}, 4),
        ({"decoder_self": "ssru"}, 8),
        ({"positions": "rotary"}, 6),
    ],
    ids=str,
)
def test_sublayers_whose_parts_kernels_compute_are_one_call(
    options: dict[str, Any], n: int, n_at_once: list[int]
) -> None:
    kind = options.get("kind", "transformer")
    model = translator(dropout=0.1, **{"n_encoder_layers": 2, "n_decoder_layers": 2, **options})
    gradients(model, batch_for(kind), "taken", CRITERIA.get(kind, predict_tokens))
    assert len(n_at_once) == n


SUBLAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "post": ({}, 10),
    "pre": ({"residual": "pre"}, 10),
    "rms, no biases": ({"norm": "rms", "bias": False}, 10),
    "gelu, attention with dropout": ({"residual": "pre", "activation": "gelu", "attention_dropout": 0.2}, 10),
    "silu, activation with dropout": ({"activation": "silu", "activation_dropout": 0.3}, 10),
    "grouped heads of other widths": ({"n_kv_heads": 2, "d_key": 16}, 10),
    "a matrix of scores' bias": ({"positions": "alibi", "window": 3, "encoder_pattern": "local"}, 8),
}


@pytest.mark.parametrize("name", SUBLAYERS)
def test_one_call_is_its_parts(
    name: str, precision: str, n_at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, with the same random numbers."""
    options, n = SUBLAYERS[name]
    model = translator(**{"n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.1, **options})
    batch = collate(toys.examples(12))
    found, drawn = gradients(model, batch, "taken"), torch.get_rng_state()
    assert len(n_at_once) == n
    monkeypatch.setattr(connections, "_is_plain", lambda _: False)
    expected = gradients(model, batch, "taken")
    assert len(n_at_once) == n and found.keys() == expected.keys()
    assert torch.equal(torch.get_rng_state(), drawn)
    for key, grad in expected.items():
        assert torch.equal(found[key], grad), key


def test_gradients_of_several_batches_are_added() -> None:
    model, batches = translator(dropout=0.1), [collate(toys.examples(5, seed=seed)) for seed in (1, 2)]
    sums = []
    for takes in (False, True):
        model.zero_grad()
        torch.manual_seed(5)
        for batch in batches:
            with deferred(), taking_gradients() if takes else nullcontext():
                predict_tokens(model, batch, smoothing=0.1)[0].backward()
        sums.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
def test_frozen_parameters_have_no_gradient(first: int) -> None:
    """The embeddings too, without which the first block's input has none."""
    model, batch = translator(), collate(toys.examples(6))
    frozen = [name for name, _ in model.named_parameters()][first::3]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    assert_same(model, batch)
    assert not set(gradients(model, batch, "taken")) & set(frozen)


def test_hooks_see_the_numbers() -> None:
    """Of modules, of parameters, and of tensors of the graph, with calls that wait and without."""
    model, batch = translator(dropout=0.1), collate(toys.examples(6))
    seen: list[Tensor] = []
    block = model.encoder.blocks[0]
    weight = block.feed_forward.expand.weight
    block.feed_forward.register_forward_hook(lambda _, __, output: seen.append(output.detach() + 0.0))

    def watch(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(lambda grad: seen.append(grad + 0.0))

    model.encoder.register_forward_hook(watch)
    weight.register_hook(lambda grad: seen.append(grad + 0.0))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad + 0.0))
    found = []
    for how in ("now", "deferred", "taken"):
        seen.clear()
        gradients(model, batch, how)
        found.append([*seen])
    assert len(found[0]) == 4
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def to_bytes(x: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Tensor:
    found: Tensor = torch.load(io.BytesIO(data), weights_only=True)
    return found


HOOKS = {
    "copies": (torch.clone, lambda x: x),
    "other strides": (
        lambda x: torch.empty(x.shape[::-1], dtype=x.dtype).permute(*range(x.dim())[::-1]).copy_(x),
        lambda x: x.contiguous(),
    ),
    "files": (to_bytes, from_bytes),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_saved_tensors(name: str, precision: str) -> None:
    model, batch = translator(dropout=0.1, positions="alibi"), collate(toys.examples(6))
    expected = gradients(model, batch, "now")
    with torch.autograd.graph.saved_tensors_hooks(*HOOKS[name]):
        for how in ("now", "deferred", "taken"):
            for key, grad in gradients(model, batch, how).items():
                torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-5)


def test_checkpointing_gives_plain_gradients() -> None:
    model, batch = translator(), collate(toys.examples(6))
    expected = gradients(model, batch, "now")
    block = model.encoder.blocks[0]
    forward = block.forward
    block.forward = lambda x, **options: checkpoint(partial(forward, **options), x, use_reentrant=False)
    for how in ("now", "deferred", "taken"):
        for key, grad in gradients(model, batch, how).items():
            torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-5)


def test_kernels_leave_to_pytorch_what_it_broadcasts_or_refuses(precision: str) -> None:
    queries, key = (3, 4, 5, 8), torch.randn(3, 4, 7, 8, dtype=PRECISIONS[precision])
    assert native.attends_to(queries, (key, key), None)
    for memory in ((key[:1], key[:1]), (key, key[:, :, :6]), (key[..., :4], key)):
        assert not native.attends_to(queries, memory, None)
    for shape in ((1, 1, 1, 7), (3, 4, 5, 7)):
        assert native.attends_to(queries, (key, key), torch.zeros(shape))
    for shape in ((2, 1, 1, 7), (1, 3, 1, 7), (1, 1, 4, 7), (3, 4, 5, 6)):
        assert not native.attends_to(queries, (key, key), torch.zeros(shape))


def test_recorded_attention_is_the_same() -> None:
    model, batch = translator(), collate(toys.examples(6))
    found = []
    for how in ("now", "taken"):
        with recorded_heads(model, [(1, 2)]) as weights:
            gradients(model, batch, how)
        found.append(weights())
    torch.testing.assert_close(*found)


LAYER = Linear(24, 24)
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "view of a view": lambda x: x.view(-1).view(2, -1)[1] * 2,
    "parts": lambda x: x.chunk(2, dim=-1)[1].clone(),
    "in place": lambda x: x.detach().add_(1.0),
    "one number": lambda x: torch.tensor(x.detach()[1, 2, 3].item()),
    "another operator": lambda x: LAYER(x).detach().clone(),
    "not contiguous": lambda x: LAYER(x.transpose(0, 1)).detach().clone(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()).clone(),
    "array": lambda x: torch.tensor(np.asarray(x.detach())),
    "list": lambda x: torch.tensor(x.tolist()),
    "dlpack": lambda x: torch.from_dlpack(x.detach()).clone(),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "file": lambda x: from_bytes(to_bytes(x.detach())),
    "shared memory": lambda x: x.detach().share_memory_().clone(),
    "another thread": lambda x: ThreadPoolExecutor(1).submit(lambda: x.detach() + 0.0).result(),
    "another thread's call": lambda x: ThreadPoolExecutor(1).submit(lambda: LAYER(x).detach()).result(),
}


@pytest.mark.parametrize("name", READERS)
def test_what_reads_a_tensor_waits_for_its_numbers(name: str) -> None:
    x, read = torch.randn(2, 4, 24), READERS[name]
    norm = LayerNorm(24)
    expected = read(norm(x))
    with deferred():
        output = norm(x)
        assert type(output) is Pending
        found = read(output)
        torch.testing.assert_close(found, expected)
        assert type(output.sum()) is Tensor


def test_an_error_leaves_nothing_that_waits() -> None:
    norm, x = LayerNorm(24), torch.randn(3, 24)
    with pytest.raises(ZeroDivisionError), deferred(), taking_gradients():
        norm(x).sum().backward()
        norm(x)
        raise ZeroDivisionError
    assert norm.weight.grad is None, "half of the gradients"
    assert type(norm(x)) is Tensor
    with pytest.raises(SettingsError, match="must not be null"), deferred():
        operators.run("residual", operators._ResidualCall(rows=1))
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, [24]))


@pytest.fixture(params=[1, 2, 3])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("n_threads", [2, 3], indirect=True)
def test_the_number_of_threads_changes_no_bit(n_threads: int, precision: str) -> None:
    model, batch = translator(dropout=0.2, n_encoder_layers=2), collate(toys.examples(40))
    found = gradients(model, batch, "taken")
    torch.set_num_threads(1)
    for name, grad in gradients(model, batch, "taken").items():
        assert torch.equal(found[name], grad), (name, n_threads)


def loss_call(x: Tensor, gold: Tensor, place: Tensor) -> Any:
    """Of a vocabulary of 2; its results go to `place`."""
    read = x.data_ptr(), x.data_ptr(), None, gold.data_ptr()
    return operators._LossCall(*read, len(x), 0, 24, 2, 0, 0.1, None, None, None, place.data_ptr(), place.data_ptr())


def test_a_call_that_fails_ends_those_after_it(n_threads: int) -> None:
    norm, x = LayerNorm(24), torch.randn(3, 24)
    wrong, right, after = torch.tensor([1, 7, 1]), torch.tensor([1, 1, 1]), torch.full((1,), torch.nan)
    with pytest.raises(SettingsError, match="gold: must be tokens of the vocabulary"), deferred():
        operators.run("loss", loss_call(x, wrong, after), x, wrong, after)
        for _ in range(50):
            operators.run("loss", loss_call(x, right, after), x, right, after)
    assert after.isnan(), "a call was made after the one that failed"
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, [24]))
    with deferred():
        torch.testing.assert_close(norm(x) + 0.0, nn.functional.layer_norm(x, [24]))


def test_fewer_threads_overtake_no_call() -> None:
    """With one thread, calls are made at once: after those that more threads have not finished."""
    first, second = Linear(256, 256), Linear(256, 256)
    x = torch.randn(1000, 256)
    expected = second(second(first(first(x))))
    before = torch.get_num_threads()
    try:
        for _ in range(30):
            torch.set_num_threads(2)
            with deferred():
                y = first(first(x))
                torch.set_num_threads(1)
                assert torch.equal(second(second(y)) + 0.0, expected)
    finally:
        torch.set_num_threads(before)


def test_what_calls_read_is_kept_when_the_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still make calls that it has got before."""
    layer, x = Linear(256, 256), torch.randn(3000, 256)
    with suppress(SettingsError), deferred():
        layer(layer(x))
        n = len(_calls.kept)
        with monkeypatch.context() as patched:
            patched.setattr("transduce.native.deferred.n_threads", lambda: 0)
            layer(x)
            with pytest.raises(SettingsError, match="n_threads"):
                layer(x)
        assert len(_calls.kept) == n + 2
    assert not _calls.kept


def test_an_interruption_of_the_wait_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = LayerNorm(24), torch.randn(3, 24)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("transduce.native.deferred._submit", interrupt)
        with pytest.raises(KeyboardInterrupt), deferred():
            norm(x)
    assert not _of_thread.is_open
    with deferred():
        torch.testing.assert_close(norm(x) + 0.0, nn.functional.layer_norm(x, [24]))


def test_gradients_of_a_loss_that_is_multiplied(precision: str) -> None:
    hidden, weight = (torch.randn(n, 64, requires_grad=True) for n in (3000, 500))
    gold = torch.randint(1, 500, (3000,))
    options = gold, 0, 0.1, PRECISIONS[precision], True

    def loss() -> Tensor:
        return operators.LinearCrossEntropy.apply(hidden, weight, None, *options)[0]

    expected = torch.autograd.grad(loss(), [hidden, weight])
    with deferred():
        found = torch.autograd.grad(loss(), [hidden, weight], torch.tensor(2.0))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, 2 * other)


def test_several_threads_at_a_time() -> None:
    models = [translator(dropout=0.0, n_encoder_layers=n) for n in (1, 2, 3)]
    batch = collate(toys.examples(9))
    expected = [gradients(model, batch, "taken") for model in models]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            for one, other in zip(pool.map(lambda m: gradients(m, batch, "taken"), models), expected, strict=True):
                for name, grad in other.items():
                    assert torch.equal(one[name], grad)


def with_gradient_of_the_memory(model: Any, batch: Any, *, smoothing: float) -> tuple[Tensor, Tensor, tuple[()]]:
    """A criterion with backward passes inside: adversarial training adds each gradient to the tensor it belongs to."""
    loss, nll, _ = predict_tokens(model, batch, smoothing=smoothing)
    weight = model.decoder.blocks[1].feed_forward.expand.weight
    of_weight, of_table = torch.autograd.grad(loss, [weight, model.output_weight], retain_graph=True)
    again = predict_tokens(model, batch, smoothing=smoothing)[0]
    return loss + again + (of_weight.detach() * weight).sum() + (of_table * model.output_weight).sum(), nll, ()


def test_backward_passes_inside_a_criterion(precision: str) -> None:
    assert_same(translator(dropout=0.1), collate(toys.examples(6)), with_gradient_of_the_memory)


def test_a_second_backward_pass_needs_the_graph() -> None:
    model, batch = translator(), collate(toys.examples(6))
    with deferred():
        loss = predict_tokens(model, batch, smoothing=0.1)[0]
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    for p, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_change_in_place_is_noticed_in_the_backward_pass() -> None:
    model, batch = translator(), collate(toys.examples(6))
    with deferred():
        loss = predict_tokens(model, batch, smoothing=0.1)[0]
    with torch.no_grad():
        model.encoder.blocks[1].feed_forward.expand.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_is_not_contiguous_has_a_gradient() -> None:
    model = translator()
    layer = model.encoder.blocks[0].feed_forward.expand
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert_same(model, collate(toys.examples(6)))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(2)


def test_hooks_and_modules_that_come_later() -> None:
    model, batch = translator(dropout=0.1), collate(toys.examples(6))
    assert_same(model, batch)
    seen: list[float] = []
    block = model.decoder.blocks[0]
    block.register_full_backward_pre_hook(lambda _, grads: tuple(2 * grad for grad in grads))
    assert_same(model, batch)
    feed_forward = model.encoder.blocks[0].feed_forward
    feed_forward.contract = Doubled(feed_forward.contract.in_features, feed_forward.contract.out_features)
    assert_same(model, batch)
    handle = nn.modules.module.register_module_forward_hook(
        lambda _, __, output: seen.append(float(output.detach().norm())) if isinstance(output, Tensor) else None
    )
    try:
        assert_same(model, batch)
    finally:
        handle.remove()
    n = len(seen) // 3
    assert seen[n : 2 * n] == pytest.approx(seen[:n], rel=1e-4) == seen[2 * n :]


def test_a_block_without_gradients(precision: str, n_at_once: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = translator(dropout=0.0), torch.randn(2, 5, 32)
    block, options = model.encoder.blocks[0], {"bias": None, "keep": torch.ones(2, 5, 1), "rotate": unchanged}
    with torch.no_grad(), deferred():
        found = block(x, **options) + 0.0
    assert len(n_at_once) == (2 if precision == "bfloat16" else 0), "in float32, kernels compute gradients only"
    with torch.inference_mode(), deferred():
        again = block(x, **options) + 0.0
    monkeypatch.setattr(connections, "_is_plain", lambda _: False)
    with torch.no_grad():
        expected = block(x, **options)
    assert torch.equal(found, expected) and torch.equal(again, expected)


def test_hooks_that_change_weights_see_every_call_made() -> None:
    """An updater whose model has hooks queues no calls: nothing else notices a change in place."""
    weights = []
    for defers in (True, False):
        model = translator(dropout=0.1)
        weight = model.encoder.blocks[0].feed_forward.expand.weight

        def halve(*_: object, weight: Tensor = weight) -> None:
            weight.data.mul_(0.5)

        model.encoder.blocks[0].feed_forward_residual.register_forward_hook(halve)
        settings = TrainingSettings(optimizer="adam", lr=1e-3)
        updater = Updater(model, settings, device=CPU, precision="float32")
        updater._defers &= defers
        for seed in range(3):
            updater.update([collate(toys.examples(60, seed=seed))], 1.0)
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_of_an_interrupted_update_are_not_added_to_the_next() -> None:
    calls: list[int] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return predict_tokens(*args, **options)

    norms = []
    batches = [collate(toys.examples(9, seed=seed)) for seed in range(2)]
    for criterion in (predict_tokens, interrupted):
        settings = TrainingSettings(optimizer="adam", lr=1e-3)
        updater = Updater(translator(dropout=0.0), settings, device=CPU, precision="float32", criterion=criterion)
        if criterion is interrupted:
            with pytest.raises(KeyboardInterrupt):
                updater.update(batches, 1.0)
        norms.append(updater.update(batches, 1.0).grad_norm)
    assert norms[0] == norms[1]


def test_the_loss_of_no_tokens(precision: str) -> None:
    """Of a masked model's sentence that is too short for a mask."""
    hidden, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((0, 64), (40, 64), (40,)))
    options = torch.zeros(0, dtype=torch.int64), 0, 0.1, PRECISIONS[precision], True
    with deferred():
        loss, nll = operators.LinearCrossEntropy.apply(hidden, weight, bias, *options)
        loss.backward()
    assert float(loss.detach()) == float(nll) == 0.0
    assert not weight.grad.any() and not bias.grad.any() and hidden.grad.shape == (0, 64)


@pytest.mark.parametrize("residual", ["post", "pre"])
def test_backward_hooks_of_parts_are_called(residual: str, precision: str) -> None:
    model = translator(residual=residual)
    parts = [one for one in model.modules() if isinstance(one, (nn.Linear, nn.LayerNorm, nn.Embedding))]
    called: dict[nn.Module, int] = {}
    for part in parts:
        part.register_full_backward_hook(lambda module, *_: called.update({module: 1}))
    gradients(model, collate(toys.examples(6)), "now")
    assert len(parts) > 10 and called.keys() == set(parts)


def test_a_model_is_freed() -> None:
    model = translator()
    gradients(model, collate(toys.examples(6)), "taken")
    watched = weakref.ref(model.encoder.blocks[0])
    del model
    gc.collect()
    assert watched() is None
