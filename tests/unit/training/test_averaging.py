"""Averages of weights, and validation."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import toys
from toys import CPU, pairs, settings
from transduce.models.registry import build_model
from transduce.runs.tensors import save_tensors
from transduce.training.averaging import AVERAGES, Average, borrowed, decay_at, mean_of
from transduce.training.feed import PairFeeder
from transduce.training.validate import Validator, judging


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator)}


def set_to(live: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in live.items():
        tensor.copy_(values[name])


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def make(kind: str, live: dict[str, Tensor], folder: Path, n: int = 3) -> Average:
    return AVERAGES[kind](live, folder=folder, n=n, decay=0.99)


def test_decay_is_warmed_up() -> None:
    assert [decay_at(n, 0.9) for n in (0, 1, 90, 10_000)] == pytest.approx([0.1, 2 / 11, 0.9, 0.9])


def test_the_moving_average_equals_its_closed_form(tmp_path: Path) -> None:
    """The closed form in float64: each set of weights times its factor times all later decays."""
    live = weights(0)
    average = AVERAGES["ema"](live, folder=tmp_path, n=1, decay=0.8)
    history, n_updates = [weights(0)], 30
    for update in range(1, n_updates + 1):
        set_to(live, weights(update))
        average.after_update()
        history.append(weights(update))
    decays = [min(0.8, (1 + n) / (10 + n)) for n in range(n_updates)]
    for name in live:
        expected = history[0][name].double() * torch.tensor(decays, dtype=torch.float64).prod()
        for i, decay in enumerate(decays):
            later = torch.tensor(decays[i + 1 :], dtype=torch.float64).prod()
            expected += (1 - decay) * later * history[i + 1][name].double()
        torch.testing.assert_close(average.tensors()[name].double(), expected, rtol=1e-5, atol=1e-6)
    assert equal(live, weights(n_updates)), "the live weights must not move"


def test_mean_of_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.safetensors" for seed in range(4)]
    for seed, path in enumerate(paths):
        save_tensors(path, weights(seed))
    mean = mean_of(paths, weights(0))
    for name, tensor in mean.items():
        expected = torch.stack([weights(seed)[name].double() for seed in range(4)]).mean(0).float()
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected)


def test_borrowed_weights_are_restored_exactly_even_after_an_error() -> None:
    live = weights(0)
    addresses = [tensor.data_ptr() for tensor in live.values()]
    with pytest.raises(RuntimeError, match="inside"), borrowed(live, weights(1)):
        assert equal(live, weights(1))
        raise RuntimeError("inside")
    assert equal(live, weights(0))
    with borrowed(live, live):
        assert equal(live, weights(0))
    assert addresses == [tensor.data_ptr() for tensor in live.values()]


STATES: list[dict[str, object]] = []


def validate(average: Average, update: int) -> dict[str, Tensor]:
    """The steps of the loop at a validation: new live weights, candidate, checkpoint. Returns the candidate."""
    set_to(dict(average.live), weights(update))
    candidate = average.candidate(update)
    STATES[:] = [*STATES[-1:], average.state()]  # the checkpoint before this one, and this one
    average.remove_unused(STATES)
    return dict(candidate)


def mean(*seeds: int) -> dict[str, Tensor]:
    return {name: torch.stack([weights(seed)[name].double() for seed in seeds]).mean(0).float() for name in weights(0)}


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in other)


def test_last_validates_the_mean_of_the_last_n(tmp_path: Path) -> None:
    average = make("last", weights(0), tmp_path, n=3)
    for update in (1, 2, 3, 4, 5):
        assert close(validate(average, update), mean(*range(max(1, update - 2), update + 1)))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"u{n:08d}.safetensors" for n in (2, 3, 4, 5)], "one more than n: for the checkpoint before"


def test_best_keeps_the_mean_of_the_n_best_validations(tmp_path: Path) -> None:
    """Scores are of the live weights; of equal scores, the earlier validation is kept."""
    average, scores = make("best", weights(0), tmp_path, n=2), {1: 1.0, 2: 3.0, 3: 2.0, 4: 2.0, 5: 0.5, 6: 4.0}
    means = {1: mean(1), 2: mean(1, 2), 3: mean(2, 3), 4: None, 5: None, 6: mean(2, 6)}
    states: list[dict[str, object]] = []
    for update, score in scores.items():
        set_to(dict(average.live), weights(update))
        if update == 4:  # resumed, after a kill between the model and the checkpoint of update 4
            average.chosen(update, average.live, (score, 0.0), is_best=False)
            average = make("best", dict(average.live), tmp_path, n=2)
            assert average.load({}, states[-1]) == []
        assert equal(dict(average.candidate(update)), weights(update))
        chosen, expected = average.chosen(update, average.live, (score, 0.0), is_best=False), means[update]
        assert (chosen is None) == (expected is None)
        assert chosen is None or close(dict(chosen), expected or {})
        states = [*states[-1:], average.state()]
        average.remove_unused(states)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"u{n:08d}.safetensors" for n in (2, 3, 6)]


def test_validations_without_a_common_score_are_compared_by_loss(tmp_path: Path) -> None:
    average = make("best", weights(0), tmp_path, n=2)
    for update, bleu, loss in ((1, 30.0, 2.0), (2, 31.0, 1.9)):
        average.chosen(update, average.live, (bleu, -loss), is_best=True)
    average.compare_by_loss()
    for update in (3, 4):  # collapsed models, whose BLEU is above any negative loss
        assert average.chosen(update, average.live, (0.1, -9.0), is_best=False) is None
    assert average.state()["kept"] == [1, 2]


@pytest.mark.parametrize("damage", ["bytes", "cut short", "empty", "missing"])
def test_missing_and_damaged_files_are_reported_and_left_out(damage: str, tmp_path: Path) -> None:
    average = make("last", weights(0), tmp_path, n=3)
    for update in (1, 2, 3):
        validate(average, update)
    path = tmp_path / "u00000002.safetensors"
    content = path.read_bytes()
    changed = {"bytes": content[:-8] + b"\0\1\2\3\4\5\6\7", "cut short": content[:-20], "empty": b""}
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    other = make("last", weights(0), tmp_path, n=3)
    (note,) = other.load({}, average.state())
    assert path.name in note
    assert close(validate(other, 4), mean(1, 3, 4))


def test_a_validation_repeated_after_a_kill_counts_once(tmp_path: Path) -> None:
    """Killed after the weights were written and before the checkpoint: the resumed run writes the same file again."""
    average = make("last", weights(0), tmp_path, n=2)
    validate(average, 1)
    checkpoint = average.state()
    average.candidate(2)
    again = make("last", weights(0), tmp_path, n=2)
    again.load({}, checkpoint)
    assert close(validate(again, 2), mean(1, 2))
    assert again.state()["kept"] == [1, 2]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return build_model(settings().model, n_src=24, n_tgt=24).train()


def held_out(**training: object) -> PairFeeder:
    return PairFeeder(pairs(50, seed=2), settings(**training).training, device=CPU)


def test_the_loss_equals_that_of_all_pairs_one_by_one(model: nn.Module) -> None:
    """Against log_softmax of each sentence alone, in float64: mean over tokens, not over batches."""
    scores = Validator(model, held_out().batches, smoothing=0.1)()
    model.eval()
    loss = nll = n = 0.0
    for src, tgt in map(pairs(50, seed=2).__getitem__, range(50)):
        src_ids = torch.tensor([[*src.tolist(), 3]])
        with torch.no_grad():
            logits = model.logits(model(src_ids, torch.tensor([[2, *tgt.tolist()]])))  # type: ignore[operator]
        log_p = torch.log_softmax(logits[0].double(), -1)
        gold = log_p.gather(1, torch.tensor([*tgt.tolist(), 3])[:, None]).sum()
        nll -= float(gold)
        loss -= float(0.9 * gold + 0.1 * log_p.mean(1).sum())
        n += len(tgt) + 1
    assert scores["nll"] == pytest.approx(nll / n, rel=1e-5)
    assert scores["loss"] == pytest.approx(loss / n, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(nll / n), rel=1e-4)


def test_validation_does_not_affect_training(model: nn.Module) -> None:
    """Mode, weights and random state are as before, even if the judge draws random numbers."""
    weights = [p.detach().clone() for p in model.parameters()]

    def judge(judged: nn.Module) -> dict[str, float]:
        assert not judged.training
        assert not torch.is_grad_enabled()
        return {"bleu": float(torch.rand(()) * 0) + 12.5, "chrf": 30.0}

    before = torch.get_rng_state()
    scores = Validator(model, held_out().batches, smoothing=0.1, judge=toys.judge(judge))()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert (scores["bleu"], scores["chrf"]) == (12.5, 30.0)


def test_a_judge_that_fails_leaves_the_model_in_training(model: nn.Module) -> None:
    def judge(judged: nn.Module) -> dict[str, float]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Validator(model, held_out().batches, smoothing=0.1, judge=toys.judge(judge))()
    assert model.training


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_gpu_the_judge_translates_in_the_precision_of_training(device: str) -> None:
    seen = []

    def judge(judged: nn.Module) -> dict[str, float]:
        seen.append(torch.is_autocast_enabled(device))
        return {"bleu": 1.0}

    model = build_model(settings().model, n_src=24, n_tgt=24).to(device)
    feeder = PairFeeder(pairs(9, seed=2), settings().training, device=torch.device(device))
    Validator(model, feeder.batches, smoothing=0.1, judge=toys.judge(judge), precision="bfloat16")()
    assert seen == [device == "cuda"]
    assert judging(torch.device("cuda"), "bfloat16") == "bfloat16"
    assert judging(torch.device("cpu"), "bfloat16") == "float32"
