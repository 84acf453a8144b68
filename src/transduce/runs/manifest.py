"""What a file was when it was written: fingerprints; and nested settings compared and joined."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transduce.errors import RunFolderError
from transduce.runs.atomic import read_json, write_json


def fingerprint(path: Path) -> dict[str, Any]:
    """What a manifest keeps of a file: sha256 and size in bytes."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def check_file(path: Path, expected: Mapping[str, Any]) -> None:
    """Compare a file with its line in a manifest; `RunFolderError` says what is wrong with it."""
    try:
        found = fingerprint(path)
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from None
    if found["size"] != expected.get("size"):
        raise RunFolderError(
            f"{path} is damaged: it has {found['size']:,} bytes and should have {expected.get('size')}"
        )
    if found["sha256"] != expected.get("sha256"):
        raise RunFolderError(f"{path} is damaged: its content is not what the manifest says")


def seal_folder(folder: Path) -> None:
    """Write manifest.json into `folder`, with what every other file in it is at this moment."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    files = {name: fingerprint(folder / name) for name in names if name != "manifest.json"}
    write_json(folder / "manifest.json", {"files": files})


def sealed_files(folder: Path) -> dict[str, Mapping[str, Any]]:
    """What `seal_folder` noted, by name; a `RunFolderError` where that cannot be read."""
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise RunFolderError(f"{folder / 'manifest.json'} is damaged: it does not describe a folder")
    return manifest["files"]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested settings, in order."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


def with_leaves(values: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Nested settings with those of these dotted names as they are in `other`.

    >>> with_leaves({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 4, "b": {"c": 5, "d": 6}}, ["b.c"])
    {'a': 1, 'b': {'c': 5, 'd': 3}}
    """
    result = copy.deepcopy(dict(values))
    for name in names:
        *path, last = name.split(".")
        there, here = other, result
        for part in path:
            there, here = there[part], here[part]
        here[last] = there[last]
    return result


def first_difference(there: Any, here: Any) -> tuple[str, str, str] | None:
    """Name and both values, as JSON, of the first setting in which two nested settings differ.

    >>> first_difference({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
    ('b.c', '2', '3')
    """
    a, b = dict(_leaves(there)), dict(_leaves(here))
    for name in a | b:
        if a.get(name) != b.get(name):
            return name, json.dumps(a.get(name), ensure_ascii=False), json.dumps(b.get(name), ensure_ascii=False)
    return None
