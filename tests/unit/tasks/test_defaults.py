from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.config.architectures import resolve_preset
from transduce.config.settings import Settings
from transduce.errors import SettingsError
from transduce.machine import Machine, this_machine
from transduce.models.registry import check_model
from transduce.tasks.defaults import CAUSAL, DEFAULTS, FINE_TUNING, TRANSLATION, Choice, Facts, choose, format_choices
from transduce.tasks.resolve import TASKS

LAPTOP = Machine("cpu", "laptop", 2, 8 * 2**30, precision="float32")
GPU = Machine("cuda", "card", 16, 80 * 2**30, precision="bfloat16")


def facts_of(asked: Settings, machine: Machine, amount: int, tokens: int | None = None) -> Facts:
    task = TASKS[asked.task]
    sizes = DEFAULTS[asked.task].sizes
    return Facts(
        asked=asked, settings=asked, machine=machine, sizes=sizes, amount=amount, unit=task.form.unit, tokens=tokens
    )


def chosen(n_pairs: int, machine: Machine = LAPTOP, **sections: dict[str, Any]) -> tuple[Settings, list[Choice]]:
    """Apply the rules of both stages, as `train` does."""
    asked = Settings.from_mapping(sections)
    facts = facts_of(asked, machine, n_pairs)
    settings, first = choose(facts, TRANSLATION.before_text)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    settings, second = choose(replace(facts, settings=settings, tokens=n_pairs * 14), TRANSLATION.before_training)
    return settings, first + second


@given(n_pairs=st.integers(1, 10**8), machine=st.sampled_from([LAPTOP, GPU]))
def test_every_setting_that_training_needs_gets_a_default(n_pairs: int, machine: Machine) -> None:
    settings, choices = chosen(n_pairs, machine)
    training = settings.training
    assert settings.tokenizer.vocab_size
    for value in (training.batch_tokens, training.micro_batch_tokens, training.optimizer, training.lr):
        assert value
    assert training.max_epochs and training.max_minutes and training.schedule and training.warmup_updates
    assert training.valid_updates and training.precision == machine.precision
    check_model(settings.model)
    assert all(choice.reason and "\n" not in choice.reason for choice in choices)


@given(n_pairs=st.integers(1, 10**7))
def test_given_settings_never_change(n_pairs: int) -> None:
    given_ = {
        "tokenizer": {"vocab_size": 777, "placeholders": 8},
        "model": {"d_model": 64, "dropout": 0.123, "residual": "post"},
        "training": {
            "batch_tokens": 999,
            "micro_batch_tokens": 333,
            "precision": "float32",
            "optimizer": "adamw",
            "lr": 0.0123,
            "schedule": "linear",
            "warmup_updates": 7,
            "valid_updates": 11,
            "max_updates": 100,
        },
        "evaluation": {"tokenize": "none"},
    }
    settings, choices = chosen(n_pairs, **given_)
    assert choices == []
    for section, values in given_.items():
        for key, value in values.items():
            assert getattr(getattr(settings, section), key) == value
    assert settings.training.max_epochs is settings.training.max_minutes is None


@pytest.mark.parametrize("limit", [{"max_minutes": 5.0}, {"max_epochs": 3.0}, {"max_updates": 50}])
def test_a_given_limit_replaces_the_default_limits(limit: dict[str, float]) -> None:
    settings, _ = chosen(29_000, training=limit)
    limits = {key: getattr(settings.training, key) for key in ("max_minutes", "max_epochs", "max_updates")}
    assert {key: value for key, value in limits.items() if value is not None} == limit
    assert settings.training.warmup_updates and settings.training.valid_updates
    if "max_updates" in limit:
        assert settings.training.warmup_updates < 50 and settings.training.valid_updates <= 10


def test_a_given_size_suppresses_the_default_preset() -> None:
    assert "model.preset" not in {c.name for c in chosen(29_000, model={"d_ff": 512})[1]}
    assert chosen(29_000, model={"preset": "base"})[0].model.d_model == 512


def test_more_text_and_a_gpu_get_larger_models() -> None:
    widths = [chosen(n)[0].model.d_model for n in (1_000, 29_000, 100_000, 10_000_000)]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert chosen(500_000, GPU)[0].model.d_model > chosen(500_000)[0].model.d_model
    sizes = [size.vocab_size for size in TRANSLATION.sizes]
    assert sizes == sorted(sizes) and [s.most for s in TRANSLATION.sizes] == sorted(s.most for s in TRANSLATION.sizes)


def test_an_update_is_split_until_it_fits_in_memory() -> None:
    small = replace(LAPTOP, memory=2**29)
    settings, choices = chosen(29_000, small)
    training = settings.training
    assert training.batch_tokens == chosen(29_000)[0].training.batch_tokens
    assert training.micro_batch_tokens and training.batch_tokens and training.micro_batch_tokens < training.batch_tokens
    assert any("parts" in choice.reason for choice in choices)


