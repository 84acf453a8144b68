"""Out of memory in a child process with a limited address space; the repeated update is bit-identical."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import transduce
from toys import examples, failing_update, settings, toy_run, updater, weights_of
from transduce.data.batch import Batch, LabelBatch, MaskedBatch, RowBatch, TrainingBatch, collate
from transduce.errors import TooLong
from transduce.training.loss import predict_tokens
from transduce.training.ranks import SINGLE_RANK
from transduce.training.step import DoesNotFit, slots_of

make = partial(updater, dropout=0.3)


def batch_of(n: int, *, seed: int = 0) -> Batch:
    return collate(examples(n, seed=seed))


class EndsInBackward(torch.autograd.Function):
    """Fails in the backward pass, when some gradients have been added already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")


def ends_above(n_slots: int, tried: list[int]) -> Callable[..., Any]:
    """A criterion whose backward pass does not fit if a batch has at least this many tokens with padding."""

    def criterion(model: Any, batch: TrainingBatch, *, smoothing: float, carry: Any = ()) -> Any:
        tried.append(batch.n_rows)
        if slots_of(batch) >= n_slots:
            hook = model.encoder.register_forward_hook(lambda _, __, out: EndsInBackward.apply(out))
            try:
                hidden = model(*batch.inputs)
            finally:
                hook.remove()
            return hidden.float().sum(), hidden.detach().sum(), ()
        return predict_tokens(model, batch, smoothing=smoothing)

    return criterion


def test_an_update_that_did_not_fit_is_bit_identical_to_one_with_halves() -> None:
    """Gradients of an earlier batch are present, and half of those of the failed one."""
    small, large = batch_of(3, seed=1), batch_of(12, seed=2)
    tried: list[int] = []
    cut, whole = make(criterion=ends_above(slots_of(large), tried)), make()
    torch.manual_seed(3)
    one = cut.update([small, large, small], 0.5)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    other = whole.update([small, large.part(0, 6), large.part(6, 12), small], 0.5)
    assert tried == [3, 12, 3, 6, 6, 3]
    assert torch.equal(weights_of(cut), weights_of(whole))
    assert (one.loss_sum, one.grad_norm) == (other.loss_sum, other.grad_norm)
    assert one.n_targets == 2 * small.n_targets + large.n_targets
    assert torch.equal(torch.get_rng_state(), after), "an update leaves the generator as it was"

    tried.clear()
    cut.update([large], 0.5)
    assert tried == [6, 6], "a size that did not fit is not tried again"


def test_the_size_that_did_not_fit_is_part_of_the_state() -> None:
    tried: list[int] = []
    one = make(criterion=ends_above(slots_of(batch_of(12)), tried))
    one.update([batch_of(12)], 0.5)
    tensors, state = one.state()
    again = make(criterion=ends_above(10**9, tried))
    again.load_state(tensors, json.loads(json.dumps(state)), n_updates=1)
    tried.clear()
    again.update([batch_of(12)], 0.5)
    assert tried == [6, 6]


def test_a_single_sentence_that_does_not_fit_is_an_error_and_changes_nothing() -> None:
    one = make(criterion=ends_above(1, []))
    before, generator = weights_of(one), torch.get_rng_state()
    with pytest.raises(DoesNotFit) as caught:
        one.update([batch_of(5)], 0.5)
    assert caught.value.batch.n_rows == 1
    assert torch.equal(weights_of(one), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in one.model.parameters())


def test_a_batch_of_one_of_several_ranks_in_step_is_not_split() -> None:
    small, large = batch_of(3, seed=1), batch_of(12, seed=2)
    tried: list[int] = []
    alone = make(criterion=ends_above(slots_of(large), tried))
    with mock.patch.object(type(alone.ranks), "in_step", True), pytest.raises(DoesNotFit):
        alone.update([small, large], 0.5)
    assert tried == [3, 12]


def test_sharded_training_that_runs_out_of_memory_says_which_setting_to_lower(tmp_path: Path) -> None:
    with (
        mock.patch.object(type(SINGLE_RANK), "in_step", True),
        failing_update(3, DoesNotFit(batch_of(4))),
        pytest.raises(TooLong, match=r"update 3: .* of 92 slots; .*training\.parallel = 'shard'.*micro_batch_tokens"),
    ):
        toy_run(tmp_path / "run", settings())


