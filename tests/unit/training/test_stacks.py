"""Stacks, embeddings and losses of the C++ library compared with their modules in PyTorch."""

import gc
import statistics
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from native_engines import needs_training_kernels
from transduce.config.architectures import model_settings
from transduce.config.settings import Settings
from transduce.data.batch import collate
from transduce.errors import SettingsError
from transduce.kernels.accelerate import accelerate, is_covered
from transduce.kernels.calls import precisions, writing_gradients
from transduce.kernels.stack import plan_of
from transduce.kernels.vocabulary import LibraryEmbedding, LibraryTable
from transduce.models.registry import build_model
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.positions import POSITIONS, Positions
from transduce.nn.recording import recorded_heads
from transduce.training.loss import autocast, predict_tokens
from transduce.training.step import Updater

pytestmark = needs_training_kernels
CPU = torch.device("cpu")
VOCAB = 37
SIZES = {"d_model": 24, "d_ff": 40, "n_heads": 4, "dropout": 0.0}

TRANSLATORS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm, gated SiLU, RMSNorm, no biases": {
        "residual": "pre", "norm": "rms", "feed_forward": "gated", "activation": "silu", "bias": False,
    },
    "post-norm, gated ReLU": {"feed_forward": "gated"},
    "shared keys, wide keys, GELU": {"n_kv_heads": 2, "d_key": 8, "activation": "gelu"},
    "rotary": {"positions": "rotary", "n_kv_heads": 1},
    "ALiBi, tanh GELU, pre-norm": {"positions": "alibi", "activation": "gelu_tanh", "residual": "pre"},
    "learned positions, separate tables": {"positions": "learned", "max_positions": 32, "tie": "none"},
    "no positions, no scale": {"positions": "none", "scale_embeddings": False, "output_bias": True},
    "SSRU": {"decoder_self": "ssru"},
    "SSRU, pre-norm, SiLU": {"decoder_self": "ssru", "residual": "pre", "activation": "silu", "bias": False},
}  # fmt: skip
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "GPT": {"kind": "gpt"},
    "BERT": {"kind": "bert"},
}


