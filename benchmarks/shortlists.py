"""CPU time of translation with and without a shortlist: random weights and lists, as speed does not depend on them.

    python benchmarks/shortlists.py                        # 6 + 6 layers, d_model 512, vocabulary of 32,000
    python benchmarks/shortlists.py --set model.n_decoder_layers=1

One thread. Rounds with and without a list alternate; printed are sentences per CPU second and the median of the ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from native_engines import engine_for
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.config.kinds import resolve_preset
from transduce.config.recipe import apply_overrides
from transduce.config.settings import Settings
from transduce.decoding.engine import DecodingInput
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.native_model import PRECISIONS
from transduce.text.special import EOS


def sources(n: int, n_tokens: int, n_listed: int) -> list[tuple[DecodingInput, DecodingInput]]:
    """Sentences of 8 to 24 tokens, whose outputs may be as long; without a list, and with one of `n_listed` tokens."""
    pick, found = random.Random(1), []
    for i in range(n):
        ids = [pick.randrange(4, n_tokens) for _ in range(pick.randint(8, 24))]
        allowed = np.array(sorted({EOS, *pick.sample(range(4, n_tokens), n_listed)}), np.int32)
        found.append((DecodingInput((i,), ids, len(ids)), DecodingInput((i,), ids, len(ids), (), allowed)))
    return found


def speed(engine: NativeEngine, batch: list[DecodingInput], options: DecodingOptions, *, alone: bool) -> float:
    """Sentences per CPU second."""
    began = time.process_time()
    for part in [[source] for source in batch] if alone else [batch]:
        engine.translate(part, options)
    return len(batch) / (time.process_time() - began)


def main() -> None:
    """Print a row per precision and search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the model")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--listed", type=int, default=500, help="tokens of a list")
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    values: dict[str, Any] = {"model": {"preset": "base"}}
    apply_overrides(values, given.set)
    settings = Settings.from_mapping(values)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    model = untrained(settings, n_src=given.vocabulary, n_tgt=given.vocabulary)
    pairs = sources(given.sentences, given.vocabulary, given.listed)
    print("| precision | beam | sentences | without | with | ratio |\n|---|---|---|---|---|---|", flush=True)
    for precision in PRECISIONS:
        engine = engine_for(model, settings, precision=precision, n_threads=1)
        for beam, alone in ((5, False), (5, True), (1, False), (1, True)):
            options = (DecodingOptions(beam=beam, scores=False, shortlist=listed) for listed in (False, True))
            whole, short = options
            rounds = []
            for number in range(given.rounds + 1):
                one = speed(engine, [pair[0] for pair in pairs], whole, alone=alone)
                two = speed(engine, [pair[1] for pair in pairs], short, alone=alone)
                rounds += [(one, two)] if number else []  # the first warms up
            without, with_list = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(two / one for one, two in rounds)
            how = "one at a time" if alone else "in one call"
            print(f"| {precision} | {beam} | {how} | {without:,.0f} | {with_list:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
