"""The cost of saving: the share of training time with a checkpoint every 100 updates.

    python benchmarks/saving.py --preset tiny --rounds 6

Trains in blocks of updates and saves after every second block as a training does: write, checksum, sync to the disk,
rename, remove old checkpoints. The share is the time of one saving relative to that of 100 updates. `--ahead` writes in
another thread, as with weights on a GPU: a saving is then the time that training waits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from transduce.config.architectures import resolve_preset
from transduce.config.settings import Settings
from transduce.data.store import TokenStore
from transduce.logging import Log
from transduce.models.registry import build_model
from transduce.process import keep_freed_memory
from transduce.runs.folder import RunFolder
from transduce.training.feed import DataPosition, PairFeeder
from transduce.training.loop import Trainer
from transduce.training.step import Updater
from transduce.training.validate import Validator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--updates", type=int, default=10, help="updates of a block")
    parser.add_argument("--ahead", action="store_true", help="write while training continues")
    given = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(1)
    training = {"batch_tokens": 4096, "optimizer": "adam", "lr": 1e-3, "schedule": "linear", "warmup_updates": 10}
    more = {"max_updates": 10**6, "valid_updates": 10**6, "precision": "float32", "device": "cpu"}
    settings = Settings.from_mapping({"model": {"preset": given.preset}, "training": training | more})
    model = build_model(resolve_preset(settings.model), n_src=given.vocab, n_tgt=given.vocab)
    draw, device = np.random.default_rng(1), torch.device("cpu")
    sides = [[draw.integers(4, given.vocab, size=draw.integers(8, 24)).tolist() for _ in range(6000)] for _ in range(2)]
    feeder = PairFeeder(TokenStore.from_lists(*sides), settings.training, device=device)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        RunFolder.create(Path(folder) / "run", settings, "") as run,
    ):
        updater = Updater(model, settings.training, device=device, precision="float32")
        validator = Validator(model, feeder.batches, smoothing=0.1)
        trainer = Trainer(model, run, updater=updater, feeder=feeder, validator=validator, log=Log(quiet=True))
        trainer.session._writes_ahead = given.ahead
        trainer._start_or_resume()
        feeds = feeder.feeds(DataPosition())
        updates: list[float] = []
        savings: list[float] = []
        for number in range(2 * given.rounds + 1):
            began = time.perf_counter()
            for _ in range(given.updates):
                trainer._update(next(feeds))
            middle = time.perf_counter()
            if number % 2:
                trainer._save()
                savings.append(time.perf_counter() - middle)
            if number:
                updates.append((middle - began) / given.updates)
            else:  # the first warms up
                start = middle
        trainer.session.writer.wait()
        total = time.perf_counter() - start
        size = sum(file.stat().st_size for file in run.checkpoints.at(run.checkpoints.updates()[0]).iterdir())
    update, saving = statistics.median(updates), statistics.median(savings)
    print(f"{given.preset}: an update {update * 1e3:.0f} ms, a saving {saving * 1e3:.0f} ms ({size / 1e6:.1f} MB)")
    print(f"{2 * given.rounds * given.updates} updates with {given.rounds} savings: {total:.2f} s")
    print(f"savings: {', '.join(f'{s * 1e3:.0f}' for s in savings)} ms")
    print(f"every 100 updates a saving takes {saving / (100 * update + saving):.2%} of the time")


if __name__ == "__main__":
    main()
