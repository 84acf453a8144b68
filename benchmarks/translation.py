"""Translation speed on the same weights beside Hugging Face generate and CTranslate2, interleaved in one run.

    python benchmarks/translation.py --peers PEERS_FOLDER --python PEERS_PYTHON --beam 5

PEERS_FOLDER holds the peers' translate.py, common.py and a small trained Marian model, whose weights are carried over
into our Transformer here by a table of names. 1,000 sentences of Multi30k's test2016, longest first. Each round runs
each system once, alone, in a process of its own that warms up and takes the median of three passes; the table gives the
median of the rounds, and the BLEU of the output, which must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, D_MODEL = 4, 128
# Marian's name of a layer's part -> (ours, the axes that lie on the residual stream: rows, columns or both)
PARTS = {
    "self_attn.out_proj": ("self_attention.output", "rows"),
    "encoder_attn.q_proj": ("cross_attention.query", "columns"),
    "encoder_attn.out_proj": ("cross_attention.output", "rows"),
    "fc1": ("feed_forward.expand", "columns"),
    "fc2": ("feed_forward.contract", "rows"),
    "self_attn_layer_norm": ("self_attention_residual.norm", "rows"),
    "encoder_attn_layer_norm": ("cross_attention_residual.norm", "rows"),
    "final_layer_norm": ("feed_forward_residual.norm", "rows"),
}
PACKED = {"self_attn": ("self_attention.query_key_value", "qkv"), "encoder_attn": ("cross_attention.key_value", "kv")}


def carried_over(path: Path) -> Any:
    """Marian's weights in our Transformer.

    Its sinusoids stand as halves and ours as pairs: the residual stream's columns are permuted. Its ids are eos 0,
    unk 1, pad last (which starts the decoder); ours are pad 0, unk 1, bos 2, eos 3, so the vocabulary's rows move.
    """
    import torch
    from safetensors.torch import load_file

    from transduce.config import ModelSettings
    from transduce.models.build import build_model

    theirs = load_file(path / "model.safetensors")
    order = torch.stack([torch.arange(D_MODEL // 2), D_MODEL // 2 + torch.arange(D_MODEL // 2)], 1).flatten()
    shared = theirs["model.shared.weight"]
    n = shared.shape[0]
    rows = torch.zeros(n + 1, D_MODEL)
    rows[1], rows[2], rows[3], rows[4:] = shared[1], shared[n - 1], shared[0], shared[2 : n - 1]
    rows = rows[:, order]
    state = {"src_embedding.table.weight": rows, "tgt_embedding.table.weight": rows}
    for side in ("encoder", "decoder"):
        for layer in range(LAYERS):
            head, own = f"model.{side}.layers.{layer}.", f"{side}.blocks.{layer}."
            for name, (ours, letters) in PACKED.items():
                if f"{head}{name}.{letters[0]}_proj.weight" in theirs:
                    parts = [f"{head}{name}.{x}_proj." for x in letters]
                    state[f"{own}{ours}.weight"] = torch.cat([theirs[p + "weight"] for p in parts])[:, order]
                    state[f"{own}{ours}.bias"] = torch.cat([theirs[p + "bias"] for p in parts])
            for name, (ours, axes) in PARTS.items():
                if f"{head}{name}.weight" in theirs:
                    weight, bias = theirs[f"{head}{name}.weight"], theirs[f"{head}{name}.bias"]
                    state[f"{own}{ours}.weight"] = weight[order] if axes == "rows" else weight[:, order]
                    state[f"{own}{ours}.bias"] = bias[order] if axes == "rows" else bias
    # Marian never writes pad (a bias of -10,000). After a last norm the sum of h / gain is the same for every h, so
    # that a row along 1 / gain is a constant logit: -30 takes padding and the beginning out of the softmax.
    gain, bias = (
        state[f"decoder.blocks.{LAYERS - 1}.feed_forward_residual.norm.{part}"] for part in ("weight", "bias")
    )
    state["output_embedding.weight"] = rows.clone()
    state["output_embedding.weight"][[0, 2]] = -30 / (bias / gain).sum() / gain
    settings = ModelSettings(preset="tiny", tie="none")
    model = build_model(settings, n_src=n + 1, n_tgt=n + 1).eval()
    model.load_state_dict(state)
    return model


def ours(peers: Path, beam: int, batch: int) -> dict[str, Any]:
    """Our search over the peers' sentences and weights."""
    sys.path.insert(0, str(peers))
    import resource

    import sacrebleu
    import sentencepiece
    import torch
    from common import DATA, MODEL  # type: ignore[import-not-found]

    from transduce.data.batch import pad_sources
    from transduce.decoding.search import beam_search
    from transduce.decoding.workers import workers
    from transduce.training.step import keep_freed_memory

    keep_freed_memory()
    model, pieces = carried_over(MODEL), json.loads((MODEL / "vocab.json").read_text())
    sp = sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "source.spm"))
    sources, references = ((DATA / f"test.{lang}").read_text().splitlines() for lang in ("en", "de"))
    names = {i: piece for piece, i in pieces.items()}
    own = {piece: {0: 3, 1: 1}.get(i, i + 2) for piece, i in pieces.items()}
    ids = [[own.get(piece, 1) for piece in sp.encode(x, out_type=str)] for x in sources]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))

    def search(rows: list[int]) -> Any:
        return beam_search(model, pad_sources([ids[i] for i in rows]), max_length=127, beam=beam)

    def run() -> list[str]:
        out = [""] * len(ids)
        batches = [order[start : start + batch] for start in range(0, len(order), batch)]
        with workers(torch.device("cpu")) as crew:  # as Translator does; with batches of one: how long one waits
            every = map(search, batches) if batch == 1 else crew.map(search, batches)
            for rows, found in zip(batches, every, strict=True):
                for i, hypotheses in zip(rows, found, strict=True):
                    out[i] = sp.decode([names[j - 2] if j > 3 else names[1] for j in hypotheses[0].ids])
        return out

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


def command(system: str, batch: int, args: argparse.Namespace) -> list[str]:
    """How to run one system once."""
    tail = ["--beam", str(args.beam), "--batch", str(batch)]
    if system == "transduce":
        return [sys.executable, __file__, "--worker", "--peers", str(args.peers), *tail]
    workers = ["--workers", "2"] if system == "ct2" and batch > 1 else []
    return [args.python, str(args.peers / "translate.py"), system, *tail, *workers]


def main() -> None:
    """Parse, run the rounds, print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--systems", nargs="*", default=["transduce", "hf", "ct2"], help="NAME or NAME:BATCH")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.peers = args.peers.resolve()
    if args.worker:
        print(json.dumps(ours(args.peers, args.beam, args.batch)))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for name in args.systems:
            system, _, batch = name.partition(":")
            done = subprocess.run(command(system, int(batch or 32), args), capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-1500:]}")
            found.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
            print(f"# {name}: {found[name][-1]['sentences_s']}", file=sys.stderr, flush=True)
    first = statistics.median(r["sentences_s"] for r in found[args.systems[0]])
    print(f"| system:batch | sentences/s, beam {args.beam} | {args.systems[0]} is faster by | BLEU 13a | MB |")
    print("|---|---|---|---|---|")
    for name, runs in found.items():
        middle = statistics.median(r["sentences_s"] for r in runs)
        print(f"| {name} | {middle:,.0f} | {first / middle:.2f} | {runs[-1]['bleu_13a']} | {runs[-1]['peak_rss_mb']} |")


if __name__ == "__main__":
    main()
