"""Training speed of recurrent encoder-decoders on real text, compared with JoeyNMT and OpenNMT-py.

    python -m venv PEERS; PEERS/bin/pip install --no-deps joeynmt==2.3.0 OpenNMT-py==3.5.1 importlib_metadata==6.8.0
    PEERS/bin/python benchmarks/rnn_peers.py --data TOK_LC       # an environment that also has transduce and torch

One-layer encoder in both directions, one-layer decoder with Luong's general attention and input feeding, all widths
equal, no dropout, separate embeddings and output matrix, label smoothing 0.1: forward, loss and backward, each with its
own model and loss, on the same batches of words. The optimizer's step, the same for all, is left out. One thread; CPU
time, which other programs affect little; the three take turns. Packages that the peers import for work on text, and
that these models do not use, may be missing.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from results import heading, row
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.config.architectures import model_settings
from transduce.models.registry import build_model
from transduce.nn.loss import label_smoothed_loss

UNUSED = (
    *("spacy", "fasttext", "pyonmttok", "ahocorasick", "rapidfuzz", "waitress", "subword_nmt", "sacremoses"),
    *("tensorboard", "absl", "configargparse", "ctranslate2", "datasets", "pandas", "matplotlib"),
)
"""Packages that the peers import, and that their models do not use."""
SMOOTHING, MIN_COUNT, PAD, UNK, BOS, EOS = 0.1, 2, 0, 1, 2, 3
Batch = tuple[Tensor, Tensor]  # source and target ids [B, S], with BOS and EOS around the target
Step = Callable[[Batch], Tensor]  # to the summed loss


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports empty modules in place of packages in UNUSED that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        pass


def batches(data: Path, *, tokens: int, n: int) -> tuple[list[Batch], int]:
    """`n` batches of pairs of similar length, spread over all lengths, and the size of the larger vocabulary."""
    sides = [(data / f"train.{lang}").read_text(encoding="utf-8").splitlines()[:20000] for lang in ("en", "de")]
    ids, sizes = [], []
    for lines in sides:
        counts = Counter(word for line in lines for word in line.split())
        index = {word: i for i, word in enumerate(sorted(w for w, c in counts.items() if c >= MIN_COUNT), EOS + 1)}
        ids.append([[index.get(word, UNK) for word in line.split()] for line in lines])
        sizes.append(len(index) + EOS + 1)
    pairs = sorted(zip(*ids, strict=True), key=lambda pair: (len(pair[1]), len(pair[0])))
    found = []
    for i in range(n):
        chosen = pairs[(2 * i + 1) * len(pairs) // (2 * n) :]
        chosen = sorted(chosen[: tokens // (len(chosen[0][1]) + 1)], key=lambda pair: -len(pair[0]))
        src = [torch.tensor([*s, EOS]) for s, _ in chosen]
        tgt = [torch.tensor([BOS, *t, EOS]) for _, t in chosen]
        found.append(tuple(nn.utils.rnn.pad_sequence(side, batch_first=True) for side in (src, tgt)))
    return found, max(sizes)


def ours(cell: str, width: int, vocab: int) -> tuple[nn.Module, Step]:
    settings = model_settings(kind="rnn", cell=cell, d_model=width, d_hidden=width, dropout=0.0, tie="none")
    model: Any = build_model(settings, n_src=vocab, n_tgt=vocab)

    def step(batch: Batch) -> Tensor:
        src, tgt = batch
        return label_smoothed_loss(model(src, tgt[:, :-1]), model.output_weight, tgt[:, 1:], smoothing=SMOOTHING)[0]

    return model, step


def joeynmt(cell: str, width: int, vocab: int) -> tuple[nn.Module, Step]:
    from joeynmt.decoders import RecurrentDecoder
    from joeynmt.embeddings import Embeddings
    from joeynmt.encoders import RecurrentEncoder
    from joeynmt.model import Model

    words = SimpleNamespace(
        pad_index=PAD, bos_index=BOS, eos_index=EOS, sep_index=None, unk_index=UNK, specials=[], lang_tags=[]
    )
    src, tgt = (Embeddings(embedding_dim=width, vocab_size=vocab, padding_idx=PAD) for _ in range(2))
    encoder = RecurrentEncoder(rnn_type=cell, hidden_size=width // 2, emb_size=width)
    decoder = RecurrentDecoder(
        rnn_type=cell, emb_size=width, hidden_size=width, encoder=encoder, attention="luong", vocab_size=vocab
    )
    model = Model(encoder, decoder, src, tgt, words, words)
    model.loss_function = ("crossentropy", SMOOTHING)

    def step(batch: Batch) -> Tensor:
        src, tgt = batch
        mask = (src != PAD)[:, None]
        given = {"src": src, "src_mask": mask, "src_length": mask.sum((1, 2)), "trg_input": tgt[:, :-1]}
        return model("loss", **given, trg=tgt[:, 1:], trg_mask=(tgt[:, 1:] != PAD)[:, None])[0]

    return model, step


def opennmt(cell: str, width: int, vocab: int) -> tuple[nn.Module, Step]:
    from onmt.decoders.decoder import InputFeedRNNDecoder
    from onmt.encoders.rnn_encoder import RNNEncoder
    from onmt.models.model import NMTModel
    from onmt.modules import Embeddings

    src, tgt = (Embeddings(width, vocab, PAD) for _ in range(2))
    encoder = RNNEncoder(cell.upper(), True, 1, width, embeddings=src)
    model = NMTModel(encoder, InputFeedRNNDecoder(cell.upper(), True, 1, width, attn_type="general", embeddings=tgt))
    model.generator = nn.Linear(width, vocab)
    for parameter in model.parameters():  # its layers come without values
        nn.init.uniform_(parameter, -0.1, 0.1)

    def step(batch: Batch) -> Tensor:
        src, tgt = (side[:, :, None] for side in batch)
        hidden, _ = model(src, tgt, (batch[0] != PAD).sum(1))
        logits, gold = model.generator(hidden.flatten(0, 1)), batch[1][:, 1:].flatten()
        return F.cross_entropy(logits, gold, ignore_index=PAD, label_smoothing=SMOOTHING, reduction="sum")

    return model, step


MODELS = {"transduce": ours, "JoeyNMT": joeynmt, "OpenNMT-py": opennmt}


def lines(cell: str, data: list[Batch], vocab: int, args: argparse.Namespace) -> Iterator[str]:
    """The speed of each model, and how much faster ours is: the median over the rounds, and its quartiles."""
    made = {name: make(cell, args.width, vocab) for name, make in MODELS.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(args.rounds + 1):
        for name, (model, step) in made.items():
            times[name].append(seconds(lambda step=step: [step(batch).backward() for batch in data]))
            model.zero_grad(set_to_none=True)
    n_tokens = sum(int((tgt[:, 1:] != PAD).sum()) for _, tgt in data)
    for name, (model, _) in made.items():
        ratios = [b / a for a, b in zip(times["transduce"][1:], times[name][1:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        n_parameters, speed = sum(p.numel() for p in model.parameters()), n_tokens / statistics.median(times[name][1:])
        yield row(name, cell, f"{n_parameters:,}", f"{speed:,.0f}", f"{middle:.2f} ({low:.2f} to {high:.2f})")


def seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    """Parse arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.en and train.de, tokenized")
    parser.add_argument("--cells", nargs="+", choices=("lstm", "gru"), default=["lstm", "gru"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="target tokens per batch, padding included")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    sys.meta_path.append(Unused())
    torch.set_num_threads(1)
    data, vocab = batches(args.data, tokens=args.tokens, n=args.batches)
    print(f"torch {torch.__version__}, one thread, batches of {args.tokens} target tokens, {vocab:,} words, float32\n")
    print(*heading("program", "cell", "parameters", "target tokens per second", "time over ours"), sep="\n")
    for cell in args.cells:
        for line in lines(cell, data, vocab, args):
            print(line, flush=True)


if __name__ == "__main__":
    main()
