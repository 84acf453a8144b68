"""Which of our kernels compute: the C++ library's in training on a CPU, and Triton's on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transduce.native.library import instruction_set, load_library

Kernels = Literal["auto", "torch"]

_LONGEST, _WIDEST = 64, 128  # sequences and heads whose tiles fit into the registers of a GPU's multiprocessor
_HALF = (torch.bfloat16, torch.float16)  # in float32, Triton would take ten seconds to compile a product

_chosen: Kernels = "auto"
_threads = 0


@cache
def precisions() -> tuple[torch.dtype, ...]:
    """The types of numbers for which this CPU has kernels."""
    library = load_library()
    return (torch.float32, torch.bfloat16)[: 0 if isinstance(library, str) else library.transduce_can_train()]


def choose_kernels(kernels: Kernels) -> None:
    """Use the native kernels where there are any (auto), or PyTorch's only, from now on in this process."""
    global _chosen
    _chosen = kernels


@cache
def _compiles_triton(device: torch.device) -> bool:
    """Whether Triton, which comes with PyTorch for GPUs on Linux, works, and this GPU has bfloat16.

    It needs a C compiler, Python's headers and a folder for what it has compiled.
    """
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    from transduce.native.triton_linear import column_sums

    try:
        column_sums(torch.ones(1, 1, device=device))
    except Exception as error:  # of any kind
        warnings.warn(f"PyTorch's kernels compute, which are slower: Triton does not work here: {error}", stacklevel=2)
        return False
    return True


def on_gpu(x: Tensor) -> bool:
    """Whether kernels in Triton compute with x."""
    return x.is_cuda and _chosen != "torch" and _compiles_triton(x.device)


def n_threads() -> int:
    return _threads or torch.get_num_threads()


@contextmanager
def all_threads_for_kernels() -> Iterator[None]:
    """Inside, PyTorch computes with one thread, and the kernels with as many as PyTorch has outside.

    Threads of two pools that wait for their next work keep one another from the cores.
    """
    global _threads
    n, before = torch.get_num_threads(), _threads
    torch.set_num_threads(1)
    _threads = n
    try:
        yield
    finally:
        _threads = before
        torch.set_num_threads(n)


def new_seed() -> int:
    """A number of PyTorch's generator, for dropout in a kernel."""
    return int(torch.empty((), dtype=torch.int64).random_())


def kernels_in_use(precision: torch.dtype) -> str:
    """The implementation of products of this type in training on a CPU: amx, avx512_bf16, avx512, avx2 or torch."""
    if _chosen == "torch" or precision not in precisions():
        return "torch"
    name = instruction_set()
    if precision == torch.float32:
        return "avx2" if name == "avx2" else "avx512"
    return "amx" if name == "amx" else "avx512_bf16"


def dtype_in_use() -> torch.dtype | None:
    """The type of the products that native kernels compute now: that of autocast, or float32 if there are gradients."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    elif torch.is_grad_enabled():
        dtype = torch.float32
    else:
        return None
    return None if torch.compiler.is_compiling() or _chosen == "torch" or dtype not in precisions() else dtype


def in_use_for(x: Tensor) -> bool:
    """Whether the kernels take part in computing with x, a result of a product."""
    return x.device.type == "cpu" and x.dtype == dtype_in_use()


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` computes x W^T in place of PyTorch."""
    return (
        x.dtype in (torch.bfloat16, torch.float32)
        and weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and dtype_in_use() in (torch.bfloat16, x.dtype)
    )


def multiplies_on_gpu(x: Tensor, bias: Tensor | None) -> bool:
    """Whether `GpuLinear` computes x W^T + b: for the gradient of b."""
    return bias is not None and x.dtype != torch.float64 and x.numel() > 0 and torch.is_grad_enabled() and on_gpu(x)


def norms(x: Tensor) -> bool:
    """Whether `normed` computes the norm of x in place of PyTorch."""
    if x.device.type != "cpu":
        return x.dtype in (torch.bfloat16, torch.float32) and x.numel() > 0 and on_gpu(x)
    return x.dtype == torch.float32 and x.numel() > 0 and dtype_in_use() is not None


