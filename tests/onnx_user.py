"""Translate with an exported ONNX folder, using onnxruntime and sentencepiece only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import sentencepiece


def translate(folder: Path, texts: list[str]) -> list[str]:
    """Greedy search."""
    how = json.loads((folder / "transduce.json").read_text())
    paths = [str(folder / how[side]["file"]) for side in ("source", "target")]
    cut, join = (sentencepiece.SentencePieceProcessor(model_file=path) for path in paths)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # a sentence's products are small
    graphs = [folder / how[name]["file"] for name in ("encoder", "decoder")]
    encoder, decoder = (onnxruntime.InferenceSession(graph, options) for graph in graphs)

    def translated(text: str) -> str:
        ids = np.array([cut.encode(text) + how["append_to_source"]])
        mask = ids != how["special"]["pad"]  # true everywhere: a single sentence has no padding
        cross = dict(zip(how["encoder"]["outputs"], encoder.run(None, {"ids": ids, "mask": mask}), strict=True))
        state, new, found = first_state(how, n_rows=1), how["begin_target"], []
        while len(found) < min(how["max_length"], 2 * ids.size + 14):
            logits, *values = decoder.run(None, {"ids": np.array([new]), "mask": mask, **cross, **state})
            state = dict(zip(state, values, strict=True))
            logits[0, -1, how["never_written"]] = -np.inf
            new = [int(logits[0, -1].argmax())]
            if new == [how["special"]["end"]]:
                break
            found += new
        return join.decode(found).strip(" ")

    return [translated(text) for text in texts]


def first_state(how: dict[str, Any], n_rows: int) -> dict[str, np.ndarray]:
    """Decoder inputs before the first step."""
    shapes = how["decoder"]["state"]
    return {name: np.zeros([n_rows if n == "batch" else n for n in axes], np.float32) for name, axes in shapes.items()}
