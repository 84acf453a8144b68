"""The folder `tokens` of a run: its encoded text, from the first preparation to the end of the training."""

from __future__ import annotations

import shutil
from pathlib import Path

from transduce.errors import RunFolderError
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.manifest import check_file, seal_folder, sealed_files


def clear_tokens(folder: RunFolder) -> Path:
    """Make an empty folder for the encoded text; remove what a killed process has left of an earlier one."""
    tokens = folder.path / "tokens"
    shutil.rmtree(tokens, ignore_errors=True)
    tokens.mkdir(exist_ok=True)
    return tokens


def seal_prepared(folder: RunFolder) -> None:
    """Store the checksums of the encoded text once it is complete."""
    seal_folder(folder.path / "tokens")


def check_prepared(folder: RunFolder) -> RunFolder:
    """Return the folder if its encoded text is intact. A `RunFolderError` names a damaged file and what to do.

    Text that has not been encoded completely is not checked: it will be read again.
    """
    tokens = folder.path / "tokens"
    if not has_read_text(folder.path):
        (tokens / "manifest.json").unlink(missing_ok=True)
    elif (tokens / "manifest.json").exists():  # runs of early versions have none
        try:
            for name, was in sealed_files(tokens).items():
                check_file(tokens / name, was)
        except RunFolderError as error:
            raise RunFolderError(
                f"{error}; if the training text has not changed, remove {folder.path / 'data.json'} and run the same "
                "command to read it again"
            ) from None
    return folder


def has_prepared(folder: RunFolder) -> bool:
    """Whether the encoded text is still there."""
    return (folder.path / "tokens").exists()


def forget_prepared(folder: RunFolder) -> None:
    """Remove the encoded text, which a finished run does not need."""
    leaving = folder.path / ".tokens.done.aside"  # after a kill, the next start removes the rest
    (folder.path / "tokens").rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)
