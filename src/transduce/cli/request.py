"""What the command line asks for, as settings: a recipe, files, `--set`; and settings as a recipe again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from transduce.config import DataSettings, Settings, apply_override, read_recipe
from transduce.data.lines import check_is_text
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.runs.atomic import read_json

Sides = tuple[tuple[Path, ...], tuple[Path, ...]]


@dataclass(frozen=True, slots=True)
class Request:
    """A training that was asked for. Files given here take the place of the recipe's and start from where we stand.

    `texts`: plain text to train on, validate on and test with; with them the task is "causal" if no other is named.
    Relative paths in a recipe start from `root` (--data) where given, else from the recipe's `data.root` or folder.
    """

    recipe: Path | None = None
    train: Sides = ((), ())
    valid: Sides = ((), ())
    test: Sides = ((), ())
    paths: tuple[Path, ...] = ()
    texts: tuple[tuple[Path, ...], tuple[Path, ...], tuple[Path, ...]] = ((), (), ())
    root: Path | None = None
    languages: tuple[str | None, str | None] = (None, None)
    start: Path | None = None
    extend: int | None = None
    overrides: tuple[str, ...] = ()
    run: Path | None = None

    def settings(self) -> Settings:
        """All settings, data paths absolute and there. Raises `SettingsError` or `DataError`.

        A run that has read its text already holds what it needs of it: the files may be gone.
        """
        origin = str(self.recipe) if self.recipe else "settings"
        values = read_recipe(self.recipe) if self.recipe else {}
        for override in self.overrides:
            apply_override(values, override)
        data = values.setdefault("data", {})
        if not isinstance(data, dict):
            raise SettingsError(f"{origin}: 'data' must be a section, [data]")
        self._check_overrides()
        for key, sides in (("train", self.train), ("valid", self.valid), ("test", self.test)):
            if corpora := _pair_up(key, sides):
                data[key] = corpora
        if self.paths:
            alone = not any(self.train)
            data["train"] = [
                *([] if alone else data["train"]),
                *({"path": str(path.absolute())} for path in self.paths),
            ]
        for key, files in zip(("train", "valid", "test"), self.texts, strict=True):
            if files:
                values.setdefault("task", self._task())
                data[key] = [{"path": str(path.absolute())} for path in files]
        data |= {key: code for key, code in zip(("src_lang", "tgt_lang"), self.languages, strict=True) if code}
        for section, key, value in (
            ("training", "start", self.start and str(self.start.absolute())),
            ("tokenizer", "extend", self.extend),
            ("data", "root", self.root and str(self.root.absolute())),
        ):
            if value is not None and isinstance(there := values.setdefault(section, {}), dict):
                there[key] = value  # another value there is refused below, with its name
        folder = self.recipe.parent if self.recipe else Path()
        settings = Settings.from_mapping(values, origin=origin).resolve_paths(folder)
        if not settings.data.train and not settings.data.demo:
            raise SettingsError("no training text: give --src and --tgt, or --path, or --text, or a recipe")
        if settings.data.train and settings.data.demo:
            raise SettingsError(
                f"data.demo = {settings.data.demo}: the built-in corpus goes without files; leave one out"
            )
        from transduce.runs.folder import has_read_text  # needs torch

        if not has_read_text(self.run_folder()):
            self._check_files(settings.data)
        return settings

    def _task(self) -> str:
        """What plain text is for where nothing else is said: as the run to begin with says, or the run that goes on."""
        if self.start is None:
            return "causal"
        for path, section in ((self.run_folder() / "manifest.json", "asked"), (self.start / "config.json", None)):
            with contextlib.suppress(RunFolderError):
                known = read_json(path)
                known = known.get(section) if section and isinstance(known, dict) else known
                task = known.get("task") if isinstance(known, dict) else None
                return "masked" if task in ("masked", "classification", "encoding") else "causal"
        return "causal"

    def _check_overrides(self) -> None:
        """Refuse `--set` of text that options name too: one of them would be lost in silence."""
        given = {"train": any((*self.train, self.paths)), "valid": any(self.valid), "test": any(self.test)}
        for key, files in zip(given, self.texts, strict=True):
            for override in self.overrides:
                if (given[key] or files) and override.split("=")[0].strip().split(".")[:2] == ["data", key]:
                    raise SettingsError(f"--set {override}: options name the {key} text already; say all in a recipe")

    def run_folder(self) -> Path:
        """Where the run goes: as given, or `runs/` and the recipe's name."""
        if self.run is not None:
            return self.run
        if self.recipe is None:
            raise SettingsError("no run folder named; add --run runs/NAME")
        return Path("runs") / self.recipe.stem

    def _check_files(self, data: DataSettings) -> None:
        """Refuse a request that names files that are not there."""
        for corpus in (*data.train, *data.valid, *data.test):
            for path in (corpus.src, corpus.tgt, corpus.path):
                if path is not None and not path.exists():
                    hint = "; say where the data lies with --data FOLDER" if self.recipe and not self.root else ""
                    raise DataError(f"there is no file {path}{hint}")
                if path is not None:
                    check_is_text(path)


def _pair_up(key: str, sides: Sides) -> list[dict[str, str]]:
    src, tgt = sides
    if len(src) != len(tgt):
        name = "" if key == "train" else f"{key}-"
        raise SettingsError(
            f"--{name}src is given {len(src)} times and --{name}tgt {len(tgt)} times; both sides go together"
        )
    return [{"src": str(s.absolute()), "tgt": str(t.absolute())} for s, t in zip(src, tgt, strict=True)]
