"""What another program must know of our settings: a table for each, and the refusal by name of what it does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transduce.config import ModelSettings

Needed = Mapping[str, Collection[Any]]
"""The values that a program can express, by setting."""

ONE_HEAD_COUNT: tuple[None] = (None,)
"""Of `n_kv_heads`: as many heads of keys and values as of queries, however that is said."""


def inexpressible(s: ModelSettings, needed: Needed) -> list[str]:
    """The settings that a program cannot express, each with what it would have to be."""
    told = []
    for key, allowed in needed.items():
        if key not in type(s).model_fields:
            continue
        value = getattr(s, key)
        value = None if key == "n_kv_heads" and value == s.n_heads else value
        if value not in allowed:
            if isinstance(allowed, range):
                choices = f"{allowed[0]} to {allowed[-1]}"
            else:
                choices = " or ".join(repr(one) for one in dict.fromkeys(allowed) if one is not None)
            told.append(f"model.{key} = {value!r}" + (f" (there: {choices})" if choices else ""))
    return told
