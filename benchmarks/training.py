"""Training speed compared with other toolkits: target tokens per second, interleaved in one run, and their ratios.

    python benchmarks/training.py --peers PEERS_FOLDER --python PEERS_PYTHON --size tiny --systems hf torchnn marian

PEERS_FOLDER contains the peers' scripts (common.py, train.py, marian.py); PEERS_PYTHON is the interpreter of an
environment with `transformers` and `pymarian`. All train one architecture on the same pieces of Multi30k in the same
batches (at most 4,096 padded tokens per side, post-norm, label smoothing 0.1, Adam, clipping). Each round runs every
system once, alone, in a separate process; the table gives the median of the rounds. For ours, the share of the
machine's measured peak is reported too. `transduce-torch` (training.kernels = "torch") is a system too; ours train in
`--precision`, by default in that of `transduce train` on this machine.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from transduce.machine import this_machine

SIZES = {"tiny": {"dropout": 0.3}, "base": {"dropout": 0.1}}
WARM = 3


def peak_flops(dtype: str, *, device: str = "cpu", seconds: float = 1.0) -> float:
    """Operations per second of a large matrix product on this machine, the best of many."""
    import torch

    n = 2048 if device == "cpu" else 8192
    a = torch.randn(n, n, dtype=getattr(torch, dtype), device=device)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * n**3 / (time.perf_counter() - began))
    return best


def training_flops(src_tokens: int, tgt_tokens: int, settings: object, vocab: int) -> float:
    """Operations of the matrix products of forward and backward for these real tokens, without attention scores."""
    d, ff = settings.d_model, settings.d_ff  # type: ignore[attr-defined]
    encoder = settings.n_encoder_layers * (4 * d * d + 2 * d * ff)  # type: ignore[attr-defined]
    decoder = settings.n_decoder_layers * (6 * d * d + 2 * d * ff)  # type: ignore[attr-defined]
    memory = settings.n_decoder_layers * 2 * d * d  # type: ignore[attr-defined]
    return 6.0 * (src_tokens * (encoder + memory) + tgt_tokens * (decoder + vocab * d))


def ours(peers: Path, size: str, updates: int, precision: str, kernels: str) -> dict[str, object]:
    """Our training step on the peers' batches."""
    sys.path.insert(0, str(peers))
    import torch
    from common import EOS, V, batches, load  # type: ignore[import-not-found]

    from transduce.config.architectures import model_settings, resolve_preset
    from transduce.config.settings import TrainingSettings
    from transduce.data.batch import collate
    from transduce.data.store import Example
    from transduce.models.registry import build_model
    from transduce.process import keep_freed_memory
    from transduce.training.step import Updater

    keep_freed_memory()
    sizes = resolve_preset(model_settings(preset=size, **SIZES[size]))
    model = build_model(sizes, n_src=V + 4, n_tgt=V + 4)
    settings = TrainingSettings(optimizer="adam", lr=1e-3, kernels=kernels)  # type: ignore[arg-type]
    updater = Updater(model, settings, device=torch.device("cpu"), precision=precision)
    pairs = load("train")

    def side(ids: list[int]) -> list[int]:
        return [i + 4 for i in ids if i != EOS]

    seen = []
    for rows in batches(pairs)[: updates + WARM]:
        began = time.perf_counter()
        batch = collate([Example(src=side(pairs[i][0]), tgt=side(pairs[i][1])) for i in rows])
        updater.update([batch], 1.0)
        seen.append((batch.n_targets, int((batch.src != 0).sum()), time.perf_counter() - began))
    seen = seen[WARM:]
    tgt, src, seconds = (sum(column) for column in zip(*seen, strict=True))
    peak = peak_flops(precision)
    used = training_flops(src, tgt, sizes, V + 4) / seconds
    return {
        "tgt_tokens_s": round(tgt / seconds),
        "gflops": round(used / 1e9),
        "peak_gflops": round(peak / 1e9),
        "share_of_peak": round(used / peak, 3),
    }


def command(system: str, args: argparse.Namespace) -> list[str]:
    """Return the command that runs one system once."""
    if system.startswith("transduce"):
        kernels = "torch" if system.endswith("torch") else "auto"
        head = [sys.executable, __file__, "--worker", args.precision, "--kernels", kernels, "--peers", str(args.peers)]
        return [*head, "--size", args.size, "--updates", str(args.updates)]
    tail = ["--size", args.size, "--updates", str(args.updates + WARM)]
    if system == "marian":
        return [args.python, str(args.peers / "marian.py"), *tail]
    return [args.python, str(args.peers / "train.py"), system, *tail, "--warm", str(WARM)]


def main() -> None:
    """Parse, run the rounds, print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--systems", nargs="*", default=["hf", "torchnn"])
    parser.add_argument("--precision", choices=("bfloat16", "float32"), help="default: that of `transduce train` here")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--kernels", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.peers, args.precision = args.peers.resolve(), args.precision or this_machine("cpu").precision
    if args.worker:
        print(json.dumps(ours(args.peers, args.size, args.updates, args.worker, args.kernels)))
        return
    speeds: dict[str, list[float]] = {}
    details: dict[str, object] = {}
    for _ in range(args.rounds):
        for system in ("transduce", *args.systems):
            done = subprocess.run(command(system, args), capture_output=True, text=True, check=False)
            found = re.search(r"(?:tgt_tokens_s|words_s)['\"]: ([\d.]+)", done.stdout)
            if not found:
                sys.exit(f"{system} reported no speed:\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")
            speeds.setdefault(system, []).append(float(found[1]))
            print(f"# {system}: {found[1]}", file=sys.stderr, flush=True)
            if system.startswith("transduce"):
                details = json.loads(done.stdout.splitlines()[-1])
    own = statistics.median(speeds["transduce"])
    print(f"| system | target tokens/s, {args.size} | transduce is faster by |\n|---|---|---|")
    for system, values in sorted(speeds.items(), key=lambda item: -statistics.median(item[1])):
        middle = statistics.median(values)
        spread = f"{min(values):,.0f}-{max(values):,.0f}"
        print(f"| {system} | {middle:,.0f} ({spread}) | {own / middle:.2f} |")
    print(f"\nlast run of transduce: {json.dumps(details)}")


if __name__ == "__main__":
    main()
