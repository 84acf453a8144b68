"""Download of a model from the Hugging Face Hub into the cache of `huggingface_hub`, which resumes and verifies files.

The library is optional: `pip install transduce[interchange]`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from transduce.convert.folder import SAFE, check_model_type, read_object
from transduce.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def hub_name(path: str) -> str | None:
    """`path` if it is OWNER/NAME, and neither it nor a folder OWNER exists; otherwise None."""
    exists = Path(path).exists() or Path(path).parent.is_dir()
    return path if _NAME.fullmatch(path) and not exists and ".." not in path else None


def download(
    name: str,
    files: Sequence[str],
    architectures: Mapping[str, Sequence[str]],
    *,
    revision: str | None = None,
    quiet: bool = False,
) -> Path:
    """Download config.json, model.safetensors and those of `files` that exist; the folder is named after the commit.

    config.json comes first and is refused if it names none of the `architectures`. Pickled weights are not downloaded.
    Raises `UserError` in one line: no such model, no access, no network, no safetensors.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError:
        raise UserError(
            f"there is no folder {name}; to download the model: pip install transduce[interchange] (huggingface_hub)"
        ) from None
    logging.set_verbosity_error()
    if quiet or not sys.stderr.isatty():
        disable_progress_bars()
    constants.HF_HUB_DISABLE_TELEMETRY = True  # otherwise it asks the Hub for a list of programs that may run it
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    fetch = partial(snapshot_download, name, endpoint=endpoint, library_name="transduce")
    try:
        folder = Path(fetch(revision=revision, allow_patterns="config.json"))
        if not (folder / "config.json").exists():
            raise UserError(f"{name} has no config.json")
        check_model_type(folder, read_object(folder / "config.json"), architectures)
        fetch(revision=folder.name, allow_patterns=[SAFE, *files])
    except UserError:
        raise
    except Exception as error:  # of the library, of its HTTP client, or caused by the server's answer
        why = " ".join(str(error).split()[:80]).rstrip(".") or type(error).__name__
        raise UserError(
            f"there is no folder {name}, and {endpoint} does not provide this model: {why}; try again, or import a "
            f"folder that was downloaded elsewhere (hf download {name} --local-dir FOLDER)"
        ) from None
    if not (folder / SAFE).exists():
        raise UserError(
            f"{name} has no {SAFE}, and other weights are not downloaded; name a revision that has it (often "
            f"refs/pr/NUMBER), or import a folder that was downloaded elsewhere (hf download {name} --local-dir FOLDER)"
        )
    return folder
