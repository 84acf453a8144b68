"""CPU time of one update of a small model (the demo's), another version of the source tree against this one.

    python benchmarks/small_steps.py --baseline OTHER_TREE --rounds 3

Each tree trains with its own code and its `.venv/bin/python` (this interpreter where there is none). A round runs
every tree and precision twice, with few and with many updates; the difference is the cost of the updates. CPU time
is compared because it depends less than wall time on what else the machine does. The table gives the lowest of the
rounds, their ratio and the peak memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FEW, MANY = 20, 140
SETTINGS = (
    *("data.demo=12000", "data.src_lang=en", "data.tgt_lang=de", "tokenizer.vocab_size=2000", "model.preset=tiny"),
    *("model.n_encoder_layers=2", "model.n_decoder_layers=2", "model.dropout=0.0", "model.residual=pre"),
    *("training.batch_tokens=2048", "training.valid_bleu_sentences=0", "training.valid_updates=100000"),
    *("training.device=cpu", "training.average=ema", "training.optimizer=muon", "decoding.beam=1"),
)


def train(tree: Path, precision: str, n_updates: int, threads: int) -> tuple[float, float]:
    """CPU seconds and peak memory in MB of a whole training."""
    python = tree / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python if python.exists() else sys.executable), "-m", "transduce", "train"]
        command += ["--run", str(Path(folder) / "run")]
        for setting in (*SETTINGS, f"training.precision={precision}", f"training.max_updates={n_updates}"):
            command += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(tree / "src")}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        error = (process.stderr.read() if process.stderr else b"").decode()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{tree}: training failed\n{error[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precisions", nargs="*", default=["bfloat16", "float32"])
    args = parser.parse_args()
    trees = {"baseline": args.baseline.resolve(), "this tree": Path(__file__).resolve().parents[1]}
    milliseconds: dict[tuple[str, str], list[float]] = {}
    memory: dict[tuple[str, str], float] = {}
    for _ in range(args.rounds):
        for precision in args.precisions:
            for name, tree in trees.items():
                few, _ = train(tree, precision, FEW, args.threads)
                many, peak = train(tree, precision, MANY, args.threads)
                milliseconds.setdefault((precision, name), []).append(1e3 * (many - few) / (MANY - FEW))
                memory[precision, name] = peak
                print(f"# {precision} {name}: {milliseconds[precision, name][-1]:.1f} ms", file=sys.stderr, flush=True)
    print("| precision | baseline, ms of CPU time | this tree | ratio | peak memory, MB |\n|---|---|---|---|---|")
    for precision in args.precisions:
        before, after = (min(milliseconds[precision, name]) for name in trees)
        peaks = " -> ".join(f"{memory[precision, name]:.0f}" for name in trees)
        print(f"| {precision} | {before:.0f} | {after:.0f} | {before / after:.2f} | {peaks} |")


if __name__ == "__main__":
    main()
