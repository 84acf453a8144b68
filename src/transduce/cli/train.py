"""`transduce train`, `prepare` and `doctor`, which share their options, and `demo`, `report` and `verify`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from transduce.cli import options as opt
from transduce.cli.options import print_lines, print_result
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.logging import Log
from transduce.process import exit_on_signals
from transduce.runs.atomic import read_json

if TYPE_CHECKING:
    from transduce.config.settings import DataSettings, Settings
    from transduce.tasks.continuation import More

Files = list[Path] | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that `train`, `prepare` and `doctor` share. Files in options replace the recipe's files.

    Paths in options are relative to the working directory. Paths in a recipe are relative to `data` if given, else to
    the recipe's `data.root`, else to the folder of the recipe.
    """

    recipe: Annotated[
        Path | None, opt.argument("RECIPE", "Settings (TOML file), or the folder of a run to resume.")
    ] = None
    src: Annotated[Files, opt.file("Source text, one sentence per line; repeatable.")] = None
    tgt: Annotated[Files, opt.file("Target text, aligned line by line with --src.")] = None
    path: Annotated[Files, opt.file("Source and target in one file, such as .tsv or .tmx; repeatable.")] = None
    text: Annotated[Files, opt.file("Plain text to train a language model on; repeatable.")] = None
    valid_text: Annotated[Files, opt.file("Plain text for validation (default: a part of --text).")] = None
    test_text: Annotated[Files, opt.file("Plain text to score after training.")] = None
    valid_src: Annotated[Files, opt.file("Validation source (default: held out from the training text).")] = None
    valid_tgt: Annotated[Files, opt.file("Validation target.")] = None
    test_src: Annotated[Files, opt.file("Test source, scored after training.")] = None
    test_tgt: Annotated[Files, opt.file("Test references.")] = None
    src_lang: Annotated[
        str | None,
        opt.option(
            "Source language code. It selects the side of a TMX file (default: by its header, if it has two "
            "languages), a TSV column or a JSON key."
        ),
    ] = None
    tgt_lang: Annotated[str | None, opt.option("Target language code.")] = None
    run: Annotated[Path | None, opt.folder("Run folder (default: runs/RECIPE).")] = None
    start: Annotated[
        Path | None, opt.option("Fine-tune the model of this run.", "--from", metavar="RUN", parser=opt.find_run)
    ] = None
    extend_vocabulary: Annotated[
        int | None, opt.option("With --from: add up to N pieces to the vocabulary.", metavar="N")
    ] = None
    data: opt.DataFolder = None
    overrides: opt.Overrides = None

    def settings(self) -> Settings:
        """Return all settings, with absolute data paths.

        Raises `SettingsError` for contradictions and `DataError` for missing files. Data files may be missing if the
        run folder already contains the encoded text.
        """
        from transduce.config.recipe import apply_overrides, read_recipe
        from transduce.config.settings import Settings

        recipe = self._recipe_file()
        origin = str(recipe) if recipe else "settings"
        values = read_recipe(recipe) if recipe else {}
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
        folder = recipe.parent if recipe else Path()
        settings = Settings.from_mapping(values, origin=origin).resolve_paths(folder)
        self._check_data(settings.data)
        return settings

    def run_folder(self) -> Path:
        """Return the run folder: `run` if given, or else `runs/` with the recipe's name."""
        if self.run is not None:
            return self.run
        if self.recipe is None:
            raise SettingsError("no run folder given; add --run runs/NAME")
        return self.recipe if self._names_run() else Path("runs") / self.recipe.stem

    def _names_run(self) -> bool:
        """Whether the argument RECIPE is a run folder instead of a recipe."""
        return self.recipe is not None and (self.recipe / "manifest.json").exists()

    def _recipe_file(self) -> Path | None:
        return self.recipe / "recipe.toml" if self.recipe is not None and self._names_run() else self.recipe

    def _corpora(self) -> dict[str, list[dict[str, str]]]:
        """Return the corpora in the options, by the keys `train`, `valid` and `test`, in the form of recipes."""
        corpora = {}
        for name, prefix in (("train", ""), ("valid", "valid_"), ("test", "test_")):
            src, tgt, text = (getattr(self, prefix + side) or () for side in ("src", "tgt", "text"))
            files = (self.path if name == "train" else None) or ()
            flag = f"--{prefix.replace('_', '-')}"
            if len(src) != len(tgt):
                raise SettingsError(
                    f"the number of {flag}src is {len(src)} and of {flag}tgt {len(tgt)}; give both sides of each corpus"
                )
            if text and (src or files):
                raise SettingsError(f"the {name} text is given as plain text and as sentence pairs; give one of them")
            pairs = [{"src": _absolute(s), "tgt": _absolute(t)} for s, t in zip(src, tgt, strict=True)]
            if corpus := pairs + [{"path": _absolute(file)} for file in (*text, *files)]:
                corpora[name] = corpus
        return corpora

    def _text_task(self) -> str:
        """Return the default task for plain text: the task of the run to resume or to fine-tune, or else causal."""
        if self.start is None:
            return "causal"
        for path, section in ((self.run_folder() / "manifest.json", "asked"), (self.start / "config.json", None)):
            with contextlib.suppress(RunFolderError, AttributeError):  # missing or damaged: reported later
                content = read_json(path)
                task = (content.get(section) if section else content).get("task")
                return "masked" if task in ("masked", "classification", "encoding") else "causal"
        return "causal"

    def _check_data(self, data: DataSettings) -> None:
        """Raise an error if there is no training text, or a file does not exist."""
        from transduce.data.lines import check_is_file, is_missing
        from transduce.runs.folder import has_read_text

        if not data.train and not data.demo:
            if self._names_run():
                raise SettingsError(
                    f"{self.recipe} was imported, not trained; train --from {self.recipe} trains it on your text",
                    "training.start",
                )
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
                check_is_file(path)


