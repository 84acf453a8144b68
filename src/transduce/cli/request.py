"""The options that describe a training, and how they become settings."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from transduce.cli.options import Overrides, argument, option
from transduce.errors import DataError, RunFolderError, SettingsError

if TYPE_CHECKING:
    from transduce.config.settings import DataSettings, Settings

FLAGS = (
    ("data.train", "--src and --tgt, --path, or --text"),
    ("data.valid", "--valid-src and --valid-tgt, or --valid-text"),
    ("data.test", "--test-src and --test-tgt, or --test-text"),
    ("data.root", "--data"),
    ("training.start", "--from"),
    ("output_dir", "--output-dir"),
    ("another run folder", "--run FOLDER"),
    ("override", "--set KEY=VALUE"),
    ("tokenizer.extend", "--extend-vocabulary"),
    ("sample = true", "--sample"),
    ("n_best", "--nbest"),
    ("n_best", "--n-best"),
    ("n_best", "--samples"),
    ("cut_prompt", "--cut-prompt"),
    ("new_key", "transduce serve --new-api-key NAME"),
)
"""Names of settings and parameters in the library's errors, and their options."""
_FLAG = re.compile(r"--[\w-]+")


def with_flags(message: str, options: Collection[str]) -> str:
    """An error message and those `options`, of the command, that stand for the settings that it names."""
    named = [
        f"{name}: {flags}"
        for name, flags in FLAGS
        if re.search(rf"\b{re.escape(name)}\b(?!\.)", message) and all(f in options for f in _FLAG.findall(flags))
    ]
    return f"{message} ({'; '.join(named)})" if named else message


_files = functools.partial(option, metavar="FILE")
Files = list[Path] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options that `train`, `prepare` and `doctor` share. Files named here replace those of the recipe.

    Paths given here are relative to the working directory. Relative paths in a recipe are relative to `data` if given,
    else to the recipe's `data.root`, else to the folder of the recipe.
    """

    recipe: Annotated[Path | None, argument("RECIPE", "Settings (TOML file).")] = None
    src: Annotated[Files, _files(help="Source text, one sentence per line; repeatable.")] = None
    tgt: Annotated[Files, _files(help="Target text, aligned line by line with --src.")] = None
    path: Annotated[Files, _files(help="Source and target in one file, such as .tsv or .tmx; repeatable.")] = None
    text: Annotated[Files, _files(help="Plain text to train a language model on; repeatable.")] = None
    valid_text: Annotated[Files, _files(help="Plain text for validation (default: a part of --text).")] = None
    test_text: Annotated[Files, _files(help="Plain text to score after training.")] = None
    valid_src: Annotated[Files, _files(help="Validation source (default: held out from the training text).")] = None
    valid_tgt: Annotated[Files, _files(help="Validation target.")] = None
    test_src: Annotated[Files, _files(help="Test source, scored after training.")] = None
    test_tgt: Annotated[Files, _files(help="Test references.")] = None
    src_lang: Annotated[
        str | None, option(help="Source language code: the side of a TMX file, a TSV column or a JSON key.")
    ] = None
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
        """All settings, with absolute data paths.

        Raises `SettingsError` for contradictions and `DataError` for missing files. Data files may be missing if the
        run folder already contains the encoded text.
        """
        from transduce.config.recipe import apply_overrides, read_recipe
        from transduce.config.settings import Settings

        origin = str(self.recipe) if self.recipe else "settings"
        values = read_recipe(self.recipe) if self.recipe else {}
        options: dict[str, dict[str, Any]] = {
            "data": {
                **self._corpora(),
                "src_lang": self.src_lang,
                "tgt_lang": self.tgt_lang,
                "root": self.data and str(self.data.absolute()),
            },
            "training": {"start": self.start and str(self.start.absolute())},
            "tokenizer": {"extend": self.extend_vocabulary},
        }
        for section, given in options.items():
            if isinstance(content := values.setdefault(section, {}), dict):  # else `from_mapping` refuses it
                content |= {key: value for key, value in given.items() if value is not None}
        apply_overrides(values, self.overrides)
        if self.text or self.valid_text or self.test_text:
            values.setdefault("task", self._text_task())
        folder = self.recipe.parent if self.recipe else Path()
        settings = Settings.from_mapping(values, origin=origin).resolve_paths(folder)
        self._check_data(settings.data)
        return settings

    def run_folder(self) -> Path:
        """The run folder: as given, or `runs/` and the recipe's name."""
        if self.run is not None:
            return self.run
        if self.recipe is None:
            raise SettingsError("no run folder given; add --run runs/NAME")
        return Path("runs") / self.recipe.stem

    def _corpora(self) -> dict[str, list[dict[str, str]]]:
        """The data sets that options name: `train`, `valid`, `test`."""
        corpora = {}
        for name, prefix in (("train", ""), ("valid", "valid_"), ("test", "test_")):
            src, tgt, text = (getattr(self, prefix + side) or () for side in ("src", "tgt", "text"))
            files = (self.path if name == "train" else None) or ()
            option = f"--{prefix.replace('_', '-')}"
            if len(src) != len(tgt):
                raise SettingsError(
                    f"the number of {option}src is {len(src)} and of {option}tgt {len(tgt)}; give both sides of each "
                    "corpus"
                )
            if text and (src or files):
                raise SettingsError(f"the {name} text is given as plain text and as sentence pairs; give one of them")
            pairs = [{"src": _absolute(s), "tgt": _absolute(t)} for s, t in zip(src, tgt, strict=True)]
            if found := pairs + [{"path": _absolute(file)} for file in (*text, *files)]:
                corpora[name] = found
        return corpora

    def _text_task(self) -> str:
        """The task of a training on plain text, unless set: that of the run to resume or to fine-tune."""
        from transduce.runs.atomic import read_json

        if self.start is None:
            return "causal"
        for path, section in ((self.run_folder() / "manifest.json", "asked"), (self.start / "config.json", None)):
            with contextlib.suppress(RunFolderError, AttributeError):  # missing or damaged: reported later
                known = read_json(path)
                task = (known.get(section) if section else known).get("task")
                return "masked" if task in ("masked", "classification", "encoding") else "causal"
        return "causal"

    def _check_data(self, data: DataSettings) -> None:
        """Refuse a request without training text, or with files that do not exist."""
        from transduce.data.arrow import is_dataset
        from transduce.data.lines import check_is_text, is_missing
        from transduce.runs.folder import has_read_text

        if not data.train and not data.demo:
            raise SettingsError("no training text: give --src and --tgt, or --path, or --text, or a recipe")
        if data.train and data.demo:
            raise SettingsError(f"data.demo = {data.demo}: the built-in corpus replaces files; leave one of them out")
        if has_read_text(self.run_folder()):
            return
        for corpus in (*data.train, *data.valid, *data.test):
            for path in filter(None, (corpus.src, corpus.tgt, corpus.path)):
                if is_missing(path):
                    hint = "; name the folder of the data with --data FOLDER" if self.recipe and not self.data else ""
                    raise DataError(f"there is no file {path}{hint}")
                if not is_dataset(path):
                    check_is_text(path)


def _absolute(path: Path) -> str:
    from transduce.config.settings import is_remote

    return str(path if is_remote(path) else path.absolute())
