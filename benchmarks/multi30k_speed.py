"""BLEU against speed on Multi30k: a table and a plot of several models, beside CTranslate2 with the first one.

    python benchmarks/multi30k_speed.py --data TOK_LC --out speed runs/standard runs/ssru:1:int8

A system is a run folder, with a beam and a precision or with all of `--beams` and `--precisions`. Speed: sentences of
test2016 per CPU second of one thread, text encoded before; the best of interleaved rounds. CTranslate2 is measured with
several batch sizes, the fastest counts, with its AVX-512 kernels unless CT2_FORCE_CPU_ISA names others. Writes OUT.md
and OUT.svg.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from results import heading, row, write

os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
os.environ["OMP_NUM_THREADS"] = "1"

import ctranslate2
import matplotlib.pyplot as plt
import torch

from transduce.config.decoding import DecodingOptions
from transduce.convert.exporting import export_run
from transduce.decoding.engine import DecodingInput
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.translator import Translator
from transduce.evaluation.metrics import evaluate

MAX_LENGTH = 127
TEST = "test_2016_flickr"
CT2_BATCHES = {1: (32, 64, 128), 5: (16, 32)}


@dataclass(slots=True)
class System:
    """Ways to translate all sentences (batch sizes), of which the fastest counts."""

    name: str
    beam: int
    precision: str
    jobs: Sequence[Callable[[], tuple[float, list[str]]]]
    seconds: float = float("inf")
    output: list[str] = field(default_factory=list)
    bleu: float = 0.0
    speed: float = 0.0


def our_systems(asked: str, lines: list[str], beams: list[int], precisions: list[str]) -> list[System]:
    """The systems of RUN or RUN:BEAM:PRECISION."""
    run, *parts = asked.split(":")
    pairs = [(int(parts[0]), parts[1])] if parts else itertools.product(beams, precisions)
    return [_ours(Path(run), lines, beam, precision) for beam, precision in pairs]


def _ours(run: Path, lines: list[str], beam: int, precision: str) -> System:
    translator = Translator.load(run, precision=precision)  # type: ignore[arg-type]
    assert not translator.choice.slow_because, translator.choice.slow_because
    options, tokenizers = DecodingOptions(beam=beam, scores=beam > 1), translator.tokenizers
    asked = [
        DecodingInput((i,), ids, min(MAX_LENGTH, 2 * len(ids) + 16))  # the limit of `transduce translate`
        for i, ids in enumerate(tokenizers.src.encode_batch(lines))
    ]

    def job() -> list[list[int]]:
        return [list(best.ids) for best, *_ in translator.engine.translate(asked, options)]

    return System(run.name, beam, precision, [_timed(job, tokenizers.tgt.decode)])


def their_systems(run: Path, folder: Path, lines: list[str], beams: list[int]) -> list[System]:
    """CTranslate2 with the model of a run, in float32 and int8."""
    tokenizers, found = Translator.load(run).tokenizers, []
    pieces = [tokenizers.src.pieces(ids) for ids in tokenizers.src.encode_batch(lines)]
    for precision in ("float32", "int8"):
        list(export_run(run, "ctranslate2", folder / precision, quantization=precision))
        engine = ctranslate2.Translator(
            str(folder / precision), compute_type=precision, inter_threads=1, intra_threads=1
        )
        ids = {piece: i for i, piece in enumerate(tokenizers.tgt.pieces(range(tokenizers.n_tgt)))}

        def job(beam: int, batch: int, engine: ctranslate2.Translator = engine) -> list[list[str]]:
            options = {"beam_size": beam, "max_batch_size": batch, "max_decoding_length": MAX_LENGTH}
            return [result.hypotheses[0] for result in engine.translate_batch(pieces, **options)]

        def decode(found: list[str], ids: dict[str, int] = ids) -> str:
            return tokenizers.tgt.decode([ids[piece] for piece in found])

        for beam in beams:
            jobs = [_timed(lambda b=beam, n=n, job=job: job(b, n), decode) for n in CT2_BATCHES.get(beam, (16, 32))]  # type: ignore[misc]
            found.append(System(f"CTranslate2 {ctranslate2.__version__}, {run.name}", beam, precision, jobs))
    return found


def _timed(job: Callable[[], list], decode: Callable) -> Callable[[], tuple[float, list[str]]]:  # type: ignore[type-arg]
    def run() -> tuple[float, list[str]]:
        began = time.process_time()
        found = job()
        seconds = time.process_time() - began
        return seconds, [decode(one) for one in found]

    return run


def measure(systems: list[System], references: list[str], rounds: int) -> None:
    """Run all jobs in turns; fill in seconds, BLEU and speed."""
    for _ in range(rounds):
        for system in systems:
            for job in system.jobs:
                seconds, output = job()
                if seconds < system.seconds:
                    system.seconds, system.output = seconds, output
    for system in systems:
        system.bleu = evaluate(system.output, references, tokenize="none").bleu.value
        system.speed = len(references) / system.seconds


def table(systems: list[System]) -> list[str]:
    """Markdown, fastest first; bold: no other system is both faster and better."""
    lines = heading("model", "beam", "precision", "BLEU", "sentences per CPU second", "")
    slowest, best = min(system.speed for system in systems), pareto(systems)
    for system in sorted(systems, key=lambda one: -one.speed):
        bleu = f"**{system.bleu:.2f}**" if system in best else f"{system.bleu:.2f}"
        times = f"{system.speed / slowest:.1f} times the slowest"
        lines.append(row(system.name, system.beam, system.precision, bleu, f"{system.speed:,.0f}", times))
    return lines


def pareto(systems: list[System]) -> list[System]:
    """Those that no other system beats in both, slowest first."""
    best: list[System] = []
    for system in sorted(systems, key=lambda one: -one.speed):
        if not best or system.bleu > best[-1].bleu:
            best.append(system)
    return best[::-1]


def plot(systems: list[System], path: Path) -> None:
    """BLEU over sentences per second (logarithmic), a line for each model and beam, a marker for each precision."""
    _, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    names, markers = list(dict.fromkeys(s.name for s in systems)), dict(zip(PRECISIONS, "os^", strict=False))

    def of(s: System) -> tuple[int, int]:
        return names.index(s.name), s.beam

    for (i, beam), group in itertools.groupby(sorted(systems, key=of), key=of):
        line, colour = list(group), f"C{i}"
        style = "-" if beam > 1 else ":"
        axes.plot([s.speed for s in line], [s.bleu for s in line], style, color=colour)
        for s in line:
            axes.plot(s.speed, s.bleu, markers[s.precision], color=colour)
    for i, name in enumerate(names):
        axes.plot([], [], color=f"C{i}", linewidth=3, label=name)
    for precision, marker in markers.items():
        axes.plot([], [], marker, color="gray", label=precision)
    for label, style in (("beam search", "-"), ("greedy", ":")):
        axes.plot([], [], style, color="gray", label=label)
    axes.set(xscale="log", xlabel="sentences per CPU second, one core", ylabel="BLEU")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize="small")
    plt.savefig(path)


def main() -> None:
    """Parse, measure, write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", metavar="RUN[:BEAM:PRECISION]")
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {TEST}.en and {TEST}.de")
    parser.add_argument("--out", type=Path, required=True, help="OUT.md and OUT.svg are written")
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines, references = ((args.data / f"{TEST}.{side}").read_text().splitlines() for side in ("en", "de"))
    with tempfile.TemporaryDirectory() as folder:
        systems = their_systems(Path(args.systems[0].split(":")[0]), Path(folder), lines, args.beams)
        for asked in args.systems:
            systems += our_systems(asked, lines, args.beams, args.precisions)
        measure(systems, references, args.rounds)
    write(table(systems), partial(plot, systems), args.out)


if __name__ == "__main__":
    main()
