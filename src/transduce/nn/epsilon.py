"""The default epsilons of norms. This module does not import torch: the native library needs them too."""

from __future__ import annotations

_EPSILONS = {"layer": 1e-5, "rms": 1e-6}


def norm_eps(norm: str, eps: float | None = None) -> float:
    """The epsilon of a norm: the given one, or the default of the norm."""
    return eps or _EPSILONS[norm]
