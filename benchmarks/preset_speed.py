"""Speed of the presets in the native library: sentences per CPU second of one thread, interleaved.

    python benchmarks/preset_speed.py tiny fast-small small fast base
    python benchmarks/preset_speed.py base base:n_decoder_layers=1,decoder_self=ssru --vocab-size 32000

A model is a preset and settings that override it. Its weights are random; an output is as long as its source. Sources
have 6 to 32 tokens, 15 on average. The best of the rounds is printed.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch

from transduce.config.architectures import model_settings, resolve_preset
from transduce.config.decoding import DecodingOptions
from transduce.config.recipe import apply_overrides
from transduce.decoding.engine import DecodingInput
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.native_model import PRECISIONS, NativeModel
from transduce.models.registry import build_model, count_parameters


def engines(model: str, vocab_size: int, precisions: list[Any]) -> tuple[int, dict[str, NativeEngine]]:
    """The number of weights, and an engine per precision."""
    preset, _, changes = model.partition(":")
    values: dict[str, Any] = {"model": {}}
    apply_overrides(values, [f"model.{change}" for change in changes.split(",") if change])
    settings = resolve_preset(model_settings(preset=preset, **values["model"]))
    torch.manual_seed(0)
    built = build_model(settings, n_src=vocab_size, n_tgt=vocab_size)
    weights = {name: tensor.detach().numpy() for name, tensor in built.state_dict().items()}
    found = {}
    for precision in precisions:
        native = NativeModel(weights, settings, n_src=vocab_size, n_tgt=vocab_size, precision=precision)  # type: ignore[arg-type]
        found[precision] = NativeEngine(native, pytorch_model=lambda: None, n_threads=1)
    return count_parameters(built), found


def sources(n: int, vocab_size: int) -> list[DecodingInput]:
    """Random sentences."""
    pick = random.Random(1)
    lengths = [min(32, max(6, round(pick.gauss(15, 5)))) for _ in range(n)]
    return [DecodingInput((i,), [pick.randrange(4, vocab_size) for _ in range(k)], k) for i, k in enumerate(lengths)]


def main() -> None:
    """Parse, run the rounds, print sentences per CPU second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=["float32", "int8"])
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    asked = sources(args.sentences, args.vocab_size)
    best: dict[tuple[str, int, str], float] = {}
    known = {model: engines(model, args.vocab_size, args.precisions) for model in args.models}
    for _ in range(args.rounds):
        for model, (_, of_model) in known.items():
            for precision, engine in of_model.items():
                for beam in args.beams:
                    began = time.process_time()
                    engine.translate(asked, DecodingOptions(beam=beam, scores=beam > 1))
                    key = (model, beam, precision)
                    best[key] = min(best.get(key, float("inf")), time.process_time() - began)
    columns = [(beam, precision) for precision in args.precisions for beam in args.beams]
    print("| model | weights |" + "".join(f" {precision}, beam {beam} |" for beam, precision in columns))
    print("|---" * (2 + len(columns)) + "|")
    for model, (n_weights, _) in known.items():
        speeds = (len(asked) / best[model, beam, precision] for beam, precision in columns)
        print(f"| `{model}` | {n_weights / 1e6:.1f}M |" + "".join(f" {speed:,.0f} |" for speed in speeds))


if __name__ == "__main__":
    main()
