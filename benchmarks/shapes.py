"""Training speed of decoder-only and encoder-only models, compared with Hugging Face's GPT-2 and BERT.

    python benchmarks/shapes.py --updates 20 --rounds 2

Requires `transformers`. All models have the same size and train on the same random tokens with AdamW, dropout 0.1 and
clipping. Each round runs every system once, in its own process. Hugging Face runs in float32 and under bfloat16
autocast; compare with the faster one. Speed is input tokens per second. BERT predicts 15 % of the tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZE = {"d": 256, "layers": 4, "heads": 4, "ff": 1024, "vocab": 8000, "context": 128, "rows": 32}
SYSTEMS = {
    "gpt": ("transduce-gpt", "hf-gpt-float32", "hf-gpt-bfloat16"),
    "bert": ("transduce-bert", "hf-bert-float32", "hf-bert-bfloat16"),
}


def tokens() -> Any:
    """Rows of random ids, the same for all systems."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, SIZE["vocab"], (SIZE["rows"], SIZE["context"]), generator=generator)


def ours(shape: str) -> Callable[[], object]:
    """A function that makes one update of our model."""
    import torch

    from transduce.config.architectures import model_settings, resolve_preset
    from transduce.config.settings import TrainingSettings
    from transduce.data.batch import MaskedBatch, RowBatch
    from transduce.machine import choose_precision
    from transduce.models.registry import build_model
    from transduce.process import keep_freed_memory
    from transduce.training.loss import predict_masked_tokens, predict_tokens
    from transduce.training.step import Updater

    keep_freed_memory()
    preset = {"gpt": "gpt2", "bert": "bert-mini"}[shape]
    layers = {"gpt": "n_decoder_layers", "bert": "n_encoder_layers"}[shape]
    sizes = {layers: SIZE["layers"], "d_model": SIZE["d"], "d_ff": SIZE["ff"], "n_heads": SIZE["heads"]}
    settings = model_settings(preset=preset, dropout=0.1, attention_dropout=0.1, **sizes)
    model = build_model(resolve_preset(settings), n_src=SIZE["vocab"], n_tgt=SIZE["vocab"])
    training = TrainingSettings(optimizer="adamw", lr=1e-4, label_smoothing=0.0)
    device = torch.device("cpu")
    criterion = {"gpt": predict_tokens, "bert": predict_masked_tokens}[shape]
    updater = Updater(model, training, device=device, precision=choose_precision(device), criterion=criterion)
    ids = tokens()
    if shape == "gpt":
        batch: Any = RowBatch((ids[:, :-1],), ids[:, 1:].contiguous(), ids[:, 1:].numel())
    else:
        places = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(1))[: ids.numel() * 15 // 100]
        labels = torch.zeros(len(ids), dtype=torch.int64)
        targets = ids.flatten()[places]
        ids = ids.flatten().scatter(0, places, 4).view_as(ids)
        batch = MaskedBatch(ids, torch.zeros_like(ids), places, targets, labels, len(places) / len(labels))
    return lambda: updater.update([batch], 1.0)


def theirs(shape: str, precision: str) -> Callable[[], object]:
    """A function that makes one update of the Hugging Face model."""
    import torch
    import transformers

    sizes = {"vocab_size": SIZE["vocab"]}
    if shape == "gpt":
        config: Any = transformers.GPT2Config(
            n_embd=SIZE["d"], n_layer=SIZE["layers"], n_head=SIZE["heads"], n_inner=SIZE["ff"], **sizes
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            hidden_size=SIZE["d"],
            num_hidden_layers=SIZE["layers"],
            num_attention_heads=SIZE["heads"],
            intermediate_size=SIZE["ff"],
            **sizes,
        )
        model = transformers.BertForMaskedLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = tokens()
    labels = ids.clone()
    if shape == "bert":
        places = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(1))[: ids.numel() * 15 // 100]
        labels = torch.full_like(ids.flatten(), -100).scatter(0, places, ids.flatten()[places]).view_as(ids)
        ids = ids.flatten().scatter(0, places, 4).view_as(ids)

    def update() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return update


def measure(system: str, updates: int) -> float:
    """Input tokens per second of one system: the median over updates."""
    name, shape, *precision = system.split("-")
    update = ours(shape) if name == "transduce" else theirs(shape, precision[0])
    for _ in range(3):
        update()
    times = []
    for _ in range(updates):
        began = time.perf_counter()
        update()
        times.append(time.perf_counter() - began)
    return SIZE["rows"] * SIZE["context"] / statistics.median(times)


def main() -> None:
    """Run the rounds and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker, args.updates)))
        return
    print("| system | tokens/s | transduce is faster by |\n|---|---|---|")
    for systems in SYSTEMS.values():
        found: dict[str, list[float]] = {system: [] for system in systems}
        for _ in range(args.rounds):
            for system in systems:
                command = [sys.executable, __file__, "--worker", system, "--updates", str(args.updates)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{system} failed:\n{done.stderr[-1500:]}")
                found[system].append(json.loads(done.stdout.splitlines()[-1]))
        first = statistics.median(found[systems[0]])
        for system, speeds in found.items():
            middle = statistics.median(speeds)
            print(f"| {system} | {middle:,.0f} | {first / middle:.2f} |", flush=True)


if __name__ == "__main__":
    main()
