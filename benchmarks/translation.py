"""Translation speed on the same weights as Hugging Face generate and CTranslate2, interleaved in one run.

    python benchmarks/translation.py --peers PEERS_FOLDER --python PEERS_PYTHON --beam 5

PEERS_FOLDER contains the peers' translate.py, common.py and a small trained Marian model, which is imported as by
`transduce import marian`. 1,000 sentences of Multi30k's test2016, longest first. Each round runs each system once,
alone, in a separate process that warms up and takes the median of three passes. CTranslate2 runs with and without MKL
(CT2_USE_MKL), and its faster run counts: which it is depends on the CPU and the batch. The table gives the median of
the rounds, and the BLEU of the output, which must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def ours(peers: Path, system: str, beam: int, batch: int) -> dict[str, Any]:
    """Our search over the peers' sentences and weights."""
    sys.path.insert(0, str(peers))
    import resource
    import tempfile

    import sacrebleu
    import torch
    from common import DATA, MODEL  # type: ignore[import-not-found]

    from transduce.config.decoding import DecodingOptions
    from transduce.convert.importing import import_run
    from transduce.decoding.engine import DecodingInput, Engine
    from transduce.decoding.torch_engine import TorchEngine
    from transduce.decoding.translator import Translator
    from transduce.process import keep_freed_memory

    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        list(import_run(MODEL, Path(folder) / "run"))
        precision: Any = "float32" if system == "pytorch" else system
        translator = Translator.load(Path(folder) / "run", precision=precision)
        engine: Engine = translator.engine
        if system == "pytorch":
            engine = TorchEngine(translator.model)
    tokenizers = translator.tokenizers
    if translator.choice.slow_because and system != "pytorch":
        sys.exit(translator.choice.slow_because)
    sources, references = ((DATA / f"test.{lang}").read_text().splitlines() for lang in ("en", "de"))
    ids = tokenizers.src.encode_batch(sources)
    longest = max(map(len, ids)) + 1
    options = DecodingOptions(beam=beam, batch_tokens=batch * longest, scores=beam > 1)
    asked = [DecodingInput((i,), row, 127) for i, row in enumerate(ids)]

    def run() -> list[str]:
        one_by_one = ([source] for source in asked)  # with batches of one: how long one user waits
        parts = [engine.translate(part, options) for part in (one_by_one if batch == 1 else [asked])]
        return [tokenizers.tgt.decode(hypotheses[0].ids) for part in parts for hypotheses in part]

    out, times = run(), []
    for _ in range(3):
        began = time.perf_counter()
        out = run()
        times.append(time.perf_counter() - began)
    return {
        "sentences_s": round(len(ids) / statistics.median(times), 1),
        "bleu_13a": round(sacrebleu.corpus_bleu(out, [references]).score, 2),
        "threads": torch.get_num_threads(),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


OURS = ("pytorch", "float32", "float32-fast", "int8")


def command(system: str, batch: int, args: argparse.Namespace) -> list[str]:
    """The command of one run of a system."""
    tail = ["--beam", str(args.beam), "--batch", str(batch)]
    if system in OURS:
        return [sys.executable, __file__, "--worker", system, "--peers", str(args.peers), *tail]
    name, _, precision = system.partition("-")
    if name == "ct2":
        tail += ["--type", precision or "float32", "--workers", "2" if batch > 1 else "1"]
    return [args.python, str(args.peers / "translate.py"), name, *tail]


def main() -> None:
    """Parse, run the rounds, print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--systems", nargs="*", default=["float32", "pytorch", "hf", "ct2"], help="NAME or NAME:BATCH")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ct2-isa", default="", help="CTranslate2's instruction set, such as AVX512")
    parser.add_argument("--batch", type=int, default=64, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=OURS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.peers = args.peers.resolve()
    if args.worker:
        print(json.dumps(ours(args.peers, args.worker, args.beam, args.batch)))
        return
    environment = os.environ | ({"CT2_FORCE_CPU_ISA": args.ct2_isa} if args.ct2_isa else {})
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for name in args.systems:
            system, _, batch = name.partition(":")
            runs = []
            for setting in ({"CT2_USE_MKL": "0"}, {"CT2_USE_MKL": "1"}) if system.startswith("ct2") else ({},):
                words = command(system, int(batch or 32), args)
                done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment | setting)
                if done.returncode:
                    sys.exit(f"{name} failed:\n{done.stderr[-1500:]}")
                runs.append(json.loads(done.stdout.splitlines()[-1]))
                print(f"# {name} {setting or ''}: {runs[-1]['sentences_s']}", file=sys.stderr, flush=True)
            found.setdefault(name, []).append(max(runs, key=lambda run: run["sentences_s"]))
    print_table(found, args.beam)


def print_table(found: dict[str, list[dict[str, Any]]], beam: int) -> None:
    """A row per system; `x CTranslate2`: compared with its fastest settings of the same precision."""
    middles = {name: statistics.median(run["sentences_s"] for run in runs) for name, runs in found.items()}
    print(f"| system:batch | sentences/s, beam {beam} | x CTranslate2 | BLEU 13a | MB |")
    print("|---|---|---|---|---|")
    for name, runs in found.items():
        peer = "ct2-int8" if "int8" in name else "ct2"
        peers = [speed for other, speed in middles.items() if other.partition(":")[0] == peer]
        ratio = f"{middles[name] / max(peers):.2f}" if peers else "-"
        print(f"| {name} | {middles[name]:,.0f} | {ratio} | {runs[-1]['bleu_13a']} | {runs[-1]['peak_rss_mb']} |")


if __name__ == "__main__":
    main()
