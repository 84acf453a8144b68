"""All architectures, by kind, task and preset."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args

from pydantic import Field

from transduce.config.architectures import (
    BertClassifierSettings,
    BertEncoderSettings,
    BertSettings,
    ConvS2SSettings,
    GPTSettings,
    RecurrentSettings,
    StarClassifierSettings,
    StarSettings,
    TransformerSettings,
    TransformerXLSettings,
)
from transduce.config.model import ModelSettings
from transduce.errors import SettingsError, nearest

SettingsT = TypeVar("SettingsT", bound=ModelSettings)

AnyModelSettings = Annotated[
    TransformerSettings
    | RecurrentSettings
    | ConvS2SSettings
    | StarSettings
    | GPTSettings
    | TransformerXLSettings
    | BertSettings
    | BertEncoderSettings
    | BertClassifierSettings
    | StarClassifierSettings,
    Field(discriminator="kind"),
]
"""The settings of any architecture, by `kind`."""

MODEL_SETTINGS: dict[str, type[ModelSettings]] = {
    section.model_fields["kind"].default: section for section in get_args(get_args(AnyModelSettings)[0])
}
"""By `model.kind`."""


def kinds_for(task: str) -> tuple[str, ...]:
    """The architectures that do a task, its default first."""
    return tuple(kind for kind, section in MODEL_SETTINGS.items() if section.task == task)


def default_kind(task: str, preset: str | None = None) -> str:
    """The architecture of a task that has this preset, or else its default; a Transformer for an unknown task."""
    kinds = kinds_for(task)
    fitting = [kind for kind in kinds if preset in MODEL_SETTINGS[kind].presets]
    return next(iter((*fitting, *kinds)), "transformer")


def model_settings(**values: Any) -> Any:
    """Settings of the architecture that `kind`, or else `preset`, names; a Transformer's without either."""
    preset = values.get("preset")
    kinds = [kind for kind, section in MODEL_SETTINGS.items() if preset in section.presets]
    kind = values.get("kind", kinds[0] if kinds else "transformer")
    return MODEL_SETTINGS[kind](**{**values, "kind": kind})


def preset_values(settings: ModelSettings) -> dict[str, Any]:
    """The values of the preset that the settings name, as far as their architecture has them; none without a preset."""
    name = settings.preset
    if name is None:
        return {}
    if name not in settings.presets:
        others = sorted({other for section in MODEL_SETTINGS.values() for other in section.presets})
        if name in others:
            raise SettingsError(
                f"model.preset = '{name}' is another kind of model; allowed for '{settings.kind}': "
                f"{', '.join(settings.presets)}"
            )
        raise SettingsError(f"model.preset = {name!r}{nearest(name, others)}; allowed: {', '.join(settings.presets)}")
    return {key: value for key, value in settings.presets[name].items() if key in type(settings).model_fields}


def resolve_preset(settings: SettingsT) -> SettingsT:
    """The same settings with the preset's values filled in, except where another value was given."""
    values = preset_values(settings)
    if not values:
        return settings
    given = {key: getattr(settings, key) for key in settings.model_fields_set if key != "preset"}
    return type(settings)(**{**values, **given})
