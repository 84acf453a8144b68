"""The encoder-only model compared with the oracle; padding, masked positions, names shared with the classifier."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oracle.adapter import encoder_weights, fitting, options_of, randomize
from oracle.cases import pad, sentences
from oracle.numpy_transformer import ACTIVATIONS, Array, encode, linear, normalise
from transduce.config.architectures import BertSettings, model_settings, resolve_preset
from transduce.config.model import ModelSettings
from transduce.models.registry import build_model, count_parameters

VOCAB = 13
SMALL: dict[str, Any] = {**BertSettings.presets["bert-tiny"], "d_model": 16, "d_ff": 24, "n_heads": 4, "dropout": 0.0,
                         "attention_dropout": 0.0, "max_positions": 16}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "bert": {},
    "next sentence": {"next_sentence": True},
    "untied, no bias": {"tie": "none", "output_bias": False, "bias": False},
    "modern": {
        "residual": "pre",
        "norm": "rms",
        "norm_eps": None,
        "positions": "none",
        "embedding_norm": False,
        "n_segments": 0,
    },
    "one segment": {"n_segments": 0, "activation": "gelu_tanh"},
}


def make(kind: str = "bert", *, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, ModelSettings]:
    s = fitting(**{**SMALL, "kind": kind, **options})
    model = build_model(s, n_src=VOCAB, n_tgt=VOCAB).eval()
    randomize(model)
    return model.to(dtype), s


def batch(lengths: tuple[int, ...] = (5, 1, 9), *, extra: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, and segments that change within each row; both end in zeros."""
    rows = sentences(lengths)
    return pad(rows, extra=extra), pad([torch.arange(len(row)).gt(len(row) // 2).long() for row in rows], extra=extra)


def expected(model: nn.Module, s: ModelSettings, ids: Tensor, segments: Tensor) -> Array:
    """Last hidden states of one row without padding, by the oracle."""
    weights = encoder_weights(model.state_dict(), s, segments.numpy())
    return encode(ids.numpy(), weights, options_of(s))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_hidden_states_and_heads_equal_the_oracles(options: dict[str, Any]) -> None:
    model, s = make(**options)
    ids, segments = batch()
    if not s.n_segments:
        segments = torch.zeros_like(segments)
    places = ids.flatten().nonzero()[:, 0]
    with torch.no_grad():
        asked, follows = model(ids, segments, places)
        logits = model.logits(asked)
    known = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    start = 0
    for number, (row, kinds) in enumerate(zip(ids, segments, strict=True)):
        length = int((row != 0).sum())
        hidden = expected(model, s, row[:length], kinds[:length])
        dense = ACTIVATIONS[s.activation](linear(hidden, known, "head.dense"))
        ready = normalise(dense, known, "head.norm", options_of(s))
        oracle_logits = ready @ known["output_embedding.weight"].T + known.get("output_bias", np.float64(0))
        np.testing.assert_allclose(logits[start : start + length].numpy(), oracle_logits, rtol=0, atol=1e-9)
        if follows is not None:
            pooled = np.tanh(linear(hidden[0], known, "pooler.dense"))
            np.testing.assert_allclose(
                follows[number].numpy(), linear(pooled, known, "next_sentence"), rtol=0, atol=1e-9
            )
        start += length
    assert (follows is not None) == s.next_sentence


@pytest.mark.parametrize("pooling", ["first", "mean", "max", "conv"])
def test_the_classifier_equals_the_oracle(pooling: str) -> None:
    model, s = make("bert-classifier", n_labels=3, pooling=pooling)
    ids, segments = batch()
    with torch.no_grad():
        logits = model(ids, segments).numpy()
    known = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    pools = {"first": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0)}
    for row, kinds, got in zip(ids, segments, logits, strict=True):
        length = int((row != 0).sum())
        hidden = expected(model, s, row[:length], kinds[:length])
        if pooling == "conv":
            padded = np.pad(hidden, ((1, 1), (0, 0)))
            windows = np.array([padded[t : t + 3].flatten() for t in range(length)])
            pooled = np.maximum(0, linear(windows, known, "pooler.dense")).max(0)
        else:
            pooled = np.tanh(linear(pools[pooling](hidden), known, "pooler.dense"))
        np.testing.assert_allclose(got, linear(pooled, known, "labels"), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pooling", ["first", "mean", "max", "conv"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_padding_and_neighbours_change_nothing(options: dict[str, Any], pooling: str) -> None:
    model, _ = make("bert-classifier", n_labels=2, **{**options, "pooling": pooling})
    ids, segments = batch()
    alone = [
        model(*(x[None, : int((row != 0).sum())] for x in (row, kinds))) for row, kinds in zip(*batch(), strict=True)
    ]
    torch.testing.assert_close(model(ids, segments), torch.cat(alone), rtol=0, atol=1e-9)
    more = [torch.nn.functional.pad(x, (0, 3)) for x in (ids, segments)]
    torch.testing.assert_close(model(*more), torch.cat(alone), rtol=0, atol=1e-9)


def test_padding_has_no_gradient_and_no_effect_on_gradients() -> None:
    found = []
    for extra in (0, 4):
        model, _ = make(next_sentence=True)
        ids, segments = batch(extra=extra)
        width = ids.shape[1]
        places = torch.tensor([1, width, 2 * width + 7])
        asked, follows = model(ids, segments, places)
        (model.logits(asked).logsumexp(-1).sum() + follows.logsumexp(-1).sum()).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], rtol=0, atol=1e-9, msg=name)


def test_only_masked_positions_pass_the_head() -> None:
    model, _ = make()
    ids, segments = batch()
    seen: list[int] = []
    model.head.register_forward_hook(lambda _m, inputs, _out: seen.append(len(inputs[0])))
    asked, _ = model(ids, segments, torch.tensor([2, 18]))
    every, _ = model(ids, segments, torch.arange(ids.numel()))
    assert seen == [2, ids.numel()]
    torch.testing.assert_close(asked, every[[2, 18]], rtol=0, atol=1e-12)
    none, _ = model(ids, segments, torch.zeros(0, dtype=torch.long))
    assert none.shape == (0, 16)


def test_both_directions_and_segments_have_an_effect() -> None:
    model, _ = make()
    ids, segments = batch((9, 9))
    places = torch.tensor([4])
    before, _ = model(ids, segments, places)
    for column in (0, 8):
        other = ids.clone()
        other[0, column] = ids[0, column] % (VOCAB - 1) + 1
        assert not torch.equal(model(other, segments, places)[0], before)
    assert not torch.equal(model(ids, 1 - segments, places)[0], before)
    torch.testing.assert_close(model(ids, None, places)[0], model(ids, segments * 0, places)[0])


def test_a_classifier_loads_the_weights_of_a_masked_model() -> None:
    masked, _ = make(next_sentence=True)
    classifier, _ = make("bert-classifier", n_labels=5)
    missing, left = classifier.load_state_dict(masked.state_dict(), strict=False)
    assert set(missing) == {"labels.weight", "labels.bias"}
    assert {name.split(".")[0] for name in left} == {"head", "output_bias", "output_embedding", "next_sentence"}


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 4.4), ("mini", 11.3), ("small", 29.1), ("base", 110.1)])
def test_presets_have_the_published_sizes(preset: str, millions: float) -> None:
    """Turc et al. 2019, table 1: 4.4, 11.3, 29.1 and 110.1 million, with BERT's vocabulary."""
    with torch.device("meta"):
        s = resolve_preset(model_settings(preset=f"bert-{preset}", next_sentence=True))
        own = count_parameters(build_model(s, n_src=30_522, n_tgt=30_522))
        head = build_model(s, n_src=30_522, n_tgt=30_522).head
    assert s.n_heads * 64 == s.d_model and s.d_ff == 4 * s.d_model
    without_heads = own - count_parameters(head) - 30_522 - 2 * s.d_model - 2
    assert abs(without_heads / 1e6 - millions) < 0.75
