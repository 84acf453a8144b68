"""The attention weights of all layers of a model, recorded."""

import numpy as np
import torch
from torch import Tensor, nn

from transduce.nn.recording import record

KINDS = {
    "relay": "relay_attention",
    "encoder": "encoder.",
    "cross": "cross_attention",
    "decoder": "self_attention",
    "other cross": "decoder.attention",
}


@torch.no_grad()
def attention_maps(model: nn.Module, src: Tensor, tgt_in: Tensor) -> dict[str, np.ndarray]:
    """Weights [layers, H, T, S] by kind of attention, for one sentence pair, without dropout."""
    training = model.training
    with record(model.eval(), "*.weights") as found:
        model(src, tgt_in)
    model.train(training)
    layers: dict[str, list[np.ndarray]] = {}
    for name in found:
        kind = next(kind for kind, pattern in KINDS.items() if pattern in name)
        layers.setdefault(kind.removeprefix("other "), []).append(found.value(name)[0].float().numpy())
    return {kind: np.stack(values) for kind, values in layers.items()}
