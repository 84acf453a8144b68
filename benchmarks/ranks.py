"""Several processes compared with several threads on one CPU: target tokens per second, interleaved, and their ratio.

    python benchmarks/ranks.py --size tiny --updates 30 --rounds 3
    python benchmarks/ranks.py --memory --size big --vocab 24000

The same updates (random sentence pairs with the lengths of captions, 4,096 padded tokens per update, Adam) by one
process with all cores as threads, and by as many processes with one thread each, which share every update. Each round
runs both, one after the other. The table gives the median of the rounds, and the share of the time that was spent on
summing gradients, including the wait for the slower process. `--parallel shard` measures sharded processes.

`--memory`: instead, bytes of the weights and the optimizer's state, and resident memory after two updates, in the
largest of 1, 2 and 4 processes that share one model (FSDP).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

WARM = 3


def work(args: argparse.Namespace) -> None:
    """Train as one of the processes; the main process prints the measurements."""
    import numpy as np
    import torch

    from transduce.config.architectures import model_settings, resolve_preset
    from transduce.config.settings import TrainingSettings
    from transduce.data.store import TokenStore
    from transduce.distributed.group import join_ranks
    from transduce.models.registry import build_model
    from transduce.process import keep_freed_memory
    from transduce.runs.tensors import shard_of
    from transduce.training.feed import DataPosition, PairFeeder
    from transduce.training.optim import optimizer_tensors
    from transduce.training.step import Updater

    if not args.memory:
        keep_freed_memory()
    draw, cpu = np.random.default_rng(1), torch.device("cpu")
    lengths = np.clip(draw.normal(14, 5, size=(8000, 1)) + draw.normal(0, 2, size=(8000, 2)), 3, 60).astype(int)
    src, tgt = ([draw.integers(4, args.vocab, size=n).tolist() for n in side] for side in lengths.T)
    settings = TrainingSettings(optimizer="adam", lr=1e-3, batch_tokens=args.batch_tokens, parallel=args.parallel)
    torch.manual_seed(1)
    model = build_model(resolve_preset(model_settings(preset=args.size)), n_src=args.vocab, n_tgt=args.vocab)
    n_parameters = sum(p.numel() for p in model.parameters())
    with join_ranks() as ranks:
        ranks.start({"timeout": 1.0})
        feeder = PairFeeder(TokenStore.from_lists(src, tgt), settings, device=cpu)
        feeder.rank, feeder.n_ranks = ranks.rank, ranks.size
        updater = Updater(model, settings, device=cpu, precision=args.precision, ranks=ranks)
        summing, n_targets, began, finish = 0.0, 0, 0.0, ranks.finish_reduction

        def timed(sums: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
            nonlocal summing
            start = time.perf_counter()
            try:
                return finish(sums, parameters)
            finally:
                summing += time.perf_counter() - start

        ranks.finish_reduction = timed  # type: ignore[method-assign]
        n_updates = 2 if args.memory else args.updates + WARM
        for number, feed in enumerate(islice(feeder.feeds(DataPosition()), n_updates)):
            if number == WARM:
                summing, n_targets, began = 0.0, 0, time.perf_counter()
            updater.update(feed.batches, 1.0, n_targets=feed.n_targets, dummies=feed.dummies)
            n_targets += feed.n_targets
        seconds = time.perf_counter() - began
        kept = [*model.parameters(), *optimizer_tensors(updater.optimizer).values()]
        found = {"tokens_s": n_targets / seconds, "summing": summing / seconds, "parameters": n_parameters}
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        print(json.dumps({**found, "kept": sum(shard_of(tensor).nbytes for tensor in kept), "resident": resident}))


def run(n: int, threads: int) -> list[dict[str, float]]:
    """Measure `n` processes with this number of threads each."""
    processes = []
    for rank in range(n):
        process = {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29511",
        }
        environment = os.environ | process | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure_memory() -> None:
    """Print the table of `--memory`."""
    print("| processes | weights and optimizer, MB | of one process | resident, MB |\n|---|---|---|---|")
    first = 0.0
    for n in (1, 2, 4):
        found = run(n, 1)
        kept, resident = (max(one[name] for one in found) / 1e6 for name in ("kept", "resident"))
        first = first or kept
        print(f"| {n} | {kept:,.0f} | {kept / first:.3f} | {resident:,.0f} |", flush=True)
    print(f"{found[0]['parameters']:,.0f} parameters")


def main() -> None:
    """Parse, run the rounds, print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", help="a preset")
    parser.add_argument("--precision", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--parallel", default="replicate", choices=("replicate", "shard"))
    parser.add_argument("--memory", action="store_true", help="measure memory instead of speed")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        args.parallel, args.batch_tokens, args.precision = "shard", 256, "float32"
    if args.worker:
        work(args)
        return
    if args.memory:
        measure_memory()
        return
    cores = len(os.sched_getaffinity(0))
    ways = {f"1 process, {cores} threads": (1, cores), f"{cores} processes, 1 thread each": (cores, 1)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            found[name].append(run(*way)[0])
            print(f"# {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    first = statistics.median(one["tokens_s"] for one in next(iter(found.values())))
    print(f"| {args.size}, {args.precision} | target tokens/s | ratio | time spent on summing |\n|---|---|---|---|")
    for name, ones in found.items():
        speeds = [one["tokens_s"] for one in ones]
        middle, share = statistics.median(speeds), statistics.median(one["summing"] for one in ones)
        print(
            f"| {name} | {middle:,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f}) | {middle / first:.2f} | {share:.1%} |"
        )


if __name__ == "__main__":
    main()