def model_of(name: str, *, seed: int = 1, **more: Any) -> Any:
    torch.manual_seed(seed)
    options = {**TRANSLATORS, **LANGUAGE_MODELS}[name]
    layers = {"gpt": {"n_decoder_layers": 2}, "bert": {"n_encoder_layers": 2}}
    depth = layers.get(options.get("kind", ""), {"n_encoder_layers": 2, "n_decoder_layers": 2})
    more = {key: value for key, value in more.items() if key != "max_positions" or "max_positions" in options}
    settings = model_settings(**{**SIZES, **depth, **options, **more})
    model = build_model(settings, n_src=VOCAB, n_tgt=VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains are zeros and ones
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def accelerated(name: str, precision: str, **options: Any) -> Any:
    model = model_of(name, **options)
    assert accelerate(model, device=CPU, precision=getattr(torch, precision), purpose="training") != "torch"
    return model


def rows(n: int, longest: int, *, seed: int) -> Tensor:
    """Random ids with padding at the end of shorter rows."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (n, longest), generator=draw)
    lengths = torch.randint(1, longest + 1, (n, 1), generator=draw)
    lengths[0] = longest
    return ids.masked_fill(torch.arange(longest) >= lengths, 0)


def loss_of(model: Any, name: str, *, shape: tuple[int, int, int] = (5, 7, 9)) -> Tensor:
    n, n_src, n_tgt = shape
    src, tgt = rows(n, n_src, seed=2), rows(n, n_tgt, seed=3)
    if name == "GPT":
        documents = (torch.arange(n_tgt) // 3).expand(n, -1)
        return model.output_embedding.loss(model(tgt, documents), tgt, bias=model.output_bias)[0]
    if name == "BERT":
        places = (src.flatten() != 0).nonzero()[::2, 0]
        hidden, follows = model(src, torch.zeros_like(src), places)
        loss = model.output_embedding.loss(hidden[None], src.flatten()[places][None], bias=model.output_bias)[0]
        return loss if follows is None else loss + follows.sum()
    hidden = model(src, tgt)
    return model.output_embedding.loss(hidden, tgt, bias=model.output_bias, smoothing=0.1)[0]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    errors = torch.stack([(found[name] - expected[name]).norm() for name in expected])
    return (errors.norm() / torch.stack([value.norm() for value in expected.values()]).norm()).item()


@pytest.fixture(params=["float32", "bfloat16"])
def precision(request: pytest.FixtureRequest) -> str:
    if getattr(torch, request.param) not in precisions():
        pytest.skip("this CPU has no products of this type")
    return str(request.param)


@pytest.mark.parametrize("shape", [(5, 7, 9), (1, 1, 1), (3, 70, 66), (24, 60, 55)], ids=str)
@pytest.mark.parametrize("name", [*TRANSLATORS, *LANGUAGE_MODELS])
def test_loss_and_gradients_are_those_of_the_modules_in_float64(name: str, shape: tuple[int, int, int]) -> None:
    model = model_of(name, max_positions=128)
    oracle = deepcopy(model).double()
    loss = loss_of(oracle, name, shape=shape)
    expected = gradients(oracle, loss)
    assert accelerate(model, device=CPU, precision=torch.float32, purpose="training") != "torch"
    assert [*model.state_dict()] == [*oracle.state_dict()], "weights keep their names"
    for writes in (False, True):
        with writing_gradients() if writes else torch.enable_grad():
            found_loss = loss_of(model, name, shape=shape)
            found = gradients(model, found_loss)
        assert found_loss.item() == pytest.approx(loss.item(), rel=1e-6)
        assert relative_error(found, expected) < 2e-6


MODELS: dict[str, dict[str, object]] = {
    "paper": {},
    "pre-norm, gated, grouped heads": {
        **{"residual": "pre", "norm": "rms", "feed_forward": "gated", "n_kv_heads": 2, "positions": "rotary"},
    },
    "ALiBi, output bias": {"positions": "alibi", "output_bias": True},
    "SSRU": {"decoder_self": "ssru"},
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_are_as_near_to_float64_as_with_pytorch(name: str, precision: str) -> None:
    sizes = {"d_model": 32, "d_ff": 48, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0}
    settings = Settings.from_mapping({"model": sizes | MODELS[name]})
    batch = collate(toys.examples(12))
    ratios = []  # the error of one model is a matter of chance: it differs by a factor of two
    for seed in range(12):
        torch.manual_seed(seed)
        model = build_model(settings.model, n_src=40, n_tgt=40)
        exact = deepcopy(model).double()
        expected = gradients(exact, predict_tokens(exact, batch, smoothing=0.1)[0])
        with autocast(CPU, precision):
            theirs = gradients(model, predict_tokens(model, batch, smoothing=0.1)[0])
            accelerate(model, device=CPU, precision=getattr(torch, precision), purpose="training")
            ours = gradients(model, predict_tokens(model, batch, smoothing=0.1)[0])
        assert any(not torch.equal(ours[key], theirs[key]) for key in ours)
        ratios.append(relative_error(ours, expected) / relative_error(theirs, expected))
    assert statistics.geometric_mean(ratios) <= 1.2 and max(ratios) <= 4


@pytest.mark.parametrize("n_threads", [2, 5])
@pytest.mark.parametrize("name", ["paper", "pre-norm, gated SiLU, RMSNorm, no biases", "SSRU", "GPT"])
def test_the_number_of_threads_changes_no_bit(name: str, n_threads: int, precision: str) -> None:
    model = accelerated(name, precision, dropout=0.2, attention_dropout=0.1, activation_dropout=0.1)
    found, before = [], torch.get_num_threads()
    for n in (1, n_threads):
        torch.set_num_threads(n)
        torch.manual_seed(4)
        with autocast(CPU, precision):
            found.append(gradients(model, loss_of(model, name, shape=(9, 40, 41))))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("place", ["dropout", "attention_dropout", "activation_dropout"])
@pytest.mark.parametrize("name", ["paper", "post-norm, gated ReLU", "SSRU, pre-norm, SiLU", "GPT", "BERT"])
def test_the_gradient_under_dropout_is_the_slope_of_the_loss(name: str, place: str) -> None:
    """With the same random numbers the loss is a function of the weights; its slope is measured."""
    model = accelerated(name, "float32", **{place: 0.3})

    def loss() -> Tensor:
        torch.manual_seed(6)
        return loss_of(model, name)

    slopes = gradients(model, loss())
    parameters = [p for key, p in model.named_parameters() if key in slopes]
    torch.manual_seed(7)
    direction = [torch.randn(p.shape) * p.norm() / p.numel() ** 0.5 for p in parameters]
    predicted = sum((slope * step).sum().item() for slope, step in zip(slopes.values(), direction, strict=True))
    losses = []
    with torch.no_grad():
        for scale in (2e-4, -4e-4):
            for p, step in zip(parameters, direction, strict=True):
                p.add_(step, alpha=scale)
            with torch.enable_grad():
                losses.append(loss().item())
    assert (losses[0] - losses[1]) / 4e-4 == pytest.approx(predicted, rel=0.02, abs=0.3)
    with torch.no_grad():
        model.eval()
        assert loss().item() == loss().item() != losses[0], "no dropout in evaluation"


def test_dropout_drops_the_given_share_independently() -> None:
    """Of the embedding of a table of ones: one seed for each call."""
    embedding: Any = LibraryEmbedding(5, 200, positions=Positions(d_model=200, d_head=1, max_positions=1), dropout=0.3)
    embedding.table.weight.data.fill_(1 / embedding.scale)
    ids = torch.ones(40, 50, dtype=torch.int64)
    torch.manual_seed(5)
    first, second = embedding(ids).detach(), embedding(ids).detach()
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.7], rel=1e-6)
    dropped, others = ((x == 0).double() - 0.3 for x in (first, second))
    n, deviation = first.numel(), (0.3 * 0.7) ** 0.5
    assert abs(dropped.mean()) < 4 * deviation / n**0.5
    for one, other in ((dropped, others), (dropped[1:], dropped[:-1]), (dropped[..., 1:], dropped[..., :-1])):
        assert abs((one * other).mean()) < 4 * deviation**2 / n**0.5


def test_validation_and_models_without_gradients_are_pytorchs() -> None:
    """There a sentence's result must not depend on its batch."""
    model = model_of("paper")
    with torch.no_grad():
        expected = loss_of(model, "paper")
        accelerate(model, device=CPU, precision=torch.float32, purpose="training")
        assert torch.equal(loss_of(model, "paper"), expected)


def test_float64_models_and_weights_in_another_order_are_pytorchs() -> None:
    model, plain = accelerated("paper", "float32"), model_of("paper")
    expected = gradients(plain.double(), loss_of(plain, "paper"))
    assert relative_error(gradients(model.double(), loss_of(model, "paper")), expected) < 1e-12
    model.float()
    weight = model.encoder.blocks[0].feed_forward.expand.weight
    weight.data = weight.data.t().contiguous().t()
    assert relative_error(gradients(model, loss_of(model, "paper")), expected) < 2e-6


class DistanceBias(Positions):
    """A researcher's scheme: a bias for each head and distance, in another order in memory than the scores."""

    learned = False

    def setup(self) -> None:
        table = torch.arange(9.0 * self.n_heads).view(9, self.n_heads).sin()
        self.table = nn.Parameter(table) if self.learned else table

    def score_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, None] - keys[None, :]).clamp(-4, 4) + 4
        return self.table[distance].permute(2, 0, 1)


