"""Speed and memory of a translator of NLLB-600M's shape in int8, beside CTranslate2, in turns.

    python benchmarks/large_vocabulary_speed.py               # idle machine, about 10 minutes, 12 GB of disk
    python benchmarks/large_vocabulary_speed.py --layers 1    # a quick look

The weights are random: 12 + 12 layers, d_model 1,024, 256,206 pieces. No output ends, and both sides stop at 20 tokens.
Prints seconds of the load, peak memory of a process that loads and translates, and sentences per second with beam 5:
30 sentences of 5 to 25 tokens at once, and 10 of them one at a time. CTranslate2 has its best batch size, with and
without MKL. Needs ctranslate2 and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

N_PIECES, LIMIT, BEAM = 256_206, 20, 5
Translate = Callable[[list[list[int]]], object]


def prepare(folder: Path, layers: int) -> None:
    """Write the model for both programs."""
    import ctranslate2
    from sentencepiece import sentencepiece_model_pb2
    from transformers import AutoTokenizer, M2M100Config, M2M100ForConditionalGeneration

    from seq2seqs import NLLB_CODES, pieces
    from transduce.convert.importing import import_run

    source = folder / "source"
    source.mkdir(parents=True)
    model = sentencepiece_model_pb2.ModelProto.FromString(pieces("bpe"))  # type: ignore[attr-defined]
    for i in range(N_PIECES - len(model.pieces) - len(NLLB_CODES) - 2):  # fairseq has <pad> and <mask> too
        model.pieces.add(piece=f"unused{i}", score=-1e6)
    (source / "sentencepiece.bpe.model").write_bytes(model.SerializeToString())
    names = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": NLLB_CODES}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    AutoTokenizer.from_pretrained(source).save_pretrained(source)
    config = M2M100Config(
        vocab_size=N_PIECES,
        d_model=1024,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_ffn_dim=4096,
        decoder_ffn_dim=4096,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        max_position_embeddings=1024,
        scale_embedding=True,
        decoder_start_token_id=2,
    )
    M2M100ForConditionalGeneration(config).save_pretrained(source)
    list(import_run(source, folder / "run"))
    ctranslate2.converters.TransformersConverter(str(source)).convert(str(folder / "ct2"), quantization="int8")


def our_engine(folder: Path) -> Translate:
    """Our native engine in int8."""
    from transduce.config.decoding import DecodingOptions
    from transduce.decoding.engine import DecodingInput
    from transduce.decoding.translator import Translator

    translator = Translator.load(folder / "run", precision="int8").between("eng_Latn", "deu_Latn")
    if translator.choice.slow_because:
        sys.exit(translator.choice.slow_because)
    options = DecodingOptions(beam=BEAM)

    def translate(sources: list[list[int]]) -> object:
        return translator.engine.translate([DecodingInput((i,), ids, LIMIT) for i, ids in enumerate(sources)], options)

    return translate


def ctranslate2_engine(folder: Path, batch: int) -> Translate:
    """CTranslate2 in int8: threads for batches if there are several sentences, otherwise inside products."""
    import ctranslate2

    n_threads, is_single = len(os.sched_getaffinity(0)), batch == 1
    threads = {"inter_threads": 1 if is_single else n_threads, "intra_threads": n_threads if is_single else 1}
    engine = ctranslate2.Translator(str(folder / "ct2"), compute_type="int8", **threads)
    pieces = json.loads((folder / "ct2" / "shared_vocabulary.json").read_text())

    def translate(sources: list[list[int]]) -> object:
        tokens = [[pieces[i] for i in ids] for ids in sources]
        limits = {"max_decoding_length": LIMIT, "min_decoding_length": LIMIT}
        return engine.translate_batch(tokens, beam_size=BEAM, max_batch_size=batch, **limits)

    return translate


def serve(folder: Path, name: str, batch: int) -> None:
    """Answer each line of standard input, a list of calls, by the seconds of the calls and the peak memory in GB."""
    began = time.perf_counter()
    translate = our_engine(folder) if name == "transduce" else ctranslate2_engine(folder, batch)
    print(json.dumps(time.perf_counter() - began), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for call in json.loads(line):
            translate(call)
        seconds = time.perf_counter() - began
        peak = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
        print(json.dumps([seconds, int(peak.split()[1]) / 1e6]), flush=True)


class Program:
    """A program in its own process."""

    def __init__(self, folder: Path, name: str, batch: int, mkl: str) -> None:
        self.name = f"{name} MKL={mkl} batch={batch}" if name == "ctranslate2" else name
        command = [sys.executable, __file__, "--folder", str(folder), "--serve", name, "--batch", str(batch)]
        environment = os.environ | {"CT2_USE_MKL": mkl, "OMP_NUM_THREADS": "1" if batch > 1 else "2"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdin and self._process.stdout
        self.load = float(self._process.stdout.readline())

    def run(self, calls: list[list[list[int]]]) -> tuple[float, float]:
        """Seconds of the calls, and the peak memory so far in GB."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps(calls), file=self._process.stdin, flush=True)
        seconds, peak = json.loads(self._process.stdout.readline())
        return float(seconds), float(peak)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure(folder: Path, rounds: int) -> None:
    """Print the table."""
    draw = random.Random(1)
    sources = [[*(draw.randrange(200, 250_000) for _ in range(draw.randint(5, 25))), 2] for _ in range(30)]
    print("| beam 5, int8 | program | load, s | peak memory, GB | sentences/s |\n|---|---|---|---|---|")
    for task, calls, batches in (
        ("30 sentences", [sources], (4, 8, 16)),
        ("one at a time", [[ids] for ids in sources[:10]], (1,)),
    ):
        programs = [Program(folder, "transduce", 2, "0")]
        programs += [Program(folder, "ctranslate2", batch, mkl) for batch in batches for mkl in "01"]
        best = dict.fromkeys(programs, (float("inf"), 0.0))
        for _ in range(rounds):
            for program in programs:
                best[program] = min(best[program], program.run(calls))
        for program, (seconds, peak) in best.items():
            n = sum(map(len, calls))
            print(f"| {task} | {program.name} | {program.load:.1f} | {peak:.2f} | {n / seconds:.2f} |", flush=True)
            program.close()


def main() -> None:
    """Parse, prepare the model, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the models are or will be (default: a temporary folder)")
    parser.add_argument("--serve", choices=["transduce", "ctranslate2"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.folder, args.serve, args.batch)
    with tempfile.TemporaryDirectory() as temporary:
        folder: Any = args.folder or Path(temporary)
        if not (folder / "ct2").exists():
            prepare(folder, args.layers)
        measure(folder, args.rounds)
    return None


if __name__ == "__main__":
    main()
