"""One attention layer with a sparse pattern on a GPU: FlexAttention, gathered blocks, and a dense product with a mask.

    python benchmarks/sparse_kernels.py                               # 1k to 64k tokens, bfloat16
    python benchmarks/sparse_kernels.py --lengths 2048 --patterns fixed

For each pattern and length: outputs and gradients of the three agree (the largest difference over the largest value is
printed), and the time and the peak memory of a forward and a backward pass, the lowest of `--rounds`. The dense product
is left out from `--dense` tokens on. Needs a CUDA device; the first call of each pattern compiles its kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import torch
from results import heading, row

from transduce.nn.attention import SelfAttention
from transduce.nn.patterns import FlexBias, SplitBias, make_patterns, sequence_bias, step_bias
from transduce.nn.positions import POSITIONS

SIZES: dict[str, dict[str, Any]] = {
    "local": {"size": 256},
    "strided": {"size": 256},
    "fixed": {"size": 1024, "summary": 8},
}
"""As in `benchmarks/long_context.py`."""


def in_blocks(bias: Any) -> Any:
    """The same bias, computed in gathered blocks."""
    if isinstance(bias, SplitBias):
        return SplitBias([(n, in_blocks(part)) for n, part in bias.parts])
    return bias.blocks if isinstance(bias, FlexBias) else bias


def once(layer: SelfAttention, x: torch.Tensor, bias: Any) -> tuple[float, int, list[torch.Tensor]]:
    """Seconds, bytes above those before, and the output and gradient of a forward and a backward pass."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x, bias=bias, rotate=lambda q: q)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() - before, [y.detach(), gradient]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, each over the largest value."""
    pairs = zip(one, other, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def line(name: str, n: int, args: argparse.Namespace) -> str:
    """A row of the table."""
    device = torch.device("cuda")
    torch.manual_seed(1)
    layer = SelfAttention(d_model=args.d_model, n_heads=args.heads).to(device)
    x = torch.randn(max(1, args.tokens // n), n, args.d_model, device=device, requires_grad=True)
    scheme = POSITIONS[args.positions](
        d_model=args.d_model, d_head=args.d_model // args.heads, max_positions=n, n_heads=args.heads, causal=True
    ).to(device)
    (pattern,) = make_patterns(name, **SIZES[name], n_heads=args.heads, causal=True)
    places = torch.arange(n, device=device)
    flex = sequence_bias(pattern, places, scheme)
    ways = {"flex": flex, "blocks": in_blocks(flex)}
    if n <= args.dense:
        ways["dense"] = step_bias(pattern, places, places, scheme, history=None, masked=True)
    measured = {way: [once(layer, x, bias) for _ in range(args.rounds + 1)][1:] for way, bias in ways.items()}
    columns = [
        f"{min(s for s, _, _ in found) * 1e3:.2f} ms, {min(size for _, size, _ in found) >> 20} MiB"
        for found in measured.values()
    ]
    gaps = [f"{difference(measured['flex'][0][2], found[0][2]):.1e}" for found in list(measured.values())[1:]]
    return row(name, f"{n:,}", *columns, *[""] * (3 - len(columns)), ", ".join(gaps))


def main() -> None:
    """Parse arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, type=int)
    parser.add_argument("--patterns", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--positions", choices=("none", "alibi", "t5"), default="none")
    add("--lengths", nargs="+", default=[1 << i for i in range(10, 17)])
    add("--tokens", default=1 << 16, help="tokens of a batch, in rows of the length")
    add("--d-model", default=512)
    add("--heads", default=8)
    add("--rounds", default=5)
    add("--dense", default=1 << 13, help="longest sequence of the dense product")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sparse_kernels.py: no CUDA device; on a CPU sparse patterns are computed in blocks")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, positions {args.positions}\n")
    print(*heading("pattern", "length", "FlexAttention", "blocks", "dense", "difference from both"), sep="\n")
    for name in args.patterns:
        for n in args.lengths:
            print(line(name, n, args), flush=True)


if __name__ == "__main__":
    main()