class LearnedDistanceBias(DistanceBias):
    learned = True


@pytest.mark.parametrize("scheme", [DistanceBias, LearnedDistanceBias])
def test_biases_of_other_schemes_are_added_and_learned(scheme: type[DistanceBias]) -> None:
    model = model_of("paper")
    for embedding in (model.src_embedding, model.tgt_embedding):
        embedding.positions = scheme(d_model=24, d_head=6, max_positions=64, n_heads=4)
    expected = gradients(model, loss_of(model, "paper"))
    accelerate(model, device=CPU, precision=torch.float32, purpose="training")
    assert is_covered(model) == (scheme is DistanceBias)
    assert relative_error(gradients(model, loss_of(model, "paper")), expected) < 2e-6


def test_hooks_and_recorders_see_the_values_inside() -> None:
    model = accelerated("paper", "float32")
    block, shapes = model.encoder.blocks[1], []
    with recorded_heads(model, [(1, 2)]) as weights:
        loss_of(model, "paper")
    assert weights().shape == (5, 1, 9, 7)
    handle = block.feed_forward.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    with_hook = gradients(model, loss_of(model, "paper"))
    handle.remove()
    assert shapes == [(5, 7, 24)]
    assert relative_error(with_hook, gradients(model, loss_of(model, "paper"))) < 2e-6
    assert len(shapes) == 1


