"""Gated convolutions and multi-step attention: the layers of ConvS2S (Gehring et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.attention import Attention
from transduce.nn.dtypes import product_dtype
from transduce.nn.masks import attention_bias
from transduce.nn.state import RowState

_HALF = math.sqrt(0.5)
"""Factor that keeps the variance when two terms are added (section 3.4)."""


def windows(x: Float[Tensor, "B R D"], kernel_size: int) -> Float[Tensor, "B T E"]:
    """Concatenate the vectors of each window of k = `kernel_size` positions: T = R - k + 1, E = k * D.

    A convolution is one matrix product with the result. The rows of a product are independent, so that a sentence's
    result does not depend on its batch.
    """
    if kernel_size == 1:
        return x
    n, x = x.shape[1] - kernel_size + 1, x.to(product_dtype(x))  # cast before the input is copied `kernel_size` times
    return torch.cat([x[:, i : i + n] for i in range(kernel_size)], dim=2)


def scaled_linear(n_in: int, n_out: int, *, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    """Create a linear layer with weights drawn from N(0, variance gain / n_in) and bias 0 (section 3.5)."""
    layer = nn.Linear(n_in, n_out, bias=bias)
    nn.init.normal_(layer.weight, std=math.sqrt(gain / n_in))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class GatedConvolution(nn.Module):
    """Convolution with a gated linear unit: A * sigmoid(B) with [A; B] = W [x_1; ...; x_k] + b (section 3.2).

    Dropout with probability p multiplies the variance of the input by 1 / (1 - p), and the gate reduces the variance of
    the output; the initial weights compensate for both (section 3.5).
    """

    def __init__(self, d_model: int, *, kernel_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.dropout = nn.Dropout(dropout)
        self.expand = scaled_linear(kernel_size * d_model, 2 * d_model, gain=4 * (1 - dropout))

    def forward(self, x: Float[Tensor, "B R D"]) -> Float[Tensor, "B T D"]:
        """Return the output for every window of x, which is padded already: T = R - kernel_size + 1."""
        return F.glu(self.expand(windows(self.dropout(x), self.kernel_size)))


class ConvEncoder(nn.Module):
    """The encoder of ConvS2S: a projection to d_conv, gated convolutions, a projection back to d_model (section 3.2).

    The windows are centred on their position. Each convolution has a residual connection, x <- (x + conv(x)) *
    sqrt(0.5). Positions outside the sentence are zeros.
    """

    def __init__(
        self, *, n_layers: int, d_model: int, d_conv: int, kernel_size: int, dropout: float = 0.0, n_readers: int = 1
    ) -> None:
        """`n_readers`: the number of decoder layers that attend to the memory."""
        super().__init__()
        self.widen = scaled_linear(d_model, d_conv, gain=1 - dropout)
        self.blocks = nn.ModuleList(
            GatedConvolution(d_conv, kernel_size=kernel_size, dropout=dropout) for _ in range(n_layers)
        )
        self.narrow = scaled_linear(d_conv, d_model)
        self.gradient_scale = 1 / (2 * n_readers)
        before = (kernel_size - 1) // 2
        self.around = (0, 0, before, kernel_size - 1 - before)

    def forward(
        self, x: Float[Tensor, "B S D"], *, keep: Bool[Tensor, "B S 1"]
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B S D"]]:
        """Return the memory of the embedded sentences x, and the values of attention, (memory + x) * sqrt(0.5).

        `keep` is False at padding. The gradient into the stack, but not the gradient into x, is divided by the number
        of uses of the memory: every attention layer uses it twice (section 3.4 and the authors' code).
        """
        hidden = self.widen(x).to(x.dtype)
        for block in self.blocks:
            hidden = (block(F.pad(hidden.masked_fill(~keep, 0), self.around)) + hidden) * _HALF
        memory = _scale_gradient(self.narrow(hidden).to(x.dtype), self.gradient_scale)
        return memory, (memory + x) * _HALF


def _scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return x, but multiply its gradient by `scale` in the backward pass."""
    return torch.lerp(x.detach(), x, scale) if x.requires_grad else x


class MemoryAttention(Attention):
    """Attention of one decoder layer to the memory (section 3.3): a_ij = softmax_j(d_i . z_j), c_i = sum_j a_ij v_j.

    d_i = (W h_i + b + g_i) * sqrt(0.5), with the hidden state h_i and the embedding g_i of the previous token; z_j is
    the memory and v_j its values. For a sentence of S tokens, the output is (h_i + W_o c_i sqrt(S) + b_o) * sqrt(0.5)
    (section 3.4). W and W_o are applied to the memory instead, once per sentence, as (W h) . z = h . (W^T z).
    """

    def __init__(self, *, d_model: int, d_conv: int) -> None:
        super().__init__()
        self.key = nn.Linear(d_model, d_conv, bias=False)  # W^T
        nn.init.normal_(self.key.weight, std=d_conv**-0.5)
        self.query_bias = nn.Parameter(torch.zeros(1, d_model))
        self.value = scaled_linear(d_model, d_conv)

    def read(
        self, memory: Float[Tensor, "B S D"], values: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 S"]
    ) -> dict[str, Tensor]:
        """Project the memory once per sentence: return keys and values [B, S, C], and a bias on the scores [B, 1, S].

        `mask` is False at padding.
        """
        n_tokens = mask.sum(2, keepdim=True).to(values.dtype)  # [B, 1, 1]
        bias = attention_bias(mask)[:, 0] + (memory * self.query_bias).sum(-1)[:, None] * _HALF
        return {"keys": self.key(memory), "values": self.value(values * n_tokens.sqrt()), "bias": bias}

    def combine(
        self, weights: Float[Tensor, "B 1 Q S"], hidden: Tensor, of_embedding: Tensor, memory: Mapping[str, Tensor]
    ) -> Float[Tensor, "B Q C"]:
        return (hidden + self.matmul(weights[:, 0], memory["values"])) * _HALF

    def weights(
        self, hidden: Float[Tensor, "B Q C"], of_embedding: Float[Tensor, "B Q S"], memory: Mapping[str, Tensor]
    ) -> Float[Tensor, "B 1 Q S"]:
        """Return the attention weights of hidden states; `of_embedding`: the products g_i . z_j."""
        return self.raw_scores(hidden, of_embedding, memory).softmax(-1)

    def raw_scores(
        self, hidden: Float[Tensor, "B Q C"], of_embedding: Float[Tensor, "B Q S"], memory: Mapping[str, Tensor]
    ) -> Float[Tensor, "B 1 Q S"]:
        """Return the scores d_i . z_j. Their term b . z_j is in `memory["bias"]`, which also hides padding."""
        products = of_embedding + self.matmul(hidden, memory["keys"].transpose(1, 2))
        return torch.add(memory["bias"], products, alpha=_HALF)[:, None]


class ConvDecoder(nn.Module):
    """The decoder of ConvS2S: causal gated convolutions, each followed by attention to the memory (section 3.3)."""

    def __init__(self, *, n_layers: int, d_model: int, d_conv: int, kernel_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.widen = scaled_linear(d_model, d_conv, gain=1 - dropout)
        self.blocks = nn.ModuleList(
            GatedConvolution(d_conv, kernel_size=kernel_size, dropout=dropout) for _ in range(n_layers)
        )
        self.attentions: Any = nn.ModuleList(MemoryAttention(d_model=d_model, d_conv=d_conv) for _ in range(n_layers))
        self.narrow = scaled_linear(d_conv, d_model)
        self.dropout = nn.Dropout(dropout)
        self.reach, self.d_conv = kernel_size - 1, d_conv

    def start(
        self,
        memory: Float[Tensor, "B S D"],
        values: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B 1 S"],
        *,
        n_beams: int,
    ) -> RowState:
        """Return the state before the first token: each layer's projections of the memory, and zeros as last inputs."""
        sentences = {"memory": memory}
        for n, attention in enumerate(self.attentions):
            sentences |= {f"{name}.{n}": read for name, read in attention.read(memory, values, mask).items()}
        before = memory.new_zeros(len(memory) * n_beams, self.reach, self.d_conv)
        return RowState({f"inputs.{n}": before for n in range(len(self.blocks))}, sentences, n_beams=n_beams)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        """Apply all layers to the next T embedded tokens of every row; `state` is updated in place."""
        known, n_steps = state.sentences, x.shape[1]
        shape = len(known["memory"]), state.n_beams * n_steps, -1
        scores = self.attentions[0].matmul(x.reshape(shape), known["memory"].transpose(1, 2))  # [B, Q, S]
        hidden = self.widen(x).to(x.dtype)
        for n, (block, attention) in enumerate(zip(self.blocks, self.attentions, strict=True)):
            inputs = torch.cat([state.rows[f"inputs.{n}"], hidden], dim=1)  # [N, reach + T, C]
            state.rows[f"inputs.{n}"] = inputs[:, n_steps:]
            memory = {name: known[f"{name}.{n}"] for name in ("keys", "values", "bias")}
            attended = attention.attend(block(inputs).reshape(shape), scores, memory)
            hidden = (attended.view_as(hidden) + hidden) * _HALF
        state.length += n_steps
        return self.dropout(self.narrow(hidden))
