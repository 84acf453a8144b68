"""Extensions: Python files, named by a recipe, that add a user's positional schemes and layers to tables of options.

An extension runs with all rights of the user. It runs only if the user allows this for the whole process, with
`--allow-code` or the environment variable TRANSDUCE_ALLOW_CODE=1, which child processes inherit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from transduce.errors import SettingsError

ALLOW, PREFIX = "TRANSDUCE_ALLOW_CODE", "extension_"


def name_of_copy(number: int, file: Path) -> str:
    return f"{PREFIX}{number}_{_original_name(file)}"


def _original_name(file: Path) -> str:
    return re.sub(rf"^{PREFIX}\d+_", "", file.name)


def load_extensions(files: Sequence[Path]) -> None:
    """Run each file once. Raises `SettingsError` if the user does not allow it, or if a file is missing or fails."""
    for file in files:
        try:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise SettingsError(f"extensions = '{file}': {error.strerror}; correct the path") from None
        if os.environ.get(ALLOW) != "1":
            raise SettingsError(
                f"extensions = '{file}': code that is not part of transduce, and runs with your rights; read it, and "
                f"allow it with --allow-code (in Python: {ALLOW}=1)"
            )
        name = f"transduce_extension_{_original_name(file)}"
        if (loaded := sys.modules.get(name)) is None:
            _run(file, name, digest)
        elif loaded.__dict__["digest"] != digest:
            raise SettingsError(
                f"extensions = '{file}': differs from {loaded.__file__}, which this process has loaded; a run keeps "
                "the version that it began with: restore it, or name another run folder",
                "run",
            )


def _run(file: Path, name: str, digest: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"extensions = '{file}': not a Python file; name one that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    module.__dict__["digest"] = digest
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file raises
        del sys.modules[name]
        raise SettingsError(f"extensions = '{file}': {type(error).__name__}: {error}; correct the file") from error
