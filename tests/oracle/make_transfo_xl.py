"""Write transfo_xl.json: outputs of Hugging Face's `TransfoXLModel`, which transformers has had until 4.35.

Run it in its own environment, from tests/: `pip install "transformers==4.35.2" torch`, then
`python -m oracle.make_transfo_xl`. The weights are a function of their names and shapes (`weight`), so that the file
contains only token ids and outputs.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_name("transfo_xl.json")
VOCAB, D_MODEL, HEADS, D_FF, LAYERS, MEMORY, SEGMENT, TEXT = 11, 12, 3, 20, 2, 5, 4, 14


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight, float64: reproducible without storing it. Norms are near 1."""
    phase, n = zlib.crc32(name.encode()) % 1000, int(np.prod(shape))
    values = 0.4 * np.cos(phase + np.arange(n) * (1.0 + phase / 7)).reshape(shape)
    return values + 1 if name.endswith("layer_norm.weight") else values


def outputs() -> dict[str, Any]:
    """Token ids of two texts, and the last hidden states of their segments."""
    import torch
    from transformers import TransfoXLConfig, TransfoXLModel  # type: ignore[attr-defined]

    config = TransfoXLConfig(
        vocab_size=VOCAB, cutoffs=[], d_model=D_MODEL, d_embed=D_MODEL, n_head=HEADS, d_head=D_MODEL // HEADS,
        d_inner=D_FF, n_layer=LAYERS, mem_len=MEMORY, same_length=False, untie_r=False, div_val=1, dropout=0.0,
        dropatt=0.0, clamp_len=-1, pre_lnorm=False,
    )  # fmt: skip
    model = TransfoXLModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
        ids = torch.tensor([[(i * i + 3 * row + i) % VOCAB for i in range(TEXT)] for row in range(2)])
        mems = [torch.zeros(0, 2, D_MODEL) for _ in range(LAYERS)]
        parts = []
        for start in range(0, TEXT, SEGMENT):
            found = model(ids[:, start : start + SEGMENT], mems=mems)
            parts.append(found.last_hidden_state)
            mems = found.mems
    return {"ids": ids.tolist(), "hidden": torch.cat(parts, 1).double().round(decimals=7).tolist()}


if __name__ == "__main__":
    PATH.write_text(json.dumps(outputs()) + "\n")
