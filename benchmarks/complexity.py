"""Time, memory and path length of one layer of each kind, against the length n and the width d (the paper's Table 1).

    python benchmarks/complexity.py --out complexity                       # about ten minutes, one thread
    python benchmarks/complexity.py --lengths 64 128 256 --widths 32 64 --layers self-attention restricted

Each layer reads one sequence and gets a gradient. Time is the lowest CPU time of several forward and backward passes.
Memory is the size of all tensors that are kept for the gradient. Exponents are the slopes of lines through the upper
half of the points, on logarithmic axes: 2 is quadratic. They are below the theory's where other work dominates: the
overhead of a step, or the projections (n d^2), which cost as much as attention's own products at n = 2 d. The memory of
self-attention is linear in n, because PyTorch's fused kernel computes the weights again for the gradient.

The path length is the number of operations, one after the other, until the last position depends on all others, found
by gradients: layers, rounds of the star, steps of the recurrent layer. A convolution reaches (k - 1) / 2 positions to
each side.

Neighbourhood and kernel: r = 64 positions to each side, the own one included, k = 3. The strided pattern has stride
sqrt(n). OUT.md has the tables, OUT.svg the plot.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from results import heading, row, write
from torch import Tensor
from torch.nn import functional as F

from transduce.nn.attention import SelfAttention
from transduce.nn.bias import sequence_bias
from transduce.nn.convolutional import GatedConvolution
from transduce.nn.patterns import FullPattern, LocalPattern, make_patterns
from transduce.nn.positions import Positions
from transduce.nn.recurrent import LSTM
from transduce.nn.star import Ring, StarBlock, StarEncoder

HEADS, RESTRICTED, KERNEL = 4, 64, 3
Layer = Callable[[Tensor], Tensor]
"""[1, n, d] to [1, n, d]."""


def attention(d: int, n: int, pattern: FullPattern) -> Layer:
    """Multi-head attention with a pattern."""
    layer = SelfAttention(d_model=d, n_heads=HEADS)
    scheme = Positions(d_model=d, d_head=d // HEADS, max_positions=n)
    return lambda x: layer(x, bias=sequence_bias(pattern, torch.arange(n), scheme), rotate=lambda y: y)


def strided(d: int, n: int) -> Layer:
    """The Sparse Transformer's strided pattern in both directions, half of the heads for each factor."""
    (pattern,) = make_patterns("strided", size=round(math.sqrt(n)), causal=False)
    return attention(d, n, pattern)


def recurrent(d: int, n: int) -> Layer:
    """An LSTM over the sequence."""
    cell = LSTM(d, d)
    cell.initialize()
    first = (torch.zeros(1, d), torch.zeros(1, d))
    return lambda x: cell(x.transpose(0, 1), first)[0].transpose(0, 1)


def recurrent_step(d: int, n: int) -> Layer:
    """One step of an LSTM at all positions at once, from the states of the positions before; states, then inputs."""
    cell = LSTM(d, d)
    cell.initialize()

    def step(nodes: Tensor) -> Tensor:
        states, inputs = F.pad(nodes, (0, 0, 2 * n - nodes.shape[1], 0)).split(n, 1)
        before = F.pad(states, (0, 0, 1, 0))[0, :-1]
        return torch.cat([cell(inputs, (before, torch.zeros_like(before)))[0], inputs], 1)

    return step