def _absolute(path: Path) -> str:
    from transduce.config.settings import is_remote

    return str(path if is_remote(path) else path.absolute())


@dataclass(frozen=True, kw_only=True)
class Train(Request, opt.Command):
    """Train a translator, a language model or a classifier.

    Unset settings are derived from the data and the machine, and printed with the reason. The same command, or train
    with the run folder alone, resumes an interrupted run; --more-updates continues a finished one. Text files may be
    compressed (.gz, .xz, .zst). Masked models and classifiers need a recipe.

    \b
    transduce train --src train.en --tgt train.de --run runs/x
    transduce train --path memory.tmx --src-lang en --tgt-lang de --run runs/tm
    transduce train recipe.toml --data texts --set training.lr=0.003
    transduce train --text book.txt --run runs/book
    transduce train --from runs/x --src new.en --tgt new.de --run runs/y
    transduce train --src a.en --tgt a.de --run runs/x --processes 2
    transduce train runs/x --more-updates 1000 --set training.lr=0.0005
    """

    more_updates: Annotated[
        int | None, opt.option("Continue a finished training by N updates.", metavar="N", min=1)
    ] = None
    more_epochs: Annotated[
        float | None, opt.option("Continue a finished training by N epochs.", metavar="N", min=0)
    ] = None
    more_minutes: Annotated[
        float | None, opt.option("Continue a finished training by N minutes.", metavar="N", min=0)
    ] = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="Read the data, print the settings that training would use, and stop.")
    ] = False
    processes: opt.Processes = 1
    max_restarts: opt.MaxRestarts = 0
    quiet: opt.Quiet = False

    def execute(self) -> None:
        from transduce.distributed import launch

        launch.stop_with_launcher()
        if launch.this_process().rank > 0:
            from transduce.pipeline import run_worker

            sys.exit(run_worker())
        settings, folder = self.settings(), self.run_folder()
        more = self._more(settings)
        if not self.dry_run:
            launch.launch_if_asked(self.processes, max_restarts=self.max_restarts)

        from transduce.pipeline import train as run_train

        run_train(settings, folder, more=more, log=Log(quiet=self.quiet), dry_run=self.dry_run)

    def _more(self, settings: Settings) -> More | None:
        """Return the options for continuing a finished training, or None if none is given."""
        if self.more_updates is self.more_epochs is self.more_minutes is None:
            return None
        from transduce.tasks.continuation import More

        names = [override.partition("=")[0].strip() for override in self.overrides or ()]
        lr = settings.training.lr if "training.lr" in names else None
        return More(updates=self.more_updates, epochs=self.more_epochs, minutes=self.more_minutes, lr=lr)