def test_choices_are_printed_with_their_reasons() -> None:
    lines = format_choices(chosen(29_000)[1])
    choice_reason = chosen(29_000)[1][0].reason
    assert any("tokenizer.vocab_size" in line and "8,000" in line and "29,000 sentence pairs" in line for line in lines)
    assert len({line.index(line.split()[0]) for line in lines}) == 1
    assert format_choices([]) == []
    for line, folded in zip(lines, format_choices(chosen(29_000)[1], width=60), strict=True):
        parts = folded.split("\n")
        assert folded.split() == line.split() and max(map(len, parts)) <= 60, "no word is broken"
        assert all(len(part) - len(part.lstrip()) == lines[0].index(choice_reason) for part in parts[1:])


def test_this_machine_is_described() -> None:
    machine = this_machine("cpu")
    assert machine.device == "cpu" and machine.n_threads >= 1 and machine.memory > 2**20
    assert "GiB" in machine.describe()


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingsError, match="no CUDA device"):
        this_machine("cuda")
    with pytest.raises(SettingsError, match="auto, cpu and cuda"):
        this_machine("gpu")
    assert this_machine("auto").device == "cpu"


@given(n_bytes=st.integers(1, 10**11), machine=st.sampled_from([LAPTOP, GPU]))
def test_every_setting_that_a_language_model_needs_gets_a_default(n_bytes: int, machine: Machine) -> None:
    asked = Settings(task="causal")
    facts = facts_of(asked, machine, n_bytes)
    settings, choices = choose(facts, CAUSAL.before_text)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    facts = replace(facts, settings=settings, tokens=max(1, n_bytes // 3))
    settings, more = choose(facts, CAUSAL.before_training)
    training = settings.training.model_dump(
        exclude={
            "matrix_lr",
            "max_updates",
            "save_updates",
            "start",
            "lora",
            "new_language",
            "guided_alignment",
            "consistency",
        }
    )
    assert None not in training.values() and settings.data.context and settings.tokenizer.exact
    assert training["batch_tokens"] % settings.data.context == 0 and training["label_smoothing"] == 0
    assert settings.model.kind == "gpt" and settings.model.residual == "pre"
    assert settings.model.positions == ("learned" if settings.model.d_model == 768 else "rotary")
    assert settings.data.context <= settings.model.max_positions
    assert all(choice.reason for choice in (*choices, *more))


@pytest.mark.parametrize(
    ("n", "warmup", "reason"),
    [
        (6, 3, "half of the expected updates (6)"),
        (40, 10, "the minimum: 8 % of the expected updates (40)"),
        (1000, 80, "about 8 % of the expected updates (1,000)"),
        (100_000, 2000, "the maximum: 8 % of the expected updates (100,000)"),
    ],
)
def test_the_reason_for_the_warmup_matches_its_value(n: int, warmup: int, reason: str) -> None:
    settings, choices = chosen(1000, training={"max_updates": n})
    assert settings.training.warmup_updates == warmup
    assert reason in next(choice.reason for choice in choices if choice.name == "training.warmup_updates")


def test_a_very_short_training_has_at_least_one_update() -> None:
    settings, choices = chosen(1000, training={"max_minutes": 1e-9})
    assert settings.training.warmup_updates == 1
    assert "updates (1)" in next(choice.reason for choice in choices if choice.name == "training.warmup_updates")


@pytest.mark.parametrize("task", TASKS)
def test_fine_tuning_has_small_learning_rates(task: str) -> None:
    """In every task. Given settings stay; matrices under muon get twice the learning rate of the rest."""
    rules = {**DEFAULTS[task].before_training, **FINE_TUNING}
    assert rules.keys() == DEFAULTS[task].before_training.keys()
    del rules["training.max_minutes"]
    for given_ in ({}, {"optimizer": "muon"}, {"max_updates": 9, "lr": 0.5}):
        asked = Settings.from_mapping(
            {
                "task": task,
                "tokenizer": {"vocab_size": 100},
                "training": {"start": "other", "batch_tokens": 999, **given_},
            }
        )
        training = choose(facts_of(asked, LAPTOP, 1000, tokens=10_000), rules)[0].training
        width, muon = asked.model.d_model, "optimizer" in given_
        assert training.lr == (0.5 if "lr" in given_ else pytest.approx(0.04 / width, abs=1e-7))
        assert training.matrix_lr == (pytest.approx(0.08 / width, abs=2e-7) if muon else None)
        assert training.optimizer == ("muon" if muon else "adamw")
        assert training.max_epochs == (None if "max_updates" in given_ else 3.0)


def test_values_of_a_preset_are_not_replaced_by_defaults() -> None:
    asked = Settings.from_mapping({"task": "causal", "model": {"preset": "gpt2", "activation": "relu"}})
    settings, choices = choose(facts_of(asked, LAPTOP, 10**6), CAUSAL.before_text)
    assert {choice.name for choice in choices if choice.name.startswith("model.")} == {"model.dropout"}
    model = resolve_preset(settings.model)
    assert (model.positions, model.activation, model.d_model) == ("learned", "relu", 768)
