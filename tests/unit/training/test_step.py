"""The update: mean over all targets for any micro-batches, clipping, precision, state; consistency and word dropout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from toys import examples, weights_of
from transduce.config.settings import Settings
from transduce.data.batch import Batch, collate
from transduce.data.store import Example
from transduce.errors import SettingsError
from transduce.tasks.resolve import check, find_task
from transduce.training.optim import OPTIMIZERS
from transduce.training.ranks import SINGLE_RANK, dropout_seed
from transduce.training.step import Updater


def cut(pairs: list[Example], sizes: list[int]) -> list[Batch]:
    parts, rest = [], list(pairs)
    for size in sizes:
        parts.append(collate(rest[:size]))
        rest = rest[size:]
    return parts


def reference(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of smoothed losses with PyTorch's cross-entropy, without padding."""
    logits = model.logits(model(batch.src, batch.tgt_in))
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.tgt_out.flatten(), ignore_index=0, reduction="sum", label_smoothing=0.1
    )


@pytest.mark.parametrize("sizes", [[12], [6, 6], [1, 11], [3, 4, 5], [1] * 12], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_does_not_depend_on_its_micro_batches(optimizer: str, sizes: list[int]) -> None:
    """It is not the mean of the parts' means: their sizes and lengths differ."""
    whole, parted = toys.updater(optimizer=optimizer), toys.updater(optimizer=optimizer)
    before = weights_of(whole)
    for seed in range(2):
        pairs = examples(12, seed=seed)
        one, many = whole.update([collate(pairs)], 0.1), parted.update(cut(pairs, sizes), 0.1)
        assert one.n_targets == many.n_targets == sum(len(pair.tgt) + 1 for pair in pairs)
        torch.testing.assert_close(many.loss_sum, one.loss_sum, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(many.nll_sum, one.nll_sum, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(many.grad_norm, one.grad_norm, rtol=1e-4, atol=1e-5)
    way = weights_of(whole) - before
    # Adam divides by the size of a gradient; for one near zero, as of the bias of keys, the step is rounding noise
    assert (weights_of(parted) - weights_of(whole)).norm() < (0.1 if optimizer == "muon" else 0.05) * way.norm()


class Descent(torch.optim.SGD):
    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:
        torch._foreach_mul_([p.grad for group in self.param_groups for p in group["params"]], scale)
        super().step()


def test_the_gradient_is_that_of_the_mean_loss_and_is_clipped_by_its_norm() -> None:
    """Plain gradient descent shows the gradient that the optimizer got."""
    batch = collate(examples(8))
    for clip_norm in (0.0, 0.5, 1e6):
        updater = toys.updater(clip_norm=clip_norm)
        updater.optimizer = Descent([{"params": list(updater.model.parameters()), "peak_lr": 2.0}], lr=2.0)
        before, model = weights_of(updater), toys.updater().model
        loss = reference(model, batch) / batch.n_targets
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        result = updater.update([batch], 0.25)
        assert result.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-4)  # as it was before clipping
        assert result.loss_sum == pytest.approx(loss.item() * batch.n_targets, rel=1e-5)
        scale = min(1.0, clip_norm / gradient.norm().item()) if clip_norm else 1.0
        torch.testing.assert_close(weights_of(updater), before - 2.0 * 0.25 * scale * gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_that_is_not_finite_changes_neither_weights_nor_state(optimizer: str) -> None:
    updater, batch = toys.updater(optimizer=optimizer, weight_decay=0.1), collate(examples(4))
    updater.update([batch], 1.0)
    before, state = weights_of(updater), {name: t.clone() for name, t in updater.state()[0].items()}
    loss = updater.criterion

    def overflows(*args: Any, **kwargs: Any) -> Any:
        total, nll, carry = loss(*args, **kwargs)
        return total * float("inf"), nll, carry

    updater.criterion = overflows
    assert updater.update([batch], 1.0).skipped
    assert updater.n_updates == 2
    after = updater.state()[0]
    assert torch.equal(weights_of(updater), before)
    assert all(torch.equal(t, after[name]) for name, t in state.items())
    assert all(p.grad is None for p in updater.model.parameters())


def test_an_update_without_any_target_changes_nothing_but_momentum() -> None:
    """A small BERT batch may have no masked token."""
    updater = toys.updater()

    def criterion(model: Any, batch: Batch, *, smoothing: float, carry: Any = ()) -> Any:
        loss = model(*batch.inputs).sum() * 0.0
        return loss, loss.detach(), ()

    updater.criterion = criterion
    before = weights_of(updater)
    assert not updater.update([collate(examples(4))], 1.0, n_targets=0).skipped
    assert torch.equal(weights_of(updater), before)


def test_gradients_are_removed_after_the_update() -> None:
    updater, batch = toys.updater(), collate(examples(4))
    updater.update([batch], 1.0)
    assert all(p.grad is None for p in updater.model.parameters())


def test_learning_rates_are_their_peaks_times_the_factor() -> None:
    updater = toys.updater(optimizer="muon", lr=0.003, matrix_lr=0.02)
    updater.update([collate(examples(4))], 0.5)
    assert {group["lr"] for group in updater.optimizer.param_groups} == {0.0015, 0.01}
    before = weights_of(updater)
    updater.update([collate(examples(4))], 0.0)
    assert torch.equal(weights_of(updater), before)


def test_dropout_is_on_in_updates() -> None:
    updater, batch = toys.updater(dropout=0.5), collate(examples(8))
    updater.model.eval()
    losses = {updater.update([batch], 0.0).loss_sum for _ in range(3)}
    assert len(losses) == 3


def test_dropout_follows_from_the_seed_the_number_of_the_update_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate(examples(8))

    def losses(n: int, *, seed: int = 1, start: int = 0) -> list[float]:
        updater = toys.updater(dropout=0.5, seed=seed)
        updater.load_state(*updater.state(), n_updates=start)
        torch.manual_seed(n)  # another user of PyTorch's generator, which stays as it is
        before = torch.get_rng_state()
        found = [updater.update([batch], 0.0).loss_sum for _ in range(n)]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    found = losses(4)
    assert losses(2, start=2) == found[2:]
    assert not {*losses(4, seed=2)} & {*found}
    monkeypatch.setattr(SINGLE_RANK, "rank", 1)
    assert not {*losses(4)} & {*found}


def test_seeds_of_dropout_differ_between_updates_and_ranks() -> None:
    cases = [(seed, update, rank) for seed in range(5) for update in range(200) for rank in range(8)]
    assert len({dropout_seed(*case) for case in cases}) == len(cases)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bfloat16_learns_as_float32_does(optimizer: str) -> None:
    """The same tiny task and seed: the losses stay within 5 % of each other."""
    batch, curves = collate(examples(8)), {}
    for precision in ("float32", "bfloat16"):
        updater = toys.updater(optimizer=optimizer, precision=precision, lr=0.003, matrix_lr=0.01)
        results = [updater.update([batch], 1.0) for _ in range(25)]
        assert all(p.dtype == torch.float32 for p in updater.model.parameters())
        curves[precision] = torch.tensor([result.loss_sum for result in results])
    assert curves["float32"][-1] < 0.7 * curves["float32"][0]
    torch.testing.assert_close(curves["bfloat16"], curves["float32"], rtol=0.05, atol=0)


KINDS: list[Any] = [{"kind": "simcut", "cut": 0.3}, {"kind": "rdrop"}]


def updater(dropout: float = 0.0, **training: Any) -> Updater:
    asked = Settings.from_mapping({"training": training})
    return toys.updater(dropout=dropout, criterion=find_task("translation").loss(asked), **training)


def embedded(updater: Updater, batch: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For source and target, in a pass of the criterion: embeddings, their expected values, and those of no piece."""
    sides, model = (updater.model.src_embedding, updater.model.tgt_embedding), updater.model
    seen: list[Tensor] = []
    hooks = [side.register_forward_hook(lambda _, __, output: seen.append(output.detach())) for side in sides]
    updater.criterion(model, batch, smoothing=0.0)
    for hook in hooks:
        hook.remove()
    result = []
    for side, ids, vectors in zip(sides, batch.inputs, seen, strict=True):
        positions = side.positions.vectors(ids.shape[1], offset=0, device=ids.device)
        result.append((vectors, side.table.weight.detach()[ids] * side.scale + positions, positions.expand_as(vectors)))
    return result


def test_simcut_cuts_pieces_of_the_second_pass_only() -> None:
    simcut, batch = updater(consistency={"kind": "simcut", "cut": 0.3}), collate(examples(64))
    for vectors, whole, none in embedded(simcut, batch):
        first, second = vectors.chunk(2)
        torch.testing.assert_close(first, whole)
        is_cut = ((second - whole).abs() > 1e-5).any(-1)
        torch.testing.assert_close(second[is_cut], none[: len(second)][is_cut])
        assert 0.2 < is_cut.float().mean() < 0.4
    losses = simcut.criterion(simcut.model, batch, smoothing=0.0)
    assert losses[0] > losses[1] > 0


def test_word_dropout_zeroes_whole_embeddings_in_training_only() -> None:
    dropping, batch = updater(word_dropout=0.25), collate(examples(64))
    dropping.model.train()
    for vectors, whole, none in embedded(dropping, batch):
        is_dropped = ((vectors - none).abs() < 1e-5).all(-1)
        kept = (none + (whole - none) / 0.75)[~is_dropped]
        torch.testing.assert_close(vectors[~is_dropped], kept)
        assert 0.15 < is_dropped.float().mean() < 0.35
    dropping.model.eval()
    for vectors, whole, _ in embedded(dropping, batch):
        torch.testing.assert_close(vectors, whole)


def test_without_dropout_rdrop_has_the_plain_loss_however_a_batch_is_split() -> None:
    pairs = examples(12)
    plain = updater().update([collate(pairs)], 0.0)
    for parts in ([pairs], [pairs[:1], pairs[1:]]):
        result = updater(consistency={"kind": "rdrop"}).update([collate(part) for part in parts], 0.0)
        assert result.n_targets == plain.n_targets
        assert result.loss_sum == pytest.approx(plain.loss_sum, rel=1e-5)
        assert result.nll_sum == pytest.approx(plain.nll_sum, rel=1e-5)
        assert result.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["kind"])
def test_consistency_begins_after_a_fraction_of_the_training(kind: Any) -> None:
    batch, plain, late = (
        collate(examples(12)),
        updater(dropout=0.3),
        updater(dropout=0.3, consistency=kind | {"from": 0.5}),
    )
    for progress in (0.0, 0.49):
        plain.update([batch], 1.0)
        late.update([batch], 1.0, progress=progress)
        assert torch.equal(weights_of(plain), weights_of(late))
    before = weights_of(late)
    late.update([batch], 1.0, progress=1.0, steps=False)
    assert torch.equal(weights_of(late), before)
    assert late.update([batch], 1.0, progress=0.5).loss_sum > plain.update([batch], 1.0).loss_sum
    assert not torch.equal(weights_of(plain), weights_of(late))


def test_consistency_is_learned_and_needs_gradients_through_both_passes() -> None:
    """The divergence of the passes falls when it is trained."""
    batch, divergences = collate(examples(12)), []
    for weight in (1e-6, 5.0):
        trained = updater(dropout=0.3, consistency={"kind": "rdrop", "weight": weight})
        for _ in range(30):
            trained.update([batch], 1.0)
        divergences.append(divergence_of(trained, batch))
    assert divergences[1] < 0.7 * divergences[0]


def divergence_of(trained: Updater, batch: Any) -> float:
    """Mean divergence of two passes with dropout."""
    torch.manual_seed(3)
    with torch.no_grad():
        log_p, log_q = (trained.model.logits(trained.model(*batch.inputs)).log_softmax(-1) for _ in range(2))
    return float((log_p.exp() * (log_p - log_q)).sum(-1)[batch.targets != 0].mean())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": {"consistency": {"kind": "rdrop", "cut": 0.1}}}, r"training\.consistency\.cut.*simcut"),
        ({"training": {"consistency": {"weight": 1}}}, r"training\.consistency\.kind is unset.*simcut, rdrop"),
        ({"training": {"consistency": {"kind": "simcutt"}}}, "did you mean 'simcut'"),
        ({"training": {"consistency": {"kind": "simcut", "from": 1}}}, r"training\.consistency\.from = 1"),
        ({"task": "causal", "training": {"consistency": {"kind": "rdrop"}}}, "consistency has no effect in task"),
        ({"task": "causal", "training": {"word_dropout": 0.1}}, "word_dropout has no effect in task"),
        (
            {
                "data": {"train": [{"path": "a.tsv"}]},
                "training": {"consistency": {"kind": "rdrop"}, "guided_alignment": "a.align"},
            },
            "cannot be used with training.consistency",
        ),
        (
            {
                "data": {"train": [{"path": "a.tsv"}]},
                "training": {"recompute": True, "guided_alignment": "a.align"},
            },
            "cannot be used with training.recompute",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check(Settings.from_mapping(settings))
