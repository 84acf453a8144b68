"""Measure one GPU: training speed, its share of the peak, memory, waits, a batch that does not fit, and translation.

`make gpu` runs it after the tests marked `gpu`.

    python benchmarks/gpu.py --size base --run runs/demo

Random pairs with the lengths of captions (mean 14) and of news (mean 29); up to 25,000 tokens of the longer side per
update, with padding: about 21,700 targets. `--device cpu --size tiny --updates 2 --batch-tokens 1000` shows on any
machine that it runs.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from training import peak_flops, training_flops

from transduce.config.architectures import model_settings, resolve_preset
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import TrainingSettings
from transduce.data.store import TokenStore
from transduce.decoding.translator import Translator
from transduce.demo.corpus import demo_pairs
from transduce.machine import choose_precision
from transduce.models.registry import build_model
from transduce.training.feed import DataPosition, Feed, PairFeeder, ahead
from transduce.training.step import Updater

VOCABULARY = 37_000
LENGTHS = {"captions": (2.58, 0.35), "news": (3.2, 0.6)}  # mean and standard deviation of the logarithm


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def feeder_of(lengths: str, batch_tokens: int, device: torch.device) -> PairFeeder:
    """Batches of random pairs."""
    draw = np.random.default_rng(1)
    mean, deviation = LENGTHS[lengths]
    n = max(400, 40 * batch_tokens // 14)
    src = np.clip(draw.lognormal(mean, deviation, n), 2, 200).astype(int)
    tgt = np.clip(src * draw.normal(1.05, 0.15, n), 2, 200).astype(int)
    sides = [[draw.integers(4, VOCABULARY, size=length) for length in side] for side in (src, tgt)]
    settings = TrainingSettings(optimizer="adam", lr=1e-3, batch_tokens=batch_tokens)
    return PairFeeder(TokenStore.from_lists(*sides), settings, device=device)


def updater_of(size: str, device: torch.device) -> Updater:
    """The model and its optimizer, in the precision of the machine."""
    torch.manual_seed(1)
    model = build_model(resolve_preset(model_settings(preset=size)), n_src=VOCABULARY, n_tgt=VOCABULARY)
    settings = TrainingSettings(optimizer="adam", lr=1e-3)
    return Updater(model, settings, device=device, precision=choose_precision(device))


def time_updates(updater: Updater, feeder: PairFeeder, n: int) -> tuple[float, float, np.ndarray]:
    """Seconds of the first `n` updates, seconds that the loop waited for their batches, and tokens of both sides."""
    device, waited, tokens = feeder.device, 0.0, np.zeros(2)
    began = time.perf_counter()
    with ahead(feeder.feeds(DataPosition()), n=2 if device.type == "cuda" else 0) as feeds:
        for _ in range(n):
            asked = time.perf_counter()
            feed: Feed = next(feeds)
            waited += time.perf_counter() - asked
            updater.update(feed.batches, 1.0, n_targets=feed.n_targets)
            tokens += feed.n_tokens - feed.n_targets, feed.n_targets
        synchronize(device)
    return time.perf_counter() - began, waited, tokens


def train(args: argparse.Namespace, lengths: str) -> str:
    """A row of the table.

    The same batches four times: their shapes are new at first, and captured as graphs at the second time.
    """
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    updater, feeder = updater_of(args.size, device), feeder_of(lengths, args.batch_tokens, device)
    time_updates(updater, feeder, 2)  # lets Triton compile
    early = [time_updates(updater, feeder, args.updates)[0] / args.updates * 1e3 for _ in range(2)]
    seconds, waited, tokens = min(time_updates(updater, feeder, args.updates) for _ in range(2))
    settings = resolve_preset(model_settings(preset=args.size))
    used = training_flops(int(tokens[0]), int(tokens[1]), settings, VOCABULARY) / seconds
    share = used / peak_flops(choose_precision(device), device=args.device)
    memory = torch.cuda.max_memory_reserved(device) / 1e9 if device.type == "cuda" else 0.0
    times = f"{early[0]:.0f} | {early[1]:.0f} | {seconds / args.updates * 1e3:.1f}"
    speed = f"{tokens[1] / seconds:,.0f} | {used / 1e12:.1f} | {share:.0%}"
    return f"| {args.size}, {lengths} | {times} | {speed} | {memory:.1f} | {waited / seconds:.0%} |"


def feed_alone(args: argparse.Namespace) -> str:
    """Target tokens per second that the feeder delivers without a model."""
    device = torch.device(args.device)
    feeds = feeder_of("news", args.batch_tokens, device).feeds(DataPosition())
    next(feeds)
    began = time.perf_counter()
    n_targets = sum(feed.n_targets for feed in islice(feeds, args.updates))
    synchronize(device)
    return f"The feeder alone delivers {n_targets / (time.perf_counter() - began):,.0f} target tokens/s."


def overflow(args: argparse.Namespace) -> str:
    """An update whose batch does not fit is made in parts."""
    if args.device != "cuda":
        return "A batch that does not fit: needs a GPU."
    device = torch.device("cuda", torch.cuda.current_device())
    updater = updater_of(args.size, device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(4e9 / torch.cuda.get_device_properties(device).total_memory, device)
    try:
        feed = next(feeder_of("news", 200_000, device).feeds(DataPosition()))
        found = updater.update(feed.batches, 1.0, n_targets=feed.n_targets)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    if updater.too_large is None:
        return "200,000 tokens fit into 4 GB: nothing was split."
    loss = found.loss_sum / found.n_targets
    return f"200,000 tokens in 4 GB: batches of {updater.too_large:,} slots are split; loss {loss:.3f}."


def translate(args: argparse.Namespace) -> Iterator[str]:
    """Sentences per second of a run of `transduce demo`."""
    texts = [pair.src for pair in demo_pairs("test", 4000, seed=1)]
    precision = "bfloat16" if args.device == "cuda" else "float32"
    translator = Translator.load(args.run, device=args.device, precision=precision)
    yield f"\n| {args.run.name} | sentences/s |\n|---|---|"
    for name, options in (("greedy", DecodingOptions(beam=1)), ("beam 5", DecodingOptions(beam=5))):
        translator.translate(texts[:100], options)
        began = time.perf_counter()
        translator.translate(texts, options)
        yield f"| {name} | {len(texts) / (time.perf_counter() - began):,.0f} |"


def main() -> None:
    """Print one section after the other, so that an interrupted run has shown what it measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="base", help="a preset")
    parser.add_argument("--batch-tokens", type=int, default=25_000)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--run", type=Path, help="a run of `transduce demo`, to translate with")
    args = parser.parse_args()
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU"
    print(f"{card}, torch {torch.__version__}, Python {platform.python_version()}\n", flush=True)
    print("| model | ms: new shape | captured | known | target tokens/s | TFLOP/s | of the peak | GB | waiting |")
    print("|---" * 9 + "|", flush=True)
    for lengths in LENGTHS:
        print(train(args, lengths), flush=True)
    for measure in (feed_alone, overflow):
        print(f"\n{measure(args)}", flush=True)
    if args.run is not None:
        for line in translate(args):
            print(line, flush=True)


if __name__ == "__main__":
    main()
