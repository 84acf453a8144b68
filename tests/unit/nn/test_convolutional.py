"""ConvS2S's layers compared with the NumPy oracle: any sizes and lengths, padding on either side, steps, gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from oracle import numpy_convs2s as oracle
from oracle.adapter import randomize
from oracle.differences import assert_gradients, vectors
from transduce.nn.convolutional import ConvDecoder, ConvEncoder, GatedConvolution, windows


class Pair(nn.Module):
    """An encoder and a decoder on embedded sentences."""

    def __init__(self, *, d_model: int = 6, d_conv: int = 5, kernel_size: int = 3, layers: tuple[int, int] = (2, 3)):
        super().__init__()
        sizes: dict[str, Any] = {"d_model": d_model, "d_conv": d_conv, "kernel_size": kernel_size}
        self.encoder = ConvEncoder(n_layers=layers[0], n_readers=layers[1], **sizes)
        self.decoder = ConvDecoder(n_layers=layers[1], **sizes)
        randomize(self, scale=0.5)
        self.double()

    def start(self, src: Tensor, real: Tensor, *, n_beams: int = 1) -> Any:
        memory, values = self.encoder(src, keep=real[:, :, None])
        return self.decoder.start(memory, values, real[:, None], n_beams=n_beams)

    def forward(self, src: Tensor, real: Tensor, tgt: Tensor) -> Tensor:
        return self.decoder(tgt, self.start(src, real))


def batch(lengths: list[int], width: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Random vectors, also at padding, and which positions are real."""
    place = torch.arange(width)
    n = torch.tensor(lengths)[:, None]
    return vectors(len(lengths), width, 6, seed=1), place >= width - n if left else place < n


def test_gradients_equal_the_oracles_finite_differences() -> None:
    """Along a random direction of each weight and of both inputs."""
    pair = Pair()
    pair.encoder.gradient_scale = 1.0
    src, tgt, direction = vectors(4, 6, seed=1), vectors(3, 6, seed=2), vectors(3, 6, seed=3)
    named = dict(pair.named_parameters()) | {"src": src.requires_grad_(), "tgt": tgt.requires_grad_()}
    (pair(src[None], torch.ones(1, 4, dtype=torch.bool), tgt[None])[0] * direction).sum().backward()

    def output(changed: str, value: Tensor) -> float:
        known = {name: (value if name == changed else weight.detach()).numpy() for name, weight in named.items()}
        e, g = known.pop("src"), known.pop("tgt")
        weights = oracle.from_layers(known)
        hidden, _ = oracle.decode(g, oracle.encode(e, weights), e, weights)
        return float((hidden * direction.numpy()).sum())

    assert_gradients(named.items(), output, rel=1e-5, abs=1e-7)


def test_the_gradient_of_the_encoders_stack_is_divided_by_its_uses() -> None:
    """Three attention layers read keys and values; the embeddings' own path to the values is not scaled."""
    src, tgt, real = vectors(1, 4, 6), vectors(1, 3, 6, seed=2), torch.ones(1, 4, dtype=torch.bool)

    def gradients(scale: float | None) -> dict[str, Tensor]:
        pair, inputs = Pair(), src.clone().requires_grad_()
        pair.encoder.gradient_scale = pair.encoder.gradient_scale if scale is None else scale
        pair(inputs, real, tgt).square().sum().backward()
        return {name: p.grad for name, p in pair.named_parameters() if p.grad is not None} | {"src": inputs.grad}

    ours, true, direct = gradients(None), gradients(1.0), gradients(0.0)
    for name, grad in ours.items():
        expected = true[name] / 6 if name.startswith("encoder") else true[name]
        if name == "src":
            expected = direct[name] + (true[name] - direct[name]) / 6
        torch.testing.assert_close(grad, expected)


def test_a_source_of_padding_only_stays_finite() -> None:
    pair = Pair()
    src, real = batch([3, 0], 4)
    ours = pair(src, real, vectors(2, 3, 6))
    ours.square().sum().backward()
    assert ours.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in pair.parameters())


def test_fresh_weights_roughly_keep_the_variance() -> None:
    """Through ten gated convolutions with dropout, in training (section 3.5, for small inputs)."""
    torch.manual_seed(0)
    encoder = ConvEncoder(n_layers=10, d_model=64, d_conv=128, kernel_size=3, dropout=0.2)
    x = torch.randn(8, 40, 64)
    memory, values = encoder(x, keep=torch.ones(8, 40, 1, dtype=torch.bool))
    assert 0.5 < memory.std().item() < 4 and 0.5 < values.std().item() < 4


def test_windows_are_those_of_a_convolution() -> None:
    x, weight = vectors(2, 7, 3), vectors(4, 3, 3, seed=1)  # [O, I, k]
    ours = windows(x, 3) @ weight.permute(0, 2, 1).reshape(4, 9).T
    torch.testing.assert_close(ours, nn.functional.conv1d(x.transpose(1, 2), weight).transpose(1, 2))
    layer = GatedConvolution(3, kernel_size=3).double()
    torch.testing.assert_close(layer(x), nn.functional.glu(layer.expand(windows(x, 3))))
