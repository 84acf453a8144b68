"""The decoder-only model compared with the NumPy oracle and with cached steps; documents are independent."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oracle import numpy_transformer as oracle
from oracle.adapter import numpy_weights, options_of
from oracle.cases import FLOAT64, MIXED, SINGLE, VOCAB, make, pad, sentences
from transduce.config.decoding import DecodingOptions
from transduce.decoding.sampling import sample
from transduce.nn.state import DecoderState

EVERY = {name: {**options, "kind": "gpt"} for name, options in (SINGLE | MIXED).items() if "encoder" not in name}
LENGTHS = (5, 1, 12, 3)


def assert_close(ours: Tensor, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(
        ours.detach().double().numpy(), expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max())
    )


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_forward_equals_the_oracle(options: dict[str, Any]) -> None:
    model, settings = make(dtype=torch.float64, **options)
    rows = sentences(LENGTHS)
    ours = model.logits(model(pad(rows)))
    weights = numpy_weights(model.state_dict(), settings)
    for row, logits in zip(rows, ours, strict=True):
        expected = oracle.causal_lm(row.numpy(), weights, options_of(settings))
        assert_close(logits[: len(row)], expected, FLOAT64[settings.positions])


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("n_known", [0, 4])
def test_steps_after_a_prompt_equal_one_forward(options: dict[str, Any], n_known: int) -> None:
    """Three texts, of which one leaves."""
    model, _ = make(dtype=torch.float64, **options)
    prompts = pad(sentences([n_known] * 3)) if n_known else torch.zeros(3, 0, dtype=torch.long)
    rows = torch.cat([prompts, pad(sentences([6] * 3, seed=3))], 1)
    with torch.no_grad():
        state = model.start(prompts, capacity=6)
        assert state.length == n_known
        for t in range(n_known, n_known + 6):
            ours = model.logits(model.advance(rows[:, t : t + 1], state))[:, 0]
            expected = model.logits(model(rows[:, : t + 1]))[:, -1]
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
            if t == n_known + 3:
                stay = torch.tensor([2, 0])
                state.select(stay)
                rows = rows[stay]


def test_the_prompt_is_computed_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = make(kind="gpt")
    seen: list[tuple[int, ...]] = []
    original = type(model).advance

    def noted(self: nn.Module, ids: Tensor, state: DecoderState) -> Tensor:
        seen.append(tuple(ids.shape))
        return original(self, ids, state)

    monkeypatch.setattr(type(model), "advance", noted)
    with torch.no_grad():
        state = model.start(pad(sentences([5, 5])), capacity=3)
        model.logits(model.advance(torch.full((2, 1), 4), state))
    assert seen == [(2, 5), (2, 1)]
    assert state.layers[0].keys is not None and state.layers[0].keys.shape[2] == 5 + 3
    assert settings.kind == "gpt"


def greedy(model: nn.Module, ids: list[int], n: int) -> list[int]:
    """One whole forward per token; PAD and BOS are never chosen."""
    ids, end = list(ids), []
    while len(end) < n and end[-1:] != [3]:
        logits = model.logits(model(torch.tensor([ids])))[0, -1].clone()
        logits[[0, 2]] = -torch.inf
        end.append(int(logits.argmax()))
        ids.append(end[-1])
    return [i for i in end if i != 3]


@pytest.mark.parametrize("options", [{}, {"positions": "rotary", "residual": "pre"}], ids=["plain", "rotary"])
def test_sampling_continues_a_prompt(options: dict[str, Any]) -> None:
    model, _ = make(kind="gpt", **options)
    prompts = pad(sentences([4] * 5, seed=8))
    with torch.no_grad():
        expected = [greedy(model, prompt, 7) for prompt in prompts.tolist()]
    src = prompts[:, :-1]
    drawn = sample(model, src, DecodingOptions(sample=True, top_k=1), prompts=prompts, max_length=7, keys=[(1,)] * 5)
    assert [[list(h.ids) for h in hypotheses] for hypotheses in drawn] == [[ids] for ids in expected]


def test_samples_of_a_prompt_are_scored_as_one_forward_scores_them() -> None:
    model, _ = make(kind="gpt")
    prompts = pad(sentences([3] * 4, seed=2)).repeat(5, 1)
    src = prompts[:, :-1]
    keys = [(i,) for i in range(20)]
    drawn = sample(model, src, DecodingOptions(sample=True), prompts=prompts, max_length=5, keys=keys)
    assert all(len({hypothesis.ids for (hypothesis,) in drawn[i::4]}) > 1 for i in range(4))
    for prompt, (hypothesis,) in zip(prompts, drawn, strict=True):
        tokens = torch.tensor([*hypothesis.ids, *([3] if hypothesis.finished else [])])
        with torch.no_grad():
            logits = model.logits(model(torch.cat([prompt, tokens])[None, :-1]))[0, 2:]
        known = logits.log_softmax(-1).gather(1, tokens[:, None]).sum().item()
        assert hypothesis.log_prob == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "rotary"}, {"positions": "learned"}, {"positions": "sinusoidal_halves"}, {"positions": "none"}],
    ids=str,
)
def test_every_document_is_read_as_if_alone(options: dict[str, Any]) -> None:
    """Its logits are those of the document alone, bit for bit."""
    model, _ = make(dtype=torch.float64, kind="gpt", **options)
    (row,) = sentences([11])
    other = row.clone()
    other[4:8] = (row[4:8] % (VOCAB - 4)) + 4
    assert not torch.equal(row, other)
    documents = torch.tensor([[1] * 4 + [2] * 4 + [3] * 3])
    mine = [0, 1, 2, 3, 8, 9, 10]
    with torch.no_grad():
        one, two = (model(ids[None], documents)[0] for ids in (row, other))
        assert torch.equal(one[mine], two[mine])
        open_one, open_two = (model(ids[None])[0] for ids in (row, other))
        for span in (slice(0, 4), slice(4, 8), slice(8, 11)):
            alone = model.logits(model(row[None, span]))[0]
            torch.testing.assert_close(model.logits(one[span]), alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(open_one[:4], open_two[:4]) and not torch.equal(open_one[8:], open_two[8:])
