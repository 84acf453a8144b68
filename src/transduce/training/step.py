"""The training step: gradients of all micro-batches, clipping, optimizer update (paper 5.3, 5.4).

If memory runs out, CUDA graphs are given up first; then the micro-batch is split in two. The failure may come in the
middle of a backward pass, when only some gradients have been added. So the whole update starts again without gradients
and from the same random numbers; its result is exactly as if the batch had been split from the start. From then on,
batches of at least this size are split before they are tried. The size is part of the state, so that a resumed run
splits the same batches.

On a GPU, an update of a small model consists of hundreds of kernels that each take a few microseconds. The CPU needs
longer to launch them than the GPU needs to run them. A CUDA graph launches them all at once, but only for batches of
one shape. So batches are padded to shapes that recur.

Dropout's random numbers depend only on the seed, the number of earlier updates and the rank, so that the state does
not contain a random generator.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.config.settings import TrainingSettings
from transduce.data.batch import RowBatch, TrainingBatch
from transduce.errors import is_out_of_memory
from transduce.kernels.accelerate import accelerate, is_covered
from transduce.kernels.calls import all_threads_for_library, writing_gradients
from transduce.kernels.products import rounded_rows
from transduce.nn.adapters import recompute_blocks
from transduce.nn.embedding import piece_vectors
from transduce.nn.positions import LearnedPositions
from transduce.nn.recurrent import SSRU
from transduce.nn.stack import Stack
from transduce.nn.star import SatelliteAttention
from transduce.text.special import PAD
from transduce.training.loss import PRECISIONS, Carry, Criterion, PredictConsistently, autocast, predict_tokens
from transduce.training.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from transduce.training.ranks import SINGLE_RANK, Ranks, dropout_seed

Results = tuple[Tensor, Tensor, Carry]
Passes = Callable[[TrainingBatch], Results]
"""Function that adds the gradients of a batch's sum of losses, and returns the sums of loss and -log p, and a carry."""

_MAX_GRAPHS = 512  # each graph takes a few megabytes
_LENGTH_MULTIPLE = 4  # lengths are padded to a multiple of this, up to the model's limit


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    batch: RowBatch  # the input buffers
    results: Results


