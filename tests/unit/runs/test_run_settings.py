"""Settings of older run folders are upgraded to the current format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from transduce.config import GPTSettings, RecurrentSettings, Settings
from transduce.models.rnn import unused_by_rnn
from transduce.runs.run_settings import upgraded

OLD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "kept" / "0.1.0-letters" / "config.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    ("task", "asked", "kind"),
    [
        ("translation", "transformer", "transformer"),
        ("causal", "transformer", "gpt"),
        ("masked", "transformer", "bert"),
        ("classification", "bert", "bert-classifier"),
        ("encoding", "bert-encoder", "bert-encoder"),
        ("causal", "gpt", "gpt"),
    ],
)
def test_format_1_had_the_settings_of_every_architecture(task: str, asked: str, kind: str) -> None:
    old = {**OLD, "task": task, "model": {**OLD["model"], "kind": asked, "d_model": 20, "n_labels": 3}}
    model = Settings.from_mapping(upgraded(old, 1)).model
    assert (model.kind, model.d_model) == (kind, 20)
    assert ("n_labels" in model.model_dump()) == (kind == "bert-classifier")


@pytest.mark.parametrize(("window", "pattern"), [(7, "local"), (None, "full")])
def test_a_window_of_format_2_is_a_local_pattern_of_the_decoder(window: int | None, pattern: str) -> None:
    old = {"task": "causal", "model": {"kind": "gpt", "window": window}}
    model = Settings.from_mapping(upgraded(old, 2)).model
    assert isinstance(model, GPTSettings)
    assert (model.window, model.decoder_pattern) == (window, pattern)


@pytest.mark.parametrize(("attention", "scale"), [("general", 1.0), ("none", 1.0), ("bahdanau", 4.0)])
def test_readouts_of_format_3_were_not_scaled(attention: str, scale: float) -> None:
    old = {"task": "translation", "model": {"kind": "rnn", "attention": attention}}
    model = Settings.from_mapping(upgraded(old, 3)).model
    assert isinstance(model, RecurrentSettings)
    assert model.readout_scale == scale
    assert not list(unused_by_rnn(model))


def test_a_damaged_model_section_is_reported_by_the_settings() -> None:
    for broken in ({"model": "x"}, {"model": {"kind": "gpt", "unknown": 1}}):
        with pytest.raises(Exception, match="model"):
            Settings.from_mapping(upgraded({"task": "causal", **broken}, 1))
