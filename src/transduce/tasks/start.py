"""A model that begins with the weights of another run: `training.start`, or `--from`."""

from __future__ import annotations

from typing import Any

from torch import nn

from transduce.checkpoint import RunFolder
from transduce.config import ModelSettings, Settings
from transduce.errors import SettingsError
from transduce.log import Log
from transduce.text.tokenizer import Tokenizers

_OWN = ("kind", "dropout", "attention_dropout", "activation_dropout", "next_sentence", "pooling", "n_labels")
"""What the new model may have otherwise."""
FAMILY = ("bert", "bert-encoder", "bert-classifier")
_HEADS = ("head.", "output_bias", "output_embedding.", "next_sentence.", "pooler.", "labels.")


def with_start(settings: Settings, kind: str) -> Settings:
    """The settings with the sizes of the run to begin with; as they are where there is none.

    Raises `SettingsError` for a run of another family or sizes that were asked for otherwise.
    """
    if settings.training.start is None:
        return settings
    other = RunFolder.open(settings.training.start).settings
    if other.model.kind not in FAMILY:
        raise SettingsError(
            f"training.start = '{settings.training.start}': its model is of kind '{other.model.kind}'; "
            f"to begin with: {', '.join(FAMILY)}"
        )
    asked, model = settings.model, dict[str, Any]()
    for key in ModelSettings.model_fields:
        given, there = getattr(asked, key), getattr(other.model, key)
        own = key in _OWN and key in asked.model_fields_set
        if key == "preset":
            continue
        if key in asked.model_fields_set and given != there and key not in _OWN:
            raise SettingsError(f"model.{key} = {given!r}: the run to begin with has {there!r}; leave it out")
        model[key] = given if own else there
    model |= {"kind": kind} | {key: getattr(asked, key) for key in ("next_sentence", "n_labels")}
    found = settings.with_values("model", **model)
    return found.with_values("tokenizer", **other.tokenizer.model_dump())


def tokenizers_of(settings: Settings) -> Tokenizers | None:
    """The vocabulary of the run to begin with, if there is one."""
    return None if settings.training.start is None else RunFolder.open(settings.training.start).tokenizers()


def begin(model: nn.Module, settings: Settings, log: Log) -> None:
    """Give a fresh model the weights of the run to begin with; what that has not stays as it is."""
    if settings.training.start is None:
        return
    found, own = RunFolder.open(settings.training.start).load_model(), model.state_dict()
    fitting = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
    lacking = [name for name in own if name not in fitting]
    if wrong := [name for name in lacking if not name.startswith(_HEADS)]:
        raise SettingsError(f"training.start = '{settings.training.start}' does not fit: {', '.join(wrong[:5])}")
    model.load_state_dict(fitting, strict=False)
    fresh = f"; fresh: {', '.join(lacking)}" if lacking else ""
    log.say(f"begins with {len(fitting)} of {len(own)} tensors of {settings.training.start}{fresh}")
