"""The interface between models and kernels: `accelerate` replaces modules by faster equivalents."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from transduce.kernels.calls import instructions
from transduce.kernels.products import FOR_CPUS
from transduce.kernels.stack import StackDecoder, StackEncoder, knows, plan_of
from transduce.kernels.vocabulary import LibraryEmbedding, LibraryTable
from transduce.nn.attention import Attention
from transduce.nn.embedding import TokenEmbedding, TokenTable
from transduce.nn.positions import Positions
from transduce.nn.stack import Decoder, Encoder, Stack

_OF_LIBRARY: dict[type[nn.Module], type[nn.Module]] = {
    Encoder: StackEncoder,
    Decoder: StackDecoder,
    TokenEmbedding: LibraryEmbedding,
    TokenTable: LibraryTable,
}


def accelerate(
    model: nn.Module, *, device: torch.device, precision: torch.dtype, purpose: Literal["training", "decoding"]
) -> str:
    """Replace modules by faster equivalents for this device; return the name of their kernels.

    The name is "torch" (PyTorch's kernels), "triton", or the CPU instructions that the C++ library uses, such as
    "avx512". In training on a CPU, the library computes whole stacks of Transformers, embeddings, and output layers
    with their loss. In training on a GPU, Triton kernels compute attention, residual connections and the loss. Other
    matrix products on a CPU use `kernels.products`, with which a sentence's result in decoding does not depend on its
    batch. Weights and their names do not change; results change only by rounding and dropout's random numbers.

    Args:
        model: Changed in place. The original classes still compute all cases that the kernels do not cover.
        device: The device on which the model will be used.
        precision: The type of the model's matrix products.
        purpose: For "decoding", only layers that are matrix products are replaced, and only on a CPU.
    """
    if device.type == "cuda" and purpose == "training" and _compiles_triton(device):
        from transduce.kernels.gpu import FOR_GPUS

        _replace(model, FOR_GPUS)
        return "triton"
    if device.type != "cpu":
        return "torch"
    name = instructions(precision) if purpose == "training" else "torch"
    _replace(model, FOR_CPUS if name == "torch" else FOR_CPUS | _OF_LIBRARY)
    return name


def is_covered(model: nn.Module) -> bool:
    """Whether the C++ library computes all stacks of an accelerated model, and no attention is outside of stacks."""
    modules = [*model.modules()]
    stacks = [module for module in modules if isinstance(module, Stack)]
    inside = {part for stack in stacks for part in stack.modules()}
    known = all(knows(module) for module in modules if isinstance(module, Positions))
    alone = any(isinstance(module, Attention) and module not in inside for module in modules)
    return bool(stacks) and known and all(plan_of(stack) is not None for stack in stacks) and not alone


def _replace(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Change the class of each module to its faster subclass in `classes`, if any; weights and hooks do not change."""
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))


@cache
def _compiles_triton(device: torch.device) -> bool:
    """Whether this GPU supports bfloat16 and Triton can compile a kernel.

    PyTorch for GPUs on Linux includes Triton, which needs a C compiler, Python's headers and a folder for its results.
    """
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    from transduce.kernels.triton_linear import column_sums

    try:
        column_sums(torch.ones(1, 1, device=device))
    except Exception as error:  # of any kind
        warnings.warn(f"PyTorch's kernels compute, which are slower: Triton does not work here: {error}", stacklevel=2)
        return False
    return True
