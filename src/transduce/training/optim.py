"""Optimizers: Adam as in the paper (5.3), AdamW, and Muon on matrices with AdamW on the rest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config.section import resolved
from transduce.config.settings import TrainingSettings
from transduce.kernels import optimizer as native
from transduce.nn.attention import FullProjection
from transduce.runs.tensors import shard_of, sharded_like

_EPS = 1e-9  # the paper's
# Newton-Schulz coefficients of Jordan et al. 2024, as in torch.optim.Muon
_NS = (3.4445, -4.7750, 2.0315)
_NS_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace each of n matrices [n, r, c] by about the nearest semi-orthogonal matrix (Jordan et al. 2024); r <= c.

    Five Newton-Schulz steps in bfloat16, as in torch.optim.Muon; the resulting singular values are between about 0.7
    and 1.2.
    """
    a, b, c = _NS
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_NS_STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _scale_gradients(params: Iterable[Tensor], scale: float) -> None:
    grads = [shard_of(p.grad) for p in params if p.grad is not None]
    if scale != 1.0 and grads:
        native.multiply(grads, scale)


class Adam(torch.optim.AdamW):
    """PyTorch's AdamW, which is Adam if the weight decay is 0; the C++ library computes updates of weights on a CPU."""

    by_library = True

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> None:  # type: ignore[override]
        """Update the weights from `scale` times the gradients, which may be overwritten."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not self.by_library or not native.reaches([x for p in params for x in (p, p.grad)]):
            _scale_gradients(params, scale)
            super().step()
            return
        for group in self.param_groups:
            tensors = [self._tensors(p) for p in group["params"] if p.grad is not None]
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            native.adam(tensors, scale=scale, **options)

    def _tensors(self, p: Tensor) -> tuple[Tensor, ...]:
        """Return a parameter, its gradient, both moments and its number of updates; the first call makes the state.

        The state has PyTorch's names.
        """
        state = self.state[p]
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        assert p.grad is not None
        return p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]


class Muon(torch.optim.Optimizer):
    """Muon, momentum with orthogonalized updates, for matrices (Jordan et al. 2024; step size: Liu et al. 2025).

    Equal to torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but matrices of equal shape are orthogonalized
    together. A matrix that packs several projections is split: a group's `rows` has the number of rows of each.
    """

    by_library = True

    def __init__(
        self, params: Sequence[dict[str, Any]], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "rows": None})
        for group in self.param_groups:
            if any(sum(group["rows"] or [len(p)]) != len(p) for p in group["params"]):
                raise ValueError(f"the rows of a matrix are not {group['rows']}")

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> None:  # type: ignore[override]
        """Update the weights from `scale` times the gradients, which may be overwritten."""
        known = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        for p in known:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        changed = [x for p in known for x in (p, p.grad, self.state[p]["momentum"])]
        if self.by_library and native.reaches(changed):
            self._step_by_library(scale)
        else:
            _scale_gradients(known, scale)
            self._step_by_torch()

    def _step_by_library(self, scale: float) -> None:
        """Update with the C++ library, one task per matrix. Products are in bfloat16 on CPUs that support it."""
        matrices = []
        for group in self.param_groups:
            kept = 1 - group["lr"] * group["weight_decay"]
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            native.will_change(params)
            for p in params:
                addresses = [x.data_ptr() for x in (p, p.grad, self.state[p]["momentum"])]
                columns = p.shape[1]
                for rows in group["rows"] or [p.shape[0]]:
                    rate = _rate(rows, columns) * group["lr"]
                    matrices.append(native.Matrix(*addresses, rows, columns, rate, kept, group["momentum"]))
                    addresses = [address + rows * columns * p.element_size() for address in addresses]
        native.muon(matrices, scale=scale, coefficients=_NS, steps=_NS_STEPS)

    def _step_by_torch(self) -> None:
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor, float]]] = defaultdict(list)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads: list[Tensor] = [p.grad for p in params if p.grad is not None]
            if not params:
                continue
            momenta = [self.state[p]["momentum"] for p in params]
            native.interpolate(momenta, grads, 1 - group["momentum"])
            native.interpolate(grads, momenta, group["momentum"])  # Nesterov; overwrites the gradients
            native.multiply(params, 1 - group["lr"] * group["weight_decay"])
            for p, g in zip(params, grads, strict=True):
                rows = group["rows"] or [p.shape[0]]
                for weight, update in zip(p.split(rows), g.split(rows), strict=True):
                    if weight.shape[0] > weight.shape[1]:
                        weight, update = weight.t(), update.t()
                    stacks[tuple(weight.shape)].append((weight, update, group["lr"]))
        for shape, members in stacks.items():
            updates = orthogonalize(torch.stack([u for _, u, _ in members]))
            for (weight, _, lr), update in zip(members, updates.unbind(0), strict=True):
                weight.add_(update, alpha=-_rate(*shape) * lr)


def _rate(rows: int, columns: int) -> float:
    """Return the factor of the learning rate that makes Muon's updates as large as AdamW's (Liu et al. 2025)."""
    return 0.2 * math.sqrt(max(rows, columns))


class CombinedOptimizer(torch.optim.Optimizer):
    """One optimizer made of several optimizers with disjoint parameters."""

    def __init__(self, parts: Sequence[Adam | Muon]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, *, scale: float = 1.0) -> None:  # type: ignore[override]
        """Update the weights from `scale` times the gradients, which may be overwritten."""
        for part in self.parts:
            part.step(scale=scale)


def _build_adam(model: nn.Module, settings: TrainingSettings) -> Adam:
    """Adam as in the paper (5.3): betas 0.9 and 0.98, epsilon 1e-9."""
    lr = resolved(settings.lr, "training.lr")
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "peak_lr": lr}]
    return Adam(groups, lr=lr, betas=settings.betas, eps=_EPS, weight_decay=0.0, fused=True)


def _build_adamw(model: nn.Module, settings: TrainingSettings, *, without: Collection[int] = ()) -> Adam:
    """AdamW, with weight decay on all weights with at least two axes; `without`: `id`s of parameters to leave out."""
    lr = resolved(settings.lr, "training.lr")
    params = [p for p in model.parameters() if p.requires_grad and id(p) not in without]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "peak_lr": lr, "weight_decay": settings.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "peak_lr": lr, "weight_decay": 0.0},
    ]
    return Adam([g for g in groups if g["params"]], lr=lr, betas=settings.betas, eps=_EPS, fused=True)


def _build_muon(model: nn.Module, settings: TrainingSettings) -> CombinedOptimizer:
    """Muon on the matrices of linear layers and recurrent units, AdamW on embeddings, norms and biases."""
    lr = resolved(settings.matrix_lr, "training.matrix_lr")
    by_rows: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            by_rows[module.rows if isinstance(module, FullProjection) else ()].append(module.weight)
        elif isinstance(module, nn.RNNCellBase):
            for weight in (module.weight_ih, module.weight_hh):
                by_rows[(module.hidden_size,) * (len(weight) // module.hidden_size)].append(weight)
    groups = [{"params": ps, "peak_lr": lr, "rows": list(rows) or None} for rows, ps in by_rows.items()]
    taken = {id(p) for weights in by_rows.values() for p in weights}
    muon = Muon(groups, lr=lr, weight_decay=settings.weight_decay)
    return CombinedOptimizer([muon, _build_adamw(model, settings, without=taken)])


OPTIMIZERS: dict[str, Callable[[nn.Module, TrainingSettings], Adam | CombinedOptimizer]] = {
    "adam": _build_adam,
    "adamw": _build_adamw,
    "muon": _build_muon,
}


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> Adam | CombinedOptimizer:
    """Build the optimizer named in the settings. Each parameter group has a `peak_lr`, which the schedule scales.

    The defaults of the settings must have been chosen (`transduce.tasks.defaults`).
    """
    optimizer = OPTIMIZERS[resolved(settings.optimizer, "training.optimizer")](model, settings)
    for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        part.by_library = settings.kernels == "auto"
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of an optimizer's state, named by the parameter's index: `0.exp_avg` and so on."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {f"{i}.{name}": value for i, p in enumerate(params) for name, value in optimizer.state.get(p, {}).items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore the result of `optimizer_tensors`; raise `ValueError` if a shape or type does not fit the optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        p = params[int(index)]
        if value.shape == p.shape:
            value = sharded_like(value, p)
        elif key != "step":
            raise ValueError(f"{name} is {list(value.shape)}, not {list(p.shape)}")
        if value.dtype != (expected := torch.float32 if key == "step" else p.dtype):
            raise ValueError(f"{name} is {value.dtype}, not {expected}")
        # A copy, so that training does not change `tensors`. Fused Adam keeps its step count on the device too.
        optimizer.state[p][key] = value.to(p.device, copy=True)