def test_hooks_of_parameters_see_their_gradients() -> None:
    model = accelerated("paper", "float32")
    feed_forward = model.encoder.blocks[0].feed_forward
    options = toys.settings(optimizer="adam", lr=1e-3).training
    updater, seen = Updater(model, options, device=CPU, precision="float32"), list[Tensor]()
    feed_forward.expand.weight.register_hook(lambda grad: seen.append(grad))
    updater.update([collate(toys.examples(4))], 1.0)
    assert [grad.shape for grad in seen] == [(40, 24)]


def test_dropout_that_differs_among_layers_is_pytorchs() -> None:
    model = accelerated("paper", "float32")
    model.encoder.blocks[0].self_attention_residual.dropout.p = 0.9
    torch.manual_seed(1)
    assert gradients(model, loss_of(model, "paper"))


@pytest.mark.parametrize("writes", [False, True])
def test_frozen_parameters_have_no_gradient_and_batches_add_up(writes: bool) -> None:
    model, plain = accelerated("paper", "float32"), model_of("paper")
    for each in (model, plain):
        each.src_embedding.requires_grad_(False)
        each.encoder.blocks[0].requires_grad_(False)
    shapes = [(5, 7, 9), (2, 4, 3)]
    with writing_gradients() if writes else torch.enable_grad():
        for shape in shapes:
            loss_of(model, "paper", shape=shape).backward()
    for shape in shapes:
        loss_of(plain, "paper", shape=shape).backward()
    found, expected = (
        {name: p.grad.double() for name, p in each.named_parameters() if p.grad is not None} for each in (model, plain)
    )
    assert relative_error(found, expected) < 2e-6


def test_values_that_are_not_numbers_are_not_hidden(precision: str) -> None:
    """Otherwise an update of a damaged model would not be skipped."""
    for name in ("paper", "SSRU", "post-norm, gated ReLU"):
        for damaged in ("encoder.blocks.0.feed_forward.expand.weight", "decoder.blocks.0.self_attention"):
            model = accelerated(name, precision)
            part = next(p for key, p in model.named_parameters() if key.startswith(damaged))
            part.data[3] = torch.nan
            with autocast(CPU, precision):
                assert loss_of(model, name).isnan()


def test_copies_of_a_model_are_independent() -> None:
    model = accelerated("paper", "float32")
    with writing_gradients():
        expected = gradients(model, loss_of(model, "paper"))
        copied = deepcopy(model)
        with torch.no_grad():
            for p in copied.parameters():
                p.mul_(2)
        loss_of(copied, "paper").backward()
        again = gradients(model, loss_of(model, "paper"))
    assert all(torch.equal(expected[name], again[name]) for name in expected)


