"""The options that describe a training, and how they become settings."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from transduce.cli.options import Overrides, argument, option
from transduce.errors import DataError, RunFolderError, SettingsError

if TYPE_CHECKING:
    from transduce.config import DataSettings, Settings


def _files(help: str) -> Any:
    return option(metavar="FILE", help=help)


Files = list[Path] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options that `train` and `doctor` share. Files named here replace those of the recipe.

    Paths given here are relative to the working directory. Relative paths in a recipe are relative to `data` if given,
    else to the recipe's `data.root`, else to the folder of the recipe.
    """

    recipe: Annotated[Path | None, argument("RECIPE", "Settings (TOML file).")] = None
    src: Annotated[Files, _files("Source text, one sentence per line; repeatable.")] = None
    tgt: Annotated[Files, _files("Target text, aligned line by line with --src.")] = None
    path: Annotated[Files, _files("Source and target in one file: .tsv, .jsonl or .tmx; repeatable.")] = None
    text: Annotated[Files, _files("Plain text to train a language model on; repeatable.")] = None
    valid_text: Annotated[Files, _files("Plain text for validation (default: a part of --text).")] = None
    test_text: Annotated[Files, _files("Plain text to score after training.")] = None
    valid_src: Annotated[Files, _files("Validation source (default: held out from the training text).")] = None
    valid_tgt: Annotated[Files, _files("Validation target.")] = None
    test_src: Annotated[Files, _files("Test source, scored after training.")] = None
    test_tgt: Annotated[Files, _files("Test references.")] = None
    src_lang: Annotated[str | None, option(help="Source language code, as in the TMX file.")] = None
    tgt_lang: Annotated[str | None, option(help="Target language code.")] = None
    run: Annotated[Path | None, option(metavar="FOLDER", help="Run folder (default: runs/RECIPE).")] = None
    start: Annotated[Path | None, option("--from", metavar="RUN", help="Fine-tune the model of this run.")] = None
    extend_vocabulary: Annotated[
        int | None, option(metavar="N", help="With --from: add up to N pieces to the vocabulary.")
    ] = None
    data: Annotated[
        Path | None, option(metavar="FOLDER", help="Folder that the recipe's data paths are relative to.")
    ] = None
    overrides: Overrides = None

    def settings(self) -> Settings:
        """Return all settings, with absolute data paths.

        Raises `SettingsError` for contradictions and `DataError` for missing files. Data files may be missing if the
        run folder already contains the encoded text.
        """
        from transduce.config import Settings, apply_override, read_recipe

        origin = str(self.recipe) if self.recipe else "settings"
        values = read_recipe(self.recipe) if self.recipe else {}
        for override in self.overrides or ():
            apply_override(values, override)
        data = values.setdefault("data", {})
        if not isinstance(data, dict):
            raise SettingsError(f"{origin}: 'data' must be a section, [data]")
        self._check_overrides()
        data |= self._corpora(data)
        if self.text or self.valid_text or self.test_text:
            values.setdefault("task", self._text_task())
        data |= {key: code for key, code in (("src_lang", self.src_lang), ("tgt_lang", self.tgt_lang)) if code}
        for section, key, value in (
            ("training", "start", self.start and str(self.start.absolute())),
            ("tokenizer", "extend", self.extend_vocabulary),
            ("data", "root", self.data and str(self.data.absolute())),
        ):
            if value is not None and isinstance(content := values.setdefault(section, {}), dict):
                content[key] = value  # a section that is not a mapping is refused below
        settings = Settings.from_mapping(values, origin=origin).resolve_paths(
            self.recipe.parent if self.recipe else Path()
        )
        self._check_data(settings.data)
        return settings

    def run_folder(self) -> Path:
        """Return the run folder: as given, or `runs/` and the recipe's name."""
        if self.run is not None:
            return self.run
        if self.recipe is None:
            raise SettingsError("no run folder given; add --run runs/NAME")
        return Path("runs") / self.recipe.stem

    def _corpora(self, data: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
        """Return the data settings that options replace: `train`, `valid`, `test`."""
        corpora = {
            "train": _pairs("", self.src, self.tgt),
            "valid": _pairs("valid-", self.valid_src, self.valid_tgt),
            "test": _pairs("test-", self.test_src, self.test_tgt),
        }
        corpora["train"] += _paths(self.path)
        texts = {"train": _paths(self.text), "valid": _paths(self.valid_text), "test": _paths(self.test_text)}
        for key in corpora:
            if texts[key] and corpora[key]:
                raise SettingsError(f"the {key} text is given as plain text and as sentence pairs; give one of them")
        return {key: given for key in corpora if (given := texts[key] or corpora[key])}

    def _text_task(self) -> str:
        """Return the task of a training on plain text, unless set: that of the run to resume or to fine-tune."""
        from transduce.runs.atomic import read_json

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
        """Refuse `--set data.train...` if options name training text too: one of them would be ignored."""
        named = {
            "train": self.src or self.tgt or self.path or self.text,
            "valid": self.valid_src or self.valid_tgt or self.valid_text,
            "test": self.test_src or self.test_tgt or self.test_text,
        }
        for override in self.overrides or ():
            section, _, key = override.split("=")[0].strip().partition(".")
            key = key.split(".")[0]
            if section == "data" and named.get(key):
                raise SettingsError(
                    f"--set {override}: the {key} text is given by options already; use a recipe for both"
                )

    def _check_data(self, data: DataSettings) -> None:
        """Refuse a request without training text, or with files that do not exist."""
        from transduce.data.lines import check_is_text
        from transduce.runs.folder import has_read_text

        if not data.train and not data.demo:
            raise SettingsError("no training text: give --src and --tgt, or --path, or --text, or a recipe")
        if data.train and data.demo:
            raise SettingsError(f"data.demo = {data.demo}: the built-in corpus replaces files; leave one of them out")
        if has_read_text(self.run_folder()):
            return
        for corpus in (*data.train, *data.valid, *data.test):
            for path in filter(None, (corpus.src, corpus.tgt, corpus.path)):
                if not path.exists():
                    hint = "; name the folder of the data with --data FOLDER" if self.recipe and not self.data else ""
                    raise DataError(f"there is no file {path}{hint}")
                check_is_text(path)


def expand_request(recipe: Any = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's first parameter, a `Request`, by one option per field.

    `recipe`: another annotation for the argument RECIPE.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def expanded(**given: Any) -> None:
            command(Request(**{field.name: given.pop(field.name) for field in fields(Request)}), **given)

        shared = dict(inspect.signature(Request, eval_str=True).parameters)
        if recipe is not None:
            shared["recipe"] = shared["recipe"].replace(annotation=recipe)
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared.values(), *own)]
        expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return expanded

    return decorate


def _pairs(prefix: str, src: Files, tgt: Files) -> list[dict[str, str]]:
    n_src, n_tgt = len(src or ()), len(tgt or ())
    if n_src != n_tgt:
        raise SettingsError(
            f"the number of --{prefix}src is {n_src} and of --{prefix}tgt {n_tgt}; give both sides of each corpus"
        )
    return [{"src": str(s.absolute()), "tgt": str(t.absolute())} for s, t in zip(src or (), tgt or (), strict=True)]


def _paths(paths: Files) -> list[dict[str, str]]:
    return [{"path": str(path.absolute())} for path in paths or ()]