def test_dummies_of_ranks_in_step_do_not_count() -> None:
    one, other, tried = updater(), updater(), list[int]()
    other.criterion = ends_above(1 << 40, tried)
    with mock.patch.object(type(other.ranks), "in_step", True):
        found = other.update([batch_of(3)], 0.5, dummies=[batch_of(4, seed=1)] * 2)
    assert found == one.update([batch_of(3)], 0.5, dummies=[batch_of(4, seed=1)])
    assert torch.equal(weights_of(one), weights_of(other))
    assert tried == [3, 4, 4]


def test_other_errors_are_raised() -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        make(criterion=wrong).update([batch_of(4)], 0.5)


def test_parts_of_every_kind_of_batch_add_up_to_the_whole() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0], [5, 0, 0, 0]])
    rows = RowBatch((ids, (ids == 5).cumsum(1)), torch.tensor([[6, 7, 8, 3], [6, 3, 0, 0], [3, 0, 0, 0]]), 7)
    places = torch.tensor([1, 3, 5, 8])
    masked = MaskedBatch(ids, ids.clamp_max(1), places, torch.tensor([16, 18, 26, 35]), torch.tensor([0, 1, 0]), 1.5)
    labels = LabelBatch(ids, ids.clamp_max(1), torch.tensor([2, 0, 1]))
    for batch in (rows, masked, labels):
        parts = [batch.part(0, 1), batch.part(1, 3)]
        assert [part.n_rows for part in parts] == [1, 2]
        assert sum(part.n_targets for part in parts) == batch.n_targets
        assert parts[1].inputs[0].tolist() == [[5, 6], [5, 0]], "no column of padding"
        assert all(one.shape == other.shape for one in [parts[1].inputs[0]] for other in parts[1].inputs[1:2])
    first, second = masked.part(0, 1), masked.part(1, 3)
    assert (first.places.tolist(), first.targets.tolist()) == ([1, 3], [16, 18])
    assert (second.places.tolist(), second.targets.tolist()) == ([1, 2], [26, 35])  # rows are two wide now
    assert second.targets_per_pair == 1.5 and second.labels.tolist() == [1, 0]


BOUNDED = """
    import resource, sys
    import numpy as np, torch
    from transduce.config.architectures import model_settings
    from transduce.config.settings import TrainingSettings
    from transduce.data.batch import collate
    from transduce.data.store import Example
    from transduce.models.registry import build_model
    from transduce.training.step import Updater

    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    ids = lambda n: draw.integers(4, 100, size=n).tolist()
    batch = collate([Example(src=ids(127), tgt=ids(127)) for _ in range(128)])
    updaters = []
    for _ in range(2):
        torch.manual_seed(1)
        model = build_model(model_settings(d_model=64, d_ff=256, n_heads=4, dropout=0.0), n_src=100, n_tgt=100)
        chosen = TrainingSettings(optimizer="adam", lr=1e-3)
        updaters.append(Updater(model, chosen, device=torch.device("cpu"), precision="float32"))
    bounded, free = updaters
    bounded.update([batch.part(0, 1)], 0.0)
    free.update([batch.part(0, 1)], 0.0)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), hard))
    bounded.update([batch], 1.0)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert bounded.too_large is not None, "the batch has fitted"
    n, parts = batch.n_rows, [batch]
    while any(bounded.too_large <= sum(t.numel() for t in (*p.inputs, p.targets)) for p in parts):
        parts = [half for p in parts for half in (p.part(0, p.n_rows // 2), p.part(p.n_rows // 2, p.n_rows))]
    free.update(parts, 1.0)
    same = all(torch.equal(a, b) for a, b in zip(bounded.model.parameters(), free.model.parameters()))
    print(len(parts), same)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="bounds of address spaces are Linux's")
def test_a_process_out_of_memory_continues_with_the_same_gradient() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(transduce.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(BOUNDED)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    n_parts, same = done.stdout.split()
    assert int(n_parts) >= 2
    assert same == "True"


@pytest.mark.gpu
def test_a_gpu_out_of_memory_continues() -> None:
    device = torch.device("cuda")
    tried: list[int] = []

    def criterion(model: Any, batch: TrainingBatch, *, smoothing: float, carry: Any = ()) -> Any:
        tried.append(batch.n_rows)
        if batch.n_rows > 4:
            torch.empty(1 << 60, dtype=torch.uint8, device=device)  # the allocator's own error
        return predict_tokens(model, batch, smoothing=smoothing)

    result = make(device=device, criterion=criterion).update([batch_of(8).to(device)], 0.5)
    assert tried == [8, 4, 4]
    assert not result.skipped