def convolution(d: int, n: int) -> Layer:
    """A gated convolution over k positions."""
    layer = GatedConvolution(d, kernel_size=KERNEL)
    return lambda x: layer(F.pad(x, (0, 0, KERNEL // 2, KERNEL // 2)))


def star(d: int, n: int) -> Layer:
    """A round of the Star-Transformer."""
    layer = StarEncoder([StarBlock(d, n_heads=HEADS)])
    return lambda x: layer(x, real=torch.ones(1, n, dtype=torch.bool))[0]


def star_rounds(d: int, n: int) -> Layer:
    """A round of satellite nodes and, behind them, the relay node, which is zero at first."""
    block, ring = StarBlock(d, n_heads=HEADS), Ring.of(torch.ones(1, n, dtype=torch.bool))
    bias = torch.zeros(1, 1, 1, n + 1)

    def round_(nodes: Tensor) -> Tensor:
        nodes = F.pad(nodes, (0, 0, 0, n + 1 - nodes.shape[1]))
        x, relay = block(nodes[:, :-1], nodes[:, -1:], embedded=torch.zeros_like(nodes[:, :-1]), ring=ring, bias=bias)
        return torch.cat([x, relay], 1)

    return round_


@dataclass(frozen=True)
class Kind:
    """A kind of layer: Table 1's cost and path, the layer, and one sequential operation of it, if that is less."""

    cost: str
    path: str
    make: Callable[[int, int], Layer]
    operation: Callable[[int, int], Layer] | None = None


KINDS: dict[str, Kind] = {
    "self-attention": Kind("n^2 d", "1", lambda d, n: attention(d, n, FullPattern())),
    "recurrent": Kind("n d^2", "n", recurrent, recurrent_step),
    "convolutional": Kind("k n d^2", "n / k", convolution),
    "restricted": Kind("r n d", "n / r", lambda d, n: attention(d, n, LocalPattern(RESTRICTED, causal=False))),
    "strided": Kind("n sqrt(n) d", "2", strided),
    "star": Kind("n d", "2", star, star_rounds),
}
"""The paper's Table 1, Child et al. 2019 and Guo et al. 2019."""


def seconds(layer: Layer, x: Tensor, rounds: int) -> float:
    """CPU time of a forward and a backward pass, the lowest."""
    found = list[float]()
    for _ in range(rounds + 1):
        began = time.process_time()
        layer(x).sum().backward()
        found.append(time.process_time() - began)
    return min(found[1:])


def kept_bytes(layer: Layer, x: Tensor) -> int:
    """Size of the tensors that are kept for the gradient; each storage counts once."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    del y
    return sum(storages.values())


def path_length(operation: Layer, d: int, n: int) -> int:
    """Operations until the last position depends on all others; at most 2 n."""
    first = torch.randn(1, n, d, dtype=torch.float64, requires_grad=True)
    x: Tensor = first
    for count in range(1, 2 * n + 1):
        x = operation(x)
        (gradient,) = torch.autograd.grad(x[:, n - 1].square().sum(), first, retain_graph=True)
        if gradient.any(2).all():
            return count
    return 2 * n


def exponent(points: dict[int, float]) -> float:
    """The slope through the upper half of the points, on logarithmic axes."""
    upper = sorted(points)[len(points) // 2 :] if len(points) > 3 else sorted(points)
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (upper, [points[n] for n in upper]))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


Found = dict[str, dict[str, dict[int, float]]]
"""Points by kind of layer and measure."""


def measure(args: argparse.Namespace) -> Found:
    """Time and memory of all layers."""
    found: Found = {}
    for name in args.layers:
        points = found.setdefault(name, {key: {} for key in ("time, n", "memory, n", "time, d", "memory, d")})
        shapes = [("n", n, n, args.width) for n in args.lengths] + [("d", d, args.length, d) for d in args.widths]
        for axis, value, n, d in shapes:
            torch.manual_seed(0)
            layer, x = KINDS[name].make(d, n), torch.randn(1, n, d, requires_grad=True)
            points[f"time, {axis}"][value] = seconds(layer, x, args.rounds)
            points[f"memory, {axis}"][value] = kept_bytes(layer, x)
        print(f"# {name} done", file=sys.stderr, flush=True)
    return found


def tables(found: Found, lengths: list[int]) -> list[str]:
    """Markdown: exponents and path lengths next to the theory's, then milliseconds and megabytes."""
    heads = ["layer", "theory", "time, n", "memory, n", "time, d", "memory, d", "path", *(f"n = {n}" for n in lengths)]
    lines = heading(*heads)
    for name, points in found.items():
        kind = KINDS[name]
        torch.set_default_dtype(torch.float64)
        paths = [path_length((kind.operation or kind.make)(16, n), 16, n) for n in lengths]
        torch.set_default_dtype(torch.float32)
        cells = [name, kind.cost, *(f"{exponent(p):.2f}" for p in points.values()), kind.path, *map(str, paths)]
        lines.append(row(*cells))
    for axis in "nd":
        values = list(next(iter(found.values()))[f"time, {axis}"])
        lines += ["", *heading("ms; MB", *(f"{axis} = {v}" for v in values))]
        for name, points in found.items():
            pairs = [(points[f"time, {axis}"][v], points[f"memory, {axis}"][v]) for v in values]
            lines.append(row(name, *(f"{1e3 * s:.1f}; {b / 1e6:.1f}" for s, b in pairs)))
    return lines


def plot(found: Found, path: Path) -> None:
    """Time and memory over n and d, all axes logarithmic."""
    import matplotlib.pyplot as plt

    _, panels = plt.subplots(1, 4, figsize=(17, 4), layout="constrained")
    for axes, key in zip(panels, next(iter(found.values())), strict=True):
        for name, points in found.items():
            factor = 1e3 if key.startswith("time") else 1e-6
            axes.plot(list(points[key]), [factor * y for y in points[key].values()], "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel=key[-1], ylabel="ms" if key.startswith("time") else "MB")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    plt.savefig(path)


def main() -> None:
    """Measure, write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1 << i for i in range(6, 14)], help="n, at --width")
    parser.add_argument("--widths", nargs="+", type=int, default=[1 << i for i in range(5, 11)], help="d, at --length")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paths", nargs="+", type=int, default=[16, 64, 256], help="lengths for paths")
    parser.add_argument("--out", type=Path, help="OUT.md and OUT.svg are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args)
    write(tables(found, args.paths), partial(plot, found), args.out)


if __name__ == "__main__":
    main()