@dataclass(frozen=True, kw_only=True)
class Prepare(Request, opt.Command):
    """Read, clean and encode the text of a training. The command train with the same options continues from there.

    A killed command resumes. Sentence pairs are cleaned and encoded by a process per core (data.workers).

    \b
    transduce prepare --src train.en --tgt train.de --run runs/x
    transduce prepare recipe.toml --run runs/x --set data.workers=4
    """

    quiet: opt.Quiet = False

    def execute(self) -> None:
        settings, folder = self.settings(), self.run_folder()

        from transduce.pipeline import prepare as run_prepare

        log = Log(quiet=self.quiet)
        with exit_on_signals():
            run_prepare(settings, folder, log=log)
        log.say(f"prepared: {folder / 'tokens'}; transduce train with the same options trains")


@dataclass(frozen=True, kw_only=True)
class Doctor(Request, opt.Command):
    """Check text, memory and time before training. Takes the options of train.

    Reads the text, runs a few updates in a separate process and keeps nothing. Prints "ready", or prints one line per
    obstacle and exits with code 2. Warnings do not change the exit code.

    \b
    transduce doctor --src train.en --tgt train.de
    transduce doctor recipe.toml --data texts --set model.preset=base
    transduce doctor --text book.txt --json
    transduce doctor --src train.en --tgt train.de --processes 2
    """

    processes: opt.Processes = 1
    json: Annotated[bool, Option("--json", help="Print all findings and measurements as one JSON object.")] = False
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only the result.")] = False

    def execute(self) -> None:
        if self.recipe is not None and self.recipe.is_dir():
            raise SettingsError(f"{self.recipe} is a folder; doctor checks a training before it starts: name a recipe")
        has_name = self.run is not None or self.recipe is not None
        settings = (self if has_name else replace(self, run=Path("runs") / "new")).settings()

        from transduce.doctor.diagnose import diagnose

        with exit_on_signals():
            diagnosis = diagnose(settings, log=Log(quiet=self.quiet or self.json), processes=self.processes)
        print_result(diagnosis, as_json=self.json)
        if not diagnosis.ready:
            raise typer.Exit(2)


def report(run: opt.Run) -> None:
    """Write report.html of a run from its measurements so far. Training may still be running.

    Also writes the model card (README.md) of a finished training if it is missing.

    \b
    transduce report runs/mine
    """
    from transduce.pipeline import rebuild_report

    print_lines([str(rebuild_report(run))])


def verify(run: opt.Run) -> None:
    """Check every file of a run against its checksum. Exit code 1: a file is damaged or missing.

    \b
    transduce verify runs/mine
    """
    from transduce.runs.manifest import summarize, verify_files

    files = verify_files(run)
    print_lines([*(file.line() for file in files), summarize(files)])
    if any(file.is_error for file in files):
        raise typer.Exit(1)


