"""`training.consistency` and `training.word_dropout` in updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from toys import examples, weights_of
from transduce.config.settings import Settings
from transduce.data.batch import collate
from transduce.errors import SettingsError
from transduce.tasks.resolve import check, find_task
from transduce.training.step import Updater

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
