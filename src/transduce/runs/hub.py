"""Models on the Hugging Face Hub: their names, and downloads into the cache of huggingface_hub.

The library is an extra, `pip install 'transduce[hub]'`, and is imported when a name is used.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transduce.errors import RunFolderError, UserError, message_of, needing
from transduce.runs.manifest import NAME, Manifest

MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def hub_name(path: str) -> str | None:
    """Return `path` if it may name a model on the Hub: it is OWNER/NAME, and neither it nor a folder OWNER exists.

    Otherwise return None, also for `runs/NAME`, because a missing run folder must not become a download.
    """
    exists = Path(path).exists() or Path(path).parent.is_dir() or path.startswith("runs/")
    return path if MODEL_NAME.fullmatch(path) and not exists and ".." not in path else None


def find_run(path: str | Path) -> Path:
    """Return the run folder at `path`; if `path` is a string that names a model on the Hub, download it.

    Raises the errors of `download`, and `RunFolderError` if the downloaded model is no run folder.
    """
    name = hub_name(path) if isinstance(path, str) else None
    if name is None:
        return Path(path)
    folder = download(name, NAME)
    if not (folder / NAME).exists():
        raise RunFolderError(
            f"{name} on the Hugging Face Hub is no run folder: it has no {NAME}; transduce import {name} RUN makes one "
            "from a model of transformers or CTranslate2"
        )
    manifest = Manifest.read(folder)
    return download(name, *map(glob.escape, (*manifest.files, *manifest.records)), revision=folder.name)


def download(name: str, *patterns: str, revision: str | None = None, quiet: bool = False) -> Path:
    """Download the files of a model that match a pattern, and return their folder, which is named after the commit.

    `quiet`: show no progress bars. Raises `UserError` without such a model, access, a network or the library.
    """
    with hub_api(f"there is no folder {name}; a model on the Hugging Face Hub", quiet=quiet) as api:
        try:
            folder = api.snapshot_download(name, revision=revision, allow_patterns=[*patterns], ignore_patterns="*/*")
        except Exception as error:  # errors of the library, of its HTTP client, or caused by the server's answer
            raise UserError(
                f"there is no folder {name}, and {api.endpoint} does not provide this model: {reason_of(error)}; try "
                f"again, or give a folder that was downloaded elsewhere (hf download {name} --local-dir FOLDER)"
            ) from None
    return Path(folder)


@contextmanager
def hub_api(what: str, *, quiet: bool = False) -> Iterator[Any]:
    """Context manager that yields huggingface_hub's `HfApi`, which prints only errors, and progress on a terminal.

    Raises `SettingsError` if the library is not installed. `what`: the feature that needs it, for the message.
    """
    with needing("hub", f"{what} needs huggingface_hub"):
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils import disable_progress_bars, logging
    verbosity, telemetry = logging.get_verbosity(), constants.HF_HUB_DISABLE_TELEMETRY
    try:
        logging.set_verbosity_error()
        # otherwise the library asks the Hub for a list of programs in which it may be running
        constants.HF_HUB_DISABLE_TELEMETRY = True
        with disable_progress_bars() if quiet or not sys.stderr.isatty() else nullcontext():
            yield HfApi(endpoint=os.environ.get("HF_ENDPOINT") or constants.ENDPOINT, library_name="transduce")
    finally:
        logging.set_verbosity(verbosity)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry


def reason_of(error: Exception) -> str:
    """Return the message of an error of huggingface_hub in one line."""
    return " ".join(message_of(error).split()[:80]).rstrip(".") or type(error).__name__
