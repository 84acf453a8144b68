"""The run folder: the model, the whole model, and the training states to go on from.

    manifest.json        what was asked for, and sha256 and size of the files that never change and of the records
    recipe.toml          the recipe as it was given
    config.json          all settings, resolved
    tokenizer*.model     vocabulary
    model.safetensors    what translate uses; it carries its own checksum
    metrics.jsonl, data.json, scores.json, samples.json, attention.json    records: what the run tells of itself
    report.html, README.md   made from the records; the card may be edited
    bad_loss.json        where a loss was not finite or exploded: the sentences that it came from
    tokens/              while training: the encoded text, with a manifest
    averaging/           while training: weights to be averaged, each file with its own checksum
    checkpoints/u00001234/  training.safetensors, state.json, manifest.json
    .lock                while training

Everything is written aside, synced and renamed. Translation needs nothing outside the folder: moving or copying it
moves the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

import transduce
from transduce.config import Settings
from transduce.errors import RunFolderError, SettingsError
from transduce.runs.atomic import read_json, refuse_outside_links, remove_leftovers, write_json, write_text
from transduce.runs.checkpoints import Checkpoint, Checkpoints
from transduce.runs.format_version import FORMAT, check_format, upgraded
from transduce.runs.lock import FolderLock
from transduce.runs.manifest import check_file, fingerprint, first_difference, with_leaves
from transduce.runs.tensors import load_metadata, load_tensors, save_tensors

CHANGEABLE = (
    *("name", "data.root", "training.keep_checkpoints", "training.save_updates"),
    *("training.on_bad_loss", "training.max_rollbacks", "training.explosion"),
)
"""Settings that change nothing that is computed: asking for others goes on with the same run, with the new ones."""


@runtime_checkable
class Saves(Protocol):
    """Saves itself into a folder."""

    def save(self, folder: Path) -> None:
        """Write the files."""
        ...


@dataclass(eq=False)
class RunFolder:
    """A run folder on the disk. `create` to train in it (holds its lock until `close`), `open` to use its model."""

    path: Path
    settings: Settings
    resumed: bool = False
    _manifest: dict[str, Any] = field(default_factory=dict, repr=False)
    _lock: FolderLock | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.path / "checkpoints")

    @classmethod
    def create(cls, path: Path, settings: Settings, recipe: str) -> RunFolder:
        """Make the folder of a new run, or take up the same run again, and lock it against other training processes.

        `settings` as asked for, `None`s and all; `recipe` is the text kept as recipe.toml. When the folder already
        holds this run, `.resumed` is true and `.settings` are the resolved ones of then. What may differ in the same
        run are the settings in `CHANGEABLE`, whose new values apply from now on: names, what is kept and how often, and
        what is done about bad losses. Not `training.micro_batch_tokens` nor `training.device`: another order
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
                "records": {},
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
        manifest = cls.manifest_of(path)
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

    @staticmethod
    def manifest_of(path: Path) -> dict[str, Any]:
        """The manifest of a run folder; a `RunFolderError` where there is none to read."""
        if not path.is_dir():
            raise RunFolderError(f"there is no run folder {path}")
        if not (path / "manifest.json").exists():
            raise RunFolderError(f"{path} is no run folder: manifest.json is missing")
        refuse_outside_links(path)
        return _read_manifest(path)

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

    def check_files(self, prefix: str) -> None:
        """Validate the files of the model whose names begin with `prefix` against their checksums."""
        for name in self._manifest["files"]:
            if name.startswith(prefix):
                self._check(name)

    def save_tokenizers(self, tokenizers: Saves) -> None:
        """Store the vocabulary of both sides."""
        self._retract("tokenizer")
        tokenizers.save(self.path)
        self._enter(*sorted(p.name for p in self.path.glob("tokenizer*")))

    def write_settings(self, settings: Settings) -> None:
        """Store the settings once nothing in them is left to choose."""
        self.settings = settings
        self._manifest["config_format"] = FORMAT
        self._retract("config.json")
        write_json(self.path / "config.json", settings.model_dump(mode="json"))
        self._enter("config.json")

    def write_record(self, name: str, value: Any) -> None:
        """Store what the run tells of itself, as JSON, with its checksum. Only for who trains in the folder."""
        records = self._manifest.setdefault("records", {})
        if records.pop(name, None) is not None:  # a kill between two files leaves no contradiction
            write_json(self.path / "manifest.json", self._manifest)
        write_json(self.path / name, value)
        self.enter_record(name)

    def enter_record(self, name: str) -> None:
        """Put the checksum of a file that tells of the run into the manifest, as the file is now."""
        self._manifest.setdefault("records", {})[name] = fingerprint(self.path / name)
        write_json(self.path / "manifest.json", self._manifest)

    def read_record(self, name: str) -> Any:
        """What `write_record` stored, checked; nothing where it is not there. Raises `RunFolderError`."""
        if name in self.records:
            check_file(self.path / name, self.records[name])
        path = self.path / name
        return read_json(path) if path.exists() else {}

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """Checksum and size of every file that the model needs and that never changes, by name."""
        return self._manifest["files"]

    @property
    def records(self) -> Mapping[str, Mapping[str, Any]]:
        """Checksum and size of the files that tell of the run, by name; none in a folder of an early version."""
        return self._manifest.get("records", {})

    def save_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights that translation uses."""
        save_tensors(self.path / "model.safetensors", tensors, {"transduce": transduce.__version__})

    def load_model(self) -> dict[str, torch.Tensor]:
        """The weights that translation uses, every byte of the file checked."""
        return load_tensors(self.path / "model.safetensors")

    def save_checkpoint(self, update: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
        """Store a training state as checkpoints/uNNNNNNNN: all of it or, when this fails or is killed, nothing."""
        return self.checkpoints.save(update, tensors, state)

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest training state that is whole (`Checkpoints.latest`)."""
        return self.checkpoints.latest()

    def prune(self, keep: int, *, spare: Collection[int] = ()) -> list[Path]:
        """Remove old training states (`Checkpoints.prune`)."""
        return self.checkpoints.prune(keep, spare=spare)

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
        if (differing := first_difference(with_leaves(there_asked, asked, CHANGEABLE), asked)) is not None:
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
            refuse_outside_links(path)
        return FolderLock(path)
    except FileExistsError:
        raise RunFolderError(f"{path} is a file; name a folder with --run") from None
    except OSError as error:
        what = "write in" if path.is_dir() else "make"
        raise RunFolderError(f"cannot {what} the run folder {path}: {error.strerror or error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path / "manifest.json")
    if (
        not isinstance(manifest, dict)
        or not isinstance(manifest.get("files"), dict)
        or not isinstance(manifest.get("asked"), dict)
        or not isinstance(manifest.get("records", {}), dict)
        or not all(
            _is_plain(name) and isinstance(was, dict)
            for part in (manifest["files"], manifest.get("records", {}))
            for name, was in part.items()
        )
    ):
        raise RunFolderError(f"{path / 'manifest.json'} is damaged: it does not describe a run")
    found = check_format(manifest.get("format"), path)
    # Written again, it is of today's format in one rename; config.json stays as it is, and remembers of which it is.
    today = {"format": FORMAT, "config_format": check_format(manifest.get("config_format", found), path)}
    return {**manifest, **today, "asked": upgraded(manifest["asked"], found)}


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file in its folder, and not a way out of it."""
    return bool(name) and name not in (".", "..") and not {*name} & {"/", "\\", "\0"}


def _read_settings(path: Path, manifest: Mapping[str, Any]) -> Settings:
    if "config.json" not in manifest["files"]:
        raise RunFolderError(f"{path} has no config.json yet: its training has not come that far")
    check_file(path / "config.json", manifest["files"]["config.json"])
    values = upgraded(read_json(path / "config.json"), manifest["config_format"])
    found, asked = (_settings_from(v, path) for v in (values, manifest["asked"]))
    return _settings_from(with_leaves(found.model_dump(mode="json"), asked.model_dump(mode="json"), CHANGEABLE), path)


def _settings_from(values: Mapping[str, Any], path: Path) -> Settings:
    try:
        return Settings.from_mapping(values, origin=str(path))
    except SettingsError as error:
        raise RunFolderError(f"{error}; the run was made by another version of transduce") from error


def has_read_text(run: Path) -> bool:
    """Whether a run has come as far as to hold its text in its folder (or is finished, and needs none)."""
    return (run / "data.json").exists()  # what preparing writes last
