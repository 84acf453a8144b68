"""A model by its name on the Hub: the files that an import reads, and no others, fetched beside the run to be made.

The names of the files are ours, never the server's; what a file holds is checked against the size, and where there is
one the digest, that the server names for the commit. `huggingface_hub` is an extra: `pip install
transduce[interchange]`. Nothing here runs for a folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.convert.folder import PICKLED, SAFE, check_model_type, read_object
from transduce.convert.importing import Imported
from transduce.convert.limits import MOST_BYTES
from transduce.errors import UserError
from transduce.logging import Bar, Log

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 15.0
"""How long the server may take to say what there is."""


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of model from elsewhere. `supported`: the architectures that the import takes, by model_type.

    `files` and `tokenizer` are what it reads beside config.json and weights; `older` ones instead of the latter, where
    the first of them is not there.
    """

    importer: Callable[[Path], Imported]
    supported: Mapping[str, Sequence[str]]
    files: tuple[str, ...]
    tokenizer: tuple[str, ...]
    older: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """A folder of downloaded files, and where they came from."""

    folder: Path
    name: str
    commit: str
    endpoint: str

    @property
    def origin(self) -> str:
        """For the card."""
        return f"`{self.name}` on {self.endpoint}, at commit `{self.commit}`"


def hub_name(path: str) -> str | None:
    """OWNER/NAME, where that is what was given: no file or folder is called so, and no folder here as the owner."""
    there = Path(path).exists() or Path(path).parent.is_dir()
    return path if _NAME.fullmatch(path) and not there and ".." not in path else None


@contextmanager
def fetched(
    name: str,
    *,
    source: Source,
    beside: Path,
    revision: str | None = None,
    log: Log | None = None,
) -> Iterator[Fetched]:
    """What an import of this kind reads, in a folder that is gone afterwards; config.json is looked at before all else.

    Raises `UserError` in one line: nothing of that name, a closed door, no network, files that are not as announced.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import logging
    except ImportError:
        raise UserError(
            f"{name} is no folder; to download it by that name: pip install transduce[interchange] (huggingface_hub)"
        ) from None
    logging.set_verbosity_error()
    constants.HF_HUB_DISABLE_TELEMETRY = (
        True  # else it asks the Hub for a list of programs, to tell which of them runs it
    )
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", suffix=".aside", dir=beside.parent) as place:
        folder = Path(place) / name.rpartition("/")[2]
        folder.mkdir()
        with _told(name, revision, endpoint):
            api = huggingface_hub.HfApi(endpoint=endpoint, library_name="transduce")
            info = api.model_info(name, revision=revision, files_metadata=True, timeout=_SECONDS)
            there = {str(file.rfilename): file for file in info.siblings or ()}
            commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise UserError(f"{endpoint} does not say which commit of {name} it has: it is no Hub")
        wanted = _wanted(name, source, there)
        _check_room(wanted, there, Path(place))
        with (log or Log(quiet=True)).progress(name) as bar:
            for file in wanted:
                with _told(name, revision, endpoint):
                    huggingface_hub.hf_hub_download(
                        name,
                        file,
                        revision=commit,
                        local_dir=folder,
                        endpoint=endpoint,
                        tqdm_class=_meter(bar, file, _size(there[file])),
                    )
                _check(folder / file, there[file])
                if file == "config.json":
                    check_model_type(folder, read_object(folder / file), source.supported)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        yield Fetched(folder, name, commit, endpoint)


def _wanted(name: str, source: Source, there: Mapping[str, Any]) -> list[str]:
    """Which of the files are needed, config.json first and the weights last."""
    weights = SAFE if SAFE in there else PICKLED
    if missing := [file for file in ("config.json", weights) if file not in there]:
        either = f"{SAFE} nor {PICKLED}" if missing[-1] == weights else "it"
        raise UserError(
            f"{name} has no {missing[0]}" if missing[0] == "config.json" else f"{name} has neither {either}"
        )
    old = bool(source.older) and source.tokenizer[0] not in there
    chosen = [*source.files, *(source.older if old else source.tokenizer)]
    return ["config.json", *(file for file in chosen if file in there), weights]


def _size(file: Any) -> int | None:
    size = getattr(file, "size", None)
    return size if type(size) is int else None


def _check_room(wanted: Sequence[str], there: Mapping[str, Any], place: Path) -> None:
    """Refuse what is larger than any such file should be, and what the disk cannot take."""
    sizes = {file: _size(there[file]) or 0 for file in wanted}
    for file, size in sizes.items():
        if file not in (SAFE, PICKLED) and size > MOST_BYTES:
            raise UserError(f"{file} there has {size:,} bytes; at most {MOST_BYTES:,} are read")
    free = shutil.disk_usage(place).free
    if 2 * sum(sizes.values()) > free:  # once as it comes, once as the run
        raise UserError(f"{sum(sizes.values()):,} bytes are to be downloaded, and {free:,} are free in {place.parent}")


def _check(path: Path, file: Any) -> None:
    """Refuse a file that is not the one that was announced."""
    size, announced = path.stat().st_size, _size(file)
    if announced is not None and size != announced:
        raise UserError(f"{path.name} came with {size:,} bytes, and {announced:,} were announced; try again")
    lfs = getattr(file, "lfs", None)
    expected = getattr(lfs, "sha256", None)
    if isinstance(expected, str):
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != expected.lower():
                raise UserError(f"{path.name} came with another sha256 than was announced; try again")


def _meter(bar: Bar, file: str, size: int | None) -> type:
    """What the library reports bytes to: shows them, and stops a file that goes on beyond its size."""
    from tqdm import tqdm

    most = MOST_BYTES if size is None else size

    class Meter(tqdm):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **{**options, "disable": True})
            self._n = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self._n += int(n or 0)
            if self._n > most:
                raise UserError(f"{file} does not end: {most:,} bytes were announced")
            bar.update(self._n / max(most, 1), note=f"{file}, {self._n / 1e6:,.1f} of {most / 1e6:,.1f} MB")

    return Meter


@contextmanager
def _told(name: str, revision: str | None, endpoint: str) -> Iterator[None]:
    """The library's errors in one line each."""
    from huggingface_hub import errors

    door = "log in with `hf auth login`"
    lines: tuple[tuple[type[Exception], str], ...] = (
        (errors.OfflineModeIsEnabled, f"{name} is no folder, and HF_HUB_OFFLINE forbids to download it"),
        (errors.GatedRepoError, f"{name} is gated: accept its terms at {endpoint}/{name}, and {door}"),
        (errors.RevisionNotFoundError, f"{name} has no revision {revision}"),
        (errors.RemoteEntryNotFoundError, f"{name} lists a file that {endpoint} does not have"),
        (
            errors.RepositoryNotFoundError,
            f"no folder here and no model on {endpoint} is called {name}; if it is private, {door}",
        ),
        (errors.HFValidationError, f"{name} is no name of a model"),
    )
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:  # of the library, of the one below it, of what a server may answer
        for kind, line in lines:
            if isinstance(error, kind) or isinstance(error.__cause__, kind):
                raise UserError(line) from None
        why = " ".join(str(error).split()[:24]) or type(error).__name__
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code is not None:
            raise UserError(f"{endpoint} refuses {name}: HTTP {code}") from None
        raise UserError(
            f"cannot download {name} from {endpoint}: {why}; try again, or import a folder that another machine "
            f"fetched (hf download {name} --local-dir FOLDER)"
        ) from None
