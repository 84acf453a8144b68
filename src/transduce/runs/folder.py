"""The run folder: the model, and the checkpoints to resume training from.

    manifest.json        the settings asked for; sha256 and size of the tokenizer, the settings and the records
    recipe.toml          the recipe as it was given
    config.json          all settings, resolved
    tokenizer*.model     vocabulary
    model.safetensors    weights for translation, with their own checksum
    shortlist.safetensors    made by `transduce shortlist`, likewise
    metrics.jsonl, data.json, *scores.json, samples.json, attention.json    records of the run
    report.html, README.md   report and model card, made from the records; the card may be edited
    time_limit.json      the number of updates that a limit in minutes became
    skipped.jsonl        the sentences of updates that were skipped because the loss or its gradient was not finite
    tokens/              during training: the encoded text, with a manifest
    averaging/           during training: weights to average, each file with its own checksum
    checkpoints/u00001234/  training.safetensors, state.json, manifest.json; shards/ of ranks that shard the weights
    .lock                during training

Every file is written under a temporary name, synced and renamed. Nothing outside the folder is needed to use the model,
so the folder can be moved and copied.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transduce
from transduce.config.settings import Settings
from transduce.errors import RunFolderError
from transduce.runs.atomic import advising, read_json, remove_leftovers, write_json, write_text
from transduce.runs.lock import FolderLock
from transduce.runs.manifest import RESTORE, Manifest, check_file
from transduce.runs.tensor_file import load_arrays, load_metadata

if TYPE_CHECKING:
    import numpy as np
    import torch

    import transduce.runs.checkpoints

_WRITTEN = ("*", "checkpoints/*", "averaging/*", "preparation/*", "tokens/*")
"""The files that training writes below a run folder, without those of trackers."""


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

    @classmethod
    def create(cls, path: Path, settings: Settings, recipe: str) -> RunFolder:
        """Make the folder of a new run, or open the same run to resume it, and lock it against other trainings.

        `settings` are those asked for, unset ones as None; `recipe` is the text to keep as recipe.toml. If the folder
        already contains this run, `.resumed` is true and `.settings` are its resolved settings. The same run may be
        asked for with other values of the settings in `identity.CHANGEABLE`; they apply from then on.

        Raises `RunFolderError`: the folder contains another run (the message names the first setting that differs) or
        other files, it cannot be written, or another process is training in it.
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
                    f"{path} is no run folder and not empty: it contains {others[0]}; name another run folder"
                )
            # The manifest comes first: with it the folder is a run, which a kill between two files leaves resumable.
            manifest = Manifest(path, settings.model_dump(mode="json"))
            manifest.save()
            write_text(path / "recipe.toml", recipe)
            run = cls(path, settings, manifest, lock=lock)
            run.write_settings(settings)
            return run
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path, *, model: bool = True) -> RunFolder:
        """A finished or running run, to use. Checks every file that the model needs.

        `model` false: the run need not have saved a model yet (for a report). Raises `RunFolderError`, which names the
        missing or damaged file.
        """
        path = Path(path)
        manifest = Manifest.read(path)
        run = cls(path, manifest.settings(), manifest)
        manifest.check()
        if model:
            if not run.has_tokenizers:
                raise RunFolderError(f"{path} has no tokenizer yet: its training has not got that far; resume it")
            if not (path / "model.safetensors").exists():
                raise RunFolderError(
                    f"{path / 'model.safetensors'} is missing: it was removed, or training has not got that far; "
                    "restore it from a copy of the run, or resume the training"
                )
            with advising(RESTORE):  # finds a truncated file; `load_model` checks every byte
                load_metadata(path / "model.safetensors")
        return run

    @classmethod
    def open_locked(cls, path: Path) -> RunFolder:
        """A run to add a record to, locked until `close`. Raises `RunFolderError` if it cannot be written."""
        Manifest.read(path)  # locking would make a missing folder
        lock = _make_and_lock(path)
        try:
            run = cls.open(path)  # as other processes have left it
        except BaseException:
            lock.release()
            raise
        run._lock = lock
        return run

    @classmethod
    def _resume(cls, path: Path, asked: Settings, recipe: str, lock: FolderLock) -> RunFolder:
        """Open the run in the folder, if it is the one asked for."""
        manifest = Manifest.read(path)
        manifest.require_same(asked)
        run = cls(path, asked, manifest, lock=lock, resumed=True)
        manifest.check()
        values = asked.model_dump(mode="json")
        changed = values != manifest.asked_settings().model_dump(mode="json")
        if changed or not (path / "recipe.toml").exists():
            write_text(path / "recipe.toml", recipe)
        if changed:
            manifest.asked = values
            manifest.save()
        if "config.json" in manifest.files:
            run.settings = manifest.settings()
        else:  # killed before or while the settings were written
            run.write_settings(asked)
        return run

    def close(self) -> None:
        """Release the lock. The system does the same when the process exits, however it does."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def checkpoints(self) -> transduce.runs.checkpoints.Checkpoints:
        """The checkpoints of the run. Importing them imports torch, which takes longer than using a small model."""
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
        """Store the resolved settings."""
        self.settings = settings
        with self.manifest.replacing(self.manifest.files, "config.json"):
            write_json(self.path / "config.json", settings.model_dump(mode="json"))

    def save_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights for translation."""
        from transduce.runs.tensors import save_tensors  # imports torch

        save_tensors(self.path / "model.safetensors", tensors, {"transduce": transduce.__version__})

    def load_model(self) -> dict[str, torch.Tensor]:
        """The weights for translation; every byte of the file is checked."""
        from transduce.runs.tensors import load_tensors  # imports torch

        with advising(RESTORE):
            return load_tensors(self.path / "model.safetensors")

    def load_arrays(self) -> dict[str, np.ndarray]:
        """The same as arrays in float32, without importing PyTorch; see `tensor_file.load_arrays`."""
        with advising(RESTORE):
            return load_arrays(self.path / "model.safetensors")

    def weights_digest(self) -> str:
        """The checksum of the weights, from the header of their file."""
        return load_metadata(self.path / "model.safetensors").get("sha256", "")

    def vocabularies_digest(self) -> str:
        """A digest of the files of both vocabularies."""
        return _digest({name: known["sha256"] for name, known in self.manifest.tokenizers.items()})

    def model_digest(self) -> str:
        """A digest of the files and settings that the model's outputs depend on. It moves with the folder."""
        decoding = self.settings.decoding.model_dump(exclude={"batch_tokens"})
        parts = {
            "model": self.weights_digest(),
            "tokenizers": self.manifest.tokenizers,
            "settings": [self.settings.model.model_dump(mode="json"), decoding],
        }
        return _digest(parts)

    # -- what describes the run

    def write_record(self, name: str, value: Any) -> None:
        """Store a record as JSON with its checksum. The folder must be locked."""
        with self.manifest.replacing(self.manifest.records, name):
            write_json(self.path / name, value)

    def write_page(self, name: str, text: str) -> None:
        """Store a text made from the records (report, model card) with its checksum. The folder must be locked."""
        with self.manifest.replacing(self.manifest.records, name):
            write_text(self.path / name, text)

    def read_record(self, name: str) -> Any:
        """The value of a record, checked; {} if there is none. Raises `RunFolderError`."""
        path = self.path / name
        if name in self.manifest.records:
            check_file(path, self.manifest.records[name])
        return read_json(path) if path.exists() else {}


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


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
            f"cannot {what} the run folder {path}: {error.strerror or error}; name another run folder"
        ) from error


def _refuse_links(run: Path) -> None:
    """Refuse links out of a run folder. Training in a downloaded folder would overwrite their targets."""
    for path in chain.from_iterable(map(run.glob, _WRITTEN)):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
            raise RunFolderError(f"{path} is a link that leads out of the run folder; replace it by its target")


def has_read_text(run: Path) -> bool:
    """Whether a run has prepared its training text, or is finished and needs it no more."""
    return (run / "data.json").exists()  # written last
