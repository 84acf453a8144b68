"""The run folder: the model, and the checkpoints to resume training from.

    manifest.json        the settings asked for, and their changes; sha256 and size of the weights, the tokenizer,
                         settings and records
    recipe.toml          the recipe as it was given
    config.json          all settings, resolved, before changes
    tokenizer*.model     vocabulary
    model.safetensors    weights for translation, or adapters of the weights of another run (training.lora)
    metrics.jsonl, data.json, *scores.json, samples.json, attention.json    records of the run
    report.html, README.md   report and model card, made from the records; the card may be edited
    time_limit.json      the number of updates that a limit in minutes became
    skipped.jsonl        the sentences of updates that were skipped because the loss or its gradient was not finite
    tokens/              during training: the encoded text, with a manifest
    averaging/           weights to average, whose checksums are in the checkpoints
    checkpoints/u00001234/  training.safetensors, state.json, manifest.json; shards/ of ranks that shard the weights
    .lock                during training

Every file is written under a temporary name, synced and renamed. Nothing outside the folder is needed to use the model,
so the folder can be moved and copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import transduce
from transduce.config.extensions import name_of_copy
from transduce.config.settings import Settings
from transduce.errors import RunFolderError
from transduce.runs.atomic import advising, expecting, read_json, remove_leftovers, write_json, write_text
from transduce.runs.lock import FolderLock
from transduce.runs.manifest import RESTORE, WEIGHTS, Change, Fingerprint, Manifest, check_file, fingerprint
from transduce.runs.tensor_file import StoredTensor, TensorFile, open_tensors, read_header, read_tensors

if TYPE_CHECKING:
    import torch

    import transduce.runs.checkpoints

BASE = "base"
"""Key in the metadata of a file of adapters: the checksum of the weights to which the adapters belong."""

NEW = ".new"
"""Suffix of the name under which a file of adapters has the new rows of a table."""

_WRITTEN = ("*", "checkpoints/*", "averaging/*", "preparation/*", "tokens/*")
"""Patterns of the files that training writes into a run folder, except the files of trackers."""


class RunFolder:
    """A run folder on disk. `create` it to train, which locks it until `close`; `open` it to use the model."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        manifest: Manifest,
        *,
        lock: FolderLock | None = None,
        resumed: bool = False,
    ) -> None:
        self.path, self.settings, self.resumed = path, settings, resumed
        self.manifest, self._lock = manifest, lock
        self.requested: dict[str, tuple[Any, Any]] = {}
        self._asked: tuple[Mapping[str, Any], str] = ({}, "")

    @classmethod
    def create(cls, path: Path, settings: Settings, recipe: str) -> RunFolder:
        """Create the folder of a new run, or open the same run to resume it, and lock it against other trainings.

        `settings`: the requested settings, of which some may be unset. `recipe`: the text for recipe.toml. If the
        folder already contains this run, `.resumed` is true and `.settings` are its resolved settings. Changeable
        settings may have other values than before, which apply from then on. If results depend on such a setting, it is
        in `.requested` until `change` has recorded it.

        Raises `RunFolderError` if the folder contains another run (the message names the first setting that differs) or
        other files, if it cannot be written, or if another process is training in it.
        """
        path = Path(path)
        lock = _make_and_lock(path)
        try:
            remove_leftovers(path)
            remove_leftovers(path / "checkpoints")
            if (path / "manifest.json").exists():
                return cls._resume(path, settings, recipe, lock)
            if others := sorted(p.name for p in path.iterdir() if p.name != ".lock"):
                raise RunFolderError(
                    f"{path} is no run folder and not empty: it contains {others[0]}; name another run folder",
                    "run",
                )
            # The manifest comes first: it makes the folder a run, which can be resumed after a kill between two files.
            manifest = Manifest(path, settings.model_dump(mode="json"))
            manifest.save()
            write_text(path / "recipe.toml", recipe)
            run = cls(path, settings, manifest, lock=lock)
            run.write_settings(run.settings)
            return run
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path, *, model: bool = True) -> RunFolder:
        """Open a finished or running run for use. Checks every file that the model needs.

        `model`: False if the run need not have saved a model yet, as for a report. Raises `RunFolderError`, which names
        the missing or damaged file.
        """
        path = Path(path)
        manifest = Manifest.read(path)
        run = cls(path, manifest.settings(), manifest)
        manifest.check()
        if model:
            if not run.has_tokenizers:
                raise RunFolderError(f"{path} has no tokenizer yet: its training has not got that far; resume it")
            if not (path / WEIGHTS).exists():
                raise RunFolderError(
                    f"{path / WEIGHTS} is missing: it was removed, or training has not got that far; "
                    "restore it from a copy of the run, or resume the training"
                )
            with advising(RESTORE, "run"):  # finds truncated files; `load_model` checks every byte
                read_header(path / WEIGHTS)
        return run

    @classmethod
    def open_locked(cls, path: Path) -> RunFolder:
        """Open a run to add a record to it, locked until `close`. Raises `RunFolderError` if it cannot be written."""
        Manifest.read(path)  # checked first, because locking creates a missing folder
        lock = _make_and_lock(path)
        try:
            run = cls.open(path)  # read again under the lock
        except BaseException:
            lock.release()
            raise
        run._lock = lock
        return run

    @classmethod
    def _resume(cls, path: Path, asked: Settings, recipe: str, lock: FolderLock) -> RunFolder:
        """Open the run in the folder to resume it. Raises `RunFolderError` if `asked` are another run's settings."""
        manifest = Manifest.read(path)
        manifest.require_same(asked, but=("freely", "recorded"))
        run = cls(path, asked, manifest, lock=lock, resumed=True)
        manifest.check()
        run._asked = asked.model_dump(mode="json"), recipe
        if "config.json" not in manifest.files:  # killed before or while the settings were written
            run._store_asked()
            run.write_settings(run.settings)
            return run
        run.requested = manifest.requested_changes(asked)
        if not run.requested:
            run._store_asked()
        run.settings = manifest.settings()
        return run

    def _store_asked(self) -> None:
        """Store the command's settings and recipe in the folder if they differ from the previous command's."""
        values, recipe = self._asked
        changed = values != self.manifest.asked_settings().model_dump(mode="json")
        if changed or not (self.path / "recipe.toml").exists():
            write_text(self.path / "recipe.toml", recipe)
        if changed:
            self.manifest.asked = values
            self.manifest.save()

    def change(self, changes: Mapping[str, tuple[Any, Any]], *, continues: bool = False) -> None:
        """Record changed settings of a resumed run, which apply from its last checkpoint on.

        `changes`: values before and after, by dotted name. `continues`: whether a finished training is continued.
        """
        # With the recipe first, a kill between the two writes leaves changes that the next command requests again.
        self.manifest.asked, recipe = self._asked
        write_text(self.path / "recipe.toml", recipe)
        self.manifest.changes.append(Change(changes, continues))
        if continues:
            self.manifest.records.pop("metrics.jsonl", None)  # the log grows again
        self.manifest.save()
        self.settings, self.requested = self.manifest.settings(), {}

    def close(self) -> None:
        """Release the lock. The system also releases it when the process exits in any way."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def checkpoints(self) -> transduce.runs.checkpoints.Checkpoints:
        """The checkpoints of the run. Imported here, because this imports torch, which takes seconds."""
        from transduce.runs.checkpoints import Checkpoints

        return Checkpoints(self.path / "checkpoints")

    # -- the model

    @property
    def has_tokenizers(self) -> bool:
        """Whether the folder contains the vocabulary."""
        return bool(self.manifest.tokenizers)

    def save_tokenizers(self, save: Callable[[Path], None]) -> None:
        """Store the vocabulary of both sides, which `save` writes into the folder."""
        with self.manifest.replacing(self.manifest.files, "tokenizer*"):
            save(self.path)

    def write_settings(self, settings: Settings) -> None:
        """Store the resolved settings, and copies of the extensions, so that the folder can be moved."""
        self.settings = settings
        copies = {name_of_copy(number, file): file for number, file in enumerate(settings.extensions, 1)}
        for name, file in copies.items():
            if file != self.path / name:
                shutil.copyfile(file, self.path / name)
        if copies:
            self.manifest.add(self.manifest.files, *copies)
        with self.manifest.replacing(self.manifest.files, "config.json"):
            write_json(self.path / "config.json", settings.model_dump(mode="json"))

    def save_model(self, tensors: Mapping[str, torch.Tensor], *, base: str | None = None) -> None:
        """Replace the run's model. `base`: if `tensors` are adapters, the checksum of the weights that they adapt."""
        from transduce.runs.tensors import save_tensors  # imports torch

        metadata = {"transduce": transduce.__version__} | ({} if base is None else {BASE: base})
        with self.manifest.replacing(self.manifest.files, WEIGHTS):
            save_tensors(self.path / WEIGHTS, tensors, metadata)

    def load_model(self) -> dict[str, torch.Tensor]:
        """Load the weights of the run's model, with adapters merged; the file is compared with its checksum."""
        from transduce.runs.tensors import tensors_of  # imports torch

        with self.open_weights() as weights:
            return tensors_of(weights)

    def load_adapters(self) -> dict[str, torch.Tensor]:
        """Load the weights in the run's own file, which are adapters if `has_adapters`."""
        from transduce.runs.tensors import tensors_in  # imports torch

        return tensors_in(self._read_weights())

    @contextlib.contextmanager
    def open_weights(self) -> Iterator[Mapping[str, np.ndarray | StoredTensor]]:
        """Context manager that yields the model's weights, to be read without PyTorch; adapters are merged."""
        with contextlib.ExitStack() as files:
            file = self._read_weights(lambda path: open_tensors(path, files))
            yield self._merged(file) if BASE in file.metadata else file.stored()

    @property
    def has_adapters(self) -> bool:
        """Whether the folder contains adapters for another run's weights instead of whole weights."""
        return BASE in read_header(self.path / WEIGHTS).metadata

    @property
    def base_name(self) -> str | None:
        """The name of the run whose weights the adapters adapt; None without adapters, or if that run is missing."""
        for run in self._initial_runs() if self.has_adapters else ():
            with contextlib.suppress(RunFolderError):
                return Manifest.read(run).settings().name
        return None

    def merge_adapters(self) -> None:
        """Merge the adapters in the folder into the weights that they adapt, and replace them by the result."""
        if self.has_adapters:
            self.save_model(self.load_model())

    def _merged(self, adapters: TensorFile) -> dict[str, np.ndarray]:
        lora, checksum = self.settings.training.lora, adapters.metadata[BASE]
        assert lora is not None, "only such runs have adapters"
        with contextlib.ExitStack() as files:
            base = open_tensors(self._find_base(checksum), files)
            if base.checksum() != checksum:
                raise RunFolderError(f"{base.path} is damaged: its content does not match the checksum of the adapters")
            with expecting(adapters.path):
                return merged(base.arrays(), adapters.arrays(), scale=lora.scale)

    def _find_base(self, checksum: str) -> Path:
        """Return the path of the weights that the adapters adapt: a copy in training, later the initial run's file."""
        if (copy := self.path / "tokens" / "start.safetensors").exists():
            return copy
        for run in self._initial_runs():
            with contextlib.suppress(RunFolderError):
                if Manifest.read(run).files.get(WEIGHTS, {}).get("sha256") == checksum:
                    return run / WEIGHTS
        raise RunFolderError(
            f"{self.path} has only adapters (training.lora.merge = false): the weights of "
            f"{self.settings.training.start}, which they belong to, are missing or have changed; restore that run, or "
            "put it beside this one",
            "run",
        )

    def _initial_runs(self) -> tuple[Path, Path]:
        """Return the possible paths of the initial run, which may have been moved together with this run."""
        start = self.settings.training.start or Path()
        return start, self.path.absolute().parent / start.name

    def _read_weights(self, read: Callable[[Path], TensorFile] | None = None) -> TensorFile:
        """Read the weights and compare them with the manifest; try again if a training replaces both meanwhile."""
        expected = self._listed_weights()
        with advising(RESTORE, "run"):
            while True:
                file = (read or read_tensors)(self.path / WEIGHTS)
                if expected is None or file.checksum() == expected.get("sha256"):
                    return file
                if (now := self._listed_weights()) == expected:
                    raise RunFolderError(
                        f"{file.path} is damaged: its content does not match the checksum in the manifest"
                    )
                expected = now

    def _listed_weights(self) -> Fingerprint | None:
        """Return checksum and size of the weights from the manifest; None while the weights are being replaced."""
        return Manifest.read(self.path).files.get(WEIGHTS)

    def weights_digest(self) -> str:
        """Return the checksum of the weights in the folder."""
        listed = self._listed_weights() or fingerprint(self.path / WEIGHTS)
        return str(listed.get("sha256"))

    def model_digest(self) -> str:
        """Return a digest of the files and settings on which the model's outputs depend; moving the folder keeps it."""
        decoding = self.settings.decoding.model_dump(exclude={"batch_tokens"})
        parts: dict[str, Any] = {
            "model": self.weights_digest(),
            "tokenizers": self.manifest.tokenizers,
            "settings": [self.settings.model.model_dump(mode="json"), decoding],
        }
        if self._has_language_tokens():
            parts["languages"] = self.settings.data.named_languages
        return _sha256(json.dumps(parts, sort_keys=True).encode())

    def _has_language_tokens(self) -> bool:
        """Whether texts get language tokens, which depend on the data's languages; see `text.special.Framing`."""
        listed = (read_json(self.path / name) for name in self.manifest.tokenizers if name.endswith(".json"))
        return any(isinstance(content, dict) and "framing" in content for content in listed)

    # -- records of the run

    def write_record(self, name: str, value: Any) -> None:
        """Store a record of the run as the JSON file `name`, with a checksum. The folder must be locked."""
        with self.manifest.replacing(self.manifest.records, name):
            write_json(self.path / name, value)

    def write_page(self, name: str, text: str) -> None:
        """Store the file `name`, a report or model card, with a checksum. The folder must be locked."""
        with self.manifest.replacing(self.manifest.records, name):
            write_text(self.path / name, text)

    def read_record(self, name: str) -> Any:
        """Return the value of a record, or {} if there is none. Raises `RunFolderError` if its checksum is wrong."""
        path = self.path / name
        if name in self.manifest.records:
            check_file(path, self.manifest.records[name])
        return read_json(path) if path.exists() else {}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def merged(
    base: Mapping[str, np.ndarray], adapters: Mapping[str, np.ndarray], *, scale: float
) -> dict[str, np.ndarray]:
    """Merge adapters into weights: add `scale` times B A to each adapted matrix, rounded once.

    `base`: the weights, with one array for all names of a tied weight. `adapters`: B and A of each matrix that a
    layer's weight packs, rows to append to a table, and whole weights, which replace or extend the weights in `base`.
    """
    weights = {name: value for name, value in base.items() if not name.endswith(NEW)}
    layers: defaultdict[str, dict[int, np.ndarray]] = defaultdict(dict)
    tables = dict[tuple[int, int], np.ndarray]()
    for name, value in adapters.items():
        layer, adapted, matrix = name.rpartition(".adapters.")
        if adapted and matrix.endswith(".b"):
            a = adapters[name[:-1] + "a"]
            number = int(matrix.removesuffix(".b"))
            layers[layer][number] = scale * (value.astype(np.float64) @ a.astype(np.float64))
        elif name.endswith(NEW):
            weight = f"{name.removesuffix(NEW)}.weight"
            both = base[weight], value
            if (key := (id(both[0]), id(both[1]))) not in tables:
                tables[key] = np.concatenate(both)
            weights[weight] = tables[key]
        elif not adapted:
            weights[name] = value
    for layer, parts in layers.items():
        change = np.concatenate([parts[number] for number in sorted(parts)])
        weights[f"{layer}.weight"] = (base[f"{layer}.weight"] + change).astype(np.float32)
    return weights


def _make_and_lock(path: Path) -> FolderLock:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / "manifest.json").exists():
            _refuse_links(path)
        return FolderLock(path)
    except FileExistsError:
        raise RunFolderError(f"{path} is a file; name a folder") from None
    except OSError as error:
        what = "write to" if path.is_dir() else "make"
        raise RunFolderError(
            f"cannot {what} the run folder {path}: {error.strerror or error}; name another run folder",
            "run",
        ) from error


def _refuse_links(run: Path) -> None:
    """Raise `RunFolderError` if files are links out of a run folder: training would overwrite the links' targets."""
    for path in chain.from_iterable(map(run.glob, _WRITTEN)):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
            raise RunFolderError(f"{path} is a link that leads out of the run folder; replace it by its target")


def has_read_text(run: Path) -> bool:
    """Whether a run has prepared its training text, or has finished and no longer needs it."""
    return (run / "data.json").exists()  # written last
