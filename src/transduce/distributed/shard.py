"""Every rank has a shard of each weight, its gradient and its optimizer state: PyTorch's FSDP2.

The blocks of encoders and decoders are gathered one by one when they compute. Everything else, such as embeddings and
models of other layers, is gathered for the whole forward and backward pass. With several machines, each has all shards
(HSDP), so that only sums of gradients cross the network.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, distributed, nn

from transduce.distributed.environment import ProcessRank
from transduce.distributed.replicate import check_equal
from transduce.nn.attention import CrossAttention
from transduce.nn.stack import Decoder, Encoder
from transduce.runs.shards import gather
from transduce.training.ranks import gradient_norm


@final
class Shards:
    """The shards of a model, which `fully_shard` puts in place of its parameters."""

    in_step = True

    def __init__(self, model: nn.Module, device: torch.device, *, precision: str, process: ProcessRank) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # the gradients are tested
        self._model: Any = model
        check_equal(dict(model.named_parameters()))  # each rank keeps another part
        sizes = torch.tensor([process.local_size, -process.local_size])
        distributed.all_reduce(sizes, op=distributed.ReduceOp.MAX)  # all ranks must make the same mesh
        is_even = not sizes.sum() and process.size % process.local_size == 0
        self._n_copies = process.size // process.local_size if is_even else 1
        shape = (process.size,) if self._n_copies == 1 else (self._n_copies, process.local_size)
        names = ("copies", "shards")[-len(shape) :]
        self._mesh = distributed.init_device_mesh(device.type, shape, mesh_dim_names=names)
        is_rounded = device.type == "cuda" and precision == "bfloat16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_rounded else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        nothing = {id(p): nn.Parameter(torch.empty(0), requires_grad=False) for p in model.parameters()}
        self._empty = copy.deepcopy(model, nothing).eval() if process.rank == 0 else None
        for unit in (*_units(model), model):
            sharded: Any = fully_shard(unit, mesh=self._mesh, mp_policy=policy, reshard_after_forward=unit is not model)
            sharded.set_gradient_divide_factor(1.0)  # `Updater` divides by the number of targets
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no operation with a factor

    @contextlib.contextmanager
    def computing(self, *, last: bool) -> Iterator[None]:
        """Gradients are summed after each backward pass, because whole ones would need the memory of the model."""
        yield
        self._model.reshard()  # after a forward pass without gradients; the loss has used the output matrix

    def finish(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Sum the `sums`; after them the norm of all shards."""
        square = gradient_norm(parameters).square() / self._n_copies
        total = torch.stack([*(value.detach().float() for value in sums), square])
        distributed.all_reduce(total)
        *summed, square = total.unbind()
        return [*summed, square.sqrt()]

    @contextlib.contextmanager
    def whole(self, model: nn.Module) -> Iterator[nn.Module]:
        """A copy of the model on the CPU in the main process; `model` in the others."""
        weights = gather(dict(model.named_parameters()), keep=self._empty is not None)
        if self._empty is None:
            yield model
            return
        for name, parameter in self._empty.named_parameters():
            parameter.data = weights.pop(name)
        try:
            yield self._empty
        finally:
            for parameter in self._empty.parameters():
                parameter.data = torch.empty(0)

    def close(self) -> None:
        """Let go of the process group: caches of PyTorch keep the mesh, and closures in an error's frames the model."""
        vars(self._mesh).get("_pg_registry", {}).clear()
        for module in [*self._model.modules()]:
            vars(module).clear()

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """Ranks have different shards."""


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are gathered on their own, inner ones first."""
    for module in model.modules():
        if isinstance(module, Encoder | Decoder):
            # A decoder computes the keys and values of the memory before its first block.
            yield from (one.key_value for one in module.modules() if isinstance(one, CrossAttention))
            yield from module.blocks