def drops(x: Tensor) -> bool:
    """Whether `dropped` drops numbers of x: in rows that a vector fills."""
    return x.device.type == "cpu" and norms(x) and x.dim() > 0 and 16 <= x.shape[-1] <= 1 << 16


def computes(norm: nn.Module, x: Tensor) -> TypeGuard[nn.LayerNorm | nn.RMSNorm]:
    """Whether `normed_beside` computes this norm of x."""
    return _is_of_rows(norm, x) and not has_hooks(norm) and norms(x)


def _is_of_rows(norm: nn.Module, x: Tensor) -> TypeGuard[nn.LayerNorm | nn.RMSNorm]:
    """Whether this is a norm of the last axis of x with a gain and an epsilon."""
    is_norm = isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and norm.normalized_shape == x.shape[-1:]
    return is_norm and norm.weight is not None and norm.eps is not None


def embeds(table: nn.Module, ids: Tensor) -> TypeGuard[nn.Embedding]:
    """Whether `embedding` computes this table's vectors."""
    weight = table.weight
    fits = isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.dtype == torch.float32
    reads = ids.dtype == torch.int64 and ids.numel() > 0
    return fits and reads and dtype_in_use() is not None and not has_hooks(table)


def activates(layer: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether `activated_linear` computes this layer, its activation and dropout."""
    return isinstance(layer, nn.Linear) and not has_hooks(layer) and multiplies(x, layer.weight)


def has_hooks(module: nn.Module) -> bool:
    """Whether something reads or changes what the module computes, or its gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def attends(query: Float[Tensor, "*B T K"], key: Float[Tensor, "*b S K"], value: Tensor, bias: object) -> bool:
    """Whether `attend` computes this attention, without relations."""
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    fits = max(n_queries, n_keys) <= _LONGEST and max(query.shape[-1], value.shape[-1]) <= _WIDEST
    return (
        query.dim() == 4
        and _is_plain(bias, (*query.shape[:3], n_keys))
        and _are_of_one_batch(query.shape, key, value)
        and n_queries * n_keys > 0
        and key.dtype == query.dtype
        and (in_use_for(query) or (fits and query.dtype in _HALF and on_gpu(query)))
    )


def attends_to(queries: Sequence[int], memory: Sequence[Tensor], bias: object) -> bool:
    """Whether kernels for CPUs attend with this bias to `memory`, or without it to keys and values of a projection.

    `queries`: their shape [B, H, T, K].
    """
    n_keys = memory[0].shape[2] if memory else queries[2]
    dtype = dtype_in_use()
    return (
        n_keys > 0
        and _is_plain(bias, (*queries[:3], n_keys))
        and all(x.dtype == dtype and x.stride(3) == 1 for x in memory)
        and (not memory or _are_of_one_batch(queries, *memory))
    )


def _are_of_one_batch(queries: Sequence[int], key: Tensor, value: Tensor) -> bool:
    """Whether nothing is broadcast: as many values as keys for each query's sequence, and queries as wide as keys."""
    return queries[0] == key.shape[0] and key.shape[:3] == value.shape[:3] and key.shape[3] == queries[3]


def _is_plain(bias: object, scores: tuple[int, ...]) -> bool:
    """Whether a kernel adds this bias to scores of this shape, [B, H, T, S]."""
    return bias is None or (
        isinstance(bias, Tensor)
        and bias.dim() == 4
        and bias.shape[3] == scores[3]
        and all(n in (1, of_scores) for n, of_scores in zip(bias.shape, scores, strict=True))
        and bias.stride(3) == 1
        and bias.dtype == torch.float32
        and not bias.requires_grad
    )


def residual_in_use(x: Tensor, update: Tensor, norm: nn.Module | None) -> bool:
    """Whether `add_and_norm` adds this update to x, and computes this norm of the sum."""
    in_use = norms(update) if x.is_cuda else x.dtype == torch.float32 and in_use_for(update)
    return in_use and (norm is None or (_is_of_rows(norm, x) and not has_hooks(norm)))
