"""The star's layers compared with the NumPy oracle: any sizes and lengths, padding on either side, gradients."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oracle import numpy_star as oracle
from oracle.adapter import randomize
from oracle.differences import assert_gradients, vectors
from transduce.nn.masks import attention_bias
from transduce.nn.star import Ring, StarBlock, StarEncoder


def encoder(*, n_rounds: int = 2, n_heads: int = 2) -> StarEncoder:
    made = StarEncoder([StarBlock(8, n_heads=n_heads) for _ in range(n_rounds)]).double()
    randomize(made, scale=0.5)
    return made


def test_gradients_equal_the_oracles_finite_differences() -> None:
    model, x = encoder(), vectors(5, 8, seed=1).requires_grad_()
    toward = vectors(6, 8, seed=2)
    nodes, relay = model(x[None], real=torch.ones(1, 5, dtype=torch.bool))
    (torch.cat([nodes[0], relay[0]]) * toward).sum().backward()
    named = dict(model.named_parameters()) | {"x": x}

    def output(changed: str, value: Tensor) -> float:
        known = {name: (value if name == changed else weight.detach()).numpy() for name, weight in named.items()}
        h, s = oracle.star(known.pop("x"), oracle.from_layers(known), 2, 2)
        return float((np.concatenate([h, s[None]]) * toward.numpy()).sum())

    assert_gradients(named.items(), output, rel=1e-4, abs=1e-7)


def test_neighbours_of_a_ring() -> None:
    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    before, itself, after = Ring.of(real).neighbours(torch.arange(16.0).view(4, 4, 1))
    assert before[..., 0].tolist() == [[2, 0, 1, 3], [4, 7, 5, 6], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert after[..., 0].tolist() == [[1, 2, 0, 3], [4, 6, 7, 5], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert itself.flatten().tolist() == list(range(16))


def test_a_text_of_padding_only_stays_finite() -> None:
    model = encoder()
    nodes, relay = model(vectors(2, 3, 8), real=torch.tensor([[True, True, False], [False] * 3]))
    (nodes.square().sum() + relay.square().sum()).backward()
    assert nodes.isfinite().all() and relay.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_attention_equals_that_of_fastnlp() -> None:
    """With the same weights; numbers of its version 0.6.0, away from the ends of the sentence.

    There fastNLP has a neighbour of zeros in place of a ring. Its norms and activations differ from the paper's too, so
    that only the attention is compared. Its mask hides the last of five tokens from the relay node.
    """
    kept = json.loads((Path(oracle.__file__).parent / "fastnlp_star.json").read_text())
    block = StarBlock(6, n_heads=3).double()
    for name in ("satellite", "relay"):
        theirs = {
            key: {kind: torch.tensor(v, dtype=torch.float64) for kind, v in w.items()} for key, w in kept[name].items()
        }
        ours = getattr(block, f"{name}_attention")
        key_value = {kind: torch.cat([theirs["key"][kind], theirs["value"][kind]]) for kind in ("weight", "bias")}
        for part, weights in (("query", theirs["query"]), ("output", theirs["output"]), ("key_value", key_value)):
            getattr(ours, part).load_state_dict(weights)
    x, embedded, s, nodes = (torch.tensor(kept[name], dtype=torch.float64) for name in ("x", "embedded", "s", "nodes"))
    relay, ring = s[None, None], Ring.of(torch.ones(1, 5, dtype=torch.bool))
    with torch.no_grad():
        satellites = block.satellite_attention(x[None], embedded[None], relay, ring)[0]
        known = torch.cat([relay, nodes[None]], dim=1)
        bias = attention_bias(torch.tensor([[[True] * 5 + [False]]]))
        updated = block.relay_attention(relay, *block.relay_attention.key_value(known), bias=bias)
    np.testing.assert_allclose(satellites[1:4].numpy(), np.array(kept["satellites"])[1:4], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(updated[0, 0].numpy(), kept["relay_of_four"], rtol=1e-8, atol=1e-8)
