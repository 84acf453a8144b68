"""Norms, and residual connections around sub-layers (paper 3.1)."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from transduce.native import kernels, operators
from transduce.nn.dropout import Dropout


class LayerNorm(nn.LayerNorm):
    """LayerNorm that our kernels compute in training on a CPU, and on a GPU."""

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return operators.normed(x, self) if kernels.norms(x) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """RMSNorm that our kernels compute in training on a CPU, and on a GPU."""

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return operators.normed(x, self) if kernels.norms(x) else super().forward(x)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": lambda d_model, *, eps, bias: LayerNorm(d_model, eps=eps, bias=bias),
    "rms": lambda d_model, *, eps, bias: RMSNorm(d_model, eps=eps),
}


KNOWN_NORMS = (LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm)  # a subclass may compute something else


class PostNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's (3.1, 5.4)."""

    final_norm = False

    def __init__(self, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x after the sub-layer, of the same shape."""
        return self._add(x, sublayer(x), self.norm)

    def _add(self, x: Tensor, update: Tensor, norm: nn.Module | None) -> Tensor:
        """x + Dropout(update), and the norm of that, if there is one."""
        if (norm is None or type(norm) in KNOWN_NORMS) and kernels.residual_in_use(x, update, norm):
            return operators.add_and_norm(x, update, norm, self.dropout.rate)
        total = self.dropout.add(x, update)
        return total if norm is None else norm(total)


class PreNorm(PostNorm):
    """x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020): trains without warm-up, needs a final norm."""

    final_norm = True

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        x, normed = self._normed(x)
        return self._add(x, sublayer(normed), None)

    def _normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x, and its norm."""
        if type(self.norm) in KNOWN_NORMS and kernels.computes(self.norm, x):
            return operators.normed_beside(x, self.norm)
        return x, self.norm(x)


RESIDUALS: dict[str, type[PostNorm]] = {"post": PostNorm, "pre": PreNorm}
