"""The native library's output on 1,000 sentences: the same as PyTorch's, and the same in any company.

    python benchmarks/native_parity.py --peers PEERS_FOLDER

For each precision and beam: how many sentences differ from PyTorch's float32, the largest difference of
log-probabilities and scores where the ids agree, and BLEU. Then how many sentences differ in any bit alone, in batches
of 1 to 64, shuffled, with one and two threads. PEERS_FOLDER: see translation.py. TRANSDUCE_NATIVE_ISA chooses the
instruction set.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sacrebleu
import torch

from transduce.config.decoding import DecodingOptions
from transduce.convert.importing import import_run
from transduce.decoding import native_engine
from transduce.decoding.engine import DecodingInput
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator


def load(run: Path, precision: NativePrecision, n_threads: int) -> Any:
    """An engine with this many threads."""
    native_engine.n_threads_to_use = lambda: n_threads  # type: ignore[attr-defined]
    return Translator.load(run, precision=precision).engine


def company(engines: Sequence[NativeEngine], asked: list[DecodingInput], options: DecodingOptions) -> int:
    """The number of sentences that differ between batches and between engines, which have 1 and 2 threads."""
    expected = engines[1].translate(asked, options)
    differing: set[int] = set()
    order = list(range(len(asked)))
    for size in (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 48, 63, 64):
        random.Random(size).shuffle(order)
        engine = engines[size % 2]
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            found = engine.translate([asked[i] for i in chosen], options)
            differing |= {i for i, one in zip(chosen, found, strict=True) if one != expected[i]}
    return len(differing)


def main() -> None:
    """Parse, compare, print a line per precision and beam."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    args = parser.parse_args()
    sys.path.insert(0, str(args.peers.resolve()))
    from common import DATA, MODEL  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        list(import_run(MODEL, Path(folder) / "run"))
        translator = Translator.load(Path(folder) / "run", precision="float32")
        engines = {p: [load(Path(folder) / "run", p, n_threads) for n_threads in (1, 2)] for p in PRECISIONS}
        exact_engine = TorchEngine(translator.model)
    sources, references = ((DATA / f"test.{lang}").read_text().splitlines() for lang in ("en", "de"))
    tokenizers = translator.tokenizers
    asked = [DecodingInput((i,), ids, 127) for i, ids in enumerate(tokenizers.src.encode_batch(sources))]
    torch.set_num_threads(2)
    for beam in args.beams:
        options = DecodingOptions(beam=beam)
        exact = exact_engine.translate(asked, options)
        for precision in PRECISIONS:
            found: Any = engines[precision][0].translate(asked, options)
            pairs = [(ours[0], theirs[0]) for ours, theirs in zip(found, exact, strict=True)]
            equal = [(ours, theirs) for ours, theirs in pairs if ours.ids == theirs.ids]
            output = [tokenizers.tgt.decode(ours.ids) for ours, _ in pairs]
            print(
                f"{precision} beam {beam}: {len(pairs) - len(equal)} of {len(pairs)} differ from PyTorch,"
                f" log-probabilities by at most {max(abs(a.log_prob - b.log_prob) for a, b in equal):.1e},"
                f" scores by {max(abs(a.score - b.score) for a, b in equal):.1e};"
                f" BLEU {sacrebleu.corpus_bleu(output, [references]).score:.2f};"
                f" {company(engines[precision], asked, options)} differ in other company",
                flush=True,
            )


if __name__ == "__main__":
    main()
