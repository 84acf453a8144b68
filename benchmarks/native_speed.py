"""The native library's speed compared with CTranslate2's best settings, all of them interleaved in one run.

    python benchmarks/native_speed.py --peers PEERS_FOLDER               # idle machine: seconds, a thread per core
    python benchmarks/native_speed.py --peers PEERS_FOLDER --cpu         # busy machine: CPU seconds, one thread each
    TRANSDUCE_NATIVE_ISA=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/native_speed.py ...

Prints sentences per second of each task and precision, and the ratio to CTranslate2 with the same precision at its
fastest batch size, library of products (CT2_USE_MKL), instruction set (its own choice and AVX-512) and number of
threads. With TRANSDUCE_NATIVE_ISA only that instruction set is measured, and CTranslate2 is limited to it. Tasks: 1,000
captions (Multi30k's test2016) at once, and 200 of them one at a time, by a small Marian model; 100 of them by one of
base size with random weights, which never ends a sentence: both sides stop at 20 tokens. Greedy search gives no scores
on either side, beam search does. Both sides get tokens and give tokens. PEERS_FOLDER: see translation.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Job = Callable[[], object]
ISA = os.environ.get("TRANSDUCE_NATIVE_ISA", "")
PEER_ISAS = ("AVX2",) if ISA in {"avx2", "avx_vnni"} else ("AVX512", "")
"""Instruction sets of CTranslate2; empty: as it chooses."""


class Task(NamedTuple):
    """A model, its sentences and decoding options."""

    model: str
    beam: int
    one_by_one: bool
    n_sentences: int
    limit: int
    batches: tuple[int, ...]  # of CTranslate2


TASKS = {
    "greedy": Task("tiny", 1, False, 1000, 127, (32, 64, 128)),
    "beam 5": Task("tiny", 5, False, 1000, 127, (16, 32)),
    "one at a time, greedy": Task("tiny", 1, True, 200, 127, (1,)),
    "one at a time, beam 5": Task("tiny", 5, True, 200, 127, (1,)),
    "base, greedy": Task("base", 1, False, 100, 20, (32, 64)),
    "base, beam 5": Task("base", 5, False, 100, 20, (8, 16)),
}
OURS = [
    (isa, precision) for isa in ([ISA] if ISA else ["", "avx512_vnni", "avx512"]) for precision in ("float32", "int8")
]
if not ISA:
    OURS.append(("", "float32-fast"))
"""Instruction set (empty: the best) and precision. Without AMX, float32-fast is float32: one of them is enough."""


def pick(task: Task, sentences: Sequence[Any]) -> list[Any]:
    """Sentences of a task, from everywhere in the set."""
    return list(sentences[:: len(sentences) // task.n_sentences])


def make_base(tiny: Path, folder: Path) -> None:
    """A Marian model of base size with random weights, whose outputs have no end."""
    from transformers import MarianConfig, MarianMTModel

    n_tokens = 32_000
    config = MarianConfig.from_pretrained(tiny)
    config.update({"d_model": 512, "vocab_size": n_tokens, "decoder_vocab_size": n_tokens})
    for side in ("encoder", "decoder"):
        config.update({f"{side}_layers": 6, f"{side}_ffn_dim": 2048, f"{side}_attention_heads": 8})
    config.update({"pad_token_id": n_tokens - 1, "decoder_start_token_id": n_tokens - 1})
    model = MarianMTModel(config)
    model.final_logits_bias[0, config.eos_token_id] = -1e9
    model.generation_config.update(
        bad_words_ids=[[n_tokens - 1]], pad_token_id=n_tokens - 1, decoder_start_token_id=n_tokens - 1
    )
    model.save_pretrained(folder)
    pieces = [piece for piece in json.loads((tiny / "vocab.json").read_text()) if piece != "<pad>"]
    pieces += [*(f"<unused {i}>" for i in range(len(pieces), n_tokens - 1)), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    for name in ("source.spm", "target.spm", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)


def prepare(folder: Path, tiny: Path) -> None:
    """Writes both models in both programs' formats."""
    import ctranslate2

    from transduce.convert.importing import import_run

    make_base(tiny, folder / "base")
    for name, path in (("tiny", tiny), ("base", folder / "base")):
        list(import_run(path, folder / f"{name}-run"))
        for precision in ("float32", "int8"):
            converter = ctranslate2.converters.TransformersConverter(str(path))
            converter.convert(str(folder / f"{name}-{precision}"), quantization=precision)


def our_jobs(folder: Path, task: Task, lines: list[str], n_threads: int) -> dict[str, Job]:
    """A job per instruction set and precision."""
    from transduce.config.decoding import DecodingOptions
    from transduce.decoding import native_engine
    from transduce.decoding.engine import DecodingInput
    from transduce.decoding.translator import Translator

    native_engine.n_threads_to_use = lambda: n_threads  # type: ignore[attr-defined]
    jobs: dict[str, Job] = {}
    options = DecodingOptions(beam=task.beam, scores=task.beam > 1)
    for isa, precision in OURS:
        os.environ["TRANSDUCE_NATIVE_ISA"] = isa
        if not isa:
            del os.environ["TRANSDUCE_NATIVE_ISA"]
        translator = Translator.load(folder / f"{task.model}-run", precision=precision)  # type: ignore[arg-type]
        if translator.choice.slow_because:
            sys.exit(translator.choice.slow_because)
        ids = translator.tokenizers.src.encode_batch(pick(task, lines))
        asked = [DecodingInput((i,), row, task.limit) for i, row in enumerate(ids)]
        parts = [[source] for source in asked] if task.one_by_one else [asked]
        engine = translator.engine
        engine.translate(asked[:2], options)
        jobs[f"{precision} {isa}".strip()] = lambda engine=engine, parts=parts: [  # type: ignore[misc]
            engine.translate(part, options) for part in parts
        ]
    return jobs


