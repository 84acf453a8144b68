"""The training step: gradients of all micro-batches, clipping, optimizer update (paper 5.3, 5.4).

If memory runs out, CUDA graphs are given up first; then the micro-batch is split in two. The failure may come in the
middle of a backward pass, when only some gradients have been added. So the whole update starts again without gradients
and from the same random numbers, and gives exactly what the two halves would have given at first. From then on, batches
of that size are split before they are tried. The size is part of the state, so that a resumed run splits the same
batches.

Dropout's random numbers follow from the seed, the number of updates before this one, and the rank, so that the state
has none.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config.settings import TrainingSettings
from transduce.data.batch import TrainingBatch
from transduce.errors import is_out_of_memory
from transduce.native.deferred import deferred, taking_gradients
from transduce.native.kernels import all_threads_for_kernels, choose_kernels, has_hooks, kernels_in_use, on_gpu
from transduce.nn.attention import Attention, CrossAttention, SelfAttention
from transduce.nn.feedforward import ConvFeedForward
from transduce.nn.patterns import HeadsPattern, SparsePattern
from transduce.nn.positions import LearnedPositions, ShawPositions, T5Positions
from transduce.nn.ssru import SSRU
from transduce.nn.stack import Decoder, Encoder
from transduce.nn.star import SatelliteAttention
from transduce.training.graphs import GraphedPasses
from transduce.training.loss import Carry, Criterion, predict_tokens
from transduce.training.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from transduce.training.ranks import SINGLE_RANK, Ranks, dropout_seed

PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of an update: sums in nats over `n_targets` targets, and the norm of the gradient before clipping."""

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
    """Number of input and target tokens of a batch with padding, as a measure of its memory."""
    return sum(tensor.numel() for tensor in (*batch.inputs, batch.targets))


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """The context in which matrix products have `precision`; weights stay float32."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


_NOT_ON_CPUS = (ConvFeedForward, ShawPositions, T5Positions)


def _is_covered(model: nn.Module, device: torch.device) -> bool:
    """Whether the kernels of a device do nearly all of a model's work: a Transformer's.

    Those for CPUs do not convolve, nor attend in the blocks of sparse patterns or with learned relative positions. On a
    GPU such models are captured in graphs nevertheless.
    """
    modules = list(model.modules())
    attentions = [one for one in modules if isinstance(one, Attention)]
    plain = all(isinstance(one, (SelfAttention, CrossAttention)) for one in attentions)
    if not attentions or not plain or any(isinstance(one, (SSRU, SatelliteAttention)) for one in modules):
        return False
    patterns = [pattern for one in modules if isinstance(one, (Encoder, Decoder)) for pattern in one.patterns]
    sparse = any(isinstance(pattern, (SparsePattern, HeadsPattern)) for pattern in patterns)
    return device.type != "cpu" or not (sparse or any(isinstance(one, _NOT_ON_CPUS) for one in modules))


class Updater:
    """A model and its optimizer; `update` is the training step.

    The gradient is that of the mean loss over all targets of an update, however it is split into micro-batches: passes
    add up gradients of sums, and the optimizer divides them.
    `too_large`: size (`slots_of`) of the smallest batch that did not fit into memory. Larger batches are split.
    `n_updates`: updates so far, including skipped ones.
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
        self.model: Any = model  # of any architecture
        self.device, self.precision, self.criterion = device, precision, criterion
        self.smoothing, self.clip_norm = settings.label_smoothing, settings.clip_norm
        ranks.distribute(model, device, parallel=settings.parallel, precision=precision)
        self._parameters, self._modules = [*model.parameters()], [*model.modules()]
        is_covered = _is_covered(model, device)
        # In float32 a CPU's kernels gain less than a change of thread pools costs where PyTorch computes the rest.
        choose_kernels(settings.kernels if precision != "float32" or is_covered else "torch")
        if device.type == "cpu":
            self.kernels = kernels_in_use(PRECISIONS[precision])
        else:
            self.kernels = "triton" if on_gpu(self._parameters[0]) else "torch"
        is_by_library = self.kernels not in ("torch", "triton")
        self._kernels_do_most = is_by_library and is_covered
        # Sharded weights are not always there.
        self._defers = is_by_library and not ranks.in_step
        self.optimizer = build_optimizer(model, settings)
        self.graphs = self._graphed_passes() if is_covered and device.type == "cuda" else None
        self.too_large: int | None = None
        self.n_updates = 0

    def update(
        self,
        batches: Sequence[TrainingBatch],
        lr_scale: float,
        n_targets: int | None = None,
        carry: Carry = (),
        dummies: Sequence[TrainingBatch] = (),
    ) -> UpdateResult:
        """Make one update from micro-batches on the device, with learning rates of `lr_scale` times their peaks.

        If the loss or the gradient is not finite, the weights and the optimizer's state do not change, and the next
        update starts without a carry.

        Args:
            batches: This process's micro-batches.
            lr_scale: Factor of the peak learning rates.
            n_targets: Targets of the whole update, if other ranks have some of its micro-batches. The returned sums
                are always those of the whole update.
            carry: The carry that the previous update returned, one row for each row of the micro-batches in order.
            dummies: Batches whose losses do not count. With `batches`, every rank has as many.

        Raises:
            DoesNotFit: A batch that cannot be split does not fit into memory. The weights are unchanged.
        """
        if not self.model.training:
            self.model.train()
        if n_targets is None:
            n_targets = sum(batch.n_targets for batch in batches)
        dummies = dummies if self.ranks.in_step else ()
        with (
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
            self._no_gradients_after(),
            all_threads_for_kernels() if self._kernels_do_most else contextlib.nullcontext(),
        ):
            *sums, carry = self._gradients(batches, carry, dummies)
            loss_sum, nll_sum, norm = self.ranks.finish_reduction(sums, self._parameters)
            # The only wait for a GPU in an update: whether to make the step is decided here.
            loss, nll, norm_of_sum = torch.stack([loss_sum, nll_sum, norm]).tolist()
            grad_norm = norm_of_sum / max(n_targets, 1)  # an update may have no target
            result = UpdateResult(loss_sum=loss, nll_sum=nll, n_targets=n_targets, grad_norm=grad_norm, carry=carry)
            if result.skipped:
                result = replace(result, carry=())
            else:
                self._step(result, lr_scale)
        self.n_updates += 1
        return result

    @contextlib.contextmanager
    def _no_gradients_after(self) -> Iterator[None]:
        """Leave no gradients to the next update, also if this one is interrupted."""
        try:
            yield
        finally:
            self.optimizer.zero_grad(set_to_none=self.graphs is None)

    def _graphed_passes(self) -> GraphedPasses | None:
        """CUDA graphs in bfloat16, where batches have inputs and targets only, and no other rank takes part."""
        if self.criterion is not predict_tokens or self.ranks.size > 1 or self.precision == "float32":
            return None
        limits = [one.max_positions for one in self.model.modules() if isinstance(one, LearnedPositions)]
        return GraphedPasses(longest=min(limits, default=None))

    def _graphed(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        return self._pass(batch)[:2]

    def _step(self, result: UpdateResult, lr_scale: float) -> None:
        """Divide and clip the gradients, and change the weights."""
        clips = self.clip_norm and result.grad_norm > self.clip_norm
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale
        scale = self.clip_norm / result.grad_norm if clips else 1.0
        self.optimizer.step(scale=scale / max(result.n_targets, 1))

    def _gradients(
        self, batches: Sequence[TrainingBatch], carry: Carry, dummies: Sequence[TrainingBatch]
    ) -> tuple[Tensor, Tensor, Carry]:
        """Add up the gradients of all micro-batches, in smaller parts if memory runs out; return sums and carry."""
        while True:
            self._seed_generators()
            batches = [part for batch in batches for part in self._fitting(batch)]
            tried: list[TrainingBatch] = []
            try:
                counted = [*((batch, True) for batch in batches), *((batch, False) for batch in dummies)]
                return self._accumulate(counted, carry, tried)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block, no traceback keeps the failed batch's tensors alive.
            self.optimizer.zero_grad(set_to_none=True)
            had_graphs, self.graphs = self.graphs is not None, None  # they keep memory, and pad batches
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if had_graphs:
                continue
            if tried[-1].n_rows == 1 or self.ranks.in_step:
                raise DoesNotFit(tried[-1])
            self.too_large = min(self.too_large or slots_of(tried[-1]), slots_of(tried[-1]))

    def _accumulate(
        self, batches: Sequence[tuple[TrainingBatch, bool]], carry: Carry, tried: list[TrainingBatch]
    ) -> tuple[Tensor, Tensor, Carry]:
        """Add up gradients and sums of the batches that count; each is appended to `tried` before it is computed."""
        loss_sum, nll_sum = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        carries: list[Carry] = []
        row = 0
        for batch, counts in batches:
            tried.append(batch)
            rows = slice(row, row := row + batch.n_rows)
            with self.ranks.computing(last=len(tried) == len(batches)):
                if self.graphs is None:
                    loss, nll, after = self._pass(batch, tuple(x[rows] for x in carry), counts=counts)
                else:
                    (loss, nll), after = self.graphs.run(self._graphed, batch), ()
            if counts:
                loss_sum += loss
                nll_sum += nll
                carries.append(after)
        return loss_sum, nll_sum, tuple(torch.cat(parts) for parts in zip(*carries, strict=True))

    def _pass(self, batch: TrainingBatch, carry: Carry = (), *, counts: bool = True) -> tuple[Tensor, Tensor, Carry]:
        """Add the gradients of one batch's sum of losses; return its sums and the carry."""
        # Nothing else notices what a hook changes in place while calls wait.
        defers = self._defers and not any(map(has_hooks, self._modules))
        takes = defers and self.ranks is SINGLE_RANK  # other ranks sum gradients during the backward pass
        with deferred() if defers else contextlib.nullcontext():
            with autocast(self.device, self.precision):
                loss, nll, after = self.criterion(self.model, batch, smoothing=self.smoothing, carry=carry)
            loss = loss if counts else 0.0 * loss
            if takes:
                with taking_gradients():
                    loss.backward(torch.ones(()))  # its default, ones_like(loss), would wait for the loss
        if not takes:
            loss.backward()
        return loss.detach(), nll, after

    def _fitting(self, batch: TrainingBatch) -> Iterator[TrainingBatch]:
        """The batch, split in halves until they are smaller than `too_large`."""
        if self.too_large is None or slots_of(batch) < self.too_large or batch.n_rows == 1:
            yield batch
            return
        half = batch.n_rows // 2
        for part in (batch.part(0, half), batch.part(half, batch.n_rows)):
            yield from self._fitting(part)

    def _seed_generators(self) -> None:
        seed = dropout_seed(self.seed, self.n_updates, self.ranks.rank)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.15 ms to look for other devices
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state for an exact resume besides the weights: the optimizer's tensors, and values."""
        state = {"processes": self.ranks.size, "too_large": self.too_large, "kernels": self.kernels}
        return optimizer_tensors(self.optimizer), state

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, n_updates: int) -> list[str]:
        """Restore the result of `state` after so many updates; return notes on what could not be restored."""
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
