"""`transduce evaluate`, `compare` and `distill`: commands that score models, or train and compare models."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from transduce.cli import options as opt
from transduce.cli.options import check_output, print_result
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.process import interrupted_by

_FLAGS = {"lowercase": "--lowercase/--cased"}


@dataclass(frozen=True, kw_only=True)
class Evaluate(opt.Command):
    """Compute BLEU, chrF and TER, perplexity, or label accuracy.

    \b
    transduce evaluate runs/x --src test.en --ref test.de
    transduce evaluate runs/x --src test.en --ref test.de --against runs/y
    transduce evaluate runs/x --ensemble runs/y --src test.en --ref test.de
    transduce evaluate runs/y --src v.en --ref v.de --measure-precisions
    transduce evaluate runs/x --src test.tok.en --ref test.tok.de --tokenize none
    transduce evaluate runs/book --text other.txt
    transduce evaluate runs/xl --text other.txt --memory 1000
    transduce evaluate runs/bert --text other.txt
    transduce evaluate runs/sst2 --labels dev.tsv
    """

    run: opt.Run
    src: Annotated[Path | None, opt.file("Source text.")] = None
    ref: Annotated[Path | None, opt.file("Reference translations, aligned line by line.", "--ref", "--tgt")] = None
    hyp: Annotated[Path | None, opt.file("Score these translations instead of RUN's translations.")] = None
    ensemble: opt.Ensemble = None
    against: Annotated[Path | None, opt.file("Compare with another run or its output (paired bootstrap).")] = None
    tokenize: Annotated[
        str | None, opt.option("BLEU tokenizer: 13a, none, zh, char, ... (default: the run's setting).")
    ] = None
    lowercase: Annotated[
        bool | None,
        opt.option("Ignore case in BLEU and chrF (default: the run's setting).", _FLAGS["lowercase"]),
    ] = None
    output: Annotated[Path | None, opt.file("Write the translations to FILE.", "--output", "-o")] = None
    batch_tokens: Annotated[
        int | None, opt.option("Tokens per batch where PyTorch computes (default: the run's setting).", min=1)
    ] = None
    precision: Annotated[
        str | None,
        opt.option(
            "Precision: float32, bfloat16, or on CPUs int8 or float32-fast (for CPUs with AMX) (default: float32)."
        ),
    ] = None
    measure_precisions: Annotated[
        bool | None,
        opt.option(
            "Also compute BLEU and speed of RUN with each precision, with the run's search and scoring settings.",
            "--measure-precisions",
        ),
    ] = None
    src_lang: opt.SrcLang = None
    tgt_lang: opt.TgtLang = None
    text: Annotated[Path | None, opt.file("Plain text, for a language model or a masked language model.")] = None
    stride: Annotated[
        int | None,
        opt.option("New tokens per row; fewer give more context (default: rows do not overlap).", min=1),
    ] = None
    memory: opt.Memory = None
    labels: Annotated[Path | None, opt.file("Labelled text: label<TAB>text lines.")] = None
    beam: opt.Beam = None
    length_penalty: opt.LengthPenalty = None
    max_length: opt.MaxLength = None
    no_repeat_ngram: opt.NoRepeatNgram = None
    split: opt.Split = None
    device: opt.Device = "auto"
    json: opt.Json = False

    def execute(self) -> None:
        from transduce.runs.folder import RunFolder

        check_output(self.output, self.src, self.ref, self.hyp, self.against, self.text, self.labels)
        task = RunFolder.open(self.run).settings.task

        from transduce.tasks.resolve import TASKS

        if task not in TASKS:
            raise SettingsError(f"a run of task '{task}' cannot be evaluated; fine-tune it first")
        scores = TASKS[task].evaluate(self.run, self._options(task, TASKS[task].evaluation), device=self.device)
        print_result(scores, as_json=self.json)

    def _options(self, task: str, options: type[Any]) -> Any:
        """Make the task's options from the command's. Raises `SettingsError` if one is missing or not supported."""
        decoding = self.decoding(without=("batch_tokens",))
        names = {field.name for field in fields(options)}
        required = [field.name for field in fields(options) if field.default is field.default_factory is MISSING]
        others = {"run", "device", "json", *type(decoding).model_fields} - {"batch_tokens"}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}
        given = {name: value for name, value in values.items() if value is not None}
        needed = " and ".join(map(opt.flag_of, required))
        unused = (given.keys() - names) | (set() if "decoding" in names else decoding.model_fields_set)
        if unused:
            flags = ", ".join(_FLAGS.get(name, opt.flag_of(name)) for name in sorted(unused))
            raise SettingsError(f"{flags}: no effect for a run of task '{task}'; evaluate it with {needed}")
        if not given.keys() >= set(required):
            raise SettingsError(f"a run of task '{task}' is evaluated with {needed}")
        return options(**given, **({"decoding": decoding} if "decoding" in names else {}))


@dataclass(frozen=True, kw_only=True)
class Compare(opt.Command):
    """Train recipes under the same conditions and compare the models.

    The first recipe sets text, vocabulary, batches, limits, search and scoring;
    other recipes may leave them out. Prints a table of cost and quality, with the
    mean over seeds and paired significance against the first recipe, and writes
    compare.json. The same command resumes; finished trainings are not repeated,
    and recipes and seeds can be added.

    \b
    transduce compare a.toml b.toml --run runs/compare --minutes 10
    transduce compare a.toml b.toml --run runs/compare --seeds 3
    transduce compare *.toml --run runs/equal --updates 2000
    """

    recipes: Annotated[list[Path], opt.argument("RECIPES...", "Recipes (TOML files); the first is the baseline.")]
    run: Annotated[Path, opt.folder("Folder of the comparison.")]
    seeds: Annotated[int, Option(help="Number of trainings of each recipe, with different seeds.", min=1)] = 1
    minutes: Annotated[
        float | None, Option(help="Minutes of each training (default: the limits of the first recipe).")
    ] = None
    updates: Annotated[
        int | None, Option(help="Updates of each training (default: the limits of the first recipe).")
    ] = None
    data: opt.DataFolder = None
    overrides: opt.Overrides = None
    json: opt.Json = False
    quiet: opt.Quiet = False

    def execute(self) -> None:
        from transduce.comparison.compare import compare

        with interrupted_by("SIGINT", "SIGTERM", "SIGHUP", then="the same command resumes"):
            result = compare(
                self.recipes,
                self.run,
                seeds=self.seeds,
                minutes=self.minutes,
                updates=self.updates,
                data=self.data,
                overrides=self.overrides or (),
                log=Log(quiet=self.quiet),
            )
        print_result(result, as_json=self.json)
        if result.failed:
            raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Distill(opt.Command):
    """Train a small, fast student on the translations of its teachers.

    Translates the first teacher's training text with all teachers, and trains the
    student on the translations, with the first teacher's tokenizer and settings,
    unless overridden. Compares the models on the test sets: BLEU, speed, parameters.
    The same command resumes.

    \b
    transduce distill runs/teacher --run runs/student --preset fast
    transduce distill runs/teacher --run runs/student --rerank --mix 1
    transduce distill runs/seed1 runs/seed2 --run runs/student --mix 1
    """

    teachers: Annotated[list[Path], opt.argument("TEACHERS...", "Run folders of translators; one or several.")]
    run: Annotated[Path, opt.folder("Run folder of the student.")]
    preset: Annotated[
        str | None, opt.option("Sizes of the student, e.g. fast (default: the first teacher's).", metavar="NAME")
    ] = None
    overrides: opt.Overrides = None
    beam: Annotated[int, Option(help="Number of beams of the teachers.", min=1)] = 5
    length_penalty: Annotated[
        float | None,
        opt.option("Length penalty of the teachers; higher gives longer text (default: each teacher's).", min=0.0),
    ] = None
    rerank: Annotated[
        bool, Option("--rerank", help="Train on the beam's translation that is most similar to the reference.")
    ] = False
    mix: Annotated[
        float, Option(help="Passes over the original pairs per pass over the translations (0: none).", min=0.0)
    ] = 0.0
    text: Annotated[
        Path | None,
        opt.folder("Folder for the translations, which students can share (default: RUN.distilled)."),
    ] = None
    json: opt.Json = False
    quiet: opt.Quiet = False

    def execute(self) -> None:
        from transduce.config.recipe import apply_overrides
        from transduce.distillation.distill import distill

        changes: dict[str, Any] = {} if self.preset is None else {"model": {"preset": self.preset}}
        apply_overrides(changes, self.overrides)
        result = distill(
            self.teachers,
            self.run,
            beam=self.beam,
            length_penalty=self.length_penalty,
            rerank=self.rerank,
            mix=self.mix,
            changes=changes,
            text=self.text,
            log=Log(quiet=self.quiet),
        )
        print_result(result, as_json=self.json)