def their_jobs(folder: Path, task: Task, lines: list[list[str]], n_threads: int) -> dict[str, Job]:
    """A job per precision, batch size and use of threads."""
    import ctranslate2

    asked = pick(task, lines)
    if not task.one_by_one:
        asked.sort(key=len, reverse=True)
    jobs: dict[str, Job] = {}
    for precision in ("float32", "int8"):
        for workers in sorted({1, n_threads} if task.one_by_one else {n_threads}):
            engine = ctranslate2.Translator(
                str(folder / f"{task.model}-{precision}"),
                compute_type=precision,
                inter_threads=1 if task.one_by_one else workers,
                intra_threads=workers if task.one_by_one else 1,
            )
            for batch in task.batches:
                parts = [[one] for one in asked] if task.one_by_one else [asked]
                jobs[f"{precision}:{batch}:{workers}"] = lambda engine=engine, batch=batch, parts=parts: [  # type: ignore[misc]
                    engine.translate_batch(
                        part, beam_size=task.beam, max_batch_size=batch, max_decoding_length=task.limit
                    )
                    for part in parts
                ]
    return jobs


def serve_ctranslate2(folder: Path, n_threads: int) -> None:
    """Runs the job that each line of standard input names; the answer is its seconds."""
    from common import DATA  # type: ignore[import-not-found]

    lines = [[*line.split(), "</s>"] for line in (DATA / "test.sp.en").read_text().splitlines()]
    known: dict[str, dict[str, Job]] = {}
    for line in sys.stdin:
        task, job = json.loads(line)
        if task not in known:
            known = {task: their_jobs(folder, TASKS[task], lines, n_threads)}
        print(json.dumps(timed(known[task][job]) if job else list(known[task])), flush=True)


def timed(job: Job) -> float:
    """Seconds: of the CPU if TIME is `cpu`."""
    clock = time.process_time if os.environ.get("TIME") == "cpu" else time.perf_counter
    began = clock()
    job()
    return clock() - began


class Peer:
    """CTranslate2 with one instruction set, with or without MKL, in its own process."""

    def __init__(self, isa: str, mkl: str, arguments: list[str]) -> None:
        environment = os.environ | {"CT2_USE_MKL": mkl} | ({"CT2_FORCE_CPU_ISA": isa} if isa else {})
        command = [sys.executable, __file__, "--serve", *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, task: str, job: str) -> Any:
        """The seconds of a job, or the names of all."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([task, job]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def measure(name: str, ours: dict[str, Job], peers: dict[str, Peer], rounds: int) -> dict[str, list[float]]:
    """The seconds of each system in each round; of the peers, by precision, those of the fastest settings."""
    found: dict[str, list[float]] = {}
    theirs = {(isa, job): f"CTranslate2 {isa} {job}" for isa, peer in peers.items() for job in peer.ask(name, "")}
    for _ in range(rounds):
        for system, job in ours.items():
            found.setdefault(system, []).append(timed(job))
        for (isa, job_name), system in theirs.items():
            found.setdefault(system, []).append(peers[isa].ask(name, job_name))
    return found


def print_table(name: str, task: Task, found: dict[str, list[float]]) -> None:
    """A row per precision of ours; the best round of each system counts."""
    speeds = {system: task.n_sentences / min(seconds) for system, seconds in found.items()}
    for system, speed in speeds.items():
        if system.startswith("CTranslate2"):
            continue
        precision = "int8" if system.startswith("int8") else "float32"
        peers = {s: v for s, v in speeds.items() if s.startswith("CTranslate2") and f" {precision}:" in s}
        best = max(peers, key=lambda s: peers[s])
        print(
            f"| {name} | {system} | {speed:,.0f} | {speed / peers[best]:.2f} | {best}: {peers[best]:,.0f} |", flush=True
        )


def main() -> None:
    """Parse, prepare the models, run the tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="measure CPU seconds, one thread each")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(args.peers.resolve()))
    n_threads = 1 if args.cpu else len(os.sched_getaffinity(0))
    if args.serve:
        return serve_ctranslate2(args.folder, n_threads)
    from common import DATA, MODEL

    os.environ |= {"OMP_NUM_THREADS": "1", "TIME": "cpu" if args.cpu else ""}
    lines = (DATA / "test.en").read_text().splitlines()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, MODEL)
        arguments = ["--peers", str(args.peers), "--folder", str(folder), *(["--cpu"] if args.cpu else [])]
        peers = {f"{isa} MKL={mkl}": Peer(isa, mkl, arguments) for isa in PEER_ISAS for mkl in "01"}
        print("| task | ours | sentences/s | x CTranslate2 | its best: instruction set, precision:batch:threads |")
        print("|---|---|---|---|---|")
        for name in args.tasks:
            task = TASKS[name]
            print_table(name, task, measure(name, our_jobs(folder, task, lines, n_threads), peers, args.rounds))
        for peer in peers.values():
            peer.close()


if __name__ == "__main__":
    main()
