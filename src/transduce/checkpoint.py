"""The run folder: the model, the whole model, and the training states to go on from.

    manifest.json        what was asked for, and sha256 and size of the files that never change
    recipe.toml          the recipe as it was given
    config.json          all settings, resolved
    tokenizer*.model     vocabulary
    model.safetensors    what translate uses; it carries its own checksum
    metrics.jsonl, data.json, scores.json, samples.json, attention.json, report.html, README.md
    checkpoints/u00001234/  training.safetensors, state.json, manifest.json
    .lock                while training

Everything is written aside, synced and renamed. Translation needs nothing outside the folder: moving or copying it
moves the model.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import transduce
from transduce.config import Settings
from transduce.errors import RunFolderError, SettingsError
from transduce.files import check_folder, read_json, remove_leftovers, write_aside, write_json, write_text
from transduce.lock import FolderLock
from transduce.manifest import check_file, fingerprint, first_difference, with_leaves
from transduce.tensors import load_metadata, load_tensors, save_tensors, write_tensors

if TYPE_CHECKING:
    from transduce.text.tokenizer import Tokenizers

FORMAT = 1
FREE = ("name", "data.root", "training.keep_checkpoints")
"""Settings that change nothing that is computed: asking for others goes on with the same run, with the new ones."""
_NAME = re.compile(r"u(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One verified training state. `notes` tell of damaged newer ones that were passed over."""

    path: Path
    update: int
    state: dict[str, Any]
    notes: tuple[str, ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the state, on the CPU."""
        return load_tensors(self.path / "training.safetensors", sealed=False)  # the manifest vouches for it


@dataclass(eq=False)
class RunFolder:
    """A run folder on the disk. `create` to train in it (holds its lock until `close`), `open` to use its model."""

    path: Path
    settings: Settings
    resumed: bool = False
    _manifest: dict[str, Any] = field(default_factory=dict, repr=False)
    _lock: FolderLock | None = field(default=None, repr=False)
    _good: set[str] = field(default_factory=set, repr=False)  # checkpoints that this process wrote or verified

    @classmethod
    def create(cls, path: Path, settings: Settings, recipe: str) -> RunFolder:
        """Make the folder of a new run, or take up the same run again, and lock it against other training processes.

        `settings` as asked for, `None`s and all; `recipe` is the text kept as recipe.toml. When the folder already
        holds this run, `.resumed` is true and `.settings` are the resolved ones of then. What may differ in the same
        run are the settings in `FREE`, whose new values apply from now on: `name`, `data.root` (all paths are absolute
        by now) and `training.keep_checkpoints`. Not `training.micro_batch_tokens` nor `training.device`: another order
        of summation rounds differently, and a run goes on to the very weights that it would have come to.

        Raises `RunFolderError`: the folder holds another run (the first differing setting is named with both values)
        or other things, it cannot be written, or another process trains in it.
        """
        path = Path(path)
        lock = _make_and_lock(path)
        try:
            remove_leftovers(path)
            if (path / "checkpoints").is_dir():
                remove_leftovers(path / "checkpoints")
            if (path / "manifest.json").exists():
                run = cls(path, settings, _manifest=_read_manifest(path), _lock=lock)
                run._take_up(settings, recipe)
                return run
            if strangers := sorted(p.name for p in path.iterdir() if p.name != ".lock"):
                raise RunFolderError(
                    f"{path} is no run folder and not empty: it holds {strangers[0]}; name another with --run"
                )
            run = cls(path, settings, _lock=lock)
            run._manifest = {
                "format": FORMAT,
                "transduce": transduce.__version__,
                "asked": settings.model_dump(mode="json"),
                "files": {},
            }
            # The manifest first: from here on the folder is a run, and a kill between two files leaves one to take up.
            write_json(path / "manifest.json", run._manifest)
            write_text(path / "recipe.toml", recipe)
            run.write_settings(settings)
            return run
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path, *, model: bool = True) -> RunFolder:
        """A finished or running run, to use. Checks every file that translation needs; a bad one is named.

        Raises `RunFolderError`. `model` false: a run that has not saved a model yet will do (for a report).
        """
        path = Path(path)
        if not path.is_dir():
            raise RunFolderError(f"there is no run folder {path}")
        if not (path / "manifest.json").exists():
            raise RunFolderError(f"{path} is no run folder: manifest.json is missing")
        check_folder(path)
        manifest = _read_manifest(path)
        run = cls(path, _read_settings(path, manifest), _manifest=manifest)
        for name in manifest["files"]:
            run._check(name)
        if model:
            if not run.has_tokenizers:
                raise RunFolderError(f"{path} has no tokenizer yet: its training has not come that far")
            if not (path / "model.safetensors").exists():
                raise RunFolderError(
                    f"{path / 'model.safetensors'} is missing: it was removed, or training has not come that far"
                )
            load_metadata(path / "model.safetensors")  # finds a file cut short; `load_model` checks every byte
        return run

    def close(self) -> None:
        """Let other processes train here. (So does the end of this process, however it comes.)"""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def made_by(self) -> str:
        """The version of transduce that began the run."""
        return str(self._manifest.get("transduce", ""))

    @property
    def has_tokenizers(self) -> bool:
        """Whether the vocabulary is in the folder."""
        return any(name.startswith("tokenizer") for name in self._manifest["files"])

    def tokenizers(self) -> Tokenizers:
        """The vocabulary of both sides, its files checked."""
        from transduce.text.tokenizer import Tokenizers

        for name in self._manifest["files"]:
            if name.startswith("tokenizer"):
                self._check(name)
        return Tokenizers.load(self.path)

    def save_tokenizers(self, tokenizers: Tokenizers) -> None:
        """Store the vocabulary of both sides."""
        self._retract("tokenizer")
        tokenizers.save(self.path)
        self._enter(*sorted(p.name for p in self.path.glob("tokenizer*")))

    def write_settings(self, settings: Settings) -> None:
        """Store the settings once nothing in them is left to choose."""
        self.settings = settings
        self._retract("config.json")
        write_json(self.path / "config.json", settings.model_dump(mode="json"))
        self._enter("config.json")

    def save_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights that translation uses."""
        save_tensors(self.path / "model.safetensors", tensors, {"transduce": transduce.__version__})

    def load_model(self) -> dict[str, torch.Tensor]:
        """The weights that translation uses, every byte of the file checked."""
        return load_tensors(self.path / "model.safetensors")

    def save_checkpoint(self, update: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
        """Store a training state as checkpoints/uNNNNNNNN: all of it or, when this fails or is killed, nothing."""
        path = self.path / "checkpoints" / f"u{update:08d}"
        with write_aside(path) as aside:
            aside.mkdir(parents=True)
            write_tensors(aside / "training.safetensors", tensors, seal=False)
            (aside / "state.json").write_text(json.dumps({"update": update, **state}), encoding="utf-8")
            files = {name: fingerprint(aside / name) for name in ("training.safetensors", "state.json")}
            (aside / "manifest.json").write_text(
                json.dumps({"format": FORMAT, "files": files}, indent=2), encoding="utf-8"
            )
        self._good.add(path.name)
        return path

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest training state that is whole; `None` where none was ever saved.

        Damaged newer ones are passed over and named in `.notes`. Raises `RunFolderError` where all are damaged: to
        start over is the user's choice.
        """
        notes: list[str] = []
        for update, path in self._checkpoints():
            try:
                _verify_checkpoint(path)
                state = read_json(path / "state.json")
            except RunFolderError as error:
                notes.append(str(error))
                continue
            self._good.add(path.name)
            told = tuple(f"{note}; going on from the checkpoint before it, update {update}" for note in notes)
            return Checkpoint(path, update, state, told)
        if notes:
            raise RunFolderError(f"every checkpoint is damaged: {'; '.join(notes)}; to start over, delete {self.path}")
        return None

    def prune(self, keep: int) -> list[Path]:
        """Remove all but the newest `keep` whole training states; what was removed. The last good one always stays."""
        assert keep >= 1, "the last state is never pruned"
        n_good = 0
        removed = []
        for _, path in self._checkpoints():
            if n_good >= keep:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            elif self._is_good(path):
                n_good += 1
        return removed

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """(update, folder) of the training states, newest first."""
        folder = self.path / "checkpoints"
        found = [
            (int(m[1]), p) for p in (folder.iterdir() if folder.is_dir() else ()) if (m := _NAME.fullmatch(p.name))
        ]
        return sorted(found, reverse=True)

    def _is_good(self, path: Path) -> bool:
        if path.name not in self._good:
            with contextlib.suppress(RunFolderError):
                _verify_checkpoint(path)
                self._good.add(path.name)
        return path.name in self._good

    def _enter(self, *names: str) -> None:
        """Put files that never change again into the manifest."""
        self._manifest["files"] |= {name: fingerprint(self.path / name) for name in names}
        write_json(self.path / "manifest.json", self._manifest)

    def _retract(self, prefix: str) -> None:
        """Take files that are about to be replaced out of the manifest: a kill in between leaves no contradiction."""
        files = self._manifest["files"]
        if any(name.startswith(prefix) for name in files):
            self._manifest["files"] = {name: f for name, f in files.items() if not name.startswith(prefix)}
            write_json(self.path / "manifest.json", self._manifest)

    def _check(self, name: str) -> None:
        check_file(self.path / name, self._manifest["files"][name])

    def _take_up(self, settings: Settings, recipe: str) -> None:
        """Go on with the run that the folder holds, if it is the one asked for."""
        there_asked = _settings_from(self._manifest["asked"], self.path).model_dump(mode="json")
        asked = settings.model_dump(mode="json")
        if (differing := first_difference(with_leaves(there_asked, asked, FREE), asked)) is not None:
            name, there, here = differing
            raise RunFolderError(
                f"{self.path} holds another run: {name} is {there} there and {here} here; "
                "ask for the same to go on with it, or name another folder with --run"
            )
        for name in self._manifest["files"]:
            self._check(name)
        self.resumed = True
        if asked != there_asked:
            write_text(self.path / "recipe.toml", recipe)
            self._manifest["asked"] = asked  # `config.json` stays: its free settings are read from here
            write_json(self.path / "manifest.json", self._manifest)
        if "config.json" in self._manifest["files"]:
            self.settings = _read_settings(self.path, self._manifest)
        else:  # killed before or while its settings were written
            self.write_settings(settings)
        if not (self.path / "recipe.toml").exists():
            write_text(self.path / "recipe.toml", recipe)


def _make_and_lock(path: Path) -> FolderLock:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / "manifest.json").exists() or (path / ".lock").is_symlink():
            check_folder(path)
        return FolderLock(path)
    except FileExistsError:
        raise RunFolderError(f"{path} is a file; name a folder with --run") from None
    except OSError as error:
        raise RunFolderError(f"cannot make the run folder {path}: {error.strerror or error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path / "manifest.json")
    if (
        not isinstance(manifest, dict)
        or not isinstance(manifest.get("files"), dict)
        or not isinstance(manifest.get("asked"), dict)
        or not all(_is_plain(name) and isinstance(was, dict) for name, was in manifest["files"].items())
    ):
        raise RunFolderError(f"{path / 'manifest.json'} is damaged: it does not describe a run")
    if manifest.get("format") != FORMAT:
        raise RunFolderError(
            f"{path} was made by another version (format {manifest.get('format')}; this one reads {FORMAT})"
        )
    return manifest


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file in its folder, and not a way out of it."""
    return bool(name) and name not in (".", "..") and not {*name} & {"/", "\\", "\0"}


def _read_settings(path: Path, manifest: Mapping[str, Any]) -> Settings:
    if "config.json" not in manifest["files"]:
        raise RunFolderError(f"{path} has no config.json yet: its training has not come that far")
    check_file(path / "config.json", manifest["files"]["config.json"])
    found, asked = (_settings_from(v, path) for v in (read_json(path / "config.json"), manifest["asked"]))
    return _settings_from(with_leaves(found.model_dump(mode="json"), asked.model_dump(mode="json"), FREE), path)


def _settings_from(values: Mapping[str, Any], path: Path) -> Settings:
    try:
        return Settings.from_mapping(values, origin=str(path))
    except SettingsError as error:
        raise RunFolderError(f"{error}; the run was made by another version of transduce") from error


def _verify_checkpoint(path: Path) -> None:
    """Check a training state against its manifest; `RunFolderError` names the damaged file."""
    manifest = read_json(path / "manifest.json")
    try:
        files = dict(manifest["files"])
        expected = {name: dict(files[name]) for name in ("training.safetensors", "state.json")}
    except (KeyError, TypeError, ValueError):
        raise RunFolderError(f"{path / 'manifest.json'} is damaged: it does not describe a checkpoint") from None
    for name, was in expected.items():
        check_file(path / name, was)
