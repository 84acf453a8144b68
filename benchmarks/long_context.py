"""Training on long sequences: CPU time and memory per token against the length, for each way to attend.

    python benchmarks/long_context.py --out long_context            # 1k to 64k tokens; about half an hour, one thread
    python benchmarks/long_context.py --lengths 1024 4096 --tokens 4096 --models dense local

A small language model (2 layers, d_model 128, 4 heads) is trained on updates of `--tokens` random tokens, as rows of
the given length, so that an update costs the same at every length if the cost per token does. Each model and length has
its own process, which makes a first update, and then measures the CPU time of others; the lowest counts. Memory is
the peak of resident memory above that before the first update. A model stops where its next length would take more
than `--limit` seconds, by the growth so far. OUT.md has the table, OUT.svg the plot.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from results import heading, row, write

SIZES = {"n_decoder_layers": 2, "d_model": 128, "d_ff": 512, "n_heads": 4, "dropout": 0.0}
GPT = {"kind": "gpt", "positions": "rotary"}
MODELS: dict[str, dict[str, Any]] = {
    "dense": GPT,
    "local": {**GPT, "decoder_pattern": "local", "window": 256},
    "strided": {**GPT, "decoder_pattern": "strided", "window": 256},
    "fixed": {**GPT, "decoder_pattern": "fixed", "window": 1024, "summary_tokens": 8},
    "transformer-xl": {"kind": "transformer-xl", "segment_length": 256, "memory_length": 256},
}
"""Model settings by name. The paper's stride is near the square root of the length, 256 for 64k."""
VOCAB = 256


def peak() -> int:
    """Bytes of resident memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def add_gradients(model: Any, ids: Any) -> None:
    """Add the gradients of the mean loss on rows of tokens; Transformer-XL reads them segment by segment."""
    from torch.nn import functional as F

    from transduce.models.transformer_xl import TransformerXL

    inputs, targets, carry = ids[:, :-1], ids[:, 1:], ()
    length = model.segment_length if isinstance(model, TransformerXL) else inputs.shape[1]
    for now, gold in zip(inputs.split(length, 1), targets.split(length, 1), strict=True):
        if isinstance(model, TransformerXL):
            hidden, carry = model(now, carry=carry)
        else:
            hidden = model(now)
        loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), gold.flatten(), reduction="sum")
        (loss / targets.numel()).backward()


def measure(name: str, length: int, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of CPU time and bytes of memory per token of an update of a model."""
    import torch

    from transduce.config.architectures import model_settings
    from transduce.models.registry import build_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model(model_settings(**SIZES, **MODELS[name]), n_src=VOCAB, n_tgt=VOCAB)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    ids = torch.randint(4, VOCAB, (max(1, tokens // length), length + 1))
    before, seconds = peak(), list[float]()
    for _ in range(rounds + 1):
        began = time.process_time()
        add_gradients(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    n = ids[:, 1:].numel()
    return {"seconds": min(seconds[1:]) / n, "bytes": (peak() - before) / n}


def measure_all(args: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """By model and length."""
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in args.models}
    for name in args.models:
        for length in args.lengths:
            known = [one["seconds"] * max(args.tokens, length) for length, one in found[name].items()]
            if len(known) > 1 and known[-1] * max(1.0, known[-1] / known[-2]) > args.limit:
                break
            command = [sys.executable, __file__, "--measure", name, "--lengths", str(length)]
            command += ["--tokens", str(args.tokens), "--rounds", str(args.rounds)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"# {name}, {length}: no result, exit code {done.returncode}", file=sys.stderr)
                break
            found[name][length] = json.loads(done.stdout)
            print(f"# {name}, {length}: {found[name][length]}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[int, dict[str, float]]], lengths: list[int]) -> list[str]:
    """Microseconds and bytes per token, and in brackets their ratio to the first length's."""
    lines = heading("model", "per token", *(f"{n:,}" for n in lengths))
    for name, by_length in found.items():
        for key, unit, factor in (("seconds", "µs", 1e6), ("bytes", "KB", 1e-3)):
            cells = list[str]()
            for n in lengths:
                value = by_length.get(n, {}).get(key)
                first = by_length.get(lengths[0], {}).get(key)
                ratio = f" ({value / first:.2f})" if value is not None and first else ""
                cells.append("" if value is None else f"{factor * value:.1f}{ratio}")
            lines.append(row(name, unit, *cells))
    return lines


def plot(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """Time and memory per token over the length, both axes logarithmic."""
    import matplotlib.pyplot as plt

    _, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = (("seconds", "CPU time per token, µs", 1e6), ("bytes", "memory per token, KB", 1e-3))
    for axes, (key, label, factor) in zip(panels, names, strict=True):
        for name, by_length in found.items():
            axes.plot(list(by_length), [factor * one[key] for one in by_length.values()], "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="length", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    panels[0].legend()
    plt.savefig(path)


def main() -> None:
    """Measure in child processes, write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1 << i for i in range(10, 17)])
    parser.add_argument("--tokens", type=int, default=1 << 16, help="tokens per update")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60, help="CPU seconds per update")
    parser.add_argument("--out", type=Path, help="OUT.md and OUT.svg are written")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.lengths[0], args.tokens, args.rounds)))
        return
    found = measure_all(args)
    write(table(found, args.lengths), partial(plot, found), args.out)


if __name__ == "__main__":
    main()