# Settings that translate about 98 % of held-out sentences exactly after 2,000 updates, in float32 and in bfloat16.
# Settings that are otherwise chosen by speed or free memory are fixed, so that models differ by rounding only.
DEMO: dict[str, dict[str, Any]] = {
    "data": {"demo": 60_000, "src_lang": "en", "tgt_lang": "de"},
    "tokenizer": {"kind": "unigram", "vocab_size": 2000},
    "model": {"preset": "tiny", "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0, "residual": "pre"},
    "training": {
        "batch_tokens": 2048,
        "micro_batch_tokens": 2048,
        "optimizer": "muon",
        "schedule": "cosine",
        "warmup_updates": 50,
        "valid_updates": 200,
        "valid_bleu_sentences": 100,
        "stop_by": "loss",  # BLEU of 100 sentences is near 100 early and noisy after that
    },
    "decoding": {"beam": 2, "max_length": 64},
}
N_SHOWN = 8
SHOWN = "When will the old doctor call his friend?"
TITLES = {"test": "Held-out sentences", "held_out_combinations": "Combinations never seen in training"}


def demo(
    updates: Annotated[int, Option(help="Number of training updates.", min=1)] = 2000,
    run: Annotated[Path, Option("--run", metavar="FOLDER", help="Run folder.")] = Path("runs/demo"),
    overrides: opt.Overrides = None,
    quiet: opt.Quiet = False,
) -> None:
    """Train on a built-in corpus, and show translations and attention.

    Takes a few minutes. The number of updates is fixed, so a slower machine takes longer and gets the same model.

    \b
    transduce demo
    transduce demo --updates 8000 --run runs/longer
    """
    from transduce.config.architectures import MODEL_SETTINGS, kinds_for
    from transduce.config.recipe import apply_overrides
    from transduce.config.settings import Settings
    from transduce.pipeline import train

    values: dict[str, Any] = {section: dict(content) for section, content in DEMO.items()}
    asked: dict[str, Any] = {}
    apply_overrides(asked, overrides)
    given = Settings.from_mapping(asked)
    kind, kinds = given.model.kind, kinds_for("translation")
    if given.task != "translation" or kind not in kinds:
        wanted = f"task = '{given.task}', model.kind = '{kind}'"
        raise SettingsError(f"{wanted}: the demo trains a translator; allowed kinds: {', '.join(kinds)}")
    if kind != "transformer":  # the transformer's model is set above
        values["model"] = {"preset": next(iter(MODEL_SETTINGS[kind].presets)), "dropout": 0.0}
    values["name"] = "demonstration"
    values["training"]["max_updates"] = updates
    apply_overrides(values, overrides)
    folder = train(Settings.from_mapping(values), run, log=Log(quiet=quiet))
    print_lines(_results(folder), colours=True)


def _results(folder: Path) -> Iterator[str]:
    """Yield lines that show translations next to their references, scores, and attention weights."""
    from transduce.decoding.translator import Translator
    from transduce.evaluation.run_record import read_record
    from transduce.inspection.inspection import inspect
    from transduce.inspection.pictures import show_attention
    from transduce.runs.folder import RunFolder

    record = read_record(RunFolder.open(folder))
    for sample_set in record.samples:
        yield f"\n{TITLES.get(sample_set['name'], sample_set['name'])}, the first {N_SHOWN}:\n"
        for sample in sample_set["samples"][:N_SHOWN]:
            right = sample["hyp"] == sample["ref"]
            yield f"  {sample['src']}\n    {'=' if right else '≠'} {sample['hyp']}"
            if not right:
                yield f"      {sample['ref']}  (reference)"
    yield "\nScores:\n"
    for scored in record.scores:
        yield f"  {TITLES.get(scored.name, scored.name)}"
        yield from (f"    {line}" for line in scored.scores.lines())
    inspection = inspect(Translator.load(folder), SHOWN)
    if inspection.recorded["attention"]:  # not every architecture has it
        yield "\nCross-attention (rows: target; columns: source):\n"
        yield show_attention(inspection)
    yield f"\nRun folder (the model): {folder}\nReport for a browser: {folder / 'report.html'}"
    yield f'Try: echo "{SHOWN}" | transduce translate {folder}'
