"""A forecast for GPUs that are not here: speed, time and memory of a training with Adam, from a stated cost model.

An update takes the sum of

- the operations of all matrix products, 6 for each weight and token and 12 * width * keys for each attention, at
  `PRODUCTS` of the GPU's peak;
- passes over the numbers that are kept for the gradient, at the bandwidth of its memory;
- the optimizer: it reads and writes 28 bytes for each parameter;
- the sum of float32 gradients over the GPUs of a machine and then over machines, in rings. None of it is counted as
  hidden behind the backward pass.

The constants are the same for all models. docs/parallel.md compares the forecast with published trainings.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn

from transduce.config.model import ModelSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.doctor.resources import tokens_at_once
from transduce.errors import SettingsError, check_known
from transduce.models.registry import build_model, count_parameters
from transduce.nn.attention import Attention
from transduce.nn.star import SatelliteAttention
from transduce.tasks.defaults import bytes_per_token

PRODUCTS = 0.6  # share of a GPU's peak that large matrix products reach
PASSES = 6  # over each kept number: written, read by two layers; with its gradient in the backward pass
FEWER_PASSES = 2  # on GPUs with our kernels, which do in one pass what PyTorch's do in several; measured on an H100
BYTES_PER_PARAMETER = 20  # float32: weights, gradients, their sums, and two of Adam
ROOM_ON_GPU = 0.9  # of the memory; the rest is of CUDA and fragmentation
SENTENCE = 32  # keys of an attention, where rows have no fixed length
PUBLISHED = (0.98, 1.31)  # smallest and largest ratio of the times of published trainings and their forecasts
SMALLEST = 2048  # tokens of a micro-batch, for the largest model that fits


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak operations per second in the precision of training, bytes of a number in it, bytes of memory, bytes per
    second of memory and of sums within a machine, and passes over each number that is kept for the gradient."""

    operations: float
    number: int
    memory: float
    bandwidth: float
    link: float
    passes: int = PASSES


GPUS = {
    "p100": Gpu(9.5e12, 4, 16e9, 732e9, 10e9),  # float32; PCIe
    "v100": Gpu(125e12, 2, 16e9, 900e9, 130e9),
    "a100": Gpu(312e12, 2, 40e9, 1555e9, 230e9, FEWER_PASSES),
    "h100": Gpu(989e12, 2, 80e9, 3350e9, 360e9, FEWER_PASSES),
    "h200": Gpu(989e12, 2, 141e9, 4800e9, 360e9, FEWER_PASSES),
}
NETWORK = 50e9
"""Bytes per second between machines: 400 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines with some GPUs each. Raises `SettingsError` for an unknown kind, or numbers below 1."""

    gpu: str
    n_gpus: int
    n_nodes: int = 1

    def __post_init__(self) -> None:
        check_known("gpu", self.gpu, GPUS)
        if min(self.n_gpus, self.n_nodes) < 1:
            raise SettingsError(f"{self.n_gpus} GPUs on each of {self.n_nodes} machines: both must be at least 1")

    def __str__(self) -> str:
        machines = f"{self.n_nodes} machines with " if self.n_nodes > 1 else ""
        return f"{machines}{self.n_gpus} {self.gpu}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """`memory`: bytes of a GPU that the training takes; `largest`: parameters of the largest model that fits, of the
    same architecture with other widths."""

    seconds_per_update: float
    tokens_per_second: float
    memory: float
    largest: float


def forecast_settings(settings: Settings, cluster: Cluster) -> Forecast:
    """Predict the training of resolved settings."""
    n_ranks = cluster.n_gpus * cluster.n_nodes
    return forecast(
        settings.model,
        cluster,
        vocab_size=resolved(settings.tokenizer.vocab_size, "tokenizer.vocab_size"),
        targets=resolved(settings.training.batch_tokens, "training.batch_tokens"),
        micro_tokens=tokens_at_once(settings, n_ranks),
        context=settings.data.context,
        shards=cluster.n_gpus if settings.training.parallel == "shard" else 1,
        passes=PASSES if settings.training.kernels == "torch" else None,
    )


def forecast(
    model: ModelSettings,
    cluster: Cluster,
    *,
    vocab_size: int,
    targets: float,
    micro_tokens: float | None = None,
    context: int | None = None,
    shards: int = 1,
    passes: int | None = None,
) -> Forecast:
    """Predict a training of `targets` target tokens per update, with as many source tokens.

    `micro_tokens`: targets of a micro-batch, if a GPU splits its share. `context`: keys of the attentions. `shards`:
    GPUs that divide the weights, their gradients and Adam's state. They gather weights in bfloat16 twice and sum
    gradients in float32 once, which takes as many bytes as before. The gathered weights are not counted as memory.
    `passes`: over each kept number, instead of those of the GPU.
    """
    with torch.device("meta"):
        built = build_model(model, n_src=vocab_size, n_tgt=vocab_size)
    n_parameters = count_parameters(built)
    tables = {id(m.weight): m.weight.numel() for m in built.modules() if isinstance(m, nn.Embedding)}
    width = int(getattr(model, "d_model"))  # noqa: B009 - every architecture has one
    card, n_gpus, n_nodes = GPUS[cluster.gpu], cluster.n_gpus, cluster.n_nodes
    share = targets / (n_gpus * n_nodes)
    attentions = sum(isinstance(module, (Attention, SatelliteAttention)) for module in built.modules())
    weights = n_parameters - sum(tables.values()) + vocab_size * width
    operations = share * (6 * weights + 12 * attentions * width * (context or SENTENCE))
    sides = 2 if "n_encoder_layers" in type(model).model_fields else 1
    kept = sides * bytes_per_token(model, vocab_size, number=card.number)
    ring = 2 * 4 * n_parameters * ((1 - 1 / n_gpus) / card.link + (1 - 1 / n_nodes) / NETWORK)
    seconds = operations / (PRODUCTS * card.operations) + (passes or card.passes) * share * kept / card.bandwidth
    seconds += 28 * n_parameters / card.bandwidth + ring
    fixed = BYTES_PER_PARAMETER * n_parameters / shards
    memory = fixed + (micro_tokens or share) * kept
    # With all widths times s, parameters grow as s**2 and what is kept as s: a quadratic equation.
    least, room = SMALLEST * kept, ROOM_ON_GPU * card.memory
    scale = (sqrt(least**2 + 4 * fixed * room) - least) / (2 * fixed)
    return Forecast(seconds, targets / seconds, memory, n_parameters * scale**2)
