"""Base of all settings: frozen sections, bounds on values, and one-line explanations of invalid ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from transduce.errors import SettingsError, nearest

MAX_BEAM = 512
MAX_PENALTY = 10.0
MAX_TOKENS = 1_000_000
MAX_BATCH = 1 << 31
MAX_SEED = (1 << 63) - 1
MAX_STEPS = 1 << 40
MAX_VOCAB = 1 << 24

Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Share = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]

ValueT = TypeVar("ValueT")


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys.

    A setting is unset if it is not in `model_fields_set`. None, and "auto" for a setting with this default, leave a
    setting unset.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {
            key: value
            for key, value in values.items()
            if key not in fields or (value is not None and not value == "auto" == fields[key].default)
        }

    def is_changed(self, key: str) -> bool:
        """Whether a setting was given a value other than its default."""
        return key in self.model_fields_set and getattr(self, key) != type(self).model_fields[key].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a setting in addition to its type, default, bounds and description.

    Args:
        tasks: Tasks in which the setting has an effect; None for all tasks.
        stored: Whether the encoded text in the run folder depends on it.
        changeable: Whether a command with another value resumes the same run: `freely` if results do not depend on the
            setting, `recorded` if they do; then the change applies from the resume on, and the run's log contains it.
        inherited: Tasks in which a fine-tuned run inherits the value from its initial run, if the setting is unset.
        shared: For settings of `training`: whether all recipes of a comparison have the same value.
        own: For settings of `model` and `tokenizer`: whether a fine-tuned run may change its value.
        size: Whether the setting decides the size of a model; if the user gives it, no preset is chosen.
        decoding: Kind of decoding on which the setting has an effect; None for both kinds.
    """

    tasks: tuple[str, ...] | None = None
    stored: bool = False
    changeable: Literal["", "freely", "recorded"] = ""
    inherited: tuple[str, ...] = ()
    shared: bool = False
    own: bool = False
    size: bool = False
    decoding: Literal["search", "samples"] | None = None


def setting(
    default: Any,
    description: str,
    traits: Traits | None = None,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare a field of a section with its default, a sentence that describes it, its traits and its bounds."""
    field: FieldInfo = Field(default, description=description, ge=ge, gt=gt, le=le, lt=lt)
    if traits is not None:
        field.metadata.append(traits)
    return field


def traits_of(field: FieldInfo) -> Traits:
    return next((item for item in field.metadata if isinstance(item, Traits)), Traits())


def resolved(value: ValueT | None, name: str) -> ValueT:
    """Return the value of the setting `name`, whose default `tasks.resolve` chooses; `SettingsError` if it is unset."""
    if value is None:
        raise SettingsError(f"{name} is unset: these are not the settings of a trained run; set it")
    return value


def name_in(error: ValidationError) -> str:
    """Return the dotted name of the setting that the first problem of a failed validation concerns."""
    return ".".join(map(str, error.errors()[0]["loc"]))


def explain(error: ValidationError, root: type[Section]) -> str:
    """Describe the first problem of a failed validation of the section `root` in one line."""
    first = error.errors()[0]
    sections, location = _locate(root, first["loc"])
    name, given = ".".join(map(str, location)), first["input"]
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        return f"unknown key '{name}'{_suggestion(root, parents, str(key), given)}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{name} = {given!r}: a section, not a value; its keys: {', '.join(_keys(sections))}"
    if first["type"].startswith("union_tag"):
        kinds = list(map(_kind, sections))
        if "kind" not in given:
            return f"{name}.kind is unset; allowed: {', '.join(kinds)}"
        return f"{name}.kind = {given['kind']!r}{nearest(str(given['kind']), kinds)}; allowed: {', '.join(kinds)}"
    message = first["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    shown = "" if isinstance(given, dict) else f" = {given!r}"
    names = re.findall("'(.*?)'", first["msg"]) if first["type"] == "literal_error" else ()
    return f"{name}{shown}: {message[:1].lower()}{message[1:]}{nearest(str(given), names)}"


def _locate(root: type[Section], location: Sequence[str | int]) -> tuple[list[type[Section]], list[str | int]]:
    """Return the possible section classes at pydantic's `location`, and the location in terms of a recipe.

    A union of sections has several classes; a plain value has none. In pydantic's location, the name of a member of a
    union selects that member; a recipe does not have this name.
    """
    sections, names = [root], []
    for part in location:
        if len(sections) > 1 and part in [_kind(section) for section in sections]:
            sections = [section for section in sections if _kind(section) == part]
            continue
        names.append(part)
        if fields := [section.model_fields[part] for section in sections if part in section.model_fields]:
            sections = [member for field in fields for member in _members(field.annotation)]
    return sections, names


def _suggestion(root: type[Section], parents: Sequence[str | int], key: str, value: Any) -> str:
    """Suggest a known key for an unknown one: an equal key of another section, or the nearest key of its section."""
    siblings = _locate(root, parents[:-1])[0]
    if len(siblings) > 1 and (others := [_kind(section) for section in siblings if key in section.model_fields]):
        union = ".".join(map(str, parents[:-1]))
        return f" for {union}.kind = '{parents[-1]}'; it applies to {', '.join(others)}"
    here = _keys(_locate(root, parents)[0])
    if isinstance(value, Mapping):  # meant as a section
        here = [name for name in here if _locate(root, [name])[0]] if not parents else here
    elif not any(isinstance(part, int) for part in parents) and (  # keys of list items do not occur in other sections
        elsewhere := [f"{name}.{key}" for name in root.model_fields if key in _keys(_locate(root, [name])[0])]
    ):
        return "; did you mean " + " or ".join(f"'{name}'" for name in elsewhere) + "?"
    return nearest(key, here) or "; known: " + ", ".join(here)


def _kind(section: type[Section]) -> str:
    return str(section.model_fields["kind"].default)


def _members(annotation: Any) -> list[type[Section]]:
    """Return the section classes in an annotation such as `tuple[Corpus, ...]` or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [member for inner in get_args(annotation) for member in _members(inner)]


def _keys(sections: Sequence[type[Section]]) -> list[str]:
    return list(dict.fromkeys(key for section in sections for key in section.model_fields))