class GraphedPasses:
    """Runs the forward and backward passes of one model on a GPU, as CUDA graphs if possible.

    The first batch of a shape runs eagerly, the second is captured in a graph, and the graph is replayed for later
    batches. After `_MAX_GRAPHS` shapes, batches of new shapes always run eagerly. Dropout's random numbers do not
    depend on this. From the first batch on, the gradients must keep their addresses in memory.
    """

    def __init__(self, *, longest: int | None) -> None:
        """`longest`: number of positions of the longest sequence that the model accepts; None for no limit."""
        self._longest = longest
        self._graphs: dict[tuple[torch.Size, ...], _Graph | None] = {}  # None: seen once
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, passes: Passes, batch: TrainingBatch) -> Results:
        """Run `passes` for a batch, eagerly or as a graph; return its results. It must be equivalent in all calls."""
        batch = padded_to_recur(batch, longest=self._longest)
        shape = tuple(x.shape for x in (*batch.inputs, batch.targets))
        if shape not in self._graphs:
            if len(self._graphs) < _MAX_GRAPHS:
                self._graphs[shape] = None
            return passes(batch)
        known = self._graphs[shape]
        if known is None:
            known = self._graphs[shape] = self._capture(passes, batch)
        for own, given in zip((*known.batch.inputs, known.batch.targets), (*batch.inputs, batch.targets), strict=True):
            own.copy_(given)
        known.graph.replay()
        return known.results

    def _capture(self, passes: Passes, batch: RowBatch) -> _Graph:
        """Capture a graph that reads its input from `batch`. All graphs share memory, as only one is used at a time."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.stream(torch.cuda.current_stream())  # restores the stream after a failed capture
        # Another thread sends batches to the GPU meanwhile, which the mode "global" would not allow.
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        error: Exception | None = None
        try:
            with stream, capture:
                try:
                    results = passes(batch)
                except Exception as first:
                    error = first
                    raise
        except Exception as last:
            raise error or last from None  # the last error only says that the capture failed
        return _Graph(graph, batch, results)


def padded_to_recur(batch: TrainingBatch, *, longest: int | None) -> RowBatch:
    """Pad the inputs and targets of a batch at their ends to a shape that many batches have.

    `longest`: greatest length that the model accepts, or None.
    """
    rows = rounded_rows(batch.n_rows, least=1)

    def padded(x: Tensor) -> Tensor:
        length = -(-x.shape[1] // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        if longest is not None:
            length = max(x.shape[1], min(length, longest))
        whole = x.new_full((rows, length, *x.shape[2:]), torch.nan if x.is_floating_point() else PAD)  # as in batches
        whole[: x.shape[0], : x.shape[1]] = x
        return whole

    return RowBatch(tuple(map(padded, batch.inputs)), padded(batch.targets), batch.n_targets)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of an update: losses in nats, summed over `n_targets` targets, and the unclipped gradient norm."""

    loss_sum: float
    nll_sum: float
    n_targets: int
    grad_norm: float
    carry: Carry = ()

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because its loss or its gradient is not finite."""
        return not (math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm))


class DoesNotFit(Exception):
    """A batch of a single row does not fit into memory."""

    def __init__(self, batch: TrainingBatch) -> None:
        self.batch = batch
        super().__init__(f"of {slots_of(batch):,} slots")


def slots_of(batch: TrainingBatch) -> int:
    """Count the input and target tokens of a batch including padding, as a measure of its memory."""
    return sum(tensor.numel() for tensor in (*batch.inputs, batch.targets))


def _drop_words(module: nn.Module, _: Any, vectors: Float[Tensor, "B T D"], *, p: float) -> Float[Tensor, "B T D"]:
    """Zero the vectors of whole pieces with probability p in training, as a forward hook (Gal and Ghahramani 2016)."""
    return F.dropout1d(vectors, p, training=module.training)


class Updater:
    """A model and its optimizer; `update` is the training step.

    The gradient is the gradient of the mean loss over all targets of an update. It does not depend on the division into
    micro-batches: passes add up gradients of sums, and the optimizer divides them.
    `too_large`: size (`slots_of`) of the smallest batch that did not fit into memory; batches of this size are split.
    `n_updates`: number of updates so far, including skipped updates.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings,
        *,
        device: torch.device,
        precision: str,
        criterion: Criterion = predict_tokens,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        self.ranks, self.seed = ranks, settings.seed
        self.model: Any = model  # a model of any architecture
        self.device, self.precision, self.criterion = device, precision, criterion
        self.smoothing, self.clip_norm = settings.label_smoothing, settings.clip_norm
        self.kernels = "torch"
        if settings.kernels == "auto":
            self.kernels = accelerate(model, device=device, precision=PRECISIONS[precision], purpose="training")
        if settings.recompute:
            recompute_blocks(model)
        if settings.word_dropout:
            drop = partial(_drop_words, p=settings.word_dropout)
            for module in piece_vectors(model):
                module.register_forward_hook(drop)
        ranks.distribute(model, device, parallel=settings.parallel, precision=precision)
        self._parameters = [*model.parameters()]
        self._by_library = self.kernels not in ("torch", "triton")
        # If PyTorch computes much itself, changing between two thread pools costs more than the threads gain.
        self._library_does_most = self._by_library and is_covered(model)
        self.optimizer = build_optimizer(model, settings)
        can_graph = device.type == "cuda" and settings.lora is None and not settings.recompute
        self.graphs = self._graphed_passes() if can_graph else None
        self.too_large: int | None = None
        self.n_updates = 0

    def update(
        self,
        batches: Sequence[TrainingBatch],
        lr_scale: float,
        *,
        n_targets: int | None = None,
        carry: Carry = (),
        dummies: Sequence[TrainingBatch] = (),
        progress: float = 1.0,
        steps: bool = True,
    ) -> UpdateResult:
        """Make one update from micro-batches on the device, with learning rates of `lr_scale` times their peaks.

        If the loss or the gradient is not finite, the weights and the optimizer's state do not change, and the next
        update starts without a carry.

        Args:
            batches: This process's micro-batches.
            lr_scale: Factor of the peak learning rates.
            n_targets: Number of targets of the whole update, needed if other ranks have some of its micro-batches. The
                returned sums always refer to the whole update.
            carry: The carry that the previous update returned, with the rows of all micro-batches in order.
            dummies: Batches whose losses do not count, so that all ranks compute equal numbers of batches.
            progress: Fraction of the training that is over, on which the criterion may depend.
            steps: False to measure the time of the passes only; gradients are then dropped.

        Raises:
            DoesNotFit: A batch that cannot be split does not fit into memory. The weights are unchanged.
        """
        if not self.model.training:
            self.model.train()
        if n_targets is None:
            n_targets = sum(batch.n_targets for batch in batches)
        dummies = dummies if self.ranks.in_step else ()
        is_early = isinstance(self.criterion, PredictConsistently) and progress < self.criterion.settings.begin
        criterion = predict_tokens if is_early else self.criterion
        try:
            with (
                torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
                all_threads_for_library() if self._library_does_most else contextlib.nullcontext(),
            ):
                *sums, carry = self._add_gradients(batches, carry, dummies, criterion)
                loss_sum, nll_sum, norm = self.ranks.finish_reduction(sums, self._parameters)
                # The only wait for a GPU in an update: whether to make the step is decided here.
                loss, nll, norm_of_sum = torch.stack([loss_sum, nll_sum, norm]).tolist()
                grad_norm = norm_of_sum / max(n_targets, 1)  # an update may have no target
                result = UpdateResult(loss_sum=loss, nll_sum=nll, n_targets=n_targets, grad_norm=grad_norm, carry=carry)
                if result.skipped:
                    result = replace(result, carry=())
                elif steps:
                    self._step(result, lr_scale)
        finally:  # also after an interrupt
            self.optimizer.zero_grad(set_to_none=self.graphs is None)
        self.n_updates += steps
        return result

    def _graphed_passes(self) -> GraphedPasses | None:
        """Return CUDA graphs for a Transformer in bfloat16 on one rank with the plain token loss, otherwise None."""
        modules = [*self.model.modules()]
        is_transformer = any(isinstance(module, Stack) for module in modules)
        is_recurrent = any(isinstance(module, (SSRU, SatelliteAttention)) for module in modules)
        is_plain = self.criterion is predict_tokens and self.ranks.size == 1
        if not is_transformer or is_recurrent or not is_plain or self.precision == "float32":
            return None
        limits = [module.max_positions for module in modules if isinstance(module, LearnedPositions)]
        return GraphedPasses(longest=min(limits, default=None))

    def _step(self, result: UpdateResult, lr_scale: float) -> None:
        """Divide and clip the gradients, and change the weights."""
        clips = self.clip_norm and result.grad_norm > self.clip_norm
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale
        scale = self.clip_norm / result.grad_norm if clips else 1.0
        self.optimizer.step(scale=scale / max(result.n_targets, 1))

    def _add_gradients(
        self, batches: Sequence[TrainingBatch], carry: Carry, dummies: Sequence[TrainingBatch], criterion: Criterion
    ) -> tuple[Tensor, Tensor, Carry]:
        """Add up the gradients of all batches; return the sums of loss and of -log p over `batches`, and their carry.

        If memory runs out, start again without CUDA graphs or with a smaller `too_large`.
        """
        while True:
            seed = dropout_seed(self.seed, self.n_updates, self.ranks.rank)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.15 ms to look for other devices
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            batches = [part for batch in batches for part in self._fitting(batch)]
            loss_sum, nll_sum = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
            carries, row = list[Carry](), 0
            try:
                for number, batch in enumerate([*batches, *dummies], 1):
                    counts, rows = number <= len(batches), slice(row, row := row + batch.n_rows)
                    with self.ranks.computing(last=number == len(batches) + len(dummies)):
                        if self.graphs is None:
                            parts = tuple(x[rows] for x in carry)
                            loss, nll, after = self._backward(criterion, batch, parts, counts=counts)
                        else:
                            loss, nll, after = self.graphs.run(partial(self._backward, criterion), batch)
                    if counts:
                        loss_sum += loss
                        nll_sum += nll
                        carries.append(after)
                return loss_sum, nll_sum, tuple(torch.cat(parts) for parts in zip(*carries, strict=True))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block, no traceback keeps the failed batch's tensors alive.
            self.optimizer.zero_grad(set_to_none=True)
            had_graphs, self.graphs = self.graphs is not None, None  # graphs keep memory, and pad batches
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if not had_graphs:
                if batch.n_rows == 1 or self.ranks.in_step:
                    raise DoesNotFit(batch)
                self.too_large = min(self.too_large or slots_of(batch), slots_of(batch))

    def _backward(
        self, criterion: Criterion, batch: TrainingBatch, carry: Carry = (), *, counts: bool = True
    ) -> tuple[Tensor, Tensor, Carry]:
        """Add the gradients of a batch's sum of losses; return this sum, the sum of -log p, and the carry.

        `counts`: False for a dummy batch, whose gradients are zero.
        """
        writes = self._by_library and self.ranks is SINGLE_RANK
        with writing_gradients(self._parameters) if writes else contextlib.nullcontext():
            with autocast(self.device, self.precision):
                loss, nll, after = criterion(self.model, batch, smoothing=self.smoothing, carry=carry)
            loss = loss if counts else 0.0 * loss
            loss.backward()
        return loss.detach(), nll, after

    def _fitting(self, batch: TrainingBatch) -> Iterator[TrainingBatch]:
        """Yield a batch, split in halves until each part is smaller than `too_large` or has one row."""
        if self.too_large is None or slots_of(batch) < self.too_large or batch.n_rows == 1:
            yield batch
            return
        half = batch.n_rows // 2
        for part in (batch.part(0, half), batch.part(half, batch.n_rows)):
            yield from self._fitting(part)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state that an exact resume needs besides the weights: the optimizer's tensors, and JSON values."""
        state = {"processes": self.ranks.size, "too_large": self.too_large, "kernels": self.kernels}
        return optimizer_tensors(self.optimizer), state

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, n_updates: int) -> list[str]:
        """Restore a result of `state`, saved after `n_updates`; return notes on differences from the saved run."""
        load_optimizer_tensors(self.optimizer, tensors)
        self.too_large = None if self.ranks.in_step else state["too_large"]
        self.n_updates = n_updates
        notes = []
        if (before := state["kernels"]) != self.kernels:
            notes.append(f"the kernels were {before} and are {self.kernels} now: results differ by rounding")
        if (n := state["processes"]) != self.ranks.size:
            notes.append(
                f"the run had {n} process{'es' * (n > 1)} until update {n_updates} and resumes with {self.ranks.size}: "
                "updates have the same sentences, but results differ by rounding, and dropout has other random numbers"
            )
        return notes
