"""The cost model of `transduce doctor --gpus` against this CPU: seconds per update, predicted and measured.

    python benchmarks/cost_model.py --sizes tiny base

The machine is described as a GPU is. A large product in the training's precision is measured here, so what it reaches
is `PRODUCTS` of the peak. The numbers kept for the gradient pass through the memory of a GPU, and through the cache of
a CPU, because one layer's numbers fit in it.
The updates are of one process, on random sentences without padding. The speed of a shared machine varies, so it is
measured beside every update; printed are medians, and the smallest and the largest error. Run it on an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Iterator
from itertools import islice

import torch
from training import peak_flops

from transduce.config.kinds import model_settings, resolve_preset
from transduce.config.model import ModelSettings
from transduce.config.settings import TrainingSettings
from transduce.data.batch import collate
from transduce.data.examples import Example
from transduce.doctor.cluster import GPUS, PRODUCTS, SENTENCE, Cluster, Gpu, forecast
from transduce.machine import choose_precision
from transduce.models.registry import build_model
from transduce.process import keep_freed_memory
from transduce.training.step import PRECISIONS, Updater

CPU = torch.device("cpu")
VOCABULARY = 8000
ROWS = 128  # sentences of an update


def this_machine(d_model: int, precision: str) -> Gpu:
    """Operations and bytes per second, measured."""
    kept = torch.randn(ROWS * SENTENCE, d_model).to(PRECISIONS[precision])
    copy = torch.empty_like(kept)
    bandwidth = 2 * kept.nbytes / min(timeit.repeat(lambda: copy.copy_(kept), number=1, repeat=200))
    return Gpu(peak_flops(precision) / PRODUCTS, kept.element_size(), 0.0, bandwidth, bandwidth)


def updates(settings: ModelSettings, precision: str) -> Iterator[float]:
    """Make updates, and yield the seconds of each."""
    torch.manual_seed(1)
    model = build_model(settings, n_src=VOCABULARY, n_tgt=VOCABULARY)
    updater = Updater(model, TrainingSettings(optimizer="adam", lr=1e-3), device=CPU, precision=precision)
    while True:
        ids = torch.randint(4, VOCABULARY, (2, ROWS, SENTENCE - 1)).tolist()
        batch = collate([Example(src=src, tgt=tgt) for src, tgt in zip(*ids, strict=True)])
        began = time.perf_counter()
        updater.update([batch], 1.0)
        yield time.perf_counter() - began


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "base"])
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--precision", choices=PRECISIONS, default=choose_precision(CPU), help="by default %(default)s")
    args = parser.parse_args()
    keep_freed_memory()
    print("| model | peak | cache | seconds per update | predicted | error |\n|---|---|---|---|---|---|")
    for size in args.sizes:
        settings, found = resolve_preset(model_settings(preset=size)), list[tuple[float, ...]]()
        for measured in islice(updates(settings, args.precision), 2, args.updates + 2):  # the first two are slower
            GPUS["here"] = here = this_machine(settings.d_model, args.precision)
            cluster, n_targets = Cluster("here", n_gpus=1), ROWS * SENTENCE
            predicted = forecast(settings, cluster, vocab_size=VOCABULARY, targets=n_targets).seconds_per_update
            error = predicted / measured - 1
            found.append((here.operations / 1e9, here.bandwidth / 1e9, measured, predicted, error))
        peak, cache, measured, predicted, error = map(statistics.median, zip(*found, strict=True))
        errors = [error for *_, error in found]
        speeds = f"{peak:,.0f} GFLOP/s | {cache:,.0f} GB/s | {measured:.3f} | {predicted:.3f}"
        print(f"| {size} | {speeds} | {error:+.0%} ({min(errors):+.0%} to {max(errors):+.0%}) |")


if __name__ == "__main__":
    main()
