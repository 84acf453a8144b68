"""Training speed of ConvS2S compared with plain PyTorch, and of the star's encoder compared with self-attention.

The plain ConvS2S is what tutorials show: `nn.Conv1d` and `F.glu`, with attention that projects queries and contexts in
each layer. Both have the same sizes and numbers of weights, run forward and backward, and sum the squares of the hidden
states, without the output matrix. One thread; CPU time, which other programs affect little; the two take turns. The
ratio is that of the second time to the first: above 1, the first is faster.

    python benchmarks/conv_speed.py --preset convs2s-tiny --repeat 10
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.config.architectures import ConvS2SSettings, model_settings, resolve_preset
from transduce.models.registry import build_model
from transduce.models.star import StarTransformer

HALF = 0.5**0.5


class Plain(nn.Module):
    """ConvS2S from PyTorch's convolutions."""

    def __init__(self, s: ConvS2SSettings, vocab: int) -> None:
        super().__init__()
        d, c, k = s.d_model, s.d_conv, s.kernel_size
        self.embedding = nn.Embedding(vocab, d)
        self.positions = nn.ModuleList(nn.Embedding(s.max_positions, d) for _ in range(2))
        self.widen, self.narrow = (nn.ModuleList(nn.Linear(*n) for _ in range(2)) for n in ((d, c), (c, d)))
        self.encoder = nn.ModuleList(nn.Conv1d(c, 2 * c, k, padding=k // 2) for _ in range(s.n_encoder_layers))
        self.decoder = nn.ModuleList(nn.Conv1d(c, 2 * c, k, padding=k - 1) for _ in range(s.n_decoder_layers))
        self.query = nn.ModuleList(nn.Linear(c, d) for _ in self.decoder)
        self.context = nn.ModuleList(nn.Linear(d, c) for _ in self.decoder)

    def embed(self, ids: Tensor, side: int) -> Tensor:
        return self.embedding(ids) + self.positions[side].weight[: ids.shape[1]]

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        real = src != 0
        e, g = self.embed(src, 0), self.embed(tgt, 1)
        h = self.widen[0](e)
        for conv in self.encoder:
            inside = h.masked_fill(~real[:, :, None], 0).transpose(1, 2)
            h = (F.glu(conv(inside), dim=1).transpose(1, 2) + h) * HALF
        z = self.narrow[0](h)
        values, root = (z + e) * HALF, real.sum(1).sqrt()[:, None, None]
        h = self.widen[1](g)
        for conv, query, context in zip(self.decoder, self.query, self.context, strict=True):
            y = F.glu(conv(h.transpose(1, 2))[:, :, : h.shape[1]], dim=1).transpose(1, 2)
            scores = (query(y) + g) * HALF @ z.transpose(1, 2)
            weights = scores.masked_fill(~real[:, None], -1e30).softmax(-1)
            y = (y + context(weights @ values * root)) * HALF
            h = (y + h) * HALF
        return self.narrow[1](h)


def batch(n: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Sentences of similar lengths, as in a training batch."""
    draw = torch.Generator().manual_seed(0)

    def side() -> Tensor:
        ids = torch.randint(4, vocab, (n, length), generator=draw)
        lengths = torch.randint(max(1, length - 3), length + 1, (n, 1), generator=draw)
        return ids.masked_fill(torch.arange(length) >= lengths, 0)

    return side(), side()


def compare(name: str, first: Callable[[], Tensor], second: Callable[[], Tensor], *, args: Any, n_tokens: int) -> None:
    """Print the speeds of two computations, forward and backward, and the ratio of their times."""
    times: list[list[float]] = [[], []]
    for _ in range(args.repeat + 1):
        for known, forward in zip(times, (first, second), strict=True):
            start = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bfloat16"):
                total = forward().float().square().sum()
            total.backward()
            known.append(time.process_time() - start)
    one, two = (statistics.median(known[1:]) for known in times)
    ratios = sorted(b / a for a, b in zip(times[0][1:], times[1][1:], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    ratio = f"ratio {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
    print(f"  {name:<44} {n_tokens / one:9,.0f}  {n_tokens / two:9,.0f}  {ratio}", flush=True)


def star_encoder(model: StarTransformer, src: Tensor) -> Tensor:
    """The satellite nodes."""
    return model.encoder(model.src_embedding(src), real=src != 0)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="convs2s-tiny")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per batch and side")
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.preset}, batches of {args.tokens} tokens, {args.precision}: tokens/s of CPU time, one thread")
    sizes = {"n_src": args.vocab, "n_tgt": args.vocab}
    s = resolve_preset(model_settings(preset=args.preset, dropout=0.0))
    ours, plain = build_model(s, **sizes), Plain(s, args.vocab)
    for length in (12, 24, 96):
        src, tgt = batch(args.tokens // length, length, args.vocab)
        name = f"ConvS2S, ours and plain, {length} tokens"
        compare(name, partial(ours, src, tgt), partial(plain, src, tgt), args=args, n_tokens=int((tgt != 0).sum()))
    options = {"d_model": 128, "d_ff": 256, "n_heads": 4, "n_encoder_layers": 4, "n_decoder_layers": 1, "dropout": 0.0}
    star, full = (build_model(model_settings(kind=kind, **options), **sizes) for kind in ("star", "transformer"))
    for length in (24, 96, 512):
        src, _ = batch(max(1, args.tokens // length), length, args.vocab)
        name = f"encoder of a star and of a Transformer, {length}"
        n_tokens = int((src != 0).sum())
        compare(name, partial(star_encoder, star, src), partial(full.encode, src), args=args, n_tokens=n_tokens)


if __name__ == "__main__":
    main()
