"""Training speed of recurrent encoder-decoders, compared with a plain PyTorch loop of the same sizes.

The plain model is what tutorials show: `nn.LSTM` or `nn.GRU` over packed sequences as the encoder, and as the decoder
`nn.LSTMCell` or `nn.GRUCell` in a loop with attention in each step. Both compute the same equations, forward and
backward; the loss is label-smoothed cross-entropy, ours in chunks. One thread; CPU time, which other programs affect
little; the two take turns.

    python benchmarks/rnn_speed.py --preset rnn-tiny --repeat 10
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.config import model_settings, resolve_preset
from transduce.models.registry import build_model
from transduce.training.loss import label_smoothed_loss

CASES = {
    "no attention, LSTM": {"attention": "none"},
    "Luong general, LSTM": {"attention": "general", "input_feeding": False},
    "Luong general with input feeding, LSTM": {"attention": "general"},
    "Bahdanau, LSTM": {"attention": "bahdanau"},
    "Bahdanau, GRU": {"attention": "bahdanau", "cell": "gru"},
}


class Plain(nn.Module):
    """An encoder-decoder of PyTorch's recurrent layers."""

    def __init__(self, s: object, vocab: int) -> None:
        super().__init__()
        self.s, self.is_lstm, d, h = s, s.cell == "lstm", s.d_model, s.d_hidden
        layer, cell = (nn.LSTM, nn.LSTMCell) if self.is_lstm else (nn.GRU, nn.GRUCell)
        self.embedding = nn.Embedding(vocab, d)
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        self.encoder = layer(d, h // 2, s.n_encoder_layers, batch_first=True, bidirectional=True)
        self.first = nn.ModuleList(nn.Linear(h, h) for _ in range(2 if self.is_lstm else 1))
        self.is_bahdanau, self.is_fed = s.attention == "bahdanau", s.attention == "general" and s.input_feeding
        self.by_steps = self.is_bahdanau or self.is_fed
        if self.by_steps:
            self.cell = cell(d + (h if self.is_bahdanau else d), h)
        else:
            self.decoder = layer(d, h, batch_first=True)
        self.key = nn.Linear(h, h, bias=self.is_bahdanau)
        if self.is_bahdanau:
            self.query, self.score = nn.Linear(h, h, bias=False), nn.Linear(h, 1, bias=False)
            self.readout = nn.Linear(2 * h + d, 2 * d)
        else:
            self.readout = nn.Linear(h if s.attention == "none" else 2 * h, d, bias=False)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        scale = self.s.d_model**0.5
        mask = src != 0
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(src) * scale, mask.sum(1), batch_first=True, enforce_sorted=False
        )
        memory, last = self.encoder(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(memory, batch_first=True, total_length=src.shape[1])
        last = last if self.is_lstm else (last,)
        state = tuple(
            torch.tanh(f(part[-2:].transpose(0, 1).flatten(1))) for f, part in zip(self.first, last, strict=True)
        )
        x, keys = self.embedding(tgt) * scale, self.key(memory) if self.s.attention != "none" else memory
        if not self.by_steps:
            given = tuple(part[None].contiguous() for part in state)
            hidden, _ = self.decoder(x, given if self.is_lstm else given[0])
            if self.s.attention != "none":
                hidden = torch.cat([self.attend(hidden, keys, memory, mask), hidden], -1)
            return self.readout(hidden).tanh()
        return self.steps(x, state, keys, memory, mask)

    def attend(self, query: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        if self.is_bahdanau:
            scores = self.score(torch.tanh(self.query(query)[:, :, None] + keys[:, None])).squeeze(-1)
        else:
            scores = query @ keys.transpose(1, 2)
        return scores.masked_fill(~mask[:, None], -1e30).softmax(-1) @ memory

    def steps(self, x: Tensor, state: tuple[Tensor, ...], keys: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        feed, outputs = x.new_zeros(len(x), x.shape[2]), []
        for now in x.unbind(1):
            before, more = state[0], feed
            if self.is_bahdanau:
                more = self.attend(before[:, None], keys, memory, mask)[:, 0]
            inner = torch.cat([now, more], -1)
            state = self.cell(inner, state) if self.is_lstm else (self.cell(inner, state[0]),)
            if self.is_bahdanau:
                outputs.append(torch.maximum(*self.readout(torch.cat([before, more, now], -1)).chunk(2, -1)))
            else:
                context = self.attend(state[0][:, None], keys, memory, mask)[:, 0]
                feed = self.readout(torch.cat([context, state[0]], -1)).tanh()
                outputs.append(feed)
        return torch.stack(outputs, 1)


def batch(n: int, length: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sentences of similar lengths, as in a training batch."""
    draw = torch.Generator().manual_seed(0)

    def side() -> Tensor:
        ids = torch.randint(4, vocab, (n, length), generator=draw)
        lengths = torch.randint(length - 3, length + 1, (n, 1), generator=draw)
        return ids.masked_fill(torch.arange(length) >= lengths, 0)

    return side(), side(), side()


def seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="rnn-tiny")
    parser.add_argument("--tokens", type=int, default=2048, help="target tokens per batch")
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--without-loss", action="store_true", help="without the output matrix and the softmax")
    parser.add_argument("--only", default="", help="part of the name of a case")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if (depth := resolve_preset(model_settings(preset=args.preset)).depth[1]) > 1:
        sys.exit(f"rnn_speed.py: --preset {args.preset} has {depth} decoder layers; the plain model has one")
    src, tgt_in, tgt_out = batch(args.tokens // args.length, args.length, args.vocab)
    n_tokens = int((tgt_out != 0).sum())
    print(f"{args.preset}, {len(src)} x {args.length} tokens, {args.precision}: target tokens/s of CPU time")
    for name, options in CASES.items():
        if args.only not in name:
            continue
        s = resolve_preset(model_settings(preset=args.preset, dropout=0.0, readout_scale=1.0, **options))
        ours, plain = build_model(s, n_src=args.vocab, n_tgt=args.vocab), Plain(s, args.vocab)

        def own_loss(hidden: Tensor, ours: Any = ours) -> Tensor:
            return label_smoothed_loss(hidden, ours.output_weight, tgt_out, smoothing=0.1)[0]

        def plain_loss(hidden: Tensor, plain: Plain = plain) -> Tensor:
            logits = F.linear(hidden, plain.embedding.weight).flatten(0, 1).float()
            return F.cross_entropy(logits, tgt_out.flatten(), ignore_index=0, label_smoothing=0.1, reduction="sum")

        def step(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bfloat16"):
                hidden = model(src, tgt_in)
                total = hidden.float().square().sum() if args.without_loss else loss(hidden)
            total.backward()
            model.zero_grad(set_to_none=True)

        pair = {
            "ours": lambda step=step, ours=ours, loss=own_loss: step(ours, loss),
            "plain": lambda step=step, plain=plain, loss=plain_loss: step(plain, loss),
        }
        times: dict[str, list[float]] = {key: [] for key in pair}
        for _ in range(args.repeat + 1):
            for key, run in pair.items():
                times[key].append(seconds(run))
        one, other = (statistics.median(times[key][1:]) for key in pair)
        ratios = [b / a for a, b in zip(times["ours"][1:], times["plain"][1:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        speeds = f"ours {n_tokens / one:7,.0f}  plain {n_tokens / other:7,.0f}"
        print(f"  {name:<40} {speeds}  ratio {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
