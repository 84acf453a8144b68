"""Download of a model from the Hugging Face Hub: the files that an import reads, and no others.

The names of the files are ours, never the server's. Sizes and, where the server gives them, sha256 sums are checked.
`huggingface_hub` is optional: `pip install transduce[interchange]`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transduce.convert.folder import MAX_BYTES, PICKLED, SAFE, check_model_type, read_object
from transduce.errors import UserError
from transduce.logging import Bar, Log

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT = 15.0  # seconds for the server's list of files


def hub_name(path: str) -> str | None:
    """`path` if it is OWNER/NAME, and neither it nor a folder OWNER exists; otherwise None."""
    exists = Path(path).exists() or Path(path).parent.is_dir()
    return path if _NAME.fullmatch(path) and not exists and ".." not in path else None


@contextmanager
def download(
    name: str,
    wanted: Callable[[Collection[str]], list[str]],
    architectures: Mapping[str, Sequence[str]],
    *,
    place: Path,
    revision: str | None = None,
    log: Log | None = None,
) -> Iterator[tuple[Path, str, str]]:
    """Download to a temporary folder next to `place`; yields it with the server and the commit.

    config.json comes first and is refused if it names none of the `architectures`. `wanted`: of the files that exist,
    those needed besides it and the weights.
    Raises `UserError` in one line: no such model, no access, no network, files that differ from the server's list.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import logging
    except ImportError:
        raise UserError(
            f"there is no folder {name}; to download the model: pip install transduce[interchange] (huggingface_hub)"
        ) from None
    logging.set_verbosity_error()
    constants.HF_HUB_DISABLE_TELEMETRY = True  # otherwise it asks the Hub for a list of programs that may run it
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", suffix=".aside", dir=place.parent) as temporary:
        folder = Path(temporary) / name.rpartition("/")[2]
        folder.mkdir()
        commit, available = _list_files(name, revision, endpoint)
        weights = SAFE if SAFE in available else PICKLED
        files = {file: available[file] for file in ("config.json", *wanted(available), weights)}
        _check_sizes({file: _size(about) or 0 for file, about in files.items()}, place.parent)
        with (log or Log(quiet=True)).progress(name) as bar:
            for file, about in files.items():
                with _one_line_errors(name, revision, endpoint):
                    meter = _meter(bar, file, _size(about))
                    huggingface_hub.hf_hub_download(
                        name, file, revision=commit, local_dir=folder, endpoint=endpoint, tqdm_class=meter
                    )
                _check_content(folder / file, about)
                if file == "config.json":
                    check_model_type(folder, read_object(folder / file), architectures)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        yield folder, endpoint, commit


def _list_files(name: str, revision: str | None, endpoint: str) -> tuple[str, dict[str, Any]]:
    """The commit, and what the server says about each file."""
    import huggingface_hub

    with _one_line_errors(name, revision, endpoint):
        api = huggingface_hub.HfApi(endpoint=endpoint, library_name="transduce")
        info = api.model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        available = {str(file.rfilename): file for file in info.siblings or ()}
    if not _COMMIT.fullmatch(str(info.sha)):
        raise UserError(f"{endpoint} does not give a commit of {name}: it is not a Hub")
    if "config.json" not in available:
        raise UserError(f"{name} has no config.json")
    if SAFE not in available and PICKLED not in available:
        raise UserError(f"{name} has neither {SAFE} nor {PICKLED}")
    return str(info.sha), available


def _size(file: Any) -> int | None:
    size = getattr(file, "size", None)
    return size if type(size) is int else None


def _check_sizes(sizes: Mapping[str, int], place: Path) -> None:
    for file, size in sizes.items():
        if file not in (SAFE, PICKLED) and size > MAX_BYTES:
            raise UserError(f"{file} has {size:,} bytes; at most {MAX_BYTES:,} are read")
    total, free = sum(sizes.values()), shutil.disk_usage(place).free
    if 2 * total > free:  # the download and the run
        raise UserError(f"{total:,} bytes are to be downloaded, and {free:,} are free in {place}")


def _check_content(path: Path, file: Any) -> None:
    """Compare size and sha256 with the server's list. The library itself compares only sizes, and not always."""
    size, expected = path.stat().st_size, _size(file)
    if expected is not None and size != expected:
        raise UserError(f"{path.name} has {size:,} bytes instead of {expected:,}; try again")
    sha256 = getattr(getattr(file, "lfs", None), "sha256", None)
    if isinstance(sha256, str):
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != sha256.lower():
                raise UserError(f"{path.name} does not match its sha256 on the server; try again")


def _meter(bar: Bar, file: str, size: int | None) -> type:
    """A progress class for the library; it also stops a file that exceeds its size."""
    from tqdm import tqdm

    limit = MAX_BYTES if size is None else size

    class Meter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self._n = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self._n += int(n or 0)
            if self._n > limit:
                raise UserError(f"{file} exceeds its size of {limit:,} bytes")
            bar.update(self._n / max(limit, 1), note=f"{file}, {self._n / 1e6:,.1f} of {limit / 1e6:,.1f} MB")

    return Meter


@contextmanager
def _one_line_errors(name: str, revision: str | None, endpoint: str) -> Iterator[None]:
    from huggingface_hub import errors

    log_in = "log in with `hf auth login`"
    lines: dict[type[Exception], str] = {
        errors.OfflineModeIsEnabled: f"there is no folder {name}, and HF_HUB_OFFLINE forbids to download it",
        errors.GatedRepoError: f"{name} is gated: accept its terms at {endpoint}/{name}, and {log_in}",
        errors.RevisionNotFoundError: f"{name} has no revision {revision}",
        errors.RepositoryNotFoundError: (
            f"there is no folder {name} and no such model on {endpoint}; if it is private, {log_in}"
        ),
    }
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the library, of its HTTP client, or caused by the server's answer
        for kind, line in lines.items():
            if isinstance(error, kind) or isinstance(error.__cause__, kind):
                raise UserError(line) from None
        code = getattr(getattr(error, "response", None), "status_code", None)
        why = f"HTTP {code}" if code else " ".join(str(error).split()[:24]) or type(error).__name__
        raise UserError(
            f"cannot download {name} from {endpoint}: {why}; try again, or import a folder that was downloaded "
            f"elsewhere (hf download {name} --local-dir FOLDER)"
        ) from None
