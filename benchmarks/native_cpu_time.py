"""CPU seconds of the native library and of CTranslate2, one thread each, interleaved: for busy machines.

    python benchmarks/native_cpu_time.py --peers PEERS_FOLDER --beams 1 5

Wall-clock time on an idle machine is what counts (translation.py); CPU time is what a busy one can measure. The best of
the rounds is printed. PEERS_FOLDER: see translation.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")

import ctranslate2
import torch

from transduce.convert.importing import import_run
from transduce.decoding.engine import Source
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.options import TranslationOptions
from transduce.decoding.translator import Translator

Job = Callable[[], object]


def our_jobs(run: Path, sources: list[str], beam: int) -> dict[str, Job]:
    """A job per precision."""
    jobs: dict[str, Job] = {}
    options = TranslationOptions(beam=beam, scores=beam > 1)
    for precision in PRECISIONS:
        translator = Translator.load(run, precision=precision)
        asked = [Source((i,), ids, 127) for i, ids in enumerate(translator.tokenizers.src.encode_batch(sources))]
        jobs[precision] = lambda engine=translator.engine, asked=asked: engine.translate(asked, options)  # type: ignore[misc]
    return jobs


def their_jobs(folder: Path, model: Path, pieces: list[list[str]], beam: int) -> dict[str, Job]:
    """A job per precision and batch size."""
    jobs: dict[str, Job] = {}
    for precision in ("float32", "int8"):
        path = folder / f"ct2-{precision}"
        if not path.exists():
            ctranslate2.converters.TransformersConverter(str(model)).convert(str(path), quantization=precision)
        engine = ctranslate2.Translator(str(path), compute_type=precision, inter_threads=1, intra_threads=1)
        for batch in (32, 64, 128) if beam == 1 else (16, 32):
            jobs[f"ct2-{precision}:{batch}"] = lambda engine=engine, batch=batch: engine.translate_batch(  # type: ignore[misc]
                pieces, beam_size=beam, max_batch_size=batch, max_decoding_length=127
            )
    return jobs


def main() -> None:
    """Parse, run the rounds, print sentences per CPU second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sys.path.insert(0, str(args.peers.resolve()))
    from common import DATA, MODEL  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    sources = (DATA / "test.en").read_text().splitlines()
    pieces = [[*line.split(), "</s>"] for line in (DATA / "test.sp.en").read_text().splitlines()]
    pieces.sort(key=len, reverse=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        list(import_run("marian", MODEL, folder / "run"))
        for beam in args.beams:
            jobs = our_jobs(folder / "run", sources, beam) | their_jobs(folder, MODEL, pieces, beam)
            best = dict.fromkeys(jobs, float("inf"))
            for _ in range(args.rounds):
                for name, job in jobs.items():
                    began = time.process_time()
                    job()
                    best[name] = min(best[name], time.process_time() - began)
            for name, seconds in best.items():
                print(f"beam {beam}  {name:16} {len(sources) / seconds:8.0f} sentences per CPU second", flush=True)


if __name__ == "__main__":
    main()