def test_a_weight_that_changes_before_the_backward_pass_is_an_error() -> None:
    model = accelerated("paper", "float32")
    loss = loss_of(model, "paper")
    with torch.no_grad():
        model.encoder.blocks[0].feed_forward.expand.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_is_freed() -> None:
    model = accelerated("paper", "float32")
    with writing_gradients():
        gradients(model, loss_of(model, "paper"))
    freed = weakref.ref(model.encoder)
    gc.disable()
    try:
        del model
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (5, 13, 70, 40), (9, 31, 33, 128)])
def test_embeddings_with_positions_and_dropout(shape: tuple[int, int, int, int], positions: str, p: float) -> None:
    torch.manual_seed(7)
    batch, length, vocabulary, width = shape
    scheme = POSITIONS[positions](d_model=width, d_head=width, max_positions=40)
    plain = TokenEmbedding(vocabulary, width, positions=scheme, dropout=p)
    ids, grad = torch.randint(vocabulary, (batch, length)), torch.randn(batch, length, width)
    ours: Any = deepcopy(plain)
    ours.__class__ = LibraryEmbedding
    output = ours(ids)
    output.backward(grad)
    factors = torch.where(output == 0, 0.0, 1 / (1 - p)).double() if p else torch.ones(*shape[:2], width)
    exact = plain.double().eval()
    expected = exact(ids) * factors
    expected.backward(grad.double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, right in zip(ours.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, rtol=1e-5, atol=1e-5)


def test_an_id_outside_the_table_is_refused() -> None:
    embedding: Any = LibraryEmbedding(4, 3, positions=Positions(d_model=3, d_head=3, max_positions=1))
    for wrong in (-1, 4):
        with pytest.raises(SettingsError, match="ids: out of range"):
            embedding(torch.tensor([[0, wrong]]))


def test_a_loss_whose_logits_are_far_below_their_bound(precision: str) -> None:
    """The hidden states and the weights have large norms in dimensions that the others lack."""
    torch.manual_seed(8)
    dtype = getattr(torch, precision)
    hidden, weight, gold = torch.randn(40, 64), torch.randn(200, 64), torch.randint(1, 200, (40,))
    hidden[::2, 0], weight[:, 0], weight[5, 1] = 100.0, 0.0, 100.0
    hidden[:, 1] = 0.0
    exact = [x.to(dtype).double().requires_grad_() for x in (hidden, weight)]
    table: Any = LibraryTable(200, 64)
    table.weight.data = weight.to(dtype).float()
    given = hidden.to(dtype).float().requires_grad_()
    with autocast(CPU, precision):
        loss, nll, _ = table.loss(given[None], gold[None], smoothing=0.1)
    loss.backward()
    logits = exact[0] @ exact[1].t()
    right = nn.functional.cross_entropy(logits, gold, label_smoothing=0.1, reduction="sum")
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-4)
    assert nll.item() == pytest.approx(nn.functional.cross_entropy(logits, gold, reduction="sum").item(), rel=1e-4)
    rounding = 2**-8 if precision == "bfloat16" else 1e-6
    for ours, exactly in ((given, exact[0]), (table.weight, exact[1])):
        assert (ours.grad.double() - exactly.grad).norm() <= 2 * rounding * exactly.grad.norm()


def test_the_loss_of_no_tokens(precision: str) -> None:
    """Of a masked model's sentence that is too short for a mask."""
    table: Any = LibraryTable(10, 8)
    hidden = torch.zeros(1, 0, 8, requires_grad=True)
    with autocast(CPU, precision):
        loss, nll, n = table.loss(hidden, torch.zeros(1, 0, dtype=torch.int64))
    loss.backward()
    assert (loss.item(), nll.item(), n.item()) == (0, 0, 0) and not table.weight.grad.any()


def test_too_little_memory_is_a_memory_error() -> None:
    """A training then divides the batch."""
    model = accelerated("paper", "float32")
    plan = plan_of(model.encoder)
    assert plan is not None
    with pytest.raises(MemoryError, match="for a stack"):
        plan.memory(1 << 60, reuse=True)


@pytest.mark.parametrize("part", ["blocks.0", "blocks.0.feed_forward", "blocks.1.self_attention_residual.norm"])
def test_a_stack_with_parts_of_other_classes_is_pytorchs(part: str) -> None:
    """Such as those of an extension, which need not have the attributes of ours."""
    model = accelerated("paper", "float32")
    owner, _, name = part.rpartition(".")
    setattr(model.encoder.get_submodule(owner), name, nn.Identity())
    assert plan_of(model.encoder) is None and plan_of(model.decoder) is not None


def test_a_stack_with_another_activation_is_pytorchs() -> None:
    model = accelerated("paper", "float32")
    model.encoder.blocks[0].feed_forward.activation = "mine"
    assert plan_of(model.encoder) is None


def test_a_mistake_in_a_plan_is_an_error() -> None:
    model = accelerated("paper", "float32")
    del model.encoder.blocks[0].feed_forward.d_ff
    with pytest.raises(AttributeError, match="d_ff"):
        plan_of(model.encoder)
