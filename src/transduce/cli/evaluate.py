"""`transduce evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, cast

from transduce.cli import options as opt
from transduce.cli.output import check_output, print_lines, to_json
from transduce.errors import SettingsError

_SEARCH = frozenset({"--beam", "--max-length", "--length-penalty", "--batch-tokens", "--precision"})
"""Options without effect if the translations are given."""
_INPUTS = {"--src": "--src and --ref", "--text": "--text", "--labels": "--labels"}
_NAMES = {"lowercase": "--lowercase or --cased"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """The options of `transduce evaluate` that apply to some tasks, the run, and the device."""

    run: opt.Run
    src: Annotated[Path | None, opt.option(metavar="FILE", help="Source text.")] = None
    ref: Annotated[Path | None, opt.option(metavar="FILE", help="Reference translations, aligned line by line.")] = None
    text: Annotated[Path | None, opt.option(metavar="FILE", help="Plain text, for a language model.")] = None
    labels: Annotated[Path | None, opt.option(metavar="FILE", help="Labelled text: label<TAB>text lines.")] = None
    stride: Annotated[
        int | None,
        opt.option(
            help="With --text: new tokens per row; fewer give more context (default: rows do not overlap).", min=1
        ),
    ] = None
    memory: opt.Memory = None
    hyp: Annotated[
        Path | None, opt.option(metavar="FILE", help="Score these translations instead of those of RUN.")
    ] = None
    against: Annotated[
        Path | None, opt.option(metavar="RUN|FILE", help="Compare with another run or its output (paired bootstrap).")
    ] = None
    tokenize: opt.Tokenize = None
    lowercase: opt.Lowercase = None
    output: opt.Output = None
    beam: opt.Beam = None
    max_length: opt.MaxLength = None
    length_penalty: opt.LengthPenalty = None
    batch_tokens: opt.BatchTokens = None
    precision: Annotated[str | None, opt.option(help=f"{opt.PRECISIONS} (default: float32).")] = None
    measure_precisions: Annotated[
        bool | None,
        opt.option(
            "--measure-precisions",
            help="Also compute BLEU and speed of RUN on these files with each precision.",
        ),
    ] = None
    device: opt.Device = "auto"

    def given(self) -> set[str]:
        """The names of the options that are set."""
        names = [f.name for f in fields(self) if f.name not in ("run", "device") and getattr(self, f.name) is not None]
        return {_NAMES.get(name, f"--{name.replace('_', '-')}") for name in names}


@opt.expand(EvaluationOptions)
def evaluate(options: EvaluationOptions, json: opt.Json = False) -> None:
    """Compute BLEU, chrF and TER, perplexity, or label accuracy.

    \b
    transduce evaluate runs/x --src test.en --ref test.de
    transduce evaluate runs/x --src test.en --ref test.de --against runs/y
    transduce evaluate runs/y --src v.en --ref v.de --measure-precisions
    transduce evaluate runs/x --src test.tok.en --ref test.tok.de --tokenize none
    transduce evaluate runs/book --text other.txt
    transduce evaluate runs/xl --text other.txt --memory 1000
    transduce evaluate runs/bert --text other.txt
    transduce evaluate runs/sst2 --labels dev.tsv
    """
    task = _check_options(options)
    check_output(options.output, options.src, options.ref, options.hyp, options.against)
    if options.labels is not None:
        from transduce.decoding.classifier import TextClassifier
        from transduce.evaluation.evaluate import evaluate_labels

        scores: Any = evaluate_labels(TextClassifier.load(options.run, device=options.device), options.labels)
    elif options.text is not None:
        scores = _text_scores(options, options.text, task)
    else:
        scores = _translation_scores(options)
    print_lines([to_json(scores.to_json())] if json else scores.lines())


def _translation_scores(options: EvaluationOptions) -> Any:
    from transduce.decoding.options import TranslationOptions
    from transduce.decoding.translator import Translator
    from transduce.evaluation.evaluate import evaluate_translations

    assert options.src is not None and options.ref is not None  # see _check_options
    decoding = TranslationOptions(
        beam=options.beam,
        max_length=options.max_length,
        length_penalty=options.length_penalty,
        batch_tokens=options.batch_tokens,
    )

    used: list[str] = []

    def translate(system: Path, sources: Sequence[str]) -> list[str]:
        precision = cast(Any, options.precision or "float32")  # `load` checks it
        translator = Translator.load(system, device=options.device, precision=precision)
        used.append(translator.choice.precision)
        return [found.text for found in translator.translate(sources, decoding)]

    found = evaluate_translations(
        options.run,
        (options.src, options.ref),
        translate=translate,
        hypotheses=options.hyp,
        against=options.against,
        tokenize=options.tokenize,
        lowercase=options.lowercase,
        output=options.output,
        with_precisions=bool(options.measure_precisions),
    )
    return replace(found, precision=" and ".join(dict.fromkeys(used)))


def _text_scores(options: EvaluationOptions, text: Path, task: str) -> Any:
    """Perplexity of a language model, or accuracy of a masked one, on a text file (`-`: stdin)."""
    if task == "masked":
        from transduce.decoding.mask_filler import MaskFiller
        from transduce.tasks.masked_scoring import score_text

        return score_text(MaskFiller.load(options.run, device=options.device), text, batch_tokens=options.batch_tokens)
    from transduce.data.encoding import encode_text
    from transduce.data.text import read_pieces
    from transduce.decoding.generator import Generator

    generator = Generator.load(options.run, device=options.device, memory=options.memory)
    pieces = read_pieces(text, generator.settings.data.documents)
    store = encode_text(None, pieces, generator.tokenizer, name=str(text))
    return generator.evaluate(store, stride=options.stride, batch_tokens=options.batch_tokens)


def _check_options(options: EvaluationOptions) -> str:
    """Return the task of the run. Refuse missing inputs, inputs of another task, and options without effect."""
    from transduce.runs.folder import RunFolder
    from transduce.tasks.registry import TASK_INFOS

    given, against = options.given(), options.against
    inputs = [name for name in _INPUTS if name in given]
    if len(inputs) != 1 or (inputs == ["--src"]) != ("--ref" in given):
        raise SettingsError(
            "evaluate needs --src and --ref (translator), --text (language model or masked model) or --labels "
            "(classifier)"
        )
    name = RunFolder.open(options.run).settings.task
    if (task := TASK_INFOS.get(name)) is None:  # reported when the model is loaded
        return name
    if task.evaluated_on != inputs[0]:
        how = f"; evaluate it with {_INPUTS[task.evaluated_on]}" if task.evaluated_on else ""
        raise SettingsError(f"{options.run}: a run of task '{name}', whose model {task.wording.usage}{how}")
    allowed, where = task.evaluate_options | {task.evaluated_on}, f"for a run of task '{name}'"
    if "--hyp" in given and not given - allowed and (against is None or not against.is_dir()):
        allowed, where = allowed - _SEARCH, "if --hyp gives the translations"
    if unused := sorted(given - allowed):
        raise SettingsError(f"{', '.join(unused)}: no effect {where}; remove it")
    return name
